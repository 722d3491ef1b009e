"""What the kernel and its drivers logged: Xid and SXid of NVIDIA's, memory errors of the host, machine checks.

One reader for all the ways in which such lines travel: the ring buffer, journald, syslog, and containers whose logs forward
another's. A line counts for what it says in full and no more: where a code, an address or a label may have been cut off, it
is not guessed, and the place is told as *no evidence*.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from bitwitness.fleet.signals import catalogue, wrapped
from bitwitness.fleet.signals.reading import words
from bitwitness.fleet.signals.record import Signal, no_evidence
from bitwitness.fleet.signals.times import Clock, Stamped, inner_of, iso, split

EVIDENCE = 400
_DECODER = json.JSONDecoder()
_CHECKED = 200
"""Lines of a file that are looked at to tell whether it is a log."""
_AHEAD = timedelta(minutes=5)

_PLAIN = re.compile(rf"{wrapped.MARKS}|\"MESSAGE\"\s*:\s*\[")
_MARKS = re.compile(rf"{_PLAIN.pattern}|\\u00[2-7][0-9a-fA-F]".encode())
_COLOUR = re.compile(r"(?:\x1b|#033|\^\[)\[[0-9;]{0,20}[A-Za-z]")
"""What colours a terminal; also as rsyslog and `cat -v` write it."""
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
_SEVERITY = re.compile(r"\[Hardware Error\]:\s+([A-Za-z]+)(?: error\b|, |\s*$)")
_FIRMWARE = re.compile(
    r"(\{\d{1,12}\})?\[Hardware Error\]:\s+(event severity|section_type|device_id): ([A-Za-z0-9][^,]{0,80})"
)
_FAILURE = re.compile(r"Memory failure: 0x[0-9a-f]+: |mce: Uncorrected hardware memory error\b")
_REPEATED = re.compile(r"message repeated (\d{1,9}) times: \[\s*$")
_SEVERITIES = {
    "corrected": "corrected",
    "uncorrected": "uncorrected",
    "recoverable": "uncorrected",
    "fatal": "uncorrected",
    "deferred": "deferred",
}
_PLUGIN = re.compile(
    r"XidCriticalError: Xid=(\d{1,6}) on Device=(?:MIG-)?(GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|MIG-[0-9a-f-]{36})(?=[;/,\s])"
)
_AGAIN = re.compile(r"(?:(\S{1,253}) )?last message repeated (\d{1,9}) times?\b")
_OBJECT = re.compile(r"(?:\[\s*)?(?:[\d.]{9,22},\s*)?\{\s*\"")
_NAMED = re.compile(r"(?:^|[\s>])(audit(?=: )|[\w./@-]{1,64}(?=\[\d{1,10}\]: ))")
"""A program whose words are in the kernel's own log, or in a line without a stamp."""
_FORWARDERS = re.compile(
    r"(?:.*/)?(?:kernel|kubelet|node-problem-detector|npd|rsyslogd?|syslog-ng|systemd-journald|journal(?:ctl|d)?|dmesg|klogd"
    r"|nvidia[\w.-]*|nv-[\w.-]+|nvsm|dcgm[\w.-]*|fabricmanager|mcelog|rasdaemon|edac[\w-]*|fluent[\w-]*|vector|promtail)",
    re.IGNORECASE,
)
"""Programs that hand on what the kernel or a driver said. Any other may quote anything."""
_PENDING = 1_000
"""Records of firmware, of different hosts, that are put together at a time."""


@dataclass(slots=True)
class Seen:
    """What a log tells of itself beside its signals: whether it is about a node and a time at all.

    Attributes:
        hosts: those that its lines name, as far as they were looked at: the first ones, and those with signals.
        first: the earliest time that was seen; None where no line has one.
        last: the latest.
    """

    hosts: set[str] = field(default_factory=set)
    first: datetime | None = None
    last: datetime | None = None

    def add(self, host: str, time: datetime | None) -> None:
        """Take in a line."""
        if host and len(self.hosts) < _PENDING:
            self.hosts.add(host)
        if time is not None:
            self.first = time if self.first is None else min(self.first, time)
            self.last = time if self.last is None else max(self.last, time)


@dataclass(slots=True)
class _Firmware:
    """A record of the firmware's, which takes many lines: how bad it is is said first, and what it is about later."""

    stamped: Stamped
    severity: str
    told: bool = False
    link: bool = False


def read(
    lines: Iterable[bytes],
    clock: Clock,
    *,
    origin: str = "",
    host: str = "",
    latest: datetime | None = None,
    export: bool = False,
    seen: Seen | None = None,
) -> Iterator[Signal]:
    """The signals in the lines of a log. Never raises on what it reads.

    Args:
        lines: without their ends.
        clock: settles times without year, zone, or counted from boot.
        origin: the file or command, for the records.
        host: the node, where lines do not name theirs.
        latest: a time after it is in the future, which the reason says; default: the clock's now.
        export: the lines are of `journalctl -o export`.
        seen: takes in which hosts and times the log has; complete after the last line.
    """
    reader = _Reader(clock, origin, host, latest or clock.now, seen or Seen())
    yield from reader.read(_export(lines) if export else lines)


