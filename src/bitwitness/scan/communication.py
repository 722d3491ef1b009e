"""Ranks of a scan send each other what each can verify alone: the only suite in which they wait for one another.

Apart from the loop of a rank, which calls `run`, and from `linking`, which judges what it leaves in the journals: here is who meets
whom, and how a rank that does not answer costs the others a time-out and no more. Whoever comes in time takes part. One rank, the
lowest, says before each round whether there is one, through the store and not through the links that are looked at; whoever loses
a peer says so there, and the suite ends for all, with the reason. What was not received is not judged.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bitwitness.runfiles.answers import Device
from bitwitness.runfiles.journal import Journal
from bitwitness.scan.collectives import Place, Result, results
from bitwitness.scan.payloads import PATTERNS, Message, compare, payload, poisoned
from bitwitness.scan.tournament import rounds

logger = logging.getLogger(__name__)

Strike = Callable[[Tensor, int, int], None]
"""Called with what was received, before it is looked at: the tensor on the processor, sender (-1: a collective) and receiver."""

SMALL, LARGE, LARGE_ON_DEVICE = 4_099, 2**20, 2**24
"""Bytes of a message. Small ones have every pattern in each round, large ones two of them in turn."""
PATIENCE, TIMEOUT = 60.0, 30.0
"""Seconds to wait for others to come, and for each answer of one that has come."""
_FLUSH = 1.0
_POLL = 0.1
_COLLECTIVES_EVERY = 15
"""Rounds at least: with few ranks, they would take most of the time."""
_AHEAD = 4
"""A word that the suite ends is left for one of the next so many rounds: the lowest rank may be one ahead."""


def run(
    device: Device,
    torch_device: torch.device,
    world: int,
    journal: Journal,
    *,
    seconds: float,
    seed: int,
    meeting: Path | None,
    strike: Strike | None = None,
    call: int = 0,
    begin: int = 0,
    most: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    patience: float = PATIENCE,
    timeout: float = TIMEOUT,
) -> int:
    """Take part in the suite for some time; never raises because of another rank, and always comes back.

    Args:
        device: who this is.
        torch_device: what is sent from and received into.
        world: ranks of the scan.
        journal: gets `link`, `collective` and `no-link` records.
        seconds: from when they have met; the lowest rank's clock decides.
        seed: of the scan: the payloads follow from it.
        meeting: a folder of this machine where its ranks meet, or None for the store that torchrun's environment names.
        strike: a fault on purpose (`payloads.LinkStriker`).
        call: number of this call, the same on all ranks.
        begin: what the last call returned; the lowest rank's counts.
        most: rounds at most, also where there is time for more; the lowest rank's counts.
        stop: whether this rank was asked to stop; the lowest rank's counts for all, between rounds and in waiting for others.
        patience: seconds to wait for others to come.
        timeout: seconds to wait for each answer of one that has come.

    Returns:
        How many rounds were played so far: with it as `begin`, the next call goes on where this one stopped.

    Raises:
        RunFilesError: the journal cannot be written.
    """
    tally = _Tally(journal)
    if world < 2:
        tally.silent(-1, "there is no other rank")
        return begin
    try:
        store = _store(meeting, device.rank, world, call, timedelta(seconds=timeout))
        members = _meet(store, device, begin, world, patience, stop)
        end = time.monotonic() + seconds
    except (RuntimeError, OSError) as error:
        tally.silent(-1, f"the ranks could not meet: {_first_line(error)}")
        return begin
    for absent in sorted({*range(world)} - members.nodes.keys() - {device.rank}):
        tally.silent(absent, f"it did not come within {patience:g} s")
    if device.rank not in members.nodes or len(members.nodes) < 2:
        tally.silent(
            -1, "it came after the others had begun" if device.rank not in members.nodes else "no other rank came"
        )
        return begin
    try:
        with _group(torch_device, store, members, device.rank, timedelta(seconds=timeout)):
            suite = _Suite(
                store, members, device.rank, torch_device, (seed, call), timedelta(seconds=timeout), tally, strike
            )
            return suite.play(lambda played: not stop() and time.monotonic() < end and (most is None or played < most))
    except RuntimeError as error:  # the group could not be made
        tally.silent(-1, f"the ranks could not connect: {_first_line(error)}")
        return members.begin
    finally:
        tally.flush()


@dataclass(frozen=True, slots=True)
class _Members:
    """Who takes part: by rank its node; and with which step they begin."""

    nodes: dict[int, str]
    begin: int

    @property
    def ranks(self) -> list[int]:
        return sorted(self.nodes)


class _Lost(Exception):
    """A peer did not answer; -1 for nobody in particular."""

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(why)
        self.peer = peer


# Meeting -------------------------------------------------------------------------------------------------------------


def _store(meeting: Path | None, rank: int, world: int, call: int, timeout: timedelta) -> dist.Store:
    """Where the ranks of this call find each other: no port is guessed, so no two scans can take each other's."""
    if meeting is None:
        return dist.PrefixStore(f"bitwitness/comm/{call}", _environment_store(rank, world, timeout))
    meeting.mkdir(parents=True, exist_ok=True)
    store = dist.FileStore(str(meeting / f"comm-{call}"))
    store.set_timeout(timeout)
    return store


