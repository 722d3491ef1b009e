"""Groups that are tested on paper: the seam at which a search is tried without a cluster, by our tests and by yours.

Repeats that pass are skipped in one draw, so that a fault that shows once in a thousand tests is tried in no time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from bitwitness.scan.groups.model import log_pass, mask
from bitwitness.scan.groups.planning import Group, Planner


@dataclass
class FakeGroups:
    """Nodes of which some are bad.

    Attributes:
        bad: the rate of each bad node.
        links: the rate of each bad pair of nodes.
        by_itself: the rate at which the workload fails whatever the group.
        crashing: nodes with which no test is judged.
        seed: of the draws.
        rounds: how many there were: a round is as long as the longest series of repeats in it.
    """

    bad: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    by_itself: float = 0.0
    crashing: frozenset[int] = frozenset()
    seed: int = 0
    rounds: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311 - no secret

    def search(self, planner: Planner) -> Planner:
        """Carry a search through to its end."""
        while groups := planner.next():
            longest = 0
            for group in groups:
                passed, failed, unjudged = self.test(planner.nodes_of(group.nodes), group.repeats)
                if unjudged:
                    planner.unjudged(3)
                planner.told(group, passed, failed, unjudged)
                longest = max(longest, passed + failed + 3 * unjudged)
            self.rounds += longest
        return planner

    def test(self, nodes: list[int], repeats: int) -> tuple[int, bool, bool]:
        """So many tests of these nodes passed, then one failed, or was not judged."""
        inside = set(nodes)
        if inside & self.crashing:
            return 0, False, True
        quiet = log_pass(self.by_itself) if self.by_itself else 0.0
        quiet += sum(log_pass(rate) for node, rate in self.bad.items() if node in inside)
        quiet += sum(log_pass(rate) for ends, rate in self.links.items() if inside.issuperset(ends))
        if quiet == 0.0:
            return repeats, False, False
        passed = int(math.log(1 - self._random.random()) / quiet)
        return (repeats, False, False) if passed >= repeats else (passed, True, False)

    @staticmethod
    def group(planner: Planner, nodes: list[int]) -> Group:
        """The planner's group of these nodes."""
        return Group(mask(planner.place_of(node) for node in nodes))
