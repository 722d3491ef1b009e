"""The study as it runs: a few nodes and steps through all four comparisons, judged, written, and what goes wrong said."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from bitwitness.compare import study
from bitwitness.compare.nodes import INVENTED, Node, Part
from bitwitness.compare.records import CompareFiles
from bitwitness.errors import BitwitnessError, ConfigurationError

FEW = tuple(one for one in INVENTED if one.number in (2, 6, 11))
STEPS = 4


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, study.Study, list[tuple[str, int, int]]]:
    folder, told, threads = tmp_path_factory.mktemp("study"), [], torch.get_num_threads()
    made = study.run(folder, steps=STEPS, seed=0, progress=lambda *one: told.append(one), nodes=FEW, workers=1)
    study.write(folder, made)
    assert torch.get_num_threads() == threads
    return folder, made, told


Done = tuple[Path, study.Study, list[tuple[str, int, int]]]


def test_each_part_is_a_comparison_that_can_be_read(done: Done) -> None:
    folder, _, told = done
    for chapter in study.chapters(STEPS):
        shown = [steps for name, *steps in told if name == chapter.name]
        assert shown == [[step + 1, chapter.steps] for step in range(chapter.steps)]
        files = CompareFiles(folder / chapter.name)
        names = [one.name for one in files.introduced()]
        free = ["control"] if chapter.mode == "free" else []
        assert names == ["leader", "reference-1", *free, "node-02", "node-06", "node-11"]
        for one in files.introduced():
            account = files.account(one, chapter.mode)
            assert account is not None
            assert (len(account.steps), account.ended) == (chapter.steps, "done")


def test_what_was_planted_is_found_and_what_is_silent_is_not(done: Done) -> None:
    silent, destroyer, worst = done[1].figures.nodes
    assert silent.outcome == "nothing seen"
    assert silent.wrong == 0
    assert worst.outcome != "nothing seen"
    for one in worst.frequencies[:3]:
        assert one.agreement == "within", one
    assert worst.noise is not None
    assert 0 < worst.noise < 0.2
    assert worst.free.drift is not None
    assert worst.free.drift > 0
    assert worst.free.most > len(worst.frequencies), "left to itself it spreads"
    assert worst.spread == (), "in lock-step it does not"
    assert destroyer.tuned.accuracy == 0.0
    assert destroyer.tuned.divergence == 1.0
    assert silent.tuned.divergence == 0.0


def test_a_healthy_one_is_told_from_a_reseeded_one(done: Done) -> None:
    figures = done[1].figures
    assert figures.healthy.accuracy is not None
    assert figures.healthy.accuracy > 0.2
    assert figures.reference.divergence == 0.0
    assert figures.control.divergence is not None
    assert figures.control.divergence > 0.0
    assert figures.reseeded.drift is not None
    assert figures.reseeded.drift > (figures.nodes[2].free.drift or 0.0)
    assert (figures.void, figures.short) == (0, ())


def test_what_is_written(done: Done) -> None:
    folder, made, _ = done
    record = json.loads((folder / "study.json").read_text())
    assert [one["held"] for one in record["shape"]] == [one.held for one in made.shape]
    assert [one["node"]["number"] for one in record["nodes"]] == [2, 6, 11]
    assert "Fifteen invented bad nodes" in (folder / "study.html").read_text()
    assert "| 11 | fwd/attn | 2.89e-02 |" in (folder / "study.md").read_text()


def test_a_study_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="give at least one of both"):
        study.run(tmp_path, steps=0)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that begin with all that is loaded here: a test is not to load torch four times."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr("multiprocessing.get_context", lambda _: context)


def test_parts_run_beside_each_other_and_all_of_them_tell(tmp_path: Path, forked: None) -> None:
    told: list[tuple[str, int, int]] = []
    made = study.run(tmp_path, steps=1, nodes=FEW[2:], workers=2, progress=lambda *one: told.append(one))
    assert sorted(told) == [(name, 1, 1) for name in ("fine-tuning", "free", "lock-step", "parameters")]
    (worst,) = made.figures.nodes
    assert worst.outcome == "not characterised", "of one step nobody is called wrong"
    assert worst.wrong > 0
    assert (made.figures.void, made.figures.short) == (0, ())


def test_a_part_that_fails_is_named_and_the_others_end(tmp_path: Path, forked: None) -> None:
    impossible = Node(1, "impossible", (Part(("fwd", "attention"), "n=1000000", "zero"),))
    with pytest.raises(BitwitnessError, match=r"part '[a-z-]+' of the study has failed: .*n=1000000"):
        study.run(tmp_path, steps=1, nodes=(impossible,), workers=2)
    assert multiprocessing.active_children() == []
