"""`dcgmi diag -j` of DCGM 3 and 4: failures by error id, and nothing else for evidence."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from bitwitness.fleet.signals import Signal, diagnostic

NOW = datetime(2026, 11, 29, tzinfo=UTC)


def read(document: object) -> list[Signal]:
    text = document if isinstance(document, str) else json.dumps(document)
    return list(diagnostic.read(text, origin="diag.json", now=NOW))


def warning(error: int | None = 52, category: int | None = 10, severity: int | None = 2) -> dict[str, Any]:
    fields = {"error_id": error, "error_category": category, "error_severity": severity}
    return {"warning": "GPU 3 has a fault", **{key: value for key, value in fields.items() if value is not None}}


def four(*results: dict[str, Any], name: str = "memory", **more: Any) -> dict[str, Any]:
    tests = [{"name": name, "results": list(results), "test_summary": {"status": "Pass"}, **more}]
    return {
        "DCGM Diagnostic": {"test_categories": [{"category": "Hardware", "tests": tests}]},
        "metadata": {"version": "4.6.0", "Driver Version Detected": "580.0"},
    }


def three(*results: dict[str, Any], name: str = "GPU Memory") -> dict[str, Any]:
    tests = [{"name": name, "results": list(results)}]
    return {"DCGM GPU Diagnostic": {"test_categories": [{"category": "Hardware", "tests": tests}]}}


def result(status: str = "Fail", *warnings: object, **more: Any) -> dict[str, Any]:
    return {
        "entity_group": "GPU",
        "entity_group_id": 1,
        "entity_id": 3,
        "status": status,
        "warnings": list(warnings),
        **more,
    }


@pytest.mark.parametrize(
    "document",
    [
        four(result("Fail", warning())),
        four(result("FAIL", warning())),
        three({"gpu_id": "3", "status": "Fail", "warnings": [warning()]}),
        three({"gpu_ids": "3", "status": "fail", "warnings": warning()}),
        "Successfully ran diagnostic for group.\n[warn] {odd} brackets\n"
        + json.dumps(four(result("Fail", warning())))
        + "\nbye",
    ],
)
def test_a_failure_of_both_generations(document: object) -> None:
    found = read(document)
    (one,) = found
    assert (one.source, one.code, one.device, one.kind, one.weight, one.time) == (
        "dcgm-diag", "dcgm-diag:52", "gpu:3", "memory", "strong", None
    )  # fmt: skip
    assert one.reason == "test " + one.reason[5:].split(":")[0] + (
        ": the test wrote to memory and read something else. DCGM says to take it out of service"
    )
    assert one.evidence == "GPU 3 has a fault"


@pytest.mark.parametrize(
    ("error", "kind", "weight"),
    [
        (4, "memory", "strong"), (52, "memory", "strong"), (58, "memory", "strong"), (79, "memory", "strong"), (80, "memory", "strong"),
        (81, "memory", "strong"), (111, "memory", "strong"), (118, "memory", "strong"), (132, "memory", "strong"),
        (86, "link", "medium"), (87, "link", "medium"),
    ],
)  # fmt: skip
def test_the_ids_that_matter(error: int, kind: str, weight: str) -> None:
    (one,) = read(four(result("Fail", warning(error))))
    assert (one.code, one.kind, one.weight) == (f"dcgm-diag:{error}", kind, weight)


@pytest.mark.parametrize(
    ("category", "severity", "kind", "weight"),
    [
        (10, 1, "memory", "weak"), (10, 2, "memory", "strong"), (10, 6, "memory", "medium"), (11, 2, "link", "medium"), (13, 1, "link", "weak"),
        (9, 2, "loud", "none"), (1, 1, "loud", "none"), (3, 5, "no-evidence", "none"), (8, 2, "no-evidence", "none"),
        (None, 2, "loud", "medium"), (99, 6, "loud", "medium"), (None, 1, "loud", "medium"), (None, None, "loud", "medium"),
    ],
)  # fmt: skip
def test_other_ids_by_category_and_severity(category: int | None, severity: int, kind: str, weight: str) -> None:
    (one,) = read(four(result("Fail", warning(999, category, severity)), name="diagnostic"))
    assert (one.code, one.kind, one.weight) == ("dcgm-diag:999", kind, weight)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("Pass", "pass"), ("PASS", "pass"), ("Skip", "skipped"), ("SKIPPED", "skipped"), ("Not Run", "not-run"), ("NOT_RUN", "not-run"),
        ("Whatever", "unknown"), ("", "unknown"),
    ],
)  # fmt: skip
def test_what_is_no_failure_is_no_evidence(status: str, code: str) -> None:
    (one,) = read(four(result(status)))
    assert (one.code, one.kind, one.weight, one.device) == (f"dcgm-diag:{code}", "no-evidence", "none", "gpu:3")
    if code == "pass":
        assert "does not rule out silent corruption" in one.reason


def test_a_status_that_is_missing_or_no_text_is_no_pass() -> None:
    for odd in (None, 0, True, ["Pass"]):
        (one,) = read(four({"entity_group": "GPU", "entity_id": 3, "status": odd}))
        assert one.code == "dcgm-diag:unknown"


def test_a_pass_with_a_warning_tells_both() -> None:
    found = read(four(result("Pass", warning(56, 6, 1))))
    assert [(one.code, one.kind) for one in found] == [
        ("dcgm-diag:56", "no-evidence"),
        ("dcgm-diag:pass", "no-evidence"),
    ]
    assert [one.weight for one in read(four(result("Pass", warning(52))))] == ["strong", "none"]


def test_a_failure_that_says_no_more_is_a_failure() -> None:
    assert [(one.code, one.kind, one.weight) for one in read(four(result("Fail")))] == [
        ("dcgm-diag:failed", "memory", "medium")
    ]
    (one,) = read(
        three({"gpu_id": "3", "status": "Fail", "warnings": "Error using CUDA API cuInit"}, name="Diagnostic")
    )
    assert (one.code, one.kind, one.weight, one.evidence) == (
        "dcgm-diag:failed",
        "loud",
        "medium",
        "Error using CUDA API cuInit",
    )


def test_the_summary_of_a_test_and_its_own_warnings() -> None:
    found = read(four(result("Pass"), test_summary={"status": "Fail", "warnings": [warning(80)]}))
    assert {one.code: one.device for one in found} == {"dcgm-diag:80": "", "dcgm-diag:pass": "gpu:3"}
    assert "dcgm-diag:58" in [one.code for one in read(four(result("Skip"), warnings=[warning(58)]))]
    assert "dcgm-diag:failed" in [one.code for one in read(four(result("Pass"), test_summary={"status": "FAIL"}))]


def test_many_devices() -> None:
    found = read(
        three({"gpu_ids": "0,1", "status": "Pass"}, {"gpu_ids": "2", "status": "Fail", "warnings": [warning(4)]})
    )
    assert {one.device: one.code for one in found} == {
        "gpu:0": "dcgm-diag:pass",
        "gpu:1": "dcgm-diag:pass",
        "gpu:2": "dcgm-diag:4",
    }


@pytest.mark.parametrize(
    "document",
    [
        "", "no JSON", "{", json.dumps(four(result("Fail", warning())))[:-40], "[" * 100_000, {"DCGM Diagnostic": []}, {"other": 1},
        {"DCGM Diagnostic": {}}, {"DCGM Diagnostic": {"test_categories": "x"}}, {"DCGM Diagnostic": {"test_categories": [{"tests": None}]}},
        {"DCGM Diagnostic": {"test_categories": [{"tests": [{"name": "memory"}]}]}}, four("Pass"),  # type: ignore[arg-type]
        {"DCGM Diagnostic": {"runtime_error": "could not connect"}},
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_no_evidence(document: object) -> None:
    found = read(document)
    assert found
    assert {(one.code, one.kind) for one in found} == {("dcgm-diag:unreadable", "no-evidence")}


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (json.dumps(four()).encode(), True),
        (b"warning\n" + json.dumps(three()).encode(), True),
        (b'[{"source": "dcgm-diag", "code": "x", "weight": "none", "reason": "\\"DCGM Diagnostic\\""}]', False),
        (b"DCGM Diagnostic", False),
        (b'{"gpu": 0}', False),
    ],
)
def test_what_looks_like_a_diagnostic(head: bytes, expected: bool) -> None:
    assert diagnostic.looks_like(head, "x") is expected
