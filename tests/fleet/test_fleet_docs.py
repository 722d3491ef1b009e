"""What docs/fleet.md says of settings, holds and actions is what the code has."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import get_args

from bitwitness.fleet.budget import HoldReason
from bitwitness.fleet.decision import Action
from bitwitness.fleet.kept import Status
from bitwitness.fleet.policy import FleetPolicy

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "fleet.md").read_text(encoding="utf-8")


def rows(header: str) -> list[list[str]]:
    """The cells of the table with this header."""
    _, found, after = TEXT.partition(header)
    assert found, f"docs/fleet.md has no table {header!r}"
    lines = after.split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))] for line in lines]


def test_every_setting_is_there_with_its_default(tmp_path: Path) -> None:
    told = {cells[0].strip("`"): cells[1].strip("`") for cells in rows("| setting | default | meaning |")}
    known = {one.name for one in fields(FleetPolicy)}
    signals = {"signals_before": "signals.before", "signals_after": "signals.after", "logs": "signals.logs"}
    signals |= {"metrics": "signals.metrics"}
    assert set(told) == {signals.get(name, name) for name in known} | {"time_zone"}
    tables = {"cluster", "notify"}
    file = tmp_path / "told.toml"
    lines = [f"{name} = {value}" for name, value in sorted(told.items()) if name not in tables]
    file.write_text("\n".join(lines), encoding="utf-8")
    assert FleetPolicy.load(file) == FleetPolicy()
    assert dict(FleetPolicy().cluster) == tomllib.loads(told["cluster"])
    assert FleetPolicy().notify == ()


def test_every_hold_is_explained() -> None:
    assert {cells[0].strip("`") for cells in rows("| held | until |")} == set(get_args(HoldReason))


def test_every_status_is_explained() -> None:
    assert {cells[0].strip("`") for cells in rows("| status | meaning |")} == set(get_args(Status))


def test_every_action_is_mentioned() -> None:
    proposed = TEXT.partition("## What is proposed")[2].partition("## When it is not")[0]
    silent = {"none"}  # for a verdict that is clean, which is no incident
    assert {action for action in get_args(Action) if action not in silent and f"*{action}*" not in proposed} == set()


def test_the_example_is_a_policy(tmp_path: Path) -> None:
    (example,) = re.findall(
        r"```toml\n(.*?)```", TEXT.partition("## The policy")[2].partition("## Clusters")[0], re.DOTALL
    )
    file = tmp_path / "fleet.toml"
    file.write_text(example, encoding="utf-8")
    policy = FleetPolicy.load(file)
    assert policy.act
    assert policy.cluster["kind"] == "slurm"
