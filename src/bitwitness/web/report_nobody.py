"""What an unattributed incident rests on, told so that it points at nobody.

A table of who computed what points at the one whose value is the rarer, whatever is written above it, and a report is read by people
who were not there. So here values are counted: which there were, on how many ranks and how many nodes. Who had which is in
incident.json, for those who have the cluster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bitwitness.comparisons import Comparison, compared, runs
from bitwitness.evidence import NONFINITE
from bitwitness.store.pages import IncidentPage, Seen

_SHOWN = 24
_WHAT = {
    "local": "the local gradient, before the all-reduce",
    "reduced": "the reduced gradient, after the all-reduce",
    "state": "parameters and optimizer state",
}


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a comparison: its letter, and on how many ranks and nodes it came out."""

    letter: str
    value: str
    ranks: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Counted:
    """A comparison that did not agree.

    Attributes:
        number: by which the text speaks of it.
        title: what was compared.
        values: in the order of their digests, which says nothing of who is right.
        failed: ranks that had no value.
        restless: nodes on which the same work gave more than one value.
    """

    number: int
    title: str
    values: tuple[Value, ...]
    failed: int
    restless: int


@dataclass(frozen=True, slots=True)
class Tables:
    """The comparisons that did not agree, as far as they are shown; how many there are of both kinds."""

    differ: tuple[Counted, ...]
    differing: int
    agreeing: int


def tables(page: IncidentPage) -> Tables:
    """What was compared, counted."""
    every = compared(page.observations)
    differ = [one for one in every if not one.agrees]
    node_of = {place.rank: place.node for place in page.placement}
    shown = tuple(_counted(number, one, node_of) for number, one in enumerate(differ[:_SHOWN], 1))
    return Tables(shown, len(differ), len(every) - len(differ))


def _counted(number: int, one: Comparison[Seen], node_of: Mapping[int, str]) -> Counted:
    ranks: dict[str, set[int]] = defaultdict(set)
    for seen in one.seen:
        for value in runs(seen):
            ranks[value].add(seen.rank)
    values = tuple(
        Value(_letter(place), value, len(ranks[value]), len(_nodes(ranks[value], node_of)))
        for place, value in enumerate(sorted(ranks))
    )
    unsteady = {seen.rank for seen in one.seen if len(set(runs(seen))) > 1}
    failed = len({seen.rank for seen in one.seen if seen.error})
    return Counted(number, _title(one), values, failed, len(_nodes(unsteady, node_of)))


def _letter(place: int) -> str:
    return chr(ord("A") + place % 26) + (str(place // 26) if place >= 26 else "")


def _nodes(ranks: set[int], node_of: Mapping[int, str]) -> set[str]:
    return {node_of[rank] for rank in ranks if node_of.get(rank)}


def _title(one: Comparison[Seen]) -> str:
    if one.owner is None:
        what = _WHAT.get(one.place, "a value")
    else:
        what = "the rebuilt input of a micro-batch" if one.check == "input" else "the result of a micro-batch"
    return f"{what} ({one.check}, step {one.step})"


def why(page: IncidentPage) -> list[str]:
    """Why nobody is named, in steps."""
    if not page.observations:
        return ["The observations it was decided from are not on record."]
    return list(dict.fromkeys(_why(page, tables(page))))


def _why(page: IncidentPage, found: Tables) -> Iterator[str]:
    if not found.differ:
        yield "In the observations on record nothing differs."
    for one in found.differ[:3]:
        yield _spread(one)
    if found.differing > 3:
        yield f"{found.differing - 3} more comparisons did not agree either."
    yield from _obstacles(page, found.differ)
    involved = len(page.incident.candidates)
    took = f", and the {involved} rank{'s' * (involved > 1)} involved carr{'y' if involved > 1 else 'ies'} no blame"
    yield f"So nobody is named{took if involved else ''}."


def _spread(one: Counted) -> str:
    failed = f" {_ranks(one.failed)} could not compute it." if one.failed else ""
    if not one.values:
        return f"Comparison {one.number}, {one.title}: no value at all.{failed}"
    each = "; ".join(f"{value.letter} on {_ranks(value.ranks)} of {_of_nodes(value.nodes)}" for value in one.values[:4])
    more = f"; and {len(one.values) - 4} more" if len(one.values) > 4 else ""
    many = f"{len(one.values)} different values" if len(one.values) > 1 else "one value"
    return f"Comparison {one.number}, {one.title}, has {many}: {each}{more}.{failed}"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _of_nodes(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}" if count else "nodes that are not on record"


def _obstacles(page: IncidentPage, differ: Sequence[Counted]) -> Iterator[str]:
    """What kept the rules from naming anybody."""
    restless = max((one.restless for one in differ), default=0)
    if restless > 1:
        yield (
            f"The same work gave more than one value on {restless} nodes. What does not repeat on several nodes is software or data, "
            "not a device."
        )
    if 0 < page.nodes < 3:
        yield f"The job had {_of_nodes(page.nodes)}. To name a rank, two other nodes must agree against it: three are needed."
    for one in differ:
        if [value.value for value in one.values] == [NONFINITE]:
            yield "A result holds NaN or Inf wherever it was run: that points to the data or the software."
        elif page.nodes >= 3 and len(one.values) > 1:
            backed = sum(value.nodes >= 2 and value.value != NONFINITE for value in one.values)
            if backed == 0:
                yield f"In comparison {one.number} no two nodes agree, so there is no value to measure the others by."
            elif backed > 1:
                yield f"In comparison {one.number} {backed} values have two nodes behind them each: neither makes the other wrong."
    if page.incident.window[0] < 0:
        yield f"The check {page.incident.check} had not passed before in this run; a first disagreement can be configuration."
