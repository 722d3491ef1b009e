"""Acting from the console: what is shown is what is done, once, by whom may, and nothing is done where anything has changed."""

from __future__ import annotations

import html
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from bitwitness.fleet.answering import answer
from bitwitness.fleet.clusters.base import ActKind
from bitwitness.fleet.kept_answers import Questions
from bitwitness.runfiles import RunFiles
from bitwitness.store import queries
from bitwitness.store.database import Database
from bitwitness.store.importing import Importer
from bitwitness.store.tables import controllers, runs
from bitwitness.web import links
from bitwitness.web.acting import Acting, acting_of
from bitwitness.web.acting_offers import HERE, LOOKING
from bitwitness.web.acting_once import Forms, Stale
from bitwitness.web.security import COOKIE
from bitwitness.web.settings import Settings
from bitwitness.web.users import Role, UsersFile, add
from tests.fleet.rehearsal import ACT, Rehearsal
from tests.web.client import Browser, Console, console
from tests.web.records import HOSTILE

ALL: frozenset[ActKind] = frozenset({"drain", "reboot", "replace"})
FIELD = re.compile(r'<input type="hidden" name="(csrf|form|shown)" value="([^"]*)">')
WHY = "seen twice on the bench"


@dataclass
class World:
    """A fleet with a controller, a database that knows of it, and a console with which one may act."""

    play: Rehearsal
    database: Database
    console: Console
    kim: Browser
    lee: Browser
    tokens: dict[str, str]

    def question(self) -> Any:
        (found,) = Questions(self.play.state).waiting()
        return found

    def approve(self) -> str:
        return links.approve("1", self.question().proposal)

    def reject(self) -> str:
        return links.reject("1", self.question().proposal)


def form_of(page: httpx.Response) -> dict[str, str]:
    """The hidden fields of the form of an act."""
    main = page.text.partition('class="act"')[2]
    found = {name: html.unescape(value) for name, value in FIELD.findall(main)}
    assert set(found) == {"csrf", "form", "shown"}, page.text
    return found


def act(browser: Browser, address: str, why: str = WHY, **more: Any) -> httpx.Response:
    """Look at an act, and do it."""
    return browser.post(address, {**form_of(browser.get(address)), "why": why, **more})


@dataclass(frozen=True)
class Base:
    """What takes a while to make: a console, which is given another fleet and another run by each test."""

    console: Console
    users: UsersFile
    tokens: dict[str, str]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Base]:
    folder = tmp_path_factory.mktemp("console")
    roles: tuple[tuple[str, Role], ...] = (("kim", "operator"), ("lee", "operator"), ("vi", "viewer"))
    # Tokens, because a password is slow to check, as it must be.
    tokens = {name: add(folder / "users.json", name, role) for name, role in roles}
    users = UsersFile(folder / "users.json")
    with (
        Database(folder / "console.db") as database,
        console(database, Settings(allow_actions=True, users=users)) as here,
        here.stack,
    ):
        yield Base(here, users, tokens)


@pytest.fixture
def world(tmp_path: Path, base: Base) -> Iterator[World]:
    """n1 is to be drained, and a person is asked."""
    with ExitStack() as stack:
        yield made(stack, tmp_path, base)


def made(stack: ExitStack, folder: Path, base: Base, *, allow: bool = True, fleet: bool = True) -> World:
    play = Rehearsal(folder, policy=replace(ACT, approve=ALL))
    stack.callback(play.end)
    settings = {"cluster": {"kind": "fake", "file": str(folder / "cluster.json")}, "notifiers": ["listener"]}
    with play.state.change():
        play.state.set_about(sources=json.dumps(settings))
    RunFiles(play.run_dir).create().write_run({"run": "r1"})
    play.incident()
    play.rounds(2)
    here, database = base.console, base.console.database
    with database.write() as connection:
        for table in (controllers, runs):
            connection.execute(sa.delete(table))
        connection.execute(sa.insert(controllers).values(id=1, place="c", path=str(play.state.folder)))
        connection.execute(
            sa.insert(runs).values(id=1, place="r", path=str(play.run_dir), run="r1", name="run", current=True)
        )
    given = Settings(
        allow_actions=allow,
        users=base.users,
        fleets=(play.state.folder,) if fleet else (),
        runs=(play.run_dir,) if fleet else (),
    )
    if not allow:
        here = stack.enter_context(console(database, given))
        stack.enter_context(here.stack)
    here.app.state.settings, here.app.state.acting = given, Acting()
    return World(play, database, here, signed_in(here, "kim"), signed_in(here, "lee"), base.tokens)


