"""What `bitwitness demo` refuses, before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bitwitness.cli.main import cli
from bitwitness.errors import ConfigurationError
from bitwitness.examples.plan import FAULTS, Settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fault", "cosmic-ray"], "'cosmic-ray' is not one of"),
        (["--fault"], "requires an argument"),
        (["--seed", "-1"], "-1 is not in the range"),
        (["--seed", "one"], "is not a valid integer"),
        (["--seed", str(2**31)], "is not in the range"),
        (["--steps", "5"], "5 is not in the range"),
        (["--steps", "many"], "is not a valid integer"),
        (["--nodes", "1"], "1 is not in the range"),
        (["--nodes", "17"], "17 is not in the range"),
        (["--ranks-per-node", "0"], "0 is not in the range"),
        (["--ranks-per-node", "9"], "9 is not in the range"),
        (["--fault", "weight", "--transient"], "a transient fault is one of arithmetic"),
        (["--fault", "moment", "--transient"], "a transient fault is one of arithmetic"),
        (["--fault", "none", "--transient"], "a transient fault is one of arithmetic"),
        (["--json", "yes"], "unexpected extra argument"),
        (["--verbose"], "No such option"),
    ],
)
def test_bad_options(tmp_path: Path, arguments: list[str], message: str) -> None:
    run_dir = tmp_path / "run"
    done = CliRunner().invoke(cli, ["demo", "--run-dir", str(run_dir), *arguments])
    assert done.exit_code == 2
    assert message in done.stderr
    assert not done.stdout
    assert not run_dir.exists()


def test_a_directory_that_is_in_use(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    done = CliRunner().invoke(cli, ["demo", "--run-dir", str(tmp_path)])
    assert done.exit_code == 2
    assert f"{tmp_path} is not empty: choose a new directory, nothing is overwritten" in done.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "mine.txt"]


@pytest.mark.parametrize("below", ["", "further"])
def test_a_directory_below_a_file(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    done = CliRunner().invoke(cli, ["demo", "--run-dir", str(file / below)])
    assert done.exit_code == 2
    assert "cannot be used as a run directory" in done.stderr
    assert "Traceback" not in done.output


def test_the_default_directory_below_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    done = CliRunner().invoke(cli, ["demo"])
    assert done.exit_code == 2
    assert "runs cannot be used as a run directory" in done.stderr


def test_the_default_directory_is_always_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitwitness.cli.demo import _fresh

    monkeypatch.chdir(tmp_path)
    made = [_fresh(Path("runs")) for _ in range(5)]
    assert len(set(made)) == 5
    assert all(path.is_dir() and path.name.startswith("demo-") for path in made)


def test_the_place_of_the_fault_follows_from_the_seed() -> None:
    drawn = {(Settings(seed=seed).rank, Settings(seed=seed).step) for seed in range(200)}
    assert {rank for rank, _ in drawn} == set(range(8))
    assert {step for _, step in drawn} == set(range(8, 16))
    assert Settings(seed=5) == Settings(seed=5)
    assert Settings(nodes=3, ranks_per_node=1, seed=2).node in ("node-0", "node-1", "node-2")


def test_settings_of_code_are_checked_as_well() -> None:
    assert FAULTS[-1] == "none"
    with pytest.raises(ConfigurationError, match="must be one of"):
        Settings(fault="other")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="too few"):
        Settings(steps=3)
    with pytest.raises(ConfigurationError, match="one node has nobody to witness it"):
        Settings(nodes=1)


def test_settings_are_handed_to_the_ranks(tmp_path: Path) -> None:
    settings = Settings(fault="gradient", transient=True, seed=7, steps=9, nodes=5, ranks_per_node=3)
    settings.write(tmp_path)
    assert Settings.read(tmp_path) == settings
