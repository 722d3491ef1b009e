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

WIDEST = 128
"""Bits of the widest dtype, complex128."""

_WIDTHS: dict[Target, int] = {"loss": 64, "digest": 64, "ckpt": 8, "rng": 32}
"""Bits of what is always of one kind: a real number, a fingerprint, a byte, a word of a Mersenne twister."""

_ELEMENTS: dict[Target, int] = {"loss": 1, "rng": 624}

_CUDA_WIDTH, _CUDA_ELEMENTS = 64, 2
"""Of CUDA's random state: a seed and an offset."""

_INTEGERS: dict[Target, tuple[int, int]] = {
    "ckpt": (0, 255),
    "rng": (-(2**31), 2**31 - 1),
    "digest": (-(2**63), 2**63 - 1),
}

_DURING: dict[Work, tuple[Target, ...]] = {
    "train": tuple(target for target in TARGETS if target != "ckpt"),
    "update": MEMORY_TARGETS,
    "replay": _REPLAYED,
    "arbiter": _REPLAYED,
    "rerun": _REPLAYED,
    "fingerprint": (*MEMORY_TARGETS, "digest"),
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
    return None


def _cuda(fault: Fault) -> bool:
    """Whether it is the random state of CUDA alone; where another may be drawn, it must be possible in that one."""
    glob = fault.where.glob
    sources = [one for one in RANDOM_SOURCES if fnmatchcase(one, glob or "*")]
    return fault.where.target == "rng" and sources == ["cuda"]


def _width(fault: Fault) -> Objection | None:
    target, mutate = fault.where.target, fault.mutate
    width = _CUDA_WIDTH if _cuda(fault) else _WIDTHS.get(target, WIDEST)
    what = {
        "loss": "the loss is a real number, which has",
        "digest": "a fingerprint is made of words, which have",
        "ckpt": "a file is bytes, which have",
        "rng": "random state is made of words, which have",
    }.get(target, "no dtype has more than")
    if target == "rng" and not _cuda(fault):
        what = "the words of torch, numpy and python (rng:cuda has 64 bits) have"
    if mutate.bit is not None and not -width <= mutate.bit < width:
        return "mutate", f"{what} the bits 0 to {width - 1}, or -1 to {-width} from the uppermost"
    if mutate.kind == "bits" and mutate.count > width:
        return "mutate", f"{what} {width} bits"
    return None


def _elements(fault: Fault) -> Objection | None:
    target, select = fault.where.target, fault.select
    most = _CUDA_ELEMENTS if _cuda(fault) else _ELEMENTS.get(target)
    if most is None:
        return None
    what = {"loss": "the loss is one number"}.get(target, f"random state has {most} words")
    if target == "rng" and not _cuda(fault):
        what = f"the state of torch, numpy and python has {most} words"
    if select.kind == "n" and select.count > most:
        return "select", f"{what}: n={most} is the most"
    outside = [index for index in select.indices if index >= most]
    if outside:
        return "select", f"{what}: there is no index {outside[0]}, the last is {most - 1}"
    if most == 1 and (fault.mutate.kind == "swap" or fault.mutate.source == "other"):
        return "mutate", f"{what}: there is no other element for {fault.mutate}"
    return None


def _integers(fault: Fault) -> Objection | None:
    target, mutate = fault.where.target, fault.mutate
    if target not in _INTEGERS:
        return None
    least, most = _INTEGERS["digest" if _cuda(fault) else target]
    if target == "digest" and mutate.kind in ("nan", "inf", "add"):
        return "mutate", f"a fingerprint is made of integers, which know no {mutate.kind}; use bit=B, set=V or random"
    whole = mutate.value.is_integer() and least <= mutate.value <= most
    if mutate.kind == "set" and not whole:
        return "mutate", f"{target} takes whole numbers from {least} to {most}"
    if mutate.kind == "scale" and not whole:
        return "mutate", f"{target} is made of integers: they take whole factors below 2**63"
    return None


def _alike(fault: Fault) -> Objection | None:
    where = fault.where
    if where.target == "comm.reduce" and (where.node or isinstance(where.rank, int)):
        word = "node" if where.node else "rank"
        return word, f"comm.reduce is the result on all ranks alike: leave out {word}, or hit one rank by comm.post"
    return None


_RULES: tuple[Callable[[Fault], Objection | None], ...] = (
    _names,
    _work,
    _micro,
    _bytes,
    _width,
    _elements,
    _integers,
    _alike,
)
