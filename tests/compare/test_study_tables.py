"""The figures and statements of the study, from results that nobody had to train for: each statement can hold, differ and not be reached."""

from __future__ import annotations

import json

import pytest

from bitwitness.compare import published
from bitwitness.compare.nodes import BWD_FFN, FWD_ATTENTION, FWD_FFN, INVENTED
from bitwitness.compare.published import CELLS
from bitwitness.compare.simulated import read
from bitwitness.compare.study_shape import Statement, shape
from bitwitness.compare.study_tables import Figures, Frequency, pretraining, spiky
from bitwitness.compare.study_view import UNPUBLISHED, Words, render, to_json
from bitwitness.faults.statistics import Share, wilson
from tests.compare.studies import ELEMENTS, NODES, STEPS, changed, free, row, study


def held(of: Figures, words: str) -> Statement:
    (found,) = (one for one in shape(of) if words in one.says)
    return found


# Nodes ---------------------------------------------------------------------------------------------------------------


def test_there_are_fifteen_and_each_can_be_played() -> None:
    assert [one.number for one in INVENTED] == list(range(1, 16))
    for one in INVENTED:
        on_modules, on_operations = read(str(one))
        assert len(on_modules) == len(one.parts)
        assert not on_operations
        assert all(fault.where.each for fault in on_modules)


@pytest.mark.parametrize("number", [1, 10, 11])
def test_published_rates_are_planted_as_they_stand(number: int) -> None:
    for cell, rate in published.NODES[number].frequencies.items():
        assert NODES[number].planted(cell, ELEMENTS, STEPS) == pytest.approx(rate)


def test_what_is_planted_follows_from_onset_and_from_the_elements_that_are_hit() -> None:
    assert NODES[13].planted(FWD_ATTENTION, ELEMENTS, 600) == pytest.approx(1e-3 / 4)
    assert NODES[13].planted(FWD_ATTENTION, ELEMENTS, 450) == 0.0
    assert NODES[7].planted(FWD_ATTENTION, 800, 600) == pytest.approx(0.05 * 8 / 800)
    assert NODES[5].planted(FWD_FFN, ELEMENTS, 600) is None, "a stuck bit may have been right"
    assert NODES[5].planted(BWD_FFN, ELEMENTS, 600) == 0.0


# Figures -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "planted", "strikes", "agreement"),
    [
        (0, 5e-7, 60.0, "none expected"),
        (0, 1e-3, 0.6, "none expected"),
        (0, 1e-3, 60.0, "outside"),
        (1000, 1e-3, 60.0, "within"),
        (1000, 2e-3, 60.0, "outside"),
        (0, 0.0, 0.0, "none planted"),
        (1, 0.0, 0.0, "outside"),
        (7, None, 60.0, "not predicted"),
    ],
    ids=["rare", "seldom", "missed", "found", "other", "nothing", "surprise", "unknown"],
)
def test_agreement_of_planted_and_measured(count: int, planted: float | None, strikes: float, agreement: str) -> None:
    assert Frequency(CELLS[0], wilson(count, 10**6), planted, None, strikes).agreement == agreement


def test_figures_are_those_of_the_right_cells() -> None:
    eleven = study().nodes[10]
    shares = [one.measured.share for one in eleven.frequencies]
    assert shares == pytest.approx([2.89e-2, 2.25e-3, 6.71e-3, 1.08e-4], rel=1e-2)
    assert [one.published for one in eleven.frequencies] == [2.89e-2, 2.25e-3, 6.71e-3, 1.08e-4]
    assert eleven.noise == 0.05
    assert study().nodes[5].tuned.divergence == 1.0
    assert study().control.accuracy == 0.84


def test_a_free_run_is_summed_up_by_its_last_steps() -> None:
    found = pretraining(free(0.5, 3.0, 7).series, 7)
    assert (found.parted, found.drift, found.weights) == (7, 3.0, 20.0)
    assert found.gap == pytest.approx(0.5)
    assert found.loss == pytest.approx(2.5)
    assert pretraining(free(None, 3.0, 7).series, 7).gap is None, "a loss that is not finite is near to none"
    assert pretraining((), None).drift is None


def test_spikes() -> None:
    assert spiky([10, *[0] * 9]) == 1.0
    assert spiky([1] * 10) == pytest.approx(0.1)
    assert spiky([0] * 10) is None


# Statements ----------------------------------------------------------------------------------------------------------


def test_all_hold_where_all_is_as_published() -> None:
    assert [one.says for one in shape(study()) if one.held != "holds"] == []


