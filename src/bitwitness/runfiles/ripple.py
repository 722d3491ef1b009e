"""What asks a running job for slices of known work between its steps, and where their answers are.

The command that asks and the ranks that are asked meet in files only: a rank must never wait for a command, nor die with it.

    RUN_DIR/ripple/request.json      the request in force: the newest one, replaced as a whole
    RUN_DIR/ripple/ID/START/         answers to it, of one start of the job (`answers.AnswerFiles`): in another start a rank may be
                                     another device
    RUN_DIR/ripple/ID/result.json    what was concluded
"""

from __future__ import annotations

import math
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

BESIDE = ("ops",)
"""The suites that can be computed beside a job: single operations. A step of a small model takes longer, and changes settings of the
whole process."""

MOST_BUDGET, MOST_SLICE_MS, MOST_MINUTES = 0.5, 1000.0, 1e7
"""What a request may ask for at most."""

_LATEST = 1e11
"""Seconds since 1970: what ends later ends never."""

_MOST_WHOLE, _MOST_DRILLS = 2**63, 1000
_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,99}")


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

    def absurd(self) -> str:
        """What of it makes no sense, whoever wrote it; "" where it can be kept to. Ranks heed no other request."""
        sound = {
            "id": _ID.fullmatch(self.id) is not None,
            "from_step": 0 <= self.from_step < _MOST_WHOLE,
            "every": 1 <= self.every < _MOST_WHOLE,
            "until": 0 <= self.until <= _LATEST,
            "slice_ms": 0 < self.slice_ms <= MOST_SLICE_MS,
            "budget": 0 < self.budget <= MOST_BUDGET,
            "suites": bool(self.suites) and set(self.suites) <= set(BESIDE),
            "seed": abs(self.seed) < _MOST_WHOLE,
            "suite_version": 0 <= self.suite_version < _MOST_WHOLE,
            "drills": len(self.drills) <= _MOST_DRILLS,
        }
        return ", ".join(f"{name} {getattr(self, name)!r:.60}" for name, fits in sound.items() if not fits)

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
                _text(record["id"]),
                _whole(record["from_step"]),
                _whole(record["every"]),
                _number(record["until"]),
                _number(record["slice_ms"]),
                _number(record["budget"]),
                _texts(record["suites"]),
                _whole(record["seed"]),
                _whole(record["suite_version"]),
                _texts(record.get("drills", [])),
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise RunFilesError(f"a request for slices that is none: {error!r}") from error
        if why := request.absurd():
            raise RunFilesError(f"a request for slices that cannot be kept to, {why}: {str(record)[:200]}")
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


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no text")
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{value!r:.60} is no list")
    return tuple(_text(one) for one in value)


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r:.60} is no whole number")
    return value


def _number(value: object) -> float:
    """NaN is none: it is neither before nor after any time."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise TypeError(f"{value!r:.60} is no number")
    return float(value)
