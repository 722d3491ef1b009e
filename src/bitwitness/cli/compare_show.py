"""Reading what a comparison has left, without torch: its report, or what its journals say where it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitwitness.compare import report
from bitwitness.compare.records import CompareFiles
from bitwitness.compare.settings import Settings
from bitwitness.errors import RunFilesError
from bitwitness.runfiles.files import read_json


def record_of(directory: Path) -> dict[str, Any]:
    """The report in the directory of a comparison, or one made now of what is there.

    Raises:
        RunFilesError: it is no directory of a comparison, or its files cannot be read.
    """
    files = CompareFiles(directory)
    if files.report.is_file():
        return report.read(directory)
    if not files.asked.is_file():
        what = "is no directory of a comparison (no compare.json)" if directory.is_dir() else "is not a directory"
        what = what if directory.exists() else "does not exist"
        found = sorted(path.parent.name for path in directory.glob("*/compare.json")) if directory.is_dir() else []
        hint = f"; comparisons in it: {', '.join(found[-8:])}" if found else ""
        raise RunFilesError(f"{directory} {what}{hint}")
    settings = Settings.from_json(read_json(files.asked))
    suspects = [one.name for one in files.introduced() if one.role == "suspect"]
    if not suspects:
        raise RunFilesError(f"{files.participants} names no suspect: the comparison had not begun when it was ended")
    from bitwitness.compare import judging

    return report.record(judging.judge(files, suspects[0], settings.confidence), finished=False)
