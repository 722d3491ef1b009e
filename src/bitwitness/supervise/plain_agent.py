"""An agent that starts workers as torchrun does, without torch: `python -m bitwitness.supervise.plain_agent TORCHRUN-ARGS`.

A test that kills processes at forty instants cannot wait forty times for torch to be imported. It understands the options
that the wrapper gives and keeps torchrun's manners: sessions of their own, log files, error files, exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from bitwitness.supervise.agent import leave_report
from bitwitness.supervise.processes import PARENT, die_with_parent


def main() -> NoReturn:
    """Start the workers of a node, wait for them, end as torchrun would."""
    die_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.environ[PARENT] = str(os.getpid())
    options = _parse()
    with contextlib.ExitStack() as stack:
        if options.node_rank == 0:
            stack.enter_context(socket.create_server((options.master_addr, options.master_port)))
        workers = [_start(options, slot) for slot in range(options.nproc_per_node)]

        def stop(number: int, frame: FrameType | None) -> None:
            _end(workers)
            sys.exit(1)

        signal.signal(signal.SIGTERM, stop)
        while any(worker.poll() is None for worker in workers) and not any(worker.poll() for worker in workers):
            time.sleep(0.02)
        _end(workers)
        failed = {slot: worker.returncode for slot, worker in enumerate(workers) if worker.returncode}
    leave_report([{"local_rank": slot, "exit_code": code} for slot, code in failed.items()])
    sys.exit(1 if failed else 0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--rdzv-backend", "--rdzv-id", "--rdzv-conf", "--master-addr", "--log-dir", "--tee"):
        parser.add_argument(name)
    for name in (
        "--nnodes",
        "--node-rank",
        "--nproc-per-node",
        "--master-port",
        "--max-restarts",
        "--shutdown-timeout",
    ):
        parser.add_argument(name, type=int)
    parser.add_argument("-m", dest="module", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args()


def _start(options: argparse.Namespace, slot: int) -> subprocess.Popen[bytes]:
    folder = Path(options.log_dir) / "plain" / "attempt_0" / str(slot)
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "RANK": str(options.node_rank * options.nproc_per_node + slot),
        "LOCAL_RANK": str(slot),
        "GROUP_RANK": str(options.node_rank),
        "WORLD_SIZE": str(options.nnodes * options.nproc_per_node),
        "LOCAL_WORLD_SIZE": str(options.nproc_per_node),
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": str(options.master_port),
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
    }
    with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as err:
        command = [sys.executable, "-u", "-m", *options.command]
        return subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True)


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGTERM)
    deadline = time.monotonic() + 30
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


if __name__ == "__main__":
    main()
