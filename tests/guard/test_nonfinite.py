"""NaN and Inf: triaged before anyone is blamed. What the user's own code makes names nobody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bitwitness
from bitwitness.runfiles import RunFiles
from tests.guard import models
from tests.guard.faults import Fault
from tests.guard.harness import Launch, Scenario, Seen, launch
from tests.guard.training import Plan, fp16_hook, run

pytestmark = pytest.mark.timeout(200)

STEP = 2
PLAN = Plan(steps=4, loss=models.flawed_loss, batches=models.Flawed("none"), policy={"audit": "auto"})
FLAWS = ("log of zero", "all-masked softmax", "bad sample", "root of zero")
OWN_DOING = {
    **{flaw: replace(PLAN, batches=models.Flawed(flaw)) for flaw in FLAWS},
    "on every rank": replace(PLAN, batches=models.Flawed("log of zero", ranks=(0, 1, 2))),
    "second micro-batch": replace(PLAN, batches=models.Flawed("root of zero", micro=1), accumulate=3),
    "loss audits": replace(PLAN, batches=models.Flawed("root of zero"), policy={"audit": "loss"}),
    "audits rarely due": replace(
        PLAN, batches=models.Flawed("bad sample"), policy={"audit_every": 50, "check_every": 50}
    ),
    "batch rebuilt": replace(PLAN, batches=models.Flawed("bad sample"), rebuild=True),
    "batch norm": replace(PLAN, batches=models.Flawed("bad sample"), model=models.BatchNorm),
}
SCALED = replace(
    PLAN,
    loss=models.flawed_fp16_loss,
    batches=models.Flawed("none"),
    scaler={"init_scale": 2.0**10},
    policy={"audit_every": 1000, "check_every": 1000},
    steps=8,
)
LONE = replace(SCALED, batches=models.Flawed("bad sample", steps=(2, 3, 4)))
TWICE = replace(SCALED, batches=models.Flawed("bad sample", steps=(2, 3)))
TOGETHER = replace(SCALED, batches=models.Flawed("bad sample", ranks=(0, 1, 2), steps=(2, 3, 4)))
SUM = replace(PLAN, batches=models.Flawed("too large", ranks=(0, 1, 2)), hook=fp16_hook)
REENTRANT = replace(PLAN, batches=models.Flawed("bad sample"), model=models.Reentrant)
CARELESS = replace(SCALED, scaler={"init_scale": 2.0**28}, policy={"audit": "gradients"}, steps=16)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Three nodes."""
    scenarios = [Scenario(name, run, plan) for name, plan in OWN_DOING.items()]
    scenarios += [
        Scenario("sum overflows", run, SUM),
        Scenario("reentrant checkpointing", run, REENTRANT),
        Scenario(
            "reentrant, device", run, replace(REENTRANT, batches=PLAN.batches, faults=(Fault("nan gradient", 2, STEP),))
        ),
        Scenario("device", run, PLAN.with_faults(Fault("nan gradient", 2, STEP), accumulate=3)),
        Scenario(
            "device, loss audits", run, PLAN.with_faults(Fault("nan gradient", 2, STEP, True), policy={"audit": "loss"})
        ),
        Scenario("device, no audits", run, PLAN.with_faults(Fault("nan gradient", 2, STEP), policy={"audit": "off"})),
        Scenario("lone overflows", run, LONE),
        Scenario("lone overflows, plain", run, replace(LONE, guarded=False)),
        Scenario("two lone overflows", run, TWICE),
        Scenario("overflows together", run, TOGETHER),
        Scenario("lone overflows of a device", run, SCALED.with_faults(Fault("nan gradient", 2, STEP, True))),
        Scenario("scale too large", run, CARELESS),
        Scenario("scale too large, plain", run, replace(CARELESS, guarded=False)),
    ]
    return launch(scenarios, 3, tmp_path_factory.mktemp("nonfinite"))


def verdict_of(seen: list[Seen]) -> Seen:
    errors = [of_rank["error"] for of_rank in seen]
    assert [error and error["type"] for error in errors] == ["CorruptionDetected"] * 3
    assert all(error["verdict"] == errors[0]["verdict"] and error["readable"] for error in errors)
    found: Seen = errors[0]["verdict"]
    return found


@pytest.mark.parametrize("name", OWN_DOING)
def test_own_doing_names_nobody(done: Launch, name: str) -> None:
    seen = done.seen(name)
    verdict = verdict_of(seen)
    assert (verdict["status"], verdict["kind"], verdict["ranks"]) == ("unattributed", "software", [])
    assert verdict["step"] == STEP
    assert "software or data, not a device" in verdict["reason"]
    assert verdict["candidates"] == ([0, 1, 2] if name == "on every rank" else [1])
    assert all(of_rank["gradients cleared"] for of_rank in seen)
    moved = [of_rank["final"] != of_rank["states"][STEP] for of_rank in seen]
    assert moved == [name == "batch norm"] * 3  # running statistics are updated by the forward


@pytest.mark.parametrize("name", OWN_DOING)
def test_micro_batches_are_saved_and_reproduce_it(done: Launch, name: str) -> None:
    incident = Path(done.seen(name)[0]["error"]["incident"])
    saved = torch.load(incident / "micro-batches-rank-00001.pt", weights_only=False)
    plan = OWN_DOING[name]
    assert (saved["rank"], saved["step"], len(saved["micro_batches"])) == (1, STEP, plan.accumulate)
    model = plan.model()
    found = []
    for micro in saved["micro_batches"]:
        torch.set_rng_state(micro["random"]["torch_cpu"])
        loss = plan.loss(model, micro["batch"])
        loss.backward()
        largest = [float(parameter.grad.abs().max()) for parameter in model.parameters() if parameter.grad is not None]
        found.append(all(value < float("inf") for value in (loss.item(), *largest)))
        model.zero_grad()
    assert isinstance(plan.batches, models.Flawed)
    assert found == [index != plan.batches.micro for index in range(plan.accumulate)]


def test_a_sum_that_overflows_is_software(done: Launch) -> None:
    verdict = verdict_of(done.seen("sum overflows"))
    assert (verdict["status"], verdict["kind"], verdict["candidates"]) == ("unattributed", "software", [])
    assert "their sum overflows" in verdict["reason"]


@pytest.mark.parametrize("name", ["device", "device, loss audits"])
def test_nan_of_a_device_names_it(done: Launch, name: str) -> None:
    verdict = verdict_of(done.seen(name))
    assert (verdict["ranks"], verdict["kind"], verdict["step"]) == ([2], "numeric", STEP)
    assert verdict["persistence"] == ("transient" if name == "device" else "persistent")


def test_without_audits_nobody_can_tell(done: Launch) -> None:
    verdict = verdict_of(done.seen("device, no audits"))
    assert (verdict["status"], verdict["candidates"]) == ("unattributed", [2])
    assert "no replay could tell" in verdict["reason"]


@pytest.mark.parametrize("name", ["reentrant checkpointing", "reentrant, device"])
def test_where_gradients_cannot_be_replayed_nobody_can_tell(done: Launch, name: str) -> None:
    verdict = verdict_of(done.seen(name))
    assert (verdict["status"], verdict["ranks"], verdict["step"]) == ("unattributed", [], STEP)
    assert verdict["candidates"] == [2 if name == "reentrant, device" else 1]


def audited(done: Launch, name: str) -> dict[int, str]:
    """The steps that were audited, with the outcome, from the ledger of rank 0."""
    files = RunFiles(done.folder(name) / "run")
    entries = [one for one in files.read_journal(0) if one["kind"] == "ledger" and one["check"] == "replay"]
    return {step: entry["outcome"] for entry in entries for step in range(entry["first"], entry["last"] + 1)}


def test_an_overflow_that_the_scaler_skips_is_no_alarm(done: Launch) -> None:
    guarded, plain = done.seen("scale too large"), done.seen("scale too large, plain")
    for own, reference in zip(guarded, plain, strict=True):
        assert own["error"] is None
        assert own["states"] == reference["states"]
    assert len(set(guarded[0]["losses"])) == CARELESS.steps
    assert len({*guarded[0]["states"]}) > CARELESS.steps, "each step lowers the scale, or updates the weights"
    assert guarded[0]["updated"][-1], "in the end it trains"
    ledger = [
        one for one in RunFiles(done.folder("scale too large") / "run").read_journal(0) if one["kind"] == "ledger"
    ]
    skipped = [one for one in ledger if one["check"] == "numerics" and one["outcome"] == "unverified"]
    assert len(skipped) > 5
    assert {one["reason"] for one in skipped} == {"gradients overflowed; the GradScaler skips this step"}


def test_three_lone_overflows_force_an_audit(done: Launch) -> None:
    """The schedule has none: the step after the third is audited, and where it was data nothing is wrong."""
    for own, reference in zip(done.seen("lone overflows"), done.seen("lone overflows, plain"), strict=True):
        assert own["error"] is None
        assert own["states"] == reference["states"]
    assert audited(done, "lone overflows") == {0: "passed", 5: "passed"}  # the first step is always audited
    assert audited(done, "two lone overflows") == audited(done, "overflows together") == {0: "passed"}
    assert not [
        seen["error"]
        for name in ("two lone overflows", "overflows together")
        for seen in done.seen(name)
        if seen["error"]
    ]


def test_lone_overflows_of_a_device_name_it(done: Launch) -> None:
    verdict = verdict_of(done.seen("lone overflows of a device"))
    assert (verdict["ranks"], verdict["kind"], verdict["persistence"]) == ([2], "numeric", "persistent")
    assert verdict["step"] == STEP + 3
    incident = bitwitness.read_incident(done.seen("lone overflows of a device")[0]["error"]["incident"])
    assert incident.verdict.ranks == (2,)
