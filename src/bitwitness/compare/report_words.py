"""What the figures of a comparison mean, and what follows: in sentences, for a page and for a terminal alike.

Whoever reads this is tired and has to decide about hardware. So nothing here says more than was measured, what was not seen has
its bound, and a fault that was played on purpose is called that wherever it is mentioned.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bitwitness.compare.records import MODES

Record = Mapping[str, Any]

DRILL = "simulated fault, a drill"

PHASES: Mapping[str, str] = {
    "batch": "batch",
    "fwd_in": "forward, input",
    "fwd_out": "forward, output",
    "loss": "loss",
    "grad_out": "backward, input",
    "grad_in": "backward, output",
    "grad_w": "gradient of parameters",
    "update": "parameters after update",
    "state": "optimizer state, buffers",
    "memory": "memory left as it was",
    "forward": "all of forward",
    "backward": "all of backward",
    "": "all",
}
"""Phases in words; the order is that of a step."""

BETWEEN = ("fwd_in", "grad_out")
"""What arrives at a module was computed by the code between the chosen ones."""

MODE_WORDS: Mapping[str, str] = {
    "lock-step": "After each module everything is made equal again, so an error stays where it arose.",
    "parameters": "Parameters and optimizer state are made equal after each step, so an error spreads within its step only.",
    "free": "Nothing is made equal, so whatever goes wrong once stays in the parameters and spreads.",
}

CLASS_WORDS: Mapping[str, str] = {
    "zero": "0 in place of another value",
    "special": "NaN or infinite",
    "sign": "the right value with the other sign",
    "stale": "the right value of the step before",
    "moved": "the right value of another place in the same tensor",
    "other": "none of these",
}

_OUTCOMES: Mapping[str, str] = {
    "differs": "DIFFERS",
    "nothing seen": "NOTHING SEEN",
    "not characterised": "NOT CHARACTERISED",
}
_PROCESSOR = re.compile(r".*/cpu-\d+")

# What judging and the command line say of a mode, which decides what is to be done.
NOT_TO_ITS_END = "it was not brought to its end: "
_WITHOUT_LEADER = "the leader takes no further part: "
_NOBODYS = ("", "unfinished", "interrupted")
"""A journal that is cut off, by whoever ended the process."""
_VOID = re.compile(r"(\S+): [\d,]+ of [\d,]+ steps do not count: (.+)", re.DOTALL)
_PARTED = re.compile(r"\S+: (.+?) differs from the leader in [\d,]+ steps;.*", re.DOTALL)
_SIDED = re.compile(r"(.+) computed what .+ computed, and not what (.+) did: .*", re.DOTALL)
_ANSWERED_NO_MORE = re.compile(
    r"; not there: rank \d|\brank \d+ has left the comparison|all ranks had come: one has died"
)

NOT_REPEATED = (
    "Work that now and then does not repeat: a race, a counter that all participants share, a first call that is unlike the others. It looks "
    "like a device that is rarely wrong, and the two steps by which the work was tried cannot see it."
)


# Numbers -------------------------------------------------------------------------------------------------------------


def rate(value: float | None) -> str:
    """A share or another number over many magnitudes: 1.55e-5, 0.037 as 3.7e-2; "-" where there is none."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}" if int(exponent) else mantissa


def figure(value: float | None) -> str:
    """A number near 1 as it is written by hand, else as a rate."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e4 else rate(value)


def count(value: int | None) -> str:
    """A whole number, thousands apart."""
    return "-" if value is None else f"{value:,}"


def interval(share: Record, confidence: float) -> str:
    """The ends of an interval with its confidence."""
    return f"{percent(confidence)} interval {rate(share['low'])} to {rate(share['high'])}"


def percent(value: float | None) -> str:
    """A share in per cent, as short as it may be."""
    return "-" if value is None else f"{100 * value:.4g} %"


# Whom it is about ----------------------------------------------------------------------------------------------------


def headline(record: Record) -> str:
    """The outcome in capitals; of a drill with what it is."""
    said = _OUTCOMES.get(record["outcome"], str(record["outcome"]).upper())
    return f"{said} ({DRILL})" if record["drill"] else said


def drill(record: Record) -> str:
    """What is played, and by whom; "" where nothing is."""
    if not record["drill"]:
        return ""
    played = "; ".join(f"{one['fault']} on {one['name']} ({one['role']})" for one in record["drills"])
    return (
        f"Simulated fault, a drill: {played or 'it is not known which'}. It was made on purpose by software. Nothing in this report is "
        "about broken hardware: take no device out because of it, and send it to no vendor."
    )


def who(one: Record) -> str:
    """A participant's device and node."""
    return f"{one['device']['device']} on {one['device']['node']}"


