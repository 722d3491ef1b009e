"""A bundle for the vendor: the smallest piece of work that the suspect gets wrong, and all that is needed to run it without us.

A figure convinces nobody who has to replace a device; ten lines that give the wrong answer on their bench do. So a bundle is a folder
that stands alone: what was seen and on what, the operands, a program in plain torch, and a letter. Where no single operation shows the
fault, it says so and has what was seen of modules: a bundle that cannot be reproduced must not look like one that can.
"""

from __future__ import annotations

import io
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined
from torch import Tensor

from bitwitness._version import __version__
from bitwitness.compare import reproduce
from bitwitness.compare.cases import Case, digest
from bitwitness.compare.exchange import Alone, Exchange
from bitwitness.compare.lineup import settled
from bitwitness.compare.minimising import Budget, minimised, trials
from bitwitness.compare.operations import Culprit, Trace, trace
from bitwitness.compare.panel import Answers, Panel, agreed, makes_sense
from bitwitness.compare.participant import Seat
from bitwitness.compare.records import CompareFiles, Difference, Mode, Participant, Site
from bitwitness.compare.settings import Settings
from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.faults.statistics import Share, wilson
from bitwitness.runfiles.files import Reported, sync_folder, utc_now, write_bytes, write_json
from bitwitness.scan.evidence import differences
from bitwitness.scan.keeping import raw, split

SCHEMA = 1
TEMPLATE = "README.txt.jinja"
ORIGINAL = "original.pt"
"""The operands as they were in the step, if they are not too large: a fault may need more than what the smallest case has."""
_LARGEST_ORIGINAL = 64 << 20
_MOST_SEEN = 50
"""Places of mismatches that are listed."""
_MOST_ELEMENTS = 256
_MOST_MASKS = 32
_MOST_TIMES = 100_000
_SURE = 0.99
"""With which the program that is sent sees the fault, if the rate has not changed."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A mismatch of the suspect that stands as evidence: no reference had one there."""

    step: int
    site: Site
    difference: Difference


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is done for a bundle.

    Attributes:
        steps: recorded at most while an operation is looked for.
        times: how often the suspect computes the case as it was found, and the smallest one, for their rates.
        questions: while it is made smaller.
        trials: calls of the suspect for one question at most, where it is wrong now and then.
    """

    steps: int = 16
    times: int = 400
    questions: int = 600
    trials: int = 100


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a culprit.

    Attributes:
        case: the smallest that is still wrong, with expected and observed outputs; None: it is no evidence, and why.
        original: as the step had it.
        first, last: how often the suspect was wrong with the original and with `case`.
        answers: how many different wrong answers `case` was given.
        questions, disagreed: asked while it was made smaller, and those of them that references answered differently.
        why: what is to be known beside that.
    """

    case: Case | None
    original: Case
    first: Share
    last: Share
    answers: int = 0
    questions: int = 0
    disagreed: int = 0
    why: str = ""


def seen_in(files: CompareFiles, suspect: str, mode: Mode = "lock-step") -> list[Seen]:
    """The mismatches of a suspect, in order, without those in tensors where a reference differs from the leader in that step too.

    Raises:
        RunFilesError: there is no such participant.
    """
    who = files.introduced()
    of = {one.name: files.account(one, mode) for one in who if one.role == "reference" or one.name == suspect}
    account = of.pop(suspect, None)
    if account is None:
        raise RunFilesError(
            f"{files.path} has no journal of {suspect} in {mode}: run the comparison in this mode first"
        )
    void: set[tuple[int, Site]] = set()
    completed: set[int] = set()
    for reference in of.values():
        if reference is None:
            continue
        for step in reference.steps:
            completed.add(step.step)
            void |= {(step.step, reference.sites[one.site]) for one in step.differences}
    found = [Seen(step.step, account.sites[one.site], one) for step in account.steps for one in step.differences]
    return [one for one in found if one.step in completed and (one.step, one.site) not in void]


