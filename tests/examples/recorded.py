"""The directory of a demo as its processes would have left it, without any: what the report is made of.

Written through the same functions as the real files. A test takes a run in which all went as it should, and changes
something.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitwitness.evidence import Observation
from bitwitness.examples.plan import IN_MEMORY, TRAININGS, Settings, events_file, expected
from bitwitness.examples.ranks import node_name
from bitwitness.examples.report_recovery import utc
from bitwitness.runfiles import Label, RunFiles, digest_files
from bitwitness.runfiles.supervision import Generation, Session, Stop, SupervisionFiles
from bitwitness.topology import Topology
from tests.cli import samples

STEP, RANK = samples.STEP, 4
BEFORE = replace(samples.KNOWN, last_passed=dict.fromkeys(("numerics", "replay", "replicas"), STEP - 1))
SESSION = "20261129T093015Z-4be1d2"
DIGEST = "1f" * 32


def settings_for(**given: Any) -> Settings:
    """Settings whose seed draws the step and the rank of the samples."""
    drawn = (Settings(**{"nodes": 3, "seed": seed, **given}) for seed in range(10_000))
    rank = RANK if given.get("nodes", 3) >= 3 else 2
    return next(one for one in drawn if (one.step, one.rank) == (STEP, rank))


def record(run_dir: Path, settings: Settings, names: Sequence[str] = (), broken: float = 0.5) -> None:
    """Write all of it: as it should be, for these settings.

    Args:
        run_dir: a folder that does not exist.
        settings: as `settings_for` gives them.
        names: of the nodes as the incident has them.
        broken: what the fault adds to the loss of the run without a guard.
    """
    for folder in ("events", "logs"):
        (run_dir / folder).mkdir(parents=True)
    settings.write(run_dir)
    started = time.time() - 100
    _clean(run_dir, settings)
    write_events(run_dir, settings, started, broken)
    _guarded(run_dir, settings, started, names)


def add(run_dir: Path, rank: int, *events: Mapping[str, Any]) -> None:
    """Append events to those of a rank."""
    with events_file(run_dir, rank).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def change(run_dir: Path, rank: int, kind: str, training: str, **fields: Any) -> None:
    """Change the events of a kind."""
    path = events_file(run_dir, rank)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    hit = [event for event in events if (event["event"], event["training"]) == (kind, training)]
    assert hit
    for event in hit:
        event.update(fields)
    add(run_dir, rank, *events)


def write_events(run_dir: Path, settings: Settings, started: float, broken: float) -> None:
    """What the ranks reported."""
    should, at = expected(settings), started
    for training in TRAININGS:
        generations = range(1, should.generations + 1) if training.supervised else (1,)
        for generation in generations:
            of = {"training": training.name, "generation": generation}
            first = (should.resumed_from or 0) if generation > 1 else 0
            stops = training.supervised and (generation < should.generations or should.exit_code != 0)
            last = STEP + 1 if stops else settings.steps
            for step in range(first, last):
                at += 0.1
                loss = (
                    5
                    - 0.1 * step
                    + (broken if step > STEP and training.name == "unguarded" and settings.fault != "none" else 0.0)
                )
                add(run_dir, 0, {"event": "step", "time": at, **of, "step": step, "loss": loss, "checks": 9})
                if training.faulty and settings.fault != "none" and step == STEP and generation == 1:
                    change_ = {"changed": 2, "before": "1.0", "after": "2.0", "selected": 2}
                    hit = {
                        "event": "landed",
                        "time": at,
                        **of,
                        "fault": settings.fault_line,
                        "rank": settings.rank,
                        "step": STEP,
                        "where": "a product",
                    }
                    add(run_dir, settings.rank, {**hit, **change_})
            for rank in range(settings.world_size):
                _last_word(run_dir, settings, rank, {**of, "time": at}, stops)


def _last_word(run_dir: Path, settings: Settings, rank: int, of: Mapping[str, Any], stops: bool) -> None:
    if not stops:
        validation = {"validation": 3.0, "updates": settings.steps, "digest": DIGEST}
        parted = of["training"] == "unguarded" and settings.fault != "none"
        add(run_dir, rank, {"event": "end", **of, **validation, **({"digest": f"{rank:064x}"} if parted else {})})


def _clean(run_dir: Path, settings: Settings) -> None:
    files = RunFiles(run_dir / "clean").create()
    for rank in range(settings.world_size):
        journal = files.journal(rank)
        last = {"first": 0, "last": settings.steps - 1, "outcome": "passed"}
        for check in ("numerics", "replay", "replicas"):
            journal.append("ledger", {"check": check, **last})
        journal.close()


def _guarded(run_dir: Path, settings: Settings, started: float, names: Sequence[str]) -> None:
    should = expected(settings)
    files = RunFiles(run_dir / "guarded").create()
    supervision = SupervisionFiles(files.path)
    supervision.create(SESSION)
    where = samples.topology(settings.nodes, names=names)
    nodes = tuple(node_name(index) for index in range(settings.nodes))
    journal = files.journal(0)
    for number in range(1, should.generations + 1):
        if number > 1:
            nodes = tuple(
                node_name(settings.nodes) if should.quarantined and one == settings.node else one for one in nodes
            )
            where_from = files.path / "checkpoints" / f"step-{should.resumed_from:08d}"
            journal.append("resume", {"step": should.resumed_from, "checkpoint": str(where_from), "refused": []})
        supervision.write_generation(SESSION, Generation(number, nodes, "127.0.0.1", 1))
        last = STEP if number < should.generations or should.exit_code else settings.steps
        for step in range(settings.checkpoint_every, last + 1, settings.checkpoint_every):
            if number == 1 or step > (should.resumed_from or 0):
                save(files, step, started if step <= STEP else started + 99, where)
        supervision.log(SESSION, "started", text=f"generation {number} on {', '.join(nodes)}")
        if number < should.generations or should.exit_code:
            incident = samples.write(
                files.path, seen(settings, where), where, BEFORE, time=utc(started + 70), generation=number
            )
            stop(run_dir, settings, incident, number)
            for device in should.quarantined:
                files.quarantine.deny_devices([device], node=settings.node, reason="persistent corruption")
                files.note_action(incident.name, "quarantined", device=device, node=settings.node)
    journal.close()
    supervision.write_session(Session(SESSION, generation=should.generations, ended=True))
    supervision.write_stop(SESSION, Stop(should.exit_code, "finished", "all ranks have finished"))
    supervision.log(SESSION, "ended", text="ended")


def seen(settings: Settings, where: Topology) -> list[Observation]:
    """What the guard would have seen of the fault."""
    if settings.fault in IN_MEMORY:
        return samples.replicas(where, settings.rank)
    return samples.replays(where, settings.rank, samples.GOOD if settings.transient else samples.BAD)


def stop(run_dir: Path, settings: Settings, incident: Path, generation: int) -> None:
    """Every rank raises what the incident says."""
    verdict = json.loads((incident / "incident.json").read_text())["verdict"]
    word = {"event": "stopped", "time": time.time(), "generation": generation, "training": "guarded"}
    updates = STEP + (settings.fault in IN_MEMORY)
    for rank in range(settings.world_size):
        add(run_dir, rank, {**word, "updates": updates, "verdict": verdict, "incident": str(incident)})


def save(files: RunFiles, step: int, at: float, where: Topology) -> None:
    """A checkpoint of one small file."""
    staging = files.checkpoints.stage(step, "0" * 8)
    (staging / "shared.pt").write_bytes(b"weights of step %d" % step)
    label = Label(
        step=step,
        saved=utc(at),
        world_size=where.world_size,
        placement=where.to_json(),
        passed=dict.fromkeys(("numerics", "replay", "replicas"), step - 1),
        failed={},
        incidents=tuple(path.name for path in files.incidents()) if step > STEP else (),
        seed=0,
        tensors={},
        files=digest_files(staging),
        software={},
        read_back="each file by a rank on another node",
    )
    files.checkpoints.publish(staging, label)
