"""What a fault did is judged by curves: here are curves of every kind, made up, and shares of them."""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwitness.errors import ConfigurationError
from bitwitness.faults.cells import CellResult
from bitwitness.faults.outcomes import (
    LABELS,
    Noise,
    Outcome,
    Series,
    Settings,
    classify,
    smoothed,
    unclear,
    worse,
)
from bitwitness.faults.statistics import highest_rate, reach, wilson

STEPS, STRUCK, NOISE = 120, 40, 0.02


def curve(seed: int, change: Callable[[int], float] = lambda step: 0.0) -> tuple[float, ...]:
    """A loss that falls, with the noise of a seed, and what is added to it."""
    draw = random.Random(seed)
    return tuple(0.5 + math.exp(-step / 30) + draw.gauss(0.0, NOISE) + change(step) for step in range(STEPS))


def series(losses: Sequence[float], accuracy: float = 0.9, loss: float = 0.5, **rest: object) -> Series:
    return Series(tuple(losses), evaluation={"accuracy": accuracy, "loss": loss}, struck=STRUCK, **rest)  # type: ignore[arg-type]


def told(run: Series, references: Sequence[Series], clean: Series, settings: Settings | None = None) -> Outcome:
    """The outcome of a run that has one."""
    found = classify(run, references, clean, settings)
    assert found is not None, unclear(run, clean)
    assert not unclear(run, clean)
    return found


REFERENCES = [series(curve(seed), 0.9 + 0.002 * (seed - 3), 0.5 + 0.001 * seed) for seed in range(1, 6)]
CLEAN = series(curve(0))
ACCURACY = Settings(final="accuracy")


def judged(change: Callable[[int], float], accuracy: float = 0.9) -> Outcome:
    """The curve of the clean run's own seed, with something added from the strike on."""
    return told(
        series(curve(0, lambda step: change(step - STRUCK) if step >= STRUCK else 0.0), accuracy),
        REFERENCES,
        CLEAN,
        ACCURACY,
    )


def test_equal_bits_are_masked() -> None:
    found = told(series(curve(0), identical=True), REFERENCES, CLEAN, ACCURACY)
    assert found.label == "masked-identical"
    assert found.onset is None


def test_a_little_drift_is_masked() -> None:
    assert judged(lambda after: 0.3 * NOISE).label == "masked-drifted"


def test_a_run_that_ends_better_says_so() -> None:
    found = judged(lambda after: -0.3 * NOISE, accuracy=0.91)
    assert found.label == "masked-drifted"
    assert found.better


def test_a_spike_that_goes_is_spike_recover() -> None:
    found = judged(lambda after: 2.0 * math.exp(-after / 4))
    assert found.label == "spike-recover"
    assert found.onset == STRUCK
    assert found.largest > 3


def test_one_step_without_a_number_is_a_spike_if_the_loss_comes_back() -> None:
    found = judged(lambda after: math.nan if after == 1 else 0.0)
    assert found.label == "spike-recover"
    assert found.largest == math.inf


def test_a_jump_that_stays_is_sharp() -> None:
    assert judged(lambda after: 1.5).label == "sharp-degrade"


def test_a_jump_over_three_steps_as_in_the_published_trace_is_sharp() -> None:
    # He et al.: 1.18 -> 1.60 -> 2.25 -> 2.46 over three steps.
    assert judged(lambda after: [0.0, 0.42, 1.07, 1.28][min(after, 3)]).label == "sharp-degrade"


def test_a_jump_that_is_made_good_in_part_is_sharp_slow() -> None:
    assert judged(lambda after: 0.6 + 1.4 * math.exp(-after / 25)).label == "sharp-slow-degrade"


def test_a_slow_rise_is_slow() -> None:
    assert judged(lambda after: 0.02 * after).label == "slow-degrade"


@pytest.mark.parametrize(("after", "label"), [(0, "immediate"), (1, "short-term"), (2, "short-term"), (3, "late")])
def test_a_loss_that_stays_nan_is_named_by_when(after: int, label: str) -> None:
    found = judged(lambda step: math.nan if step >= after else 0.0)
    assert found.label == f"{label}-nonfinite"
    assert found.onset == STRUCK + after
    assert found.final is not None


