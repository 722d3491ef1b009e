"""The same silicon under another name, and what a node says of itself before a job starts there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from bitwitness.cli.main import cli
from bitwitness.errors import RunFilesError
from bitwitness.fleet.clearing import clear
from bitwitness.fleet.identity import (
    Condemned,
    Return,
    Sighting,
    read_condemned,
    returned,
    sightings_of,
    write_condemned,
)
from bitwitness.fleet.publishing import CONDEMNED
from bitwitness.fleet.signals.gather import IDENTITY
from bitwitness.fleet.signals.record import Signal
from bitwitness.runfiles import RunFiles
from bitwitness.topology import Placement, Topology
from tests.fleet.incidents import NOW, topology, verdict, write
from tests.fleet.rehearsal import Rehearsal

WAS = Condemned("GPU-1", "SN-1", "n1", "20261129T120000Z-000001", NOW.isoformat())


def seen(minutes: float, device: str = "GPU-1", node: str = "n1", serial: str = "") -> Sighting:
    return Sighting(device, serial, node, (NOW + timedelta(minutes=minutes)).isoformat(), "a test")


@pytest.mark.parametrize(
    ("sighting", "back"),
    [
        (seen(11), True),
        (seen(5), False),  # the job may have been started just before
        (seen(1, node="n9"), True),
        (seen(-1, node="n9"), False),
        (seen(99, device="GPU-2"), False),
        (seen(99, device="GPU-2", serial="SN-1"), True),
        (seen(99, device="GPU-2", serial="SN-2"), False),
    ],
)
def test_what_counts_as_a_return(sighting: Sighting, back: bool) -> None:
    assert bool(returned([WAS], [sighting])) is back


def test_an_unknown_serial_equals_no_other() -> None:
    assert not returned([Condemned("GPU-1", "", "n1", "i", NOW.isoformat())], [seen(99, device="GPU-2")])


def test_a_return_is_told_loudly_and_once() -> None:
    (found,) = returned([WAS], [seen(30), seen(20, node="n9"), seen(40)])
    assert "THE SAME SILICON IS BACK: device GPU-1 is in n9, and was in n1" in found.text


def test_a_start_of_a_job_is_a_sighting(tmp_path: Path) -> None:
    files = RunFiles(tmp_path).create()
    assert sightings_of(files) == []
    files.write_run({"started": NOW.isoformat(), "placement": topology(("n0",)).to_json()})
    assert [(one.device, one.node) for one in sightings_of(files)] == [("GPU-n0-0", "n0"), ("GPU-n0-1", "n0")]


@pytest.mark.parametrize("record", [{"started": "yesterday"}, {"started": "2026-11-29T12:00:00"}, {"placement": 3}, {}])
def test_a_start_that_cannot_be_read_is_no_empty_one(tmp_path: Path, record: dict[str, object]) -> None:
    files = RunFiles(tmp_path).create()
    files.write_run({"started": NOW.isoformat(), "placement": topology(("n0",)).to_json(), **record} if record else {})
    with pytest.raises(RunFilesError, match=r"run\.json is damaged"):
        sightings_of(files)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunFilesError, match=r"run\.json"):
        sightings_of(files)


# By the controller --------------------------------------------------------------------------------------------------


def moved(play: Rehearsal, node: str, device: str, run_dir: Path, rank: int = 0) -> None:
    """A job with this device in another node has an incident that names another rank."""
    where = Topology(
        (Placement(0, "n3", "GPU-n3-0", 0, "H100", "x"), Placement(1, node, device, 0, "H100", "x")),
    )
    write(run_dir, 90, verdict(where, (rank,), "transient"), where, play.clock.wall)


def test_an_incident_that_came_over_the_network_is_a_sighting(play: Rehearsal) -> None:
    play.incident()
    play.rounds(2)
    play.clock.move(timedelta(hours=1))
    far = play.folder / "far"
    moved(play, "n2", "GPU-n1-0", far)
    play.controller._runs._runs += (far,)
    play.rounds(3)
    (text,) = play.trail("returned")
    assert "THE SAME SILICON IS BACK: device GPU-n1-0 is in n2, and was in n1" in text
    assert play.cluster.calls() == [("drain", "n1"), ("drain", "n2")]


def test_a_return_that_is_cleared_while_it_is_compared_is_none(
    play: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    play.incident()
    play.rounds(2)
    play.clock.move(timedelta(hours=1))
    where = Topology((Placement(0, "n2", "GPU-n1-0", 0, "H100", "x"),))
    RunFiles(play.run_dir).write_run({"started": play.clock.wall.isoformat(), "placement": where.to_json()})
    compare = play.controller._returns._returned

    def cleared(seen: Sequence[Sighting]) -> list[Return]:
        found = compare(seen)
        monkeypatch.setattr(play.controller._returns, "_returned", compare)
        clear(play.state, play.cluster, "n1", "it was a test", "kim@head")
        assert len(found) == 1
        return found

    monkeypatch.setattr(play.controller._returns, "_returned", cleared)
    play.rounds(3)
    assert play.trail("returned") == []
    assert play.cluster.calls() == [("drain", "n1"), ("clear", "n1")]


def test_a_job_that_still_runs_on_a_draining_node_is_no_return(play: Rehearsal) -> None:
    play.incident(1)
    play.rounds(2)
    play.clock.move(timedelta(hours=1))
    play.incident(2, persistence="transient")
    play.rounds(3)
    assert play.trail("returned") == []


def test_a_slice_and_its_device_are_the_same_silicon(play: Rehearsal, tmp_path: Path) -> None:
    play.where = Topology(tuple(replace(one, device=f"MIG-{one.node}") for one in play.where.placements))
    evidence = "pci=0000:9b:00 serial=165 index=0 mig=MIG-n1,MIG-n1-b"
    told = Signal("nvml", IDENTITY, "GPU-n1", None, "noise", "none", "where it is", host="n1")
    play.signals = [replace(told, evidence=evidence)]
    play.incident()
    play.rounds(2)
    (was,) = play.controller.book.condemned()
    assert (was.device, was.serial, was.aliases) == ("MIG-n1", "165", ("GPU-n1", "MIG-n1-b"))
    file = play.state.folder / CONDEMNED
    assert read_condemned(file) == [was]
    for device in ("GPU-n1", "MIG-n1", "MIG-n1-b"):
        assert admit(file, "--device", device)[0] == 1
    assert admit(file, "--device", "MIG-n2")[0] == 0
    play.clock.move(timedelta(hours=1))
    moved(play, "n2", "MIG-n1-b", tmp_path / "far")
    play.controller._runs._runs += (tmp_path / "far",)
    play.rounds(2)
    assert len(play.trail("returned")) == 1


def test_a_slice_that_is_named_by_its_device_needs_nobody_to_tell() -> None:
    was = replace(WAS, device="MIG-GPU-0a/1/0", serial="")
    assert returned([was], [seen(60, device="GPU-0a")])
    assert returned([was], [seen(60, device="MIG-GPU-0a/2/0")])
    assert not returned([was], [seen(60, device="GPU-0b")])


def test_a_list_of_an_older_version_is_read(tmp_path: Path) -> None:
    file = tmp_path / CONDEMNED
    write_condemned(file, [WAS])
    record = json.loads(file.read_text())
    del record["devices"][0]["aliases"]
    file.write_text(json.dumps(record))
    assert read_condemned(file) == [WAS]


def test_a_start_that_cannot_be_read_is_said_once_and_until_it_can(play: Rehearsal) -> None:
    path = play.run_dir / "run.json"
    path.write_text("{")
    play.rounds(4)
    assert [text for text in play.trail("trouble") if "run.json" in text] == play.trail("trouble")
    assert len(play.trail("trouble")) == 1
    path.unlink()
    play.rounds(2)
    assert len(play.trail("over")) == 1


# On the node --------------------------------------------------------------------------------------------------------


def admit(file: Path, *more: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["fleet", "admit", "--condemned", str(file), "--node", "n7", *more])
    return done.exit_code, done.output


def test_admission(tmp_path: Path) -> None:
    file = tmp_path / "condemned.json"
    assert admit(file)[0] == 2
    write_condemned(file, [WAS])
    assert read_condemned(file) == [WAS]
    assert admit(file, "--device", "GPU-2")[0] == 0
    code, output = admit(file, "--device", "GPU-2", "--device", "GPU-1")
    assert code == 1
    assert "THE SAME SILICON IS BACK" in output
    code, output = admit(file, "--device", "GPU-1", "--json")
    assert (code, json.loads(output)["admitted"]) == (1, False)


def test_a_damaged_list_is_not_an_empty_one(tmp_path: Path) -> None:
    file = tmp_path / "condemned.json"
    for content in ('{"schema": 1}', '{"schema": 1, "devices": [{}]}', '{"schema": 1, "devices": 3}', "", "[]"):
        file.write_text(content)
        with pytest.raises(RunFilesError):
            read_condemned(file)
        assert admit(file)[0] == 2
