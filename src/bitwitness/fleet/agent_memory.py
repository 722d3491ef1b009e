"""What a node's agent remembers across a kill: one small file, whole or as it was.

It is written after NVSentinel has taken an event. An agent that is killed between the two tells the same once more, which changes
nothing. A file that is lost, damaged or of another node is no memory, and that is told: what is decided without memory is more
careful (`agent.step`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.fleet.agent import Memory, Said
from bitwitness.fleet.clock import moment, stamp
from bitwitness.fleet.clusters.nvsentinel_events import valid_strategy
from bitwitness.runfiles.files import TEMPORARY, read_json, write_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Noted:
    """What is in the file.

    Attributes:
        memory: what was told.
        looked: when the node was last seen; None: never.
        troubles: what was wrong then.
    """

    memory: Memory
    looked: datetime | None = None
    troubles: tuple[str, ...] = ()


class MemoryFile:
    """The file of one node's agent.

    Args:
        path: of the file; None: it is kept in this process only, and lost with it.
        node: whose it is.
    """

    def __init__(self, path: Path | None, node: str) -> None:
        self._path, self._node = path, node

    def load(self) -> Noted:
        """What is remembered; no memory where there is none that can be trusted."""
        if self._path is None or not self._path.exists():
            return Noted(Memory(lost=True))
        try:
            return _noted(read_json(self._path), self._node)
        except (RunFilesError, ConfigurationError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is no memory of this agent, and is written anew: %s", self._path, error)
            return Noted(Memory(lost=True))

    def save(self, noted: Noted) -> None:
        """Keep this.

        Raises:
            RunFilesError: the disk does not take it.
        """
        if self._path is None:
            return
        record = {
            "node": self._node,
            "said": None if noted.memory.said is None else _record(noted.memory.said),
            "lost": noted.memory.lost,
            "looked": None if noted.looked is None else stamp(noted.looked),
            "troubles": list(noted.troubles),
        }
        write_json(self._path, record)

    def tidy(self) -> None:
        """Remove what a killed agent has left beside it."""
        if self._path is None:
            return
        for leftover in self._path.parent.glob(f".{self._path.name}.*{TEMPORARY}"):
            with suppress(OSError):
                leftover.unlink()


def _record(said: Said) -> dict[str, Any]:
    return {
        "healthy": said.healthy,
        "incident": said.incident,
        "devices": list(said.devices),
        "strategy": said.strategy,
        "asked": said.asked,
        "uid": said.uid,
        "at": stamp(said.at),
    }


def _noted(record: Mapping[str, Any], node: str) -> Noted:
    if record["node"] != node:
        raise ValueError(f"it is that of {record['node']!r:.80}")
    said = record["said"]
    looked = record["looked"]
    memory = Memory(None if said is None else _said(said), bool(record["lost"]))
    return Noted(memory, None if looked is None else _time(looked), tuple(str(one) for one in record["troubles"]))


def _said(record: Mapping[str, Any]) -> Said:
    return Said(
        healthy=bool(record["healthy"]),
        incident=str(record["incident"]),
        devices=tuple(str(one) for one in record["devices"]),
        strategy=valid_strategy(str(record["strategy"]), "the strategy"),
        asked=str(record["asked"]),
        uid=str(record["uid"]),
        at=_time(record["at"]),
    )


def _time(text: Any) -> datetime:
    made = moment(str(text))
    return made if made.tzinfo else made.replace(tzinfo=UTC)
