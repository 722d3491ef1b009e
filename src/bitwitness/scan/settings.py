"""What a scan was asked for: one record that the coordinator writes and every rank reads, and readers find years later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from bitwitness._version import __version__
from bitwitness.errors import RunFilesError
from bitwitness.scan.drill import Drill, parse
from bitwitness.scan.items import SUITE_VERSION, SUITES, Suite


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What was asked.

    Attributes:
        id: of this scan.
        world: how many ranks answer.
        seconds: that each rank works, from the start of its own work.
        suites: in their order.
        seed: of what is drawn: drills, and what ranks send each other.
        drills: faults on purpose.
        played: processes of a processor stand for devices: what is found says nothing about a node of that name.
        processors: ranks that torchrun has started may judge processors where there is no GPU.
        ranks_per_node: so many played devices share a node.
        confidence: of the bounds.
        job: of torchrun, by which the ranks of one start know each other; "" where one process started them all.
        time: of the start.
    """

    id: str
    world: int
    seconds: float
    suites: tuple[Suite, ...] = SUITES
    seed: int = 0
    drills: tuple[Drill, ...] = ()
    played: bool = False
    processors: bool = False
    ranks_per_node: int = 1
    confidence: float = 0.95
    job: str = ""
    time: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON values, with the versions of what computes."""
        return asdict(self) | {
            "suites": list(self.suites),
            "drills": [str(drill) for drill in self.drills],
            "drill": bool(self.drills),
            "minutes": self.seconds / 60,
            "suite_version": SUITE_VERSION,
            "bitwitness": __version__,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`.

        Raises:
            RunFilesError: it is none.
        """
        try:
            wanted = [str(suite) for suite in record["suites"]]
            return cls(
                id=str(record["id"]),
                world=int(record["world"]),
                seconds=float(record["seconds"]),
                suites=tuple(suite for suite in SUITES if suite in wanted),
                seed=int(record["seed"]),
                drills=tuple(parse(str(text)) for text in record["drills"]),
                played=bool(record["played"]),
                processors=bool(record["processors"]),
                ranks_per_node=int(record["ranks_per_node"]),
                confidence=float(record["confidence"]),
                job=str(record["job"]),
                time=str(record["time"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RunFilesError(
                f"scan.json describes no scan ({error!r}): it was not written by this version"
            ) from error