def signed_in(here: Console, name: str) -> Browser:
    """A browser that holds what it gets when somebody signs in there."""
    browser = here.browser()
    user = here.app.state.settings.users.named(name)
    browser.client.cookies.set(COOKIE, here.app.state.sessions.begin(user))
    return browser


# Shown first -----------------------------------------------------------------------------------------------------------


def test_permissions_come_first_then_the_exact_calls_who_is_told_and_a_form(world: World) -> None:
    page = world.kim.get(world.approve())
    assert page.status_code == 200
    places = [
        page.text.index(part)
        for part in (
            "Permissions it needs",
            "right to drain",
            "The exact calls",
            "fake drain n1",
            "Who is told",
            "listener: when it is done",
            'name="why"',
        )
    ]
    assert places == sorted(places)
    assert "required" in page.text[places[-1] : places[-1] + 120]
    assert world.play.cluster.calls() == []
    world.play.cluster.forbid("drain")
    assert "forbidden: drain" in world.kim.get(world.approve()).text


def test_what_cannot_be_tried_stays_unknown(world: World) -> None:
    world.play.cluster.unreachable()
    page = world.kim.get(world.approve())
    assert page.status_code == 200
    assert ">unknown</b>" in page.text
    assert "fake drain n1" in page.text, "what was planned when it was asked"


# Approving -------------------------------------------------------------------------------------------------------------


def test_an_approval_is_acted_upon_once_and_says_who(world: World) -> None:
    address = world.approve()
    done = act(world.kim, address)
    assert (done.status_code, "is approved" in done.text) == (200, True)
    assert world.play.cluster.calls() == []
    world.play.rounds(5)
    assert world.play.cluster.calls() == [("drain", "n1")]
    (said,) = world.play.state.history(what="approved")
    assert (said.who, said.text) == ("kim (console)", WHY)
    assert world.play.statuses() == {"n1": "done"}


def test_a_second_click_answers_with_what_the_first_did(world: World) -> None:
    address = world.approve()
    form = {**form_of(world.kim.get(address)), "why": WHY}
    first, second = world.kim.post(address, form), world.kim.post(address, form)
    assert (first.status_code, second.status_code) == (200, 200)
    assert "This form was sent before" in second.text
    assert "This form was sent before" not in first.text
    assert len(world.play.state.history(what="approved")) == 1


def test_two_operators(world: World) -> None:
    address = world.approve()
    mine, theirs = form_of(world.kim.get(address)), form_of(world.lee.get(address))
    assert world.kim.post(address, {**mine, "why": WHY}).status_code == 200
    late = world.lee.post(address, {**theirs, "why": "me too"})
    assert (late.status_code, "approved by kim (console)" in late.text) == (409, True)
    world.play.rounds(3)
    assert world.play.cluster.calls() == [("drain", "n1")]
    assert [one.who for one in world.play.state.history(what="approved")] == ["kim (console)"]


def test_many_clicks_at_once(world: World) -> None:
    address = world.approve()
    form = {**form_of(world.kim.get(address)), "why": WHY}
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda: codes.append(world.kim.post(address, form).status_code)) for _ in range(8)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert set(codes) <= {200, 202}
    assert 200 in codes
    assert len(world.play.state.history(what="approved")) == 1


def test_a_rejection(world: World) -> None:
    done = act(world.kim, world.reject(), "it is on the bench")
    assert (done.status_code, "is rejected" in done.text) == (200, True)
    world.play.rounds(3)
    assert (world.play.cluster.calls(), world.play.statuses()) == ([], {"n1": "rejected"})


