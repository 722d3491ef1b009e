"""The file of a search: what is damaged, of another planner, or of other nodes is refused; a result is never lost."""

from __future__ import annotations

import json
import logging
import os
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bitwitness.cli.main import cli
from bitwitness.errors import RunFilesError
from bitwitness.runfiles.files import dump
from bitwitness.scan.groups import planning, state
from bitwitness.scan.groups.state import State, checked

MANY = bool(os.environ.get("BITWITNESS_EXHAUSTIVE"))
ARGUMENTS: dict[str, Any] = {"nodes": ["a", "b"], "seed": 0}
COMMAND = ["find-bad", "--nodes", "n[1-6]", "--test", "./try.sh {nodes}", "--max-bad", "1", "--state", "s.jsonl"]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "try.sh").write_text('#!/bin/sh\necho "$1" >> ran\ncase ",$1," in *,n3,*) exit 1;; esac\nexit 0\n')
    (tmp_path / "try.sh").chmod(0o755)


def search(*args: str) -> tuple[int, str]:
    """Exit code, and what it said."""
    done = CliRunner().invoke(cli, [*COMMAND, *args])
    assert "Traceback" not in done.output
    return done.exit_code, done.output


def whole() -> list[bytes]:
    """The lines of a search that is over, but for its result: as it is when it is killed just before."""
    assert search()[0] == 0
    lines = Path("s.1.jsonl").read_bytes().splitlines(keepends=True)
    assert json.loads(lines[-1])["kind"] == "result"
    return lines[:-1]


def refused(lines: list[bytes], says: str) -> None:
    """Refused, and left as it is, and nothing is tested."""
    Path("ran").unlink(missing_ok=True)
    Path("s.jsonl").write_bytes(b"".join(lines))
    code, output = search()
    assert code == 2, output
    assert says in " ".join(output.split())
    assert Path("s.jsonl").read_bytes() == b"".join(lines)
    assert not Path("ran").exists()


def test_a_line_that_is_missing_damaged_or_of_other_nodes_is_refused() -> None:
    lines = whole()
    assert len(lines) > 8
    refused([*lines[:4], b'{"sch\n', *lines[5:]], "line 5 is damaged")
    refused([*lines[:4], *lines[5:]], "missing")
    refused([*lines[:5], lines[4], *lines[5:]], "line 6 is damaged")
    record = json.loads(lines[4])
    del record["check"]
    refused([*lines[:4], dump(record).encode() + b"\n", *lines[5:]], "line 5 is damaged")
    record["group"] = state.digest("n9")
    refused([*lines[:4], dump(checked_anew(record)).encode() + b"\n", *lines[5:]], "line 5 is of a test of other nodes")
    refused([lines[0][:-9] + b"\n", *lines[1:]], "first line is damaged")
    refused([lines[0][:50]], "first line is damaged")


def checked_anew(record: dict[str, Any]) -> dict[str, Any]:
    """A changed record with a checksum that is right again."""
    said = {key: value for key, value in record.items() if key not in ("schema", "time", "check")}
    return {"schema": 1, "time": "", **checked(said)}


def test_a_hole_anywhere_is_refused() -> None:
    """The test of the line that is missing would be made again, and could end otherwise: what follows is of other groups then."""
    lines = whole()
    last = json.loads(lines[-1])["test"][0]
    for number, line in enumerate(lines[1:], 1):
        if json.loads(line)["test"][0] < last:
            refused([*lines[:number], *lines[number + 1 :]], "missing")


def test_a_bit_that_flipped_anywhere_is_noticed() -> None:
    lines = whole()
    content = b"".join(lines)
    rng = random.Random(1)
    places = range(len(content)) if MANY else rng.sample(range(len(content)), 60)
    arguments = json.loads(lines[0])["arguments"]
    Path("s.jsonl").write_bytes(content)
    with State(Path("s.jsonl").absolute(), arguments) as read:
        told = read.told
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1 << rng.randrange(8)
        Path("s.jsonl").write_bytes(changed)
        try:
            with State(Path("s.jsonl").absolute(), arguments) as read:
                # Only the time of a line may differ, and the last line may have lost its end.
                assert read.told.items() <= told.items()
                assert len(read.told) == len(told) - (place == len(content) - 1)
        except RunFilesError:
            assert Path("s.jsonl").read_bytes() == changed


def test_only_the_last_line_may_be_torn(caplog: pytest.LogCaptureFixture) -> None:
    lines = whole()
    ran = len(Path("ran").read_text().splitlines())
    Path("s.jsonl").write_bytes(b"".join(lines)[:-7])
    with caplog.at_level(logging.WARNING):
        assert search()[0] == 0
    assert "torn" in caplog.text
    assert len(Path("ran").read_text().splitlines()) == ran + 1
    assert Path("s.2.jsonl").read_bytes().startswith(b"".join(lines[:-1]))


def test_the_state_of_another_planner_or_search_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = whole()
    with monkeypatch.context() as patched:
        patched.setattr(state, "PLANNER_VERSION", planning.PLANNER_VERSION + 1)
        refused(lines, "finish it with the version that began it")
    refused([b'{"schema": 1, "kind": "search", "arguments": {"nodes": ["a"]}}\n'], "is of planner unknown")
    refused([b"hello\n"], "is no state of a search")
    header = {"schema": 1, **checked({"kind": "search", "planner": planning.PLANNER_VERSION, "arguments": ARGUMENTS})}
    refused([dump(header).encode() + b"\n"], "other arguments (")


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo("pipe")
    Path("link").symlink_to("elsewhere")
    for path in ("pipe", "link", "/dev/full", "/dev/zero"):
        done = CliRunner().invoke(cli, [*COMMAND, "--state", path])
        assert done.exit_code == 2
        assert "no plain file" in done.output
    assert not Path("ran").exists()
    assert not Path("elsewhere").exists()


def test_a_result_takes_a_name_that_is_free_for_file_and_logs() -> None:
    whole()
    Path("s.1.jsonl").unlink()
    code, output = search("--json")
    assert code == 0
    assert Path(json.loads(output)["state"]).name == "s.2.jsonl"
    assert Path("s.2-logs").is_dir()
    assert not Path("s.jsonl").exists()


@pytest.mark.parametrize("fails", ["s-logs", "s.jsonl"])
def test_a_search_killed_when_it_is_over_is_not_made_again(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Killed before either is renamed: the same command says the same, from what was told, and does what is left."""
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name == fails:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        CliRunner().invoke(cli, COMMAND)
    assert Path("s.jsonl").exists()
    ran = Path("ran").read_text()
    code, output = search("--json")
    assert (code, json.loads(output)["bad"], Path("ran").read_text()) == (0, ["n3"], ran)
    assert Path("s.1.jsonl").exists()
    assert Path("s.1-logs").is_dir()


def test_a_state_that_cannot_be_renamed_costs_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, target: Path) -> Path:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "rename", refuse)
    done = CliRunner().invoke(cli, [*COMMAND, "--json"])
    assert (done.exit_code, json.loads(done.stdout)["bad"]) == (0, ["n3"])
    assert "could not be put away" in done.stderr
