"""Pages and their JSON: both are the same record, whatever it holds, and nothing is on one side only."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from bitwitness.store.database import Database
from bitwitness.store.queries import EXPORTS
from bitwitness.store.tables import incident_ranks, incidents, nodes, runs, stays
from bitwitness.web import links
from bitwitness.web.listing import operations
from bitwitness.web.pages import PAGES
from bitwitness.web.rendering import as_json, plain
from tests.web.client import Console, console

MARKUP = "<script>alert(1)</script>'\"><img src=x onerror=alert(2)>{{ 7*7 }}"
NAMES = (
    "node-1",
    "..",
    ".",
    "../../etc/passwd",
    "/",
    "//evil.example/",
    "rack/1/node 2",
    "?page=2#top",
    "%2e%2e%2f",
    "a\\b",
    MARKUP,
    "javascript:alert(1)",
    "\u202eedon",
    " blanks around ",
    "zeile\r\nSet-Cookie: a=b",
    " ü" * 125,
)
"""Of nodes and devices: each must have a page of its own, and stay text on it."""
ONLY_JSON = {"/api/history", "/api/openapi.json"}
"""What has no page of its own: pages show a part of the first, and `/api` shows the second."""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """A run on hostile nodes, with an unattributed incident."""
    with Database(tmp_path_factory.mktemp("database") / "console.db") as database:
        with database.write() as connection:
            key = {"name": MARKUP, "path": "/runs/" + "x" * 10_000, "place": "p", "run": "r", "current": True}
            connection.execute(sa.insert(runs).values(id=1, **key, world_size=len(NAMES), unattributed=1, open=1))
            row = {
                "name": "i?1",
                "run_id": 1,
                "status": "unattributed",
                "headline": MARKUP,
                "check": "replay",
                "step": 7,
            }
            connection.execute(sa.insert(incidents).values(id=1, **row, time="2026-11-30T07:00:00Z", notes=[MARKUP]))
            for rank, name in enumerate(NAMES):
                where = {"rank": rank, "node": name, "device": f"GPU-{name}"}
                connection.execute(sa.insert(stays).values(run_id=1, current=True, **where))
                connection.execute(sa.insert(nodes).values(name=name))
                connection.execute(sa.insert(incident_ranks).values(incident_id=1, run_id=1, role="candidate", **where))
        with console(database) as made:
            yield made


class _Elements(HTMLParser):
    """Elements and attributes, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


# Pages and twins ------------------------------------------------------------------------------------------------------


def test_every_page_has_a_twin_and_every_twin_a_page(shown: Console) -> None:
    twins = {page.twin: page.address for page in PAGES}
    assert len(twins) == len(PAGES)
    for page in PAGES:
        assert page.twin == ("/api/runs" if page.address == "/" else f"/api{page.address}")
    listed = set(shown.app.openapi()["paths"])
    assert {path for path in listed if path.startswith("/api/")} - ONLY_JSON == {
        twin.replace(":path", "") for twin in twins
    }
    pages = set(_routes(shown)) - {page.address for page in PAGES}
    not_pages = {
        "/events",
        "/healthz",
        "/metrics",
        "/login",
        "/logout",
        "/api",
        "/export/{table}.csv",
        "/static/{name:path}",
    }
    acts = {path for path in pages if path.startswith(("/act/", "/fleet/proposals/", "/runs/"))}
    assert pages - acts - not_pages - set(twins) - ONLY_JSON == {"/incidents/{incident_id}"}


def _routes(shown: Console) -> Iterator[str]:
    """Addresses that are answered, whatever router they came by."""
    waiting = list(shown.app.routes)
    while waiting:
        route = waiting.pop()
        inner = getattr(getattr(route, "original_router", None), "routes", None)
        if inner is not None:
            waiting += inner
        elif isinstance(route, APIRoute):
            yield route.path


