"""The report of a campaign, and the command that makes it, with a runner that trains nothing."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bitwitness.cli import campaign as campaign_command
from bitwitness.cli.main import cli
from bitwitness.errors import BitwitnessError, ConfigurationError, RunFilesError
from bitwitness.faults import report, runner, survey, table
from bitwitness.faults.cells import CellResult, CellSpec
from bitwitness.faults.database import Results
from bitwitness.faults.runner import Progress
from tests.faults.campaigns import FILE, campaign, caught, everywhere, finished

Answer = Callable[[CellSpec], CellResult]


def good(spec: CellSpec) -> CellResult:
    """Everything as promised."""
    if spec.role != "fault":
        return finished(spec)
    if spec.label == "flips":
        nan = ("nan",) * 4
        return finished(spec, digests=everywhere(4), losses=(2.0, 1.9, 1.8, 1.7, *nan), evaluation={"loss": "inf"})
    return finished(spec, digests=everywhere(4)) if "comm.pre" in spec.faults[0] else caught(spec, 4, 1)


def bad(spec: CellSpec) -> CellResult:
    """What is covered is missed."""
    return finished(spec, digests=everywhere(4)) if spec.role == "fault" else finished(spec)


class Runner:
    """Stands for `runner.run`; stops after so many runs, as a kill does."""

    def __init__(self, answer: Answer = good, stops_after: int = 1000) -> None:
        self.answer, self.stops_after = answer, stops_after
        self.asked: list[str] = []
        self.settings: dict[str, Any] = {}

    def __call__(self, cells: Sequence[CellSpec], *, on_result: Any, on_progress: Any, **settings: Any) -> None:
        self.settings = settings
        self.asked = [cell.key for cell in cells]
        for number, cell in enumerate(cells):
            on_progress(Progress(number, len(cells), (cell,), 1.0 * number))
            if number == self.stops_after:
                raise KeyboardInterrupt
            on_result(cell, self.answer(cell))
        on_progress(Progress(len(cells), len(cells), (), 1.0))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tried.yaml"
    path.write_text(FILE)
    return path


def command(
    monkeypatch: pytest.MonkeyPatch,
    fake: Runner,
    *words: object,
    impossible: Mapping[str, str] | BitwitnessError | None = None,
) -> Result:
    monkeypatch.setattr(runner, "run", fake)
    if not isinstance(impossible, BitwitnessError):
        told = {} if impossible is None else impossible

        def ask(cells: Sequence[CellSpec], path: Sequence[str]) -> dict[str, str]:
            return {cell.key: problem for cell in cells for label, problem in told.items() if cell.label == label}
    else:
        raised = impossible

        def ask(cells: Sequence[CellSpec], path: Sequence[str]) -> dict[str, str]:
            raise raised

    monkeypatch.setattr(survey, "ask", ask)
    return CliRunner().invoke(cli, ["campaign", *map(str, words)])


class Page(HTMLParser):
    """Checks that tags are closed, and keeps what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.classes: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.ids.add(given.get("id") or "")
        self.classes.append(given.get("class") or "")
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.classes.append(dict(attributes).get("class") or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page(text: str) -> Page:
    read = Page()
    read.feed(text)
    assert read.open == []
    return read


def made(answer: Answer) -> tuple[Any, list[tuple[CellSpec, CellResult]]]:
    asked = campaign()
    given = [(cell, answer(cell)) for cell in asked.cells()]
    return table.build(given, asked.classify, len(given)), given


def test_the_page_shows_tables_figures_and_curves() -> None:
    judged, given = made(good)
    text = report.render(campaign(), judged, given)
    read = page(text)
    assert {"verdict", "matrix", "rows"} <= read.ids
    assert "shares" in read.classes
    assert "curves" in read.classes
    assert "As promised" in read.text
    assert "allreduce" in read.text, "what is not covered is there, with words"
    assert "<b>bold</b>" not in text
    assert "A <b>bold</b> campaign & more." in read.text
    assert "http" not in text, "a page that needs nothing else"


def test_a_page_with_problems_names_them() -> None:
    judged, given = made(bad)
    read = page(report.render(campaign(), judged, given))
    assert "Not as promised: 1 covered faults were missed" in read.text


def test_a_page_marks_what_proves_nothing() -> None:
    def crashes(spec: CellSpec) -> CellResult:
        covered = spec.role == "fault" and spec.policy is not None and "fwd_out" in spec.faults[0]
        return CellResult(spec.key, "crash", "no memory", struck=1) if covered else good(spec)

    judged, given = made(crashes)
    read = page(report.render(campaign(), judged, given))
    assert "As promised" in read.text
    assert "Not proved: 1 faults were promised" in read.text
    assert read.classes.count("unproved") == 1
    assert "promised for certain, and nothing is proved" in read.text
    assert "unproved" not in page(report.render(campaign(), *made(good))).classes


def test_a_page_marks_a_hang_under_a_guard() -> None:
    def hangs(spec: CellSpec) -> CellResult:
        guarded = spec.role == "fault" and spec.policy is not None
        return CellResult(spec.key, "hang", struck=1) if guarded else good(spec)

    judged, given = made(hangs)
    read = page(report.render(campaign(), judged, given))
    assert "Not as promised: 2 times a guarded run hung" in read.text
    assert read.classes.count("problem") == 2


def test_a_page_of_nothing_is_a_page() -> None:
    page(report.render(campaign(), table.build([], campaign().classify, 12), []))


def test_sheet_and_record_hold_the_same_rows(tmp_path: Path) -> None:
    judged, given = made(good)
    report.write(tmp_path, campaign(), judged, given)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    record = json.loads((tmp_path / "table.json").read_text(), parse_constant=pytest.fail)
    assert [row["key"] for row in rows] == [row["key"] for row in record["rows"]]
    assert len(rows) == 8
    assert {row["outcome"] for row in rows} == {"", "immediate-nonfinite"}
    assert rows[0]["ranks"] == "1"
    assert record["campaign"] == "tried"


# The command ---------------------------------------------------------------------------------------------------------


def test_a_campaign_ends_with_its_table(monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path) -> None:
    fake = Runner()
    ended = command(monkeypatch, fake, file, "--out", tmp_path / "out", "--jobs", 3)
    assert ended.exit_code == 0, ended.output
    assert fake.settings["parallel"] == 3
    assert "0 false alarms" in ended.output
    assert "not covered (1)" in ended.output
    assert (tmp_path / "out" / "report.html").exists()


def test_json_is_one_object(monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path) -> None:
    ended = command(monkeypatch, Runner(), file, "--out", tmp_path / "out", "--json")
    record = json.loads(ended.stdout)
    assert (record["runs"], record["missed"], record["planned"]) == (12, [], 12)
    assert len(record["not_covered"]) == 1


def test_what_was_promised_and_not_seen_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path
) -> None:
    ended = command(monkeypatch, Runner(bad), file, "--out", tmp_path / "out")
    assert ended.exit_code == 1
    assert "PROBLEM: 1 covered faults were missed" in ended.output
    assert "missed: rank=1 fwd_out" in ended.output


