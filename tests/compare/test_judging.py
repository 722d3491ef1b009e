"""Whom a comparison calls wrong, by journals that are made by hand; for any number of made-up worlds see `test_judging_worlds`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from bitwitness.compare import judging
from bitwitness.compare.judging import judge, judged
from bitwitness.compare.records import Account, CompareFiles, Difference, Mode, Participant, Role, Site, Step
from bitwitness.compare.results import Result, Row
from bitwitness.errors import RunFilesError
from bitwitness.faults.statistics import highest_rate
from bitwitness.runfiles.answers import Device
from bitwitness.runfiles.files import write_json

BATCH = Site("", "batch", "x", 0, "int64", (4,))
IN = Site("ffn", "fwd_in", "0", 0, "float32", (10, 10))
OUT = Site("ffn", "fwd_out", "0", 0, "float32", (10, 10))
BACK = Site("ffn", "grad_in", "0", 0, "float32", (10, 10))
GRAD = Site("ffn", "grad_w", "weight", 0, "bfloat16", (10, 20))
UPDATE = Site("ffn", "update", "weight", 0, "float32", (10, 20))
SITES = (BATCH, IN, OUT, BACK, GRAD, UPDATE)

Wrong = Mapping[int, Mapping[Site, tuple[int, str]]]
"""By step, by site: mismatches and the answer."""


def participant(name: str, role: Role, rank: int, device: str = "") -> Participant:
    return Participant(name, role, Device(rank, "node", device or f"GPU-{name}", {"model": "H100"}))


LEADER, FIRST, SECOND, SUSPECT, OTHER = (
    participant("leader", "leader", 0),
    participant("reference-1", "reference", 1),
    participant("reference-2", "reference", 2),
    participant("suspect", "suspect", 3),
    participant("suspect-2", "suspect", 4),
)
WHO = (LEADER, FIRST, SECOND, SUSPECT)


def account(
    who: Participant,
    wrong: Wrong | None = None,
    *,
    mode: Mode = "lock-step",
    steps: int = 20,
    ended: str = "done",
    left_out: Sequence[int] = (),
    missing: Mapping[int, Site] | None = None,
) -> Account:
    made = Account(who, mode, list(SITES), [tuple(range(len(SITES)))], ended=ended)
    for step in range(steps):
        if step in left_out:
            continue
        layout = 0
        if missing and step in missing:
            layout = len(made.layouts)
            made.layouts.append(tuple(n for n, site in enumerate(SITES) if site != missing[step]))
        found = tuple(
            Difference(
                SITES.index(site),
                count,
                severity_sum=2.0 * count,
                severity_of=count,
                severity_largest=5.0,
                noise=4.0,
                signal=16.0,
                answer=answer,
            )
            for site, (count, answer) in (wrong or {}).get(step, {}).items()
        )
        made.steps.append(Step(step, layout, loss=1.0 + step, gradient_noise=0.1 * len(found), differences=found))
    return made


def says(accounts: Sequence[Account], suspect: str = "suspect", who: Sequence[Participant] = WHO) -> Result:
    by_mode: dict[Mode, list[Account]] = {}
    for one in accounts:
        by_mode.setdefault(one.mode, []).append(one)
    return judged(by_mode, who, suspect, {"steps": 20})


def row(rows: Sequence[Row], group: str, phase: str) -> Row:
    (found,) = (one for one in rows if one.group == group and one.phase == phase)
    return found


@pytest.fixture
def once_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is not about how often: a suspect that is wrong once is wrong."""
    monkeypatch.setattr(judging, "CHANCE", 1.0)


# What is said --------------------------------------------------------------------------------------------------------


def test_who_is_equal_in_all_has_nothing_seen_and_bounds() -> None:
    result = says([account(who) for who in WHO])
    assert result.outcome == "nothing seen"
    (mode,) = result.modes
    assert mode.total is not None
    assert mode.steps == mode.asked == 20
    assert mode.total.mismatches.of == 20 * (300 + 400), "a batch is not computed"
    assert mode.total.bound == highest_rate(14_000)
    assert mode.total.step_bound == highest_rate(20)
    assert mode.total.mismatches.high == mode.total.bound
    assert mode.first is None
    assert mode.patterns == ()
    assert f"{mode.total.bound:.2g}" in result.sentence
    assert result.references == (LEADER, FIRST, SECOND)


