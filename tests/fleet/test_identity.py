"""The same silicon under another name, and what a node says of itself before a job starts there."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from bitwitness.cli.main import cli
from bitwitness.errors import RunFilesError
from bitwitness.fleet.identity import (
    Condemned,
    Sighting,
    read_condemned,
    returned,
    sightings_of,
    write_condemned,
)
from bitwitness.runfiles import RunFiles
from tests.fleet.incidents import NOW, topology

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