def bundle(
    seats: Sequence[Seat],
    settings: Settings,
    folder: Path,
    suspect: str,
    seen: Sequence[Seen],
    exchange: Exchange | None = None,
    effort: Effort | None = None,
) -> dict[str, Any]:
    """Find the operation, make it smaller, and write the folder. A collective: all processes of the comparison call it.

    Args:
        seats: of this process, as they were in the comparison.
        settings: of the comparison.
        folder: to be made; must not exist.
        suspect: whose bundle it is.
        seen: its mismatches, see `seen_in`; the same in all processes.
        exchange: with the other processes.
        effort: how much is done for it.

    Returns:
        What was written into `bundle.json`.

    Raises:
        ConfigurationError: the folder exists, or nothing was seen, or there are not two references.
        RunFilesError: it cannot be written.
    """
    exchange, effort = exchange or Alone(), effort or Effort()
    who = [one for found in exchange.gather([seat.participant for seat in seats]) for one in found]
    _check(exchange, folder, suspect, seen, who)
    mine = next((seat for seat in seats if seat.participant.name == suspect), None)
    # Some operations give out padding that they never wrote: filled, it is the same everywhere, and nothing else changes.
    with settled(seats), reproduce.settled(reproduce.settings() | {"fill": True}):
        traced = trace(seats, settings, exchange, suspect, min(one.step for one in seen), effort.steps)
        panel = Panel(seats, suspect, exchange, step=settings.steps)
        found = None if traced.culprit is None else examined(traced.culprit, panel, effort, settings.confidence)
        here = exchange.gather(None if mine is None else _facts(mine.device))
    record = _record(settings, suspect, who, seen, traced, found)
    record["reproduce"] = {"times": _times(found)} | next(one for one in here if one is not None)
    if exchange.rank == exchange.leader:
        _write(folder, record, found)
    exchange.barrier()
    return record


def _facts(device: torch.device) -> dict[str, Any]:
    """What the program of a bundle must know of the device that it was made on."""
    named = "cuda:0" if device.type == "cuda" else device.type
    return {"device": named, "kind": reproduce.kind(device), "settings": reproduce.settings()}


def _check(exchange: Exchange, folder: Path, suspect: str, seen: Sequence[Seen], who: Sequence[Participant]) -> None:
    objection = ""
    if exchange.rank == exchange.leader and os.path.lexists(folder):
        objection = f"--bundle {folder}: there is something of this name already: give a new one"
    if not seen:
        objection = f"nothing was seen of {suspect} that could be put into a bundle"
    if suspect not in {one.name for one in who}:
        objection = f"there is no participant {suspect!r:.60}; there are {', '.join(one.name for one in who)}"
    if sum(one.role in ("leader", "reference") for one in who) < 2:
        objection = "a bundle needs two references: against one alone nobody can say who is wrong"
    said = next((one for one in exchange.gather(objection) if one), "")
    if said:
        raise ConfigurationError(said)


# Examining -----------------------------------------------------------------------------------------------------------


def examined(culprit: Culprit, panel: Panel, effort: Effort, confidence: float = 0.95) -> Found:
    """Compute an operation again on all devices, make it smaller, and measure how often it goes wrong. A collective.

    What references do not agree upon is no evidence, of the whole and of each smaller one.
    """
    none = wilson(0, 0, confidence)
    original, found_as = replace(culprit.case, expected=(), observed=()), culprit.case
    answers = panel.references(original, keep=True)
    right = agreed(answers)
    if right is None:
        return Found(None, culprit.case, none, none, why=_no_answer(culprit.case.operation, answers))
    why = ""
    if right == culprit.right:
        found_as = replace(found_as, expected=_output(answers, right))
    else:
        why = "computed alone, references give another answer than in the step: where operands lie in memory changes it"
    first = panel.suspect(original, effort.times, keep=True)
    share = _share(first, right, confidence)
    if not share.count:
        expected = _output(answers, right)
        observed = culprit.case.observed
        if right != culprit.right:
            return Found(None, found_as, share, share, why=f"{why}; the suspect does as well, {share.of} times")
        never = f"the suspect gave the wrong answer once, in the step, and not again in {share.of} repeats"
        return Found(replace(culprit.case, expected=expected, observed=observed), found_as, share, share, 1, why=never)
    often = trials(share.low, effort.trials)
    disagreed = 0

    def wrong(candidate: Case) -> bool:
        nonlocal disagreed
        if candidate.shapes() != original.shapes() and not makes_sense(candidate):
            return False
        given = panel.references(candidate)
        expected = agreed(given)
        if expected is None:
            disagreed += not any(one.problem for one in given.values())
            return False
        return bool(_wrong(panel.suspect(candidate, often, until_unlike=expected), expected))

    budget = Budget(effort.questions)
    small = minimised(original, wrong, budget)
    final = _final(small, panel, effort.times, often)
    if final is None and small is not original:
        small, final = original, _final(original, panel, effort.times, often)
        why = "; ".join([*([why] if why else []), "made smaller, it was not wrong again: it is as it was found"])
    if final is None:
        return Found(None, found_as, share, share, 0, budget.asked, disagreed, _not_again(share))
    case, last, kinds = final
    return Found(
        case, found_as, share, _share(last, digest(case.expected), confidence), kinds, budget.asked, disagreed, why
    )


