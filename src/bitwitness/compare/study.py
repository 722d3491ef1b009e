"""The study of silent data corruption in LLM training, anew: fifteen invented bad nodes through all modes, and onto a task.

The study published figures and no code. This runs its method on nodes that anybody can have, because they are played, and sets what
comes out beside what was published. Four comparisons, each in a folder that `bitwitness compare show` reads: all nodes stand beside
one leader, so that it and the other reference are computed once for all of them.

Source: Ma, Pei, Lausen, Karypis, "Understanding Silent Data Corruption in LLM Training", ACL 2025 (arXiv 2502.12340).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from bitwitness.compare import workload
from bitwitness.compare.judging import judged
from bitwitness.compare.lineup import Lineup, Seat, one_thread
from bitwitness.compare.nodes import GLOBS, INVENTED, Node
from bitwitness.compare.records import Account, CompareFiles, Mode, Participant
from bitwitness.compare.results import Result
from bitwitness.compare.settings import Settings
from bitwitness.compare.simulated import Simulated
from bitwitness.compare.study_shape import Statement, shape
from bitwitness.compare.study_tables import Figures, NodeResults, figures
from bitwitness.compare.study_view import Words, render, to_json
from bitwitness.errors import BitwitnessError, ConfigurationError
from bitwitness.runfiles import utc_now
from bitwitness.runfiles.files import read_json, write_bytes, write_json
from bitwitness.scan.devices import this_device
from bitwitness.supervise.processes import die_with_parent

STEPS = 600
"""Enough for node 13, which is clean until step 450."""

TUNING_STEPS = 200
_NO_VARIABLE = "BITWITNESS_PARENT_OF_STUDY"
"""The one that is usual names the parent of this whole command, where it has one."""
_CPU = torch.device("cpu")
_RECORD, _PAGE, _TEXT = "study.json", "study.html", "study.md"

Progress = Callable[[str, int, int], None]
"""Is told after each step: the part of the study, how many steps of it are done, and of how many."""


@dataclass(frozen=True, slots=True)
class Chapter:
    """One comparison of the study; `name`: of its folder too."""

    name: str
    workload: str
    options: Mapping[str, str]
    mode: Mode
    globs: tuple[str, ...]
    steps: int
    every: int = 1


@dataclass(frozen=True, slots=True)
class Study:
    """What came out.

    Attributes:
        figures: all of them. shape: what the published tables show and whether ours do. seconds: that it took.
        steps, seed: as asked. time: when it began, UTC.
    """

    figures: Figures
    shape: tuple[Statement, ...]
    steps: int
    seed: int
    seconds: float
    time: str
    software: str


def chapters(steps: int) -> tuple[Chapter, ...]:
    """The comparisons, the longest first.

    One block, so that each cell of the tables is one tensor of 8192 elements. The noise of the gradient is measured in a quarter of
    the steps: with parameters made equal no step knows of the one before. Where errors spread, one module is watched and not each.
    The learning rate of the fine-tuning is as high as still trains: at a twentieth of it so short a training forgives nearly all.
    """
    small, submodules = {"blocks": "1", "batch": "8"}, tuple(GLOBS.values())
    tuning = min(steps, TUNING_STEPS)
    return (
        Chapter("free", "gpt", small, "free", ("norm",), steps, max(1, steps // 60)),
        Chapter("lock-step", "gpt", small, "lock-step", submodules, steps),
        Chapter(
            "fine-tuning", "digits", {"blocks": "1", "lr": "0.02"}, "free", ("norm",), tuning, max(1, tuning // 20)
        ),
        Chapter("parameters", "gpt", small, "parameters", ("norm",), max(1, steps // 4)),
    )


def run(
    folder: Path,
    *,
    steps: int = STEPS,
    seed: int = 0,
    progress: Progress | None = None,
    nodes: Sequence[Node] = INVENTED,
    workers: int | None = None,
) -> Study:
    """Run all of it, and judge.

    Args:
        folder: where the comparisons go, one folder each; new or empty.
        steps: of pretraining.
        seed: of data order and of what the nodes' faults draw.
        progress: see `Progress`.
        nodes: to play.
        workers: comparisons at a time, each in a process of its own; 1: one after the other in this one; None: 2 where there are
            two processors.

    Raises:
        ConfigurationError: no steps, or no nodes.
        BitwitnessError: a comparison has failed; the message says which and why.
    """
    if steps < 1 or not nodes:
        raise ConfigurationError(f"a study of {len(nodes)} nodes in {steps} steps: give at least one of both")
    begun, start = utc_now(), time.monotonic()
    plan = chapters(steps)
    for one in plan:
        CompareFiles(folder / one.name).create()
    if (min(2, os.cpu_count() or 1) if workers is None else workers) > 1:
        _run_beside(folder, plan, nodes, seed, progress)
    else:
        for one in plan:
            run_chapter(folder / one.name, one, nodes, seed, progress)
    found = figures(nodes, judged_nodes(folder, nodes), "digits")
    return Study(found, shape(found), steps, seed, time.monotonic() - start, begun, f"torch {torch.__version__}, CPU")


def write(folder: Path, study: Study) -> None:
    """Write `study.json`, `study.html` and `study.md`.

    Raises:
        RunFilesError: one cannot be written.
    """
    words = Words(study.figures, study.shape, study.steps, study.seed, study.seconds, study.time, study.software)
    write_json(folder / _RECORD, to_json(words))
    write_bytes(folder / _PAGE, render(words, "study.html.jinja").encode())
    write_bytes(folder / _TEXT, render(words, "study.md.jinja").encode())


# One comparison ------------------------------------------------------------------------------------------------------


def run_chapter(folder: Path, chapter: Chapter, nodes: Sequence[Node], seed: int, progress: Progress | None) -> None:
    """All nodes beside one leader and one more reference; a reseeded healthy one too where nothing is made equal."""
    files = CompareFiles(folder)
    settings = Settings(
        id=chapter.name,
        workload=chapter.workload,
        options=dict(chapter.options),
        modes=(chapter.mode,),
        globs=chapter.globs,
        steps=chapter.steps,
        seed=seed,
        every=chapter.every,
        control=chapter.mode == "free",
        keep=64,
        time=utc_now(),
    )
    write_json(files.asked, settings.to_json())
    seats = _seats(chapter, nodes, seed)
    for seat in seats:
        files.introduce(seat.participant)

    def tell(mode: Mode, done: int) -> None:
        if progress is not None:
            progress(chapter.name, done, chapter.steps)

    with one_thread():
        Lineup(seats, settings, files).run(tell)


def _seats(chapter: Chapter, nodes: Sequence[Node], seed: int) -> list[Seat]:
    make = workload.load(chapter.workload, chapter.options)
    healthy = [("leader", "leader"), ("reference-1", "reference")]
    healthy += [("control", "control")] if chapter.mode == "free" else []
    seats = [
        Seat(Participant(name, role, this_device(rank, _CPU, name)), _CPU, make)  # type: ignore[arg-type]
        for rank, (name, role) in enumerate(healthy)
    ]
    for rank, node in enumerate(nodes, len(seats)):
        who = Participant(node.name, "suspect", this_device(rank, _CPU, node.name), str(node))
        seats.append(Seat(who, _CPU, make, Simulated(str(node), seed)))
    return seats


def judged_nodes(folder: Path, nodes: Sequence[Node]) -> dict[int, NodeResults]:
    """What the judge says of each node in each part.

    Raises:
        RunFilesError: a file is damaged or absent.
    """
    of = {
        name: _judged(CompareFiles(folder / name), nodes) for name in ("lock-step", "parameters", "free", "fine-tuning")
    }
    return {one.number: NodeResults(*(results[one.number] for results in of.values())) for one in nodes}


def _judged(files: CompareFiles, nodes: Sequence[Node]) -> dict[int, Result]:
    """Journals are read once for all nodes: where errors spread, each has millions of characters."""
    asked, participants = read_json(files.asked), files.introduced()
    (mode,) = Settings.from_json(asked).modes
    accounts = [_short(account) for who in participants if (account := files.account(who, mode)) is not None]
    return {one.number: judged({mode: accounts}, participants, one.name, asked, 0.95) for one in nodes}


def _short(account: Account) -> Account:
    """Without single elements where errors spread: nothing is made of them there, and they are most of the memory."""
    if account.mode != "lock-step":
        account.steps = [
            replace(step, differences=tuple(replace(one, elements=()) for one in step.differences))
            for step in account.steps
        ]
    return account


# Beside each other ---------------------------------------------------------------------------------------------------


def _run_beside(
    folder: Path, plan: Sequence[Chapter], nodes: Sequence[Node], seed: int, progress: Progress | None
) -> None:
    """Two at a time, each in a process of its own: a lineup in one process uses one processor."""
    context = multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    waiting, running = list(plan), dict[str, SpawnProcess]()
    try:
        while waiting or running:
            while waiting and len(running) < 2:
                chapter = waiting.pop(0)
                given = (folder / chapter.name, chapter, tuple(nodes), seed, told)
                running[chapter.name] = context.Process(target=_in_a_process, args=given, daemon=True)
                running[chapter.name].start()
            _listen(told, progress)
            for name, process in list(running.items()):
                if not process.is_alive():
                    _listen(told, progress)
                    del running[name]
                    if process.exitcode:
                        raise BitwitnessError(f"the part {name!r} of the study ended with code {process.exitcode}")
            time.sleep(0.1)
    finally:
        for process in running.values():
            process.terminate()
            process.join()


def _listen(told: Any, progress: Progress | None) -> None:
    while not told.empty():
        name, done, of, why = told.get()
        if why:
            raise BitwitnessError(f"the part {name!r} of the study has failed: {why}")
        if progress is not None:
            progress(name, done, of)


def _in_a_process(folder: Path, chapter: Chapter, nodes: Sequence[Node], seed: int, told: Any) -> None:
    die_with_parent(_NO_VARIABLE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells all of a group; who started this decides
    try:
        run_chapter(folder, chapter, nodes, seed, lambda name, done, of: told.put((name, done, of, "")))
    except BitwitnessError as error:
        told.put((chapter.name, 0, 0, str(error)))