def references(record: Record) -> str:
    """How many there were; that they are healthy is what their agreement has to show."""
    number = len(record["references"])
    return f"{number} reference{'' if number == 1 else 's'}"


def is_processor(record: Record) -> bool:
    """Whether the suspect is a stand-in: the same node's processor plays its references too."""
    all_of = [record["suspect"], *record["references"]]
    alike = len({one["device"]["node"] for one in all_of}) == 1
    return alike and all(_PROCESSOR.fullmatch(str(one["device"]["device"])) is not None for one in all_of)


# Modes ---------------------------------------------------------------------------------------------------------------


def seen_in(record: Record) -> list[Record]:
    """The modes in which something differs."""
    return [mode for mode in record["modes"] if mode["total"] is not None and mode["total"]["mismatches"]["count"]]


def worst_first(rows: Sequence[Record]) -> list[Record]:
    """Rows by the share of elements that differ; those with none behind, by their bound."""
    return sorted(
        rows,
        key=lambda row: (
            -(row["mismatches"]["share"] or 0.0),
            -row["mismatches"]["count"],
            -(row["bound"] or 0.0),
        ),
    )


def clean(rows: Sequence[Record]) -> list[Record]:
    """Rows in which nothing was seen, the loosest bound first."""
    return [row for row in worst_first(rows) if not row["mismatches"]["count"]]


def module(row: Record) -> str:
    """The name of a row's module."""
    return str(row["group"]) or "outside of all chosen modules"


def place(row: Record) -> str:
    """Module and phase of a row."""
    return f"{module(row)}, {PHASES.get(row['phase'], row['phase'])}"


def mode_line(mode: Record, record: Record) -> str:
    """How far a mode came, and what it saw first."""
    parts = [f"{count(mode['steps'])} of {count(mode['asked'])} steps judged"]
    if mode["void"]:
        parts.append(f"{count(mode['void'])} left out{_why_left_out(mode, record)}")
    if mode["first"] is not None:
        parts.append(f"first mismatch in step {mode['first']}")
    if mode["ended"] != "done":
        parts.append(_ended(mode["ended"], record))
    return "; ".join(parts) + "."


def _why_left_out(mode: Record, record: Record) -> str:
    """As the judge says it in a note."""
    for note in record["notes"]:
        found = _VOID.fullmatch(note)
        if found and found[1] == mode["mode"]:
            return f": {found[2]}"
    return ""


def _ended(ended: str, record: Record) -> str:
    """Why a mode did not come to the end; that the suspect did not only where it was the suspect."""
    if ended.startswith(_WITHOUT_LEADER):
        return f"it ended when {leader(record)} failed ({ended.removeprefix(_WITHOUT_LEADER)})"
    if ended in _NOBODYS:
        still = "it was ended from outside, or still runs" if record["may_run"] else "the comparison was ended before"
        return f"it did not come to the end ({still})"
    return f"the suspect did not come to the end ({ended})"


def leader(record: Record) -> str:
    """The leader's name."""
    return next((str(one["name"]) for one in record["references"] if one["role"] == "leader"), "the leader")


def is_wrong_at_times(record: Record) -> bool:
    """There are mismatches that count, and too few of them to say that the device made them."""
    return record["outcome"] == "not characterised" and bool(seen_in(record))


# What it means -------------------------------------------------------------------------------------------------------


def shows(record: Record) -> list[str]:
    """What was measured, a sentence each."""
    suspect, outcome, confidence = who(record["suspect"]), record["outcome"], record["confidence"]
    said = []
    if outcome == "not characterised":
        said.append(
            "Nothing can be said of the suspect, neither that it is wrong nor that it is right. What figures there are below name nobody."
        )
    for mode in seen_in(record):
        total = mode["total"]
        said.append(
            f"In {mode['mode']}, {count(total['mismatches']['count'])} of {count(total['mismatches']['of'])} elements have other bits "
            f"than those of {references(record)}: a share of {rate(total['mismatches']['share'])} "
            f"({interval(total['mismatches'], confidence)}), in {count(total['steps_hit'])} of {count(total['steps'])} steps. "
            f"{MODE_WORDS.get(mode['mode'], '')}"
        )
    if outcome == "differs":
        said.append(
            "The references gave the same bits as each other in every step that is counted. "
            f"So the difference came with {suspect}{' and the fault that was played on it' if record['drill'] else ', its node or its software'}."
        )
    if outcome != "not characterised" or said[1:]:
        said += [f"In {dtype}: {finding}" for dtype, finding in findings(record)]
    if outcome == "nothing seen":
        said.append(
            f"All that was compared on {suspect} had the same bits as on {references(record)}, within the bounds below. "
            "That is no proof of health: it says how rare a fault must be in this work, if there is one."
        )
    return said


