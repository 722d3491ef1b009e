"""What a wrong answer looked like: a record by which anybody can compute the same again on another device.

Written by a rank at the moment it sees an answer that it or others had given otherwise, because an intermittent fault may not
come back. The record is what was seen and no judgement: whether anybody is wrong says the result of the scan. No torch here: it
is read, shown and sent to a vendor from machines that have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from bitwitness.errors import RunFilesError
from bitwitness.runfiles.answers import Device
from bitwitness.runfiles.files import read_json, write_bytes, write_json
from bitwitness.scan.items import Item

LARGEST = 4 << 20
"""Bytes of a wrong output that are kept: it is copied through shared storage by every rank that is wrong."""
MOST_ELEMENTS = 64
"""Of the elements that differ, so many are listed."""

ExpectedBy = Literal["others", "itself"]
"""Who gave the answer that was expected: other devices of the kind, or this one before."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of an output, and where its bits are in the file.

    Attributes:
        dtype: as torch calls it, without `torch.`.
        shape: its sizes.
        offset: of its first byte in the file; elements follow each other in logical order, little-endian.
        size: in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Element:
    """One element that differs.

    Attributes:
        output: which tensor of the output.
        index: where in it.
        expected, observed, xor: its bits, in hexadecimal.
    """

    output: int
    index: tuple[int, ...]
    expected: str
    observed: str
    xor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One wrong answer of one device.

    Attributes:
        item: what was computed.
        device: on what.
        expected: digest of the answer that was expected, and by whom it was given.
        observed: by digest, how often this device gave it until then; `wrong` is the one that this is about.
        time: when it was seen.
        celsius: temperature of the device then, where it tells.
        scan, seed: of the scan.
        drill: whether the scan had faults on purpose.
        played: whether a processor stood for the device.
        file: name of the file beside this one that holds the wrong output; "" where it was too large.
        parts: what is in it.
        differing: how many elements differ from a right output of the same device; None where it gave none.
        elements: the first of them.
    """

    item: Item
    device: Device
    expected: str
    expected_by: ExpectedBy
    wrong: str
    observed: Mapping[str, int]
    time: str
    celsius: float | None = None
    scan: str = ""
    seed: int = 0
    drill: bool = False
    played: bool = False
    file: str = ""
    parts: tuple[Part, ...] = ()
    differing: int | None = None
    elements: tuple[Element, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {
            "item": self.item.id,
            "device": self.device.to_json(),
            "parts": [asdict(part) for part in self.parts],
            "elements": [asdict(element) for element in self.elements],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`.

        Raises:
            RunFilesError: it is no evidence.
        """
        try:
            differing, celsius = record["differing"], record["celsius"]
            return cls(
                item=Item.parse(str(record["item"])),
                device=Device.from_json(record["device"]),
                expected=str(record["expected"]),
                expected_by="others" if record["expected_by"] == "others" else "itself",
                wrong=str(record["wrong"]),
                observed={str(digest): int(count) for digest, count in record["observed"].items()},
                time=str(record["time"]),
                celsius=None if celsius is None else float(celsius),
                scan=str(record["scan"]),
                seed=int(record["seed"]),
                drill=bool(record["drill"]),
                played=bool(record["played"]),
                file=str(record["file"]),
                parts=tuple(_part(part) for part in record["parts"]),
                differing=None if differing is None else int(differing),
                elements=tuple(_element(one) for one in record["elements"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunFilesError(f"this is no evidence of a scan: {error!r}") from error


def read(path: Path) -> Evidence:
    """The evidence in a file.

    Raises:
        RunFilesError: it cannot be read, or is none; says which file.
    """
    record = read_json(path)
    try:
        return Evidence.from_json(record)
    except RunFilesError as error:
        raise RunFilesError(f"{path}: {error}: give a file of DIR/evidence/ of a scan") from error


def write(folder: Path, name: str, evidence: Evidence, output: bytes | None) -> Path:
    """Write evidence, and the wrong output before it, so that a record never names a file that is not there.

    Raises:
        RunFilesError: it cannot be written.
    """
    if output is not None:
        assert evidence.file, "the output needs a name"
        write_bytes(folder / evidence.file, output)
    path = folder / f"{name}.json"
    write_json(path, evidence.to_json())
    return path


def wrong_output(path: Path, evidence: Evidence) -> list[bytes] | None:
    """The bits of each tensor of the wrong output; None where none was kept.

    Args:
        path: of the evidence.
        evidence: what is in it.

    Raises:
        RunFilesError: the file is missing, or shorter than the record says.
    """
    if not evidence.file:
        return None
    beside = path.parent / Path(evidence.file).name
    try:
        content = beside.read_bytes()
    except OSError as error:
        raise RunFilesError(f"{beside}, the wrong output, cannot be read: {error.strerror or error}") from error
    if len(content) != sum(part.size for part in evidence.parts):
        raise RunFilesError(f"{beside}, the wrong output, has {len(content)} bytes, not those of {path.name}: damaged")
    return [content[part.offset : part.offset + part.size] for part in evidence.parts]


def differences(
    expected: Sequence[bytes], observed: Sequence[bytes], parts: Sequence[Part], most: int = MOST_ELEMENTS
) -> tuple[int, tuple[Element, ...]]:
    """How many elements differ between two outputs of the same shapes, and the first of them."""
    count = 0
    elements: list[Element] = []
    for number, (right, wrong, part) in enumerate(zip(expected, observed, parts, strict=True)):
        if right == wrong:
            continue
        width = max(1, part.size // max(1, _elements(part.shape)))
        for place in range(0, part.size, _BLOCK - _BLOCK % width):
            end = min(part.size, place + _BLOCK - _BLOCK % width)
            if right[place:end] == wrong[place:end]:
                continue
            for start in range(place, end, width):
                one, other = right[start : start + width], wrong[start : start + width]
                if one != other:
                    count += 1
                    if len(elements) < most:
                        elements.append(_differing(number, _index(start // width, part.shape), one, other))
    return count, tuple(elements)


_BLOCK = 4096
"""Bytes that are compared at once: most of an output is right."""


def _differing(output: int, index: tuple[int, ...], expected: bytes, observed: bytes) -> Element:
    xor = bytes(one ^ other for one, other in zip(expected, observed, strict=True))
    return Element(output, index, *(word[::-1].hex() for word in (expected, observed, xor)))


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, position = divmod(flat, size)
        index.append(position)
    return tuple(reversed(index))


def _part(record: Mapping[str, Any]) -> Part:
    shape = tuple(int(size) for size in record["shape"])
    return Part(str(record["dtype"]), shape, int(record["offset"]), int(record["size"]))


def _element(record: Mapping[str, Any]) -> Element:
    index = tuple(int(place) for place in record["index"])
    return Element(int(record["output"]), index, str(record["expected"]), str(record["observed"]), str(record["xor"]))
