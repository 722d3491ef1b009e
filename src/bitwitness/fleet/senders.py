"""Webhook, chat and mail: each hands one message over, in bounded time, or says in a `ClusterError` why not.

An error names the host and never the rest of an address: the address of a chat room lets anybody write there.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import smtplib
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from bitwitness._version import __version__
from bitwitness.errors import ClusterError, ConfigurationError, MissingExtra
from bitwitness.fleet.notify import SEVERITIES, Message, Notifier, Severity
from bitwitness.fleet.secret import read_secret

try:
    import httpx
except ImportError as missing:
    raise MissingExtra("messages of fleet need httpx: pip install 'bitwitness[fleet]'") from missing

logger = logging.getLogger(__name__)

SECONDS = 10.0
"""For each part of handing a message over."""
SIGNATURE = "X-Bitwitness-Signature"
_TLS = ("starttls", "ssl", "none")
_SLACK_BLOCK = 2900
"""Characters; Slack takes 3000."""


class _Unsaid(logging.Filter):
    """Drops records that tell an address: httpx logs each one at level INFO."""

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._secret = secret

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record may be said."""
        return self._secret not in record.getMessage()


def made(settings: Mapping[str, Any], where: str) -> Notifier:
    """One notifier from its table in the policy. `where`: for errors.

    Raises:
        ConfigurationError: a kind or a setting is unknown or impossible.
    """
    table = _Table(settings, where)
    kind = table.text("kind")
    if kind not in _KINDS:
        raise ConfigurationError(f"{where}: kind = {kind!r:.80}: there are {', '.join(sorted(_KINDS))}")
    notifier = _KINDS[kind](table)
    notifier.name = table.text("name", notifier.name)
    least = table.text("severity", "info")
    if least not in SEVERITIES:
        raise ConfigurationError(
            f"{where}: severity = {least!r:.80}: the least that is told, one of {', '.join(SEVERITIES)}"
        )
    table.end()
    return notifier if least == "info" else _FromSeverity(notifier, SEVERITIES.index(least))