def test_a_norm_that_is_not_finite_dates_the_nan() -> None:
    losses = [math.nan if step > STRUCK else loss for step, loss in enumerate(curve(0))]
    norms = tuple(math.inf if step >= STRUCK else 1.0 for step in range(STEPS))
    quiet = Series(CLEAN.losses, (1.0,) * STEPS, CLEAN.evaluation)
    run = Series(tuple(losses), norms, struck=STRUCK)
    assert told(run, REFERENCES, quiet).label == "immediate-nonfinite"
    # Where healthy norms overflow too, as under a GradScaler, they say nothing.
    scaled = Series(CLEAN.losses, (math.inf, *(1.0,) * (STEPS - 1)), CLEAN.evaluation)
    assert told(run, REFERENCES, scaled).label == "short-term-nonfinite"


def test_a_bad_evaluation_after_good_training_is_low_test_accuracy() -> None:
    assert judged(lambda after: 0.0, accuracy=0.5).label == "low-test-accuracy"


@pytest.mark.parametrize(
    ("accuracy", "label"), [(0.86, "masked-drifted"), (0.52, "slight"), (0.3, "low-test-accuracy")]
)
def test_a_worse_evaluation_is_judged_by_what_seeds_differ_by(accuracy: float, label: str) -> None:
    noisy = [series(one.losses, 0.9 + 0.05 * (number - 2)) for number, one in enumerate(REFERENCES)]
    assert told(series(curve(0), accuracy), noisy, CLEAN, ACCURACY).label == label


@pytest.mark.parametrize(("end", "label"), [("crash", "crash"), ("hang", "hang"), ("detected", "stopped")])
def test_a_run_that_did_not_finish_is_named_by_its_end(end: str, label: str) -> None:
    found = told(series(curve(0)[:50], end=end), REFERENCES, CLEAN, ACCURACY)
    assert found.label == label
    assert found.onset == 50


def test_without_references_the_tolerance_is_the_noise() -> None:
    shifted = tuple(loss + 0.5 for loss in CLEAN.losses)
    assert told(series(shifted), [], CLEAN).label == "sharp-degrade"
    assert told(series(tuple(loss * 1.001 for loss in CLEAN.losses)), [], CLEAN).label == "masked-drifted"


@given(
    st.lists(st.one_of(st.floats(0, 1e6), st.just(math.nan), st.just(math.inf)), max_size=30),
    st.integers(0, 40),
    st.sampled_from([None, False]),
    st.sampled_from(["accuracy", "loss", "perplexity"]),
)
def test_every_run_has_one_outcome(losses: list[float], struck: int, identical: bool | None, final: str) -> None:
    run = Series(tuple(losses), evaluation={"loss": 1.0, "accuracy": 0.1}, identical=identical, struck=struck)
    found = classify(run, REFERENCES, CLEAN, Settings(final=final))
    if found is None:
        assert unclear(run, CLEAN) == "there are no losses"
        return
    assert found.label in LABELS
    assert not math.isnan(found.largest)
    if losses and not math.isfinite(losses[-1]):
        assert found.label.endswith("nonfinite")
    found.to_json()


@given(st.floats(1e-3, 1e3))
def test_the_unit_of_the_loss_does_not_matter(unit: float) -> None:
    """Kinds are shapes: the same curves in another unit are the same outcome."""

    def in_unit(one: Series) -> Series:
        return Series(tuple(unit * loss for loss in one.losses), evaluation=one.evaluation, struck=one.struck)

    jump = series(curve(0, lambda step: 1.5 if step >= STRUCK else 0.0))
    found = told(in_unit(jump), [in_unit(one) for one in REFERENCES], in_unit(CLEAN), ACCURACY)
    assert found.label == "sharp-degrade"


def test_another_seed_is_rarely_a_degradation() -> None:
    """Whatever changes a bit puts training on another path, as another seed does: that alone must not count as harm."""
    found = [told(series(curve(seed)), REFERENCES, CLEAN, ACCURACY).label for seed in range(20, 220)]
    assert found.count("masked-drifted") >= 0.95 * len(found)


