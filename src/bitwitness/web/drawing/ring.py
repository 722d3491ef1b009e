"""The ring of witnesses: ranks on a circle, grouped by node, and a chord from each owner to each witness of its work.

A chord that agrees is thin; one that does not is bold and has a cross, so that it shows without colour. Who is named by the verdict is
filled, a candidate only outlined. Of a large job the ranks that the matter is about are drawn, and the others are counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bitwitness.comparisons import Comparison, compared, runs
from bitwitness.evidence import NONFINITE
from bitwitness.store.pages import IncidentPage, Seen

SIZE = 400.0
"""Of the square that it is drawn in."""
_RADIUS = 150.0
_MOST = 48
_CHORDS = 160
_ASIDE = 9.0
"""How far a chord bends to its own side, so that the two between a pair of ranks do not lie on each other."""

Role = Literal["named", "candidate", "other"]
Outcome = Literal["agrees", "differs", "unknown"]


@dataclass(frozen=True, slots=True)
class Point:
    """A rank on the circle."""

    rank: int
    x: float
    y: float
    size: float
    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one node: an arc outside of them, and where its name stands."""

    node: str
    path: str
    x: float
    y: float
    anchor: str
    named: bool


@dataclass(frozen=True, slots=True)
class Chord:
    """From an owner to a witness; the cross stands at `x`, `y`."""

    owner: int
    witness: int
    path: str
    outcome: Outcome
    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Ring:
    """All of it; `hidden` ranks of the job are not drawn, nor `more` chords, all of which agree."""

    points: tuple[Point, ...]
    groups: tuple[Group, ...]
    chords: tuple[Chord, ...]
    hidden: int
    more: int
    differing: int


def ring(page: IncidentPage) -> Ring:
    """The ring of an incident."""
    pairs = list(_pairs(compared(page.observations)))
    ranks = _drawn(page, pairs)
    node_of = {place.rank: place.node for place in page.placement}
    first_of: dict[str, int] = {}
    for rank, node in sorted(node_of.items()):
        first_of.setdefault(node, rank)
    order = sorted(ranks, key=lambda rank: (first_of.get(node_of.get(rank, ""), rank), rank))
    where, groups = _around(order, node_of, set(page.incident.nodes))
    size = min(9.0, max(5.0, 2.6 * _RADIUS / max(len(order), 1)))
    points = tuple(_point(rank, where[rank], size, page, node_of) for rank in order)
    drawn = [pair for pair in pairs if pair[0] in where and pair[1] in where]
    drawn.sort(key=lambda pair: pair[2] == "agrees")
    chords = tuple(_chord(where, *pair) for pair in drawn[:_CHORDS])
    # What disagrees is drawn last, over what agrees.
    ordered = tuple(sorted(chords, key=lambda chord: chord.outcome == "differs"))
    differing = sum(outcome == "differs" for _, _, outcome in pairs)
    return Ring(
        points, groups, ordered, max(0, page.world_size - len(order)), max(0, len(pairs) - len(chords)), differing
    )


def _pairs(every: Sequence[Comparison[Seen]]) -> Iterator[tuple[int, int, Outcome]]:
    """Each owner with each of its witnesses, and whether they agree; a pair once, at its worst."""
    found: dict[tuple[int, int], Outcome] = {}
    for one in every:
        for owner, witness, outcome in _of_case(one) if one.owner is not None else _of_place(one):
            held = found.get((owner, witness), "agrees")
            found[owner, witness] = max(held, outcome, key=("agrees", "unknown", "differs").index)
    yield from ((owner, witness, outcome) for (owner, witness), outcome in found.items())


def _of_case(one: Comparison[Seen]) -> Iterator[tuple[int, int, Outcome]]:
    mine = {run for seen in one.seen if seen.rank == one.owner for run in runs(seen)}
    for seen in one.seen:
        if seen.rank != one.owner and one.owner is not None:
            theirs = set(runs(seen))
            outcome: Outcome = "unknown"
            if mine and theirs and not seen.error:
                outcome = "agrees" if mine == theirs and len(mine) == 1 and NONFINITE not in mine else "differs"
            yield one.owner, seen.rank, outcome


def _of_place(one: Comparison[Seen]) -> Iterator[tuple[int, int, Outcome]]:
    """Nobody owns what each rank held of its own: one rank stands for each value, and those of different values differ."""
    stands: dict[str, int] = {}
    for seen in one.seen:
        for value in runs(seen):
            stands.setdefault(value, seen.rank)
    first, *others = stands.values() or [None]
    for other in others:
        if first is not None and other is not None and first != other:
            yield first, other, "differs"


