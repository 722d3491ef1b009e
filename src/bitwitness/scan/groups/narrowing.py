"""Who of a group that failed: the suspects of one failure, and the next group that tells most about them.

A group that failed holds a fault, unless the workload fails by itself, which `weighing` sees to. So a search stays inside
the group, its *context*, and each further failure makes the context smaller. Nodes with the same record are one *cell*:
what is known is one probability per cell (or two cells, for a link) and rate. The next group is the one whose outcome tells
most by this, in bits: halves where a fault shows each time, about 1/e of the mass where it shows rarely, which is what the
channel's capacity asks for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bitwitness.scan.groups.model import Fault, Rates, Record, bits, log_pass, mask

LINK = 0.03
"""How probable it is before any test that a failing group holds a bad link and not a bad node."""

WORTH = 0.8
"""So much of what the best test tells, another must tell to be made at the same time."""

_CELLS = 24
_FEW = 8
_FORGET = 1e-4
_CLEARED = 1e-9  # the mass that is left to a node that was cleared
_SURE_NODE = 0.95
_SURE_LINK = 0.9
_SHARES = (0.25, 1 / math.e, 0.5, 0.75)
_BATCH = 0.25
_COMPANY = 0.01  # so probable, beside one suspect, is a fault of who was taken along
_TOGETHER = 0.2  # so probable must a link be before both ends are tested together again


def entropy(chance: float) -> float:
    """Bits of an event of this probability."""
    if chance <= 0.0 or chance >= 1.0:
        return 0.0
    return -(chance * math.log2(chance) + (1 - chance) * math.log2(1 - chance))


class Search:
    """The search for a fault inside one group that failed."""

    def __init__(self, context: int, record: Record, rates: Rates, cleared: int = 0) -> None:
        """`cleared`: nodes that are not bad by themselves, whatever else they are in."""
        self.context = context
        self._cleared = cleared
        self._rates = rates
        self._noise = [entropy(rate) for rate in rates.values]
        cells = [1 << node for node in bits(context)] if _few(context) else _cells(context, record)
        self.cells = [part for cell in cells for part in (cell & ~cleared, cell & cleared) if part]
        self.single: list[list[float]] = []
        nodes = context.bit_count()
        for cell in self.cells:
            members = bits(cell)
            passed = sum(record.passes[node] for node in members) / len(members)
            share = len(members) / nodes * (_CLEARED if cell & cleared else 1.0)
            self.single.append(
                [
                    (1 - LINK) * prior * rate * math.exp(max(-600.0, passed * log_pass(rate))) * share
                    for rate, prior in zip(rates.values, rates.prior, strict=True)
                ]
            )
        self.pairs: dict[tuple[int, int], list[float]] = {}
        total = sum(map(sum, self.single))
        if _few(context):
            self._add_each_pair(record)
        elif nodes > 1:
            self._add_pairs(nodes, (LINK * total / (1 - LINK)) if total > 0 else 1.0)
        self._normalise()

    def _add_each_pair(self, record: Record) -> None:
        """Each link among a few nodes, by the tests that passed with both ends: one that passed with neither says nothing about it."""
        count = len(self.cells) * (len(self.cells) - 1) / 2
        for i, one in enumerate(self.cells):
            for j in range(i + 1, len(self.cells)):
                both = one | self.cells[j]
                passed = sum(right for group, (right, _) in record.groups.items() if right and group & both == both)
                self.pairs[i, j] = [
                    LINK * prior * rate * math.exp(max(-600.0, passed * log_pass(rate))) / count
                    for rate, prior in zip(self._rates.values, self._rates.prior, strict=True)
                ]

    def _add_pairs(self, nodes: int, mass: float) -> None:
        sizes = [cell.bit_count() for cell in self.cells]
        count = nodes * (nodes - 1) / 2
        weight = sum(rate * prior for rate, prior in zip(self._rates.values, self._rates.prior, strict=True))
        for i, one in enumerate(sizes):
            for j in range(i, len(sizes)):
                share = (one * (one - 1) / 2 if i == j else one * sizes[j]) / count
                if share:
                    self.pairs[i, j] = [
                        mass * share * rate * prior / weight
                        for rate, prior in zip(self._rates.values, self._rates.prior, strict=True)
                    ]

    def told(self, group: int, passed: int, failed: bool, *, trusted: bool = False) -> None:
        """A test of any group: so often passed, and then perhaps failed.

        `trusted`: who of the group is outside of the context was only taken along, because groups must not be smaller.
        """
        inside = group & self.context
        if not inside:
            return
        self._split(inside)
        if passed:
            self._shift([(1 - min(rate, 1.0)) ** passed for rate in self._rates.values], inside)
        if failed:
            if group & ~self.context:
                # It may be another fault: less is learned.
                others = _COMPANY if trusted else 1.0
                self._shift([1 + rate / others for rate in self._rates.values], inside)
            else:
                self._restrict(inside)
                self._shift(self._rates.values, inside)
        self._normalise()

    def _split(self, inside: int) -> None:
        for i, cell in enumerate(list(self.cells)):
            part = cell & inside
            if part in (0, cell):
                continue
            rest, j = cell ^ part, len(self.cells)
            a, b = part.bit_count(), rest.bit_count()
            self.cells[i] = part
            self.cells.append(rest)
            share = a / (a + b)
            self.single.append([value * (1 - share) for value in self.single[i]])
            self.single[i] = [value * share for value in self.single[i]]
            self._split_pairs(i, j, a, b)

    def _split_pairs(self, i: int, j: int, a: int, b: int) -> None:
        links = (a + b) * (a + b - 1) / 2
        for (one, two), values in list(self.pairs.items()):
            if i not in (one, two):
                continue
            del self.pairs[one, two]
            if one == two:
                parts = {(i, i): a * (a - 1) / 2 / links, (i, j): a * b / links, (j, j): b * (b - 1) / 2 / links}
            else:
                other = two if one == i else one
                parts = {(min(i, other), max(i, other)): a / (a + b), (min(j, other), max(j, other)): b / (a + b)}
            for key, share in parts.items():
                if share:
                    self.pairs[key] = [value * share for value in values]

    def _shift(self, factors: list[float] | tuple[float, ...], inside: int) -> None:
        within = [cell & inside != 0 for cell in self.cells]
        for i, values in enumerate(self.single):
            if within[i]:
                self.single[i] = [value * factor for value, factor in zip(values, factors, strict=True)]
        for (i, j), values in self.pairs.items():
            if within[i] and within[j]:
                self.pairs[i, j] = [value * factor for value, factor in zip(values, factors, strict=True)]

    def _restrict(self, inside: int) -> None:
        keep = [i for i, cell in enumerate(self.cells) if cell & inside]
        place = {old: new for new, old in enumerate(keep)}
        self.cells = [self.cells[i] for i in keep]
        self.single = [self.single[i] for i in keep]
        self.pairs = {
            (place[i], place[j]): values for (i, j), values in self.pairs.items() if i in place and j in place
        }
        self.context = inside

    def _normalise(self) -> None:
        total = sum(map(sum, self.single)) + sum(map(sum, self.pairs.values()))
        if total <= 1e-300:  # what was seen is impossible with one fault: begin again with what the context says
            fresh = Search(self.context, Record(self.context.bit_length()), self._rates, self._cleared)
            self.cells, self.single, self.pairs = fresh.cells, fresh.single, fresh.pairs
            return
        self.single = [[value / total for value in values] for values in self.single]
        self.pairs = {key: [value / total for value in values] for key, values in self.pairs.items()}
        if self.link_mass() < _FORGET:
            self.pairs = {}

    def link_mass(self) -> float:
        """How probable it is that it is a link."""
        return sum(map(sum, self.pairs.values()))

    def expected(self, values: list[float]) -> tuple[float, float]:
        """How probable it is that a group with faults of these masses fails, and the entropy that is left if one knew which."""
        fails = sum(value * rate for value, rate in zip(values, self._rates.values, strict=True))
        return fails, sum(value * noise for value, noise in zip(values, self._noise, strict=True))

    def choose(self, spare: float = 0.0) -> list[tuple[int, int]]:
        """The group that tells most, and how often to test it before planning anew; and one beside it, if it is worth it.

        The cells are taken in the order of their mass per node: a group that fails is then as small as it can be for what it
        told. One cell may be taken in part. The second group is of the nodes that are left, and worth it if it tells about as much
        more as the first one told; or, for `spare` of the evidence that is needed anyway, as its control.
        """
        weights = _Weights(self)
        everything = self.context.bit_count()
        whole = everything == 2 and self.link_mass() > _TOGETHER
        first = weights.best(weights.parts(self.context), everything if whole else everything - 1, _told)
        groups = [first]
        left = self.context & ~first.nodes
        if left:

            def told_more(fails: float, noise: float) -> float:
                neither = max(0.0, 1 - first.fails - fails)
                three = sum(-p * math.log2(p) for p in (first.fails, fails, neither) if p > 0)
                return three - noise - entropy(first.fails)

            second = weights.best(weights.parts(left), left.bit_count(), told_more)
            if second.told >= WORTH * first.told:
                groups.append(second)
            elif spare >= 1.0 and first.repeats == 1:
                groups.append(_Chosen(left))
        return [(group.nodes, group.repeats) for group in groups]

    def ready(self, least: int) -> Fault | None:
        """The fault that a proof should be tried of, if one is probable enough and the context small enough."""
        if self.context.bit_count() > 2 and least == 1:
            return None  # a smaller group can be tested
        best, mass = None, 0.0
        for cell, values in zip(self.cells, self.single, strict=True):
            if sum(values) > mass and cell.bit_count() == 1:
                best, mass = Fault(cell), sum(values)
        if best is not None and mass >= _SURE_NODE:
            return best
        for (i, j), values in self.pairs.items():
            nodes = self.cells[i] | self.cells[j]
            if nodes.bit_count() == 2 and sum(values) >= _SURE_LINK:
                return Fault(nodes)
        return None

    def mass(self, fault: Fault) -> float:
        """How probable it is that it is this fault."""
        places = [i for i, cell in enumerate(self.cells) if cell & fault.nodes]
        if self.context & fault.nodes != fault.nodes:
            return 0.0
        if not fault.pair:
            return sum(self.single[places[0]]) / self.cells[places[0]].bit_count()
        sizes = [self.cells[i].bit_count() for i in places]
        links = sizes[0] * sizes[1] if len(places) == 2 else sizes[0] * (sizes[0] - 1) / 2
        return sum(self.pairs.get((places[0], places[-1]), ())) / links

    def likeliest(self) -> int:
        """One node of the cell with most mass per node."""
        best = max(range(len(self.cells)), key=lambda i: sum(self.single[i]) / self.cells[i].bit_count())
        return self.cells[best] & -self.cells[best]


def _few(context: int) -> bool:
    """Whether each node and link of a context can be looked at by itself."""
    return 1 < context.bit_count() <= _FEW


def _told(fails: float, noise: float) -> float:
    return entropy(fails) - noise


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A group, what it tells in bits, and how probable it is that it fails."""

    nodes: int
    told: float = 0.0
    fails: float = 0.0
    repeats: int = 1