CHANGED = [
    ("The references agree", changed(4, "free", void=3)),
    ("The references agree", changed(4, "lock_step", ended="step 3: RuntimeError: broken")),
    ("Nodes 2 and 3 show nothing", changed(2, "lock_step", first=5)),
    ("Single elements", {n: found for n in NODES for n, found in changed(n, "lock_step", rows=(row(CELLS[0], 9, severity=2.0),)).items()}),
    ("noise of the gradient", changed(11, "parameters", noise=0.3)),
    ("noise of the gradient", changed(11, "parameters", gradient_lost=1)),
    ("Node 11 is the worst", changed(4, "parameters", noise=0.09)),
    ("Node 13 is clean", changed(13, "lock_step", first=3)),
    ("Attention is hit more often", changed(10, "lock_step", rows=tuple(row(cell, n) for cell, n in zip(CELLS, (1, 2, 9, 3), strict=True)))),
    ("Lock-step keeps errors", changed(12, "lock_step", rows=(row(FWD_FFN, 4),))),
    ("Node 6 destroys", changed(6, "tuning", results={"leader": {"digits": 0.8}, "node-06": {"digits": 0.1, "divergence": 0.9}})),
    ("Node 6 destroys", changed(6, "tuning", results={})),
    ("Losses stay near", {n: found for n in NODES for n, found in changed(n, "free", series=free(0.9, 3.0, 2).series, first=2).items()}),
    ("Losses stay near", {n: found for n in NODES for n, found in changed(n, "free", series=free(None, 3.0, 2).series, first=2).items()}),
    ("It is alike on most", {n: found for n in NODES for n, found in changed(n, "free", series=free(0.0, 10.0**n, 2).series, first=2).items()}),
    ("Drift does not tell", {n: found for n in NODES for n, found in changed(n, "free", series=free(0.0, study().nodes[n - 1].highest, 2).series, first=2).items()}),
    ("Of fine-tuning, most", {n: found for n in NODES if n != 1 for n, found in changed(n, "tuning", results={f"node-{n:02d}": {"digits": 0.5, "divergence": 0.5}}).items()}),
    ("Answers to single questions", {n: found for n in NODES if n > 6 for n, found in changed(n, "tuning", results={f"node-{n:02d}": {"digits": 0.83, "divergence": 0.0}}).items()}),
    ("Answers to single questions", changed(4, "tuning", results={"node-04": {"digits": 0.83, "divergence": 0.5}})),
    ("Mismatch frequencies", {n: found for n in (10, 11) for n, found in changed(n, "lock_step", rows=tuple(row(cell, 40) for cell in CELLS)).items()}),
    ("Errors come in spikes", {n: found for n in NODES for n, found in changed(n, "lock_step", series=()).items()}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "other"), CHANGED, ids=[f"{i}-{words[:12]}" for i, (words, _) in enumerate(CHANGED)])
def test_a_statement_differs_where_the_figures_do(words: str, other: dict[int, object]) -> None:
    expected = "not reached" if words == "Errors come in spikes" else "differs"
    assert held(study(other), words).held == expected  # type: ignore[arg-type]


def test_a_short_study_does_not_reach_all_and_contradicts_nothing() -> None:
    short = study(steps=2)
    assert held(short, "Node 13 is clean").held == "not reached"
    assert held(short, "Attention is hit more often").held == "not reached"


def test_one_cell_in_twenty_may_be_outside_by_chance() -> None:
    rows = tuple(row(cell, round(rate * ELEMENTS * STEPS)) for cell, rate in published.NODES[10].frequencies.items())
    one_off = (row(CELLS[0], 2 * rows[0].mismatches.count), *rows[1:])
    found = held(study(changed(10, "lock_step", rows=one_off)), "Mismatch frequencies")
    assert found.held == "holds"
    assert "outside: node 10 fwd/attn" in found.ours


# Words ---------------------------------------------------------------------------------------------------------------


def words(of: Figures) -> Words:
    return Words(of, shape(of), STEPS, 0, 12.5, "2026-01-01T00:00:00Z", "torch <2>")


def test_the_same_cells_in_the_page_in_markdown_and_in_the_record() -> None:
    shown = words(study())
    page, text, record = render(shown, "study.html.jinja"), render(shown, "study.md.jinja"), to_json(shown)
    for cell in (cells[3] for cells in shown.tables[1].rows):
        assert cell in page
        assert cell in text
    assert "torch &lt;2&gt;" in page
    assert record["nodes"][10]["frequencies"]["fwd/attn"]["published"] == 2.89e-2
    json.dumps(record, allow_nan=False)


def test_gaps_of_the_published_tables_are_named_and_what_is_too_rare_says_so() -> None:
    tables = {one.title: one for one in words(study()).tables}
    cells = {(one[0], one[1]): one for one in tables["Mismatch frequency by submodule and direction"].rows}
    assert cells["4", "fwd/attn"][4] == UNPUBLISHED
    assert cells["2", "fwd/ffn"][4] == "none seen"
    assert cells["2", "fwd/ffn"][3].startswith("none expected: 0 in 4.9e+06 elements, below 6.1e-07")
    assert cells["11", "fwd/attn"][4] == "2.89e-02"
    tuned = [one for one in tables["Fine-tuning"].rows if one[0].startswith("published")]
    assert ("published, CosmosQA", "node 6", "0.00 %", "100.00 %") in tuned


def test_a_number_that_is_not_finite_is_null_in_the_record() -> None:
    lost = changed(4, "free", series=free(None, float("inf"), 2).series, first=2)
    record = to_json(words(study(lost)))
    assert record["nodes"][3]["free"]["drift"] is None
    assert "not finite" in render(words(study(lost)), "study.md.jinja")


def test_nothing_that_was_compared_is_no_frequency() -> None:
    nothing = changed(4, "lock_step", rows=())
    (cell, *_) = study(nothing).nodes[3].frequencies
    assert cell.measured == Share(0, 0, 0.0, 1.0)
