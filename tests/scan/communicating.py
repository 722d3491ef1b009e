"""Ranks that really send each other things, forked from one process: `python -m tests.scan.communicating FOLDER NAME...`."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bitwitness.runfiles.answers import Device
from bitwitness.runfiles.journal import Journal
from bitwitness.scan.communication import PATIENCE, Strike, run
from bitwitness.scan.drill import parse
from bitwitness.scan.payloads import LinkStriker

WORLD, SEED = 4, 7
DEVICES = [Device(rank, f"node-{rank}", f"cpu-{rank}", {"model": "cpu"}) for rank in range(WORLD)]


def _drill(text: str) -> Callable[[int], Strike]:
    return lambda rank: LinkStriker([parse(text)], rank, SEED)


@dataclass
class _Keeping:
    """Gives again what came before: from the same peer, or from another one."""

    same_peer: bool
    kept: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def __call__(self, received: Tensor, sender: int, receiver: int) -> None:
        if sender < 0:
            return
        fresh = received.clone()
        for (peer, size), earlier in self.kept.items():
            if size == received.numel() and (peer == sender) == self.same_peer:
                received.copy_(earlier)
                break
        self.kept.setdefault((sender, fresh.numel()), fresh)


def _bad_receiver(rank: int) -> Strike:
    def strike(received: Tensor, sender: int, receiver: int) -> None:
        if rank == 2 and sender >= 0:
            received[-1] ^= 1

    return strike


def _zeros(everyone: bool) -> Callable[[int], Strike]:
    def made(rank: int) -> Strike:
        def strike(received: Tensor, sender: int, receiver: int) -> None:
            if sender < 0 and (everyone or rank == 1):
                received.zero_()

        return strike

    return made


def _not_what_was_sent(rank: int) -> Strike | None:
    """One rank gets what came before from the same peer, one what came from another, one nothing from one of its peers."""

    def not_delivered(received: Tensor, sender: int, receiver: int) -> None:
        if sender == 3:
            received.bitwise_not_()

    strikes: dict[int, Strike] = {0: not_delivered, 1: _Keeping(same_peer=True), 2: _Keeping(same_peer=False)}
    return strikes.get(rank)


def _ends_by(number: signal.Signals) -> Callable[[int], Strike]:
    def made(rank: int) -> Strike:
        def strike(received: Tensor, sender: int, receiver: int) -> None:
            if rank == 3 and sender >= 0:
                os.kill(os.getpid(), number)

        return strike

    return made


@dataclass(frozen=True)
class Scenario:
    """What happens to whom; `most` rounds are played."""

    strike: Callable[[int], Strike | None] = lambda rank: None
    most: int = 6
    absent: int = -1
    patience: float = PATIENCE
    timeout: float = 60.0
    by_environment: bool = False
    own_group: bool = False


SCENARIOS = {
    "healthy": Scenario(most=4),
    "bad_link": Scenario(_drill("link=1-2 p=0.7")),
    "bad_receiver": Scenario(_bad_receiver),
    "zeros_for_all": Scenario(_zeros(everyone=True), most=1),
    "zeros_for_one": Scenario(_zeros(everyone=False), most=3),
    "not_what_was_sent": Scenario(_not_what_was_sent, most=4),
    "killed": Scenario(_ends_by(signal.SIGKILL)),
    "stopped": Scenario(_ends_by(signal.SIGSTOP), timeout=3.0),
    "absent": Scenario(most=2, absent=3, patience=3.0),
    "by_environment": Scenario(most=3, by_environment=True),
    "own_group": Scenario(most=3, own_group=True),
}


def _rank(folder: Path, scenario: Scenario, rank: int) -> None:
    code = 1
    try:
        os.dup2(os.open(folder / f"log-{rank}", os.O_CREAT | os.O_WRONLY), 2)
        faulthandler.dump_traceback_later(120, exit=True)  # it ends also where it hangs, and its log says where
        warnings.simplefilter("error")
        journal = Journal(folder / f"{rank}.jsonl", rank)
        if scenario.own_group:
            dist.init_process_group("gloo", store=dist.FileStore(str(folder / "own")), rank=rank, world_size=WORLD)
        played = run(
            DEVICES[rank],
            torch.device("cpu"),
            WORLD,
            journal,
            seconds=100.0,
            seed=SEED,
            meeting=None if scenario.by_environment else folder / "meeting",
            strike=scenario.strike(rank),
            most=scenario.most,
            patience=scenario.patience,
            timeout=scenario.timeout,
        )
        journal.append("end", {"why": "done", "played": played, "group": dist.is_initialized()})
        journal.close()
        code = 0
    except BaseException:  # noqa: BLE001  (it must not go on in the code of its parent)
        traceback.print_exc()
    finally:
        os._exit(code)


def _agent() -> tuple[int, int]:
    """A process that keeps a store, as torchrun does, and its port. One of its own: who forks ranks must have no threads."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        while store.port and os.getppid() == parent:
            time.sleep(1)
        os._exit(0)
    listener.close()
    return pid, port


def main(folder: Path, names: list[str]) -> None:
    """Play these scenarios at the same time: in most of them, ranks mostly wait."""
    torch.set_num_threads(1)
    agent, port = _agent()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    pids: dict[int, bool] = {}
    for name in names:
        scenario = SCENARIOS[name]
        (folder / name).mkdir()
        for rank in range(WORLD):
            if rank == scenario.absent:
                continue
            pid = os.fork()
            if pid == 0:
                _rank(folder / name, scenario, rank)
            pids[pid] = name == "stopped" and rank == WORLD - 1
    for pid, stops in sorted(pids.items(), key=lambda one: one[1]):
        if stops:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
