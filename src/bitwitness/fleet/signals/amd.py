"""The ECC counts of AMD's devices, from the JSON of `amd-smi metric --ecc --json` (and of `amd-smi list --json`).

Its shape changed between ROCm 6 (a list of devices) and 7 (an object with `gpu_data`); both are read, and the names of the
library call `amdsmi_get_gpu_total_ecc_count` too. A guest of a virtual machine is told `N/A`, which is no count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from bitwitness.fleet.signals.catalogue import Entry, pci_address
from bitwitness.fleet.signals.reading import begins_json, is_ours, read_json, whole, words
from bitwitness.fleet.signals.record import Signal, no_evidence
from bitwitness.fleet.signals.times import iso

SOURCE = "amd-smi"
_ECC = re.compile(rb'"ecc"\s*:\s*(?:"N/A"|\{|null)')
_COUNTS: Mapping[str, Entry] = {
    "uncorrectable": Entry("memory", "strong", "errors that ECC could not correct, since the driver was loaded"),
    "deferred": Entry(
        "memory",
        "medium",
        "errors that ECC could not correct, in data that nobody had used yet; used, they become worse",
    ),
    "correctable": Entry("memory", "weak", "errors that ECC corrected did no harm; many of them announce worse"),
}


def looks_like(head: bytes, name: str) -> bool:
    """Whether a file begins like the JSON of `amd-smi`."""
    if not begins_json(head) or is_ours(head):
        return False
    named = "amd-smi" in name.lower() or "amd_smi" in name.lower() or "amdsmi" in name.lower()
    return (
        b"correctable_count" in head
        or b'"gpu_data"' in head
        or (b'"gpu"' in head and _ECC.search(head) is not None)
        or (b'"gpu"' in head and (named or b'"gfx_activity"' in head or b'"bdf"' in head))
    )


def read(source: str | bytes | Path, *, origin: str, now: datetime) -> Iterator[Signal]:
    """The ECC counts of all devices. Never raises on what it reads.

    Args:
        source: the JSON, or the file that has it.
        origin: the file, for the records.
        now: when it was written, which is when the devices were where it says.
    """

    def devices(values: list[Any]) -> list[dict[str, Any]]:
        return [one for value in values for one in _devices(value)]

    def signals(found: list[dict[str, Any]]) -> Iterator[Signal]:
        return (signal for one in found for signal in _of_device(one, origin, now))

    return read_json(source, origin, SOURCE, "no ECC counts", "it has no devices of amd-smi", devices, signals)


def _devices(value: object) -> list[dict[str, Any]]:
    if isinstance(value, dict) and isinstance(value.get("gpu_data"), list):
        value = value["gpu_data"]
    elif isinstance(value, dict):
        value = [value]
    known = {"gpu", "ecc", "ecc_blocks", "uncorrectable_count", "correctable_count", "total_uncorrectable_count"}
    return [one for one in value if isinstance(one, dict) and known & set(one)] if isinstance(value, list) else []


def _of_device(one: dict[str, Any], origin: str, now: datetime) -> Iterator[Signal]:
    index = whole(one.get("gpu"))
    pci = pci_address(one["bdf"]) if isinstance(one.get("bdf"), str) else ""
    uuid = words(one["uuid"], 80) if isinstance(one.get("uuid"), str) else ""
    device = uuid or pci or (f"gpu:{index}" if index is not None else "")
    if uuid and pci:
        evidence = f"pci={pci}" + (f" index={index}" if index is not None else "")
        why = "which device sits in which slot"
        yield Signal(SOURCE, "identity:pci", uuid, iso(now), "noise", "none", why, evidence=evidence, origin=origin)
    ecc = one.get("ecc", one)
    ecc = ecc if isinstance(ecc, dict) else {}
    if "ecc" not in one and not any(key.endswith("correctable_count") for key in one):
        why = f"no ECC counts of {device or 'a device'} are in it: ask for them with `amd-smi metric --ecc --json`"
        yield no_evidence(SOURCE, "amd-smi:not-collected", why, origin=origin, device=device)
        return
    for kind, entry in _COUNTS.items():
        told = next((ecc[key] for key in (f"total_{kind}_count", f"{kind}_count") if key in ecc), None)
        count = whole(told.get("value") if isinstance(told, dict) else told)
        if count is None and kind != "deferred":
            said = "has no count" if told is None else f"says {words(told, 40)!r} for the count"
            why = f"{device or 'a device'} {said} of {kind} errors; in a virtual machine there is none. What is not counted is not 0"
            yield no_evidence(SOURCE, "amd-smi:not-available", why, origin=origin, device=device)
        elif count:
            # Without the number, so that a count that was read again later is the same count, and not added to it.
            evidence = words(f"{kind}_count{_blocks(one, kind)}")
            yield Signal(
                SOURCE,
                f"amd-smi:{kind}",
                device,
                None,
                entry.kind,
                entry.weight,
                f"{count} {entry.reason}",
                "",
                count,
                evidence,
                origin,
            )


def _blocks(one: Mapping[str, Any], kind: str) -> str:
    """In which parts of the device the errors were, where it says so."""
    blocks = one.get("ecc_blocks")
    counts = {
        words(name, 20): whole(block.get(f"{kind}_count")) for name, block in blocks.items() if isinstance(block, dict)
    } if isinstance(blocks, dict) else {}  # fmt: skip
    told = ", ".join(name for name, count in list(counts.items())[:32] if count)
    return f", in {told}" if told else ""
