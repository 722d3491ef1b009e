"""`bitwitness fleet send`: hand incidents to the inbox of a controller that does not see the files of the run."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from bitwitness.cli.output import console, print_json, styled
from bitwitness.cli.runs import GIVEN_PATH, open_run
from bitwitness.errors import ConfigurationError, MissingExtra, RunFilesError
from bitwitness.runfiles import read_incident

if TYPE_CHECKING:
    import httpx

_SECONDS = 30.0
_LATER = (408, 425, 429, 500, 502, 503, 504, 507)
"""Answers after which the same may be taken."""
_LONGEST_PAUSE = 30.0


@dataclass(frozen=True, slots=True)
class _Sent:
    """What became of one incident."""

    incident: str
    path: str
    outcome: Literal["stored", "known", "refused", "not sent"]
    why: str = ""

    @property
    def ok(self) -> bool:
        """Whether the inbox has it."""
        return self.outcome in ("stored", "known")


@click.command()
@click.argument("path", type=GIVEN_PATH, metavar="INCIDENT_OR_RUN_DIR")
@click.option(
    "--to", "address", required=True, metavar="URL", help="Of the controller, e.g. https://fleet.example:9470."
)
@click.option("--token-file", required=True, type=GIVEN_PATH, help="Holds the token; only its owner may read it.")
@click.option(
    "--run", "run", default=None, metavar="NAME", help="Name of the run at the inbox. Default: of its directory."
)
@click.option(
    "--patience", default=30.0, show_default=True, type=click.FloatRange(0, 86_400), metavar="SECONDS",
    help="How long to try again where the inbox cannot be reached or is busy.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def send(path: Path, address: str, token_file: Path, run: str | None, patience: float, as_json: bool) -> None:
    """Send an incident, or all incidents of a run, to the inbox of a controller (`bitwitness fleet watch --listen`).

    What was sent before is not stored twice, so that the command can be repeated. Exit codes: 0 the inbox has all of them;
    1 it has not; 2 wrong input.
    """
    from bitwitness.fleet.received import Refused, valid_run
    from bitwitness.fleet.secret import SHORTEST, read_secret

    try:
        import httpx
    except ImportError as error:
        raise MissingExtra("bitwitness fleet send needs httpx: pip install 'bitwitness[fleet]'") from error
    token = read_secret(token_file, "the token of the inbox", SHORTEST)
    url, secure = _target(address)
    incidents = _incidents(path)
    try:
        name = valid_run(_run_of(path) if run is None else run)
    except Refused as refused:
        raise ConfigurationError(f"{refused.why}; give one by --run") from None
    if not secure and not as_json:
        console(stderr=True).print(
            styled("the token goes over the network in the clear: use https outside of a trusted network")
        )
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", "X-Bitwitness-Run": name}
    deadline = time.monotonic() + patience
    with httpx.Client(timeout=_SECONDS, follow_redirects=False, headers=headers) as client:
        sent = [_send(client, url, one, deadline) for one in incidents]
    _report(sent, name, as_json)
    if not all(one.ok for one in sent):
        raise click.exceptions.Exit(1)


def _target(address: str) -> tuple[str, bool]:
    """The address of the inbox, and whether nobody else on the way can read the token."""
    import httpx

    try:
        url = httpx.URL(address)
    except (httpx.InvalidURL, UnicodeError, ValueError):
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise ConfigurationError("--to must be an http or https address such as https://fleet.example:9470")
    path = url.path.rstrip("/")
    inbox = url.copy_with(path=path if path.endswith("/incidents") else f"{path}/incidents")
    return str(inbox), url.scheme == "https" or url.host in ("localhost", "127.0.0.1", "::1")


def _incidents(path: Path) -> list[Path]:
    """The directories of the incidents that are meant, oldest first.

    Raises:
        RunFilesError: there are none, or one is damaged.
    """
    if path.name == "incident.json" or (path / "incident.json").exists():
        found = [path.parent if path.name == "incident.json" else path]
    else:
        found = open_run(path, "an incident (no incident.json)").incidents()
        if not found:
            raise RunFilesError(f"{path} has no incidents: nothing was found in this run, and nothing is sent")
    return found


def _run_of(path: Path) -> str:
    """The directory of the run in which an incident is, by its name."""
    folder = path.absolute()
    folder = folder.parent if folder.name == "incident.json" else folder
    if (folder / "incident.json").exists() and folder.parent.name == "incidents":
        folder = folder.parent.parent
    return folder.name


def _send(client: httpx.Client, url: str, incident: Path, deadline: float) -> _Sent:
    from bitwitness.fleet.received import LARGEST

    try:
        body = json.dumps(dict(read_incident(incident).record), separators=(",", ":")).encode()
    except RunFilesError as error:
        return _Sent(incident.name, str(incident), "not sent", str(error))
    if len(body) > LARGEST:
        why = f"it has {len(body) >> 20} MiB, and an inbox takes {LARGEST >> 20}: let the controller read the run directory itself"
        return _Sent(incident.name, str(incident), "not sent", why)
    pause = 0.5
    while True:
        status, why, asked = _post(client, url, body)
        if status in {200, 201}:
            return _Sent(incident.name, str(incident), "stored" if status == 201 else "known")
        if status is not None and status not in _LATER:
            return _Sent(incident.name, str(incident), "refused", why)
        pause = min(_LONGEST_PAUSE, pause * 2)
        if time.monotonic() + max(pause, asked) > deadline:
            return _Sent(
                incident.name, str(incident), "not sent", f"{why}; send it again later, nothing is stored twice"
            )
        time.sleep(max(pause, asked))


def _post(client: httpx.Client, url: str, body: bytes) -> tuple[int | None, str, float]:
    """The status, what the inbox says, and after how many seconds it may be asked again."""
    import httpx

    try:
        answer = client.post(url, content=body)
    except (httpx.HTTPError, OSError) as error:
        return None, f"the inbox cannot be reached ({type(error).__name__}: {error})", 0.0
    try:
        said: Any = answer.json()
        why = str(said["error"])
    except (ValueError, KeyError, TypeError):
        why = "and does not say why" if not answer.is_redirect else "it redirects: give the address that it names"
    asked = answer.headers.get("retry-after", "")
    return answer.status_code, f"it answered {answer.status_code}: {why}", float(asked) if asked.isdecimal() else 0.0


def _report(sent: list[_Sent], run: str, as_json: bool) -> None:
    if as_json:
        listed = [{"incident": one.incident, "path": one.path, "outcome": one.outcome, "why": one.why} for one in sent]
        print_json({"run": run, "sent": sum(one.ok for one in sent), "incidents": listed})
        return
    for one in sent:
        style = "" if one.ok else "yellow"
        console(stderr=not one.ok).print(
            styled(f"{one.incident}: {one.outcome}{f' ({one.why})' if one.why else ''}", style)
        )
