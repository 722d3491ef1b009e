"""amd-smi and ascend-dmi: what is known of their JSON is read, and nothing else is taken for anything."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from bitwitness.fleet.signals import Signal, amd, ascend
from bitwitness.fleet.signals.gather import gather

NOW = datetime(2026, 11, 29, tzinfo=UTC)


def of_amd(document: object) -> list[Signal]:
    text = document if isinstance(document, str) else json.dumps(document)
    return list(amd.read(text, origin="amd.json", now=NOW))


def of_ascend(document: object) -> list[Signal]:
    text = document if isinstance(document, str) else json.dumps(document)
    return list(ascend.read(text, origin="ascend.json", now=NOW))


def ecc(correctable: object = 0, uncorrectable: object = 0, deferred: object = 0) -> dict[str, object]:
    return {
        "total_correctable_count": correctable,
        "total_uncorrectable_count": uncorrectable,
        "total_deferred_count": deferred,
        "cache_correctable_count": 0,
    }


@pytest.mark.parametrize("wrap", ["list", "gpu_data"])
def test_ecc_counts_of_both_shapes(wrap: str) -> None:
    devices = [
        {"gpu": 0, "ecc": ecc()},
        {"gpu": 3, "ecc": ecc(5, 2, 1), "ecc_blocks": {"UMC": {"uncorrectable_count": 2}, "GFX": {}}},
    ]
    found = of_amd(devices if wrap == "list" else {"gpu_data": devices})
    assert [(one.source, one.code, one.device, one.weight, one.count) for one in found] == [
        ("amd-smi", "amd-smi:uncorrectable", "gpu:3", "strong", 2), ("amd-smi", "amd-smi:deferred", "gpu:3", "medium", 1),
        ("amd-smi", "amd-smi:correctable", "gpu:3", "weak", 5),
    ]  # fmt: skip
    assert found[0].evidence == "uncorrectable_count, in UMC"
    assert found[0].reason.startswith("2 errors")
    assert {one.kind for one in found} == {"memory"}


def test_the_names_of_the_library_call_and_values_with_a_unit() -> None:
    counts = {"correctable_count": 0, "uncorrectable_count": {"value": 1, "unit": ""}, "deferred_count": 0}
    assert [one.code for one in of_amd(counts)] == ["amd-smi:uncorrectable"]


def test_where_it_sits() -> None:
    found = of_amd([{"gpu": 0, "bdf": "0000:9B:00.0", "uuid": "11ff-22", "ecc": ecc(1)}])
    assert (found[0].code, found[0].device, found[0].evidence) == (
        "identity:pci",
        "11ff-22",
        "pci=0000:9b:00 index=0",
    )
    assert found[1].device == "11ff-22"
    assert (found[0].time, found[1].time) == ("2026-11-29T00:00:00.000Z", None)
    assert [one.device for one in of_amd([{"gpu": 0, "bdf": "0000:9B:00.0", "ecc": ecc(1)}])] == ["0000:9b:00"]


@pytest.mark.parametrize("value", ["N/A", None, -1, 1.5, "x", True, [], {"value": "N/A"}, 1e400])
def test_a_count_that_is_none_is_no_zero(value: object) -> None:
    (one,) = of_amd([{"gpu": 0, "ecc": ecc(0, value)}])
    assert (one.code, one.kind, one.device) == ("amd-smi:not-available", "no-evidence", "gpu:0")


@pytest.mark.parametrize(
    "document", ["", "{", "[]", "7", {}, {"gpu_data": 7}, [7], [[]], "AMD SMI: no device", "[" * 50_000]
)
def test_other_shapes_of_amd_are_no_evidence(document: object) -> None:
    assert [(one.code, one.kind) for one in of_amd(document)] == [("amd-smi:unreadable", "no-evidence")]


def test_a_count_that_was_read_twice_is_one_count() -> None:
    first, later = ([{"gpu": 3, "ecc": ecc(5, count)}] for count in (2, 3))
    found = gather([*of_amd(first), *of_amd(later)])
    assert [(one.code, one.count) for one in found] == [("amd-smi:uncorrectable", 3), ("amd-smi:correctable", 5)]


def test_a_list_without_counts_is_no_evidence() -> None:
    assert [(one.code, one.kind) for one in of_amd([{"gpu": 0, "ecc": "N/A"}])] == [
        ("amd-smi:not-available", "no-evidence")
    ] * 2
    assert [one.code for one in of_amd([{"gpu": 0, "temperature": {}}])] == ["amd-smi:not-collected"]


def test_outcomes_of_ascend_wherever_they_stand() -> None:
    found = of_ascend(
        {
            "healthCheck": {"hbm": {"result": "FAIL", "device": 4}, "network": "FAIL", "driver": "PASS"},
            "stressTest": [
                {"item": "aicore", "npu_id": "2", "status": "EMERGENCY_WARN"},
                {"name": "prbs", "status": "SKIP"},
            ],
            "performanceCheck": [
                {"item": "aiflops", "status": "IMPORTANT_WARN"},
                {"item": "nic", "status": "GENERAL_WARN"},
            ],
        }
    )
    assert [(one.code, one.device, one.kind, one.weight) for one in found] == [
        ("ascend-dmi:hbm", "npu:4", "memory", "medium"), ("ascend-dmi:network", "", "link", "weak"),
        ("ascend-dmi:aicore", "npu:2", "memory", "medium"), ("ascend-dmi:aiflops:important", "", "memory", "weak"),
        ("ascend-dmi:nic:general", "", "noise", "none"), ("ascend-dmi:pass", "", "no-evidence", "none"),
        ("ascend-dmi:skipped", "", "no-evidence", "none"),
    ]  # fmt: skip
    assert "does not rule out" in next(one for one in found if one.code == "ascend-dmi:pass").reason


@pytest.mark.parametrize("document", ["", "x", "{", {}, {"status": "ok"}, [1, None], {"hbm": "passed"}, "[" * 50_000])
def test_other_shapes_of_ascend_are_no_evidence(document: object) -> None:
    assert [(one.code, one.kind) for one in of_ascend(document)] == [("ascend-dmi:unreadable", "no-evidence")]


def test_a_deep_document_is_walked_without_a_deep_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [one.code for one in of_ascend('{"a":' * 400 + '"FAIL"' + "}" * 400)] == ["ascend-dmi:unknown"]
    monkeypatch.setattr(ascend, "_NODES", 10)
    assert [one.code for one in of_ascend([["FAIL"], *range(20)])] == ["ascend-dmi:unknown", "ascend-dmi:more"]


@pytest.mark.parametrize(
    ("head", "name", "is_amd", "is_ascend"),
    [
        (b'{"gpu_data": [{"gpu": 0', "x", True, False),
        (b'[{"gpu": 0, "ecc": {"total_correctable_count"', "x", True, False),
        (b'[{"gpu": 0}]', "amd-smi-metric.json", True, False),
        (b'[{"gpu": 0}]', "x.json", False, False),
        (b'[{"gpu": 0, "ecc": "N/A"}]', "x.json", True, False),
        (b'[\n {\n  "gpu": 0,\n  "ecc" : {', "x.json", True, False),
        (b'{"gpu": 0, "ecc": 3}', "x.json", False, False),
        (b'{"healthCheck": {}}', "x", False, True),
        (b'{"a": 1}', "ascend_dmi.json", False, True),
        (b'[{"source": "ascend-dmi", "code": "x", "weight": "none"}]', "ascend.json", False, False),
        (b"ascend", "x", False, False),
    ],
)
def test_what_looks_like_them(head: bytes, name: str, is_amd: bool, is_ascend: bool) -> None:
    assert (amd.looks_like(head, name), ascend.looks_like(head, name)) == (is_amd, is_ascend)
