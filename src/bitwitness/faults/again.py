"""One run of a campaign once more, with the strikes of its record in the place of its faults: the proof that a record is enough.

A campaign keeps only the beginning of long records. So the run is first made as it was, with all of its record, which must
agree with what was kept; then it is made from that record alone.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bitwitness.errors import ConfigurationError
from bitwitness.faults import runner
from bitwitness.faults.cells import CellResult, CellSpec
from bitwitness.faults.database import Results
from bitwitness.faults.record import Strike, append, read

_DEADLINE = 600.0
"""Seconds for a run, far more than any takes: a campaign may have allowed more than is usual, and a machine be slower now."""

_COMPARED = ("end", "caught_by", "caught_step", "struck", "losses", "digests", "updates")


def run(folder: Path, key: str) -> tuple[Sequence[Strike], Sequence[Strike], str]:
    """Make a run again, twice.

    Args:
        folder: of the campaign.
        key: of the run, or its beginning.

    Returns:
        The strikes then, those that the record led to, and in what the runs differ, empty if in nothing.

    Raises:
        ConfigurationError: there is no such run, or nothing was hit in it.
    """
    spec, then, places = _find(folder, key)
    path = list(dict.fromkeys([*filter(None, sys.path), *places, str(Path.cwd())]))  # as `search_path` did then
    with tempfile.TemporaryDirectory() as scratch:
        first, before = _make(spec, Path(scratch, "first"), path)
        record = Path(scratch, "record.jsonl")
        for strike in before:
            append(record, strike)
        again, after = _make(replace(spec, faults=(f"@{record}",)), Path(scratch, "again"), path)
    differs = [name for name in _COMPARED if not getattr(then, name) == getattr(first, name) == getattr(again, name)]
    return before, after, ", ".join(differs)


def _make(spec: CellSpec, keep: Path, path: Sequence[str]) -> tuple[CellResult, tuple[Strike, ...]]:
    """Make a run; its result and its whole record."""
    found: list[CellResult] = []
    runner.run(
        [spec],
        parallel=1,
        deadline=_DEADLINE,
        on_result=lambda _, result: found.append(result),
        keep=keep,
        path=path,
    )
    files = sorted(keep.rglob("strikes-*.jsonl"))
    return found[0], tuple(strike for file in files for strike in read(file))


def _find(folder: Path, key: str) -> tuple[CellSpec, CellResult, list[str]]:
    with Results(folder / "results.sqlite") as results:
        places = results.places
        hit = [(spec, result) for spec, result in results.all() if result.struck]
    found = [one for one in hit if key and one[0].key.startswith(key)]
    if len(found) != 1:
        offered = ", ".join(f"{spec.key[:8]} ({spec.label})" for spec, _ in (found or hit)[:5]) or "none"
        what = f"{len(found)} of its runs that were hit begin with {key!r}" if key else "say which of its runs"
        raise ConfigurationError(f"{folder}: {what}; there is {offered}. `table.csv` beside it has all keys")
    return *found[0], places
