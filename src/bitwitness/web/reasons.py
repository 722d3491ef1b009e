"""What disagreed with what, and why this rank or why nobody: sentences that say no more than the evidence carries.

A verdict's own reason is one long sentence. Whoever has to defend the removal of a node, or to explain why none was removed, needs it
in steps, each of which can be looked up in the observations: which value, from whom, how often, on which other nodes. The rules are
those of DESIGN section 3 ("Attribution"). Nothing is decided here: where the observations do not show what the verdict says, e.g.
because they were pruned, that is said instead.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bitwitness.advice import Advice, Matter, advise
from bitwitness.advice import listed as advice_listed
from bitwitness.comparisons import Comparison, about, compared, differences, runs, tensors
from bitwitness.evidence import NONFINITE
from bitwitness.fleet.notify import answer_commands
from bitwitness.store.pages import IncidentPage, ProposalRow, RunRow, Seen
from bitwitness.topology import Placement

_DIGITS = 10
_CASES = 3
_ROWS = 24
_DIFFERING, _AGREEING = 12, 24
_PLACES = {
    "local": "local gradient, before the all-reduce",
    "reduced": "reduced gradient, after the all-reduce",
    "state": "parameters and optimizer state",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of what was compared.

    Attributes:
        role, rank, node, value, repeats, about: who did what, where, and what came out.
        named: whether the verdict names it.
        letters: of its values, those that it got in this table: who has the same letter got the same; "" for none.
        differs: of a rank that is named, True where it is not like the reference; False for a rank that is; None where nothing may be
            said: of every other rank, and of every rank of an unattributed incident, in which no value is right or wrong.
    """

    role: str
    rank: int
    node: str
    value: str
    repeats: str
    about: str
    named: bool
    letters: str
    differs: bool | None


@dataclass(frozen=True, slots=True)
class Compared:
    """What was compared, as a table: its title, the lines that are shown, how many are not and what they hold, and what else is to be said."""

    title: str
    agrees: bool
    rows: tuple[Row, ...]
    hidden: int
    left_out: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tables:
    """What did not agree, and what did: the first of each, and how many there are."""

    differ: tuple[Compared, ...]
    same: tuple[Compared, ...]
    differing: int
    agreeing: int


def listed(items: Sequence[object], noun: str = "", most: int = 8) -> str:
    """`rank 3`, `ranks 3, 4 and 5`: the filter of that name."""
    return advice_listed(noun, items, most)


def short(value: str) -> str:
    """As much of a digest as a person compares by eye."""
    if value == NONFINITE:
        return "NaN or Inf"
    return value if len(value) <= _DIGITS else f"{value[:_DIGITS]}…"


# What was compared ----------------------------------------------------------------------------------------------------


def tables(page: IncidentPage) -> Tables:
    """What was compared with what, those that are shown."""
    nodes, every = _Nodes(page), compared(page.observations)
    named = set(page.incident.ranks) if page.incident.status == "attributed" else set()
    shaky = _shaky(every)
    differ, same = ([one for one in every if one.agrees == agrees] for agrees in (False, True))
    return Tables(
        tuple(_table(one, named, shaky, nodes) for one in differ[:_DIFFERING]),
        tuple(_table(one, named, shaky, nodes) for one in same[:_AGREEING]),
        len(differ),
        len(same),
    )


def _table(one: Comparison[Seen], named: set[int], shaky: set[int], nodes: _Nodes) -> Compared:
    against = (_against(rank, one, shaky, nodes) for rank in sorted(named))
    reference = next((found[0] for found in against if found is not None), None)
    letters = {value: _letter(place) for place, value in enumerate(one.values)}
    rows = [_row(seen, one, reference, named, letters, nodes) for seen in one.seen]
    shown = sorted(_chosen(rows), key=rows.index)
    hidden = [row.letters or "none" for row in rows if row not in shown]
    left_out = ", ".join(f"{hidden.count(each)} with {each}" for each in dict.fromkeys(hidden))
    return Compared(_title(one), one.agrees, tuple(shown), len(hidden), left_out, tuple(differences(one.seen)))


def _chosen(rows: Sequence[Row]) -> list[Row]:
    """Whom the verdict names, then some of each value in turn: to show only the rarer ones would point at somebody."""
    turns: dict[str, int] = defaultdict(int)
    order = []
    for row in rows:
        order.append((not row.named, turns[row.letters]))
        turns[row.letters] += 1
    return [rows[place] for place in sorted(range(len(rows)), key=order.__getitem__)[:_ROWS]]