@pytest.mark.usefixtures("once_is_enough")
def test_who_differs_alone_is_wrong_with_figures() -> None:
    wrong = {3: {OUT: (5, "a"), GRAD: (1, "b")}, 7: {OUT: (1, "c")}}
    result = says([account(LEADER), account(FIRST), account(SECOND), account(SUSPECT, wrong)])
    assert result.outcome == "differs"
    assert "suspect differs from 3 references" in result.sentence
    assert "7 of 14,000" in result.sentence
    (mode,) = result.modes
    assert mode.first == 3
    assert mode.noise == pytest.approx(0.2)
    assert mode.noise_step == 3
    out = row(mode.rows, "ffn", "fwd_out")
    assert (out.mismatches.count, out.mismatches.of, out.steps, out.steps_hit) == (6, 2000, 20, 2)
    assert out.severity == pytest.approx(2.0)
    assert out.severity_largest == 5.0
    assert out.noise == pytest.approx(0.5)
    assert out.bound is None
    assert out.step_bound is None
    assert out.mismatches.low < 6 / 2000 < out.mismatches.high
    clean = row(mode.rows, "ffn", "grad_in")
    assert clean.bound == highest_rate(2000)
    assert clean.severity is None
    backward = row(mode.groups, "ffn", "backward")
    assert (backward.mismatches.count, backward.mismatches.of, backward.dtype) == (1, 6000, "bfloat16, float32")
    assert row(mode.groups, "ffn", "forward").mismatches.count == 6
    assert [one.mismatches for one in mode.series if one.mismatches] == [6, 1]
    assert {one.dtype for one in mode.patterns} == {"float32", "bfloat16"}


@pytest.mark.parametrize(("references", "enough"), [(2, 7), (3, 5), (7, 4)])
def test_work_that_rarely_does_not_repeat_would_strike_others_too(references: int, enough: int) -> None:
    others = [participant(f"reference-{number}", "reference", 10 + number) for number in range(1, references)]
    who = (LEADER, *others, SUSPECT)
    for times in (1, enough - 1, enough):
        wrong = {2 * step: {OUT: (5, f"{step}")} for step in range(times)}
        result = says([account(LEADER), *map(account, others), account(SUSPECT, wrong)], who=who)
        assert result.outcome == ("differs" if times == enough else "not characterised")
        assert result.modes[0].total is not None
        assert result.modes[0].total.mismatches.count == 5 * times, "figures are there in any case"
        if times < enough:
            assert f"seen {times} time" in result.sentence
            assert f"{enough} times would tell" in result.sentence


def test_what_goes_on_from_step_to_step_is_one_event_until_the_work_is_made_anew() -> None:
    """Twenty steps are made anew at every second: a mean that is kept in an attribute carries an error over one step."""
    for last, said in ((8, "not characterised"), (10, "differs")):
        wrong = {step: {OUT: (5, f"{step}")} for step in range(last)}
        assert says([account(LEADER), account(FIRST), account(SUSPECT, wrong)]).outcome == said


def test_the_same_steps_of_two_modes_are_the_same_events() -> None:
    wrong = {step: {OUT: (5, f"{step}")} for step in (0, 4, 8, 12)}
    modes: list[Mode] = ["lock-step", "parameters"]
    both = [
        account(who, wrong if who is SUSPECT else None, mode=mode) for mode in modes for who in (LEADER, FIRST, SUSPECT)
    ]
    assert "seen 4 times" in says(both).sentence
    other = {step + 2: found for step, found in wrong.items()}
    both[5] = account(SUSPECT, other, mode="parameters")
    assert says(both).outcome == "differs"


