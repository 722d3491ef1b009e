"""Which steps say something about a suspect: the only place that decides whether a difference may be held against it.

All are compared with the leader, so that a leader that is wrong makes everybody else differ. What is held against a suspect is

- that it differs from the leader in a step in which at least one other reference, on another device, computed everything as the leader
  did, and no reference computed anything otherwise. A step in which references differ is void as a whole, not only where they do: what
  two broken devices have in common later in it (both infinite, both 0) would pass for agreement;
- in the free run, nothing after references have parted, and by no reference of which a step is lost;
- nothing that as many others compute as the suspect does, as there are references: then either may be right;
- nothing after its batch was another one, for then it was given other work.

No name is wrong by this as long as two references are not wrong in the same bits of the same step. Two that are, and agree in all else,
cannot be told from a suspect that is wrong; more references make that harder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bitwitness.compare.records import BORDERS_OF_BACKWARD, Account, Difference, Mode, Participant, Site, Step

Reading = Literal["counts", "references differ", "nobody confirms", "others agree", "other batch"]
"""Of a step: it counts, or why not."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one participant computed in one step, by site, the layout's number being gone.

    Attributes:
        step: the record.
        sites: what was compared, in the order of computation.
        missing: sites that the leader, or another reference, had and this one had not.
        differing: by site, in order.
    """

    step: Step
    sites: tuple[Site, ...]
    missing: frozenset[Site]
    differing: Mapping[Site, Difference]

    @property
    def differs(self) -> bool:
        """In anything."""
        return bool(self.differing or self.missing)


@dataclass(slots=True)
class Steps:
    """One suspect's steps in one mode, read.

    Attributes:
        seen: by step, what the suspect computed.
        reading: by step, whether it counts.
        leader: by step, the leader's records.
        parted: by reference's name, in how many steps it differed from the leader; all of them, not only those that the suspect has done.
        against_leader: names of references that gave the suspect's answer where it was not the leader's: the leader is then in doubt.
        agreeing: names of others than references that did so in steps that would count.
        last_confirmed: the last step that a reference besides the leader has done; -1: none.
    """

    seen: dict[int, Seen] = field(default_factory=dict)
    reading: dict[int, Reading] = field(default_factory=dict)
    leader: dict[int, Step] = field(default_factory=dict)
    parted: dict[str, int] = field(default_factory=dict)
    against_leader: set[str] = field(default_factory=set)
    agreeing: set[str] = field(default_factory=set)
    last_confirmed: int = -1

    def counted(self) -> list[Seen]:
        """The steps that count, in order."""
        return [self.seen[step] for step in sorted(self.seen) if self.reading[step] == "counts"]

    def differs_uncounted(self) -> bool:
        """The suspect differs in a step that does not count."""
        return any(one.differs and self.reading[step] != "counts" for step, one in self.seen.items())


def read(mode: Mode, accounts: Sequence[Account], leader: Participant, suspect: Account) -> Steps:
    """Read what all have written in one mode."""
    followers = {
        one.participant.name: _Reader(one) for one in accounts if one.participant.role in ("reference", "suspect")
    }
    own = next((one for one in accounts if one.participant.name == leader.name), None)
    led = _Reader(own) if own is not None else None
    references = {name: one for name, one in followers.items() if one.who.role == "reference"}
    result = Steps(leader={} if led is None else led.steps)
    me = _Reader(suspect)
    done = set(me.steps).union(*(one.steps for one in references.values()))
    seen = {
        name: {step: one.seen(step, _all_sites(step, led, references)) for step in one.steps if step in done}
        for name, one in followers.items()
    }
    mine = seen.get(suspect.participant.name, {})
    over, other_way = False, False  # of the free run: what follows says nothing
    whole = {name: _until_gap(one.steps) for name, one in references.items()}
    for step in sorted(done):
        others = {name: seen[name][step] for name in references if step in seen[name]}
        odd = {name for name, one in others.items() if one.differs}
        for name in odd:
            result.parted[name] = result.parted.get(name, 0) + 1
        independent = {
            name
            for name in others
            if place(references[name].who) != place(leader) and (mode != "free" or step < whole[name])
        }
        if independent:
            result.last_confirmed = step
        over = over or (mode == "free" and bool(odd))
        if step not in mine:
            continue
        result.seen[step] = mine[step]
        result.against_leader |= {name for name in odd if _same_answer(mine[step], others[name])}
        if odd or over:
            result.reading[step] = "references differ"
        elif not independent:
            result.reading[step] = "nobody confirms"
        elif other_way or any(site.phase == "batch" for site in mine[step].differing):
            result.reading[step] = "other batch"
            other_way = mode == "free"
        else:
            result.reading[step] = "counts"
    _hear_others(mode, result, {name: seen[name] for name in followers}, followers, leader, suspect.participant)
    return result


class _Reader:
    """One account, by step."""

    def __init__(self, account: Account) -> None:
        self.who = account.participant
        self._account = account
        self.steps = {one.step: one for one in account.steps}
        self._layouts: dict[int, tuple[tuple[Site, ...], frozenset[Site]]] = {}

    def sites(self, step: int) -> tuple[Site, ...]:
        return self._of(self.steps[step].layout)[0]

    def site_set(self, step: int) -> frozenset[Site]:
        return self._of(self.steps[step].layout)[1]

    def _of(self, layout: int) -> tuple[tuple[Site, ...], frozenset[Site]]:
        """A layout is taken apart once, for steps are many."""
        if layout not in self._layouts:
            sites = self._account.sites
            some = tuple(sites[number] for number in self._account.layouts[layout] if 0 <= number < len(sites))
            self._layouts[layout] = some, frozenset(some)
        return self._layouts[layout]

    def seen(self, step: int, wanted: frozenset[Site]) -> Seen:
        record, mine = self.steps[step], self.site_set(step)
        differing = {self._account.sites[one.site]: one for one in record.differences}
        missing = wanted - mine if wanted is not mine else frozenset[Site]()
        if self.who.simulated:  # what plays a fault reaches into the backward, and has other borders there
            missing = frozenset(site for site in missing if site.phase not in BORDERS_OF_BACKWARD)
        return Seen(record, self.sites(step), missing, differing)


def _all_sites(step: int, leader: _Reader | None, references: Mapping[str, _Reader]) -> frozenset[Site]:
    """What was there to be compared: the leader's; where its journal is lost, what references were compared by."""
    if leader is not None and step in leader.steps:
        return leader.site_set(step)
    having = [one.site_set(step) for one in references.values() if step in one.steps]
    return frozenset[Site]().union(*having)


