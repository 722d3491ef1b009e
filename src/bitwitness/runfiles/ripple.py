"""What asks a running job for slices of known work between its steps, and where their answers are.

The command that asks and the ranks that are asked meet in files only: a rank must never wait for a command, nor die with it.

    RUN_DIR/ripple/request.json      the request in force: the newest one, replaced as a whole
    RUN_DIR/ripple/ID/START/         answers to it, of one start of the job (`answers.AnswerFiles`): in another start a rank may be
                                     another device
    RUN_DIR/ripple/ID/result.json    what was concluded
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from bitwitness.errors import RunFilesError
from bitwitness.runfiles.answers import RIPPLE, AnswerFiles
from bitwitness.runfiles.files import Reported, exists, read_json, refresh_folder, write_json

LOOK_SECONDS = 10.0
"""How often a rank looks whether there is a request."""

_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,99}")


@dataclass(frozen=True, slots=True)
class Request:
    """What the ranks of a job are asked for.

    Attributes:
        id: names it, and the folder of its answers.
        from_step, every: the steps after which there is a slice: a function of the step alone, so that all ranks take the same ones
            and none has to ask another.
        until: when it ends, in seconds since 1970; 0 where it was withdrawn.
        slice_ms: how long a slice may be.
        budget: the share of the job's time that all slices together may take.
        suites: what is computed.
        seed: of the order in which it is computed.
        suite_version: of what is computed; a rank that has another one computes nothing.
        drills: faults on purpose, as `scan --drill` takes them.
    """

    id: str
    from_step: int
    every: int
    until: float
    slice_ms: float
    budget: float
    suites: tuple[str, ...]
    seed: int
    suite_version: int
    drills: tuple[str, ...] = ()

    def slice_after(self, step: int) -> int | None:
        """Number of the slice after this step, from 0; None where there is none."""
        number, rest = divmod(step - self.from_step, self.every)
        return number if rest == 0 and number >= 0 else None

    def withdrawn(self) -> Self:
        """The same, ended."""
        return replace(self, until=0.0)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"suites": list(self.suites), "drills": list(self.drills)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`.

        Raises:
            RunFilesError: it is no request, or one that cannot be kept to.
        """
        try:
            request = cls(
                str(record["id"]),
                int(record["from_step"]),
                int(record["every"]),
                float(record["until"]),
                float(record["slice_ms"]),
                float(record["budget"]),
                tuple(str(one) for one in record["suites"]),
                int(record["seed"]),
                int(record["suite_version"]),
                tuple(str(one) for one in record.get("drills", ())),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RunFilesError(f"a request for slices that is none: {error!r}") from error
        sound = request.every >= 1 and request.from_step >= 0 and request.slice_ms > 0 and 0 < request.budget <= 1
        if not sound or not _ID.fullmatch(request.id):
            raise RunFilesError(f"a request for slices that cannot be kept to: {str(record)[:200]}")
        return request


class RippleFiles:
    """The files about slices in a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.path = run_dir, run_dir / RIPPLE
        self.request = self.path / "request.json"

    def stamp(self) -> tuple[int, ...] | None:
        """What changes when there is another request; None where there is none. Asks the file server anew."""
        if not exists(self.path):
            return None
        refresh_folder(self.path)
        try:
            seen = self.request.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RunFilesError(f"{self.request} cannot be looked at: {error.strerror or error}") from error
        return seen.st_mtime_ns, seen.st_size, seen.st_ino

    def read(self) -> Request | None:
        """The request in force, ended ones included; None where there is none.

        Raises:
            RunFilesError: it is damaged.
        """
        return Request.from_json(read_json(self.request)) if exists(self.path) and exists(self.request) else None

    def write(self, request: Request) -> None:
        """Put a request in the place of the one before."""
        with Reported(self.path, "made"):
            self.path.mkdir(exist_ok=True)
        write_json(self.request, request.to_json())

    def answers(self, request: str, start: str) -> AnswerFiles:
        """The answers to a request of one start of the job."""
        return AnswerFiles(self.path / request / (re.sub(r"[^0-9A-Za-z._-]", "-", start) or "start"))

    def starts(self, request: str) -> list[AnswerFiles]:
        """The answers to a request of each start of the job that has some, oldest first."""
        folder = self.path / request
        refresh_folder(folder)
        with Reported(folder, "read"):
            found = [one for one in folder.iterdir() if one.is_dir()] if folder.is_dir() else []
            return [AnswerFiles(one) for one in sorted(found, key=lambda one: (one.stat().st_mtime_ns, one.name))]

    def result(self, request: str) -> Path:
        """Where the conclusion is written."""
        return self.path / request / "result.json"
