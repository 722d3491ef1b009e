"""Programs of this machine that print their log, or do not: none of them may keep us."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bitwitness.fleet.signals import collect
from bitwitness.fleet.signals.opening import LINE_MAX


def output(program: str) -> tuple[list[bytes], str]:
    """The lines of a program, and why there were none or not all."""
    made = collect._Output([sys.executable, "-c", program] if "import" in program else ["sh", "-c", program])
    return list(made.lines()), made.why


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        ("import time; time.sleep(60)", []),
        ("echo one; exec sleep 60", [b"one"]),
        ("import os, time; os.close(1); time.sleep(60)", []),
    ],
)
def test_a_program_that_falls_silent_is_left(monkeypatch: pytest.MonkeyPatch, program: str, lines: list[bytes]) -> None:
    monkeypatch.setattr(collect, "_PATIENCE", 0.8)
    found, why = output(program)
    assert found == lines
    assert "took longer than 0.8 seconds" in why


def test_many_words_of_errors_stop_no_program() -> None:
    found, why = output("import sys; sys.stderr.write('no rights ' * 100_000); print('one'); sys.exit(3)")
    assert found == [b"one"]
    assert "failed: no rights" in why
    assert len(why) < 1000


def test_lines_are_whole_and_none_is_longer_than_they_may_be() -> None:
    found, why = output(f"import sys; print('a' * {3 * LINE_MAX}); print('b\\r'); print(); print('c', end='')")
    assert (found, why) == ([b"a" * LINE_MAX, b"b", b"", b"c"], "")


def test_a_silent_journal_is_told_and_the_rest_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(collect, "_PATIENCE", 0.4)
    sleeps = (sys.executable, "-c", "import time; time.sleep(60)")
    here = collect.Here(root=tmp_path, journal=sleeps, ring=("true",), kmsg=tmp_path / "none", devices=False)
    found = list(collect.read(here=here))
    assert [one.code for one in found] == ["kernel:no-journal", "kernel:unreadable", "kernel:no-logs"]