def is_log(lines: Iterable[bytes], clock: Clock) -> bool:
    """Whether one of these lines begins as those of logs do."""
    return any(_known(line, clock) for line in lines)


def is_export(head: bytes) -> bool:
    """Whether a file begins as `journalctl -o export` prints."""
    return head.startswith(b"__CURSOR=")


def _known(line: bytes, clock: Clock) -> bool:
    text = _COLOUR.sub("", line[:4096].decode("utf-8", "replace"))
    if text.lstrip().startswith("{"):
        return wrapped.HAS_TEXT.search(text) is not None and wrapped.HAS_TIME.search(text) is not None
    return split(text, clock).known or text.startswith("Linux version ")  # `dmesg -t` leaves the stamps out


@dataclass(slots=True)
class _Reader:
    """The state of reading one log."""

    clock: Clock
    origin: str
    host: str
    latest: datetime
    seen: Seen
    checked: int = 0
    known: bool = False
    anything: bool = False
    cut: int = 0
    first_cut: str = ""
    fallen: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Of each host, the device that a message of several lines began with, and for how many lines that holds."""
    firmware: dict[tuple[str, str], _Firmware] = field(default_factory=dict)

    def read(self, lines: Iterable[bytes]) -> Iterator[Signal]:
        last: deque[bytes] = deque(maxlen=20)
        before: list[Signal] = []
        for line in lines:
            last.append(line)
            if _MARKS.search(line) is None:
                before.clear()
                if self.checked < _CHECKED and line.strip():
                    self.checked += 1
                    self.known = self.known or _known(line, self.clock)
                    self._look(line)
                continue
            said: list[Signal] = []
            for stamped in self._entries(line.decode("utf-8", "replace")):
                self.known = self.known or stamped.known
                self.seen.add(stamped.host, stamped.time)
                said += self._again(stamped, before)
                said += self._of_text(stamped)
            self.anything = self.anything or bool(said)
            before = said[:100]
            yield from said
        for record in self.firmware.values():
            yield from self._of_firmware(record, "")
        for line in last:
            self._look(line)
        yield from self._damage()

    def _look(self, line: bytes) -> None:
        """Where and when an ordinary line was written."""
        for stamped in self._entries(line[:4096].decode("utf-8", "replace"), quiet=True):
            self.seen.add(stamped.host, stamped.time)

    def _again(self, stamped: Stamped, before: list[Signal]) -> Iterator[Signal]:
        """What the line before said, where this one only says that it was said again."""
        found = _AGAIN.match(stamped.text)
        for one in before if found else ():
            if found and (found[1] or stamped.host or one.host) == one.host:
                said = replace(one, count=max(1, int(found[2])), evidence=f"{one.evidence} (repeated)"[:EVIDENCE])
                yield said if stamped.time is None else replace(said, time=iso(stamped.time))

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

    def _entries(self, line: str, depth: int = 0, *, quiet: bool = False) -> Iterator[Stamped]:
        line = _COLOUR.sub("", line)
        stamped = split(line, self.clock if depth == 0 else replace(self.clock, boot=None))
        if depth == 3 or _OBJECT.match(stamped.text) is None:
            yield stamped
            return
        try:
            record, end = _DECODER.raw_decode(stamped.text)
        except (ValueError, RecursionError):
            if not quiet and _PLAIN.search(line):
                self._cut(line)
            yield stamped
            return
        rest = stamped.text[end:].strip("] ,\t")
        found = wrapped.pieces(record, self.clock)
        if not found:
            yield stamped
        for piece in found:
            outer = _around(stamped, piece)
            for part in piece.text.splitlines()[:1000]:
                for inner in self._entries(part, depth + 1, quiet=quiet):
                    yield _inside(outer, inner)
        if rest:
            yield from self._entries(rest, depth + 1, quiet=quiet)

    # What a line says

    def _of_text(self, stamped: Stamped) -> Iterator[Signal]:
        text = stamped.text
        if "XidCriticalError" in text:
            yield from self._of_plugin(stamped)
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

    def _of_plugin(self, stamped: Stamped) -> Iterator[Signal]:
        """What the device plugin of Kubernetes heard from the driver."""
        found = _PLUGIN.search(stamped.text)
        if found is None:
            self._cut(stamped.text)
            return
        entry = catalogue.xid(int(found[1]))
        why = f"{entry.reason} (told by the device plugin of Kubernetes)"
        made = Signal("nvml", f"xid:{int(found[1])}", found[2], None, entry.kind, entry.weight, why)
        yield self._dated(made, stamped, stamped.text[found.start() :])

    def _identity(self, stamped: Stamped) -> Iterator[Signal]:
        named = _UUID.search(stamped.text)
        address = catalogue.pci_address(named[1]) if named else ""
        if named and address and not _quoted_by(stamped):
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
        if "NVRM: The NVIDIA GPU" in text and own and len(self.fallen) < 10_000 and not _quoted_by(stamped):
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
        told = _FIRMWARE.search(text)
        if told is not None:
            yield from self._firmware(stamped, told[1] or "", told[2], told[3].strip())
            return
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
        if code:
            yield self._of_host(stamped, code, device, more)

    def _of_host(self, stamped: Stamped, code: str, device: str, more: str) -> Signal:
        entry = catalogue.entry(f"mce:{code}")
        made = Signal("mce", f"mce:{code}", device, None, entry.kind, entry.weight, entry.reason + more)
        return self._dated(made, stamped)

    def _firmware(self, stamped: Stamped, number: str, what: str, value: str) -> Iterator[Signal]:
        """One line of a record of the firmware's (ACPI APEI)."""
        key = (stamped.host, number)
        record = self.firmware.get(key)
        if what == "event severity":
            if record is not None or len(self.firmware) >= _PENDING:
                old = self.firmware.pop(key if record is not None else next(iter(self.firmware)))
                yield from self._of_firmware(old, "")
            severity = _SEVERITIES.get(value.split(maxsplit=1)[0].lower(), "")
            if severity:
                self.firmware[key] = _Firmware(stamped, severity)
        elif record is not None and what == "section_type":
            if record.link:
                yield from self._of_firmware(record, "")
            record.link = "pci" in value.lower()
            if not record.link:
                yield from self._of_firmware(record, value)
        elif record is not None and record.link:
            yield from self._of_firmware(record, catalogue.pci_address(value))

    def _of_firmware(self, record: _Firmware, said: str) -> Iterator[Signal]:
        """The signal of a record, once it is told what it is about: a part of the machine, or the address on PCI Express."""
        if record.link:
            record.link, record.told = False, True
            one = self._of_host(record.stamped, "pcie", said, f" (severity: {record.severity})")
            yield one if record.severity != "corrected" else replace(one, weight="none")
        elif said:
            record.told = True
            yield self._of_host(record.stamped, record.severity, "", f" (the firmware names: {words(said, 60)})")
        elif not record.told:
            record.told = True
            one = self._of_host(record.stamped, record.severity, "", " (the log does not say of which part)")
            yield replace(one, weight="weak") if one.weight in ("strong", "medium") else one

    def _dated(self, signal: Signal, stamped: Stamped, said: str = "") -> Signal:
        """The signal with when, where and what, and with its place in the ring buffer, by which copies of it are known."""
        evidence = signal.evidence or words(_trimmed(said or stamped.text), EVIDENCE)
        if stamped.place and signal.code != "identity:pci":
            evidence = f"[{stamped.place}] {evidence}"
        reason, time = signal.reason, None
        if stamped.time is not None:
            time = iso(stamped.time)
            if stamped.time - self.latest > _AHEAD:
                reason += " (its time is in the future: a wrong clock, or another zone than the one given)"
            elif stamped.forwarded:
                reason += " (its time is when it was forwarded: where an old log was read again, it is older)"
        elif stamped.doubt:
            reason += f" (its time is not known: {stamped.doubt})"
        host = words(stamped.host, 253) or self.host
        writer = _quoted_by(stamped)
        if writer:
            reason = (
                f"written by {words(writer, 80)}, which may quote anything, so that it weighs nothing."
                f" Else: {signal.weight}, {reason}"
            )
            signal = replace(signal, weight="none")
        return replace(signal, time=time, host=host, reason=reason, evidence=evidence, origin=self.origin)

    def _cut(self, text: str) -> None:
        self.cut += 1
        self.first_cut = self.first_cut or words(text, EVIDENCE)


