"""What AMD's `rvs` (ROCm Validation Suite) prints: the table of its results, and the lines of devices above it.

Most of what it tests is speed, and a device that is slow is not wrong. What bears on corruption is its memory test, and the checks
of results of its stress test. Two things are known to look like corruption and to be none: a configuration of AMD's own
(`gst_selfcheck.conf`) injects errors on purpose, and `crc_check` warns of itself where its operands change.

The words are those of github.com/ROCm/ROCmValidationSuite: `rvs/src/rvsexec.cpp` (the table; the program ends with 0 whatever is
in it) and `gst.so` (`met: TRUE`, `self-check error`, `accu-check error`, `crc-check error ... CRC-32 mismatch`). Where a test
cannot reach the device it may end without any table, which is no evidence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from bitwitness.fleet.signals.catalogue import Entry
from bitwitness.fleet.signals.reading import Unreadable, bounded, document, words
from bitwitness.fleet.signals.record import Signal, no_evidence

SOURCE = "rvs"
_PASSED = "passed, but a pass does not rule out silent corruption"
_SPEED = "a test of speed or power: a device that is slow is not wrong"

_MODULES: Mapping[str, Entry] = {
    "MEM": Entry(
        "memory", "medium", "a test of memory; it also fails where it gets no memory or may not use the device"
    ),
    "PBQT": Entry("link", "none", f"copies between devices, {_SPEED}"),
    "PEBB": Entry("link", "none", f"copies over PCI Express, {_SPEED}"),
    "PEQT": Entry("link", "none", "how PCI Express is set up, which damages nothing"),
    "RCQT": Entry("no-evidence", "none", "which packages are installed"),
}
_OTHER = Entry("loud", "none", _SPEED)

_CHECKS: Mapping[str, Entry] = {
    "crc": Entry("memory", "medium", "the same product was computed twice, with two results"),
    "self": Entry(
        "memory",
        "weak",
        "the same product was computed twice, with two results; AMD's gst_selfcheck.conf does that on purpose",
    ),
    "accu": Entry("noise", "none", "a product differs from that of the host, which may be rounding"),
}

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TITLE = "ROCm Validation Suite (RVS)"
_ROW = re.compile(
    r"\|\s*(?P<action>[^|]{1,200}?)\s*\|\s*(?P<module>[A-Za-z]{2,12})\s*\|\s*(?P<result>[A-Za-z]{2,20})\s*\|"
)
_LINE = re.compile(r"\[(?:RESULT|INFO|ERROR)\s*\]\s*\[\s*\d+\.\d+\]")
_DEVICE = re.compile(r"\[(?P<action>[^\]]{1,200})\]\s+\[GPU::\s*(?P<device>\d{1,9})\]\s+(?P<said>.{1,300})")
_CHECK = re.compile(r"(?P<check>self|accu|crc)-check error\b(?!.{0,20}internal)")
_MISSED = re.compile(r"\bmet: FALSE\b")
_WARNED = re.compile(r"WARNING: crc_check with copy_matrix:false")
_ERROR = re.compile(r"RVS-ERROR\s+(?P<said>.{1,300})|\[ERROR\s*\]\s*\[[^\]]*\]\s*(?P<more>.{1,300})")


def looks_like(head: bytes, name: str) -> bool:
    """Whether a file begins like the output of `rvs`."""
    text = head.decode("utf-8", "replace")
    return _TITLE in text or "RVS-ERROR" in text or (_LINE.search(text) is not None and "[GPU::" in text)


def read(source: str | bytes | Path, *, origin: str, now: datetime) -> Iterator[Signal]:
    """The results of a run. Never raises on what it reads; output without results is no evidence.

    Args:
        source: the output, or the file that has it.
        origin: the file, for the records.
        now: not needed here; every reader is told it.
    """
    try:
        text = _COLOUR.sub("", document(source))
    except Unreadable as error:
        yield no_evidence(SOURCE, "rvs:unreadable", f"no results: {error}", origin=origin)
        return
    yield from bounded(_of_text(text, origin), SOURCE, origin)


def _of_text(text: str, origin: str) -> Iterator[Signal]:
    rows = [found for line in text.splitlines() if (found := _ROW.match(line.strip())) and found["module"] != "Module"]
    doubtful = {found["action"] for found in _DEVICE.finditer(text) if _WARNED.search(found["said"])}
    yield from _of_devices(text, doubtful, origin)
    passed = list[str]()
    unknown = list[str]()
    for row in rows:
        action, module, result = words(row["action"], 80), row["module"].upper(), row["result"].upper()
        if result == "FAIL":
            entry = _MODULES.get(module, _OTHER)
            why = f"{module} ({action}) failed: {entry.reason}"
            code = f"rvs:{module.lower()}"
            yield Signal(SOURCE, code, "", None, entry.kind, entry.weight, why, evidence=words(row[0]), origin=origin)
        else:
            (passed if result == "PASS" else unknown).append(f"{module} ({action})")
    if passed:
        yield no_evidence(SOURCE, "rvs:pass", words(f"{_PASSED}: {', '.join(passed)}", 400), origin=origin)
    if unknown:
        why = words(f"of an outcome that is not understood: {', '.join(unknown)}", 400)
        yield no_evidence(SOURCE, "rvs:unknown", why, origin=origin)
    for found in list(_ERROR.finditer(text))[:5]:
        said = words(found["said"] or found["more"], 200)
        yield no_evidence(SOURCE, "rvs:error", f"it could not do what it was to do: {said}", origin=origin)
    if not rows:
        why = "it has no table of results: it did not come to its end"
        yield no_evidence(SOURCE, "rvs:unreadable", why, origin=origin)


def _of_devices(text: str, doubtful: set[str], origin: str) -> Iterator[Signal]:
    """What lines say of single devices; each thing once of each device."""
    seen: set[tuple[str, str]] = set()
    for found in _DEVICE.finditer(text):
        check = _CHECK.search(found["said"])
        name = check["check"] if check else "speed" if _MISSED.search(found["said"]) else ""
        key = (name, found["device"])
        if not name or key in seen:
            continue
        seen.add(key)
        entry = _CHECKS.get(name, _OTHER)
        if name == "crc" and found["action"] in doubtful:
            entry = Entry("noise", "none", "it warned that its operands change, so that results must differ")
        why = f"{words(found['action'], 80)}: {entry.reason}"
        device, said = f"gpu-id:{found['device']}", words(found["said"])
        yield Signal(SOURCE, f"rvs:{name}", device, None, entry.kind, entry.weight, why, evidence=said, origin=origin)
