"""A rank dies or stalls in the midst of a save: the others are told who, and the next start finds what was there before."""

from __future__ import annotations

import signal

import pytest

from tests.guard.children import Child, Moment, gone_on, of_more_ranks, run_children, small_job, struck
from tests.guard.harness import Launch, Scenario, Seen, launch

pytestmark = pytest.mark.timeout(300)

DIE = [
    Moment("begin", 0),
    Moment("write", 1),
    Moment("read back", 2),
    Moment("publish", 0),
    Moment("published", 0, left=("step-00000002", "step-00000003")),
]
SLOW = Moment("fsync", 1, sleep=8.0, timeout=5.0, checkpoint_timeout=60.0)
TOO_SLOW = Moment("fsync", 1, sleep=12.0, timeout=5.0, checkpoint_timeout=6.0)

EXITS = Moment("write", 1, exits=True, checkpoint_timeout=120.0)


def _child(name: str, world_size: int, run: object, given: object = None, folder: str = "") -> Child:
    return Child(name, world_size, run, given, folder)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    moments = [*DIE, SLOW, TOO_SLOW, EXITS]
    first = [_child(moment.name, 3, struck, moment, moment.name.replace(" ", "-")) for moment in moments]
    first += [_child("one process", 1, small_job), _child("two nodes", 2, small_job)]
    then = [_child(moment.name, 3, gone_on, moment, moment.name.replace(" ", "-")) for moment in (*DIE, TOO_SLOW)]
    then += [_child("fewer ranks", 1, of_more_ranks, folder="two-nodes")]
    scenarios = [Scenario("first", run_children, first), Scenario("then", run_children, then)]
    folder = tmp_path_factory.mktemp("interrupted")
    return launch(scenarios, 3, folder, deadline=200, process_group=False)


def _of(done: Launch, when: str, name: str) -> list[Seen]:
    return [seen[name] for seen in done.seen(when) if name in seen]


@pytest.mark.parametrize("moment", DIE, ids=lambda moment: moment.name)
def test_the_others_are_told_who_died(done: Launch, moment: Moment) -> None:
    for rank, seen in enumerate(_of(done, "first", moment.name)):
        if rank == moment.rank:
            assert seen == {"ended": -signal.SIGKILL}
            continue
        assert seen["error"]["type"] == "RankLost"
        assert "GuardFailure" in seen["error"]["family"]
        message = seen["error"]["message"]
        # With the first rank its store is gone, and nobody can tell more than that.
        assert f"rank {moment.rank} (node n{moment.rank})" in message or (moment.rank == 0 and "store" in message), (
            message
        )
        assert "says nothing about the numbers" in message
        assert seen["waited"] < moment.checkpoint_timeout + 40


@pytest.mark.parametrize("moment", [*DIE, TOO_SLOW], ids=lambda moment: moment.name)
def test_the_next_start_finds_what_was_whole(done: Launch, moment: Moment) -> None:
    for seen in _of(done, "then", moment.name):
        assert [name for name in seen["visible"] if not name.startswith(".")] == list(moment.left)
        assert seen["from"] == int(moment.left[-1].removeprefix("step-"))
        assert seen["right"]
        assert seen["afterwards"] == [*moment.left, "step-00000004"], "what was hidden and half is gone"


def test_a_rank_that_exits_does_not_let_the_others_wait(done: Launch) -> None:
    for rank, seen in enumerate(_of(done, "first", EXITS.name)):
        if rank == EXITS.rank:
            assert seen == {"ended": 0}, "of a child that was ended by an exception"
            continue
        assert seen["error"]["type"] == "RankLost"
        for words in ("given up by rank", "rank 1 (node n1) raised SystemExit: 7. This says nothing"):
            assert words in seen["error"]["message"], seen["error"]["message"]


def test_slow_storage_is_no_lost_rank(done: Launch) -> None:
    for seen in _of(done, "first", SLOW.name):
        assert seen["error"] is None
        assert seen["waited"] > SLOW.timeout, "it was not slow enough to prove anything"
        assert seen["right"]


def test_storage_that_is_slower_than_allowed_is_named(done: Launch) -> None:
    for rank, seen in enumerate(_of(done, "first", TOO_SLOW.name)):
        assert seen["error"]["type"] == "RankLost"
        assert "rank 1 (node n1)" in seen["error"]["message"] or rank == 1
        assert "checkpoint: write" in seen["error"]["message"]
    assert any("waiting for rank 1 (node n1)" in seen["error"]["message"] for seen in _of(done, "first", TOO_SLOW.name))


def test_one_process_and_two_nodes(done: Launch) -> None:
    for name in ("one process", "two nodes"):
        for seen in _of(done, "first", name):
            assert (seen["staged"], seen["from"], seen["right"]) == (2, 2, True)
            expected = "on the same node" if name == "one process" else "each file by a rank on another node"
            assert seen["read_back"].startswith(expected)


def test_fewer_ranks_than_saved(done: Launch) -> None:
    (seen,) = _of(done, "then", "fewer ranks")
    assert seen["error"]["type"] == "ConfigurationError"
    assert "saved by 2 ranks, this job has 1" in seen["error"]["message"]
