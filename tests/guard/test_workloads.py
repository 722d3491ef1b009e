"""The ways in which people train: each guarded without an alarm, bit for bit like the plain loop, and each still guarded.

One run tells both: a fault strikes in its last step. What combines two of them, or is nearly another, is tried with
`BITWITNESS_EXHAUSTIVE=1`.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from tests.guard import models
from tests.guard.faults import Fault
from tests.guard.harness import Launch, Scenario, launch
from tests.guard.training import Plan, averaging_hook, fp16_hook, power_sgd, run, two_optimizers

pytestmark = pytest.mark.timeout(300)

STEP = 3
FAULT = Fault("matmul", 1, STEP, True, "training")
AUTO = Plan(steps=STEP + 1, policy={"audit": "auto"})


VIEW = {"gradient_as_bucket_view": True}
WORKLOADS = {
    "auto": AUTO,
    "gradients": replace(AUTO, policy={"audit": "gradients"}),
    "loss": replace(AUTO, policy={"audit": "loss"}),
    "off": replace(AUTO, policy={"audit": "off"}),
    "phases": replace(AUTO, drive="phases"),
    "no clipping": replace(AUTO, clip=None),
    "batch rebuilt": replace(AUTO, rebuild=True),
    "nested batch": replace(AUTO, batches=models.nested, loss=models.nested_loss),
    "nested batch rebuilt": replace(AUTO, batches=models.nested, loss=models.nested_loss, rebuild=True),
    "every source of randomness": replace(AUTO, loss=models.random_loss, own_generators=True),
    "two optimizers": replace(AUTO, optimizers=two_optimizers),
    "batch norm": replace(AUTO, model=models.BatchNorm),
    "batch norm, not broadcast": replace(AUTO, model=models.BatchNorm, ddp={"broadcast_buffers": False}),
    "batch norm, accumulated": replace(AUTO, model=models.BatchNorm, accumulate=3),
    "batch norm, accumulated, not broadcast": replace(
        AUTO, model=models.BatchNorm, accumulate=2, ddp={"broadcast_buffers": False}
    ),
    "frozen and unused": replace(AUTO, model=models.Frozen, ddp={"find_unused_parameters": True}),
    "frozen, unused, accumulated": replace(
        AUTO, model=models.Frozen, ddp={"find_unused_parameters": True}, accumulate=2
    ),
    "allreduce_hook": replace(AUTO, hook=averaging_hook),
    "fp16_compress_hook": replace(AUTO, hook=fp16_hook),
    "PowerSGD": replace(AUTO, hook=power_sgd),
    "accumulated": replace(AUTO, accumulate=3),
    "accumulated by phases": replace(AUTO, accumulate=3, drive="phases"),
    "fp16 and scaler": replace(AUTO, loss=models.fp16_loss, scaler={"init_scale": 1024.0}),
    "fp16 and scaler by phases": replace(AUTO, loss=models.fp16_loss, scaler={"init_scale": 1024.0}, drive="phases"),
    "fp16, scaler, accumulated": replace(AUTO, loss=models.fp16_loss, scaler={"init_scale": 1024.0}, accumulate=2),
    "scaler switched off": replace(AUTO, scaler={"enabled": False}),
    "bf16": replace(AUTO, loss=models.bf16_loss),
    "bf16 around the loop": replace(AUTO, autocast_outside=True),
    "views of buckets": replace(AUTO, ddp=VIEW),
    "views of buckets, kept": replace(AUTO, ddp=VIEW, set_to_none=False),
    "views of buckets, accumulated": replace(AUTO, ddp=VIEW, accumulate=3),
    "gradients kept": replace(AUTO, set_to_none=False),
    "static graph": replace(AUTO, ddp={"static_graph": True}),
    "small buckets": replace(AUTO, ddp={"bucket_cap_mb": 0.001}),
    "convolutions": replace(AUTO, model=models.Convolutional, batches=models.squares),
    "transformer": replace(AUTO, model=models.Transformer),
    "activation checkpointing": replace(AUTO, model=models.Checkpointed),
    "reentrant checkpointing": replace(AUTO, model=models.Reentrant),
    "hooks on parameters": replace(AUTO, model=models.Hooked),
}
COMBINED = {
    "gradients",
    "batch norm, not broadcast",
    "batch norm, accumulated",
    "fp16, scaler, accumulated",
    "bf16 around the loop",
    "nested batch rebuilt",
    "batch norm, accumulated, not broadcast",
    "frozen, unused, accumulated",
    "accumulated by phases",
    "fp16 and scaler by phases",
    "views of buckets, kept",
    "views of buckets, accumulated",
    "gradients kept",
    "small buckets",
    "static graph",
    "hooks on parameters",
}
if os.environ.get("BITWITNESS_EXHAUSTIVE") != "1":
    WORKLOADS = {name: plan for name, plan in WORKLOADS.items() if name not in COMBINED}
DETERMINISTIC = replace(AUTO, policy={"audit": "auto", "deterministic_audits": True})
UNTIDY = replace(AUTO, model=models.Untidy)
LEVELS = {"loss": "loss", "reentrant checkpointing": "loss", "off": "off"}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Three nodes; every workload plain, and guarded with a fault at the end."""
    scenarios = []
    for name, plan in WORKLOADS.items():
        scenarios.append(Scenario(f"{name}/plain", run, replace(plan, guarded=False)))
        scenarios.append(Scenario(f"{name}/guarded", run, plan.with_faults(FAULT)))
    scenarios += [
        Scenario("deterministic", run, DETERMINISTIC.with_faults(FAULT)),
        Scenario("untidy", run, UNTIDY.with_faults(FAULT)),
        Scenario("untidy gradients", run, replace(UNTIDY, policy={"audit": "gradients"})),
    ]
    return launch(scenarios, 3, tmp_path_factory.mktemp("workloads"), deadline=240)


