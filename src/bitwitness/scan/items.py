"""What a scan has devices compute: pieces of work that have one right answer, named so that anybody can do them again.

No torch here: the judge, the golden file and whoever reads evidence speak of items without computing any.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from bitwitness.errors import ConfigurationError

Suite = Literal["train", "ops", "comm", "mix"]
SUITES: tuple[Suite, ...] = get_args(Suite)
"""In the order in which they are begun with: what tells most comes first."""

SUITE_VERSION = 1
"""Of what the items compute. Another one means other right answers: golden answers of an older one are refused."""

_WORD = r"[a-z0-9_.]+"
_ID = re.compile(
    rf"(?P<suite>{'|'.join(SUITES)})/(?P<operation>{_WORD})/(?P<dtype>{_WORD})/(?P<shape>\d+(?:x\d+)*)"
    rf"(?:/a(?P<alpha>[0-9.e+-]+)b(?P<beta>[0-9.e+-]+))?(?:/(?P<variant>{_WORD}))?"
)


@dataclass(frozen=True, slots=True)
class Item:
    """One piece of work.

    Attributes:
        suite: which suite it belongs to.
        operation: what is computed, e.g. `matmul`, `layer_norm`, `scatter_add`, `transformer`.
        dtype: of the operands, as torch calls it: `float32`, `bfloat16`, `int64`, ...
        shape: sizes; what they mean is the operation's.
        alpha, beta: factors of the two operands, which move them into another range: `(alpha A) (beta B)`. Whether a fault shows
            depends strongly on the range of operands (AEGIS, SDCHunter).
        variant: tells two items apart that are equal otherwise, e.g. `transposed`.

    Raises:
        ConfigurationError: a part cannot stand in an id.
    """

    suite: Suite
    operation: str
    dtype: str
    shape: tuple[int, ...]
    alpha: float = 1.0
    beta: float = 1.0
    variant: str = ""

    def __post_init__(self) -> None:
        if _ID.fullmatch(self.id) is None:
            raise ConfigurationError(f"{self.id!r} names no item of a scan")

    @property
    def id(self) -> str:
        """Its name: `ops/matmul/float32/256x256x256/a1e+03b1e-03/transposed`; the last two parts only where there is something to say."""
        parts = [self.suite, self.operation, self.dtype, "x".join(map(str, self.shape))]
        if (self.alpha, self.beta) != (1.0, 1.0):
            parts.append(f"a{self.alpha:g}b{self.beta:g}")
        return "/".join([*parts, *([self.variant] if self.variant else [])])

    @property
    def kind(self) -> str:
        """What is counted together in a result: `ops/matmul/float32`."""
        return f"{self.suite}/{self.operation}/{self.dtype}"

    @classmethod
    def parse(cls, text: str) -> Item:
        """The inverse of `id`.

        Raises:
            ConfigurationError: it names no item.
        """
        found = _ID.fullmatch(text)
        if found is None:
            raise ConfigurationError(f"{text!r:.200} names no item of a scan")
        try:
            alpha, beta = float(found["alpha"] or 1), float(found["beta"] or 1)
        except ValueError as error:
            raise ConfigurationError(f"{text!r:.200} names no item of a scan: {error}") from error
        shape = tuple(int(part) for part in found["shape"].split("x"))
        suite: Suite = found["suite"]  # type: ignore[assignment]  # the pattern allows no other
        return cls(suite, found["operation"], found["dtype"], shape, alpha, beta, found["variant"] or "")

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"shape": list(self.shape), "id": self.id}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Item:
        """The inverse of `to_json`.

        Raises:
            ConfigurationError: it is no item.
        """
        text = record.get("id")
        if not isinstance(text, str):
            raise ConfigurationError(f"an item of a scan without an id: {str(record)[:120]}")
        return cls.parse(text)
