"""Asking a running job for slices of known work, and judging what its ranks answer: the command's side of `ripple`.

No torch and no part of the job: everything goes through the files of the run, so that a command that is killed leaves a job that
trains on, and slices that end when they were to end.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, cast

from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.runfiles import RunFiles, new_incident_id, utc_now
from bitwitness.runfiles.answers import AnswerFiles, Device, Sheet
from bitwitness.runfiles.files import write_json
from bitwitness.runfiles.ripple import (
    BESIDE,
    LOOK_SECONDS,
    MOST_BUDGET,
    MOST_MINUTES,
    MOST_SLICE_MS,
    Request,
    RippleFiles,
)
from bitwitness.scan import drill
from bitwitness.scan.items import SUITE_VERSION, Suite
from bitwitness.scan.judging import Golden, judge, wrong_items
from bitwitness.scan.results import Judgement

SUITES = cast("tuple[Suite, ...]", BESIDE)
"""What slices compute."""

AHEAD = 2 * LOOK_SECONDS
"""Seconds from the request to the first slice: by then every rank has looked."""

_SILENT, _SILENT_STEPS = 60.0, 10.0
"""A job of which nothing has been heard for so many seconds, and for so long as so many steps, does not run."""

_Key = TypeVar("_Key")

_RECENT = 30
_MOST_RANKS = 10**7

_MOST_QUIET = 600.0
"""Seconds: a rank that takes slices writes within a minute, or later where the budget does not have it. One that has written nothing
for so long, while others went on, has fallen silent."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How a job goes: its last step on record, seconds a step, how many ranks, and how long ago it was heard of."""

    step: int
    seconds: float
    world_size: int
    age: float

    @property
    def patience(self) -> float:
        """Seconds of silence after which it is taken to be over."""
        return max(_SILENT, _SILENT_STEPS * self.seconds)


def pace(run_dir: Path) -> Pace:
    """How the job in a run directory goes.

    Raises:
        ConfigurationError: there is no guarded job that runs; says what there is.
        RunFilesError: its files cannot be read.
    """
    files = RunFiles(run_dir)
    if not (run_dir / "run.json").is_file():
        raise ConfigurationError(
            f"{run_dir} is not the directory of a guarded job: there is no run.json. Give the run_dir of its Guard"
        )
    world = files.read_run().get("world_size")
    recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)
    step, last = -1, ""
    for record in files.read_journal(0):
        if record.get("kind") == "start":
            recent.clear()
        if record.get("kind") == "steps" and all(isinstance(record.get(one), int) for one in ("first", "last")):
            step, last = record["last"], str(record.get("time", ""))
            recent.append((record["last"] - record["first"] + 1, float(record.get("seconds") or 0.0)))
    steps, seconds = sum(one for one, _ in recent), sum(one for _, one in recent)
    if not steps or seconds <= 0 or not isinstance(world, int):
        raise ConfigurationError(
            f"{run_dir}: the job has ended no step since it started: ask again when it trains, or look whether it runs"
        )
    found = Pace(step, seconds / steps, world, _age(last))
    if found.age > found.patience:
        raise ConfigurationError(
            f"{run_dir}: nothing was heard of the job for {found.age:,.0f} s (step {step}, {found.seconds:.3g} s a step): it does not "
            "run any more, or its files are those of another node. Slices need a job that trains; without one: bitwitness scan"
        )
    return found


def _age(text: str) -> float:
    try:
        return max(0.0, time.time() - datetime.fromisoformat(text).timestamp())
    except ValueError:
        return math.inf


def ask(
    run_dir: Path,
    *,
    budget: float = 0.005,
    slice_ms: float = 3.0,
    minutes: float = 10.0,
    seed: int | None = None,
    drills: Sequence[drill.Drill] = (),
    suites: Sequence[Suite] = SUITES,
    ahead: float = AHEAD,
) -> Request:
    """Put a request in force, in the place of one that there is.

    Args:
        run_dir: of the job.
        budget: the share of its time that slices may take.
        slice_ms: of one slice.
        minutes: how long, from the first slice on.
        seed: of the order of the work; drawn if not given.
        drills: faults on purpose.
        suites: what is computed.
        ahead: seconds from now to the first slice.

    Raises:
        ConfigurationError: a number makes no sense, or no guarded job runs there.
        RunFilesError: the files of the run cannot be read or written.
    """
    limits = (
        ("--budget", budget, MOST_BUDGET),
        ("--slice-ms", slice_ms, MOST_SLICE_MS),
        ("--minutes", minutes, MOST_MINUTES),
    )
    for name, value, most in limits:
        if not 0 < value <= most:
            raise ConfigurationError(f"{name} {value:g}: give a number above 0 and at most {most:g}")
    going = pace(run_dir)
    drill.check(drills, going.world_size)
    request = Request(
        id=new_incident_id(),
        from_step=going.step + max(2, math.ceil(ahead / going.seconds)),
        every=max(1, math.ceil(slice_ms / 1000 / (budget * going.seconds))),
        until=time.time() + ahead + 60 * minutes,
        slice_ms=slice_ms,
        budget=budget,
        suites=tuple(suites),
        seed=secrets.randbits(32) if seed is None else seed,
        suite_version=SUITE_VERSION,
        drills=tuple(map(str, drills)),
    )
    if why := request.absurd():
        raise ConfigurationError(f"slices cannot be asked for with {why}")
    RippleFiles(run_dir).write(request)
    return request


