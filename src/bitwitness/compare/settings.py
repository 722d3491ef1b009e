"""What was asked of a comparison. Torch-free, because it is read back where a report is shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self, TypeVar

from bitwitness.compare.records import MODES, Mode
from bitwitness.errors import RunFilesError

T = TypeVar("T")

_MOST = 10**15


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a comparison.

    Attributes:
        id: name of its directory.
        workload, options: what is computed, as it was named, and what its maker is given besides device and seed.
        modes: in which order.
        globs: names of the submodules that are compared and, in lock-step, made equal again; () for all that have no submodules.
        steps: in each mode. seed: of data order and of what the model draws; the control has another.
        every: parameters are compared in the free run every so many steps.
        control: whether a reseeded healthy one runs along in the free run.
        confidence: of intervals and bounds.
        keep: wrong elements kept of one tensor in one step.
        timeout: seconds that one participant waits for another.
        time: when it began, UTC.
    """

    id: str
    workload: str
    options: Mapping[str, str] = field(default_factory=dict)
    modes: tuple[Mode, ...] = MODES
    globs: tuple[str, ...] = ()
    steps: int = 200
    seed: int = 0
    every: int = 1
    control: bool = True
    confidence: float = 0.95
    keep: int = 2048
    timeout: float = 600.0
    time: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"options": dict(self.options)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`.

        Raises:
            RunFilesError: it is none.
        """
        try:
            return cls(
                id=_text(record, "id"),
                workload=_text(record, "workload"),
                options={
                    _a_text("options", one): _text(record["options"], one) for one in _is("options", record, dict)
                },
                modes=_modes(record),
                globs=tuple(_a_text("globs", one) for one in _is("globs", record, list)),
                steps=_whole(record, "steps", 1),
                seed=_whole(record, "seed", 0),
                every=_whole(record, "every", 1),
                control=_is("control", record, bool),
                confidence=_number(record, "confidence", 1.0),
                keep=_whole(record, "keep", 0),
                timeout=_number(record, "timeout", math.inf),
                time=_text(record, "time"),
            )
        except KeyError as error:
            raise RunFilesError(
                f"a record of a comparison's settings without {error.args[0]}: it is damaged"
            ) from error
        except (TypeError, ValueError) as error:
            raise RunFilesError(f"a record of a comparison's settings that is none: {error}") from error


def _is(name: str, record: Mapping[str, Any], kind: type[T]) -> T:
    """A value of this kind; a bool is no number."""
    value = record[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} is {value!r:.60}")
    return value


def _a_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} has {value!r:.60} in it")
    return value


def _text(record: Mapping[str, Any], name: str) -> str:
    return _is(name, record, str)


def _whole(record: Mapping[str, Any], name: str, least: int) -> int:
    value = _is(name, record, int)
    if not least <= value <= _MOST:
        raise ValueError(f"{name} is {value!r:.60}")
    return value


def _number(record: Mapping[str, Any], name: str, below: float) -> float:
    value = float(_is(name, record, float)) if not isinstance(record[name], int) else float(_whole(record, name, 0))
    if not 0 < value < below:
        raise ValueError(f"{name} is {value!r:.60}")
    return value


def _modes(record: Mapping[str, Any]) -> tuple[Mode, ...]:
    found = _is("modes", record, list)
    if not found or any(one not in MODES for one in found) or len(set(found)) < len(found):
        raise ValueError(f"modes is {found!r:.60}")
    return tuple(mode for mode in MODES if mode in found)
