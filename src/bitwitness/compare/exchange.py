"""How the leader's tape comes to everybody else: not at all where all participants are in one process, over the network where not.

A lineup asks for the tape of a step and never knows where it comes from, so that a comparison of GPUs of one machine and one across
nodes are the same code. Across nodes everybody waits for everybody, so each wait ends: with what was waited for, with the time-out and
the names of those who are missing, or with the word of one who left. Small things go through the job's store, where a wait can be
interrupted and each rank is seen by itself; tensors go through gloo, with a digest, because a tape that was damaged on its way would
make all healthy devices look wrong alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bitwitness.errors import RankLost

if TYPE_CHECKING:
    from bitwitness.compare.records import Site
    from bitwitness.compare.tape import Tape

T = TypeVar("T")

_SLICE = 0.5
"""Seconds between looks whether somebody has left."""
_CATCH_UP = 2.0
"""Seconds after which a rank that has not come to where another one's wait has failed is named as missing."""
_TOGETHER = 16 << 20
"""Bytes: smaller tensors travel together, up to so many."""
_FAREWELL = 20.0
"""Seconds for which the rank that holds the store waits for the others to have read all that is in it."""

_Layout = list[tuple["Site", torch.dtype, tuple[int, ...]]]


class Exchange(Protocol):
    """What a lineup needs of wherever its other participants are.

    Attributes:
        rank: of this process. world: how many there are. leader: the rank whose process holds the leader.
    """

    rank: int
    world: int
    leader: int

    def share(self, tape: Tape | None) -> Tape:
        """The leader's tape of this step. The leader's process gives it, or None where the leader has failed; all others give None.

        Raises:
            RankLost: the leader has failed, or some rank did not take part in time.
        """
        ...

    def gather(self, obj: T) -> list[T]:
        """What every rank gave, by rank. For small things that can be pickled.

        Raises:
            RankLost: some rank did not take part in time.
        """
        ...

    def barrier(self) -> None:
        """Wait until every rank has come here.

        Raises:
            RankLost: some rank did not in time.
        """
        ...


class Alone:
    """All participants are in this process."""

    rank = 0
    world = 1
    leader = 0

    def share(self, tape: Tape | None) -> Tape:
        """The tape itself."""
        if tape is None:
            raise RankLost(_NO_LEADER)
        return tape

    def gather(self, obj: T) -> list[T]:
        """That of this process."""
        return [obj]

    def barrier(self) -> None:
        """Nobody else is waited for."""


_NO_LEADER = "the leader has no tape of this step: it has failed, and nobody can be compared any more"


