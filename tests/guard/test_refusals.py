"""What cannot be guarded is refused by name, on every rank, with what to do about it; and nothing is left behind."""

from __future__ import annotations

import pytest

from bitwitness import Policy, PolicyError
from tests.guard.harness import Launch, Scenario, launch
from tests.guard.refusals import REFUSALS, absent, ask

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Every refusal, on three ranks."""
    scenarios = [Scenario(name, ask, name) for name in REFUSALS]
    scenarios.append(Scenario("a rank without a guard", absent, 2))
    return launch(scenarios, 3, tmp_path_factory.mktemp("refusals"), deadline=200)


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_everywhere_and_told_what_to_do(done: Launch, name: str) -> None:
    refusal = REFUSALS[name]
    for seen in done.seen(name):
        error = seen["error"]
        assert error is not None, "was accepted"
        assert error["type"] == refusal.error, error["message"]
        assert all(word in error["message"] for word in refusal.words), error["message"]


@pytest.mark.parametrize("name", [name for name, refusal in REFUSALS.items() if not refusal.leaves_files])
def test_nothing_is_half_written(done: Launch, name: str) -> None:
    assert [file for seen in done.seen(name) for file in seen["files"] if file != "file"] == []


@pytest.mark.parametrize("name", [name for name, refusal in REFUSALS.items() if refusal.again])
def test_the_model_can_be_guarded_afterwards(done: Launch, name: str) -> None:
    for seen in done.seen(name):
        assert seen["afterwards"] is None
        assert seen["trained"]


def test_a_rank_without_a_guard_is_named(done: Launch) -> None:
    for rank, seen in enumerate(done.seen("a rank without a guard")):
        if rank == 2:
            continue
        assert seen["error"]["type"] == "RankLost"
        assert "rank 2" in seen["error"]["message"]
        assert seen["waited"] < 3 + 20


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("audit", "sometimes"),
        ("audit_every", 0),
        ("check_every", 2.5),
        ("on_detection", "pray"),
        ("timeout", float("nan")),
    ],
)
def test_wrong_settings(setting: str, value: object) -> None:
    with pytest.raises(PolicyError, match=f"{setting}="):
        Policy.every_step(**{setting: value})
