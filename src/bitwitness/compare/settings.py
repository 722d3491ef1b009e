"""What was asked of a comparison. Torch-free, because it is read back where a report is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from bitwitness.compare.records import MODES, Mode
from bitwitness.errors import RunFilesError


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
            modes = tuple(mode for mode in MODES if mode in record["modes"])
            return cls(
                id=str(record["id"]),
                workload=str(record["workload"]),
                options={str(name): str(value) for name, value in record["options"].items()},
                modes=modes,
                globs=tuple(str(glob) for glob in record["globs"]),
                steps=int(record["steps"]),
                seed=int(record["seed"]),
                every=int(record["every"]),
                control=bool(record["control"]),
                confidence=float(record["confidence"]),
                keep=int(record["keep"]),
                timeout=float(record["timeout"]),
                time=str(record["time"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunFilesError(f"a record of a comparison's settings that is none: {error!r}") from error
