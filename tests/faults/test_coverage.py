"""What is promised of a fault is said beforehand, and says no more than the checks do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwitness.faults import grammar
from bitwitness.faults.coverage import Coverage, covers
from bitwitness.faults.spec import TARGETS, WORKS, Fault, Mutate, Persist, Select, When, Where
from bitwitness.policy import Policy

JOB = {"ranks": 4, "steps": 200, "checkpoint_every": 20, "rebuild": True}
EVERY: Mapping[str, Any] = {"audit_every": 1, "check_every": 1}
FLIP = ": n=1 -> bit=20"


def promised(line: str, policy: Mapping[str, Any] | None = EVERY, **options: Any) -> Coverage:
    return covers(grammar.parse_all(line), JOB | options, policy)


@pytest.mark.parametrize("target", ["fwd_in", "fwd_w", "fwd_out", "grad_out", "grad_in", "grad_w", "loss"])
@pytest.mark.parametrize("persist", ["", " ; permanent", " ; intermittent=0.5"])
def test_arithmetic_is_witnessed(target: str, persist: str) -> None:
    found = promised(f"rank=2 {target} @ step=8 {FLIP}{persist}")
    assert (found.certain, found.check, found.probability, found.delay) == (True, "replay", 1.0, 0)


@pytest.mark.parametrize(
    ("line", "check"),
    [
        (f"rank=2 param @ step=8 {FLIP}", "replicas"),
        (f"rank=2 exp_avg @ step=8 {FLIP}", "replicas"),
        (f"rank=0 during=update param @ step=8 {FLIP}", "replicas"),
        (f"rank=2 input @ step=8 {FLIP}", "input"),
        (f"rank=2 comm.post @ step=8 {FLIP}", "numerics"),
        ("rank=2 comm.pre @ step=8 : n=1 -> nan", "numerics"),
        ("comm.reduce @ step=8 : n=1 -> inf", "numerics"),
        ("ckpt @ step=19 : n=1 -> bit=5", "checkpoint"),
        (f"rank=0 during=save param @ step=19 {FLIP}", "checkpoint"),
        (f"rank=2 digest @ step=8 {FLIP}", "any"),
        (f"rank=2 during=replay fwd_out @ step=8 {FLIP}", "any"),
        (f"rank=1 during=fingerprint param @ step=8 {FLIP}", "any"),
        (f"rank=1 fwd_out @ step=8 {FLIP} & rank=2 param @ step=8 {FLIP}", "replay + replicas"),
    ],
)
def test_what_each_check_must_see(line: str, check: str) -> None:
    found = promised(line)
    assert found.certain, found.words
    assert found.check == check


@pytest.mark.parametrize(
    ("line", "options", "words"),
    [
        (f"rank=2 comm.pre @ step=8 {FLIP}", {}, "allreduce, which does not exist"),
        (f"comm.reduce @ step=8 {FLIP}", {}, "allreduce, which does not exist"),
        (f"rank=* comm.post @ step=8 {FLIP}", {}, "allreduce"),
        ("comm.reduce @ step=8 : n=1 -> nan", {"precision": "fp16"}, "GradScaler"),
        (f"rank=2 rng @ step=8 {FLIP}", {}, "travels to the witness"),
        (f"rank=2 input @ step=8 {FLIP}", {"rebuild": False}, "very batch in question"),
        (f"rank=0 buffer @ step=8 {FLIP}", {}, "hands the buffers of rank 0"),
        (f"buffer @ step=8 {FLIP}", {}, "hands the buffers of rank 0"),
        (f"rank=2 buffer @ step=8 {FLIP}", {}, "overwrites it"),
        (f"rank=* param @ step=8 {FLIP}", {}, "at_rest, which does not exist"),
        (f"rank=* during=update param @ step=8 {FLIP}", {}, "update, which does not exist"),
        (f"rank=* fwd_out @ step=8 {FLIP} ; permanent", {}, "every node has the same fault"),
        (f"rank=2 fwd_out @ step=8 {FLIP}", {"compile": True}, "torch.compile"),
        (f"rank=0 param @ step=8 {FLIP}", {"ranks": 1}, "no replica"),
        (f"rank=0 fwd_out @ step=8 {FLIP} ; permanent", {"ranks": 1}, "repeats as well"),
        (f"rank=* fwd_out @ step=0 {FLIP}", {}, "does not repeat"),
        ("ckpt @ step=8 : n=1 -> bit=5", {"checkpoint_every": 0}, "saves nothing"),
        (f"rank=* digest @ step=8 {FLIP}", {}, "Training is not touched"),
    ],
)
def test_what_no_check_sees_is_said_in_words(line: str, options: dict[str, Any], words: str) -> None:
    found = promised(line, **options)
    assert not found.covered
    assert not found.certain
    assert found.probability == 0.0
    assert words in found.words


def test_a_loss_only_audit_promises_nothing() -> None:
    loss = {**EVERY, "audit": "loss"}
    assert "nothing but gradients" in promised(f"rank=2 grad_in @ step=8 {FLIP}", loss).words
    forward = promised(f"rank=2 fwd_out @ step=8 {FLIP}", loss)
    assert not forward.covered
    assert "where the loss changes" in forward.words


def test_a_compiled_job_that_asks_for_audits_by_name_has_them() -> None:
    assert promised(f"rank=2 fwd_out @ step=8 {FLIP}", {**EVERY, "audit": "gradients"}, compile=True).certain


def test_an_unguarded_run_is_promised_nothing() -> None:
    assert not promised(f"rank=2 fwd_out @ step=8 {FLIP}", None).covered


def test_a_fault_on_all_ranks_that_strikes_once_is_seen() -> None:
    assert promised(f"rank=* fwd_out @ step=8 {FLIP}").certain, "the witnesses are healthy by then"
    assert promised(f"rank=* during=train fwd_out @ step=8 {FLIP} ; permanent").certain


def test_one_healthy_node_suffices() -> None:
    every = [f"rank={rank} fwd_out @ step=8 {FLIP} ; permanent" for rank in range(4)]
    assert promised(" & ".join(every[:3])).certain
    assert not promised(" & ".join(every)).covered


def test_replicas_of_buffers_by_option() -> None:
    assert promised(f"rank=2 buffer @ step=8 {FLIP}", {**EVERY, "replica_buffers": True}).check == "replicas"


# By chance -----------------------------------------------------------------------------------------------------------

SAMPLED: Mapping[str, Any] = {"audit_every": 10, "check_every": 10}


def test_a_known_step_is_audited_or_not() -> None:
    assert promised(f"rank=2 fwd_out @ step=8 {FLIP}", SAMPLED, checkpoint_every=0).probability == 0.0
    assert promised(f"rank=2 fwd_out @ step=9 {FLIP}", SAMPLED, checkpoint_every=0).certain
    assert promised(f"rank=2 fwd_out @ step=0 {FLIP}", SAMPLED).certain, "the first step is always audited"


def test_over_all_steps_it_is_the_formula_of_the_documentation() -> None:
    for micros in (1, 4):
        chances = [
            promised(f"rank=2 fwd_out @ step={step} {FLIP}", SAMPLED, checkpoint_every=0, accumulate=micros).probability
            for step in range(10, 110)
        ]
        assert sum(chances) / len(chances) == pytest.approx(1 / (10 * micros))


def test_a_step_that_is_audited_anyway_is_still_one_of_a_sample() -> None:
    assert promised(f"rank=2 fwd_out @ step=9 {FLIP}", SAMPLED).sampled
    assert promised(f"rank=2 fwd_out @ step=8 {FLIP}", SAMPLED).sampled
    assert not promised(f"rank=2 fwd_out @ step=8 {FLIP}").sampled
    assert not promised(f"rank=2 param @ step=8 {FLIP}", SAMPLED).sampled


def test_a_drawn_step() -> None:
    found = promised(f"rank=2 fwd_out @ p=0.02 from=10 {FLIP}", SAMPLED, checkpoint_every=0)
    assert found.covered
    assert not found.certain
    assert 0.05 < found.probability < 0.12


def test_the_step_before_a_save_is_audited() -> None:
    assert promised(f"rank=2 fwd_out @ step=19 {FLIP}", {"audit_every": 100, "check_every": 100}).certain


def test_other_micro_batches_are_not_audited() -> None:
    once = promised(f"rank=2 fwd_out @ step=8 {FLIP}", accumulate=4)
    assert (once.covered, once.certain, once.probability) == (True, False, 0.25)
    assert "one of 4 micro-batches" in once.words
    assert promised(f"rank=2 fwd_out @ step=8 {FLIP} ; permanent", accumulate=4).certain
    assert promised(f"rank=2 fwd_out @ step=8 micro=1 {FLIP}", accumulate=4).probability == 0.25


def test_a_fault_that_stays_is_met_by_the_next_audit() -> None:
    stays = promised(f"rank=2 fwd_out @ step=8 {FLIP} ; permanent", SAMPLED)
    assert (stays.covered, stays.certain, stays.probability) == (True, False, 1.0)


def test_an_intermittent_fault_is_met_as_owner_and_as_witness() -> None:
    found = promised(f"rank=2 fwd_out @ steps=10..19 {FLIP} ; intermittent=0.1", SAMPLED, checkpoint_every=0)
    assert found.probability == pytest.approx(1 - 0.9**2)


def test_nan_is_looked_for_in_every_step() -> None:
    assert promised("rank=2 grad_in @ step=8 : n=1 -> nan", SAMPLED).check == "numerics"
    assert promised("rank=2 grad_w @ step=8 : n=1 -> inf", SAMPLED).certain
    assert not promised("rank=2 fwd_out @ step=8 : n=1 -> inf", SAMPLED).certain, "a softmax makes it finite again"


def test_what_has_parted_waits_for_the_next_comparison() -> None:
    found = promised(f"rank=2 param @ step=11 {FLIP}", SAMPLED)
    assert (found.certain, found.delay) == (True, 9)
    late = promised(f"rank=2 param @ step=11 {FLIP}", SAMPLED, steps=15, checkpoint_every=0)
    assert (late.certain, late.probability) == (False, 0.0)
    assert "before the job ends" in late.words or "not again" in late.words


@given(
    st.sampled_from(TARGETS),
    st.sampled_from([None, *WORKS]),
    st.sampled_from([None, "*", 0, 2]),
    st.sampled_from(["once", "permanent"]),
    st.sampled_from(["nan", "zero", "sign"]),
    st.integers(1, 4),
    st.sampled_from([None, {}, EVERY, SAMPLED, {**EVERY, "audit": "off"}, {**EVERY, "audit": "loss"}]),
    st.integers(0, 250),
)
def test_every_fault_has_an_answer(
    target: Any, during: Any, rank: Any, persist: Any, kind: Any, ranks: int, policy: Any, step: int
) -> None:
    fault = Fault(
        Where(target, rank=rank, during=during), When(step, step), Select("n", count=1), Mutate(kind), Persist(persist)
    )
    found = covers([fault], JOB | {"ranks": ranks}, policy)
    assert found.words
    assert 0.0 <= found.probability <= 1.0
    assert not found.certain or (found.covered and found.probability == 1.0 and found.check)
    assert found.covered or found.probability == 0.0
    again = covers([fault, fault], JOB | {"ranks": ranks}, policy)
    assert again.covered == found.covered, "two of the same are promised no more than one"


def test_the_settings_are_those_of_policy() -> None:
    """A cell tells its guard of its saves; so the promise must count on it, and on nothing that Policy does not have."""
    assert Policy(**EVERY, checkpoint_every=20).audit_due(8)
