"""Checkpoints that somebody breaks: each is refused by name, the one before is taken, and the end is that of a run never hit."""

from __future__ import annotations

import pytest

from tests.guard import writing
from tests.guard.harness import Launch, Scenario, launch
from tests.guard.resuming import KINDS, LOADERS, loaders, put_back, refuses_its_state
from tests.guard.saving import DAMAGE, NAMES, OTHERS, Copies, damaged, forbidden, mismatched, none_left, two_saves

pytestmark = pytest.mark.timeout(300)

SOURCE = "two saves"
FOLDER = "two_saves"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    scenarios = [
        Scenario(SOURCE, two_saves),
        Scenario("damaged", damaged, Copies(FOLDER, tuple(DAMAGE))),
        Scenario("none left", none_left, FOLDER),
        Scenario("forbidden", forbidden, FOLDER),
        Scenario("mismatched", mismatched, FOLDER),
        Scenario("troubled", writing.troubled),
        Scenario("parted", writing.parted, "raise"),
        Scenario("parted in shadow mode", writing.parted, "record"),
        Scenario("in shadow mode", writing.in_shadow),
        Scenario("out of turn", writing.out_of_turn),
        Scenario("caught by the loop", writing.caught_by_the_loop),
        Scenario("retained", writing.retained),
        Scenario("told to stop", writing.told_to_stop),
        Scenario("under suspicion", writing.under_suspicion),
        Scenario("in quarantine", writing.in_quarantine),
        Scenario("foreign", writing.foreign),
        *(Scenario(f"resumed, {name}", put_back, name) for name in KINDS),
        *(Scenario(f"loader, {name}", loaders, name) for name in LOADERS),
        Scenario("refuses its state", refuses_its_state),
    ]
    return launch(scenarios, 3, tmp_path_factory.mktemp("checkpoints"), deadline=200, collective_timeout=20)


def test_saves_change_nothing(done: Launch) -> None:
    for seen in done.seen(SOURCE):
        assert seen["final"] == seen["expected"]
        assert seen["visible"] == ["step-00000002", "step-00000004"]
        newest, oldest = seen["labels"]
        assert (newest["step"], oldest["step"]) == (4, 2)
        assert sorted(newest["files"]) == [f"rank-0000{rank}.pt" for rank in range(3)] + ["shared.pt"]
        assert newest["read_back"] == "each file by a rank on another node; the weights by rank 1 on n1"
        assert newest["passed"]["replicas"] == newest["passed"]["numerics"] == 3
        assert newest["passed"]["replay"] == 0, "only the first step was audited"
        assert newest["failed"] == {}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_damaged_is_refused_by_name(done: Launch, name: str) -> None:
    for rank, of_rank in enumerate(done.seen("damaged")):
        seen = of_rank[name]
        assert seen["from"] == 2
        assert seen["right"], "training from the checkpoint before it ends elsewhere"
        (event,) = seen["journal"]
        ((refused, reason),) = event["refused"]
        assert (event["step"], refused) == (2, "step-00000004")
        assert all(word in reason for word in NAMES[name]), reason
        told = [line for line in seen["logged"] if "step-00000004 is refused" in line]
        assert [reason in line for line in told] == ([True] if rank == 0 else [])


def test_none_left(done: Launch) -> None:
    for seen in done.seen("none left"):
        error = seen["error"]
        assert error["type"] == "CheckpointError"
        assert all(
            words in error["message"]
            for words in ("none of the 2 checkpoints", "step-00000004: shared.pt differs", "step-00000002", "no label")
        )
        assert (seen["untouched"], seen["unchanged"], seen["trained"]) == (True, True, True)


def test_an_incident_forbids_what_it_casts_doubt_on(done: Launch) -> None:
    for rank, seen in enumerate(done.seen("forbidden")):
        assert seen["from"] == 2
        if rank == 0:
            assert any("step-00000004 is refused: incident" in line and "(replay)" in line for line in seen["logged"])
        assert seen["saved"] == "step-00000004", "the distrusted one makes way"
        assert seen["visible"] == ["step-00000002", "step-00000004"]
        assert seen["again"] == 4
        assert seen["right"]


@pytest.mark.parametrize("name", OTHERS)
def test_another_job_is_told_so(done: Launch, name: str) -> None:
    for seen in done.seen("mismatched"):
        error = seen[name]["error"]
        assert error is not None, "was accepted"
        assert error["type"] == "ConfigurationError", error["message"]
        assert all(word in error["message"] for word in OTHERS[name][2]), error["message"]
        assert seen[name]["unchanged"]


def test_another_number_of_ranks(done: Launch) -> None:
    for seen in done.seen("mismatched"):
        error = seen["world"]["error"]
        assert error["type"] == "ConfigurationError"
        assert "saved by 4 ranks, this job has 3" in error["message"]


