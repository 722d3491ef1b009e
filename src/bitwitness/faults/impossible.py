"""What a fault says that could never happen, whatever the job.

Such a fault would run its whole campaign without landing, hours after somebody wrote it. Here it is refused when it is
written; what depends on the job (names, shapes, dtypes) is checked by a survey of it.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from bitwitness.faults.spec import MEMORY_TARGETS, MODULE_TARGETS, PARAMETER_TARGETS, TARGETS, Fault, Target, Work

NAMED_TARGETS: tuple[Target, ...] = (*MODULE_TARGETS, *PARAMETER_TARGETS, "buffer", "input", "ckpt", "rng")
"""Of these there are several, with names; there is one loss, and a collective has none."""

RANDOM_SOURCES = ("torch", "cuda", "numpy", "python")

_BYTES: tuple[Target, ...] = ("ckpt", "rng")
_NUMBERS_ONLY = ("nan", "inf", "scale", "add", "sign", "profile")
_REPLAYED: tuple[Target, ...] = (*MODULE_TARGETS, "grad_w", "loss", "input", "digest")

_DURING: dict[Work, tuple[Target, ...]] = {
    "train": tuple(target for target in TARGETS if target != "ckpt"),
    "update": MEMORY_TARGETS,
    "replay": _REPLAYED,
    "arbiter": _REPLAYED,
    "rerun": _REPLAYED,
    "fingerprint": (*PARAMETER_TARGETS, "buffer", "loss", "fwd_out", "grad_in", "digest"),
    "save": (*MEMORY_TARGETS, "ckpt"),
}
"""What takes part in which work: nobody replays an all-reduce, memory is none of a replay's own, only a save writes a file."""

Objection = tuple[str, str]
"""The word of the line that is at fault (an attribute of a part of the fault), and what is wrong with it."""


def objection(fault: Fault) -> Objection | None:
    """Why a fault can never happen; None: it might."""
    for rule in _RULES:
        found = rule(fault)
        if found is not None:
            return found
    return None


def _names(fault: Fault) -> Objection | None:
    where = fault.where
    if where.target not in NAMED_TARGETS and (where.glob or where.each):
        word = "glob" if where.glob else "each"
        return word, f"{where.target} has no names to choose from; names go with {', '.join(NAMED_TARGETS)}"
    if where.target == "rng" and where.glob and not any(fnmatchcase(one, where.glob) for one in RANDOM_SOURCES):
        return "glob", f"random state is that of {', '.join(RANDOM_SOURCES)}"
    return None


def _work(fault: Fault) -> Objection | None:
    during, target = fault.where.during, fault.where.target
    if during is None or target in _DURING[during]:
        return None
    works = [work for work, targets in _DURING.items() if target in targets]
    return "during", f"{target} takes no part in during={during}; it does in {', '.join(works)}"


def _micro(fault: Fault) -> Objection | None:
    if fault.when.micro is None:
        return None
    if fault.where.target in (*MEMORY_TARGETS, "ckpt"):
        return "micro", f"{fault.where.target} is stored: it is hit once a step, in no micro-batch"
    if fault.where.during in ("update", "save"):
        return "micro", f"during={fault.where.during} comes once a step, in no micro-batch"
    return None


def _bytes(fault: Fault) -> Objection | None:
    target, mutate = fault.where.target, fault.mutate
    if target not in _BYTES:
        return None
    if mutate.kind in _NUMBERS_ONLY:
        return (
            "mutate",
            f"{target} is bytes, which know no {mutate.kind}; use bit=B, bits=K, zero, random, set=V, copy or swap",
        )
    if fault.persist.only_if is not None or fault.select.kind == "largest":
        word = "select" if fault.persist.only_if is None else "if"
        return word, f"{target} is bytes, whose magnitude means nothing"
    if target == "ckpt" and mutate.bit is not None and not -8 <= mutate.bit < 8:
        return "mutate", "a file is bytes, which have the bits 0 to 7"
    return None


def _alike(fault: Fault) -> Objection | None:
    where = fault.where
    if where.target == "comm.reduce" and (where.node or isinstance(where.rank, int)):
        word = "node" if where.node else "rank"
        return word, f"comm.reduce is the result on all ranks alike: leave out {word}, or hit one rank by comm.post"
    return None


_RULES: tuple[Callable[[Fault], Objection | None], ...] = (_names, _work, _micro, _bytes, _alike)