def wandering(draw: random.Random, alike: float, jump: float = 0.0, at: int = 0) -> tuple[float, ...]:
    """A loss of 200 steps whose noise at a step is, but for a share, that of the step before; and a jump, in sigmas."""
    before, losses = draw.gauss(0.0, 1.0), []
    covariances = [alike**lag for lag in range(5)]
    smoothed_sigma = math.sqrt(2 * sum((5 - lag) * (1 + (lag > 0)) * one for lag, one in enumerate(covariances)) / 25)
    for step in range(200):
        losses.append(0.3 + 2 * math.exp(-step / 60) + 0.05 * (before + (jump * smoothed_sigma if step >= at else 0.0)))
        before = alike * before + math.sqrt(1 - alike * alike) * draw.gauss(0.0, 1.0)
    return tuple(losses)


EXHAUSTIVE = os.environ.get("BITWITNESS_EXHAUSTIVE") == "1"
RUNS = 150 if EXHAUSTIVE else 75
PAIRS = ((0.0, 3), (0.5, 6), (0.9, 3))
MORE_PAIRS = ((0.0, 6), (0.5, 3), (0.9, 6)) if EXHAUSTIVE else ()


@pytest.mark.parametrize(("alike", "count"), PAIRS + MORE_PAIRS)
def test_noise_is_not_harm_and_a_jump_of_six_sigma_is(alike: float, count: int) -> None:
    """Looking at 200 steps finds three sigma in one run of seven, so that as many of the harmless faults were called harmful."""
    draw = random.Random(f"{alike}/{count}")
    harmed = found = 0
    for _ in range(RUNS):

        def one(jump: float = 0.0) -> Series:
            evaluation = {"loss": 0.5 + 0.02 * draw.gauss(0.0, 1.0)}  # whose noise is more than what is tolerated
            return Series(wandering(draw, alike, jump, 100), evaluation=evaluation, struck=100 if jump else 20)

        references, clean = [one() for _ in range(count)], one()
        harmed += told(one(), references, clean).label not in ("masked-identical", "masked-drifted")
        found += told(one(6.0), references, clean).label in ("sharp-degrade", "sharp-slow-degrade")
    assert harmed <= 0.03 * RUNS
    assert found >= 0.9 * RUNS


@pytest.mark.parametrize("left", range(1, 8))
def test_a_jump_in_the_last_steps_is_sharp(left: int) -> None:
    assert judged(lambda after: 1.5 if after >= STEPS - STRUCK - left else 0.0).label == "sharp-degrade"


@pytest.mark.parametrize("left", range(2, 8))
@pytest.mark.parametrize("height", [1.5, math.nan])
def test_a_spike_in_the_last_steps_is_a_spike(left: int, height: float) -> None:
    assert judged(lambda after: height if after == STEPS - STRUCK - left else 0.0).label == "spike-recover"


def test_a_rise_after_a_step_without_a_number_is_sharp() -> None:
    assert judged(lambda after: math.nan if after == 0 else 1.5).label == "sharp-degrade"


# What was not the fault ----------------------------------------------------------------------------------------------


def test_an_evaluation_that_is_no_number_without_the_fault_either_says_nothing() -> None:
    clean = series(curve(0), math.nan)
    assert told(series(curve(0), math.nan), REFERENCES, clean, ACCURACY) == Outcome("masked-drifted")
    assert told(series(curve(0), math.nan), REFERENCES, CLEAN, ACCURACY).label == "low-test-accuracy"


NAN_AT_END = series((*curve(0)[:-1], math.nan))


@pytest.mark.parametrize(
    ("run", "clean", "words"),
    [
        (NAN_AT_END, NAN_AT_END, "the loss is not finite without the fault either"),
        (series(curve(0)), NAN_AT_END, "the loss is not finite without the fault either"),
        (series(curve(0)), series(curve(0)[:9], end="crash"), r"without the fault did not finish either \(crash\)"),
        (series((), end="hang"), series((), end="hang"), r"without the fault did not finish either \(hang\)"),
        (Series(curve(0)[:9], end="crash"), CLEAN, "nothing was hit"),
        (Series(curve(0), identical=True), CLEAN, "nothing was hit"),
        (series((), end="refused"), CLEAN, "the run was refused"),
    ],
)
def test_what_is_not_the_faults_doing_has_no_outcome(run: Series, clean: Series, words: str) -> None:
    assert classify(run, REFERENCES, clean, ACCURACY) is None
    assert re.search(words, unclear(run, clean))


