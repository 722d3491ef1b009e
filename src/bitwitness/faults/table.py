"""From the results of a campaign to its table: which check caught what, how late, and whether the right rank was named.

Pure: the same results make the same table. What was promised of each fault comes from `coverage`, what happened from the
results; where the two differ is the list that a campaign exists for. Nothing is left out: a fault that no check covers, did
not land or ended a run stands in a list of its own.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from bitwitness.faults import grammar
from bitwitness.faults.cells import CellResult, CellSpec
from bitwitness.faults.coverage import Coverage, covers
from bitwitness.faults.norms import Strays, strays
from bitwitness.faults.outcomes import LABELS, Outcome, Series, Settings, classify
from bitwitness.faults.spec import Fault
from bitwitness.faults.statistics import Share, highest_rate, wilson

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


@dataclass(frozen=True, slots=True)
class Row:
    """One run with a fault, judged.

    Attributes:
        spec, result: what was asked for, what came.
        coverage: what was promised.
        status: `caught`; `missed` where it was covered and should have been; `by chance` where an audit could have met it and
            did not; `masked` where every bit of the state stayed that of the clean run; `not covered`; and how else a run ended.
        late: steps from the first update that left wrong bits to the catch; None where it was not caught.
        updates: how many updates left wrong bits, up to the catch or to the end; None where the clean run is not known.
        named: whether the verdict's ranks were all hit.
        masked: None where a run ended early or the clean run is not known.
        held: steps of the published checkpoints that hold wrong bits.
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
    held: tuple[int, ...]
    outcome: Outcome | None

    @property
    def fault(self) -> str:
        """The lines, as one."""
        return " & ".join(self.spec.faults)

    @property
    def is_late(self) -> bool:
        """Whether it was caught later than was promised."""
        if self.status != "caught" or not self.coverage.certain:
            return False
        return bool(self.held) or (self.late or 0) > self.coverage.delay

    @property
    def is_false_alarm(self) -> bool:
        """Whether a verdict came before anything was hit."""
        if self.result.verdict is None:
            return False
        return self.result.first_step is None or self.result.verdict["step"] < self.result.first_step

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
            "checkpoints_held": list(self.held),
            "outcome": self.outcome.to_json() if self.outcome is not None else None,
            "drift": self.result.drift,
            "seconds": round(self.result.seconds, 3),
            "error": self.result.error,
        }


@dataclass(slots=True)
class Summary:
    """Every fault once in the list that it belongs into; the lists of `problems` should be empty.

    Attributes:
        runs: how many there were; planned: of how many.
        missed: covered for certain, landed, not masked, not caught.
        late: caught after a checkpoint held it, or later than its check promises.
        wrong_rank: a rank was named that was not hit.
        false_alarms: fault-free runs in which something was caught, and verdicts before anything was hit.
        changed_bits: fault-free guarded runs that ended with other bits than unguarded ones.
        broken: fault-free runs that did not finish.
        guard_failures, refused: runs with a fault that ended so.
        unattributed: caught, and nobody named.
        not_covered: with the words why, whatever came of them.
        not_landed: changed no bit.
        masked, caught, by_chance, crashed, hung: as the status of the row says.
    """

    runs: int = 0
    planned: int = 0
    missed: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    wrong_rank: list[str] = field(default_factory=list)
    unattributed: list[str] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)
    not_covered: list[dict[str, Any]] = field(default_factory=list)
    not_landed: list[str] = field(default_factory=list)
    changed_bits: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    guard_failures: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    caught: int = 0
    masked: int = 0
    by_chance: int = 0

    def problems(self) -> list[str]:
        """What should not be, a sentence each."""
        told = {
            "missed": "covered faults were missed",
            "late": "faults were caught too late",
            "wrong_rank": "times a rank was named that was not hit",
            "false_alarms": "times there was an alarm and no fault",
            "changed_bits": "guarded runs ended with other bits than unguarded ones",
            "broken": "fault-free runs did not finish",
            "guard_failures": "times the guard itself failed",
            "refused": "runs were refused",
        }
        return [f"{len(getattr(self, name))} {words}" for name, words in told.items() if getattr(self, name)]

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True, slots=True)
class Chance:
    """Faults whose check samples, under one policy and in one job: what was predicted and what was measured.

    Attributes:
        job, policy: whose.
        predicted: the mean over the faults.
        measured: caught ones, among those that landed and were not masked.
        nonfinite: how many of the caught were seen as NaN or Inf, which is looked for in every step.
    """

    job: str
    policy: str
    predicted: float
    measured: Share
    nonfinite: int

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {
            "job": self.job,
            "policy": self.policy,
            "predicted": self.predicted,
            "measured": self.measured.to_json(),
            "nonfinite": self.nonfinite,
        }


