"""`bitwitness compare` from the command line, with stand-ins in this process: what it shows, refuses and leaves."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from bitwitness.cli import compare_seats, compare_start
from bitwitness.cli.compare_progress import Progress
from bitwitness.cli.main import cli
from bitwitness.compare import report
from bitwitness.compare.records import Mode
from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.runfiles.answers import Device

TINY = ["--set", "blocks=1", "--set", "width=8", "--set", "heads=2", "--set", "context=8", "--set", "batch=2"]
FAULT = "op:addmm @ every=1 : rate=0.01 -> bit=20 ; permanent"

MODEL = """
import torch
from torch import nn
from bitwitness.compare.workload import Workload

def make(device, seed, width="4"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, int(width)), nn.ReLU(), nn.Linear(int(width), 2)).to(device)
    def batch(step):
        return torch.randn(3, 4, generator=torch.Generator().manual_seed(1000 * seed + step)).to(device)
    return Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).square().mean(), batch)
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No ranks of a launcher that started these tests, and a directory of one's own."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["compare", *arguments])


@pytest.fixture(scope="module")
def drilled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A comparison with a fault that is played, in all modes."""
    out = tmp_path_factory.mktemp("compare") / "out"
    threads = torch.get_num_threads()
    done = invoke("--devices", "3", "--steps", "8", "--simulate", FAULT, *TINY, "--out", str(out), "--json")
    assert torch.get_num_threads() == threads
    return done, out


def test_a_suspect_that_differs(drilled: tuple[Result, Path]) -> None:
    done, out = drilled
    assert done.exit_code == 1, (done.output, done.exception)
    record = json.loads(done.stdout)
    assert (record["outcome"], record["drill"], record["finished"], record["exit_code"]) == ("differs", True, True, 1)
    assert [one["name"] for one in record["references"]] == ["reference-1", "reference-2"]
    assert record["control"]["name"] == "control"
    assert [mode["mode"] for mode in record["modes"]] == ["lock-step", "parameters", "free"]
    assert all(mode["steps"] == 8 for mode in record["modes"])
    assert json.loads((out / "compare.json").read_text())["suspect"] == "suspect"
    assert (out / "report.html").is_file()
    assert f"in {out}" in done.stderr


def test_the_report_is_shown_again(drilled: tuple[Result, Path]) -> None:
    _, out = drilled
    again = invoke("show", str(out))
    assert again.exit_code == 0
    assert "DIFFERS (simulated fault, a drill): suspect differs from 2 references that agree" in again.stdout
    assert "UNFINISHED" not in again.stdout
    assert json.loads(invoke("show", str(out), "--json").stdout)["outcome"] == "differs"
    assert "is about suspect" in invoke("show", str(out), "--suspect", "reference-1").stderr


def test_a_directory_with_something_in_it_stays_as_it_is(drilled: tuple[Result, Path]) -> None:
    _, out = drilled
    before = (out / "report.json").read_bytes()
    done = invoke("--devices", "3", *TINY, "--out", str(out))
    assert done.exit_code == 2
    assert f"--out {out} is not empty (it has compare.json): give a new directory" in done.stderr
    assert (out / "report.json").read_bytes() == before


def test_ones_own_workload_and_nothing_seen(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODEL)
    options = ["--workload", "own.py:make", "--set", "width=6", "--module", "0", "--mode", "lock-step", "--steps", "3"]
    done = invoke("--devices", "3", *options)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "NOTHING SEEN" in done.stdout
    (out,) = (tmp_path / "comparisons").iterdir()
    report = json.loads((out / "report.json").read_text())
    assert {row["group"] for row in report["modes"][0]["rows"]} == {"", "0"}
    assert report["modes"][0]["total"]["bound"] > 0
    assert not (out / "journal" / "control.free.jsonl").exists()


def test_a_reference_that_is_wrong_blames_nobody(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODEL)
    options = ["--workload", "own.py:make", "--mode", "lock-step", "--steps", "3", "--out", "out"]
    done = invoke("--devices", "3", "--simulate", f"reference-1: {FAULT.replace('0.01', '0.5')}", *options)
    assert done.exit_code == 3, (done.output, done.exception)
    assert "differ in step 0: " in done.stderr
    assert "NOT CHARACTERISED" in done.stdout.upper()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "term"])
def test_what_was_interrupted_has_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    tell = Progress.tell

    def interrupted(self: Progress, mode: Mode, done: int) -> None:
        tell(self, mode, done)
        if done == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Progress, "tell", interrupted)
    (tmp_path / "own.py").write_text(MODEL)
    before = signal.getsignal(number)
    done = invoke("--devices", "3", "--workload", "own.py:make", "--mode", "lock-step", "--steps", "9", "--out", "out")
    assert signal.getsignal(number) == before
    assert done.exit_code == code, (done.output, done.exception)
    assert "ending after this step" in done.stderr
    assert "UNFINISHED" in done.stdout
    assert "the suspect has done 2 of 9 steps" in done.stdout
    assert json.loads((tmp_path / "out" / "report.json").read_text())["finished"] is False


def test_what_breaks_off_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Progress, mode: Mode, done: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Progress, "tell", fails)
    (tmp_path / "own.py").write_text(MODEL)
    done = invoke("--devices", "3", "--workload", "own.py:make", "--mode", "lock-step", "--steps", "9", "--out", "out")
    assert done.exit_code == 3
    assert "broken off: [Errno 28] No space left on device" in done.stderr
    assert "it was not brought to its end: [Errno 28]" in done.stdout


def test_an_error_in_the_work_is_one_line_and_told_once(tmp_path: Path) -> None:
    fails = "lambda m, b: sys.exit(7) if b[1] == 2 else m(b[0]).square().mean(), lambda step: (batch(step), step))"
    own = MODEL.replace("lambda m, b: m(b).square().mean(), batch)", fails).replace(
        "import torch\n", "import sys, torch\n", 1
    )
    (tmp_path / "own.py").write_text(own)
    done = invoke("--devices", "3", "--workload", "own.py:make", "--steps", "4", "--out", "out")
    assert done.exit_code == 3, (done.output, done.exception)
    assert done.stdout.startswith("NOT CHARACTERISED: reference-1 did not come to its end")
    assert "it ended when reference-1 failed (step 2: it raised SystemExit(7)" in done.stdout
    assert "the suspect did not come to the end" not in done.stdout
    assert re.search(r"look at the work first: reference-1 failed.*own.py:\d+", done.stdout)


def test_what_is_warned_of_in_each_mode_is_warned_of_once() -> None:
    source = logging.getLogger("bitwitness.compare.participant")
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    source.addHandler(handler)
    try:
        with compare_start._told_once():
            for name in ("a", "a", "b", "a"):
                source.warning("%s takes no further part", name)
        source.warning("a takes no further part")
    finally:
        source.removeHandler(handler)
    assert heard == [f"{name} takes no further part" for name in "aba"]


def test_a_disk_that_is_full_takes_the_report_and_not_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise RunFilesError("report.json cannot be written: No space left on device")

    monkeypatch.setattr(report, "write", full)
    (tmp_path / "own.py").write_text(MODEL)
    done = invoke("--devices", "3", "--workload", "own.py:make", "--mode", "lock-step", "--steps", "2", "--out", "out")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "No space left on device" in done.stderr
    assert done.stdout.startswith("NOTHING SEEN")
    assert "report.html" not in done.stdout


_NO_TEXTS: list[Any] = [None, 7.5, []]
_WRONG: dict[str, list[Any]] = {
    "id workload time suspect": [None, 7, [], {}],
    "options": [None, 7, "x", [], {"a": 1}],
    "modes": [None, "x", "free", [], ["x"], ["free", "free"], [[]], {}],
    "globs": [None, "x", [1], {}],
    "steps every": [None, 0, -1, 1.5, True, "1", [], 1e400, 10**400],
    "seed keep": [None, -1, "1", True],
    "control": [None, 1, "yes", []],
    "confidence": [None, 0, 1, -1, "x", True, 1e400, []],
    "timeout": [None, 0, -1.0, "x", 1e400, {}],
}
WRONG = [(name, value) for names, values in _WRONG.items() for name in names.split() for value in values]


def test_settings_of_wrong_types_are_refused_by_name(drilled: tuple[Result, Path], tmp_path: Path) -> None:
    _, out = drilled
    asked = json.loads((out / "compare.json").read_text())
    (tmp_path / "it").mkdir()
    for name, value in WRONG:
        damaged = asked | {name: value}
        (tmp_path / "it" / "compare.json").write_text(json.dumps(damaged))
        done = invoke("show", str(tmp_path / "it"))
        assert (done.exit_code, done.stdout) == (2, ""), (name, value, done.output)
        assert "it/compare.json" in done.stderr, (name, value)
        assert "Error(" not in done.stderr, (name, value)
    for name in asked.keys() - {"schema", "suspect"}:
        (tmp_path / "it" / "compare.json").write_text(json.dumps({key: asked[key] for key in asked if key != name}))
        assert f"it/compare.json: a record of a comparison's settings without {name}" in invoke("show", "it").stderr


def test_participants_of_wrong_types_are_refused_by_name(drilled: tuple[Result, Path], tmp_path: Path) -> None:
    _, out = drilled
    (tmp_path / "it" / "participants").mkdir(parents=True)
    (tmp_path / "it" / "compare.json").write_bytes((out / "compare.json").read_bytes())
    who = json.loads((out / "participants" / "suspect.json").read_text())
    inner: list[dict[str, Any]] = [
        {"device": who["device"] | {name: value}} for name in ("rank", "node", "device", "kind") for value in _NO_TEXTS
    ]
    outer: list[dict[str, Any]] = [
        {name: value} for name in ("name", "role", "device", "simulated") for value in _NO_TEXTS
    ]
    for damage in [*inner, *outer, {"name": "other"}, {"role": "judge"}]:
        (tmp_path / "it" / "participants" / "suspect.json").write_text(json.dumps(who | damage))
        done = invoke("show", "it")
        assert (done.exit_code, done.stdout) == (2, ""), (damage, done.output)
        assert "it/participants/suspect.json" in done.stderr, damage
        assert "Error(" not in done.stderr, damage


BAD: list[tuple[list[str], str]] = [
    (["--devices", "2"], "2 is not in the range 3<=x<=64"),
    (["--suspect", "cuda:0"], "torch sees no GPU on this machine"),
    ([], "torch sees no GPU on this machine"),
    (["--devices", "3", "--suspect", "cuda:0"], "--devices N plays all participants"),
    (["--devices", "3", "--reference", "cuda:0"], "--devices N plays all participants"),
    (["--devices", "3", "--suspect-rank", "0"], "--suspect-rank is for several processes"),
    (["--devices", "3", "--cpu"], "--cpu is for several processes"),
    (["--devices", "3", "--steps", "0"], "0 is not in the range"),
    (["--devices", "3", "--mode", "sideways"], "'sideways' is not one of"),
    (["--devices", "3", "--confidence", "1"], "1.0 is not in the range"),
    (["--devices", "3", "--confidence", "nan"], "nan is no number"),
    (["--devices", "3", "--timeout", "forever"], "forever"),
    (["--devices", "3", "--set", "width"], "'width' is no NAME=VALUE"),
    (["--devices", "3", "--set", "width=1", "--set", "width=2"], "width is given twice"),
    (["--devices", "3", "--set", "height=1"], "Its options are width"),
    (["--devices", "3", "--set", "width=many"], "the option width of the workload gpt is 'many'"),
    (["--devices", "3", "--workload", "resnet"], "no such workload: 'resnet'"),
    (["--devices", "3", "--workload", "no.py:make"], "no.py: there is no such file"),
    (["--devices", "3", "--workload", "no_such_module:make"], "cannot be imported"),
    (["--devices", "3", "--simulate", "lightning"], "--simulate 'lightning'"),
    (["--devices", "3", "--simulate", f"reference-9: {FAULT}"], "--simulate reference-9: there is no such participant"),
    (["--devices", "3", "--simulate", "rank=1 fwd_out @ every=1 : n=1 -> zero", *TINY], "has no rank"),
    (["--devices", "3", "--simulate", "fwd_out:nope @ every=1 : n=1 -> zero", *TINY], "no fwd_out matches 'nope'"),
    (["--devices", "3", "--module", "blox*", *TINY], "--module 'blox*' matches no submodule"),
    (["--devices", "3", "--bundle", "."], "--bundle .: there is something of this name"),
    (["--devices", "3", "--bundle", "b", "--mode", "free"], "--bundle needs --mode lock-step"),
    (["--devices", "3", "--out", ""], "is empty: is a variable unset?"),
    (["--devices", "3", "--out", "a\nb"], "characters in it that do not print"),
    (["--study", "--devices", "3"], "leave out --devices"),
    (["--study", "--mode", "free"], "leave out --mode"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_what_cannot_be_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2, (done.output, done.exception)
    assert message in done.stderr
    assert not done.stdout
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODEL)
    (tmp_path / "file").write_text("mine")
    done = invoke("--devices", "3", "--workload", "own.py:make", "--out", "file/out")
    assert done.exit_code == 2
    assert "file/out" in done.stderr
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text(""), "is not a directory"),
        (lambda path: path.mkdir(), "is no directory of a comparison (no compare.json)"),
        (lambda path: _with(path, "compare.json", "{"), "compare.json"),
        (lambda path: _with(path, "report.json", '{"what": "comparison"}'), "report.json"),
    ],
    ids=["absent", "file", "empty", "torn", "damaged"],
)
def test_what_cannot_be_shown(tmp_path: Path, made: Any, message: str) -> None:
    made(tmp_path / "it")
    done = invoke("show", str(tmp_path / "it"))
    assert done.exit_code == 2
    assert message in done.stderr
    assert not done.stdout


def _with(path: Path, name: str, text: str) -> None:
    path.mkdir()
    (path / name).write_text(text)


def test_a_place_with_comparisons_in_it_names_them(drilled: tuple[Result, Path]) -> None:
    _, out = drilled
    assert "comparisons in it: out" in invoke("show", str(out.parent)).stderr


def test_gpus_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)

    def numbers(suspect: str | None, *references: str) -> list[int | None]:
        return [one.index for one in compare_seats._gpus(suspect, references)]

    assert numbers("cuda:3") == [3, 0, 1]
    assert numbers("0") == [0, 1, 2]
    assert numbers("cuda:1", "cuda:7", "2", "cuda:5") == [1, 7, 2, 5]
    for suspect, reference, message in (
        (None, "cuda:1", "Give --suspect cuda:N; this machine has cuda:0 to cuda:7"),
        ("cuda:8", "cuda:1", "--suspect cuda:8: this machine has cuda:0 to cuda:7"),
        ("cuda:1", "cpu", "--reference 'cpu' is no GPU of this machine"),
        ("bad07", "cuda:1", "nodes by their name under torchrun"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            numbers(suspect, reference)


def test_the_suspect_among_ranks() -> None:
    ranks = [Device(rank, f"n{rank // 2}", f"GPU-{rank}", {}) for rank in range(5)]
    find = compare_seats._suspect_among
    assert (find(ranks, None, 3), find(ranks, "n2", None), find(ranks, "GPU-1", None)) == (3, 4, 1)
    for node, rank, message in (
        (None, None, "Give --suspect NODE, one of n0, n1, n2, or --suspect-rank R"),
        (None, 5, "--suspect-rank 5: torchrun has started the ranks 0 to 4"),
        ("n9", None, "no rank runs there; the nodes are n0, n1, n2"),
        ("n0", None, "2 ranks run there (0, 1): say which with --suspect-rank R"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            find(ranks, node, rank)


def test_faults_by_participant() -> None:
    one, two = "fwd_out @ every=1 : n=1 -> zero", "grad_in:head @ step=3 : n=1 -> zero"
    assert compare_seats.faults_of([one, f"reference-2: {two}", two]) == {
        "suspect": f"{one} & {two}",
        "reference-2": two,
    }
    with pytest.raises(ConfigurationError, match="--simulate"):
        compare_seats.faults_of([f"control: {one[:20]}"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suspect-rank", "1"], "under torchrun give --out DIR"),
        (["--devices", "3", "--out", "out"], "leave out --devices and --reference"),
        (["--reference", "cuda:0", "--out", "out"], "leave out --devices and --reference"),
        (["--suspect", "n1", "--suspect-rank", "1", "--out", "out"], "give one"),
    ],
    ids=["no out", "devices", "reference", "twice"],
)
def test_what_cannot_be_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    done = invoke(*arguments)
    assert done.exit_code == 2, (done.output, done.exception)
    assert message in done.stderr
    assert not list(tmp_path.iterdir())
