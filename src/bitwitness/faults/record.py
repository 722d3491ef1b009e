"""What a fault did, bit by bit: proof that it landed, and enough to do exactly the same again.

A fault that was drawn at random can be studied only if it can be had again: the record holds the site, the elements and their
bits before and after, so a replay writes those very bits at the same moment of the same work, and fails loudly where it finds
others. A record is a JSON line, so what a process that died has written so far can be read.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from bitwitness.errors import ConfigurationError
from bitwitness.runfiles.files import Reported

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Site:
    """The moment and the place of one opportunity to strike.

    Attributes:
        fault: the fault's number in its job, from 0.
        rank, step, micro: where and when; `micro` is -1 outside of micro-batches.
        work: train, update, replay, arbiter, rerun, fingerprint or save.
        target: what was hit; name: of the module, parameter, tensor or file.
        call: how many opportunities this site had before, in this work of this micro-batch.
    """

    fault: int
    rank: int
    step: int
    micro: int
    work: str
    target: str
    name: str
    call: int


@dataclass(frozen=True, slots=True)
class Strike:
    """One change that landed.

    Attributes:
        site: where and when.
        spec: the fault, in the grammar.
        node: of the rank.
        shape, dtype: of the tensor; for files its bytes.
        count: how many elements have other bits now.
        example: the first of them, `index`, `before` and `after` in words.
        indices, before, after: all of them, int64, packed by `pack`; a complex128 element has two words.
    """

    site: Site
    spec: str
    node: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    example: Mapping[str, Any]
    indices: str
    before: str
    after: str

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; unknown keys are ignored.

        Raises:
            KeyError, TypeError, ValueError: it is no strike.
        """
        known = {one.name: record[one.name] for one in fields(cls)}
        site = Site(**{one.name: record["site"][one.name] for one in fields(Site)})
        return cls(**{**known, "site": site, "shape": tuple(known["shape"])})


def pack(words: Tensor) -> str:
    """Integers as text: compressed, because a whole tensor may have been hit."""
    raw = words.to(torch.int64).contiguous().cpu().numpy().astype("<i8").tobytes()
    return base64.b64encode(zlib.compress(raw, 9)).decode()


def unpack(text: str) -> Tensor:
    """The inverse of `pack`, flat.

    Raises:
        ValueError: it was not packed by `pack`.
    """
    try:
        raw = zlib.decompress(base64.b64decode(text, validate=True))
    except (zlib.error, ValueError) as error:
        raise ValueError(f"packed integers cannot be unpacked: {error}") from error
    return torch.from_numpy(np.frombuffer(raw, dtype="<i8").astype(np.int64))


def append(path: Path, strike: Strike) -> None:
    """Add a strike to a file of records; it is with the system when this returns.

    Raises:
        RunFilesError: it cannot be written.
    """
    with Reported(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(strike.to_json()) + "\n")


def read(path: Path) -> tuple[Strike, ...]:
    """The strikes in a file of records, or in every `*.jsonl` of a folder; a torn last line is left out.

    Raises:
        ConfigurationError: there is none, or something in it is no record; names file and line.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    found: list[Strike] = []
    for file in files:
        found += _read_file(file)
    if not found:
        raise ConfigurationError(
            f"{path} holds no record of a fault: give a file that an injector has written, or its folder"
        )
    return tuple(found)


def _read_file(file: Path) -> Sequence[Strike]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"record {file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file} is no record of faults: it is not text") from error
    lines = text.splitlines(keepends=True)
    strikes = []
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n") and number > 1:
            break
        try:
            strike = Strike.from_json(json.loads(line))
            if len(unpack(strike.after)) % max(1, len(unpack(strike.indices))):
                raise ValueError("as many bits as elements are needed")
            strikes.append(strike)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{file}, line {number}: no record of a fault ({type(error).__name__}: {error})"
            ) from error
    return strikes
