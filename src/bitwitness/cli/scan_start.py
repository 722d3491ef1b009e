"""Starting a scan and bringing it to its end: checks before anything starts, ranks, the result, and what follows from it.

Everything that may be wrong in what was asked is found before the first rank works: a key that is no key must not cost an hour.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.console import Console

from bitwitness.cli.output import console, plain, print_json, styled
from bitwitness.cli.scan_progress import Progress
from bitwitness.cli.scan_view import show
from bitwitness.errors import BitwitnessError, ConfigurationError, RunFilesError
from bitwitness.runfiles.answers import AnswerFiles
from bitwitness.runfiles.files import read_json, refresh_folder, utc_now, write_json
from bitwitness.scan import drill, exiting, golden, living, vendors
from bitwitness.scan.concluding import Conclusion, refuse_used
from bitwitness.scan.coordinating import Coordinator, Patience
from bitwitness.scan.launching import Launched, Share, Torchrun, count_devices, report_loss, torchrun
from bitwitness.scan.results import Judgement
from bitwitness.scan.settings import Settings
from bitwitness.topology import node_name

logger = logging.getLogger(__name__)

_WAIT_FOR_START = 300.0
"""Seconds that other ranks of torchrun wait for scan.json of rank 0."""
_WAIT_FOR_RESULT = 120.0
_POLL = 0.5

Options = Mapping[str, Any]


def start(options: Options, environment: Mapping[str, str]) -> int:
    """Do what was asked; the exit code.

    Raises:
        BitwitnessError: nothing was started, or files cannot be written.
    """
    among = torchrun(environment)
    known = _check(options, among)
    if among is not None and among.rank > 0:
        return _take_part(options["out"], among)
    played = options["devices"] is not None
    world = among.world if among is not None else options["devices"] or _count()
    drills = tuple(drill.parse(text) for text in options["drills"])
    drill.check(drills, world)
    if options["learn"] is not None:
        golden.check(options["learn"], options["sign_key"], world)
    path = _directory(options["out"])
    seed = secrets.randbelow(2**31) if options["seed"] is None else options["seed"]
    settings = Settings(
        id=path.resolve().name,
        world=world,
        seconds=options["minutes"] * 60,
        suites=options["suites"],
        seed=seed,
        drills=drills,
        played=played,
        processors=options["cpu"],
        ranks_per_node=options["ranks_per_node"],
        confidence=options["confidence"],
        job=among.job if among is not None else "",
        time=utc_now(),
    )
    files = AnswerFiles(path)
    files.create()
    write_json(files.scan, {**settings.to_json(), "coordinator": living.this_process()})
    share = Share(0, world) if among is None else Share(0, 1, among.slot)
    screen = console(stderr=True)
    screen.print(styled(_introduction(settings, path)), soft_wrap=True)
    asked = _Asked()
    with _handled(
        asked
    ):  # to the last word: a scan that is ended while a vendor's diagnostic runs has a result all the same
        try:
            conclusion = _watch(files, settings, share, known, screen, asked)
            return _finish(files, settings, conclusion, asked, options, screen)
        except Exception as error:  # noqa: BLE001 - whatever it was: Python would end with 1, which says that somebody failed
            return _broken_off(error, options["exit_codes"], asked)


# Before ---------------------------------------------------------------------------------------------------------------


def _check(options: Options, among: Torchrun | None) -> golden.GoldenFile | None:
    """Refuse what cannot be done, and read the golden answers.

    Raises:
        BitwitnessError: it cannot.
    """
    if options["verify_key"] is not None and options["golden"] is None:
        raise ConfigurationError("--verify-key is for --golden FILE: give both")
    if (options["learn"] is None) != (options["sign_key"] is None):
        raise ConfigurationError(
            "--learn FILE and --sign-key FILE belong together (bitwitness scan key FILE makes a key)"
        )
    if options["learn"] is not None and options["suites"] == ("comm",):
        raise ConfigurationError("--learn: what is communicated has no answer that could be learned; give other suites")
    if options["learn"] is not None and options["drills"]:
        raise ConfigurationError("--learn and --drill: nothing is learned from faults on purpose")
    if among is not None and options["devices"] is not None:
        raise ConfigurationError(
            "--devices is for one machine without torchrun: torchrun says how many ranks there are"
        )
    if among is None and options["cpu"]:
        raise ConfigurationError(
            "--cpu is for torchrun; without it give --devices N: so many processes stand for devices"
        )
    if among is not None and options["out"] is None:
        raise ConfigurationError(
            "under torchrun give --out DIR, the same new directory on all nodes, on storage that they share"
        )
    if options["vendor"]:
        unknown = [name for name in options["vendor"] if name not in (*vendors.VENDORS, "auto")]
        if unknown:
            raise ConfigurationError(f"--vendor {unknown[0]!r:.40}: choose auto, {', '.join(vendors.VENDORS)}")
    if options["sign_key"] is not None:
        from bitwitness.scan import signing

        signing.private_key(options["sign_key"])
    return None if options["golden"] is None else golden.load(options["golden"], options["verify_key"])


def _count() -> int:
    """How many GPUs this machine has.

    Raises:
        ConfigurationError: none. A node whose driver has lost its devices must not pass by its processor.
    """
    found = count_devices()
    if not found:
        raise ConfigurationError(
            "torch sees no GPU on this machine. If it has some: look at its driver, for it cannot be judged so. To see how a scan "
            "works, or to judge processors, give --devices N: so many processes of this machine then stand for devices"
        )
    return found


def _directory(out: Path | None) -> Path:
    """A directory with nothing in it.

    Raises:
        ConfigurationError, RunFilesError: there is something in it, or it cannot be made.
    """
    if out is None:
        out = Path("scans") / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
    if not str(out.resolve()).isprintable():
        raise ConfigurationError(
            f"{plain(out.resolve())} has characters in it that do not print: choose another directory"
        )
    refuse_used(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFilesError(f"{out} cannot be made: {error.strerror or error}") from error
    return out


def _introduction(settings: Settings, path: Path) -> str:
    who = (
        f"{settings.world} processes of this machine stand for devices"
        if settings.played
        else f"{settings.world} device(s)"
    )
    faults = f"; a drill: {'; '.join(map(str, settings.drills))}" if settings.drills else ""
    return f"scan {settings.id}: {who}, {settings.seconds / 60:g} minutes, {', '.join(settings.suites)}, seed {settings.seed}{faults}; in {path}"


# While it works -------------------------------------------------------------------------------------------------------


def _nothing(number: int) -> None:
    """The number is enough."""


@dataclass(slots=True)
class _Asked:
    """A handler of signals, for all of a scan.

    Attributes:
        number: of the signal by which it was asked to end, 0 where it was not.
        act: what is done then; afterwards it is enough that the number is there.
    """

    number: int = 0
    act: Callable[[int], None] = _nothing

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take note."""
        self.act(number)
        self.number = number


