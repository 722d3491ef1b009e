"""What `dcgmi diag -j` found, of DCGM 3 and 4, whose JSON has no published schema.

A diagnostic that finds something is strong evidence. One that finds nothing is none: silent corruption depends on data,
heat and luck, and devices that corrupt pass every level of it. So only failures become evidence here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from bitwitness.fleet.signals.catalogue import Entry
from bitwitness.fleet.signals.reading import begins_json, is_ours, read_json, whole, words
from bitwitness.fleet.signals.record import Signal, Weight, no_evidence

SOURCE = "dcgm-diag"
_ROOTS = ("dcgm diagnostic", "dcgm gpu diagnostic")
_PASSED = "a pass does not rule out silent corruption"

_ERRORS: Mapping[int, Entry] = {
    3: Entry("link", "weak", "many packets were sent again on PCI Express, which repairs them"),
    4: Entry("memory", "strong", "memory errors that ECC could not correct, since the driver was loaded"),
    5: Entry("memory", "weak", "many errors that ECC corrected: they did no harm, but announce worse"),
    6: Entry("memory", "weak", "pages wait for a reset to be retired, and are in use until then"),
    7: Entry("memory", "medium", "more pages were retired than NVIDIA tolerates"),
    8: Entry("memory", "medium", "more pages were retired after uncorrected errors than NVIDIA tolerates"),
    13: Entry("link", "weak", "more NVLink errors than expected: supports a communication cause"),
    14: Entry("link", "weak", "an NVLink is down: supports a communication cause"),
    15: Entry("link", "weak", "fatal errors of an NVSwitch: support a communication cause"),
    16: Entry("link", "weak", "errors of an NVSwitch: support a communication cause"),
    52: Entry("memory", "strong", "the test wrote to memory and read something else"),
    57: Entry("memory", "strong", "CUDA met a memory error that ECC could not correct"),
    58: Entry("memory", "strong", "the test wrote to memory and read something else"),
    70: Entry("link", "weak", "more NVLink errors than expected: supports a communication cause"),
    71: Entry("link", "weak", "an NVLink error that must not occur: supports a communication cause"),
    79: Entry("memory", "strong", "the cache of a processor returned something else than was written"),
    80: Entry("memory", "strong", "a memory row failed and could not be replaced; NVIDIA takes such a device back"),
    81: Entry("memory", "strong", "a memory error was not contained (Xid 95): distrust the step and the checkpoint"),
    83: Entry("memory", "weak", "pages wait for a reset to be retired, and are in use until then"),
    84: Entry("memory", "weak", "rows were replaced after uncorrected errors: supports a memory cause"),
    85: Entry("memory", "weak", "a failed memory row waits for a reset to be replaced: supports a memory cause"),
    86: Entry("link", "medium", "a copy to this device arrived wrong: device or way there"),
    87: Entry("link", "medium", "a copy from this device arrived wrong: device or way there"),
    95: Entry("loud", "medium", "the extended diagnostic found the device broken; its own log says what"),
    101: Entry("loud", "none", "an Xid was logged during the test; the kernel log says which, and is read for itself"),
    103: Entry("memory", "strong", "memory errors that ECC could not correct occurred during the test"),
    105: Entry("memory", "medium", "more errors that ECC corrected than the test tolerates"),
    106: Entry("memory", "strong", "more errors that ECC could not correct than the test tolerates"),
    109: Entry("link", "weak", "an NVSwitch logged an error during the test: supports a communication cause"),
    111: Entry("memory", "strong", "the device computed NaN where the test has none: a wrong result, seen happening"),
    118: Entry("memory", "strong", "the device has had more uncorrected SRAM errors than NVIDIA tolerates"),
    132: Entry("memory", "strong", "so many memory rows were replaced that NVIDIA takes the device back"),
}
"""By DCGM's error id (`dcgm_errors.h`), those that bear on corruption; all others are weighed by category and severity."""

_CATEGORIES: Mapping[int, Entry] = {
    1: Entry("loud", "none", "the device was slower than expected, which is no wrong result"),
    2: Entry("loud", "none", "the device was slower than expected, which is no wrong result"),
    5: Entry("loud", "none", "an Xid was logged during the test; the kernel log says which, and is read for itself"),
    9: Entry("loud", "none", "heat costs speed, not correctness"),
    10: Entry("memory", "weak", "an error of the device's memory"),
    11: Entry("link", "weak", "an error of NVLink: supports a communication cause"),
    12: Entry("link", "weak", "an error of an NVSwitch: supports a communication cause"),
    13: Entry("link", "weak", "an error of PCI Express, which sends damaged packets again"),
    14: Entry("loud", "none", "an error of power, which is not silent"),
    15: Entry("loud", "weak", "a hardware error of which DCGM does not say more"),
}
"""By DCGM's error category."""

