"""What a controller needs of the machine on which it runs: its state, disk space, logs, Prometheus, and ways to reach people.

Everything is looked at and nothing is written, also not to see whether it could be: the answer of `access` is as good as can be had
without leaving a trace.
"""

from __future__ import annotations

import glob
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

from bitwitness.errors import BitwitnessError, ClusterError
from bitwitness.fleet.clock import stamp
from bitwitness.fleet.clusters.base import Check, one_line
from bitwitness.fleet.identity import read_condemned
from bitwitness.fleet.kept import Book
from bitwitness.fleet.notify import Message, Notifier, notifiers
from bitwitness.fleet.owning import STATE_LOCK, owned
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.publishing import CONDEMNED
from bitwitness.fleet.rehearsing import Part, broken
from bitwitness.fleet.rehearsing_incident import copy_state
from bitwitness.fleet.signals.merging import same_host
from bitwitness.fleet.signals.reading import shown_address
from bitwitness.fleet.signals.record import Signal
from bitwitness.fleet.state import NAME, State

_LEAST = 100 << 20
"""Bytes that must be free below the state: the database, its copy while it is written, and some messages."""
_MOST = 10_000


# Signals ------------------------------------------------------------------------------------------------------------


def about_signals(policy: FleetPolicy, node: str, run: Path | None, now: datetime) -> Part:
    """What would be read of a node. A source that says nothing is unknown, and never good."""
    checks = [_log(pattern.replace("{node}", node)) for pattern in policy.logs]
    if policy.metrics:
        checks.append(_metrics(policy, node, now))
    if run is not None:
        checks.append(_beside(run, node))
    if not checks:
        text = "the policy names no logs and no Prometheus: it decides by what ranks have computed alone, and never replaces a node"
        checks.append(Check("signals", "unknown", text, "[signals] logs = [...] and metrics = ..."))
    checks.append(_driver(node))
    return Part("signals", tuple(checks))


def _log(pattern: str) -> Check:
    what = f"log {pattern}"
    try:
        paths = [Path(name) for name in islice(glob.iglob(pattern), _MOST)]  # noqa: PTH207 - the pattern is absolute
    except OSError as error:
        return broken(what, error)
    files = [one for path in paths for one in ([path] if not path.is_dir() else sorted(path.iterdir()))]
    if not files:
        remedy = "correct the pattern, or have the logs of the nodes brought here"
        return Check(what, "bad", f"no file is called {pattern}", remedy)
    wrong = [text for path in files if (text := _unreadable(path))]
    if wrong:
        remedy = "let the user of the controller read it, e.g. by the group adm"
        return Check(what, "bad", f"{len(wrong)} of {len(files)} cannot be read: {wrong[0]}", remedy)
    newest = max(path.stat().st_mtime for path in files)
    written = f"{len(files)} file{'s' if len(files) != 1 else ''}, written last at {stamp(datetime.fromtimestamp(newest, UTC))}"
    if not any(path.stat().st_size for path in files):
        return Check(what, "unknown", f"{written}, and empty")
    return Check(what, "good", written)


