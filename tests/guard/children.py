"""Jobs whose ranks die, stall, or are fewer: each rank of a scenario is a process of its own, forked from one without a group.

Many such jobs run at once, because most of them wait.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from bitwitness import BitwitnessError
from bitwitness.guard import checkpoints, snapshot
from bitwitness.runfiles import read_label
from bitwitness.runfiles.checkpoints import Checkpoints
from tests.guard.harness import Rank, Seen
from tests.guard.saving import RARELY, Small, expected, visible
from tests.guard.training import described
from tests.guard.worker import die_with


@dataclass(frozen=True)
class Child:
    """A job: how many ranks, what they run, in which folder if not one of its own."""

    name: str
    world_size: int
    run: Callable[[Rank, Any], Seen]
    given: Any = None
    folder: str = ""


def run_children(place: Rank, children: Sequence[Child]) -> Seen:
    """Fork this rank of every job at once; what each saw, or how it ended."""
    _meet(place)
    pids: dict[int, Child] = {}
    own = os.getpid()
    for child in children:
        if place.rank < child.world_size:
            pid = os.fork()
            if pid == 0:
                die_with(own)
                _child(place, child)
            pids[pid] = child
    seen: Seen = {}
    for pid, child in pids.items():
        _, status = os.waitpid(pid, 0)
        file = place.folder / f"{child.name}-{place.rank}.json".replace(" ", "-")
        seen[child.name] = (
            json.loads(file.read_text()) if file.exists() else {"ended": os.waitstatus_to_exitcode(status)}
        )
    return seen


def _meet(place: Rank) -> None:
    """Wait for the parents of the other ranks: their jobs of the scenario before may have taken longer."""
    (place.folder / f"ready-{place.rank}").touch()
    while len(list(place.folder.glob("ready-*"))) < place.world_size:
        time.sleep(0.02)


def _store(place: Rank, child: Child) -> dist.Store:
    """As torchrun does it, kept by the first rank; it takes a free port and leaves word of it."""
    word = place.folder / f"port-of-{child.name}".replace(" ", "-")
    timeout = timedelta(seconds=120)
    if place.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, child.world_size, True, timeout, wait_for_workers=False)
        word.with_suffix(".tmp").write_text(str(store.port))
        word.with_suffix(".tmp").rename(word)
        return store
    while not word.exists():
        time.sleep(0.02)
    return dist.TCPStore("127.0.0.1", int(word.read_text()), child.world_size, False, timeout, wait_for_workers=False)


def _child(place: Rank, child: Child) -> None:
    try:
        folder = place.folder.parent / (child.folder or child.name.replace(" ", "-"))
        folder.mkdir(exist_ok=True)
        if child.world_size > 1:
            store = _store(place, child)
            dist.init_process_group("gloo", rank=place.rank, world_size=child.world_size, store=store)
        seen = child.run(Rank(place.rank, child.world_size, folder), child.given)
        file = place.folder / f"{child.name}-{place.rank}.json".replace(" ", "-")
        file.with_suffix(".tmp").write_text(json.dumps(seen))
        file.with_suffix(".tmp").rename(file)
    except BaseException:  # noqa: BLE001  (it must not go on in the code of its parent)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


# A rank that dies or stalls while all save ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """Where in a save something happens to a rank; `sleep` seconds, `sys.exit(7)`, or death."""

    where: str
    rank: int
    sleep: float = 0.0
    exits: bool = False
    timeout: float = 30.0
    checkpoint_timeout: float = 6.0
    left: tuple[str, ...] = ("step-00000002",)

    @property
    def name(self) -> str:
        """For the name of a scenario."""
        what = "stalls" if self.sleep else "exits" if self.exits else "dies"
        return f"{what} at {self.where} on rank {self.rank}, {self.sleep:.0f} s"

    def strike(self) -> None:
        """It happens, now."""
        if self.exits:
            raise SystemExit(7)
        if not self.sleep:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.sleep)


def struck(place: Rank, moment: Moment) -> Seen:
    """Two steps, a save, one more step, and a save in which it happens; then, if all is well, another step."""
    job, seen = Small(place), Seen(error=None)
    with job.guard(policy={"checkpoint_timeout": 120.0}) as guard:
        job.train(guard, 2)
        guard.save_checkpoint()
        job.train(guard, 3)
        # A busy machine may be slow everywhere else.
        guard.job.policy = guard.job.policy.replace(checkpoint_timeout=moment.checkpoint_timeout)
        guard.job.channel.timeout = moment.timeout
        started = time.monotonic()
        with ExitStack() as stack:
            if place.rank == moment.rank:
                stack.enter_context(_trap(moment))
            try:
                guard.save_checkpoint()
            except BitwitnessError as error:
                seen["error"] = described(error, 3)
        seen["waited"] = time.monotonic() - started
        guard.job.channel.timeout = RARELY["timeout"]
        if seen["error"] is None:
            job.train(guard, 4)
            seen["right"] = job.state() == expected(place, 4)
    return seen


def _trap(moment: Moment) -> Any:
    """Have it happen on the way into one of these."""
    owner: Any
    owner, name = {
        "begin": (Checkpoints, "stage"),
        "write": (snapshot, "write"),
        "fsync": (os, "fsync"),
        "read back": (checkpoints, "digest_file"),
        "publish": (Path, "rename"),
        "published": (Checkpoints, "prune"),
    }[moment.where]
    original, armed = getattr(owner, name), [True]

    def trapped(*args: Any, **kwargs: Any) -> Any:
        done = original(*args, **kwargs) if moment.where == "write" else None
        if armed.pop() if armed else False:
            moment.strike()
        return done if moment.where == "write" else original(*args, **kwargs)

    return patch.object(owner, name, trapped)


def gone_on(place: Rank, moment: Moment) -> Seen:
    """The restart: what is there, from where it goes on, and how it ends."""
    job, seen = Small(place), Seen(visible=visible(place.run_dir))
    with job.guard() as guard:
        seen["from"] = job.resume(guard)
        job.train(guard, 4)
        seen["saved"] = guard.save_checkpoint().name
    return seen | {"right": job.state() == expected(place, 4), "afterwards": visible(place.run_dir)}


# Fewer ranks ----------------------------------------------------------------------------------------------------------


def small_job(place: Rank, _: None) -> Seen:
    """One process, or two nodes."""
    job, seen = Small(place), Seen()
    with job.guard() as guard:
        job.train(guard, 2)
        guard.save_checkpoint()
        with guard.checkpoint(place.folder / "own.pt") as staged:
            if place.rank == 0:
                (place.folder / "own.pt").write_bytes(b"weights")
        job.train(guard, 3)
    seen["staged"] = staged.standing.step
    again = Small(place)
    with again.guard() as guard:
        seen["from"] = again.resume(guard)
        again.train(guard, 4)
        guard.save_checkpoint()
    label = read_label(place.run_dir / "checkpoints" / "step-00000002")
    return seen | {"right": again.state() == expected(place, 4), "read_back": label.read_back}


def of_more_ranks(place: Rank, _: None) -> Seen:
    """What two ranks saved, in a job of one."""
    job = Small(place)
    with job.guard() as guard:
        try:
            guard.resume()
        except BitwitnessError as error:
            return {"error": described(error, -1)}
    return {"error": None}