def _letter(place: int) -> str:
    """A, B, ..., Z, A1, B1, ..."""
    return chr(ord("A") + place % 26) + (str(place // 26) if place >= 26 else "")


def _title(one: Comparison[Seen]) -> str:
    if one.owner is None:
        return f"{_PLACES.get(one.place, one.place)} ({one.check}, step {one.step})"
    return f"{'input' if one.check == 'input' else 'result'} of {_batch(one)} of rank {one.owner}"


def _batch(one: Comparison[Seen]) -> str:
    return "the micro-batches" if one.micro is None else f"micro-batch {one.micro}"


def _row(
    seen: Seen,
    one: Comparison[Seen],
    reference: str | None,
    named: set[int],
    letters: Mapping[str, str],
    nodes: _Nodes,
) -> Row:
    role = "held" if one.owner is None else "owner" if seen.place == "original" or seen.rank == one.owner else "witness"
    done, is_named = runs(seen), seen.rank in named
    like = None if reference is None or not done else set(done) == {reference}
    differs = False if like else True if is_named and like is not None else None
    # From what a rank is said to differ is a matter of who is right, so it is said of those who are named only.
    told = one.owner is None and (is_named or not tensors(seen.detail))
    said = seen.error or (about(seen.detail) if told else "")
    held = ", ".join(letters[value] for value in dict.fromkeys(done))
    return Row(role, seen.rank, nodes.of(seen.rank), seen.value, _repeats(seen), said, is_named, held, differs)


def _repeats(seen: Seen) -> str:
    if not seen.repeats:
        return "none"
    if set(seen.repeats) == {seen.value}:
        return f"{len(seen.repeats)} × the same"
    if len(set(seen.repeats)) == 1:
        return f"{len(seen.repeats)} × {short(seen.repeats[0]) or 'nothing'}"
    return ", ".join(short(value) or "nothing" for value in seen.repeats[:8])


class _Nodes:
    """Where ranks are; one whose place is not on record counts as no node at all."""

    def __init__(self, page: IncidentPage) -> None:
        self._of = {place.rank: place.node for place in page.placement}

    def of(self, rank: int) -> str:
        return self._of.get(rank, "")

    def said(self, rank: int, word: str = "rank") -> str:
        node = self.of(rank)
        return f"{word} {rank} on {node}" if node else f"{word} {rank} (its node is not on record)"

    def all_said(self, ranks: Iterable[int], word: str = "rank") -> str:
        """Several of them; `word` stands before the first alone, which a sentence may begin with."""
        return listed(
            [self.said(rank, word if place == 0 else "rank") for place, rank in enumerate(sorted(set(ranks)))], most=6
        )

    def among(self, ranks: Iterable[int]) -> set[str]:
        return {self.of(rank) for rank in ranks} - {""}


# Why -----------------------------------------------------------------------------------------------------------------


def why(page: IncidentPage) -> list[str]:
    """Why this rank, or why nobody, in steps."""
    if not page.observations:
        gone = "were removed by retention" if page.pruned else "are not on record"
        return [f"The observations it was decided from {gone}, so only the verdict's own words are left."]
    every, nodes = compared(page.observations), _Nodes(page)
    if page.incident.status != "attributed":
        return list(_why_nobody(page, every, nodes))
    told: list[str] = []
    for rank in page.incident.ranks[:_CASES]:
        told += _why_rank(rank, page, every, nodes)
    if len(page.incident.ranks) > _CASES:
        told.append(f"{len(page.incident.ranks) - _CASES} more ranks are named: see what disagreed with what.")
    agreed = [one for one in every if one.owner is not None and one.agrees]
    if agreed:
        told.append(
            f"On {len(agreed)} further micro-batch{'es' * (len(agreed) > 1)} of this step every run agreed bit for bit."
        )
    return told


def _why_rank(rank: int, page: IncidentPage, every: Sequence[Comparison[Seen]], nodes: _Nodes) -> Iterator[str]:
    shaky = _shaky(every)
    against = [(one, found) for one in every if (found := _against(rank, one, shaky, nodes)) is not None]
    if not against:
        yield (
            f"Rank {rank} is named by the verdict; the observations on record do not show by themselves which two other nodes "
            "spoke against it."
        )
        return
    one, (value, backers) = min(against, key=lambda pair: (pair[0].owner is None, pair[0].owner != rank))
    mine = next(seen for seen in one.seen if seen.rank == rank)
    what = _work(one, rank)
    wrong = next((run for run in runs(mine) if run != value), mine.value)
    yield f"{nodes.said(rank, 'Rank')} got {short(wrong)} for {what}."
    first, *rest = backers
    others = listed([nodes.said(first, "Rank"), *map(nodes.said, rest)], most=4)
    if one.owner is None:
        yield f"{others} hold {short(value)} for the same."
    else:
        times = 1 + min((len(seen.repeats) for seen in one.seen if seen.rank in backers), default=0)
        yield f"{others} did the same work and got {short(value)}, {times} times each, bit for bit."
    count = len(nodes.among(backers) - {nodes.of(rank)})
    yield (
        f"So {count} other nodes agree with each other and not with rank {rank}: two are needed to name a rank, and none of them is "
        "its own."
    )
    if one.owner is not None:
        yield _again(mine, value, page.incident.persistence)
    if len(against) > 1:
        yield f"The same shows in {len(against) - 1} more of the comparisons."


def _work(one: Comparison[Seen], rank: int) -> str:
    if one.owner is None:
        return f"its {_PLACES.get(one.place, one.place)}"
    whose = "its own " if one.owner == rank else ""
    of = "" if one.owner == rank else f" of rank {one.owner}, which it ran again as a witness"
    rebuilt = "the rebuilt input of " if one.check == "input" else ""
    return f"{rebuilt}{whose}{_batch(one) if not whose else _batch(one).removeprefix('the ')}{of}"


def _again(mine: Seen, value: str, persistence: str) -> str:
    wrong = sum(run != value for run in mine.repeats)
    if not mine.repeats:
        said = "It did not repeat this work, so whether it would be wrong again is not known."
    elif wrong:
        said = f"Asked to repeat it {len(mine.repeats)} times, it was wrong {wrong} times."
    else:
        said = f"Asked to repeat it {len(mine.repeats)} times, it was right every time: once wrong, then right."
    return f"{said} The verdict calls it {persistence}."


def _shaky(every: Sequence[Comparison[Seen]]) -> set[int]:
    """Ranks whose runs of one work were not all equal: they speak against nobody."""
    return {seen.rank for one in every for seen in one.seen if len(set(runs(seen))) > 1}


def _against(rank: int, one: Comparison[Seen], shaky: set[int], nodes: _Nodes) -> tuple[str, list[int]] | None:
    """The value that two other nodes agree on and this rank does not, and the ranks that have it; None where there is none."""
    mine = [seen for seen in one.seen if seen.rank == rank and runs(seen)]
    if not mine:
        return None
    by_value: dict[str, list[int]] = defaultdict(list)
    for seen in one.seen:
        done = runs(seen)
        steady = done and seen.rank not in shaky and (one.owner is None or len(done) > 1)
        if (
            steady
            and seen.rank != rank
            and not seen.error
            and done[0] != NONFINITE
            and nodes.of(seen.rank) != nodes.of(rank)
        ):
            by_value[done[0]].append(seen.rank)
    backed = {value: ranks for value, ranks in by_value.items() if len(nodes.among(ranks)) >= 2}
    if one.owner is None and backed:  # replicas: more than half of them
        most = max(backed, key=lambda value: len(backed[value]))
        backed = {most: backed[most]} if 2 * len(backed[most]) > len(one.seen) else {}
    if len(backed) != 1:
        return None
    (value, ranks), *_ = backed.items()
    return (value, sorted(ranks)) if set(runs(mine[0])) != {value} else None


def _why_nobody(page: IncidentPage, every: Sequence[Comparison[Seen]], nodes: _Nodes) -> Iterator[str]:
    differ = [one for one in every if not one.agrees]
    for one in differ[:_CASES]:
        yield _spread(one, nodes)
    if len(differ) > _CASES:
        yield f"{len(differ) - _CASES} more comparisons did not agree either."
    if not differ:
        yield "In the observations on record nothing differs; what was found is in the verdict's own words."
    yield from dict.fromkeys(_obstacles(page, differ, nodes))
    involved = page.incident.candidates
    yield "So nobody is named" + (
        f", and {listed(involved, 'rank', 12)} carr{'ies' if len(involved) == 1 else 'y'} no blame: they took part, no more."
        if involved
        else "."
    )


def _spread(one: Comparison[Seen], nodes: _Nodes) -> str:
    """Who got which value."""
    holders: dict[str, list[int]] = defaultdict(list)
    for seen in one.seen:
        for value in dict.fromkeys(runs(seen)):
            holders[value].append(seen.rank)
    parts = [f"{short(value)} by {nodes.all_said(ranks)}" for value, ranks in list(holders.items())[:4]]
    more = f"; and {len(holders) - 4} more" if len(holders) > 4 else ""
    what = _title(one)
    failed = [seen for seen in one.seen if seen.error]
    lost = f" {listed([seen.rank for seen in failed], 'Rank')} could not compute it." if failed else ""
    if not holders:
        return f"The {what}: no value at all.{lost}"
    many = f"{len(holders)} different values" if len(holders) > 1 else "one value everywhere"
    return f"The {what} has {many}: {'; '.join(parts)}{more}.{lost}"


def _obstacles(page: IncidentPage, differ: Sequence[Comparison[Seen]], nodes: _Nodes) -> Iterator[str]:
    """What kept the rules from naming anybody."""
    restless = {seen.rank for one in differ for seen in one.seen if len(set(seen.repeats)) > 1}
    if len(nodes.among(restless)) > 1:
        yield (
            f"{nodes.all_said(restless, 'Rank')} did not repeat even their own results. What does not repeat on several nodes is "
            "software or data, not a device."
        )
    if 0 < page.nodes < 3:
        yield (
            f"The job has {page.nodes} node{'s' * (page.nodes > 1)}. To name a rank, two other nodes must agree against it: three "
            "are needed."
        )
    for one in differ:
        if one.values == (NONFINITE,):
            yield f"Every run of the {_title(one)} holds NaN or Inf, wherever it ran: that points to the data or the software."
        elif page.nodes >= 3 and one.owner is not None and len(one.values) > 1:
            yield from _unbacked(one, nodes)
    if page.incident.window[0] < 0:
        yield f"The check {page.incident.check} had not passed before in this run; a first disagreement can be configuration."


def _unbacked(one: Comparison[Seen], nodes: _Nodes) -> Iterator[str]:
    where: dict[str, set[str]] = defaultdict(set)
    for seen in one.seen:
        done = set(runs(seen))
        if len(done) == 1 and not seen.error and NONFINITE not in done:
            where[done.pop()] |= nodes.among([seen.rank])
    backed = sum(len(found) >= 2 for found in where.values())
    if backed == 0:
        yield f"No two nodes agree on the {_title(one)}, so there is no value to measure the others by."
    elif backed > 1:
        yield f"On the {_title(one)} {backed} values have two nodes behind them each: neither makes the other wrong."


# What to do ----------------------------------------------------------------------------------------------------------


def advice(page: IncidentPage) -> list[Advice]:
    """What to do next, most urgent first: the same that `bitwitness incident show` says, as far as the database knows."""
    one = page.incident
    places = {
        place.rank: Placement(place.rank, place.node, place.device, place.slot, place.model, "", place.pod)
        for place in page.placement
    }
    saved = [name for name in page.files if name.startswith("micro-batches-rank-") and name.endswith(".pt")]
    return advise(
        Matter(
            id=one.id,
            status=one.status,
            step=one.step,
            ranks=one.ranks,
            candidates=one.candidates,
            kind=one.kind,
            persistence=one.persistence,
            persistences=(),
            window=one.window,
            check=one.check,
            places=places,
            nodes=page.nodes,
            on_detection=page.on_detection,
            saved=tuple(f"{page.path}/{name}" for name in sorted(saved)),
        )
    )


def commands(page: IncidentPage) -> list[str]:
    """What shows more of it on a machine that has the files."""
    where = shlex.quote(page.path)
    return [
        f"bitwitness incident show {where}",
        list_checkpoints(page.run),
        f"bitwitness report {shlex.quote(page.run.path)} {shlex.quote(f'--incident={page.incident.id}')} --html incident.html",
    ]


def list_checkpoints(run: RunRow) -> str:
    """What lists the checkpoints of a run."""
    return f"bitwitness checkpoint list {shlex.quote(run.path)}"


def answers(one: ProposalRow) -> list[str]:
    """What approves or rejects a proposal that waits, for those who cannot do it from here; nothing while it is not asked about."""
    return list(answer_commands(one.question, one.state)) if one.question else []


def judge(page: IncidentPage) -> str:
    """What says what an incident was, for those who cannot do it from here."""
    return f"bitwitness incident judge {shlex.quote(page.run.path)} --as confirmed --why '...' -- {shlex.quote(page.incident.id)}"
