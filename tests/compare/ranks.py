"""Processes of a comparison, for tests: `python -m tests.compare.ranks FOLDER` plays all scenes and prints what each process saw.

One process imports torch and forks the ranks of each scene, before it computes anything: importing it a dozen times would cost more
processor time than all that is tested.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from torch import Tensor

from bitwitness.cli.compare_progress import Progress
from bitwitness.cli.main import cli
from bitwitness.compare.exchange import Ranks
from bitwitness.compare.records import Mode, Site
from bitwitness.compare.tape import Tape
from bitwitness.errors import RankLost

TINY = ["--set", "blocks=1", "--set", "width=8", "--set", "heads=2", "--set", "context=8", "--set", "batch=2"]
FAULT = "op:addmm @ every=1 : rate=0.01 -> bit=20 ; permanent"
LEADER = 1

Scene = Callable[[int, Path], Any]


def tape(step: int) -> Tape:
    """Of all kinds of tensors, one larger than what travels together."""
    generator = torch.Generator().manual_seed(step)
    tensors: list[Tensor] = [
        torch.randn(3, 4, generator=generator),
        torch.tensor(step),
        torch.randn(5, generator=generator).bfloat16(),
        torch.tensor([True, False, True]),
        torch.tensor([float("nan"), float("-inf"), -0.0]),
        torch.zeros(5 << 20, dtype=torch.uint8).index_fill_(0, torch.tensor([7 + step]), 1),
        torch.randn(2, 2, generator=generator, dtype=torch.float64),
    ]
    sites = [Site(f"m{n}", "fwd_out", "0", 0, str(one.dtype), tuple(one.shape)) for n, one in enumerate(tensors)]
    return Tape(step, dict(zip(sites, tensors, strict=True)))


def same(one: Tape, other: Tape) -> bool:
    """Bit for bit, and in the same order."""
    pairs = zip(one.entries.values(), other.entries.values(), strict=True)
    equal = all(
        a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in pairs
    )
    return one.step == other.step and list(one.entries) == list(other.entries) and equal


# Scenes -----------------------------------------------------------------------------------------------------------


def _shared(rank: int, folder: Path) -> Any:
    ranks = Ranks.join(LEADER, 60.0)
    try:
        for step in range(2):
            if not same(ranks.share(tape(step) if rank == LEADER else None), tape(step)):
                return f"tape {step} is another one"
        lost = ranks.share(Tape(2, lost="it fell") if rank == LEADER else None).lost
        return [lost, ranks.gather({"rank": rank})]
    finally:
        ranks.close()


def _until_lost(rank: int, leave: Callable[[Ranks], None]) -> Any:
    """Rank 2 goes; what the others are told."""
    ranks = Ranks.join(LEADER, 60.0)
    ranks.barrier()
    ranks._timeout = 3.0  # of what is tested, and not of a busy machine's start
    if rank == 2:
        leave(ranks)
        ranks.close()
        return "gone"
    try:
        while True:
            ranks.share(tape(0) if rank == LEADER else None)
    except RankLost as error:
        return str(error)
    finally:
        ranks.close()


def _died(rank: int, folder: Path) -> Any:
    return _until_lost(rank, lambda ranks: os.kill(os.getpid(), signal.SIGKILL))


def _hung(rank: int, folder: Path) -> Any:
    return _until_lost(rank, lambda ranks: signal.pause())


def _left(rank: int, folder: Path) -> Any:
    return _until_lost(rank, lambda ranks: ranks.leave("a lack of time"))


class _Damaging(Ranks):
    """The bits change between the announcement and the sending."""

    def _send(self, what: str, buffer: Tensor) -> None:
        super()._send(what, buffer)
        if self.rank == 2:
            buffer[3] ^= 1


def _damaged(rank: int, folder: Path) -> Any:
    ranks = _Damaging.join(LEADER, 60.0)
    try:
        ranks.share(tape(0) if rank == LEADER else None)
        return "whole"
    except RankLost as error:
        return str(error)
    finally:
        ranks.close()


def _whole(rank: int, folder: Path) -> Any:
    """The command on all ranks, the first one wrong."""
    command = ["compare", "--cpu", "--suspect-rank", "0", "--steps", "8", "--simulate", FAULT, *TINY]
    command += ["--mode", "lock-step", "--mode", "free"]
    done = CliRunner().invoke(cli, [*command, "--out", str(folder / "whole")])
    return [done.exit_code, done.stdout, done.stderr, _trace(done.exception)]


def _other_options(rank: int, folder: Path) -> Any:
    command = ["compare", "--cpu", "--suspect-rank", "0", "--steps", str(2 + rank // 2), *TINY]
    done = CliRunner().invoke(cli, [*command, "--out", str(folder / "other")])
    return [done.exit_code, done.stderr, _trace(done.exception)]


def _killed(rank: int, folder: Path) -> Any:
    """One process alone, killed in its second step."""

    def tell(self: Progress, mode: Mode, done: int) -> None:
        if done == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    Progress.tell = tell  # type: ignore[method-assign]
    command = ["compare", "--devices", "3", "--mode", "lock-step", "--steps", "9", "--simulate", FAULT, *TINY]
    CliRunner().invoke(cli, [*command, "--out", str(folder / "killed")])
    return "survived"


SCENES: dict[str, tuple[int, Scene]] = {
    "shared": (3, _shared),
    "died": (3, _died),
    "hung": (3, _hung),
    "left": (3, _left),
    "damaged": (3, _damaged),
    "whole": (3, _whole),
    "other options": (3, _other_options),
    "killed": (1, _killed),
}


# Playing ----------------------------------------------------------------------------------------------------------


def _trace(error: BaseException | None) -> str:
    known = error is None or isinstance(error, SystemExit)
    return "" if known else "".join(traceback.format_exception(error))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _child(name: str, scene: Scene, rank: int, world: int, port: int, folder: Path) -> None:
    try:
        if world > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        said = scene(rank, folder)
    except BaseException as error:  # noqa: BLE001  (whatever it is: the test shows it)
        said = "".join(traceback.format_exception(error))
    (folder / f"{name}.{rank}").write_text(json.dumps(said))
    os._exit(0)


def play(name: str, folder: Path) -> list[Any]:
    """What each rank of a scene has said; None where it was killed."""
    world, scene = SCENES[name]
    port = _free_port()
    children = []
    for rank in range(world):
        child = os.fork()
        if not child:
            _child(name, scene, rank, world, port, folder)
        children.append(child)
    if name == "hung":  # the last one hangs, and is not waited for
        os.waitpid(children[0], 0)
        os.waitpid(children[1], 0)
        os.kill(children[2], signal.SIGKILL)
        children = children[2:]
    for child in children:
        os.waitpid(child, 0)
    files = [folder / f"{name}.{rank}" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


if __name__ == "__main__":
    _folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps({name: play(name, _folder) for name in SCENES}))
