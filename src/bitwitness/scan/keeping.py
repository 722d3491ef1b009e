"""Keeping wrong outputs of a rank as evidence: few of them, because shared storage and people's time are limited.

Apart from `evidence`, which is read without torch, and from the loop, which must not know how an output is stored.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bitwitness.errors import RunFilesError
from bitwitness.runfiles.answers import AnswerFiles, Device
from bitwitness.runfiles.files import utc_now
from bitwitness.scan.evidence import LARGEST, Element, Evidence, Part, differences, write
from bitwitness.scan.items import Item
from bitwitness.scan.settings import Settings

logger = logging.getLogger(__name__)

_MOST = {True: 4, False: 3}
"""Files of a rank: of answers unlike those of others, and of such as are only unlike its own before."""
_MOST_OF_ITEM = 2


class Keeper:
    """Keeps the wrong outputs of one rank."""

    def __init__(self, files: AnswerFiles, settings: Settings, device: Device) -> None:
        self._folder, self._settings, self._device = files.evidence, settings, device
        self._kept: Counter[bool] = Counter()
        self._of_item: Counter[str] = Counter()

    def wants(self, item: Item, by_others: bool) -> bool:
        """Whether there is room for one more, of an answer unlike that of others or unlike its own."""
        return self._kept[by_others] < _MOST[by_others] and self._of_item[item.id] < _MOST_OF_ITEM

    def keep(
        self,
        item: Item,
        expected: str,
        by_others: bool,
        wrong: str,
        observed: Mapping[str, int],
        outputs: Sequence[Tensor],
        right: Sequence[Tensor] | None,
        celsius: float | None,
    ) -> None:
        """Write one wrong output; where that cannot be, the answer in the journal must do, and the log says why.

        Args:
            item: what was computed.
            expected: the digest that others, or it before, gave.
            by_others: which of the two.
            wrong: the digest of this output.
            observed: all digests it gave so far.
            outputs: the wrong output, on the processor.
            right: an output with the expected digest from this device, if it gave one.
            celsius: temperature of the device.
        """
        self._kept[by_others] += 1
        self._of_item[item.id] += 1
        parts, content = raw(outputs)
        differing: int | None = None
        elements: tuple[Element, ...] = ()
        if right is not None:
            others, expected_content = raw(right)
            if others == parts:
                differing, elements = differences(split(expected_content, parts), split(content, parts), parts)
        name = f"rank-{self._device.rank:05d}-{self._kept.total()}"
        small = len(content) <= LARGEST
        made = Evidence(
            item=item,
            device=self._device,
            expected=expected,
            expected_by="others" if by_others else "itself",
            wrong=wrong,
            observed=dict(observed),
            time=utc_now(),
            celsius=celsius,
            scan=self._settings.id,
            seed=self._settings.seed,
            drill=bool(self._settings.drills),
            played=self._settings.played,
            file=f"{name}.bin" if small else "",
            parts=parts if small else (),
            differing=differing,
            elements=elements,
        )
        try:
            write(self._folder, name, made, content if small else None)
        except RunFilesError as error:
            logger.warning("no evidence of a wrong answer to %s: %s", item.id, error)


def raw(outputs: Sequence[Tensor]) -> tuple[tuple[Part, ...], bytes]:
    """The bits of tensors one after the other, in logical order, and what is where."""
    parts: list[Part] = []
    content = bytearray()
    for output in outputs:
        plain = output.detach().to("cpu").resolve_conj().resolve_neg().contiguous().flatten()
        words = plain.view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)
        name = str(output.dtype).removeprefix("torch.")
        parts.append(Part(name, tuple(output.shape), len(content), words.numel()))
        content += words.numpy().tobytes()
    return tuple(parts), bytes(content)


def split(content: bytes, parts: Sequence[Part]) -> list[bytes]:
    """The bits of each tensor."""
    return [content[part.offset : part.offset + part.size] for part in parts]
