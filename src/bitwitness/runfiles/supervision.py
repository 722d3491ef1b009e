"""What `bitwitness run` leaves in RUN_DIR/supervise: how one leader and the wrappers of many nodes talk through files.

Nothing else joins them, so that no port, lock or daemon can be left behind by a `kill -9`. What is relied on is what every
network file system has: a rename within a folder shows the old file or the new one, and opening a folder shows what has
been renamed into it. No time of one host is ever compared with that of another: who is alive is told by a counter that
goes on.

    supervise/session.json                        the leader's word: who leads, which generation, whether to stop
    supervise/log.jsonl                           what happened, one JSON object a line
    supervise/<session>/members/<node>.json       a wrapper's word: its state, its beat
    supervise/<session>/generation-0001.json      who trains, in the order of ranks
    supervise/<session>/abort-0001.json           why a generation is stopped; the first reason stays
    supervise/<session>/marks/0001/rank-00003.json  a rank's durable word that it has finished, or stopped when asked to
    supervise/<session>/stop.json                 how the session ended
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast, get_args
from urllib.parse import quote

from bitwitness.errors import RunFilesError
from bitwitness.runfiles.files import SCHEMA, Reported, dump, read_json, write_json
from bitwitness.runfiles.journal import append_line

logger = logging.getLogger(__name__)

MemberState = Literal["joined", "ready", "refused", "running", "ended", "stopped"]
Mark = Literal["finished", "stopped"]

_SESSIONS_KEPT = 5


class _Record:
    """A record with a plain JSON form, whose reader ignores what a newer writer has added."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values, every field present."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]  # each subclass is a dataclass

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: the record is not one of these.
        """
        known: dict[str, Any] = {}
        for one in fields(cls):  # type: ignore[arg-type]
            if one.name in record:
                value = record[one.name]
                known[one.name] = tuple(value) if isinstance(value, list) else value
        return cls(**known)


_Kind = TypeVar("_Kind", bound=_Record)


@dataclass(frozen=True, slots=True)
class Session(_Record):
    """The leader's word, rewritten at every beat.

    Attributes:
        id: of this supervised run; a new one at each start of the leader.
        host, pid: where the leader is, for people.
        beat: goes up while the leader lives.
        job: what is run (nodes, processes, script); a wrapper that was started with something else says so.
        preparing: the generation for which wrappers shall say whether they are ready.
        generation: the last generation that was started; 0 before the first.
        abort: the last generation that was called off.
        stopping: the signal on which all workers are asked to stop, or "".
        kill: do not wait for them.
        ended: stop.json is written.
    """

    id: str
    host: str = ""
    pid: int = 0
    beat: int = 0
    job: Mapping[str, Any] = field(default_factory=dict)
    preparing: int = 0
    generation: int = 0
    abort: int = 0
    stopping: str = ""
    kill: bool = False
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Member(_Record):
    """A wrapper's word on its node, rewritten at every beat.

    Attributes:
        node, host, pid, index, address: who and where it is; `index` is its place among the wrappers.
        token: of this process, so that two wrappers that call themselves alike find out.
        devices: identities of the node's devices, in the order of local ranks.
        state, generation: what it does, and in which generation.
        why: the reason of a refusal; of one that ran, why it has ended its workers by itself.
        port: one that was free when it became ready.
        code: exit code of its agent, once that has ended; -n for a signal.
        failures: what is known of its workers that have failed, as `supervise.decisions.Failure` has it.
        beat: goes up while the wrapper lives.
        signal: the signal it was told to stop by, or "".
        progress: rank (as text) -> [step, phase, seconds since it said so].
        quiet: seconds since any of its ranks showed progress.
        port_taken: its agent could not listen on the port of the generation.
    """

    node: str
    token: str
    host: str = ""
    pid: int = 0
    index: int = 0
    address: str = ""
    devices: tuple[str, ...] = ()
    state: MemberState = "joined"
    generation: int = 0
    why: str = ""
    port: int = 0
    code: int | None = None
    failures: tuple[Mapping[str, Any], ...] = ()
    beat: int = 0
    signal: str = ""
    progress: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    quiet: float = 0.0
    port_taken: bool = False

    def __post_init__(self) -> None:
        if self.state not in get_args(MemberState):
            raise ValueError(f"{self.state!r} is none of {', '.join(get_args(MemberState))}")


@dataclass(frozen=True, slots=True)
class Generation(_Record):
    """Who trains together, from one start of the workers to their end.

    Attributes:
        number: from 1, within a session.
        nodes: in the order of node ranks.
        address, port: where the first node's agent listens.
        suspicion: every step is audited.
        reason: why this generation was started.
    """

    number: int
    nodes: tuple[str, ...]
    address: str
    port: int
    suspicion: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Stop(_Record):
    """How a session ended: the exit code of every wrapper, and why."""

    exit_code: int
    outcome: str
    reason: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)


class SupervisionFiles:
    """The files of supervision in one run directory."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.run_dir = Path(run_dir).absolute()
        self.folder = self.run_dir / "supervise"

    def create(self, session: str) -> None:
        """Make the folders of a session, and remove those of long ago.

        Raises:
            RunFilesError: they cannot be made.
        """
        home = self._home(session)
        with Reported(home, "made"):
            (home / "members").mkdir(parents=True, exist_ok=True)
            (home / "marks").mkdir(exist_ok=True)
        others = sorted(path for path in self.folder.iterdir() if path.is_dir() and path != home)
        for path in others[: -_SESSIONS_KEPT + 1]:
            shutil.rmtree(path, ignore_errors=True)

    def log(self, session: str, kind: str, **fields: Any) -> None:
        """Append one event to log.jsonl."""
        append_line(self.folder / "log.jsonl", {"kind": kind, "session": session, **fields})

    def logs(self, session: str, generation: int, node: str) -> Path:
        """The folder of what one node's agent and workers print."""
        return self.run_dir / "logs" / session / f"generation-{generation:04d}" / _file_name(node)

    # The leader's word

    def read_session(self) -> Session | None:
        """The session of now; None where there is none."""
        return _read(self.folder / "session.json", Session)

    def write_session(self, session: Session) -> None:
        """Say it: without a flush to the disk, since another beat follows."""
        _replace(self.folder / "session.json", session.to_json())

    def read_generation(self, session: str, number: int) -> Generation | None:
        """A generation; None where it was not started, or cannot be seen from here yet."""
        return _read(self._home(session) / f"generation-{number:04d}.json", Generation)

    def write_generation(self, session: str, generation: Generation) -> None:
        """Write who trains, durably."""
        write_json(self._home(session) / f"generation-{generation.number:04d}.json", generation.to_json())

    def read_abort(self, session: str, number: int) -> Mapping[str, Any]:
        """Why a generation was called off: `reason` and `kind`; empty where it was not."""
        try:
            return read_json(self._home(session) / f"abort-{number:04d}.json")
        except RunFilesError:
            return {}

    def write_abort(self, session: str, number: int, kind: str, reason: str) -> None:
        """Call a generation off; the reason that was written first stays."""
        path = self._home(session) / f"abort-{number:04d}.json"
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        with Reported(path, "written"):
            staged.write_text(dump({"schema": SCHEMA, "kind": kind, "reason": reason}), encoding="utf-8")
            try:
                os.link(staged, path)
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links
                if not path.exists():
                    staged.replace(path)
            finally:
                staged.unlink(missing_ok=True)

    def read_stop(self, session: str) -> Stop | None:
        """How a session ended; None while it goes on."""
        return _read(self._home(session) / "stop.json", Stop)

    def write_stop(self, session: str, stop: Stop) -> None:
        """Write how the session ended, durably."""
        write_json(self._home(session) / "stop.json", stop.to_json())

    # The wrappers' words

    def read_member(self, session: str, node: str) -> Member | None:
        """What a wrapper said last."""
        return _read(self._member(session, node), Member)

    def read_members(self, session: str) -> list[Member]:
        """What every wrapper of a session said last, in order of their indices."""
        folder = self._home(session) / "members"
        found = (_read(path, Member) for path in _listed(folder) if path.suffix == ".json")
        return sorted((one for one in found if one is not None), key=lambda one: (one.index, one.node))

    def write_member(self, session: str, member: Member) -> None:
        """Say it: without a flush to the disk, since another beat follows."""
        _replace(self._member(session, member.node), member.to_json())

    # The workers' words

    def write_mark(self, session: str, generation: int, rank: int, mark: Mark) -> None:
        """A rank's word that it is done, durably: this, and no exit code, is what success consists of."""
        folder = self._home(session) / "marks" / f"{generation:04d}"
        with Reported(folder, "made"):
            folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"rank-{rank:05d}.json", {"rank": rank, "mark": mark})

    def read_marks(self, session: str, generation: int, known: Mapping[int, Mark] | None = None) -> dict[int, Mark]:
        """The marks of a generation by rank. What is in `known` is not read again."""
        found: dict[int, Mark] = dict(known or {})
        for path in _listed(self._home(session) / "marks" / f"{generation:04d}"):
            digits = path.stem.removeprefix("rank-")
            if path.suffix != ".json" or not digits.isdecimal() or int(digits) in found:
                continue
            try:
                mark = read_json(path).get("mark")
            except RunFilesError as error:
                logger.debug("%s", error)
                continue
            if mark in get_args(Mark):
                found[int(digits)] = cast("Mark", mark)
        return found

    def _home(self, session: str) -> Path:
        return self.folder / _file_name(session)

    def _member(self, session: str, node: str) -> Path:
        return self._home(session) / "members" / f"{_file_name(node)}.json"


def _file_name(name: str) -> str:
    """A name from elsewhere as the name of a file: no separators, and no dot in front."""
    plain = quote(name, safe="")
    return "%2E" + plain[1:] if plain.startswith(".") else plain


def _listed(folder: Path) -> list[Path]:
    """The files of a folder. Opening it is what makes a network file system look again at what is in it."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _read(path: Path, kind: type[_Kind]) -> _Kind | None:
    """A record, or None: what is absent, damaged or half-visible is not there yet, and the next beat brings it anew."""
    try:
        return kind.from_json(read_json(path))
    except (RunFilesError, KeyError, TypeError, ValueError) as error:
        logger.debug("%s: %s", path, error)
        return None


def _replace(path: Path, record: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with Reported(path, "written"):
        temporary.write_text(dump({"schema": SCHEMA, **record}), encoding="utf-8")
        temporary.replace(path)
