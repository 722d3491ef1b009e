"""Collectives of a scan, each with a result that is known exactly, whatever the order in which a backend adds.

Apart from `communication`, which says when and with whom: here is the algebra. Contributions are integers so small that every
partial sum is exact in the dtype, or powers of two; each rank draws those of all ranks from one generator, gives its own, and
computes what it must receive. That ranks agree proves nothing: all may have got the same zeros.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from bitwitness.scan.items import Item
from bitwitness.scan.payloads import generator, poisoned

ELEMENTS = 4_099
"""Of an all_reduce: no multiple of anything that a backend cuts by."""
BLOCK = 1_024
"""Of what one rank gives another in the others."""
_ROOTS = 16
"""So many ranks broadcast in one pass; in a larger world, others do in the next."""

_EXACT = {torch.float32: 2**24, torch.bfloat16: 2**8, torch.int32: 2**30, torch.int64: 2**62}
"""Up to this size every integer is itself in the dtype."""
_FACTORS = 100
"""At most so many ranks give a factor other than 1 to a product: 2**100 is finite in float32 and bfloat16."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank stands in the group.

    Attributes:
        index, size: of the group.
        seed: of the scan and of this call of the suite.
        step: in which it is called, so that no payload comes twice.
        device: what the backend moves.
        timeout: of each call.
    """

    index: int
    size: int
    seed: tuple[int, int]
    step: int
    device: torch.device
    timeout: timedelta

    def drawn(self, item: str, most: int, *shape: int) -> Tensor:
        """Integers from -most to most, the same on every rank."""
        return torch.randint(-most, most + 1, shape, dtype=torch.int64, generator=generator(self.seed, self.step, item))

    def finish(self, work: dist.Work | None) -> None:
        """Wait for a call, not for ever."""
        if work is not None:
            work.wait(self.timeout)


@dataclass(frozen=True, slots=True)
class Result:
    """What one call gave, and what it should have; both on the processor."""

    item: str
    got: Tensor
    expected: Tensor

    @property
    def digest(self) -> str:
        """Of what it gave: tells whether several ranks got the same."""
        return hashlib.blake2b(self.got.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


def results(place: Place, store: dist.Store) -> Iterator[Result]:
    """Call one collective after the other.

    Args:
        place: of this rank.
        store: counts who has come to the barrier.

    Raises:
        RuntimeError: of the backend: a rank did not take part.
    """
    for dtype in _EXACT:
        for name in ("sum", "max", "min"):
            yield _all_reduce(place, dtype, name)
    for dtype in (torch.float32, torch.bfloat16):
        yield _all_reduce(place, dtype, "product")
    yield _all_gather(place)
    for dtype in (torch.float32, torch.int64):
        yield _reduce_scatter(place, dtype)
    yield _all_to_all(place)
    for root in range(min(_ROOTS, place.size)):
        yield _broadcast(place, (root + place.step * _ROOTS) % place.size if place.size > _ROOTS else root)
    yield _barrier(place, store)


def _barrier(place: Place, store: dist.Store) -> Result:
    """A barrier is right if whoever has left it finds that all had entered it."""
    counter = f"barrier/{place.step}"
    store.add(counter, 1)
    place.finish(dist.barrier(async_op=True))
    entered = store.add(counter, 0)
    item = Item("comm", "barrier", "int64", (1,)).id
    return Result(item, torch.tensor([entered]), torch.tensor([place.size]))


def _all_reduce(place: Place, dtype: torch.dtype, name: str) -> Result:
    item = _item("all_reduce", dtype, ELEMENTS, name)
    given = _contributions(place, item, dtype, name, ELEMENTS)
    match name:
        case "sum":
            expected = given.sum(0)
        case "max":
            expected = given.amax(0)
        case "min":
            expected = given.amin(0)
        case _:
            expected = given.sum(0)  # exponents
    moved = _as(given[place.index], dtype, name).to(place.device)
    place.finish(dist.all_reduce(moved, getattr(dist.ReduceOp, name.upper()), async_op=True))
    return Result(item, moved.cpu(), _as(expected, dtype, name))


def _reduce_scatter(place: Place, dtype: torch.dtype) -> Result:
    item = _item("reduce_scatter", dtype, BLOCK, "sum")
    given = _contributions(place, item, dtype, "sum", place.size * BLOCK)
    expected = given.sum(0)[place.index * BLOCK : (place.index + 1) * BLOCK].to(dtype)
    got = _opposite(expected).to(place.device)
    own = [part.to(place.device, dtype) for part in given[place.index].split(BLOCK)]
    place.finish(dist.reduce_scatter(got, own, async_op=True))
    return Result(item, got.cpu(), expected)


def _all_gather(place: Place) -> Result:
    item = _item("all_gather", torch.int64, BLOCK)
    expected = place.drawn(item, 2**62, place.size, BLOCK)
    got = [row.to(place.device) for row in _opposite(expected)]
    place.finish(dist.all_gather(got, expected[place.index].to(place.device), async_op=True))
    return Result(item, torch.stack([row.cpu() for row in got]), expected)


def _all_to_all(place: Place) -> Result:
    item = _item("all_to_all", torch.int64, BLOCK)
    every = place.drawn(item, 2**62, place.size, 1, BLOCK) ^ place.drawn(f"{item}/to", 2**62, 1, place.size, BLOCK)
    expected = every[:, place.index].contiguous()
    got = _opposite(expected).to(place.device)
    own = every[place.index].contiguous().to(place.device)
    place.finish(dist.all_to_all_single(got, own, async_op=True))
    return Result(item, got.cpu(), expected)


def _broadcast(place: Place, root: int) -> Result:
    item = _item("broadcast", torch.int64, BLOCK)
    expected = place.drawn(f"{item}/{root}", 2**62, BLOCK)
    moved = (expected if place.index == root else _opposite(expected)).to(place.device)
    place.finish(dist.broadcast(moved, src=root, async_op=True))
    return Result(item, moved.cpu(), expected)


def _contributions(place: Place, item: str, dtype: torch.dtype, name: str, elements: int) -> Tensor:
    """One row a rank: what it gives, or for a product, of which power of two."""
    if name == "product":
        given = place.drawn(item, 1, place.size, elements)
        given[_FACTORS:] = 0
        return given
    if name != "sum":
        return place.drawn(item, _EXACT[dtype], place.size, elements)
    most = _EXACT[dtype] // place.size
    given = place.drawn(item, max(1, most), place.size, elements)
    if not most:  # so many ranks that a sum would not be exact: in each place, only some give anything
        every = -(-place.size // _EXACT[dtype])
        given[(torch.arange(place.size)[:, None] + torch.arange(elements)) % every != 0] = 0
    return given


def _as(given: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    return torch.exp2(given.double()).to(dtype) if name == "product" else given.to(dtype)


def _opposite(expected: Tensor) -> Tensor:
    """Every bit the other way round."""
    return poisoned(expected.contiguous().view(torch.uint8)).view(expected.dtype)


def _item(operation: str, dtype: torch.dtype, elements: int, variant: str = "") -> str:
    return Item("comm", operation, str(dtype).removeprefix("torch."), (elements,), variant=variant).id
