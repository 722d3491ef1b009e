"""Acts from the console: what would be done is shown first, then done once, by a signed-in operator, with a reason that is kept.

GET shows which permissions an act needs and has, the exact calls, and who is told. POST looks and plans again, and does only what was shown.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar
from urllib.parse import parse_qs

from fastapi import APIRouter, Depends, FastAPI, Path
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from bitwitness.errors import BitwitnessError, ClusterError, ConfigurationError, NotFound
from bitwitness.fleet.kept_answers import Said
from bitwitness.store.queries.places import controller_place, run_place
from bitwitness.web import links
from bitwitness.web.acting_fleet import Answering, HealthCheck, Returning, fleet_of
from bitwitness.web.acting_offers import (
    DOING,
    HERE,
    LOOKING,
    Bounded,
    Doing,
    Done,
    NotAnswered,
    Sent,
    as_record,
    refused,
    sentence,
)
from bitwitness.web.acting_once import Forms, Stale, UnderWay
from bitwitness.web.acting_runs import Clearing, Judging, run_of
from bitwitness.web.context import LARGEST_KEY, Data, Given, Key
from bitwitness.web.rendering import as_json, render, wants_page
from bitwitness.web.security import acting
from bitwitness.web.sessions import Session

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_REASON = 2000
_FORM = "application/x-www-form-urlencoded"
Operator = Annotated[Session, Depends(acting)]
Controller = Annotated[int, Path(ge=1, le=LARGEST_KEY, description="key of a controller")]
Proposal = Annotated[int, Path(ge=1, le=LARGEST_KEY, description="key of a proposal")]
Name = Annotated[str, Path(max_length=2000)]
Id = Annotated[str, Path(max_length=300)]

router = APIRouter(include_in_schema=False)


class Acting:
    """What all acts of one console share: its forms, how many wait for clusters, and how many for nothing but files."""

    def __init__(self) -> None:
        self.forms, self.clusters, self.here = Forms(), Bounded(), Bounded(HERE, HERE)
        self.looking, self.doing = LOOKING, DOING

    def run(self, what: Callable[[], T], limit: float, node: str) -> T:
        """Run what may hang; `node`: whose cluster it asks, "" for none."""
        return self.clusters.run(what, limit, node) if node else self.here.run(what, limit)


_making = threading.Lock()


def acting_of(app: FastAPI) -> Acting:
    """What the acts of a console share."""
    with _making:
        found: Acting | None = getattr(app.state, "acting", None)
        if found is None:
            found = app.state.acting = Acting()
        return found


async def _sent(request: Request) -> Sent:
    """What a form has sent."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        raise HTTPException(415, f"an act is sent as a form ({_FORM})")
    try:
        fields = parse_qs((await request.body()).decode(), keep_blank_values=True, max_num_fields=500)
    except ValueError as error:
        raise HTTPException(400, "the form cannot be read") from error
    one = {name: values[0] for name, values in fields.items() if len(values) == 1}
    chosen = {name: tuple(values) for name, values in fields.items() if name not in ("csrf", "form", "shown", "why")}
    return Sent(one.get("form", ""), one.get("shown", ""), one.get("why", "").strip(), chosen)


Form = Annotated[Sent, Depends(_sent)]


# Showing and doing -----------------------------------------------------------------------------------------------------


def _show(
    request: Request,
    who: Session,
    make: Callable[[], Doing],
    *,
    node: str = "",
    status: int = 200,
    text: str = "",
    why: str = "",
) -> Response:
    """The offer as it stands now, with a form of its own."""
    shared = acting_of(request.app)
    try:
        offer = shared.run(lambda: make().offer(), shared.looking, node)
    except NotFound as error:
        return _tell(request, refused("There is no such thing", str(error), links.fleet(), 404))
    except ConfigurationError as error:
        return _tell(request, refused("That cannot be done", str(error), links.fleet()))
    except (BitwitnessError, OSError) as error:
        kind = 504 if isinstance(error, NotAnswered) else 502
        return _tell(
            request, refused("Nothing was done", f"What would be done could not be seen: {error}", links.fleet(), kind)
        )
    token = shared.forms.issue(request.url.path, who.name)
    if not wants_page(request):
        return as_json(as_record(offer, form=token, error=text), status)
    return render(
        request, "act_offer.html.jinja", status, page=offer, form=token, text=text, why=why, most=_LONGEST_REASON
    )


