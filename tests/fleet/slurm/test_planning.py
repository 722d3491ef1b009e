"""Which exact commands an act takes, whether it has landed, and that nothing of an incident gets into a command unchecked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clusters import slurm_command
from bitwitness.fleet.clusters.base import Act, ActKind, Call, JobState, Landed, NodeState
from bitwitness.fleet.clusters.slurm import SlurmCluster, from_settings
from bitwitness.fleet.clusters.slurm_command import Answer
from bitwitness.fleet.clusters.slurm_names import job_id, node_name
from bitwitness.fleet.clusters.slurm_rest import SlurmRest

FIXTURES = Path(__file__).with_name("fixtures")
INCIDENT = "20261129T093015Z-4be1d2"
BEFORE, AFTER = "2026-11-29T09:00:00.000Z", "2026-11-29T10:00:00.000Z"
IDLE = NodeState("n2", "in", "IDLE", booted=BEFORE)
OURS = NodeState("n2", "out", "IDLE+DRAIN", f"bitwitness {INCIDENT}: wrong numbers", "root", BEFORE)
THEIRS = replace(OURS, reason="bad fan", reason_by="anna")


class Recorded:
    """A runner that answers by the beginning of a command, and keeps what it was asked."""

    def __init__(self, **answers: Answer) -> None:
        self.answers, self.asked = answers, list[tuple[str, ...]]()

    def __call__(self, words: Sequence[str], timeout: float) -> Answer:
        self.asked.append(tuple(words))
        return self.answers.get("_".join(words[:3]).replace("-", ""), self.answers.get(words[0], Answer(0, "")))


def act(kind: ActKind, node: str = "n2", reason: str = "wrong numbers") -> Act:
    return Act(kind, node, INCIDENT, reason)


def words(
    kind: ActKind, state: NodeState = IDLE, *, hyperpod: bool = False, reason: str = "wrong numbers"
) -> list[str]:
    calls = SlurmCluster(Recorded(), hyperpod=hyperpod).plan(act(kind, reason=reason), state)
    assert len(calls) <= 1
    return list(calls[0].words) if calls else []


def test_the_exact_commands() -> None:
    tagged = f"bitwitness {INCIDENT}: wrong numbers"
    assert words("drain") == ["scontrol", "update", "NodeName=n2", "State=DRAIN", f"Reason={tagged}"]
    assert words("clear", OURS) == ["scontrol", "update", "NodeName=n2", "State=UNDRAIN"]
    assert words("reboot") == ["scontrol", "reboot", "ASAP", "nextstate=DOWN", f"reason={tagged}", "n2"]


@pytest.mark.parametrize(("kind", "exact"), [("replace", "Action:Replace"), ("reboot", "Action:Reboot")])
def test_hyperpod_is_told_its_words_and_nothing_else(kind: ActKind, exact: str) -> None:
    asked = words(kind, hyperpod=True, reason="a reason that must not be appended")
    assert asked == ["scontrol", "update", "node=n2", "state=fail", f"reason={exact}"]
    failed = NodeState("n2", "out", "IDLE+FAIL", exact, "root", BEFORE)
    assert words(kind, failed, hyperpod=True) == []
    assert words("clear", failed, hyperpod=True)[-1] == "State=UNDRAIN"


def test_slurm_by_itself_replaces_nothing() -> None:
    assert SlurmCluster(Recorded()).acts == {"drain", "clear", "reboot"}
    assert SlurmCluster(Recorded(), hyperpod=True).acts == {"drain", "clear", "reboot", "replace"}
    with pytest.raises(ConfigurationError, match="HyperPod"):
        words("replace")


def test_what_has_landed_needs_no_call() -> None:
    assert words("drain", OURS) == []
    assert words("drain", THEIRS) == []  # it would take the reason of whoever was first
    assert words("clear", IDLE) == []
    rebooting = replace(OURS, raw="IDLE+DRAIN+REBOOT_REQUESTED")
    assert words("reboot", rebooting) == []


def test_a_node_that_is_down_is_drained_on_top() -> None:
    assert words("drain", NodeState("n2", "unknown", "DOWN*"))[3] == "State=DRAIN"
    assert words("drain", NodeState("n2", "in", "IDLE+MAINT"))[3] == "State=DRAIN"


def test_only_what_is_ours_is_cleared() -> None:
    with pytest.raises(ConfigurationError, match=r"anna.*bad fan"):
        words("clear", THEIRS)
    with pytest.raises(ConfigurationError, match="anna"):
        words("clear", replace(THEIRS, reason="Action:Replace"))  # this is no HyperPod
    with pytest.raises(ConfigurationError, match="anna"):
        words("clear", replace(THEIRS, reason="bitwitness-like"))


def test_a_node_that_is_not_there_is_not_acted_upon() -> None:
    with pytest.raises(ConfigurationError, match="no node n2"):
        words("drain", NodeState("n2", "absent"))
    with pytest.raises(ConfigurationError, match="given for an act"):
        SlurmCluster(Recorded()).plan(act("drain", "n3"), IDLE)


@pytest.mark.parametrize(
    ("kind", "before", "now", "landed"),
    [
        ("drain", IDLE, OURS, "yes"),
        ("drain", IDLE, replace(OURS, raw="MIXED+DRAIN", service="draining"), "yes"),
        ("drain", IDLE, IDLE, "no"),
        ("drain", IDLE, NodeState("n2", "unknown", "DOWN*"), "no"),
        ("drain", IDLE, NodeState("n2", "absent"), "unknown"),
        ("drain", IDLE, NodeState("n2", "unknown", "UNKNOWN"), "unknown"),
        ("clear", OURS, IDLE, "yes"),
        ("clear", OURS, OURS, "no"),
        ("clear", OURS, THEIRS, "unknown"),
        ("clear", OURS, NodeState("n2", "unknown", "DOWN*"), "yes"),
        ("reboot", IDLE, replace(IDLE, booted=AFTER), "yes"),
        ("reboot", IDLE, replace(OURS, raw="DOWN+DRAIN+REBOOT_ISSUED", reason=OURS.reason + " : reboot issued"), "yes"),
        ("reboot", IDLE, replace(THEIRS, raw="IDLE+DRAIN+REBOOT_REQUESTED"), "unknown"),
        ("reboot", IDLE, IDLE, "no"),
        ("reboot", IDLE, replace(IDLE, booted="2026-11-29T09:00:01.000Z"), "no"),  # computed anew, the same boot
        ("reboot", IDLE, replace(IDLE, booted=""), "unknown"),
        ("reboot", replace(IDLE, booted=""), IDLE, "unknown"),
        ("reboot", OURS, IDLE, "unknown"),
    ],
)
def test_whether_it_has_landed(kind: ActKind, before: NodeState, now: NodeState, landed: Landed) -> None:
    assert SlurmCluster(Recorded()).landed(act(kind), before, now) == landed


FAILED = NodeState("n2", "out", "IDLE+FAIL", "Action:Replace", "root", BEFORE)


@pytest.mark.parametrize(
    ("kind", "now", "landed"),
    [
        ("replace", FAILED, "yes"),
        ("reboot", FAILED, "unknown"),
        ("reboot", replace(FAILED, reason="Action:Reboot"), "yes"),
        ("replace", replace(FAILED, reason="action:replace"), "unknown"),
        ("replace", replace(IDLE, instance="i-1"), "no"),
        ("replace", replace(IDLE, instance="i-2", booted=AFTER), "yes"),
        ("replace", replace(IDLE, instance="i-1", booted=AFTER), "unknown"),
    ],
)
def test_whether_hyperpod_has_begun(kind: ActKind, now: NodeState, landed: Landed) -> None:
    cluster = SlurmCluster(Recorded(), hyperpod=True)
    assert cluster.landed(act(kind), replace(IDLE, instance="i-1"), now) == landed


ENDED = JobState("7", "ended", "FAILED (NonZeroExitCode)", 160)


def requeue(job: JobState, *exclude: str) -> list[str]:
    return [str(call) for call in SlurmCluster(Recorded()).plan_requeue(job, exclude)]


def test_a_job_is_held_while_its_nodes_are_excluded() -> None:
    assert requeue(ENDED, "n2", "n4") == [
        "scontrol requeuehold 7",
        "scontrol update JobId=7 ExcNodeList=n2,n4",
        "scontrol release 7",
    ]
    assert requeue(replace(ENDED, excluded=("n1",)), "n2")[1] == "scontrol update JobId=7 ExcNodeList=n1,n2"


def test_a_requeue_that_was_cut_short_is_carried_on_with() -> None:
    held = JobState("7", "pending", "PENDING (job_requeued_in_held_state)")
    assert requeue(held, "n2") == ["scontrol update JobId=7 ExcNodeList=n2", "scontrol release 7"]
    assert requeue(replace(held, excluded=("n2",)), "n2") == ["scontrol release 7"]
    waits = JobState("7", "pending", "PENDING (Resources)", excluded=("n2",))
    assert requeue(waits, "n2") == []
    by_a_person = JobState("7", "pending", "PENDING (JobHeldUser)", excluded=("n2",))
    assert requeue(by_a_person, "n2") == []


def test_a_job_that_runs_or_is_forgotten_is_not_requeued() -> None:
    for job in (JobState("7", "running", "RUNNING"), JobState("7", "absent")):
        with pytest.raises(ConfigurationError):
            requeue(job, "n2")


@pytest.mark.parametrize(
    "name", ["ALL", "all", "localhost", "LOCALHOST", "default", "n[1-5]", "n1,n2", "-n", "", "a b", "n1;x", "n1\n"]
)
def test_no_word_that_means_more_than_one_node(name: str) -> None:
    with pytest.raises(ConfigurationError):
        node_name(name)
    with pytest.raises(ConfigurationError):
        SlurmCluster(Recorded()).plan(act("drain", name), replace(IDLE, node=name))
    with pytest.raises(ConfigurationError):
        SlurmCluster(Recorded()).look(name)
    with pytest.raises(ConfigurationError):
        requeue(ENDED, name)


@given(st.text())
def test_what_is_no_name_reaches_no_command(name: str) -> None:
    runner = Recorded()
    try:
        SlurmCluster(runner).plan(act("drain", name), replace(IDLE, node=name))
        SlurmCluster(runner).look(name)
    except (ConfigurationError, ClusterError):
        pass
    for asked in runner.asked:
        assert all(word.isascii() and word.isprintable() and " " not in word for word in asked)


@given(st.text())
def test_a_reason_stays_one_word_of_one_line(reason: str) -> None:
    for kind in ("drain", "reboot"):
        asked = words(kind, reason=reason)
        assert len(asked) == (5 if kind == "drain" else 6)
        assert all("\n" not in word and "\r" not in word and "\0" not in word for word in asked)
        assert f"bitwitness {INCIDENT}" in asked[4]


def test_ids_of_jobs() -> None:
    assert [job_id(job) for job in ("slurm:1234", "1234", "slurm:12_3")] == ["1234", "1234", "12_3"]
    for wrong in ("", "slurm:", "k8s:1", "1 2", "-1", "0", "all", "1;2", "1\n"):
        with pytest.raises(ConfigurationError):
            job_id(wrong)
    with pytest.raises(ConfigurationError, match="heterogeneous"):
        job_id("12+0")


ARRAY = """\
JobId=3 ArrayJobId=7 ArrayTaskId=1 JobName=a JobState=PENDING
   JobState=FAILED Reason=NonZeroExitCode Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=160:0
   NodeList=n[1,3]