class Ranks:
    """One process of several that torchrun has started, one participant each.

    Args:
        store: that all ranks share.
        rank, world: as torchrun says.
        leader: the rank of the leader.
        timeout: seconds that one waits for another.

    Raises:
        RankLost: not all have come in time; names those who have not.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, leader: int, timeout: float) -> None:
        self.rank, self.world, self.leader = rank, world, leader
        self._timeout, self._farewell = timeout, _FAREWELL
        self._store = dist.PrefixStore("bitwitness/compare", store)
        self._count = 0
        self._tapes = 0
        self.barrier()  # making a group has no end that could name who is missing
        if os.environ.get("LOCAL_WORLD_SIZE", "") == str(world):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the name of a container need not resolve
        try:
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
            )
        except RuntimeError as error:
            raise self._lost("connecting with one another", error) from error

    @classmethod
    def join(cls, leader: int, timeout: float) -> Ranks:
        """Join the ranks of torchrun's environment.

        Raises:
            RankLost: not all have come in time.
        """
        place = os.environ.get("MASTER_ADDR", "MASTER_ADDR")
        try:
            store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        except (RuntimeError, OSError, ValueError) as error:
            raise RankLost(f"the ranks could not meet at {place}: {_first(error)}") from error
        return cls(store, rank, world, leader, timeout)

    # What a lineup calls --------------------------------------------------------------------------------------------

    def share(self, tape: Tape | None) -> Tape:
        """The leader's tape of this step, from its rank; see `Exchange.share`.

        Raises:
            RankLost: the leader has failed, some rank did not take part in time, or the tape came damaged.
        """
        self._tapes += 1
        what = f"sharing tape {self._tapes} of this run"
        if self.rank == self.leader:
            self._announce(what, tape)
            if tape is None:
                raise RankLost(_NO_LEADER)
            for buffer in _packed(list(tape.entries.values())):
                self._send(what, buffer)
            return tape
        empty, layout, digest = self._announced(what)
        entries: dict[Site, Tensor] = {}
        seen = hashlib.blake2b(digest_size=16)
        for group in _groups([(dtype, shape) for _, dtype, shape in layout]):
            buffer = torch.empty(sum(_bytes(*one) for one in group), dtype=torch.uint8)
            self._send(what, buffer)
            seen.update(buffer.numpy().data)
            for tensor in _unpacked(buffer, group):
                entries[layout[len(entries)][0]] = tensor
        if seen.digest() != digest:
            raise RankLost(
                f"{what} came to rank {self.rank} otherwise than it left rank {self.leader}: the network or a host's memory between "
                "them damages what is sent, and nobody can be compared over it"
            )
        return replace(empty, entries=entries)

    def gather(self, obj: T) -> list[T]:
        """What every rank gave, by rank; see `Exchange.gather`."""
        what = "gathering what all ranks say"
        key = self._begin(what)
        try:
            self._put(f"{key}/{self.rank}", obj)
            found = [pickle.loads(self._await(f"{key}/{one}", what)) for one in range(self.world)]  # noqa: S301 (our own ranks)
            if self._store.add(f"{key}/read", 1) == self.world:
                for name in [*map(str, range(self.world)), "read"]:
                    self._store.delete_key(f"{key}/{name}")
        except RuntimeError as error:
            raise self._lost(what, error) from error
        return found

    def barrier(self) -> None:
        """Wait until every rank has come here; see `Exchange.barrier`."""
        self.gather(None)

    def leave(self, why: str) -> None:
        """Say to all others that this rank takes part no more, so that none waits for it; their next wait ends with `RankLost`."""
        with suppress(RuntimeError):
            self._store.set("left", f"rank {self.rank} has left the comparison: {why[:500]}")

    def close(self) -> None:
        """End: the rank that may hold the store waits until the others need it no more."""
        with suppress(RuntimeError):
            self._store.set(f"gone/{self.rank}", "")
            until = time.monotonic() + self._farewell
            others = [f"gone/{one}" for one in range(1, self.world)] if self.rank == 0 else []
            while time.monotonic() < until and not all(self._store.check([key]) for key in others):
                time.sleep(0.02)
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()

    # How it is done -------------------------------------------------------------------------------------------------

    def _begin(self, what: str) -> str:
        """Leave word of where this rank is; the name of the place in the store for what it does now."""
        self._count += 1
        with suppress(RuntimeError):  # what follows finds out by itself
            self._store.set(f"at/{self.rank}", json.dumps([self._count, what, time.time()]))
        return f"{self._count}"

    def _announce(self, what: str, tape: Tape | None) -> None:
        """Tell the others which tensors come, and with which digest."""
        key = self._begin(what)
        said: Any = None
        if tape is not None:
            layout: _Layout = [(site, one.dtype, tuple(one.shape)) for site, one in tape.entries.items()]
            digest = hashlib.blake2b(digest_size=16)
            for buffer in _packed(list(tape.entries.values())):
                digest.update(buffer.numpy().data)
            said = (replace(tape, entries={}), layout, digest.digest())
        try:
            self._put(f"{key}/tape", said)
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def _announced(self, what: str) -> tuple[Tape, _Layout, bytes]:
        key = self._begin(what)
        try:
            said = pickle.loads(self._await(f"{key}/tape", what))  # noqa: S301  (our own ranks)
            if self._store.add(f"{key}/read", 1) == self.world - 1:
                self._store.delete_key(f"{key}/tape")
                self._store.delete_key(f"{key}/read")
        except RuntimeError as error:
            raise self._lost(what, error) from error
        if said is None:
            raise RankLost(f"{_NO_LEADER} (rank {self.leader})")
        found: tuple[Tape, _Layout, bytes] = said
        return found

    def _send(self, what: str, buffer: Tensor) -> None:
        """Broadcast from the leader."""
        if not buffer.numel():
            return
        try:
            work = dist.broadcast(buffer, self.leader, async_op=True)
            assert work is not None
            self._until(work.is_completed, what)
            work.wait()
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def _until(self, done: Callable[[], bool], what: str) -> None:
        """Wait in short sleeps: what waits in C++ hears no Ctrl-C, and c10d warns of each wait that is cut short."""
        begun = looked = time.monotonic()
        while not done():
            now = time.monotonic()
            time.sleep(min(0.02, 0.0002 + (now - begun) / 50))
            if now - looked > _SLICE:
                looked = now
                self._check_left()
            if now - begun > self._timeout + _SLICE:
                raise self._lost(what, TimeoutError(f"not complete after {self._timeout:g} s"))

    def _put(self, key: str, obj: object) -> None:
        self._store.set(key, pickle.dumps(obj))  # type: ignore[arg-type]  # takes bytes, and says that it takes text

    def _await(self, key: str, what: str) -> bytes:
        """What is at a key of the store, once it is there."""
        self._until(lambda: self._store.check([key]), what)
        return bytes(self._store.get(key))

    def _check_left(self) -> None:
        if self._store.check(["left"]):
            raise RankLost(self._store.get("left").decode(errors="replace"))

    def _lost(self, what: str, error: Exception) -> RankLost:
        """Who was not there, by the word that each has left."""
        try:
            if self._store.check(["left"]):
                return RankLost(self._store.get("left").decode(errors="replace"))
            self._store.set(f"lost/{self.rank}", "")
            self._farewell = _CATCH_UP
            until = time.monotonic() + _CATCH_UP  # who was only a little later is not missing
            while (behind := self._behind()) and time.monotonic() < until:
                time.sleep(0.05)
            missing = [self._place(one) for one in behind]
        except RuntimeError as gone:
            host = os.environ.get("MASTER_ADDR", "that of rank 0")
            return RankLost(
                f"the store of the job on {host} is gone while {what}: look at that host first ({_first(gone)})"
            )
        who = (
            f"not there: {', '.join(missing[:8])}" if missing else "all ranks had come: one has died while it took part"
        )
        return RankLost(f"{what} was not completed on rank {self.rank} ({_first(error)}); {who}")

    def _behind(self) -> list[int]:
        """Who has not come to where this rank is, and does not miss somebody either."""
        behind = [one for one in range(self.world) if self._at(one)[0] < self._count]
        return [one for one in behind if not self._store.check([f"lost/{one}"])]

    def _at(self, rank: int) -> tuple[int, str, float]:
        """How many waits a rank has begun, the last one, and when."""
        key = f"at/{rank}"
        if not self._store.check([key]):
            return 0, "", 0.0
        count, what, when = json.loads(self._store.get(key))
        return int(count), str(what), float(when)

    def _place(self, rank: int) -> str:
        count, what, when = self._at(rank)
        if not count:
            return f"rank {rank} (it has never come)"
        return f"rank {rank} (last at {what}, {max(0.0, time.time() - when):.0f} s ago)"


def _first(error: BaseException) -> str:
    """The first sentence of an error, without the place in gloo's source that precedes it."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.rpartition(".cc:")[2].partition("] ")[2].partition(". ")[0][:300] or line[:300]


