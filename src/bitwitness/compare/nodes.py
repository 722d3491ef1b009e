"""Fifteen invented bad nodes: what `bitwitness compare --study` plays, since nobody can be lent the real ones.

Where a node's rates were published they are planted as they stand, by submodule and direction. The others have the shapes that
the literature knows: near-silent, late, in spikes, strides, tiles, grids, rows, stuck bits. So a rate that is found again proves that
the measurement works; that nature has such rates is the study's finding and not ours. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bitwitness.compare.published import LATE, NODES, ONSET, Cell, Direction, Submodule

GLOBS: dict[Submodule, str] = {"attention": "blocks.*.attention", "ffn": "blocks.*.mlp"}
"""Names of the submodules in the workloads that ship."""

TARGETS: dict[Direction, str] = {"fwd": "fwd_out", "bwd": "grad_in"}
"""What a submodule gives: its output, and the gradient that it passes on."""

DESTROYER = 6
"""The node that destroys a fine-tuning, as theirs did."""


@dataclass(frozen=True, slots=True)
class Part:
    """One fault of a node, at every submodule of its cell.

    Attributes:
        cell: direction and submodule.
        select: which elements, in the grammar. becomes: what becomes of them.
        share: of all steps in which it strikes; below 1 errors come in spikes.
        start: the first step.
        persist: whether they are drawn anew, and on what it depends.
        rate: of an element in a step in which it strikes; None: it follows from `hit`, or cannot be said beforehand.
        hit: elements of a tensor that are hit when it strikes; None: see `rate`.
    """

    cell: Cell
    select: str
    becomes: str
    share: float = 1.0
    start: int = 0
    persist: str = "permanent redraw"
    rate: float | None = None
    hit: int | None = None

    def __str__(self) -> str:
        way, part = self.cell
        time = f"p={self.share!r}" if self.share < 1 else "every=1"
        time += f" from={self.start}" if self.start else ""
        return f"each {TARGETS[way]}:{GLOBS[part]} @ {time} : {self.select} -> {self.becomes} ; {self.persist}"

    def strikes(self, steps: int) -> float:
        """In how many of so many steps it is expected to strike, if something is in reach."""
        return self.share * max(0, steps - self.start)

    def planted(self, elements: int, steps: int) -> float | None:
        """The share of elements that it makes wrong over so many steps of one tensor of so many elements; None: cannot be said."""
        due = self.strikes(steps) / steps if steps else 0.0
        if self.rate is not None:
            return self.rate * due
        return None if self.hit is None or not elements else min(1.0, self.hit / elements) * due


@dataclass(frozen=True, slots=True)
class Node:
    """An invented node: number as in the study, what it is, and what is wrong with it."""

    number: int
    kind: str
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        """Of the participant."""
        return f"node-{self.number:02d}"

    def __str__(self) -> str:
        return " & ".join(map(str, self.parts))

    def planted(self, cell: Cell, elements: int, steps: int) -> float | None:
        """The share of wrong elements in a cell, see `Part.planted`; 0.0 where nothing is planted."""
        rates = [part.planted(elements, steps) for part in self.parts if part.cell == cell]
        return math.fsum(rate for rate in rates if rate is not None) if None not in rates else None

    def strikes(self, cell: Cell, steps: int) -> float:
        """In how many steps a fault of a cell is expected to strike."""
        return math.fsum(part.strikes(steps) for part in self.parts if part.cell == cell)


def _scattered(cell: Cell, rate: float, becomes: str, share: float = 1.0, start: int = 0) -> Part:
    """Elements anywhere, drawn anew each time; `rate` is the mean over all steps from `start` on, `share` of which are hit."""
    within = rate / share
    return Part(cell, f"rate={within!r}", becomes, share, start, rate=within)


def _as_published(number: int, becomes: str, share: float = 1.0) -> tuple[Part, ...]:
    return tuple(_scattered(cell, rate, becomes, share) for cell, rate in NODES[number].frequencies.items())


FWD_ATTENTION: Cell = ("fwd", "attention")
FWD_FFN: Cell = ("fwd", "ffn")
BWD_ATTENTION: Cell = ("bwd", "attention")
BWD_FFN: Cell = ("bwd", "ffn")

INVENTED: tuple[Node, ...] = (
    Node(1, "light, in spikes, at the published rates", _as_published(1, "scale=2.3", share=0.1)),
    Node(2, "near-silent: one element in 10^12", (_scattered(FWD_FFN, 1e-12, "copy=other"),)),
    Node(
        3,
        "near-silent: wrong only on operands larger than any here",
        (Part(FWD_ATTENTION, "all", "zero", persist="permanent if=1000000.0..inf", rate=0.0),),
    ),
    Node(
        4,
        "light, steady",
        (_scattered(FWD_ATTENTION, 2e-5, "scale=2.0"), _scattered(BWD_ATTENTION, 1e-4, "scale=2.0")),
    ),
    Node(
        5,
        "a bit that is stuck in three fixed places",
        (Part(FWD_FFN, "n=3", "stuck1=12", persist="permanent"),),
    ),
    Node(
        DESTROYER,
        "light, and NaN where operands are large",
        (
            _scattered(BWD_ATTENTION, 2e-5, "copy=other"),
            Part(FWD_FFN, "all", "nan", persist="permanent if=4.2..inf"),
        ),
    ),
    Node(
        7,
        "lanes: eight elements, four apart, one bit, in spikes",
        (Part(FWD_ATTENTION, "run=8,stride=4", "bit=18", 0.05, hit=8),),
    ),
    Node(
        8,
        "tiles: 3 x 3 elements share a flipped bit, in spikes",
        (Part(FWD_FFN, "tile=3x3", "bit=20", 0.05, hit=9), Part(BWD_FFN, "tile=3x3", "bit=20", 0.05, hit=9)),
    ),
    Node(
        9,
        "a grid: four consecutive elements, periodic on both axes, in spikes",
        (Part(BWD_ATTENTION, "grid=4,rows=8,columns=32", "copy=other", 0.02),),
    ),
    Node(10, "heavy, at the published rates", _as_published(10, "bit=18")),
    Node(11, "the worst case, at the published rates", _as_published(11, "bit=22")),
    Node(
        12,
        "backward only, in spikes",
        (_scattered(BWD_ATTENTION, 1e-4, "copy=other", 0.2), _scattered(BWD_FFN, 1e-5, "copy=other", 0.2)),
    ),
    Node(
        LATE,
        f"clean until step {ONSET}",
        (
            _scattered(FWD_ATTENTION, 1e-3, "copy=other", start=ONSET),
            _scattered(BWD_ATTENTION, 1e-3, "copy=other", start=ONSET),
        ),
    ),
    Node(
        14,
        "a cache line: a whole row shares a flipped bit, in spikes",
        (Part(FWD_FFN, "row", "bit=20", 0.03),),
    ),
    Node(
        15, "forward only: signs, light", (_scattered(FWD_ATTENTION, 1e-5, "sign"), _scattered(FWD_FFN, 1e-6, "sign"))
    ),
)
"""In the order of their numbers. Node 4's rates and all of those that the study's readers have not seen are our choice."""