def test_what_was_asked_for_and_is_not_there_is_no_pass() -> None:
    accounts = [account(who) for who in WHO]
    asked = {"steps": 20, "modes": ["lock-step", "free"]}
    result = judged({"lock-step": accounts}, WHO, "suspect", asked)
    assert result.outcome == "not characterised"
    assert "free: not begun yet" in result.sentence
    accounts[-1] = account(SUSPECT, left_out=range(3, 15))
    assert "8 of 20 steps are on record" in judged({"lock-step": accounts}, WHO, "suspect", {"steps": 20}).sentence


def test_what_strikes_references_as_often_is_the_work() -> None:
    mine = {step: {OUT: (5, f"{step}")} for step in range(0, 20, 4)}
    theirs = {step: {OUT: (5, f"{step}")} for step in range(2, 20, 4)}
    result = says([account(LEADER), account(FIRST, theirs), account(SUSPECT, mine)])
    assert result.outcome == "not characterised"
    assert "references differed in 5" in result.sentence


def test_in_the_free_run_all_that_follows_is_the_same_event() -> None:
    wrong = {step: {OUT: (5, f"{step}")} for step in range(2, 20)}
    result = says([account(LEADER, mode="free"), account(FIRST, mode="free"), account(SUSPECT, wrong, mode="free")])
    assert result.outcome == "not characterised"
    assert "seen 1 time," in result.sentence


def test_other_results_of_the_task_are_a_difference() -> None:
    accounts = [account(who, mode="free") for who in (LEADER, FIRST, SUSPECT)]
    for one, answers in zip(accounts, ([1, 2], [1, 2], [1, 3]), strict=True):
        one.results = {"digits": answers}
    result = says(accounts)
    assert result.outcome == "not characterised"
    assert "gave other results of the task" in result.sentence
    accounts[1].results = {"digits": [0, 0]}
    assert says(accounts).outcome == "nothing seen", "references differ: then it says nothing"


@pytest.mark.usefixtures("once_is_enough")
def test_what_code_between_the_modules_gets_wrong_is_noted() -> None:
    result = says([account(LEADER), account(FIRST), account(SUSPECT, {3: {IN: (1, "a")}, 4: {IN: (1, "b")}})])
    assert result.outcome == "differs"
    assert any("between the chosen modules" in note for note in result.notes)
    assert row(result.modes[0].groups, "ffn", "forward").mismatches.count == 0


# Nobody is wrongly named ---------------------------------------------------------------------------------------------


def test_a_leader_that_is_wrong_is_in_doubt_and_the_suspect_is_not() -> None:
    wrong = {3: {OUT: (5, "right")}}
    result = says([account(LEADER), account(FIRST, wrong), account(SECOND, wrong), account(SUSPECT, wrong)])
    assert result.outcome == "not characterised"
    assert "leader may be the wrong one" in result.sentence
    assert "reference-1" in result.sentence
    assert result.modes[0].total is not None
    assert result.modes[0].total.mismatches.count == 0
    assert result.modes[0].series[3].void


@pytest.mark.usefixtures("once_is_enough")
def test_a_reference_that_is_wrong_takes_its_steps_with_it_and_no_more() -> None:
    broken, wrong = {3: {OUT: (5, "x")}}, {3: {BACK: (1, "z")}, 9: {BACK: (1, "y")}, 10: {BACK: (1, "w")}}
    result = says([account(LEADER), account(FIRST, broken), account(SECOND), account(SUSPECT, wrong)])
    assert result.outcome == "differs"
    assert (result.modes[0].void, result.modes[0].steps, result.modes[0].first) == (1, 19, 9)
    assert any("reference-1 differs from the leader in 1 steps" in note for note in result.notes)
    healthy = says([account(LEADER), account(FIRST, broken), account(SECOND), account(SUSPECT)])
    assert healthy.outcome == "nothing seen"
    assert healthy.modes[0].total is not None
    assert healthy.modes[0].total.mismatches.of == 19 * 700


def test_who_differs_only_where_references_differ_is_not_characterised() -> None:
    result = says([account(LEADER), account(FIRST, {3: {OUT: (5, "x")}}), account(SUSPECT, {3: {OUT: (5, "y")}})])
    assert result.outcome == "not characterised"
    assert "references differ" in result.sentence


