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

from bitwitness.scan.groups.model import Fault, Rates, Record, bits, log_pass, mask

LINK = 0.03
"""How probable it is before any test that a failing group holds a bad link and not a bad node."""

_CELLS = 24
_FORGET = 1e-4
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

    def __init__(self, context: int, record: Record, rates: Rates) -> None:
        self.context = context
        self._rates = rates
        self._noise = [entropy(rate) for rate in rates.values]
        self.cells = _cells(context, record)
        self._single: list[list[float]] = []
        nodes = context.bit_count()
        for cell in self.cells:
            members = bits(cell)
            passed = sum(record.passes[node] for node in members) / len(members)
            self._single.append(
                [
                    (1 - LINK) * prior * rate * math.exp(max(-600.0, passed * log_pass(rate))) * len(members) / nodes
                    for rate, prior in zip(rates.values, rates.prior, strict=True)
                ]
            )
        self._pairs: dict[tuple[int, int], list[float]] = {}
        total = sum(map(sum, self._single))
        if nodes > 1:
            self._add_pairs(nodes, (LINK * total / (1 - LINK)) if total > 0 else 1.0)
        self._normalise()

    def _add_pairs(self, nodes: int, mass: float) -> None:
        sizes = [cell.bit_count() for cell in self.cells]
        count = nodes * (nodes - 1) / 2
        weight = sum(rate * prior for rate, prior in zip(self._rates.values, self._rates.prior, strict=True))
        for i, one in enumerate(sizes):
            for j in range(i, len(sizes)):
                share = (one * (one - 1) / 2 if i == j else one * sizes[j]) / count
                if share:
                    self._pairs[i, j] = [
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
            self._single.append([value * (1 - share) for value in self._single[i]])
            self._single[i] = [value * share for value in self._single[i]]
            self._split_pairs(i, j, a, b)

    def _split_pairs(self, i: int, j: int, a: int, b: int) -> None:
        links = (a + b) * (a + b - 1) / 2
        for (one, two), values in list(self._pairs.items()):
            if i not in (one, two):
                continue
            del self._pairs[one, two]
            if one == two:
                parts = {(i, i): a * (a - 1) / 2 / links, (i, j): a * b / links, (j, j): b * (b - 1) / 2 / links}
            else:
                other = two if one == i else one
                parts = {(min(i, other), max(i, other)): a / (a + b), (min(j, other), max(j, other)): b / (a + b)}
            for key, share in parts.items():
                if share:
                    self._pairs[key] = [value * share for value in values]

    def _shift(self, factors: list[float] | tuple[float, ...], inside: int) -> None:
        within = [cell & inside != 0 for cell in self.cells]
        for i, values in enumerate(self._single):
            if within[i]:
                self._single[i] = [value * factor for value, factor in zip(values, factors, strict=True)]
        for (i, j), values in self._pairs.items():
            if within[i] and within[j]:
                self._pairs[i, j] = [value * factor for value, factor in zip(values, factors, strict=True)]

    def _restrict(self, inside: int) -> None:
        keep = [i for i, cell in enumerate(self.cells) if cell & inside]
        place = {old: new for new, old in enumerate(keep)}
        self.cells = [self.cells[i] for i in keep]
        self._single = [self._single[i] for i in keep]
        self._pairs = {
            (place[i], place[j]): values for (i, j), values in self._pairs.items() if i in place and j in place
        }
        self.context = inside

    def _normalise(self) -> None:
        total = sum(map(sum, self._single)) + sum(map(sum, self._pairs.values()))
        if total <= 1e-300:  # what was seen is impossible with one fault: begin again with what the context says
            fresh = Search(self.context, Record(self.context.bit_length()), self._rates)
            self.cells, self._single, self._pairs = fresh.cells, fresh._single, fresh._pairs
            return
        self._single = [[value / total for value in values] for values in self._single]
        self._pairs = {key: [value / total for value in values] for key, values in self._pairs.items()}
        if self.link_mass() < _FORGET:
            self._pairs = {}

    def link_mass(self) -> float:
        """How probable it is that it is a link."""
        return sum(map(sum, self._pairs.values()))

    def _expected(self, values: list[float]) -> tuple[float, float]:
        fails = sum(value * rate for value, rate in zip(values, self._rates.values, strict=True))
        return fails, sum(value * noise for value, noise in zip(values, self._noise, strict=True))

    def choose(self) -> tuple[int, int]:
        """The group that tells most, and how often to test it before planning anew.

        The cells are taken in the order of their mass per node: a group that fails is then as small as it can be for what it
        told. One cell may be taken in part.
        """
        sizes = [cell.bit_count() for cell in self.cells]
        single = [self._expected(values) for values in self._single]
        pairs = {key: self._expected(values) for key, values in self._pairs.items()}
        touching: dict[int, list[tuple[int, tuple[float, float]]]] = defaultdict(list)
        weight = [sum(values) for values in self._single]
        for (i, j), value in pairs.items():
            mass = sum(self._pairs[i, j])
            weight[i] += mass
            if i != j:
                touching[i].append((j, value))
                touching[j].append((i, value))
                weight[j] += mass
        order = sorted(range(len(sizes)), key=lambda i: (-weight[i] / sizes[i], self.cells[i]))
        everything = self.context.bit_count()
        whole = everything == 2 and self.link_mass() > _TOGETHER
        taken: dict[int, float] = {}
        fails = noise = mass = 0.0
        best = (-1.0, 0, 0, 1.0)
        done = 0
        for place, i in enumerate(order):
            size = sizes[i]
            for count in sorted({max(1, min(size, round(size * share))) for share in (*_SHARES, 1.0)} | {1}):
                share = count / size
                own = pairs.get((i, i), (0.0, 0.0))
                both = share * (count - 1) / (size - 1) if size > 1 else 0.0
                f = fails + share * single[i][0] + both * own[0]
                h = noise + share * single[i][1] + both * own[1]
                for other, value in touching[i]:
                    f += share * taken.get(other, 0.0) * value[0]
                    h += share * taken.get(other, 0.0) * value[1]
                m = mass + share * weight[i]
                told = entropy(f) - h
                if (done + count < everything or whole) and told > best[0] * (1 + 1e-9):
                    best = (told, place, count, f / m if m > 0 else 1.0)
            taken[i] = 1.0
            fails, noise, mass = f, h, m
            done += size
        _, place, count, rate = best
        group = 0
        for i in order[:place]:
            group |= self.cells[i]
        group |= mask(bits(self.cells[order[place]])[:count])
        return group, max(1, int(_BATCH / max(rate, 1e-6)))

    def ready(self, least: int) -> Fault | None:
        """The fault that a proof should be tried of, if one is probable enough and the context small enough."""
        if self.context.bit_count() > 2 and least == 1:
            return None  # a smaller group can be tested
        best, mass = None, 0.0
        for cell, values in zip(self.cells, self._single, strict=True):
            if sum(values) > mass and cell.bit_count() == 1:
                best, mass = Fault(cell), sum(values)
        if best is not None and mass >= _SURE_NODE:
            return best
        for (i, j), values in self._pairs.items():
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
            return sum(self._single[places[0]]) / self.cells[places[0]].bit_count()
        sizes = [self.cells[i].bit_count() for i in places]
        links = sizes[0] * sizes[1] if len(places) == 2 else sizes[0] * (sizes[0] - 1) / 2
        return sum(self._pairs.get((places[0], places[-1]), ())) / links

    def likeliest(self) -> int:
        """One node of the cell with most mass per node."""
        best = max(range(len(self.cells)), key=lambda i: sum(self._single[i]) / self.cells[i].bit_count())
        return self.cells[best] & -self.cells[best]


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
