"""From the results of a campaign to its table: which check caught what, how late, and whether the right rank was named.

Pure: the same results make the same table. Each run is judged in `rows`; here they are counted, and where promise and
result differ is the list that a campaign exists for. Nothing is left out: a fault that no check covers, did
not land or ended a run stands in a list of its own.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from bitwitness.faults.cells import CellResult, CellSpec
from bitwitness.faults.norms import Strays, strays
from bitwitness.faults.outcomes import LABELS, Outcome, Series, Settings
from bitwitness.faults.rows import Row, Status, judge, policy_name, wrong_steps
from bitwitness.faults.statistics import Share, highest_rate, wilson

PROBLEMS = {
    "missed": "covered faults were missed",
    "late": "faults were caught too late",
    "wrong_rank": "times a rank was named that was not hit",
    "false_alarms": "times there was an alarm and no fault",
    "changed_bits": "guarded runs ended with other bits than unguarded ones",
    "broken": "fault-free runs did not finish",
    "guard_failures": "times the guard itself failed",
    "guard_hangs": "times a guarded run hung",
    "refused": "runs were refused",
}
"""The lists of a summary that should be empty, in words that follow their lengths."""

REMARKS = {
    "unproved": "faults were promised to be caught for certain and the run proves nothing of it: it crashed or hung, or no bit changed",
}
"""The lists of a summary that break no promise and must not be overlooked, likewise."""


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
        guard_hangs: guarded runs with a fault that hung: the guard must add no hang.
        unproved: promised for certain, and the run crashed, hung, or the fault changed no bit.
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
    guard_hangs: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    unproved: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    caught: int = 0
    masked: int = 0
    by_chance: int = 0

    def problems(self) -> list[str]:
        """What should not be, a sentence each."""
        return self._told(PROBLEMS)

    def remarks(self) -> list[str]:
        """What breaks no promise and keeps none either, a sentence each."""
        return self._told(REMARKS)

    def _told(self, words: Mapping[str, str]) -> list[str]:
        return [f"{len(getattr(self, name))} {said}" for name, said in words.items() if getattr(self, name)]

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
            "remarks": self.summary.remarks(),
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


def _place(spec: CellSpec) -> tuple[str, int]:
    return spec.job, spec.seed


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
        if row.is_unproved:
            found.unproved.append(told)
        if row.is_guarded_hang:
            found.guard_hangs.append(told)
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
        sampled = row.coverage.covered and row.coverage.sampled and not row.coverage.at_least
        if sampled and row.status in ("caught", "by chance", "missed"):
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