def _do(request: Request, who: Session, sent: Sent, make: Callable[[], Doing], *, node: str = "") -> Response:
    """Do what a form asks for, once."""
    shared = acting_of(request.app)
    if not sent.why or len(sent.why) > _LONGEST_REASON:
        text = f"Say why, in at most {_LONGEST_REASON} characters: it is kept with what is done."
        return _show(request, who, make, node=node, status=422, text=text, why=sent.why[:_LONGEST_REASON])
    try:
        before = shared.forms.claim(sent.form, request.url.path, who.name)
    except Stale:
        text = "The form was too old, or not from here. Nothing was done: look at it again."
        return _show(request, who, make, node=node, status=409, text=text, why=sent.why)
    except UnderWay:
        text = "The same form was sent before, and that is under way. Nothing was done a second time: look at the page in a moment."
        return _tell(request, Done(202, "It is under way", text, "unknown", links.fleet()))
    if before is not None:
        return _tell(request, before)
    try:
        work = partial(_work, shared, sent, f"{who.name} (console)", make)
        done = shared.run(work, shared.doing, node)
    except NotAnswered as error:
        if str(error).startswith("too many"):
            shared.forms.release(sent.form)
            return _tell(request, refused("Nothing was done", str(error), links.fleet(), 503))
        text = f"{error}. It goes on, so it may still happen, or have happened: look at the node and at its history before you try again."
        return _tell(request, Done(504, "It is not known what happened", text, "unknown", links.fleet()))
    if done.status == 409 and done.happened == "no" and done.title == _CHANGED:
        return _show(request, who, make, node=node, status=409, text=done.text, why=sent.why)
    return _tell(request, done)


_CHANGED = "It has changed"


def _work(shared: Acting, sent: Sent, who: str, make: Callable[[], Doing]) -> Done:
    """Look and plan again, and do what was shown; whatever comes of it is kept for a second click, also where nobody waits any more."""
    back, begun, several = links.fleet(), False, False
    try:
        doing = make()
        offer = doing.offer()
        several = isinstance(doing, Returning) and len(offer.calls) > 1
        back = offer.back
        if offer.digest != sent.shown:
            text = "What would be done is not what was shown any more, so nothing was done. This is how it stands now."
            done = refused(_CHANGED, text, back)
        else:
            begun = True
            done = doing.do(offer, sent, who)
    except NotFound as error:
        done = refused("There is no such thing", str(error), back, 404)
    except BitwitnessError as error:
        done = _failed(error, back, begun=begun, several=several)
        if isinstance(error, ConfigurationError) and done.happened == "no":
            shared.forms.release(sent.form)  # e.g. nothing was chosen: the same form may be sent again
            return done
    except Exception:
        logger.exception("an act of %s", who)
        text = "This failed in a way that nobody foresaw: the log of the console says how."
        done = Done(500, "It failed", f"{text} {_MAY if begun else _NOT}", "unknown" if begun else "no", back)
    logger.info("%s: %s: %s (%s)", who, done.title, done.text, done.happened)
    shared.forms.finish(sent.form, done)
    return done


_MAY = "Something may have happened: look at the node and at its history before you try again."
_NOT = "Nothing was done."


def _failed(error: BitwitnessError, back: str, *, begun: bool, several: bool) -> Done:
    """What an error means for what was to be done; of several calls the first may have been made when another was refused."""
    of_cluster = isinstance(error, ClusterError)
    certain = not of_cluster or (isinstance(error, ClusterError) and error.refused)
    unsure = begun and (several or not certain)
    status = 502 if of_cluster else 409 if isinstance(error, ConfigurationError) else 503
    title = "The cluster did not do it" if of_cluster else "It was not done"
    return Done(
        status, title, f"{sentence(str(error))} {_MAY if unsure else _NOT}", "unknown" if unsure else "no", back
    )


def _tell(request: Request, done: Done) -> Response:
    if not wants_page(request):
        return as_json(as_record(done), done.status)
    return render(request, "act_done.html.jinja", done.status, page=done)


# What there is to do ----------------------------------------------------------------------------------------------------


