"""From a wrong number to a drained node and back, on a real Slurm cluster of four slurmd on this machine: `make rehearse-slurm`.

Two guarded jobs of three ranks are submitted by sbatch. One is never hit. In the other the node that runs rank 1 computes
wrongly, and goes on doing so. What has to be seen: the job ends with 160; the controller drains that node and says why; the
job is started again without it, goes on from a checkpoint that was verified, and every rank ends with the very bits of the job
that was never hit. Exit code 0 only if all of it was seen.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fleet.slurm.real import Slurm, missing, slurm

ROOT = Path(__file__).resolve().parent.parent.parent
BITWITNESS = Path(sys.executable).with_name("bitwitness")
BAD, NODES, TRAIN, LIMIT = "n2", 4, 3, 150.0
FAULT = f"node={BAD} grad_w:* @ step=7 : n=1 -> bit=24 ; permanent"

HEAD = f"""\
#!/bin/bash
#SBATCH --nodes={TRAIN} --ntasks-per-node=1 --cpus-per-task=1
#SBATCH --requeue --open-mode=append --no-kill
export OMP_NUM_THREADS=1
"""
JOB = ROOT / "tests" / "supervise" / "real_job.py"
GUARDED = (
    HEAD
    + f"""\
export BITWITNESS_FAULT='{FAULT}'
srun --kill-on-bad-exit=0 --no-kill --wait=0 \
  {BITWITNESS} run --nodes {TRAIN} --address 127.0.0.1 --run-dir {{run}} {JOB} {{run}} {{out}}
"""
)
ALONE = (
    HEAD
    + f"""\
export WORLD_SIZE={TRAIN} LOCAL_WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT={{port}}
srun bash -c 'RANK=$SLURM_PROCID exec {sys.executable} {JOB} {{run}} {{out}}'
"""
)
"""The same job without a fault and without a supervisor: half as many processes to start, and nothing in common but the numbers."""

POLICY = """\
act = true
drills = "act"  # the fault is injected, and its node is to be drained all the same
owner = "the rehearsal"
nodes_per_hour = 1
cluster_share = 0.3