@pytest.mark.parametrize("name", WORKLOADS)
def test_guarding_changes_no_bit(done: Launch, name: str) -> None:
    plain, guarded = done.seen(f"{name}/plain"), done.seen(f"{name}/guarded")
    right = STEP * WORKLOADS[name].accumulate
    for own, reference in zip(guarded, plain, strict=True):
        assert name == "off" or own["error"]["step"] == STEP, "an alarm without a fault"
        assert own["states"][: STEP + 1] == reference["states"][: STEP + 1]
        assert own["losses"][:right] == reference["losses"][:right]
        assert own["draws"] == reference["draws"], "of the step that was hit as well"
    assert len({*plain[0]["states"]}) == STEP + 2, "nothing is trained, so nothing is compared"


@pytest.mark.parametrize("name", WORKLOADS)
def test_audits_as_strictly_as_the_workload_allows(done: Launch, name: str) -> None:
    assert {seen["level"] for seen in done.seen(f"{name}/guarded")} == {LEVELS.get(name, "gradients")}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_fault_is_caught(done: Launch, name: str) -> None:
    """Where replays are on, in the step in which it struck and on the right rank."""
    seen = done.seen(f"{name}/guarded")
    assert [of_rank["struck"] > 0 for of_rank in seen] == [False, True, False]
    if name == "off":
        assert [of_rank["error"] for of_rank in seen] == [None] * 3
        assert any("replays are off" in limit for limit in seen[0]["limits"])
        return
    verdicts = [of_rank["error"]["verdict"] for of_rank in seen]
    assert verdicts[0] == verdicts[1] == verdicts[2]
    assert (verdicts[0]["ranks"], verdicts[0]["step"], verdicts[0]["persistence"]) == ([1], STEP, "transient")


def test_deterministic_audits(done: Launch) -> None:
    verdict = done.seen("deterministic")[0]["error"]["verdict"]
    assert (verdict["ranks"], verdict["step"]) == ([1], STEP)
    assert not torch.are_deterministic_algorithms_enabled()


def test_auto_falls_to_the_loss_where_gradients_do_not_repeat(done: Launch) -> None:
    seen = done.seen("untidy")
    assert {of_rank["level"] for of_rank in seen} == {"loss"}
    (warning,) = [line for line in seen[0]["logged"] if "audits compare the loss only" in line]
    assert "head.bias" in warning
    assert "deterministic_audits=True" in warning
    verdict = seen[0]["error"]["verdict"]
    assert (verdict["ranks"], verdict["step"]) == ([1], STEP)


def test_gradients_asked_for_by_name_must_repeat(done: Launch) -> None:
    for seen in done.seen("untidy gradients"):
        assert seen["error"]["type"] == "WorkloadError"
        assert seen["error"]["step"] == 0
        assert "head.bias" in seen["error"]["message"]
        assert 'Policy(audit="loss")' in seen["error"]["message"]