# Saving under difficulties --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", writing.TROUBLES)
def test_a_save_that_fails_is_told_everywhere_and_leaves_nothing(done: Launch, name: str) -> None:
    trouble = writing.TROUBLES[name]
    for of_rank in done.seen("troubled"):
        seen = of_rank[name]
        assert seen["error"] is not None, "was published"
        assert seen["error"]["type"] == "CheckpointError"
        assert all(word in seen["error"]["message"] for word in trouble.words), seen["error"]["message"]
        assert seen["error"]["message"].count("as they were") == 1, seen["error"]["message"]
        assert seen["files"] == ["step-00000001"], "the one before is as it was, and nothing half is left"
        assert seen["unchanged"]


def test_training_goes_on_after_failed_saves(done: Launch) -> None:
    for seen in done.seen("troubled"):
        assert seen["right"]
        assert seen["steps"] == 1 + len(writing.TROUBLES)
        assert seen["from"] == seen["steps"]
        assert seen["right afterwards"]
        assert seen["visible"] == ["step-00000001", f"step-{seen['steps']:08d}"]


def test_a_checkpoint_is_not_lost_to_one_that_cannot_replace_it(done: Launch) -> None:
    for seen in done.seen("troubled"):
        assert seen["replacing"]["error"]["type"] == "CheckpointError"
        assert seen["replacing"]["files"], "the old one is there, bit for bit"


def test_replicas_that_parted_are_not_saved(done: Launch) -> None:
    for seen in done.seen("parted"):
        error = seen["error"]
        assert error["type"] == "CorruptionDetected"
        assert (error["verdict"]["check"], error["verdict"]["ranks"]) == ("replicas", [1])
        assert error["readable"]
        assert seen["visible"] == ["step-00000001"]
        assert (seen["foreign"]["type"], seen["called"]) == ("CorruptionDetected", False)
        assert (seen["from"], seen["right"]) == (1, True)


def test_in_shadow_mode_they_are_saved_and_not_trusted(done: Launch) -> None:
    for rank, seen in enumerate(done.seen("parted in shadow mode")):
        assert seen["error"] is None
        assert (seen["foreign"], seen["called"]) == (None, True)
        assert seen["visible"] == ["step-00000001", "step-00000002"]
        assert "memory corruption on rank 1 (node n1)" in seen["failed"]["step-00000002"]["replicas"]
        assert seen["failed"]["step-00000001"] == {}
        assert (seen["from"], seen["right"]) == (1, True)
        told = [
            line for line in seen["logged"] if "step-00000002 is refused: it is not a verified one: replicas" in line
        ]
        assert len(told) == (rank == 0)


def test_in_shadow_mode_what_the_weights_took_is_in_every_later_label(done: Launch) -> None:
    for seen in done.seen("in shadow mode"):
        assert seen["visible"] == ["step-00000001", "step-00000004"]
        assert "compute corruption on rank 1" in seen["failed"]["step-00000004"]["replay"]
        assert seen["incidents"]["step-00000004"] == [], "known, and not dealt with"
        assert seen["from in shadow mode"] == 4, "who only watches sends no job back"
        assert (seen["from"], seen["right"]) == (1, True)


def test_only_between_two_steps(done: Launch) -> None:
    for seen in done.seen("out of turn"):
        assert (seen["nothing there"], seen["at the beginning"]) == (0, "step-00000000")
        for when in ("after a micro-batch", "before verify_weights"):
            assert seen[when]["type"] == "ConfigurationError"
            assert "between two steps" in seen[when]["message"]
        for when in ("resume after a micro-batch", "resume after a step"):
            assert seen[when]["type"] == "ConfigurationError"
            assert "before the loop" in seen[when]["message"]
        assert seen["closed"]["type"] == "ConfigurationError"
        assert (seen["right"], seen["from"], seen["right again"]) == (True, 0, True)


def test_a_run_directory_that_is_gone_is_not_made_anew(done: Launch) -> None:
    for seen in done.seen("out of turn"):
        error, made = seen["gone"]
        assert error["type"] == "CheckpointError"
        assert "run.json is gone: was the storage unmounted" in error["message"]
        assert not made


def test_a_checkpoint_of_another_run_is_taken_with_a_warning(done: Launch) -> None:
    for rank, seen in enumerate(done.seen("out of turn")):
        first, second = seen["runs"]
        told = [
            f"saved by another run ({first}) than the one in this directory (another)" in line
            for line in seen["logged"]
        ]
        assert any(told) == (rank == 0)
        assert second == "another", "the id of a run is kept"
    for seen in done.seen("forbidden"):
        assert not any("another run" in line for line in seen["logged"])


def test_after_an_error_that_the_loop_caught(done: Launch) -> None:
    for seen in done.seen("caught by the loop"):
        assert (seen["raised"], seen["saved"]) == ("'x'", "step-00000002")


