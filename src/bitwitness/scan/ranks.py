"""The processes of a scan's ranks on one machine: forked from one that has imported torch, so that sixteen start in seconds.

A module of its own, started by `launching` in a process that has used no device yet: a fork of one that has cannot use it (CUDA
programming guide; torch.multiprocessing). Each rank asks the kernel to be killed with this process, as this one does with who
started it, so that `kill -9` of a scan leaves nothing behind.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path

import torch

from bitwitness.errors import BitwitnessError
from bitwitness.runfiles.answers import AnswerFiles
from bitwitness.runfiles.files import read_json
from bitwitness.runfiles.journal import Journal
from bitwitness.scan.devices import this_device
from bitwitness.scan.launching import log_of
from bitwitness.scan.settings import Settings
from bitwitness.scan.working import Asked, Worker
from bitwitness.supervise.processes import PARENT, die_with_parent
from bitwitness.topology import node_name


def main() -> int:
    """Start ranks, pass on a SIGTERM to them, and report each one's end on standard output, one JSON object a line."""
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--slot", type=int, default=0)
    parser.add_argument("--count-devices", action="store_true")
    given = parser.parse_args()
    if given.count_devices:
        sys.stdout.write(f"{torch.cuda.device_count()}\n")
        return 0
    files = AnswerFiles(given.path)
    settings = Settings.from_json(read_json(files.scan))
    if settings.played and "train" in settings.suites:
        import_module("torch._dynamo")  # an optimizer loads it: once for all, which have fewer cores than ranks
    ranks: dict[int, int] = {}

    def stop(number: int, frame: object) -> None:
        for pid in ranks:
            os.kill(pid, signal.SIGTERM)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells all of a group; who started this decides
    os.environ[PARENT] = str(os.getpid())
    for number in range(given.count):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            _child(files, settings, given.first + number, given.slot + number)
        ranks[pid] = given.first + number
        signal.signal(signal.SIGTERM, stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    while ranks:
        pid, status = os.waitpid(-1, 0)
        rank = ranks.pop(pid, None)
        if rank is not None:
            line = {"rank": rank, "code": os.waitstatus_to_exitcode(status)}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    return 0


def _child(files: AnswerFiles, settings: Settings, rank: int, slot: int) -> None:
    """What a fork does; never returns into what its parent was doing."""
    code = 1
    try:
        log = os.open(log_of(files, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        die_with_parent()
        code = run_rank(files, settings, rank, slot)
    except BaseException:  # noqa: BLE001 - the last thing this process does is to say what it was
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def run_rank(files: AnswerFiles, settings: Settings, rank: int, slot: int) -> int:
    """Be one rank, to its end; its exit code."""
    faulthandler.enable()
    asked = Asked(files.path / "stop.json")

    def stop(number: int, frame: object) -> None:
        asked.by_signal = True

    signal.signal(signal.SIGTERM, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    torch_device = _torch_device(settings, slot)
    if torch_device.type == "cpu":
        torch.set_num_threads(1)
    node = f"node-{rank // settings.ranks_per_node}" if settings.played else node_name(os.environ)
    place = rank % settings.ranks_per_node if settings.played else None
    device = this_device(rank, torch_device, node, place)
    journal = files.introduce(device)
    if torch_device.type == "cpu" and not (settings.played or settings.processors):
        said = f"torch sees {torch.cuda.device_count()} GPU(s) here, and this is process {slot} of its node: look at the driver"
        journal.append("end", {"why": said})
        return 1
    worker = Worker(files, settings, device, torch_device, journal, asked)
    try:
        worker.run()
    except BitwitnessError as error:
        sys.stderr.write(f"{error}\n")
        _say_why(journal, str(error), worker.at)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - whatever it was: others work on, and the result says it
        traceback.print_exc()
        _say_why(journal, f"{type(error).__name__}: {error}", worker.at)
        return 1
    journal.close()
    return 0


def _torch_device(settings: Settings, slot: int) -> torch.device:
    if settings.played or not torch.cuda.is_available() or slot >= torch.cuda.device_count():
        return torch.device("cpu")
    torch.cuda.set_device(slot)
    return torch.device("cuda", slot)


def _say_why(journal: Journal, why: str, item: str) -> None:
    try:
        journal.append("end", {"why": f"{why[:300]} (at {item or 'its start'})"})
    except BitwitnessError as error:
        sys.stderr.write(f"{error}\n")


if __name__ == "__main__":
    sys.exit(main())
