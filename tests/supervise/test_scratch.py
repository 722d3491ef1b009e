"""Folders of a node: gone when closed, and swept up by the next when their owner was killed; those in use stay."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bitwitness.supervise.scratch import Scratch

OWNER = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from bitwitness.supervise.scratch import Scratch
scratch = Scratch()
print(scratch.path, flush=True)
time.sleep(600)
"""


def test_who_was_killed_leaves_nothing_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        first = Scratch()
        assert left.is_dir(), "its owner lives"
        owner.send_signal(signal.SIGKILL)
    assert left.is_dir()
    second = Scratch()
    assert not left.exists()
    assert first.path.is_dir()
    for one in (first, second, second):
        one.close()
    assert not list(tmp_path.iterdir())
