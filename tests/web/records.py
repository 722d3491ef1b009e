"""Pages as the database would give them, realistic ones and hostile ones, for whoever draws, serves or reads them.

The hostile ones have in every field what somebody could write into a file of a run: markup, quotes, control characters, marks that
turn writing around, half of a surrogate pair, and far too much of everything.
"""

from __future__ import annotations

import dataclasses
import math
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


def filled(kind: Any, text: str = HOSTILE, many: int = 3, number: int = 7, choice: int = -1) -> Any:
    """A record of that type with the text in every field that takes one, and so many entries wherever there can be several.

    Args:
        kind: the type of the record, or of one of its fields.
        text: what stands in every field that takes words.
        number: what stands in every field that takes one.
        many: entries wherever there can be several.
        choice: which one of the words where only some are allowed.
    """
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        made = {one.name: filled(hints[one.name], text, many, number, choice) for one in dataclasses.fields(kind)}
        return kind(**made)  # type: ignore[operator]  # a dataclass is called like any class
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return args[choice]
    if origin in (typing.Union, types.UnionType):
        return filled(next(one for one in args if one is not type(None)), text, many, number, choice)
    if origin is tuple:
        several = len(args) == 2 and args[1] is Ellipsis
        return tuple(filled(args[0], text, many, number, choice) for _ in range(many)) if several else tuple(
            filled(one, text, many, number, choice) for one in args
        )  # fmt: skip
    if origin is not None and issubclass(origin, typing.Mapping):
        return {
            filled(args[0], f"{text}{index}", many, number): filled(args[1], text, many, number, choice)
            for index in range(many)
        }
    return {str: text, int: number, float: 0.25, bool: True}.get(kind, text)


# The other pages, realistic -------------------------------------------------------------------------------------------


def series(steps: int = 4_000, buckets: int = 400) -> pages.Series:
    """A loss that falls, with a stretch that was NaN."""
    size = steps // buckets
    first = tuple(range(0, steps, size))
    loss = tuple(
        None if 300 <= index < 303 else 2.5 + 8 / (1 + index / 12) + 0.08 * math.sin(index) for index in range(buckets)
    )
    norm = tuple(None if one is None else 0.6 + 0.05 * one + 0.1 * math.cos(index) for index, one in enumerate(loss))
    return pages.Series(
        first=first, last=tuple(one + size - 1 for one in first), loss=loss, norm=norm,
        loss_low=tuple(one and one - 0.2 for one in loss), loss_high=tuple(one and one + 0.25 for one in loss),
        norm_low=tuple(one and one - 0.1 for one in norm), norm_high=tuple(one and one + 0.3 for one in norm),
        nonfinite=tuple(1 if one is None else 0 for one in loss), seconds=(1.31,) * buckets,
    )  # fmt: skip


def ledger_map(check: str = "replay", world: int = 16, columns: int = 100, size: int = 40) -> pages.LedgerMap:
    """A map with all that a map can have."""
    rows: list[tuple[pages.Cell, ...]] = []
    for rank in range(world):
        row: list[pages.Cell] = [
            "passed" if check == "numerics" or column % 5 == rank % 5 else "gap" for column in range(columns)
        ]
        row[20:24] = ["gap"] * 4
        row[40] = "partly"
        row[60:62] = ["unverified"] * 2
        row[90] = "failed" if rank in (2, 4) else row[90]
        rows.append(tuple(row))
    return pages.LedgerMap(
        check, tuple((rank, rank) for rank in range(world)), tuple((one * size, one * size + size - 1) for one in range(columns)),
        tuple(rows), {f"{rank},60": "out of memory in the witness" for rank in range(world)},
    )  # fmt: skip


def places(world: int = 16) -> tuple[pages.Place, ...]:
    """Two ranks a node."""
    return tuple(
        pages.Place(rank, f"node-{rank // 2}", f"GPU-8f2e6a3{rank:x}", rank % 2, "NVIDIA H100 80GB HBM3", "")
        for rank in range(world)
    )


