"""What came of the demo, in words and curves: all of it from the report."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bitwitness.cli.demo_view import loss_text
from bitwitness.cli.output import plain, styled, this_command
from bitwitness.evidence import Verdict
from bitwitness.examples.plan import expected
from bitwitness.examples.report import Report
from bitwitness.examples.report_page import moments
from bitwitness.examples.report_recovery import Saved

_BLOCKS = "▁▂▃▄▅▆▇█"


def summarise(report: Report, console: Console) -> None:
    """Say what happened."""
    console.print()
    for heading, lines in (
        ("What was done", _what_was_done(report)),
        ("What the guard saw", _what_was_seen(report)),
        ("The recovery", list(_recovery(report))),
        ("Without the guard", _what_it_saves(report)),
    ):
        if lines:
            console.print(Text(heading, style="bold"))
            for line in lines:
                shown = styled(line) if isinstance(line, str) else line
                if isinstance(shown, Text) and shown.no_wrap:  # to be copied: whole, however narrow the terminal is
                    console.print(Text("  ") + shown, soft_wrap=True)
                else:
                    console.print(Padding(shown, (0, 0, 0, 2), expand=isinstance(shown, Table)))
            console.print()
    console.print(Text("Training loss, mean over all ranks", style="bold"))
    console.print(Padding(_curves(report), (0, 0, 0, 2), expand=False))
    console.print()
    if report.incident is not None:
        console.print("The incident, and what to do next:")
        command = f"{this_command()} incident show {shlex.quote(str(report.incident))}"
        console.print(styled(f"  {command}", "cyan"), soft_wrap=True)
    console.print("All of this as a page for a browser:")
    console.print(styled(f"  {report.page}", "cyan"), soft_wrap=True)
    console.print("Journals, checkpoints and logs:")
    console.print(styled(f"  {report.run_dir}", "cyan"), soft_wrap=True)
    console.print()
    for problem in report.problems:
        console.print(styled(f"Not as it should be: {problem}", "bold red"))
    if not report.problems:
        console.print(Text(f"As it should be. {report.seconds:.0f} s.", style="bold green"))


def _what_was_done(report: Report) -> list[str | Text]:
    settings, injected = report.settings, report.injected
    trained = f"A small GPT, {settings.world_size} ranks on {settings.nodes} nodes (processes of this machine)"
    lines: list[str | Text] = [f"{trained}, Policy.every_step(): every check at every step."]
    if injected is None:
        return [*lines, "No fault was injected."]
    when = (
        f"At step {injected['step']}, once,"
        if settings.strikes_once
        else f"From step {injected['step']} on, each time,"
    )
    count = f"{injected['changed']} element{'s' * (injected['changed'] != 1)}"
    lines.append(f"{when} rank {injected['rank']} on {settings.node} had this wrong: {injected['where']}.")
    lines.append(f"{count} changed; the first: {injected['before']} became {injected['after']}.")
    lines.append("The same in a job of your own, with the names of its modules:")
    lines.append(Text(f"{plain(report.environment)} bitwitness run ...", style="cyan", no_wrap=True))
    return lines


def _what_was_seen(report: Report) -> list[str | Text]:
    settings, verdict = report.settings, report.verdict
    passed = ", ".join(f"{name} {count}" for name, count in sorted(report.checks.items()))
    alarms = "no false alarm" if not report.false_alarms else f"{report.false_alarms} FALSE ALARMS"
    lines: list[str | Text] = []
    if verdict is not None:
        when = "before" if report.before_update else "after"
        lines.append(
            Text.assemble(
                ("Caught", "bold green"),
                f" at step {verdict.step} by {verdict.check}, {when} the update of that step, on every rank: "
                f"{verdict.kind} corruption, {verdict.persistence}.",
            )
        )
        lines.append(_who(report, verdict))
    elif settings.fault != "none":
        lines.append(Text("The fault was not caught.", style="bold red"))
    lines.append(f"With nothing wrong: {alarms} in {sum(report.checks.values())} checks that passed ({passed}).")
    same = "equal bit for bit" if report.changes_no_bit else "NOT EQUAL"
    until = "up to the fault" if report.injected is not None else "to the end, final weights included"
    lines.append(f"Guarded and unguarded training: {same} {until}.")
    return lines


def _who(report: Report, verdict: Verdict) -> Text:
    if verdict.status != "attributed":
        why = (
            "right: it takes three nodes to name anybody"
            if report.settings.nodes < 3
            else "it should have named the rank"
        )
        return Text(f"Named: nobody ({why}).", style="" if report.settings.nodes < 3 else "bold red")
    ranks, nodes = ", ".join(map(str, verdict.ranks)), plain(", ".join(verdict.nodes))
    how = Text("right", style="bold green") if report.right else Text("WRONG", style="bold red")
    return Text.assemble(f"Named: rank {ranks} on {nodes} (", how, ").")


# The recovery --------------------------------------------------------------------------------------------------------


def _recovery(report: Report) -> Iterator[RenderableType]:
    recovery = report.recovery
    if report.verdict is not None:
        timeline = Table.grid(padding=(0, 2))
        timeline.add_column(justify="right", no_wrap=True, style="dim")
        timeline.add_column(overflow="fold")
        for at, what in moments(report):
            timeline.add_row(at, styled(what))
        yield timeline
    saved = Table.grid(padding=(0, 2))
    for one in recovery.checkpoints:
        saved.add_row(*_checkpoint(one, resumed=one.step == recovery.resumed_from))
    if recovery.checkpoints:
        yield Text("Checkpoints, verified anew just now, with what their labels say:")
        yield saved
        for how in dict.fromkeys(one.read_back for one in recovery.checkpoints if one.read_back):
            yield f"Read back before they were published: {how}."
    yield _quarantine(report)
    if expected(report.settings).exit_code and recovery.exit_code:
        yield f"bitwitness run gave up with exit code {recovery.exit_code}: {recovery.reason}."
    else:
        equal = Text("equal, bit for bit,", style="bold green")
        proof = equal if report.final_weights_equal else Text("NOT EQUAL", style="bold red")
        never = "those of the run that was never hit" if report.injected is not None else "those of the first run"
        yield Text.assemble("Final weights of every rank: ", proof, f" to {never}.")


def _checkpoint(saved: Saved, resumed: bool) -> list[Text]:
    by_step: dict[int, list[str]] = {}
    for check, step in sorted((saved.passed or {}).items()):
        by_step.setdefault(step, []).append(check)
    passed = "; ".join(f"{', '.join(checks)} passed at step {step}" for step, checks in sorted(by_step.items()))
    state = styled("verified", "green") if saved.verified else styled(f"REFUSED: {saved.refused}", "bold red")
    return [styled(saved.name), state, styled(passed), styled("resumed from" if resumed else "", "bold")]


def _quarantine(report: Report) -> str:
    recovery = report.recovery
    denied = [f"device {name} ({why})" for name, why in sorted(recovery.devices.items())]
    denied += [f"node {name} ({why})" for name, why in sorted(recovery.nodes.items())]
    strikes = [f"{name} has {count} strike{'s' * (count != 1)}" for name, count in sorted(recovery.struck.items())]
    words = [f"In quarantine: {', '.join(denied) or 'nobody'}.", *(f"{strike}." for strike in strikes)]
    return " ".join(words)


def _what_it_saves(report: Report) -> list[str | Text]:
    """What the same fault did where nobody looked: measured, little as it may be."""
    clean, hit = report.validation["clean"], report.validation["unguarded"]
    if report.injected is None or clean is None or hit is None:
        return []
    at = report.injected["step"]
    before, after = report.losses["clean"][at], report.losses["unguarded"][at]
    first = "the same" if before == after else f"{loss_text(after)} instead of {loss_text(before)}"
    lines: list[str | Text] = [
        f"In the step that was hit the training log shows {first} loss; the job went on to its end."
    ]
    held_back = f"loss {loss_text(hit)} on text that was held back, {loss_text(clean)} without the fault."
    useless = "" if math.isfinite(hit) else " are useless"
    lines.append(f"Its final weights{useless}: {held_back}")
    if report.replicas_parted:
        lines.append("Its ranks ended with different weights, which nothing reported.")
    return lines


# The curves ----------------------------------------------------------------------------------------------------------


def _curves(report: Report) -> Table:
    """One line a training, on a common scale."""
    finite = [loss for losses in report.losses.values() for loss in losses if math.isfinite(loss)]
    lowest, highest = min(finite, default=0.0), max(finite, default=1.0)
    table = Table.grid(padding=(0, 2))
    for name, losses in report.losses.items():
        curve = sparkline(losses, lowest, highest)
        if len(losses) < report.settings.steps:
            curve += " stopped"
        last = next((loss for loss in reversed(losses)), math.nan)
        first = losses[0] if losses else math.nan
        table.add_row(report.settings.titles[name], curve, f"{loss_text(first)} to {loss_text(last)}")
    return table


def sparkline(values: Sequence[float], lowest: float, highest: float, width: int = 48) -> str:
    """Values as block characters, `width` at most; `!` where one is not finite."""
    stride = max(1, math.ceil(len(values) / width))
    shown = [values[index] for index in range(0, len(values), stride)]
    span = (highest - lowest) or 1.0
    return "".join(
        _BLOCKS[round((value - lowest) / span * (len(_BLOCKS) - 1))] if math.isfinite(value) else "!" for value in shown
    )
