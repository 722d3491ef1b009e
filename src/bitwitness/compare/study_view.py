"""The study as people read it: tables of words and numbers, for a page, for Markdown and for a terminal, and the record as JSON.

All three show the same cells, which are worked out here once; what they look like is in the templates beside this file. Where nothing
was published it says so, and where nothing was seen it says what that leaves possible.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined

from bitwitness._version import __version__
from bitwitness.compare.nodes import DESTROYER
from bitwitness.compare.published import CONTROL, FINE_TUNING, HEALTHY, LATE, ONSET, Cell
from bitwitness.compare.study_shape import Statement
from bitwitness.compare.study_tables import Figures, FineTuning, Frequency, NodeFigures, Pretraining

UNPUBLISHED = "not published"
"""As far as it is known here: the published tables were not all seen."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table: title, what it shows, names of columns, rows of cells in their order."""

    title: str
    about: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Words:
    """A study to be shown, see `study.Study`."""

    figures: Figures
    shape: tuple[Statement, ...]
    steps: int
    seed: int
    seconds: float
    time: str
    software: str

    @property
    def version(self) -> str:
        """Of bitwitness."""
        return __version__

    @property
    def sentence(self) -> str:
        """How many statements hold."""
        held = [one.held for one in self.shape]
        words = f"Of {len(held)} statements on the published tables {held.count('holds')} hold"
        words += f", {held.count('differs')} differ" if "differs" in held else ""
        return words + (f", {held.count('not reached')} were not reached." if "not reached" in held else ".")

    @property
    def command(self) -> str:
        """That runs it again."""
        return f"bitwitness compare --study --steps {self.steps} --seed {self.seed}"

    @property
    def tables(self) -> tuple[Table, ...]:
        """All of them."""
        of = self.figures
        return (_nodes(of), _frequencies(of), _noise(of), _training(of), _tuning(of))


def render(words: Words, template: str) -> str:
    """The page (`study.html.jinja`) or the Markdown (`study.md.jinja`)."""
    source = resources.files(__package__).joinpath(template).read_text("utf-8")
    environment = Environment(
        autoescape=template.endswith("html.jinja"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source).render(study=words, tables=words.tables, shape=words.shape)


def to_json(words: Words) -> dict[str, Any]:
    """Everything as JSON values; a number that is not finite is null."""
    of = words.figures
    record = {
        "version": words.version,
        "software": words.software,
        "time": words.time,
        "seconds": round(words.seconds, 1),
        "steps": words.steps,
        "seed": words.seed,
        "sentence": words.sentence,
        "shape": [asdict(one) for one in words.shape],
        "healthy": asdict(of.healthy),
        "reseeded": {"tuned": asdict(of.control), "free": asdict(of.reseeded)},
        "nodes": [_node(one) for one in of.nodes],
        "tables": [asdict(one) for one in words.tables],
    }
    plain: dict[str, Any] = _finite(record)
    return plain


def _node(one: NodeFigures) -> dict[str, Any]:
    record = asdict(one)
    record["node"] = {"number": one.node.number, "kind": one.node.kind, "faults": str(one.node)}
    record["published"] = {
        "frequencies": {_cell(cell): rate for cell, rate in one.published.frequencies.items()},
        "noise": one.published.noise,
        "silent": one.published.silent,
    }
    record["frequencies"] = {
        _cell(cell.cell): asdict(cell)
        | {"cell": _cell(cell.cell), "measured": cell.measured.to_json(), "agreement": cell.agreement}
        for cell in one.frequencies
    }
    return record


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): _finite(one) for key, one in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
        case _:
            return value


# Tables --------------------------------------------------------------------------------------------------------------


def _nodes(of: Figures) -> Table:
    return Table(
        "The nodes",
        "What was planted, in the grammar of faults.",
        ("node", "what it is", "faults"),
        tuple((str(one.node.number), one.node.kind, str(one.node)) for one in of.nodes),
    )


def _frequencies(of: Figures) -> Table:
    return Table(
        "Mismatch frequency by submodule and direction",
        f"Lock-step, {of.steps} steps; measured with its 95 % interval, which allows for mismatches that come together. Forward is the "
        "output of a submodule, backward the gradient that it passes on. What was planted was put in by us, so that planted = measured "
        "shows that the measurement works and nothing of nature.",
        ("node", "cell", "planted", "measured", "published", "mean and largest severity"),
        tuple(
            (
                str(one.node.number),
                _cell(cell.cell),
                _planted(cell),
                _measured(cell),
                _published(one, cell),
                _severity(cell),
            )
            for one in of.nodes
            for cell in one.frequencies
            if cell.measured.count or cell.planted != 0.0 or cell.published is not None
        ),
    )