def test_the_same_command_goes_on_where_it_was_stopped(
    monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path
) -> None:
    first = Runner(stops_after=5)
    ended = command(monkeypatch, first, file, "--out", tmp_path / "out")
    assert ended.exit_code == 130, ended.output
    assert json.loads((tmp_path / "out" / "table.json").read_text())["runs"] == 5
    second = Runner()
    assert command(monkeypatch, second, file, "--out", tmp_path / "out").exit_code == 0
    assert second.asked == first.asked[5:]
    third = Runner()
    assert command(monkeypatch, third, file, "--out", tmp_path / "out").exit_code == 0
    assert third.asked == []


def test_runs_that_failed_are_made_again_on_demand(monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path) -> None:
    def hangs(spec: CellSpec) -> CellResult:
        return CellResult(spec.key, "hang") if spec.role == "control" else good(spec)

    ended = command(monkeypatch, Runner(hangs), file, "--out", tmp_path / "out")
    assert ended.exit_code == 1
    assert "fault-free runs did not finish" in ended.output
    again = Runner()
    assert command(monkeypatch, again, file, "--out", tmp_path / "out", "--retry").exit_code == 0
    assert len(again.asked) == 1


def fails_at_first(spec: CellSpec) -> CellResult:
    return CellResult(spec.key, "hang") if spec.role == "control" else good(spec)


@pytest.mark.parametrize("how", ["refused", "killed", "crashed"])
def test_what_failed_keeps_its_result_until_there_is_another(
    monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path, how: str
) -> None:
    out = tmp_path / "out"
    assert command(monkeypatch, Runner(fails_at_first), file, "--out", out).exit_code == 1
    before = (out / "report.html").read_bytes()
    if how == "refused":
        wrong = ConfigurationError("the job mlp cannot be run")
        ended = command(monkeypatch, Runner(), file, "--out", out, "--retry", impossible=wrong)
        assert ended.exit_code == 2
        assert f"{file}, line 4: job tiny: the job mlp cannot be run" in ended.output.replace("\n", " ")
        assert (out / "report.html").read_bytes() == before
    elif how == "killed":
        assert command(monkeypatch, Runner(stops_after=0), file, "--out", out, "--retry").exit_code == 130
    else:

        def broken(spec: CellSpec) -> CellResult:
            raise BitwitnessError("the process that runs cells did not start")

        assert command(monkeypatch, Runner(broken), file, "--out", out, "--retry").exit_code == 1
    with Results(out / "results.sqlite") as results:
        assert [result.end for spec, result in results.all() if spec.role == "control"] == ["hang"]
        assert len(results.done()) == 12
    again = Runner()
    assert command(monkeypatch, again, file, "--out", out, "--retry").exit_code == 0
    assert len(again.asked) == 1