def _final(small: Case, panel: Panel, times: int, often: int) -> tuple[Case, Answers, int] | None:
    """The case with its outputs, how the suspect answered it, and in how many wrong ways; None: not wrong, or references disagree."""
    answers = panel.references(small, keep=True)
    right = agreed(answers)
    if right is None:
        return None
    given = panel.suspect(small, max(times, often), keep=True)
    wrong = _wrong(given, right)
    kept = {answer: count for answer, count in wrong.items() if answer in given.outputs}
    if not kept:
        return None
    commonest = min(kept, key=lambda answer: (-kept[answer], answer))
    return replace(small, expected=_output(answers, right), observed=given.outputs[commonest]), given, len(wrong)


def _wrong(answers: Answers, right: str) -> dict[str, int]:
    return {answer: count for answer, count in answers.counts.items() if answer != right}


def _share(answers: Answers, right: str, confidence: float) -> Share:
    return wilson(sum(_wrong(answers, right).values()), answers.times, confidence)


def _output(answers: Mapping[str, Answers], right: str) -> tuple[Tensor, ...]:
    return next(one.outputs[right] for one in answers.values() if right in one.outputs)


def _no_answer(operation: str, answers: Mapping[str, Answers]) -> str:
    problem = next((one.problem for one in answers.values() if one.problem), "")
    return (
        f"{operation} cannot be computed alone: {problem}"
        if problem
        else f"references disagree about {operation}: it is no evidence"
    )


def _not_again(share: Share) -> str:
    return f"the suspect was wrong in {share.count} of {share.of} repeats, and then no more"


def _times(found: Found | None) -> int:
    if found is None or found.case is None:
        return 0
    return max(100, trials(found.last.low, _MOST_TIMES, _SURE))


# Writing -------------------------------------------------------------------------------------------------------------


def _record(
    settings: Settings,
    suspect: str,
    who: Sequence[Participant],
    seen: Sequence[Seen],
    traced: Trace,
    found: Found | None,
) -> dict[str, Any]:
    accused = next(one for one in who if one.name == suspect)
    played = "; ".join(f"{one.name}: {one.simulated}" for one in who if one.simulated)
    case = None if found is None else found.case
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "drill": played,
        "written": utc_now(),
        "bitwitness": __version__,
        "suspect": accused.to_json(),
        "references": [one.to_json() for one in who if one.role in ("leader", "reference")],
        "software": {
            name: value for name, value in accused.device.kind.items() if name not in ("device", "environment")
        },
        "environment": accused.device.kind.get("environment", ""),
        "comparison": settings.to_json(),
        "operation": None if case is None else case.operation,
        "found": found_sentence(traced, found),
        "recorded_steps": traced.steps,
        "seen": [
            {
                "step": one.step,
                "site": str(one.site),
                "dtype": one.site.dtype,
                "shape": list(one.site.shape),
                "mismatches": one.difference.mismatches,
                "elements": [_words(*element) for element in one.difference.elements[:8]],
            }
            for one in seen[:_MOST_SEEN]
        ],
        "seen_in_all": len(seen),
    }
    if found is not None and case is not None and traced.culprit is not None:
        record |= _of_case(found, case, traced.culprit)
    return record


def _words(index: int, expected: int, observed: int) -> dict[str, Any]:
    return {"index": index, "expected": f"{expected:x}", "observed": f"{observed:x}", "xor": f"{expected ^ observed:x}"}


