"""What came of a demo, from the files that it left: nothing in a summary is there because it was expected.

The ranks' events, the guard's journals, incidents and labels, and the supervisor's log are read when all is over; what they
say is compared with what should have come of it (`plan.expected`), and each difference is a sentence. A recorded run
directory gives the same report again.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bitwitness.errors import BitwitnessError
from bitwitness.evidence import Verdict
from bitwitness.examples.plan import IN_MEMORY, TRAININGS, Event, Expected, Settings, events_file, expected
from bitwitness.examples.report_recovery import Recovery, read_recovery, utc
from bitwitness.runfiles import RunFiles

PAGE = "report.html"


@dataclass
class Reported:
    """What the ranks reported of one training.

    Attributes:
        attempts: by generation of the job, the mean loss over all ranks by step.
        stops: by generation, the last word of each rank that the guard stopped.
        ends: the last word of each rank that came to the end.
        landed: where the fault struck first, if it did.
        resumed: the steps at which later generations went on.
    """

    attempts: dict[int, dict[int, float]] = field(default_factory=dict)
    stops: dict[int, dict[int, Event]] = field(default_factory=dict)
    ends: dict[int, Event] = field(default_factory=dict)
    landed: Event | None = None
    resumed: dict[int, int] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        """By step; of a step that was done again, as it came out the last time."""
        merged: dict[int, float] = {}
        for generation in sorted(self.attempts):
            merged |= self.attempts[generation]
        return [merged[step] for step in sorted(merged)]

    @property
    def first_losses(self) -> list[float]:
        """By step, as far as the first generation came."""
        first = self.attempts.get(min(self.attempts, default=0), {})
        return [first[step] for step in sorted(first)]

    @property
    def validation(self) -> float | None:
        """Loss of the final weights on text that nobody trained on; None where there are none."""
        return float(self.ends[0]["validation"]) if 0 in self.ends else None

    @property
    def digests(self) -> list[str]:
        """Of each rank's final weights."""
        return [str(self.ends[rank]["digest"]) for rank in sorted(self.ends)]

    def note(self, rank: int, event: Event) -> None:
        """Take note of one event."""
        generation = int(event["generation"])
        match event["event"]:
            case "step":
                self.attempts.setdefault(generation, {})[int(event["step"])] = float(event["loss"])
            case "stopped":
                self.stops.setdefault(generation, {})[rank] = event
            case "end":
                self.ends[rank] = event
            case "resumed" if rank == 0:
                self.resumed[generation] = int(event["step"])
            case "landed" if self.landed is None:
                self.landed = event


def read_events(run_dir: Path, world_size: int) -> dict[str, Reported]:
    """What the ranks reported, by training."""
    reported: dict[str, Reported] = {training.name: Reported() for training in TRAININGS}
    for rank in range(world_size):
        path = events_file(run_dir, rank)
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            with suppress(ValueError):  # what a rank that was killed has left of a line
                event = json.loads(line)
                reported[event["training"]].note(rank, event)
    return reported