JobId=7 ArrayJobId=7 ArrayTaskId=3 JobName=a
   JobState=COMPLETED Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   NodeList=n2

JobId=8 ArrayJobId=7 ArrayTaskId=4-8:2,11%2 JobName=a
   JobState=PENDING Reason=JobHeldUser Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   NodeList=
"""


def shown(job: str, text: str) -> JobState:
    return SlurmCluster(Recorded(scontrol=Answer(0, text))).job(job)


def test_a_task_of_an_array_is_asked_about_and_started_again_by_its_own_number() -> None:
    runner = Recorded(scontrol=Answer(0, ARRAY))
    task = SlurmCluster(runner).job("slurm:7_1")
    assert runner.asked == [("scontrol", "--all", "show", "job", "7_1")]
    assert task == JobState("7_1", "ended", "FAILED (NonZeroExitCode)", 160, 2, (), ("n1", "n3"))
    assert requeue(task, "n2") == [
        "scontrol requeuehold 7_1",
        "scontrol update JobId=7_1 ExcNodeList=n2",
        "scontrol release 7_1",
    ]
    assert [(shown(f"7_{place}", ARRAY).state, shown(f"7_{place}", ARRAY).held) for place in (3, 4, 8, 11)] == [
        ("ended", False),
        ("pending", True),
        ("pending", True),
        ("pending", True),
    ]
    for gone in ("7_5", "7_9", "8_1"):
        with pytest.raises(ClusterError, match="not understood"):
            shown(gone, ARRAY)
    no_such = Recorded(scontrol=Answer(1, "Job 7_9 not found\n"))
    assert SlurmCluster(no_such).job("7_9") == JobState("7_9", "absent")


def test_a_number_that_stands_for_a_whole_array_is_refused() -> None:
    last = ARRAY.split("\n\n")[1]  # once the others are forgotten
    for text in (ARRAY, last):
        with pytest.raises(ConfigurationError, match=r"job array.*requeue 7_TASK"):
            shown("7", text)
    first = ARRAY.split("\n\n", maxsplit=1)[0]
    assert shown("3", first).state == "ended"  # its own id, which no other task has


def test_a_heterogeneous_job_is_refused() -> None:
    text = ARRAY.replace("ArrayJobId=7 ArrayTaskId=", "HetJobId=3 HetJobOffset=")
    for job in ("3", "7", "7_1"):
        with pytest.raises(ConfigurationError, match="heterogeneous"):
            shown(job, text)
    with pytest.raises(ConfigurationError, match="heterogeneous"):
        requeue(replace(ENDED, job="7+0"), "n2")


def test_a_job_that_slurm_starts_no_second_time_is_refused() -> None:
    text = ARRAY.split("\n\n", maxsplit=1)[0].replace("Requeue=1", "Requeue=0")
    with pytest.raises(ConfigurationError, match="--requeue"):
        SlurmCluster(Recorded()).plan_requeue(shown("7_1", text), ["n2"])


def test_what_is_missing_on_this_machine_is_no_job_that_is_gone() -> None:
    broken = SlurmCluster(Recorded(scontrol=Answer(127, "", "scontrol: libslurm.so: cannot open: not found\n")))
    for ask in (lambda: broken.job("7"), lambda: broken.look("n2")):
        with pytest.raises(ClusterError, match="ended with 127"):
            ask()


def test_looking_at_a_busy_node_lists_its_jobs() -> None:
    text = (FIXTURES / "24.11" / "node_draining.txt").read_text()
    runner = Recorded(scontrol=Answer(0, text), squeue=Answer(0, "12 RUNNING\n12 RUNNING\n13 COMPLETING\n9 PENDING\n"))
    assert SlurmCluster(runner).look("n1").jobs == ("12", "13")
    assert [asked[0] for asked in runner.asked] == ["scontrol", "squeue"]


def test_what_is_not_there_is_absent() -> None:
    nothing = Recorded(scontrol=Answer(1, "Node n9 not found\n"))
    assert SlurmCluster(nothing).look("n9") == NodeState("n9", "absent")
    nothing = Recorded(scontrol=Answer(1, "", "slurm_load_jobs error: Invalid job id specified\n"))
    assert SlurmCluster(nothing).job("slurm:99") == JobState("99", "absent")


def test_what_scontrol_says_against_it_is_an_error() -> None:
    refused = SlurmCluster(Recorded(scontrol=Answer(1, "", "slurm_update error: Access/permission denied\n")))
    with pytest.raises(ClusterError, match=r"ended with 1: .*permission denied"):
        refused.carry_out(Call(("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=x")))
    with pytest.raises(ClusterError, match="permission denied"):
        refused.look("n2")
    with pytest.raises(ClusterError, match="not understood"):
        SlurmCluster(Recorded()).look("n2")
    with pytest.raises(ConfigurationError, match="not a command"):
        refused.carry_out(Call(("rm", "-rf", "/")))


def test_a_command_that_hangs_or_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="not installed"):
        slurm_command.run([str(tmp_path / "scontrol")], 5)
    with pytest.raises(ClusterError, match=r"within 0\.05 s"):
        slurm_command.run(["sleep", "60"], 0.05)
    with pytest.raises(ClusterError, match="could not be run"):
        slurm_command.run([str(tmp_path)], 5)


def test_commands_run_in_a_fixed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CLUSTERS", "SQUEUE_FORMAT", "TZ", "SLURM_TIME_FORMAT"):
        monkeypatch.setenv(name, "other")
    said = slurm_command.run(["env"], 10).out.splitlines()
    assert {"TZ=UTC", "LC_ALL=C", "SLURM_TIME_FORMAT=standard"} <= set(said)
    assert not any(line.startswith(("SLURM_CLUSTERS", "SQUEUE")) for line in said)


def test_settings(tmp_path: Path) -> None:
    assert isinstance(from_settings({"kind": "slurm"}), SlurmCluster)
    hyperpod = from_settings({"kind": "slurm", "hyperpod": True, "timeout": 5})
    assert "replace" in hyperpod.acts
    token = tmp_path / "token"
    rest = {"kind": "slurm", "rest": "unix:/run/rest.sock", "user": "root", "token_file": str(token)}
    assert isinstance(from_settings(rest), SlurmRest)
    for wrong in (
        {"hyperpods": True},
        {"hyperpod": "yes"},
        {"timeout": 0},
        {"timeout": True},
        {"timeout": "5"},
        {"rest": 5},
        {"token_file": "/x"},
        {"rest": "ftp://x"},
        {"rest": "unix:/x", "version": "42"},
        {"rest": "http://user:secret@host:1"},
        {"rest": "unix:/x", "user": "a\nb"},
    ):
        with pytest.raises(ConfigurationError):
            from_settings({"kind": "slurm"} | wrong)
