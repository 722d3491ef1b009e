"""The tables of docs/signals.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from bitwitness.fleet.signals import catalogue, dcgm_fields, diagnostic
from bitwitness.fleet.signals.record import SignalClass

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "signals.md").read_text(encoding="utf-8")


def rows(first: str) -> list[list[str]]:
    """The rows whose first cell begins so."""
    lines = [line for line in TEXT.splitlines() if line.startswith(f"| `{first}")]
    return [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_codes_of_the_kernel() -> None:
    told = [row for kind in ("xid:", "sxid:", "edac:", "mce:") for row in rows(kind)]
    for code, kind, weight, reason in told:
        found = catalogue.entry(code)
        assert (kind, weight, reason) == (found.kind, found.weight, found.reason), code
    codes = {row[0] for row in told}
    known = {f"xid:{n}" for n in catalogue._XID} | {f"sxid:{n}" for n in catalogue._SXID} | set(catalogue._HOST)
    assert codes == known


def test_codes_of_the_diagnostic() -> None:
    told = {row[0]: tuple(row[1:]) for row in rows("dcgm-diag:")}
    assert told == {f"dcgm-diag:{n}": (one.kind, one.weight, one.reason) for n, one in diagnostic._ERRORS.items()}


def test_fields_of_dcgm() -> None:
    told = {row[0]: tuple(row[1:]) for row in rows("dcgm:")}
    counted = [
        one for one in dcgm_fields.FIELDS.values() if one.reading in ("count", "flag", "bits", "celsius") and one.why
    ]
    assert told == {f"dcgm:{one.id}": (one.kind, one.weight, one.fresh or one.weight, one.why) for one in counted}


def test_every_class_is_explained() -> None:
    table = TEXT.partition("| class | what it speaks for |")[2].split("\n\n", 1)[0]
    assert set(re.findall(r"^\| \*([a-z-]+)\*", table, re.MULTILINE)) == set(get_args(SignalClass))