@pytest.mark.parametrize(
    "problem", [OSError(28, "No space left on device"), RunFilesError("results.sqlite cannot be written: disk is full")]
)
@pytest.mark.parametrize("when", ["running", "reporting", "telling"])
def test_a_full_disk_under_way_does_not_end_as_if_nothing_was_run(
    monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path, problem: Exception, when: str
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise problem

    if when == "reporting":
        monkeypatch.setattr(report, "write", full)
    if when == "telling":
        monkeypatch.setattr(campaign_command, "_print", full)
    ended = command(monkeypatch, Runner(full if when == "running" else good), file, "--out", tmp_path / "out")
    assert ended.exit_code == 1
    assert "the same command goes on" in ended.output.replace("\n", " ")


def test_a_failure_of_the_runner_keeps_what_there_is(
    monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path
) -> None:
    def fails(spec: CellSpec) -> CellResult:
        if spec.role == "fault":
            raise BitwitnessError("the process that runs cells did not start")
        return good(spec)

    ended = command(monkeypatch, Runner(fails), file, "--out", tmp_path / "out")
    assert ended.exit_code == 1
    assert "did not start" in ended.output
    assert json.loads((tmp_path / "out" / "table.json").read_text())["runs"] == 4


def test_a_changed_file_is_refused(monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path) -> None:
    assert command(monkeypatch, Runner(), file, "--out", tmp_path / "out").exit_code == 0
    file.write_text(FILE.replace("step=4", "step=5"))
    ended = command(monkeypatch, Runner(), file, "--out", tmp_path / "out")
    assert ended.exit_code == 2
    assert "runs that this campaign does not have" in ended.output


def test_a_changed_label_is_shown(monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path) -> None:
    command(monkeypatch, Runner(), file, "--out", tmp_path / "out")
    file.write_text(FILE.replace("name: flips", "name: turned"))
    ended = command(monkeypatch, Runner(), file, "--out", tmp_path / "out")
    assert ended.exit_code == 0
    assert "turned" in ended.output
    assert "flips" not in ended.output


def test_a_dry_run_says_what_is_promised_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path
) -> None:
    fake = Runner()
    ended = command(monkeypatch, fake, file, "--out", tmp_path / "out", "--dry-run")
    assert ended.exit_code == 0
    assert "12 runs (1 clean, 2 reference, 1 control, 8 fault); nothing was run" in ended.output
    assert "not covered: a finite change on the wire" in ended.output
    assert not fake.settings
    assert not (tmp_path / "out").exists()
    record = json.loads(command(monkeypatch, fake, file, "--dry-run", "--json").stdout)
    assert record["roles"] == {"clean": 1, "reference": 2, "control": 1, "fault": 8}
    assert record["faults"][0]["coverage"]["check"] == "replay"


def test_a_wrong_file_runs_nothing(monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path) -> None:
    fake = Runner()
    file.write_text(FILE.replace("references", "refrences"))
    ended = command(monkeypatch, fake, file, "--out", tmp_path / "out")
    assert ended.exit_code == 2
    assert "line 5" in ended.output
    assert "did you mean 'references'" in ended.output
    assert not fake.settings
    assert not (tmp_path / "out").exists()


def test_an_impossible_fault_runs_nothing(monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path) -> None:
    fake = Runner()
    wrong = {"flips": "there is no module head"}
    for words in ((), ("--dry-run",)):
        ended = command(monkeypatch, fake, file, "--out", tmp_path / "out", *words, impossible=wrong)
        assert ended.exit_code == 2
        assert "1 faults are impossible; nothing was run\n" in ended.output
        assert f"{file}, line 9: job tiny: there is no module head" in ended.output.replace("Error: ", "")
    assert not fake.settings


def test_norms_are_shown_where_runs_are_long(tmp_path: Path) -> None:
    asked = campaign()
    given = []
    for cell in asked.cells():
        norms = tuple(1.0 + 0.01 * ((7 * step + cell.seed) % 11) for step in range(130))
        given.append((cell, finished(cell, norms=norms, first_step=110 if cell.role == "fault" else None)))
    judged = table.build(given, asked.classify)
    assert judged.to_json()["norms"][0]["faults"] == 6
    assert "norms" in page(report.render(asked, judged, given)).ids


def test_a_name_that_does_not_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = command(monkeypatch, Runner(), "cofferage")
    assert ended.exit_code == 2
    assert "no such file, and no campaign of this name" in ended.output
    assert command(monkeypatch, Runner()).exit_code == 2


def test_the_list_of_what_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(monkeypatch, Runner(), "--list").exit_code == 0
    record = json.loads(command(monkeypatch, Runner(), "--list", "--json").stdout)
    assert isinstance(record["campaigns"], list)


def test_two_commands_on_one_folder(monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path) -> None:
    inner: list[Result] = []

    def again(spec: CellSpec) -> CellResult:
        if not inner:
            inner.append(CliRunner().invoke(cli, ["campaign", str(file), "--out", str(tmp_path / "out")]))
        return good(spec)

    assert command(monkeypatch, Runner(again), file, "--out", tmp_path / "out").exit_code == 0
    assert inner[0].exit_code == 2
    assert "another bitwitness campaign is at work" in inner[0].output
