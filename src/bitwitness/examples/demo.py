"""The demo: one training job, hit on purpose, with and without the guard; and what came of it.

The ranks (`examples.train`) only report what happened. Everything that the demo claims is worked out here, from their
reports and from the guard's own journals and incidents, so that nothing in a summary is there because it was expected. No
torch: the command answers at once, and the ranks have the memory.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from bitwitness.errors import BitwitnessError, ConfigurationError
from bitwitness.evidence import Verdict
from bitwitness.examples.ranks import Ranks, node_name
from bitwitness.runfiles import RunFiles, read_json, write_json

FaultChoice = Literal["matmul", "gradient", "nan", "weight", "moment", "none"]
FAULTS: tuple[FaultChoice, ...] = get_args(FaultChoice)
IN_MEMORY: tuple[FaultChoice, ...] = ("weight", "moment")
"""Faults that change a stored number once; the others are wrong arithmetic, which may repeat."""

MIN_STEPS = 6
_SILENCE = 300.0
"""Seconds without any event after which the demo gives up."""
_POLL = 0.1

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Training:
    """One of the three trainings of the demo. Its name is also that of its folder in the run directory."""

    name: Literal["clean", "unguarded", "guarded"]
    guarded: bool
    faulty: bool


TRAININGS = (
    Training("clean", guarded=True, faulty=False),
    Training("unguarded", guarded=False, faulty=True),
    Training("guarded", guarded=True, faulty=True),
)


@dataclass(frozen=True)
class Settings:
    """What is asked of the demo.

    Raises:
        ConfigurationError: settings that cannot be, or do not go together.
    """

    fault: FaultChoice = "matmul"
    transient: bool = False
    seed: int = 0
    steps: int = 24
    nodes: int = 4
    ranks_per_node: int = 2

    def __post_init__(self) -> None:
        if self.fault not in FAULTS:
            raise ConfigurationError(f"fault {self.fault!r}: must be one of {', '.join(FAULTS)}")
        if self.steps < MIN_STEPS:
            raise ConfigurationError(f"{self.steps} steps are too few to see anything: at least {MIN_STEPS}")
        if self.world_size < 2:
            raise ConfigurationError(
                "one rank has nobody to witness it: use at least two, and three nodes to name anybody"
            )
        if self.transient and (self.fault == "none" or self.fault in IN_MEMORY):
            raise ConfigurationError(
                f"a transient fault is one of arithmetic: matmul, gradient or nan, not {self.fault}"
            )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def rank(self) -> int:
        """The rank that is hit: drawn by the seed."""
        return random.Random(f"rank {self.seed}").randrange(self.world_size)  # noqa: S311  (no secret)

    @property
    def step(self) -> int:
        """The step from which it is hit: drawn by the seed from the middle third."""
        return random.Random(f"step {self.seed}").randrange(self.steps // 3, 2 * self.steps // 3)  # noqa: S311

    @property
    def node(self) -> str:
        """The node of the rank that is hit."""
        return node_name(self.rank // self.ranks_per_node)

    def fault_record(self) -> dict[str, Any]:
        """The fields of `examples.faults.Fault`."""
        return {"kind": self.fault, "rank": self.rank, "step": self.step, "transient": self.transient}

    def write(self, run_dir: Path) -> None:
        """Leave them for the ranks."""
        write_json(run_dir / "demo.json", asdict(self))

    @classmethod
    def read(cls, run_dir: Path) -> Settings:
        """What `write` left."""
        record = read_json(run_dir / "demo.json")
        return cls(**{name: record[name] for name in cls.__dataclass_fields__})


@dataclass
class Reported:
    """What the ranks reported of one training.

    Attributes:
        losses: by step, the mean over all ranks; as many as there were steps.
        ends: each rank's last event.
        landed: where the fault struck first, if it did.
    """

    losses: list[float] = field(default_factory=list)
    ends: dict[int, Event] = field(default_factory=dict)
    landed: Event | None = None

    @property
    def validation(self) -> float:
        """Loss of the final weights on text that nobody trained on."""
        return float(self.ends[0]["validation"])

    @property
    def digests(self) -> list[str]:
        """Of each rank's final weights."""
        return [str(self.ends[rank]["digest"]) for rank in sorted(self.ends)]


