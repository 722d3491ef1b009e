"""What a fault did, bit by bit: proof that it landed, and enough to do exactly the same again.

A fault that was drawn at random can be studied only if it can be had again: the record holds the site, the elements and their
bits before and after, so a replay writes those very bits at the same moment of the same work, and fails loudly where it finds
others. A record is a JSON line, written by one system call, so what a process that died has written so far can be read: at most
its last line is torn. What is read was perhaps edited, and decides what a job is hit with, so all of it is checked first.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from bitwitness.errors import ConfigurationError
from bitwitness.faults.grammar import parse
from bitwitness.faults.spec import WORKS, Fault
from bitwitness.mutate import bits_of
from bitwitness.runfiles.files import Reported, refresh_folder

logger = logging.getLogger("bitwitness")

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
        start: which start of the job, from 1: a job that goes back after corruption passes the same steps again.
    """

    fault: int
    rank: int
    step: int
    micro: int
    work: str
    target: str
    name: str
    call: int
    start: int = 1

    @classmethod
    def from_json(cls, record: object) -> Self:
        """The inverse of `asdict`; unknown keys are ignored.

        Raises:
            ConfigurationError: it is no site; says what is wrong.
        """
        _require(isinstance(record, dict), f"site is {shortened(record)}, must be an object")
        assert isinstance(record, dict)
        least = {"fault": 0, "rank": 0, "step": 0, "micro": -1, "call": 0, "start": 1}
        numbers = {name: _whole({"start": 1, **record}, name, lowest) for name, lowest in least.items()}
        words = {name: _text(record, name) for name in ("work", "target", "name")}
        _require(words["work"] in WORKS, f"there is no work {words['work']!r}: it is {', '.join(WORKS)}")
        return cls(**numbers, **words)  # type: ignore[arg-type]


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
    def from_json(cls, record: object) -> Self:
        """The inverse of `to_json`; unknown keys are ignored.

        Raises:
            ConfigurationError: it is no strike that can have landed; says what is wrong.
        """
        _require(isinstance(record, dict), f"{shortened(record)} is no JSON object")
        assert isinstance(record, dict)
        schema = record.get("schema")
        _require(
            schema == SCHEMA and not isinstance(schema, bool),
            f"schema is {shortened(schema)}, this version reads {SCHEMA}",
        )
        site, spec, shape = Site.from_json(record.get("site")), _text(record, "spec"), record.get("shape")
        target = _fault(spec).where.target
        _require(site.target == target, f"the site's target is {site.target!r}, and that of its fault {target!r}")
        _require(
            isinstance(shape, list | tuple) and all(type(size) is int and size >= 0 for size in shape),
            f"shape is {shortened(shape)}, must be a list of sizes",
        )
        assert isinstance(shape, list | tuple)
        made = cls(
            site=site,
            spec=spec,
            node=_text(record, "node"),
            shape=tuple(shape),
            dtype=_text(record, "dtype"),
            count=_whole(record, "count", 1),
            example=_example(record.get("example")),
            indices=_text(record, "indices"),
            before=_text(record, "before"),
            after=_text(record, "after"),
        )
        _check_bits(made)
        return made


def _require(holds: bool, words: str) -> None:
    if not holds:
        raise ConfigurationError(words)


def _whole(record: Mapping[str, Any], name: str, least: int) -> int:
    value = record.get(name)
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    _require(whole, f"{name} is {shortened(value)}, must be a whole number, at least {least}")
    assert isinstance(value, int)
    return value


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    _require(isinstance(value, str), f"{name} is {shortened(value)}, must be a text")
    assert isinstance(value, str)
    return value


def _example(value: object) -> Mapping[str, Any]:
    _require(isinstance(value, dict), f"example is {shortened(value)}, must be an object")
    assert isinstance(value, dict)
    return {"index": _whole(value, "index", 0), "before": _text(value, "before"), "after": _text(value, "after")}


@lru_cache(maxsize=256)
def _fault(spec: str) -> Fault:
    try:
        return parse(spec)
    except ConfigurationError as error:
        raise ConfigurationError(f"spec is no fault: {error}") from error


def _check_bits(strike: Strike) -> None:
    """Raises ConfigurationError unless these bits can have been changed in a tensor of this shape and dtype."""
    dtype = getattr(torch, strike.dtype.removeprefix("torch."), None)
    known = isinstance(dtype, torch.dtype) and str(dtype) == strike.dtype
    _require(known, f"there is no dtype {shortened(strike.dtype)}; one is e.g. torch.float32")
    assert isinstance(dtype, torch.dtype)
    indices = _numbers(strike.indices, "indices")
    _require(len(indices) == strike.count, f"count is {strike.count}, and there are {len(indices)} indices")
    _require(len(indices.unique()) == len(indices), "an index stands in it twice")
    size, wrong = math.prod(strike.shape), int(indices.min()) if int(indices.min()) < 0 else int(indices.max())
    _require(0 <= wrong < size, f"index {wrong} is outside of the shape {list(strike.shape)}")
    words = [
        _words(text, name, len(indices), dtype) for name, text in (("before", strike.before), ("after", strike.after))
    ]
    _require(bool((words[0] != words[1]).any(1).all()), "an element has the same bits before and after")
    _require(
        strike.example["index"] == int(indices[0]), "the index of the example is another than the first of the indices"
    )


