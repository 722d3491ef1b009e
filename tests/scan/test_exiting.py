"""How a scan ends for whoever started it: only a failure looks like one, and a machine can read every first line."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwitness.errors import ConfigurationError
from bitwitness.scan import exiting
from bitwitness.scan.results import DeviceResult, Judgement, LinkResult, Standing, Voice

FAILURES = {"plain": 1, "slurm": 1, "kubernetes": 160, "nagios": 2, "npd": 1}


def device(rank: int, standing: Standing = "pass", reason: str = "1000 answers right") -> DeviceResult:
    wrong = 5 if standing == "fail" else 0
    limit = 3e-3 if standing == "pass" else None
    return DeviceResult(rank, f"n{rank}", f"GPU-{rank}", "H200", standing, reason, 1000, wrong, limit)


def link(standing: Standing) -> LinkResult:
    return LinkResult((0, 1), ("n0", "n1"), ("GPU-0", "GPU-1"), standing, "3 of 90 arrived otherwise", 90, 3)


PASS = Judgement((device(0), device(1)))
FAIL = Judgement((device(0), device(1, "fail", "5 of 1000 answers were wrong")))
NOT_JUDGED = Judgement((device(0), device(1, "not judged", "2 devices of its kind: three must be compared")))
LINK = Judgement((device(0), device(1)), (link("fail"),))
VOICE = Judgement((device(0),), voices=(Voice("dcgm-diag", "n0", "gpu:3", "fail", "memory", "strong"),))
EMPTY = Judgement(())


@pytest.mark.parametrize("style", exiting.STYLES)
def test_only_a_failure_looks_like_one(style: str) -> None:
    assert exiting.code(PASS, style) == 0
    assert {exiting.code(one, style) for one in (FAIL, LINK, VOICE)} == {FAILURES[style]}
    for one in (NOT_JUDGED, EMPTY, Judgement((device(0),), (link("not judged"),))):
        assert exiting.code(one, style) not in (0, FAILURES[style])
    assert exiting.unusable(style) not in (0, FAILURES[style])


def test_the_codes_that_others_have_fixed() -> None:
    codes = {style: [exiting.code(one, style) for one in (PASS, FAIL, NOT_JUDGED)] for style in exiting.STYLES}
    assert codes == {
        "plain": [0, 1, 3], "slurm": [0, 1, 3], "kubernetes": [0, 160, 3], "nagios": [0, 2, 3], "npd": [0, 1, 2],
    }  # fmt: skip
    assert {style: exiting.unusable(style) for style in exiting.STYLES} == {
        "plain": 2, "slurm": 2, "kubernetes": 2, "nagios": 3, "npd": 2,
    }  # fmt: skip


@pytest.mark.parametrize("style", exiting.STYLES)
@pytest.mark.parametrize("judgement", [PASS, FAIL, NOT_JUDGED, LINK, VOICE])
def test_a_drill_never_looks_like_a_failure(judgement: Judgement, style: str) -> None:
    assert exiting.code(judgement, style, drill="found") == 0
    assert exiting.code(judgement, style, drill="missed") == exiting.code(NOT_JUDGED, style)
    for drill in ("found", "missed"):
        said = exiting.line(judgement, style, drill=drill)
        assert f"drill {drill}" in said
        assert not said.startswith(("fail", "BITWITNESS CRITICAL", "bitwitness scan fail"))
        assert "failed=1;;0" not in said


def test_a_drill_is_found_where_all_of_it_failed_and_nothing_else() -> None:
    assert exiting.drilled(FAIL, ranks=(1,)) == "found"
    assert exiting.drilled(FAIL, ranks=(0,)) == exiting.drilled(PASS, ranks=(1,)) == "missed"
    assert exiting.drilled(Judgement((device(0, "fail"), device(1, "fail"))), ranks=(1,)) == "missed"
    assert exiting.drilled(LINK, link=(1, 0)) == "found"
    assert exiting.drilled(LINK, link=(0, 2)) == exiting.drilled(LINK, ranks=(1,)) == "missed"


def test_lines_say_who_and_why() -> None:
    assert exiting.line(FAIL, "plain") == "fail: 1 of 2 devices failed: n1 GPU-1: 5 of 1000 answers were wrong"
    assert exiting.line(FAIL, "slurm").startswith("bitwitness scan fail: 1 of 2 devices failed: n1 GPU-1: 5 of 1000")
    assert exiting.line(PASS, "plain") == (
        "pass: 2 devices, 2000 answers right, error rate of each below 0.003 per call (95%)"
    )
    assert exiting.line(LINK, "npd") == "fail: 1 links failed: n0 GPU-0 to n1 GPU-1: 3 of 90 arrived otherwise"
    assert exiting.line(VOICE, "kubernetes") == "bitwitness scan fail: dcgm-diag failed n0 gpu:3: memory"
    assert exiting.line(NOT_JUDGED, "plain").startswith("not judged: 1 of 2 devices not judged: n1 GPU-1: 2 devices")
    assert exiting.line(EMPTY, "plain") == "not judged: no device was scanned"


def test_nagios_gets_performance_data() -> None:
    assert exiting.line(FAIL, "nagios") == (
        "BITWITNESS CRITICAL - 1 of 2 devices failed: n1 GPU-1: 5 of 1000 answers were wrong | devices=2;;;0 passed=1;;;0;2 "
        "failed=1;;0;0;2 not_judged=0;0;;0;2 calls=2000;;;0 wrong=5;;;0 bound=0.003000000000;;;0;1"
    )


TEXT = st.text(max_size=200)
DEVICES = st.builds(
    DeviceResult, st.integers(0, 9), TEXT, TEXT, TEXT, st.sampled_from(["pass", "fail", "not judged"]), TEXT,
    st.integers(0, 10**12), st.integers(0, 10**6), st.none() | st.floats(0, 1),
)  # fmt: skip
PERFORMANCE = re.compile(r"\w+=-?[0-9.]+[a-zA-Z%]*(?:;[0-9.:@~-]*){0,4}")


@given(st.lists(DEVICES, max_size=4), st.sampled_from(exiting.STYLES), st.sampled_from([None, "found", "missed"]))
def test_every_line_can_be_read_by_a_machine(
    devices: list[DeviceResult], style: str, drill: exiting.Drill | None
) -> None:
    judgement = Judgement(tuple(devices))
    said = exiting.line(judgement, style, drill=drill)
    assert re.fullmatch(r"[\x20-\x7e]+", said)
    assert len(said.encode()) <= (80 if style == "npd" else 1000)
    if style == "nagios":
        words, data = said.split("|")
        assert all(PERFORMANCE.fullmatch(part) for part in data.split()), data
        expected = {0: "OK", 2: "CRITICAL", 3: "UNKNOWN"}[exiting.code(judgement, style, drill=drill)]
        assert words.startswith(f"BITWITNESS {expected} - ")


def test_another_style_is_refused() -> None:
    for act, style in itertools.product((exiting.code, exiting.line), ("", "Nagios", "icinga")):
        with pytest.raises(ConfigurationError, match="choose plain, nagios, npd, kubernetes, slurm"):
            act(PASS, style)
    with pytest.raises(ConfigurationError):
        exiting.unusable("icinga")