@dataclass(frozen=True, slots=True)
class Shares:
    """What unguarded runs with one label came to.

    Attributes:
        job, label: whose.
        shares: by outcome, those that occurred.
        better: those that ended better than the clean run, among the masked ones with other bits.
    """

    job: str
    label: str
    shares: Mapping[str, Share]
    better: Share

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        shares = {name: share.to_json() for name, share in self.shares.items()}
        return {"job": self.job, "label": self.label, "shares": shares, "better": self.better.to_json()}


@dataclass(frozen=True, slots=True)
class Table:
    """All of it.

    Attributes:
        rows: one a run with a fault.
        summary: the lists.
        matrix: by label, how many were caught by each check, and how many were not, by status.
        chances: predicted and measured, where audits sample.
        shares: of outcomes, where runs are unguarded.
        norms: how far gradient norms stray with and without faults, where unguarded runs are long enough.
        controls: fault-free guarded runs; control_steps: the steps that they made.
    """

    rows: tuple[Row, ...]
    summary: Summary
    matrix: Mapping[str, Mapping[str, int]]
    chances: tuple[Chance, ...]
    shares: tuple[Shares, ...]
    norms: tuple[Strays, ...]
    controls: int
    control_steps: int

    @property
    def columns(self) -> list[str]:
        """Of the matrix: the checks that caught something, then the statuses of what none caught."""
        names = list(dict.fromkeys(name for row in self.matrix.values() for name in row))
        order = list(get_args(Status))
        return sorted(names, key=lambda name: order.index(name) if name in order else -1)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values: the summary, and beside it what it was made from but the rows."""
        return {
            **self.summary.to_json(),
            "problems": self.summary.problems(),
            "matrix": {label: dict(row) for label, row in self.matrix.items()},
            "chances": [one.to_json() for one in self.chances],
            "outcomes": [one.to_json() for one in self.shares],
            "norms": [{name: _finite(value) for name, value in one.to_json().items()} for one in self.norms],
            "controls": {
                "runs": self.controls,
                "steps": self.control_steps,
                "alarms": len(self.summary.false_alarms),
                "highest_rate_per_step": None if self.summary.false_alarms else highest_rate(self.control_steps),
            },
        }


def _finite(value: Any) -> Any:
    """JSON has no number for Inf and NaN: they become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def build(results: Iterable[tuple[CellSpec, CellResult]], settings: Settings, planned: int | None = None) -> Table:
    """Judge all results.

    Args:
        results: of a campaign, in its order; some may be missing.
        settings: for outcomes.
        planned: how many runs the campaign has; None: as many as there are results.
    """
    given = list(results)
    clean = {_place(spec): result for spec, result in given if spec.role == "clean"}
    calm: dict[str, list[tuple[int, Series]]] = defaultdict(list)
    for spec, result in given:
        if spec.role in ("clean", "reference"):
            calm[spec.job].append((spec.seed, Series.of(result)))
    rows = []
    for spec, result in given:
        if spec.role == "fault":
            others = [one for seed, one in calm[spec.job] if seed != spec.seed]
            rows.append(judge(spec, result, clean.get(_place(spec)), others, settings))
    controls = [(spec, result) for spec, result in given if spec.role == "control"]
    summary = _summary(rows, given, clean)
    summary.runs, summary.planned = len(given), len(given) if planned is None else planned
    return Table(
        rows=tuple(rows),
        summary=summary,
        matrix=_matrix(rows),
        chances=tuple(_chances(rows)),
        shares=tuple(_shares(rows)),
        norms=strays(given),
        controls=len(controls),
        control_steps=sum(result.updates for _, result in controls),
    )


def judge(
    spec: CellSpec, result: CellResult, clean: CellResult | None, references: Sequence[Series], settings: Settings
) -> Row:
    """One run against the clean one of the same job and seed, if there is one."""
    faults = [grammar.parse(line) for line in spec.faults]
    coverage = covers(faults, spec.options, spec.policy)
    wrong = None if clean is None else wrong_steps(result, clean)
    is_caught = result.verdict is not None or bool(result.caught_by)
    identical = None if wrong is None or result.end not in ("finished", "not_landed") else not wrong
    masked = identical
    if identical and any(_harms_files(fault, result) for fault in faults):
        masked = False
    late = updates = None
    if wrong is not None:
        before = [step for step in wrong if result.caught_step is None or step < result.caught_step]
        updates = len(before)
        if is_caught and result.caught_step is not None:
            late = result.caught_step - before[0] if before else 0
    elif is_caught and result.caught_step is not None and result.first_step is not None:
        late = max(0, result.caught_step - result.first_step)
    outcome = None
    if spec.policy is None and clean is not None and result.end != "not_landed":
        outcome = classify(Series.of(result, identical), references, Series.of(clean), settings)
    return Row(
        spec=spec,
        result=result,
        coverage=coverage,
        status=_status(result, coverage, is_caught, masked, spec.policy is None),
        late=late,
        updates=updates,
        named=_named(result) if is_caught else "",
        masked=masked,
        held=_held(result, set(wrong or ())),
        outcome=outcome,
    )


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