def _watch(
    files: AnswerFiles,
    settings: Settings,
    share: Share,
    known: golden.GoldenFile | None,
    screen: Console,
    asked: _Asked,
) -> Conclusion:
    """Start the ranks of this machine and watch all; what is concluded."""
    with Progress(screen) as progress, Launched(files, share, played=settings.played) as launched:
        coordinator = Coordinator(files, settings, launched, known, progress.tell, asked=asked.number)

        def act(number: int) -> None:
            if coordinator.asked:  # a second time: now
                launched.kill()
            coordinator.asked = number

        asked.act = act
        try:
            return coordinator.watch()
        finally:
            asked.act = _nothing


@contextmanager
def _handled(act: Any) -> Iterator[None]:
    """Have Ctrl-C and SIGTERM handled so for a while."""
    before = {number: signal.signal(number, act) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _take_part(path: Path, among: Torchrun) -> int:
    """Be one rank of several that torchrun has started, which rank 0 watches; its exit code.

    Raises:
        RunFilesError: rank 0 has not begun in time, or the files cannot be used.
    """
    files = AnswerFiles(path)
    settings = _wait_for_start(files, among)
    asked = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = number

    with Launched(files, Share(among.rank, 1, among.slot), played=False) as launched, _handled(stop):
        while launched.look() and not asked:
            time.sleep(_POLL)
        if asked:
            launched.terminate()
            _wait(lambda: not launched.look(), Patience().stop)
            return 128 + asked
        why = launched.why(among.rank)
    if why:
        click.echo(plain(f"rank {among.rank}: {why}"), err=True)
        with suppress(RunFilesError):  # who cannot be told finds out by waiting
            report_loss(files, among.rank, why)
    left = settings.seconds + Patience().appear + Patience().grace  # others may have begun later
    if not _wait(lambda: _exists(files.result), left + _WAIT_FOR_RESULT):
        raise RunFilesError(f"{files.result} has not appeared: rank 0 has ended without a result; look at its output")
    # Whoever ends with a code other than 0 has torchrun end the others: not before rank 0 is done with everything.
    more = float(read_json(files.result).get("more_within", 0.0))
    _wait(lambda: "more_within" not in read_json(files.result), more)
    return int(read_json(files.result).get("exit_code", exiting.code(Judgement(()), "plain")))


def _wait_for_start(files: AnswerFiles, among: Torchrun) -> Settings:
    """What rank 0 of this very start has written; an older scan in the directory is none of ours."""
    until = time.monotonic() + _WAIT_FOR_START
    said = False
    while time.monotonic() < until:
        if _exists(files.scan) and not _exists(files.result):
            settings = Settings.from_json(read_json(files.scan))
            if settings.job == among.job and settings.world == among.world:
                return settings
        if not said and time.monotonic() > until - _WAIT_FOR_START + 10:
            said = True
            click.echo(
                plain(
                    f"rank {among.rank} waits for rank 0 to write {files.scan}: is it on storage that all nodes share?"
                ),
                err=True,
            )
        time.sleep(_POLL)
    raise RunFilesError(
        f"rank 0 has not written {files.scan} within {_WAIT_FOR_START:.0f} s: it has not started, or the directory is not the same here "
        "and there; give --out on storage that all nodes share"
    )


def _exists(path: Path) -> bool:
    refresh_folder(path.parent)
    return path.is_file()


def _wait(done: Any, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL)
    return True


# After ----------------------------------------------------------------------------------------------------------------


def _finish(
    files: AnswerFiles, settings: Settings, conclusion: Conclusion, asked: _Asked, options: Options, screen: Console
) -> int:
    """Write the result, hear the vendors, learn, write what has changed and show it; the exit code."""
    if options["vendor"] and not asked.number:
        conclusion = _hear(files, settings, conclusion, asked, options, screen)
    conclusion = replace(conclusion, interrupted=conclusion.interrupted or bool(asked.number))
    style, outcome = options["exit_codes"], conclusion.drill_outcome(settings)
    record = _record(conclusion, settings, asked, style)
    if options["learn"] is not None and not conclusion.interrupted:
        _write(files, {**record, "more_within": _WAIT_FOR_RESULT}, screen)
        record["learned"] = _learn(settings, conclusion, options)
        if "error" in record["learned"] and not record["exit_code"]:
            record["exit_code"] = exiting.code(
                Judgement(()), style
            )  # not all of what was asked for is done; nobody failed
    written = _write(files, record, screen)
    if not written and not record["exit_code"]:
        record["exit_code"] = exiting.code(Judgement(()), style)
    try:
        if not options["as_json"] and style != "plain":
            click.echo(exiting.line(conclusion.judgement, style, drill=outcome))
        if options["as_json"]:
            print_json(record)
        else:
            show(record, files.path, console())
    except BrokenPipeError:  # a reader such as `head` has had enough, which changes nothing
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if learned := record.get("learned"):
        said, color = (
            (f"nothing was learned: {learned['error']}", "yellow")
            if "error" in learned
            else (f"learned {learned['items']} golden answers: {options['learn']}", "green")
        )
        screen.print(styled(said, color), soft_wrap=True)
    return int(record["exit_code"])


def _record(conclusion: Conclusion, settings: Settings, asked: _Asked, style: str) -> dict[str, Any]:
    """What result.json holds, with the code that this process ends with."""
    code = exiting.code(conclusion.judgement, style, drill=conclusion.drill_outcome(settings))
    if asked.number and (style == "plain" or code == 0):
        code = 128 + asked.number
    return {**conclusion.to_json(settings), "exit_code": code}


def _write(files: AnswerFiles, record: Mapping[str, Any], screen: Console) -> bool:
    """Write the result, as far as that can be; whether it could."""
    try:
        write_json(files.result, record)
    except RunFilesError as error:
        screen.print(styled(f"the result is shown here and nowhere else: {error}", "yellow"), soft_wrap=True)
        return False
    return True


def _hear(
    files: AnswerFiles, settings: Settings, conclusion: Conclusion, asked: _Asked, options: Options, screen: Console
) -> Conclusion:
    """What the diagnostics of vendors say besides. They take long and may end a machine, so there is a result before."""
    which, level, timeout = options["vendor"], options["vendor_level"], options["vendor_timeout"]
    node = node_name(os.environ)
    before = replace(conclusion.judgement, voices=tuple(vendors.asked_for(which, node)))
    record = _record(replace(conclusion, judgement=before), settings, asked, options["exit_codes"])
    _write(files, {**record, "more_within": vendors.longest(which, level, timeout) + _WAIT_FOR_RESULT}, screen)
    screen.print(styled("the vendors' diagnostics run now, on this node"))
    voices = vendors.run(which, level, timeout, node, lambda: bool(asked.number))
    return replace(conclusion, judgement=replace(conclusion.judgement, voices=tuple(voices)))


def _learn(settings: Settings, conclusion: Conclusion, options: Options) -> dict[str, Any]:
    """Learn golden answers; what came of it."""
    try:
        learned = golden.learn(conclusion.sheets, conclusion.judgement, settings.id)
        golden.write(options["learn"], learned, options["sign_key"])
    except BitwitnessError as error:
        return {"error": str(error)}
    count = sum(len(kind["items"]) for kind in learned["kinds"])
    return {"path": str(options["learn"]), "items": count, "skipped": len(learned["skipped"])}


def _broken_off(error: Exception, style: str, asked: _Asked) -> int:
    """Say that a scan that had begun has ended without a result; an exit code that accuses nobody."""
    known = isinstance(error, BitwitnessError | OSError)
    why = plain(error) if known else plain(f"{type(error).__name__}: {error}")
    if not known:
        logger.error("the scan has ended in an error that nobody foresaw", exc_info=error)
    if style != "plain":
        click.echo(exiting.unusable_line(style, why))
    click.echo(f"Error: the scan has ended without a result: {why}", err=True)
    return 128 + asked.number if asked.number else exiting.code(Judgement(()), style)
