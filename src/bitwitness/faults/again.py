"""One run of a campaign once more, with the strikes of its record in the place of its faults: the proof that a record is enough."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bitwitness.errors import ConfigurationError
from bitwitness.faults import runner
from bitwitness.faults.cells import CellResult, CellSpec
from bitwitness.faults.database import Results
from bitwitness.faults.record import Strike, append

_COMPARED = ("end", "caught_by", "caught_step", "losses", "digests", "updates")


def run(folder: Path, key: str) -> tuple[Sequence[Strike], Sequence[Strike], str]:
    """Make a run again.

    Args:
        folder: of the campaign.
        key: of the run, or its beginning.

    Returns:
        The strikes then, the strikes now, and in what the two runs differ, empty if in nothing.

    Raises:
        ConfigurationError: there is no such run, or it has nothing that could be done again.
    """
    spec, then = _find(folder, key)
    before = [Strike.from_json(one) for one in then.strikes]
    if then.struck != len(before):
        raise ConfigurationError(
            f"{spec.key} was hit {then.struck} times, of which {len(before)} are kept: give its fault and seed to a campaign instead"
        )
    found: list[CellResult] = []
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(scratch, "record.jsonl")
        for strike in before:
            append(record, strike)
        again = replace(spec, faults=(f"@{record}",))
        runner.run([again], parallel=1, on_result=lambda _, result: found.append(result))
    now = found[0]
    differs = [name for name in _COMPARED if getattr(then, name) != getattr(now, name)]
    return before, [Strike.from_json(one) for one in now.strikes], ", ".join(differs)


def _find(folder: Path, key: str) -> tuple[CellSpec, CellResult]:
    with Results(folder / "results.sqlite") as results:
        everything = list(results.all())
    hit = [(spec, result) for spec, result in everything if result.struck and spec.key.startswith(key)]
    if len(hit) != 1 or not key:
        keys = ", ".join(spec.key for spec, _ in (hit or [one for one in everything if one[1].struck])[:5])
        what = "is not one run of it that was hit" if key else "is missing: say which run"
        raise ConfigurationError(f"{folder}: --cell {key} {what}; there is {keys or 'none'}")
    return hit[0]