def _answering(
    request: Request, data: Data, settings: Given, controller: int, key: int, said: Said
) -> Callable[[], Doing]:
    def make() -> Doing:
        folder = controller_place(data, controller)
        if folder.resolve() not in {one.resolve() for one in settings.fleets}:
            raise ConfigurationError(
                f"this console was not started with --fleet {folder}: it answers only for its own controllers"
            )
        return Answering(folder, key, said, acting_of(request.app).clusters)

    return make


@router.get("/fleet/proposals/{controller}/{key}/approve")
def show_approve(
    request: Request, who: Operator, data: Data, settings: Given, controller: Controller, key: Proposal
) -> Response:
    """What an approval would have done."""
    return _show(request, who, _answering(request, data, settings, controller, key, "approved"))


@router.post("/fleet/proposals/{controller}/{key}/approve")
def approve(
    request: Request, who: Operator, data: Data, settings: Given, controller: Controller, key: Proposal, sent: Form
) -> Response:
    """Approve it."""
    return _do(request, who, sent, _answering(request, data, settings, controller, key, "approved"))


@router.get("/fleet/proposals/{controller}/{key}/reject")
def show_reject(
    request: Request, who: Operator, data: Data, settings: Given, controller: Controller, key: Proposal
) -> Response:
    """What a rejection means."""
    return _show(request, who, _answering(request, data, settings, controller, key, "rejected"))


@router.post("/fleet/proposals/{controller}/{key}/reject")
def reject(
    request: Request, who: Operator, data: Data, settings: Given, controller: Controller, key: Proposal, sent: Form
) -> Response:
    """Reject it."""
    return _do(request, who, sent, _answering(request, data, settings, controller, key, "rejected"))


def _of_node(kind: type[Returning | HealthCheck], settings: Given, name: str, fleet: str) -> Callable[[], Doing]:
    def make() -> Doing:
        node = links.name_of(name)
        return kind(fleet_of(node, settings.fleets, fleet), node)

    return make


@router.get("/act/return/{name:path}")
def show_return(request: Request, who: Operator, settings: Given, name: Name, fleet: str = "") -> Response:
    """What a return would do."""
    return _show(request, who, _of_node(Returning, settings, name, fleet), node=name)


@router.post("/act/return/{name:path}")
def return_node(request: Request, who: Operator, settings: Given, name: Name, sent: Form, fleet: str = "") -> Response:
    """Return a node to service."""
    return _do(request, who, sent, _of_node(Returning, settings, name, fleet), node=name)


@router.get("/act/health-check/{name:path}")
def show_health_check(request: Request, who: Operator, settings: Given, name: Name, fleet: str = "") -> Response:
    """What a health check would do."""
    return _show(request, who, _of_node(HealthCheck, settings, name, fleet), node=name)


@router.post("/act/health-check/{name:path}")
def health_check(request: Request, who: Operator, settings: Given, name: Name, sent: Form, fleet: str = "") -> Response:
    """Start a health check of a node."""
    return _do(request, who, sent, _of_node(HealthCheck, settings, name, fleet), node=name)


def _of_run(data: Data, settings: Given, key: int, incident: str = "") -> Callable[[], Doing]:
    def make() -> Doing:
        path, run = run_place(data, key)
        files = run_of(path, run, settings.runs, settings.parents)
        return Judging(files, key, incident) if incident else Clearing(files, key)

    return make


@router.get("/runs/{key}/quarantine/clear")
def show_clear(request: Request, who: Operator, data: Data, settings: Given, key: Key) -> Response:
    """Who could be cleared."""
    return _show(request, who, _of_run(data, settings, key))


@router.post("/runs/{key}/quarantine/clear")
def clear_quarantine(request: Request, who: Operator, data: Data, settings: Given, key: Key, sent: Form) -> Response:
    """Clear them."""
    return _do(request, who, sent, _of_run(data, settings, key))


@router.get("/runs/{key}/incidents/{incident_id}/judge")
def show_judge(request: Request, who: Operator, data: Data, settings: Given, key: Key, incident_id: Id) -> Response:
    """What could be said of an incident."""
    return _show(request, who, _of_run(data, settings, key, incident_id))


@router.post("/runs/{key}/incidents/{incident_id}/judge")
def judge(
    request: Request, who: Operator, data: Data, settings: Given, key: Key, incident_id: Id, sent: Form
) -> Response:
    """Say it."""
    return _do(request, who, sent, _of_run(data, settings, key, incident_id))
