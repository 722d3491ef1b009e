"""Which incidents were drills and what came of injected faults: nobody is absolved, caught or named wrongly who was not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bitwitness.runfiles import read_actions, read_incident
from bitwitness.runfiles.drills import Found, Struck, is_drill, settled, start_of
from bitwitness.runfiles.faults import injected_into, judgement
from tests.store.making import INCIDENT, append, make_incident, make_run, strike, topology, verdict

THREE, FIVE = Struck(3, "n3", "s/1", {10: "c"}), Struck(5, "n5", "s/1", {10: "c"})


def found(
    *named: int,
    step: int = 10,
    passed: int = 9,
    key: int = 1,
    start: str = "s/1",
    check: str = "replicas",
    persistence: str = "unknown",
) -> Found:
    who = frozenset((rank, f"n{rank}") for rank in named)
    status = "attributed" if named else "unattributed"
    return Found(key, step, passed, status, who, start, check=check, persistence=persistence)


def test_work_that_the_check_did_not_look_at_explains_nothing() -> None:
    """A replay looks at one step; a rank that was wrong again when it repeated its work was hit again."""
    often = Struck(3, "n3", "s/1", {2: "c", 12: "ac", 22: "c"})
    at_rest = Struck(3, "n3", "s/1", {10: "s"})
    for incident, fault, drill in (
        (found(3, step=7, passed=6, check="replay"), often, False),
        (found(3, step=12, passed=11, check="replay", persistence="persistent"), often, True),
        (found(3, step=22, passed=21, check="replay", persistence="persistent"), often, False),
        (found(3, step=22, passed=21, check="replay", persistence="transient"), often, True),
        (found(3, step=22, passed=-1, check="numerics"), often, True),
        (found(3, step=9, passed=4, check="replay"), Struck(3, "n3", "s/1", {6: "c"}), False),
        (found(3, step=9, passed=4, check=""), Struck(3, "n3", "s/1", {6: "c"}), False),
        (found(3, step=10, check="replay"), at_rest, False),
        (found(3, step=14, passed=9, check="at_rest"), at_rest, True),
        (found(3, step=14, passed=10, check="at_rest"), at_rest, False),
    ):
        assert is_drill(incident, [fault]) == drill, (incident, fault)


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
    ("in another start", [found(4, start="s/2")], [THREE], 20, "missed", None),
    ("nothing, and it was looked at since", [], [THREE], 11, "missed", None),
    ("nothing, and nobody has looked since", [], [THREE], 10, "unclear", None),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_what_came_of_a_fault(case: int) -> None:
    words, incidents, faults, passed, outcome, late = CASES[case]
    drills, came = settled(faults, incidents, {"s/1": passed})
    assert (came[0].outcome, came[0].late) == (outcome, late), words
    assert (came[0].incident is None) == (came[0].late is None)
    assert drills == {one.key for one in incidents if is_drill(one, faults)}


def test_an_incident_that_names_somebody_whom_no_fault_hit_is_no_drill() -> None:
    """Whatever else was injected; and so is one on another node, in another start, or of which nobody knows in which."""
    moved = Struck(3, "n9", "s/1", {10: "c"})
    unknown = Struck(3, "n3", "", {10: "c"})
    assert all((is_drill(found(3), [THREE]), is_drill(found(3, 5), [THREE, FIVE]), is_drill(found(), [THREE])))
    for incident, faults in (
        (found(4), [THREE]),
        (found(3, 4), [THREE, FIVE]),
        (found(3), [moved]),
        (found(3), [FIVE]),
        (found(3, start="s/2"), [THREE]),
        (found(3, start=""), [THREE]),
        (found(3, start=""), [unknown]),
        (found(), [unknown]),
        (Found(1, 10, 9, "unattributed", frozenset(), "s/1", frozenset({4, 5})), [THREE]),
        (Found(1, 10, 9, "attributed", frozenset(), "s/1"), [THREE]),
    ):
        assert not is_drill(incident, faults), (incident, faults)


def test_nobody_knows_what_came_of_a_fault_in_a_start_that_nobody_knows() -> None:
    assert [one.outcome for one in settled([Struck(3, "n3", "", {1: "c"})], [found(3)], {"": 99})[1]] == ["unclear"]
    assert settled([THREE], [], {"s/2": 99})[1][0].outcome == "unclear", "another start has passed, this one never did"


def test_a_start_is_named_by_its_session_and_its_number_together() -> None:
    assert start_of({"supervision": "a", "generation": 1}) == "a/1"
    assert start_of({"supervision": "b", "generation": 1, "start_id": "x"}) == "b/1"
    assert start_of({"generation": 1}) == start_of({"supervision": "a"}) == start_of({"start_id": 7}) == ""
    assert start_of({"start_id": "20261130T120000Z-00000a"}) == "20261130T120000Z-00000a"


def test_the_files_alone_say_what_an_incident_was(tmp_path: Path) -> None:
    """As the command line and the fleet read them, which have no database; a person's word comes first."""
    where = topology()
    files = make_run(tmp_path / "run", where)
    folder = make_incident(files, verdict(where), where)

    def was() -> str:
        return judgement(read_incident(folder), read_actions(folder), injected_into(tmp_path / "run"))

    assert was() == ""
    (tmp_path / "run/faults").mkdir()
    append(tmp_path / "run/faults/rank-00002.jsonl", b"\xff\n" + strike(2, 7, start="another/1").encode())
    append(tmp_path / "run/faults/rank-00003.jsonl", strike(3, 7))
    assert was() == "", "of another session, and on another rank"
    append(tmp_path / "run/faults/rank-00002.jsonl", strike(2, 7))
    assert was() == "drill"
    files.note_action(INCIDENT, "judged", judgement="confirmed", who="ann@host", why="it failed its test")
    assert was() == "confirmed"
    record = json.loads((folder / "incident.json").read_text())
    assert start_of(record) == "s1/1"
