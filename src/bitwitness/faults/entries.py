"""The faults of a campaign file: what one item of its list stands for.

An item may be one line of the grammar, several that strike in the same run, a line with blanks that are filled in with every
combination of some values, or a published model that is drawn many times. Whatever it is, it ends here as plain lines, each
parsed and possible, so that nothing behind this module knows of more than lines. No torch.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from bitwitness.errors import ConfigurationError, PolicyError
from bitwitness.faults import grammar, presets
from bitwitness.faults.job import Shape, node_of
from bitwitness.faults.spec import Fault
from bitwitness.faults.yamlfile import Item, shown, suggestion
from bitwitness.policy import Policy

_ENTRY = (
    "fault",
    "faults",
    "preset",
    "name",
    "jobs",
    "seeds",
    "policy",
    "count",
    "steps",
    "modules",
    "phase",
    "rank",
    "rate",
    "vary",
)
_BLANK = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_MOST_SEED = 2**32 - 1
"""What every generator takes: numpy's, and torch's after a rank has made its own of it."""
_OF_A_GUARD = ("replay", "arbiter", "rerun", "fingerprint", "save")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job of a campaign.

    Attributes:
        name: within the campaign.
        factory: a known name or `module:function`.
        options: its arguments; `ranks` and `steps` are among them.
        source: digest of the file of its module, if it is a user's.
        lines: of the file, of each option and of `factory`.
    """

    name: str
    factory: str
    options: Mapping[str, Any]
    source: str = ""
    lines: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def ranks(self) -> int:
        """How many."""
        return int(self.options["ranks"])

    @property
    def steps(self) -> int:
        """How many."""
        return int(self.options["steps"])


@dataclass(frozen=True, slots=True)
class Entry:
    """Faults that strike in one run.

    Attributes:
        label: what reports call them; entries with the same label are counted together.
        lines: in the grammar, canonical.
        jobs: the names of the jobs they are run with; seeds: likewise.
        policy: settings of `Policy`; None: unguarded.
        repeat: the number of the draw, where one item of the file stands for several.
        line: of the item in the file.
    """

    label: str
    lines: tuple[str, ...]
    jobs: tuple[str, ...]
    seeds: tuple[int, ...]
    policy: Mapping[str, Any] | None
    repeat: int = 0
    line: int = field(default=0, compare=False)


def read_seeds(item: Item) -> tuple[int, ...]:
    """Seeds of jobs: a number, a list or a range."""
    return tuple(dict.fromkeys(item.wholes("seeds", _MOST_SEED)))


def read_policy(item: Item) -> Mapping[str, Any] | None:
    """Settings of `Policy`, as `every_step`, `default`, a mapping, or null for no guard."""
    if item.value is None:
        return None
    if isinstance(item.value, str):
        named: dict[str, dict[str, Any]] = {"every_step": {"audit_every": 1, "check_every": 1}, "default": {}}
        if item.value not in named:
            item.fail(f"policy {item.value!r}: must be every_step, default, null (no guard) or settings of Policy")
        return named[item.value]
    settings = item.known([one.name for one in fields(Policy)], "policy")
    plain = {key: value.plain() for key, value in settings.items()}
    for key, value in plain.items():
        try:
            Policy(**{key: value})
        except (PolicyError, TypeError) as error:
            settings[key].fail(str(error))
    return plain


def read_entries(item: Item, where: str, jobs: Mapping[str, JobSpec], usual: Entry) -> Iterator[Entry]:
    """The entries that one item of the list stands for."""
    if isinstance(item.value, str):
        yield _entry(item, "", _parsed(item, item.value), jobs, usual)
        return
    if not isinstance(item.value, dict):
        item.fail(f"a fault must be a line of the grammar or a mapping, not {shown(item.value)}")
    given = item.known(_ENTRY, "a fault")
    kinds = [key for key in ("fault", "faults", "preset") if key in given]
    if len(kinds) != 1:
        item.fail("a fault has one of the keys fault, faults and preset")
    usual = _usual(given, jobs, usual)
    name = given["name"].text("name") if "name" in given else ""
    if kinds == ["preset"]:
        _only(item, given, ("preset", "count", "steps", "modules", "phase", "rank", "rate"))
        for preset in _presets(given["preset"]):
            for label, number, fault in _drawn(given, preset, f"{where}/{preset}", usual, jobs):
                yield _entry(item, label.replace(preset, name, 1) if name else label, (fault,), jobs, usual, number)
        return
    _only(item, given, ("fault", "faults", "count", "steps", "vary"))
    lines = [given["fault"]] if "fault" in given else given["faults"].items("faults")
    if not lines:
        item.fail("faults: at least one line")
    texts = [line.text("a fault") for line in lines]
    for number, filling in _fillings(item, given, texts, name, where, usual, jobs):
        faults: list[Fault] = []
        for line, text in zip(lines, texts, strict=True):
            faults += _parsed(line, _filled(text, filling))
        label = _filled(name, filling)
        yield _entry(item, label, tuple(faults), jobs, usual, number)


