"""What the kernel and its drivers logged: Xid and SXid of NVIDIA's, memory errors of the host, machine checks.

One reader for all the ways in which such lines travel: the ring buffer, journald, syslog, and containers whose logs forward
another's. A line counts for what it says in full and no more: where a code, an address or a label may have been cut off, it
is not guessed, and the place is told as *no evidence*.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from bitwitness.fleet.signals import catalogue
from bitwitness.fleet.signals.reading import words
from bitwitness.fleet.signals.record import Signal, no_evidence
from bitwitness.fleet.signals.times import Clock, Stamped, iso, split

EVIDENCE = 400
_CHECKED = 200
"""Lines of a file that are looked at to tell whether it is a log."""
_AHEAD = timedelta(minutes=5)

_MARKS = re.compile(
    rb"NVRM|SXid|EDAC M|Hardware Error|fallen off the bus|Memory failure:|Uncorrected hardware memory|\"MESSAGE\"\s*:\s*\["
)
_WHERE = r"\(([^()]{1,80})\)[^:()]{0,80}:\s(\d{1,6}),"
_XID = re.compile(rf"NVRM:\s+Xid\s*{_WHERE}")
_SXID = re.compile(rf"(?:nvidia-nvswitch\d+:\s+)?SXid\s*{_WHERE}")
_BEGUN = re.compile(
    r"NVRM:\s+(?:Xid(?=\s*\(|\s*$)|Xi?\s*$)|SXid(?=\s*\(|\s*$)|EDAC MC\d*(?::(?:\s(?:\d*(?:\s[CU]?)?)?)?)?$"
)
_FALLEN = re.compile(r"fallen off the bus")
_GPU_AT = re.compile(r"GPU(?:\s+at)?\s+((?:PCI:)?[0-9a-fA-F:]{5,16}(?:\.[0-9a-fA-F])?)(?=[\s:.,]|$)")
_UUID = re.compile(
    r"NVRM:\s+GPU at (PCI:[0-9a-fA-F:.]+):\s+(GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?![0-9a-f-])"
)
_RECOVERY = re.compile(r"\bto 0x[0-9a-fA-F]+ \(([^()]{1,60})\)")
_EDAC = re.compile(r"EDAC MC(\d{1,6}): (?:(\d{1,9}) )?(CE|UE)(?=[\s:,-])")
_LABEL_NEW = re.compile(r" on (\S.{0,200}?) \((?=[a-z]+:|page|addr)")
_LABEL_OLD = re.compile(r"\"([^\"]{1,200})\"")
_CHECK = re.compile(r"\[Hardware Error\]: CPU (\d{1,6}): Machine Check( Exception)?:")
_STATUS = re.compile(r"\s*[0-9a-f]{1,16} Bank (\d{1,4}): ([0-9a-fA-F]{16})(?![0-9a-fA-F])")
_EVENTS = re.compile(r"\[Hardware Error\]: Machine check events logged")
_SEVERITY = re.compile(r"\[Hardware Error\]:\s+(?:event severity: )?([A-Za-z]+)(?: error\b|, |\s*$)")
_FAILURE = re.compile(r"Memory failure: 0x[0-9a-f]+: |mce: Uncorrected hardware memory error\b")
_REPEATED = re.compile(r"message repeated (\d{1,9}) times: \[\s*$")
_SEVERITIES = {
    "corrected": "corrected",
    "uncorrected": "uncorrected",
    "recoverable": "uncorrected",
    "fatal": "uncorrected",
}
_OBJECT = re.compile(r"\{\s*\"")
_TEXTS = ("MESSAGE", "message", "msg", "log", "line")
_TIMES = ("time", "@timestamp", "timestamp", "ts")
_HAS_TEXT = re.compile(rf"\"(?:{'|'.join(_TEXTS)})\"\s*:")
_HAS_TIME = re.compile(rf"\"(?:__REALTIME_TIMESTAMP|{'|'.join(_TIMES)})\"\s*:")
_HOSTS = ("_HOSTNAME", "hostname", "host", "node", "nodename")


def read(
    lines: Iterable[bytes],
    clock: Clock,
    *,
    origin: str = "",
    host: str = "",
    latest: datetime | None = None,
    export: bool = False,
) -> Iterator[Signal]:
    """The signals in the lines of a log. Never raises on what it reads.

    Args:
        lines: without their ends.
        clock: settles times without year, zone, or counted from boot.
        origin: the file or command, for the records.
        host: the node, where lines do not name theirs.
        latest: a time after it is in the future, which the reason says; default: the clock's now.
        export: the lines are of `journalctl -o export`.
    """
    reader = _Reader(clock, origin, host, latest or clock.now)
    yield from reader.read(_export(lines) if export else lines)


def is_log(lines: Iterable[bytes], clock: Clock) -> bool:
    """Whether one of these lines begins as those of logs do."""
    return any(_known(line, clock) for line in lines)


def is_export(head: bytes) -> bool:
    """Whether a file begins as `journalctl -o export` prints."""
    return head.startswith(b"__CURSOR=")


def _known(line: bytes, clock: Clock) -> bool:
    text = line[:4096].decode("utf-8", "replace")
    if text.lstrip().startswith("{"):
        return _HAS_TEXT.search(text) is not None and _HAS_TIME.search(text) is not None
    return split(text, clock).known or text.startswith("Linux version ")  # `dmesg -t` leaves the stamps out


@dataclass(slots=True)
class _Reader:
    """The state of reading one log."""

    clock: Clock
    origin: str
    host: str
    latest: datetime
    checked: int = 0
    known: bool = False
    anything: bool = False
    cut: int = 0
    first_cut: str = ""
    fallen: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Of each host, the device that a message of several lines began with, and for how many lines that holds."""

    def read(self, lines: Iterable[bytes]) -> Iterator[Signal]:
        for line in lines:
            if _MARKS.search(line) is None:
                if not self.known and self.checked < _CHECKED and line.strip():
                    self.checked += 1
                    self.known = _known(line, self.clock)
                continue
            for stamped in self._entries(line.decode("utf-8", "replace")):
                self.known = self.known or stamped.known
                for signal in self._of_text(stamped):
                    self.anything = True
                    yield signal
        yield from self._damage()

    def _damage(self) -> Iterator[Signal]:
        if self.cut:
            why = (
                f"{self.cut} line(s) begin like an error of a device, and are cut off or damaged before they say which"
            )
            yield replace(
                no_evidence("kernel", "kernel:cut-off", why, origin=self.origin, host=self.host),
                evidence=self.first_cut,
            )
        elif not self.known and not self.anything and self.checked:
            why = "none of its first lines begins like a line of a log"
            yield no_evidence("kernel", "kernel:foreign", why, origin=self.origin, host=self.host)

    # What a line is wrapped in

    def _entries(self, line: str, depth: int = 0) -> Iterator[Stamped]:
        stamped = split(line, self.clock)
        if depth == 3 or _OBJECT.match(stamped.text) is None:
            yield stamped
            return
        try:
            record = json.loads(stamped.text)
        except (ValueError, RecursionError):
            self._cut(line)
            yield stamped
            return
        text = _message(next((record[key] for key in _TEXTS if record.get(key) is not None), None))
        if text is None:
            yield stamped
            return
        time = _journal_time(record) or self._record_time(record) or stamped.time
        host = next((words(record[key], 253) for key in _HOSTS if isinstance(record.get(key), str)), stamped.host)
        for part in text.splitlines()[:1000]:
            for inner in self._entries(part, depth + 1):
                known = inner.time if inner.time is not None and (time is None or inner.host) else time
                relative = "" if known else inner.relative
                yield replace(inner, time=known, host=inner.host or host, relative=relative, known=True)

    def _record_time(self, record: Mapping[str, Any]) -> datetime | None:
        for key in _TIMES:
            value = record.get(key)
            if isinstance(value, str):
                found = split(value[:60] + " ", self.clock).time
                if found is not None:
                    return found
        return None

    # What a line says

    def _of_text(self, stamped: Stamped) -> Iterator[Signal]:
        text = stamped.text
        xids = list(_XID.finditer(text))
        switches = list(_SXID.finditer(text))
        yield from self._numbered(stamped, xids, "xid")
        yield from self._numbered(stamped, switches, "sxid")
        covered = {found.start() for found in xids} | {found.start() + found[0].index("SXid") for found in switches}
        if any(begun.start() not in covered for begun in _BEGUN.finditer(text)):
            self._cut(text)
        if "NVRM" in text or "fallen" in text:
            yield from self._fallen_off(stamped, any(int(found[2]) == 79 for found in xids))
            yield from self._identity(stamped)
        if "EDAC" in text:
            yield from self._edac(stamped)
        if "Hardware Error" in text or "emory" in text:
            yield from self._machine_check(stamped)

    def _identity(self, stamped: Stamped) -> Iterator[Signal]:
        named = _UUID.search(stamped.text)
        address = catalogue.pci_address(named[1]) if named else ""
        if named and address:
            reason = "the driver told which device is in which slot"
            made = Signal("kernel", "identity:pci", named[2], None, "noise", "none", reason, evidence=f"pci={address}")
            yield self._dated(made, stamped)

    def _numbered(self, stamped: Stamped, found: list[re.Match[str]], kind: str) -> Iterator[Signal]:
        for match, after in zip(found, [*found[1:], None], strict=False):
            said = stamped.text[match.start() : after.start() if after else None]
            code = f"{kind}:{int(match[2])}"
            entry = catalogue.entry(code)
            reason = entry.reason
            device = catalogue.pci_address(match[1])
            wanted = _RECOVERY.search(said) if code == "xid:154" else None
            if wanted is not None:
                reason = f"the driver asks for: {wanted[1]}; {reason}"
            if not device:
                reason = f"{reason} (the line does not say legibly which device)"
            repeated = _REPEATED.search(stamped.text, 0, match.start())
            count = max(1, int(repeated[1])) if repeated else 1
            yield self._dated(
                Signal("kernel", code, device, None, entry.kind, entry.weight, reason, count=count), stamped, said
            )

    def _fallen_off(self, stamped: Stamped, has_xid: bool) -> Iterator[Signal]:
        text = stamped.text
        address, left = self.fallen.get(stamped.host, ("", 0))
        if left:
            self.fallen[stamped.host] = (address, left - 1)
        named = _GPU_AT.search(text)
        own = catalogue.pci_address(named[1]) if named else ""
        if "NVRM: The NVIDIA GPU" in text and own and len(self.fallen) < 10_000:
            self.fallen[stamped.host] = (own, 4)
        if has_xid or _FALLEN.search(text) is None or not ("NVRM" in text or own):
            return
        entry = catalogue.xid(79)
        device = own or (address if left else "")
        yield self._dated(Signal("kernel", "xid:79", device, None, entry.kind, entry.weight, entry.reason), stamped)

    def _edac(self, stamped: Stamped) -> Iterator[Signal]:
        for found in _EDAC.finditer(stamped.text):
            said = stamped.text[found.start() :]
            label = _LABEL_NEW.search(said) or _LABEL_OLD.search(said)
            device = words(label[1], 200) if label else f"mc{int(found[1])}"
            code = f"edac:{found[3].lower()}"
            entry = catalogue.entry(code)
            count = max(1, int(found[2] or 1))
            made = Signal("edac", code, device, None, entry.kind, entry.weight, entry.reason, count=count)
            yield self._dated(made, stamped, said)

    def _machine_check(self, stamped: Stamped) -> Iterator[Signal]:
        text = stamped.text
        check = _CHECK.search(text)
        code, device, more = "", "", ""
        if check is not None:
            status = _STATUS.match(text, check.end())
            device = f"cpu{int(check[1])}"
            if status is not None:
                value = int(status[2], 16)
                code = "uncorrected" if check[2] or value >> 61 & 1 else "corrected"
                more = f" (bank {int(status[1])}: {_of_machine(value & 0xFFFF)})"
            else:
                code = "uncorrected" if check[2] else "logged"
        elif _EVENTS.search(text) is not None:
            code = "logged"
        elif _FAILURE.search(text) is not None:
            code = "uncorrected"
        else:
            severity = _SEVERITY.search(text)
            code = _SEVERITIES.get(severity[1].lower(), "") if severity else ""
            code = code or ("uncorrected" if severity and severity[1] == "Deferred" else "")
        if code:
            entry = catalogue.entry(f"mce:{code}")
            made = Signal("mce", f"mce:{code}", device, None, entry.kind, entry.weight, entry.reason + more)
            yield self._dated(made, stamped)

    def _dated(self, signal: Signal, stamped: Stamped, said: str = "") -> Signal:
        """The signal with when, where and what: undated ones keep their place in the ring buffer, to be told apart."""
        evidence = signal.evidence or words(_trimmed(said or stamped.text), EVIDENCE)
        if stamped.relative:
            evidence = f"[{stamped.relative}] {evidence}"
        reason, time = signal.reason, None
        if stamped.time is not None:
            time = iso(stamped.time)
            if stamped.time - self.latest > _AHEAD:
                reason += " (its time is in the future: a wrong clock, or another zone than the one given)"
        host = words(stamped.host, 253) or self.host
        return replace(signal, time=time, host=host, reason=reason, evidence=evidence, origin=self.origin)

    def _cut(self, text: str) -> None:
        self.cut += 1
        self.first_cut = self.first_cut or words(text, EVIDENCE)


