"""The console in a real browser: what a person sees and does there, and what must never happen to him."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
from playwright.sync_api import Page, expect

from bitwitness.fleet.serving import Server
from bitwitness.web.app import create
from bitwitness.web.settings import Settings
from bitwitness.web.users import OneToken
from tests.browser.conftest import PHONE, SCREENSHOTS, WIDE, Visitor
from tests.browser.site import Site

PAGES: dict[str, Callable[[Site], str]] = {
    "runs": lambda site: "/",
    "run": lambda site: site.run("real"),
    "run-that-trains": lambda site: site.run("live"),
    "run-that-is-broken": lambda site: site.run("broken"),
    "incident": lambda site: site.incident("real"),
    "incident-unattributed": lambda site: site.incident("nobody"),
    "node": lambda site: "/nodes/n1",
    "fleet": lambda site: "/fleet",
    "drills": lambda site: "/drills",
    "api": lambda site: "/api",
    "login": lambda site: "/login",
    "absent": lambda site: "/runs/4711",
}
WINDOWS: tuple[tuple[Literal["light", "dark"], str], ...] = (
    ("light", "wide"),
    ("dark", "wide"),
    ("dark", "phone"),
    ("light", "phone"),
)
if os.environ.get("BITWITNESS_EXHAUSTIVE") != "1":
    WINDOWS = (("light", "wide"), ("dark", "phone"))


def settled(page: Page) -> None:
    """Scripts have run, and fonts are there."""
    page.wait_for_load_state("load")
    page.evaluate("document.fonts.ready.then(() => new Promise(requestAnimationFrame)).then(() => 0)")


def pictures(page: Page, name: str) -> None:
    """One of each kind, or by default two, kept in build/screenshots to be looked at. Nothing is wider than the window, and dark is not light."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    colours = {}
    for scheme, size in WINDOWS:
        page.set_viewport_size(WIDE if size == "wide" else PHONE)
        page.emulate_media(color_scheme=scheme)
        settled(page)
        page.screenshot(path=SCREENSHOTS / f"{name}-{scheme}-{size}.png", full_page=True)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= page.evaluate("innerWidth"), f"{scheme}, {size}: it is {width} wide"
        colours[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colours["light"] != colours["dark"]


def sign_in(page: Page, site: Site) -> None:
    page.goto("/login")
    page.locator("input[name=name]").fill("operator")
    page.locator("input[name=secret]").fill(site.token)
    page.locator("main button[type=submit]").click()
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()


def shown(page: Page) -> str:
    return page.locator("main").inner_text()


# Looking --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_every_page_light_and_dark_wide_and_on_a_phone(site: Site, visitor: Visitor, name: str) -> None:
    page = visitor.window()
    answer = page.goto(PAGES[name](site))
    assert answer is not None
    assert answer.status == (404 if name == "absent" else 200)
    expect(page.locator("h1")).to_have_count(1)
    pictures(page, name)
    if name == "absent":
        visitor.wrong = [one for one in visitor.wrong if "404" not in one]


def test_a_run_that_trains_changes_its_page_without_a_reload(site: Site, visitor: Visitor) -> None:
    page = visitor.window()
    page.goto(site.run("live"))
    expect(page.locator("#live-state")).to_have_attribute("data-state", "on")
    page.evaluate("window.same = true")
    last = page.locator("dt", has_text="Last step").first.locator("xpath=following-sibling::dd[1]")
    before = site.training.step - 1
    expect(last).to_have_text(f"{before}")
    site.training.train(30)
    site.look()
    expect(last).to_have_text(f"{before + 30}")
    assert page.evaluate("window.same"), "it was loaded again"


def test_nobody_is_named_by_an_incident_that_is_unattributed(site: Site, visitor: Visitor) -> None:
    page = visitor.window()
    page.goto(site.incident("nobody"))
    text = shown(page)
    assert "unattributed" in text
    assert re.search(r"nobody", text, re.IGNORECASE)
    for word in ("scontrol", "kubectl cordon", "state=drain"):
        assert word not in text, "a node is to be taken out, and none was named"
    expect(page.locator("main .tag-attributed")).to_have_count(0)
    page.goto("/")
    apart = page.locator("section", has=page.locator("#top-unattributed")).last
    expect(apart.get_by_role("link", name=re.compile("unattributed"))).to_have_count(1)
    page.goto("/fleet")
    row = page.locator("main tr, main li", has_text="node-0").first
    assert not re.search(r"\b(suspected|out|unclear)\b", row.inner_text()), "candidates of it are no suspects"


def test_what_a_node_calls_itself_stays_text(site: Site, visitor: Visitor) -> None:
    """No dialog, no script, nothing that the policy had to refuse: the visitor says so at the end."""
    page = visitor.window()
    page.goto(site.incident("nobody"))
    link = page.locator("main a[href^='/nodes/']", has_text="gpu-7").first
    expect(link).to_contain_text("<img src=x onerror=alert(1)>")
    link.click()
    expect(page.locator("h1")).to_contain_text("gpu-7<img src=x onerror=alert(1)>\"'><script>")
    expect(page.locator("h1")).to_contain_text("{{7*7}}")
    for address in ("/", "/fleet", site.run("nobody")):
        page.goto(address)
        settled(page)
        assert page.title() != "ran"
        expect(page.locator("main img")).to_have_count(0)
        expect(page.locator("main script")).to_have_count(0)
    page.set_viewport_size(PHONE)
    page.goto("/fleet")
    state = page.locator("main th", has_text="State").bounding_box()
    assert state is not None
    assert state["x"] < PHONE["width"] / 2, "one long name pushes what matters off a phone"


def test_without_scripts_every_page_says_everything(site: Site, visitor: Visitor) -> None:
    bare, full = visitor.window(java_script_enabled=False), visitor.window()
    for name in ("runs", "run", "incident", "incident-unattributed", "fleet", "drills", "node"):
        for page in (bare, full):
            page.goto(PAGES[name](site))
        settled(full)
        said, known = (set(re.findall(r"[\w.-]{4,}", shown(page))) for page in (bare, full))
        only = {"zoom", "point", "arrow", "move"}
        missing = {word for word in known - said if word.lower() not in only}
        assert len(missing) <= 12, f"{name}: said by scripts alone: {sorted(missing)}"
        expect(bare.locator("main h1")).to_have_count(1)
    bare.goto(site.run("real"))
    expect(bare.locator("main svg")).not_to_have_count(0)
    bare.goto(site.incident("real"))
    assert "differs" in shown(bare)


def test_by_keyboard_alone_to_an_incident(site: Site, visitor: Visitor) -> None:
    page = visitor.window()
    page.goto("/")
    wanted = site.incident("nobody")
    for _ in range(60):
        page.keyboard.press("Tab")
        at = page.evaluate("document.activeElement.getAttribute('href')")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", f"one does not see that {at} has the focus"
        if at == wanted:
            break
    else:
        pytest.fail("no Tab comes to it")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**{wanted}")
    expect(page.locator("h1")).to_contain_text("unattributed")


def test_who_is_signed_out_is_told_and_offered_the_way_back(site: Site, visitor: Visitor) -> None:
    users = OneToken()
    app = create(site.database, Settings(allow_actions=False, users=users, open=False))
    with Server(app, "127.0.0.1", 0, downloads="/export/") as server:
        visitor.site = replace(site, address=server.address, token=users.token)
        page = visitor.window()
        sign_in(page, visitor.site)
        page.goto(site.run("live"))
        expect(page.locator("#live-state")).to_have_text("live")
        page.context.clear_cookies()
        site.training.train(10)
        site.look()
        notice = page.locator("#signed-out")
        expect(notice).to_contain_text("Your session has ended")
        expect(notice).to_be_visible()
        assert page.url.endswith(site.run("live")), "nobody is sent anywhere"
        assert all("401" in one for one in visitor.wrong)
        visitor.wrong.clear()
        notice.get_by_role("link", name="Sign in").click()
        page.locator("input[name=secret]").fill(users.token)
        page.locator("main button[type=submit]").click()
        page.wait_for_url(f"**{site.run('live')}")
        expect(page.locator("#signed-out")).to_have_count(0)
        app.state.changes.stop()


# Acting ---------------------------------------------------------------------------------------------------------------


def test_an_approval_has_the_cluster_called_once(site: Site, visitor: Visitor) -> None:
    page = visitor.window()
    page.goto("/fleet")
    offered = page.locator("main").get_by_role("link", name=re.compile("pproving"))
    expect(offered).to_have_count(0)
    sign_in(page, site)
    page.goto("/fleet")
    offered.click()
    expect(page.locator("main")).to_contain_text("fake drain n1")
    pictures(page, "act")
    assert site.fleet.cluster.calls() == []
    page.locator("main textarea, main input[type=text]").last.fill("seen twice on the bench")
    page.locator("main form button[type=submit]").last.click()
    page.wait_for_load_state("load")
    assert site.fleet.cluster.calls() == [], "the controller acts, not the console"
    site.fleet.rounds(4)
    assert site.fleet.cluster.calls() == [("drain", "n1")]
    site.look()
    page.goto("/fleet")
    expect(page.locator("main")).to_contain_text("seen twice on the bench")
    site.fleet.rounds(4)
    assert site.fleet.cluster.calls() == [("drain", "n1")]


# The net --------------------------------------------------------------------------------------------------------------


def test_the_visitor_notices(site: Site, visitor: Visitor) -> None:
    """What is asserted at the end of every test must be able to fail."""
    page = visitor.window()
    page.goto("/")
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: 'alert(1)'}))")
    page.evaluate("fetch('http://127.0.0.1:1/elsewhere').catch(() => 0)")
    page.evaluate("setTimeout(() => { throw new Error('on purpose') }, 0); 0")
    page.evaluate("setTimeout(() => { alert('here'); window.passed = true }, 0); 0")
    page.wait_for_function("window.passed")
    said = " / ".join(visitor.wrong)
    for word in ("inline script", "on purpose", "dialog: here"):
        assert word in said
    assert "elsewhere" in said
    visitor.wrong.clear()