def _only(item: Item, given: Mapping[str, Item], allowed: Sequence[str]) -> None:
    for key in given:
        if key not in (*allowed, "name", "jobs", "seeds", "policy"):
            kind = next(kind for kind in ("fault", "faults", "preset") if kind in given)
            raise ConfigurationError(f"{item.file}, line {item.keys[key]}: {key!r} has no meaning beside {kind!r}")


def _usual(given: Mapping[str, Item], jobs: Mapping[str, JobSpec], usual: Entry) -> Entry:
    """What an entry says about jobs, seeds and policy, else what the campaign does."""
    named: tuple[str, ...] = usual.jobs
    if "jobs" in given:
        listed = given["jobs"].items("jobs") if isinstance(given["jobs"].value, list) else [given["jobs"]]
        for one in listed:
            if one.text("jobs") not in jobs:
                one.fail(f"there is no job {one.value!r}{suggestion(one.value, jobs)}; jobs are {', '.join(jobs)}")
        named = tuple(dict.fromkeys(one.value for one in listed)) or given["jobs"].fail("jobs must not be empty")
    seeds = read_seeds(given["seeds"]) if "seeds" in given else usual.seeds
    return Entry("", (), named, seeds, read_policy(given["policy"]) if "policy" in given else usual.policy)


def _parsed(item: Item, text: str) -> tuple[Fault, ...]:
    try:
        return tuple(grammar.parse_all(text))
    except ConfigurationError as error:
        raise ConfigurationError(f"{item.file}, line {item.line}: {error}") from error


def _entry(
    item: Item, label: str, faults: Sequence[Fault], jobs: Mapping[str, JobSpec], usual: Entry, repeat: int = 0
) -> Entry:
    """Check what can be known without torch: that ranks, nodes, steps and whatever else is hit exist."""
    for fault, name in itertools.product(faults, usual.jobs):
        ranks, steps = jobs[name].ranks, jobs[name].steps
        if isinstance(fault.where.rank, int) and fault.where.rank >= ranks:
            item.fail(f"{fault}: rank {fault.where.rank} does not exist, job {name} has ranks 0..{ranks - 1}")
        if fault.when.first >= steps:
            item.fail(f"{fault}: never happens, job {name} has steps 0..{steps - 1}")
        problem = _nowhere(fault, name, Shape.split(jobs[name].options)[0]) or _unguarded(fault, usual.policy)
        if problem:
            item.fail(f"{fault}: {problem}")
    lines = tuple(str(fault) for fault in faults)
    return Entry(label or " & ".join(lines), lines, usual.jobs, usual.seeds, usual.policy, repeat, item.line)


def _nowhere(fault: Fault, job: str, shape: Shape) -> str:
    """Why a job has no place for a fault; empty if it has one."""
    where = fault.where
    nodes = list(dict.fromkeys(node_of(shape, rank) for rank in range(shape.ranks)))
    if where.node and where.node not in nodes:
        return f"node {where.node} does not exist, job {job} has {nodes[0]}..{nodes[-1]}"
    if where.node and isinstance(where.rank, int) and node_of(shape, where.rank) != where.node:
        return f"rank {where.rank} of job {job} is on {node_of(shape, where.rank)}, not on {where.node}"
    if (where.target == "ckpt" or where.during == "save") and not shape.checkpoint_every:
        return f"job {job} saves no checkpoint: give it checkpoint_every"
    return ""


def _unguarded(fault: Fault, policy: Mapping[str, Any] | None) -> str:
    """Why a fault needs a guard, if there is none."""
    if policy is not None:
        return ""
    if fault.where.during in _OF_A_GUARD:
        return f"during={fault.where.during} is work of a guard's, and policy is null"
    if fault.where.target in ("digest", "ckpt"):
        return f"{fault.where.target} is a guard's, and policy is null"
    return ""


