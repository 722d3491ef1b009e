"""Which groups to test next, and what has been shown: pure, so that a search is the same in a simulation and on a cluster.

A group that failed is searched (`narrowing`) until one node, or two with a link between them, are left. They are *on trial*:
tested alone, and everything else without them, until the evidence (`weighing`) says that neither chance nor a workload that
fails by itself can explain it. Then the rest is tested, and what fails there is searched, until every node that could still be bad at the
assumed rate would have shown by now with the stated confidence, or as many are found as there can be.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from bitwitness.scan.groups.alone import alone, cleared, end_passed, may_be_named
from bitwitness.scan.groups.bound import one_more
from bitwitness.scan.groups.designs import Design, first_rounds
from bitwitness.scan.groups.model import (
    NEVER,
    Fault,
    Rates,
    Record,
    Rows,
    bits,
    log_pass,
    mask,
    possible_rates,
    rate_of,
)
from bitwitness.scan.groups.narrowing import LINK, WORTH, Search
from bitwitness.scan.groups.weighing import evidence, evidence_of_all, fails_by_itself, fit, log_prior

PLANNER_VERSION = 2
"""Of what is asked for after the same answers: one more with each change to it, here or in `narrowing`, `weighing`, `designs`."""

UNKNOWN_RATE = 0.1
"""The lowest rate at which a set in which nothing failed is said to be free of faults, unless another is asked for."""

_LEAST_RATE = 0.02  # of what the faults found show: so few of them have a lower rate
_MOST_RATE = 0.5
_CRASHES = 24
_DOUBT = 0.5  # so improbable, a fault on trial is searched again
_LEAST_LIMIT = 200  # tests, and so many times what any search needs: in all, and since something was learned
_TIMES_BOUND, _TIMES_IDLE = 20, 5
_PATIENCE = 100.0  # failures that a trial should have seen, if what is on trial is bad

Why = Literal[
    "found", "enough", "by itself", "unexplained", "never passes", "not judged", "too few", "tests", "unsettled"
]


@dataclass(frozen=True, slots=True)
class Group:
    """A group of a round: its nodes, and how often to test it before planning anew; a failure ends the repeats."""

    nodes: int
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Settings:
    """What a search is asked for."""

    size: int
    confidence: float = 0.99
    max_bad: int | None = None
    rate: float | None = None
    parallel: int | None = None
    design: Design = "halving"
    min_group: int = 1
    max_tests: int | None = None
    trust_test: bool = False
    seed: int = 0


@dataclass
class Planner:
    """Plans rounds of groups, and is told how they ended. Nodes are numbers below `settings.size`."""

    settings: Settings
    found: list[Fault] = field(default_factory=list)
    on_trial: list[Fault] = field(default_factory=list)
    searches: list[Search] = field(default_factory=list)
    not_judged: set[int] = field(default_factory=set)
    tests: int = 0
    judged: int = 0
    why: Why | None = None

    def __post_init__(self) -> None:
        order = list(range(self.settings.size))
        random.Random(self.settings.seed).shuffle(order)  # noqa: S311 - no secret
        self._order = order
        self._place = {node: place for place, node in enumerate(order)}
        self.record = Record(self.settings.size)
        self.rates = possible_rates(self.settings.rate)
        self._first = first_rounds(self.settings.design, self.settings.size)
        self._to_split: list[int] = []
        self._crashed: dict[int, int] = {}
        self._turn = 0
        self._shown: list[list[float]] = []
        self._origin: dict[Fault, Search] = {}
        self._doubted: set[Fault] = set()
        self._cleared = 0
        self._spent = 0.0
        self._known: set[int] = set()
        self._learned = 0

    def nodes_of(self, group: int) -> list[int]:
        """The nodes of a group of ours: inside, they go by a random order, so that no rack is a group by accident."""
        return sorted(self._order[place] for place in bits(group))

    def place_of(self, node: int) -> int:
        """The other way round."""
        return self._place[node]

    # -- planning ----------------------------------------------------------------------------------------------------

    def next(self) -> list[Group]:
        """The groups of the next round, which have no node in common; none when the search is over (`why` says why)."""
        if self.why is None:
            self._look()
        if self.why is not None:
            return []
        self._turn += 1
        most = self.settings.parallel or self.settings.size
        groups: list[Group] = []
        taken = 0
        for group in self._candidates():
            if len(groups) >= most:
                break
            nodes = group.nodes & ~self._gone()
            if nodes and not nodes & taken:
                groups.append(Group(nodes, group.repeats))
                taken |= nodes
        if not groups:
            self.why = "too few"
        left = None if self.settings.max_tests is None else self.settings.max_tests - self.tests
        if left is not None and groups:
            groups = groups[: max(1, left)]
            groups = [Group(one.nodes, min(one.repeats, max(1, left // len(groups)))) for one in groups]
        if self._first and not self._to_split:  # what did not fit into this round is tested in the next one
            asked = mask(node for group in groups for node in bits(group.nodes))
            self._first[0] = [group for group in self._first[0] if not group & asked]
        return groups

    def _candidates(self) -> list[Group]:
        if self._to_split:
            return [Group(group) for group in self._to_split]
        while self._first and not self._first[0]:
            self._first.pop(0)
        if self._first:
            return [Group(group) for group in self._first[0]]
        groups = []
        for search in self.searches:
            chosen = [Group(self._padded(nodes), repeats) for nodes, repeats in search.choose(self._spare(search))]
            groups += chosen
        if not groups and self.on_trial:
            groups += self._trial()
        return groups or self._sweep()

    def _everything(self) -> int:
        return (1 << self.settings.size) - 1

    def _gone(self) -> int:
        return mask(self.not_judged)

    def _rest(self, without: Sequence[Fault] = ()) -> int:
        """All nodes but the bad ones, those on trial, and one end of each bad link, turn about."""
        rest = self._everything() & ~self._gone()
        for fault in (*self.found, *self.on_trial, *without):
            if not fault.pair:
                rest &= ~fault.nodes
        for fault in (*self.found, *self.on_trial, *without):
            if fault.pair and rest & fault.nodes == fault.nodes:
                rest &= ~self._tested_more(fault)
        return rest

    def _tested_more(self, fault: Fault) -> int:
        one, two = bits(fault.nodes)
        return 1 << (one if self.record.passes[one] > self.record.passes[two] else two)

    def _padded(self, nodes: int) -> int:
        """The group, with nodes that passed most beside it where it is smaller than a test may be; others each time."""
        missing = self.settings.min_group - nodes.bit_count()
        if missing <= 0:
            return nodes
        rest = self._rest() & ~nodes
        for fault in self.found:
            if fault.pair and fault.nodes & nodes:
                rest &= ~fault.nodes
        good = sorted(bits(rest), key=lambda node: (-self.record.passes[node], node))[: 12 * missing]
        unsuspected = [node for node in good if not any(group >> node & 1 for group in self.suspected())]
        good = unsuspected if len(unsuspected) >= missing else good
        start = self._turn * missing % max(1, len(good))
        return nodes | mask((good * 2)[start : start + missing])

    def _sweep(self) -> list[Group]:
        """Everything that may still hold a fault, as often as the certainty about it asks for."""
        rest = self._rest()
        if rest.bit_count() < max(1, self.settings.min_group):
            return []
        missing = self._unseen(rest) - math.log(1 - self.settings.confidence)
        repeats = max(1, math.ceil(missing / -log_pass(self.assumed_rate()) - 1e-9))
        return [Group(rest, repeats)]

    def _spare(self, search: Search) -> float:
        """Bits of evidence that an accusation will lack once the search has ended: tests that will be made anyway."""
        if self.settings.trust_test or self.settings.max_bad is None or len(self.searches) > 1:
            return 0.0
        fault = Fault(search.likeliest())
        prior = log_prior(fault, self.settings.size, LINK) + self._only()
        shown = evidence(self._rows(), fault, self.on_trial, self.rates, prior)
        return (self._need() - shown - math.log(search.context.bit_count())) / math.log(2) if shown > NEVER else 0.0

    def _trial(self) -> list[Group]:
        """The test that tells most about who is on trial, alone or everything else; both at a time if both are worth it."""
        fault = self.on_trial[0]
        others = [*self.found, *self.on_trial[1:]]
        rest = self._rest()
        rows = self._rows()
        best, _ = fit(rows, (*self.on_trial[1:], fault), self.rates)
        rate = best[-1]
        self._spent += max(rate, int(0.25 / rate) * rate)
        repeats = max(1, int(0.25 / rate))
        if self._turn % 2 and self._lacks_tests_alone(fault):
            return [Group(self._padded(fault.nodes), repeats)]  # nobody is named without
        if fault.pair:
            ends = self._ends_to_test(fault, rows, others)
            if ends is not None:
                return [Group(ends, repeats)]
        tests = sum(row[1] + row[2] for row in rows)
        chance = min(0.999, max(1e-6, sum(row[2] for row in rows) / tests if tests else 0.5))
        lone = rate * math.log(rate / chance)
        lone += (1 - rate) * (log_pass(rate) - math.log1p(-chance)) if rate < 1 else 0.0
        control = -math.log1p(-chance)
        enough = rest.bit_count() >= max(1, self.settings.min_group)
        if self.settings.max_bad is None:
            useful = self._unseen(rest) > math.log(1 - self.settings.confidence)
        else:
            useful = len(self.found) + len(self.on_trial) < self.settings.max_bad
        # A control is the next search as well, where there is to be one.
        tests_of = [Group(self._padded(fault.nodes), repeats)]
        if self.settings.trust_test:
            return [*tests_of, Group(rest, repeats)] if enough and useful else tests_of
        if enough and control * (2 if useful else 1) > lone:
            tests_of.insert(0, Group(rest, repeats))
        elif enough and control > WORTH * lone:
            tests_of.append(Group(rest, repeats))
        return tests_of if lone > WORTH * control else tests_of[:1]

    def _lacks_tests_alone(self, fault: Fault) -> bool:
        if fault.pair:
            return not self._may_be_named(fault)
        return not alone(self.record, fault.nodes, self.settings.min_group).shown

    def _ends_to_test(self, fault: Fault, rows: Rows, others: Sequence[Fault]) -> int | None:
        """One end of a link on trial with everything but the other end, while it could still be a bad node."""
        _, link = fit(rows, (*self.on_trial[1:], fault), self.rates)
        link += log_prior(fault, self.settings.size, LINK)
        for end in bits(fault.nodes):
            node = Fault(1 << end)
            enough = end_passed(self.record, fault, end, self.rates, self.settings.min_group, self._doubted_link())
            if enough and self._is_cleared(node):
                continue
            _, single = fit(rows, (*self.on_trial[1:], node), self.rates)
            surer = link - single - log_prior(node, self.settings.size, LINK)
            if not enough or surer < self._need():
                rest = self._rest() & ~fault.nodes | node.nodes
                for other in others:
                    if other.pair and other.nodes & rest == other.nodes:
                        rest &= ~(other.nodes & ~node.nodes)
                if self.record.groups.get(rest, [0, 0])[1]:
                    rest = self._padded(node.nodes)  # something else fails there
                if rest.bit_count() > 1 or self.settings.min_group == 1:
                    return rest
        return None

    # -- what tests say ------------------------------------------------------------------------------------------------

    def told(self, group: Group, passed: int, failed: bool, unjudged: bool = False) -> None:
        """How the tests of a group ended: so many passed, then one failed, or was not judged although repeated."""
        self.tests += passed + failed
        self.judged += passed + failed
        nodes = group.nodes
        if nodes in self._to_split:
            self._to_split.remove(nodes)
        if unjudged:
            self._split(nodes)
        if not passed and not failed:
            return
        self.record.add(nodes, passed, int(failed))
        if not any(fault.nodes & nodes == fault.nodes for fault in self.found):
            for search in [*self.searches, *(self._origin[fault] for fault in self.on_trial)]:
                company = (nodes & ~search.context).bit_count()
                search.told(nodes, passed, failed, trusted=company < self.settings.min_group)
        self._doubt()
        self._clear()
        self._try()
        self._cover()
        self._exchange()
        self._accuse()

    def unjudged(self, tests: int = 1) -> None:
        """So many tests ended in neither verdict: they count as tests, and as nothing else."""
        self.tests += tests

    def _split(self, nodes: int) -> None:
        """Find whose presence makes a group impossible to judge: its halves."""
        self._crashed[nodes] = self._crashed.get(nodes, 0) + 1
        members = bits(nodes)
        if not self.judged and len(self._crashed) >= _CRASHES:
            self.why = "not judged"
        elif len(members) <= max(1, self.settings.min_group):
            self.not_judged |= set(members)
            left = [group & ~nodes for group in self._to_split]
            self._to_split = [group for i, group in enumerate(left) if group and group not in left[:i]]
            self.searches = [search for search in self.searches if not search.context & nodes]
            self.on_trial = [fault for fault in self.on_trial if not fault.nodes & nodes]
        else:
            half, least = len(members) // 2, self.settings.min_group
            self._to_split += [mask(members[: max(half, least)]), mask(members[-max(len(members) - half, least) :])]

    def _rows(self) -> Rows:
        return self.record.without(self.found)

    def _rates(self) -> Rates:
        return self.rates.learned(self._shown)

    def _try(self) -> None:
        """Put on trial what searches ended in."""
        for search in list(self.searches):
            fault = search.ready(self.settings.min_group)
            if fault is not None and fault not in self.found:
                self.searches.remove(search)
                if not fault.pair and self._cleared & fault.nodes:
                    if search.context & ~fault.nodes:
                        self.searches.append(self._search(search.context))
                    continue
                if fault not in self.on_trial:
                    self.on_trial.append(fault)
                    self._origin[fault] = search

    def _doubt(self) -> None:
        """Who is on trial is no longer, once tests say that it is somebody else of the group that failed."""
        for fault in list(self.on_trial):
            search = self._origin[fault]
            if fault in self._doubted or fault.pair:
                continue  # once: two searches could take turns for ever
            if search.mass(fault) < _DOUBT and search.context & ~fault.nodes:
                self._doubted.add(fault)
                self.on_trial.remove(fault)
                self.searches.append(search)

    def _is_cleared(self, node: Fault) -> bool:
        """Whether its tests alone say that it is not bad by itself."""
        if self._cleared & node.nodes:
            return True
        known = [*self.found, *(fault for fault in self.on_trial if fault.pair and not fault.nodes & node.nodes)]
        return cleared(self.record, node.nodes, known, self.rates, self.settings.min_group, self._doubted_link())

    def _clear(self) -> None:
        """Who passed alone, again and again, and failed beside others, is not bad by itself: what failed is searched for links."""
        for fault in [fault for fault in self.on_trial if not fault.pair and self._is_cleared(fault)]:
            self._cleared |= fault.nodes
            self.on_trial.remove(fault)
        for node in bits(self._cleared):
            if alone(self.record, 1 << node, self.settings.min_group).failed:
                self._cleared &= ~(1 << node)

    def _search(self, context: int) -> Search:
        return Search(context, self.record, self._rates(), self._cleared)

    def _cover(self) -> None:
        """Every failure must have an explanation: found, on trial, or being searched."""
        self._drop_needless()
        rows = self.record.without([*self.found, *self.on_trial])
        for group, _, failed in sorted(rows, key=lambda row: row[0].bit_count()):  # the smallest tells most
            if failed and not any(search.context & group for search in self.searches):
                context = group & ~self._gone()
                for fault in self.found:
                    if not fault.pair:
                        context &= ~fault.nodes
                if context:
                    self.searches.append(self._search(context))
        self._try()

    def _exchange(self) -> None:
        """A link on trial gives way to one of its ends where that explains the tests better."""
        rows = self._rows()
        for i, fault in enumerate(self.on_trial):
            if not fault.pair:
                continue
            others = [*self.on_trial[:i], *self.on_trial[i + 1 :]]
            ends = [fault, *(one for end in bits(fault.nodes) if not self._is_cleared(one := Fault(1 << end)))]
            logs = [fit(rows, (*others, one), self.rates)[1] + log_prior(one, self.settings.size, LINK) for one in ends]
            self.on_trial[i] = ends[max(range(len(ends)), key=logs.__getitem__)]
            self._origin.setdefault(self.on_trial[i], self._origin[fault])
        self.on_trial = list(dict.fromkeys(self.on_trial))

    def _drop_needless(self) -> None:
        """On trial no longer: whom the others make needless, and a link one of whose ends is bad by itself."""
        rows = self._rows()
        for fault in list(self.on_trial) if len(self.on_trial) > 1 else ():
            others = [other for other in self.on_trial if other != fault]
            prior = log_prior(fault, self.settings.size, LINK)
            without = fit(rows, others, self.rates)[1]
            if without > NEVER and others and without > fit(rows, (*others, fault), self.rates)[1] + prior:
                self.on_trial = others
        nodes = 0
        for fault in (*self.found, *self.on_trial):
            nodes |= 0 if fault.pair else fault.nodes
        self.on_trial = [fault for fault in self.on_trial if not (fault.pair and fault.nodes & nodes)]

    def _accuse(self) -> None:
        shown = self._proven()
        while shown:
            rows = self._rows()
            self._spent = 0.0
            for fault in shown:
                self.on_trial.remove(fault)
                self._shown.append(rate_of(rows, fault, self.rates))
                self.found.append(fault)
                # What failed with it needs no other explanation; what failed without it is searched anew.
                self.searches = [one for one in self.searches if one.context & fault.nodes != fault.nodes]
            self._cover()
            shown = self._proven()

    def _proven(self) -> list[Fault]:
        """Those on trial who are shown to be bad, and failed alone: whatever was thought of them before, nobody else is named."""
        return [fault for fault in self._likely() if self._may_be_named(fault)]

    def _may_be_named(self, fault: Fault) -> bool:
        return may_be_named(self.record, fault, self.found, self.rates, self.settings.min_group, self._doubted_link())

    def _doubted_link(self) -> float:
        """The chance at which a node is taken for a link, or not for bad by itself: less than for others, as links are rare."""
        return LINK * (1 - self.settings.confidence)

    def _likely(self) -> list[Fault]:
        """Those on trial whom the tests tell from chance: together, and each given the others."""
        if not self.on_trial:
            return []
        if self.settings.trust_test:
            return [fault for fault in self.on_trial if self._failed_alone(fault)]
        priors = sum(log_prior(fault, self.settings.size, LINK) for fault in self.on_trial) + self._only()
        if evidence_of_all(self._rows(), self.on_trial, self.rates, priors) < self._need():
            return []
        trial = self.on_trial
        return [fault for fault in trial if self._shown_bad(fault, [other for other in trial if other is not fault])]

    def _failed_alone(self, fault: Fault) -> bool:
        """Whether a group that holds nothing else failed; or, where groups must be larger, nobody else can be it."""
        others = [other for other in self.on_trial if other != fault]
        rows = self._rows()
        if fault.pair and self._ends_to_test(fault, rows, [*self.found, *others]) is not None:
            return False
        if any(group == fault.nodes and failed for group, _, failed in rows):
            return True
        if self.settings.min_group <= fault.nodes.bit_count():
            return False
        sure = self._origin[fault].mass(fault) >= self.settings.confidence
        return sure and (fault.pair or self._alone(fault, rows, others, self._need()))

    def _only(self) -> float:
        """Where there is one fault at most, that it is the first of several has no share in the prior."""
        return math.log(2) if self.settings.max_bad == len(self.on_trial) == 1 else 0.0

    def _need(self) -> float:
        return -math.log(1 - self.settings.confidence)

    def _shown_bad(self, fault: Fault, others: Sequence[Fault]) -> bool:
        """Whether tests show this fault, and nothing else could explain them as well."""
        rows = self._rows()
        need = self._need()
        if not any(row[1] for row in rows if row[0] & fault.nodes != fault.nodes):
            return False  # no control without it has passed
        prior = log_prior(fault, self.settings.size, LINK) + self._only()
        if evidence(rows, fault, others, self.rates, prior) < need:
            return False
        if fault.pair:
            return self._ends_to_test(fault, rows, list(self.found)) is None
        return self._alone(fault, rows, others, need)

    def _alone(self, fault: Fault, rows: Rows, others: Sequence[Fault], need: float) -> bool:
        """No other node explains the failures, nor a link to one: where a test needs company, that of each other test is another one."""
        shared = self._everything() & ~fault.nodes
        for group, _, failed in rows:
            if failed and fault.nodes & group and not any(o.nodes & group == o.nodes for o in others):
                shared &= group
        _, own = fit(rows, (*others, fault), self.rates)
        instead = [Fault(nodes) for node in bits(shared) for nodes in (1 << node, 1 << node | fault.nodes)]
        return all(own - fit(rows, (*others, other), self.rates)[1] >= need for other in instead)

    # -- when it is over -------------------------------------------------------------------------------------------------

    def assumed_rate(self) -> float:
        """The lowest rate at which another fault would be seen: as asked for, or as those found show, or a tenth."""
        if self.settings.rate is not None:
            return self.settings.rate
        if not self._shown:
            return UNKNOWN_RATE
        lowest = _MOST_RATE
        for shown in self._shown:
            below = 0.0
            for rate, chance in sorted(zip(self.rates.values, shown, strict=True)):
                below += chance
                if below > _LEAST_RATE:
                    lowest = min(lowest, rate)
                    break
        return lowest

    def rates_found(self) -> list[float]:
        """Of each found fault, the rate at which it showed: the mean of what the tests say."""
        return [sum(r * p for r, p in zip(self.rates.values, shown, strict=True)) for shown in self._shown]

    def suspected(self) -> list[int]:
        """The groups that hold a fault which is not shown yet, unless the test fails by itself."""
        return [*(fault.nodes for fault in self.on_trial), *(search.context for search in self.searches)]

    def _unseen(self, nodes: int) -> float:
        """Logarithm of the ratio for one more bad node, at the assumed rate, for the node tested least."""
        rate = self.assumed_rate()
        quiet = log_pass(rate)
        hidden = []
        for group, (_, failed) in self.record.groups.items():
            known = [i for i, fault in enumerate(self.found) if fault.nodes & group == fault.nodes]
            if failed and known:
                passing = 0.0
                for i in known:
                    passing += log_pass(sum(r * p for r, p in zip(self.rates.values, self._shown[i], strict=True)))
                more = math.expm1(passing + quiet) / math.expm1(passing)
                hidden.append((group, failed * math.log(max(1.0, more))))
        worst = NEVER
        for node in bits(nodes):
            value = self.record.passes[node] * quiet
            value += sum(gain for group, gain in hidden if group >> node & 1)
            worst = max(worst, value)
        return worst

    def _look(self) -> None:
        """Whether it is over."""
        if self.settings.max_tests is not None and self.tests >= self.settings.max_tests:
            self.why = "tests"
        elif self.settings.max_bad is not None and len(self.found) >= self.settings.max_bad:
            self.why = "found"
        elif (self.on_trial or self.searches) and self._means_nothing():
            passes = any(self.record.passes)
            self.why = "unexplained" if self.found else "by itself" if passes else "never passes"
        elif (self.settings.max_tests is None and self._leads_nowhere()) or (
            self.on_trial and not self.searches and not self._can_be_tried()
        ):
            self.why = "unsettled" if any(self.record.passes) else "never passes"
        elif not self.searches and not self.on_trial and not self._to_split and not self._first:
            rest = self._everything() & ~self._gone()
            for fault in self.found:
                rest &= ~fault.nodes if not fault.pair else rest
            if rest and self._unseen(rest) <= math.log(1 - self.settings.confidence) + 1e-9:
                self.why = "enough"

    def _leads_nowhere(self) -> bool:
        """Whether the search has made many times the tests that any needs, in all or since it last suspected anything new.

        Where what is bad is nothing that it looks for, as three nodes that are bad only together, no number of tests would end it.
        """
        suspected = {fault.nodes for fault in self.found}.union(self.suspected())
        if not suspected <= self._known:
            self._known |= suspected
            self._learned = self.tests
        rate = self.settings.rate or min(self.assumed_rate(), UNKNOWN_RATE)
        needed = one_more(self.settings.size, len(self.found), rate, self.settings.confidence)
        idle = self.tests - self._learned > _LEAST_LIMIT + _TIMES_IDLE * needed
        return idle or self.tests > _LEAST_LIMIT + _TIMES_BOUND * needed

    def _can_be_tried(self) -> bool:
        """Whether more tests may settle who is on trial: nothing does if no node is left to compare them with."""
        if self._spent > _PATIENCE:
            return False
        return any(self.record.passes) or self._rest().bit_count() >= max(1, self.settings.min_group)

    def _means_nothing(self) -> bool:
        if self.settings.trust_test:
            return False
        faults = list(self.on_trial)
        rows = self._rows()
        priors = sum(log_prior(fault, self.settings.size, LINK) for fault in faults)
        for search in self.searches:
            # It may be any of the context, and the likeliest stands for all of them.
            node = Fault(search.likeliest())
            if node not in faults:
                faults.append(node)
                priors += log_prior(node, self.settings.size, LINK) + math.log(search.context.bit_count())
        covered = [row for row in rows if not row[2] or any(fault.nodes & row[0] == fault.nodes for fault in faults)]
        # A failure that nobody explains yet is taken to have an explanation as good as those at hand.
        return len(faults) > 0 and fails_by_itself(covered, faults, self.rates, priors)
