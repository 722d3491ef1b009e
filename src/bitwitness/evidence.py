"""The records that pass between the guard, the verdict and the files of a run.

They live at the bottom, free of torch, because everything else meets in them: a check produces observations, the verdict
is computed from nothing but observations, and the fleet reads both from disk years after the process died. They are
frozen, and each has a plain JSON form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

CheckName = Literal["numerics", "recompute", "allreduce", "replay", "at_rest", "update", "replicas", "bounds", "input"]
"""The detectors of DESIGN section 1. `input` is the premise of a replay that compares batches, reported by that name."""

Status = Literal["clean", "attributed", "unattributed"]
Kind = Literal["numeric", "compute", "update", "memory", "collective", "input", "software"]
Persistence = Literal["transient", "persistent", "unknown"]
Place = Literal["local", "reduced", "original", "witness", "state"]
"""Where a value was seen: a gradient before (`local`) or after (`reduced`) the all-reduce, the `original` run of a
micro-batch in training, a `witness`'s replay of it, or the `state` (parameters, optimizer) held by a replica."""

NONFINITE = "non-finite"
"""The value of a result that holds NaN or Inf. All such results count as the same value: the bits of a NaN are not
defined by IEEE 754 arithmetic and may differ between correct runs. It is never a reference that could blame anybody."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What one check saw on one rank at one step: pure data, equal on every rank after the exchange.

    Attributes:
        check: the detector.
        step: the optimizer step, from 0.
        rank: the rank whose device produced `value`.
        place: where the value was seen.
        value: digest of the result in hexadecimal, or `NONFINITE`; empty where the check compares no value.
        repeats: digests of the repetitions of the same work on the same rank, in order.
        owner: replay and input: the rank whose micro-batch this is.
        micro: replay and input: index of the micro-batch within the step.
        error: why there is no value (an exception, a lack of memory); such an observation blames nobody.
        detail: what a person needs to see next, e.g. the names of the tensors that differ. JSON values only.
    """

    check: CheckName
    step: int
    rank: int
    place: Place
    value: str = ""
    repeats: tuple[str, ...] = ()
    owner: int | None = None
    micro: int | None = None
    error: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def runs(self) -> tuple[str, ...]:
        """The value and its repeats: every time this rank did this work."""
        every = (self.value, *self.repeats)
        return every if "" not in every else tuple(filter(None, every))

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values without the empty fields."""
        return {key: value for key, value in asdict(self).items() if value not in ((), "", None, {})}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Observation:
        """The inverse of `to_json`; unknown keys are ignored, so that older readers accept newer files."""
        known = {name.name: record[name.name] for name in fields(cls) if name.name in record}
        known["repeats"] = tuple(known.get("repeats", ()))
        return cls(**known)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows from the observations; the same on every rank.

    Attributes:
        status: `clean`, `attributed` (somebody is named) or `unattributed` (corruption, and nobody can be named).
        ranks: the named ranks; empty unless attributed. Likewise `nodes` and `devices`.
        candidates: ranks involved, without blame.
        kind: what kind of wrong it is; None only when clean.
        persistence: whether the named ranks' repetitions were right (`transient`) or not (`persistent`); where several
            are named, the worst of them.
        persistences: the same for each of `ranks`, in their order.
        reason: one sentence that a person can act on.
        window: (last step at which this check passed, step of detection]; -1 means it never passed.
        check: the check that saw it.

    Raises:
        ValueError: the fields contradict each other.
    """

    status: Status
    step: int
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    candidates: tuple[int, ...] = ()
    kind: Kind | None = None
    persistence: Persistence = "unknown"
    persistences: tuple[Persistence, ...] = ()
    reason: str = ""
    window: tuple[int, int] = (-1, -1)
    check: CheckName | None = None

    def __post_init__(self) -> None:
        for value, allowed in ((self.status, Status), (self.persistence, Persistence)):
            if value not in get_args(allowed):
                raise ValueError(f"{value!r} is none of {', '.join(get_args(allowed))}")
        if (self.status == "attributed") != bool(self.ranks):
            raise ValueError(f"a verdict names ranks exactly if it is attributed, got {self.status} and {self.ranks}")
        if (self.status == "clean") != (self.kind is None):
            raise ValueError(f"a verdict has a kind exactly if it is not clean, got {self.status} and {self.kind}")

    def headline(self) -> str:
        """One line: what, when, who."""
        if self.status == "clean":
            return f"step {self.step}: clean"
        if self.status == "unattributed":
            return f"step {self.step}: corruption ({self.kind}), unattributed"
        ranks = ", ".join(map(str, self.ranks))
        how = "" if self.persistence == "unknown" else f"{self.persistence} "
        return (
            f"step {self.step}: {how}{self.kind} corruption on rank{'s' * (len(self.ranks) > 1)} {ranks} "
            f"(node{'s' * (len(self.nodes) > 1)} {', '.join(self.nodes)})"
        )

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values, every field present."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Verdict:
        """The inverse of `to_json`; unknown keys are ignored."""
        known = {name.name: record[name.name] for name in fields(cls) if name.name in record}
        for name in ("ranks", "nodes", "devices", "candidates", "persistences", "window"):
            if name in known:
                known[name] = tuple(known[name])
        return cls(**known)


@dataclass(frozen=True, slots=True)
class History:
    """What was known before this step, equal on every rank.

    Attributes:
        last_passed: for each check, the last step at which it passed; absent where it never did.
        compared_before: the checks that compare ranks and have passed at least once. The first comparison tells
            configuration from nothing, so it never blames: not for replicas or reduced gradients that differ, nor for a
            rank that gets the same other result in all that it does. `input` counts as one of them.
        reductions_agreed: whether the fingerprints of the reduced gradient agreed across ranks in every step since the
            last passed replica check.
        sum_may_overflow: whether the finite local gradients are so large that their correct sum may be non-finite.
    """

    last_passed: Mapping[str, int] = field(default_factory=dict)
    compared_before: frozenset[str] = frozenset()
    reductions_agreed: bool = True
    sum_may_overflow: bool = False

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {
            "last_passed": dict(self.last_passed),
            "compared_before": sorted(self.compared_before),
            "reductions_agreed": self.reductions_agreed,
            "sum_may_overflow": self.sum_may_overflow,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> History:
        """The inverse of `to_json`; unknown keys are ignored."""
        return cls(
            {str(check): int(step) for check, step in record["last_passed"].items()},
            frozenset(record["compared_before"]),
            bool(record["reductions_agreed"]),
            bool(record["sum_may_overflow"]),
        )


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What was verified, or not: a range of steps of one kind of work on one rank.

    Attributes:
        check: the detector.
        first, last: the range of steps, both included.
        outcome: `passed`; `failed`; or `unverified`, which is a gap and never health.
        reason: why not, for a gap.
        detail: the level of an audit, the micro-batch, whose work was witnessed.
    """

    check: CheckName
    first: int
    last: int
    outcome: Literal["passed", "failed", "unverified"]
    reason: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values without the empty fields."""
        return {key: value for key, value in asdict(self).items() if value not in ("", {})}
