"""What DCGM's exporter has told Prometheus of the devices: a scrape as text, or an answer of Prometheus' query API.

Two traps shape this. The gauge of the last Xid is never reset, so its value is old news of unknown age: only a change that
was seen happening has a time. And an exporter leaves out most error counters unless it is told to collect them: a counter
that is not there is *not collected*, and not 0.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from bitwitness.errors import MissingExtra
from bitwitness.fleet.signals import catalogue, samples
from bitwitness.fleet.signals.counters import Point, Series, read_slices
from bitwitness.fleet.signals.dcgm_fields import EXPECTED, FIELDS, NAMES, XID
from bitwitness.fleet.signals.reading import (
    MAX_JSON,
    MAX_RECORDS,
    Unreadable,
    begins_json,
    bounded,
    document,
    is_ours,
    masked,
    parent_of,
    shown_address,
    stamp,
    whole,
    words,
)
from bitwitness.fleet.signals.record import Signal, no_evidence
from bitwitness.fleet.signals.times import iso

SOURCE = "dcgm"
_COUNTED_XIDS = "DCGM_EXP_XID_ERRORS_COUNT"
_HOSTS = ("node", "nodename", "kubernetes_node", "Hostname", "hostname", "instance")
"""Labels that name the node, the surest first: inside a container `Hostname` is the name of a pod, and `instance` may be an address."""
_UUIDS = ("UUID", "uuid", "gpu_uuid")
_STEPS = 5_000
"""Of a range query; Prometheus answers none that has more than 11,000."""


def looks_like(head: bytes, name: str) -> bool:
    """Whether a file begins like a scrape in Prometheus' text format, or like an answer of its query API."""
    if is_ours(head):
        return False
    if begins_json(head) and b'"status"' in head and (b'"resultType"' in head or b'"errorType"' in head):
        return True
    return samples.is_text(head) and (
        b"DCGM_" in head or b"# TYPE" in head or b"# HELP" in head or name.endswith(".prom")
    )


def read(source: str | bytes | Path, *, origin: str, now: datetime) -> Iterator[Signal]:
    """The signals of a scrape or of an answer of the query API. Never raises on what it reads.

    Args:
        source: the text, or the file that has it.
        origin: the file or address, for the records.
        now: when it was written, which is when the devices were where it says, unless its samples say when.
    """
    try:
        text = document(source)
        answered = text[:100].lstrip()[:1] in ("{", "[")
        seen = _answer(text) if answered else _scrape(text)
    except Unreadable as error:
        yield no_evidence(SOURCE, "dcgm:unreadable", f"no metrics: {error}", origin=origin)
        return
    yield from bounded(_signals(seen, origin, now), SOURCE, origin)


def _scrape(text: str) -> _Seen:
    seen = _Seen()
    seen.take(samples.from_text(text, _wanted, seen.damage))
    return seen


def _answer(text: str) -> _Seen:
    if len(text) > MAX_JSON:
        raise Unreadable(f"the answer is larger than {MAX_JSON >> 20} MiB; ask for a shorter time")
    seen = _Seen()
    seen.take(samples.from_query(text, _wanted, seen.damage))
    return seen


def _wanted(name: str) -> bool:
    return name in NAMES or name == _COUNTED_XIDS


@dataclass(frozen=True, slots=True, order=True)
class _Device:
    """Whom a series is about. `part`: the slice of a shared device; blame covers all slices, so it is no device."""

    host: str
    name: str
    index: str
    part: str


