"""What a report holds, as plain data: made by `report`, made anew without names by `report_redacting`, drawn by `report_rendering`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bitwitness.runfiles import Incident
from bitwitness.store.pages import DrillRow, IncidentPage, StrikeRow
from bitwitness.web.report_deciding import Decided

INJECTED = "faults"
"""In the directory of a run: what was injected on purpose, if anything."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device that the verdict names.

    Attributes:
        rank, node, device, slot, model, pod: as in `store.pages.Place`.
        software: what its rank ran with, as run.json and the incident say.
        serial: its serial number, if a signal has told it, or "".
    """

    rank: int
    node: str
    device: str
    slot: int
    model: str
    pod: str
    software: str
    serial: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """A file beside the incident; `problem` says why it could not be read."""

    name: str
    bytes: int
    sha256: str
    problem: str


@dataclass(frozen=True, slots=True)
class Report:
    """All that the document says.

    Attributes:
        page: the incident, as the console shows it.
        devices: that the verdict names; empty unless it is attributed.
        nodes: how many the job had then.
        software: of the run, when the incident was written.
        decided: whether the verdict follows from the observations again.
        files: the evidence, with digests as of now.
        injected: faults that were injected on purpose and belong to this incident.
        recorded: whether the run has records of such faults at all, of this incident or not.
        demo: whether the run is a training of `bitwitness demo`, whose fault is its own.
        strikes, denied: of the named devices in this run.
        fleet: whether the state of a fleet controller was given.
        incidents: of this run, oldest first; this one is among them.
        newest: whether this one was taken because none was asked for.
        made, version: when and by which bitwitness.
        redacted: what was replaced or left out in it, kind -> how many; None where nothing was.
        source: the incident's own file; not a part of the document.
    """

    page: IncidentPage
    devices: tuple[Device, ...]
    nodes: int
    software: str
    decided: Decided
    files: tuple[Evidence, ...]
    injected: tuple[DrillRow, ...]
    recorded: bool
    demo: bool
    strikes: tuple[StrikeRow, ...]
    denied: tuple[str, ...]
    fleet: bool
    incidents: tuple[str, ...]
    newest: bool
    made: str
    version: str
    redacted: Mapping[str, int] | None = None
    source: Incident | None = field(default=None, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        record = dataclasses.asdict(dataclasses.replace(self, source=None))
        del record["source"]
        return record
