"""Pages as the database would give them, realistic ones and hostile ones, for whoever draws, serves or reads them.

The hostile ones have in every field what somebody could write into a file of a run: markup, quotes, control characters, marks that
turn writing around, half of a surrogate pair, and far too much of everything.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from datetime import UTC, datetime, timedelta
from typing import Any

from bitwitness.store import pages

NOW = datetime(2026, 11, 30, 7, 30, tzinfo=UTC)
HOSTILE = "<script>alert(1)</script>'\"><img src=x onerror=alert(2)>{{ 7*7 }}\x00\x1b[31m\u202e\ud800 ../..//?x=1#y"
"""No page may show it as anything but text, and no address may end in the middle of it."""
GOOD, BAD, OTHER = "65c6ee7d4551c88acfa06ea6", "23a1650410c39d6724ef76a8", "b7ab06f51732fb5137b1d939"
CHECKS = ("numerics", "allreduce", "replay", "at_rest", "update", "replicas")
_EPOCH = datetime(2026, 11, 30, 6, 0, tzinfo=UTC)


def at(seconds: float) -> str:
    """A time of the story that the realistic pages tell."""
    return (_EPOCH + timedelta(seconds=seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# Realistic -----------------------------------------------------------------------------------------------------------


def coverage(world: int = 16, steps: int = 4_000) -> tuple[pages.Coverage, ...]:
    """Of six checks: some see every step, some a tenth of them, one has failed, and none without gaps."""
    every = world * steps
    return (
        pages.Coverage("numerics", every - 48, 0, 0, every, steps - 1),
        pages.Coverage("allreduce", every - 48, 0, 0, every, steps - 1),
        pages.Coverage("replay", every // 10 - 20, 16, 4, every, steps - 10),
        pages.Coverage("at_rest", every // 4, 0, 0, every, steps - 2),
        pages.Coverage("replicas", every // 10, 0, 0, every, steps - 10),
    )


def run(key: int = 1, **changes: Any) -> pages.RunRow:
    """A run of 16 ranks that trains."""
    made = pages.RunRow(
        key=key, name=f"gpt-7b-{key:03}", path=f"/shared/runs/gpt-7b-{key:03}", run="5f0c2d7e", job=f"slurm:{4700 + key}",
        state="training", state_text="It trains: its journals grew 4 s ago.", started=at(0), seen=at(5_390), world_size=16, nodes=8,
        step=3_999, checkpoint=3_600, coverage=coverage(), cost=0.0064, attributed=0, unattributed=0, drills=0, false_alarms=0, open=0,
        problems=0,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def incident(**changes: Any) -> pages.IncidentRow:
    """An incident that names rank 4."""
    made = pages.IncidentRow(
        id="20261130T065610Z-f1c985", run=1, run_name="gpt-7b-001", time=at(3_370), step=3_612, check="replay", kind="compute",
        status="attributed", persistence="persistent",
        headline="step 3612: persistent compute corruption on rank 4 (node node-2)",
        reason="rank 4 on node node-2 (device GPU-8f2e6a31) alone differs in the results of the micro-batches of ranks 0, 2, 4: rank 0 on "
        "node node-0 and rank 2 on node node-1 agree bit for bit in every repeat; its repeats were wrong, so it is persistent: take it "
        "out of the job",
        ranks=(4,), nodes=("node-2",), devices=("GPU-8f2e6a31",), candidates=(), window=(3_610, 3_612), judgement="",
        action="drain waits for approval",
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def unattributed(**changes: Any) -> pages.IncidentRow:
    """An incident on two nodes, which names nobody."""
    return incident(
        id="20261130T065700Z-1fd824", run=2, run_name="ablation-small", time=at(3_420), step=811, status="unattributed",
        persistence="unknown", headline="step 811: corruption (compute), unattributed",
        reason="the results of the micro-batches of ranks 0, 2, 3 differ between runs on ranks 0, 1, 2, 3, on 2 nodes: three are needed to "
        "name anybody; run on three, or swap one node and audit again",
        ranks=(), nodes=(), devices=(), candidates=(0, 1, 2, 3), window=(809, 811), action="",
    ) if not changes else dataclasses.replace(unattributed(), **changes)  # fmt: skip


def runs_page(**changes: Any) -> pages.RunsPage:
    """Five runs, of which two have something to be looked at."""
    rows = (
        run(1, attributed=1, open=1),
        run(2, name="ablation-small", state="stopped", state_text="It was stopped: nobody could be named twice, a person must look.",
            world_size=4, nodes=2, unattributed=2, open=2, step=811, checkpoint=800, problems=1),
        run(3),
        run(4, state="silent", state_text="Nothing was written for 14 min; its steps take 2 s."),
        run(5, name="drill-friday", state="finished", state_text="Every rank has finished.", drills=3, false_alarms=1),
        run(6, name="fresh", state="unknown", state_text="Nothing tells.", step=-1, checkpoint=-1, coverage=(), cost=None, job=""),
    )  # fmt: skip
    made = pages.RunsPage(
        runs=rows, total=len(rows), page=1, pages=1, attributed=1, unattributed=2, query="",
        states={"training": 2, "silent": 1, "finished": 1, "stopped": 1, "unknown": 1},
        incidents=(incident(), unattributed(), unattributed(id="20261130T065710Z-c31902")),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


# Hostile -------------------------------------------------------------------------------------------------------------


def filled(kind: Any, text: str = HOSTILE, many: int = 3, number: int = 7) -> Any:
    """A record of that type with the text in every field that takes one, and so many entries wherever there can be several."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        made = {one.name: filled(hints[one.name], text, many, number) for one in dataclasses.fields(kind)}
        return kind(**made)  # type: ignore[operator]  # a dataclass is called like any class
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return args[-1]
    if origin in (typing.Union, types.UnionType):
        return filled(next(one for one in args if one is not type(None)), text, many, number)
    if origin is tuple:
        several = len(args) == 2 and args[1] is Ellipsis
        return tuple(filled(args[0], text, many, number) for _ in range(many)) if several else tuple(
            filled(one, text, many, number) for one in args
        )  # fmt: skip
    if origin is not None and issubclass(origin, typing.Mapping):
        return {
            filled(args[0], f"{text}{index}", many, number): filled(args[1], text, many, number)
            for index in range(many)
        }
    return {str: text, int: number, float: 0.25, bool: True}.get(kind, text)
