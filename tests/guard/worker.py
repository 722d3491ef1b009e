"""The process that imports torch once, for all launches of a process of tests, and forks each of them (see harness).

It reads a line of JSON for each launch, forks the process that forks the ranks, answers with its number, and with a second
line when that has ended. It computes nothing itself, because a process that has computed has threads, and those do not
survive a fork.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer of a process loads it
import torch.distributed as dist

import bitwitness
import bitwitness.guard.guard  # loaded before the fork, once for all
from tests.guard.harness import Rank, Scenario, Spec, folder_of

_SET_PDEATHSIG = 1  # linux/prctl.h


def serve(parent: int) -> None:
    """One launch after another, until nobody asks any more."""
    die_with(parent)
    own = os.getpid()
    while line := sys.stdin.readline():
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _launch(asked, own)
        _answer(pid)
        _, status = os.waitpid(pid, 0)
        _answer(os.waitstatus_to_exitcode(status))


def _answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _launch(asked: dict[str, Any], parent: int) -> None:
    """Become the process that forks the ranks: leader of its own session, with nothing of the one that was asked; never returns."""
    code = 1
    try:
        os.setsid()
        nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor, own in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, own)
        os.close(nothing)
        os.close(log)
        os.environ.clear()
        os.environ.update(asked["environment"])
        code = main(asked["spec"], parent)
    except BaseException:  # noqa: BLE001  (whatever it is, it must be seen in the log and not go on in the parent's code)
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main(spec_file: str, parent: int) -> int:
    """Fork the ranks of one launch, and wait for them all."""
    die_with(parent)
    spec: Spec = pickle.loads(Path(spec_file).read_bytes())
    torch.set_num_threads(1)
    pids: dict[int, int] = {}
    own = os.getpid()
    # Bound before anybody knows the number, so that no other launch can take it meanwhile.
    listener = socket.create_server(("127.0.0.1", 0))
    for rank in range(spec.world_size):
        pid = os.fork()
        if pid == 0:
            die_with(own)
            _rank(spec, rank, listener)
        pids[pid] = rank
    listener.close()
    while pids:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        (spec.folder / f"rank-{pids.pop(pid)}.exit").write_text(str(code))
    return 0


def die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _rank(spec: Spec, rank: int, listener: socket.socket) -> None:
    """Run everything as one rank; never returns. Gloo's threads can fail at a normal exit of the interpreter."""
    code = 1
    try:
        log = os.open(spec.folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(levelname)s %(message)s")
        _run(spec, rank, listener)
        code = 0
    except BaseException:  # noqa: BLE001  (whatever it is, it must be seen in the log and not go on in the parent's code)
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run(spec: Spec, rank: int, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    descriptor = listener.detach() if rank == 0 and spec.process_group else None
    listener.close()
    if spec.process_group:
        store = dist.TCPStore(
            "127.0.0.1", port, spec.world_size, is_master=rank == 0, master_listen_fd=descriptor, wait_for_workers=False
        )
        timeout = timedelta(seconds=spec.collective_timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=spec.world_size, timeout=timeout)
    with (spec.folder / f"rank-{rank}.jsonl").open("a") as results:
        for scenario in spec.scenarios:
            logging.info("=== %s", scenario.name)  # noqa: LOG015  (read in the log of a rank that fails)
            seen = _seen(spec, scenario, rank)
            results.write(json.dumps({"name": scenario.name, "seen": seen}) + "\n")
            results.flush()
            if spec.process_group:
                dist.barrier()


def _seen(spec: Spec, scenario: Scenario, rank: int) -> dict[str, object]:
    os.environ["BITWITNESS_NODE"] = f"n{rank // scenario.per_node}"
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002  (the global generator is one of the sources of randomness)
    started = time.monotonic()
    try:
        seen = scenario.run(Rank(rank, spec.world_size, folder_of(spec, scenario.name)), scenario.given)
    except BaseException as error:  # noqa: BLE001  (likewise)
        traceback.print_exc()
        seen = {"crashed": "".join(traceback.format_exception(error))[-4000:]}
    return {"seconds": time.monotonic() - started, **seen}


if __name__ == "__main__":
    assert bitwitness.__version__
    serve(int(sys.argv[1]))
