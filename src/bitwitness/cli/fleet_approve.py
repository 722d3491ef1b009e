"""`bitwitness fleet approve`: a person says yes to one act of the controller, and why."""

from __future__ import annotations

from pathlib import Path

import click

from bitwitness.cli.fleet_watch import STATE
from bitwitness.cli.output import console, print_json, styled
from bitwitness.cli.runs import GIVEN_PATH
from bitwitness.fleet.answering import Answered, answer, find, heard, stands, withdraw
from bitwitness.fleet.approving import act_of
from bitwitness.fleet.asking import Preview, preview
from bitwitness.fleet.kept_answers import Question, Said
from bitwitness.fleet.state import State
from bitwitness.fleet.watched import cluster_as_watched, notifiers_as_watched
from bitwitness.runfiles.quarantine import who_asks

_OUTCOMES = {"good": "green", "bad": "bold red", "unknown": "yellow"}


@click.command()
@click.argument("which", metavar="KEY")
@click.option("--why", required=True, metavar="TEXT", help="What was looked at; it is logged.")
@click.option("--state", "folder", type=GIVEN_PATH, default=STATE, show_default=True, help="Of the controller.")
@click.option("--withdraw", "back", is_flag=True, help="Take an approval back whose act is not begun.")
@click.option("--dry-run", is_flag=True, help="Print the exact calls and what they need, and note nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def approve(which: str, why: str, folder: Path, back: bool, dry_run: bool, as_json: bool) -> None:
    """Approve one act that waits for it (`approve` in the policy); the controller does it in its next round.

    KEY is what the message and `fleet status` show, such as 12-3fa9c1d2; an incident or a node will do where one act of it waits. The
    approval is of exactly what was shown: where the proposal or the machine has changed since, the controller asks anew. Budgets,
    quiet hours and protected nodes count after it as before. The first answer counts.
    """
    if back and not dry_run:
        with State(folder.absolute(), create=False) as state:
            show_answer(withdraw(state, which, who_asks(), why), as_json)
        return
    give_answer(which, "approved", why, folder.absolute(), dry_run=dry_run, as_json=as_json)


def give_answer(which: str, said: Said, why: str, folder: Path, *, dry_run: bool, as_json: bool) -> None:
    """Note an answer, or say what it is about."""
    with State(folder, create=False, write=not dry_run) as state:
        if dry_run:
            _show_question(find(state, which), said, state, as_json)
            return
        show_answer(answer(state, which, said, who_asks(), why, notifiers=notifiers_as_watched(state)), as_json)


def show_answer(done: Answered, as_json: bool) -> None:
    """Print what became of an answer."""
    if as_json:
        print_json(done.to_json())
        return
    console().print(styled(done.text, "green" if done.new else "yellow"), soft_wrap=True)


def _show_question(question: Question, wanted: Said, state: State, as_json: bool) -> None:
    found = preview(cluster_as_watched(state), act_of(state, question))
    word, closed = heard(state, question.incident), stands(state, question, wanted)
    if as_json:
        judged = None if word is None else word.to_json()
        print_json(
            {"dry_run": True, "question": question.to_json(), "judged": judged, "closed": closed, **found.to_json()}
        )
        return
    asked = f"{question.name}: {question.act} {question.node}, because of incident {question.incident}"
    said = f"{question.said} by {question.who}" if question.said else f"asked at {question.asked}"
    console().print(styled(f"{asked}; {said}", "bold"), soft_wrap=True)
    if closed:
        console().print(styled(f"it cannot be {wanted} now: {closed}", "yellow"), soft_wrap=True)
    if word is not None:
        console().print(styled(f"its incident was {word.text}", "yellow"), soft_wrap=True)
    if found.before.instance != question.machine:
        text = f"the machine is {found.before.instance or 'not known'} now, and was {question.machine or 'not known'}: it is asked anew"
        console().print(styled(text, "yellow"), soft_wrap=True)
    show_preview(found)


def show_preview(found: Preview) -> None:
    """Print what would be called, and what that needs."""
    screen = console()
    for check in found.checks:
        remedy = f" -> {check.remedy}" if check.remedy else ""
        screen.print(
            styled(f"{check.outcome:<8} {check.what}: {check.text}{remedy}", _OUTCOMES[check.outcome]), soft_wrap=True
        )
    for call in found.calls:
        screen.print(styled(f"would call: {call}"), soft_wrap=True)
    for text in found.warnings:
        screen.print(styled(text, "yellow"), soft_wrap=True)
