"""What one rank sends another in a scan: a pure function of who, when and how much, so that the receiver knows every bit.

Apart from the sending, because that a payload cannot be mistaken for another one is what the whole suite stands on. Each begins
with a mark that says whose it is, so that even one of zeros differs in every round; what it is compared with is computed on the
processor, and the buffer that it is received into holds the opposite of every bit that should arrive.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from bitwitness.mutate import FlipBits, mutated, put_words, words_of
from bitwitness.scan.drill import Drill
from bitwitness.scan.items import Item

Pattern = Literal["random", "zeros", "ones", "walking", "word"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)

_MAGIC = 0x6269_7477_6974_6E73
_MARK = 4
"""Words of 64 bits at the beginning: the constant, who to whom, the round and the pattern, the size."""
_HALF = 32


@dataclass(frozen=True, slots=True)
class Message:
    """One transfer.

    Attributes:
        seed: of the scan and of this call of the suite.
        sender, receiver: ranks.
        step: the round, counted through all calls.
        size: in bytes, at least 64; need not be a multiple of anything.
        pattern: of what follows the mark.
    """

    seed: tuple[int, int]
    sender: int
    receiver: int
    step: int
    size: int
    pattern: Pattern

    @property
    def item(self) -> str:
        """The id of the item that it belongs to."""
        return Item("comm", "p2p", "uint8", (self.size,), variant=self.pattern).id

    def __str__(self) -> str:
        return f"from rank {self.sender} to rank {self.receiver} in round {self.step} ({self.pattern})"


def payload(message: Message) -> Tensor:
    """Its bytes, on the processor."""
    words = (message.size + 7) // 8
    key = _key(message)
    match message.pattern:
        case "random":
            body = torch.randint(-(2**63), 2**63 - 1, (words,), dtype=torch.int64, generator=_generator(key))
        case "zeros":
            body = torch.zeros(words, dtype=torch.int64)
        case "ones":
            body = torch.full((words,), -1, dtype=torch.int64)
        case "walking":
            body = torch.ones(words, dtype=torch.int64) << ((torch.arange(words) + message.step) % 64)
        case "word":
            body = torch.full((words,), key - 2**62, dtype=torch.int64)
    body[:_MARK] = torch.tensor(_mark(message))
    return body.view(torch.uint8)[: message.size]


def poisoned(expected: Tensor) -> Tensor:
    """A buffer to receive into: every bit is the opposite of what should arrive."""
    return torch.bitwise_not(expected)


def compare(received: Tensor, expected: Tensor, message: Message) -> dict[str, Any] | None:
    """What is wrong with what arrived; None where every bit is right.

    Args:
        received: bytes, on the processor.
        expected: likewise.
        message: what should have arrived.

    Returns:
        `what` in words, `bytes` and `bits` that differ, the offset `first` and the difference `mask` of up to 8 bytes there.
    """
    if torch.equal(received, expected):
        return None
    difference = torch.bitwise_xor(received, expected)
    wrong = difference.nonzero().flatten()
    first, bits = int(wrong[0]), sum(int(((difference >> bit) & 1).sum()) for bit in range(8))
    mask = bytes(difference[first : first + 8].tolist()).hex()
    what = _what(received, expected, message) or f"{bits} bit(s) differ, the first in byte {first} of {message.size}"
    return {"what": what, "bytes": len(wrong), "bits": bits, "first": first, "mask": mask}


def generator(*parts: object) -> torch.Generator:
    """A generator of its own for what these words name."""
    return _generator(_hash(*parts))


class LinkStriker:
    """Strikes what arrives over the links of a drill, with a generator of its own: nothing else that is drawn changes."""

    def __init__(self, drills: Sequence[Drill], rank: int, seed: int) -> None:
        self._drills = [drill for drill in drills if drill.link is not None and rank in drill.link]
        self._random = random.Random(f"bitwitness link drill {seed} {rank}")  # noqa: S311 - no secret is drawn
        self.struck = 0

    def __call__(self, received: Tensor, sender: int, receiver: int) -> None:
        """Flip one bit of what the receiver has, where a drill strikes that link.

        Args:
            received: bytes; changed in place.
            sender: rank; -1 for a collective, which is not struck.
            receiver: rank.
        """
        for drill in self._drills:
            if (
                drill.link is None
                or {sender, receiver} != set(drill.link)
                or self._random.random() >= drill.probability
            ):
                continue
            where, flip = [self._random.randrange(received.numel())], FlipBits((self._random.randrange(8),))
            put_words(received, where, mutated(words_of(received, where), received.dtype, flip))
            self.struck += 1


def _what(received: Tensor, expected: Tensor, message: Message) -> str:
    if torch.equal(received, poisoned(expected)):
        return "nothing arrived: the buffer is as it was"
    if not received.any():
        return "all zeros"
    mark = torch.zeros(_MARK * 8, dtype=torch.uint8)
    mark.copy_(received[: _MARK * 8])
    magic, ends, when, size = mark.view(torch.int64).tolist()
    pattern = when & 0xFF
    if magic != _MAGIC or size != message.size or pattern >= len(PATTERNS):
        return ""
    found = replace(
        message, sender=ends >> _HALF, receiver=ends & 0xFFFF_FFFF, step=when >> 8, pattern=PATTERNS[pattern]
    )
    if found == message or not torch.equal(received, payload(found)):
        return ""
    same = (found.sender, found.receiver) == (message.sender, message.receiver)
    return f"{'stale: ' if same and found.step < message.step else ''}the payload {found} instead of that {message}"


def _mark(message: Message) -> list[int]:
    ends = message.sender << _HALF | message.receiver
    return [_MAGIC, ends, message.step << 8 | PATTERNS.index(message.pattern), message.size]


def _key(message: Message) -> int:
    return _hash(message.seed, message.sender, message.receiver, message.step, message.size, message.pattern)


def _hash(*parts: object) -> int:
    """63 bits."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def _generator(key: int) -> torch.Generator:
    return torch.Generator().manual_seed(key)