def proposal(**changes: Any) -> pages.ProposalRow:
    """A drain that waits for a person."""
    made = pages.ProposalRow(
        key=17, incident=incident().id, node="node-2", devices=("GPU-8f2e6a31",), action="drain", confidence="high",
        reason="persistent compute corruption on GPU-8f2e6a31, and the kernel log names the same device", act="drain", status="held",
        hold="approval", why="A person must approve it: the policy asks for that before a drain.", updated=at(3_400),
        signals=("2026-11-30 06:54:41 Xid 95 (uncontained ECC error) on GPU-8f2e6a31", "2026-11-30 06:55:02 ECC uncorrectable: 0 to 3"),
        waits=True, controller=1, question="17-3fa9c1d2", state="/var/lib/bit witness",
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def audit(**changes: Any) -> pages.AuditRow:
    """What a person did."""
    made = pages.AuditRow(
        at(3_600), "ada@ops-1", "approved", incident().id, "node-2", "seen in two runs, ticket 4411", "fleet"
    )
    return dataclasses.replace(made, **changes)


def run_page(**changes: Any) -> pages.RunPage:
    """The page of a run in which rank 4 was named."""
    checkpoints = tuple(
        pages.CheckpointRow(step, at(step), {"numerics": step - 1, "replay": step - 10, "replicas": step - 1},
                            "the suspect window of 20261130T065610Z-f1c985 begins before it" if step > 3_610 else "", step > 2_000)
        for step in range(3_800, 1_200, -400)
    )  # fmt: skip
    marks = (
        pages.Mark(0, at(0), "start", "training began on 16 ranks"),
        *(pages.Mark(step, at(step), "checkpoint", f"checkpoint of step {step}") for step in range(400, 4_000, 400)),
        pages.Mark(1_200, at(1_500), "drill", "a bit was flipped on purpose", "20261130T061200Z-aaaaaa"),
        pages.Mark(2_410, at(2_600), "unattributed", "nobody could be named", "20261130T064200Z-bbbbbb"),
        pages.Mark(3_612, at(3_370), "attributed", "rank 4 on node-2 was named", incident().id),
        pages.Mark(3_613, at(3_380), "restart", "restarted without node-2"),
    )
    made = pages.RunPage(
        run=run(1, attributed=1, unattributed=1, open=1), series=series(), marks=marks,
        maps=tuple(ledger_map(check) for check in ("numerics", "replay", "replicas")),
        costs=tuple(pages.CheckCost(check, 3.2 * (index + 1), 4_000, 0.0006 * (index + 1)) for index, check in enumerate(CHECKS)),
        incidents=(incident(), unattributed(run=1, judgement="confirmed")), checkpoints=checkpoints, placement=places(),
        policy={"audit": "gradients", "audit_every": 10, "check_every": 10, "on_detection": "raise"},
        limits=(), history=(audit(),), problems=(pages.Problem("journal/rank-00007.jsonl", "2 lines are no JSON; skipped", at(40), 2),),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def seen(rank: int, owner: int, value: str, repeats: str = "", **changes: Any) -> pages.Seen:
    """A run of an owner's micro-batch, and three repeats."""
    made = pages.Seen(
        "replay",
        3_612,
        rank,
        "original" if rank == owner else "witness",
        value,
        (repeats or value,) * 3,
        owner,
        0,
        "",
        {},
    )
    return dataclasses.replace(made, **changes)


def incident_page(**changes: Any) -> pages.IncidentPage:
    """Rank 4 of eight was wrong in its own work and as a witness of two others."""
    world = 8
    observations = [
        seen(rank, owner, f"{'bad' if rank == 4 else 'good'}{owner}".encode().hex().ljust(24, "0"))
        for owner in range(world)
        for rank in (owner, (owner + 2) % world, (owner + 4) % world)
    ]
    made = pages.IncidentPage(
        incident=incident(), run=run(1, attributed=1, open=1, world_size=world, nodes=4), observations=tuple(observations),
        placement=places(world), world_size=world, nodes=4, checkpoint=3_600, proposals=(proposal(),), history=(audit(),), notes=(),
        files={"incident.json": 18_233, "micro-batches-rank-00004.pt": 5_242_880},
        path="/shared/runs/gpt-7b-001/incidents/20261130T065610Z-f1c985", pruned=False,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def unattributed_page(**changes: Any) -> pages.IncidentPage:
    """Two nodes of two ranks: a disagreement that names nobody."""
    observations = (
        *(seen(rank, 0, GOOD if rank < 2 else BAD) for rank in (0, 1, 2)),
        *(seen(rank, 2, OTHER if rank == 2 else GOOD) for rank in (2, 0, 3)),
        *(seen(rank, 1, GOOD) for rank in (1, 0, 3)),
    )
    return incident_page(
        incident=unattributed(), run=run(2, name="ablation-small", unattributed=1, open=1, world_size=4, nodes=2),
        observations=observations, placement=places(4), world_size=4, nodes=2, checkpoint=800, proposals=(), history=(), **changes,
    )  # fmt: skip


def node_page(**changes: Any) -> pages.NodePage:
    """A node with a strike that counts, one that does not any more, and an incident in which it was only involved."""
    stays = tuple(
        pages.Stay(
            f"GPU-8f2e6a3{slot}", "node-2", key, f"gpt-7b-{key:03}", 4 + slot, at(key * 900), at(key * 900 + 700)
        )
        for key in (1, 2, 3)
        for slot in (0, 1)
    )
    strikes = (
        pages.StrikeRow(at(3_370), incident().id, 1, "gpt-7b-001", 4, "GPU-8f2e6a31", "node-2", "persistent", True, "", "", now="node-2"),
        pages.StrikeRow(at(1_200), "20261130T062000Z-0000aa", 2, "gpt-7b-002", 5, "GPU-8f2e6a30", "node-2", "transient", False,
                        "ada@ops-1 cleared it 2026-11-30: card replaced", "", now="node-2"),
    )  # fmt: skip
    row = pages.NodeRow("node-2", "waits for approval", "A drain waits for a person's approval.", 2, 1, 1, 1, at(5_000))
    made = pages.NodePage(
        "node", "node-2", row, stays, strikes, (unattributed(),), ("gpt-7b-001 denies its device GPU-8f2e6a31",),
        (proposal(), proposal(key=3, waits=False, status="done", hold="", signals=())), (audit(), audit(what="cleared")),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def fleet_page(**changes: Any) -> pages.FleetPage:
    """Nodes in every state, one action that waits, one under way."""
    states: tuple[pages.NodeState, ...] = typing.get_args(pages.NodeState)
    nodes = tuple(
        pages.NodeRow(f"node-{index}", state, f"It is {state}, as its last proposal left it.", 8, index % 3, index % 2, index % 2, at(5_000 - index))
        for index, state in enumerate(states)
    )  # fmt: skip
    made = pages.FleetPage(
        states={state: index + 1 for index, state in enumerate(states)}, nodes=nodes, total=len(nodes), page=1, pages=1, query="",
        waiting=(proposal(),), acting=(proposal(key=18, waits=False, node="node-5", status="held", hold="budget", why="Two of two nodes of this hour are used."),),
        controllers=({"id": "1", "path": "/var/lib/bitwitness", "mode": "act", "cluster": "slurm", "life": "running", "text": "running on ops-1, last round 12 s ago", "last_round": at(5_390), "seen": at(5_391)},),
        todo=("node-9 came back into service with a condemned device: take it out again",), history=(audit(),),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def drills_page(**changes: Any) -> pages.DrillsPage:
    """Every outcome that a drill can have."""
    outcomes = ("caught", "caught, unattributed", "named wrongly", "missed", "unclear")
    drills = tuple(
        pages.DrillRow(at(600 * index), 5, "drill-friday", "backward.compute @ step 40 : rank 3 -> bitflip(exponent)", 3, "node-1", 40, outcome,
                       "replay" if index < 3 else "", incident().id if index < 3 else "", 0 if index < 3 else None)
        for index, outcome in enumerate(outcomes)
    )  # fmt: skip
    made = pages.DrillsPage(
        drills=drills, total=len(drills), page=1, pages=1, outcomes=dict.fromkeys(outcomes, 1), false_alarms=(incident(judgement="false alarm"),),
        unjudged=2, tallies=(pages.CheckTally("numerics", 48_000_000, 0, 6.25e-8), pages.CheckTally("replay", 120_000, 1, 4.0e-5),
                         pages.CheckTally("update", 0, 0, None)),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)