def test_one_reference_against_the_suspect_is_one_word_against_another() -> None:
    wrong = {15: {OUT: (5, "x")}}
    result = says([account(LEADER), account(FIRST, steps=10, ended=""), account(SUSPECT, wrong)])
    assert result.outcome == "not characterised"
    assert "no reference besides the leader" in result.sentence
    assert result.modes[0].steps == 10


def test_a_second_seat_on_the_leaders_device_confirms_nothing() -> None:
    same = participant("reference-1", "reference", 1, "GPU-leader")
    result = says([account(LEADER), account(same), account(SUSPECT, {3: {OUT: (5, "x")}})], who=(LEADER, same, SUSPECT))
    assert result.outcome == "not characterised"
    assert "another device" in result.sentence
    accounts = [
        account(LEADER),
        account(same),
        account(SECOND, steps=2, ended="killed"),
        account(SUSPECT, {3: {OUT: (5, "x")}}),
    ]
    assert says(accounts, who=(LEADER, same, SECOND, SUSPECT)).outcome == "not characterised"


@pytest.mark.usefixtures("once_is_enough")
def test_two_suspects_that_agree_outvote_two_references_that_may_both_be_wrong() -> None:
    wrong = {3: {OUT: (5, "x")}, 4: {OUT: (5, "y")}}
    two = [account(LEADER), account(FIRST), account(SUSPECT, wrong), account(OTHER, wrong)]
    result = says(two, who=(LEADER, FIRST, SUSPECT, OTHER))
    assert result.outcome == "not characterised"
    assert "others that take part" in result.sentence
    three = [account(LEADER), account(FIRST), account(SECOND), account(SUSPECT, wrong), account(OTHER, wrong)]
    assert says(three, who=(LEADER, FIRST, SECOND, SUSPECT, OTHER)).outcome == "differs"


def test_in_the_free_run_nothing_counts_after_references_parted() -> None:
    parted = {step: {OUT: (50, f"r{step}")} for step in range(5, 20)}
    mine = {step: {OUT: (60, f"s{step}")} for step in range(8, 20)}
    free = [account(LEADER, mode="free"), account(FIRST, parted, mode="free"), account(SUSPECT, mine, mode="free")]
    result = says(free)
    assert result.outcome == "not characterised"
    assert (result.modes[0].steps, result.modes[0].void) == (5, 15)
    again = [free[0], account(FIRST, {5: parted[5]}, mode="free"), free[2]]
    assert says(again).outcome == "not characterised", "that it is equal again later does not make it healthy"
    lost = [
        account(LEADER, mode="free"),
        account(FIRST, mode="free", left_out=[7]),
        account(SUSPECT, mine, mode="free"),
    ]
    assert says(lost).outcome == "not characterised", "it may have parted in the step that is lost"


def test_other_work_is_not_held_against_anybody() -> None:
    wrong = {3: {BATCH: (4, "b"), OUT: (50, "x")}}
    result = says([account(LEADER), account(FIRST), account(SUSPECT, wrong)])
    assert result.outcome == "not characterised"
    assert "batch" in result.sentence
    assert any("batch" in note for note in result.notes)


def test_who_stops_where_others_go_on_has_not_passed() -> None:
    for ended in ("", "step 5: IndexError: out of range"):
        result = says([account(LEADER), account(FIRST), account(SUSPECT, steps=5, ended=ended)])
        assert result.outcome == "not characterised"
        assert "did not come to its end" in result.sentence


@pytest.mark.parametrize("ended", ["", "interrupted"])
def test_a_comparison_that_was_ended_is_judged_by_what_is_there(ended: str) -> None:
    result = says([account(who, steps=5, ended=ended) for who in WHO])
    assert result.outcome == "not characterised"
    assert "5 of 20 steps are on record" in result.sentence
    assert "nothing was wrong with suspect in the 5 steps" in result.sentence
    assert result.modes[0].ended in ("unfinished", "interrupted")
    assert any("5 of 20 steps" in note for note in result.notes)


