"""Results of Huawei's `ascend-dmi --dg … --fmt json`, whose shape is published nowhere that we know of.

What is known are the words of its outcomes and the names of its tests. So this looks for those words wherever they stand,
takes the failures that it finds for failures, and takes nothing at all for health.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bitwitness.fleet.signals.catalogue import Entry
from bitwitness.fleet.signals.reading import begins_json, is_ours, read_json, whole, words
from bitwitness.fleet.signals.record import Signal, Weight, no_evidence

SOURCE = "ascend-dmi"
_FAILED, _SERIOUS, _WARNED, _QUIET = "failed", "serious", "warned", "quiet"
_OUTCOMES: Mapping[str, tuple[str, str]] = {
    "FAIL": (_FAILED, "failed"),
    "EMERGENCY_WARN": (_FAILED, "emergency"),
    "IMPORTANT_WARN": (_SERIOUS, "important"),
    "GENERAL_WARN": (_WARNED, "general"),
    "PASS": (_QUIET, "pass"),
    "HEALTH": (_QUIET, "pass"),
    "SKIP": (_QUIET, "skipped"),
}
_COMPUTES = frozenset({"hbm", "chipmemory", "random", "aicore", "aiflops", "aicpu", "dsa"})
_LINKS = frozenset({"network", "nic", "signalquality", "prbs", "bandwidth"})
_TESTS = _COMPUTES | _LINKS | {"driver", "cann", "device", "edp", "tdp"}
_RESULTS = frozenset({"status", "result", "outcome"})
_NODES = 100_000
"""Values of one document that are looked at."""


def looks_like(head: bytes, name: str) -> bool:
    """Whether a file begins like JSON of `ascend-dmi`."""
    if not begins_json(head) or is_ours(head):
        return False
    small = head.lower()
    scenes = sum(word in small for word in (b"healthcheck", b"performancecheck", b"stresstest"))
    return b"ascend" in small or "ascend" in name.lower() or scenes > 0


def read(source: str | bytes | Path, *, origin: str, now: datetime) -> Iterator[Signal]:
    """The outcomes of a diagnosis. Never raises on what it reads; a shape that it does not know is no evidence.

    Args:
        source: the JSON, or the file that has it.
        origin: the file, for the records.
        now: not needed here; every reader is told it.
    """
    return read_json(
        source,
        origin,
        SOURCE,
        "no diagnosis",
        "it has no complete JSON",
        list,
        lambda values: _of_document(values, origin),
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a document a value stands: the test and device that were named on the way to it."""

    test: str = ""
    device: str = ""


def _of_document(values: list[object], origin: str) -> Iterator[Signal]:
    quiet: dict[str, list[str]] = {}
    found = False
    for outcome, place, told in _walk(values):
        found = True
        if outcome not in _OUTCOMES:
            yield no_evidence(SOURCE, f"ascend-dmi:{outcome}", told, origin=origin, device=place.device)
            continue
        outcome_of, code = _OUTCOMES[outcome]
        if outcome_of == _QUIET:
            quiet.setdefault(code, []).append(place.test or "a test")
            continue
        entry = _weigh(place.test, outcome_of)
        why = f"test {place.test or 'without name'} ended with {outcome}: {entry.reason}"
        test = "".join(filter(str.isalnum, place.test.lower())) or "unknown"
        code = f"ascend-dmi:{test}" if outcome_of == _FAILED else f"ascend-dmi:{test}:{code}"
        yield Signal(SOURCE, code, place.device, None, entry.kind, entry.weight, why, evidence=told, origin=origin)
    for code, tests in quiet.items():
        said = (
            "passed, but a pass does not rule out silent corruption"
            if code == "pass"
            else "skipped, which says nothing"
        )
        why = words(f"{said}: {', '.join(dict.fromkeys(tests))}", 400)
        yield no_evidence(SOURCE, f"ascend-dmi:{code}", why, origin=origin)
    if not found:
        why = "the JSON has a shape that is not known, with no outcome of a test"
        yield no_evidence(SOURCE, "ascend-dmi:unreadable", why, origin=origin)


def _weigh(test: str, outcome: str) -> Entry:
    name = test.lower()
    if outcome == _WARNED:
        return Entry("noise", "none", "a general warning")
    if name in _COMPUTES:
        weight: Weight = "medium" if outcome == _FAILED else "weak"
        return Entry(
            "memory", weight, "a part that computes or remembers; other programs on the device make it fail too"
        )
    if name in _LINKS:
        return Entry("link", "weak", "supports a communication cause")
    if not name:
        return Entry("loud", "weak", "of which test is not known, so neither of what")
    return Entry("loud", "none", "a fault that the vendor's tools see, which is not silent")


def _walk(values: list[object]) -> Iterator[tuple[str, _Place, str]]:
    """All outcomes of a document, or what else there is to say of it, in the place of one.

    Without recursion: a document may be deeper than the stack of Python.
    """
    stack: list[tuple[object, _Place]] = [(value, _Place()) for value in reversed(values)]
    for _ in range(_NODES):
        if not stack:
            return
        value, place = stack.pop()
        if isinstance(value, dict):
            place = _named(value, place)
            for key, inner in reversed(value.items()):
                named = key.lower() in _TESTS
                stack.append((inner, _Place(key, place.device) if named else place))
                if (named or key.lower() in _RESULTS) and not _is_outcome(inner) and whole(inner) is None:
                    yield (
                        "unreadable",
                        place,
                        f"an outcome that is not known, of {place.test or words(key, 60)}: {words(inner, 60)}",
                    )
        elif isinstance(value, list):
            stack += [(inner, place) for inner in reversed(value)]
        elif isinstance(value, str) and _is_outcome(value):
            outcome = value.strip().upper()
            yield outcome, place, words(f"{place.test or 'outcome'}: {outcome}")
    if stack:
        yield "more", _Place(), f"it has more than {_NODES} values; those beyond were not read"


def _is_outcome(value: object) -> bool:
    """Whether a value is an outcome, or may have one inside."""
    return isinstance(value, dict | list) or (isinstance(value, str) and value.strip().upper() in _OUTCOMES)


def _named(value: Mapping[str, object], place: _Place) -> _Place:
    """The place inside an object that names its test or its device."""
    test, device = place.test, place.device
    for key, inner in value.items():
        small = "".join(filter(str.isalnum, key.lower()))
        if (
            small in {"item", "name", "test", "testname", "checkitem"}
            and isinstance(inner, str)
            and not _is_outcome(inner)
        ):
            test = words(inner, 60)
        elif small in {"device", "deviceid", "npu", "npuid", "cardid", "chipid", "id"}:
            number = whole(inner)
            device = f"npu:{number}" if number is not None else device
    return _Place(test, device)