@cache
def _environment_store(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """The one that torchrun keeps; where it keeps none, rank 0 does, as long as its process lives."""
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise RuntimeError(
            f"MASTER_ADDR and MASTER_PORT name no place to meet ({error}): start it by torchrun"
        ) from error
    store = dist.TCPStore(address, port, world, rank == 0 and not kept, timeout, wait_for_workers=False)
    return dist.PrefixStore(f"bitwitness/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _meet(
    store: dist.Store, device: Device, begin: int, world: int, patience: float, stop: Callable[[], bool]
) -> _Members:
    """Say that one is here, and wait for the others or the end of patience. Who takes part is settled once, for all."""
    store.set(f"here/{device.rank}", json.dumps({"node": device.node, "begin": begin}))
    deadline = time.monotonic() + patience
    while not store.check(["members"]):
        complete = store.check([f"here/{rank}" for rank in range(world)])
        if complete or time.monotonic() > deadline:
            here = [rank for rank in range(world) if complete or store.check([f"here/{rank}"])]
            store.compare_set("members", "", json.dumps(here))
            break
        if stop():
            raise RuntimeError("asked to stop")
        time.sleep(_POLL)
    said = {rank: json.loads(store.get(f"here/{rank}")) for rank in json.loads(store.get("members"))}
    return _Members({rank: str(one["node"]) for rank, one in said.items()}, int(said[min(said)]["begin"]))


@contextmanager
def _group(
    torch_device: torch.device, store: dist.Store, members: _Members, rank: int, timeout: timedelta
) -> Iterator[None]:
    """A process group of those who came. One that is there already is used and left, if it is of just these ranks."""
    index, size = members.ranks.index(rank), len(members.nodes)
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (index, size):
            raise RuntimeError(f"there is a process group of {dist.get_world_size()} ranks already, and {size} came")
        yield
        return
    backend = "nccl" if torch_device.type == "cuda" else "gloo"
    with _blocking():
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=index,
            world_size=size,
            timeout=timeout,
            device_id=torch_device if backend == "nccl" else None,
        )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _blocking() -> Iterator[None]:
    """NCCL reads when a group is made that a time-out shall raise here, and not end the process."""
    wanted = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# Playing -------------------------------------------------------------------------------------------------------------


