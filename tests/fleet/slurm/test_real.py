"""The adapter against a real Slurm 22.05: what it asks for happens, and is seen to have happened."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bitwitness.cli.advice import next_steps
from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clusters import slurm_command
from bitwitness.fleet.clusters.base import Act, ActKind, Call, Census, Cluster, NodeState
from bitwitness.fleet.clusters.slurm import SlurmCluster
from bitwitness.fleet.clusters.slurm_command import Answer
from bitwitness.fleet.clusters.slurm_rest import SlurmRest
from tests.fleet.incidents import incident, topology, verdict
from tests.fleet.slurm.real import Slurm, left_of, me, need, slurm, until

SCRIPTS = Path(__file__).resolve().parent.parent.parent.parent / "deploy" / "slurm"
INCIDENT = "20261129T093015Z-4be1d2"

# Programs that stand for bitwitness in prolog and epilog: on n3 a device has come back, elsewhere all is well.
ADMIT = """\
#!/bin/sh
case "$*" in
*signals*) echo '[]' ;;
*'--node n3 '*) echo '{"node": "n3", "admitted": false, "returned": ["GPU-bad was taken out on n1"]}'; exit 1 ;;
*) echo '{"admitted": true, "returned": []}' ;;
esac
"""


@pytest.fixture(scope="module")
def here() -> Iterator[Slurm]:
    need("slurmrestd")
    with slurm(3, prepare=_scripts) as cluster:
        yield cluster


def _scripts(folder: Path) -> str:
    """Prolog and epilog as a site would set them up."""
    (folder / "bitwitness").write_text(ADMIT)
    (folder / "bitwitness").chmod(0o755)
    (folder / "condemned.json").write_text("{}")
    settings = {
        "BITWITNESS": folder / "bitwitness",
        "BITWITNESS_CONDEMNED": folder / "condemned.json",
        "BITWITNESS_SIGNALS_DIR": folder / "signals",
        "SLURM_CONF": folder / "slurm.conf",
    }
    (folder / "slurm.env").write_text("".join(f"export {name}={value}\n" for name, value in settings.items()))
    for name in ("prolog", "epilog"):
        text = f"#!/bin/sh\nexport BITWITNESS_SETTINGS={folder}/slurm.env\nexec {SCRIPTS}/{name}.sh\n"
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"Prolog={folder}/prolog\nEpilog={folder}/epilog\nPrologFlags=Alloc"


@pytest.fixture
def cluster(here: Slurm) -> SlurmCluster:
    return SlurmCluster(_runner(here))


def _runner(here: Slurm) -> slurm_command.Runner:
    def run(words: Sequence[str], timeout: float) -> Answer:
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("SLURM")]:
                patch.delenv(name)
            for name in ("SLURM_CONF", "PATH"):
                patch.setenv(name, here.env[name])
            return slurm_command.run(words, timeout)

    return run


def act(kind: ActKind, node: str, reason: str = "wrong numbers on GPU-1 (rank = 3)") -> Act:
    return Act(kind, node, INCIDENT, reason)


def carry_out(cluster: Cluster, asked: Act) -> tuple[NodeState, NodeState]:
    """Do it; how the node was before and is now."""
    before = cluster.look(asked.node)
    for call in cluster.plan(asked, before):
        cluster.carry_out(call)
    now = cluster.look(asked.node)
    assert cluster.landed(asked, before, now) == "yes"
    return before, now


def test_a_node_is_drained_and_brought_back(here: Slurm, cluster: SlurmCluster) -> None:
    assert cluster.census() == Census(3, 0)
    before, drained = carry_out(cluster, act("drain", "n2"))
    assert (before.service, before.raw) == ("in", "IDLE")
    assert (drained.service, drained.raw, drained.reason_by) == ("out", "IDLE+DRAIN", me())
    assert drained.reason == f"bitwitness {INCIDENT}: wrong numbers on GPU-1 (rank = 3)"
    assert drained.ours
    assert cluster.census() == Census(3, 1)
    assert cluster.plan(act("drain", "n2"), drained) == ()
    _, back = carry_out(cluster, act("clear", "n2"))
    assert (back.service, back.ours) == ("in", False)
    assert cluster.plan(act("clear", "n2"), back) == ()
    until(lambda: set(here.states().values()) == {"idle"}, "n2 is idle again")


def test_a_reason_is_kept_word_for_word(here: Slurm, cluster: SlurmCluster) -> None:
    reason = 'it\'s "quoted"; $(rm -rf x) `x` \\ State=IDLE [root@2026-11-29T09:30:15] ' + "x" * 200
    _, drained = carry_out(cluster, act("drain", "n1", reason))
    assert drained.reason == f"bitwitness {INCIDENT}: {reason.strip()}"
    carry_out(cluster, act("clear", "n1"))
    until(lambda: here.states()["n1"] == "idle", "n1 is idle again")


def test_what_is_not_there(cluster: SlurmCluster) -> None:
    assert cluster.look("n9") == NodeState("n9", "absent")
    assert cluster.job("slurm:4242").state == "absent"
    with pytest.raises(ClusterError, match="Invalid node name"):
        cluster.carry_out(Call(("scontrol", "update", "NodeName=n9", "State=DRAIN", "Reason=x")))
    with pytest.raises(ClusterError, match="Invalid job id"):
        cluster.carry_out(Call(("scontrol", "requeuehold", "4242")))


def test_hyperpods_words(here: Slurm) -> None:
    cluster = SlurmCluster(_runner(here), hyperpod=True)
    for kind, exact in (("replace", "Action:Replace"), ("reboot", "Action:Reboot")):
        _, failed = carry_out(cluster, act(kind, "n2"))  # type: ignore[arg-type]
        assert (failed.raw, failed.reason) == ("IDLE+FAIL", exact)
    carry_out(cluster, act("clear", "n2"))
    until(lambda: here.states()["n2"] == "idle", "n2 is idle again")


def test_the_command_that_incident_show_advises(here: Slurm, cluster: SlurmCluster) -> None:
    found = incident(found=verdict(topology(), (2,)))
    (line,) = [line for step in next_steps(found) for line in step.commands if line.startswith("scontrol")]
    here.run(*shlex.split(line))
    drained = cluster.look("n1")
    assert (drained.service, drained.reason) == ("out", f"bitwitness {found.path.name}")
    assert drained.ours  # so that `fleet clear` can take it back
    carry_out(cluster, act("clear", "n1"))


def test_a_busy_node_drains_and_its_job_starts_again_elsewhere(here: Slurm, cluster: SlurmCluster) -> None:
    gate = here.folder / "gate"
    script = f"#!/bin/sh\nwhile [ ! -e {gate} ]; do sleep 0.1; done\n[ $SLURM_RESTART_COUNT ] && exit 0\nexit 160\n"
    job = here.submit(script, "--nodes=1", "--nodelist=n2", "--requeue")
    until(lambda: cluster.job(job).state == "running", "the job runs")
    _, draining = carry_out(cluster, act("drain", "n2"))
    assert (draining.service, draining.raw, draining.jobs) == ("draining", "MIXED+DRAIN", (job,))
    gate.touch()
    until(lambda: cluster.job(job).state == "ended", "the job ends")
    ended = cluster.job(f"slurm:{job}")
    assert (ended.exit_code, ended.restarts, ended.excluded) == (160, 0, ())
    hold, *rest = cluster.plan_requeue(ended, ["n3"])
    cluster.carry_out(hold)  # killed right here, the next controller goes on from what Slurm shows
    held = cluster.job(job)
    assert (held.state, held.restarts) == ("pending", 1)
    assert cluster.plan_requeue(held, ["n3"]) == tuple(rest)
    for call in rest:
        cluster.carry_out(call)
    waits = cluster.job(job)
    assert (waits.state, waits.excluded) == ("pending", ("n3",))
    assert cluster.plan_requeue(waits, ["n3"]) == ()
    assert cluster.look("n2").service == "out"
    here.run("scancel", job)  # that a requeued job runs elsewhere is seen in the rehearsal
    carry_out(cluster, act("clear", "n2"))


def test_one_task_of_an_array_starts_again_and_no_other(here: Slurm, cluster: SlurmCluster) -> None:
    gate = here.folder / "array-gate"
    script = f"#!/bin/sh\n[ $SLURM_ARRAY_TASK_ID = 2 ] && while [ ! -e {gate} ]; do sleep 0.1; done\n"
    array = here.submit(f"{script}[ $SLURM_ARRAY_TASK_ID = 1 ] && exit 160\nexit 0\n", "--array=0-3", "--exclude=n3")
    task = f"slurm:{array}_1"
    until(lambda: cluster.job(task).state == "ended", "the task ends")
    until(lambda: cluster.job(f"{array}_3").state == "ended", "the last task ends")
    with pytest.raises(ConfigurationError, match="job array"):
        cluster.job(array)  # which is the id of the last task as well
    ended = cluster.job(task)
    assert (ended.exit_code, ended.restarts, len(ended.nodes)) == (160, 0, 1)
    for call in cluster.plan_requeue(ended, ["n1"]):
        cluster.carry_out(call)
    again = cluster.job(task)
    assert (again.state, again.restarts, tuple(sorted(again.excluded))) == ("pending", 1, ("n1", "n3"))
    others = [cluster.job(f"{array}_{number}") for number in (0, 2, 3)]
    assert [(one.state, one.restarts) for one in others] == [("ended", 0), ("running", 0), ("ended", 0)]
    assert cluster.job(f"{array}_9").state == "absent"
    gate.touch()
    here.run("scancel", array)


def test_what_starts_no_second_time(here: Slurm, cluster: SlurmCluster) -> None:
    job = here.submit("#!/bin/sh\nexit 160\n", "--no-requeue", "--exclude=n3")
    until(lambda: cluster.job(job).state == "ended", "the job ends")
    with pytest.raises(ConfigurationError, match="Requeue=0"):
        cluster.plan_requeue(cluster.job(job), ["n3"])
    held = here.submit("#!/bin/sh\nexit 0\n", "--hold")
    assert (cluster.job(held).state, cluster.job(held).held) == ("pending", True)
    here.run("scancel", held)
    parts = here.submit("#!/bin/sh\nexit 0\n", "--exclude=n3", "--hold", ":", "--exclude=n3", "--hold")
    with pytest.raises(ConfigurationError, match="heterogeneous"):
        cluster.job(parts)
    here.run("scancel", parts)


def test_a_reboot_is_asked_for_and_seen(here: Slurm, cluster: SlurmCluster) -> None:
    until(lambda: cluster.look("n1").booted != "", "n1 has told when it booted")
    asked = act("reboot", "n1")
    before, now = carry_out(cluster, asked)
    assert "REBOOT" in now.raw
    until((here.folder / "reboots").exists, "Slurm has rebooted it")
    here.stop("n1")
    here.start_node("n1", "-b")  # as after a reboot
    until(lambda: cluster.look("n1").raw == "DOWN" and cluster.look("n1").booted != "", "n1 is back")
    back = cluster.look("n1")
    assert cluster.landed(asked, before, back) == "yes"
    assert (back.service, back.ours) == (
        "out",
        True,
    )  # what computed wrongly before it was booted gets no job by itself
    carry_out(cluster, act("clear", "n1"))
    until(lambda: here.states()["n1"] == "idle", "n1 is idle again")


def test_through_slurmrestd(here: Slurm, cluster: SlurmCluster) -> None:
    security = "disable_user_check,disable_unshare_sysv,disable_unshare_files"  # it runs as root here
    words = ["slurmrestd", "-f", f"{here.folder}/slurm.conf", "-s", "v0.0.38", "-a", "rest_auth/local"]
    here.start("slurmrestd", *words, f"unix:{here.folder}/rest.sock", env={"SLURMRESTD_SECURITY": security})
    until((here.folder / "rest.sock").is_socket, "slurmrestd answers")
    rest = SlurmRest(f"unix:{here.folder}/rest.sock", me(), runner=_runner(here))
    assert rest.version == "v0.0.38"
    assert rest.look("n9") == NodeState("n9", "absent")
    assert rest.job("4242").state == "absent"
    carry_out(rest, act("drain", "n2"))  # which this version leaves to scontrol
    assert rest.look("n2") == cluster.look("n2")
    assert rest.census() == cluster.census()
    carry_out(rest, act("clear", "n2"))
    array = here.submit("#!/bin/sh\nexit 3\n", "--array=0-1", "--exclude=n3", "--no-requeue")
    for task in (f"{array}_0", f"{array}_1"):
        until(lambda task=task: cluster.job(task).state == "ended", "the task ends")  # type: ignore[misc]
        assert rest.job(task).nodes == cluster.job(task).nodes != ()
        assert (rest.job(task).state, rest.job(task).exit_code) == ("ended", 3)
    assert rest.job(f"{array}_7").state == "absent"
    with pytest.raises(ConfigurationError, match="job array"):
        rest.job(array)
    here.stop("slurmrestd")


def test_a_node_with_a_condemned_device_takes_no_job(here: Slurm, cluster: SlurmCluster) -> None:
    job = here.submit("#!/bin/sh\nexit 0\n", "--nodes=1", "--nodelist=n3", "--requeue")
    until(lambda: cluster.look("n3").service == "out", "n3 is drained by its prolog")
    state = cluster.look("n3")
    assert state.reason == "bitwitness admit: GPU-bad was taken out on n1"
    assert state.ours
    until(lambda: cluster.job(job).state == "pending", "the job waits again")
    assert cluster.job(job).restarts == 1
    here.run("scancel", job)


def test_the_signals_of_each_node_are_kept_beside_its_job(here: Slurm, cluster: SlurmCluster) -> None:
    job = here.submit("#!/bin/sh\nexit 0\n", "--nodes=1", "--nodelist=n2")
    kept = here.folder / "signals" / "n2" / f"{job}.json"
    until(kept.exists, "the epilog has kept what was said")
    assert kept.read_text() == "[]\n"
    assert [file.name for file in kept.parent.iterdir() if file.name.startswith(".")] == []
    until(lambda: cluster.look("n2").service == "in", "n2 is still in service")


def test_nothing_is_left_of_a_cluster() -> None:
    need()
    with slurm(1) as cluster:
        cluster.submit(f"#!/bin/sh\nsetsid sleep 1000 &\ntouch {cluster.folder}/runs\nsleep 1000\n")
        until((cluster.folder / "runs").exists, "the job runs")
        assert len(left_of(cluster.folder)) >= 4
    assert left_of(cluster.folder) == []
    assert not cluster.folder.exists()
