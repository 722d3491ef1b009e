"""Incidents into the database, and what was done about each.

Blame comes from here, so nothing is believed that contradicts itself: an incident names a rank only where its verdict is
attributed, names that rank, and the placement has that rank on a node and a device that the verdict names too. Whatever else a
file claims of an unattributed incident, it has candidates and names nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from bitwitness.errors import RunFilesError
from bitwitness.evidence import Observation, Verdict
from bitwitness.runfiles.drills import start_of
from bitwitness.runfiles.reading import ACTIONS, INCIDENT, INCIDENT_NAME, INCIDENTS, Folder, Lines, to_object
from bitwitness.store.database import upsert
from bitwitness.store.importing_about import write_stays
from bitwitness.store.importing_problems import Problems
from bitwitness.store.importing_sources import Source, Taken
from bitwitness.store.importing_values import moment, name, plain, text, whole
from bitwitness.store.tables import actions, evidence, incident_ranks, incidents
from bitwitness.topology import Placement, Topology

_LARGEST = 64 << 20
FILES, _INVOLVED = 200, 512
JUDGEMENTS = ("confirmed", "false alarm", "drill")


def listed(folder: Folder, problems: Problems) -> list[str]:
    """The incidents of a run, by their names; what is something else is told."""
    found = folder.names(INCIDENTS)
    names = [one for one in found if INCIDENT_NAME.fullmatch(one)]
    strange = [one for one in found if one not in names]
    where = str(folder.path / INCIDENTS)
    if strange:
        problems.note(where, f"not incidents, and left out: {', '.join(map(repr, strange[:5]))}")
    else:
        problems.clear(where)
    return names


class Read:
    """What an incident.json says, as rows.

    Raises:
        RunFilesError: it contradicts itself, or is none; says what.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        try:
            self.verdict = Verdict.from_json(record["verdict"])
            self.topology = Topology.from_json(record["placement"])
            self.row = self._row(record)
            self.named = self._named()
            self.candidates = self._ranks(self.verdict.candidates)
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError, IndexError, RecursionError) as error:
            raise RunFilesError(f"it is damaged: {text(repr(error), 300)}") from error
        seen = record.get("observations")
        self.observations, self.lost = _observations(seen if isinstance(seen, list) else [])

    def _row(self, record: Mapping[str, Any]) -> dict[str, Any]:
        verdict = self.verdict
        step = whole(verdict.step)
        if verdict.status == "clean" or step is None or len(verdict.window) != 2:
            raise ValueError("its verdict is of no incident")
        first, last = (whole(one, -1) for one in verdict.window)
        notes, policy = record.get("notes"), record.get("policy")
        return {
            "time": moment(record.get("time")),
            "step": step,
            "check": name(verdict.check),
            "kind": text(verdict.kind, 50),
            "status": verdict.status,
            "persistence": verdict.persistence,
            "headline": text(verdict.headline(), 1000),
            "reason": text(verdict.reason),
            "window_first": -1 if first is None else first,
            "window_last": step if last is None else last,
            "world_size": self.topology.world_size,
            "nodes": len(self.topology.nodes),
            "start": name(start_of(record)),
            "on_detection": text(policy.get("on_detection"), 50) if isinstance(policy, dict) else "",
            "notes": [text(one, 1000) for one in notes[:100]] if isinstance(notes, list) else [],
        }

    def _ranks(self, ranks: tuple[Any, ...]) -> list[int]:
        found = [whole(one, most=self.topology.world_size - 1) for one in ranks]
        if None in found:
            raise ValueError(f"it speaks of rank {ranks[found.index(None)]!r:.40}, which its placement has not")
        return [one for one in dict.fromkeys(found) if one is not None]

    def _named(self) -> dict[int, str]:
        """Named ranks and how each was wrong; nobody unless the verdict is attributed."""
        verdict = self.verdict
        if verdict.status != "attributed":
            return {}
        ranks = self._ranks(verdict.ranks)
        for rank in ranks:
            place = self.topology.placements[rank]
            if place.node not in verdict.nodes or place.device not in verdict.devices:
                raise ValueError(f"it names rank {rank}, and not the node and the device where its placement has it")
        how = verdict.persistences if len(verdict.persistences) == len(ranks) else (verdict.persistence,) * len(ranks)
        return {rank: text(one, 20) for rank, one in zip(ranks, how, strict=True)}

    def ranks(self) -> list[dict[str, Any]]:
        """Rows of who was named, and of who was involved without blame."""
        candidates = [rank for rank in self.candidates if rank not in self.named]
        seen = {one["rank"] for one in self.observations} - self.named.keys() - set(candidates)
        involved = [rank for rank in sorted(seen) if rank < self.topology.world_size][:_INVOLVED]
        roles = [("named", rank) for rank in self.named]
        roles += [("candidate", rank) for rank in candidates] + [("involved", rank) for rank in involved]
        return [
            {
                "role": role,
                "rank": rank,
                "node": name(self.topology.node_of(rank)),
                "device": name(self.topology.device_of(rank)),
                "persistence": self.named.get(rank, "") if role == "named" else "",
            }
            for role, rank in roles
        ]

    def placement(self) -> list[dict[str, Any]]:
        """Where the ranks were that it speaks of."""
        ranks = {row["rank"] for row in self.ranks()}
        return [_place(rank, place) for rank, place in enumerate(self.topology.placements) if rank in ranks]