@dataclass(slots=True)
class _Seen:
    """The samples of a document, sorted by device and field.

    Labels that name the job, or the error itself, come and go with the value: they split no series here.
    """

    fields: dict[_Device, dict[int, Series]] = field(default_factory=dict)
    counted: dict[tuple[_Device, int], float] = field(default_factory=dict)
    pci: dict[tuple[_Device, str], float | None] = field(default_factory=dict)
    """Who sat in which slot, with the first time at which that was seen."""
    slices: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    """By host and name of a device, the names of what it is cut into."""
    damage: samples.Damage = field(default_factory=samples.Damage)

    def take(self, found: Iterable[samples.Sample]) -> None:
        """Sort the samples, and then give the slices whose device is known by now to that device."""
        for one in found:
            device = _device(one.labels)
            address = catalogue.pci_address(one.labels.get("pci_bus_id", ""))
            if address and device.name.startswith("GPU-"):
                self._place(replace(device, part=""), address, one.time)
            if one.name == _COUNTED_XIDS:
                self._count(device, one)
            else:
                self._sort(device, one)
        devices = [*self.fields, *(device for device, _ in self.counted)]
        parents = {(one.host, one.index): one.name for one in devices if one.name.startswith("GPU-") and one.index}
        for device in [one for one in self.fields if one.name.startswith("MIG-")]:
            parent = parents.get((device.host, device.index))
            if parent is not None:
                self.slices.setdefault((device.host, parent), set()).add(device.name)
                of_parent = replace(device, name=parent, part=device.part or device.name)
                self.fields.setdefault(of_parent, {}).update(self.fields.pop(device))
        # Of the slices of a device all count the same Xids.
        counted: dict[tuple[_Device, int], float] = {}
        for (device, xid), times in self.counted.items():
            name = parents.get((device.host, device.index), "") if device.name.startswith("MIG-") else ""
            whole_device = replace(device, name=name or device.name, part="")
            counted[whole_device, xid] = max(times, counted.get((whole_device, xid), 0))
        self.counted = counted

    def _place(self, device: _Device, address: str, time: float | None) -> None:
        first = self.pci.get((device, address), math.inf)
        if (device, address) in self.pci or len(self.pci) < MAX_RECORDS:
            self.pci[device, address] = None if time is None or first is None else min(time, first)

    def _count(self, device: _Device, one: samples.Sample) -> None:
        xid = whole(one.labels.get("xid"))
        if xid is None or one.value is None or one.value < 0:
            self.damage.note(f"{one.name} {one.labels.get('xid')} {one.value}")
        elif one.value and xid:
            self.counted[device, xid] = max(one.value, self.counted.get((device, xid), 0))

    def _sort(self, device: _Device, one: samples.Sample) -> None:
        known = NAMES[one.name]
        series = self.fields.setdefault(device, {}).setdefault(known.id, Series())
        if one.value is None or _blank(one.value):
            series.blanks += 1
        elif one.value < 0 or (known.reading not in {"celsius", "raw"} and one.value != int(one.value)):
            self.damage.note(f"{one.name} {one.value!r}")
        else:
            told = words(one.labels.get("err_msg", ""), 120) if known.id == XID else ""
            series.points.append(Point(one.time, one.value, told))


def _device(labels: Mapping[str, str]) -> _Device:
    host = next((labels[name] for name in _HOSTS if labels.get(name)), "")
    name = next((labels[name] for name in _UUIDS if labels.get(name)), "")
    parent = parent_of(name)
    name, part = (parent, name) if parent else (name, labels.get("GPU_I_ID", ""))
    switch = labels.get("nvswitch", "")
    if not name and switch:
        name = switch if switch.startswith("nvswitch") else f"nvswitch{switch}"
    elif not name and "gpu" in labels:
        name = f"gpu:{labels['gpu']}"
    host = host.rsplit(":", 1)[0] if host.count(":") == 1 else host
    return _Device(words(host, 253), words(name, 120), words(labels.get("gpu", ""), 20), words(part, 80))


def _blank(value: float) -> bool:
    """DCGM's marks for *no value*: the last 16 numbers of 64 and of 32 bits, and their like among fractions."""
    return value >= 9.2e18 or 2147483632 <= value <= 2147483647 or 140737488355328 <= value <= 140737488355343


def _signals(seen: _Seen, origin: str, now: datetime | None = None) -> Iterator[Signal]:
    yield from _said_of(seen, origin)
    yield from _identities(seen, origin, now)
    devices: dict[tuple[str, str], dict[int, list[tuple[str, Series]]]] = {}
    for device, fields in sorted(seen.fields.items(), key=lambda item: item[0]):
        whole_device = devices.setdefault((device.host, device.name), {})
        for identifier, series in fields.items():
            whole_device.setdefault(identifier, []).append((device.part, series))
    for (host, name), found in devices.items():
        for identifier, parts in sorted(found.items()):
            slices = [part for part, series in parts if part and series.points]
            part = f" (slice {', '.join(slices)})" if slices else ""
            for one in read_slices(FIELDS[identifier], [series for _, series in parts]):
                yield replace(one, device=name, host=host, evidence=words(one.evidence + part), origin=origin)
    for (device, xid), times in sorted(seen.counted.items()):
        entry = catalogue.xid(xid)
        why = f"{entry.reason}. Counted by the exporter within its window, at a time that it does not say"
        told = f"{_COUNTED_XIDS}{{xid={xid}}}"
        yield Signal(
            SOURCE,
            f"xid:{xid}",
            device.name,
            None,
            entry.kind,
            entry.weight,
            why,
            device.host,
            max(1, int(times)),
            told,
            origin,
        )


def _identities(seen: _Seen, origin: str, now: datetime | None) -> Iterator[Signal]:
    for (device, pci), first in sorted(seen.pci.items(), key=lambda item: item[0]):
        slices = sorted(seen.slices.get((device.host, device.name), ()))
        told = [f"pci={pci}"] + ([f"index={device.index}"] if device.index else [])
        evidence = " ".join([*told, f"mig={','.join(slices)}"] if slices else told)[:2000]
        since = stamp(first) or (iso(now) if now else None)
        yield Signal(
            SOURCE, "identity:pci", device.name, since, "noise", "none", _IDENTITY, device.host, 1, evidence, origin
        )


