"""Tables as CSV, row by row, so that ten million of them need no memory; for spreadsheets, which take text for formulas.

A cell that a spreadsheet would run gets an apostrophe before it: names of nodes and reasons come from elsewhere. Numbers stay
numbers. Each that is fetched holds a connection of the database, so there are only some at once, and of one person fewer.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from bitwitness.fleet.clients import network
from bitwitness.store import queries
from bitwitness.web.context import LARGEST_KEY, Data
from bitwitness.web.manners import HEAD
from bitwitness.web.rendering import plain
from bitwitness.web.security import client_of, signed_in

Table = Literal["runs", "incidents", "observations", "ledger", "checkpoints", "audit", "drills", "nodes"]
OfRun = Annotated[int | None, Query(ge=1, le=LARGEST_KEY, description="key of a run; all of them if absent")]
AT_ONCE, OF_ONE = 6, 2
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What a cell of text must not begin with; the last four are what some spreadsheets take for the first four."""
_ROWS = 500

router = APIRouter(tags=["Tables"])


class Exports:
    """Who fetches tables now; safe in threads."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._running.total()

    def enter(self, who: str) -> None:
        """Begin one.

        Raises:
            HTTPException: 503 where there are too many.
        """
        with self._lock:
            if self._running[who] >= OF_ONE:
                said = f"{OF_ONE} tables are being fetched for you: try again when one of them is done or given up"
                raise HTTPException(503, said, {"Retry-After": "10"})
            if len(self) >= AT_ONCE:
                said = f"{AT_ONCE} tables are being fetched, and no more at once: try again when one of them is done"
                raise HTTPException(503, said, {"Retry-After": "30"})
            self._running[who] += 1

    def leave(self, who: str) -> None:
        """End it."""
        with self._lock:
            self._running -= Counter({who: 1})


@router.get("/export/{table}.csv", response_class=Response, responses={200: {"content": {"text/csv": {}}}})
def export(request: Request, data: Data, table: Table, run: OfRun = None) -> Response:
    """A table as CSV, of one run or of all. Cells that a spreadsheet would run begin with an apostrophe."""
    file = f"bitwitness-{table}" + ("" if run is None else f"-run-{run}")
    headers = {"Content-Disposition": f'attachment; filename="{file}.csv"'}
    if request.scope.get(HEAD):
        return Response(media_type="text/csv", headers=headers)
    running: Exports = request.app.state.exports
    session = signed_in(request)
    who = f"user {session.name}" if session is not None else network(client_of(request))
    running.enter(who)
    try:
        columns, rows = queries.export(data, table, run=run)
        body = _stream(lines(columns, rows), rows, partial(running.leave, who))
    except BaseException:
        running.leave(who)
        raise
    return StreamingResponse(body, media_type="text/csv", headers=headers)


def lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[bytes]:
    """A table as CSV in parts of some hundred rows."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow([cell(name) for name in columns])
    rest = iter(rows)
    while True:
        part = list(itertools.islice(rest, _ROWS))
        writer.writerows([[cell(value) for value in row] for row in part])
        yield buffer.getvalue().encode(errors="replace")
        if len(part) < _ROWS:
            return
        buffer.seek(0)
        buffer.truncate()


def cell(value: Any) -> Any:
    """A value as a spreadsheet may have it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
    text = text.replace("\0", "\ufffd")
    return f"'{text}" if text.lstrip(" \u00a0\ufeff").startswith(_FORMULA) else text


async def _stream(parts: Iterator[bytes], rows: Any, leave: Callable[[], None]) -> AsyncIterator[bytes]:
    """The parts; whoever goes away before the end holds neither a place nor a connection of the database any more."""
    try:
        while (part := await run_in_threadpool(next, parts, b"")) != b"":
            yield part
    finally:
        leave()
        if hasattr(rows, "close"):
            rows.close()