def _noise(of: Figures) -> Table:
    return Table(
        "Worst-case noise-to-signal ratio of the gradient",
        f"The largest ‖ĝ - g‖ / ‖g‖ of {of.noise_steps} steps, parameters made equal after each. Node {LATE} is clean until step {ONSET}.",
        ("node", "measured", "published", "first mismatch (lock-step)", "share of mismatches in a tenth of the steps"),
        tuple(
            (
                str(one.node.number),
                _ratio(one),
                UNPUBLISHED if one.published.noise is None else f"{one.published.noise}",
                "none" if one.first is None else f"step {one.first}",
                "" if one.spiky is None else f"{100 * one.spiky:.0f} %",
            )
            for one in of.nodes
        ),
    )


def _training(of: Figures) -> Table:
    rows = [("reseeded healthy", of.reseeded), *((f"node {one.node.number}", one.free) for one in of.nodes)]
    return Table(
        "Loss and drift",
        f"Free run, {of.steps} steps. The difference of the loss from the healthy one's is the mean of its magnitude over the last tenth "
        "of the steps. Published: losses near-identical while parameters drift, at a rate that is alike on most nodes; no figures known here.",
        ("who", "parted at step", "loss", "its difference", "drift ‖ŵ - w‖", "relative to ‖w‖"),
        tuple((who, *_trained(one, is_control=who.startswith("reseeded"))) for who, one in rows),
    )


def _tuning(of: Figures) -> Table:
    ours: list[tuple[str, FineTuning]] = [(HEALTHY, of.healthy), ("the other reference", of.reference)]
    ours += [(CONTROL, of.control), *((f"node {one.node.number}", one.tuned) for one in of.nodes)]
    rows = [("ours, digits", who, _per_cent(one.accuracy), _per_cent(one.divergence)) for who, one in ours]
    rows += [
        (f"published, {one.task}", one.who, _per_cent(one.accuracy), _per_cent(one.divergence)) for one in FINE_TUNING
    ]
    return Table(
        "Fine-tuning",
        f"Free run, {of.tuning_steps} steps on handwritten digits by a network that was trained on others; 297 questions. Divergence is "
        "the share of answers that are not the healthy one's. Published are multiple-choice sets of language on Mistral-7B: another task, "
        f"another model. Node {LATE} is not wrong before step {ONSET}; node {DESTROYER} is the one that destroys.",
        ("task", "who", "accuracy", "divergence"),
        tuple(rows),
    )


# Cells ---------------------------------------------------------------------------------------------------------------


def _cell(cell: Cell) -> str:
    return f"{cell[0]}/{'attn' if cell[1] == 'attention' else 'ffn'}"


def _planted(cell: Frequency) -> str:
    if cell.planted is None:
        return "not predicted"
    return "0" if cell.planted == 0 else f"{cell.planted:.2e}"


def _measured(cell: Frequency) -> str:
    of = cell.measured
    if not of.of:
        return "not compared"
    if of.count:
        agreement = " (planted is outside)" if cell.agreement == "outside" else ""
        return f"{of.share:.2e} [{of.low:.1e}, {of.high:.1e}], {of.count}{agreement}"
    bound = f"0 in {of.of:.1e} elements, below {cell.bound if cell.bound is not None else of.high:.1e}"
    return f"none expected: {bound}" if cell.agreement == "none expected" else bound


def _published(one: NodeFigures, cell: Frequency) -> str:
    if one.published.silent:
        return "none seen"
    return UNPUBLISHED if cell.published is None else f"{cell.published:.2e}"


def _severity(cell: Frequency) -> str:
    if cell.severity is None or cell.severity_largest is None:
        return ""
    return f"{cell.severity:.2g}, {cell.severity_largest:.1e}"


def _ratio(one: NodeFigures) -> str:
    lost = f"{one.lost} steps not finite" if one.lost else ""
    if not one.noise:
        return lost or "none"
    return f"{one.noise:.2g}" + (f"; {lost}" if lost else "")


def _trained(one: Pretraining, *, is_control: bool) -> tuple[str, ...]:
    if one.parted is None and not is_control:
        return ("never", _number(one.loss), "0", "0", "0")
    relative = one.drift / one.weights if one.drift is not None and one.weights else None
    return (
        "other data from the start" if is_control else f"{one.parted}",
        _number(one.loss),
        _number(one.gap),
        _number(one.drift) + (f" ({one.lost})" if one.lost else ""),
        _number(relative),
    )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def _per_cent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"