_IDENTITY = "which device sits in which slot"


def _said_of(seen: _Seen, origin: str) -> Iterator[Signal]:
    """What the document does not tell: damage, what is not collected, what its sender warns of."""
    damage = seen.damage
    if damage.lines:
        why = f"{damage.lines} lines or series are damaged and were not read, the first: {damage.first}"
        yield no_evidence(SOURCE, "dcgm:damaged", why, origin=origin)
    if damage.more:
        why = f"it has more than {samples.MAX_SAMPLES} samples; those beyond were not read. Ask for a shorter time"
        yield no_evidence(SOURCE, "dcgm:more", why, origin=origin)
    for warning in damage.warnings:
        yield no_evidence(SOURCE, "dcgm:warning", f"Prometheus says of its answer: {warning}", origin=origin)
    if not seen.fields and not seen.counted:
        yield no_evidence(
            SOURCE, "dcgm:not-collected", "it has no metrics of DCGM, which is no sign of health", origin=origin
        )
        return
    told: dict[tuple[str, str], set[int]] = {}
    for device, fields in seen.fields.items():
        if not device.name.startswith("nvswitch"):
            has = {identifier for identifier, series in fields.items() if series.points}
            told.setdefault((device.host, device.name), set()).update(has)
    lacking: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (host, name), has in sorted(told.items()):
        missing = tuple(what for what, ids in EXPECTED.items() if not ids & has)
        if missing:
            lacking.setdefault((host, missing), []).append(name)
    for (host, missing), names in lacking.items():
        whom = names[0] if len(names) == 1 else ""
        why = f"not collected, or blank, for {len(names)} device(s): {', '.join(missing)}. What is not counted is not 0"
        yield no_evidence(SOURCE, "dcgm:not-collected", why, origin=origin, host=host, device=whom)


def query(
    url: str, *, host: str, at: datetime, before: timedelta, after: timedelta, timeout: float = 30
) -> Iterator[Signal]:
    """Ask Prometheus for what DCGM's exporter told of a host around a time. An answer that does not come is no evidence.

    Args:
        url: of Prometheus, as `http://prometheus:9090`; a password in it is shown nowhere.
        host: its name in the labels `node`, `nodename`, `kubernetes_node`, `Hostname`, `hostname`, or the first part of `instance`.
        at: the time of the incident.
        before: how long before it.
        after: how long after it.
        timeout: in seconds, of the whole request.

    Raises:
        MissingExtra: httpx is not installed.
    """
    try:
        import httpx  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise MissingExtra("asking Prometheus needs httpx: pip install 'bitwitness[fleet]'") from error
    shown = shown_address(url)
    span = max((before + after).total_seconds(), 1.0)
    question = {
        "query": _question(host),
        "start": f"{(at - before).timestamp():.3f}",
        "end": f"{(at + after).timestamp():.3f}",
        "step": f"{max(15.0, math.ceil(span / _STEPS)):g}",
    }
    try:
        with (
            httpx.Client(timeout=timeout, follow_redirects=False) as client,
            client.stream("POST", f"{url.rstrip('/')}/api/v1/query_range", data=question) as answer,
        ):
            text = _bounded_text(answer.iter_bytes(), time.monotonic() + timeout)
            status = answer.status_code
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, Unreadable) as error:
        why = f"Prometheus did not answer: {words(masked(str(error)), 160) or type(error).__name__}"
        yield no_evidence(SOURCE, "dcgm:unreachable", why, origin=shown, host=host)
        return
    try:
        found = _signals(_answer(text), shown)
    except Unreadable as error:
        why = f"no metrics: Prometheus answered with HTTP status {status}: {error}"
        found = iter([no_evidence(SOURCE, "dcgm:unreadable", why)])
    # It is of this host by whatever label was asked for, which may not be the one that names it best.
    yield from (replace(one, host=host, origin=shown) for one in bounded(found, SOURCE, shown))


def _question(host: str) -> str:
    """All known metrics of a host, under whatever label names it. `or` keeps a series once, whoever found it first."""
    metrics = "|".join((*sorted(NAMES), _COUNTED_XIDS))
    quoted = host.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    pattern = re.escape(host).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    named = (*(f'{label}="{quoted}"' for label in _HOSTS[:-1]), f'instance=~"{pattern}(:[0-9]+)?"')
    return " or ".join(f'{{__name__=~"{metrics}",{label}}}' for label in named)


def _bounded_text(chunks: Iterable[bytes], until: float) -> str:
    got = bytearray()
    for chunk in chunks:
        got += chunk
        if len(got) > MAX_JSON:
            raise Unreadable("the answer is too large; ask for a shorter time")
        if time.monotonic() > until:
            raise Unreadable("the answer took too long")
    return got.decode("utf-8", errors="replace")
