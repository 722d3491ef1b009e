"""Following the journals of a scan's ranks while they grow: each line is read once, so that a thousand ranks can be looked at often.

Apart from `AnswerFiles`, which reads all of a journal at once and serves whoever looks at a scan that is over.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from bitwitness.errors import RunFilesError
from bitwitness.runfiles.answers import AnswerFiles, Sheet
from bitwitness.runfiles.journal import parse_line

_KINDS = ("begin", "end", "skip", "temperature", "link", "collective", "no-link")
"""What is kept of a journal beside answers."""


class Follower:
    """Reads what has been added to the journals of a scan.

    Attributes:
        records: by rank, its records that are no answers.
        damaged: by rank, why the file that says who it is cannot be used.
    """

    def __init__(self, files: AnswerFiles) -> None:
        self._files = files
        self._sheets: dict[int, Sheet] = {}
        self._read: dict[int, int] = {}
        self.records: dict[int, list[Mapping[str, Any]]] = {}
        self.damaged: dict[int, str] = {}

    def sheets(self) -> list[Sheet]:
        """The sheets of all that have said who they are, with what has been added since the last time.

        Raises:
            RunFilesError: a journal cannot be read.
        """
        for rank in self._files.ranks():
            if rank not in self._sheets:
                try:
                    self._sheets[rank] = Sheet(self._files.device(rank))
                except RunFilesError as error:
                    self.damaged[rank] = str(error)
                    continue
                self.damaged.pop(rank, None)
                self.records[rank] = []
            self._follow(rank, self._sheets[rank])
        return [self._sheets[rank] for rank in sorted(self._sheets)]

    def _follow(self, rank: int, sheet: Sheet) -> None:
        """Take note of the whole lines that are new; one that is still being written is for the next time."""
        path = self._files.answers(rank)
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(rank, 0), os.SEEK_SET)
                new = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunFilesError(f"journal {path} cannot be read: {error.strerror or error}") from error
        whole = new[: new.rfind(b"\n") + 1]
        self._read[rank] = self._read.get(rank, 0) + len(whole)
        for line in whole.splitlines():
            record = parse_line(line)
            if record is not None:
                sheet.take(record)
                if record.get("kind") in _KINDS:
                    self.records[rank].append(record)