_SOFTWARE = frozenset({0, 3, 4, 6, 7, 8, 16})
_UNKNOWN = "a warning of which nothing is known"

_ISOLATE, _TRIAGE, _RESET = 2, 4, 6
_SEVERITIES = {
    0: "",
    1: "DCGM says to watch it",
    _ISOLATE: "DCGM says to take it out of service",
    3: "",
    _TRIAGE: "DCGM says that a person must look",
    5: "DCGM says that it may be a matter of configuration",
    _RESET: "DCGM says to reset it",
}


def looks_like(head: bytes, name: str) -> bool:
    """Whether a file begins like the JSON of `dcgmi diag -j`, perhaps behind other lines."""
    small = head.lower()
    return begins_json(head) and not is_ours(head) and any(f'"{root}"'.encode() in small for root in _ROOTS)


def read(source: str | bytes | Path, *, origin: str, now: datetime) -> Iterator[Signal]:
    """The signals of a run of the diagnostic. Never raises on what it reads.

    Args:
        source: the JSON, or the file that has it, perhaps behind other lines.
        origin: the file, for the records.
        now: not needed here; every reader is told it.
    """

    def runs(values: list[Any]) -> list[Mapping[str, Any]]:
        return [root for value in values if (root := _root(value)) is not None]

    def signals(found: list[Mapping[str, Any]]) -> Iterator[Signal]:
        return (signal for root in found for signal in _of_run(root, origin))

    lacks = "it has no complete result of `dcgmi diag -j`"
    return read_json(source, origin, SOURCE, "no diagnostic", lacks, runs, signals)


def _root(value: object) -> Mapping[str, Any] | None:
    if not isinstance(value, dict):
        return None
    return next((dict(body) for key, body in value.items() if key.lower() in _ROOTS and isinstance(body, dict)), None)


@dataclass(frozen=True, slots=True)
class _Result:
    """What one test said of one device, or of all together (device "")."""

    test: str
    device: str
    status: str
    warnings: tuple[Any, ...]
    info: str


def _of_run(root: Mapping[str, Any], origin: str) -> Iterator[Signal]:
    quiet: dict[tuple[str, str], list[str]] = {}
    any_result = False
    for one in _results(root):
        any_result = True
        if isinstance(one, str):
            yield no_evidence(SOURCE, "dcgm-diag:unreadable", one, origin=origin)
            continue
        faults = [_of_warning(one, warning, origin) for warning in one.warnings]
        yield from faults
        status = _STATUSES.get("".join(filter(str.isalpha, one.status.lower())), "unknown")
        if status == "failed" and not faults:
            yield _failed(one, origin)
        elif status not in {"failed", "warned"}:
            quiet.setdefault((status, one.device), []).append(one.test)
    for (status, device), tests in quiet.items():
        why = f"{_QUIET[status]}: {', '.join(dict.fromkeys(tests))}"
        yield no_evidence(SOURCE, f"dcgm-diag:{status}", words(why, 400), origin=origin, device=device)
    if not any_result:
        yield no_evidence(
            SOURCE, "dcgm-diag:unreadable", "the diagnostic has no results that can be read", origin=origin
        )


_STATUSES = {
    "pass": "pass",
    "passed": "pass",
    "fail": "failed",
    "failed": "failed",
    "warn": "warned",
    "warning": "warned",
    "skip": "skipped",
    "skipped": "skipped",
    "notrun": "not-run",
}
_QUIET = {
    "pass": f"passed, but {_PASSED}",
    "skipped": "skipped, which says nothing",
    "not-run": "not run, which says nothing",
    "unknown": "of an outcome that is not understood, which says nothing",
}


def _results(root: Mapping[str, Any]) -> Iterator[_Result | str]:
    """All results; a text is what could not be read, or what went wrong with the run as a whole."""
    for key, told in root.items():
        if "error" in key.lower() and told:
            yield f"the diagnostic itself failed: {words(told, 200)}"
    categories = root.get("test_categories")
    for category in _list(categories):
        tests = category.get("tests") if isinstance(category, dict) else None
        if not isinstance(tests, list):
            yield f"a category of tests cannot be read: {words(category, 120)}"
        for test in _list(tests):
            if not isinstance(test, dict) or not isinstance(test.get("results"), list):
                yield f"a test cannot be read: {words(test, 120)}"
            else:
                yield from _of_test(test)
    if categories is not None and not isinstance(categories, list):
        yield f"the tests cannot be read: {words(categories, 120)}"