def test_a_leader_that_failed_is_not_the_suspects_fault() -> None:
    ended = "the leader takes no further part: step 5: it ran out of memory"
    accounts = [account(LEADER, steps=5, ended="step 5: it ran out of memory")]
    accounts += [account(who, steps=5, ended=ended) for who in (FIRST, SUSPECT)]
    result = says(accounts)
    assert result.outcome == "not characterised"
    assert result.sentence.startswith("leader did not come to its end")
    assert "ran out of memory" in result.sentence


@pytest.mark.usefixtures("once_is_enough")
def test_a_tensor_that_never_came_is_a_difference_whoever_lacks_it() -> None:
    result = says([account(LEADER), account(FIRST), account(SUSPECT, missing={6: GRAD})])
    assert result.outcome == "differs"
    assert "did not compute all" in result.sentence
    assert any("step 6" in note for note in result.notes)
    result = says([account(LEADER), account(FIRST, missing={6: GRAD}), account(SUSPECT)])
    assert result.outcome == "nothing seen"
    assert result.modes[0].steps == 19


def test_nothing_counts_without_a_leader_a_reference_or_a_step() -> None:
    assert says([account(SUSPECT)], who=(SUSPECT,)).outcome == "not characterised"
    assert says([account(LEADER), account(SUSPECT)], who=(LEADER, SUSPECT)).outcome == "not characterised"
    assert says([account(LEADER), account(FIRST)]).outcome == "not characterised"
    assert "not a suspect" in says([account(who) for who in WHO], "reference-1").sentence
    with pytest.raises(RunFilesError, match="takes no part"):
        says([account(who) for who in WHO], "nobody")


@pytest.mark.usefixtures("once_is_enough")
def test_a_lost_journal_of_the_leader_leaves_what_followers_compared_with_its_tape() -> None:
    wrong = {3: {OUT: (5, "x")}, 4: {OUT: (5, "y")}}
    result = says([account(FIRST), account(SECOND), account(SUSPECT, wrong)])
    assert result.outcome == "differs"
    assert result.modes[0].series[0].reference_loss is None


# Results of the task, control, files ---------------------------------------------------------------------------------


def test_answers_become_accuracy_and_divergence() -> None:
    control = participant("control", "control", 5)
    accounts = [account(who, mode="free") for who in (*WHO, control)]
    right = [1, 2, 3, 4]
    for one, answers in zip(accounts, ([1, 2, 3, 0], right, right, [1, -1, 0, 0], [4, 3, 2, 1]), strict=True):
        one.results = {"digits": answers, "digits.right": right, "perplexity": 3.5, "lost": math.inf, "word": "x"}
    result = says(accounts, who=(*WHO, control))
    (mode,) = result.modes
    assert mode.results["leader"] == {"digits": 0.75, "perplexity": 3.5, "divergence": 0.0}
    assert mode.results["suspect"] == {"digits": 0.25, "perplexity": 3.5, "divergence": 0.5}
    assert mode.results["control"]["divergence"] == 1.0
    assert [one.step for one in mode.control] == list(range(20))
    assert mode.control[4].reference_loss == 5.0


@pytest.mark.usefixtures("once_is_enough")
def test_it_is_read_from_files(tmp_path: Path) -> None:
    files = CompareFiles(tmp_path / "out")
    files.create()
    write_json(files.asked, {"steps": 2})
    for who in (LEADER, FIRST, SUSPECT):
        files.introduce(who)
        journal = files.journal(who, "lock-step")
        journal.append(
            "site",
            {
                "site": {
                    "module": "ffn",
                    "phase": "fwd_out",
                    "tensor": "0",
                    "call": 0,
                    "dtype": "float32",
                    "shape": [10],
                }
            },
        )
        journal.append("layout", {"sites": [0]})
        for step in range(2):
            wrong = (Difference(0, 1, answer=f"{step}"),) if who is SUSPECT else ()
            journal.append("step", {"step": Step(step, 0, differences=wrong).to_json()})
        journal.close()
    result = judge(files, "suspect")
    assert result.outcome == "differs"
    assert result.modes[0].total is not None
    assert (result.modes[0].total.mismatches.count, result.modes[0].total.mismatches.of) == (2, 20)
    assert result.asked["steps"] == 2
