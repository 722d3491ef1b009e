"""Tables as CSV, row by row, so that ten million of them need no memory; for spreadsheets, which take text for formulas.

A cell that a spreadsheet would run gets an apostrophe before it: names of nodes and reasons come from elsewhere. Numbers stay
numbers.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from bitwitness.store import queries
from bitwitness.web.context import LARGEST_KEY, Data
from bitwitness.web.manners import HEAD
from bitwitness.web.rendering import plain

Table = Literal["runs", "incidents", "observations", "ledger", "checkpoints", "audit", "drills", "nodes"]
OfRun = Annotated[int | None, Query(ge=1, le=LARGEST_KEY, description="key of a run; all of them if absent")]
AT_ONCE = 4
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What a cell of text must not begin with; the last four are what some spreadsheets take for the first four."""
_ROWS = 500

router = APIRouter(tags=["Tables"])


@router.get("/export/{table}.csv", response_class=Response, responses={200: {"content": {"text/csv": {}}}})
def export(request: Request, data: Data, table: Table, run: OfRun = None) -> Response:
    """A table as CSV, of one run or of all. Cells that a spreadsheet would run begin with an apostrophe."""
    file = f"bitwitness-{table}" + ("" if run is None else f"-run-{run}")
    headers = {"Content-Disposition": f'attachment; filename="{file}.csv"'}
    if request.scope.get(HEAD):
        return Response(media_type="text/csv", headers=headers)
    running: threading.BoundedSemaphore = request.app.state.exports
    if not running.acquire(blocking=False):
        raise HTTPException(503, "too many tables are fetched at once: try again", {"Retry-After": "10"})
    try:
        columns, rows = queries.export(data, table, run=run)
        body = _stream(lines(columns, rows), rows, running)
    except BaseException:
        running.release()
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


async def _stream(parts: Iterator[bytes], rows: Any, running: threading.BoundedSemaphore) -> AsyncIterator[bytes]:
    """The parts; whoever goes away before the end holds neither a place nor a connection of the database any more."""
    try:
        while (part := await run_in_threadpool(next, parts, b"")) != b"":
            yield part
    finally:
        running.release()
        if hasattr(rows, "close"):
            rows.close()
