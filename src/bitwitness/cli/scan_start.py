"""Starting a scan and bringing it to its end: checks before anything starts, ranks, the result, and what follows from it.

Everything that may be wrong in what was asked is found before the first rank works: a key that is no key must not cost an hour.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
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
from bitwitness.scan import drill, exiting, golden, vendors
from bitwitness.scan.concluding import Conclusion, refuse_used
from bitwitness.scan.coordinating import Coordinator, Patience
from bitwitness.scan.launching import Launched, Share, Torchrun, count_devices, torchrun
from bitwitness.scan.settings import Settings
from bitwitness.topology import node_name

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
    write_json(files.scan, settings.to_json())
    share = Share(0, world) if among is None else Share(0, 1, among.slot)
    screen = console(stderr=True)
    screen.print(styled(_introduction(settings, path)), soft_wrap=True)
    conclusion, asked = _watch(files, settings, share, known, screen)
    return _finish(files, settings, conclusion, asked, options, screen)


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


def _watch(
    files: AnswerFiles, settings: Settings, share: Share, known: golden.GoldenFile | None, screen: Console
) -> tuple[Conclusion, int]:
    """Start the ranks of this machine and watch all; what is concluded, and the signal that ended it before its time."""
    with Progress(screen) as progress, Launched(files, share, played=settings.played) as launched:
        coordinator = Coordinator(files, settings, launched, known, progress.tell)

        def stop(number: int, frame: FrameType | None) -> None:
            if coordinator.asked:  # a second time: now
                launched.kill()
            coordinator.asked = number

        with _handled(stop):
            return coordinator.watch(), coordinator.asked


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
    left = settings.seconds + Patience().appear + Patience().grace  # others may have begun later
    if not _wait(lambda: _exists(files.result), left + _WAIT_FOR_RESULT):
        raise RunFilesError(f"{files.result} has not appeared: rank 0 has ended without a result; look at its output")
    return int(read_json(files.result).get("exit_code", 1))


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
    files: AnswerFiles, settings: Settings, conclusion: Conclusion, asked: int, options: Options, screen: Console
) -> int:
    """Hear the vendors, learn, write the result and show it; the exit code."""
    if options["vendor"] and not asked:
        screen.print(styled("the vendors' diagnostics run now, on this node"))
        voices = vendors.run(
            options["vendor"], options["vendor_level"], options["vendor_timeout"], node_name(os.environ)
        )
        conclusion = replace(conclusion, judgement=replace(conclusion.judgement, voices=tuple(voices)))
    judgement = conclusion.judgement
    style = options["exit_codes"]
    outcome = conclusion.drill_outcome(settings)
    code = exiting.code(judgement, style, drill=outcome)
    if asked and (style == "plain" or code == 0):
        code = 128 + asked
    record = {**conclusion.to_json(settings), "exit_code": code}
    trouble: BitwitnessError | None = None
    if options["learn"] is not None and not asked:
        try:
            learned = golden.learn(conclusion.sheets, judgement, settings.id)
            golden.write(options["learn"], learned, options["sign_key"])
            count = sum(len(kind["items"]) for kind in learned["kinds"])
            record["learned"] = {"path": str(options["learn"]), "items": count, "skipped": len(learned["skipped"])}
        except BitwitnessError as error:
            record["learned"] = {"error": str(error)}
            trouble = error
    write_json(files.result, record)
    if options["as_json"]:
        print_json(record)
    else:
        if style != "plain":
            click.echo(exiting.line(judgement, style, drill=outcome))
        show(record, files.path, console())
        if (learned_record := record.get("learned")) and not trouble:
            console().print(
                styled(f"learned {learned_record['items']} golden answers: {options['learn']}", "green"), soft_wrap=True
            )
    if trouble is not None:
        screen.print(styled(f"nothing was learned: {trouble}", "yellow"), soft_wrap=True)
        return code or trouble.exit_code
    return code