def _fillings(
    item: Item,
    given: Mapping[str, Item],
    texts: Sequence[str],
    name: str,
    where: str,
    usual: Entry,
    jobs: Mapping[str, JobSpec],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """What to put into the blanks of a line: every combination of `vary`, and `count` draws of it, numbered."""
    vary = {key: _values(one, key) for key, one in given["vary"].mapping("vary").items()} if "vary" in given else {}
    steps = _steps(given["steps"], usual, jobs) if "steps" in given else []
    if steps and "step" in vary:
        item.fail("{step} is filled in from steps, or by vary, and not by both")
    blanks = {name for text in texts for name in _BLANK.findall(text)}
    filled = {*vary, *(["step"] if steps else [])}
    if blanks != filled:
        missing, idle = ", ".join(sorted(blanks - filled)), ", ".join(sorted(filled - blanks))
        item.fail(f"nothing fills {{{missing}}}" if missing else f"no line has the blank {{{idle}}}")
    if strange := set(_BLANK.findall(name)) - filled:
        given["name"].fail(f"nothing fills {{{', '.join(sorted(strange))}}}")
    count = given["count"].whole("count", 1, 100_000) if "count" in given else 1
    for values in itertools.product(*vary.values()):
        for number in range(count):
            filling = dict(zip(vary, values, strict=True))
            if steps:
                filling["step"] = random.Random(f"{where}/{number}").choice(steps)  # noqa: S311  (drawn to be repeated)
            yield number, filling


def _filled(text: str, filling: Mapping[str, Any]) -> str:
    return _BLANK.sub(lambda blank: str(filling.get(blank[1], blank[0])), text)


def _values(item: Item, name: str) -> list[Any]:
    if isinstance(item.value, list):
        found = [one.plain() for one in item.value]
        if not found or any(isinstance(one, list | dict | bool) or one is None for one in found):
            item.fail(f"vary: {name} must be a list of numbers or words")
        return found
    return list(item.wholes(f"vary: {name}"))


def _steps(item: Item, usual: Entry, jobs: Mapping[str, JobSpec]) -> list[int]:
    steps = item.wholes("steps")
    for name in usual.jobs:
        if max(steps) >= jobs[name].steps:
            item.fail(f"steps: {max(steps)} never happens, job {name} has steps 0..{jobs[name].steps - 1}")
    return steps


def _presets(item: Item) -> list[str]:
    listed = item.items("preset") if isinstance(item.value, list) else [item]
    for one in listed:
        if one.text("preset") not in presets.NAMES:
            one.fail(
                f"there is no preset {one.value!r}{suggestion(one.value, presets.NAMES)}; presets are "
                f"{', '.join(presets.NAMES)}"
            )
    return [str(one.value) for one in listed] or item.fail("preset must not be empty")


def _drawn(
    given: Mapping[str, Item], preset: str, where: str, usual: Entry, jobs: Mapping[str, JobSpec]
) -> Iterator[tuple[str, int, Fault]]:
    """`count` faults of a published model, each at a drawn step: what to call it, its number, and the fault."""
    item = given["preset"]
    count = given["count"].whole("count", 1, 100_000) if "count" in given else 1
    steps = _steps(given["steps"], usual, jobs) if "steps" in given else item.fail("preset needs steps, e.g. 5..20")
    modules = given["modules"].text("modules") if "modules" in given else "*"
    phase = given["phase"].text("phase") if "phase" in given else "any"
    rank = given["rank"].whole("rank") if "rank" in given and given["rank"].value != "any" else None
    rates: list[float | None] = [None]
    if "rate" in given:
        listed = given["rate"].items("rate") if isinstance(given["rate"].value, list) else [given["rate"]]
        rates = [one.number("rate") for one in listed] or given["rate"].fail("rate must not be empty")
    for rate, number in itertools.product(rates, range(count)):
        draw = random.Random(f"{where}/{number}")  # noqa: S311  (drawn to be repeated)
        step, seed = draw.choice(steps), draw.getrandbits(32)
        chosen: Any = None if phase == "any" else phase  # what presets have no fault for they refuse by name
        try:
            fault = presets.expand(preset, rank=rank, step=step, module=modules, seed=seed, phase=chosen, rate=rate)
        except ConfigurationError as error:
            item.fail(str(error))
        yield preset if rate is None else f"{preset} rate={rate:g}", number, fault