def _drawn(page: IncidentPage, pairs: Sequence[tuple[int, int, Outcome]]) -> list[int]:
    """The ranks to be drawn, those that the matter is about first."""
    differ = [rank for owner, witness, outcome in pairs if outcome != "agrees" for rank in (owner, witness)]
    rest = [rank for owner, witness, _ in pairs for rank in (owner, witness)]
    placed = [place.rank for place in page.placement]
    ordered = dict.fromkeys([*page.incident.ranks, *differ, *page.incident.candidates, *rest, *placed])
    return list(ordered)[:_MOST]


def _around(
    order: Sequence[int], node_of: Mapping[int, str], named: set[str]
) -> tuple[dict[int, tuple[float, float]], tuple[Group, ...]]:
    """Where each rank is, and the arcs of the nodes; between nodes there is a gap of one rank."""
    parts: list[tuple[str, list[int]]] = []
    for rank in order:
        node = node_of.get(rank, "")
        if parts and node and parts[-1][0] == node:
            parts[-1][1].append(rank)
        else:
            parts.append((node, [rank]))
    slots = max(len(order) + len(parts), 1)
    turn, place = 2 * math.pi / slots, 0.0
    where: dict[int, tuple[float, float]] = {}
    groups = []
    for node, ranks in parts:
        begin = place
        for rank in ranks:
            where[rank] = _on(_RADIUS, place * turn)
            place += 1
        groups.append(_group(node, begin * turn, (place - 1) * turn, min(turn / 3, 0.12), node in named))
        place += 1
    return where, tuple(groups)


def _on(radius: float, angle: float) -> tuple[float, float]:
    """A place on a circle; the angle is measured from the top, clockwise."""
    return round(SIZE / 2 + radius * math.sin(angle), 2), round(SIZE / 2 - radius * math.cos(angle), 2)


def _group(node: str, begin: float, end: float, over: float, named: bool) -> Group:
    radius = _RADIUS + 19
    (x1, y1), (x2, y2) = _on(radius, begin - over), _on(radius, end + over)
    large = int(end - begin + 2 * over > math.pi)
    middle = (begin + end) / 2
    x, y = _on(radius + 9, middle)
    side = math.sin(middle)
    anchor = "middle" if abs(side) < 0.3 else "start" if side > 0 else "end"
    return Group(
        node,
        f"M{x1} {y1}A{radius:g} {radius:g} 0 {large} 1 {x2} {y2}",
        x,
        round(y + 3.5 - 5 * math.cos(middle), 2),
        anchor,
        named,
    )


def _point(rank: int, at: tuple[float, float], size: float, page: IncidentPage, node_of: Mapping[int, str]) -> Point:
    role: Role = (
        "named" if rank in page.incident.ranks else "candidate" if rank in page.incident.candidates else "other"
    )
    said = {"named": "named by the verdict", "candidate": "involved, no blame", "other": "not involved"}[role]
    return Point(rank, *at, round(size, 2), role, f"rank {rank} on {node_of.get(rank) or 'an unknown node'}: {said}")


def _chord(where: Mapping[int, tuple[float, float]], owner: int, witness: int, outcome: Outcome) -> Chord:
    (x1, y1), (x2, y2) = where[owner], where[witness]
    middle = SIZE / 2
    long = math.hypot(x2 - x1, y2 - y1) or 1.0
    # Towards the centre, and to the right of the way from owner to witness.
    bend_x = (x1 + x2) / 2 + (middle - (x1 + x2) / 2) * 0.35 - (y2 - y1) / long * _ASIDE
    bend_y = (y1 + y2) / 2 + (middle - (y1 + y2) / 2) * 0.35 + (x2 - x1) / long * _ASIDE
    x, y = (x1 + 2 * bend_x + x2) / 4, (y1 + 2 * bend_y + y2) / 4
    words = {"agrees": "agree", "differs": "do not agree", "unknown": "could not be compared"}[outcome]
    path = f"M{x1} {y1}Q{bend_x:.2f} {bend_y:.2f} {x2} {y2}"
    return Chord(
        owner, witness, path, outcome, round(x, 2), round(y, 2), f"work of rank {owner}, witness {witness}: {words}"
    )