def place(who: Participant) -> tuple[str, str]:
    """A device, under whatever name it takes part: agreement with oneself is no evidence."""
    return who.device.node, who.device.device


def _until_gap(steps: Mapping[int, Step]) -> int:
    """The first step that is not recorded. In the free run, what was lost there may have been where it parted."""
    step = 0
    while step in steps:
        step += 1
    return step


def _same_answer(mine: Seen, other: Seen) -> bool:
    return any(
        site in other.differing and one.answer and other.differing[site].answer == one.answer
        for site, one in mine.differing.items()
    )


def _hear_others(
    mode: Mode,
    result: Steps,
    seen: Mapping[str, Mapping[int, Seen]],
    followers: Mapping[str, _Reader],
    leader: Participant,
    suspect: Participant,
) -> None:
    """Take back steps in which as many give the suspect's answer as there are who give the leader's.

    It is the first site that differs which is asked: from there on errors spread, and unlike ones may end alike.
    """
    over = False
    for step in sorted(result.seen):
        mine = result.seen[step]
        if result.reading[step] != "counts" or not mine.differs:
            continue
        if over:
            result.reading[step] = "others agree"
            continue
        first = next(iter(mine.differing), None)
        mine_too = {place(suspect)}
        right = {place(leader)}
        names = set()
        for name, steps in seen.items():
            who, other = followers[name].who, steps.get(step)
            if other is None or name == suspect.name:
                continue
            if not other.differs:
                right.add(place(who))
            elif first is not None and first in other.differing:
                answer = other.differing[first].answer
                if answer and answer == mine.differing[first].answer:
                    mine_too.add(place(who))
                    names.add(name)
        if len(mine_too - {place(suspect)}) and len(mine_too) >= len(right - mine_too):
            result.reading[step] = "others agree"
            result.agreeing |= names
        if mode == "free":
            over = result.reading[step] != "counts"
            if not over:
                return