def _unreadable(path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return f"{path} is no regular file"
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return ""


def _metrics(policy: FleetPolicy, node: str, now: datetime) -> Check:
    from bitwitness.fleet.signals.metrics import query  # noqa: PLC0415 - needs an extra

    shown = shown_address(policy.metrics)
    what = f"Prometheus {shown}"
    hour = timedelta(hours=1)
    found: Sequence[Signal] = list(
        query(policy.metrics, host=node, at=now, before=hour, after=timedelta(0), timeout=20)
    )
    failed = [one for one in found if one.code in ("dcgm:unreachable", "dcgm:unreadable")]
    if failed:
        return Check(what, "bad", failed[0].reason, "see that this host reaches it, and that it is a Prometheus")
    devices = {one.device for one in found if one.device}
    if not devices:
        said = "; ".join(dict.fromkeys(one.reason for one in found)) or "nothing"
        remedy = "see that dcgm-exporter runs there and is scraped, and that a label node, Hostname or instance has this name"
        return Check(what, "unknown", one_line(f"it has no data of {node} within the last hour ({said})", 400), remedy)
    return Check(what, "good", f"it has data of {len(devices)} devices of {node}")


def _beside(run: Path, node: str) -> Check:
    folder, what = run / "signals" / node, "signals beside the run"
    if not folder.is_dir():
        remedy = "an agent on the node (bitwitness fleet agent), or any program that puts its logs there, would fill it"
        return Check(what, "unknown", f"there is no {folder}", remedy)
    return _log(f"{glob.escape(str(folder))}/*")


def _driver(node: str) -> Check:
    what = f"driver of {node}"
    here = socket.gethostname()
    if not same_host(here, node):
        text = f"this host is {here}: what the driver of {node} says is known only there"
        return Check(what, "unknown", text, f"on {node}: bitwitness fleet signals")
    from bitwitness.fleet.signals import nvml  # noqa: PLC0415 - starts a process

    found = nvml.read(host=node)
    devices = {one.device for one in found if one.device}
    if devices:
        return Check(what, "good", f"{len(devices)} devices answer")
    said = "; ".join(one.reason for one in found) or "it says nothing"
    return Check(what, "unknown", one_line(said, 300))


# People -------------------------------------------------------------------------------------------------------------


def about_notify(policy: FleetPolicy, node: str, now: datetime, *, tell: bool) -> Part:
    """Who would be told; with `tell`, each gets a message that says what it is."""
    if not policy.notify:
        text = "the policy names nobody: only who looks at `bitwitness fleet status` or at /metrics will know"
        return Part("notify", (Check("notify", "unknown", text, "[[notify]] kind = ..."),))
    ready: list[Notifier] = []
    checks: list[Check] = []
    for number, one in enumerate(policy.notify, 1):
        try:
            ready += notifiers([one])
        except (BitwitnessError, OSError) as error:
            checks.append(broken(f"[[notify]] number {number}", error))
    if not checks:
        try:
            notifiers(policy.notify)
        except (BitwitnessError, OSError) as error:
            checks.append(broken("[[notify]]", error))
    for reached in ready:
        if not tell:
            text = "it is set up; whether a message arrives was not tried"
            checks.append(Check(f"tell {reached.name}", "unknown", text, "send a message that says REHEARSAL: --tell"))
            continue
        try:
            reached.send(_message(node, now))
            checks.append(Check(f"tell {reached.name}", "good", "the message was taken: see that it has arrived"))
        except (ClusterError, OSError) as error:
            checks.append(broken(f"tell {reached.name}", error))
    return Part("notify", tuple(checks))


def _message(node: str, now: datetime) -> Message:
    text = (
        "REHEARSAL: nothing has happened, and nothing is to be done.\n\nThis is how bitwitness would reach you if a node gave wrong "
        f"results. It was sent by `bitwitness fleet rehearse` on {socket.gethostname()}, with the node {node or '(none)'}."
    )
    record = {"kind": "rehearsal", "node": node}
    when = stamp(now)
    return Message(f"rehearsal-{when}", when, "info", "REHEARSAL by bitwitness: nothing has happened", text, record)


# Files --------------------------------------------------------------------------------------------------------------


def about_state(folder: Path, publish: Path | None) -> Part:
    """Whether a controller could keep its state here, and nodes could read what it publishes."""
    checks = [_folder(folder), _database(folder), _lock(folder), _space(folder)]
    shared = publish or _published(folder)
    if shared is not None:
        checks.append(_shared(shared))
    checks.append(_condemned(folder, shared))
    return Part("state", tuple(one for one in checks if one is not None))


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _folder(folder: Path) -> Check:
    there = _existing(folder)
    what = f"folder {folder}"
    if not os.access(there, os.W_OK | os.X_OK):
        remedy = (
            f"chown it to the user of the controller, or give another --state; this was tried as uid {os.geteuid()}"
        )
        return Check(what, "bad", f"{there} cannot be written by this user", remedy)
    if there == folder:
        return Check(what, "good", "it can be written")
    return Check(what, "good", f"it is not there yet, and can be made in {there}")


def _database(folder: Path) -> Check | None:
    if not (folder / NAME).exists():
        return None
    what = f"{NAME}"
    try:
        with tempfile.TemporaryDirectory(prefix="bitwitness-rehearse-") as name:
            copy_state(folder, Path(name))
            with State(Path(name)) as state:
                return Check(what, "good", f"it is whole; {sum(Book(state).incidents().values())} incidents are known")
    except (BitwitnessError, OSError) as error:
        return broken(what, error)


def _lock(folder: Path) -> Check:
    file = folder / STATE_LOCK
    held = owned(file)
    if held:
        try:
            whose = file.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            whose = "a process"
        return Check("lock", "good", f"a controller runs already: {one_line(whose)}")
    if held is None and file.exists():
        return Check("lock", "unknown", f"whether somebody holds {file} cannot be told from here")
    return Check("lock", "good", "free: no controller runs on this state")


def _space(folder: Path) -> Check:
    there = _existing(folder)
    try:
        left = shutil.disk_usage(there).free
        inodes = os.statvfs(there).f_favail
    except OSError as error:
        return broken("disk space", error)
    if left < _LEAST or inodes == 0:
        text = f"{left >> 20} MiB and {inodes} files are left in {there}"
        return Check("disk space", "bad", text, f"make room: at least {_LEAST >> 20} MiB")
    return Check("disk space", "good", f"at least {_LEAST >> 20} MiB are free")


def _published(folder: Path) -> Path | None:
    """Where the controller of this state publishes, as it has noted."""
    if not (folder / NAME).exists():
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="bitwitness-rehearse-") as name:
            copy_state(folder, Path(name))
            with State(Path(name)) as state:
                shared = state.about().get("publish", "")
    except (BitwitnessError, OSError):
        return None  # said already
    return Path(shared) if shared else None


def _shared(folder: Path) -> Check:
    what = f"published in {folder}"
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        return broken(what, error)
    if not stat.S_ISDIR(mode) or not os.access(folder, os.W_OK | os.X_OK):
        return Check(what, "bad", "this user cannot write there", "let the user of the controller write there")
    if not mode & stat.S_IXOTH:
        return Check(what, "bad", f"it is closed to others (mode {stat.S_IMODE(mode):04o})", f"chmod 755 {folder}")
    return Check(what, "good", "the controller can write there, and nodes can read")


def _condemned(folder: Path, shared: Path | None) -> Check | None:
    files = [path / CONDEMNED for path in (folder, shared) if path is not None and (path / CONDEMNED).exists()]
    if not files:
        return None
    try:
        counts = [f"{len(read_condemned(file))} devices in {file}" for file in files]
    except (BitwitnessError, OSError) as error:
        return broken("condemned devices", error)
    closed = None if shared is None else shared / CONDEMNED
    if closed is not None and closed in files and not closed.stat().st_mode & stat.S_IROTH:
        return Check("condemned devices", "bad", f"{closed} can be read by its owner only", f"chmod 644 {closed}")
    return Check("condemned devices", "good", "; ".join(counts))
