"""What `bitwitness scan` concluded of devices, from its `result.json`: a failure is the strongest thing that can be said of one.

Read as a file like every other source, because a scan runs elsewhere and earlier than whoever weighs it, and may be of another
version. A pass is no evidence, as that of every diagnostic; a drill, in which faults are made on purpose, is none either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bitwitness.fleet.signals.reading import begins_json, is_ours, read_json, whole, words
from bitwitness.fleet.signals.record import Signal, no_evidence
from bitwitness.fleet.signals.times import iso

SOURCE = "scan"
_QUIET = {
    "pass": ("scan:pass", "nothing wrong was seen, which does not rule out silent corruption"),
    "not judged": ("scan:not-judged", "it was not judged"),
}


def looks_like(head: bytes, name: str) -> bool:
    """Whether a file begins like the `result.json` of a scan."""
    known = b'"standing"' in head and (b'"failed_nodes"' in head or b'"calls_by_kind"' in head)
    return known and begins_json(head) and not is_ours(head)


def read(source: str | bytes | Path, *, origin: str, now: datetime) -> Iterator[Signal]:
    """What was concluded of each device and each link. Never raises on what it reads.

    Args:
        source: the JSON, or the file that has it.
        origin: the file, for the records.
        now: not needed here; every reader is told it.
    """

    def results(values: list[Any]) -> list[Mapping[str, Any]]:
        return [one for one in values if isinstance(one, dict) and isinstance(one.get("devices"), list)]

    def signals(found: list[Mapping[str, Any]]) -> Iterator[Signal]:
        return (signal for one in found for signal in _of_result(one, origin))

    return read_json(source, origin, SOURCE, "no result of a scan", "it has no complete result", results, signals)


def _of_result(result: Mapping[str, Any], origin: str) -> Iterator[Signal]:
    if result.get("drill"):
        why = "a drill: faults were made on purpose, and it says nothing about any device"
        yield no_evidence(SOURCE, "scan:drill", why, origin=origin)
        return
    if result.get("played"):
        why = "processes of one machine stood for devices, so it says nothing about any device"
        yield no_evidence(SOURCE, "scan:played", why, origin=origin)
        return
    when = _time(result)
    quiet: dict[tuple[str, str], list[str]] = {}
    for device in result["devices"]:
        if not isinstance(device, dict):
            yield no_evidence(SOURCE, "scan:unreadable", f"a device cannot be read: {words(device, 80)}", origin=origin)
            continue
        standing, node = str(device.get("standing")), words(device.get("node") or "", 200)
        name, reason = words(device.get("device") or "", 200), words(device.get("reason") or "", 300)
        wrong = whole(device.get("wrong"))
        if standing == "fail" and wrong and node and name:
            why = f"it computed wrongly what others of its kind compute rightly: {reason}"
            evidence = f"{wrong} of {device.get('calls')} answers were wrong"
            yield Signal(
                SOURCE,
                "scan:wrong",
                name,
                when,
                "memory",
                "strong",
                why,
                host=node,
                evidence=words(evidence),
                origin=origin,
            )
        elif standing in _QUIET:
            quiet.setdefault((standing, node), []).append(name)
        else:
            why = (
                f"a standing that cannot be, {words(standing, 40)} with {words(device.get('wrong'), 40)} wrong answers"
            )
            yield no_evidence(SOURCE, "scan:unreadable", why, origin=origin, host=node, device=name)
    for (standing, node), names in quiet.items():
        code, said = _QUIET[standing]
        yield no_evidence(SOURCE, code, words(f"{said}: {', '.join(names)}", 400), origin=origin, host=node)
    yield from _of_links(result, when, origin)
    yield from _of_voices(result, origin)


def _of_links(result: Mapping[str, Any], when: str | None, origin: str) -> Iterator[Signal]:
    """A signal at each end: a link blames neither alone."""
    for link in _list(result.get("links")):
        if not (isinstance(link, dict) and link.get("standing") == "fail"):
            continue
        ends = list(zip(_list(link.get("nodes")), _list(link.get("devices")), strict=False))
        for number, (node, device) in enumerate(ends[:2]):
            other = words(str(ends[1 - number][1]), 100) if len(ends) > 1 else "?"
            why = (
                f"what it sent to {other} or got from it arrived otherwise, and neither of them did so with the others"
            )
            evidence = f"{link.get('wrong')} of {link.get('transfers')} transfers were wrong"
            yield Signal(
                SOURCE, "scan:link", words(str(device), 200), when, "link", "medium", why,
                host=words(str(node), 200), evidence=words(evidence), origin=origin,
            )  # fmt: skip


def _of_voices(result: Mapping[str, Any], origin: str) -> Iterator[Signal]:
    """That a vendor's diagnostic failed: its own output says of what, and is weighed by its own reader."""
    for voice in _list(result.get("voices")):
        if isinstance(voice, dict) and voice.get("standing") == "fail":
            why = f"{words(voice.get('source') or '', 40)} failed it beside the scan; give its own output, which says of what"
            node, device = words(voice.get("node") or "", 200), words(voice.get("device") or "", 200)
            yield no_evidence(SOURCE, "scan:vendor", why, origin=origin, host=node, device=device)


def _time(result: Mapping[str, Any]) -> str | None:
    """When it ended, where it says so."""
    for name in ("ended", "time", "at"):
        try:
            told = datetime.fromisoformat(str(result[name]))
        except (KeyError, ValueError):
            continue
        if told.tzinfo is not None:
            return iso(told.astimezone(UTC))
    return None


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []
