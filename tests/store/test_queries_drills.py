"""What came of injected faults: nobody is said to be caught, or to be named wrongly, who was not."""

from __future__ import annotations

import pytest

from bitwitness.store.importing_drills import Found, Struck, judged

THREE, FIVE = Struck(rank=3, start=1, first=10, last=10), Struck(rank=5, start=1, first=10, last=10)


def found(*named: int, step: int = 10, passed: int = 9, key: int = 1, start: int = 1) -> Found:
    return Found(key, step, passed, "attributed" if named else "unattributed", frozenset(named), start)


CASES: list[tuple[str, list[Found], list[Struck], int, str, int | None]] = [
    ("the rank that was hit is named", [found(3)], [THREE], 20, "caught", 0),
    ("later", [found(3, step=14)], [THREE], 20, "caught", 4),
    ("nobody is named", [found()], [THREE], 20, "caught, unattributed", 0),
    ("somebody else is named", [found(4)], [THREE], 20, "named wrongly", 0),
    ("the right one, and somebody else", [found(3, 4)], [THREE], 20, "named wrongly", 0),
    ("both that were hit", [found(3, 5)], [THREE, FIVE], 20, "caught", 0),
    ("the other that was hit, and this one never", [found(5)], [THREE, FIVE], 20, "missed", None),
    ("the other first, and this one then", [found(5), found(3, step=12, key=2)], [THREE, FIVE], 20, "caught", 2),
    ("the check had passed since", [found(4, step=15, passed=12)], [THREE], 20, "missed", None),
    ("before it", [found(4, step=9, passed=8)], [THREE], 20, "missed", None),
    ("in another start", [found(4, start=2)], [THREE], 20, "missed", None),
    ("nothing, and it was looked at since", [], [THREE], 11, "missed", None),
    ("nothing, and nobody has looked since", [], [THREE], 10, "unclear", None),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_what_came_of_a_fault(case: int) -> None:
    words, incidents, faults, passed, outcome, late = CASES[case]
    came = judged(THREE, incidents, passed, faults)
    assert (came.outcome, came.late) == (outcome, late), words
    assert (came.incident is None) == (came.late is None)