def findings(record: Record) -> Iterator[tuple[str, str]]:
    """What wrong elements have in common, by dtype."""
    for mode in record["modes"]:
        for one in mode["patterns"]:
            for finding in one["findings"]:
                yield one["dtype"], finding


def does_not_show(record: Record) -> list[str]:
    """What nobody may read into it."""
    said = []
    hit = {mode["mode"] for mode in seen_in(record)}
    run = {mode["mode"] for mode in record["modes"]}
    if record["outcome"] == "differs":
        if "lock-step" in run and "lock-step" not in hit:
            said.append(
                "Where it arises: lock-step saw nothing. Comparing and overwriting disturb the work and can lower the rate of errors."
            )
        if hit & {"parameters", "free"}:
            said.append(
                "How often the device is wrong, from parameters or free: there an error spreads, and the elements that it reaches are "
                "counted too. Only lock-step counts where errors arise."
            )
        if "free" in hit:
            said.append(
                "How bad a device is, from its drift: whatever differs once leads training elsewhere, about as fast as another seed "
                "does. Compare with the control."
            )
        said.append(
            "Which part of the device is at fault; how it does on other operations, shapes, values or temperatures; whether it is as "
            "often wrong when nobody looks. Intervals hold for this work on this day."
        )
    if record["outcome"] == "nothing seen":
        said.append(
            "That the device is healthy: other operations, shapes, values or temperatures were not tried, a fault may be rarer than the "
            "bounds, and comparing disturbs the work, which can lower the rate of errors."
        )
    said.append(NOT_REPEATED)
    said.append(
        "Faults that suspect and references share: they would give the same wrong bits, and nothing here would see it."
    )
    missing = [mode for mode in _asked_modes(record) if mode not in run]
    if missing:
        said.append(
            f"Anything in the mode{'s' if len(missing) > 1 else ''} {', '.join(missing)}: not run, or not judged."
        )
    if not record["finished"]:
        said.append("The rest of what was asked for: the comparison is not finished.")
    return said


def _asked_modes(record: Record) -> list[str]:
    asked = record["asked"].get("modes")
    return [str(mode) for mode in asked] if isinstance(asked, list) and asked else list(MODES)


def unseen(record: Record) -> list[dict[str, Any]]:
    """Modes that saw nothing, with their bounds: `mode`, `elements`, `bound`, `steps`, `step_bound`."""
    return [
        {
            "mode": mode["mode"],
            "elements": mode["total"]["mismatches"]["of"],
            "bound": mode["total"]["bound"],
            "steps": mode["total"]["steps"],
            "step_bound": mode["total"]["step_bound"],
        }
        for mode in record["modes"]
        if mode["total"] is not None and not mode["total"]["mismatches"]["count"]
    ]


def again(mode: Record, confidence: float) -> str:
    """How long to look to see it again; "" where nothing was seen."""
    trials = mode["trials"]
    if trials is None:
        return ""
    ends = f"between {count(trials['at_least'])} and {count(trials['at_most'])} at the ends of its interval"
    return (
        f"{count(trials['steps']['count'])} of {count(trials['steps']['of'])} steps were hit: to see it again with {percent(confidence)} "
        f"confidence takes {count(trials['needed'])} step{'' if trials['needed'] == 1 else 's'} ({ends}), if steps are hit independently."
    )


# What to do ----------------------------------------------------------------------------------------------------------


def next_steps(record: Record, command: str = "bitwitness") -> list[str]:
    """What a person should do, most urgent first. Lines that begin with two blanks belong to the one before; commands can be copied."""
    outcome = record["outcome"]
    steps = [] if record["finished"] else _after_end(record, command)
    if record["drill"]:
        steps.append(_after_drill(outcome))
    elif outcome == "differs":
        steps += _after_difference(record, command)
    elif outcome == "nothing seen":
        more = (
            "if it is still suspected: run more steps (the report says how many show which rate), with the workload, dtype and load "
            f"in which it was suspected; or other work at full power: {command} scan"
        )
        steps += [
            "nothing follows for the device from this alone: not seen is not healthy",
            more,
        ]
    else:
        steps += _after_nothing_said(record, command)
    return steps


