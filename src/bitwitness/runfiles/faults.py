"""The records of faults that were injected on purpose, read without torch: who reads incidents must know which were drills.

`bitwitness.faults.record` writes them, checks every bit of them, and needs torch for that. Here only what a person must know is
taken from a line: which fault, where, when, and how many elements it changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwitness.runfiles.drills import Found, Struck, is_drill, landing, start_of
from bitwitness.runfiles.judging import last_judgement
from bitwitness.runfiles.reading import FAULTS, Folder, next_lines, rank_of
from bitwitness.runfiles.run import Incident

SCHEMA = 1
_STEPS = 1 << 40


@dataclass(frozen=True, slots=True)
class Injected:
    """One change that landed.

    Attributes:
        fault: the fault's number in its job.
        spec: the fault, in the grammar.
        node, rank, step: where and when.
        start: what names the start of the job (see `drills.start_of`); "" in records of older versions, which only count the
            starts of a session of `bitwitness run`, so that the first of another one has the same number.
        work, target, name: what was hit, in which work.
        count: elements that were changed.
    """

    fault: int
    spec: str
    node: str
    rank: int
    step: int
    start: str
    work: str
    target: str
    name: str
    count: int


def read_injected(line: bytes) -> Injected | None:
    """What a line of a record says; None where it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA or not isinstance(record.get("site"), dict):
        return None
    site = record["site"]
    numbers = [_whole(site.get(name)) for name in ("fault", "rank", "step")] + [_whole(record.get("count"))]
    words = [record.get("spec"), record.get("node"), *(site.get(name) for name in ("work", "target", "name"))]
    if None in numbers or not all(isinstance(word, str) for word in words):
        return None
    fault, rank, step, count = (int(number or 0) for number in numbers)
    spec, node, work, target, name = map(str, words)
    return Injected(fault, spec, node, rank, step, start_of(record), work, target, name, count)


def _whole(value: Any) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _STEPS
    return value if whole else None


def injected_into(run_dir: Path) -> list[Struck]:
    """The faults that landed in a run; what cannot be read counts as none, so that nothing is called a drill because of it."""
    found: dict[tuple[int, str, str, int], dict[int, str]] = {}
    try:
        with Folder(run_dir) as folder:
            for name in folder.names(FAULTS):
                if rank_of(name) is not None:
                    for one in filter(None, map(read_injected, _lines(folder, f"{FAULTS}/{name}"))):
                        key = (one.rank, one.node, one.start, one.fault)
                        found[key] = landing(found.get(key, {}), one.step, one.work)
    except OSError:
        pass
    return [Struck(rank, node, start, landed) for (rank, node, start, _), landed in found.items()]


def _lines(folder: Folder, name: str) -> Iterator[bytes]:
    try:
        descriptor = folder.open(name)
    except OSError:
        return
    try:
        lines = next_lines(descriptor, 0)
        while lines.offset or lines.more:
            yield from (line for _, line in lines.lines)
            if not lines.more:
                return
            lines = next_lines(descriptor, lines.offset, lines.scanned)
    except OSError:
        return
    finally:
        os.close(descriptor)


def judgement(found: Incident, actions: Sequence[Mapping[str, Any]], faults: Sequence[Struck]) -> str:
    """What an incident was: a person's last word, else a drill where injected faults explain it, else ""."""
    said = last_judgement(actions)
    return str(said["judgement"]) if said is not None else "drill" if was_drill(found, faults) else ""


def was_drill(found: Incident, faults: Sequence[Struck]) -> bool:
    """Whether injected faults explain all of an incident."""
    verdict, size = found.verdict, found.topology.world_size
    named = frozenset((rank, found.topology.node_of(rank) if 0 <= rank < size else "") for rank in verdict.ranks)
    about = Found(
        found.path.name,
        verdict.step,
        verdict.window[0],
        verdict.status,
        named if verdict.status == "attributed" else frozenset(),
        start_of(found.record),
        frozenset(verdict.candidates),
        str(verdict.check),
        verdict.persistence,
    )
    return is_drill(about, faults)
