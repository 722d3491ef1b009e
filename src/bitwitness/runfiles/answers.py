"""The files in which devices leave their answers, for whoever judges them: of a scan, and of the slices beside a running job.

Ranks leave answers and judge nothing, so that none waits for another and a rank that dies loses only itself. Each has files of
its own:

    DIR/scan.json                  what was asked: suites, time, seed, version
    DIR/ranks/rank-00003.json      who it is: node, device, kind, process
    DIR/answers/rank-00003.jsonl   what it computed: `answer` records, and an `end` where it came to one
    DIR/focus.json                 the items that all ranks are to repeat, because somebody was wrong
    DIR/evidence/                  what a wrong answer looked like
    DIR/result.json                what was concluded; written last
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from bitwitness.errors import RunFilesError
from bitwitness.runfiles.files import read_json, refresh_folder, write_json
from bitwitness.runfiles.journal import Journal, read_journal

RIPPLE = "ripple"
"""The folder of a run directory that has the answers of slices between its steps."""

_RANK = re.compile(r"rank-(\d{5,})\.json")


_MOST_COUNTED, _MOST_SECONDS = 10**9, 1e9
"""In one record: whatever says more was not written by a rank."""


@dataclass(frozen=True, slots=True)
class Device:
    """Who answers.

    Attributes:
        rank: its number in this scan.
        node, device: as in `topology.Placement`; the device's identity survives renaming.
        kind: what must be equal for equal answers: model of the device, software, choice of kernels; by name.
        pid: its process, on its node.
    """

    rank: int
    node: str
    device: str
    kind: Mapping[str, str]
    pid: int = 0

    @property
    def kind_name(self) -> str:
        """The kind in one line."""
        return "; ".join(f"{name} {value}" for name, value in sorted(self.kind.items()))

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"kind": dict(self.kind)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`.

        Raises:
            RunFilesError: it is none.
        """
        try:
            kind = {str(name): str(value) for name, value in record["kind"].items()}
            return cls(int(record["rank"]), str(record["node"]), str(record["device"]), kind, int(record.get("pid", 0)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunFilesError(f"a record of a device that is none: {str(record)[:120]}") from error


@dataclass(slots=True)
class Sheet:
    """All answers of one device.

    Attributes:
        device: who.
        answers: by item, how often it gave which answer (a digest in hexadecimal).
        operands: by item, how many sets of operands gave just these answers, by the answers in order. Where there is none, as in a
            sheet that was made by hand, each answer counts as one from operands of its own.
        ended: how it ended: `done`, a reason, or "" where it has not ended, or was ended.
        seconds: that it has worked.
        last: time of its last record.
    """

    device: Device
    answers: dict[str, dict[str, int]] = field(default_factory=dict)
    ended: str = ""
    seconds: float = 0.0
    last: str = ""
    operands: dict[str, dict[tuple[str, ...], int]] = field(default_factory=dict)

    def take(self, record: Mapping[str, Any]) -> None:
        """Take note of one record of its journal; what is no answer and no end is skipped."""
        self.last = str(record.get("time", ""))
        if record.get("kind") == "end":
            self.ended = str(record.get("why", "")) or "done"
        elif record.get("kind") == "answer":
            self._take_answers(record)

    def _take_answers(self, record: Mapping[str, Any]) -> None:
        """A record says what came of some sets of operands: one answer, how often; or several, of one set."""
        item, given = record.get("item"), record.get("answers")
        answers: dict[Any, Any] = given if isinstance(given, dict) else {record.get("digest"): record.get("count")}
        whole = all(isinstance(digest, str) and _is_count(count) for digest, count in answers.items())
        if not isinstance(item, str) or not answers or not whole:
            return
        found = self.answers.setdefault(item, {})
        for digest, count in answers.items():
            found[digest] = found.get(digest, 0) + count
        batches, seconds = record.get("batches", 1), record.get("seconds", 0.0)
        came = self.operands.setdefault(item, {})
        names = tuple(sorted(answers))
        came[names] = came.get(names, 0) + (min(batches, sum(answers.values())) if _is_count(batches) else 1)
        if isinstance(seconds, int | float) and 0 <= seconds <= _MOST_SECONDS:
            self.seconds += seconds

    def sets(self, item: str) -> int:
        """From how many sets of operands its answers to an item came."""
        came = self.operands.get(item)
        return sum(came.values()) if came is not None else sum(self.answers.get(item, {}).values())

    def sets_with_other(self, item: str, right: str) -> int:
        """From how many of them an answer came that is not this one."""
        came = self.operands.get(item)
        if came is None:
            return sum(count for digest, count in self.answers.get(item, {}).items() if digest != right)
        return sum(count for digests, count in came.items() if digests != (right,))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST_COUNTED


class AnswerFiles:
    """The files of one scan, or of the slices of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.scan, self.focus, self.result = path / "scan.json", path / "focus.json", path / "result.json"
        self.evidence = path / "evidence"

    def create(self) -> None:
        """Make the folders that ranks write to."""
        for folder in (self.path, self.path / "ranks", self.path / "answers", self.evidence):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RunFilesError(f"{folder} cannot be made: {error.strerror or error}") from error

    def introduce(self, device: Device) -> Journal:
        """Say who a rank is, and open the journal of its answers: `append("answer", {"item", "digest", "count", "batches", "seconds"})`
        for answers since the last such record, with the number of sets of operands that they came from; `append("answer", {"item",
        "answers": {digest: count}, "batches": 1, "seconds"})` for one set of which different ones came; `append("end", {"why":
        "done"})` at the end.
        """
        write_json(self.path / "ranks" / f"rank-{device.rank:05d}.json", device.to_json())
        return Journal(self.answers(device.rank), device.rank)

    def answers(self, rank: int) -> Path:
        """The journal of a rank's answers."""
        return self.path / "answers" / f"rank-{rank:05d}.jsonl"

    def ranks(self) -> list[int]:
        """The ranks that have said who they are."""
        folder = self.path / "ranks"
        refresh_folder(folder)
        names = [_RANK.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
        return sorted(int(found[1]) for found in names if found)

    def device(self, rank: int) -> Device:
        """Who a rank is.

        Raises:
            RunFilesError: nothing says so, or it is about another rank.
        """
        path = self.path / "ranks" / f"rank-{rank:05d}.json"
        device = Device.from_json(read_json(path))
        if device.rank != rank:
            raise RunFilesError(f"{path} is about rank {device.rank}: it was not written by rank {rank}")
        return device

    def sheet(self, rank: int) -> Sheet:
        """All that a rank has answered so far. What is torn or no answer is skipped."""
        sheet = Sheet(self.device(rank))
        for record in read_journal(self.answers(rank)):
            sheet.take(record)
        return sheet

    def sheets(self) -> list[Sheet]:
        """Of every rank, in order."""
        return [self.sheet(rank) for rank in self.ranks()]
