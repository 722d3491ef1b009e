"""A real Slurm cluster on this machine, for the time of a test: munged, slurmctld, and one slurmd for each node.

The adapter is only as right as the outputs that it was written by, so they come from the real programs. All files lie in a
temporary folder, ports are free ones of the loopback interface, and no service of the machine is touched. Whatever was
started ends with the context, by SIGTERM and, a moment later, by SIGKILL, each process by its own id.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol", "sbatch", "sinfo", "squeue")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

CONFIG = """\
ClusterName=bitwitness
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=100000
MpiDefault=none
KillWait=5
MessageTimeout=10
SlurmdTimeout=300
ResumeTimeout=60
ReturnToService=2
MinJobAge=300
RebootProgram={folder}/reboot
{more}
"""


def missing(*more: str) -> list[str]:
    """Which of the programs are not installed."""
    return [name for name in (*PROGRAMS, *more) if shutil.which(name, path=PATH) is None]


def need(*more: str) -> None:
    """Skip the test where Slurm is not installed; fail where it must be (BITWITNESS_REAL=1)."""
    if lacking := missing(*more):
        say = f"not installed: {', '.join(lacking)} (apt-get install slurm-wlm munge slurmrestd; .ci/packages)"
        if os.environ.get("BITWITNESS_REAL") == "1":
            pytest.fail(say)
        pytest.skip(say)


def until(met: Callable[[], bool], what: Callable[[], str] | str, *, within: float = 60.0) -> None:
    """Wait for something to become true; `what` says what did not."""
    end = time.monotonic() + within
    while not met():
        if time.monotonic() > end:
            raise AssertionError(f"not within {within:.0f} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.05)


@dataclass
class Slurm:
    """A running cluster.

    Attributes:
        folder: where everything lies.
        nodes: names of its nodes.
        ports: of slurmctld, and of each node.
        processes: what was started here, by name.
    """

    folder: Path
    nodes: tuple[str, ...]
    ports: Mapping[str, int]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """The environment in which Slurm's commands find this cluster; nothing of another one is left in it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}

    def run(self, *words: str, check: bool = True) -> str:
        """Run a command against the cluster, and what it printed."""
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=60, check=False)
        if check and done.returncode:
            raise AssertionError(f"{words} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def start(self, name: str, *words: str, env: Mapping[str, str] | None = None, **how: str | int) -> None:
        """Start a process that ends with the cluster."""
        with (self.folder / f"{name}.out").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                words,
                env=self.env | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                **how,  # type: ignore[call-overload]  # user and group, where they are given
            )

    def start_node(self, node: str, *options: str) -> None:
        """Start the slurmd of a node."""
        self.start(node, "slurmd", "-D", "-N", node, "-f", str(self.folder / "slurm.conf"), *options)

    def stop(self, name: str) -> None:
        """Kill a process that was started here."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def submit(self, script: str, *options: str) -> str:
        """Submit a job with this script; its id."""
        file = self.folder / f"job-{time.monotonic_ns()}.sh"
        file.write_text(script, encoding="utf-8")
        said = self.run("sbatch", "--parsable", f"--output={self.folder}/job-%j.out", *options, str(file))
        return said.strip().splitlines()[-1].split(";")[0]

    def states(self) -> dict[str, str]:
        """The state of each node, e.g. `idle+drain`."""
        said = self.run("sinfo", "--noheader", "--Node", "--Format=NodeList:256,StateComplete:256")
        return {line.split()[0]: line.split()[1] for line in said.splitlines() if len(line.split()) > 1}

    def logs(self) -> str:
        """The ends of all logs: what one wants to see where a test fails."""
        files = sorted((*self.folder.glob("*.log"), *self.folder.glob("*.out")))
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)


@contextlib.contextmanager
def slurm(count: int = 2, *, prepare: Callable[[Path], str] = lambda folder: "", cpus: int = 2) -> Iterator[Slurm]:
    """A cluster of `count` nodes n1, n2, ... that are idle; `prepare` puts files into its folder, and returns further settings."""
    folder = Path(tempfile.mkdtemp(prefix="bw-slurm-"))  # short: the path of a socket is limited to 107 bytes
    folder.chmod(0o755)
    nodes = tuple(f"n{index + 1}" for index in range(count))
    here = Slurm(folder, nodes, dict(zip(("slurmctld", *nodes), _free_ports(count + 1), strict=True)))
    try:
        _write(here, prepare(folder), cpus)
        here.start("munged", *_munged(folder))
        until((folder / "munge.socket").exists, "munged answers")
        here.start("slurmctld", "slurmctld", "-D", "-c", "-f", str(folder / "slurm.conf"))
        for node in nodes:
            here.start_node(node)
        until(lambda: _ready(here), lambda: f"all nodes idle, {here.states()}\n{here.logs()}", within=20)
        yield here
    finally:
        _end(here)
        shutil.rmtree(folder, ignore_errors=True)


def me() -> str:
    """The user as whom all of it runs."""
    return pwd.getpwuid(os.geteuid()).pw_name


def _ready(here: Slurm) -> bool:
    if gone := [name for name, process in here.processes.items() if process.poll() is not None]:
        raise AssertionError(f"{gone} ended by itself\n{here.logs()}")
    states = here.states()
    return set(states) == set(here.nodes) and set(states.values()) == {"idle"}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _write(here: Slurm, more: str, cpus: int) -> None:
    folder = here.folder
    lines = [
        f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={here.ports[node]} CPUs={cpus} RealMemory=100"
        for node in here.nodes
    ]
    lines.append(
        f"PartitionName=all Nodes={','.join(here.nodes)} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO"
    )
    text = CONFIG.format(port=here.ports["slurmctld"], user=me(), folder=folder, more=more)
    (folder / "slurm.conf").write_text(text + "\n".join(lines) + "\n", encoding="utf-8")
    (folder / "state").mkdir()
    for node in here.nodes:
        (folder / f"spool-{node}").mkdir()
    reboot = folder / "reboot"  # a reboot of what is no machine: it is noted, and the test does the rest
    reboot.write_text(f'#!/bin/sh\necho "$SLURMD_NODENAME $*" >> {folder}/reboots\n', encoding="utf-8")
    reboot.chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)


def _munged(folder: Path) -> list[str]:
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    return [
        "munged", "--foreground", "--force", "--num-threads=2", f"--log-file={folder}/munged.log",
        *(f"--{option}={folder}/{file}" for option, file in files.items()),
    ]  # fmt: skip


def _end(here: Slurm) -> None:
    """End what was started, and what Slurm has started for jobs.

    Jobs go first: a slurmd waits for its step daemons, and these for the job, longer than anybody wants to wait here.
    """
    own = {process.pid for process in here.processes.values()}
    for process in here.processes.values():
        process.terminate()
    end = time.monotonic() + 3
    while left := [pid for pid in left_of(here.folder) if pid not in own]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    for process in here.processes.values():
        try:
            process.wait(timeout=0.3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def left_of(folder: Path) -> list[int]:
    """Processes that belong to the cluster of a folder: whose environment names its configuration."""
    found = []
    mark = f"SLURM_CONF={folder}/slurm.conf".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found