def _of_case(found: Found, case: Case, culprit: Culprit) -> dict[str, Any]:
    return {
        "step": culprit.step,
        "number": culprit.number,
        "operands": _described(case),
        "original": {
            "operands": _described(found.original),
            "elements": found.original.elements,
            "file": ORIGINAL if _is_small(found.original) else "",
            **_wrong_elements(found.original),
        },
        "elements": case.elements,
        "nonzero": case.nonzero,
        "questions": found.questions,
        "disagreed": found.disagreed,
        "repeat": found.last.to_json() | {"confidence": found.last.confidence, "answers": found.answers},
        "repeat_original": found.first.to_json() | {"confidence": found.first.confidence},
        "agreeing_references": culprit.references,
        "note": found.why,
        **_wrong_elements(case),
    }


def _wrong_elements(case: Case) -> dict[str, Any]:
    """The outputs of a case, and where they are wrong. None differing: expected and observed are of other shapes, or not known."""
    parts, right = raw(case.expected)
    others, wrong = raw(case.observed)
    count, elements = (
        differences(split(right, parts), split(wrong, parts), parts, 1 << 16) if others == parts else (None, ())
    )
    masks = Counter(one.xor for one in elements)
    return {
        "outputs": [{"dtype": part.dtype, "shape": list(part.shape)} for part in others],
        "differing": count,
        "wrong": [asdict(one) | {"index": list(one.index)} for one in elements[:_MOST_ELEMENTS]],
        "masks": [{"xor": mask, "count": times} for mask, times in masks.most_common(_MOST_MASKS)],
    }


def _is_small(case: Case) -> bool:
    """Whether it goes into a bundle beside the smallest one: with both outputs, and not too much to be sent."""
    size = sum(one.numel() * one.element_size() for one in (*case.tensors(), *case.expected, *case.observed))
    return bool(case.expected) and size <= _LARGEST_ORIGINAL


def _described(case: Case) -> list[dict[str, Any]]:
    def described(value: Any) -> Any:
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            return {"dtype": dtype, "shape": list(value.shape), "stride": list(value.stride())}
        return [described(one) for one in value] if isinstance(value, list | tuple) else value

    listed = [{"name": str(number), "value": described(one)} for number, one in enumerate(case.args)]
    return listed + [{"name": name, "value": described(one)} for name, one in case.kwargs.items()]


def found_sentence(traced: Trace, found: Found | None) -> str:
    """What was found, for people."""
    if traced.culprit is None or found is None:
        return f"No single operation shows the fault: {traced.why}. What follows is what was seen of modules."
    if found.case is None:
        return f"No single operation shows the fault: {found.why}. What follows is what was seen of modules."
    name, share = found.case.operation, found.last
    if not share.count:
        return f"{name} gave wrong bits in step {traced.culprit.step} with right operands; {found.why}."
    smaller = (
        f"{found.case.elements} numbers, {found.case.nonzero} of them not 0 (of {found.original.elements} in the step)"
    )
    return f"{name} gives wrong bits in {share.count} of {share.of} repeats with right operands: {smaller}."


def _write(folder: Path, record: Mapping[str, Any], found: Found | None) -> None:
    """All of it under a temporary name, then the name: a bundle is there whole or not at all."""
    files: dict[str, bytes] = {"README.txt": letter(record).encode()}
    if found is not None and found.case is not None:
        files["operands.pt"] = _saved(found.case)
        files["reproduce.py"] = program(str(record["drill"])).encode()
        if record["original"]["file"]:
            files[ORIGINAL] = _saved(found.original)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    with Reported(folder, "written"):
        temporary.mkdir(parents=True)
        try:
            write_json(temporary / "bundle.json", record)
            for name, content in files.items():
                write_bytes(temporary / name, content)
            temporary.rename(folder)
            sync_folder(folder.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _saved(case: Case) -> bytes:
    content = io.BytesIO()
    torch.save(case.stored(), content)
    return content.getvalue()


def program(drill: str) -> str:
    """The program of a bundle: `compare/reproduce.py`, whose first line says so where the fault is played."""
    text = resources.files("bitwitness.compare").joinpath("reproduce.py").read_text(encoding="utf-8")
    said = " ".join(drill.split())
    return f"# DRILL: this fault was played on purpose; no device is accused. {said}\n{text}" if drill else text


def letter(record: Mapping[str, Any]) -> str:
    """The README for a vendor, in plain text."""
    environment = Environment(autoescape=False, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # noqa: S701  (no HTML)
    source = resources.files("bitwitness.compare").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(**record, bundle=record)
