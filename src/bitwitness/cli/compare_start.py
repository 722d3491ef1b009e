"""Starting a comparison and bringing it to its end: checks before anything is written, all modes, the report, and what follows.

Under torchrun all processes go through the same code at the same time. Whatever one of them refuses, all refuse, and whoever must go
says so to the others, so that none waits for nobody. The process with the leader writes the report and shows it.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click
from rich.console import Console

from bitwitness.cli import compare_seats
from bitwitness.cli.compare_progress import Progress
from bitwitness.cli.compare_seats import Assembly
from bitwitness.cli.compare_view import show
from bitwitness.cli.output import console, plain, print_json, styled
from bitwitness.compare import judging, report
from bitwitness.compare.checking import check_participants, check_work
from bitwitness.compare.exchange import Alone, Exchange, Ranks
from bitwitness.compare.lineup import Lineup, one_thread
from bitwitness.compare.records import CompareFiles, Mode
from bitwitness.compare.report_words import NOT_TO_ITS_END
from bitwitness.compare.results import Result
from bitwitness.compare.settings import Settings
from bitwitness.compare.users_code import Interrupted, place_of, said, typed_apart
from bitwitness.compare.workload import load
from bitwitness.errors import BitwitnessError, ConfigurationError, MissingExtra, RunFilesError
from bitwitness.runfiles.files import exists, refresh_folder, utc_now, write_json
from bitwitness.scan.launching import Torchrun, torchrun
from bitwitness.scan.work import CUBLAS

logger = logging.getLogger(__name__)

CODES = {"nothing seen": 0, "differs": 1, "not characterised": 3}
STEPS = 200
_INTERRUPTED = "it was interrupted"
_RANK = re.compile(r"\brank (\d{1,6})\b")
_SHARED = 60.0
"""Seconds within which what one node has written must be seen on another."""

Options = Mapping[str, Any]
T = TypeVar("T")


@dataclass(slots=True)
class Asked:
    """A handler of signals: while steps run, the first one ends a comparison after the step that is under way, the second one at once.

    Attributes:
        number: of the signal, 0 where there was none.
        screen: where people are told.
        at_once: there are no more steps after which it could end.
    """

    screen: Console
    number: int = 0
    at_once: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take note, or end."""
        again, self.number = bool(self.number), number
        if again or self.at_once:
            raise Interrupted
        self.screen.print(styled("ending after this step; once more: at once", "yellow"), soft_wrap=True)

    def look(self) -> None:
        """End if that was asked for.

        Raises:
            Interrupted: it was.
        """
        if self.number:
            raise Interrupted


@contextmanager
def handled(asked: Asked) -> Iterator[None]:
    """Have Ctrl-C and SIGTERM handled so for a while."""
    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(options: Options, environment: Mapping[str, str]) -> int:
    """Do what was asked; the exit code.

    Raises:
        BitwitnessError: nothing was started, or files cannot be written.
    """
    among = torchrun(environment)
    among = among if among is not None and among.world > 1 else None
    with typed_apart():
        return _start(options, among)


def _start(options: Options, among: Torchrun | None) -> int:
    os.environ.setdefault(*CUBLAS)  # before the first kernel
    _check_options(options, among)
    faults = compare_seats.faults_of(options["faults"])
    make = load(options["workload"], options["pairs"])
    out = check_out(options["out"], "comparisons") if among is None or among.rank == 0 else options["out"]
    settings = _settings(options, out)
    with one_thread(), _exchange(among, settings.timeout) as exchange:
        settings = _agree(settings, options, exchange)
        if isinstance(exchange, Ranks):
            assert among is not None
            assembly = compare_seats.of_ranks(
                options, make, faults, among, exchange, control=settings.control, seed=settings.seed
            )
        else:
            assembly = compare_seats.of_this_machine(
                options, make, faults, control=settings.control, seed=settings.seed
            )
        check_participants(assembly.everybody)
        screen = console(stderr=True)
        leads = exchange.rank == exchange.leader
        if leads:
            screen.print(styled("trying the work: two steps, twice on each reference"), soft_wrap=True)
        warnings = check_work(assembly.seats, settings, exchange)
        files = CompareFiles(out)
        _together(exchange, lambda: _create(files, settings, assembly, options) if leads else None)
        _together(exchange, lambda: _see(files, settings))
        if leads:
            screen.print(styled(_introduction(settings, assembly, out)), soft_wrap=True)
        for text in warnings if leads else ():
            screen.print(styled(text, "yellow"), soft_wrap=True)
        return _Comparison(files, settings, assembly, exchange, options, screen).run()