@dataclass(frozen=True)
class Report:
    """What came of a demo. Each value is measured; `problems` is empty if all went as it should.

    Attributes:
        reported: by training, what its ranks reported.
        recovery: what supervisor and guard left of the supervised training.
        verdict: of its first generation that was stopped, as every rank raised it, or None.
        everywhere: whether all of its ranks raised the same.
        incident: its directory.
        before_update: whether the guard stopped before the update of the step that was hit.
        false_alarms: incidents and verdicts of the clean guarded run.
        checks: by name, at how many steps each check passed in the clean guarded run, summed over ranks.
        changes_no_bit: whether the guarded runs equal the unguarded one bit for bit as long as there is no fault.
        problems: what did not go as it should, each a sentence.
    """

    settings: Settings
    run_dir: Path
    seconds: float
    reported: Mapping[str, Reported]
    recovery: Recovery
    verdict: Verdict | None
    everywhere: bool
    incident: Path | None
    before_update: bool | None
    false_alarms: int
    checks: dict[str, int]
    changes_no_bit: bool
    problems: tuple[str, ...] = ()

    @property
    def injected(self) -> Event | None:
        """The event of the fault's first strike in the guarded run, or None."""
        return self.reported["guarded"].landed

    @property
    def environment(self) -> str:
        """What hits another job by the same fault, to be put before its command; empty if nothing was hit."""
        if self.injected is None:
            return ""
        seed = f"BITWITNESS_FAULT_SEED={self.settings.seed} " if self.settings.seed else ""
        return f"{seed}BITWITNESS_FAULT={shlex.quote(str(self.injected['fault']))}"

    @property
    def losses(self) -> dict[str, list[float]]:
        """By training and step."""
        return {name: of.losses for name, of in self.reported.items()}

    @property
    def validation(self) -> dict[str, float | None]:
        """Loss of the final weights on text that was held back, by training; None where it did not finish."""
        return {name: of.validation for name, of in self.reported.items()}

    @property
    def replicas_parted(self) -> bool:
        """Whether the ranks of the unguarded run ended with different weights."""
        return len(set(self.reported["unguarded"].digests)) > 1

    @property
    def final_weights_equal(self) -> bool:
        """Whether every rank of the supervised run ended with the very bits of the run that was never hit."""
        clean, guarded = self.reported["clean"].digests, self.reported["guarded"].digests
        return len(guarded) == self.settings.world_size and guarded == clean and len(set(clean)) == 1

    @property
    def right(self) -> bool | None:
        """Whether exactly the rank that was hit is named; None where nobody should be named."""
        if self.injected is None or self.settings.nodes < 3:
            return None
        return self.verdict is not None and self.verdict.ranks == (self.injected["rank"],)

    @property
    def page(self) -> Path:
        """The report for a browser."""
        return self.run_dir / PAGE

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values; numbers that JSON lacks are strings, e.g. "nan"."""
        settings, verdict, injected, recovery = self.settings, self.verdict, self.injected, self.recovery
        return {
            "fault": settings.fault,
            "transient": settings.transient,
            "seed": settings.seed,
            "steps": settings.steps,
            "nodes": settings.nodes,
            "ranks_per_node": settings.ranks_per_node,
            "injected_fault": injected["fault"] if injected else None,
            "injected_step": injected["step"] if injected else None,
            "injected_where": injected["where"] if injected else None,
            "injected_change": f"{injected['before']} -> {injected['after']}" if injected else None,
            "injected_elements": injected["changed"] if injected else 0,
            "true_rank": injected["rank"] if injected else None,
            "true_node": settings.node if injected else None,
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
            "resumed_from_step": recovery.resumed_from,
            "final_weights_equal_clean_run": self.final_weights_equal,
            "generations": len(recovery.generations),
            "quarantined": {"devices": sorted(recovery.devices), "nodes": sorted(recovery.nodes)},
            "recovery": [{"time": utc(moment.time), "what": moment.what} for moment in recovery.timeline],
            "checkpoints": [saved.to_json() for saved in recovery.checkpoints],
            "run_exit_code": recovery.exit_code,
            "false_alarms": self.false_alarms,
            "checks_passed": self.checks,
            "guard_changes_no_bit": self.changes_no_bit,
            "unguarded_replicas_parted": self.replicas_parted,
            "losses": {name: [_json_number(loss) for loss in losses] for name, losses in self.losses.items()},
            "validation_loss": {name: _json_number(loss) for name, loss in self.validation.items()},
            "incident": str(self.incident) if self.incident else None,
            "run_dir": str(self.run_dir),
            "report": str(self.page),
            "seconds": round(self.seconds, 2),
            "ok": not self.problems,
            "problems": list(self.problems),
        }


def _json_number(value: float | None) -> float | str | None:
    return value if value is None or abs(value) < float("inf") else str(value)


# Conclusions ---------------------------------------------------------------------------------------------------------


def conclude(settings: Settings, run_dir: Path, exit_code: int | None, seconds: float) -> Report:
    """What follows from the files of a demo.

    Args:
        settings: what was asked for.
        run_dir: where the files are.
        exit_code: of `bitwitness run`.
        seconds: that all of it took.

    Raises:
        BitwitnessError: a training that should have come to its end did not.
        RunFilesError: a file of the run is damaged.
    """
    reported = read_events(run_dir, settings.world_size)
    for training in TRAININGS:
        ranks = sorted(reported[training.name].ends)
        if not training.supervised and ranks != list(range(settings.world_size)):
            raise BitwitnessError(f"only ranks {ranks} finished the {training.name} run: look at {run_dir / 'logs'}")
    guarded = reported["guarded"]
    words = guarded.stops[min(guarded.stops)] if guarded.stops else {}
    raised = [word["verdict"] for _, word in sorted(words.items())]
    path = next((word["incident"] for _, word in sorted(words.items()) if word["incident"]), "")
    before_update = None
    if words and guarded.landed is not None:
        before_update = all(int(word["updates"]) <= int(guarded.landed["step"]) for word in words.values())
    draft = Report(
        settings=settings,
        run_dir=run_dir,
        seconds=seconds,
        reported=reported,
        recovery=read_recovery(settings, run_dir, exit_code, guarded.landed),
        verdict=Verdict.from_json(raised[0]) if raised else None,
        everywhere=not raised or (len(raised) == settings.world_size and all(one == raised[0] for one in raised)),
        incident=Path(path) if path else None,
        before_update=before_update,
        false_alarms=count_alarms(run_dir / "clean", settings.world_size),
        checks=count_checks(run_dir / "clean", settings.world_size),
        changes_no_bit=_changes_no_bit(settings, reported),
    )
    return replace(draft, problems=tuple(problems(draft, expected(settings))))


def _changes_no_bit(settings: Settings, reported: Mapping[str, Reported]) -> bool:
    clean, unguarded, guarded = (reported[training.name] for training in TRAININGS)
    until = guarded.landed["step"] if guarded.landed else settings.steps
    same_weights = guarded.landed is not None or clean.digests == unguarded.digests == guarded.digests
    return same_weights and clean.losses[:until] == unguarded.losses[:until] == guarded.first_losses[:until]


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


def problems(report: Report, should: Expected) -> Iterator[str]:
    """What did not go as it should have, in words."""
    settings, verdict = report.settings, report.verdict
    if report.false_alarms:
        yield f"{report.false_alarms} false alarm(s) in the run without a fault: see {report.run_dir / 'clean' / 'incidents'}"
    if not report.checks:
        yield "the guard verified nothing in the run without a fault"
    if not report.changes_no_bit:
        yield "the guarded and the unguarded run differ although nothing was wrong yet"
    if not report.everywhere:
        yield "the ranks did not all stop with the same verdict"
    if settings.fault == "none":
        if verdict is not None:
            yield f"nothing was injected, and yet the guard stopped: {verdict.headline()}"
    elif report.injected is None:
        yield "the fault did not strike"
    elif verdict is None:
        yield "the fault was not caught"
    else:
        yield from _verdict_problems(report, report.injected, verdict, should)
    yield from _recovery_problems(report, should)


def _verdict_problems(report: Report, injected: Event, verdict: Verdict, should: Expected) -> Iterator[str]:
    if verdict.step != injected["step"]:
        yield f"the fault struck at step {injected['step']} and was caught at step {verdict.step}"
    if should.before_update and not report.before_update:
        yield "the fault was caught only after the weights had been updated"
    if verdict.ranks != should.ranks:
        named, meant = (", ".join(map(str, ranks)) or "nobody" for ranks in (verdict.ranks, should.ranks))
        yield f"named {named}, should have named {meant}"
    elif should.ranks and report.settings.fault not in IN_MEMORY and verdict.persistence != should.persistence:
        yield f"called {verdict.persistence}, was {should.persistence}"


def _recovery_problems(report: Report, should: Expected) -> Iterator[str]:
    recovery, node = report.recovery, report.settings.node
    if recovery.exit_code != should.exit_code:
        why = f" ({recovery.reason})" if recovery.reason else ""
        log = report.run_dir / "logs" / "run.log"
        yield f"bitwitness run ended with exit code {recovery.exit_code}{why}, not with {should.exit_code}: look at {log}"
    if len(recovery.generations) != should.generations:
        yield f"the job was started {len(recovery.generations)} time(s), not {should.generations}"
    if recovery.resumed_from != should.resumed_from:
        went, meant = (_from_step(step) for step in (recovery.resumed_from, should.resumed_from))
        yield f"the job went on {went}, not {meant}"
    if sorted(recovery.devices) != sorted(should.quarantined) or recovery.nodes:
        put, meant = (
            ", ".join(names) or "nothing" for names in ([*recovery.devices, *recovery.nodes], should.quarantined)
        )
        yield f"in quarantine: {put}; should be: {meant}"
    last = recovery.generations[-1] if recovery.generations else ()
    if should.quarantined and node in last:
        yield f"{node} trained again although its device is in quarantine"
    for saved in recovery.checkpoints:
        if not saved.verified:
            yield f"checkpoint {saved.name} is not a verified one: {saved.refused}"
    if should.exit_code == 0 and not report.final_weights_equal:
        yield "the final weights are not those of the run that was never hit"


def _from_step(step: int | None) -> str:
    return "from the beginning" if step is None else f"from the checkpoint of step {step}"
