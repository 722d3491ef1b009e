"""What nodes read before a job starts: beside a state that is closed to them, open to all, and never out of date unsaid."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from bitwitness.fleet.publishing import CONDEMNED
from tests.fleet.test_fleet_commands import Place, call

DEVICE = "GPU-n1-0"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Under the umask of the service."""
    before = os.umask(0o077)
    try:
        yield Place(tmp_path)
    finally:
        os.umask(before)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o755)
    return folder


def devices(folder: Path) -> list[str]:
    return [one["device"] for one in json.loads((folder / CONDEMNED).read_text())["devices"]]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def admitted(folder: Path) -> int:
    return call("admit", "--condemned", str(folder / CONDEMNED), "--node", "n1", "--device", DEVICE).exit_code


def test_every_node_can_read_it_also_after_a_clear(place: Place, shared: Path) -> None:
    place.incident()
    assert place.watch("--once", "--act", "--publish", str(shared)).exit_code == 0
    assert place.watch("--once", "--act", "--publish", str(shared)).exit_code == 0
    assert (mode(place.state), mode(place.state / CONDEMNED)) == (0o700, 0o600)
    assert (mode(shared / CONDEMNED), devices(shared), admitted(shared)) == (0o644, [DEVICE], 1)
    done = place.ask("clear", "n1", "--why", "the board was exchanged", "--policy", str(place.policy))
    assert (done.exit_code, done.stderr) == (0, "")
    assert (mode(shared / CONDEMNED), devices(shared), admitted(shared)) == (0o644, [], 0)


def test_what_others_wrote_there_is_put_right(place: Place, shared: Path) -> None:
    place.incident()
    for _ in range(2):
        place.watch("--once", "--act", "--publish", str(shared))
    (shared / CONDEMNED).write_text("{}")
    place.watch("--once", "--act", "--publish", str(shared))
    assert devices(shared) == [DEVICE]


def test_a_rehearsal_leaves_it_alone(place: Place, shared: Path) -> None:
    place.incident()
    assert place.watch("--dry-run", "--publish", str(shared)).exit_code == 0
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("closed", [False, True])
def test_a_folder_that_nodes_cannot_read_is_said_loudly(place: Place, shared: Path, closed: bool) -> None:
    where = shared if closed else shared / "not-mounted"
    shared.chmod(0o700 if closed else 0o755)
    place.watch("--once", "--publish", str(where))
    todo = " ".join(place.asked("status")["todo"])
    assert "nodes do not see which devices were taken out" in todo, todo
    assert ("chmod 755" if closed else "cannot be reached") in todo
    assert closed or not where.exists(), "below a mount that is absent it would be a folder of this machine"
    shared.chmod(0o755)
    where.mkdir(mode=0o755, exist_ok=True)
    where.chmod(0o755)
    place.watch("--once", "--publish", str(where))
    assert "nodes do not see" not in " ".join(place.asked("status")["todo"])


def test_a_clear_that_nodes_do_not_see_says_so(place: Place, shared: Path) -> None:
    place.incident()
    place.watch("--once", "--act", "--publish", str(shared))
    (shared / CONDEMNED).unlink(missing_ok=True)
    shared.rmdir()
    done = place.ask("clear", "n1", "--why", "repaired", "--policy", str(place.policy))
    assert done.exit_code == 0
    assert "nodes still refuse its devices" in done.stderr


def test_a_file_that_is_left_behind_is_said(place: Place, shared: Path) -> None:
    place.watch("--once", "--publish", str(shared))
    assert "is not kept up to date any more" in place.watch("--once").stderr


def test_the_unit_publishes_where_the_prolog_looks() -> None:
    root = Path(__file__).resolve().parent.parent.parent
    unit = (root / "deploy" / "systemd" / "bitwitness-fleet.service").read_text()
    folder = unit.partition("BITWITNESS_PUBLISH=--publish ")[2].partition("'")[0]
    assert f"ReadWritePaths=-{folder}\n" in unit
    assert "$BITWITNESS_PUBLISH --state" in unit
    assert f"BITWITNESS_CONDEMNED={folder}/{CONDEMNED}\n" in (root / "docs" / "slurm.md").read_text()
