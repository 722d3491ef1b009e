"""Messages: what a person reads, and that they arrive at real servers on loopback without a header or a mention smuggled in."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any, get_args

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, Envelope
from hypothesis import given
from hypothesis import strategies as st

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.budget import HoldReason
from bitwitness.fleet.decision import Proposal
from bitwitness.fleet.identity import Condemned, Return, Sighting
from bitwitness.fleet.kept import Status
from bitwitness.fleet.notify import (
    About,
    Ending,
    Message,
    Notifier,
    clean,
    compose,
    compose_clear,
    compose_return,
    notifiers,
    undo_command,
)
from bitwitness.fleet.outbox import MOST, Outbox, deliver
from bitwitness.fleet.senders import Email, slack_form
from bitwitness.fleet.state import State
from tests.fleet.rehearsal import HandClock, Listener
from tests.fleet.web import ID, Sink

TIME = "2026-11-29T09:30:15.000+00:00"
ABOUT = About(
    time=TIME,
    run="job-1",
    incident=f"/runs/job 1/incidents/{ID}",
    headline="step 7: persistent compute corruption on rank 1 (node node-b)",
    job="slurm:1234",
    state="/srv/fleet state",
    calls=("scontrol update nodename=node-b state=drain",),
    owner="gpu-ops",
)
PROPOSAL = Proposal(ID, "node-b", ("GPU-b",), "drain", "drain", "medium", "GPU-b gave wrong results again")
NOBODY = Proposal(ID, "", (), "contact", None, "low", "attributed to nobody")
SECRET = "hunter2-hunter2-hunter2"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback is reached directly, whatever the machine's settings are."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


# What is said ---------------------------------------------------------------------------------------------------------


def test_a_drained_node() -> None:
    message = compose(PROPOSAL, "done", "the cluster shows DRAINED", ABOUT)
    assert message.subject == f"bitwitness: drained node-b (incident {ID})"
    assert message.severity == "warning"
    for said in (
        f"Incident {ID} of run job-1, job slurm:1234",
        "persistent compute corruption",
        "Node: node-b\nDevice: GPU-b",
        "drain (medium confidence)",
        "Why: GPU-b gave wrong results again",
        "Done: the node takes no new jobs. the cluster shows DRAINED",
        "scontrol update nodename=node-b state=drain",
        "What to do next: diagnose node-b",
        "Ask gpu-ops",
        "Undo: bitwitness fleet clear node-b --why 'WHAT WAS FOUND OUT' --state '/srv/fleet state'",
        f"bitwitness incident show '/runs/job 1/incidents/{ID}'",
        "bitwitness fleet history --state '/srv/fleet state'",
    ):
        assert said in message.text
    assert message.record["undo"] == undo_command("node-b", "/srv/fleet state")
    assert Message.from_json(json.loads(json.dumps(message.to_json()))) == message


def test_nobody_named_asks_for_no_node() -> None:
    message = compose(NOBODY, "nothing", "", ABOUT)
    assert message.severity == "critical"
    assert "nobody can be named" in message.subject
    assert "Undo" not in message.text
    assert "take no node out of service because of it alone" in message.text


@pytest.mark.parametrize("ending", get_args(Ending))
@pytest.mark.parametrize("proposal", [PROPOSAL, NOBODY, replace(PROPOSAL, action="re-test", act=None)])
def test_every_ending_says_what_to_do(ending: Ending, proposal: Proposal) -> None:
    message = compose(proposal, ending, "because", ABOUT, hold="quiet-hours" if ending == "held" else "")
    assert "What to do next: " in message.text
    assert ID in message.subject
    assert len(message.subject) <= 120
    assert ("Undo: " in message.text) == (proposal is PROPOSAL and ending in {"done", "already out", "unclear"})


def test_endings_and_holds_are_those_of_the_controller() -> None:
    assert set(get_args(Ending)) <= set(get_args(Status))
    for why in get_args(HoldReason):
        assert "What to do next: " in compose(PROPOSAL, "held", "text", ABOUT, hold=why).text


def test_the_id_tells_what_is_told_twice_from_what_is_new() -> None:
    held = compose(PROPOSAL, "held", "until 7", ABOUT, hold="quiet-hours")
    assert (
        compose(PROPOSAL, "held", "until 8", replace(ABOUT, time="2026-11-29T10:00:00+00:00"), hold="quiet-hours").id
        == held.id
    )
    others = [
        compose(PROPOSAL, "held", "", ABOUT, hold="cluster-share"),
        compose(PROPOSAL, "done", "", ABOUT),
        compose(replace(PROPOSAL, node="node-c"), "held", "", ABOUT, hold="quiet-hours"),
        compose_clear("node-b", "me", "mended", ABOUT),
    ]
    assert len({held.id, *(one.id for one in others)}) == 5


def test_a_device_that_came_back_is_critical() -> None:
    was = Condemned("GPU-b", "165", "node-b", ID, TIME)
    message = compose_return(Return(was, Sighting("GPU-b", "165", "node-x", TIME, "a job")), ABOUT)
    assert message.severity == "critical"
    assert "node-x" in message.subject
    assert "THE SAME SILICON IS BACK" in message.text
    assert undo_command("node-b", ABOUT.state) in message.text


@given(st.text(max_size=400), st.text(max_size=400))
def test_nothing_from_elsewhere_looks_like_ours(first: str, second: str) -> None:
    wild = replace(PROPOSAL, devices=(first,), reason=second)
    message = compose(wild, "done", first, replace(ABOUT, run=second, headline=first, job=second, owner=first))
    assert "\n" not in message.subject
    assert len(message.subject) <= 120
    assert clean(message.text) == message.text
    heads = [line.partition(":")[0] for line in message.text.splitlines() if line.startswith(("Undo", "Node", "Done"))]
    assert heads == ["Node", "Done", "Undo"]
    json.dumps(message.to_json()).encode()
    message.text.encode()


def test_control_characters_and_turned_text_are_taken_out() -> None:
    assert clean("a\x1b[31mb\r\nc\u202ed\u2028e\x00f\u200bg\ud800h") == "a [31mb \nc d e f g h"
    long = compose(replace(PROPOSAL, reason="x" * 100_000), "done", "y" * 100_000, ABOUT)
    assert len(long.text) <= 8000


# Webhook and chat -----------------------------------------------------------------------------------------------------


@pytest.fixture
def sink() -> Iterator[Sink]:
    with Sink().running() as running:
        yield running


def kept(path: Path, secret: str) -> str:
    path.write_text(secret)
    path.chmod(0o600)
    return str(path)


def test_a_webhook_gets_it_signed_with_its_id(sink: Sink, tmp_path: Path) -> None:
    settings = {"kind": "webhook", "url": f"{sink.address}/hook", "secret_file": kept(tmp_path / "s", SECRET)}
    message = compose(PROPOSAL, "done", "", ABOUT)
    (notifier,) = notifiers([settings])
    notifier.send(message)
    ((headers, content),) = sink.got
    assert json.loads(content) == json.loads(json.dumps(message.to_json()))
    assert headers["idempotency-key"] == message.id
    assert headers["content-type"] == "application/json"
    expected = hmac.new(SECRET.encode(), content, hashlib.sha256).hexdigest()
    assert headers["x-bitwitness-signature"] == f"sha256={expected}"
    assert SECRET not in f"{headers}{content!r}{notifier.name}{notifier!r}"


def test_slack_gets_plain_text_only(sink: Sink, tmp_path: Path) -> None:
    evil = replace(PROPOSAL, reason="<!channel> *bold* <https://evil|click> @here & :boom:", devices=("<!here>",))
    message = replace(compose(evil, "done", "", ABOUT), subject="<!channel> & co")
    (notifier,) = notifiers(
        [{"kind": "slack", "url_file": kept(tmp_path / "url", f"{sink.address}/services/T0/B0/key")}]
    )
    notifier.send(message)
    sent = json.loads(sink.got[0][1])
    assert sent == slack_form(message)
    assert sent["text"] == "&lt;!channel&gt; &amp; co"
    assert (sent["mrkdwn"], sent["link_names"], sent["parse"]) == (False, False, "none")
    assert [block["text"]["type"] for block in sent["blocks"]] == ["plain_text", "plain_text"]
    assert all(block["text"]["emoji"] is False and len(block["text"]["text"]) <= 3000 for block in sent["blocks"])
    long = slack_form(compose(replace(PROPOSAL, devices=tuple(f"GPU-{n:040}" for n in range(200))), "done", "", ABOUT))
    assert all(len(block["text"]["text"]) <= 3000 for block in long["blocks"])


@pytest.mark.parametrize("status", [301, 302, 307, 400, 404, 429, 500, 503])
def test_an_answer_that_is_no_success_is_an_error_without_the_address(
    sink: Sink, tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    caplog.set_level(logging.DEBUG)
    sink.statuses.append(status)
    (notifier,) = notifiers(
        [{"kind": "slack", "url_file": kept(tmp_path / "url", f"{sink.address}/services/{SECRET}")}]
    )
    with pytest.raises(ClusterError, match=f"slack 127.0.0.1: not delivered, it answered {status}") as error:
        notifier.send(compose(PROPOSAL, "done", "", ABOUT))
    assert SECRET not in f"{error.value}{error.value.__cause__}{caplog.text}"
    assert len(sink.got) == 1, "a redirection is not followed"


def test_nobody_there_is_an_error_without_the_address(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG)
    with closing(socket.socket()) as bound:  # bound and not listening: refused
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        settings = {"kind": "webhook", "url_file": kept(tmp_path / "url", f"http://127.0.0.1:{port}/{SECRET}")}
        (notifier,) = notifiers([settings])
        with pytest.raises(ClusterError, match="not delivered") as error:
            notifier.send(compose(PROPOSAL, "done", "", ABOUT))
    assert SECRET not in f"{error.value}{caplog.text}"


def test_only_what_is_severe_enough(sink: Sink) -> None:
    (notifier,) = notifiers([{"kind": "webhook", "url": sink.address, "severity": "critical"}])
    notifier.send(compose(PROPOSAL, "done", "", ABOUT))
    assert sink.got == []
    notifier.send(compose(PROPOSAL, "unclear", "", ABOUT))
    assert len(sink.got) == 1


# Mail -----------------------------------------------------------------------------------------------------------------


class Mailbox:
    """What a mail server calls; keeps what came."""

    def __init__(self) -> None:
        self.got: list[tuple[str, list[str], EmailMessage]] = []
        self.answer = "250 OK"
        self.refuse: set[str] = set()

    async def handle_RCPT(self, server: Any, session: Any, envelope: Envelope, address: str, options: Any) -> str:  # noqa: N802
        if address in self.refuse:
            return "550 no such user"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Envelope) -> str:  # noqa: N802
        content = envelope.content
        assert isinstance(content, bytes)
        mail = message_from_bytes(content, EmailMessage, policy=policy.default)
        self.got.append((str(envelope.mail_from), list(envelope.rcpt_tos), mail))
        return self.answer


@contextmanager
def mail_server(box: Mailbox, **settings: Any) -> Iterator[int]:
    with closing(socket.socket()) as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    controller = Controller(box, hostname="127.0.0.1", port=port, **settings)
    controller.start()
    try:
        yield port
    finally:
        controller.stop()


def mail_settings(port: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "email",
        "host": "127.0.0.1",
        "port": port,
        "from": "fleet@example.org",
        "to": ["ops@example.org", "night@example.org"],
        "tls": "none",
    } | more


def test_a_mail_arrives_with_one_subject_and_nothing_smuggled_in() -> None:
    box = Mailbox()
    evil = replace(PROPOSAL, reason="x\r\nBcc: evil@example.org\r\n\r\n.\r\nquit", devices=("GPU-\r\nX: y",))
    message = compose(evil, "done", "ä € 漢", ABOUT)
    message = replace(message, subject="bitwitness: drained nöde " + "x" * 90)
    with mail_server(box) as port:
        (notifier,) = notifiers([mail_settings(port)])
        notifier.send(message)
    ((sender, to, mail),) = box.got
    assert (sender, to) == ("fleet@example.org", ["ops@example.org", "night@example.org"])
    assert mail["Subject"] == message.subject
    assert mail["Auto-Submitted"] == "auto-generated"
    assert mail["To"] == "ops@example.org, night@example.org"
    assert mail["Bcc"] is None
    assert mail["X"] is None
    assert mail["Message-ID"].endswith("@bitwitness.invalid>")
    assert mail.get_content().splitlines() == message.text.splitlines()


def test_a_message_that_was_made_elsewhere_smuggles_nothing_in(sink: Sink) -> None:
    box = Mailbox()
    evil = Message(
        "trouble/ö \r\nX: y\ud800", TIME, "warning", "x\r\nBcc: evil@example.org", "a\x1bb\ud800", {"a": "\ud800"}
    )
    assert (evil.subject, evil.text) == ("x  Bcc: evil@example.org", "a b ")
    with mail_server(box) as port:
        for notifier in notifiers([mail_settings(port), {"kind": "webhook", "url": sink.address}]):
            notifier.send(evil)
    assert box.got[0][2]["Bcc"] is None
    assert box.got[0][1] == ["ops@example.org", "night@example.org"]
    assert "x" not in sink.got[0][0]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        if os.environ.get("BITWITNESS_REAL"):
            pytest.fail("openssl is not installed")
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(folder / "key"), "-out", str(folder / "cert"), "-days", "2", "-subj", "/CN=test"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "cert", folder / "key"


def test_mail_over_tls_with_a_password(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    asked: list[Any] = []

    def authenticate(server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        asked.append((data.login, data.password))
        return AuthResult(success=data.password == SECRET.encode(), handled=False)

    box = Mailbox()
    secure = {"tls_context": context, "authenticator": authenticate, "auth_required": True, "require_starttls": True}
    with mail_server(box, **secure) as port:
        settings = mail_settings(port, tls="starttls", user="fleet", password_file=kept(tmp_path / "p", SECRET))
        (trusting,) = notifiers([settings | {"ca_file": str(cert)}])
        trusting.send(compose(PROPOSAL, "done", "", ABOUT))
        assert len(box.got) == 1
        (careful,) = notifiers([settings])
        with pytest.raises(ClusterError, match="not delivered"):  # nobody vouches for the certificate
            careful.send(compose(PROPOSAL, "done", "", ABOUT))
        (wrong,) = notifiers([settings | {"ca_file": str(cert), "password_file": kept(tmp_path / "q", SECRET + "x")}])
        with pytest.raises(ClusterError, match="it answered 535") as error:
            wrong.send(compose(PROPOSAL, "done", "", ABOUT))
    assert next(password for _, password in asked) == SECRET.encode()
    assert {password for _, password in asked} == {SECRET.encode(), f"{SECRET}x".encode()}
    assert SECRET not in str(error.value)
    assert len(box.got) == 1


def test_a_server_without_tls_gets_nothing_in_the_clear() -> None:
    box = Mailbox()
    with mail_server(box) as port:
        (notifier,) = notifiers([mail_settings(port, tls="starttls")])
        with pytest.raises(ClusterError, match="not delivered"):
            notifier.send(compose(PROPOSAL, "done", "", ABOUT))
    assert box.got == []


def test_a_refusal_is_an_error_and_one_of_several_recipients_is_not(caplog: pytest.LogCaptureFixture) -> None:
    box = Mailbox()
    with mail_server(box) as port:
        (notifier,) = notifiers([mail_settings(port)])
        box.answer = "451 try later"
        with pytest.raises(ClusterError, match="it answered 451"):
            notifier.send(compose(PROPOSAL, "done", "", ABOUT))
        box.answer, box.refuse = "250 OK", {"night@example.org"}
        notifier.send(compose(PROPOSAL, "done", "", ABOUT))
        assert "refused for night@example.org" in caplog.text
        box.refuse.add("ops@example.org")
        with pytest.raises(ClusterError, match="not delivered"):
            notifier.send(compose(PROPOSAL, "done", "", ABOUT))
    with pytest.raises(ClusterError, match="not delivered"):
        notifier.send(compose(PROPOSAL, "done", "", ABOUT))  # nobody listens any more


# Settings -------------------------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"kind": "pager"}, "there are email, slack, webhook"),
    ({}, "kind is missing"),
    ({"kind": "webhook"}, "give url, or url_file"),
    ({"kind": "webhook", "url": "ftp://x/"}, "http or https"),
    ({"kind": "webhook", "url": "/x"}, "http or https"),
    ({"kind": "webhook", "url": f"http://user:{SECRET}@x/"}, "without a password"),
    ({"kind": "webhook", "url": "http://x/", "colour": "red"}, "no such setting: colour"),
    ({"kind": "webhook", "url": "http://x/", "severity": "loud"}, "severity"),
    ({"kind": "webhook", "url": "http://x/", "secret_file": "/nowhere/s"}, "cannot be read"),
    ({"kind": "slack", "url": "http://x/", "url_file": "/nowhere/s"}, "cannot be read"),
    (mail_settings(0), "port"),
    (mail_settings(25, to=[]), "to must be"),
    (mail_settings(25, to=["a@b\nBcc: c@d"]), "no address of mail"),
    (mail_settings(25, **{"from": "nobody"}), "no address of mail"),
    (mail_settings(25, tls="maybe"), "starttls, ssl, none"),
    (mail_settings(25, user="u"), "belong together"),
    (mail_settings(25, ca_file="/nowhere/ca"), "ca_file"),
    (mail_settings(25, host="x\r\ny"), "host must be a text"),
]


@pytest.mark.parametrize(("settings", "why"), WRONG)
def test_wrong_settings_are_refused_before_anything_is_sent(settings: dict[str, Any], why: str) -> None:
    if "ca_file" in settings:
        settings = settings | {"tls": "starttls"}
    with pytest.raises(ConfigurationError, match=why) as error:
        notifiers([{"kind": "webhook", "url": "http://x/"}, settings])
    assert "number 2" in str(error.value)
    assert SECRET not in str(error.value)


def test_a_password_is_not_sent_in_the_clear(tmp_path: Path) -> None:
    settings = mail_settings(25, host="mail.example.org", user="u", password_file=kept(tmp_path / "p", SECRET))
    with pytest.raises(ConfigurationError, match="in the clear"):
        notifiers([settings])


def test_the_protocol_is_kept() -> None:
    made: list[Notifier] = notifiers([{"kind": "webhook", "url": "http://x/"}, mail_settings(25)])
    assert [one.name for one in made] == ["webhook x", "email 127.0.0.1"]
    assert isinstance(made[1], Email)
    assert notifiers([]) == []


def test_two_rooms_of_one_chat_need_names(tmp_path: Path) -> None:
    """Messages wait under the name: with one name, one room would get those of both."""
    rooms = [{"kind": "slack", "url": f"https://chat.example/{room}"} for room in "ab"]
    with pytest.raises(ConfigurationError, match=r"slack chat\.example is there twice"):
        notifiers(rooms)
    named = notifiers([rooms[0], rooms[1] | {"name": "night shift", "severity": "critical"}])
    assert [one.name for one in named] == ["slack chat.example", "night shift"]


# Storms ---------------------------------------------------------------------------------------------------------------


def nobody(number: int, state: State) -> Message:
    """About one of many incidents in which nobody can be named."""
    proposal = replace(NOBODY, incident=f"20261129T093015Z-{number:06x}")
    return compose(proposal, "nothing", "", replace(ABOUT, time=state.stamp()))


def test_in_a_storm_the_rest_is_told_together(tmp_path: Path) -> None:
    clock, listener, stop = HandClock(), Listener(), threading.Event()
    with State(tmp_path / "state dir", clock=clock) as state:
        outbox = Outbox(state, ["listener"])

        def put(*messages: Message) -> list[str]:
            with state.change():
                for message in messages:
                    outbox.put(message)
            before = len(listener.got)
            deliver(state, [listener], stop)
            return [one.subject for one in listener.got[before:]]

        storm = [nobody(number, state) for number in range(150)]
        assert len(put(*storm)) == MOST
        assert put(storm[0], storm[149]) == [], "what was put is not put again"
        assert outbox.waiting()["waiting"] == 130
        done = compose(PROPOSAL, "failed", "refused", replace(ABOUT, time=state.stamp()))
        assert put(done) == [done.subject], "what happened to a node is told by itself"
        clock.move(timedelta(seconds=31))
        assert put() == ["bitwitness: 130 more; see fleet status"]
        more = listener.got[-1]
        assert (more.severity, more.record["count"]) == ("critical", 130)
        assert "fleet status --state '" in more.text
        assert outbox.waiting()["waiting"] == 0
        clock.move(timedelta(seconds=60))
        assert put(nobody(200, state)) == []
        with state.change():
            Outbox(state, ["listener"]).forget_strangers()
        assert outbox.waiting()["waiting"] == 1, "a restart forgets none of them"
        clock.move(timedelta(seconds=600))
        quiet = nobody(201, state)
        assert sorted(put(quiet)) == sorted(["bitwitness: 1 more; see fleet status", quiet.subject])


def test_without_anybody_to_tell_nothing_waits(tmp_path: Path) -> None:
    with State(tmp_path) as state:
        with state.change():
            for number in range(MOST + 5):
                Outbox(state, []).put(nobody(number, state))
        deliver(state, [])
        assert Outbox(state, []).waiting()["waiting"] == 0
