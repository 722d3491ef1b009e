"""The settings of a `bitwitness demo`, as far as others must know them: what was played is no finding.

A demo has its fault built in and leaves no record of an injected one (see `faults`), so the incident of its guarded training looks
like a real one to whoever reads the files of the run alone.
"""

from __future__ import annotations

from pathlib import Path

from bitwitness.errors import RunFilesError
from bitwitness.runfiles.files import read_json

DEMO = "demo.json"
"""Beside the trainings of a demo: its settings."""


def demo_fault(run_dir: Path) -> str:
    """The fault that a demo has played in this run; "" where the run is of none, or nothing was wrong in it."""
    try:
        fault = read_json(run_dir.parent / DEMO).get("fault")
    except RunFilesError:
        return ""
    return fault if isinstance(fault, str) and fault != "none" else ""