def _after_end(record: Record, command: str) -> list[str]:
    """Of a comparison that was cut short: what ended it, and how it is had whole."""
    if record["may_run"]:
        return [
            (
                f"if it still runs, judge again when it has ended ({command} compare show DIR); if it was killed, run the same command again "
                "with a new --out: this comparison is not finished"
            )
        ]
    why = next((note for note in record["notes"] if note.startswith(NOT_TO_ITS_END)), "")
    again = "then run the same command again with a new --out: this comparison is not finished"
    if _ANSWERED_NO_MORE.search(why):
        return [
            (
                "look at whoever stopped answering, who is named in the note above: whether its node is up, what its process said last, what "
                f"the kernel says (dmesg), and whether a step takes longer than --timeout; {again}. If it stops again, leave it out"
            )
        ]
    if why:
        return [f"remove what ended it ({why.removeprefix(NOT_TO_ITS_END)}), {again}"]
    return ["run the same command again with a new --out: this comparison was interrupted, and is not finished"]


def _after_nothing_said(record: Record, command: str) -> list[str]:
    """By what kept the judge from an answer."""
    steps = ["blame nobody on this, and take no device out: the reason above says why it is no answer"]
    ended = [str(mode["ended"]) for mode in record["modes"]]
    failed = next((one for one in ended if one.startswith(_WITHOUT_LEADER)), "")
    alone = next((one for one in ended if one not in ("done", *_NOBODYS) and not one.startswith(_WITHOUT_LEADER)), "")
    odd = in_doubt(record)
    rare = is_wrong_at_times(record)
    if failed:
        steps.append(
            f"look at the work first: {leader(record)} failed, where a healthy device should not ({failed.removeprefix(_WITHOUT_LEADER)}). "
            "Mend that, and compare again with a new --out; if the work is sound, take another leader (--reference: the first one leads)"
        )
    if alone:
        steps.append(
            f"look at why the suspect ended where references went on ({alone}): what its process and the kernel (dmesg) say. Compare again; "
            "a device that fails each time is told to its vendor as one that fails"
        )
    if rare:
        steps.append(
            "compare longer: the sentence above says how many steps (--steps N) can decide it; and beside other references (--reference)"
        )
    if odd:
        named = ", ".join(odd)
        steps += [
            (
                f"find out which of {named} and {leader(record)} is wrong: have them judged on their own ({command} scan), or compare again under "
                "another leader (--reference: the first one leads; under torchrun the lowest rank that is not the suspect) and without one of them"
            )
        ]
    if rare or odd:
        steps.append(
            "test whether the work itself repeats: run the same command with a healthy device as the suspect. If that one is wrong now and then "
            "too, it is the work (a race, a counter that all share) and no device"
        )
    if not (failed or alone or odd or rare) and record["finished"]:
        steps.append(
            f"remove that reason, e.g. with other references that are judged on their own before ({command} scan), and compare again"
        )
    return steps


def in_doubt(record: Record) -> list[str]:
    """Names of references that differ from the leader, by the notes and the sentence of the judge."""
    found = [match[1] for note in record["notes"] if (match := _PARTED.fullmatch(note))]
    sided = _SIDED.fullmatch(record["sentence"])
    found += sided[1].split(", ") if sided else []
    return list(dict.fromkeys(found))


def _after_drill(outcome: str) -> str:
    if outcome == "differs":
        return "nothing: the fault was played on purpose, and was seen. Take no device out because of it"
    if outcome == "nothing seen":
        return (
            "look why the fault that was played was not seen: did it strike (its rate, its place, the number of steps)? "
            "It says nothing about any device"
        )
    return "nothing about any device: the fault was played on purpose. Read the reason above for why it was not characterised"


def _after_difference(record: Record, command: str) -> list[str]:
    suspect = record["suspect"]
    node, name = str(suspect["device"]["node"]), str(suspect["device"]["device"])
    if is_processor(record):
        steps = [f"suspect this machine's processor or memory: {name} is a process on it that stands for a device"]
    else:
        reason = shlex.quote(f"bitwitness compare {record['asked'].get('id', '')}".strip())
        steps = [
            f"let no job use {name} on {node} until its vendor has answered:",
            f"  in Slurm: scontrol update NodeName={shlex.quote(node)} State=DRAIN Reason={reason}",
            f"  in Kubernetes: kubectl cordon {shlex.quote(node)}",
            f"  for `bitwitness run`: {command} quarantine add RUN_DIR {shlex.quote(name)} --reason {reason}",
        ]
    evidence = (
        f"make evidence for its return: run the same command again with --bundle FOLDER ({command} compare --help): the smallest input "
        "that shows the wrong result, and a script that computes it with plain torch"
    )
    return [
        *steps,
        evidence,
        "send report.html, report.json and the bundle to the vendor",
        "distrust what jobs with this device have written since it was last known to be right: checkpoints, evaluations, data",
    ]