class _Weights:
    """What each cell of a search adds to the probability that a group fails, and to its noise."""

    def __init__(self, search: Search) -> None:
        self._cells = search.cells
        self._sizes = [cell.bit_count() for cell in search.cells]
        self._single = [search.expected(values) for values in search.single]
        self._pairs = {key: search.expected(values) for key, values in search.pairs.items()}
        self._touching: dict[int, list[tuple[int, tuple[float, float]]]] = defaultdict(list)
        self._mass = [sum(values) for values in search.single]
        for (i, j), value in self._pairs.items():
            mass = sum(search.pairs[i, j])
            self._mass[i] += mass
            if i != j:
                self._touching[i].append((j, value))
                self._touching[j].append((i, value))
                self._mass[j] += mass

    def parts(self, nodes: int) -> list[tuple[int, int]]:
        """What these nodes hold of each cell, those with most mass per node first."""
        order = sorted(range(len(self._sizes)), key=lambda i: (-self._mass[i] / self._sizes[i], self._cells[i]))
        return [(i, self._cells[i] & nodes) for i in order if self._cells[i] & nodes]

    def best(self, parts: Sequence[tuple[int, int]], most: int, told: Callable[[float, float], float]) -> _Chosen:
        """The first so many nodes that tell most."""
        taken: dict[int, float] = {}
        fails = noise = mass = 0.0
        best, cut = _Chosen(0, -1.0), (0, 1)
        done = 0
        for place, (i, part) in enumerate(parts):
            size = part.bit_count()
            for count in sorted({max(1, min(size, round(size * share))) for share in (*_SHARES, 1.0)} | {1}):
                f, h = self._with(i, count, taken)
                f, h, m = fails + f, noise + h, mass + self._mass[i] * count / self._sizes[i]
                value = told(f, h)
                if done + count <= most and value > best.told * (1 + 1e-9):
                    rate = f / m if m > 0 else 1.0
                    best, cut = _Chosen(0, value, f, max(1, int(_BATCH / max(rate, 1e-6)))), (place, count)
            taken[i] = size / self._sizes[i]
            fails, noise, mass = f, h, m
            done += size
        place, count = cut
        nodes = mask(bits(parts[place][1])[:count])
        for _, part in parts[:place]:
            nodes |= part
        return replace(best, nodes=nodes)

    def _with(self, i: int, count: int, taken: Mapping[int, float]) -> tuple[float, float]:
        """What so many nodes of a cell add, beside those taken."""
        size = self._sizes[i]
        share = count / size
        both = share * (count - 1) / (size - 1) if size > 1 else 0.0
        own = self._pairs.get((i, i), (0.0, 0.0))
        fails = share * self._single[i][0] + both * own[0]
        noise = share * self._single[i][1] + both * own[1]
        for other, value in self._touching[i]:
            beside = share * taken.get(other, 0.0)
            fails, noise = fails + beside * value[0], noise + beside * value[1]
        return fails, noise


def _cells(context: int, record: Record) -> list[int]:
    """Nodes that were in about as many passed tests are one cell."""
    by_passes: dict[int, int] = defaultdict(int)
    for node in bits(context):
        by_passes[record.passes[node]] |= 1 << node
    if len(by_passes) <= _CELLS:
        return [by_passes[count] for count in sorted(by_passes)]
    width = max(by_passes) / (_CELLS - 1)
    wide: dict[int, int] = defaultdict(int)
    for count, nodes in by_passes.items():
        wide[math.ceil(count / width)] |= nodes
    return [wide[key] for key in sorted(wide)]
