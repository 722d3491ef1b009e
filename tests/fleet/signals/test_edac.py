"""EDAC's counters, in a tree like that of `/sys`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitwitness.fleet.signals import Signal, edac
from bitwitness.fleet.signals.gather import gather


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, value in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n", encoding="utf-8")
    return root


def read(root: Path) -> list[Signal]:
    return list(edac.read_sysfs(root, host="n1"))


def controller(ce: object = 0, ue: object = 0, **more: object) -> dict[str, object]:
    files = {"ce_count": ce, "ue_count": ue, "ce_noinfo_count": 0, "seconds_since_reset": 7200, **more}
    return {f"mc0/{name}": value for name, value in files.items()}


def module(kind: str, ce: object, ue: object, label: str) -> dict[str, object]:
    return {f"mc0/{kind}/dimm_ce_count": ce, f"mc0/{kind}/dimm_ue_count": ue, f"mc0/{kind}/dimm_label": label}


@pytest.mark.parametrize("kind", ["dimm3", "rank3"])
def test_modules_are_told_once_and_by_their_label(tmp_path: Path, kind: str) -> None:
    found = read(tree(tmp_path, controller(4, 1) | module(kind, 4, 1, "DIMM_B1")))
    assert [(one.code, one.device, one.count, one.kind, one.weight) for one in found] == [
        ("edac:ce", "DIMM_B1", 4, "memory", "weak"),
        ("edac:ue", "DIMM_B1", 1, "memory", "strong"),
    ]
    assert all(one.time is None and one.host == "n1" and "in the last 2.0 hours" in one.reason for one in found)


def test_what_no_module_is_told_for_is_told_for_the_controller(tmp_path: Path) -> None:
    found = read(tree(tmp_path, controller(7, 2) | module("dimm0", 4, 0, "") | module("dimm1", 0, 0, "")))
    assert [(one.code, one.device, one.count) for one in found] == [
        ("edac:ce", "mc0/dimm0", 4),
        ("edac:ce", "mc0", 3),
        ("edac:ue", "mc0", 2),
    ]


def test_a_tree_is_known_wherever_it_was_copied_to(tmp_path: Path) -> None:
    root = tree(tmp_path / "sosreport/edac", controller(0, 1))
    assert edac.looks_like_tree(root)
    for other in (tmp_path, root / "mc0", root / "mc0/ue_count", tmp_path / "absent"):
        assert not edac.looks_like_tree(other)
    (tmp_path / "mc1").mkdir()
    assert not edac.looks_like_tree(tmp_path), "a folder of that name is no controller yet"


def test_a_count_that_was_read_twice_is_one_count(tmp_path: Path) -> None:
    first, later = (read(tree(tmp_path / str(count), controller(0, count))) for count in (2, 3))
    assert [(one.code, one.count) for one in gather([*first, *later])] == [("edac:ue", 3)]


def test_the_older_tree(tmp_path: Path) -> None:
    rows = {"mc0/csrow0/ce_count": 2, "mc0/csrow0/ue_count": 0, "mc0/csrow0/ch0_dimm_label": "A1"}
    assert [(one.code, one.device) for one in read(tree(tmp_path, controller(2) | rows))] == [("edac:ce", "A1")]


def test_no_errors_are_no_records(tmp_path: Path) -> None:
    assert read(tree(tmp_path, controller() | module("dimm0", 0, 0, "A1"))) == []


@pytest.mark.parametrize("damage", ["", "x", "-1", "9" * 30, "1 2", "\x00", "²"])
def test_a_counter_that_cannot_be_read_is_no_zero(tmp_path: Path, damage: str) -> None:
    found = read(tree(tmp_path, controller(0, damage) | module("dimm0", 0, damage, "A1")))
    assert [(one.code, one.kind, one.device) for one in found] == [
        ("edac:unreadable", "no-evidence", "A1"),
        ("edac:unreadable", "no-evidence", "mc0"),
    ]


def test_a_counter_that_is_absent_is_no_zero(tmp_path: Path) -> None:
    files = controller()
    del files["mc0/ue_count"]
    assert [one.code for one in read(tree(tmp_path, files))] == ["edac:unreadable", "edac:unreadable"]


@pytest.mark.parametrize("root", ["absent", "empty"])
def test_no_driver_is_no_evidence(tmp_path: Path, root: str) -> None:
    (tmp_path / "empty").mkdir()
    (one,) = read(tmp_path / root)
    assert (one.code, one.kind) == ("edac:absent", "no-evidence")
