"""What the demo concludes, from recorded runs: no process is started here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bitwitness.cli.demo_summary import sparkline, summarise
from bitwitness.cli.output import console
from bitwitness.errors import BitwitnessError
from bitwitness.evidence import Verdict
from bitwitness.examples.plan import IN_MEMORY, Expected, FaultChoice, Settings, expected
from bitwitness.examples.report import Report, conclude, read_events
from bitwitness.examples.report_page import Scale, outlook, render, write_page
from bitwitness.faults.report import ticks
from bitwitness.runfiles import RunFiles
from bitwitness.runfiles.supervision import SupervisionFiles
from tests.examples import recorded

LASTING = recorded.settings_for()
LINE = LASTING.fault_line
CASES = {
    "persistent": LASTING,
    "transient": recorded.settings_for(transient=True),
    "weight": recorded.settings_for(fault="weight"),
    "two nodes": recorded.settings_for(nodes=2),
    "two nodes, once": recorded.settings_for(nodes=2, fault="nan", transient=True),
    "nothing": Settings(fault="none", nodes=3),
}


def report_of(run_dir: Path, settings: Settings = LASTING, exit_code: int | None = None, **given: Any) -> Report:
    recorded.record(run_dir, settings, **given)
    return again(run_dir, settings, exit_code)


def again(run_dir: Path, settings: Settings = LASTING, exit_code: int | None = None) -> Report:
    return conclude(settings, run_dir, expected(settings).exit_code if exit_code is None else exit_code, 61.5)


# What should come of it ----------------------------------------------------------------------------------------------


def test_what_should_come_of_each_fault() -> None:
    lasting = Settings(seed=7)
    rank, device, start = lasting.rank, lasting.device, lasting.step // 4 * 4
    named = Expected(ranks=(rank,), generations=2, resumed_from=start)
    arithmetic: tuple[FaultChoice, ...] = ("matmul", "gradient", "nan")
    for fault in arithmetic:
        settings = Settings(seed=7, fault=fault)
        lasts = replace(named, persistence="persistent", before_update=True, quarantined=(device,))
        assert expected(settings) == lasts
        once = Settings(seed=7, fault=fault, transient=True)
        assert expected(once) == replace(named, persistence="transient", before_update=True)
    for fault in IN_MEMORY:
        assert expected(Settings(seed=7, fault=fault)) == named
    assert expected(Settings(fault="none")) == expected(Settings(fault="none", nodes=2)) == Expected()


def test_with_two_nodes_nobody_is_named() -> None:
    cases: list[tuple[FaultChoice, bool, int]] = [("matmul", False, 3), ("nan", True, 0), ("moment", False, 0)]
    for fault, transient, exit_code in cases:
        settings = Settings(nodes=2, fault=fault, transient=transient)
        should = expected(settings)
        assert (should.ranks, should.quarantined, should.persistence) == ((), (), "unknown")
        assert (should.generations, should.exit_code) == (2, exit_code)


def test_a_checkpoint_is_there_before_the_fault() -> None:
    for steps in (*range(6, 60), 1000):
        for seed in range(40):
            settings = Settings(steps=steps, seed=seed)
            resumed = expected(settings).resumed_from
            assert resumed is not None
            assert 0 < resumed <= settings.step < resumed + settings.checkpoint_every


# What is concluded ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_as_it_should_be(tmp_path: Path, case: str) -> None:
    settings = CASES[case]
    report = report_of(tmp_path / "run", settings)
    assert not report.problems
    should, record = expected(settings), report.to_json()
    json.dumps(record, allow_nan=False)
    assert record["ok"] is True
    assert record["resumed_from_step"] == should.resumed_from
    assert record["final_weights_equal_clean_run"] is (should.exit_code == 0)
    assert record["generations"] == should.generations
    assert record["quarantined"] == {"devices": list(should.quarantined), "nodes": []}
    assert record["run_exit_code"] == should.exit_code
    assert record["report"] == str(tmp_path / "run" / "report.html")
    assert record["named_ranks"] == list(should.ranks)
    assert all(one["verified"] and not one["refused"] for one in record["checkpoints"])
    steps = [one["step"] for one in record["checkpoints"]]
    assert steps == list(range(4, 25 if should.exit_code == 0 else 13, 4))
    assert record["checkpoints"][0]["passed"] == {"numerics": 3, "replay": 3, "replicas": 3}
    finished = {name: len(losses) for name, losses in record["losses"].items()}
    assert finished == {"clean": 24, "unguarded": 24, "guarded": 24 if should.exit_code == 0 else 13}
    assert outlook(should)


def test_the_timeline(tmp_path: Path) -> None:
    record = report_of(tmp_path / "run").to_json()
    told = [one["what"] for one in record["recovery"]]
    assert [one["time"] for one in record["recovery"]] == sorted(one["time"] for one in record["recovery"])
    assert told[0].startswith("step-00000012 saved; read back: each file by a rank on another node")
    assert told[1] == "step 12: rank 4 (node-2/cpu-0): a product is wrong"
    assert told[2].startswith("every rank stopped; step 12: persistent compute corruption on rank 4 (node node-2)")
    assert "went on with step 12 from step-00000012" in told
    assert "generation 2 on node-0, node-1, node-3" in told
    assert told[-1] == "ended"


def damage_checkpoint(run_dir: Path) -> None:
    path = run_dir / "guarded" / "checkpoints" / "step-00000008" / "shared.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def raise_a_false_alarm(run_dir: Path) -> None:
    journal = RunFiles(run_dir / "clean").journal(1)
    journal.append("verdict", {"step": 5, "verdict": {}})
    journal.close()


def name_another(run_dir: Path) -> None:
    wrong = Verdict("attributed", 12, (1,), ("node-0",), ("node-0/cpu-1",), kind="compute", persistence="persistent")
    for rank in range(6):
        recorded.change(run_dir, rank, "stopped", "guarded", verdict=wrong.to_json())


def start_once_more(run_dir: Path) -> None:
    files = SupervisionFiles(run_dir / "guarded")
    session = files.read_session()
    assert session is not None
    generation = files.read_generation(session.id, 1)
    assert generation is not None
    files.write_session(type(session)(session.id, generation=3))
    files.write_generation(session.id, type(generation)(3, generation.nodes, "", 1))


def go_on_from_the_beginning(run_dir: Path) -> None:
    path = run_dir / "guarded" / "journal" / "rank-00000.jsonl"
    path.write_text("")


def part_everywhere(run_dir: Path) -> None:
    for name in ("clean", "guarded"):
        recorded.change(run_dir, 3, "end", name, digest="00" * 32)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "other weights": (
        lambda run: recorded.change(run, 3, "end", "guarded", digest="00" * 32),
        "the final weights are not those of the run that was never hit",
    ),
    "parted without a fault": (
        part_everywhere,
        "the final weights are not those",
    ),
    "a rank stopped alone": (
        lambda run: recorded.change(run, 3, "stopped", "guarded", verdict={}),
        "did not all stop with the same verdict",
    ),
    "stopped too late": (
        lambda run: recorded.change(run, 3, "stopped", "guarded", updates=13),
        "caught only after the weights had been updated",
    ),
    "found late": (
        lambda run: recorded.change(run, recorded.RANK, "landed", "guarded", step=11),
        "struck at step 11 and was caught at step 12",
    ),
    "somebody else is named": (name_another, "named 1, should have named 4"),
    "a false alarm": (raise_a_false_alarm, "1 false alarm(s) in the run without a fault"),
    "the guard changes bits": (
        lambda run: recorded.change(run, 0, "step", "unguarded", loss=4.9),
        "the guarded and the unguarded run differ although nothing was wrong yet",
    ),
    "nobody in quarantine": (
        lambda run: (run / "guarded" / "quarantine.json").unlink(),
        "in quarantine: nothing; should be: node-2/cpu-0",
    ),
    "another in quarantine": (
        lambda run: RunFiles(run / "guarded").quarantine.deny_node("node-0", reason="?"),
        "in quarantine: node-2/cpu-0, node-0; should be: node-2/cpu-0",
    ),
    "started again": (start_once_more, "the job was started 3 time(s), not 2"),
    "the bad node trains on": (start_once_more, "node-2 trained again although its device is in quarantine"),
    "from the beginning": (
        go_on_from_the_beginning,
        "the job went on from the beginning, not from the checkpoint of step 12",
    ),
    "a damaged checkpoint": (damage_checkpoint, "step-00000008 is not a verified one: shared.pt differs"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_not_as_it_should_be(tmp_path: Path, case: str) -> None:
    recorded.record(tmp_path / "run", LASTING)
    damage, sentence = DAMAGE[case]
    damage(tmp_path / "run")
    report = again(tmp_path / "run")
    assert [problem for problem in report.problems if sentence in problem], report.problems
    assert report.to_json()["ok"] is False
    assert sentence in " ".join(render(report).split()).replace("&#39;", "'")


def test_a_supervisor_that_gave_up(tmp_path: Path) -> None:
    report = report_of(tmp_path / "run", exit_code=160)
    assert any(
        problem.startswith("bitwitness run ended with exit code 160 (all ranks have finished), not with 0")
        for problem in report.problems
    )


def test_a_fault_that_did_not_strike_or_was_not_seen(tmp_path: Path) -> None:
    report = report_of(tmp_path / "run", CASES["nothing"])
    wanted = Settings(nodes=3)
    assert "the fault did not strike" in conclude(wanted, report.run_dir, 0, 1.0).problems
    landed = {"fault": wanted.fault_line, "rank": wanted.rank, "step": wanted.step, "where": "x"}
    landed |= {"changed": 1, "before": "0", "after": "1"}
    recorded.add(
        report.run_dir, wanted.rank, {"event": "landed", "training": "guarded", "generation": 1, "time": 1.0, **landed}
    )
    assert "the fault was not caught" in conclude(wanted, report.run_dir, 0, 1.0).problems


def test_a_training_that_did_not_finish_is_an_error(tmp_path: Path) -> None:
    recorded.record(tmp_path / "run", LASTING)
    path = tmp_path / "run" / "events" / "rank-00002.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if "clean" not in line))
    with pytest.raises(BitwitnessError, match=r"only ranks \[0, 1, 3, 4, 5\] finished the clean run: look at"):
        again(tmp_path / "run")


def test_events_of_a_rank_that_was_killed(tmp_path: Path) -> None:
    recorded.record(tmp_path / "run", LASTING)
    with (tmp_path / "run" / "events" / "rank-00000.jsonl").open("a") as file:
        file.write('{"event": "step", "trai\n')
    of = {"event": "step", "training": "guarded", "time": 1.0, "checks": 0}
    recorded.add(tmp_path / "run", 0, {**of, "generation": 2, "step": 20, "loss": float("nan")})
    reported = read_events(tmp_path / "run", 6)["guarded"]
    assert len(reported.first_losses) == 13
    assert len(reported.losses) == 24
    assert str(reported.losses[20]) == "nan"


# The summary and the page --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_summary(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    summarise(report_of(tmp_path / "run", CASES[case]), console())
    page = " ".join(capsys.readouterr().out.split())
    assert "step-00000012 verified numerics, replay, replicas passed at step 11" in page
    assert "As it should be." in page
    if case == "persistent":
        assert "In quarantine: device node-2/cpu-0 (persistent corruption)." in page
        assert "+0.0 s step 12: rank 4 (node-2/cpu-0): a product is wrong" in page
        assert f"BITWITNESS_FAULT='{LINE}' bitwitness run ..." in page
    if case == "two nodes":
        assert "bitwitness run gave up with exit code 3" in page
        assert "Named: nobody (right: it takes three nodes to name anybody)." in page
    else:
        assert "Final weights of every rank: equal, bit for bit, to those of the" in page


class Page(HTMLParser):
    """A page that must be well-formed and need nothing from elsewhere."""

    VOID = ("meta", "line", "polyline", "br", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())


@pytest.mark.parametrize("case", CASES)
def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path, case: str) -> None:
    report = report_of(tmp_path / "run", CASES[case])
    write_page(report)
    source = report.page.read_text(encoding="utf-8")
    page = Page(source)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "onload", "onclick")]
    assert not any(word in source for word in ("http:", "https:", "@import", "url(", "{{", "{%"))
    assert ("role", "img") in page.attributes
    assert ("aria-labelledby", "chart-title chart-description") in page.attributes
    assert "prefers-color-scheme: dark" in source
    assert page.tags.count("polyline") >= 6  # three curves, three legends
    assert "As it should be" in page.words
    assert report.settings.command in page.words
    each = report.settings.world_size * 24
    passed = f"(numerics {each}, replay {each}, replicas {each})"
    assert f"None in {3 * each} checks that passed with nothing wrong {passed}" in page.words
    equal = "Equal. The SHA-256 of the final weights" in page.words
    assert equal is (case != "two nodes")
    if case == "persistent":
        assert "persistent compute corruption on rank 4 (node node-2)" in page.words
        assert "fault strikes: step 12" in page.words
        assert f"BITWITNESS_FAULT='{LINE}' bitwitness run ..." in page.words
        assert "resumed: step 12" in page.words
        assert "quarantined" in page.words
        assert "replay: result of micro-batch 0 of rank 4" in page.words
        assert page.words.count(recorded.DIGEST) == 12


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    hostile = "<script>alert('x')</script>"
    report = report_of(tmp_path / "run", names=("node-0", "node-1", hostile))
    assert report.verdict is not None
    assert report.verdict.nodes == (hostile,)
    recorded.change(tmp_path / "run", recorded.RANK, "landed", "guarded", where='"><img src=x onerror=y>')
    source = render(again(tmp_path / "run"))
    page = Page(source)
    assert not {"script", "img"} & set(page.tags)
    assert hostile in page.words
    assert "<script" not in source


def test_curves_of_what_is_no_number(tmp_path: Path) -> None:
    report = report_of(tmp_path / "run", broken=float("inf"))
    page = Page(render(report))
    assert page.tags.count("circle") == 11
    assert "A dot at the top: not a finite number." in page.words
    assert "inf" in page.words
    assert report.to_json()["losses"]["unguarded"][-1] == "inf"
    assert "What is above" in Page(render(report_of(tmp_path / "other", broken=1e9))).words


def test_ticks_and_scale() -> None:
    assert ticks(0, 23, 8) == [0, 5, 10, 15, 20]
    assert ticks(3.1, 5.4, 6) == [3.5, 4, 4.5, 5]
    assert ticks(2.0, 2.0, 6) == [2.0]
    assert ticks(0, 5, 8) == [0, 1, 2, 3, 4, 5]
    for most in range(3, 9):
        for span in (1e-6, 0.3, 7.0, 1e12):
            assert 1 <= len(ticks(1.0, 1.0 + span, most)) <= most
    scale = Scale(steps=11, lowest=1.0, highest=3.0)
    assert scale.x(0) < scale.x(5) < scale.x(10)
    assert scale.y(1.0) > scale.y(2.0) > scale.y(3.0) == scale.y(1e9)


def test_sparkline() -> None:
    assert sparkline([0.0, float("nan"), 1.0], 0.0, 1.0) == "▁!█"
    assert len(sparkline([1.0] * 1000, 0.0, 1.0)) <= 48
