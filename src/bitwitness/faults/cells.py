"""What a campaign is made of: one run of a job, asked for and reported. Both are plain JSON, kept for years in a database.

They pass between the campaign, which decides and judges and knows no torch, and the processes that train.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

Role = Literal["clean", "control", "reference", "fault"]
"""`clean`: no fault and no guard, the run that all others of its seed are compared with. `control`: no fault, guarded.
`reference`: no fault, no guard, another seed: what training does by itself. `fault`: with faults."""

End = Literal["finished", "detected", "guard_failure", "not_landed", "refused", "crash", "hang"]
"""How a run ended: all steps made; corruption was raised; the guard itself failed; a fault changed no bit; the job or the fault
cannot be as asked; any other error; killed at the deadline."""


@dataclass(frozen=True, slots=True)
class CellSpec:
    """One run.

    Attributes:
        key: names it; follows from all the rest but `label`.
        job: the name of the job within the campaign.
        factory: of the job, a known name or `module:function`; options: its arguments, `ranks` and `steps` among them.
        policy: settings of `Policy`; None: unguarded.
        faults: lines of the grammar.
        seed: of the job and of the faults' draws.
        role: what it is for.
        label: what reports call the fault.
        repeat: tells runs apart that are made several times; each draws its faults' sites and elements anew.
    """

    key: str
    job: str
    factory: str
    options: Mapping[str, Any]
    policy: Mapping[str, Any] | None
    faults: tuple[str, ...]
    seed: int
    role: Role
    label: str = ""
    repeat: int = 0

    @property
    def draws(self) -> int:
        """The seed of what the faults of this run draw."""
        return self.seed * 1_000_003 + self.repeat

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {**asdict(self), "faults": list(self.faults)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        known = {one.name: record[one.name] for one in fields(cls) if one.name in record}
        return cls(**{**known, "faults": tuple(known["faults"])})


@dataclass(frozen=True, slots=True)
class CellResult:
    """What came of one run.

    Attributes:
        key: of its spec.
        end: how it ended; error: the message, if by an error.
        verdict: `Verdict.to_json()` of the first verdict that is not clean, `caught_step` its step; None where there was none.
        caught_by: the check that saw it; `checkpoint` where a save or the verification of a label refused.
        verdicts: every verdict, in shadow mode more than one.
        strikes: `Strike.to_json()` of each, at most a hundred; struck: how many there were.
        struck_ranks: the ranks that were hit; first_step: the step of the first strike.
        losses: mean over the ranks, by step; NaN and Inf as strings. norms: of the gradient, likewise.
        digests: of parameters, buffers and optimizer state after each step, by rank.
        updates: how many updates were made on rank 0.
        checkpoints: `{"step", "published", "problem"}` of each save.
        evaluation: e.g. `{"loss": 1.0, "accuracy": 0.9}`, at the end.
        drift: relative distance of the final parameters from those of the clean run, if that was at hand.
        seconds: it took.
    """

    key: str
    end: End
    error: str = ""
    verdict: Mapping[str, Any] | None = None
    caught_step: int | None = None
    caught_by: str = ""
    verdicts: tuple[Mapping[str, Any], ...] = ()
    strikes: tuple[Mapping[str, Any], ...] = ()
    struck: int = 0
    struck_ranks: tuple[int, ...] = ()
    first_step: int | None = None
    losses: tuple[float | str, ...] = ()
    norms: tuple[float | str, ...] = ()
    digests: tuple[tuple[str, ...], ...] = ()
    updates: int = 0
    checkpoints: tuple[Mapping[str, Any], ...] = ()
    evaluation: Mapping[str, float | str] = field(default_factory=dict)
    drift: float | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; unknown keys are ignored."""
        known = {one.name: record[one.name] for one in fields(cls) if one.name in record}
        for name in ("verdicts", "strikes", "struck_ranks", "losses", "norms", "checkpoints"):
            if name in known:
                known[name] = tuple(known[name])
        if "digests" in known:
            known["digests"] = tuple(tuple(of_rank) for of_rank in known["digests"])
        return cls(**known)
