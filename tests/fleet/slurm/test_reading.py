"""What Slurm prints and answers, of 22.05 and 24.11: recorded from real clusters, written out in a table, and damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clusters import slurm_json, slurm_text
from bitwitness.fleet.clusters.base import Census, JobState, NodeState, Service
from bitwitness.fleet.clusters.slurm_names import expand
from bitwitness.fleet.clusters.slurm_states import away, flags_of, moment, phase_of, service_of, split_reason

FIXTURES = Path(__file__).with_name("fixtures")
VERSIONS = ["22.05", "24.11"]
REASON = "bitwitness 20261129T093015Z-4be1d2: persistent corruption, device GPU-1 (a = 'b')"


def text_of(version: str, name: str) -> str:
    return (FIXTURES / version / f"{name}.txt").read_text()


def json_of(version: str, name: str) -> Any:
    return json.loads((FIXTURES / version / f"{name}.json").read_text())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_drained_node_says_why_and_by_whom(version: str) -> None:
    for state in (
        slurm_text.node_state(text_of(version, "node_drain"), "n2"),
        slurm_json.node_state(json_of(version, "node_drain"), "n2"),
    ):
        assert (state.service, state.raw, state.reason, state.reason_by) == ("out", "IDLE+DRAIN", REASON, "root")
        assert state.ours
        assert state.booted.startswith("2026-11-29T14:26:5")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "node", "raw", "service", "reason"),
    [
        ("node_idle", "n2", "IDLE", "in", ""),
        ("node_draining", "n1", "MIXED+DRAIN", "draining", "hand"),
        ("node_failing", "n3", "MIXED+FAIL", "draining", "Action:Replace"),
        ("node_fail", "n3", "IDLE+FAIL", "out", "Action:Replace"),
        ("node_reboot", "n1", "IDLE+DRAIN+REBOOT_REQUESTED", "out", "bitwitness x y"),
        ("node_rebooting", "n1", "DOWN+DRAIN+REBOOT_ISSUED", "out", "bitwitness x y : reboot issued"),
        ("node_undrain", "n2", "IDLE+NOT_RESPONDING", "in", ""),  # 24.11 still shows the reason of what was taken back
    ],
)
def test_recorded_nodes(version: str, name: str, node: str, raw: str, service: Service, reason: str) -> None:
    states = [slurm_text.node_state(text_of(version, name), node)]
    if (FIXTURES / version / f"{name}.json").exists():
        states.append(slurm_json.node_state(json_of(version, name), node))
    for state in states:
        assert (state.raw, state.service, state.reason) == (raw, service, reason)
        assert state.reason_by == ("root" if reason else "")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "phase", "raw", "code", "restarts"),
    [
        ("job_run", "running", "RUNNING", None, 0),
        ("job_failed", "ended", "FAILED (NonZeroExitCode)", 160, 0),
        ("job_held", "pending", "PENDING (job requeued in held state)", None, 1),
    ],
)
def test_recorded_jobs(version: str, name: str, phase: str, raw: str, code: int | None, restarts: int) -> None:
    for state in (
        slurm_text.job_state(text_of(version, name), "1"),
        slurm_json.job_state(json_of(version, name), "1"),
    ):
        assert (state.state, state.raw.replace("_", " "), state.exit_code) == (phase, raw.replace("_", " "), code)
        assert (state.restarts, state.excluded) == (restarts, ("n2",))
        assert state.nodes == (() if phase == "pending" else ("n1", "n3"))
        assert (state.requeueable, state.held) == (True, False)  # held by us, until its nodes are excluded


@pytest.mark.parametrize("version", VERSIONS)
def test_tasks_of_an_array_in_json(version: str) -> None:
    answer = json_of(version, "job_failed")
    number: Any = (lambda value: value) if version == "22.05" else (lambda value: {"set": True, "number": value})
    (one,) = answer["jobs"]
    tasks = [{**one, "array_job_id": number(7), "array_task_id": number(task)} for task in (0, 3)]
    waiting = {**tasks[0], "job_state": "PENDING", "array_task_string": "4-5", "state_reason": "JobHeldUser"}
    answer["jobs"] = [*tasks, {**waiting, "requeue": False}]
    assert slurm_json.job_state(answer, "7_3").exit_code == 160
    assert slurm_json.job_state(answer, "7_6") == JobState("7_6", "absent")
    held = slurm_json.job_state(answer, "7_5")
    assert (held.state, held.held, held.requeueable) == ("pending", True, False)
    with pytest.raises(ConfigurationError, match="job array"):
        slurm_json.job_state(answer, "7")
    answer["jobs"] = [{**one, "het_job_id": number(7)}]
    with pytest.raises(ConfigurationError, match="heterogeneous"):
        slurm_json.job_state(answer, "7")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_census_from_json(version: str) -> None:
    assert slurm_json.census(json_of(version, "nodes")).total == 3
    assert slurm_json.census(json_of(version, "nodes")).out >= 1


@pytest.mark.parametrize("version", VERSIONS)
def test_what_does_not_exist_is_an_error_and_no_state(version: str) -> None:
    for name in ("node_none", "job_none"):
        with pytest.raises(ClusterError):
            slurm_text.node_state(text_of(version, name), "n9")
        with pytest.raises(ClusterError):
            slurm_json.node_state(json_of(version, name), "n9")
        assert slurm_json.errors_of(json_of(version, name))


@pytest.mark.parametrize(
    ("words", "service", "out"),
    [
        ("IDLE", "in", False),
        ("idle", "in", False),
        ("ALLOCATED", "in", False),
        ("alloc", "in", False),
        ("MIXED", "in", False),
        ("mixed-", "in", False),
        ("IDLE+PLANNED", "in", False),
        (["IDLE", "PLANNED"], "in", False),
        ("RESERVED", "in", False),
        ("IDLE+COMPLETING", "in", False),
        ("idle~", "in", False),
        ("IDLE+CLOUD+POWERED_DOWN", "in", False),
        ("IDLE+DYNAMIC_NORM", "in", False),
        ("MAINT", "in", True),
        ("IDLE+MAINT", "in", True),
        ("idle$", "in", True),
        ("idle*", "in", True),
        ("IDLE+NOT_RESPONDING", "in", True),
        ("IDLE+DRAIN", "out", True),
        ("drained", "out", True),
        ("drained*", "out", True),
        ("IDLE+DRAIN+MAINT", "out", True),
        ("IDLE+COMPLETING+DRAIN", "draining", True),
        ("draining", "draining", True),
        ("drng", "draining", True),
        ("MIXED+DRAIN", "draining", True),
        (["ALLOCATED", "DRAIN", "COMPLETING"], "draining", True),
        ("FAIL", "out", True),
        ("failing", "draining", True),
        ("IDLE+FAIL", "out", True),
        ("DOWN", "out", True),
        ("DOWN*", "unknown", True),
        ("DOWN+NOT_RESPONDING", "unknown", True),
        ("DOWN*+FAIL", "out", True),
        ("down*+drain", "out", True),
        ("DOWN+DRAIN+NOT_RESPONDING", "out", True),
        ("DOWN+DRAIN+REBOOT_ISSUED", "out", True),
        ("ERROR", "out", True),
        ("reboot^", "unknown", True),
        ("IDLE@", "in", True),
        ("FUTURE", "absent", True),
        ("UNKNOWN", "unknown", True),
        ("unk*", "unknown", True),
        ("INVAL", "unknown", True),
        ("SOMETHING_NEW", "unknown", True),
        ("", "unknown", True),
        ([], "unknown", True),
    ],
)
def test_words_for_states(words: str | list[str], service: Service, out: bool) -> None:
    assert (service_of(flags_of(words)), away(flags_of(words))) == (service, out)


@pytest.mark.parametrize(
    ("words", "phase"),
    [
        (["PENDING"], "pending"),
        (["REQUEUE_HOLD"], "pending"),
        (["SPECIAL_EXIT"], "pending"),
        (["RUNNING"], "running"),
        (["FAILED", "COMPLETING"], "running"),
        (["COMPLETING"], "running"),
        (["SUSPENDED"], "running"),
        (["NODE_FAIL"], "ended"),
        (["OUT_OF_MEMORY"], "ended"),
        (["COMPLETED"], "ended"),
        (["NEWER"], None),
        ([], None),
    ],
)
def test_words_for_jobs(words: list[str], phase: str | None) -> None:
    assert phase_of(words) == phase


def test_a_reason_is_what_stands_before_its_stamp() -> None:
    assert split_reason("bad GPU [root@2026-11-29T09:30:15]") == ("bad GPU", "root")
    assert split_reason("see [1] = x [a.b-c@2026-11-29T09:30:15]") == ("see [1] = x", "a.b-c")
    assert split_reason("no stamp [here]") == ("no stamp [here]", "")
    assert split_reason("bitwitness x [root@now] [hand@2026-11-29T09:30:15]") == ("bitwitness x [root@now]", "hand")
    assert split_reason("") == ("", "")


def test_a_reason_cannot_pass_for_a_state() -> None:
    text = "NodeName=n1 Arch=x\n   State=IDLE+DRAIN\n   Reason=State=IDLE NodeName=n2 [root@2026-11-29T09:30:15]\n"
    assert slurm_text.node_state(text, "n1") == NodeState(
        "n1", "out", "IDLE+DRAIN", "State=IDLE NodeName=n2", reason_by="root"
    )


def test_times() -> None:
    assert moment("2026-11-29T14:26:54") == "2026-11-29T14:26:54.000Z"
    assert [moment(text) for text in ("None", "Unknown", "", "29 Nov")] == ["", "", "", ""]


def test_a_census_counts_a_node_once() -> None:
    text = "n1   idle   \nn1   idle   \nn2   idle+drain\nn3   down*\nn4   future\n\nn5 mixed+maint\n"
    assert slurm_text.census(text) == Census(total=4, out=3)
    for damaged in ("", "n1", "n1 idle what", "sinfo: error: no answer"):
        with pytest.raises(ClusterError):
            slurm_text.census(damaged)


def test_lists_of_nodes() -> None:
    assert expand("n[1-3,07],gpu-a") == ("n1", "n2", "n3", "n07", "gpu-a")
    assert expand("a[1-2]b[08-09]") == ("a1b08", "a1b09", "a2b08", "a2b09")
    assert expand("(null)") == expand("") == ()
    for damaged in ("n[1-", "n[2-1]", "n]", ",", "n[a-b]", "n[1-999999999]", "n[1-99999]x[1-99999]", "[1]" * 5000):
        with pytest.raises(ClusterError):
            expand(damaged)


def test_exit_codes() -> None:
    job = text_of("22.05", "job_failed")
    assert slurm_text.job_state(job.replace("ExitCode=160:0", "ExitCode=0:9"), "1").exit_code == 137
    assert slurm_text.job_state(job.replace("ExitCode=160:0", "ExitCode=what"), "1").exit_code is None
    record = json_of("22.05", "job_failed")
    record["jobs"][0]["exit_code"] = 9
    assert slurm_json.job_state(record, "1").exit_code == 137


READ = {
    "node": (slurm_text.node_state, slurm_json.node_state),
    "job": (slurm_text.job_state, slurm_json.job_state),
}


@pytest.mark.parametrize("word", ["DRAIN0", "DRAI", "FAILX", "DOWNER"])
def test_a_word_that_begins_like_one_that_takes_a_node_out_is_not_passed_over(word: str) -> None:
    expected = "in" if word == "DRAI" else "unknown"
    assert service_of(flags_of(f"IDLE+{word}")) == expected
    assert service_of(flags_of(["IDLE", word, "DRAIN"])) == "out"


@given(st.data())
def test_damaged_text_is_an_error_or_no_better_than_it_was(data: st.DataObject) -> None:
    version, kind = data.draw(st.sampled_from(VERSIONS)), data.draw(st.sampled_from(["node", "job"]))
    text = text_of(version, "node_drain" if kind == "node" else "job_failed")
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    damaged = text[:start] + data.draw(st.text(max_size=6)) + text[end:]
    _no_better(kind, READ[kind][0], damaged)


@given(st.data())
def test_damaged_json_is_an_error_or_no_better_than_it_was(data: st.DataObject) -> None:
    version, kind = data.draw(st.sampled_from(VERSIONS)), data.draw(st.sampled_from(["node", "job"]))
    answer = json_of(version, "node_drain" if kind == "node" else "job_failed")
    record = answer[f"{kind}s"][0]
    key = data.draw(st.sampled_from(sorted(record)))
    junk = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    )
    record[key] = data.draw(junk)
    _no_better(kind, READ[kind][1], answer)
    for broken in (data.draw(junk), {f"{kind}s": data.draw(junk)}):
        with pytest.raises(ClusterError):
            READ[kind][1](broken, "n2")


def _no_better(kind: str, read: Any, damaged: Any) -> None:
    try:
        state = read(damaged, "n2" if kind == "node" else "1")
    except (ClusterError, ConfigurationError):  # the latter: it looks like an array
        return
    if kind == "node":
        assert isinstance(state, NodeState)
        text = damaged if isinstance(damaged, str) else json.dumps(damaged)
        assert state.service != "in" or "DRAIN" not in text
    else:
        assert isinstance(state, JobState)
