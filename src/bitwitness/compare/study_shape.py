"""What the published tables show, one sentence each, and whether ours show it too.

The figures of a small model on invented nodes cannot be those of a large one on real ones; what can be compared is their shape. Each
statement is decided from the figures alone, says where ours differ in plain words, and may be not reached by a short study.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bitwitness.compare import published
from bitwitness.compare.intervals import spearman
from bitwitness.compare.nodes import DESTROYER
from bitwitness.compare.published import CELLS, LATE, ONSET
from bitwitness.compare.study_tables import Figures, NodeFigures

Held = Literal["holds", "differs", "not reached"]

FEW_PER_CENT = 0.1
"""What counts as a few per cent of noise: the published maximum is half of it."""

WRONG_BY_ORDERS = 1e3
RELATED = 0.5
"""What is correlated less than this does not follow."""

ALIKE = 3.0
"""Drifts that differ by less than this factor are alike."""

MOST = 2 / 3


@dataclass(frozen=True, slots=True)
class Statement:
    """One thing that the published tables show.

    Attributes:
        says: what. held: whether ours show it. ours: our figures, in words. remark: a plain word on what it means or where ours differ.
    """

    says: str
    held: Held
    ours: str
    remark: str = ""


Decided = tuple[Held, str]


def shape(of: Figures) -> tuple[Statement, ...]:
    """All statements, in the order of the tables."""
    return tuple(
        Statement(says, *decide(of), remark)
        for says, decide, remark in (
            (
                "The references agree bit for bit, so that whatever differs is the suspect's.",
                _references_agree,
                "",
            ),
            (
                "Mismatch frequencies that were planted are measured within their intervals.",
                _planted_found,
                "That the published rates come out again shows that the measurement works: they were put in. It says nothing of nature.",
            ),
            (
                "Nodes 2 and 3 show nothing in pretraining.",
                _silent,
                "Their bounds say what rates that leaves possible.",
            ),
            (
                "Frequencies differ by orders of magnitude from node to node.",
                _orders,
                "By construction, as far as rates are planted.",
            ),
            ("Attention is hit more often than the FFN, forward and backward.", _attention_more, "By construction."),
            (
                "Node 11 is the worst of all.",
                _worst,
                "By construction, as far as frequencies go; its noise is measured.",
            ),
            (
                "Single elements are wrong by orders of magnitude.",
                _severity,
                "Theirs reach 10^12: our tensors have a millionth of their elements, and fewer that are nearly zero.",
            ),
            (
                "And yet the noise of the gradient stays at a few per cent.",
                _noise,
                "How far a wrong element is off was chosen here, for the nodes with a published figure so that ours comes near it.",
            ),
            ("Errors come in spikes.", _spikes, "By construction; of rare errors a few steps have all in any case."),
            (
                f"Node {LATE} is clean until about step {ONSET}.",
                _late,
                "By construction; found at the step at which it was put in.",
            ),
            (
                "Lock-step keeps errors from spreading; left to themselves they reach tensors that no fault hits.",
                _spreading,
                "",
            ),
            ("Losses stay near those of the healthy one while parameters drift.", _alike, ""),
            (
                "Drift does not tell how bad a node is: it does not follow the mismatch frequencies.",
                _drift_no_rank,
                "So a node cannot be judged by how far its parameters are.",
            ),
            (
                "It is alike on most nodes.",
                _drift_alike,
                "Theirs took 4500 steps; in so few as ours what began as a last bit has not grown as far as what began large.",
            ),
            (
                "Of fine-tuning, most nodes do the task as well as the reseeded healthy one.",
                _tuned_alike,
                "By the distance of the reseeded one: one draw of what chance does.",
            ),
            (
                "Answers to single questions change all the same, how many depends on the node, about as many as on the reseeded one.",
                _answers,
                "Published are 5 % on node 1 and 7 % reseeded, and 37 to 42 % against 57 % on a task that is nearly guessed.",
            ),
            (
                f"Node {DESTROYER} destroys the fine-tuning: no right answer, none in common with the healthy one.",
                _destroyed,
                "Ours computes NaN where operands are large, which this task's are and the pretraining's are not.",
            ),
        )
    )


# Mismatches ----------------------------------------------------------------------------------------------------------


def _references_agree(of: Figures) -> Decided:
    if of.void or of.short:
        return "differs", "; ".join([*([f"{of.void} steps do not count"] if of.void else []), *of.short])
    return "holds", "every step of every part counts"


def _planted_found(of: Figures) -> Decided:
    all_of_them = [(one, cell) for one in of.nodes for cell in one.frequencies]
    judged = [cell.agreement for _, cell in all_of_them]
    within, outside = judged.count("within"), judged.count("outside")
    if not within + outside:
        return "not reached", "no planted rate was high enough to be seen in so few steps"
    ours = f"{within} of {within + outside} cells within their 95 % interval"
    missed = [f"node {one.node.number} {_cell(cell.cell)}" for one, cell in all_of_them if cell.agreement == "outside"]
    if missed:
        ours += f"; outside: {', '.join(missed)}"
    none = judged.count("none expected")
    ours += f"; {none} too rare to be expected" if none else ""
    # One in twenty is outside by chance: what more than that allows is no chance.
    return ("holds" if outside <= _allowed(within + outside) else "differs"), ours


def _allowed(of: int) -> int:
    """The most of so many intervals of 95 % that chance leaves out in 99 of 100 studies."""
    count, tail, chance = 0, 0.0, 0.95**of
    while tail + chance < 0.99 and count < of:
        tail += chance
        chance *= (of - count) / (count + 1) * 0.05 / 0.95
        count += 1
    return count


def _silent(of: Figures) -> Decided:
    silent = [one for one in of.nodes if one.published.silent]
    if not silent:
        return "not reached", "they were not played"
    seen = [one.node.number for one in silent if one.outcome != "nothing seen"]
    bounds = [cell.bound for one in silent for cell in one.frequencies if cell.bound is not None]
    if seen:
        return "differs", f"node {', '.join(map(str, seen))}: not silent"
    return "holds", f"nothing seen; at most {max(bounds):.1e} of the elements of a cell" if bounds else "nothing seen"


def _orders(of: Figures) -> Decided:
    highest = [one.highest for one in of.nodes if one.highest]
    if len(highest) < 2:
        return "not reached", "fewer than two nodes with a mismatch"
    factor = max(highest) / min(highest)
    return ("holds" if factor >= WRONG_BY_ORDERS else "differs"), f"a factor of {factor:.0f} between the nodes seen"


def _attention_more(of: Figures) -> Decided:
    pairs = []
    for one in of.nodes:
        if len(one.published.frequencies) == len(CELLS):
            found = {cell.cell: cell.measured for cell in one.frequencies}
            pairs += [(one, way, found[way, "attention"], found[way, "ffn"]) for way in ("fwd", "bwd")]
    wrong = [f"node {one.node.number} {way}" for one, way, more, less in pairs if (more.share or 0) < (less.share or 0)]
    seen = [pair for pair in pairs if pair[2].count or pair[3].count]
    if len(seen) < len(pairs) or not pairs:
        return "not reached", f"mismatches in {len(seen)} of {len(pairs)} pairs"
    return ("differs" if wrong else "holds"), f"{len(pairs) - len(wrong)} of {len(pairs)} pairs" + (
        f"; not {', '.join(wrong)}" if wrong else ""
    )


def _worst(of: Figures) -> Decided:
    worst = max(of.nodes, key=lambda one: one.highest)
    if not worst.highest:
        return "not reached", "no mismatch on any node"
    noisiest = max(of.nodes, key=lambda one: one.noise or 0.0)
    ours = f"most mismatches: node {worst.node.number}; most noise: node {noisiest.node.number}"
    return ("holds" if worst.node.number == noisiest.node.number == 11 else "differs"), ours


def _severity(of: Figures) -> Decided:
    largest = [
        cell.severity_largest for one in of.nodes for cell in one.frequencies if cell.severity_largest is not None
    ]
    if not largest:
        return "not reached", "no mismatch"
    return ("holds" if max(largest) >= WRONG_BY_ORDERS else "differs"), f"up to {max(largest):.1e} of itself"


def _noise(of: Figures) -> Decided:
    seen = [one for one in of.nodes if one.noise]
    if not seen:
        return "not reached", "no wrong gradient"
    above = [one for one in of.nodes if (one.noise or 0.0) > FEW_PER_CENT or one.lost]
    most = max(one.noise or 0.0 for one in seen)
    known = [
        f"node {one.node.number} {one.noise or 0.0:.3f} (theirs {one.published.noise})"
        for one in of.nodes
        if one.published.noise is not None
    ]
    ours = f"at most {most:.3f}, theirs {published.LARGEST_NOISE}; {'; '.join(known)}"
    if above:
        ours += f"; above {FEW_PER_CENT}: {_numbers(above)}"
    return ("differs" if above else "holds"), ours


def _spikes(of: Figures) -> Decided:
    found = [one for one in of.nodes if one.spiky is not None and one.wrong >= 20]
    in_spikes = [one for one in found if (one.spiky or 0.0) >= 0.5]
    if not found:
        return "not reached", "too few mismatches on any node"
    ours = f"on {len(in_spikes)} of {len(found)} nodes a tenth of the steps has at least half of all mismatches"
    return ("holds" if in_spikes else "differs"), ours


def _late(of: Figures) -> Decided:
    late = _number(of, LATE)
    if of.steps <= ONSET or late is None:
        return "not reached", f"{of.steps} steps were run" if late is not None else "it was not played"
    if late.first is None:
        return "differs", "nothing seen at all"
    return ("holds" if ONSET <= late.first <= ONSET + 50 else "differs"), f"its first mismatch is at step {late.first}"


# Training ------------------------------------------------------------------------------------------------------------


def _spreading(of: Figures) -> Decided:
    parted = [one for one in of.nodes if one.free.parted is not None]
    if not parted:
        return "not reached", "no node left the healthy trajectory"
    spread = [one for one in of.nodes if one.spread]
    kept = max(len({part.cell for part in one.node.parts}) for one in of.nodes)
    ours = (
        f"in lock-step wrong only where a fault was planted (at most {kept} kinds of tensor), on {len(of.nodes) - len(spread)} of "
        f"{len(of.nodes)} nodes; in the free run up to {max(one.free.most for one in parted)} tensors at once"
    )
    if spread:
        ours += "; elsewhere in lock-step: " + ", ".join(f"node {one.node.number} {one.spread[0]}" for one in spread)
    wide = max(one.free.most for one in parted) > kept
    return ("holds" if wide and not spread else "differs"), ours


def _alike(of: Figures) -> Decided:
    drifting = [one for one in of.nodes if one.free.drift or one.free.lost or one.free.gap is None]
    if not drifting:
        return "not reached", "no node drifted"
    control = of.reseeded.gap
    if control is None:
        return "not reached", "there is no reseeded healthy one to compare with"
    apart = [one for one in drifting if one.free.gap is None or one.free.gap > control]
    most = max((one.free.gap for one in drifting if one.free.gap is not None), default=None)
    ours = (
        f"on {len(drifting) - len(apart)} of {len(drifting)} drifting nodes losses of the last steps are nearer to the healthy one's "
        f"than the reseeded one's are ({control:.3f})"
    )
    ours += f"; the largest difference is {most:.3f}" if most is not None else ""
    ours += f"; not so: {_numbers(apart)}" if apart else ""
    return ("holds" if len(apart) <= len(drifting) * (1 - MOST) else "differs"), ours


def _drifting(of: Figures) -> list[NodeFigures]:
    """Those that parted early enough: a node that parted late has had no time."""
    early = of.steps / 4
    return [one for one in of.nodes if one.free.drift and one.free.parted is not None and one.free.parted < early]


def _drift_no_rank(of: Figures) -> Decided:
    long = _drifting(of)
    ranks = spearman([(one.highest, one.free.drift) for one in long])
    if ranks is None:
        return "not reached", f"{len(long)} nodes drifted for long enough"
    return ("holds" if abs(ranks) < RELATED else "differs"), f"correlation of ranks {ranks:.2f} on {len(long)} nodes"


def _drift_alike(of: Figures) -> Decided:
    drifts = [one.free.drift or 0.0 for one in _drifting(of)]
    if len(drifts) < 4:
        return "not reached", f"{len(drifts)} nodes drifted for long enough"
    middle = statistics.median(drifts)
    alike = [drift for drift in drifts if middle / ALIKE <= drift <= middle * ALIKE]
    ours = (
        f"{len(alike)} of {len(drifts)} drifts within a factor of {ALIKE:.0f} of their median {middle:.2g}, all of them from {min(drifts):.2g} "
        f"to {max(drifts):.2g} (reseeded: {of.reseeded.drift or 0.0:.2g})"
    )
    return ("holds" if len(alike) >= MOST * len(drifts) else "differs"), ours


# Fine-tuning ---------------------------------------------------------------------------------------------------------


def _tuned_alike(of: Figures) -> Decided:
    if of.healthy.accuracy is None or of.control.accuracy is None:
        return "not reached", "the healthy ones gave no answers"
    # The reseeded one is one draw: what lies as near as twice its distance, or 2 points, is as good.
    near = max(0.02, 2 * abs(of.control.accuracy - of.healthy.accuracy))
    rest = [one for one in of.nodes if one.node.number != DESTROYER]
    good = [one for one in rest if _near(one, of.healthy.accuracy, near)]
    ours = f"{len(good)} of {len(rest)} nodes within {100 * near:.1f} points of the healthy {100 * of.healthy.accuracy:.1f} %"
    return ("holds" if len(good) >= MOST * len(rest) else "differs"), ours


def _answers(of: Figures) -> Decided:
    rest = {one.node.number: one.tuned.divergence for one in of.nodes if one.node.number != DESTROYER}
    known = {number: share for number, share in rest.items() if share is not None}
    control = of.control.divergence
    if not known or not control:
        return "not reached", "the reseeded one gave no other answers"
    # As with the losses, by a factor: the reseeded one is one draw.
    changed = [number for number, share in known.items() if share >= control / ALIKE]
    above = [number for number, share in known.items() if share > control * ALIKE]
    some = sum(share > 0 for share in known.values())
    ours = (
        f"{some} of {len(known)} nodes change an answer, {len(changed)} of them at least a third as many as the reseeded one "
        f"({100 * control:.1f} %), {len(above)} more than three times as many"
    )
    return ("holds" if len(changed) >= MOST * len(known) and not above else "differs"), ours


def _near(one: NodeFigures, healthy: float, near: float) -> bool:
    return one.tuned.accuracy is not None and abs(one.tuned.accuracy - healthy) <= near


def _destroyed(of: Figures) -> Decided:
    node = _number(of, DESTROYER)
    if node is None:
        return "not reached", "it was not played"
    one = node.tuned
    if one.accuracy is None or one.divergence is None:
        return "differs", "it gave no answers at all"
    ours = f"accuracy {100 * one.accuracy:.1f} %, answers that differ {100 * one.divergence:.1f} %"
    return ("holds" if one.accuracy == 0.0 and one.divergence == 1.0 else "differs"), ours


# Words ---------------------------------------------------------------------------------------------------------------


def _number(of: Figures, number: int) -> NodeFigures | None:
    return next((one for one in of.nodes if one.node.number == number), None)


def _numbers(nodes: Sequence[NodeFigures]) -> str:
    return "node " + ", ".join(str(one.node.number) for one in nodes)


def _cell(cell: published.Cell) -> str:
    return f"{cell[0]}/{'attn' if cell[1] == 'attention' else 'ffn'}"
