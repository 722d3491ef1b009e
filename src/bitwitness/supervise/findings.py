"""From the files of a run to what `decisions` decides on, and from what it decided to the quarantine."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

from bitwitness.errors import RunFilesError
from bitwitness.evidence import Verdict
from bitwitness.runfiles import Incident, RunFiles, read_incident
from bitwitness.runfiles.supervision import Member
from bitwitness.supervise.decisions import Blame, Failure, Hang, Hit, Named, Place
from bitwitness.supervise.settings import Settings

logger = logging.getLogger(__name__)


def incidents_of(files: RunFiles, session: str, generation: int, failures: Sequence[Failure]) -> tuple[Hit, ...]:
    """The incidents that ended a generation.

    One that was only recorded, or after which training went on, ended nothing, unless a worker failed with it. One that the
    disk refused is known from the worker's error alone.
    """
    raised = {Path(one.incident).name: one for one in failures if one.incident}
    hits: dict[str, Hit] = {}
    for path in files.incidents():
        incident = _read(path)
        if incident is None or _origin(incident) != (session, generation):
            continue
        if _stops(incident) or path.name in raised:
            hits[path.name] = _hit(incident)
    for name, failure in raised.items():  # of a guard whose run_dir is not ours
        incident = None if name in hits else _read(Path(failure.incident))
        if incident is not None:
            hits[name] = _hit(incident)
    unwritten = [one for one in failures if one.verdict and Path(one.incident).name not in hits]
    if unwritten and not hits:
        hits[""] = _hit_of_error(unwritten[0].verdict)
    return tuple(hits[name] for name in sorted(hits))


def survived(files: RunFiles, session: str, generation: int, ending: Sequence[Hit]) -> tuple[Hit, ...]:
    """The incidents of a generation after which training went on (*retry*, *skip*): they count as strikes all the same.

    Shadow mode is not among them: it observes, and nothing follows from it.
    """
    ended = {hit.id for hit in ending}
    found = (_read(path) for path in files.incidents() if path.name not in ended)
    mine = [one for one in found if one is not None and _origin(one) == (session, generation)]
    return tuple(_hit(one) for one in mine if not _stops(one) and one.record["policy"]["on_detection"] != "record")


def unsettled(files: RunFiles, session: str) -> tuple[Hit, ...]:
    """Incidents of earlier supervised runs about which nothing was done, because their supervisor died as well."""
    hits = []
    for path in files.incidents():
        incident = _read(path)
        if incident is None or not _stops(incident) or _origin(incident)[0] in ("", session):
            continue
        if not files.actions(path.name):
            hits.append(_hit(incident))
    return tuple(hits)


def _read(path: Path) -> Incident | None:
    try:
        return read_incident(path)
    except RunFilesError as error:
        logger.warning("%s", error)
        return None


def _origin(incident: Incident) -> tuple[str, int]:
    return str(incident.record.get("supervision") or ""), int(incident.record.get("generation") or 0)


def _stops(incident: Incident) -> bool:
    policy = incident.record.get("policy")
    return not isinstance(policy, Mapping) or policy.get("on_detection", "raise") == "raise"


def _hit(incident: Incident) -> Hit:
    verdict, where = incident.verdict, incident.topology
    how = verdict.persistences if len(verdict.persistences) == len(verdict.ranks) else repeat(verdict.persistence)
    named = [
        Named(rank, where.node_of(rank), where.device_of(rank), persistence)
        for rank, persistence in zip(verdict.ranks, how, strict=False)
    ]
    return Hit(incident.path.name, verdict, tuple(named), str(incident.path))


def _hit_of_error(record: Mapping[str, Any]) -> Hit:
    verdict = Verdict.from_json(record)
    if not len(verdict.ranks) == len(verdict.devices) == len(verdict.nodes):
        return Hit("", verdict)  # which device stands on which node is not said: nobody is denied
    places = zip(verdict.ranks, verdict.nodes, verdict.devices, strict=True)
    return Hit("", verdict, tuple(Named(*place, verdict.persistence) for place in places))


def strikes_within(files: RunFiles, settings: Settings) -> dict[str, int]:
    """How many strikes each device has within the window."""
    quarantine = files.quarantine.read()
    counted = {name: quarantine.strikes_within(name, settings.strike_window) for name in quarantine.strikes}
    return {name: count for name, count in counted.items() if count}


def punish(files: RunFiles, blamed: Blame) -> list[str]:
    """Write strikes and denials, durably, and what was done beside each incident; the sentences.

    Raises:
        RunFilesError: the quarantine cannot be read or written.
    """
    quarantine, said = files.quarantine, []
    for hit, one in blamed.strikes:
        quarantine.strike(one.device, incident=hit.id, node=one.node, persistence=one.persistence)
        said.append(f"strike: {one.device} on {one.node} ({one.persistence} corruption)")
        _note(files, hit, "strike", device=one.device, node=one.node)
    for device, (hit, one, reason) in blamed.devices.items():
        quarantine.deny_devices([device], node=one.node, reason=reason, incident=hit.id)
        said.append(f"quarantined: {device} on {one.node}: {reason}")
        _note(files, hit, "quarantined", device=device, node=one.node, reason=reason)
    for node, (hit, reason) in blamed.nodes.items():
        quarantine.deny_node(node, reason=reason, incident=hit.id)
        said.append(f"quarantined: node {node}: {reason}")
        _note(files, hit, "quarantined", node=node, reason=reason)
    return said


def note(files: RunFiles, hits: Iterable[Hit], action: str, **fields: Any) -> None:
    """Note beside each incident what was done."""
    for hit in hits:
        _note(files, hit, action, **fields)


def _note(files: RunFiles, hit: Hit, action: str, **fields: Any) -> None:
    if hit.id and Path(hit.path).parent == files.path / "incidents":
        try:
            files.note_action(hit.id, action, **fields)
        except RunFilesError as error:
            logger.warning("%s", error)


def named_before(files: RunFiles, hits: Sequence[Hit]) -> tuple[Named, ...]:
    """Whom other incidents of this run have named as persistent."""
    own = {hit.id for hit in hits}
    found = (_read(path) for path in files.incidents() if path.name not in own)
    names = (one for incident in found if incident is not None for one in _hit(incident).named)
    return tuple(one for one in names if one.persistence == "persistent")


def hang_of(members: Collection[Member], marked: Collection[int], timeout: float) -> Hang | None:
    """What is known where some node has been quiet for too long; None where there is none."""
    if not timeout:
        return None
    quiet = [one for one in members if one.state == "running" and one.quiet >= timeout]
    if not quiet:
        return None
    ranks: list[Place] = []
    for member in members:
        for rank, (step, phase, age) in member.progress.items():
            if int(rank) not in marked:
                ranks.append((int(rank), member.node, int(step), str(phase), float(age)))
    silent = tuple(one.node for one in quiet if not one.progress) if ranks else ()
    return Hang(max(one.quiet for one in quiet), _behind(ranks), tuple(sorted(ranks)), silent)


def _behind(ranks: Sequence[Place]) -> tuple[Place, ...]:
    """Those that stand at a place where the others are not: at an earlier step, else where the longest-standing stands."""
    if not ranks:
        return ()
    lowest = min(step for _, _, step, _, _ in ranks)
    early = [one for one in ranks if one[2] == lowest]
    oldest = max(early, key=lambda one: one[4])
    found = early if len(early) < len(ranks) else [one for one in early if one[3] == oldest[3]]
    return tuple(sorted(found, key=lambda one: -one[4])) if len(found) < len(ranks) else ()
