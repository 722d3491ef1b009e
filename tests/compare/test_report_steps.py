"""What a report says is to be done, by what kept the judge from an answer; and that one of wrong types is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bitwitness.compare import report, report_words
from bitwitness.compare.judging import judge
from bitwitness.compare.simulated import Simulated
from bitwitness.errors import RunFilesError
from tests.compare.lineups import Broken, compared
from tests.compare.results_made import mode, result
from tests.compare.test_report import Elements, page, shown

# What keeps a judge from an answer, and what follows --------------------------------------------------------------------

WITHOUT = "the leader takes no further part: step 3: ZeroDivisionError: x (train.py:7)"
FAILED = mode(clean=True, ended=WITHOUT)
RARE = "suspect differs from 2 references. That may be the device, or work that now and then does not repeat: compare longer, about 40 steps"
PARTED = "lock-step: reference-1 differs from the leader in 3 steps; one of the two is wrong, and which cannot be said from this"
SIDED = "reference-1 computed what suspect computed, and not what reference-0 did: reference-0 may be the wrong one; compare again"
LOST = "it was not brought to its end: sharing tape 8 of this run was not completed on rank 0 (x); not there: rank 1 (last at y, 2 s ago)"


@pytest.mark.parametrize(
    ("given", "finished", "says"),
    [
        (
            {"modes": (mode(),), "sentence": RARE, "notes": ()},
            True,
            ("compare longer:", "whether the work itself repeats"),
        ),
        ({"modes": (FAILED,), "notes": ()}, True, ("look at the work first: reference-0 failed", "train.py:7")),
        (
            {"modes": (mode(clean=True, ended="step 3: IndexError"),), "notes": ()},
            True,
            ("why the suspect ended where",),
        ),
        (
            {"modes": (mode(clean=True),), "notes": (PARTED,)},
            True,
            ("which of reference-1 and reference-0 is wrong", "work itself"),
        ),
        (
            {"modes": (mode(clean=True),), "sentence": SIDED, "notes": ()},
            True,
            ("which of reference-1 and reference-0 is wrong",),
        ),
        ({"modes": (), "notes": ()}, True, ("remove that reason",)),
        ({"modes": (mode(clean=True),), "notes": (LOST,)}, False, ("whoever stopped answering", "a new --out")),
        (
            {"modes": (), "notes": ("it was not brought to its end: no space",)},
            False,
            ("remove what ended it (no space)",),
        ),
        ({"modes": (), "notes": ()}, False, ("this comparison was interrupted",)),
    ],
    ids=["rare", "leader", "suspect", "parted", "sided", "other", "lost rank", "disk", "interrupted"],
)
def test_each_reason_has_its_own_next_step_and_blames_nobody(given: Any, finished: bool, says: tuple[str, ...]) -> None:
    made = result("not characterised", **given)
    for text in (Elements(page(made, finished)).text, shown(report.record(made, finished))):
        assert [one for one in (*says, "blame nobody") if one not in text] == []
        for never in (
            "scontrol",
            "cordon",
            "evidence for its return",
            "vendor has answered",
            "judge again when it has ended",
        ):
            assert never not in text


def test_figures_of_what_is_too_rare_stay_in_the_report() -> None:
    made = result("not characterised", modes=(mode(),), sentence=RARE)
    total = made.modes[0].total
    assert total is not None
    for text in (Elements(page(made)).text, shown(report.record(made))):
        assert f"{total.mismatches.count:,} of {total.mismatches.of:,}" in text
        assert "steps were hit: to see it again" in text


@pytest.mark.parametrize("outcome", ["differs", "nothing seen", "not characterised"])
def test_that_the_work_may_not_repeat_is_always_said(outcome: str) -> None:
    assert "a race, a counter that all" in Elements(page(result(outcome))).text


def test_the_first_line_is_no_answer_where_there_is_none() -> None:
    for may_run in (False, True):
        made = report.record(result("nothing seen"), finished=False, may_run=may_run)
        assert made["outcome"] == "not characterised"
        first = shown(made).splitlines()[0]
        assert first.startswith(
            "NOT CHARACTERISED: it was not brought to its end, and nothing was seen so far: suspect gave"
        )
        assert ("judge again when it has ended" in shown(made)) == may_run
    assert report.record(result(), finished=False)["outcome"] == "differs"


def test_steps_are_left_out_for_the_reason_that_was_found() -> None:
    why = "lock-step: 3 of 203 steps do not count: no reference besides the leader has done them"
    for notes, said in (((why,), "3 left out: no reference besides the leader has done them"), ((), "3 left out;")):
        made = report.record(result("not characterised", notes=notes))
        assert said in report_words.mode_line(made["modes"][0], made)
        assert "Grey steps are not judged, because" not in page(result(notes=notes))


def test_the_suspect_did_not_come_to_the_end_only_where_it_was_the_suspect() -> None:
    def line(ended: str, may_run: bool = False) -> str:
        made = report.record(result(modes=(mode(ended=ended),)), finished=not may_run, may_run=may_run)
        return report_words.mode_line(made["modes"][0], made)

    assert "it ended when reference-0 failed (step 3: ZeroDivisionError: x (train.py:7))" in line(WITHOUT)
    assert "the suspect did not come to the end (step 3: IndexError)" in line("step 3: IndexError")
    assert "the comparison was ended before" in line("interrupted")
    assert "or still runs" in line("unfinished", may_run=True)


def test_what_the_judge_says_is_understood(tmp_path: Path) -> None:
    """The words that decide what is to be done are the judge's own."""
    files = compared(
        tmp_path, {"reference-1": Simulated("fwd_out:head @ every=1 : n=1 -> set=9.0", 5)}, modes=["lock-step"]
    )
    made = report.record(judge(files, "suspect"))
    assert report_words.in_doubt(made) == ["reference-1"]
    assert "left out: references differ among themselves" in report_words.mode_line(made["modes"][0], made)
    files = compared(tmp_path / "failed", {"reference-0": Broken(2)}, modes=["lock-step"])
    made = report.record(judge(files, "suspect"))
    assert made["outcome"] == "not characterised"
    assert "it ended when reference-0 failed (step 2: IndexError: index 7000" in report_words.mode_line(
        made["modes"][0], made
    )


_NO_TEXTS: list[Any] = [None, 3, [], {}]
_NO_BOOLS: list[Any] = [None, 1, "yes", []]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("outcome", "sentence", "version", "made") for value in _NO_TEXTS),
        *(("finished", value) for value in _NO_BOOLS),
        *(("confidence", value) for value in (None, 0, 1, 3, "x")),
        ("outcome", "good"),
        ("modes", {}),
        ("references", "x"),
    ],
)
def test_a_report_of_wrong_types_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    made = report.record(result(modes=()))
    (tmp_path / "report.json").write_text(json.dumps(made))
    assert report.read(tmp_path)["outcome"] == "differs"
    (tmp_path / "report.json").write_text(json.dumps(made | {name: value}))
    with pytest.raises(RunFilesError, match=rf"report.json is damaged.*{name}"):
        report.read(tmp_path)