class _Table:
    """The settings of one notifier, each asked for once by its type; what nobody asked for is unknown."""

    def __init__(self, settings: Mapping[str, Any], where: str) -> None:
        self._settings, self.where, self._asked = settings, where, set[str]()

    def text(self, name: str, default: str | None = None) -> str:
        """A text without control characters."""
        value = self._value(name, default)
        if not isinstance(value, str) or (not value.strip() and default is None) or not value.isprintable():
            raise ConfigurationError(f"{self.where}: {name} must be a text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts, or one."""
        value = self._value(name, None)
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not listed or not all(isinstance(one, str) for one in listed):
            raise ConfigurationError(f"{self.where}: {name} must be a text or a list of texts")
        return tuple(listed)

    def port(self, name: str, default: int) -> int:
        """A port."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 65536:
            raise ConfigurationError(f"{self.where}: {name} must be a port, 1 to 65535")
        return value

    def secret(self, name: str, shortest: int = 1) -> str:
        """What is in the file of this name, or "" where none is set."""
        path = self.text(name, "")
        return read_secret(Path(path), f"{self.where}, {name}", shortest) if path else ""

    def address(self, value: str, name: str) -> httpx.URL:
        """An http or https address that holds no password."""
        try:
            url = httpx.URL(value)
        except (httpx.InvalidURL, UnicodeError, ValueError):
            url = httpx.URL("")
        if url.scheme not in ("http", "https") or not url.host or url.userinfo:
            raise ConfigurationError(f"{self.where}: {name} must be an http or https address without a password in it")
        return url

    def mail(self, value: str, name: str) -> str:
        """An address of mail."""
        try:
            return Address(addr_spec=value).addr_spec
        except Exception as error:
            raise ConfigurationError(f"{self.where}: {name} = {value!r:.80} is no address of mail") from error

    def end(self) -> None:
        """Refuse settings that nobody asked for."""
        unknown = sorted(set(self._settings) - self._asked)
        if unknown:
            raise ConfigurationError(
                f"{self.where}: no such setting: {', '.join(unknown)}; there are {', '.join(sorted(self._asked))}"
            )

    def _value(self, name: str, default: Any) -> Any:
        self._asked.add(name)
        value = self._settings.get(name, default)
        if value is None:
            raise ConfigurationError(f"{self.where}: {name} is missing")
        return value


@dataclass(frozen=True, slots=True)
class _FromSeverity:
    """A notifier that is told only what is severe enough."""

    inner: Notifier
    least: int

    @property
    def name(self) -> str:
        """That of the notifier."""
        return self.inner.name

    def send(self, message: Message) -> None:
        """Hand it over, or leave it."""
        severity: Severity = message.severity
        if SEVERITIES.index(severity) >= self.least:
            self.inner.send(message)


class Webhook:
    """JSON to any address, signed if there is a secret: `X-Bitwitness-Signature: sha256=<HMAC-SHA256 of the body>`."""

    def __init__(self, url: httpx.URL, secret: str = "") -> None:
        self.name = f"webhook {url.host}"
        self._url, self._secret = url, secret
        _hush(url)

    @classmethod
    def of(cls, table: _Table) -> Webhook:
        """From its settings: `url` or `url_file`, and `secret_file`."""
        return cls(_url(table), table.secret("secret_file", 16))

    def send(self, message: Message) -> None:
        """Post it; 2xx is success, and the id lets the receiver drop what it has got already."""
        body = json.dumps(message.to_json()).encode()
        headers = {"Idempotency-Key": _key(message)}
        if self._secret:
            headers[SIGNATURE] = "sha256=" + hmac.new(self._secret.encode(), body, hashlib.sha256).hexdigest()
        _post(self.name, self._url, body, headers)


class Slack:
    """What Slack's incoming webhooks take, and Mattermost and others with them."""

    def __init__(self, url: httpx.URL) -> None:
        self.name = f"slack {url.host}"
        self._url = url
        _hush(url)

    @classmethod
    def of(cls, table: _Table) -> Slack:
        """From its settings: `url` or `url_file`."""
        return cls(_url(table))

    def send(self, message: Message) -> None:
        """Post it."""
        _post(self.name, self._url, json.dumps(slack_form(message)).encode(), {})


def slack_form(message: Message) -> dict[str, Any]:
    """A message as plain text blocks, in which nothing is a mention, a link or markup. Pure."""
    text = message.text if len(message.text) <= _SLACK_BLOCK else message.text[: _SLACK_BLOCK - 4] + " ..."
    return {
        "text": message.subject.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"),
        "mrkdwn": False,
        "link_names": False,
        "parse": "none",
        "unfurl_links": False,
        "blocks": [
            {"type": "header", "text": {"type": "plain_text", "text": message.subject, "emoji": False}},
            {"type": "section", "text": {"type": "plain_text", "text": text, "emoji": False}},
        ],
    }


def _url(table: _Table) -> httpx.URL:
    plain, kept = table.text("url", ""), table.secret("url_file")
    if bool(plain) == bool(kept):
        raise ConfigurationError(
            f"{table.where}: give url, or url_file with the address in a file that only its owner can read"
        )
    return table.address(plain or kept, "url" if plain else "url_file")


def _hush(url: httpx.URL) -> None:
    logging.getLogger("httpx").addFilter(_Unsaid(str(url)))


def _post(name: str, url: httpx.URL, body: bytes, headers: Mapping[str, str]) -> None:
    sent = {"Content-Type": "application/json", "User-Agent": f"bitwitness/{__version__}", **headers}
    try:
        # The body of the answer is not read: it may have no end.
        with (
            httpx.Client(timeout=SECONDS, follow_redirects=False) as client,
            client.stream("POST", url, content=body, headers=sent) as answer,
        ):
            status = answer.status_code
    except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
        raise ClusterError(f"{name}: not delivered ({type(error).__name__})") from None  # its text may tell the address
    if not 200 <= status < 300:
        raise ClusterError(f"{name}: not delivered, it answered {status}")


class Email:
    """Mail through a server, encrypted unless it is told not to."""

    def __init__(
        self,
        host: str,
        port: int,
        sender: str,
        to: tuple[str, ...],
        *,
        tls: str = "starttls",
        ca_file: str = "",
        user: str = "",
        password: str = "",
    ) -> None:
        self.name = f"email {host}"
        self._host, self._port, self._sender, self._to = host, port, sender, to
        self._tls, self._user, self._password = tls, user, password
        self._context = None if tls == "none" else ssl.create_default_context(cafile=ca_file or None)

    @classmethod
    def of(cls, table: _Table) -> Email:
        """From its settings: `host`, `port`, `from`, `to`, `tls`, `ca_file`, `user`, `password_file`."""
        tls = table.text("tls", "starttls")
        if tls not in _TLS:
            raise ConfigurationError(f"{table.where}: tls = {tls!r:.80}: one of {', '.join(_TLS)}")
        host, user, password = table.text("host"), table.text("user", ""), table.secret("password_file")
        if bool(user) != bool(password):
            raise ConfigurationError(f"{table.where}: user and password_file belong together")
        if user and tls == "none" and not _is_loopback(host):
            raise ConfigurationError(f"{table.where}: a password is not sent in the clear: tls must be starttls or ssl")
        sender = table.mail(table.text("from"), "from")
        to = tuple(table.mail(one, "to") for one in table.texts("to"))
        port, ca_file = table.port("port", 465 if tls == "ssl" else 587), table.text("ca_file", "")
        try:
            return cls(host, port, sender, to, tls=tls, ca_file=ca_file, user=user, password=password)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"{table.where}: ca_file cannot be used: {error.strerror or 'no certificates'}"
            ) from error

    def send(self, message: Message) -> None:
        """Hand it to the server; refused by some of the recipients is delivered, and logged."""
        try:
            with self._connect() as server:
                if self._tls == "starttls":
                    server.starttls(context=self._context)
                if self._user:
                    server.login(self._user, self._password)
                refused = server.send_message(self._mail(message), self._sender, list(self._to))
        except smtplib.SMTPResponseException as error:
            raise ClusterError(f"{self.name}: not delivered, it answered {error.smtp_code}") from None
        except (smtplib.SMTPException, OSError, ValueError) as error:
            raise ClusterError(f"{self.name}: not delivered ({type(error).__name__})") from None
        if refused:
            logger.warning("%s: delivered, but refused for %s", self.name, ", ".join(sorted(refused)))

    def _connect(self) -> smtplib.SMTP:
        if self._tls == "ssl":
            return smtplib.SMTP_SSL(self._host, self._port, timeout=SECONDS, context=self._context)
        return smtplib.SMTP(self._host, self._port, timeout=SECONDS)

    def _mail(self, message: Message) -> EmailMessage:
        mail = EmailMessage(policy=SMTP)
        mail["Subject"] = message.subject
        mail["From"] = self._sender
        mail["To"] = ", ".join(self._to)
        mail["Date"] = format_datetime(datetime.fromisoformat(message.time))
        mail["Message-ID"] = f"<{_digest(message)}@bitwitness.invalid>"
        mail["Auto-Submitted"] = "auto-generated"
        mail["X-Bitwitness-Severity"] = message.severity
        mail.set_content(message.text)
        return mail


def _digest(message: Message) -> str:
    return hashlib.sha256(message.id.encode(errors="backslashreplace")).hexdigest()[:32]


def _key(message: Message) -> str:
    """The id, where a header can hold it; a name of a folder may be in it."""
    plain = 0 < len(message.id) <= 200 and all(0x21 <= ord(char) <= 0x7E for char in message.id)
    return message.id if plain else _digest(message)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


_KINDS: dict[str, Callable[[_Table], Webhook | Slack | Email]] = {
    "webhook": Webhook.of,
    "slack": Slack.of,
    "email": Email.of,
}
