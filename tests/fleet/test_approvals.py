"""Acts that wait for a person: nothing is done without an answer, and by an answer only what was shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace as changed
from datetime import timedelta
from typing import Any, Literal

import pytest
from click.testing import CliRunner

from bitwitness.cli.main import cli
from bitwitness.errors import ConfigurationError
from bitwitness.fleet.answering import answer, find, withdraw
from bitwitness.fleet.approving import act_of
from bitwitness.fleet.asking import preview
from bitwitness.fleet.clearing import clear
from bitwitness.fleet.figures import figures
from bitwitness.fleet.kept import Kept
from bitwitness.fleet.kept_answers import Question, Questions
from bitwitness.fleet.policy import FleetPolicy, QuietHours
from bitwitness.fleet.rehearsing import about_policy
from bitwitness.fleet.signals.record import Signal
from bitwitness.fleet.view import report
from tests.fleet.rehearsal import Rehearsal

HOUR = timedelta(hours=1)
DRAINED = [("drain", "n1")]
ALL = frozenset({"drain", "reboot", "replace"})
WHY = "seen twice on the bench"


@pytest.fixture
def asked(play: Rehearsal) -> Rehearsal:
    """A drain of n1 waits for an answer."""
    play.begin(approve=ALL)
    play.incident()
    play.rounds(2)
    return play


def question(play: Rehearsal, node: str = "n1") -> Question:
    (found,) = [one for one in Questions(play.state).waiting() if one.node == node]
    return found


def kept(play: Rehearsal, node: str = "n1") -> Kept:
    (found,) = play.kept(node)
    return found


def approve(play: Rehearsal, which: str = "n1", who: str = "kim@head") -> None:
    answer(play.state, which, "approved", who, WHY)


def severe(play: Rehearsal, kind: str = "replace") -> None:
    """Have the hardware of n1 ask for more than a drain."""
    codes = {"replace": ("xid:95", "memory", "strong"), "reboot": ("xid:154", "loud", "medium")}
    code, family, support = codes[kind]
    now = play.clock.now().isoformat()
    play.signals = [Signal("kernel", code, "GPU-n1-0", now, family, support, "as a test says", host="n1")]  # type: ignore[arg-type]


# Asking ---------------------------------------------------------------------------------------------------------------


def test_nothing_is_done_until_somebody_has_approved_it_and_then_once(asked: Rehearsal) -> None:
    asked.rounds(5, timedelta(minutes=2))
    one = question(asked)
    assert (asked.cluster.calls(), kept(asked).status, kept(asked).hold) == ([], "held", "approval")
    assert f"bitwitness fleet approve {one.name} --why" in kept(asked).why
    assert f"--state {asked.state.folder}" in kept(asked).why
    approve(asked, one.name)
    asked.rounds(5)
    assert asked.cluster.calls() == DRAINED
    assert kept(asked).status == "done"
    trail = [(entry.what, entry.who) for entry in asked.state.history(node="n1")]
    expected = ["proposed", "asked", "approved", "intent", "call", "done"]
    assert [what for what, _ in trail] == expected
    assert ("approved", "kim@head") in trail
    (said,) = asked.state.history(what="approved")
    assert (said.text, said.record["question"], said.record["act"]) == (WHY, one.name, "drain")


def test_people_are_told_once_and_by_which_command(asked: Rehearsal) -> None:
    asked.rounds(5, timedelta(hours=1))
    asked.begin()
    asked.rounds(2)
    (message,) = asked.listener.got
    name = question(asked).name
    assert message.subject.startswith("bitwitness: an answer is wanted: drain n1")
    for command in (f"bitwitness fleet approve {name} --why", f"bitwitness fleet reject {name} --why"):
        assert command in message.text
        assert any(one.startswith(command) for one in message.record["answers"])
    assert "What would be called:\n  fake drain n1" in message.text


def test_status_and_metrics_show_what_waits(asked: Rehearsal) -> None:
    found = report(asked.state)
    name = question(asked).name
    assert [one.name for one in found.questions] == [name]
    assert any(f"bitwitness fleet approve {name}" in text for text in found.todo)
    assert found.to_json()["questions"][0]["act"] == "drain"
    assert figures(asked.state.folder).held == {"approval": 1}
    approve(asked)
    assert not report(asked.state).questions


def test_an_act_that_needs_no_approval_needs_none(play: Rehearsal) -> None:
    play.begin(approve=frozenset({"reboot", "replace"}))
    play.incident()
    play.rounds(2)
    assert play.cluster.calls() == DRAINED
    assert Questions(play.state).all_of(1) == []


def test_an_answer_that_is_not_wanted_any_more(asked: Rehearsal) -> None:
    asked.begin(approve=frozenset())
    asked.rounds(2)
    assert asked.cluster.calls() == DRAINED


def test_only_observing_asks_nobody(play: Rehearsal) -> None:
    play.begin(act=False, approve=ALL)
    play.incident()
    play.rounds(2)
    assert (play.statuses(), Questions(play.state).waiting()) == ({"n1": "observed"}, [])


# What the act becomes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "can", "acts"),
    [
        ({"replace"}, False, ["drain"]),
        ({"drain"}, False, []),
        ({"drain"}, True, ["replace"]),
        ({"replace"}, True, []),
        ({"drain", "replace"}, False, []),
        ({"reboot"}, True, ["replace"]),
    ],
)
def test_what_an_act_becomes_counts(play: Rehearsal, setting: set[Any], can: bool, acts: list[str]) -> None:
    play.begin(approve=frozenset(setting), may=ALL)
    if not can:
        play.cluster.acts = frozenset({"drain", "clear"})
    severe(play)
    play.incident()
    play.rounds(3)
    assert [kind for kind, _ in play.cluster.calls()] == acts
    waiting = [one.act for one in Questions(play.state).waiting()]
    assert waiting == ([] if acts else ["replace" if can else "drain"])


def refusing(play: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the cluster can plan no replacement."""
    plan = play.cluster.plan

    def planned(act: Any, state: Any) -> Any:
        if act.kind == "replace":
            raise ConfigurationError("which machine is meant cannot be told")
        return plan(act, state)

    monkeypatch.setattr(play.cluster, "plan", planned)