[cluster]
kind = "slurm"
timeout = 10
"""

_started = time.monotonic()


def say(text: str) -> None:
    """One line of what is seen, with the second."""
    sys.stdout.write(f"[{time.monotonic() - _started:5.1f} s] {text}\n")
    sys.stdout.flush()


class NotSeen(Exception):
    """What had to be seen was not."""


@dataclass
class Job:
    """One of the two jobs.

    Attributes:
        cluster: on which it runs.
        run: its run directory.
        out: where each rank leaves a digest of its weights.
        id: what sbatch called it.
    """

    cluster: Slurm
    run: Path
    out: Path
    id: str = ""

    @classmethod
    def submit(cls, cluster: Slurm, name: str, script: str) -> Job:
        """Submit it."""
        job = cls(cluster, cluster.folder / "runs" / name, cluster.folder / f"{name}-weights")
        job.out.mkdir()
        job.run.parent.mkdir(exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        job.id = cluster.submit(script.format(run=job.run, out=job.out, port=port), f"--job-name={name}")
        return job

    def fields(self) -> dict[str, str]:
        """What scontrol shows of it, as words with a `=`."""
        said = self.cluster.run("scontrol", "show", "job", self.id)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def ended(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.fields()["JobState"] in {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}

    def weights(self) -> dict[str, str]:
        """The digest of each rank's weights."""
        return {file.name: file.read_text() for file in sorted(self.out.glob("rank-*")) if "." not in file.name}

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What its supervisor has noted, of one kind."""
        file = self.run / "supervise" / "log.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [event for event in map(json.loads, lines) if event.get("kind") == kind]

    def printed(self) -> str:
        """What the job has printed."""
        file = self.cluster.folder / f"job-{self.id}.out"
        return file.read_text(errors="replace") if file.exists() else "(nothing)"


def wait(cluster: Slurm, met: Callable[[], bool], what: str) -> None:
    """Wait for something within the time of the whole rehearsal, while everything that was started lives."""
    while not met():
        if gone := [name for name, process in cluster.processes.items() if process.poll() is not None]:
            raise NotSeen(f"{what}: {gone} ended")
        if time.monotonic() - _started > LIMIT:
            raise NotSeen(f"in time: {what}")
        time.sleep(0.2)


def must(seen: bool, what: str) -> None:
    """Say what is seen, or that it is not."""
    if not seen:
        raise NotSeen(what)
    say(f"seen: {what}")


def rehearse(cluster: Slurm) -> None:
    """All of it, on a cluster that is up."""
    say(f"{NODES} slurmd are up: {cluster.states()}")
    hit = Job.submit(cluster, "hit", GUARDED)
    say(f"job {hit.id} runs under `bitwitness run`, and will be hit: {FAULT}")
    watch(cluster, hit)

    wait(
        cluster,
        lambda: bool(hit.events("ended")) and (hit.fields()["Restarts"] != "0" or hit.ended()),
        f"job {hit.id} ends",
    )
    first = hit.events("ended")
    must(bool(first) and first[0]["exit_code"] == 160, f"job {hit.id} ended with 160 (corruption, attributed)")
    never = Job.submit(cluster, "never", ALONE)
    say(f"job {never.id} is the same and never hit")
    wait(cluster, lambda: "drain" in cluster.states()[BAD], f"{BAD} is drained")
    node = cluster.run("scontrol", "show", "node", BAD)
    reason = next((line.strip() for line in node.splitlines() if line.strip().startswith("Reason=")), "no reason")
    must(reason.startswith("Reason=bitwitness "), f"{BAD} is {cluster.states()[BAD]}; {reason}")
    others = {name: state for name, state in cluster.states().items() if name != BAD}
    must(not any("drain" in state for state in others.values()), f"no other node is: {others}")

    wait(cluster, lambda: hit.fields()["Restarts"] == "1", f"job {hit.id} is requeued")
    wait(cluster, lambda: hit.fields()["ExcNodeList"] == BAD, f"job {hit.id} excludes {BAD}")
    say(f"seen: job {hit.id} was requeued with ExcNodeList={BAD}")
    wait(
        cluster,
        lambda: len(hit.events("ended")) > 1 or (hit.fields()["JobState"] == "FAILED" and hit.ended()),
        "its end",
    )
    wait(cluster, lambda: hit.ended() and never.ended(), "both jobs end")
    shown = hit.fields()
    must(shown["JobState"] == "COMPLETED", f"job {hit.id} ended well, on {shown['NodeList']}")
    must(never.fields()["JobState"] == "COMPLETED", f"job {never.id} ended well")
    started = hit.events("started")
    must(BAD in started[0]["nodes"], f"it had started on {started[0]['nodes']}")
    must(BAD not in started[-1]["nodes"], f"it was started again on {started[-1]['nodes']}")
    step = resumed(hit)
    must(step > 0, f"it went on from the verified checkpoint of step {step}")
    must(len(hit.weights()) == TRAIN, f"{TRAIN} ranks left their weights")
    same = ", ".join(f"{rank} {digest[:12]}" for rank, digest in hit.weights().items())
    must(hit.weights() == never.weights(), f"and each has the bits of the job that was never hit: {same}")
    shown_by_controller(cluster)


def shown_by_controller(cluster: Slurm) -> None:
    """What the controller says that it has done, and that it ends when it is asked to."""
    said = cluster.run(str(BITWITNESS), "fleet", "history", "--state", str(cluster.folder / "fleet"))
    say("the controller's own history:\n" + said.rstrip())
    watching = cluster.processes.pop("watch")
    watching.terminate()
    must(watching.wait(20) == 0, "the controller ended when it was asked to")


def resumed(job: Job) -> int:
    """The step from which the last start of a job went on, as its ranks say; 0 where they do not."""
    said = re.findall(r"resumed at step (\d+) from ", job.printed())
    return int(said[-1]) if said else 0


def watch(cluster: Slurm, job: Job) -> None:
    """Start the controller."""
    policy = cluster.folder / "fleet.toml"
    policy.write_text(POLICY, encoding="utf-8")
    state = cluster.folder / "fleet"
    words = [
        BITWITNESS,
        "fleet",
        "watch",
        "--runs",
        job.run.parent,
        "--state",
        state,
        "--policy",
        policy,
        "--act",
        "--every",
        "1s",
    ]
    cluster.start("watch", *map(str, words))
    say("the controller watches: " + " ".join(map(str, words[1:])))


def main() -> int:
    """Run it; 0 if all was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="print all logs also where all was seen")
    keep = parser.parse_args().keep
    if lacking := missing():
        say(f"not installed: {', '.join(lacking)}; on Debian: bash .ci/packages")
        return 2
    with slurm(NODES) as cluster:
        try:
            rehearse(cluster)
        except (NotSeen, AssertionError, subprocess.SubprocessError, KeyError) as error:
            say(f"NOT SEEN: {error!r}\n{cluster.logs()}")
            return 1
        if keep:
            say(cluster.logs())
    say("all was seen; nothing is left running")
    return 0


if __name__ == "__main__":
    sys.exit(main())