def test_steps_in_which_the_clean_loss_is_not_finite_say_nothing() -> None:
    def holed(losses: Sequence[float]) -> Series:
        return series([math.inf if step == 60 else loss for step, loss in enumerate(losses)])

    assert told(holed(curve(0)), REFERENCES, holed(curve(0))).label == "masked-drifted"


def test_perplexity_and_loss_are_shares_and_accuracy_is_absolute() -> None:
    run, other = series((), 0.8, 1.1), series((), 0.9, 1.0)
    assert worse(run, other, Settings(final="accuracy")) == pytest.approx(0.1)
    assert worse(run, other, Settings(final="loss")) == pytest.approx(0.1)
    assert worse(run, other, Settings(final="perplexity")) == pytest.approx(math.expm1(0.1))
    assert worse(Series(()), other, Settings()) is None


def test_sigma_is_the_spread_of_the_seeds() -> None:
    references = [Series((value,) * 10) for value in (0.9, 1.1, 1.0)]
    noise = Noise.of(references, Series((1.0,) * 10), Settings(), 10)
    assert noise.sigma == pytest.approx([math.sqrt(2 * 0.02 / 3)] * 10)


def test_smoothing_looks_back_only() -> None:
    assert smoothed([0.0, 0.0, 3.0, 0.0], 3) == [0.0, 0.0, 1.0, 1.0]


def test_text_of_results_is_read_as_numbers() -> None:
    result = CellResult(
        "k", "finished", losses=(1.0, "nan", "inf"), norms=("-inf",), evaluation={"loss": "nan"}, first_step=1
    )
    found = Series.of(result, False)
    assert math.isnan(found.losses[1])
    assert found.losses[2] == math.inf
    assert found.struck == 1


@pytest.mark.parametrize(
    "wrong", [{"final": "bleu"}, {"smooth": 0}, {"jump": True}, {"tolerance": 0.0}, {"sigmas": "3"}]
)
def test_impossible_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Settings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("freedom", "looks", "chance", "limit"),
    # Student's distribution in any table; the normal one where an estimate is as good as known.
    [(3, 1, 0.01, 4.541), (6, 1, 0.01, 3.143), (1, 1, 0.01, 31.82), (10, 1, 0.05, 1.812), (1e5, 10, 0.01, 3.090)],
)
def test_what_chance_reaches(freedom: float, looks: float, chance: float, limit: float) -> None:
    assert reach(freedom, looks, chance) == pytest.approx(limit, rel=1e-3)


@pytest.mark.parametrize("wrong", [(0, 1, 0.1), (1, 0, 0.1), (1, 1, 0.0), (1, 1, 0.5)])
def test_impossible_chances_are_refused(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="no limit"):
        reach(*wrong)


# Shares --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_published(count: int, of: int, low: float, high: float) -> None:
    found = wilson(count, of)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


@given(st.integers(0, 500), st.integers(0, 500), st.floats(0.5, 0.999))
def test_an_interval_holds_its_share(one: int, other: int, confidence: float) -> None:
    count, of = min(one, other), max(one, other)
    found = wilson(count, of, confidence)
    assert 0.0 <= found.low <= found.high <= 1.0
    if found.share is not None:
        assert found.low <= found.share <= found.high
        mirrored = wilson(of - count, of, confidence)
        assert found.low == pytest.approx(1.0 - mirrored.high, abs=1e-12)
    assert str(found)


def test_no_alarm_in_many_leaves_about_three_in_as_many() -> None:
    assert highest_rate(1000) == pytest.approx(3e-3, rel=0.01)
    assert highest_rate(0) == 1.0


@pytest.mark.parametrize("wrong", [(2, 1), (-1, 4)])
def test_an_impossible_share_is_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no share"):
        wilson(*wrong)
    with pytest.raises(ValueError, match="trials"):
        highest_rate(-1)
