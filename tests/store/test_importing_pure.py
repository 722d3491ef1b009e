"""The ledger's ranges, the chart's stretches and the drills, against what they mean step by step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bitwitness.runfiles.faults import read_injected
from bitwitness.store import importing_ledger, importing_steps
from bitwitness.store.importing_ledger import Range, Sums, Undone, after_pruning, tally
from bitwitness.store.importing_steps import MOST, Stretch
from bitwitness.store.importing_values import moment, plain, real, text, whole
from tests.store.making import strike

RANGES = st.lists(
    st.builds(
        lambda first, length, outcome, start: Range(first, first + length, outcome, "", {}, start),
        st.integers(0, 30),
        st.integers(0, 12),
        st.sampled_from(importing_ledger.OUTCOMES),
        st.integers(1, 3),
    ),
    max_size=12,
).map(lambda ranges: sorted(ranges, key=lambda one: one.start))


@given(RANGES, st.integers(0, 12))
@settings(max_examples=150)
def test_ranges_say_of_each_step_what_was_said_of_it_last_and_worst(ranges: list[Range], cut: int) -> None:
    """However a journal is cut into batches; a later start overrules an earlier one, and within one the worst word counts."""
    severity = {outcome: number for number, outcome in enumerate(importing_ledger.OUTCOMES)}
    said: dict[int, tuple[int, int]] = {}
    for one in ranges:
        for step in range(one.first, one.last + 1):
            said[step] = max(said.get(step, (0, 0)), (one.start, severity[one.outcome]))
    found = importing_ledger.laid(importing_ledger.laid([], ranges[:cut]), ranges[cut:])
    assert {
        step: (one.start, severity[one.outcome]) for one in found for step in range(one.first, one.last + 1)
    } == said
    assert all(one.last < other.first for one, other in pairwise(found))
    assert all(one.last + 1 < other.first or one.words != other.words for one, other in pairwise(found)), "neighbours"
    assert sum(tally(found).values()) == len(said)


WORDS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 30), st.integers(0, 12), st.sampled_from(importing_ledger.OUTCOMES)),
        st.tuples(st.just("resume"), st.integers(0, 30)),
        st.tuples(st.just("start")),
        st.tuples(st.just("prune")),
    ),
    max_size=16,
)


@example([(0, 1, "passed"), ("start",), ("prune",), (0, 0, "passed")], 0)
@given(WORDS, st.integers(0, 16))
@settings(max_examples=200)
def test_what_was_thrown_away_counts_no_more_and_sums_are_never_more_than_what_passed(
    words: list[Any], cut: int
) -> None:
    """Against an account step by step; sums of ranges that were removed may be less than it says, without them they are it."""
    said: dict[int, tuple[int, int]] = {}
    severity = {outcome: number for number, outcome in enumerate(importing_ledger.OUTCOMES)}
    start, events, found, sums, pruned = 1, list[Range | Undone](), list[Range](), None, False

    def settle() -> None:
        nonlocal sums, found
        sums, kept = after_pruning(sums, events)
        found = importing_ledger.laid(found, kept)
        events.clear()

    for number, word in enumerate(words):
        if number == cut:
            settle()
        if word[0] == "start":
            start += 1
        elif word[0] == "resume":
            events.append(Undone(word[1]))
            said = {step: one for step, one in said.items() if step < word[1]}
        elif word[0] == "prune":
            settle()
            counts = tally(found)
            last = max([one.last for one in found] + ([sums.last] if sums else []), default=-1)
            if found:
                before = (sums.passed, sums.unverified, sums.failed) if sums else (0, 0, 0)
                totals = [counts[each] + more for each, more in zip(importing_ledger.OUTCOMES, before, strict=True)]
                sums, found, pruned = Sums(last, max(one.start for one in found), -1, *totals), [], True
        else:
            first, more, outcome = word
            events.append(Undone(first, start))
            said = {step: one for step, one in said.items() if step < first or one[0] == start}
            events.append(Range(first, first + more, outcome, "", {}, start))
            for step in range(first, first + more + 1):
                said[step] = max(said.get(step, (0, 0)), (start, severity[outcome]))
    settle()
    truth = [sum(one[1] == severity[outcome] for one in said.values()) for outcome in importing_ledger.OUTCOMES]
    mine = [tally(found)[each] + (getattr(sums, each) if sums else 0) for each in importing_ledger.OUTCOMES]
    assert mine[0] <= truth[0]
    assert pruned or mine == truth
    if sums is not None and sums.is_whole:
        assert all(said.get(step, (0, 9))[1] == 0 for step in range(sums.last + 1))


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 20), st.floats(-5, 5)), max_size=30))
@settings(max_examples=150)
def test_stretches_that_are_made_again_replace_what_was_said(said: list[tuple[int, int, float]]) -> None:
    new = [Stretch(first, first + more, more + 1, loss, loss, loss) for first, more, loss in said]
    found = importing_steps.laid([], new)
    last: dict[int, float | None] = {}
    for one in new:
        last |= dict.fromkeys(range(one.first, one.last + 1), one.loss)
    assert {step: one.loss for one in found for step in range(one.first, one.last + 1)} == last
    assert all(one.last < other.first for one, other in pairwise(found))


def test_a_long_run_stays_bounded_and_its_spikes_stay_visible() -> None:
    found: list[Stretch] = []
    for begin in range(0, 60_000, 1000):
        new = [
            Stretch(step, step, 1, 1.0, 1.0, 99.0 if step == 31_337 else 1.0, nonfinite=step == 7)
            for step in range(begin, begin + 1000)
        ]
        found = importing_steps.laid(found, new)
        assert len(found) <= MOST
    assert (found[0].first, found[-1].last, sum(one.count for one in found)) == (0, 59_999, 60_000)
    assert sum(one.nonfinite for one in found) == 1
    (spike,) = [one for one in found if one.loss_high == 99.0]
    assert spike.first <= 31_337 <= spike.last
    assert all(one.loss == pytest.approx(1.0) for one in found)


def test_means_are_weighted_and_what_is_unknown_stays_unknown() -> None:
    one, other = Stretch(0, 2, 3, loss=1.0, seconds=None), Stretch(3, 3, 1, loss=5.0, norm=None, seconds=2.0)
    merged = importing_steps.merged([one, other])
    assert (merged.loss, merged.norm, merged.seconds, merged.count) == (2.0, None, 2.0, 4)


def test_values_are_what_a_database_takes() -> None:
    assert (whole(True), whole(1.0), whole(-1), whole(1 << 41), whole(5)) == (None, None, None, None, 5)
    assert (real(True), real("nan"), real(float("inf")), real(10**400), real(3)) == (None, None, None, None, 3.0)
    assert text("a\0b\ud800") == "a\ufffdb\ufffd"
    assert text(7) == ""
    assert len(text("x" * 9999, 100)) <= 100
    assert text("x" * 9999 + "a", 100) != text("x" * 9999 + "b", 100)
    assert moment("2026-11-30T12:00:00+01:00") == "2026-11-30T11:00:00.000Z"
    assert [moment(one) for one in ("2026-11-30T12:00:00", "yesterday", 7, "0001-01-01T00:00:00+23:00")] == [""] * 4
    assert plain({"a": [float("nan"), 1 << 70, {1: "\0"}]}) == {"a": ["nan", "0x400000000000000000", {"1": "\ufffd"}]}


@given(st.binary(max_size=60))
def test_no_bytes_are_a_record_of_a_fault_unless_they_are(line: bytes) -> None:
    assert read_injected(line) is None


def test_a_record_of_a_fault_is_read() -> None:
    found = read_injected(strike(3, 7, start="s/2").encode())
    assert found is not None
    assert (found.rank, found.step, found.start, found.spec, found.node) == (3, 7, "s/2", "flip", "n1")