def _trimmed(text: str) -> str:
    """A message without what its forwarders put around it, so that two copies of it are alike."""
    return text.strip().rstrip("\"'\\]}, \t")


def _message(value: object) -> str | None:
    """The text of a record: journald writes what is no UTF-8 as a list of bytes."""
    if isinstance(value, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 256 for one in value
    ):
        return bytes(value).decode("utf-8", "replace")
    return value if isinstance(value, str) else None


def _journal_time(record: Mapping[str, Any]) -> datetime | None:
    for key in ("_SOURCE_REALTIME_TIMESTAMP", "__REALTIME_TIMESTAMP"):
        value = record.get(key)
        if isinstance(value, str | int) and str(value).isascii() and str(value).isdigit():
            try:
                return datetime.fromtimestamp(int(value) / 1e6, UTC)
            except (ValueError, OverflowError, OSError):
                continue
    return None


def _of_machine(code: int) -> str:
    """What a machine check was about, by its architectural code (Intel SDM volume 3B, table "IA32_MCi_Status compound")."""
    code &= ~0x1000
    kinds: tuple[tuple[Callable[[int], bool], str], ...] = (
        (lambda one: one & 0xFF80 == 0x0080, "memory controller"),
        (lambda one: one & 0xFF00 == 0x0100, "a cache"),
        (lambda one: one & 0xFFF0 == 0x0010, "address translation"),
        (lambda one: one & 0xF800 == 0x0800, "bus or interconnect"),
        (lambda one: one & 0xFFFC == 0x000C, "a cache"),
    )
    return next((name for matches, name in kinds if matches(code)), "the processor")


def _export(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The entries of journald's export format as lines of its JSON format.

    A message that is no plain text stands on lines of its own there, behind its length; whatever in an entry is no field is
    therefore taken as a message.
    """
    entry: dict[str, Any] = {}
    texts: list[str] = []

    def ended() -> Iterator[bytes]:
        for text in texts or ([entry.pop("MESSAGE")] if "MESSAGE" in entry else []):
            yield json.dumps({**entry, "MESSAGE": text}).encode()
        entry.clear()
        texts.clear()

    for line in lines:
        name, equals, value = line.decode("utf-8", "replace").partition("=")
        if not line.strip() or (name == "__CURSOR" and entry):
            yield from ended()
        if equals and name in ("MESSAGE", "_HOSTNAME", "__REALTIME_TIMESTAMP", "_SOURCE_REALTIME_TIMESTAMP"):
            entry[name] = value
        elif _MARKS.search(line) and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name) and len(texts) < 100:
            texts.append(line.decode("utf-8", "replace"))
    yield from ended()