def _words(text: str, name: str, count: int, dtype: torch.dtype) -> Tensor:
    per_element, width = (2, 64) if dtype == torch.complex128 else (1, bits_of(dtype))
    found = _numbers(text, name)
    _require(
        len(found) == count * per_element,
        f"{name} has {len(found)} words, and {count} elements of {dtype} have {count * per_element}",
    )
    fits = width == 64 or (int(found.min()) >= 0 and not int(found.max()) >> width)
    _require(fits, f"a word of {name} is wider than the {width} bits of {dtype}")
    return found.reshape(count, per_element)


def _numbers(text: str, name: str) -> Tensor:
    try:
        return unpack(text)
    except ValueError as error:
        raise ConfigurationError(f"{name}: {error}") from error


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
        return torch.from_numpy(np.frombuffer(raw, dtype="<i8").astype(np.int64))
    except (zlib.error, ValueError) as error:
        raise ValueError(f"packed integers cannot be unpacked: {error}") from error


def append(path: Path, strike: Strike, start_id: str = "") -> None:
    """Add a strike to a file of records; it is with the system when this returns.

    What a writer that died left of a line stays, for readers to skip. Beside the strike stands what names this start of the job and no
    other (`runfiles.drills.start_of`): `site.start` begins at 1 again with every `bitwitness run`, and one fault must not explain
    what was found in another session. It is no part of the strike, which is to be had again in another.

    Raises:
        RunFilesError: it cannot be written.
    """
    named = {"start_id": start_id} if start_id else {}
    line = json.dumps({**strike.to_json(), **named}).encode() + b"\n"
    with Reported(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                line = b"\n" + line
            while line:
                line = line[os.write(file, line) :]
        finally:
            os.close(file)


def read(path: Path, *, of_one_run: bool = True) -> tuple[Strike, ...]:
    """The strikes in a file of records, or in every `*.jsonl` of a folder; torn lines are left out.

    Args:
        path: of the file or the folder.
        of_one_run: they are to be had again, which those of several runs in one folder cannot.

    Raises:
        ConfigurationError: there is none, or something in it is no record, or they are of several runs; names file and line.
    """
    if not path.exists():
        raise ConfigurationError(f"there is no record {path}")
    found = landed(path)
    if not found:
        raise ConfigurationError(
            f"{path} holds no record of a fault: give a file that an injector has written, or its folder"
        )
    if of_one_run:
        _require_one_run(path, found)
    return found


def landed(path: Path) -> tuple[Strike, ...]:
    """What has landed up to now, by a file or folder that may not be there yet, and may be written to by others.

    Raises:
        ConfigurationError: something in it is no record; names file and line.
    """
    refresh_folder(path if path.is_dir() else path.parent)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path] if path.exists() else []
    return tuple(strike for file in files for strike in _read_file(file))


def _require_one_run(path: Path, strikes: tuple[Strike, ...]) -> None:
    specs: dict[int, str] = {}
    sites: set[Site] = set()
    for strike in strikes:
        spec = specs.setdefault(strike.site.fault, strike.spec)
        if spec != strike.spec:
            what = f"fault {strike.site.fault} is {spec} and also {strike.spec}"
        elif strike.site in sites:
            what = f"step {strike.site.step} on rank {strike.site.rank} stands in it twice"
        else:
            sites.add(strike.site)
            continue
        raise ConfigurationError(
            f"{path} is the record of several runs ({what}): only that of one can be had again. Give a run a directory of its own"
        )


def _read_file(file: Path) -> list[Strike]:
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigurationError(f"record {file} cannot be read: {error.strerror or error}") from error
    strikes, torn = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip(b" \t\r\0"):
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            torn.append((number, line))
            continue
        try:
            strikes.append(Strike.from_json(record))
        except ConfigurationError as error:
            raise ConfigurationError(f"{file}, line {number}: no record of a fault: {error}") from error
    # Of a record that was cut short the beginning is there; a file of something else begins otherwise.
    foreign = next((number for number, line in torn if not line.startswith(b"{")), None)
    if foreign is not None and not strikes:
        raise ConfigurationError(f"{file}, line {foreign}: no record of a fault: it is not JSON")
    if torn:
        logger.warning("%s: skipped %d torn line(s), the first is line %d", file, len(torn), torn[0][0])
    return strikes
