"""Where incidents and hardware signals come from: run directories that come and go, and logs that may hang.

Nothing here may stop the rest: a directory that vanishes, a file that is damaged and a log on a server that does not answer
are each said once, and everything else goes on.
"""

from __future__ import annotations

import errno
import glob
import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from functools import partial
from itertools import chain, islice
from pathlib import Path

from bitwitness.errors import BitwitnessError, ConfigurationError, RunFilesError
from bitwitness.fleet.clusters.base import valid_node
from bitwitness.fleet.decision import namings_of
from bitwitness.fleet.notify import Severity
from bitwitness.fleet.owning import RUN_LOCK, Lock, owned
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.signals.gather import IDENTITY, gather, of_node
from bitwitness.fleet.signals.reading import masked, shown_address
from bitwitness.fleet.signals.record import Signal, no_evidence
from bitwitness.runfiles import Incident, RunFiles

logger = logging.getLogger(__name__)

ReadSignals = Callable[[Incident], Sequence[Signal]]
"""What the hardware says around an incident; it never raises."""

Stamp = tuple[int, int, int]

_PATIENCE = 20.0
"""Seconds that one source of signals may take."""
_MINUTE = 60.0
_LARGEST_FILE = 32 << 20
"""Bytes of an incident.json or run.json; on 100,000 ranks they are some 20 MiB."""
_MOST_SIGNALS = 500
_MOST_FILES, _MOST_NAMES = 200, 100_000
"""Of one pattern: files that are read, and names that are looked at to find the newest of them."""
_WEIGHTS = {"strong": 0, "medium": 2, "weak": 3, "none": 4}


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that is wrong with what is watched, by which it is recognised, and in a sentence."""

    key: str
    text: str
    severity: Severity = "warning"


def stamp_of(path: Path) -> Stamp | None:
    """By which a file that was replaced is told from the one before; None where there is none."""
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_size, seen.st_ino


def check_size(path: Path) -> None:
    """Refuse a file that is larger than any of its kind: it is read into memory, and a controller has to live on.

    Raises:
        RunFilesError: it is too large, or cannot be looked at.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFilesError(f"{path} cannot be read: {error.strerror or error}") from error
    if size > _LARGEST_FILE:
        raise RunFilesError(f"{path} has {size >> 20} MiB, more than the {_LARGEST_FILE >> 20} that one is read with")


class Runs:
    """The runs that are watched.

    Args:
        runs: their directories.
        parents: folders of such directories; new ones are picked up as they come.
        own: whether each is locked, so that nobody else watches it. Off for rehearsals, which touch nothing.
        must_own: whether one that cannot be locked is left alone, unless it is one that this user may only read; whoever only
            observes watches it in any case.
    """

    def __init__(
        self, runs: Sequence[Path], parents: Sequence[Path], *, own: bool = True, must_own: bool = True
    ) -> None:
        self._runs = tuple(dict.fromkeys(path.resolve() for path in runs))
        self._parents = tuple(dict.fromkeys(path.resolve() for path in parents))
        self._own, self._must_own = own, must_own
        self._locks: dict[Path, Lock] = {}

    def now(self) -> tuple[list[RunFiles], list[Trouble]]:
        """The runs that are there and ours, and what is wrong with others."""
        found, wrong = [], []
        paths, troubles = self._listed()
        wrong += troubles
        for path in paths:
            try:
                if not path.is_dir():
                    self._release(path)
                    wrong.append(Trouble(f"gone:{path}", f"{path} is gone: nothing of it is seen until it is back"))
                    continue
                if self._own and path not in self._locks:
                    self._lock(path)
                found.append(RunFiles(path))
            except (ConfigurationError, RunFilesError, OSError) as error:
                wrong.append(Trouble(f"run:{path}", f"{path} is not watched: {error}"))
        for path in set(self._locks) - set(paths):
            self._release(path)
        return found, wrong

    def _listed(self) -> tuple[list[Path], list[Trouble]]:
        paths, wrong = list(self._runs), []
        for parent in self._parents:
            try:
                below = sorted(path for path in parent.iterdir() if not path.name.startswith("."))
            except OSError as error:
                wrong.append(Trouble(f"gone:{parent}", f"{parent} cannot be read: {error.strerror or error}"))
                continue
            for path in below:
                try:
                    if path.is_dir() and ((path / "incidents").is_dir() or (path / "run.json").is_file()):
                        paths.append(path)
                except OSError as error:  # somebody's private folder, or a server that is away
                    wrong.append(Trouble(f"run:{path}", f"{path} is not watched: {error.strerror or error}"))
        return list(dict.fromkeys(paths)), wrong

    def _lock(self, path: Path) -> None:
        try:
            self._locks[path] = Lock(path / RUN_LOCK, f"run {path}")
        except RunFilesError as error:
            # Runs belong to the people who train, and a controller need not be able to write there. That nobody else watches it is
            # then not certain; every act looks at the node first, so two do what one does.
            foreign = getattr(error.__cause__, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS)
            if self._must_own and (not foreign or owned(path / RUN_LOCK)):
                raise

    def _release(self, path: Path) -> None:
        lock = self._locks.pop(path, None)
        if lock is not None:
            lock.release()

    def release(self) -> None:
        """Give up all runs."""
        for path in list(self._locks):
            self._release(path)


