"""One run of a campaign, judged: what was promised of its fault, what came of it, and whether the right rank was named.

Pure. Each run is judged against the fault-free run of the same job and seed, bit for bit, and by nothing that the guard says
of itself. What is counted over all runs is in `table`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from bitwitness.faults import grammar
from bitwitness.faults.cells import CellResult, CellSpec
from bitwitness.faults.coverage import Coverage, covers
from bitwitness.faults.job import Shape
from bitwitness.faults.outcomes import Outcome, Series, Settings, classify
from bitwitness.faults.spec import Fault
from bitwitness.faults.world import policy_of

Status = Literal[
    "caught",
    "missed",
    "masked",
    "not covered",
    "by chance",
    "not landed",
    "guard failure",
    "refused",
    "crash",
    "hang",
    "unguarded",
]
Named = Literal["right", "wrong", "unattributed", ""]
COLUMNS = (
    "key",
    "label",
    "fault",
    "job",
    "seed",
    "repeat",
    "policy",
    "status",
    "end",
    "covered",
    "certain",
    "expected_check",
    "why",
    "predicted",
    "struck",
    "struck_ranks",
    "first_step",
    "check",
    "caught_step",
    "late",
    "updates",
    "verdict",
    "kind",
    "persistence",
    "ranks",
    "named",
    "masked",
    "note",
    "checkpoints_held",
    "outcome",
    "drift",
    "seconds",
    "error",
)
"""Of a row as JSON and CSV; docs/campaigns.md says what each means."""
_OF_END: Mapping[str, Status] = {
    "guard_failure": "guard failure",
    "refused": "refused",
    "crash": "crash",
    "hang": "hang",
}
_PROVES_NOTHING: tuple[Status, ...] = ("not landed", "crash", "hang")

HEALED = "healed before it was compared"
REMOVED = "the checkpoint that it damaged is gone: nobody can resume from it"
UNPROVED = "promised for certain, and nothing is proved by this run"


@dataclass(frozen=True, slots=True)
class Row:
    """One run with a fault, judged.

    Attributes:
        spec, result: what was asked for, what came.
        coverage: what was promised.
        status: `caught`; `missed` where it was covered and should have been; `by chance` where an audit could have met it and
            did not; `masked` where every bit of the state is that of the clean run, after every update or (healed) whenever the
            guard looked; `not covered`; and how else a run ended.
        late: steps from the first update that left wrong bits to the catch; None where it was not caught.
        updates: how many updates left wrong bits, up to the catch or to the end; None where the clean run is not known.
        named: whether the verdict's ranks were all hit.
        masked: None where a run ended early, left out an update, or the clean run is not known.
        note: what else there is to say: why it is masked although bits were wrong, or that a promise is not proved.
        held: steps of the published checkpoints that hold wrong bits and that somebody would resume from.
        outcome: of an unguarded run.
    """

    spec: CellSpec
    result: CellResult
    coverage: Coverage
    status: Status
    late: int | None
    updates: int | None
    named: Named
    masked: bool | None
    note: str
    held: tuple[int, ...]
    outcome: Outcome | None

    @property
    def fault(self) -> str:
        """The lines, as one."""
        return " & ".join(self.spec.faults)

    @property
    def is_unproved(self) -> bool:
        """Whether it was promised for certain, and the run ended so that this says nothing."""
        return self.coverage.certain and self.status in _PROVES_NOTHING

    @property
    def is_guarded_hang(self) -> bool:
        """Whether a run hung under a guard, which must not add a hang to whatever a fault does."""
        return self.status == "hang" and self.spec.policy is not None

    @property
    def is_late(self) -> bool:
        """Whether it was caught later than was promised."""
        if self.status != "caught" or not self.coverage.certain:
            return False
        return bool(self.held) or (self.late or 0) > self.coverage.delay

    @property
    def is_false_alarm(self) -> bool:
        """Whether a verdict came, or a save was refused, before anything was hit."""
        return any(not _follows_a_hit(self.result, step) for step in _alarms(self.result))

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values: what the CSV and the JSON report hold."""
        verdict = self.result.verdict or {}
        return {
            "key": self.spec.key,
            "label": self.spec.label,
            "fault": self.fault,
            "job": self.spec.job,
            "seed": self.spec.seed,
            "repeat": self.spec.repeat,
            "policy": policy_name(self.spec.policy),
            "status": self.status,
            "end": self.result.end,
            "covered": self.coverage.covered,
            "certain": self.coverage.certain,
            "expected_check": self.coverage.check,
            "why": self.coverage.words,
            "predicted": self.coverage.probability,
            "struck": self.result.struck,
            "struck_ranks": list(self.result.struck_ranks),
            "first_step": self.result.first_step,
            "check": self.result.caught_by,
            "caught_step": self.result.caught_step,
            "late": self.late,
            "updates": self.updates,
            "verdict": verdict.get("status", ""),
            "kind": verdict.get("kind", ""),
            "persistence": verdict.get("persistence", ""),
            "ranks": list(verdict.get("ranks", ())),
            "named": self.named,
            "masked": self.masked,
            "note": self.note,
            "checkpoints_held": list(self.held),
            "outcome": self.outcome.to_json() if self.outcome is not None else None,
            "drift": self.result.drift,
            "seconds": round(self.result.seconds, 3),
            "error": self.result.error,
        }