@pytest.mark.parametrize("drain_too", [True, False])
def test_an_approved_replacement_that_becomes_a_drain(
    play: Rehearsal, monkeypatch: pytest.MonkeyPatch, drain_too: bool
) -> None:
    play.begin(approve=ALL if drain_too else frozenset({"replace"}), may=ALL)
    severe(play)
    play.incident()
    play.rounds(2)
    first = question(play)
    approve(play)
    refusing(play, monkeypatch)
    play.rounds(3)
    if not drain_too:
        assert play.cluster.calls() == DRAINED
        return
    assert play.cluster.calls() == []
    second = question(play)
    assert (first.act, second.act) == ("replace", "drain")
    assert "it is a drain now, and no replace" in play.trail("asked")[-1]
    assert len(play.told()) == 2
    approve(play, second.name)
    play.rounds(2)
    assert play.cluster.calls() == DRAINED


# Exactly what was shown ------------------------------------------------------------------------------------------------


def test_another_machine_needs_another_answer(asked: Rehearsal) -> None:
    one = question(asked)
    approve(asked)
    asked.cluster.exchange("n1")
    asked.rounds(3)
    assert asked.cluster.calls() == []
    assert "another machine now: 1+, not 1" in asked.trail("asked")[-1]
    with pytest.raises(ConfigurationError, match="is not what is asked now"):
        approve(asked, one.name)
    approve(asked, question(asked).name)
    asked.rounds(2)
    assert asked.cluster.calls() == DRAINED


