"""The one way in which the ranks of a guarded job talk to each other.

Every collective of the guard goes through here, for two promises. First, a check that raises on one rank must not leave
the others waiting: whatever a rank is to contribute is computed under `Channel`'s eyes, and a failure travels through the
same collective in place of the contribution. Second, no wait is without end: each is cut into slices, ends at the
time-out or as soon as some rank has given up, and says which ranks did not take part, from heartbeats that every rank
leaves in the job's store.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from bitwitness import errors
from bitwitness.errors import BitwitnessError, CheckFailed, ConfigurationError, RankLost
from bitwitness.topology import Topology

logger = logging.getLogger(__name__)

_SLICE = 1.0
"""Seconds between looks at the store while a collective is under way: how late a rank learns that another gave up."""

_BEAT_BYTES = 200
"""Of a sign of life, written in place so that its reader never finds it torn."""

_GRACE = 5.0
"""Seconds that a rank which lost a collective waits for the others to say so too, before it names the silent ones."""


class Channel:
    """A process group of the guard's own, on the job's backend, so that its collectives never mix with the job's.

    Making one is itself collective. With one process there is no group, and every exchange is with oneself.

    Args:
        rank: this rank; `world_size`: how many there are.
        device: where the model lives; collectives run there if the backend can, else on the CPU.
        timeout: seconds.
        problem: why this rank cannot take part; every rank then raises it.

    Raises:
        RankLost: not every rank made a channel in time; names those.
    """

    def __init__(
        self, rank: int, world_size: int, device: torch.device, timeout: float, problem: BitwitnessError | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.topology: Topology | None = None
        self.collective_seconds: dict[str, float] = defaultdict(float)
        self.local_seconds: dict[str, float] = defaultdict(float)
        self._step = -1
        self._last_exchange = time.perf_counter()
        self._meetings = 0
        self._told = False
        self._beats = _beats_file(rank)
        self._group: dist.ProcessGroup | None = None
        self.device = torch.device("cpu")
        if world_size > 1:
            # The job's own store has no public name; torchrun and every init_method leave it here.
            self._store = dist.PrefixStore(f"bitwitness/{next(_serials)}", dist.distributed_c10d._get_default_store())
            self._meet(problem)
            # NCCL's own watchdog ends the process without naming anybody, so it is given a little longer than we wait.
            self._group = dist.new_group(timeout=timedelta(seconds=timeout + 60))
            if device.type != "cpu" and "nccl" in str(dist.get_backend(self._group)):
                self.device = device
            self.beat(-1, "start")
        elif problem is not None:
            raise problem

    # What a check calls ---------------------------------------------------------------------------------------------

    def max(self, phase: str, width: int, compute: Callable[[], Tensor | Sequence[int]], own: int = 0) -> Tensor:
        """The element-wise maximum over all ranks of what `compute` returns: int64 `[width + own]`, on the CPU.

        The last `own` values are no business of the others: they come back as they are, in the same read. Together with the
        bitwise complement of a value this also gives its minimum, and hence whether all agree, at a cost that does not grow
        with the number of ranks. This is the only place where a check reads the device.

        Raises:
            CheckFailed: `compute` raised on some rank (or the error itself, if it is one of configuration).
            RankLost: some rank did not take part in time.
        """
        values, error = self._attempt(phase, compute)
        table = torch.zeros(width + 1, dtype=torch.int64, device=self.device)
        rest = table[:0]
        if error is None:
            assert values is not None
            given = values if isinstance(values, Tensor) else torch.tensor(list(values), dtype=torch.int64)
            assert given.numel() == width + own, f"{phase}: {given.numel()} values for a width of {width} + {own}"
            given = given.to(self.device)
            table[1:], rest = given[:width], given[width:]
        else:
            table[0] = 1
        if self._group is not None:
            self._complete(phase, lambda: dist.all_reduce(table, dist.ReduceOp.MAX, self._group, async_op=True))
        result = self._read(phase, torch.cat([table, rest]) if own else table)
        if result[0]:
            self._raise_failures(phase, error)
        return result[1:]

    def gather(self, phase: str, compute: Callable[[], Any]) -> list[Any]:
        """What `compute` returned on every rank, by rank. For rare or small things: the cost grows with the ranks.

        Raises:
            CheckFailed, RankLost: as `max`.
        """
        value, error = self._attempt(phase, compute)
        if error is None:
            mine = pickle.dumps(("value", value))
        else:
            mine = pickle.dumps(("failure", _describe(error)))
        answers = [pickle.loads(content) for content in self._gather_bytes(phase, mine)]  # noqa: S301  (our own ranks)
        failures = {rank: answer for rank, (kind, answer) in enumerate(answers) if kind == "failure"}
        if failures:
            self._raise(phase, failures, error)
        return [answer for _, answer in answers]

    def patiently(self, phase: str, timeout: float, compute: Callable[[], Any]) -> list[Any]:
        """As `gather`, for work that waits for storage: the ranks meet in the store, where waiting is not limited by the
        time-out of collectives and does not occupy the device.

        Raises:
            CheckFailed, RankLost: as `max`.
        """
        value, error = self._attempt(phase, compute)

        def answer() -> Any:
            if error is not None:
                raise error
            return value

        if self._group is not None:
            try:
                self._meet_in_store(phase, timeout)
            except (KeyboardInterrupt, SystemExit) as interruption:
                self.raised(interruption)
                raise
            self._last_exchange = time.perf_counter()
        return self.gather(phase, answer)

    def exchange(self, phase: str, compute: Callable[[], Mapping[int, Tensor]]) -> dict[int, Tensor]:
        """Send bytes to some ranks and receive what others sent here: uint8 `[n]` by rank, each aligned to 64 bytes.

        Raises:
            CheckFailed, RankLost: as `max`.
        """
        outgoing: dict[int, Tensor] = {}

        def prepare() -> Sequence[int]:
            outgoing.update({rank: _padded(content.to(self.device)) for rank, content in compute().items()})
            return ()

        self.max(phase, 0, prepare)
        if self._group is None:
            return outgoing
        sent = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        for rank, content in outgoing.items():
            sent[rank] = content.numel()
        received = torch.empty_like(sent)
        self._complete(phase, lambda: dist.all_to_all_single(received, sent, group=self._group, async_op=True))
        sizes = self._read(phase, received).tolist()
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        data = torch.cat([outgoing[rank] for rank in sorted(outgoing)]) if outgoing else empty
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        splits = [outgoing[rank].numel() if rank in outgoing else 0 for rank in range(self.world_size)]
        self._complete(
            phase, lambda: dist.all_to_all_single(buffer, data, sizes, splits, group=self._group, async_op=True)
        )
        self._wait_for_device(phase)
        parts = torch.split(buffer, sizes)
        return {rank: part for rank, part in enumerate(parts) if part.numel()}

    def beat(self, step: int, phase: str) -> None:
        """Leave word of where this rank is. One small message to the store, whose answer is not waited for."""
        self._step = step
        if self._beats is not None:
            line = json.dumps({"rank": self.rank, "step": step, "phase": phase, "time": time.time()})
            with suppress(OSError):
                os.pwrite(self._beats, line.encode()[:_BEAT_BYTES].ljust(_BEAT_BYTES) + b"\n", 0)
        if self._group is not None:
            try:
                self._store.set(f"beat/{self.rank}", json.dumps([step, phase, time.time()]))
            except RuntimeError:
                logger.debug("heartbeat: the store did not answer", exc_info=True)

    def raised(self, error: BaseException) -> None:
        """Leave word that this rank's own code raised, for the others to find when they miss it."""
        if self._group is not None:
            self._told = True
            with suppress(RuntimeError):
                self._store.set(f"raised/{self.rank}", f"{type(error).__name__}: {str(error)[:300]}")
                self._store.set("abort", str(self.rank))

    def goes_on(self) -> None:
        """Take that word back: the loop caught what was raised and goes on."""
        if self._told:
            self._told = False
            with suppress(RuntimeError):
                self._store.delete_key(f"raised/{self.rank}")
                if self._store.check(["abort"]) and self._store.get("abort").decode() == str(self.rank):
                    self._store.delete_key("abort")

    def who_raised(self) -> str:
        """The ranks that left such word, without waiting for more: the others still wait for this one to fail as well."""
        if self._group is None:
            return ""
        try:
            words = self._told_words()
        except RuntimeError as error:
            return (
                f"The job's store is gone with its host, {os.environ.get('MASTER_ADDR', 'that of rank 0')} ({error})."
            )
        if not words:
            return "No rank has told that it failed: one died or left the loop, and its launcher knows its exit code."
        return "; ".join(words[:8]) + "."

    def _told_words(self) -> list[str]:
        told = [rank for rank in range(self.world_size) if self._store.check([f"raised/{rank}"])]
        return [f"{self._place(rank)} raised {self._store.get(f'raised/{rank}').decode()}" for rank in told]

    def silent_ranks(self, phase: str, busy: float = 0.0) -> str:
        """After a collective of the job or the guard failed: say so to the others, and name the ranks that stay silent.

        Returns a sentence; empty where nothing is known. `busy`: this rank is the one that was late, by so many seconds.
        """
        if self._group is None:
            return ""
        try:
            words = self._told_words()  # first: the store goes with the first rank, which waits until all have answered
            self._store.set(f"lost/{self.rank}", json.dumps([phase, busy]))
            self._store.set("abort", str(self.rank))
            if words and self.rank:
                return "; ".join(words[:8]) + "."
            silent = list(range(self.world_size))
            try:
                return self._name_silent(silent)
            except RuntimeError:
                if 0 in silent:
                    raise
                # The store left with the first rank, which had given up as well: that is not what was lost.
                if not silent:
                    return "Every rank had answered before rank 0 left."
                return "Did not answer before rank 0 left: " + ", ".join(map(self._place, silent[:8])) + "."
        except RuntimeError as error:
            host = os.environ.get("MASTER_ADDR", "the host of rank 0")
            node = f", node {self.topology.node_of(0)}" if self.topology else ""
            return f"the job's store on {host} (started with rank 0{node}) is gone: look at that host first ({error})."

    # How it is done -------------------------------------------------------------------------------------------------

    def _meet(self, problem: BitwitnessError | None) -> None:
        """Wait in the store until every rank is here: making a group has no end that we could choose or explain."""
        ranks = range(self.world_size)
        if problem is not None:
            self._store.set(f"problem/{self.rank}", json.dumps(_describe(problem)))
            self._store.add("problems", 1)
        self._store.set(f"here/{self.rank}", "")
        if self._store.add("here", 1) == self.world_size:
            self._store.set("all here", "")
        try:
            self._store.wait(["all here"], timedelta(seconds=self.timeout))
        except RuntimeError as error:
            try:
                missing = [rank for rank in ranks if not self._store.check([f"here/{rank}"])]
            except RuntimeError:
                raise RankLost(self.silent_ranks("start")) from error
            raise RankLost(
                f"not every rank made a guard within {self.timeout:.0f} s: waiting for rank {_listed(missing)}. Make it on every "
                "rank, with the same settings; the job cannot go on with this process group: restart it"
            ) from error
        if self._store.add("problems", 0):
            found = {
                rank: self._store.get(f"problem/{rank}") for rank in ranks if self._store.check([f"problem/{rank}"])
            }
            self._raise("start", {rank: tuple(json.loads(text)) for rank, text in found.items()}, problem)

    def _meet_in_store(self, phase: str, timeout: float) -> None:
        """Wait until every rank has come here, in slices; any that gives up ends it for all."""
        self._meetings += 1
        prefix = f"meeting/{self._meetings}"
        started = time.monotonic()
        try:
            self._store.set(f"{prefix}/{self.rank}", "")
            if self._store.add(f"{prefix}/here", 1) == self.world_size:
                self._store.set(f"{prefix}/all here", "")
            while not self._store.check([f"{prefix}/all here"]):
                if self._store.check(["abort"]):
                    raise self._lost(phase, f"given up by rank {self._store.get('abort').decode()}")
                waited = time.monotonic() - started
                if waited > timeout:
                    missing = [r for r in range(self.world_size) if not self._store.check([f"{prefix}/{r}"])]
                    where = ", ".join(self._place(rank) for rank in missing[:8])
                    raise self._lost(phase, f"not complete after {waited:.0f} s, waiting for {where}")
                time.sleep(min(0.25, 0.002 + waited / 20))
        except RuntimeError as error:
            raise self._lost(phase, str(error)) from error

    def _attempt(self, phase: str, compute: Callable[[], Any]) -> tuple[Any, Exception | None]:
        self.beat(self._step, phase)
        started = time.perf_counter()
        try:
            return compute(), None
        except Exception as error:  # a check that misfires must not leave the others waiting
            logger.debug("%s raised on rank %d", phase, self.rank, exc_info=True)
            return None, error
        except BaseException as error:  # nor may somebody's Ctrl-C or sys.exit()
            self.raised(error)
            raise
        finally:
            self.local_seconds[phase] += time.perf_counter() - started

    def _complete(self, phase: str, start: Callable[[], Any]) -> None:
        """Start a collective and wait for it, in slices."""
        started = time.perf_counter()
        busy = started - self._last_exchange
        try:
            self._wait(phase, start(), started)
            if busy > _SLICE and self._store.check(["abort"]):
                # What the others had sent before they gave up completes it here: this rank must not go on alone.
                raise self._lost(phase, f"given up by rank {self._store.get('abort').decode()}", busy)
        except RuntimeError as error:
            raise self._lost(phase, str(error)) from error
        finally:
            self._last_exchange = time.perf_counter()
            self.collective_seconds[phase] += self._last_exchange - started

    def _wait(self, phase: str, work: Any, started: float) -> None:
        if self.device.type != "cpu":
            work.wait()  # orders streams; the host waits in _wait_for_device, before it reads
            return
        while True:
            try:
                work.wait(timedelta(seconds=min(_SLICE, self.timeout)))
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # it ended between the slices: raises what went wrong, if anything did
                    return
            self._give_up_if_due(phase, started)

    def _read(self, phase: str, tensor: Tensor) -> Tensor:
        """Bring a small tensor to the host; the only synchronisation of a step."""
        self._wait_for_device(phase)
        return tensor.cpu()

    def _wait_for_device(self, phase: str) -> None:
        """Wait for the device as patiently as for a collective, because a lost rank shows here under NCCL."""
        if self.device.type == "cpu":
            return
        started = time.perf_counter()
        event = torch.cuda.Event()
        event.record()
        next_look = started + _SLICE
        while not event.query():
            if time.perf_counter() > next_look:
                next_look += _SLICE
                self._give_up_if_due(phase, started)
        self.collective_seconds[phase] += time.perf_counter() - started

    def _give_up_if_due(self, phase: str, started: float) -> None:
        waited = time.perf_counter() - started
        if waited > self.timeout:
            raise self._lost(phase, f"not complete after {waited:.0f} s")
        try:
            gave_up = self._store.check(["abort"])
        except RuntimeError as error:
            raise self._lost(phase, f"the store does not answer: {error}") from error
        if gave_up:
            raise self._lost(phase, f"given up by rank {self._store.get('abort').decode()}")

    def _lost(self, phase: str, why: str, busy: float = 0.0) -> RankLost:
        if len(why) > 200:
            why = why[:200] + "..."
        silent = self.silent_ranks(phase, busy)
        return RankLost(
            f"guard on rank {self.rank}: the ranks could not agree in {phase} at step {self._step} ({why}). {silent} "
            "This says nothing about the numbers; the job cannot go on with this process group: restart it."
        )

    def _name_silent(self, silent: list[int]) -> str:
        """Takes out of `silent` who answers, for a while."""
        deadline = time.monotonic() + min(_GRACE, self.timeout)
        while True:
            for rank in list(silent):
                if self._store.check([f"lost/{rank}"]) or self._store.check([f"raised/{rank}"]):
                    silent.remove(rank)
            if not silent or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if not silent and (words := self._told_words()):
            return "; ".join(words[:8]) + "."
        if not silent:
            answers = (json.loads(self._store.get(f"lost/{rank}")) for rank in range(self.world_size))
            late = [
                f"{self._place(rank)}, {busy:.0f} s in {phase}" for rank, (phase, busy) in enumerate(answers) if busy
            ]
            if late:
                return "Too late: " + "; ".join(late[:8]) + "."
            return "Every rank answered: suspect the network between them, not a rank."
        return "Did not answer: " + "; ".join(self._last_heard(rank) for rank in silent[:8]) + "."

    def _last_heard(self, rank: int) -> str:
        if not self._store.check([f"beat/{rank}"]):
            return f"{self._place(rank)}, never heard of"
        step, phase, when = json.loads(self._store.get(f"beat/{rank}"))
        return f"{self._place(rank)}, last heard {max(0.0, time.time() - when):.0f} s ago at step {step} in {phase}"

    def _place(self, rank: int) -> str:
        return f"rank {rank}" + (f" (node {self.topology.node_of(rank)})" if self.topology else "")

    def _gather_bytes(self, phase: str, mine: bytes) -> list[bytes]:
        if self._group is None:
            return [mine]
        size = torch.tensor([len(mine)], dtype=torch.int64, device=self.device)
        sizes = [torch.empty_like(size) for _ in range(self.world_size)]
        self._complete(phase, lambda: dist.all_gather(sizes, size, self._group, async_op=True))
        lengths = self._read(phase, torch.cat(sizes)).tolist()
        content = torch.zeros(max(lengths), dtype=torch.uint8)
        content[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        content = content.to(self.device)
        parts = [torch.empty_like(content) for _ in range(self.world_size)]
        self._complete(phase, lambda: dist.all_gather(parts, content, self._group, async_op=True))
        self._wait_for_device(phase)
        return [part[:length].cpu().numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def _raise_failures(self, phase: str, error: Exception | None) -> NoReturn:
        answers = self._gather_bytes(phase, pickle.dumps(_describe(error) if error is not None else None))
        failures = {rank: pickle.loads(answer) for rank, answer in enumerate(answers)}  # noqa: S301  (our own ranks)
        self._raise(phase, {rank: failure for rank, failure in failures.items() if failure is not None}, error)

    def _raise(self, phase: str, failures: Mapping[int, tuple[str, str]], error: Exception | None) -> NoReturn:
        """Raise the same error on every rank: the kind of the first failure, and who failed with what."""
        rank, (kind, message) = next(iter(sorted(failures.items())))
        everywhere = len(failures) == self.world_size
        who = "every rank" if everywhere else "ranks " + ", ".join(map(str, sorted(failures)))
        if not everywhere and self.topology:
            who += f" (node {', '.join(self.topology.nodes_of(failures))})"
        family = getattr(errors, kind, None)
        if isinstance(family, type) and issubclass(family, ConfigurationError):
            raise family(message if everywhere else f"{message} [on {who}]") from error
        if isinstance(family, type) and issubclass(family, BitwitnessError):
            raise family(f"{message} [on {who}]") from error
        raise CheckFailed(
            f"the guard's {phase} raised on {who} at step {self._step}: rank {rank}: {kind}: {message}. This is a failure "
            "of the guard or of the code it runs and says nothing about the numbers: mend it, or turn that check off"
        ) from error


_serials = itertools.count(1)
"""Numbers the channels of this process, so that a second guard does not read the first one's keys in the store."""


def _beats_file(rank: int) -> int | None:
    """Where the supervisor of this node looks for signs of life; None where nobody does."""
    folder = os.environ.get("BITWITNESS_BEATS")
    if not folder:
        return None
    try:
        return os.open(os.path.join(folder, f"rank-{rank:05d}"), os.O_WRONLY | os.O_CREAT, 0o644)  # noqa: PTH118
    except OSError as error:
        logger.warning("%s: no sign of life can be left there: %s", folder, error)
        return None


def _describe(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)[:2000]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _padded(content: Tensor) -> Tensor:
    """Pad to a multiple of 64 bytes, so that the next rank's content is aligned as an allocation would be."""
    return torch.nn.functional.pad(content, (0, -content.numel() % 64))
