"""Whoever only reads the state of a controller changes nothing of it and leaves nothing beside it, whatever lies there."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from bitwitness.cli.main import cli
from bitwitness.errors import StorageBusy
from bitwitness.fleet.figures import figures
from bitwitness.fleet.rehearsing_incident import copy_state
from bitwitness.fleet.state import NAME, State

CONTROLLER = """
import sys
from pathlib import Path
from bitwitness.fleet.state import State

with State(Path(sys.argv[1])) as state:
    for line in sys.stdin:
        with state.change():
            state.note("test", line.strip())
        print("noted", flush=True)
"""


class Controller:
    """A process that has a state open, and writes to it when it is told to."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def note(self, text: str) -> None:
        """Write a line to the audit trail."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "noted\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """States as they are found: of a controller that has ended, and of one that was killed."""
    folder = tmp_path_factory.mktemp("states")
    controller = Controller(folder / "killed")
    try:
        controller.note("one")
        controller.note("two")
    finally:
        controller.process.kill()
        controller.process.communicate()
    # As a backup leaves out what is made anew, and as a controller leaves it that ends.
    shutil.copytree(folder / "killed", folder / "backup", ignore=shutil.ignore_patterns("*-shm"))
    shutil.copytree(folder / "killed", folder / "ended")
    State(folder / "ended").close()
    return {path.name: path for path in folder.iterdir()}


def lying(folder: Path) -> dict[str, tuple[str, int, int]]:
    """What lies there: content, time and owner; but the index of SQLite, which is made anew whenever it is needed, by name."""
    found = {}
    for path in sorted(folder.iterdir()):
        state, index = path.stat(), path.name.endswith("-shm")
        content = "" if index else hashlib.sha256(path.read_bytes()).hexdigest()
        found[path.name] = (content, 0 if index else state.st_mtime_ns, state.st_uid)
    return found


def _state(folder: Path) -> None:
    with State(folder, create=False, write=False) as state:
        assert [one.text for one in state.history()][:2] == ["one", "two"]
        with pytest.raises(AssertionError, match="opened to be read"), state.change():
            pass


def _commands(folder: Path) -> None:
    for command in ("status", "history"):
        done = CliRunner().invoke(cli, ["fleet", command, "--state", str(folder), "--json"])
        assert done.exit_code == 0, done.output


def _rehearsal(folder: Path) -> None:
    copy = folder.with_name(f"{folder.name}-copy")
    copy.mkdir()
    copy_state(folder, copy)
    with State(copy) as state:
        assert len(state.history()) == 2


@pytest.mark.parametrize("read", [_state, _commands, figures, _rehearsal])
@pytest.mark.parametrize("name", ["killed", "backup", "ended"])
def test_readers_change_nothing(
    made: dict[str, Path], tmp_path: Path, name: str, read: Callable[[Path], object]
) -> None:
    folder = tmp_path / name
    shutil.copytree(made[name], folder)
    before = lying(folder)
    read(folder)
    assert lying(folder) == before


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody may write there; root may all the same."""
    paths = [folder, *folder.iterdir()]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        yield
    finally:
        for path in paths:
            path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.mark.parametrize("name", ["killed", "backup", "ended"])
def test_what_cannot_be_written_can_be_read(made: dict[str, Path], tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    shutil.copytree(made[name], folder)
    with read_only(folder):
        before = lying(folder)
        _state(folder)
        assert lying(folder) == before


def test_beside_a_controller_that_runs_starts_and_ends(tmp_path: Path) -> None:
    State(tmp_path).close()
    with State(tmp_path, create=False, write=False) as reader:
        assert reader.history() == []
        controller = Controller(tmp_path)
        try:
            controller.note("one")  # which began while the state was read as it lay
            assert [one.text for one in reader.history()] == ["one"]
            controller.note("two")
            before = lying(tmp_path)
            _state(tmp_path)
            _commands(tmp_path)
            assert lying(tmp_path) == before
            controller.note("three")
            assert [one.text for one in reader.history()] == ["one", "two", "three"]
        finally:
            controller.process.communicate()
        assert controller.process.returncode == 0
        assert [one.text for one in reader.history()] == ["one", "two", "three"]
    with State(tmp_path) as state:  # it is as good as before for who writes
        assert len(state.history()) == 3


def test_a_state_that_changes_while_it_is_read_as_it_lies_is_read_again(made: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "state"
    shutil.copytree(made["ended"], folder)
    with State(folder, create=False, write=False) as reader:
        assert len(reader.history()) == 2
        with State(folder) as state, state.change():
            state.note("test", "three")
        assert [one.text for one in reader.history()] == ["one", "two", "three"]
        assert sorted(path.name for path in folder.iterdir()) == [NAME]


def test_who_may_not_read_is_told_what(made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "state"
    shutil.copytree(made["ended"], folder)
    (folder / NAME).unlink()
    (folder / NAME).mkdir()  # which nobody can open, root neither
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != NAME)
    with pytest.raises(StorageBusy, match=f"this user may not read {NAME}"):
        State(folder, create=False, write=False)