# Tensors as bytes ---------------------------------------------------------------------------------------------------


def _bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    size = dtype.itemsize
    for one in shape:
        size *= one
    return size


def _groups(
    layout: Sequence[tuple[torch.dtype, tuple[int, ...]]],
) -> Iterator[list[tuple[torch.dtype, tuple[int, ...]]]]:
    """Which tensors travel together, the same on both sides."""
    group: list[tuple[torch.dtype, tuple[int, ...]]] = []
    size = 0
    for one in layout:
        more = _bytes(*one)
        if group and size + more > _TOGETHER:
            yield group
            group, size = [], 0
        group.append(one)
        size += more
    if group:
        yield group


def _packed(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Tensors as bytes, small ones together: uint8 `[bytes]`, in order."""
    place = 0
    for group in _groups([(one.dtype, tuple(one.shape)) for one in tensors]):
        flat = [one.contiguous().reshape(-1).view(torch.uint8) for one in tensors[place : place + len(group)]]
        place += len(group)
        yield flat[0] if len(flat) == 1 else torch.cat(flat)


def _unpacked(buffer: Tensor, group: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> Iterator[Tensor]:
    """The inverse, each in memory of its own: whoever is done with one tensor must not keep all."""
    place = 0
    for dtype, shape in group:
        size = _bytes(dtype, shape)
        piece = buffer[place : place + size]
        place += size
        yield (piece if len(group) == 1 else piece.clone()).view(dtype).reshape(shape)