def withdraw(run_dir: Path, only: str | None = None) -> Request | None:
    """End the request in force, or that one only; the one that was ended, None where none was in force.

    Raises:
        RunFilesError: it cannot be read or written.
    """
    files = RippleFiles(run_dir)
    request = files.read()
    if request is None or request.until <= time.time() or only not in (None, request.id):
        return None
    files.write(request.withdrawn())
    return request


class Following:
    """Looks at the answers to a request, until it is over.

    Args:
        run_dir: of the job.
        request: what was asked for.
        golden: answers that are known.
        confidence: of the bounds.
    """

    def __init__(self, run_dir: Path, request: Request, golden: Golden | None = None, confidence: float = 0.95) -> None:
        self.request = request
        self._run, self._files = RunFiles(run_dir), RippleFiles(run_dir)
        self._golden, self._confidence = golden, confidence
        self._focus: dict[str, dict[str, str]] = {}
        self._size, self._grown = -1, time.monotonic()
        self.sheets: list[Sheet] = []

    def look(self, repeat: bool = True, running: bool = True) -> Judgement:
        """Judge what is there now, and have ranks repeat what somebody got wrong, unless told not to.

        Args:
            repeat: have it repeated.
            running: more answers are to come; else who has not said that it ended has fallen silent, and does not pass.

        Raises:
            RunFilesError: files cannot be read or written.
        """
        starts = self._gather()
        if starts and repeat:
            self._have_repeated(starts[-1])
        sheets = _with_silence(self.sheets) if running else self.sheets
        return judge(sheets, self._golden, confidence=self._confidence, running=running)

    def _gather(self) -> list[AnswerFiles]:
        """Read what was answered; in which starts of the job."""
        starts = self._files.starts(self.request.id)
        try:
            placement = self._run.read_run().get("placement", [])
        except RunFilesError:
            placement = []  # it is being replaced, or gone: what was answered can be judged all the same
        self.sheets = together([_sheets(start) for start in starts], placement)
        return starts

    @property
    def running(self) -> bool:
        """Whether more answers are to come: the request is in force, and the job runs."""
        return self.request.until > time.time() and _runs(self._run.path)

    def settle(self, patience: float, poll: float) -> None:
        """Wait until all ranks have written how they ended, which they do after the next step that they look, or `patience` is over."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            self._gather()
            if all(sheet.ended for sheet in self.sheets):
                return
            time.sleep(poll)

    def over(self, patience: float) -> str:
        """Why no more answers are to come; "" while there are.

        Args:
            patience: seconds of silence of the job after which it is taken to be over.
        """
        size = self._run.size()
        if size != self._size:
            self._size, self._grown = size, time.monotonic()
        current = self._files.read()
        if current is None or current.id != self.request.id:
            return "another request has taken its place"
        if current.until <= 0:
            return "it was withdrawn"
        late = time.time() - self.request.until
        if late > 0 and (late > patience or all(sheet.ended for sheet in self.sheets)):
            return "its time is over"
        if time.monotonic() - self._grown > patience:
            return "nothing is heard of the job any more"
        return ""

    def conclude(self, why: str) -> Judgement:
        """Judge for the last time, and write result.json.

        Raises:
            RunFilesError: files cannot be read or written.
        """
        judgement = self.look(repeat=False, running=False)
        path = self._files.result(self.request.id)
        if path.parent.is_dir():
            write_json(path, self.record(judgement, why))
        return judgement

    def record(self, judgement: Judgement, why: str) -> dict[str, Any]:
        """A judgement, with what it is about, as JSON values.

        Args:
            judgement: of the answers to this request.
            why: no more of them are to come; "" while there are.
        """
        about = {"ripple": True, "request": self.request.to_json(), "drill": bool(self.request.drills)}
        return judgement.to_json() | about | {"ended": why, "time": utc_now()}

    def _have_repeated(self, start: AnswerFiles) -> None:
        kinds: dict[str, list[Sheet]] = defaultdict(list)
        for sheet in self.sheets:
            kinds[sheet.device.kind_name].append(sheet)
        wrong = {name: wrong_items(group, self._golden) for name, group in kinds.items()}
        focus = {name: items for name, items in wrong.items() if items}
        if focus != self._focus:
            write_json(start.focus, {"kinds": focus})
            self._focus = focus


def patience_to_end(run_dir: Path) -> float:
    """Seconds within which the ranks of a job write that a request has ended; 0.0 where no job runs."""
    try:
        return LOOK_SECONDS + pace(run_dir).patience
    except (ConfigurationError, RunFilesError):
        return 0.0


def _runs(run_dir: Path) -> bool:
    return patience_to_end(run_dir) > 0


def _with_silence(sheets: Sequence[Sheet]) -> list[Sheet]:
    """The same; of who has written nothing for long, while others have, that is how it ended."""
    last = {sheet.device.rank: _seconds(sheet.last) for sheet in sheets if sheet.last}
    newest = max(last.values(), default=0.0)
    quiet = {rank: newest - seen for rank, seen in last.items() if newest - seen > _MOST_QUIET}
    return [
        replace(sheet, ended=f"it has written nothing for {quiet[rank] / 60:,.0f} min, while others have")
        if not sheet.ended and (rank := sheet.device.rank) in quiet
        else sheet
        for sheet in sheets
    ]


def _seconds(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def _sheets(start: AnswerFiles) -> list[Sheet]:
    found = []
    for rank in start.ranks():
        try:
            found.append(start.sheet(rank))
        except RunFilesError:
            continue  # it shows as one that has answered nothing
    return found


def _placed(placement: object) -> dict[tuple[str, str], int]:
    """Node and device -> rank."""
    if not isinstance(placement, list | tuple):
        raise RunFilesError(f"run.json: the placement is no list: {placement!r:.100}")
    now: dict[tuple[str, str], int] = {}
    for one in placement:
        rank = one.get("rank") if isinstance(one, Mapping) else None
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < _MOST_RANKS:
            raise RunFilesError(
                f"run.json: in the placement there is an entry without a rank that can be one: {one!r:.100}"
            )
        now[str(one.get("node")), str(one.get("device"))] = rank
    return now


def together(starts: Sequence[Sequence[Sheet]], placement: Sequence[Mapping[str, Any]]) -> list[Sheet]:
    """One sheet a device, over all starts of the job; oldest start first.

    A device keeps its answers when its rank changes, and a rank on another device does not inherit them. Devices that are no
    longer in the job are numbered behind the others; those that have answered nothing are there and say so.

    Args:
        starts: the sheets of each start.
        placement: where each rank is now, as run.json has it.

    Raises:
        RunFilesError: it is no placement.
    """
    known: dict[tuple[str, str, str], Sheet] = {}
    for sheets in starts:
        for sheet in sheets:
            who = sheet.device
            key = (who.node, who.device, who.kind_name)
            known[key] = _added(known[key], sheet) if key in known else sheet
    now = _placed(placement)
    free = max([len(placement), *(1 + rank for rank in now.values())])
    found, taken = [], set()
    for sheet in reversed(known.values()):
        who = sheet.device
        rank = now.get((who.node, who.device))
        if rank is None or rank in taken:
            rank, free = free, free + 1
        taken.add(rank)
        found.append(replace(sheet, device=replace(who, rank=rank)))
    for (node, device), rank in now.items():
        if rank not in taken:
            found.append(Sheet(Device(rank, node, device, {}), ended="it has taken no slice"))
    return sorted(found, key=lambda sheet: sheet.device.rank)


def _added(before: Sheet, sheet: Sheet) -> Sheet:
    answers, operands = {}, {}
    for item in {**before.answers, **sheet.answers}:
        answers[item] = _summed(before.answers.get(item, {}), sheet.answers.get(item, {}))
        operands[item] = _summed(_operands(before, item), _operands(sheet, item))
    # A rank whose slices failed has not come to its end because the job was started anew.
    ended = before.ended if before.ended not in ("", "done") else sheet.ended
    seconds, last = before.seconds + sheet.seconds, max(before.last, sheet.last)
    return replace(sheet, answers=answers, operands=operands, ended=ended, seconds=seconds, last=last)


def _operands(sheet: Sheet, item: str) -> Mapping[tuple[str, ...], int]:
    """How many sets of operands gave which answers; without a word about that, each answer is from one of its own."""
    found = sheet.operands.get(item)
    return {(digest,): count for digest, count in sheet.answers.get(item, {}).items()} if found is None else found


def _summed(one: Mapping[_Key, int], other: Mapping[_Key, int]) -> dict[_Key, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