def _place(spec: CellSpec) -> tuple[str, int]:
    return spec.job, spec.seed


def _harms_files(fault: Fault, result: CellResult) -> bool:
    """Whether it damaged what is saved, so that training itself says nothing of it. Rank 0 writes what all hold alike."""
    return fault.where.target == "ckpt" or (fault.where.during == "save" and 0 in result.struck_ranks)


def _status(result: CellResult, coverage: Coverage, is_caught: bool, masked: bool | None, unguarded: bool) -> Status:
    if is_caught:
        return "caught"
    if result.end == "not_landed" or (result.end == "finished" and not result.struck):
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
    """Checkpoints after so many updates that were published and hold wrong bits."""
    return tuple(
        int(one["step"])
        for one in result.checkpoints
        if one.get("published") and not one.get("problem") and int(one["step"]) - 1 in wrong
    )


# Counting ------------------------------------------------------------------------------------------------------------


def _summary(
    rows: Sequence[Row], given: Sequence[tuple[CellSpec, CellResult]], clean: Mapping[tuple[str, int], CellResult]
) -> Summary:
    found = Summary()
    for row in rows:
        told = f"{row.fault} [{row.spec.job}, seed {row.spec.seed}, {policy_name(row.spec.policy)}]"
        lists: dict[Status, list[str]] = {
            "missed": found.missed,
            "not landed": found.not_landed,
            "guard failure": found.guard_failures,
            "refused": found.refused,
            "crash": found.crashed,
            "hang": found.hung,
        }
        if row.status in lists:
            lists[row.status].append(told)
        found.caught += row.status == "caught"
        found.masked += row.status == "masked"
        found.by_chance += row.status == "by chance"
        if row.is_false_alarm:
            found.false_alarms.append(told)
        if row.is_late:
            found.late.append(told)
        if row.named == "wrong":
            found.wrong_rank.append(told)
        if row.named == "unattributed":
            found.unattributed.append(told)
        if not row.coverage.covered and row.spec.policy is not None:
            found.not_covered.append({"fault": told, "why": row.coverage.words, "status": row.status})
    for spec, result in given:
        if spec.role == "fault":
            continue
        told = f"{spec.role} [{spec.job}, seed {spec.seed}, {policy_name(spec.policy)}, repeat {spec.repeat}]"
        if result.verdict is not None or result.caught_by:
            found.false_alarms.append(told)
        elif result.end != "finished":
            found.broken.append(f"{told}: {result.end}: {result.error}".rstrip(": "))
        other = clean.get(_place(spec))
        if spec.role == "control" and other is not None and other.end == "finished" and wrong_steps(result, other):
            found.changed_bits.append(told)
    return found


def _matrix(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """By label: the check that caught, else the status."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        name = row.result.caught_by or "unknown check" if row.status == "caught" else row.status
        counts.setdefault(row.spec.label or row.fault, Counter())[name] += 1
    return {label: dict(count) for label, count in counts.items()}


def _chances(rows: Sequence[Row]) -> Iterable[Chance]:
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.coverage.covered and row.coverage.sampled and row.status in ("caught", "by chance", "missed"):
            groups[row.spec.job, policy_name(row.spec.policy)].append(row)
    for (job, policy), group in groups.items():
        caught = [row for row in group if row.status == "caught"]
        predicted = sum(row.coverage.probability for row in group) / len(group)
        nonfinite = sum(row.result.caught_by == "numerics" for row in caught)
        yield Chance(job, policy, predicted, wilson(len(caught), len(group)), nonfinite)


def _shares(rows: Sequence[Row]) -> Iterable[Shares]:
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for row in rows:
        if row.outcome is not None:
            groups[row.spec.job, row.spec.label or row.fault].append(row.outcome)
    for (job, label), group in groups.items():
        counts = Counter(one.label for one in group)
        drifted = [one for one in group if one.label == "masked-drifted" and one.final is not None]
        yield Shares(
            job=job,
            label=label,
            shares={name: wilson(counts[name], len(group)) for name in LABELS if counts[name]},
            better=wilson(sum(one.better for one in drifted), len(drifted)),
        )