class _Suite:
    """The part of one rank in one call."""

    def __init__(
        self,
        store: dist.Store,
        members: _Members,
        rank: int,
        torch_device: torch.device,
        seed: tuple[int, int],
        timeout: timedelta,
        tally: _Tally,
        strike: Strike | None,
    ) -> None:
        self.store, self.members, self.rank, self.device = store, members, rank, torch_device
        self.seed, self.timeout, self.tally, self.strike = seed, timeout, tally, strike
        self.ranks = members.ranks
        self.rounds = rounds(members.nodes)
        self.sizes = (SMALL, LARGE if torch_device.type == "cpu" else LARGE_ON_DEVICE)

    def play(self, wanted: Callable[[int], bool]) -> int:
        """One step after the other until the lowest rank says that it is enough, or somebody is lost: the rounds played."""
        begin = played = self.members.begin
        step = 0
        try:
            while self._goes_on(step, wanted(played - begin)):
                # A group's first call must be one of all its ranks (NCCL), and collectives take the least time.
                if step % (max(len(self.rounds), _COLLECTIVES_EVERY) + 1) == 0:
                    self._collectives(step)
                else:
                    self._round(played, self.rounds[played % len(self.rounds)])
                    played += 1
                step += 1
                self.tally.flush(_FLUSH)
        except _Lost as lost:
            self._say_lost(step, lost)
        return played

    def _goes_on(self, step: int, wanted: bool) -> bool:
        """Whether there is such a step: the lowest rank's word, or that of one who lost a peer, whichever came first."""
        key = f"step/{step}"
        try:
            if self.rank == self.ranks[0]:
                self.store.compare_set(key, "", "go" if wanted else "over")
            self.store.wait([key], 2 * self.timeout)  # the lowest rank may itself be waiting for a peer
            word = self.store.get(key).decode()
        except RuntimeError as error:
            raise _Lost(
                self.ranks[0], f"no word of rank {self.ranks[0]} about step {step}: {_first_line(error)}"
            ) from error
        if word not in ("go", "over"):
            raise _Lost(-1, word)
        return word == "go"

    def _say_lost(self, step: int, lost: _Lost) -> None:
        """Leave the reason for the others, and in the journal the one that was left first: the rest follows from it."""
        why = f"rank {self.rank} at step {step}: {lost}" if lost.peer >= 0 else str(lost)
        try:
            first = self.store.compare_set("lost", "", why).decode()
            for ahead in range(1, _AHEAD):
                self.store.compare_set(f"step/{step + ahead}", "", f"the suite ended: {first}")
        except RuntimeError:  # the store has gone as well
            first = why
        logger.warning("comm ends: %s", first)
        known = first == why or first in str(lost)
        self.tally.silent(lost.peer, str(lost) if known else f"{lost}; first of all: {first}")

    def _collectives(self, step: int) -> None:
        place = Place(self.ranks.index(self.rank), len(self.ranks), self.seed, step, self.device, self.timeout)
        last = "none"
        try:
            for number, result in enumerate(results(place, self.store)):
                last = result.item
                self._look_at_result(result, f"{self.seed[1]}/{step}/{number}")
        except RuntimeError as error:
            raise _Lost(-1, f"a collective did not end (the last that did: {last}): {_first_line(error)}") from error

    def _look_at_result(self, result: Result, call: str) -> None:
        if self.strike is not None:
            self.strike(result.got, -1, self.rank)
        right = torch.equal(result.got, result.expected)
        self.tally.collective(result.item, len(self.ranks), call, "" if right else result.digest)

    def _round(self, step: int, pairs: Sequence[tuple[int, int]]) -> None:
        peer = next((a + b - self.rank for a, b in pairs if self.rank in (a, b)), None)
        if peer is None:
            return
        messages = [*((self.sizes[0], pattern) for pattern in PATTERNS)]
        messages += [(self.sizes[1], PATTERNS[(step + more) % len(PATTERNS)]) for more in (0, 1)]
        sent = [Message(self.seed, self.rank, peer, step, size, pattern) for size, pattern in messages]
        wanted = [Message(self.seed, peer, self.rank, step, size, pattern) for size, pattern in messages]
        expected = [payload(message) for message in wanted]
        received = self._exchange(peer, [payload(message) for message in sent], expected)
        for message, right, got in zip(wanted, expected, received, strict=True):
            if self.strike is not None:
                self.strike(got, peer, self.rank)
            self.tally.link(message.item, peer, compare(got, right, message))

    def _exchange(self, peer: int, given: Sequence[Tensor], expected: Sequence[Tensor]) -> list[Tensor]:
        """Send and receive at the same time; what came, on the processor."""
        index = self.ranks.index(peer)
        buffers = [poisoned(right).to(self.device) for right in expected]
        work = [dist.P2POp(dist.irecv, buffer, index) for buffer in buffers]
        work += [dist.P2POp(dist.isend, own.to(self.device), index) for own in given]
        try:
            for one in dist.batch_isend_irecv(work):
                one.wait(self.timeout)
            return [buffer.cpu() for buffer in buffers]
        except RuntimeError as error:
            raise _Lost(peer, f"no answer from rank {peer}: {_first_line(error)}") from error


class _Tally:
    """What was received since the last records, and the records."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._links: dict[tuple[str, int], list[int]] = {}
        self._examples: dict[tuple[str, int], dict[str, Any]] = {}
        self._right: dict[tuple[str, int], int] = {}
        self._last = time.monotonic()

    def link(self, item: str, peer: int, wrong: dict[str, Any] | None) -> None:
        """One transfer from a peer."""
        counts = self._links.setdefault((item, peer), [0, 0])
        counts[wrong is not None] += 1
        if wrong is not None:
            self._examples.setdefault((item, peer), wrong)

    def collective(self, item: str, ranks: int, call: str, digest: str) -> None:
        """One call. The digest of a wrong result is written at once, with which call it was: others compare theirs."""
        if digest:
            record = {"item": item, "ranks": ranks, "right": 0, "wrong": 1, "call": call, "digest": digest}
            self._journal.append("collective", record)
        else:
            self._right[item, ranks] = self._right.get((item, ranks), 0) + 1

    def silent(self, peer: int, why: str) -> None:
        """Nothing came."""
        self._journal.append("no-link", {"peer": peer, "why": why[:400]})

    def flush(self, at_least: float = 0.0) -> None:
        """Write what was counted, unless the last time is less than so many seconds ago."""
        if time.monotonic() - self._last < at_least:
            return
        for (item, peer), (right, wrong) in self._links.items():
            example = {"example": self._examples[item, peer]} if wrong else {}
            self._journal.append("link", {"item": item, "peer": peer, "right": right, "wrong": wrong, **example})
        for (item, ranks), right in self._right.items():
            self._journal.append("collective", {"item": item, "ranks": ranks, "right": right, "wrong": 0})
        self._links, self._examples, self._right = {}, {}, {}
        self._last = time.monotonic()


def _first_line(error: BaseException) -> str:
    """What is worth keeping of a backend's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