def _place(rank: int, place: Placement) -> dict[str, Any]:
    return {
        "rank": rank,
        "node": name(place.node),
        "device": name(place.device),
        "slot": whole(place.slot) or 0,
        "model": text(place.model, 200),
        "pod": name(place.pod),
    }


def _observations(records: list[Any]) -> tuple[list[dict[str, Any]], int]:
    """Those that are some, and how many are not."""
    found = []
    for record in records:
        try:
            one = Observation.from_json(record)
        except (TypeError, ValueError, KeyError):
            continue
        rank, step = whole(one.rank), whole(one.step)
        parts = (one.check, one.place, one.value, one.error)
        if rank is None or step is None or not all(isinstance(part, str) for part in parts):
            continue
        more = {"owner": one.owner, "micro": one.micro}
        if not isinstance(one.detail, Mapping) or any(
            each is not None and whole(each) is None for each in more.values()
        ):
            continue
        found.append(plain(one.to_json()))
    return found, len(records) - len(found)


def read(folder: Folder, incident: str, problems: Problems) -> Read | None:
    """What an incident says; None where it cannot be read, or is gone."""
    where = f"{INCIDENTS}/{incident}/{INCIDENT}"
    path = str(folder.path / where)
    try:
        found = Read(to_object(folder.read(where, _LARGEST), INCIDENT))
    except FileNotFoundError:
        return None
    except (OSError, RunFilesError) as error:
        problems.note(path, f"this incident could not be read: {error}")
        return None
    if found.lost:
        problems.note(path, f"{found.lost} of its observations are damaged, and left out", found.lost)
    else:
        problems.clear(path)
    return found


def write(
    connection: sa.Connection, run: int, incident: str, path: Path, found: Read, files: Mapping[str, int], stamp: str
) -> None:
    """Write an incident; what people said of it since stays."""
    values = {**found.row, "path": text(str(path)), "files": {text(one, 200): size for one, size in files.items()}}
    row = {"run_id": run, "name": incident, **values, "stamp": stamp}
    upsert(connection, incidents, [row], keys=("run_id", "name"))
    here = sa.select(incidents.c.id, incidents.c.pruned).where(incidents.c.run_id == run, incidents.c.name == incident)
    key, pruned = connection.execute(here).one()
    connection.execute(sa.delete(incident_ranks).where(incident_ranks.c.incident_id == key))
    ranks = [{"incident_id": key, "run_id": run, **one} for one in found.ranks()]
    upsert(connection, incident_ranks, ranks, update=())
    if not pruned:
        proof = {"incident_id": key, "observations": found.observations, "placement": found.placement()}
        upsert(connection, evidence, [proof])
    write_stays(connection, run, found.topology.placements, found.row["time"])


def actions_path(incident: str) -> str:
    """Where an incident's actions are noted."""
    return f"{INCIDENTS}/{incident}/{ACTIONS}"


def take_actions(connection: sa.Connection, source: Source, lines: Lines, run: int, incident: int) -> Taken:
    """Write lines of actions.jsonl."""
    rows, skipped = [], 0
    for at, line in lines.lines:
        if not line.strip():
            continue
        try:
            record = to_object(line, ACTIONS)
        except RunFilesError:
            skipped += 1
            continue
        action = text(record.get("action"), 200)
        if not action or (action == "judged" and record.get("judgement") not in JUDGEMENTS):
            skipped += 1
            continue
        said = next((text(record.get(one)) for one in ("why", "reason", "outcome") if record.get(one)), "")
        rows.append(
            {
                "incident_id": incident,
                "at": at,
                "run_id": run,
                "time": moment(record.get("time")),
                "action": action,
                "who": name(record.get("who")),
                "text": said,
                "record": plain(
                    {key: value for key, value in record.items() if key not in ("schema", "time", "action")}
                ),
            }
        )
    upsert(connection, actions, rows)
    return Taken(len(rows), skipped)


def forget_actions(connection: sa.Connection, incident: int) -> None:
    """Remove what was noted: the file was replaced by another."""
    connection.execute(sa.delete(actions).where(actions.c.incident_id == incident))
