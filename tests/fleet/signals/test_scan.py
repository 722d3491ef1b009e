"""Results of `bitwitness scan` and of AMD's `rvs` as signals: a failure weighs, whatever else is said is never health."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwitness.fleet.signals import Signal, detect, rvs, scan
from bitwitness.runfiles.answers import Device
from bitwitness.runfiles.files import write_json
from bitwitness.scan.linking import judge_transfers
from bitwitness.scan.results import DeviceResult, Finding, Judgement, LinkResult, Unjudged, Voice

NOW = datetime(2026, 11, 30, tzinfo=UTC)
FINDING = Finding("ops/matmul/float32/16x16x16", "1" * 32, {"1" * 32: 95, "f" * 32: 5}, ("GPU-0", "GPU-2"))
DEVICES = (
    DeviceResult(0, "n0", "GPU-0", "H200", "pass", "1000 answers right", 1000, 0, 3e-3),
    DeviceResult(1, "n1", "GPU-1", "H200", "fail", "5 of 1000 answers were wrong", 1000, 5, None, {}, (FINDING,)),
    DeviceResult(2, "n1", "GPU-2", "H200", "not judged", "it died"),
)
LINK = LinkResult((0, 2), ("n0", "n1"), ("GPU-0", "GPU-2"), "fail", "3 of 90 arrived otherwise", 90, 3)
VOICE = Voice("dcgm-diag", "n0", "gpu:3", "fail", "memory", "strong")
JUDGEMENT = Judgement(DEVICES, (LINK,), (Unjudged("comm/x/float32/1", "why"),), (VOICE,))


def read(result: object) -> list[Signal]:
    text = result if isinstance(result, str) else json.dumps(result)
    return list(scan.read(text, origin="result.json", now=NOW))


def test_a_failure_is_strong_and_all_else_is_no_health(tmp_path: Path) -> None:
    file = tmp_path / "copied-off-a-node"
    write_json(file, JUDGEMENT.to_json() | {"ended": "2026-11-30T09:00:00.000Z"})
    found = list(detect.read(file, now=NOW))
    assert [(one.code, one.host, one.device, one.kind, one.weight) for one in found] == [
        ("scan:wrong", "n1", "GPU-1", "memory", "strong"),
        ("scan:pass", "n0", "", "no-evidence", "none"),
        ("scan:not-judged", "n1", "", "no-evidence", "none"),
        ("scan:link", "n0", "GPU-0", "link", "medium"),
        ("scan:link", "n1", "GPU-2", "link", "medium"),
        ("scan:vendor", "n0", "gpu:3", "no-evidence", "none"),
    ]
    wrong = found[0]
    assert (wrong.source, wrong.time, wrong.evidence) == (
        "scan", "2026-11-30T09:00:00.000Z", "5 of 1000 answers were wrong",
    )  # fmt: skip
    assert "does not rule out" in found[1].reason


def test_a_drill_says_nothing_of_any_device() -> None:
    found = read(JUDGEMENT.to_json() | {"drill": True})
    assert [(one.code, one.kind) for one in found] == [("scan:drill", "no-evidence")]
    assert "on purpose" in found[0].reason


def test_processes_that_stand_for_devices_are_none() -> None:
    assert [(one.code, one.kind) for one in read(JUDGEMENT.to_json() | {"played": True})] == [
        ("scan:played", "no-evidence")
    ]


@pytest.mark.parametrize(
    "change",
    [{"standing": "failed"}, {"wrong": 0}, {"wrong": None}, {"wrong": "many"}, {"wrong": -3}, {"wrong": "5"}, {"wrong": True}, {"wrong": 5.0}, {"wrong": 1e308}, {"wrong": 10**400}, {"wrong": 1001}, {"calls": 3}, {"calls": None}, {"standing": ["fail"]}, {"node": ["n1"]}, {"device": {"x": 1}}, {"node": ""}, {"device": ""}, {"node": None}],
)  # fmt: skip
def test_a_failure_that_cannot_be_accuses_nobody(change: dict[str, Any]) -> None:
    result = JUDGEMENT.to_json() | {"links": [], "voices": []}
    result["devices"][1].update(change)
    assert {one.kind for one in read(result)} == {"no-evidence"}
    assert "scan:unreadable" in {one.code for one in read(result)}


def of_failed_rank(links: list[LinkResult], reason: str = "why") -> list[tuple[str, str, str, str]]:
    failed = DeviceResult(1, "n1", "GPU-1", "H200", "fail", reason)
    result = Judgement((DEVICES[0], failed), tuple(links)).to_json()
    return [(one.code, one.host, one.device, one.evidence) for one in read(result) if one.weight == "strong"]


def of_pair(ranks: tuple[int, int], wrong: int, transfers: int = 90) -> LinkResult:
    ends = ("a", "b"), ("c", "d")
    return LinkResult(ranks, *ends, "not judged", "x", transfers, wrong)


def test_a_rank_that_fails_by_its_transfers_only_is_a_signal() -> None:
    listed = of_failed_rank([of_pair((0, 1), 40), of_pair((1, 2), 30), of_pair((0, 2), 7)])
    assert listed == [("scan:transfers", "n1", "GPU-1", "70 of 180 transfers were wrong, with 2 other ranks")]
    said = "480 of 720 transfers with 6 of 6 ranks of other nodes were wrong, while those"
    assert [code for code, *_ in of_failed_rank([], said)] == ["scan:transfers"]
    assert of_failed_rank([of_pair((0, 1), 40)]) == []
    assert of_failed_rank([of_pair((0, 1), 40), of_pair((1, 2), 91)]) == []
    assert of_failed_rank([], said.replace("480", "9999")) == []


def test_what_the_judge_says_of_a_rank_is_read_as_it_was_meant() -> None:
    devices = [Device(rank, f"n{rank}", f"d{rank}", {}) for rank in range(4)]
    made = [
        {"kind": "link", "rank": b, "peer": a, "right": 60 * (2 not in (a, b)), "wrong": 60 * (2 in (a, b))}
        for a in range(4)
        for b in range(4)
        if a != b
    ]
    found = judge_transfers(devices, made)
    for links in (list(found.links), []):
        assert [code for code, *_ in of_failed_rank(links, found.failed[2])] == ["scan:transfers"]


@pytest.mark.parametrize(
    "change",
    [{"nodes": "ab"}, {"nodes": ["a"]}, {"nodes": ["a", ["b"]]}, {"nodes": ["a", ""]}, {"devices": "cd"}, {"wrong": 0}, {"wrong": "3"}, {"wrong": 91}],
)  # fmt: skip
def test_a_link_that_cannot_be_says_nothing(change: dict[str, Any]) -> None:
    result = JUDGEMENT.to_json() | {"devices": [], "voices": []}
    result["links"][0].update(change)
    assert [(one.code, one.kind) for one in read(result)] == [("scan:unreadable", "no-evidence")]


def test_a_path_between_nodes_names_no_device() -> None:
    result = JUDGEMENT.to_json() | {"devices": [], "voices": []}
    result["links"][0]["devices"] = ["", ""]
    assert [(one.code, one.host, one.device) for one in read(result)] == [
        ("scan:link", "n0", ""), ("scan:link", "n1", "")
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["drill", "played"])
@pytest.mark.parametrize("told", ["false", "true", 1, 0, [], "x"])
def test_what_is_neither_a_drill_nor_none_accuses_nobody(name: str, told: object) -> None:
    assert [one.code for one in read(JUDGEMENT.to_json() | {name: told})] == ["scan:unreadable"]


@pytest.mark.parametrize("result", ["", "{", "[]", {"devices": 3}, {"standing": "fail"}, "[" * 50_000])
def test_what_is_no_result(result: object) -> None:
    assert [one.kind for one in read(result)] == ["no-evidence"]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=9), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["devices", "links", "voices", "standing", "nodes", "ended", "wrong", "drill"]), inner, max_size=5)))  # fmt: skip
def test_no_damage_crashes_it_or_accuses(result: object) -> None:
    assert all(one.kind in ("no-evidence", "link") for one in read({"devices": [], "x": result}))
    assert all(one.kind in ("no-evidence", "link") for one in read({"devices": [result], "links": [result]}))


# rvs ----------------------------------------------------------------------------------------------------------------------

TABLE = """\
[RESULT] [302733.975838] [action_6] [GPU:: 20068] GFLOPS 4300 Target GFLOPS: 5000 met: FALSE
[RESULT] [302735.975838] [gst-check] [GPU:: 48932] crc-check error CRC-32 mismatch detected (SDC candidate)
+=====================================================================+
|                 ROCm Validation Suite (RVS) Summary                 |
+=====================================================================+
| GPU Name - GPU ID                | AMD Instinct MI210 - 35824       |
| Action Name                      | Module         | Result          |
+=====================================================================+
| action_1                         | RCQT           | FAIL            |
| action_5                         | PEBB           | FAIL            |
| action_6                         | GST            | \x1b[31mFAIL           \x1b[0m |
| action_7                         | BABEL          | PASS            |
| action_8                         | MEM            | FAIL            |
| action_9                         | PESM           | WHAT            |
+---------------------------------------------------------------------+
"""


def of_rvs(text: str) -> list[tuple[str, str, str, str]]:
    return [(one.code, one.device, one.kind, one.weight) for one in rvs.read(text, origin="rvs.txt", now=NOW)]


def test_rvs_memory_and_results_weigh_and_speed_does_not(tmp_path: Path) -> None:
    expected = [
        ("rvs:speed", "gpu-id:20068", "loud", "none"),
        ("rvs:crc", "gpu-id:48932", "memory", "medium"),
        ("rvs:rcqt", "", "no-evidence", "none"),
        ("rvs:pebb", "", "link", "none"),
        ("rvs:gst", "", "loud", "none"),
        ("rvs:mem", "", "memory", "medium"),
        ("rvs:pass", "", "no-evidence", "none"),
        ("rvs:unknown", "", "no-evidence", "none"),
    ]
    assert of_rvs(TABLE) == expected
    file = tmp_path / "x"
    file.write_text(TABLE)
    assert [(one.code, one.device, one.kind, one.weight) for one in detect.read(file, now=NOW)] == expected


def test_rvs_knows_what_only_looks_like_corruption() -> None:
    said = "[RESULT] [3.1] [gst-3K-sgemm-check] [GPU:: 7] self-check error 2.0000000000\n"
    assert of_rvs(said)[0] == ("rvs:self", "gpu-id:7", "memory", "weak")
    assert of_rvs(said.replace("self", "accu"))[0] == ("rvs:accu", "gpu-id:7", "noise", "none")
    warned = "[RESULT] [3.0] [gst] [GPU:: 7] WARNING: crc_check with copy_matrix:false and beta != 0 on sgemm\n"
    mismatch = "[RESULT] [3.1] [gst] [GPU:: 7] crc-check error CRC-32 mismatch detected (SDC candidate)\n"
    assert of_rvs(warned + mismatch)[0] == ("rvs:crc", "gpu-id:7", "noise", "none")
    internal = "[RESULT] [3.1] [gst] [GPU:: 7] crc-check error internal error (unsupported type or copy failed)\n"
    assert [kind for _, _, kind, _ in of_rvs(internal)] == ["no-evidence"]


@pytest.mark.parametrize(
    "text", ["", "hello", "RVS-ERROR [CLI] No platform support for the detected GPU", "|" * 10_000]
)
def test_rvs_without_a_table_is_no_evidence(text: str) -> None:
    assert {kind for _, _, kind, _ in of_rvs(text)} == {"no-evidence"}


@given(st.text(max_size=300), st.integers(0, len(TABLE)))
def test_no_damage_of_rvs_crashes_the_reader(text: str, at: int) -> None:
    list(rvs.read(TABLE[:at] + text + TABLE[at:], origin="", now=NOW))
    list(rvs.read(text, origin="", now=NOW))


@pytest.mark.parametrize(
    ("head", "is_scan", "is_rvs"),
    [
        (b'{"schema": 1, "standing": "fail", "confidence": 0.95, "failed_nodes": ["n1"], "devices": [', True, False),
        (b'{"standing": "x", "devices": [{"calls_by_kind": {}}]}', True, False),
        (b'{"standing": "fail"}', False, False),
        (b'[{"source": "scan", "code": "x", "weight": "none", "standing": 1, "failed_nodes": 2}]', False, False),
        (TABLE.encode(), False, True),
        (b"RVS-ERROR [CLI] No platform support", False, True),
        (b"[RESULT] [1.2] something", False, False),
        (b"\xff\xfe", False, False),
    ],
)
def test_what_looks_like_them(head: bytes, is_scan: bool, is_rvs: bool) -> None:
    assert (scan.looks_like(head, "x"), rvs.looks_like(head, "x")) == (is_scan, is_rvs)
