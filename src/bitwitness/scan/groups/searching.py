"""Carrying a search through on real nodes: rounds of tests that run side by side, each noted once it has ended.

Apart from the planner so that the planner stays pure, and from the command line so that a program can search as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitwitness.scan.groups.bound import bound
from bitwitness.scan.groups.model import bits
from bitwitness.scan.groups.planning import Group, Planner
from bitwitness.scan.groups.running import Running
from bitwitness.scan.groups.state import State

MORE_TRIES = 2
"""So often a test that was not judged is repeated before the search plans around its group."""

_POLL = 0.02
_NEARLY_ALL = 9  # so many times as many tests not judged as judged

WORDS = {
    "found": "as many are found as there can be",
    "enough": "everything else has passed often enough",
    "by itself": "the test fails whatever the group: it accuses nobody, find out why it fails by itself",
    "unexplained": "there are failures left that nobody explains, those named included: the test may fail by itself as well",
    "never passes": "no group passed: the test fails whatever the group, or every node is bad; nobody can be told from it",
    "not judged": "hardly any test was judged: see the logs for why the command ends with neither 0 nor 1",
    "too few": "no group is left that could be tested: not enough nodes that are not suspected themselves",
    "unsettled": "tests do not settle which nodes it is, or whether the test fails by itself",
    "tests": "as many tests were made as were allowed",
}


@dataclass
class _Series:
    """The repeats of one group in a round."""

    group: Group
    number: int
    passed: int = 0
    tries: int = 0
    repeat: int = 0
    over: bool = False
    failed: bool = False
    unjudged: bool = False
    running: Running | None = None
    since: float = 0.0

    def count(self, outcome: str) -> None:
        """One test more has ended."""
        self.repeat += 1
        if outcome == "passed":
            self.passed += 1
            self.tries = 0
            self.over = self.passed >= self.group.repeats
        elif outcome == "failed":
            self.failed = self.over = True
        else:
            self.tries += 1
            self.unjudged = self.over = self.tries > MORE_TRIES


@dataclass
class Searching:
    """A search on real nodes.

    Attributes:
        names: of the nodes; the planner knows their numbers.
        words: the command's template, split.
        timeout: seconds after which a test is ended, and not judged.
        heard: called after each change, to show it.
    """

    names: Sequence[str]
    words: Sequence[str]
    planner: Planner
    state: State
    timeout: float
    heard: Callable[[Searching], None] = lambda _: None
    rounds: int = 0
    why_not: dict[str, int] = field(default_factory=dict)
    _plan: int = 0
    _series: list[_Series] = field(default_factory=list)

    def run(self) -> None:
        """Search until it is over; however this ends, no test goes on running."""
        try:
            while groups := self.planner.next():
                self._round(groups)
                self.heard(self)
            self.state.used_up()
        finally:
            for series in self._series:
                if series.running is not None:
                    series.running.kill()

    def _round(self, groups: Sequence[Group]) -> None:
        self._series = [_Series(group, number) for number, group in enumerate(groups)]
        while any(not series.over for series in self._series):
            moved = [self._step(series) for series in self._series if not series.over]
            if not any(moved):
                time.sleep(_POLL)
        self._plan += 1
        self.rounds += max(series.repeat for series in self._series)
        for series in self._series:
            tests = series.repeat - series.passed - series.failed
            if tests:
                self.planner.unjudged(tests)
            self.planner.told(series.group, series.passed, series.failed, series.unjudged)

    def _step(self, series: _Series) -> bool:
        """Start, or look after, the test of a group; whether something happened."""
        key = (self._plan, series.number, series.repeat)
        if series.running is None:
            nodes = self.nodes(series.group.nodes)
            known = self.state.answer(key, nodes)
            if known is not None:
                self._ended(series, *known)
                return True
            name = "-".join(str(part) for part in key)
            series.running = Running(self.words, nodes, name, self.state.logs)
            series.since = time.monotonic()
            self.heard(self)
            return True
        outcome = series.running.outcome()
        if outcome is None and time.monotonic() - series.since > self.timeout:
            series.running.kill()
            outcome = series.running.outcome()
        if outcome is None:
            return False
        series.running = None
        self.state.tell(key, *outcome, self.nodes(series.group.nodes))
        self._ended(series, *outcome)
        return True

    def _ended(self, series: _Series, outcome: str, why: str) -> None:
        series.count(outcome)
        if why:
            self.why_not[why] = self.why_not.get(why, 0) + 1

    def nodes(self, group: int) -> list[str]:
        """The names of a group of the planner's."""
        return [self.names[node] for node in self.planner.nodes_of(group)]

    def result(self) -> dict[str, Any]:
        """What was found, for people and programs."""
        planner, settings = self.planner, self.planner.settings
        unjudged = sum(self.why_not.values())
        bad = sorted((self.nodes(fault.nodes)[0] for fault in planner.found if not fault.pair), key=self.names.index)
        finished = planner.why in ("found", "enough") and not planner.not_judged
        why = WORDS[planner.why] if planner.why else ""
        if planner.not_judged and planner.why in ("found", "enough"):
            why += "; but there are nodes that could not be judged"
        hardly = unjudged > _NEARLY_ALL * planner.judged and not finished
        if hardly:
            most = max(sorted(self.why_not), key=self.why_not.__getitem__)
            why = f"{WORDS['not judged']} ({unjudged} of {unjudged + planner.judged} were not, most: {most})"
        certify = None if planner.why == "found" else planner.assumed_rate()
        rates = planner.rates_found()
        needed = bound(settings.size, len(planner.found), min(rates, default=1.0), settings.confidence, certify)
        return {
            "bad": bad,
            "pairs": [self.nodes(fault.nodes) for fault in planner.found if fault.pair],
            "tests": planner.tests,
            "rounds": self.rounds,
            "confidence": settings.confidence,
            "finished": finished,
            "why": why,
            "rate": certify,
            "rates": {"+".join(self.nodes(f.nodes)): round(r, 4) for f, r in zip(planner.found, rates, strict=True)},
            "bound": {
                "tests": round(needed.tests, 1),
                "counting": round(needed.counting, 1),
                "accusing": round(needed.accusing, 1),
                "certifying": round(needed.certifying, 1),
            },
            "candidates": [self.nodes(group) for group in planner.suspected()],
            "not_judged": [self.nodes(1 << node)[0] for node in sorted(planner.not_judged)],
            "tests_not_judged": dict(sorted(self.why_not.items())),
            "hardly_judged": hardly,
            "nodes": settings.size,
            "seed": settings.seed,
        }


def suspects(planner: Planner) -> int:
    """How many nodes are suspected now."""
    return sum(len(bits(group)) for group in planner.suspected())
