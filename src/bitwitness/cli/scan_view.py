"""The result of a scan for people: who passes with which bound, who fails on what evidence, who is not judged, and what to do now.

It shows a record as `result.json` holds it, so that what is printed at the end and what is read years later are the same.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bitwitness.cli.output import print_list, styled, this_command
from bitwitness.errors import RunFilesError
from bitwitness.scan.evidence import read

Record = Mapping[str, Any]

_STYLES = {"pass": "green", "fail": "bold red", "not judged": "yellow"}
_MOST_PASSES = 32
"""Rows of devices that pass; of more, the number is enough."""
_MOST_FINDINGS = 5
_MOST_NODES = 8


def show(record: Record, path: Path, screen: Console) -> None:
    """Show a result, or how a scan stands that has none yet."""
    _headline(record, path, screen)
    screen.print()
    print_list(_devices(record), screen)
    hidden = sum(one["standing"] == "pass" for one in record["devices"]) - _MOST_PASSES
    if hidden > 0:
        screen.print(styled(f"and {hidden} more devices that pass", "dim"))
    _coverage(record, screen)
    _findings(record, path, screen)
    _links(record, screen)
    _voices(record, screen)
    _unjudged(record, screen)
    screen.print()
    screen.print("What to do now", style="bold")
    for step in next_steps(record, path):
        screen.print(styled(f"  {step}"), soft_wrap=True)


def _headline(record: Record, path: Path, screen: Console) -> None:
    standing = str(record["standing"])
    said = _counted(record) or "no device"
    if not record.get("ended"):
        word = "RUNNING: so far" if record.get("running") else f"{standing.upper()}, because there is no result:"
        screen.print(styled(f"{word} {said}", _STYLES.get(standing, "")), soft_wrap=True)
    else:
        screen.print(styled(f"{standing.upper()}: {said}", _STYLES.get(standing, "")), soft_wrap=True)
    notes = []
    if record.get("drill"):
        notes.append(f"a drill ({'; '.join(record['drills'])}): its faults are made on purpose, nobody acts upon it")
    if record.get("interrupted"):
        notes.append("interrupted before its time: judged by what there was")
    if record.get("played"):
        notes.append("processes of this machine stand for the devices")
    if not record.get("ended"):
        notes.append(
            "no result yet: this is how it stands by its files"
            if record.get("running")
            else "it has left no result, and nothing shows that it still runs: this is what its files say"
        )
    for note in notes:
        screen.print(styled(note, "yellow"), soft_wrap=True)
    took = f", took {record['took_seconds']:.0f} s" if record.get("took_seconds") else ""
    screen.print(
        styled(f"{path}; {record['minutes']:g} minutes asked for{took}; seed {record['seed']}", "dim"), soft_wrap=True
    )


def _counted(record: Record) -> str:
    """How many devices have which standing, and what else failed or told nothing."""
    counts = {name: sum(one["standing"] == name for one in record["devices"]) for name in _STYLES}
    parts = [", ".join(f"{count} {name}" for name, count in counts.items() if count)]
    links = [one for one in record["links"] if one["standing"] == "fail"]
    if links:
        more = f" and {len(links) - 1} more links" if len(links) > 1 else ""
        parts.append(f"the link of ranks {links[0]['ranks'][0]} and {links[0]['ranks'][1]}{more} failed")
    for standing, verb in (("fail", "failed"), ("not judged", "did not judge")):
        voices = [one for one in record["voices"] if one["standing"] == standing]
        for source in dict.fromkeys(one["source"] for one in voices):
            about = [_about(one) for one in voices if one["source"] == source]
            more = f" and {len(about) - 1} more" if len(about) > 1 else ""
            parts.append(f"{source} {verb} {about[0]}{more}")
    return "; ".join(part for part in parts if part)


def _about(voice: Record) -> str:
    """Whom a voice is about."""
    return " on ".join(part for part in (voice["device"], voice["node"]) if part) or "this node"


def _devices(record: Record) -> Table:
    table = _table("node", "device", "standing", "calls", "wrong", "error rate", "reason")
    order = {"fail": 0, "not judged": 1, "pass": 2}
    passes = 0
    for one in sorted(record["devices"], key=lambda one: (order.get(one["standing"], 1), one["rank"])):
        passes += one["standing"] == "pass"
        if passes > _MOST_PASSES:
            break
        limit = f"q < {one['bound']:.2g}" if one["bound"] is not None else ""
        cells = [one["node"], one["device"]]
        rest = [one["calls"], one["wrong"], limit, one["reason"]]
        table.add_row(
            *(styled(cell) for cell in cells),
            styled(one["standing"], _STYLES.get(one["standing"], "")),
            *(styled(cell) for cell in rest),
        )
    return table


def _coverage(record: Record, screen: Console) -> None:
    parts = []
    for suite, found in record["coverage"].items():
        if suite == "comm":
            bad, seen = len(record["links"]), f"{found['transfers']} transfers, {found['collectives']} collectives, "
            parts.append(f"comm {seen}{bad} pair(s) that do not plainly pass")
        else:
            parts.append(f"{suite} {found['calls']} calls of {found['items']} items")
    screen.print()
    screen.print(styled(f"Suites: {'; '.join(parts)}"), soft_wrap=True)
    for one in record["skipped"][:_MOST_FINDINGS]:
        screen.print(
            styled(f"left out by {one['devices']} device(s): {one['item']} ({one['what']}: {one['why']})", "dim"),
            soft_wrap=True,
        )
    if len(record["skipped"]) > _MOST_FINDINGS:
        screen.print(styled(f"and {len(record['skipped']) - _MOST_FINDINGS} more items left out", "dim"))


def _findings(record: Record, path: Path, screen: Console) -> None:
    kept: dict[tuple[int, str], list[str]] = defaultdict(list)
    for one in record["evidence"]:
        kept[one["rank"], one["item"]].append(_lies(one, path))
    for device in record["devices"]:
        if not device["findings"]:
            continue
        screen.print()
        screen.print(
            styled(f"Wrong answers of rank {device['rank']}, {device['device']} on {device['node']}", "bold"),
            soft_wrap=True,
        )
        worst = sorted(device["findings"], key=_wrong, reverse=True)
        for finding in worst[:_MOST_FINDINGS]:
            calls = sum(finding["answers"].values())
            others = [digest for digest in finding["answers"] if digest != finding["expected"]]
            golden = ", as the golden file says" if finding["golden"] else ""
            screen.print(
                styled(
                    f"  {finding['item']}: {_wrong(finding)} of {calls} wrong, {len(others)} different; expected "
                    f"{finding['expected'][:16]}, which {finding['backers']} device(s) gave each time{golden}"
                ),
                soft_wrap=True,
            )
            for file in kept.get((device["rank"], finding["item"]), ())[:1]:
                _show_evidence(file, screen)
        if len(worst) > _MOST_FINDINGS:
            screen.print(styled(f"  and {len(worst) - _MOST_FINDINGS} more items (--json has all)", "dim"))


def _lies(evidence: Record, path: Path) -> str:
    """Where a file of evidence is now: the directory may have been moved, or be called otherwise from here."""
    return str(path / "evidence" / Path(str(evidence["path"])).name)


def _wrong(finding: Record) -> int:
    answers: Mapping[str, int] = finding["answers"]
    return sum(answers.values()) - answers.get(finding["expected"], 0)


def _show_evidence(file: str, screen: Console) -> None:
    screen.print(styled(f"    evidence: {file}"), soft_wrap=True)
    try:
        evidence = read(Path(file))
    except RunFilesError:
        return
    if evidence.differing is None:
        return
    screen.print(styled(f"    {evidence.differing} element(s) differ from a right output of the same device"))
    for one in evidence.elements[:3]:
        place = ", ".join(map(str, one.index))
        screen.print(
            styled(
                f"    output {one.output} [{place}]: expected {one.expected}, observed {one.observed}, xor {one.xor}"
            ),
            soft_wrap=True,
        )


def _links(record: Record, screen: Console) -> None:
    if not record["links"]:
        return
    screen.print()
    screen.print("Links", style="bold")
    table = _table("ranks", "nodes", "standing", "transfers", "wrong", "reason")
    for one in record["links"][:_MOST_PASSES]:
        cells = ["-".join(map(str, one["ranks"])), " - ".join(one["nodes"])]
        table.add_row(
            *(styled(cell) for cell in cells),
            styled(one["standing"], _STYLES.get(one["standing"], "")),
            *(styled(cell) for cell in (one["transfers"], one["wrong"], one["reason"])),
        )
    print_list(table, screen)
    if len(record["links"]) > _MOST_PASSES:
        screen.print(styled(f"and {len(record['links']) - _MOST_PASSES} more (--json has all)", "dim"))


def _voices(record: Record, screen: Console) -> None:
    if not record["voices"]:
        return
    screen.print()
    screen.print("Vendors' diagnostics (a pass of theirs is weak evidence)", style="bold")
    table = _table("source", "node", "device", "standing", "reason")
    for one in record["voices"]:
        cells = [one["source"], one["node"], one["device"] or "all", one["standing"], one["reason"]]
        table.add_row(*(styled(cell) for cell in cells))
    print_list(table, screen)


def _unjudged(record: Record, screen: Console) -> None:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for one in record["unjudged"]:
        by_reason[one["reason"]].append(one["item"])
    if by_reason:
        screen.print()
        screen.print("Items that judge nobody", style="bold")
    for reason, items in by_reason.items():
        more = f" and {len(items) - 1} more" if len(items) > 1 else ""
        screen.print(styled(f"  {items[0]}{more}: {reason}"), soft_wrap=True)


def next_steps(record: Record, path: Path) -> list[str]:
    """What a person should do, most urgent first; commands can be copied."""
    command = this_command()
    told = _about_voices(record)
    steps: list[str] = []
    if record.get("running"):
        steps.append("wait: it still runs")
    elif not record.get("ended"):
        steps.append("look why it ended without a result (is the disk full?), and scan again")
    failed = [one for one in record["devices"] if one["standing"] == "fail"]
    if record.get("drill") and steps:
        return steps
    if record.get("drill"):
        places = [f"rank {one['rank']}" for one in failed]
        places += [
            f"the link of ranks {one['ranks'][0]} and {one['ranks'][1]}"
            for one in record["links"]
            if one["standing"] == "fail"
        ]
        where = ", ".join(places) or "nowhere"
        if record.get("drill_outcome") == "found":
            done = "nothing" if not told else "nothing about our own work"
            return [
                f"{done}: the drill was found on {where}, and nothing else. Take no device out because of it",
                *told,
            ]
        missed = (
            f"nothing was proved: failures were found on {where}, and the drill was {'; '.join(record['drills'])}. Look whether it struck "
            "often enough (a longer scan, a higher p), or something fails on its own account; take nothing out because of a drill"
        )
        return [missed, *told]
    for one in failed[:_MOST_NODES]:
        steps += _for_failed(one, record, path, command)
    if len(failed) > _MOST_NODES:
        steps.append(
            f"and likewise with {len(failed) - _MOST_NODES} more: that so many are faulty is rare; look for a cause that they share"
        )
    for link in [one for one in record["links"] if one["standing"] == "fail"][:_MOST_NODES]:
        steps.append(
            f"keep {' and '.join(link['nodes'])} from talking to each other: put them into different jobs, and have the link between them tested"
        )
    unjudged = [one for one in record["devices"] if one["standing"] == "not judged"]
    if unjudged:
        nodes = list(dict.fromkeys(one["node"] for one in unjudged))
        more = f" and {len(nodes) - _MOST_NODES} more" if len(nodes) > _MOST_NODES else ""
        steps.append(
            f"not judged is no pass: see the reason of each in {path / 'result.json'}, and scan again: {', '.join(nodes[:_MOST_NODES])}{more}"
        )
    steps += told
    if not steps:
        steps.append(
            "nothing: no wrong answer was seen. Rare faults need longer scans; the bound says how rare they must be"
        )
    return steps


def _about_voices(record: Record) -> list[str]:
    """What follows from what vendors' diagnostics said, and from those that said nothing."""
    steps = []
    failed = [one for one in record["voices"] if one["standing"] == "fail"]
    for one in failed[:_MOST_NODES]:
        own = [device for device in record["devices"] if device["standing"] == "fail" and device["node"] == one["node"]]
        ours = "" if own else "; our own work found nothing wrong there, which does not clear it"
        steps.append(
            f"let no job use {_about(one)} until its vendor has been asked: {one['source']} failed it ({one['reason']}){ours}"
        )
    if len(failed) > _MOST_NODES:
        steps.append(f"and likewise with {len(failed) - _MOST_NODES} more that a diagnostic failed")
    mute = [one for one in record["voices"] if one["standing"] == "not judged"][:_MOST_NODES]
    steps.extend(
        f"{one['source']}, which was asked for, did not judge {_about(one)}: {one['reason']}. The standing above is of our own work only"
        for one in mute
    )
    return steps


def _for_failed(device: Record, record: Record, path: Path, command: str) -> Sequence[str]:
    evidence = [
        _lies(one, path) for one in record["evidence"] if one["rank"] == device["rank"] and one["standing"] == "fail"
    ]
    node, name = str(device["node"]), str(device["device"])
    steps = [f"let no job use {name} on {node} (rank {device['rank']}):"]
    if record.get("played"):
        steps[0] = (
            f"{name} is a process that stands for a device (rank {device['rank']}): suspect this machine's processor or memory:"
        )
    else:
        reason = shlex.quote(f"bitwitness scan {record['id']}")
        steps += [
            f"  in Slurm: scontrol update NodeName={shlex.quote(node)} State=DRAIN Reason={reason}",
            f"  in Kubernetes: kubectl cordon {shlex.quote(node)}",
            f"  for `bitwitness run`: {command} quarantine add RUN_DIR {shlex.quote(name)} --reason {reason}",
        ]
    if evidence:
        steps.append(
            f"  then have another device of its kind compute it: {command} scan replay {shlex.quote(evidence[0])}"
        )
    return steps


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, header_style="dim", overflow="fold")
    return table
