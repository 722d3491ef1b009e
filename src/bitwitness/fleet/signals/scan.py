"""What `bitwitness scan` concluded of devices, from its `result.json`: a failure is the strongest thing that can be said of one.

Read as a file like every other source, because a scan runs elsewhere and earlier than whoever weighs it, and may be of another
version. A pass is no evidence, as that of every diagnostic; a drill, in which faults are made on purpose, is none either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bitwitness.fleet.signals.reading import begins_json, is_ours, read_json, words
from bitwitness.fleet.signals.record import Signal, no_evidence
from bitwitness.fleet.signals.times import iso

SOURCE = "scan"
_NO_SCANS = {
    "drill": "a drill: faults were made on purpose",
    "played": "processes of one machine stood for devices",
}
_MOST = 1 << 53
_TRANSFERS = re.compile(r"(\d{1,15}) of (\d{1,15}) transfers with \d{1,15} of \d{1,15} ranks of other nodes were wrong")
Count = tuple[int, int]
"""Of transfers: wrong ones, and all of them."""
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
    for name, meaning in _NO_SCANS.items():
        told = result.get(name)
        if told is None or told is False:
            continue
        code, why = (name, meaning) if told is True else ("unreadable", f"its {name!r} is neither true nor false")
        yield no_evidence(SOURCE, f"scan:{code}", f"{why}, so it says nothing about any device", origin=origin)
        return
    when = _time(result)
    quiet: dict[tuple[str, str], list[str]] = {}
    transfers = _transfers(result)
    for device in result["devices"]:
        standing = device.get("standing") if isinstance(device, dict) else None
        if isinstance(device, dict) and type(standing) is str and standing in _QUIET:
            node, name = (_text(device.get(key), 200) for key in ("node", "device"))
            quiet.setdefault((standing, node), []).append(name)
        else:
            yield _of_failure(device, transfers, when, origin)
    for (standing, node), names in quiet.items():
        code, said = _QUIET[standing]
        yield no_evidence(SOURCE, code, words(f"{said}: {', '.join(names)}", 400), origin=origin, host=node)
    yield from _of_links(result, when, origin)
    yield from _of_voices(result, origin)


def _of_failure(device: object, transfers: Mapping[int, Mapping[int, Count]], when: str | None, origin: str) -> Signal:
    """What a device fails for; no evidence where that cannot be, for whoever damaged one value may have damaged others."""
    if not isinstance(device, dict):
        return _unreadable(f"a device cannot be read: {words(device, 80)}", origin)
    node, name, reason = (_text(device.get(key), 300) for key in ("node", "device", "reason"))
    wrong, calls, rank = (_count(device.get(key)) for key in ("wrong", "calls", "rank"))
    if (
        device.get("standing") == "fail"
        and node
        and name
        and wrong is not None
        and calls is not None
        and wrong <= calls
    ):
        if wrong:
            why, evidence = (
                "it computed wrongly what others of its kind compute rightly",
                f"{wrong} of {calls} answers were wrong",
            )
            return Signal(
                SOURCE, "scan:wrong", name, when, "memory", "strong", f"{why}: {reason}",
                host=node, evidence=words(evidence), origin=origin,
            )  # fmt: skip
        if evidence := _by_transfers(reason, transfers.get(-1 if rank is None else rank, {})):
            why = "what it sent to others or received from them was wrong, while those are right among themselves"
            return Signal(
                SOURCE, "scan:transfers", name, when, "link", "strong", f"{why}: {reason}",
                host=node, evidence=words(evidence), origin=origin,
            )  # fmt: skip
    said = f"{words(device.get('standing'), 40)} with {words(device.get('wrong'), 40)} wrong answers of {words(device.get('calls'), 40)}"
    return _unreadable(f"a standing that cannot be, {said}", origin, node, name)


def _by_transfers(reason: str, peers: Mapping[int, Count]) -> str:
    """How many transfers of a rank were wrong, with two others at least: by its links, else by the reason itself, for links are
    listed only up to a number.
    """
    if len(peers) > 1:
        wrong, looked_at = (sum(counts) for counts in zip(*peers.values(), strict=True))
        return f"{wrong} of {looked_at} transfers were wrong, with {len(peers)} other ranks"
    found = _TRANSFERS.match(reason)
    if found is None or not 0 < int(found[1]) <= int(found[2]):
        return ""
    return found[0]


def _transfers(result: Mapping[str, Any]) -> dict[int, dict[int, Count]]:
    """By rank and peer, of pairs with wrong transfers: how many were wrong, and of how many."""
    found: dict[int, dict[int, Count]] = {}
    for link in _list(result.get("links")):
        ranks = _list(link.get("ranks")) if isinstance(link, dict) else []
        counts = _wrong_of(link, "transfers") if len(ranks) == 2 else None
        if counts and link.get("standing") == "not judged" and all(_count(rank) is not None for rank in ranks):
            for one, other in (ranks, ranks[::-1]):
                found.setdefault(one, {})[other] = counts
    return found


def _of_links(result: Mapping[str, Any], when: str | None, origin: str) -> Iterator[Signal]:
    """A signal at each end: a link blames neither alone. Ends without a device are nodes: the path between them is bad."""
    for link in _list(result.get("links")):
        if not (isinstance(link, dict) and link.get("standing") == "fail"):
            continue
        nodes, devices = ([_text(end, 200) for end in _list(link.get(key))] for key in ("nodes", "devices"))
        raw = [*_list(link.get("nodes")), *_list(link.get("devices"))]
        counts = _wrong_of(link, "transfers")
        if (
            counts is None
            or (len(nodes), len(devices)) != (2, 2)
            or not all(nodes)
            or any(type(end) is not str for end in raw)
        ):
            yield _unreadable("a link that fails cannot be read", origin)
            continue
        for number, (node, device) in enumerate(zip(nodes, devices, strict=True)):
            other = words(devices[1 - number] or nodes[1 - number], 100)
            why = (
                f"what it sent to {other} or got from it arrived otherwise, and neither of them did so with the others"
            )
            yield Signal(
                SOURCE, "scan:link", device, when, "link", "medium", why,
                host=node, evidence=f"{counts[0]} of {counts[1]} transfers were wrong", origin=origin,
            )  # fmt: skip


def _wrong_of(record: Mapping[str, Any], total: str) -> Count | None:
    """How many were wrong, and of how many; None where none was, or what is said cannot be."""
    wrong, looked_at = _count(record.get("wrong")), _count(record.get(total))
    return (wrong, looked_at) if wrong and looked_at and wrong <= looked_at else None


def _count(value: object) -> int | None:
    """A count as a scan writes it, a whole number. What is written otherwise was not written by one, and not counted on."""
    return value if type(value) is int and 0 <= value <= _MOST else None


def _text(value: object, limit: int) -> str:
    return words(value, limit) if type(value) is str else ""


def _unreadable(why: str, origin: str, node: str = "", name: str = "") -> Signal:
    return no_evidence(SOURCE, "scan:unreadable", why, origin=origin, host=node, device=name)


def _of_voices(result: Mapping[str, Any], origin: str) -> Iterator[Signal]:
    """That a vendor's diagnostic failed: its own output says of what, and is weighed by its own reader."""
    for voice in _list(result.get("voices")):
        if isinstance(voice, dict) and voice.get("standing") == "fail":
            why = f"{words(voice.get('source') or '', 40)} failed it beside the scan; give its own output, which says of what"
            node, device = _text(voice.get("node"), 200), _text(voice.get("device"), 200)
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
