"""The fault models of the literature, by name.

Who compares a detector with a publication should not have to translate its fault model first, nor wonder whether two campaigns
translated it alike. A preset is a selection, a mutation and a persistence, and which targets it speaks of; where the
publication leaves something open, the choice made here is said in `source`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

from bitwitness.errors import ConfigurationError
from bitwitness.faults.spec import (
    LEAST_CHANCE,
    MEMORY_TARGETS,
    MOST_RANKS,
    MOST_STEPS,
    PARAMETER_TARGETS,
    Fault,
    Mutate,
    Persist,
    Select,
    Target,
    When,
    Where,
)

Phase = Literal["forward", "backward"]

_HE, _PRISM, _ANATOMY = "He et al., ISCA 2023", "LLM-PRISM, arXiv 2604.10390", "Anatomy of SDC, arXiv 2605.04213"

PRISM_RATE = 0.05
"""From which share of steps on LLM-PRISM sees harm; the paper varies it from run to run."""


ONCE = Persist()


@dataclass(frozen=True, slots=True)
class Preset:
    """A published fault model.

    Attributes:
        select, mutate, persist: what stands behind the colon.
        forward, backward, memory: what it hits in each phase; one is drawn.
        source: where it is from, and what was left open there.
        rate: strikes in this share of the steps, from the given one on; None: in the given step.
    """

    select: Select
    mutate: Mutate
    source: str
    persist: Persist = ONCE
    forward: tuple[Target, ...] = ()
    backward: tuple[Target, ...] = ()
    memory: tuple[Target, ...] = ()
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.select} -> {self.mutate} ; {self.persist}"

    @property
    def targets(self) -> tuple[Target, ...]:
        """Whatever it may hit."""
        return (*self.forward, *self.backward, *self.memory)


class Row(NamedTuple):
    """A preset in a table: its name, what stands behind the colon, its source, its targets."""

    name: str
    line: str
    source: str
    targets: tuple[Target, ...]


def _he(select: Select, mutate: Mutate, operand: Literal["", "input", "weight"], what: str) -> Preset:
    forward: dict[str, tuple[Target, ...]] = {"": ("fwd_out",), "input": ("fwd_in",), "weight": ("fwd_w",)}
    backward: dict[str, tuple[Target, ...]] = {"": ("grad_in", "grad_w"), "input": ("grad_out",), "weight": ()}
    return Preset(select, mutate, f"{_HE}: {what}", forward=forward[operand], backward=backward[operand])


def _neighbours(count: int) -> Select:
    return Select("run", count=count, align=count, channels_last=True)


def _groups(count: int) -> Select:
    return Select("groups", count=count, channels_last=True)


def _prism(select: Select, mutate: Mutate, what: str) -> Preset:
    persist = Persist("permanent", redraw=True)
    source = f"{_PRISM}: {what}"
    return Preset(select, mutate, source, persist, ("fwd_out",), ("grad_in", "grad_w"), rate=PRISM_RATE)


def _anatomy(select: Select, what: str) -> Preset:
    mutate = Mutate("profile", profile="anatomy")
    return Preset(select, mutate, f"{_ANATOMY}: {what}", forward=("fwd_out",), backward=("grad_in", "grad_w"))


_ONE, _ANY_BIT = Select("n", count=1), Mutate("bit")
_RANDOM, _COPIED = Mutate("random"), Mutate("copy", source="other")

PRESETS: dict[str, Preset] = {
    "he2023.input": _he(_ONE, _ANY_BIT, "input", "one bit of an input operand"),
    "he2023.wt": _he(_ONE, _ANY_BIT, "weight", "one bit of a weight operand"),
    "he2023.rbflip": _he(_ONE, _ANY_BIT, "", "one bit of an output"),
    "he2023.rd": _he(_ONE, _RANDOM, "", "an output is any finite value"),
    "he2023.zero": _he(_ONE, Mutate("zero"), "", "an output is 0"),
    "he2023.rd_correct": _he(_ONE, _COPIED, "", "an output is one from elsewhere"),
    "he2023.n16_rd": _he(_neighbours(16), _RANDOM, "", "16 aligned outputs are any finite values"),
    "he2023.n16_rd_correct": _he(_neighbours(16), _COPIED, "", "16 aligned outputs are others from elsewhere"),
    "he2023.n64_input": _he(_neighbours(64), _COPIED, "input", "64 aligned input operands are others from elsewhere"),
    "he2023.n64_wt": _he(_neighbours(64), _COPIED, "weight", "64 aligned weight operands are others from elsewhere"),
    "he2023.n16_rd_glb": _he(
        _groups(16), _RANDOM, "", "groups of 16 from a drawn one to a drawn one, any finite values"
    ),
    "he2023.n16_rd_correct_glb": _he(_groups(16), _COPIED, "", "groups of 16, others from elsewhere"),
    "he2023.n64_input_glb": _he(_groups(64), _COPIED, "input", "groups of 64 input operands, others from elsewhere"),
    "he2023.n64_wt_glb": _he(_groups(64), _COPIED, "weight", "groups of 64 weight operands, others from elsewhere"),
    "prism.tensor_core": _prism(
        Select("tile", count=3, columns=3), _ANY_BIT, "a patch of 3 x 3 outputs shares one flipped bit"
    ),
    "prism.fma": _prism(
        _ONE,
        Mutate("scale", value=65536.0),
        "sporadic large outliers; how large is our choice, one that float16 can overflow by",
    ),
    "prism.cache_line": _prism(Select("row"), _ANY_BIT, "a whole row; that it shares one flipped bit is our choice"),
    "anatomy": _anatomy(
        _ONE, "zero, flips falling from the least significant bit, NaN and infinity, in the published shares"
    ),
    **{
        f"anatomy.stride{stride}": _anatomy(
            Select("run", count=8, stride=stride), f"addresses {stride} apart; that they are 8 is our choice"
        )
        for stride in (2, 4, 8, 16)
    },
    "anatomy.control": _anatomy(
        Select("tile", count=16, columns=16, low=0.2, high=0.75),
        "faults of control logic, in 20 to 75 % of an output tile; its size is our choice",
    ),
    "aegis-eu": Preset(
        Select("grid", count=4, rows=8, columns=32),
        _RANDOM,
        "AEGIS, OSDI 2026: 4 consecutive wrong elements, periodic on both axes, permanent; both periods are our choice",
        Persist("permanent"),
        ("fwd_out",),
        ("grad_in", "grad_w"),
    ),
    "hbm-1bit": Preset(
        _ONE, _ANY_BIT, "SDCHunter, OSDI 2026: one bit of memory flips without a notice from ECC", memory=("param",)
    ),
    "aws.activation-10000": Preset(
        _ONE,
        Mutate("scale", value=10000.0),
        "AWS three-check method, 2026: one activation times 10,000, which no threshold on gradient norms tells from data",
        forward=("fwd_out",),
    ),
}

NAMES: tuple[str, ...] = tuple(PRESETS)


def get(name: str) -> Preset:
    """The preset of this name.

    Raises:
        ConfigurationError: there is none.
    """
    if name not in PRESETS:
        close = difflib.get_close_matches(name.lower(), NAMES, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(NAMES)}"
        raise ConfigurationError(f"there is no preset {name!r}: {hint}")
    return PRESETS[name]


def expand(
    name: str,
    *,
    rank: int | None,
    step: int,
    seed: int,
    module: str = "*",
    phase: Phase | Target | None = None,
    rate: float | None = None,
) -> Fault:
    """A published fault at a place and a time.

    Pure: the same arguments make the same fault.

    Args:
        name: of the preset.
        rank: on which rank; None: drawn when the fault is injected.
        step: strikes in this step; a preset with a rate, in its share of the steps from this one on.
        seed: draws the target among those of the phase.
        module: glob of modules; where a parameter is hit, of those whose parameters.
        phase: of the computation; or one target of the preset (or of memory, where the preset hits memory); None: any.
        rate: the share of steps, in place of the preset's own.

    Raises:
        ConfigurationError: there is no such preset, or it has nothing to hit in this phase, or no rate; or rank, step, module or
            rate are none that a fault can be written with.
    """
    preset = get(name)
    draw = Random(f"{name}/{seed}/{step}/{module}/{phase}")  # noqa: S311 - a campaign must draw the same again
    target = draw.choice(_targets(name, preset, phase))
    if rate is not None and preset.rate is None:
        raise ConfigurationError(f"preset {name} strikes in one step and has no rate")
    share = preset.rate if rate is None else rate
    if share is not None and not LEAST_CHANCE <= share <= 1.0:
        raise ConfigurationError(
            f"preset {name}: rate {share} is no share of steps above 0 (the least is {LEAST_CHANCE})"
        )
    if not 0 <= step <= MOST_STEPS:
        raise ConfigurationError(f"preset {name}: step {step} is none; steps are 0 to {MOST_STEPS}")
    if rank is not None and not 0 <= rank <= MOST_RANKS:
        raise ConfigurationError(f"preset {name}: rank {rank} is none; ranks are 0 to {MOST_RANKS}")
    if re.search(r"[\s@]", module):
        raise ConfigurationError(f"preset {name}: {module!r} is no glob of modules: it has a blank or '@' in it")
    glob = "" if module == "*" else module
    if target in PARAMETER_TARGETS and glob and not glob.endswith("*"):
        glob += ".*"
    when = When(first=step, last=step) if share is None else When(first=step, p=share)
    return Fault(Where(target, glob, rank), when, preset.select, preset.mutate, preset.persist, preset=name)


def _targets(name: str, preset: Preset, phase: Phase | Target | None) -> tuple[Target, ...]:
    match phase:
        case None:
            found = preset.targets
        case "forward":
            found = preset.forward
        case "backward":
            found = preset.backward
        case _:
            known = MEMORY_TARGETS if preset.memory else preset.targets
            found = tuple(target for target in known if target == phase)
    if not found:
        raise ConfigurationError(
            f"preset {name} has nothing to hit in phase {phase!r}: it hits {', '.join(preset.targets)}"
        )
    return found


def describe() -> list[Row]:
    """All presets as a table, in the order of `NAMES`."""
    return [Row(name, str(preset), preset.source, preset.targets) for name, preset in PRESETS.items()]
