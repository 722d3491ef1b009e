"""Attacks on the console: other sites in the same browser, guessed secrets, forged forms, names that lead here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bitwitness.store.database import Database
from bitwitness.web.settings import Settings, hosts_of
from bitwitness.web.status import Status
from bitwitness.web.users import OneToken, UsersFile, add, remove
from tests.web.client import CSRF, HOST, PAGE, Browser, Console, console

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """Nothing is in it, and nothing here writes to it."""
    with Database(tmp_path_factory.mktemp("database") / "console.db") as made:
        yield made


@pytest.fixture
def one(database: Database) -> Iterator[tuple[Console, str]]:
    """A console in which one may act and everybody must sign in, and the token."""
    users = OneToken()
    with console(database, Settings(users=users, allow_actions=True, open=False)) as made:
        yield made, users.token


@pytest.fixture(scope="module")
def local(database: Database) -> Iterator[Console]:
    """As it is started without an option."""
    with console(database) as made:
        yield made


def cookie_of(answer: httpx.Response, name: str = "bitwitness") -> str:
    found = [one for one in answer.headers.get_list("set-cookie") if one.startswith(f"{name}=")]
    assert len(found) == 1
    return found[0]


# What every answer has ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 200),
        ("/api", 200),
        ("/api/runs", 200),
        ("/healthz", 200),
        ("/static/console.css", 200),
        ("/export/runs.csv", 200),
        ("/nothing", 404),
        ("/runs/7", 404),
        ("/api/runs/seven", 422),
        ("/static/nothing", 404),
    ],
)
def test_every_answer_has_the_manners(local: Console, path: str, status: int) -> None:
    for accept in ("text/html", "application/json"):
        answer = local.program(Accept=accept).get(path)
        assert answer.status_code == status
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert "cache-control" in answer.headers
        assert "Traceback" not in answer.text


def test_refusals_have_the_manners_too(one: tuple[Console, str]) -> None:
    made, _ = one
    for answer in (
        made.browser().get("/"),
        made.program().get("/api/runs"),
        made.program(Host="evil.example").get("/"),
        made.program().delete("/"),
        made.program().post("/login", content=b"x" * 100_000),
    ):
        assert answer.status_code >= 303
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["cache-control"] == "no-store"


def test_what_nobody_foresaw_shows_no_traceback(local: Console, caplog: pytest.LogCaptureFixture) -> None:
    @local.app.get("/broken")
    def broken() -> None:
        raise RuntimeError("secret inside")

    for accept in ("text/html", "application/json"):
        answer = local.program(Accept=accept).get("/broken")
        assert answer.status_code == 500
        assert "secret inside" not in answer.text
        assert "Traceback" not in answer.text
        assert answer.headers["content-security-policy"] == POLICY
    assert "secret inside" in caplog.text


# Names that lead here -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8642",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "evil.example#localhost",
        "localhost/evil",
        "192.0.2.1",
        "localhost:port",
        "localhost:99999",
        "[::1",
        "",
        "0.0.0.0",
    ],
)
def test_a_request_for_another_name_is_refused(local: Console, host: str) -> None:
    for path in ("/", "/api/runs", "/static/console.css", "/healthz", "/events"):
        assert local.program(Host=host).get(path).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8642", "[::1]:8642", "LOCALHOST:9000", "localhost."])
def test_a_request_for_our_name_is_answered(local: Console, host: str) -> None:
    assert local.program(Host=host).get("/api/runs").status_code == 200


def test_hosts_by_where_we_listen() -> None:
    assert hosts_of("127.0.0.1", ["https://console.example.org"]) >= {"localhost", "console.example.org"}
    assert "*ip" not in hosts_of("127.0.0.1", [])
    assert hosts_of("0.0.0.0", [], ["node-1", "node-1.example"]) >= {"*ip", "node-1", "node-1.example"}
    assert hosts_of("192.0.2.7", []) == {"192.0.2.7"}


def test_on_all_addresses_each_is_ours_and_no_other_name(database: Database) -> None:
    users = OneToken()
    with console(database, Settings(users=users, open=False, hosts=hosts_of("0.0.0.0", []))) as made:
        assert made.program(users.token, Host="192.0.2.1:8642").get("/api/runs").status_code == 200
        assert made.program(users.token, Host="[2001:db8::1]").get("/api/runs").status_code == 200
        assert made.program(users.token, Host="evil.example").get("/api/runs").status_code == 421


# Other sites ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
        {"Origin": "https://localhost:8642"},
        {"Origin": "http://localhost:8642.evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_form_of_another_site_is_refused(one: tuple[Console, str], headers: dict[str, str]) -> None:
    made, token = one
    browser = made.browser()
    assert browser.sign_in(token).status_code == 303
    csrf = CSRF.findall(browser.get("/api").text)[0]
    for path in ("/logout", "/login"):
        answer = browser.post(path, {"csrf": csrf}, **headers)
        assert answer.status_code == 403
        assert "another site" in answer.text
    assert browser.get("/api").status_code == 200  # still signed in


def test_a_form_must_say_from_where_and_carry_its_token(one: tuple[Console, str]) -> None:
    made, token = one
    browser = made.browser()
    browser.sign_in(token)
    csrf = CSRF.findall(browser.get("/api").text)[0]
    other = made.browser()
    other.sign_in(token)
    of_other = CSRF.findall(other.get("/api").text)[0]
    assert of_other != csrf
    for forged in ({}, {"csrf": ""}, {"csrf": csrf[:-1]}, {"csrf": of_other}, {"csrf": "ü" * 43}):
        assert browser.post("/logout", forged).status_code == 403
    assert browser.client.post("/logout", data={"csrf": csrf}).status_code == 403  # says nothing of where it comes from
    twice = browser.client.post(
        "/logout",
        content=f"csrf={csrf}&csrf={csrf}",
        headers={"Origin": f"http://{HOST}", "Content-Type": "application/x-www-form-urlencoded"},
    )
    assert twice.status_code == 403
    assert browser.post("/logout", {"csrf": csrf}).status_code == 303


@pytest.mark.parametrize("mode", ["no-cors", "cors", "websocket"])
def test_another_site_can_load_nothing_of_ours(local: Console, mode: str) -> None:
    for path in ("/api/runs", "/export/runs.csv", "/static/console.css"):
        headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": mode}
        assert local.program(**headers).get(path).status_code == 403


def test_a_link_from_elsewhere_leads_here(one: tuple[Console, str]) -> None:
    """Browsers keep the cookie back then, so that somebody who is signed in would seem not to be."""
    made, _ = one
    browser = made.browser()
    arrived = browser.get("/fleet?page=2", **{"Sec-Fetch-Site": "cross-site"})
    assert arrived.status_code == 200
    assert '<meta http-equiv="refresh" content="0; url=/fleet?page=2">' in arrived.text
    assert browser.get("/fleet?page=2").headers["location"] == "/login?after=%2Ffleet%3Fpage%3D2"


def test_only_some_methods_and_bodies_are_taken(one: tuple[Console, str]) -> None:
    made, token = one
    program = made.program(token)
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"):
        answer = program.request(method, "/")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD, POST")
    too_large = program.post("/logout", content=b"x" * 70_000, headers={"Content-Type": "application/json"})
    assert too_large.status_code == 413
    for kind in ("multipart/form-data; boundary=x", "text/plain", "application/xml"):
        assert program.post("/logout", content=b"x", headers={"Content-Type": kind}).status_code == 415
    packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert program.post("/logout", content=b"x", headers=packed).status_code == 415

    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * 4096

    # Says no length, and never ends.
    assert (
        program.post("/logout", content=_bounded(endless()), headers={"Content-Type": "application/json"}).status_code
        == 413
    )
    assert program.get("/?query=" + "x" * 5000).status_code == 414
    assert program.get("/nodes/" + "x" * 9000).status_code == 414


def _bounded(parts: Iterator[bytes]) -> Iterator[bytes]:
    for _ in range(100):
        yield next(parts)


# Signing in -----------------------------------------------------------------------------------------------------------


def test_where_one_must_sign_in_nothing_is_shown_before(one: tuple[Console, str]) -> None:
    made, token = one
    for path in ("/", "/api", "/fleet", "/nothing", "/runs/1", "/nodes/x"):
        answer = made.browser().get(path)
        assert (answer.status_code, answer.headers["location"][:13]) == (303, "/login?after=")
    for path in ("/", "/api/runs", "/api/openapi.json", "/export/runs.csv", "/events", "/nothing"):
        answer = made.program().get(path)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert made.browser().get("/login").status_code == 200
    assert made.program().get("/static/console.css").status_code == 200
    assert made.program().get("/healthz").status_code == 200
    assert made.program(token).get("/api/runs").status_code == 200


def test_a_session_begins_anew_at_each_sign_in_and_its_cookie_is_no_scripts(one: tuple[Console, str]) -> None:
    made, token = one
    browser = made.browser()
    browser.client.cookies.set("bitwitness", "chosen-by-somebody-else", domain="localhost.local")
    first = cookie_of(browser.sign_in(token, after="/fleet"))
    assert first.endswith("; HttpOnly; Path=/; SameSite=strict")
    assert "chosen-by-somebody-else" not in first
    before = browser.client.cookies.get("bitwitness", domain="localhost.local")
    second = cookie_of(browser.sign_in(token))
    assert second != first
    thief = made.browser()
    thief.client.cookies.set("bitwitness", str(before), domain="localhost.local")
    assert thief.get("/api").status_code == 303  # the session before has ended


def test_signing_out_ends_the_session_here_too(one: tuple[Console, str]) -> None:
    made, token = one
    browser = made.browser()
    browser.sign_in(token)
    held = browser.client.cookies.get("bitwitness")
    csrf = CSRF.findall(browser.get("/api").text)[0]
    answer = browser.post("/logout", {"csrf": csrf})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert "Max-Age=0" in cookie_of(answer)
    thief = made.browser()
    thief.client.cookies.set("bitwitness", str(held))
    assert thief.get("/api").status_code == 303


def test_no_session_key_is_kept(one: tuple[Console, str]) -> None:
    made, token = one
    browser = made.browser()
    browser.sign_in(token)
    held = str(browser.client.cookies.get("bitwitness"))
    sessions = made.app.state.sessions
    assert len(sessions) == 1
    assert held not in repr(sessions._kept)
    assert token not in repr(vars(made.app.state.signing))


@pytest.mark.parametrize(
    "after",
    [
        "https://evil.example/",
        "//evil.example/",
        "/\\evil.example",
        "javascript:alert(1)",
        "/\t/evil.example",
        "/x\r\nSet-Cookie: a=b",
        "",
    ],
)
def test_nobody_is_sent_elsewhere(one: tuple[Console, str], after: str) -> None:
    made, token = one
    answer = made.browser().sign_in(token, after=after)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert "a=b" not in str(answer.headers)


def test_the_sign_in_has_a_form_token_of_its_own(one: tuple[Console, str]) -> None:
    made, token = one
    attacker, victim = made.browser(), made.browser()
    form = CSRF.findall(attacker.get("/login").text)[-1]
    victim.get("/login")
    answer = victim.post("/login", {"csrf": form, "secret": token})
    assert (answer.status_code, len(made.app.state.sessions)) == (403, 0)


def test_over_tls_the_cookie_belongs_to_this_host_alone(database: Database) -> None:
    users, public = OneToken(), "https://console.example.org"
    settings = Settings(users=users, open=False, hosts=hosts_of("127.0.0.1", [public]), origins=frozenset({public}))
    with console(database, settings) as made:
        browser = Browser(made.program(Host="console.example.org", **PAGE))
        form = browser.get("/login")
        nonce = cookie_of(form, "__Host-bitwitness-form")
        held = {"Cookie": nonce.partition(";")[0]}
        data = {"csrf": CSRF.findall(form.text)[-1], "secret": users.token}
        answer = browser.post("/login", data, Origin=public, **held)
        found = cookie_of(answer, "__Host-bitwitness")
        assert found.endswith("; HttpOnly; Path=/; SameSite=strict; Secure")
        key = found.partition(";")[0].partition("=")[2]
        assert browser.get("/api", Cookie=f"__Host-bitwitness={key}").status_code == 200
        assert (
            browser.get("/api", Cookie=f"bitwitness={key}").status_code == 303
        )  # a neighbour in the domain can set that one
        assert browser.post("/logout", {}, Origin="http://evil.example").status_code == 403


def test_what_a_proxy_says_is_not_believed(local: Console) -> None:
    headers = {
        "X-Forwarded-Host": "evil.example",
        "X-Forwarded-For": "192.0.2.1",
        "X-Forwarded-Proto": "https",
        "Forwarded": "host=evil",
    }
    answer = local.program(**headers).get("/api")
    assert answer.status_code == 200
    assert "evil" not in answer.text


# Roles ----------------------------------------------------------------------------------------------------------------


def test_a_console_that_only_shows_takes_no_act_from_anybody(database: Database) -> None:
    users = OneToken()
    with console(database, Settings(users=users)) as made:
        program = made.program(users.token)
        for path in ("/fleet/proposals/c/1/approve", "/nothing", "/runs/1/quarantine/clear", "/"):
            answer = program.post(path)
            assert answer.status_code == 403
            assert "--allow-actions" in answer.json()["error"]
        assert made.program().post("/nothing").status_code == 403


def test_a_removed_user_is_signed_out_and_a_new_role_needs_a_new_sign_in(tmp_path: Path, database: Database) -> None:
    path, now = tmp_path / "users.json", [0.0]
    first = add(path, "ada", "operator")
    token = add(path, "bob", "viewer")
    users = UsersFile(path, lambda: now[0])
    with console(database, Settings(users=users, open=False, allow_actions=True)) as made:
        ada = made.browser()
        assert ada.sign_in(first, "ada").status_code == 303
        bob = made.program(token)
        assert bob.get("/api/runs").status_code == 200
        assert "viewer" in bob.post("/runs/1/quarantine/clear").json()["error"]
        second = add(path, "ada", "viewer")
        remove(path, "bob")
        now[0] += 2
        assert ada.get("/api").status_code == 303
        assert bob.get("/api/runs").status_code == 401
        path.chmod(0o620)
        now[0] += 2
        assert ada.sign_in(second, "ada").status_code == 401
        path.chmod(0o600)
        now[0] += 2
        assert ada.sign_in(first, "ada").status_code == 401
        assert ada.sign_in(second, "ada").status_code == 303


def test_wrong_secrets_are_told_on_the_form_and_after_some_one_waits(database: Database) -> None:
    users = OneToken()
    with console(database, Settings(users=users, open=False)) as made:
        browser = made.browser("192.0.2.1")
        wrong = users.token[:-2] + "xx"
        answers = [browser.sign_in(wrong) for _ in range(11)]
        assert [one.status_code for one in answers] == [401] * 10 + [429]
        assert "the name, the password or the token is wrong" in answers[0].text
        assert wrong not in answers[0].text
        assert int(answers[-1].headers["retry-after"]) <= 15
        assert browser.sign_in("a password", name="operator").status_code == 429
        for client in ("192.0.2.1", "192.0.2.2"):  # who has the token does not wait for who guesses
            assert made.browser(client).sign_in(users.token).status_code == 303
        assert made.program(users.token, "192.0.2.1").get("/api/runs").status_code == 200


def test_who_is_not_signed_in_learns_nothing_of_files(database: Database) -> None:
    users, status = OneToken(), Status()
    status.tell("import", "error", "the import of /secret/path fails")
    with console(database, Settings(users=users, open=False), status) as made:
        assert made.program().get("/healthz").json() == {"ok": True}
        assert "/secret/path" not in made.browser().get("/login").text
        assert made.program(users.token).get("/healthz").json()["errors"] == ["the import of /secret/path fails"]
        browser = made.browser()
        browser.sign_in(users.token)
        assert "/secret/path" in browser.get("/").text
