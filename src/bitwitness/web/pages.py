"""One table of all pages: their address, the record that they say, the template that draws it, and the JSON that is the same record.

A page is added here or nowhere, so that none can be without its twin, nor a twin say what no page does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from bitwitness.store import pages, queries
from bitwitness.web import links
from bitwitness.web.context import Data, Key
from bitwitness.web.events import Changes
from bitwitness.web.rendering import as_json, problem, render

_LONGEST = 200
Searched = Annotated[str, Query(max_length=_LONGEST, description="part of a name")]
Exact = Annotated[str, Query(max_length=_LONGEST, description="only of this one")]
Number = Annotated[int, Query(ge=1, le=10**6, description="which page of the list")]
Size = Annotated[int, Query(ge=1, le=500, description="rows of a page of the list")]
State = Annotated[Literal["", "training", "silent", "finished", "stopped", "failed", "unknown"], Query()]
OfNode = Annotated[
    Literal["", "in service", "out", "acting", "waits for approval", "held", "suspected", "unclear", "unknown"], Query()
]
Id = Annotated[str, Path(max_length=300, description="id of an incident")]
Name = Annotated[str, Path(max_length=2000, description="name, percent-encoded")]


@dataclass(frozen=True, slots=True)
class Page:
    """A page.

    Attributes:
        name: of it; of its template as well.
        address: with what changes in braces.
        twin: the address of its JSON.
        record: what it says.
        ask: makes the record, from what is in the address.
        title: in a few words.
    """

    name: str
    address: str
    twin: str
    record: type
    ask: Callable[..., Any]
    title: str


def runs(data: Data, query: Searched = "", state: State = "", page: Number = 1, size: Size = 50) -> pages.RunsPage:
    """All runs, those that need a person first."""
    return queries.runs_page(data, query=query, state=state, page=page, size=size)


def run(data: Data, key: Key) -> pages.RunPage:
    """One run."""
    return queries.run_page(data, key)


def incident(data: Data, key: Key, incident_id: Id) -> pages.IncidentPage:
    """One incident."""
    return queries.incident_page(data, key, incident_id)


def node(data: Data, name: Name) -> pages.NodePage:
    """A node through all runs."""
    return queries.node_page(data, links.name_of(name))


def device(data: Data, name: Name) -> pages.NodePage:
    """A device through all runs, nodes and ranks."""
    return queries.device_page(data, links.name_of(name))


def fleet(data: Data, query: Searched = "", state: OfNode = "", page: Number = 1, size: Size = 100) -> pages.FleetPage:
    """All nodes, and what is to be done about them."""
    return queries.fleet_page(data, query=query, state=state, page=page, size=size)


def drills(data: Data, page: Number = 1, size: Size = 100) -> pages.DrillsPage:
    """Injected faults and what came of them, and false alarms."""
    return queries.drills_page(data, page=page, size=size)


PAGES = (
    Page("runs", "/", "/api/runs", pages.RunsPage, runs, "Runs"),
    Page("run", "/runs/{key}", "/api/runs/{key}", pages.RunPage, run, "One run"),
    Page(
        "incident",
        "/runs/{key}/incidents/{incident_id}",
        "/api/runs/{key}/incidents/{incident_id}",
        pages.IncidentPage,
        incident,
        "One incident",
    ),
    Page("node", "/nodes/{name:path}", "/api/nodes/{name:path}", pages.NodePage, node, "One node"),
    Page("device", "/devices/{name:path}", "/api/devices/{name:path}", pages.NodePage, device, "One device"),
    Page("fleet", "/fleet", "/api/fleet", pages.FleetPage, fleet, "Nodes"),
    Page("drills", "/drills", "/api/drills", pages.DrillsPage, drills, "Drills and false alarms"),
)


def _router() -> APIRouter:
    """The pages, their twins, and what leads to a page."""
    made = APIRouter()
    for page in PAGES:
        made.add_api_route(
            page.twin,
            _twin(page),
            methods=["GET"],
            response_model=page.record,
            name=f"{page.name}_json",
            summary=page.title,
            description=inspect.getdoc(page.record),
            tags=["Pages"],
        )
        made.add_api_route(page.address, _page(page), methods=["GET"], name=page.name, include_in_schema=False)
    made.add_api_route(
        "/api/history", history, methods=["GET"], response_model=tuple[pages.AuditRow, ...], tags=["Pages"]
    )
    made.add_api_route("/incidents/{incident_id}", find_incident, methods=["GET"], include_in_schema=False)
    return made


def history(
    data: Data, node: Exact = "", incident: Exact = "", who: Exact = "", page: Number = 1, size: Size = 100
) -> Response:
    """Who did what, of all sources, newest first: all of what pages show a part of."""
    return as_json(queries.history(data, node=node, incident=incident, who=who, page=page, size=size))


def find_incident(request: Request, data: Data, incident_id: Id) -> Response:
    """To the page of an incident whose run is not known; where several runs have one of this name, to the newest."""
    keys = queries.find_incident(data, incident_id)
    if not keys:
        raise HTTPException(404, "there is no such incident here; was its run imported?")
    return RedirectResponse(links.incident(keys[0], incident_id), 303)


def _counter(request: Request) -> int:
    """The change counter before the record is made: what changes meanwhile is told to the page once it is open."""
    changes: Changes = request.app.state.changes
    return changes.refresh()


Counter = Annotated[int, Depends(_counter)]


def _twin(page: Page) -> Callable[..., Response]:
    asked = Depends(page.ask)

    def twin(record: Any = asked) -> Response:
        return as_json(record)

    return twin


def _page(page: Page) -> Callable[..., Response]:
    asked, template = Depends(page.ask), f"{'node' if page.name == 'device' else page.name}.html.jinja"

    def show(request: Request, counter: Counter, record: Any = asked) -> Response:
        request.state.change = counter
        address = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return render(request, template, page=record, here=page.name, twin=links.twin(address))

    return show


def not_found(request: Request, error: Exception) -> Response:
    """What the database does not have."""
    return problem(request, 404, str(error))


router = _router()
