"""What the items of a scan compute on: numbers that are the same on every machine, and the means to draw them.

Apart from the operations, because two devices can only be compared if both began with the same bits. So operands are drawn as
integers by a generator on the processor and become floating-point numbers by exact steps alone: no logarithm or cosine, as a
normal distribution needs, whose last bit depends on the processor. They have full mantissas and exponents of their own, because
which operands show a fault depends on their bits (AEGIS, SDCHunter).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bitwitness.errors import ConfigurationError
from bitwitness.scan.items import SUITE_VERSION, Item

Compute = Callable[[], list[Tensor]]
"""Computes the outputs of an item: new tensors each time, the same bits each time."""

PERIOD = 262_139
"""The most numbers that are drawn for one operand; a longer one repeats them. The largest prime below 2^18, so that no two rows of
a matrix are alike; drawing more would take longer than the operation."""

_EXPONENTS = 8
"""Magnitudes are spread over so many powers of two, 2^-7 to 1."""


class Unsupported(Exception):
    """This device has no kernel for the operation with this dtype: nothing is said about the device."""


@dataclass(frozen=True, slots=True)
class Operation:
    """How an item is computed.

    Attributes:
        build: takes the operands of an item and gives what computes it.
        sizes: how many sizes its shape has; any of these.
        variants: the variants that there are, "" not among them.
        needs_variant: whether an item without one cannot be computed.
    """

    build: Callable[[Operands], Compute]
    sizes: tuple[int, ...]
    variants: frozenset[str] = field(default_factory=frozenset)
    needs_variant: bool = False


def dtype_named(name: str) -> torch.dtype:
    """The dtype that torch calls so.

    Raises:
        ConfigurationError: there is none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigurationError(f"{name!r} is no dtype of torch {torch.__version__}")
    return found


class Operands:
    """Draws the operands of one item and puts them on its device.

    All that was drawn is in `kept`, in order: what an operation reads and nobody may change. `generator` is what they are drawn from.

    Raises:
        ConfigurationError: the item's dtype does not exist.
    """

    def __init__(self, item: Item, device: torch.device, *, salt: str = "") -> None:
        self.item, self.device = item, device
        self.dtype = dtype_named(item.dtype)
        self.kept: list[Tensor] = []
        seed = hashlib.blake2b(f"{SUITE_VERSION}/{item.id}/{salt}".encode(), digest_size=8).digest()
        self.generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(seed, "big") >> 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the item."""
        return self.item.shape

    def a(self, *shape: int) -> Tensor:
        """The first operand, αA, in the item's dtype: within ±α, or ±100α for integers."""
        return self.values(shape, self.item.alpha)

    def b(self, *shape: int) -> Tensor:
        """The second operand, βB."""
        return self.values(shape, self.item.beta)

    def values(self, shape: tuple[int, ...], scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers of any sign, not larger than `scale`; for integers not larger than 100 times that, nor than the dtype holds."""
        dtype = dtype or self.dtype
        if not dtype.is_floating_point:
            return self._spread(shape, self._whole(shape, scale, dtype))
        return self._spread(shape, self._floats(shape).mul_(scale).to(dtype))

    def away_from_zero(self, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
        """As `values`, but none nearer to zero than half of `scale`, and none that is zero: to divide by."""
        if not self.dtype.is_floating_point:
            drawn = self._whole(shape, scale, self.dtype)
            return self._spread(shape, torch.where(drawn == 0, 3, drawn))
        drawn = self._floats(shape)
        return self._spread(shape, drawn.abs().add_(1).mul_(0.5 * scale).copysign_(drawn).to(self.dtype))

    def positive(self, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
        """Numbers in (0, scale], spread over powers of two."""
        drawn = self._floats(shape).abs().add_(2.0**-_EXPONENTS)
        return self._spread(shape, drawn.mul_(scale / (1 + 2.0**-_EXPONENTS)).to(self.dtype))

    def integers(self, shape: tuple[int, ...], low: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Whole numbers in [low, high)."""
        return self._spread(shape, self._integers(shape, low, high).to(dtype))

    def permutation(self, count: int) -> Tensor:
        """The numbers below `count` in any order."""
        return self.keep(torch.randperm(count, generator=self.generator, device="cpu"))

    def mask(self, shape: tuple[int, ...], keep: float) -> Tensor:
        """What dropout multiplies by: 1/keep with the probability `keep`, else 0; float32."""
        kept = self._integers(shape, 0, 1 << 20) < int(keep * (1 << 20))
        return self._spread(shape, kept.to(torch.float32).div_(keep))

    def host_values(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Numbers within ±1, left on the host."""
        return self._kept(_repeated(self._floats(shape).to(dtype), shape))

    def host_integers(self, shape: tuple[int, ...], low: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Whole numbers in [low, high), left on the host."""
        return self._kept(_repeated(self._integers(shape, low, high).to(dtype), shape))

    def keep(self, drawn: Tensor) -> Tensor:
        """On the item's device, and remembered.

        Raises:
            Unsupported: the device has no such dtype.
        """
        return self._kept(self.put(drawn))

    def put(self, drawn: Tensor) -> Tensor:
        """On the item's device, and not remembered.

        Raises:
            Unsupported: the device has no such dtype.
        """
        try:
            return drawn.to(self.device)
        except TypeError as error:  # e.g. no float64 on MPS
            raise Unsupported(f"{self.item.id} on {self.device}: {error}") from error

    def _spread(self, shape: tuple[int, ...], block: Tensor) -> Tensor:
        """On the device, where what was drawn is repeated: copying it all would take longer than the operation."""
        return self._kept(_repeated(self.put(block), shape))

    def _kept(self, operand: Tensor) -> Tensor:
        self.kept.append(operand)
        return operand

    def _whole(self, shape: tuple[int, ...], scale: float, dtype: torch.dtype) -> Tensor:
        limits = torch.iinfo(dtype)
        most = min(limits.max - 1, int(100 * scale))
        return self._integers(shape, max(limits.min, -most), most + 1).to(dtype)

    def _integers(self, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        count = min(math.prod(shape), PERIOD)
        return torch.randint(low, high, (count,), generator=self.generator, dtype=torch.int64, device="cpu")

    def _floats(self, shape: tuple[int, ...]) -> Tensor:
        """Within ±1, as float64: a random sign, 53 random bits below it, and one of eight exponents."""
        count = min(math.prod(shape), PERIOD)
        drawn = torch.empty(count, dtype=torch.int64, device="cpu").random_(generator=self.generator)
        exponents = drawn & (_EXPONENTS - 1)
        # Shifts, because a power computed by the processor's library need not be exact.
        powers = (1 << (_EXPONENTS - 1 - exponents)).to(torch.float64).mul_(2.0 ** (1 - _EXPONENTS))
        mantissas = ((drawn >> 3) & ((1 << 54) - 1)) - (1 << 53)
        return mantissas.to(torch.float64).mul_(2.0**-53).mul_(powers)


def _repeated(block: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    if count > block.numel():
        block = block.repeat(-(-count // block.numel()))[:count].clone()
    return block.view(shape)