ADDRESSES = (
    "/",
    "/runs/1",
    "/runs/1/incidents/i%3F1",
    "/fleet",
    "/drills",
    links.node(MARKUP),
    links.device(f"GPU-{MARKUP}"),
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_page_and_its_twin_are_one_record(shown: Console, address: str) -> None:
    page = shown.browser().get(address)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    twin = shown.program().get(links.twin(address))
    assert twin.status_code == 200
    assert twin.headers["content-type"] == "application/json"
    record = next(one.record for one in PAGES if _matches(one.address, address))
    made: Any = TypeAdapter(record).validate_json(twin.content)  # as its typed description says, field by field
    assert plain(made) == twin.json()
    wrong = [tag for tag, about in _Elements(page.text).tags if any(name.startswith("on") for name in about)]
    assert not wrong
    assert "alert(1)</script>" not in page.text


def _matches(pattern: str, address: str) -> bool:
    form = re.sub(r"\{\w+:path\}", ".+", pattern)
    return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", form), address) is not None


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_node_is_called_it_has_a_page(shown: Console, name: str) -> None:
    for address in (links.node(name), links.device(f"GPU-{name}")):
        assert not re.search(r"/\.{1,2}(/|$)|[^!-~]|[\"'<>\\]", address)
        twin = shown.program().get(links.twin(address))
        assert twin.status_code == 200
        assert twin.json()["name"].removeprefix("GPU-") == name
        page = shown.browser().get(address)
        assert page.status_code == 200
        scripts = [about.get("src", "") for tag, about in _Elements(page.text).tags if tag == "script"]
        assert all(str(one).startswith("/static/") for one in scripts)
        assert "a=b" not in page.headers.get("set-cookie", "")


def test_links_on_pages_lead_to_pages(shown: Console) -> None:
    browser, seen, waiting = shown.browser(), set[str](), ["/"]
    while waiting:
        address = waiting.pop()
        answer = browser.get(address)
        assert answer.status_code == 200, address
        if "text/html" not in answer.headers["content-type"]:
            continue
        for _, about in _Elements(answer.text).tags:
            for given in (about.get("href"), about.get("src")):
                link = (given or "#").partition("#")[0]
                if link.startswith("/") and link not in seen:
                    seen.add(link)
                    waiting.append(link)
                assert link.startswith(("/", "?")) or link in ("", "data:,"), link
    assert {links.run(1), links.node("..")} <= seen


def test_an_incident_is_found_without_its_run(shown: Console) -> None:
    answer = shown.browser().get(links.find_incident("i?1"))
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs/1/incidents/i%3F1")
    assert shown.browser().get("/incidents/nothing").status_code == 404


# What cannot be -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("/runs/2", 404),
        ("/runs/0", 422),
        ("/runs/99999999999", 422),
        ("/runs/one", 422),
        ("/runs/1/incidents/none", 404),
        ("/runs/1/incidents/" + "x" * 301, 422),
        ("/nodes/nobody", 404),
        ("/nodes/%00", 404),
        ("/nodes/%ff%fe", 404),
        ("/?page=0", 422),
        ("/?page=x", 422),
        ("/?state=healthy", 422),
        ("/?query=" + "x" * 201, 422),
        ("/fleet?size=1000", 422),
        ("/nothing", 404),
        ("/runs/1/", 404),
    ],
)
def test_errors_are_told_in_the_form_that_was_asked_for(shown: Console, address: str, status: int) -> None:
    page = shown.browser().get(address)
    assert (page.status_code, page.headers["content-type"]) == (status, "text/html; charset=utf-8")
    assert f"({status})" in page.text
    said = shown.program().get(links.twin(address))
    assert (said.status_code, list(said.json())) == (status, ["error"])
    assert html.escape(said.json()["error"], quote=False).split("'")[0][:30] in html.unescape(page.text).replace(
        "<", "&lt;"
    )


def test_an_address_that_answers_another_method(shown: Console) -> None:
    answer = shown.program().get("/logout")
    assert (answer.status_code, answer.json()) == (405, {"error": "this address does not answer that method"})


def test_head_is_get_without_a_body(shown: Console) -> None:
    for address in (*ADDRESSES, "/api/runs", "/export/runs.csv", "/events", "/nothing", "/static/console.css"):
        head, get = shown.program().head(address), None
        assert head.content == b""
        if address not in ("/events", "/export/runs.csv"):
            get = shown.program().get(address)
            assert (head.status_code, head.headers["content-length"]) == (
                get.status_code,
                get.headers["content-length"],
            )


def test_numbers_that_json_does_not_know_are_null() -> None:
    made = as_json({"a": [float("nan"), float("inf"), 1.5], "half": "\ud800"})
    assert json.loads(bytes(made.body)) == {"a": [None, None, 1.5], "half": "?"}


# For programs ---------------------------------------------------------------------------------------------------------


def test_the_list_for_people_is_made_from_the_typed_description(shown: Console) -> None:
    document = shown.program().get("/api/openapi.json").json()
    assert document["openapi"].startswith("3.")
    assert set(document["components"]["schemas"]) >= {page.record.__name__ for page in PAGES}
    for page in PAGES:
        about = document["paths"][page.twin.replace(":path", "")]["get"]
        schema = about["responses"]["200"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{page.record.__name__}"}
    listed = html.unescape(shown.browser().get("/api").text)
    for one in operations(document):
        assert one.path in listed
        assert one.summary


def test_the_tables_are_those_of_the_database() -> None:
    assert links.EXPORTS == EXPORTS or set(links.EXPORTS) == set(EXPORTS)


# Static files ---------------------------------------------------------------------------------------------------------


def test_a_file_is_kept_where_its_address_names_its_content(shown: Console) -> None:
    browser = shown.browser()
    address = links.static("console.css")
    first = browser.get(address)
    assert (first.status_code, first.headers["cache-control"]) == (200, "max-age=31536000, immutable")
    assert first.headers["content-type"] == "text/css; charset=utf-8"
    assert browser.get("/static/console.css").headers["cache-control"] == "no-cache"
    again = browser.get(address, **{"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        "../app.py",
        "%2e%2e/app.py",
        "..%2fapp.py",
        "%2e%2e%2fapp.py",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "console.css%00.js",
        "..\\app.py",
        "",
        ".",
        "vendor",
        "CONSOLE.CSS",
    ],
)
def test_nothing_but_the_files_can_be_fetched(shown: Console, path: str) -> None:
    answer = shown.program().get(f"/static/{path}")
    assert answer.status_code == 404
    assert b"import" not in answer.content


@pytest.mark.parametrize(
    "path",
    ["/export/../runs.csv", "/export/etc.csv", "/export/runs%00.csv", "/export/runs.csv.csv", "/export/meta.csv"],
)
def test_nothing_but_the_tables_can_be_fetched(shown: Console, path: str) -> None:
    assert shown.program().get(path).status_code in (404, 422)


def test_everything_of_a_hostile_record_is_in_its_json() -> None:
    hostile: dict[str, Any] = {"name": MARKUP, "nested": {"\u2028": ["</script>", "\x00"]}}
    assert json.loads(bytes(as_json(hostile).body)) == hostile
