"""The figures of a controller for Prometheus and its page, from its database; apart because they need an extra."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Literal

from bitwitness.fleet.budget import HOUR, left
from bitwitness.fleet.clock import Clock, moment
from bitwitness.fleet.exposition import TROUBLES, Figures, Recent
from bitwitness.fleet.kept import Book
from bitwitness.fleet.outbox import Outbox
from bitwitness.fleet.state import State

_RECENT = 20
_A_DAY = timedelta(days=1)


def figures(folder: Path, clock: Clock | None = None) -> Figures:
    """What the controller of this state has seen and done; may be called from any thread.

    Raises:
        BitwitnessError: the database cannot be read.
    """
    with State(folder, clock=clock, create=False, check=False, write=False) as state:
        return figures_of(state)


def figures_of(state: State) -> Figures:
    """The same of an open state."""
    book, about = Book(state), state.about()
    proposals: dict[tuple[str, str], int] = defaultdict(int)
    for action, status, _, count in book.tally():
        proposals[action, status] += count
    messages, limit = Outbox(state, ()).waiting(), int(about.get("nodes_per_hour") or 0)
    mode: Literal["observe", "act"] = "act" if about.get("mode") == "act" else "observe"
    return Figures(
        mode=mode,
        cluster=about.get("cluster", ""),
        incidents=book.incidents(),
        proposals=dict(proposals),
        acts=book.acts(),
        held=_held(state),
        troubles=dict(Counter(_kind(key) for key in state.said() if not key.startswith("told:"))),
        unsettled=sum(one.outcome is None for one in book.intents(unsettled=True)),
        budget_used=left(book.acted(HOUR), state.clock.now(), limit).used,
        budget_limit=limit,
        last_round=_unix(about.get("round")),
        started=_unix(about.get("started")),
        round_seconds=float(about["round_seconds"]) if about.get("round_seconds") else None,
        condemned=len(book.condemned()),
        returned=len({one["device"] for one in book.returns()}),
        messages_pending=messages["waiting"],
        messages_failed=messages["failed"],
        oldest_message=_unix(messages["oldest"]),
        recent=tuple(_recent(book)),
    )


def _held(state: State) -> dict[str, int]:
    """What holds how many. What the cluster can never do stands there for a day: it is told, and no cluster that is silent."""
    since = state.stamp(state.clock.now() - _A_DAY)
    rows = state.read(
        "SELECT hold, COUNT(*) FROM proposals WHERE status IN ('held', 'observed') "
        "AND (final = 0 OR hold != 'cluster' OR updated > ?) GROUP BY hold",
        (since,),
    )
    return {str(hold): int(count) for hold, count in rows}


def _kind(key: str) -> str:
    kind = key.partition(":")[0]
    return kind if kind in TROUBLES else "other"


def _unix(time: str | None) -> float | None:
    return moment(time).timestamp() if time else None


def _recent(book: Book) -> list[Recent]:
    last = sorted(book.proposals(last=_RECENT), key=lambda one: one.updated, reverse=True)
    return [
        Recent(
            one.updated,
            one.proposal.incident,
            one.proposal.node,
            one.proposal.action,
            one.status,
            one.why or one.proposal.reason,
        )
        for one in last
    ]
