"""What people say of incidents, and what injected faults explain: nobody is acted upon because of a drill or a false alarm."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.answering import answer
from bitwitness.fleet.clearing import clear
from bitwitness.fleet.kept_answers import Questions
from bitwitness.fleet.policy import QuietHours
from bitwitness.fleet.view import report
from bitwitness.runfiles import RunFiles
from bitwitness.runfiles.judging import Judgement, note_judgement
from tests.fleet.incidents import incident_id
from tests.fleet.rehearsal import Rehearsal
from tests.store.making import strike

ALL = frozenset({"drain", "reboot", "replace"})
DRAINED = [("drain", "n1")]
MINUTE = timedelta(minutes=1)


def judge(play: Rehearsal, path: Path, judgement: Judgement = "false alarm", who: str = "bob@login") -> None:
    note_judgement(RunFiles(play.run_dir), path.name, judgement, "the loss scale was wrong", who)


def last(play: Rehearsal, node: str = "n1") -> tuple[str, str, bool]:
    kept = play.kept(node)[-1]
    return kept.status, kept.why, kept.final


# What waits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("judgement", ["false alarm", "drill"])
def test_what_was_judged_away_before_it_was_picked_up_is_acted_upon_by_nobody(
    play: Rehearsal, judgement: Judgement
) -> None:
    judge(play, play.incident(), judgement)
    play.rounds(3)
    (kept,) = play.kept("n1")
    assert (kept.proposal.action, kept.proposal.act, kept.status) == ("contact", None, "nothing")
    assert f"judged a {judgement} by bob@login" in kept.proposal.reason
    assert "the loss scale was wrong, so nothing is done (drain: GPU-n1-0" in kept.proposal.reason
    assert play.cluster.calls() == []
    assert len(play.trail("judged")) == 1


@pytest.mark.parametrize("judgement", ["false alarm", "drill"])
def test_what_waits_is_ended_by_the_word(play: Rehearsal, judgement: Judgement) -> None:
    play.begin(approve=ALL)
    path = play.incident()
    play.rounds(2)
    judge(play, path, judgement)
    play.rounds(2)
    status, why, final = last(play)
    assert (status, final) == ("cleared", True)
    assert why.startswith(f"judged a {judgement} by bob@login at 20")
    assert (Questions(play.state).waiting(), play.cluster.calls()) == ([], [])
    entry = play.state.history(what="judged")[-1]
    assert (entry.who, entry.incident, entry.node, entry.record["by"]) == ("controller", path.name, "n1", "bob@login")
    play.begin(approve=frozenset())
    play.rounds(3)
    assert (last(play)[0], play.cluster.calls(), len(play.trail("judged"))) == ("cleared", [], 1)


def test_a_word_that_comes_while_the_node_is_looked_at_is_heard(
    play: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, look = play.incident(), play.cluster.look

    def looking(node: str) -> object:
        judge(play, path)
        return look(node)

    monkeypatch.setattr(play.cluster, "look", looking)
    play.rounds(3)
    assert (last(play)[0], play.cluster.calls()) == ("cleared", [])


def test_an_approval_of_what_was_judged_away_is_refused(play: Rehearsal) -> None:
    play.begin(approve=ALL)
    path = play.incident()
    play.rounds(2)
    judge(play, path)
    with pytest.raises(ConfigurationError, match="judged a false alarm by bob@login"):
        answer(play.state, "n1", "approved", "kim@head", "seen on the bench")
    answer(play.state, "n1", "rejected", "kim@head", "seen on the bench")
    play.rounds(2)
    assert (last(play)[0], play.cluster.calls()) == ("rejected", [])


def test_an_approval_that_waits_for_its_hour_is_ended_by_the_word(play: Rehearsal) -> None:
    play.begin(approve=ALL, quiet_hours=(QuietHours.parse("11:00-13:00"),))
    path = play.incident()
    play.rounds(2)
    answer(play.state, "n1", "approved", "kim@head", "seen on the bench")
    play.rounds(2)
    judge(play, path)
    play.clock.move(2 * 60 * MINUTE)
    play.rounds(2)
    assert (last(play)[0], play.cluster.calls()) == ("cleared", [])


def test_what_the_cluster_has_refused_is_not_asked_for_again(play: Rehearsal) -> None:
    path = play.incident()
    play.cluster.refuse(1)
    play.rounds(1)
    assert last(play)[0] == "failed"
    judge(play, path)
    play.rounds(5, apart=MINUTE)
    status, why, final = last(play)
    assert (status, final, len(play.cluster.calls())) == ("cleared", True, 1)
    assert why.endswith("so it is not asked for again")


# Strikes --------------------------------------------------------------------------------------------------------------


def strikes(play: Rehearsal, judged: int, *, late: bool = False) -> list[Path]:
    """Three transient incidents on n1, of which so many are judged a false alarm."""
    paths = []
    for number in range(3):
        paths.append(play.incident(number + 1, persistence="transient"))
        if number < judged and not late:
            judge(play, paths[-1])
        if number < 2:
            play.rounds(1, apart=MINUTE)
    for path in paths[:judged] if late else ():
        judge(play, path)
    return paths


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("judged", "acts"), [(0, DRAINED), (1, []), (3, [])])
def test_what_was_judged_away_is_no_strike(
    play: Rehearsal, judged: int, late: bool, acts: list[tuple[str, str]]
) -> None:
    strikes(play, judged, late=late)
    play.rounds(3)
    assert play.cluster.calls() == acts


def test_what_waits_because_of_a_strike_that_was_none_is_ended(play: Rehearsal) -> None:
    play.begin(approve=ALL)
    paths = strikes(play, 0)
    play.rounds(2)
    assert len(Questions(play.state).waiting()) == 1
    judge(play, paths[0])
    play.rounds(2)
    status, why, final = last(play)
    assert (status, final, Questions(play.state).waiting()) == ("cleared", True, [])
    assert why.startswith(f"incident {paths[0].name} was judged a false alarm by bob@login")
    assert "a strike, no proof of broken hardware (2 of 3 strikes)" in why


def test_a_persistent_incident_does_not_end_with_the_strikes_beside_it(play: Rehearsal) -> None:
    play.begin(approve=ALL)
    first = play.incident(1, persistence="transient")
    play.rounds(1, apart=MINUTE)
    play.incident(2)
    play.rounds(2)
    judge(play, first)
    play.rounds(2)
    assert len(Questions(play.state).waiting()) == 1


def test_one_that_is_confirmed_after_all_counts_again_for_what_comes(play: Rehearsal) -> None:
    paths = strikes(play, 1, late=True)
    play.rounds(2)
    assert play.cluster.calls() == []
    judge(play, paths[0], "confirmed", "carol (console)")
    play.rounds(2)
    assert play.cluster.calls() == []
    assert "was judged confirmed by carol (console)" in play.trail("judged")[-1]
    assert "counts as a strike again" in play.trail("judged")[-1]
    assert any("counts again" in subject for subject in play.told())
    play.incident(4, persistence="transient")
    play.rounds(3)
    assert play.cluster.calls() == DRAINED


def test_status_shows_what_was_said(play: Rehearsal) -> None:
    play.begin(approve=ALL)
    path = play.incident()
    play.rounds(2)
    judge(play, path, "confirmed", "carol (console)")
    play.rounds(1)
    shown = report(play.state)
    assert f"(incident {path.name} was judged confirmed by carol (console) at " in shown.todo[0]
    record = shown.to_json()
    assert [(one["incident"], one["judgement"], one["who"]) for one in record["judged"]] == [
        (path.name, "confirmed", "carol (console)")
    ]
    assert "its incident was judged confirmed by carol (console)" in record["proposals"][0]["why"]
    judge(play, path)
    play.rounds(1)
    assert report(play.state).todo == ()


# What was done --------------------------------------------------------------------------------------------------------


def test_a_node_that_is_out_stays_out_and_people_are_told_how_to_return_it(play: Rehearsal) -> None:
    path = play.incident()
    play.rounds(2)
    assert play.cluster.calls() == DRAINED
    judge(play, path)
    play.rounds(3)
    assert (last(play)[0], play.cluster.look("n1").service) == ("done", "out")
    (text,) = play.trail("still out")
    assert text.endswith(f"bitwitness fleet clear n1 --why 'WHAT WAS FOUND OUT' --state {play.folder / 'state'}")
    assert len([one for one in play.told() if "n1 is out because of what was no fault" in one]) == 1
    assert text in report(play.state).todo
    clear(play.state, play.cluster, "n1", "nothing is wrong with it", "kim@head")
    play.rounds(2)
    assert len(play.trail("still out")) == 1
    assert text not in report(play.state).todo


def test_a_node_that_is_out_for_something_else_as_well_is_not_spoken_of(play: Rehearsal) -> None:
    first = play.incident(1)
    play.rounds(2, apart=MINUTE)
    play.incident(2)
    play.rounds(2)
    assert [one.status for one in play.kept("n1")] == ["done", "already out"]
    judge(play, first)
    play.rounds(2)
    assert play.trail("still out") == []


def test_a_device_of_a_false_alarm_is_not_taken_out_anew_when_it_is_seen_again(play: Rehearsal) -> None:
    path = play.incident()
    play.rounds(2)
    judge(play, path)
    play.rounds(1)
    play.cluster.take_in("n1")
    play.clock.move(MINUTE)
    placement, started = play.where.to_json(), (play.clock.wall + MINUTE).isoformat()
    RunFiles(play.run_dir).write_run({"placement": placement, "started": started})
    play.clock.move(2 * MINUTE)
    play.rounds(3, apart=MINUTE)
    assert (play.cluster.calls(), play.trail("returned"), play.trail("trouble")) == (DRAINED, [], [])


# Injected faults ------------------------------------------------------------------------------------------------------

START = "20261129T110000Z-0000aa"


def inject(play: Rehearsal, rank: int = 1, step: int = 7) -> None:
    """A fault lands on a rank, in the start of the job in which the incidents of these tests are found."""
    folder = play.run_dir / "faults"
    folder.mkdir(exist_ok=True)
    with (folder / f"rank-{rank:05d}.jsonl").open("a") as file:
        file.write(strike(rank, step, start=START, node=f"n{rank}"))


@pytest.mark.parametrize("before", [True, False])
def test_what_injected_faults_explain_drains_nobody_and_is_no_strike(play: Rehearsal, before: bool) -> None:
    """Also where another controller has picked it up, which did not look."""
    play.begin(approve=ALL)
    if before:
        inject(play)
    path = play.incident(start_id=START)
    play.rounds(2)
    if not before:
        assert len(Questions(play.state).waiting()) == 1
        inject(play)
        play.begin()
        play.rounds(2)
    (kept,) = play.kept("n1")
    assert (kept.proposal.action, kept.status) == (("contact", "nothing") if before else ("drain", "cleared"))
    assert "faults that were injected on purpose explain all of it" in (kept.proposal.reason if before else kept.why)
    play.begin(approve=frozenset())
    for number in (2, 3):
        play.clock.move(MINUTE)
        play.incident(number, persistence="transient", start_id="20261129T110000Z-0000bb")
        play.rounds(2)
    assert play.cluster.calls() == []
    judge(play, path, "confirmed")
    play.rounds(2)
    assert play.cluster.calls() == DRAINED, "a person's word counts more than the records"
    play.rounds(2)
    assert [one.status for one in play.kept("n1")].count("done") == 1


def test_a_drill_may_be_told_to_go_the_whole_way_and_a_person_can_still_end_it(play: Rehearsal) -> None:
    play.begin(drills="act", approve=ALL)
    inject(play)
    path = play.incident(start_id=START)
    play.rounds(2)
    assert len(Questions(play.state).waiting()) == 1
    judge(play, path, "drill")
    play.rounds(2)
    assert [one.status for one in play.kept("n1")] == ["cleared"]
    play.begin(drills="act", approve=frozenset())
    play.incident(2, start_id=START)
    play.rounds(2)
    assert play.cluster.calls() == DRAINED


def test_faults_that_do_not_explain_an_incident_change_nothing(play: Rehearsal) -> None:
    inject(play, rank=2)
    play.incident(start_id=START)
    play.rounds(2)
    assert play.cluster.calls() == DRAINED


# Reading --------------------------------------------------------------------------------------------------------------


def test_notes_that_cannot_be_read_are_said_once_and_stop_nothing(play: Rehearsal) -> None:
    play.begin(approve=ALL)
    path = play.incident()
    play.rounds(2)
    notes = path / "actions.jsonl"
    notes.mkdir()
    play.rounds(3)
    assert len([one for one in play.trail("trouble") if "counts as before" in one]) == 1
    notes.rmdir()
    judge(play, path)
    play.rounds(2)
    assert last(play)[0] == "cleared"
    assert len(play.trail("over")) == 1


def test_a_word_stays_heard_when_the_run_is_gone(play: Rehearsal) -> None:
    play.begin(approve=ALL)
    path = play.incident()
    judge(play, path)
    play.rounds(1)
    (path / "actions.jsonl").unlink()
    play.rounds(2)
    assert len(play.trail("judged")) == 1
    assert play.controller.book.namings() == []


def test_many_incidents_are_looked_at_in_turn(play: Rehearsal) -> None:
    """None is left out for good, however many there are: 450 are looked at within three rounds."""
    book = play.controller.book
    row = "INSERT INTO namings VALUES (?, 'GPU-x', 'n9', ?, NULL)"
    with play.state.change():
        for number in range(450):
            record = {"time": "2026-01-01T00:00:00+00:00", "incident": incident_id(number), "run": "r", "rank": 0}
            record |= {"device": "GPU-x", "node": "n9", "persistence": "transient", "shadow": False}
            play.state.write(row, (incident_id(number), json.dumps(record)))
    seen, at = set[str](), ""
    for _ in range(3):
        some = book.named_after(at, 200)
        at = some[-1] if len(some) == 200 else ""
        seen |= set(some)
    assert (len(seen), at) == (450, "")
