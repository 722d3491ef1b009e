"""Whether a device that was taken out has come back: repaired or not, under whatever name its node has now.

A node keeps its name when its machine is exchanged, and a machine may come back from repair with the same silicon. The UUID
and the serial number of a device are the only proof of which it is (recovery.md section 2.2), so they are kept from
before, and every start of a job is a chance to see them again. Pure but for reading the files of a run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from pathlib import Path

from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.runfiles import Incident, RunFiles, read_json, write_json
from bitwitness.topology import Topology

_SAME_NODE = timedelta(minutes=10)
"""A job may have been started on the node just before the node was taken out, and clocks differ."""
_SLICE = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/\d+/\d+")
"""Of drivers before 470, which name a slice by its parent."""


@dataclass(frozen=True, slots=True)
class Condemned:
    """A device because of which a node was taken out.

    Attributes:
        device: its UUID or other identity.
        serial: of the silicon, or "" where it was not known.
        node: where it was then.
        incident: id of the incident.
        time: when the node was taken out, UTC in ISO 8601.
        aliases: other names of the same silicon: of a slice (MIG) its device and the other slices, of a device its slices.
    """

    device: str
    serial: str
    node: str
    incident: str
    time: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sighting:
    """A device that was seen in a node.

    Attributes:
        device, serial: which; one of them may be "".
        node: where.
        time: when, UTC in ISO 8601.
        origin: by what it is known.
        aliases: other names of the same silicon, as in `Condemned`.
    """

    device: str
    serial: str
    node: str
    time: str
    origin: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Return:
    """A condemned device that was seen again."""

    condemned: Condemned
    sighting: Sighting

    @property
    def text(self) -> str:
        """A sentence, loud."""
        was, now = self.condemned, self.sighting
        same = f"serial {now.serial}" if was.serial and was.serial == now.serial else f"device {was.device}"
        where = f"back in {now.node}" if was.node == now.node else f"in {now.node}, and was in {was.node}"
        return (
            f"THE SAME SILICON IS BACK: {same} is {where} (seen {now.time}, {now.origin}); its node was taken out because of "
            f"incident {was.incident}, and nobody has cleared it"
        )


def returned(condemned: Sequence[Condemned], sightings: Sequence[Sighting]) -> list[Return]:
    """Which condemned devices were seen again after their node was taken out, each once with its first such sighting."""
    found = []
    for was in condemned:
        seen = [one for one in sightings if _is_same(was, one) and _is_later(was, one)]
        if seen:
            found.append(Return(was, min(seen, key=lambda one: datetime.fromisoformat(one.time))))
    return found


def _is_same(was: Condemned, one: Sighting) -> bool:
    return bool(_names(was) & _names(one)) or bool(was.serial and was.serial == one.serial)


def _names(one: Condemned | Sighting) -> set[str]:
    """All names of a piece of silicon."""
    told = {one.device, *one.aliases} - {""}
    return told | {parent[1] for name in told if (parent := _SLICE.fullmatch(name)) is not None}


def _is_later(was: Condemned, one: Sighting) -> bool:
    since = datetime.fromisoformat(was.time) + (_SAME_NODE if was.node == one.node else timedelta(0))
    return datetime.fromisoformat(one.time) > since


def returned_at_admission(condemned: Sequence[Condemned], sightings: Sequence[Sighting]) -> list[Return]:
    """Which condemned devices are in a node that asks whether it may take jobs: whatever the time, none of them may."""
    return [
        Return(was, next(one for one in sightings if _is_same(was, one)))
        for was in condemned
        if any(_is_same(was, one) for one in sightings)
    ]


def write_condemned(path: Path, condemned: Sequence[Condemned], *, mode: int | None = None) -> None:
    """Write the list that nodes look at before a job starts there, whole or not at all.

    Raises:
        RunFilesError: the file cannot be written.
    """
    write_json(path, {"devices": [asdict(one) for one in condemned]}, mode=mode)


def read_condemned(path: Path) -> list[Condemned]:
    """The inverse of `write_condemned`.

    Raises:
        RunFilesError: the file is absent, damaged or of another schema. It is never read as an empty list.
    """
    record = read_json(path)
    names = [one.name for one in fields(Condemned) if one.name != "aliases"]
    try:
        found = [
            Condemned(**{name: str(one[name]) for name in names}, aliases=tuple(map(str, one.get("aliases", ()))))
            for one in record["devices"]
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise RunFilesError(f"{path} is damaged ({error!r}): nobody can say which devices were taken out") from error
    return found


def sightings_of(files: RunFiles) -> list[Sighting]:
    """Where the last start of a run saw which device; empty where it has not started, or its files came over the network.

    Raises:
        RunFilesError: its run.json cannot be read, so nobody can say which devices it has.
    """
    path = files.path / "run.json"
    if not path.exists():
        return []
    try:
        record = files.read_run()
        where, time = Topology.from_json(record["placement"]), str(record["started"])
        if datetime.fromisoformat(time).tzinfo is None:
            raise ValueError(f"the time of its start has no zone: {time}")
    except (ConfigurationError, AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunFilesError(
            f"{path} is damaged ({error!r:.200}): nobody can say which devices this run has, so none that was taken out is "
            "recognised there"
        ) from error
    return _placed(where, time, f"a job that started there, {files.path}")


def sightings_in(incident: Incident, time: str) -> list[Sighting]:
    """Where the job of an incident had which device when it was found, at `time`."""
    return _placed(incident.topology, time, f"a job that ran there, of incident {incident.path.name}")


def _placed(where: Topology, time: str, origin: str) -> list[Sighting]:
    """A processor has no identity of its own (its "device" is called after its node), so it cannot come back."""
    devices = {place.device: place.node for place in where.placements if "/cpu-" not in place.device}
    return [Sighting(device, "", node, time, origin) for device, node in devices.items()]


def words_of(evidence: str) -> dict[str, str]:
    """What a signal `identity:pci` tells of a device: `serial=... mig=MIG-a,MIG-b`."""
    return {name: value for name, sign, value in (word.partition("=") for word in evidence.split()) if sign and value}


def slices_of(evidence: str) -> tuple[str, ...]:
    """The slices of the device that such a signal is about."""
    return tuple(name for name in words_of(evidence).get("mig", "").split(",") if name)
