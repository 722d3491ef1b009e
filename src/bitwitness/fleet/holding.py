"""What holds a proposal now: the budget, asked with what this round knows of the cluster and of what was done within the hour.

The rules are `budget`'s, which is pure. Here stands what they need: the size of the cluster, asked once a round, what was done
lately, and when the incident was.
"""

from __future__ import annotations

import logging
from datetime import datetime

from bitwitness.errors import ClusterError
from bitwitness.fleet.budget import HOUR, Hold, hold
from bitwitness.fleet.clusters.base import Census, Cluster
from bitwitness.fleet.kept import RETURNED, Book, Kept, found_at
from bitwitness.fleet.patience import Patience
from bitwitness.fleet.policy import FleetPolicy

logger = logging.getLogger(__name__)

_ROOMY = Census(1_000_000_000, 0)
_REST = 20.0
"""A cluster that takes a second to be counted is not counted again within so many of them, while nothing is done anyway."""
_LONGEST_REST = 60.0
OUT = "told:out:"
"""What the key begins with under which it is noted that the node of a proposal is out while its act is not done yet."""


class Holder:
    """Says what holds a proposal.

    Args:
        book: what is kept.
        cluster: that is counted.
        policy: the limits.
        patience: how long a round may wait for the cluster.

    Attributes:
        error: why the cluster could not be counted in this round, or "".
    """

    def __init__(self, book: Book, cluster: Cluster, policy: FleetPolicy, patience: Patience) -> None:
        self._book, self._cluster, self._policy, self._patience = book, cluster, policy, patience
        self._clock = book.state.clock
        self._census: Census | None = None
        self._acted: list[tuple[datetime, str]] | None = None
        self._full: tuple[Census, float] | None = None
        self.error = ""

    def forget(self) -> None:
        """Ask anew: another round begins, or something was done."""
        self._census, self._acted, self.error = None, None, ""
        self._full = None

    def renew(self) -> None:
        """Another round begins: count anew, but not at once where that takes long and there was no room for another node."""
        full, now = self._full, self._clock.ticks()
        self.forget()
        if full is not None and now < full[1]:
            self._full, self._census = full, full[0]

    def hold(self, kept: Kept, but: int = 0) -> Hold | None:
        """What holds a proposal now; `but`: an intent that does not count, because it is its own."""
        now = self._clock.now()
        if but:
            acted = self._book.acted(HOUR, but=but)
        else:
            self._acted = acted = self._book.acted(HOUR) if self._acted is None else self._acted
        made = min(now - kept.waited, self.happened(kept) or now)

        def asked(census: Census | None) -> Hold | None:
            return hold(kept.proposal, made=made, acted=acted, census=census, now=now, policy=self._policy)

        # What holds whatever the cluster's size is needs no count, which for a large one takes seconds.
        return asked(_ROOMY) or asked(self._counted())

    def happened(self, kept: Kept) -> datetime | None:
        """When the incident was: a controller that is new to a run must not act on what was repaired months ago.

        Not of a device that came back, which is news however old its incident is.
        """
        known = self._book.incident(kept.proposal.incident)
        return None if known is None or kept.number >= RETURNED else found_at(known, self._clock.now())

    def _counted(self) -> Census | None:
        """The census of this round; what was begun and is not shown yet counts as out already."""
        if not self._policy.act or self.error:
            return None
        if self._census is None:
            began = self._clock.ticks()
            try:
                seen = self._patience.ask(self._cluster.census)
            except (ClusterError, OSError) as error:
                self.error = str(error)
                logger.warning("the cluster cannot be counted: %s", error)
                return None
            shown = self._book.state.said(OUT)
            hidden = {
                one.act.node
                for one in self._book.intents(unsettled=True)
                if one.outcome is None and f"{OUT}{one.proposal}" not in shown
            }
            self._census = Census(seen.total, seen.out + len(hidden))
            if self._census.out >= self._policy.allowed_out(seen.total):
                took = self._clock.ticks() - began
                self._full = (self._census, began + took + min(_LONGEST_REST, _REST * took))
        return self._census
