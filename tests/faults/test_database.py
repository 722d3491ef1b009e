"""Results outlive whatever happens to the process that writes them."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.faults import database
from bitwitness.faults.cells import CellResult, CellSpec
from bitwitness.faults.database import Results

ROOT = Path(__file__).resolve().parents[2]


def specs(count: int) -> list[CellSpec]:
    return [
        CellSpec(
            f"key-{number:04d}", "tiny", "mlp", {"ranks": 2, "steps": 3}, {}, ("a line",), number, "fault", "label"
        )
        for number in range(count)
    ]


def result(spec: CellSpec) -> CellResult:
    return CellResult(
        spec.key,
        "finished",
        losses=(1.0, "nan"),
        digests=(("a", "b"), ("a", "b")),
        checkpoints=({"step": 2, "published": True, "problem": ""},),
        struck_ranks=(1,),
    )


def filled(path: Path, cells: Sequence[CellSpec], done: int) -> None:
    with Results(path) as results:
        results.begin("try", cells)
        for spec in cells[:done]:
            results.put(spec, result(spec))


def test_what_is_put_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "results.sqlite"
    cells = specs(3)[::-1]
    filled(path, cells, 2)
    with Results(path) as results:
        assert results.done() == {cells[0].key, cells[1].key}
        assert results.all() == [(spec, result(spec)) for spec in cells[:2]], "in the order of the campaign"


def test_a_second_result_replaces_the_first(tmp_path: Path) -> None:
    (spec,) = specs(1)
    with Results(tmp_path / "r.sqlite") as results:
        results.begin("try", [spec])
        results.put(spec, CellResult(spec.key, "hang"))
        results.put(spec, result(spec))
        assert results.all() == [(spec, result(spec))]


_WRITER = """
import sys
from pathlib import Path
from bitwitness.faults.database import Results
from tests.faults.test_database import result, specs
cells = specs(2000)
with Results(Path(sys.argv[1])) as results:
    results.begin("try", cells)
    for spec in cells:
        results.put(spec, result(spec))
        print(spec.key, flush=True)
"""


@pytest.mark.parametrize("after", [1, 7, 40])
def test_kill_9_loses_nothing_that_was_put(tmp_path: Path, after: int) -> None:
    path = tmp_path / "results.sqlite"
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    told = [process.stdout.readline().strip() for _ in range(after)]
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate()
    told += [line for line in rest.splitlines() if line.startswith("key-") and len(line) == 8]
    assert process.returncode == -signal.SIGKILL
    with Results(path) as results:
        done = results.done()
        assert set(told) <= done
        assert len(done) <= len(told) + 1, "at most the one under way is there as well"
        assert all(found == result(spec) for spec, found in results.all())
        results.begin("try", specs(2000))
        results.put(specs(2000)[-1], result(specs(2000)[-1]))


def test_a_campaign_that_was_extended_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    filled(path, specs(2), 2)
    with Results(path) as results:
        results.begin("try", specs(5))
        assert len(results.done()) == 2


def test_results_of_other_runs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    filled(path, specs(3), 3)
    with Results(path) as results:
        with pytest.raises(ConfigurationError, match=r"1 runs that this campaign does not have.*--out"):
            results.begin("try", specs(2))
        with pytest.raises(ConfigurationError, match="of the campaign 'try', not of 'other'"):
            results.begin("other", specs(3))
        results.begin("try", specs(3))


def test_what_has_no_result_may_be_changed(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    filled(path, specs(3), 1)
    with Results(path) as results:
        results.begin("try", specs(1))
        assert len(results.all()) == 1


def test_results_of_another_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.sqlite"
    filled(path, specs(1), 1)
    monkeypatch.setattr(database, "__version__", "9.9")
    with Results(path) as results, pytest.raises(ConfigurationError, match=r"this is 9\.9"):
        results.begin("try", specs(1))


def test_another_file_is_not_touched(tmp_path: Path) -> None:
    text = tmp_path / "notes"
    text.write_text("not a database, but long enough to look like one " * 50)
    with pytest.raises(RunFilesError, match="notes"):
        Results(text)
    assert text.read_text().startswith("not a database")
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE songs (name)")
    connection.close()
    with pytest.raises(RunFilesError, match="something else"):
        Results(other)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    filled(path, specs(1), 1)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE about SET value = '7' WHERE name = 'schema'")
    connection.close()
    with pytest.raises(RunFilesError, match="schema 7"):
        Results(path)


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    filled(path, specs(1), 1)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE cells SET result = '{'")
    connection.close()
    with Results(path) as results, pytest.raises(RunFilesError, match="key-0000 is damaged"):
        results.all()


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFilesError, match="nowhere"):
        Results(tmp_path / "nowhere" / "r.sqlite")


def test_one_writer_waits_for_another(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    one, two = specs(2)
    with Results(path) as first, Results(path) as second:
        first.begin("try", [one, two])
        second.put(one, result(one))
        first.put(two, result(two))
        assert first.done() == second.done() == {one.key, two.key}