# Before -----------------------------------------------------------------------------------------------------------


def _check_options(options: Options, among: Torchrun | None) -> None:
    """Refuse what cannot be together.

    Raises:
        ConfigurationError: it cannot.
    """
    if among is None:
        for name in ("suspect_rank", "cpu"):
            if options[name]:
                raise ConfigurationError(f"--{name.replace('_', '-')} is for several processes, started by torchrun")
        if options["suspect_rank"] == 0:
            raise ConfigurationError("--suspect-rank is for several processes, started by torchrun")
        if options["devices"] is not None and (options["suspect"] or options["references"]):
            raise ConfigurationError(
                "--devices N plays all participants: leave out --suspect and --reference, or leave out --devices"
            )
    else:
        if options["devices"] is not None or options["references"]:
            raise ConfigurationError(
                "under torchrun each rank is a participant: leave out --devices and --reference; --suspect NODE or --suspect-rank R says "
                "who is under suspicion"
            )
        if options["out"] is None:
            raise ConfigurationError("under torchrun give --out DIR, on storage that all nodes share")
        if options["suspect"] is not None and options["suspect_rank"] is not None:
            raise ConfigurationError("--suspect and --suspect-rank both say who is under suspicion: give one")
    if options["bundle"] is not None:
        if os.path.lexists(options["bundle"]):
            raise ConfigurationError(f"--bundle {options['bundle']}: there is something of this name: give a new one")
        if "lock-step" not in options["modes"]:
            raise ConfigurationError(
                "--bundle needs --mode lock-step: where errors spread nobody knows which operation was wrong"
            )


def check_out(out: Path | None, folder: str) -> Path:
    """A directory that is new or empty. It is not made yet.

    Raises:
        ConfigurationError: there is something in it, or its name cannot be shown.
    """
    if out is None:
        out = Path(folder) / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
    if not str(out.resolve()).isprintable():
        raise ConfigurationError(
            f"{plain(out.resolve())} has characters in it that do not print: choose another directory"
        )
    refuse_used(out, "--out")
    return out


def refuse_used(path: Path, option: str) -> None:
    """Refuse a directory that has something in it, which would be mixed with what is written.

    Raises:
        ConfigurationError: it has, or it is none.
    """
    if path.is_dir():
        first = next(iter(sorted(one.name for one in path.iterdir())), None)
        if first is not None:
            raise ConfigurationError(
                f"{option} {path} is not empty (it has {plain(first)}): give a new directory; nothing is written over"
            )
    elif path.exists() or path.is_symlink():
        raise ConfigurationError(f"{option} {path} is not a directory: give a new one")


def _settings(options: Options, out: Path) -> Settings:
    return Settings(
        id=out.resolve().name,
        workload=options["workload"],
        options=options["pairs"],
        modes=options["modes"],
        globs=options["globs"],
        steps=options["steps"] or STEPS,
        seed=options["seed"],
        every=options["every"],
        control=options["control"] and "free" in options["modes"],
        confidence=options["confidence"],
        timeout=options["timeout"],
        time=utc_now(),
    )


@contextmanager
def _exchange(among: Torchrun | None, timeout: float) -> Iterator[Exchange]:
    """With the other processes, if there are any. Who leaves in an error says so to them."""
    if among is None:
        yield Alone()
        return
    ranks = Ranks.join(0, timeout)
    try:
        yield ranks
    except BaseException as error:
        ranks.leave(f"{type(error).__name__} {error}".strip())
        raise
    finally:
        ranks.close()


def _together(exchange: Exchange, do: Callable[[], T]) -> T:
    """Do something on each rank; where one of them refuses, all do.

    Raises:
        ConfigurationError, RunFilesError: one did.
    """
    value, problem = None, None
    try:
        value = do()
    except BitwitnessError as error:
        problem = error
    told = exchange.gather(str(problem) if problem else "")
    if problem is not None:
        raise problem
    for rank, text in enumerate(told):
        if text:
            raise ConfigurationError(f"rank {rank}: {text}")
    return value  # type: ignore[return-value]  # None only where `do` gives that


