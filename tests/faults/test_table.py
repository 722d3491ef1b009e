"""The table says what was promised, what came of it, and leaves nothing out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bitwitness.faults.cells import CellResult, CellSpec
from bitwitness.faults.outcomes import Settings
from bitwitness.faults.rows import COLUMNS, Row, policy_name
from bitwitness.faults.table import Table, build
from tests.faults.campaigns import campaign, caught, digests, everywhere, finished, saves, verdict

EVERY = {"audit_every": 1, "check_every": 1}
COVERED = "rank=1 fwd_out @ step=4 : n=1 -> bit=20 ; once"


def spec(line: str = COVERED, policy: Any = EVERY, role: Any = "fault", **options: Any) -> CellSpec:
    job = {"ranks": 3, "steps": 8, "checkpoint_every": 4} | options
    lines = tuple(line.split(" & ")) if role == "fault" else ()
    return CellSpec(f"{role} {line} {policy}", "tiny", "mlp", job, policy, lines, 0, role, line)


CLEAN = spec(policy=None, role="clean")


def judged(one: CellSpec, result: CellResult, clean: bool = True) -> tuple[Row, Table]:
    given = [(one, result), *([(CLEAN, finished(CLEAN))] if clean else [])]
    table = build(given, Settings())
    return table.rows[0], table


def test_caught_in_its_step_with_the_right_rank() -> None:
    row, table = judged(spec(), caught(spec(), 4, 1))
    assert (row.status, row.late, row.updates, row.named, row.held) == ("caught", 0, 0, "right", ())
    assert not table.summary.problems()
    assert table.matrix == {COVERED: {"replay": 1}}


def test_missed_is_covered_landed_and_not_masked() -> None:
    row, table = judged(spec(), finished(spec(), digests=everywhere(4)))
    assert (row.status, row.late, row.updates, row.masked) == ("missed", None, 4, False)
    assert row.held == (8,), "the save after four updates came before it"
    assert len(table.summary.missed) == 1
    assert table.summary.problems() == ["1 covered faults were missed"]


def test_masked_is_every_bit_of_every_rank_after_every_update() -> None:
    row, table = judged(spec(), finished(spec()))
    assert (row.status, row.masked) == ("masked", True)
    assert not table.summary.problems()
    for rank in range(3):
        again, _ = judged(spec(), finished(spec(), digests=digests({rank: {7}})))
        assert again.status == "missed"


def test_without_a_clean_run_nothing_is_called_masked() -> None:
    row, _ = judged(spec(), finished(spec()), clean=False)
    assert (row.status, row.masked, row.updates) == ("missed", None, None)


def test_late_is_counted_from_the_first_wrong_update() -> None:
    row, table = judged(spec(), caught(spec(), 6, 1, digests=everywhere(4, 6), checkpoints=saves(4)))
    assert (row.status, row.late, row.updates) == ("caught", 2, 2)
    assert len(table.summary.late) == 1


def test_a_checkpoint_that_holds_it_is_late_whatever_the_steps() -> None:
    line = "rank=1 param @ step=3 : n=1 -> bit=20 ; once"
    result = caught(
        spec(line), 3, 1, check="replicas", digests=digests({1: {3}}, 4), checkpoints=saves(4), first_step=3
    )
    row, table = judged(spec(line), result)
    assert (row.late, row.held) == (0, (4,))
    assert table.summary.late


def test_a_comparison_that_is_due_later_is_not_late() -> None:
    policy = {"audit_every": 4, "check_every": 4}
    line = "rank=1 param @ step=4 : n=1 -> bit=20 ; once"
    result = caught(
        spec(line, policy), 7, 1, check="replicas", digests=digests({1: {4, 5, 6, 7}}), checkpoints=saves(4)
    )
    row, table = judged(spec(line, policy), result)
    assert (row.late, row.coverage.delay) == (3, 3)
    assert not table.summary.problems()


@pytest.mark.parametrize(
    ("ranks", "named"), [((1,), "right"), ((), "unattributed"), ((0,), "wrong"), ((0, 1), "wrong")]
)
def test_names(ranks: tuple[int, ...], named: str) -> None:
    row, table = judged(spec(), caught(spec(), 4, *ranks))
    assert row.named == named
    assert bool(table.summary.wrong_rank) == (named == "wrong")
    assert bool(table.summary.unattributed) == (named == "unattributed")


def test_one_of_two_hit_ranks_is_right_and_a_later_wrong_name_is_wrong() -> None:
    assert judged(spec(), caught(spec(), 4, 1, struck_ranks=(1, 2)))[0].named == "right"
    shadow = finished(
        spec(), verdict=verdict(4, 1), verdicts=(verdict(4, 1), verdict(5, 0)), caught_step=4, caught_by="replay"
    )
    assert judged(spec(), shadow)[0].named == "wrong"


def test_what_is_not_covered_stays_in_the_table_with_words() -> None:
    line = "rank=1 comm.pre @ step=4 : n=1 -> bit=20 ; once"
    row, table = judged(spec(line), finished(spec(line), digests=everywhere(4)))
    assert row.status == "not covered"
    assert not table.summary.problems()
    (one,) = table.summary.not_covered
    assert "allreduce" in one["why"]
    assert one["status"] == "not covered"
    seen, table = judged(spec(line), caught(spec(line), 4, check="numerics"))
    assert seen.status == "caught"
    assert len(table.summary.not_covered) == 1, "caught all the same, and still listed"


@pytest.mark.parametrize(
    ("end", "status", "name"),
    [
        ("not_landed", "not landed", "not_landed"),
        ("guard_failure", "guard failure", "guard_failures"),
        ("refused", "refused", "refused"),
        ("crash", "crash", "crashed"),
        ("hang", "hang", "hung"),
    ],
)
def test_other_ends_have_lists_of_their_own(end: Any, status: str, name: str) -> None:
    row, table = judged(spec(), replace(finished(spec()), end=end, digests=()))
    assert row.status == status
    assert len(getattr(table.summary, name)) == 1
    assert not table.summary.missed


def test_a_fault_that_never_struck_did_not_land() -> None:
    row, table = judged(spec(), finished(spec(), struck=0, struck_ranks=(), first_step=None))
    assert row.status == "not landed"
    assert len(table.summary.not_landed) == 1


def test_damage_to_a_file_is_not_masked_by_training_that_goes_on() -> None:
    line = "ckpt @ step=3 : n=1 -> bit=5 ; once"
    row, table = judged(spec(line), finished(spec(line)))
    assert (row.status, row.masked) == ("missed", False)
    assert table.summary.missed
    saved = saves(4, problem="differs from its label")
    seen = finished(spec(line), caught_by="checkpoint", caught_step=3, first_step=3, checkpoints=saved)
    row, table = judged(spec(line), seen)
    assert (row.status, row.held) == ("caught", ())
    assert not table.summary.problems()


def test_what_a_rank_reads_wrongly_that_writes_nothing_harms_nothing() -> None:
    line = "rank=1 during=save param @ step=3 : n=1 -> sign ; once"
    assert judged(spec(line), finished(spec(line)))[0].status == "masked"
    line = "rank=0 during=save param @ step=3 : n=1 -> sign ; once"
    assert judged(spec(line), finished(spec(line), struck_ranks=(0,)))[0].status == "missed"


def test_a_file_that_retention_has_removed_harms_nobody() -> None:
    line = "ckpt @ step=3 : n=1 -> bit=5 ; once"
    strike = {"site": {"step": 3, "target": "ckpt"}}
    gone = ({"step": 4, "published": True, "problem": "", "gone": True}, *saves(8))
    result = finished(spec(line), strikes=(strike,), checkpoints=gone)
    row, table = judged(spec(line), result)
    assert (row.status, row.masked) == ("masked", True)
    assert "nobody can resume" in row.note
    assert not table.summary.problems()
    for other in (
        replace(result, checkpoints=saves(4, 8)),
        replace(result, strikes=(strike, {"site": {"step": 7, "target": "ckpt"}}), struck=2),
        replace(result, struck=2),  # of one strike nothing is known
        replace(result, strikes=()),
    ):
        assert judged(spec(line), other)[0].status == "missed"
    saving = "rank=1 during=save ckpt @ step=3 : n=1 -> bit=5 ; once"
    assert judged(spec(saving), result)[0].status == "missed", "what was read back was wrong then"


SPARSE = {"audit_every": 1, "check_every": 4}
MOMENT = "rank=1 exp_avg @ step=4 : n=1 -> bit=0 ; once"


def test_what_is_right_again_whenever_it_is_compared_has_healed() -> None:
    for steps in ({4}, {4, 5, 6}):
        row, table = judged(spec(MOMENT, SPARSE), finished(spec(MOMENT, SPARSE), digests=digests({1: steps})))
        assert (row.status, row.masked, row.note) == ("masked", True, "healed before it was compared")
        assert (row.updates, table.summary.masked, table.summary.problems()) == (len(steps), 1, [])


def test_what_is_wrong_at_a_comparison_or_at_the_end_has_not_healed() -> None:
    for line, policy, steps, options in (
        (MOMENT, SPARSE, {5, 6, 7}, {}),
        (MOMENT.replace("step=4", "step=1"), SPARSE, {1, 2, 3}, {}),
        (MOMENT, EVERY, {4}, {}),
        (MOMENT, {"audit_every": 1, "check_every": 100, "checkpoint_every": 0}, {7}, {"checkpoint_every": 0}),
        # A save that the policy was not told of.
        (MOMENT.replace("step=4", "step=3"), {**SPARSE, "check_every": 3, "checkpoint_every": 0}, {3}, {}),
    ):
        one = spec(line, policy, **options)
        row, _ = judged(one, finished(one, digests=digests({1: steps})))
        assert row.status in ("missed", "by chance"), (policy, steps)
        assert (row.masked, row.note) == (False, "")
    unguarded = spec(MOMENT, None)
    assert judged(unguarded, finished(unguarded, digests=digests({1: {4}})))[0].masked is False


def test_what_may_come_after_the_last_comparison_is_missed_if_it_came_before() -> None:
    policy = {"audit_every": 1, "check_every": 3, "checkpoint_every": 0}
    one = spec("rank=1 param @ p=0.5 from=1 : n=1 -> bit=20 ; once", policy, checkpoint_every=0)
    for first, status in ((4, "missed"), (6, "by chance")):
        row, _ = judged(one, finished(one, checkpoints=(), digests=digests({1: set(range(first, 8))})))
        assert not row.coverage.certain
        assert row.status == status


# Policies that go on -------------------------------------------------------------------------------------------------


def shadow(one: CellSpec, **rest: Any) -> CellResult:
    found = verdict(4, 1)
    return finished(one, verdict=found, verdicts=(found,), caught_step=4, caught_by="replay", **rest)


def save(step: int, distrusted: str = "", **rest: Any) -> dict[str, Any]:
    return {"step": step, "published": True, "problem": "", "distrusted": distrusted, **rest}


def test_an_update_that_was_left_out_is_not_damage() -> None:
    skip = spec(COVERED, {**EVERY, "on_detection": "skip"})
    row, table = judged(skip, shadow(skip, digests=everywhere(4), checkpoints=(save(4), save(8))))
    assert (row.status, row.late, row.updates, row.held, row.masked) == ("caught", 0, 0, (), None)
    assert not table.summary.problems()
    late, table = judged(skip, shadow(skip, digests=everywhere(2), checkpoints=(save(4), save(8))))
    assert (late.late, late.updates, late.held) == (2, 2, (4,)), "before the catch nothing was left out"
    assert table.summary.late


def test_a_step_that_was_run_again_leaves_the_right_bits() -> None:
    retry = spec(COVERED, {**EVERY, "on_detection": "retry"})
    row, table = judged(retry, shadow(retry))
    assert (row.status, row.late, row.held, row.masked) == ("caught", 0, (), True)
    assert not table.summary.problems()
    row, table = judged(retry, shadow(retry, digests=everywhere(4), checkpoints=(save(4), save(8))))
    assert (row.held, len(table.summary.late)) == ((8,), 1), "a retry that did not help"


def test_a_checkpoint_whose_label_says_so_holds_nothing_unseen() -> None:
    record = spec(COVERED, {**EVERY, "on_detection": "record"})
    told = "it is not a verified one: replay had failed when it was saved"
    row, table = judged(record, shadow(record, digests=everywhere(4), checkpoints=(save(4), save(8, told))))
    assert (row.status, row.late, row.held) == ("caught", 0, ())
    assert not table.summary.problems()
    gone = (save(4), save(6, gone=True), save(8, told))
    assert judged(record, shadow(record, digests=everywhere(4), checkpoints=gone))[0].held == ()
    for saved in ((save(4), save(8)), (save(4, gone=True), save(8, told))):
        row, table = judged(record, shadow(record, digests=everywhere(3), checkpoints=saved))
        assert row.held
        assert table.summary.late


# What proves nothing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["not_landed", "crash", "hang"])
def test_what_was_promised_and_proves_nothing_is_marked(end: Any) -> None:
    row, table = judged(spec(), replace(finished(spec()), end=end, digests=()))
    assert row.is_unproved
    assert "nothing is proved" in row.note
    assert len(table.summary.unproved) == 1
    assert "1 faults were promised" in table.summary.remarks()[0]
    assert table.to_json()["remarks"]
    assert table.summary.problems() == (["1 times a guarded run hung"] if end == "hang" else [])
    uncovered = spec("rank=1 comm.pre @ step=4 : n=1 -> bit=20 ; once")
    row, table = judged(uncovered, replace(finished(uncovered), end=end, digests=()))
    assert not row.is_unproved
    assert not table.summary.remarks()


def test_a_fault_may_hang_a_run_that_nobody_guards() -> None:
    unguarded = spec(COVERED, None)
    row, table = judged(unguarded, replace(finished(unguarded), end="hang"))
    assert row.status == "hang"
    assert not table.summary.problems()
    assert not table.summary.remarks()


def test_wrong_names_are_told_whatever_was_promised() -> None:
    line = "rank=0 fwd_out:2 @ step=4 : index=1 -> bit=20 ; permanent & rank=1 fwd_out:2 @ step=4 : index=1 -> bit=20 ; permanent"
    row, table = judged(spec(line), caught(spec(line), 4, 2, struck_ranks=(0, 1)))
    assert (row.coverage.covered, row.named) == (False, "wrong")
    assert len(table.summary.wrong_rank) == len(table.summary.not_covered) == 1


# Fault-free runs -----------------------------------------------------------------------------------------------------


def test_controls() -> None:
    control = spec(role="control")
    for result, name in (
        (caught(control, 3, 1), "false_alarms"),
        (finished(control, digests=digests({0: {7}})), "changed_bits"),
        (CellResult(control.key, "crash", "no memory"), "broken"),
    ):
        table = build([(CLEAN, finished(CLEAN)), (control, result)], Settings())
        assert len(getattr(table.summary, name)) == 1
        assert len(table.summary.problems()) == 1
    table = build([(CLEAN, finished(CLEAN)), (control, finished(control))], Settings())
    assert not table.summary.problems()
    assert (table.controls, table.control_steps) == (1, 8)


def test_a_verdict_before_the_fault_is_a_false_alarm() -> None:
    _, table = judged(spec(), caught(spec(), 3, first_step=4))
    assert len(table.summary.false_alarms) == 1
    _, table = judged(spec(), caught(spec(), 3, struck=0, struck_ranks=(), first_step=None))
    assert len(table.summary.false_alarms) == 1


def test_a_save_that_is_refused_before_the_fault_is_a_false_alarm() -> None:
    saved = saves(4, problem="differs from its label")
    early = finished(spec(), caught_by="checkpoint", caught_step=3, checkpoints=saved)
    unhit = replace(early, struck=0, struck_ranks=(), first_step=None)
    for result, status in ((early, "masked"), (unhit, "not landed")):
        row, table = judged(spec(), result)
        assert row.status == status
        assert table.summary.caught == 0
        assert len(table.summary.false_alarms) == len(table.summary.problems()) == 1


# Chances and shares --------------------------------------------------------------------------------------------------


def test_predicted_beside_measured() -> None:
    policy = {"audit_every": 4, "check_every": 4}
    given = [(CLEAN, finished(CLEAN))]
    for repeat in range(40):
        one = replace(spec("rank=1 fwd_out @ step=4 : n=1 -> bit=20 ; once", policy, accumulate=2), key=str(repeat))
        one = replace(one, faults=(f"rank=1 fwd_out @ step={3 if repeat % 4 == 0 else 4} : n=1 -> bit=20 ; once",))
        result = caught(one, 3, 1, first_step=3) if repeat % 8 == 0 else finished(one, digests=everywhere(4))
        given.append((one, result))
    (chance,) = build(given, Settings()).chances
    assert chance.predicted == pytest.approx(1 / 8)
    assert (chance.measured.count, chance.measured.of) == (5, 40)
    assert chance.measured.low < chance.predicted < chance.measured.high
    # Those in a step that is audited anyway belong to the sample too.
    sure = replace(
        given[1][0],
        key="sure",
        options={"ranks": 3, "steps": 8},
        faults=("rank=1 fwd_out @ step=3 : n=1 -> bit=20 ; once",),
    )
    (more,) = build([*given, (sure, caught(sure, 3, 1, first_step=3))], Settings()).chances
    assert (more.measured.count, more.measured.of) == (6, 41)
    summary = build(given, Settings()).summary
    assert (summary.by_chance, summary.missed) == (35, [])


def test_a_lower_bound_is_no_prediction() -> None:
    policy = {"audit_every": 4, "check_every": 4}
    line = "rank=1 each fwd_out @ every=1 from=1 : n=1 -> bit=20 ; intermittent=0.05"
    one = spec(line, policy)
    row, table = judged(one, finished(one, digests=everywhere(4)))
    assert row.coverage.at_least
    assert row.status == "by chance"
    assert table.chances == ()
    drawn = spec(line.replace("each ", ""), policy)
    assert len(judged(drawn, finished(drawn, digests=everywhere(4)))[1].chances) == 1


def test_outcomes_of_unguarded_runs_have_intervals() -> None:
    asked = campaign()
    given: list[tuple[CellSpec, CellResult]] = []
    for number, one in enumerate(asked.cells()):
        if one.label == "flips" and number % 2:
            given.append((one, finished(one, digests=everywhere(4), losses=(2.0,) * 4 + ("nan",) * 4)))
        elif one.role != "fault" or one.label == "flips":
            given.append((one, finished(one)))
        else:
            given.append((one, caught(one, 4, 1)))
    table = build(given, asked.classify, len(given))
    (shares,) = table.shares
    assert set(shares.shares) == {"masked-identical", "immediate-nonfinite"}
    assert sum(share.count for share in shares.shares.values()) == 6
    assert all(share.low < 0.5 < share.high for share in shares.shares.values())
    assert all(row.outcome is None for row in table.rows if row.spec.policy is not None)


def test_everything_is_json_and_every_column_is_there() -> None:
    import json

    row, table = judged(spec(), caught(spec(), 4, 1))
    assert tuple(row.to_json()) == COLUMNS
    record = json.loads(json.dumps(table.to_json(), allow_nan=False))
    least = {"runs", "missed", "late", "wrong_rank", "unattributed", "false_alarms", "not_covered"}
    assert least <= set(record)


def test_the_same_results_make_the_same_table() -> None:
    given = [(spec(), caught(spec(), 4, 1)), (CLEAN, finished(CLEAN))]
    assert build(given, Settings()) == build(given, Settings())


def test_policies_have_names() -> None:
    assert policy_name(None) == "unguarded"
    assert policy_name(EVERY) == "every_step"
    assert policy_name({}) == "default"
    assert policy_name({"check_every": 5, "audit": "loss"}) == "audit=loss, check_every=5"