def test_a_machine_that_is_exchanged_between_two_looks(asked: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    approve(asked)
    look, looks = asked.cluster.look, [0]

    def looked(node: str) -> Any:
        looks[0] += 1
        if looks[0] == 2:
            asked.cluster.exchange("n1")
        return look(node)

    monkeypatch.setattr(asked.cluster, "look", looked)
    asked.rounds(3)
    assert (asked.cluster.calls(), question(asked).machine) == ([], "1+")


def test_a_machine_that_cannot_be_told_is_waited_for(asked: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    approve(asked)
    look = asked.cluster.look
    monkeypatch.setattr(asked.cluster, "look", lambda node: changed(look(node), instance=""))
    asked.rounds(3)
    assert (asked.cluster.calls(), kept(asked).hold) == ([], "cluster")
    assert "cannot be told now" in kept(asked).why
    monkeypatch.undo()
    asked.rounds(3, timedelta(minutes=5))
    assert asked.cluster.calls() == DRAINED


@pytest.mark.parametrize("answered", [True, False])
def test_what_is_worded_anew_needs_another_answer(play: Rehearsal, answered: bool) -> None:
    """The hardware says more after the window: a replacement is proposed instead of what was approved, and held by quiet hours."""
    play.begin(approve=ALL, may=ALL, quiet_hours=(QuietHours.parse("11:00-13:00"),))
    play.incident()
    play.rounds(2)
    first = question(play)
    if answered:
        approve(play)
    severe(play)
    play.rounds(3, timedelta(minutes=6))
    play.clock.move(HOUR)
    play.rounds(3)
    assert play.cluster.calls() == []
    again = question(play)
    assert (first.act, again.act) == ("drain", "replace")
    assert sum("an answer is wanted" in subject for subject in play.told()) == 2
    with pytest.raises(ConfigurationError, match="is not what is asked now"):
        approve(play, first.name)
    approve(play, again.name)
    play.rounds(2)
    assert play.cluster.calls() == [("replace", "n1")]


def test_an_answer_to_what_was_worded_anew_and_is_not_asked_yet_is_refused(asked: Rehearsal) -> None:
    one = kept(asked)
    with asked.state.change():
        asked.controller.book.reword(one.key, changed(one.proposal, reason="the hardware has said more"))
    with pytest.raises(ConfigurationError, match="has changed since it was asked"):
        approve(asked)
    asked.rounds(2)
    approve(asked)
    asked.rounds(2)
    assert asked.cluster.calls() == DRAINED


# The first answer counts -----------------------------------------------------------------------------------------------


def test_the_same_answer_twice_is_one(asked: Rehearsal) -> None:
    one = question(asked)
    assert answer(asked.state, one.name, "approved", "kim@head", WHY).new
    again = answer(asked.state, one.name, "approved", "lee@head", "me too")
    assert (again.new, again.question.who) == (False, "kim@head")
    asked.rounds(3)
    after = answer(asked.state, one.name, "approved", "kim@head", WHY)
    assert (after.new, asked.cluster.calls()) == (False, DRAINED)
    assert len(asked.state.history(what="approved")) == 1


@pytest.mark.parametrize(("first", "second"), [("approved", "rejected"), ("rejected", "approved")])
def test_another_answer_is_refused(
    asked: Rehearsal, first: Literal["approved", "rejected"], second: Literal["approved", "rejected"]
) -> None:
    one = question(asked)
    answer(asked.state, one.name, first, "kim@head", WHY)
    with pytest.raises(ConfigurationError, match=f"was {first} by kim@head .*first answer counts"):
        answer(asked.state, one.name, second, "lee@head", "no")
    asked.rounds(3)
    assert asked.cluster.calls() == (DRAINED if first == "approved" else [])


def test_an_approval_is_withdrawn_until_its_act_is_begun(asked: Rehearsal) -> None:
    approve(asked)
    done = withdraw(asked.state, "n1", "kim@head", "not yet")
    assert done.question.said == ""
    asked.rounds(3)
    assert (asked.cluster.calls(), kept(asked).hold) == ([], "approval")
    with pytest.raises(ConfigurationError, match="nothing to withdraw"):
        withdraw(asked.state, "n1", "kim@head", "again")
    approve(asked)
    asked.rounds(2)
    with pytest.raises(ConfigurationError, match="was begun already"):
        withdraw(asked.state, "n1", "kim@head", "too late")
    assert (asked.cluster.calls(), kept(asked).status) == (DRAINED, "done")
    assert asked.trail("withdrawn") == ["not yet"]


@pytest.mark.parametrize("count", [1, 2])
def test_an_approval_that_is_withdrawn_while_the_controller_looks(
    asked: Rehearsal, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Before the intent is noted nothing is done; after it, withdrawing says that it is too late."""
    approve(asked)
    look, looks, late = asked.cluster.look, [0], []

    def looked(node: str) -> Any:
        looks[0] += 1
        if looks[0] == count:
            try:
                withdraw(asked.state, "n1", "kim@head", "wait")
            except ConfigurationError as error:
                late.append(str(error))
        return look(node)

    monkeypatch.setattr(asked.cluster, "look", looked)
    asked.rounds(3)
    assert asked.cluster.calls() == (DRAINED if count == 2 else [])
    assert bool(late) is (count == 2)


# A rejection -----------------------------------------------------------------------------------------------------------


def test_a_rejection_ends_the_proposal_and_forgets_no_strike(asked: Rehearsal) -> None:
    answer(asked.state, "n1", "rejected", "kim@head", "it is on the bench", notifiers=["listener"])
    asked.rounds(3)
    one = kept(asked)
    assert (asked.cluster.calls(), one.status, one.final) == ([], "rejected", True)
    assert "kim@head has rejected the drain: it is on the bench" in one.why
    assert len(asked.controller.book.namings()) == 1
    assert "rejected: n1, by kim@head" in asked.told()[-1]
    asked.incident(2)
    asked.rounds(2)
    assert question(asked).incident.endswith("000002"), "another incident is asked about anew"


def test_a_rejected_node_gives_its_job_up(play: Rehearsal) -> None:
    play.begin(approve=frozenset({"drain"}))
    play.cluster.add_job("7", ["n1", "n2"], state="ended", exit_code=160)
    play.incident(ranks=(1, 2), scheduler_job="fake:7")
    play.rounds(2)
    answer(play.state, "n1", "rejected", "kim@head", "no")
    approve(play, "n2")
    play.rounds(5, timedelta(minutes=2))
    assert play.cluster.calls() == [("drain", "n2")]
    (row,) = play.controller.book.requeues(waiting=False)
    assert (row.status, "n1 stays in service" in row.why) == ("given up", True)


@pytest.mark.parametrize("answered", [True, False])
def test_a_node_that_is_returned_asks_no_more(asked: Rehearsal, answered: bool) -> None:
    one = question(asked)
    if answered:
        approve(asked, one.name)
    clear(asked.state, asked.cluster, "n1", "repaired", "kim@head")
    assert Questions(asked.state).waiting() == []
    with pytest.raises(ConfigurationError, match="is over: it is cleared"):
        approve(asked, one.name)
    assert kept(asked).status == "cleared"


def test_a_return_leaves_a_rejection_as_it_was(asked: Rehearsal) -> None:
    answer(asked.state, "n1", "rejected", "kim@head", "no")
    clear(asked.state, asked.cluster, "n1", "repaired", "kim@head")
    assert kept(asked).status == "rejected"


# No other door ---------------------------------------------------------------------------------------------------------


def test_budgets_count_after_an_approval(play: Rehearsal) -> None:
    play.begin(approve=ALL, nodes_per_hour=1)
    play.incident(ranks=(0, 1, 2))
    play.rounds(3)
    assert len(Questions(play.state).waiting()) == 3
    for node in ("n0", "n1", "n2"):
        approve(play, node)
    play.rounds(5)
    assert len(play.cluster.calls()) == 1
    play.clock.move(HOUR)
    play.rounds(3)
    assert len(play.cluster.calls()) == 2


def test_what_a_budget_holds_is_asked_about_already(play: Rehearsal) -> None:
    """The answer is to be there when it may be done."""
    play.begin(nodes_per_hour=1, approve=frozenset())
    play.incident(1, ranks=(0,))
    play.rounds(2)
    play.begin(approve=ALL)
    play.incident(2, ranks=(1,))
    play.rounds(3)
    assert kept(play).hold == "approval"
    approve(play)
    play.rounds(2)
    assert (kept(play).hold, play.cluster.calls()) == ("nodes-per-hour", [("drain", "n0")])
    play.clock.move(HOUR)
    play.rounds(2)
    assert play.cluster.calls() == [("drain", "n0"), ("drain", "n1")]


def test_quiet_hours_count_after_an_approval(play: Rehearsal) -> None:
    play.begin(approve=ALL, quiet_hours=(QuietHours.parse("11:00-13:00"),))
    play.incident()
    play.rounds(2)
    approve(play)
    when = find(play.state, "n1").answered
    assert (kept(play).status, kept(play).hold) == ("held", "")
    assert kept(play).why.startswith(f"approved by kim@head at {when}")
    play.rounds(3)
    assert (play.cluster.calls(), kept(play).hold) == ([], "quiet-hours")
    held = f"approved by kim@head at {when}; held: quiet hours until 2026-11-29 13:00 UTC"
    assert kept(play).why == held
    assert [one["why"] for one in report(play.state).to_json()["proposals"]] == [held]
    play.clock.move(HOUR * 1.1)
    play.rounds(2)
    assert play.cluster.calls() == DRAINED


def test_a_protected_node_is_not_asked_about(play: Rehearsal) -> None:
    play.begin(approve=ALL, protect=("n1",))
    play.incident()
    play.rounds(2)
    assert (kept(play).hold, Questions(play.state).waiting()) == ("protected", [])


def test_a_node_that_is_protected_after_its_approval(asked: Rehearsal) -> None:
    approve(asked)
    asked.begin(protect=("n*",))
    asked.rounds(3)
    assert (asked.cluster.calls(), kept(asked).hold) == ([], "protected")
    assert kept(asked).why.startswith("approved by kim@head at ")


@pytest.mark.parametrize("answered", [True, False])
def test_an_approval_expires_with_what_it_approves(play: Rehearsal, answered: bool) -> None:
    play.begin(approve=ALL, act_within=HOUR)
    play.incident()
    play.rounds(2)
    name = question(play).name
    if answered:
        approve(play)
    play.clock.move(HOUR * 2)
    play.rounds(3)
    assert (play.cluster.calls(), kept(play).status) == ([], "expired")
    assert Questions(play.state).pending() == []
    if not answered:
        with pytest.raises(ConfigurationError, match="is over: it is expired"):
            approve(play, name)


def test_somebody_else_takes_the_node_out_meanwhile(asked: Rehearsal) -> None:
    approve(asked)
    asked.cluster.take_out("n1", "fan")
    asked.rounds(3)
    assert (asked.cluster.calls(), kept(asked).hold) == ([], "not-ours")


def test_a_node_that_is_out_already_is_not_asked_about_again(play: Rehearsal) -> None:
    play.begin(approve=ALL)
    play.incident(1)
    play.incident(2)
    play.rounds(2)
    waiting = Questions(play.state).waiting()
    assert len(waiting) == 2
    with pytest.raises(ConfigurationError, match="say which"):
        approve(play, "n1")
    approve(play, waiting[0].name)
    play.rounds(5, timedelta(minutes=2))
    assert play.cluster.calls() == DRAINED
    assert [one.status for one in play.kept("n1")] == ["done", "already out"]


# Who may be meant ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["1", "n1", "incident", "name"])
def test_by_what_it_may_be_called(asked: Rehearsal, which: str) -> None:
    one = question(asked)
    name = {"incident": one.incident, "name": one.name}.get(which, which)
    assert find(asked.state, name).number == one.number


@pytest.mark.parametrize("which", ["2", "n2", "", "1-00000000", "x'; DROP TABLE approvals", "99999999999999999999999"])
def test_what_nobody_asks(asked: Rehearsal, which: str) -> None:
    with pytest.raises(ConfigurationError):
        approve(asked, which)
    asked.rounds(2)
    assert asked.cluster.calls() == []


@pytest.mark.parametrize("why", ["", "  ", "\n", "\x1b"])
def test_an_answer_needs_a_reason(asked: Rehearsal, why: str) -> None:
    for said in ("approved", "rejected"):
        with pytest.raises(ConfigurationError, match="needs a reason"):
            answer(asked.state, "n1", said, "kim@head", why)
    with pytest.raises(ConfigurationError, match="needs a reason"):
        withdraw(asked.state, "n1", "kim@head", why)


def test_a_reason_stays_one_line(asked: Rehearsal) -> None:
    answer(asked.state, "n1", "approved", "kim@head", "a\nforged: line \x1b[2J\u202e")
    (said,) = asked.state.history(what="approved")
    assert said.text.isprintable()


# The setting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [{"clear"}, {"drain", "delete"}])
def test_what_cannot_be_approved(value: set[Any]) -> None:
    with pytest.raises(ConfigurationError, match="approve has"):
        FleetPolicy(approve=frozenset(value))


def test_a_rehearsal_knows_who_is_waited_for() -> None:
    checks = {one.what: one for one in about_policy(FleetPolicy(approve=frozenset({"drain"}))).checks}
    assert (checks["approve"].outcome, "nobody is told" in checks["approve"].text) == ("unknown", True)
    told = FleetPolicy(approve=frozenset({"drain"}), notify=({"kind": "webhook", "url": "http://x"},))
    assert {one.what: one.outcome for one in about_policy(told).checks}["approve"] == "good"
    assert "approve" not in {one.what for one in about_policy(FleetPolicy()).checks}


def test_what_would_be_called_is_shown_before(asked: Rehearsal) -> None:
    found = preview(asked.cluster, act_of(asked.state, question(asked)))
    assert [str(call).split(" --")[0] for call in found.calls] == ["fake drain n1"]
    assert [one.outcome for one in found.checks] == ["good"]
    asked.cluster.forbid("drain")
    worse = preview(asked.cluster, act_of(asked.state, question(asked)))
    assert [one.outcome for one in worse.checks] == ["bad"]
    assert worse.digest == found.digest
    asked.cluster.exchange("n1")
    assert preview(asked.cluster, act_of(asked.state, question(asked))).digest != found.digest
    assert asked.cluster.calls() == []


# Commands --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(asked: Rehearsal) -> Callable[..., Any]:
    """Runs a command about the state of `asked`."""
    settings = {"cluster": {"kind": "fake", "file": str(asked.folder / "cluster.json")}, "notifiers": ["listener"]}
    with asked.state.change():
        asked.state.set_about(sources=json.dumps(settings))

    def run(command: str, *words: str) -> Any:
        return CliRunner().invoke(cli, ["fleet", command, *words, "--state", str(asked.state.folder)])

    return run


def test_the_commands_answer(asked: Rehearsal, fleet: Callable[..., Any]) -> None:
    name = question(asked).name
    dry = fleet("approve", name, "--why", WHY, "--dry-run")
    assert (dry.exit_code, "would call: fake drain n1" in dry.output, "good" in dry.output) == (0, True, True)
    asked.rounds(2)
    assert asked.cluster.calls() == []
    done = fleet("approve", name, "--why", WHY, "--json")
    assert (done.exit_code, json.loads(done.output)["new"]) == (0, True)
    assert fleet("reject", name, "--why", WHY).exit_code == 2
    assert "cannot be rejected now" in fleet("reject", name, "--why", WHY, "--dry-run").output
    back = fleet("approve", name, "--why", "wait", "--withdraw")
    assert (back.exit_code, "counts no more" in back.output) == (0, True)
    no = fleet("reject", name, "--why", "no")
    assert (no.exit_code, "is rejected" in no.output) == (0, True)
    asked.rounds(2)
    assert (asked.cluster.calls(), kept(asked).status) == ([], "rejected")
    assert "rejected" in asked.told()[-1]


def test_a_dry_run_as_json(asked: Rehearsal, fleet: Callable[..., Any]) -> None:
    found = json.loads(fleet("reject", "n1", "--why", WHY, "--dry-run", "--json").output)
    assert (found["dry_run"], found["question"]["node"], len(found["calls"])) == (True, "n1", 1)


def test_status_says_what_to_do(asked: Rehearsal, fleet: Callable[..., Any]) -> None:
    assert f"bitwitness fleet approve {question(asked).name}" in fleet("status").output
