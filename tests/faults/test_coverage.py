"""What is promised of a fault is said beforehand, and says no more than the checks do."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwitness.faults import grammar
from bitwitness.faults.coverage import Coverage, covers
from bitwitness.faults.spec import TARGETS, WORKS, Fault, Mutate, Persist, Select, When, Where
from bitwitness.faults.world import World, window
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


def on(*ranks: object, line: str) -> str:
    """The same line on several ranks, as several faults."""
    return " & ".join(f"rank={rank} {line}" for rank in ranks)


SAME = "fwd_out:head @ step=8 : index=5 -> bit=20 ; permanent"


def test_two_nodes_with_the_same_wrong_bits_outvote_a_correct_third() -> None:
    for ranks in ((0, 1), (1, 3), (0, 1, 2)):
        found = promised(on(*ranks, line=SAME))
        assert not found.covered
        assert "a healthy one may be outvoted and named" in found.words
    assert "every node has the same fault" in promised(on(0, 1, 2, 3, line=SAME)).words
    assert promised(on(2, line=SAME)).certain


@pytest.mark.parametrize(
    "line",
    [
        "grad_w:head.weight @ step=8 : largest -> sign ; permanent",
        "grad_in:head @ step=8 : all -> scale=2.0 ; permanent redraw",
        "loss @ step=8 : n=1 -> bit=3 ; permanent",
        "fwd_out:head @ every=1 : index=1+2 -> zero ; intermittent=0.5",
        "fwd_in:head @ steps=2..20 : rate=1.0 -> add=0.5 ; permanent",
        "input:0 @ step=8 : index=0 -> bit=1 ; permanent",
        "param:head.weight @ step=8 : index=5 -> bit=20",
        "exp_avg:head.weight @ step=8 : largest -> zero",
        "during=update param:head.weight @ step=8 : index=5 -> bit=20",
        "digest @ step=8 : index=0 -> bit=3 ; permanent",
        "during=fingerprint param:head.weight @ step=9 : index=0 -> bit=3",
    ],
)
def test_whatever_compares_nodes_is_outvoted(line: str) -> None:
    assert not promised(on(0, 2, line=line)).covered
    assert promised(on(2, line=line)).covered


def test_wrong_at_first_and_in_the_repeats_is_wrong_each_time() -> None:
    parts = [SAME.replace("fwd_out", f"during={work} fwd_out") for work in ("train", "rerun")]
    assert not promised(f"{on(0, line=SAME)} & {on(2, line=parts[0])} & {on(2, line=parts[1])}").covered
    assert promised(f"{on(0, line=SAME)} & {on(2, line=parts[0])}").certain


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("index=5 -> sign", "index=5 -> bit=-1"),
        ("index=5 -> sign", "index=5 -> scale=-1.0"),
        ("index=5 -> bit=31", "index=5 -> bit=-1"),
        ("index=5+7 -> zero", "index=7+5 -> set=0.0"),
        ("all -> add=1.0", "rate=1.0 -> scale=2.0"),
        ("index=5 -> stuck1=20", "index=5 -> bit=20"),
    ],
)
def test_two_lines_that_say_the_same(one: str, other: str) -> None:
    def pair(one: str, other: str, glob: str = "head") -> Coverage:
        return promised(
            f"rank=1 fwd_out:head @ step=8 : {one} ; permanent & rank=2 fwd_out:{glob} @ step=8 : {other} ; permanent"
        )

    assert not pair(one, other).covered
    assert not pair(one, other, "h*d").covered, "it may match the same name"
    assert pair(one, other, "tail").certain


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("fwd_out:head @ step=8 : n=1 -> bit=20 ; permanent", None),  # the line tells the rank, and draws from it
        ("fwd_out:head @ step=8 : index=5 -> bit=any ; permanent", None),
        ("fwd_out:head @ step=8 : index=5 -> bit=20", None),  # once: its repeats are right
        ("param:head.weight @ step=8 : n=1 -> bit=20", None),
        ("during=replay fwd_out:head @ step=8 : index=5 -> bit=20 ; permanent", None),  # its repeats are right
        ("comm.post @ step=8 : index=0 -> bit=20", None),  # nobody is named where an all-reduce ended differently
        ("grad_w:head.weight @ step=8 : index=5 -> inf ; permanent", None),
        (SAME, "fwd_out:head @ step=8 : index=5 -> bit=21 ; permanent"),
        (SAME, "fwd_out:head @ step=8 : index=6 -> bit=20 ; permanent"),
        (SAME, "grad_in:head @ step=8 : index=5 -> bit=20 ; permanent"),
        ("fwd_out:head @ steps=2..5 : all -> zero ; permanent", "fwd_out:head @ step=8 : all -> zero ; permanent"),
        ("param:head.weight @ step=8 : index=5 -> bit=20", "param:head.weight @ step=30 : index=5 -> bit=20"),
    ],
)
def test_faults_that_do_not_agree_are_promised_each(line: str, other: str | None) -> None:
    found = promised(f"rank=1 {line} & rank=2 {other or line}")
    assert found.certain, found.words


def test_memory_that_went_bad_before_the_same_comparison_agrees() -> None:
    line = "param:head.weight @ step={} : index=5 -> bit=20"
    pair = f"rank=1 {line.format(21)} & rank=2 {line.format(24)}"
    assert promised(pair).certain
    assert not promised(pair, SAMPLED).covered


def test_a_node_is_one_however_many_ranks_it_has() -> None:
    assert promised(on(0, 1, line=SAME), ranks=6, ranks_per_node=2).certain
    assert not promised(on(0, 2, line=SAME), ranks=6, ranks_per_node=2).covered
    assert promised(f"node=node-1 {SAME}").certain
    assert promised(f"rank=* node=node-1 {SAME}", ranks=6, ranks_per_node=2).certain
    assert not promised(on(0, 1, line=SAME), ranks=2, ranks_per_node=2).covered
    assert not promised(on(0, 1, line="comm.post @ step=8 : index=0 -> bit=20"), ranks=2).covered


def test_agreement_on_nan_is_caught_unless_a_scaler_skips_it() -> None:
    line = "fwd_out:head @ step=8 : all -> nan ; permanent"
    assert promised(on(0, 1, line=line)).certain
    assert promised(on(0, 1, 2, 3, line=line)).certain
    assert promised(on(0, 1, line=line), precision="fp16").covered
    assert not promised(on(0, 1, 2, 3, line=line), precision="fp16").covered
    inf = "fwd_out:head @ step=8 : all -> inf ; permanent"
    assert not promised(on(0, 1, line=inf)).covered, "a softmax makes it finite again"


# Work that need not come ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "policy", "words"),
    [
        (f"rank=2 during=arbiter fwd_out @ step=8 {FLIP}", EVERY, "only after a disagreement"),
        (f"rank=2 during=rerun fwd_out @ step=8 {FLIP} ; permanent", EVERY, "only after a disagreement"),
        (f"rank=2 during=replay fwd_out @ step=8 {FLIP}", {**EVERY, "audit": "off"}, "nothing is replayed"),
        (f"rank=2 during=replay grad_in @ step=8 {FLIP}", {**EVERY, "audit": "loss"}, "the loss only"),
        (f"rank=2 during=replay fwd_out @ steps=11..18 {FLIP}", {"audit_every": 10}, "nothing is replayed in a step"),
        (f"rank=2 during=replay digest @ step=8 {FLIP}", {"audit_every": 10}, "nothing is replayed in a step"),
        (f"rank=2 during=fingerprint param @ step=8 {FLIP}", {"audit_every": 10}, "not fingerprinted"),
        (f"rank=2 during=fingerprint exp_avg @ step=8 {FLIP}", {"audit_every": 1}, "not fingerprinted"),
        (f"rank=2 during=fingerprint buffer @ step=8 {FLIP}", EVERY, "but with Policy(replica_buffers=True)"),
        (f"rank=2 digest @ step=8 {FLIP}", {"audit_every": 10}, "only an audit compares"),
        ("ckpt @ step=8 : n=1 -> bit=5", EVERY, "saves nothing after a step"),
        (f"rank=0 during=save param @ step=8 {FLIP}", EVERY, "saves nothing after a step"),
        (f"rank=0 during=save buffer @ step=19 {FLIP}", EVERY, "only with what was written"),
    ],
)
def test_work_that_does_not_come_is_not_promised(line: str, policy: Mapping[str, Any], words: str) -> None:
    found = promised(line, policy)
    assert not found.covered
    assert words in found.words


def test_work_that_comes_is_promised() -> None:
    ten = {"audit_every": 10, "check_every": 10}
    assert promised(f"rank=2 during=replay fwd_out @ steps=11..19 {FLIP}", ten).certain
    assert promised(f"rank=2 during=fingerprint param @ step=9 {FLIP}", ten).certain
    assert promised(f"rank=2 during=fingerprint param @ step=8 {FLIP}", {"audit_every": 1}).certain, (
        "premises of the audit"
    )
    assert promised(f"rank=2 during=fingerprint buffer @ step=8 {FLIP}", {**EVERY, "replica_buffers": True}).certain
    assert promised(f"rank=2 digest @ step=8 {FLIP} ; permanent", ten).certain
    assert promised(f"rank=2 digest @ step=8 {FLIP}", {**ten, "audit": "off"}).certain
    assert promised("rank=1 ckpt @ steps=8..19 : n=1 -> bit=5").certain


def test_a_wrong_arbiter_takes_nothing_from_what_is_promised_of_others() -> None:
    real = f"rank=1 fwd_out:head @ step=8 {FLIP}"
    for work in ("arbiter", "rerun"):
        assert promised(f"{real} & rank=2 during={work} fwd_out:head @ step=8 {FLIP} ; permanent").certain


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
    assert found.probability * found.lands == pytest.approx(1 - 0.9**2)
    assert found.lands == pytest.approx(1 - 0.9**11), "ten steps, and one replay"


def test_every_micro_batch_draws() -> None:
    line = f"rank=2 fwd_out @ steps=10..19 {FLIP} ; intermittent=0.1"
    found = promised(line, SAMPLED, checkpoint_every=0, accumulate=4)
    assert found.probability * found.lands == pytest.approx(1 - 0.9**2), "the audited one among them"
    one = promised(line.replace("steps=10..19", "steps=10..19 micro=1"), SAMPLED, checkpoint_every=0, accumulate=4)
    assert one.probability * one.lands == pytest.approx(1 - (1 - 0.1 / 4) * 0.9)


def test_a_name_drawn_for_each_of_several_is_a_lower_bound() -> None:
    line = f"each fwd_out:blocks.* @ every=1 from=2 {FLIP} ; intermittent=0.01"
    found = promised(f"rank=2 {line}", SAMPLED)
    assert found.at_least
    assert "at least as often" in found.words
    assert not promised(f"rank=2 {line}").at_least, "certain"
    assert not promised(f"rank=2 {line.replace('each ', '')}", SAMPLED).at_least
    assert promised(f"rank=2 {line.replace('each ', '')}", SAMPLED, checkpointing=True).at_least


def simulated(line: str, trials: int, **options: Any) -> tuple[int, int]:
    """How often a fault landed, and how often an audit met it: the injector's rules and the audits', played with dice."""
    fault = grammar.parse(line)
    world = World.of(JOB | {"checkpoint_every": 0} | options, SAMPLED)
    dice = random.Random(7)
    landed = met = 0
    for _ in range(trials):
        strikes = seen = False
        for step in window(fault, world):
            at_work = dice.random() < fault.when.p
            audited = dice.randrange(world.micros)
            hit: list[int] = []
            for micro in range(world.micros):
                over = fault.persist.kind == "once" and strikes
                here = fault.when.micro in (None, micro) and at_work and not over
                if here and dice.random() < fault.persist.p:
                    strikes = True
                    hit.append(micro)
            as_witness = fault.persist.kind != "once" and fault.where.during is None and at_work
            replays = world.audits(step) and as_witness and dice.random() < fault.persist.p
            strikes = strikes or replays
            if world.audits(step) and (audited in hit or replays):
                seen = True
                break
        landed += strikes
        met += seen
    return landed, met


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize(
    "line",
    [
        "fwd_out @ p=0.1 from=12 : n=1 -> bit=20",
        "fwd_out @ steps=12..31 : n=1 -> bit=20 ; intermittent=0.03",
        "fwd_out @ step=12 : n=1 -> bit=20 ; intermittent=0.03",
        "during=train fwd_out @ steps=12..31 : n=1 -> bit=20 ; intermittent=0.03",
        "fwd_out @ steps=12..31 micro=0 : n=1 -> bit=20 ; intermittent=0.1",
        "fwd_out @ p=0.2 from=12 : n=1 -> bit=20 ; intermittent=0.1",
        "fwd_out @ p=0.02 from=12 micro=0 : n=1 -> bit=20 ; permanent",
    ],
)
def test_what_is_predicted_is_the_share_of_those_that_land(line: str, micros: int) -> None:
    options = {"steps": 45, "accumulate": micros, "checkpoint_every": 0}
    found = promised(f"rank=1 {line}", SAMPLED, **options)
    landed, met = simulated(f"rank=1 {line}", 4000, **options)
    sigma = (found.probability * (1 - found.probability) / landed) ** 0.5
    assert abs(met / landed - found.probability) < 4 * sigma
    assert abs(landed / 4000 - found.lands) < 4 * (max(found.lands * (1 - found.lands), 1e-4) / 4000) ** 0.5
    assert found.lands < 1.0


def test_of_two_faults_one_must_land_and_one_be_met() -> None:
    one = "rank=1 fwd_out @ p=0.01 from=20 : n=1 -> bit=20"
    single = promised(one, SAMPLED, checkpoint_every=0)
    both = promised(f"{one} & {one.replace('rank=1', 'rank=2')}", SAMPLED, checkpoint_every=0)
    assert both.lands == pytest.approx(1 - (1 - single.lands) ** 2)
    assert both.probability * both.lands == pytest.approx(1 - (1 - single.probability * single.lands) ** 2)
    assert promised(f"{one} & rank=2 rng @ step=8 {FLIP}", SAMPLED).probability == 0.0, "not covered"


def test_what_may_slip_into_a_later_step_is_certain_only_if_that_is_audited() -> None:
    found = promised(f"rank=2 fwd_out @ steps=9..12 {FLIP}", SAMPLED, checkpoint_every=0)
    assert (found.covered, found.certain, found.probability) == (True, False, 1.0)


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


def test_what_may_come_after_the_last_comparison_is_not_certain() -> None:
    options = {"steps": 35, "checkpoint_every": 0}
    for when in ("p=0.1 from=20", "steps=20..32"):
        found = promised(f"rank=2 param @ {when} {FLIP}", SAMPLED, **options)
        assert (found.covered, found.certain) == (True, False), when
        assert "perhaps not again" in found.words
    drawn = promised(f"rank=2 param @ p=0.1 from=20 {FLIP}", SAMPLED, **options)
    assert drawn.probability == pytest.approx((1 - 0.9**10) / (1 - 0.9**15))
    often = promised(f"rank=2 param @ every=1 from=20 {FLIP} ; intermittent=0.1", SAMPLED, accumulate=4, **options)
    assert often.probability == pytest.approx((1 - 0.9**10) / (1 - 0.9**15)), "memory is hit once a step"
    assert promised(f"rank=2 param @ every=1 from=20 {FLIP} ; permanent", SAMPLED, **options).certain
    assert promised(f"rank=2 param @ p=0.1 from=20 {FLIP}", SAMPLED, steps=40, checkpoint_every=0).certain


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
    assert again.covered <= found.covered, "two of the same are promised no more than one"


def test_the_settings_are_those_of_policy() -> None:
    """A cell tells its guard of its saves; so the promise must count on it, and on nothing that Policy does not have."""
    assert Policy(**EVERY, checkpoint_every=20).audit_due(8)