def test_older_ones_are_thinned_out(done: Launch) -> None:
    for seen in done.seen("retained"):
        kept = [int(name.partition("-")[2]) for name in seen["visible"]]
        assert kept[-2:] == [11, 12]
        assert 1 in kept, "the only one that was audited at its last step"
        assert len(kept) <= 6


def test_told_to_stop_on_one_rank(done: Launch) -> None:
    for seen in done.seen("told to stop"):
        assert seen["steps"] == [False, True, True]


def test_under_suspicion_every_step_is_checked(done: Launch) -> None:
    for seen in done.seen("under suspicion"):
        assert seen["passed"] == {"numerics": 2, "replay": 2, "replicas": 2}
        assert any("under suspicion" in line for line in seen["logged"])
        assert seen["right"]


def test_a_device_in_quarantine_joins_under_no_name(done: Launch) -> None:
    for seen in done.seen("in quarantine"):
        refused = seen["refused"]
        assert refused["type"] == "ConfigurationError"
        assert all(word in refused["message"] for word in ("device chip-7 (then on node n1)", "ranks 2 (node renamed)"))
        assert "quarantine clear" in refused["message"]
        assert seen["node"]["type"] == "ConfigurationError"
        assert "node n0 is in quarantine" in seen["node"]["message"]
        assert seen["placement"] == ["chip-20", "chip-21", "chip-7"]
        assert seen["right"]


# Somebody else's writer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", writing.WRITERS)
def test_somebody_elses_writer(done: Launch, name: str) -> None:
    words = writing.WRITERS[name][2]
    for rank, of_rank in enumerate(done.seen("foreign")):
        seen = of_rank[name]
        own = name == "raises on every rank" or (name == "raises on rank 2" and rank == 2)
        assert seen["own"] == (["the writer has no room"] if own else [])
        if own or words:
            assert seen["step"] is None, "was labelled"
        else:
            assert seen["step"] == seen["at"]
            assert seen["read_back"].startswith("each file by a rank on another node")
        if words and not own:
            assert seen["error"]["type"] == "CheckpointError"
            assert all(word in seen["error"]["message"] for word in words), seen["error"]["message"]
        else:
            assert seen["error"] is None


def test_all_files_of_a_folder_are_labelled(done: Launch) -> None:
    for seen in done.seen("foreign"):
        for name in ("a folder", "a folder, read back"):
            assert seen[name]["files"] == [".metadata", *(f"deep/__{rank}_0.distcp" for rank in range(3))]
        assert seen["a file"]["files"] == ["a-file"]


def test_a_foreign_file_that_another_node_reads_differently(done: Launch) -> None:
    for seen in done.seen("foreign"):
        error = seen["lied to"]["error"]
        assert error["type"] == "CheckpointError"
        assert "reads differently on rank 1 (node n1)" in error["message"]
        assert seen["lied to"]["step"] is None


def test_ranks_that_do_not_mean_the_same_checkpoint(done: Launch) -> None:
    for seen in done.seen("foreign"):
        elsewhere, among_ours = seen["refused"]
        mixed = seen["asynchronous"]["mixed"]
        assert {one["type"] for one in (elsewhere, among_ours, mixed)} == {"ConfigurationError"}
        assert "do not stage the same: rank 0 (node n0) " in elsewhere["message"]
        assert "of-1.pt" in elsewhere["message"]
        assert "holds the checkpoints of save_checkpoint() alone" in among_ours["message"]
        assert "do not label the same" in mixed["message"]
        assert "in the same order" in mixed["message"]


def test_a_writer_that_takes_two_steps(done: Launch) -> None:
    for seen in done.seen("foreign"):
        one = seen["asynchronous"]
        assert one["label"] == one["step"]
        assert one["error"]["type"] == "CheckpointError"
        assert f"the weights that were staged at step {one['step']}" in one["error"]["message"]
        assert not one["labelled"]
        assert seen["right"], "and nothing of this changed a bit of the training"


# What is put back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_everything_is_put_back(done: Launch, name: str) -> None:
    for seen in done.seen(f"resumed, {name}"):
        assert seen["final"] == seen["expected"]
        assert seen["from"] == 2
        assert seen["resumed"] == seen["expected"]


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_go_on_where_they_were(done: Launch, name: str) -> None:
    for seen in done.seen(f"loader, {name}"):
        assert len(set(seen["losses"])) == len(seen["losses"])
        assert seen["guarded"] == seen["plain"], "the saves changed something"
        assert sorted(map(int, seen["resumed"])) == seen["saves"]
        assert {step: outcome for step, outcome in seen["resumed"].items() if outcome != [*seen["plain"], True]} == {}
        assert seen.get("twice", seen["plain"]) == seen["plain"]


def test_an_object_that_refuses_its_state_is_named(done: Launch) -> None:
    for seen in done.seen("refuses its state"):
        assert seen["error"]["type"] == "CheckpointError"
        assert "stateful['counter']" in seen["error"]["message"]
        assert "no such clock" in seen["error"]["message"]