@dataclass(frozen=True)
class Report:
    """What came of a demo. Each value is measured; `problems` is empty if all went as it should.

    Attributes:
        injected: the event of the fault's first strike in the guarded run, or None.
        verdict: of the guarded run, as every rank raised it, or None.
        incident: its directory.
        before_update: whether the guard stopped before the update of the step that was hit.
        false_alarms: incidents and verdicts of the clean guarded run.
        checks: by name, at how many steps each check passed in the clean guarded run, summed over ranks.
        changes_no_bit: whether the guarded clean run equals the unguarded one bit for bit as long as there is no fault.
        replicas_parted: whether the ranks of the unguarded run ended with different weights.
        losses, validation: by training.
        problems: what did not go as it should, each a sentence.
    """

    settings: Settings
    run_dir: Path
    seconds: float
    injected: Event | None
    verdict: Verdict | None
    incident: Path | None
    before_update: bool | None
    false_alarms: int
    checks: dict[str, int]
    changes_no_bit: bool
    replicas_parted: bool
    losses: dict[str, list[float]]
    validation: dict[str, float]
    problems: tuple[str, ...] = ()

    @property
    def right(self) -> bool | None:
        """Whether exactly the rank that was hit is named; None where nobody should be named."""
        if self.injected is None or self.settings.nodes < 3:
            return None
        return self.verdict is not None and self.verdict.ranks == (self.injected["rank"],)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values; numbers that JSON lacks are strings, e.g. "nan"."""
        verdict, injected = self.verdict, self.injected
        return {
            "fault": self.settings.fault,
            "transient": self.settings.transient,
            "seed": self.settings.seed,
            "steps": self.settings.steps,
            "nodes": self.settings.nodes,
            "ranks_per_node": self.settings.ranks_per_node,
            "injected_step": injected["step"] if injected else None,
            "injected_where": injected["where"] if injected else None,
            "injected_change": f"{injected['before']} -> {injected['after']}" if injected else None,
            "injected_elements": injected["changed"] if injected else 0,
            "true_rank": injected["rank"] if injected else None,
            "true_node": node_name(injected["rank"] // self.settings.ranks_per_node) if injected else None,
            "detected_step": verdict.step if verdict else None,
            "before_update": self.before_update,
            "check": verdict.check if verdict else None,
            "status": verdict.status if verdict else "clean",
            "kind": verdict.kind if verdict else None,
            "persistence": verdict.persistence if verdict else None,
            "named_ranks": list(verdict.ranks) if verdict else [],
            "named_nodes": list(verdict.nodes) if verdict else [],
            "reason": verdict.reason if verdict else None,
            "right": self.right,
            "false_alarms": self.false_alarms,
            "checks_passed": self.checks,
            "guard_changes_no_bit": self.changes_no_bit,
            "unguarded_replicas_parted": self.replicas_parted,
            "losses": {name: [_json_number(loss) for loss in losses] for name, losses in self.losses.items()},
            "validation_loss": {name: _json_number(loss) for name, loss in self.validation.items()},
            "incident": str(self.incident) if self.incident else None,
            "run_dir": str(self.run_dir),
            "seconds": round(self.seconds, 2),
            "ok": not self.problems,
            "problems": list(self.problems),
        }


def _json_number(value: float) -> float | str:
    return value if abs(value) < float("inf") else str(value)


def events_file(run_dir: Path, rank: int) -> Path:
    """Where a rank writes its events."""
    return run_dir / "events" / f"rank-{rank:05d}.jsonl"


def run(settings: Settings, run_dir: Path, on_event: Callable[[int, Event], None]) -> Report:
    """Run the demo in an empty directory.

    Args:
        settings: what to do.
        run_dir: an existing, empty directory.
        on_event: called with the rank and each event, as they happen.

    Raises:
        BitwitnessError: a rank failed, or nothing happened for minutes; shows what it printed.
    """
    started = time.monotonic()
    run_dir = run_dir.absolute()
    for folder in ("events", "logs"):
        (run_dir / folder).mkdir()
    settings.write(run_dir)
    reported: dict[str, Reported] = {training.name: Reported() for training in TRAININGS}
    command = ["-m", "bitwitness.examples.train", str(run_dir)]
    with Ranks(command, settings.nodes, settings.ranks_per_node, run_dir / "logs") as ranks:
        for rank, event in _events(ranks, run_dir):
            _note(reported, rank, event)
            on_event(rank, event)
    return conclude(settings, run_dir, reported, time.monotonic() - started)


def _events(ranks: Ranks, run_dir: Path) -> Iterator[tuple[int, Event]]:
    """The events of all ranks as they happen, until all have ended."""
    tails = [_Tail(events_file(run_dir, rank)) for rank in range(ranks.world_size)]
    heard = time.monotonic()
    running = True
    while running:
        running = ranks.running  # before the files are read: what a rank wrote before it ended is then read too
        new = [(rank, event) for rank, tail in enumerate(tails) for event in tail.new()]
        heard = time.monotonic() if new else heard
        yield from sorted(new, key=lambda one: one[1]["time"])
        if time.monotonic() - heard > _SILENCE:
            raise BitwitnessError(f"the ranks have been silent for {_SILENCE:.0f} s: look at {ranks.log(0).parent}")
        if running:
            time.sleep(_POLL)


class _Tail:
    """Reads what is appended to a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[Event]:
        """The whole lines that have come since."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return
        whole = content.rfind(b"\n") + 1
        self._offset += whole
        for line in content[:whole].splitlines():
            yield json.loads(line)


def _note(reported: Mapping[str, Reported], rank: int, event: Event) -> None:
    of = reported[event["training"]]
    match event["event"]:
        case "step":
            of.losses.append(float(event["loss"]))
        case "end":
            of.ends[rank] = event
        case "landed":
            of.landed = event


# Conclusions ---------------------------------------------------------------------------------------------------------


def conclude(settings: Settings, run_dir: Path, reported: Mapping[str, Reported], seconds: float) -> Report:
    """What follows from what was reported, and from the files that the guard left."""
    clean, unguarded, guarded = (reported[training.name] for training in TRAININGS)
    for name, of in reported.items():
        if sorted(of.ends) != list(range(settings.world_size)):
            raise BitwitnessError(f"only ranks {sorted(of.ends)} finished the {name} run: look at {run_dir / 'logs'}")
    raised = [end["verdict"] for end in guarded.ends.values() if end["outcome"] == "stopped"]
    verdict = Verdict.from_json(raised[0]) if raised else None
    path = guarded.ends[0].get("incident")
    injected = guarded.landed
    before_update = None
    if verdict is not None and injected is not None:
        before_update = int(guarded.ends[0]["updates"]) <= int(injected["step"])
    until = injected["step"] if injected else settings.steps
    same_weights = injected is not None or clean.digests == unguarded.digests == guarded.digests
    draft = Report(
        settings=settings,
        run_dir=run_dir,
        seconds=seconds,
        injected=injected,
        verdict=verdict,
        incident=Path(path) if path else None,
        before_update=before_update,
        false_alarms=count_alarms(run_dir / "clean", settings.world_size),
        checks=count_checks(run_dir / "clean", settings.world_size),
        changes_no_bit=same_weights and clean.losses[:until] == unguarded.losses[:until] == guarded.losses[:until],
        replicas_parted=len(set(unguarded.digests)) > 1,
        losses={name: of.losses for name, of in reported.items()},
        validation={name: of.validation for name, of in reported.items()},
    )
    everywhere = len(raised) in (0, settings.world_size) and all(one == raised[0] for one in raised)
    return Report(**{**draft.__dict__, "problems": tuple(_problems(draft, everywhere))})


def count_alarms(run_dir: Path, world_size: int) -> int:
    """Incidents and verdicts that a guard left in its run directory, each step counted once."""
    files = RunFiles(run_dir)
    steps = {one["step"] for rank in range(world_size) for one in files.read_journal(rank) if one["kind"] == "verdict"}
    return max(len(steps), len(files.incidents()))


def count_checks(run_dir: Path, world_size: int) -> dict[str, int]:
    """By check, at how many steps it passed, summed over the ranks, as the ledgers in the journals say."""
    files = RunFiles(run_dir)
    passed: dict[str, int] = {}
    for rank in range(world_size):
        for one in files.read_journal(rank):
            if one["kind"] == "ledger" and one["outcome"] == "passed":
                passed[one["check"]] = passed.get(one["check"], 0) + one["last"] - one["first"] + 1
    return passed


def _problems(report: Report, everywhere: bool) -> Iterator[str]:
    """What did not go as it should have, in words."""
    settings, verdict, injected = report.settings, report.verdict, report.injected
    if report.false_alarms:
        yield f"{report.false_alarms} false alarm(s) in the run without a fault: see {report.run_dir / 'clean' / 'incidents'}"
    if not report.checks:
        yield "the guard verified nothing in the run without a fault"
    if not report.changes_no_bit:
        yield "the guarded and the unguarded run differ although nothing was wrong yet"
    if not everywhere:
        yield "the ranks did not all stop with the same verdict"
    if settings.fault == "none":
        if verdict is not None:
            yield f"nothing was injected, and yet the guard stopped: {verdict.headline()}"
        return
    if injected is None:
        yield "the fault did not strike"
    elif verdict is None:
        yield "the fault was not caught"
    else:
        yield from _verdict_problems(settings, injected, verdict, report.before_update)


def _verdict_problems(
    settings: Settings, injected: Event, verdict: Verdict, before_update: bool | None
) -> Iterator[str]:
    if verdict.step != injected["step"]:
        yield f"the fault struck at step {injected['step']} and was caught at step {verdict.step}"
    if settings.fault not in IN_MEMORY and not before_update:
        yield "the fault was caught only after the weights had been updated"
    expected: Sequence[int] = (injected["rank"],) if settings.nodes >= 3 else ()
    if list(verdict.ranks) != list(expected):
        named, meant = (", ".join(map(str, ranks)) or "nobody" for ranks in (verdict.ranks, expected))
        yield f"named {named}, should have named {meant}"
    if expected and settings.fault not in IN_MEMORY:
        persistence = "transient" if settings.transient else "persistent"
        if verdict.persistence != persistence:
            yield f"called {verdict.persistence}, was {persistence}"