def judge(
    spec: CellSpec, result: CellResult, clean: CellResult | None, references: Sequence[Series], settings: Settings
) -> Row:
    """One run against the clean one of the same job and seed, if there is one."""
    faults = [grammar.parse(line) for line in spec.faults]
    coverage = covers(faults, spec.options, spec.policy)
    is_caught = any(_follows_a_hit(result, step) for step in _alarms(result))
    wrong = None if clean is None else wrong_steps(result, clean)
    parted = wrong is not None and result.verdict is not None and _leaves_out_updates(spec)
    if wrong is not None and parted:  # and so has other bits from then on, and should have
        wrong = [step for step in wrong if step < (result.caught_step or 0)]
    identical = None if parted else _identical(result, wrong)
    masked, note = identical, ""
    held = _held(result, set(wrong or ()))
    compared = _compared(spec, wrong or ())
    if wrong and not masked and not is_caught and not held and _healed(spec, result, wrong, compared):
        masked, note = True, HEALED
    if masked and any(_harms_files(fault, result) for fault in faults):
        masked, note = (True, REMOVED) if _is_gone(faults, result) else (False, "")
    outcome = None
    if spec.policy is None and clean is not None and result.end != "not_landed":
        outcome = classify(Series.of(result, identical), references, Series.of(clean), settings)
    late, updates = _late(result, wrong, is_caught)
    status = _status(result, coverage, is_caught, masked, spec.policy is None)
    if status == "by chance" and coverage.check == "replicas" and compared:
        status = "missed"  # whether it would be compared was open; it was
    row = Row(
        spec=spec,
        result=result,
        coverage=coverage,
        status=status,
        late=late,
        updates=updates,
        named=_named(result),
        masked=masked,
        note=note,
        held=held,
        outcome=outcome,
    )
    return replace(row, note=UNPROVED) if row.is_unproved else row


def _alarms(result: CellResult) -> list[int | None]:
    """The steps of all verdicts, and of the save that was refused; None where that is not known."""
    verdicts = [*result.verdicts, *([result.verdict] if result.verdict is not None else [])]
    refused = [result.caught_step] if result.caught_by and result.verdict is None else []
    return [*(int(verdict["step"]) for verdict in verdicts), *refused]


def _follows_a_hit(result: CellResult, step: int | None) -> bool:
    if not result.struck:
        return False
    return step is None or result.first_step is None or step >= result.first_step


def _identical(result: CellResult, wrong: Sequence[int] | None) -> bool | None:
    """Whether every bit was right after every update; None where that cannot be said."""
    return None if wrong is None or result.end not in ("finished", "not_landed") else not wrong


def _late(result: CellResult, wrong: Sequence[int] | None, is_caught: bool) -> tuple[int | None, int | None]:
    """Steps from the first wrong update to the catch, and how many wrong updates there were."""
    if wrong is None:
        if is_caught and result.caught_step is not None and result.first_step is not None:
            return max(0, result.caught_step - result.first_step), None
        return None, None
    before = [step for step in wrong if result.caught_step is None or step < result.caught_step]
    if not is_caught or result.caught_step is None:
        return None, len(before)
    return (result.caught_step - before[0] if before else 0), len(before)