def _trimmed(text: str) -> str:
    """A message without what its forwarders put around it, so that two copies of it are alike."""
    return text.strip().rstrip("\"'\\]}, \t")


def _quoted_by(stamped: Stamped) -> str:
    """The program that wrote or forwarded a line and is none of those that hand on what the kernel says; or ""."""
    mark = _PLAIN.search(stamped.text)
    own = _NAMED.findall(stamped.text, 0, mark.start()) if mark else []
    return next((name for name in (*stamped.programs, *own) if _FORWARDERS.fullmatch(name) is None), "")


def _around(stamped: Stamped, piece: wrapped.Piece) -> Stamped:
    """What a line and a record in it say of the texts of the record."""
    time, sure = stamped.time, stamped.sure
    if piece.time is not None:
        time, sure = inner_of(time, sure, piece.time, piece.sure)
    programs = (*stamped.programs, piece.program) if piece.program else stamped.programs
    return replace(stamped, time=time, sure=sure, host=piece.host or stamped.host, programs=programs)


def _inside(outer: Stamped, inner: Stamped) -> Stamped:
    """A line by what it says itself, and for the rest by what is around it."""
    time, sure, doubt = outer.time, outer.sure, outer.doubt
    if inner.doubt:
        time, sure, doubt = None, False, inner.doubt
    elif inner.time is not None:
        (time, sure), doubt = inner_of(time, sure, inner.time, inner.sure), ""
    return replace(
        inner,
        time=time,
        sure=sure,
        doubt=doubt,
        host=inner.host or outer.host,
        relative="" if time else inner.relative,
        known=True,
        programs=(*outer.programs, *inner.programs),
        forwarded=inner.forwarded
        or (time is not None and inner.time is None and bool(inner.place) and not (*outer.programs, *inner.programs)),
    )


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
