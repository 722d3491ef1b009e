"""An incident as a document to hand on: what a vendor needs to take a device back, or why nobody can be asked to.

Everything in it is what the console shows of the incident, read from the files of the run through the same import and the same
queries, so that the two never differ; what only matters outside is added: digests of the evidence, the software of the named
devices, and whether the verdict follows from the observations again. An unattributed incident gives a report that names nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bitwitness._version import __version__
from bitwitness.errors import ConfigurationError, NotFound, RunFilesError
from bitwitness.fleet.kept import Book
from bitwitness.fleet.state import State
from bitwitness.runfiles import Incident, RunFiles, digest_file, read_incident, utc_now
from bitwitness.runfiles.demo import demo_fault
from bitwitness.store import queries
from bitwitness.store.database import Database
from bitwitness.store.importing import Importer
from bitwitness.store.pages import IncidentPage, StrikeRow
from bitwitness.web.report_deciding import decide_again
from bitwitness.web.report_records import INJECTED, Device, Evidence, Report
from bitwitness.web.report_redacting import nameless

_FILES, _DRILLS, _DEVICES = 200, 100, 64


def gather(files: RunFiles, incident: str = "", fleet: Path | None = None) -> Report:
    """What there is to say about an incident of a run.

    Args:
        files: of the run.
        incident: its id; the newest if empty.
        fleet: the state folder of a `bitwitness fleet watch`; nothing is written there.

    Raises:
        ConfigurationError: there is no incident, or none of this id, or no state of a controller there.
        RunFilesError: the incident is damaged.
    """
    known = [path.name for path in files.incidents()]
    found = read_incident(files.path / "incidents" / _chosen(files, known, incident))
    with Database.memory() as database:
        serials = _serials(fleet)
        done = Importer(database, [files.path], fleets=[fleet] if fleet is not None else []).round()
        try:
            page = next(iter(_pages(database, done.runs, found.path.name)))
        except (NotFound, StopIteration):
            raise RunFilesError(
                f"{found.path / 'incident.json'} could not be taken over whole: see `bitwitness incident show {found.path}`"
            ) from None
        try:  # what is damaged shows only when it is used
            named = tuple(_devices(found, page, serials))[:_DEVICES]
            nodes, software = len(found.topology.nodes), _software(found)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RunFilesError(f"{found.path / 'incident.json'} is damaged: {error!r:.200}") from error
        strikes, denied = _standing(database, page)
        drills = queries.drills_page(database, size=_DRILLS).drills
    report = Report(
        page=page,
        devices=named,
        nodes=nodes,
        software=software,
        decided=decide_again(found),
        files=tuple(_evidence(found.path)),
        injected=tuple(one for one in drills if one.incident == found.path.name),
        recorded=(files.path / INJECTED).is_dir(),
        demo=bool(demo_fault(files.path.resolve())),
        strikes=strikes,
        denied=denied,
        fleet=fleet is not None,
        incidents=tuple(known),
        newest=not incident,
        made=utc_now(),
        version=__version__,
        source=found,
    )
    return report if page.incident.status == "attributed" else nameless(report)


def _chosen(files: RunFiles, known: Sequence[str], incident: str) -> str:
    if not known:
        raise ConfigurationError(
            f"{files.path} has no incidents: nothing was found in this run, so there is nothing to report"
        )
    if not incident:
        return known[-1]
    if incident not in known:
        newest = ", ".join(known[:-9:-1])
        raise ConfigurationError(f"{files.path} has no incident {incident!r:.80}; there are {len(known)}: {newest}")
    return incident


def _pages(database: Database, runs: frozenset[int], name: str) -> Iterator[IncidentPage]:
    for run in sorted(runs):
        yield queries.incident_page(database, run, name)


def _serials(fleet: Path | None) -> dict[str, str]:
    """Serial numbers as signals have told them to a controller; a state that cannot be read is an error here, not a gap."""
    if fleet is None:
        return {}
    with State(fleet, create=False, check=False, write=False) as state:
        return Book(state).serials()


def _devices(found: Incident, page: IncidentPage, serials: Mapping[str, str]) -> Iterator[Device]:
    placed = {place.rank: place for place in found.topology.placements}
    for rank in page.incident.ranks:
        place = placed.get(rank)
        if place is not None:
            serial = serials.get(place.device, "")
            where = (rank, str(place.node), str(place.device), int(place.slot))
            yield Device(*where, str(place.model), str(place.pod), str(place.software), serial)


def _software(found: Incident) -> str:
    """What most ranks ran with, and bitwitness itself."""
    said = [str(place.software) for place in found.topology.placements if place.software]
    usual = max(dict.fromkeys(said), key=said.count, default="")
    by = f"bitwitness {found.record.get('bitwitness', 'of an unknown version')}"
    return f"{by}; {usual}" if usual else by


def _standing(database: Database, page: IncidentPage) -> tuple[tuple[StrikeRow, ...], tuple[str, ...]]:
    strikes: list[StrikeRow] = []
    denied: list[str] = []
    for device in dict.fromkeys(page.incident.devices):
        try:
            known = queries.device_page(database, device)
        except NotFound:
            continue
        strikes += known.strikes
        denied += known.denied
    return tuple(strikes), tuple(dict.fromkeys(denied))


def _evidence(folder: Path) -> Iterator[Evidence]:
    """Regular files only: what a link leads to is somebody else's."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    for path in paths[:_FILES]:
        name = path.relative_to(folder).as_posix()
        try:
            digest = digest_file(path)
        except RunFilesError as error:
            yield Evidence(name, 0, "", str(error))
            continue
        yield Evidence(name, digest.bytes, digest.sha256, "")
    if len(paths) > _FILES:
        yield Evidence("...", 0, "", f"{len(paths) - _FILES} more files are not listed")
