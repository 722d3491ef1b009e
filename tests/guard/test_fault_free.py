"""Many guarded steps without a fault: no alarm, and not one bit other than in the plain loop.

`BITWITNESS_EXHAUSTIVE=1` makes them two thousand, in all ways to train; test_workloads.py has a few steps of each by default.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.guard import models
from tests.guard.harness import Launch, Scenario, launch
from tests.guard.training import Plan, run, two_optimizers

pytestmark = pytest.mark.timeout(400)

EXHAUSTIVE = os.environ.get("BITWITNESS_EXHAUSTIVE") == "1"

FP16 = {"init_scale": 2.0**16, "growth_interval": 40 if EXHAUSTIVE else 8}
PLAIN = Plan(policy={"audit": "gradients"}, every_state=False)
PLANS = {
    "fp32": replace(PLAIN),
    "bf16 autocast": replace(PLAIN, loss=models.bf16_loss),
    "fp16 and scaler": replace(PLAIN, loss=models.fp16_loss, scaler=FP16),
    "accumulated": replace(PLAIN, accumulate=3),
    "fp16, scaler, accumulated": replace(PLAIN, loss=models.fp16_loss, scaler=FP16, accumulate=3),
    "views of buckets": replace(PLAIN, ddp={"gradient_as_bucket_view": True}),
    "views of buckets, accumulated": replace(PLAIN, ddp={"gradient_as_bucket_view": True}, accumulate=3),
    "batch norm, two optimizers": replace(PLAIN, model=models.BatchNorm, optimizers=two_optimizers),
    "transformer": replace(PLAIN, model=models.Transformer),
    "randomness": replace(PLAIN, loss=models.random_loss, own_generators=True),
}

STEPS = {
    3: {
        "fp32": 460,
        "bf16 autocast": 360,
        "fp16 and scaler": 360,
        "accumulated": 60,
        "fp16, scaler, accumulated": 50,
        "views of buckets": 240,
        "views of buckets, accumulated": 50,
        "batch norm, two optimizers": 100,
        "transformer": 50,
        "randomness": 90,
    },
    4: {"fp32": 40, "fp16 and scaler": 20, "accumulated": 12, "views of buckets, accumulated": 12, "transformer": 12},
    6: {"fp32": 30, "bf16 autocast": 20, "fp16, scaler, accumulated": 10, "views of buckets": 14, "randomness": 10},
}
if not EXHAUSTIVE:
    STEPS = {
        3: {
            "fp32": 20,
            "fp16 and scaler": 24,  # its scale falls, and grows after 8 steps
            "fp16, scaler, accumulated": 6,
            "views of buckets, accumulated": 6,
            "randomness": 6,
        },
        6: {"fp32": 6},
    }
RUNS = [(ranks, name) for ranks, of_ranks in STEPS.items() for name in of_ranks]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Launch]:
    """For each number of ranks every plan, guarded and plain."""
    done = {}
    for ranks, of_ranks in STEPS.items():
        scenarios = []
        for name, steps in of_ranks.items():
            plan = replace(PLANS[name], steps=steps)
            scenarios.append(Scenario(name, run, plan, per_node=max(1, ranks // 3)))
            scenarios.append(Scenario(f"plain {name}", run, replace(plan, guarded=False)))
        done[ranks] = launch(scenarios, ranks, tmp_path_factory.mktemp(f"ranks-{ranks}"), deadline=300)
    return done


@pytest.mark.parametrize(("ranks", "name"), RUNS)
def test_no_alarm(launches: dict[int, Launch], ranks: int, name: str) -> None:
    done = launches[ranks]
    for seen in done.seen(name):
        assert seen["error"] is None
        assert seen["level"] == "gradients"
        assert len(seen["updated"]) == STEPS[ranks][name]
        assert all(seen["updated"])
    assert not list((done.folder(name) / "run" / "incidents").iterdir())


@pytest.mark.parametrize(("ranks", "name"), RUNS)
def test_ends_bit_identical(launches: dict[int, Launch], ranks: int, name: str) -> None:
    """Parameters, buffers, optimizer state, loss scale; every loss on the way; and what every generator draws next."""
    guarded, plain = launches[ranks].seen(name), launches[ranks].seen(f"plain {name}")
    for own, reference in zip(guarded, plain, strict=True):
        assert own["losses"] == reference["losses"]
        assert own["draws"] == reference["draws"]
        assert own["final"] == reference["final"]
    assert len(set(guarded[0]["losses"])) > STEPS[ranks][name] // 2, "nothing is trained, so nothing is compared"


def test_that_many_steps_in_all(launches: dict[int, Launch]) -> None:
    steps = sum(len(launches[ranks].seen(name)[0]["updated"]) for ranks, name in RUNS)
    least = 2000 if EXHAUSTIVE else 60
    assert steps == sum(steps for of_ranks in STEPS.values() for steps in of_ranks.values()) >= least