@pytest.mark.parametrize("said", ["approved", "rejected"])
def test_an_answer_is_taken_although_the_cluster_hangs(
    world: World, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setattr("bitwitness.web.acting_fleet._ASKING", 0.05)
    over = hang(monkeypatch, "look")
    address = world.approve() if said == "approved" else world.reject()
    form = {**form_of(world.kim.get(address)), "why": WHY}
    shared = acting_of(world.console.app)
    shared.looking = 0.02
    for number in range(8):
        world.kim.get(links.return_node(f"n{number % 4}"))
    shared.looking = LOOKING
    for _ in range(HERE + 1):  # more than may wait at one time, of which none waits for long
        assert world.kim.get(address).status_code == 200
    done = world.kim.post(address, form)
    over.set()
    assert done.status_code == 200
    assert len(world.play.state.history(what=said)) == 1


def test_what_was_judged_away_is_shown_and_cannot_be_approved(world: World) -> None:
    run = RunFiles(world.play.run_dir)
    (path,) = run.incidents()
    approve, reject = world.approve(), world.reject()
    before = {**form_of(world.kim.get(approve)), "why": WHY}
    form = {**form_of(world.kim.get(links.judge(1, path.name))), "why": "the loss scale", "judgement": "false-alarm"}
    assert world.kim.post(links.judge(1, path.name), form).status_code == 200
    answered = world.kim.post(approve, before)
    assert (answered.status_code, "is not approved" in answered.text) == (409, True)
    assert_closed(world, approve, "judged a false alarm by kim (console)")
    world.play.rounds(3)
    assert (world.play.cluster.calls(), world.play.statuses()) == ([], {"n1": "cleared"})
    for address in (approve, reject):
        assert_closed(world, address, "is over: it is cleared")


def assert_closed(world: World, address: str, where: str) -> None:
    """It says where it stands, offers nothing, and takes nothing."""
    form = {**form_of(world.kim.get(links.judge(1, incident_of(world)))), "why": WHY}
    for page in (world.kim.get(address), world.kim.post(address, form)):
        assert (page.status_code, where in page.text) == (409, True), page.text
        assert 'class="act"' not in page.text
        assert "You approve exactly" not in page.text


def incident_of(world: World) -> str:
    (path,) = RunFiles(world.play.run_dir).incidents()
    return path.name


def test_what_was_answered_or_is_done_is_not_offered_again(world: World) -> None:
    approve, reject = world.approve(), world.reject()
    assert act(world.kim, approve).status_code == 200
    for address in (approve, reject):
        assert_closed(world, address, "was approved by kim (console)")
    world.play.rounds(3)
    for address in (approve, reject):
        assert_closed(world, address, "is over: it is done")


# What has changed ------------------------------------------------------------------------------------------------------


def test_a_form_that_shows_what_is_no_more_does_nothing(world: World) -> None:
    address = world.approve()
    form = {**form_of(world.kim.get(address)), "why": WHY}
    world.play.cluster.exchange("n1")
    answered = world.kim.post(address, form)
    assert (answered.status_code, "is not what was shown any more" in answered.text) == (409, True)
    assert WHY in answered.text, "the reason need not be written again"
    assert world.play.state.history(what="approved") == []
    assert world.kim.post(address, {**form_of(answered), "why": WHY}).status_code == 200


def test_a_form_that_was_changed(world: World) -> None:
    address = world.approve()
    for change in ("form", "shown"):
        form = {**form_of(world.kim.get(address)), "why": WHY}
        answered = world.kim.post(address, {**form, change: "x" * 32})
        assert answered.status_code == 409
    assert world.play.state.history(what="approved") == []


def test_a_form_of_somebody_else_or_of_another_act(world: World) -> None:
    address = world.approve()
    theirs = form_of(world.lee.get(address))
    mine = form_of(world.kim.get(address))
    assert world.kim.post(address, {**mine, "form": theirs["form"], "why": WHY}).status_code == 409
    assert world.kim.post(world.reject(), {**mine, "why": WHY}).status_code == 409
    assert world.play.state.history(what="approved") == []


def test_a_reason_is_required_and_the_form_may_be_sent_again(world: World) -> None:
    address = world.approve()
    form = form_of(world.kim.get(address))
    for why in ("", "   ", "x" * 2001):
        answered = world.kim.post(address, {**form, "why": why})
        assert (answered.status_code, "Say why" in answered.text) == (422, True)
    assert world.kim.post(address, {**form, "why": WHY}).status_code == 200


def test_a_reason_that_is_far_too_long_is_answered_with_the_limit(world: World) -> None:
    answered = world.kim.post(world.approve(), {"why": "x" * (65 << 10)})
    assert (answered.status_code, "at most 2000 characters" in answered.text) == (413, True)


def test_a_node_that_is_out_already_promises_no_calls(world: World) -> None:
    world.play.cluster.take_out("n1", "fan")
    page = world.kim.get(world.approve())
    assert (page.status_code, "Nothing is called." in page.text) == (200, True)
    assert "allowed: <" not in page.text.replace("\n", "")
    assert "makes these calls" not in page.text


def test_what_nobody_asks(world: World) -> None:
    for address in (links.approve("1", 99), links.approve("2", 1), links.approve("2", 1)):
        assert world.kim.get(address).status_code == 404
    assert world.kim.get("/fleet/proposals/1/0/approve").status_code == 422


# Who may ---------------------------------------------------------------------------------------------------------------


ADDRESSES = (
    links.approve("1", 1),
    links.reject("1", 1),
    links.return_node("n1"),
    links.health_check("n1"),
    links.clear_quarantine(1),
    links.judge(1, "20261129T120000Z-000001"),
)


def test_a_viewer_and_a_stranger_may_nothing(world: World) -> None:
    viewer, stranger = signed_in(world.console, "vi"), world.console.browser()
    csrf = re.findall(r'name="csrf" value="([^"]+)"', viewer.get("/api").text)[0]
    for address in ADDRESSES:
        page = viewer.get(address)
        assert (page.status_code, "vi is a viewer" in page.text) == (403, True)
        assert viewer.post(address, {"csrf": csrf, "form": "x", "shown": "x", "why": WHY}).status_code == 403
        assert stranger.get(address).status_code in (303, 401)
        assert stranger.post(address, {"form": "x", "shown": "x", "why": WHY}).status_code in (303, 401)
    assert world.play.cluster.calls() == []


def test_without_the_token_of_the_page_nothing_is_done(world: World) -> None:
    address = world.approve()
    form = {**form_of(world.kim.get(address)), "why": WHY}
    forged = {name: value for name, value in form.items() if name != "csrf"}
    assert world.kim.post(address, forged).status_code == 403
    assert world.kim.post(address, {**form, "csrf": "x"}).status_code == 403
    other = world.kim.client.post(
        address, data=form, headers={"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
    )
    assert other.status_code == 403
    assert world.play.state.history(what="approved") == []
    assert world.kim.post(address, form).status_code == 200


def test_a_console_that_only_shows(tmp_path: Path, base: Base) -> None:
    with ExitStack() as stack:
        world = made(stack, tmp_path, base, allow=False)
        for address in ADDRESSES:
            page = world.kim.get(address)
            assert (page.status_code, "--allow-actions" in page.text) == (403, True)
            assert world.kim.post(address, {"form": "x", "shown": "x", "why": WHY}).status_code == 403
        assert world.play.state.history(what="approved") == []


def test_a_console_of_no_fleet_and_of_other_runs(tmp_path: Path, base: Base) -> None:
    with ExitStack() as stack:
        world = made(stack, tmp_path, base, fleet=False)
        for address in ADDRESSES:
            page = world.kim.get(address)
            assert (page.status_code, "not started with" in page.text or "no fleet to act with" in page.text) == (
                409,
                True,
            )


def test_a_program_acts_with_its_token(world: World) -> None:
    program = world.console.program(world.tokens["lee"])
    address = world.approve()
    offer = program.get(address)
    assert (offer.status_code, offer.json()["calls"][0].split(" --")[0]) == (200, "fake drain n1")
    form = {"form": offer.json()["form"], "shown": offer.json()["digest"], "why": WHY}
    assert program.post(address, json=form).status_code == 415
    done = program.post(address, data=form)
    assert (done.status_code, done.json()["happened"]) == (200, "yes")
    assert world.play.state.history(what="approved")[0].who == "lee (console)"
    assert world.console.program(world.tokens["vi"]).get(address).status_code == 403


# Returning a node ------------------------------------------------------------------------------------------------------


@pytest.fixture
def out(world: World) -> World:
    """n1 was taken out."""
    answer(world.play.state, "n1", "approved", "kim@head", WHY)
    world.play.rounds(2)
    assert world.play.cluster.calls() == [("drain", "n1")]
    return world


def test_a_node_is_returned_once(out: World) -> None:
    address = links.return_node("n1")
    form = {**form_of(out.kim.get(address)), "why": "replaced the GPU"}
    for _ in range(2):
        done = out.kim.post(address, form)
        assert (done.status_code, "is in service again" in done.text) == (200, True)
    assert out.play.cluster.calls("n1", "clear") == [("clear", "n1")]
    trail = [(one.what, one.who) for one in out.play.state.history(node="n1")][-2:]
    assert trail == [("clear", "kim (console)"), ("cleared", "kim (console)")]
    out.play.rounds(3)
    assert "by kim (console)" in out.play.told()[-1]


def test_two_operators_return_a_node(out: World) -> None:
    address = links.return_node("n1")
    mine, theirs = form_of(out.kim.get(address)), form_of(out.lee.get(address))
    assert out.kim.post(address, {**mine, "why": WHY}).status_code == 200
    late = out.lee.post(address, {**theirs, "why": WHY})
    assert late.status_code == 409
    assert out.play.cluster.calls("n1", "clear") == [("clear", "n1")]


def test_what_the_cluster_refuses_says_whether_something_may_have_happened(out: World) -> None:
    out.play.cluster.refuse(1, "n1")
    done = act(out.kim, links.return_node("n1"))
    assert (done.status_code, "Something may have happened" in done.text) == (502, True)
    assert out.play.trail("clear failed")
    out.play.cluster.unreachable()
    page = out.kim.get(links.return_node("n1"))
    assert (page.status_code, "Nothing was done" in page.text) == (502, True)


def test_a_node_that_somebody_else_took_out_is_theirs(world: World) -> None:
    world.play.cluster.take_out("n2", "fan")
    page = world.kim.get(links.return_node("n2"))
    assert (page.status_code, "only they return it" in page.text) == (409, True)


def test_names_that_are_none(world: World) -> None:
    for name in (HOSTILE, "..", "-x", "n1;reboot", "n[1-3]", ""):
        for address in (links.return_node(name), links.health_check(name)):
            page = world.kim.get(address)
            assert page.status_code in (404, 409, 422)
            assert "<script>alert" not in page.text


# A health check --------------------------------------------------------------------------------------------------------


def test_a_health_check_is_started_once_whoever_clicks(out: World) -> None:
    address = links.health_check("n1")
    mine, theirs = form_of(out.kim.get(address)), form_of(out.lee.get(address))
    for browser, form in ((out.kim, mine), (out.kim, mine), (out.lee, theirs)):
        answered = browser.post(address, {**form, "why": "vendor"})
        assert answered.status_code == 200
    assert "was asked for by kim (console)" in answered.text
    assert out.play.cluster.calls("n1", "check") == [("check", "n1")]


def test_a_node_in_service_is_not_checked(world: World) -> None:
    page = world.kim.get(links.health_check("n1"))
    assert (page.status_code, "only a node that we have taken out" in page.text) == (409, True)


def hang(monkeypatch: pytest.MonkeyPatch, what: str) -> threading.Event:
    """From now on the cluster answers nothing, until the event is set; then it does what it was asked for."""
    from bitwitness.fleet.clusters.fake import FakeCluster

    over, real = threading.Event(), getattr(FakeCluster, what)

    def hanging(*words: Any) -> Any:
        assert over.wait(30)
        return real(*words)

    monkeypatch.setattr(FakeCluster, what, hanging)
    return over


def test_a_cluster_that_hangs_does_not_hang_the_console(out: World, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = acting_of(out.console.app)
    address = links.health_check("n1")
    form = {**form_of(out.kim.get(address)), "why": "vendor"}
    shared.doing = 0.2
    over = hang(monkeypatch, "carry_out")
    answered = out.kim.post(address, form)
    assert (answered.status_code, "it may still happen" in answered.text) == (504, True)
    again = out.kim.post(address, form)
    assert (again.status_code, "under way" in again.text) == (202, True)
    assert out.kim.get("/api").status_code == 200
    over.set()
    for _ in range(500):
        last = out.kim.post(address, form)
        if last.status_code != 202:
            break
        time.sleep(0.01)
    assert (last.status_code, "was asked for" in last.text) == (200, True)
    assert out.play.cluster.calls("n1", "check") == [("check", "n1")]


def test_few_wait_for_a_cluster_that_hangs_and_the_others_are_told_at_once(
    out: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = acting_of(out.console.app)
    shared.looking = 0.02
    over = hang(monkeypatch, "look")
    codes = [out.kim.get(links.health_check("n1")).status_code for _ in range(2)]
    assert codes == [504] * 2
    page = out.kim.get(links.health_check("n1"))
    assert (page.status_code, "too many requests wait for an answer about n1" in page.text) == (504, True)
    others = [out.kim.get(links.return_node(f"n{number % 4}")) for number in (0, 0, 2, 2, 3, 3)]
    assert ["no answer within" in page.text for page in others] == [True] * 6
    page = out.kim.get(links.return_node("n9"))
    assert (page.status_code, "too many requests wait for what does not answer" in page.text) == (504, True)
    run = RunFiles(out.play.run_dir)
    (path,) = run.incidents()
    address = links.judge(1, path.name)
    form = {**form_of(out.kim.get(address)), "why": "the vendor says so", "judgement": "confirmed"}
    assert out.kim.post(address, form).status_code == 200, "which asks no cluster"
    over.set()
    for _ in range(500):
        if (page := out.kim.get(links.health_check("n1"))).status_code == 200:
            break
        time.sleep(0.01)
    assert page.status_code == 200


# A run -----------------------------------------------------------------------------------------------------------------


def test_a_quarantine_is_cleared_of_what_was_chosen(world: World) -> None:
    quarantine = RunFiles(world.play.run_dir).quarantine
    quarantine.deny_node("n1", reason="fan")
    quarantine.deny_devices(["GPU-1", "GPU-2"], node="n1", reason="ecc")
    address = links.clear_quarantine(1)
    page = world.kim.get(address)
    assert "denied as a device since" in page.text
    form = {**form_of(page), "why": "replaced"}
    nothing = world.kim.post(address, form)
    assert (nothing.status_code, "hoose who may join again" in nothing.text) == (409, True)
    strange = world.kim.post(address, {**form, "name": "GPU-3"})
    assert strange.status_code == 409
    done = world.kim.client.post(
        address,
        data={**form, "name": ["GPU-1", "n1"]},
        headers={"Origin": "http://localhost:8642", "Sec-Fetch-Site": "same-origin"},
    )
    assert done.status_code == 200
    held = quarantine.read()
    assert held.names() == ["GPU-2"]
    assert [(one["who"], one["reason"]) for one in held.log if one["what"] == "clear"] == [
        ("kim (console)", "replaced")
    ] * 2


def test_an_incident_is_judged(world: World) -> None:
    run = RunFiles(world.play.run_dir)
    (path,) = run.incidents()
    address = links.judge(1, path.name)
    assert "nobody has" in world.kim.get(address).text
    form = {**form_of(world.kim.get(address)), "why": "the vendor says so"}
    assert world.kim.post(address, form).status_code == 409
    assert world.kim.post(address, {**form, "judgement": "guilty"}).status_code == 409
    for _ in range(2):
        assert world.kim.post(address, {**form, "judgement": "confirmed"}).status_code == 200
    judged = [one for one in run.actions(path.name) if one["action"] == "judged"]
    assert [(one["judgement"], one["who"], one["why"]) for one in judged] == [
        ("confirmed", "kim (console)", "the vendor says so")
    ]
    assert "confirmed, by kim (console)" in world.kim.get(address).text
    for word in ("false alarm", "false-alarm"):  # as records have it, and as the command line does
        assert act(world.kim, address, f"by {word}", judgement=word).status_code == 200
    words = [one["judgement"] for one in run.actions(path.name) if one["action"] == "judged"]
    assert words == ["confirmed", "false alarm", "false alarm"]


def test_an_incident_that_is_not_there(world: World) -> None:
    for name in ("20261129T120000Z-ffffff", "..", HOSTILE):
        assert world.kim.get(links.judge(1, name)).status_code in (404, 422)


def test_another_run_in_the_same_directory(world: World) -> None:
    RunFiles(world.play.run_dir).write_run({"run": "r2"})
    for address in (links.clear_quarantine(1), links.judge(1, "20261129T120000Z-000001")):
        page = world.kim.get(address)
        assert (page.status_code, "nother run lies at" in page.text) == (404, True)
    with world.database.write() as connection:
        connection.execute(sa.update(runs).values(current=False))
    assert world.kim.get(links.clear_quarantine(1)).status_code == 404


def test_names_stay_text(world: World) -> None:
    RunFiles(world.play.run_dir).quarantine.deny_node(
        "<script>alert(1)</script>", reason="<img src=x onerror=alert(2)>"
    )
    page = world.kim.get(links.clear_quarantine(1))
    assert page.status_code == 200
    assert "<script>alert" not in page.text
    assert "<img src=x" not in page.text
    assert "&lt;script&gt;alert" in page.text


# From the files to the act and back -------------------------------------------------------------------------------------


def test_what_the_importer_finds_is_approved_and_what_came_of_it_is_found(world: World) -> None:
    play, database = world.play, world.database
    with database.write() as connection:
        for table in (controllers, runs):
            connection.execute(sa.delete(table))
    importer = Importer(database, [play.run_dir], fleets=[play.state.folder], clock=play.clock.now)
    importer.round()
    (row,) = queries.fleet_page(database).waiting
    assert (row.waits, row.node, row.hold) == (True, "n1", "approval")
    assert act(world.kim, links.approve(str(row.controller), row.key)).status_code == 200
    play.rounds(3)
    importer.round()
    assert play.cluster.calls() == [("drain", "n1")]
    page = queries.node_page(database, "n1")
    assert [one.status for one in page.proposals] == ["done"]
    assert ("approved", "kim (console)") in [(one.what, one.who) for one in page.history]
    (path,) = RunFiles(play.run_dir).incidents()
    (key,) = queries.find_incident(database, path.name)
    judged = act(world.kim, links.judge(key, path.name), "a drill of ours", judgement="drill")
    assert judged.status_code == 200
    importer.round()
    assert queries.incident_page(database, key, path.name).incident.judgement == "drill"


# Forms -----------------------------------------------------------------------------------------------------------------


def test_forms_are_bounded_and_end() -> None:
    now = [0.0]
    forms = Forms(lambda: now[0])
    first = forms.issue("/a", "kim")
    for _ in range(3000):
        last = forms.issue("/a", "kim")
    assert len(forms._forms) == 2000
    with pytest.raises(Stale):
        forms.claim(first, "/a", "kim")
    assert forms.claim(last, "/a", "kim") is None
    late = forms.issue("/a", "kim")
    now[0] += 3 * 3600
    with pytest.raises(Stale):
        forms.claim(late, "/a", "kim")