def _of_test(test: dict[str, Any]) -> Iterator[_Result | str]:
    name = words(test.get("name", "a test without name"), 80)
    failed = False
    for one in test["results"]:
        if not isinstance(one, dict):
            yield f"a result of {name} cannot be read: {words(one, 120)}"
            continue
        for device in _devices(one):
            result = _result(name, device, one)
            failed |= result.status.lower().startswith("fail")
            yield result
    summary = test.get("test_summary")
    whole_test = [one for one in (summary, {"warnings": test.get("warnings")}) if isinstance(one, dict)]
    for one in whole_test:
        result = _result(name, "", one)
        if result.warnings or (result.status.lower().startswith("fail") and not failed):
            yield result


def _result(test: str, device: str, one: Mapping[str, Any]) -> _Result:
    told = one.get("warnings")
    warnings = told if isinstance(told, list) else [] if told in (None, "") else [told]
    status = one.get("status")
    return _Result(
        test, device, status if isinstance(status, str) else "", tuple(warnings), words(one.get("info") or "", 120)
    )


def _devices(one: Mapping[str, Any]) -> list[str]:
    """Those of a result. DCGM counts devices; which device that is, only the driver of that boot can tell."""
    if "entity_id" in one or "entity_group" in one:
        group = one.get("entity_group")
        group = words(group, 40).lower() if isinstance(group, str) and group else "entity"
        number = whole(one.get("entity_id"))
        return [f"{group}:{number}" if number is not None else ""]
    told = next((one[key] for key in ("gpu_id", "gpu_ids") if key in one), "")
    numbers = [whole(part) for part in (told if isinstance(told, list) else str(told).split(","))]
    return [f"gpu:{number}" for number in numbers[:64] if number is not None] or [""]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _of_warning(one: _Result, warning: object, origin: str) -> Signal:
    """One warning, by its error id; where it has none, by what little is left."""
    fields = warning if isinstance(warning, dict) else {"warning": warning}
    text = words(fields.get("warning", warning), 200)
    error, category, severity = (whole(fields.get(f"error_{key}")) for key in ("id", "category", "severity"))
    entry = _weigh(error, category, severity)
    code = f"dcgm-diag:{error}" if error is not None else "dcgm-diag:warned"
    if entry is None and one.status.lower().startswith("fail"):
        failed = _failed(one, origin, text)
        return failed if error is None else replace(failed, code=code)
    if entry is None:
        return Signal(SOURCE, code, one.device, None, "no-evidence", "none", _UNKNOWN, evidence=text, origin=origin)
    advice = _SEVERITIES.get(severity if severity is not None else 0, "")
    why = f"test {one.test}: {entry.reason}" + (f". {advice}" if advice else "")
    return Signal(SOURCE, code, one.device, None, entry.kind, entry.weight, why, evidence=text, origin=origin)


def _weigh(error: int | None, category: int | None, severity: int | None) -> Entry | None:
    """What an error weighs; None where nothing is known of it."""
    known = _ERRORS.get(error) if error is not None else None
    if known is not None:
        return known
    entry = _CATEGORIES.get(category) if category is not None else None
    if entry is None and category in _SOFTWARE:
        return Entry(
            "no-evidence", "none", "an error of software or configuration, so the test told nothing of the device"
        )
    if entry is None and severity in {_ISOLATE, _RESET, _TRIAGE}:
        return Entry("loud", "medium", "DCGM does not say what kind of error it is, but takes it seriously")
    if entry is None:
        return None
    weights: dict[int | None, Weight] = {_ISOLATE: "strong", _RESET: "medium", _TRIAGE: "medium"}
    if entry.kind == "memory":
        return Entry("memory", weights.get(severity, entry.weight), entry.reason)
    if entry.kind == "link" and severity == _ISOLATE:
        return Entry("link", "medium", entry.reason)
    return entry


def _failed(one: _Result, origin: str, text: str = "") -> Signal:
    """A failure of which nothing more is known. It is a failure all the same."""
    about = "memory" in one.test.lower() or "memtest" in one.test.lower()
    why = f"test {one.test} failed without an error that is known: " + (
        "of memory, but it may have failed for want of memory or of rights" if about else "of what, its text may say"
    )
    evidence = text or one.info or f"{one.test}: {words(one.status, 40)}"
    return Signal(
        SOURCE,
        "dcgm-diag:failed",
        one.device,
        None,
        "memory" if about else "loud",
        "medium",
        why,
        evidence=evidence,
        origin=origin,
    )