def _agree(settings: Settings, options: Options, exchange: Exchange) -> Settings:
    """The settings of rank 0, which all ranks must have been given.

    Raises:
        ConfigurationError: another rank was started with others.
    """
    more = {name: str(options[name]) for name in ("suspect", "suspect_rank", "faults", "bundle", "out", "cpu")}
    gathered = exchange.gather((settings, more))
    asked = [one for one, _ in gathered]
    for rank, (other, also) in enumerate(gathered):
        mine = asked[0].to_json() | gathered[0][1]
        theirs = replace(other, id=asked[0].id, time=asked[0].time).to_json() | also
        differing = [name for name, value in mine.items() if theirs[name] != value]
        if differing:
            name = differing[0]
            raise ConfigurationError(
                f"rank {rank} was started with other options than rank 0 ({name}: {theirs[name]!r:.60}, not {mine[name]!r:.60}): give all "
                "ranks the same command"
            )
    return asked[0]


def _create(files: CompareFiles, settings: Settings, assembly: Assembly, options: Options) -> None:
    """The directory, with what was asked. What cannot be made whole is taken back."""
    there = files.path.exists()
    try:
        files.create()
        for who in assembly.everybody:
            files.introduce(who)
        write_json(files.asked, {**settings.to_json(), "suspect": assembly.suspect})
    except RunFilesError:
        for folder in (files.participants, files.journals):
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            files.asked.unlink(missing_ok=True)
        if not there:
            with suppress(OSError):
                files.path.rmdir()
        raise


def _see(files: CompareFiles, settings: Settings) -> None:
    """Wait until this node sees what the leader has written.

    Raises:
        ConfigurationError: it does not.
    """
    until = time.monotonic() + _SHARED
    while not files.asked.is_file():
        if time.monotonic() > until:
            raise ConfigurationError(
                f"{files.asked}, which the leader has written, is not there on this node: give --out on storage that all nodes share"
            )
        time.sleep(0.2)
        refresh_folder(files.path.parent)


def _introduction(settings: Settings, assembly: Assembly, out: Path) -> str:
    suspect = next(one for one in assembly.everybody if one.role == "suspect")
    healthy = sum(one.role in ("leader", "reference") for one in assembly.everybody)
    drills = [f"{one.name}: {one.simulated}" for one in assembly.everybody if one.simulated]
    played = f"; a drill, played on {'; '.join(drills)}" if drills else ""
    return (
        f"comparison {settings.id}: {suspect.device.device} on {suspect.device.node} beside {healthy} references and "
        f"{'a' if settings.control else 'no'} control; {settings.workload}, {', '.join(settings.modes)}, {settings.steps} steps each, seed "
        f"{settings.seed}{played}; in {out}"
    )