def _leaves_out_updates(spec: CellSpec) -> bool:
    return spec.policy is not None and spec.policy.get("on_detection") == "skip"


def _compared(spec: CellSpec, wrong: Sequence[int]) -> list[int]:
    """Those of these steps after which the replicas were compared."""
    if spec.policy is None:
        return []
    policy = policy_of(Shape.split(spec.options)[0], spec.policy)
    return [step for step in wrong if policy.replicas_due(step)]


def _healed(spec: CellSpec, result: CellResult, wrong: Sequence[int], compared: Sequence[int]) -> bool:
    """Whether every bit was right again whenever the replicas were compared, and at the end.

    A low bit of a moment decays and is rounded away within a few updates: nothing of it is left then, nowhere.
    """
    at_the_end = Shape.split(spec.options)[0].steps - 1 in wrong
    return spec.policy is not None and result.end == "finished" and not compared and not at_the_end


def wrong_steps(result: CellResult, clean: CellResult) -> list[int]:
    """The steps after whose update some rank held other bits than in the clean run, in order."""
    found = set()
    for own, other in zip(result.digests, clean.digests, strict=False):
        found |= {step for step, (one, two) in enumerate(zip(own, other, strict=False)) if one != two}
    return sorted(found)


def policy_name(policy: Mapping[str, Any] | None) -> str:
    """A policy in few words."""
    if policy is None:
        return "unguarded"
    if dict(policy) == {"audit_every": 1, "check_every": 1}:
        return "every_step"
    return ", ".join(f"{key}={value}" for key, value in sorted(policy.items())) or "default"


def _harms_files(fault: Fault, result: CellResult) -> bool:
    """Whether it damaged what is saved, so that training itself says nothing of it. Rank 0 writes what all hold alike."""
    return fault.where.target == "ckpt" or (fault.where.during == "save" and 0 in result.struck_ranks)


def _is_gone(faults: Sequence[Fault], result: CellResult) -> bool:
    """Whether all files that it damaged at rest were of checkpoints that retention has removed since."""
    if any(_harms_files(fault, result) and fault.where.during == "save" for fault in faults):
        return False
    gone = {int(one["step"]) for one in result.checkpoints if one.get("gone")}
    hit = {int(one["site"]["step"]) + 1 for one in result.strikes if one["site"]["target"] == "ckpt"}
    return bool(hit) and result.struck == len(result.strikes) and hit <= gone


def _status(result: CellResult, coverage: Coverage, is_caught: bool, masked: bool | None, unguarded: bool) -> Status:
    if is_caught:
        return "caught"
    if result.end == "not_landed" or (result.end in ("finished", "detected") and not result.struck):
        return "not landed"
    if unguarded and result.end == "finished":
        return "unguarded"
    if result.end in _OF_END:
        return _OF_END[result.end]
    if masked:
        return "masked"
    if not coverage.covered:
        return "not covered"
    return "missed" if coverage.certain else "by chance"


def _named(result: CellResult) -> Named:
    """Whether all verdicts name only ranks that were hit; one that does not is one too many."""
    verdicts = [*result.verdicts, *([result.verdict] if result.verdict is not None else [])]
    named = {rank for verdict in verdicts for rank in verdict.get("ranks", ())}
    if not named:
        return "unattributed" if verdicts else ""
    return "right" if named <= set(result.struck_ranks) else "wrong"


def _held(result: CellResult, wrong: set[int]) -> tuple[int, ...]:
    """Checkpoints after so many updates that were published, hold wrong bits, and whom no label or incident speaks against.

    One that was saved after the catch and is gone by now cannot be asked for its label any more: then everybody knew.
    """
    return tuple(
        int(one["step"])
        for one in result.checkpoints
        if one.get("published")
        and not one.get("problem")
        and not one.get("distrusted")
        and not (one.get("gone") and result.caught_step is not None and int(one["step"]) - 1 >= result.caught_step)
        and int(one["step"]) - 1 in wrong
    )
