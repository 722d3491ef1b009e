"""A campaign without training: made-up results of every kind, to be judged and shown."""

from __future__ import annotations

from typing import Any

from bitwitness.faults import yamlfile
from bitwitness.faults.campaign import Campaign, from_item
from bitwitness.faults.cells import CellResult, CellSpec

STEPS, RANKS = 8, 3

FILE = """\
campaign: tried
description: A <b>bold</b> campaign & more.
jobs:
  tiny: {factory: mlp, ranks: 3, steps: 8, checkpoint_every: 4}
references: 2
faults:
  - "rank=1 fwd_out @ step=4 : n=1 -> bit=20"
  - "rank=1 comm.pre @ step=4 : n=1 -> bit=20"
  - {fault: "rank=1 fwd_out @ step=4 : n=1 -> bit={bit}", vary: {bit: 1..6}, policy: null, name: flips}
"""


def campaign() -> Campaign:
    return from_item(yamlfile.parse(FILE, "tried.yaml"))


def digests(wrong: dict[int, set[int]] | None = None, steps: int = STEPS) -> tuple[tuple[str, ...], ...]:
    """Of each rank after each step; `wrong` says at which steps a rank has others."""
    wrong = wrong or {}
    return tuple(
        tuple(f"bad{step}" if step in wrong.get(rank, ()) else f"good{step}" for step in range(steps))
        for rank in range(RANKS)
    )


def everywhere(first: int, steps: int = STEPS) -> tuple[tuple[str, ...], ...]:
    """Wrong on all ranks from a step on, as an update with a wrong gradient leaves them."""
    return digests({rank: set(range(first, steps)) for rank in range(RANKS)}, steps)


def saves(*steps: int, problem: str = "") -> tuple[dict[str, Any], ...]:
    return tuple({"step": step, "published": not problem, "problem": problem} for step in steps)


def verdict(step: int, *ranks: int, check: str = "replay") -> dict[str, Any]:
    status = "attributed" if ranks else "unattributed"
    return {
        "status": status,
        "step": step,
        "ranks": list(ranks),
        "kind": "compute",
        "check": check,
        "persistence": "transient",
    }


def finished(spec: CellSpec, **rest: Any) -> CellResult:
    """A run that made all its steps."""
    hit = {"struck": 1, "struck_ranks": (1,), "first_step": 4} if spec.role == "fault" else {}
    usual: dict[str, Any] = {
        "losses": tuple(2.0 - 0.1 * step for step in range(STEPS)),
        "norms": (1.0,) * STEPS,
        "digests": digests(),
        "updates": STEPS,
        "checkpoints": saves(4, 8) if spec.policy is not None else (),
        "evaluation": {"loss": 1.0, "accuracy": 0.9},
        "seconds": 0.5,
    }
    return CellResult(spec.key, "finished", **(usual | hit | rest))


def caught(spec: CellSpec, step: int = 4, *ranks: int, check: str = "replay", **rest: Any) -> CellResult:
    """A run that a guard ended before the update of a step."""
    found = verdict(step, *ranks, check=check)
    usual: dict[str, Any] = {
        "verdict": found,
        "verdicts": (found,),
        "caught_step": step,
        "caught_by": check,
        "struck": 1,
        "struck_ranks": (1,),
        "first_step": 4,
        "digests": digests(steps=step),
        "updates": step,
        "checkpoints": saves(4),
    }
    return CellResult(spec.key, "detected", **(usual | rest))