@contextmanager
def _told_once() -> Iterator[None]:
    """What fails in one mode fails in all; it is said in the first."""
    told: set[str] = set()

    def fresh(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        known = text in told and record.levelno >= logging.WARNING
        told.add(text)
        return not known

    source = logging.getLogger("bitwitness.compare.participant")
    source.addFilter(fresh)
    try:
        yield
    finally:
        source.removeFilter(fresh)


# While it runs, and after -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Comparison:
    """One comparison whose directory is made, from the first step to the last word."""

    files: CompareFiles
    settings: Settings
    assembly: Assembly
    exchange: Exchange
    options: Options
    screen: Console
    result: Result | None = None

    def run(self) -> int:
        """Run, judge, write and show; the exit code."""
        asked = Asked(self.screen)
        with handled(asked):
            try:
                why = self._compute(asked)
                code = self._conclude(why, asked) if self.leads else CODES["not characterised"]
                if (
                    not why
                ):  # torchrun ends all ranks once one ends otherwise than with 0: not before the report is there
                    code = self.exchange.gather(code)[self.exchange.leader]
                    self._bundle(code, asked)
                elif not self.leads:
                    self._wait_for_report()
            except Interrupted:
                return 128 + asked.number
        return 128 + asked.number if asked.number else code

    @property
    def leads(self) -> bool:
        """Whether the leader is in this process."""
        return self.exchange.rank == self.exchange.leader

    def _compute(self, asked: Asked) -> str:
        """All modes; why they were not brought to their end, "" where they were."""
        lineup = Lineup(self.assembly.seats, self.settings, self.files, self.exchange)
        try:
            with (
                _told_once(),
                Progress(self.screen, self.settings, quiet=not self.leads) as progress,
            ):

                def told(mode: Mode, done: int) -> None:
                    progress.tell(mode, done)
                    asked.look()

                lineup.run(told)
            self.exchange.barrier()  # all journals are whole
            return ""
        except (Interrupted, KeyboardInterrupt):
            why = _INTERRUPTED
        except Exception as error:
            known = isinstance(error, BitwitnessError | OSError)
            why = plain(error) if known else plain(said(error))
            quiet = known or bool(place_of(error))  # a user's error has its line in it, one of ours needs the whole way
            logger.log(logging.DEBUG if quiet else logging.ERROR, "the comparison was broken off", exc_info=True)
            self.screen.print(styled(f"broken off: {why}", "yellow"), soft_wrap=True)
        if isinstance(self.exchange, Ranks):
            self.exchange.leave(why)
        return why

    def _conclude(self, why: str, asked: Asked) -> int:
        """The report of what was seen; the exit code."""
        refresh_folder(self.files.journals)
        result = judging.judge(self.files, self.assembly.suspect, self.settings.confidence)
        if why not in ("", _INTERRUPTED):
            result = replace(result, notes=(*result.notes, f"{NOT_TO_ITS_END}{why}{self._who_are(why)}"))
        result = replace(result, notes=(*result.notes, *self._not_struck()))
        self.result = result
        finished = not why
        try:
            record = report.write(self.files, result, finished)
        except (MissingExtra, RunFilesError) as error:  # a full disk takes the file, and not the answer
            self.screen.print(styled(error, "yellow"), soft_wrap=True)
            record = report.record(result, finished)
        code = 128 + asked.number if asked.number else CODES[record["outcome"]]
        self._show({**record, "exit_code": code})
        return code

    def _who_are(self, why: str) -> str:
        """The participants behind the ranks that a message names."""
        named = {int(number) for number in _RANK.findall(why.partition("; not there: ")[2] or why)}
        of = [
            f"rank {one.device.rank} is {one.name}, {one.device.device} on {one.device.node}"
            for one in self.assembly.everybody
            if one.device.rank in named and one.role != "control"
        ]
        return f". Who that is: {'; '.join(of)}" if of and isinstance(self.exchange, Ranks) else ""

    def _not_struck(self) -> list[str]:
        """Of faults that are played here: that one has changed nothing, which is no drill."""
        said = []
        for seat in self.assembly.seats:
            landed, why = getattr(seat.fault, "landed", 1), getattr(seat.fault, "why_not", "")
            if seat.fault is not None and not landed:
                because = f": {why}" if why else ""
                said.append(
                    f"the fault that is played on {seat.participant.name} changed no bit in the last mode{because}"
                )
        return said

    def _show(self, record: Mapping[str, Any]) -> None:
        try:
            if self.options["as_json"]:
                print_json(record)
            else:
                show(record, console())
                if self.files.page.is_file():
                    click.echo(f"report: {self.files.page}")
        except BrokenPipeError:  # a reader such as `head` has had enough, which changes nothing
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def _bundle(self, code: int, asked: Asked) -> None:
        """Evidence for the vendor, made by all ranks together."""
        folder = self.options["bundle"]
        if folder is None:
            return
        if code != CODES["differs"]:
            why = (
                "it is not characterised"
                if code == CODES["not characterised"]
                else "there is no difference to show in it"
            )
            if self.leads:
                self.screen.print(styled(f"no bundle was made: {why}", "yellow"), soft_wrap=True)
            return
        from bitwitness.compare import bundling

        if self.leads:
            self.screen.print(styled("looking for the operation that is wrong, and its smallest operands"))
        asked.at_once = True
        try:
            refresh_folder(self.files.journals)
            seen = bundling.seen_in(self.files, self.assembly.suspect)
            bundling.bundle(
                self.assembly.seats, self.settings, folder, self.assembly.suspect, seen, exchange=self.exchange
            )
        except BitwitnessError as error:
            self.screen.print(styled(f"no bundle was made: {error}", "yellow"), soft_wrap=True)
            return
        if self.leads:
            self.screen.print(styled(f"bundle: {folder} (README.txt there is for the vendor)"), soft_wrap=True)

    def _wait_for_report(self) -> None:
        """Until the leader has written it, if it still can: torchrun ends it as soon as this process has ended badly."""
        until = time.monotonic() + _SHARED
        while not exists(self.files.report) and time.monotonic() < until:
            time.sleep(0.2)