def _written(path: Path) -> int:
    stamp = stamp_of(path)
    return 0 if stamp is None else stamp[0]


def _weightiest(signals: Sequence[Signal], most: int) -> Sequence[Signal]:
    """So many of them, in their order: what weighs most and what tells a device's serial number, and of the like the newest."""
    if len(signals) <= most:
        return signals

    def rank(at: int) -> tuple[int, int]:
        one = signals[at]
        weight = 1 if one.code == IDENTITY else 5 if one.kind == "no-evidence" else _WEIGHTS[one.weight]
        return weight, -at

    kept = sorted(sorted(range(len(signals)), key=rank)[: most - 1])
    why = f"{len(signals) - len(kept)} signals that weigh less than the {len(kept)} kept are left out"
    return [*(signals[at] for at in kept), no_evidence("logs", "signals:too-many", why)]


class SignalReader:
    """Reads what the hardware said around an incident, from where the policy says and from beside the run.

    Args:
        policy: its logs, metrics and window.
        zone: of logs that do not say.
        patience: seconds that one source may take.
    """

    def __init__(
        self,
        policy: FleetPolicy,
        *,
        zone: tzinfo = UTC,
        patience: float = _PATIENCE,
    ) -> None:
        self._policy, self._zone, self._patience = policy, zone, patience
        self._metrics_at = shown_address(policy.metrics)
        self._hanging: dict[str, threading.Thread] = {}
        self._spent: deque[tuple[float, float]] = deque()

    def __call__(self, incident: Incident) -> Sequence[Signal]:
        """The signals; a source that cannot be read in time is one that says so."""
        named = namings_of(incident, "")
        found: list[Signal] = []
        for node in dict.fromkeys(one.node for one in named):
            try:
                valid_node(node)
            except ConfigurationError as error:
                found.append(no_evidence("logs", "logs:node", str(error)))
                continue
            for pattern, own in self._patterns(incident, node):
                read = partial(self._logs, pattern, node if own else "", node, named[0].moment)
                found += self._bounded("logs", node, pattern, read)
            if self._policy.metrics:
                read = partial(self._metrics, node, named[0].moment)
                found += self._bounded("metrics", node, self._metrics_at, read)
        return _weightiest(gather(found, identities=True), _MOST_SIGNALS)

    def _patterns(self, incident: Incident, node: str) -> Iterator[tuple[str, bool]]:
        """Names of logs, and whether they are the node's own: in one of the whole cluster a line that names nobody is nobody's."""
        for pattern in self._policy.logs:
            yield pattern.replace("{node}", node), "{node}" in pattern
        beside = incident.path.parent.parent / "signals" / node
        if beside.is_dir():
            yield f"{glob.escape(str(beside))}/*", True

    def _logs(self, pattern: str, host: str, node: str, at: datetime) -> Iterable[Signal]:
        from bitwitness.fleet.signals.detect import read_all  # noqa: PLC0415 - readers are many, and most runs have no logs

        paths = [Path(name) for name in islice(glob.iglob(pattern), _MOST_NAMES)]  # noqa: PTH207 - the pattern is absolute
        if not paths:
            why = f"no file is called {pattern}"
            return [no_evidence("logs", "logs:absent", why, origin=pattern, host=node)]
        extra: list[Signal] = []
        if len(paths) > _MOST_FILES:
            many = f"more than {len(paths):,}" if len(paths) == _MOST_NAMES else f"{len(paths):,}"
            why = f"{many} files are called {pattern}; only the {_MOST_FILES} that were written last were read"
            extra.append(no_evidence("logs", "logs:too-many", why, origin=pattern, host=node))
            paths = heapq.nlargest(_MOST_FILES, paths, key=_written)
        # Before anything is gathered: of a log of the whole cluster the newest of each kind may all be of other nodes and days.
        first, last = at - self._policy.signals_before, at + self._policy.signals_after
        read = read_all(paths, zone=self._zone, host=host, window=(first, last))
        mine = of_node((one for one in read if one.host or host or one.kind == "no-evidence"), node)
        return chain(extra, (one for one in mine if one.moment is None or first <= one.moment <= last))

    def _metrics(self, node: str, at: datetime) -> Iterable[Signal]:
        from bitwitness.fleet.signals.metrics import query  # noqa: PLC0415 - needs an extra

        policy = self._policy
        before, after = policy.signals_before, policy.signals_after
        return query(policy.metrics, host=node, at=at, before=before, after=after, timeout=self._patience)

    def _is_busy(self) -> bool:
        """Whether reading has taken so long of late that acts would wait for it: in a storm each incident wants its logs."""
        while self._spent and self._spent[0][0] < time.monotonic() - _MINUTE:
            self._spent.popleft()
        return sum(took for _, took in self._spent) > 2 * self._patience

    def _bounded(self, source: str, node: str, origin: str, read: Callable[[], Iterable[Signal]]) -> Sequence[Signal]:
        """What a source says within the time that it has. One that hangs is not asked again while it does."""
        if self._is_busy():
            why = f"{origin} is read later: reading signals has taken {self._patience * 2:g} s of the last minute"
            return [no_evidence(source, f"{source}:later", why, origin=origin, host=node)]
        old = self._hanging.get(origin)
        if old is not None and old.is_alive():
            return [no_evidence(source, f"{source}:hangs", f"{origin} has not answered yet", origin=origin, host=node)]
        said: list[Sequence[Signal]] = []

        def ask() -> None:
            try:
                said.append(gather(read(), identities=True))
            except (
                BitwitnessError,
                OSError,
                ValueError,
                LookupError,
                TypeError,
                ArithmeticError,
                ImportError,
            ) as error:
                text = f"{origin} could not be read: {masked(str(error))}"
                said.append([no_evidence(source, f"{source}:unreadable", text, origin=origin, host=node)])

        thread = threading.Thread(target=ask, daemon=True, name="bitwitness-fleet-signals")
        began = time.monotonic()
        thread.start()
        thread.join(self._patience)
        self._spent.append((time.monotonic(), time.monotonic() - began))
        if said:
            return said[0]
        self._hanging[origin] = thread
        text = f"{origin} did not answer within {self._patience:g} s"
        return [no_evidence(source, f"{source}:hangs", text, origin=origin, host=node)]
