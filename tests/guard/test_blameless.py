"""What a hostile reader found: states of the program, and agreement on NaN, that had a healthy rank named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from bitwitness import BitwitnessError
from bitwitness.runfiles import RunFiles
from tests.guard import models
from tests.guard.harness import Launch, Rank, Scenario, Seen, launch
from tests.guard.training import Plan, TrainingRun, described

pytestmark = pytest.mark.timeout(200)


@dataclass(frozen=True)
class Case:
    """What the loop does beside training: `before` a step's forward, or `between` its backward and the check."""

    name: str
    before: str = ""
    between: str = ""
    loss: Callable[[Any, Any], Tensor] = models.token_loss


def act(what: str, training: TrainingRun, rank: int, step: int) -> None:
    """Do what a case says, on some ranks, in step 2."""
    module, weight = training.module, next(training.module.parameters())
    ranks, _, deed = what.partition(" ")
    if not what or step != 2 or str(rank) not in ranks:
        return
    with torch.no_grad():
        if deed in ("nan", "inf"):
            weight.view(-1)[3] = float(deed)
        elif deed == "eval":
            module.eval()
        elif deed == "precision":
            torch.set_float32_matmul_precision("medium")
        elif deed == "freeze":
            list(module.parameters())[-1].requires_grad_(False)
        elif deed == "refill":
            LAST_BATCH[0]["x"].add_(1).remainder_(7)


LAST_BATCH: list[Any] = [None]


def loss_of_rank_0(model: Any, batch: Any) -> Tensor:
    """A program that treats one rank apart."""
    loss = models.token_loss(model, batch)
    return loss * 1.01 if torch.distributed.get_rank() == 0 else loss


CASES = [
    Case("two nan", between="02 nan"),
    Case("two inf", between="02 inf"),
    Case("one nan", between="1 nan"),
    Case("one nan before", before="1 nan"),
    Case("rank 0 evaluates", before="0 eval"),
    Case("rank 0 evaluates between", between="0 eval"),
    Case("all evaluate between", between="012 eval"),
    Case("precision", before="0 precision"),
    Case("rank in loss", loss=loss_of_rank_0),
    Case("batch refilled", between="2 refill"),
    Case("freeze", before="012 freeze"),
]


def train(place: Rank, case: Case) -> Seen:
    """Four steps, with the deed in the third."""
    plan = Plan(ddp={"find_unused_parameters": True}, loss=case.loss)
    training = TrainingRun(place, plan)
    seen: Seen = {"error": None, "steps": 0}
    try:
        with training.make_guard() as guard:
            for step in range(plan.steps):
                act(case.before, training, place.rank, step)
                LAST_BATCH[0] = models.tokens(step, place.rank, 0)
                guard.forward_backward(LAST_BATCH[0])
                act(case.between, training, place.rank, step)
                guard.step(max_grad_norm=1.0)
                seen["steps"] += 1
    except BitwitnessError as error:
        seen["error"] = described(error, seen["steps"])
    finally:
        torch.set_float32_matmul_precision("highest")
    return seen


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    scenarios = [Scenario(case.name, train, case) for case in CASES]
    return launch(scenarios, 3, tmp_path_factory.mktemp("blameless"), deadline=120)


def verdicts(done: Launch, name: str) -> list[dict[str, Any]]:
    return [seen["error"]["verdict"] for seen in done.seen(name)]


@pytest.mark.parametrize("name", ["two nan", "two inf"])
def test_two_ranks_that_agree_on_nan_do_not_outvote_the_third(done: Launch, name: str) -> None:
    for verdict in verdicts(done, name):
        assert (verdict["status"], verdict["ranks"]) == ("unattributed", [])


@pytest.mark.parametrize("name", ["one nan", "one nan before"])
def test_one_rank_with_nan_in_a_weight_is_named_for_its_memory(done: Launch, name: str) -> None:
    for verdict in verdicts(done, name):
        assert (verdict["ranks"], verdict["kind"]) == ([1], "memory")
        assert "network" not in verdict["reason"]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("rank 0 evaluates", "eval mode"),
        ("rank 0 evaluates between", "eval mode"),
        ("all evaluate between", "settings"),
        ("precision", "float32 matmul precision"),
    ],
)
def test_unlike_settings_are_a_gap_and_no_alarm(done: Launch, name: str, setting: str) -> None:
    for rank, seen in enumerate(done.seen(name)):
        assert (seen["error"], seen["steps"]) == (None, 4)
        journal = list(RunFiles(done.folder(name) / "run").read_journal(rank))
        gaps = [one for one in journal if one["kind"] == "ledger" and one["outcome"] == "unverified"]
        assert gaps, "an audit between unlike settings was called verified"
        assert setting in gaps[0]["reason"]


def test_a_loss_that_depends_on_the_rank_is_software(done: Launch) -> None:
    for seen in done.seen("rank in loss"):
        verdict = seen["error"]["verdict"]
        assert (verdict["status"], verdict["kind"], verdict["candidates"]) == ("unattributed", "software", [0])
        assert seen["steps"] == 0


def test_a_batch_that_changes_after_its_forward_names_nobody(done: Launch) -> None:
    for verdict in verdicts(done, "batch refilled"):
        assert (verdict["status"], verdict["kind"], verdict["candidates"]) == ("unattributed", "input", [2])
        assert "rebuild_batch" in verdict["reason"]


def test_parameters_may_be_frozen_in_the_middle_of_a_run(done: Launch) -> None:
    assert [(seen["error"], seen["steps"]) for seen in done.seen("freeze")] == [(None, 4)] * 3
