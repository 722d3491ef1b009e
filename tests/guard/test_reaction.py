"""Instead of raising: a step that is run again leaves no trace, one that is dropped leaves the weights; all ranks alike.

Ways to train that are nearly others are tried with `BITWITNESS_EXHAUSTIVE=1`.
"""

from __future__ import annotations

import pytest

from bitwitness import Policy
from bitwitness.runfiles import RunFiles
from tests.guard import reacting
from tests.guard.harness import Launch, Scenario, launch
from tests.guard.reacting import CALLBACKS, RAISED, RETRIED, SKIPPED, Callback, TooMany, if_transient

pytestmark = pytest.mark.timeout(300)

TOO_MANY = {
    "three in a row": (TooMany((1, 2, 3), 2), [True, False, False], 3),
    "none allowed": (TooMany((1,), 0), [True], 1),
    "now and then": (TooMany((1, 3, 5), 1), [True, False, True, False, True, False], None),
}
"""With what happened to the updates, and the step at which it must raise."""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    scenarios = [
        *(Scenario(f"retried, {name}", reacting.retried, name) for name in RETRIED),
        *(Scenario(f"raised, {name}", reacting.raised, name) for name in RAISED),
        *(Scenario(f"skipped, {name}", reacting.skipped, name) for name in SKIPPED),
        *(Scenario(f"asked, {name}", reacting.asked, name) for name in CALLBACKS),
        *(Scenario(f"too many, {name}", reacting.too_many, given) for name, (given, _, _) in TOO_MANY.items()),
        Scenario("wrong twice", reacting.wrong_twice),
        Scenario("without loss_fn", reacting.without_loss_fn),
        Scenario("skipped after the update", reacting.skipped_after_the_update),
        Scenario("told where", reacting.told_where),
    ]
    return launch(scenarios, 3, tmp_path_factory.mktemp("reaction"), deadline=200, collective_timeout=20)


@pytest.mark.parametrize("name", RETRIED)
def test_a_retried_step_leaves_no_trace(done: Launch, name: str) -> None:
    fault = RETRIED[name].faults[0]
    for rank, seen in enumerate(done.seen(f"retried, {name}")):
        hit, never_hit = seen["hit"], seen["reference"]
        assert hit["error"] is None
        assert (hit["struck"] > 0) == (rank == fault.rank)
        if (
            fault.step > 0
        ):  # the sums of the very first step are rounded before DDP regroups its buckets, and never again
            assert hit["states"] == never_hit["states"], "weights, statistics, moments, loss scale"
            assert hit["held"] == never_hit["losses"], "the loss that the loop reads after the step"
        assert hit["draws"] == never_hit["draws"]
        assert hit["updated"] == [True] * 4
        assert seen["actions"] == [[["retried", "right"]]]


@pytest.mark.parametrize("name", RETRIED)
def test_a_retried_step_is_on_record_once(done: Launch, name: str) -> None:
    journal = RunFiles(done.folder(f"retried, {name}") / "run").read_journal(0)
    records = [one for one in journal if one["kind"] == "steps"]
    assert [step for one in records for step in range(one["first"], one["last"] + 1)] == list(range(4))


@pytest.mark.parametrize("name", RAISED)
def test_what_cannot_be_retried_raises_and_says_why(done: Launch, name: str) -> None:
    _, step, words = RAISED[name]
    for seen in done.seen(f"raised, {name}"):
        error = seen["error"]
        assert (error["type"], error["step"]) == ("CorruptionDetected", step)
        assert words in error["message"]
        assert seen["actions"] == [[]]


def test_wrong_twice(done: Launch) -> None:
    for seen in done.seen("wrong twice"):
        error = seen["error"]
        assert (error["type"], error["step"], error["verdict"]["ranks"]) == ("CorruptionDetected", 2, [1])
        assert "The step was run again and was wrong again" in error["message"]
        assert sorted(seen["actions"]) == [[], [["retried", "wrong again"]]]
        assert seen["states"][-1] == seen["final"], "no update was made of it"
        assert seen["gradients cleared"]


def test_without_loss_fn_nothing_can_be_run_again(done: Launch) -> None:
    for seen in done.seen("without loss_fn"):
        assert (seen["error"]["type"], seen["error"]["step"]) == ("CorruptionDetected", 2)
        assert "loss_fn=" in seen["error"]["message"]


@pytest.mark.parametrize("name", SKIPPED)
def test_a_skipped_step_leaves_everything_as_it_was(done: Launch, name: str) -> None:
    for rank, seen in enumerate(done.seen(f"skipped, {name}")):
        hit, plain = seen["hit"], seen["reference"]
        assert hit["error"] is None
        assert hit["updated"] == [True, True, False, True]
        if name != "statistics" or rank == 0:  # the others hold those that DDP has broadcast, and will again
            assert hit["states"][3] == hit["states"][2] != hit["states"][4]
            assert hit["states"] == plain["states"]
        assert hit["draws"] == plain["draws"]
        assert seen["actions"] == [[["skipped", ""]]]


@pytest.mark.parametrize("name", TOO_MANY)
def test_only_so_many_in_a_row(done: Launch, name: str) -> None:
    given, updated, step = TOO_MANY[name]
    for seen in done.seen(f"too many, {name}"):
        assert seen["updated"] == updated
        if step is None:
            assert seen["error"] is None
        else:
            assert (seen["error"]["type"], seen["error"]["step"]) == ("CorruptionDetected", step)
            assert f"max_skips={given.max_skips}" in seen["error"]["message"]


def test_after_the_update_nothing_can_be_skipped(done: Launch) -> None:
    for seen in done.seen("skipped after the update"):
        assert (seen["error"]["type"], seen["error"]["step"]) == ("CorruptionDetected", 2)
        assert "could not be skipped" in seen["error"]["message"]


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_function_says_what_to_do(done: Launch, name: str) -> None:
    _, actions, words = CALLBACKS[name]
    for seen in done.seen(f"asked, {name}"):
        assert [action for of_one in seen["actions"] for action, _ in of_one] == actions
        if words or name == "says raise":
            assert (seen["error"]["type"], seen["error"]["step"]) == ("CorruptionDetected", 2)
            assert seen["error"]["readable"]
            assert words in seen["error"]["message"]
            assert seen["gradients cleared"]
        else:
            assert seen["error"] is None
            assert seen["updated"] == [True, True, actions != ["skipped"], True]


def test_the_function_is_told_where_the_incident_is(done: Launch) -> None:
    told = done.seen("told where")
    assert [seen["told"] for seen in told] == [[[[1], True]]] * 3
    draws = [seen["hit"]["draws"] for seen in done.seen("skipped, matmul")]
    assert [seen["draws"] for seen in told] == draws, "what the function draws is nobody else's"


def test_a_function_is_compared_by_its_name() -> None:
    """Ranks compare their policies as JSON: no address may stand in it."""

    def given(reaction: object) -> object:
        return Policy(on_detection=reaction).to_json()["on_detection"]  # type: ignore[arg-type]

    assert given(if_transient) == "function if_transient"
    assert given(Callback("skip")) == given(Callback("record")) == "function Callback"
    assert given(lambda verdict, incident: "skip") == given(lambda verdict, incident: "raise")
    assert given(if_transient) != given(Callback("skip"))
