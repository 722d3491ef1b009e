"""What a report claims, what it does not, and what it is good for: sentences, so that both its forms say exactly the same.

A report travels further than a console page, to people who do not know the words. It must never be stronger than its evidence: an
unattributed incident is no request to replace anything, and neither are a drill, a false alarm and a verdict that cannot be decided
again.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bitwitness.store.pages import AuditRow
from bitwitness.web.reasons import listed
from bitwitness.web.report_records import INJECTED, Report

Kind = Literal["replacement", "suspicion", "nobody", "drill", "false alarm", "unconfirmed"]


@dataclass(frozen=True, slots=True)
class Standing:
    """What the report is good for: a kind, a title, and one or two sentences that stand before everything else."""

    kind: Kind
    title: str
    text: str


def standing(report: Report) -> Standing:
    """What the report is good for."""
    one = report.page.incident
    if one.judgement == "drill":
        return Standing(
            "drill",
            "Drill: a fault that was injected on purpose",
            "A fault was injected on purpose here. This is no request for a replacement (RMA): it says nothing about any device.",
        )
    if report.demo:
        return Standing(
            "drill",
            "Drill: the fault of a demo",
            "This run is a training of `bitwitness demo`, and its fault is the demo's own, injected on purpose. This is no request for a "
            "replacement (RMA): it says nothing about any device.",
        )
    if one.judgement == "false alarm":
        return Standing(
            "false alarm",
            "Incident that was judged a false alarm",
            "A person has judged this a false alarm. This is no request for a replacement (RMA).",
        )
    if one.status != "attributed":
        return Standing(
            "nobody",
            "Silent data corruption, nobody is named",
            "This is the report of an unattributed incident: wrong numbers were found, and the evidence does not say where they came from. "
            "It names no device and no node, and is no request for a replacement (RMA).",
        )
    if report.decided.outcome in ("different", "impossible"):
        return Standing(
            "unconfirmed",
            "Incident whose verdict cannot be confirmed",
            "The verdict on record does not follow from the observations on record. This is no request for a replacement (RMA) before "
            "somebody has looked.",
        )
    what = _what(report)
    if one.persistence != "persistent":
        why = (
            "It was right when it repeated its work, and a rare race in software looks the same"
            if one.persistence == "transient"
            else "Whether it would be wrong again is not known"
        )
        return Standing(
            "suspicion",
            f"Silent data corruption on {what}",
            f"{why}. By itself this is a strike, and no ground for a replacement (RMA).",
        )
    if one.kind in ("input", "collective"):
        part = "the batch that its node read" if one.kind == "input" else "what came out of the all-reduce there"
        return Standing(
            "suspicion",
            f"Silent data corruption on {what}",
            f"What was wrong is {part}, again and again; the device itself may be healthy. Storage, host memory or the link come first.",
        )
    return Standing(
        "replacement",
        f"Silent data corruption on {what}",
        "The device returned wrong results without an error, again when it repeated its work, while devices on at least two other nodes "
        "agreed bit for bit on the right ones.",
    )


def _what(report: Report) -> str:
    named = report.page.incident.devices
    return listed(list(named), "device", 3) if named else listed(list(report.page.incident.ranks), "rank", 3)


def window(report: Report) -> str:
    """When it can have happened."""
    last, found = report.page.incident.window
    check = report.page.incident.check
    if last < 0:
        since = (
            f"The check {check} had not passed before in this run, so it can have happened at any step up to {found}"
        )
    else:
        since = f"It happened after step {last}, when the check {check} had passed, and up to step {found}, where it was found"
    safe, resumed = report.page.checkpoint, report.page.resumed
    kept = (
        f"Of the checkpoints that are still kept, the last safe one is that of step {safe}"
        if safe >= 0
        else "No checkpoint that is still kept is known to be safe"
    )
    went_on = f" The job went on from the checkpoint of step {resumed}, as its journal says." if resumed >= 0 else ""
    return f"{since}.{went_on} {kept}."


def signals(report: Report) -> str:
    """What stands in the place of signals where there are none: never that all is well."""
    if not report.fleet:
        return "Not collected: no state of a fleet controller was given to this report (--fleet). That is no sign of health."
    if report.page.incident.status != "attributed" and report.page.proposals:
        return "Signals name devices, and this report names none: `bitwitness fleet status` and the console show what the fleet has heard."
    if not report.page.proposals:
        return "Not collected: the fleet controller whose state was given knows nothing of this incident. That is no sign of health."
    return "No signal that the fleet controller has kept bears on this incident. That is no sign of health: nothing may have been collected."


def not_proved(report: Report) -> Iterator[str]:
    """What must not be read into it."""
    one = report.page.incident
    if one.status != "attributed":
        yield "It does not show that any device, node or link is faulty, nor that any of those involved is healthy."
        yield "A witness that was wrong looks, to one comparison, exactly like an owner that was wrong."
    else:
        yield (
            "It shows that the named device returned other bits than devices on two other nodes, for the same work from the same weights, "
            "inputs and random state. It does not show which part of it is broken: core, memory, power, cooling, or firmware."
        )
        yield "One common cause that made two other nodes wrong in the same way, and only them, would look the same."
        if one.persistence != "persistent":
            yield "It does not show that the device will be wrong again."
        if any(not device.serial for device in report.devices):
            yield "It ties the results to the identity that the driver reported, not to a serial number that anybody has read off the part."
    if not report.fleet:
        yield "Nobody has looked at signals of the hardware for this report, so none of them speaks for or against it."
    yield (
        "Results are compared by digests that the ranks computed themselves. This report is not signed: whoever can write to the "
        "directory of the run can change what it is made from. The digests of the files beside the incident are those of the moment it was made."
    )


def injected(report: Report) -> str:
    """Whether anything was injected on purpose, where no record of it belongs to this incident."""
    if report.demo:
        return "The run is a training of `bitwitness demo`, which injects its fault itself and keeps no record of it."
    if report.recorded:
        return "The run has records of faults that were injected on purpose; none of them belongs to this incident, as far as is on record."
    return "The run has no record of a fault that was injected on purpose."


def settle(report: Report) -> Iterator[str]:
    """Of an unattributed incident: what would tell more."""
    one, nodes = report.page.incident, report.nodes
    if one.kind == "software":
        yield "Run the same step again from the last safe checkpoint with the same batch: if it comes again on other devices, it is software or data."
        yield "Look at what does not repeat: the guard names the operation where it can."
        return
    if nodes < 3:
        yield f"Run on at least three nodes: there were {nodes}, and one opinion against another names nobody."
        yield "Or swap one node for another: if it comes again, it came from what stayed."
    if one.kind == "collective":
        yield "Compare the counters of the links between the ranks involved, and run the collective library's own test between them."
    if one.kind == "input":
        yield "Have the batch rebuilt (rebuild_batch=) on three nodes, so that the odd one out shows."
    if one.window[0] < 0:
        yield "Compare the configuration of the ranks: at a first comparison it can explain everything."
    yield "Restart once from the last safe checkpoint with every step audited (Policy.every_step()); a second incident is judged from more observations."


def replays(report: Report) -> Iterator[str]:
    """Commands that run something again, where there are any."""
    run = shlex.quote(report.page.run.path)
    if report.recorded:
        where = shlex.quote(f"{report.page.run.path}/{INJECTED}")
        yield f"bitwitness fault show {where}"
        yield f"bitwitness fault replay {where} bitwitness run --run-dir NEW ... SCRIPT"
    yield f"bitwitness incident show {shlex.quote(report.page.path)}"
    yield f"bitwitness report {run} --incident {shlex.quote(report.page.incident.id)} --json"


def history(report: Report) -> tuple[AuditRow, ...]:
    """Who did what."""
    return report.page.history


def included(report: Report) -> str:
    """What of the machine and of people stands in it."""
    if report.redacted is None:
        places = (
            "identities of devices, names of nodes and pods, paths of the run, names of people who acted and of their machines, names of "
            "tensors, and what people wrote"
            if report.page.incident.status == "attributed"
            else "paths of the run, names of people who acted and of their machines, and names of tensors; nothing that tells a node or a "
            "device, and so nothing that people wrote"
        )
        return f"It holds {places}. With --redact it is made without names of nodes, paths and people."
    counts = ", ".join(f"{kind}: {count}" for kind, count in report.redacted.items() if count) or "nothing"
    return (
        "It was made without names: what is in it has a form that holds none, e.g. numbers, times, digests and words of bitwitness, or was "
        f"replaced, the same name by the same word everywhere, or left out ({counts}). Identities of devices with their serial numbers, "
        "models, versions of software and names of tensors were kept. Read it before you send it."
    )
