"""From observations to a verdict: pure functions, no torch, no I/O.

Blame is the one thing this library must never get wrong, so everything that can name a rank is on this page, works on
plain data that is equal on every rank, and can be tested over every combination of faults. The rules are those of
DESIGN section 3 ("Attribution"); the comments give their numbers.

What no vote can solve: the *same* wrong bits produced on two different nodes outvote a correct third. Independent
devices that are wrong in their own ways never agree, so this takes one common cause, and it is stated in the docs.

Sources: replay by another node, a third node on disagreement and "a suspect must not judge itself" follow the published
description of silent-data-corruption checks for data-parallel training on SageMaker HyperPod (AWS, 2026); a majority of
replicas is not proof of a correct reduction because ring all-reduce forwards a corrupt chunk to later ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bitwitness.evidence import NONFINITE, CheckName, Kind, Observation, Persistence, Verdict
from bitwitness.topology import Topology


@dataclass(frozen=True, slots=True)
class History:
    """What was known before this step, equal on every rank.

    Attributes:
        last_passed: for each check, the last step at which it passed; absent where it never did.
        compared_before: the checks that compare ranks and have passed at least once. The first comparison tells
            configuration from nothing, so it never blames.
        reductions_agreed: whether the fingerprints of the reduced gradient agreed across ranks in every step since the
            last passed replica check.
        sum_may_overflow: whether the finite local gradients are so large that their correct sum may be non-finite.
    """

    last_passed: Mapping[str, int] = field(default_factory=dict)
    compared_before: frozenset[str] = frozenset()
    reductions_agreed: bool = True
    sum_may_overflow: bool = False


@dataclass(frozen=True, slots=True)
class _Finding:
    """What one group of observations says, before the groups are put together."""

    check: CheckName
    kind: Kind
    reason: str
    named: Mapping[int, Persistence] = field(default_factory=dict)
    candidates: tuple[int, ...] = ()


def decide(observations: Sequence[Observation], topology: Topology, history: History, step: int) -> Verdict:
    """The verdict that follows from all observations of one step, the same on every rank that has the same data.

    Args:
        observations: everything that was seen, in any order.
        topology: the placement of the ranks.
        history: what was known before.
        step: the step of detection.
    """
    findings = [
        *_judge_replays(observations, topology),
        *_judge_numerics(observations, topology, history),
        *_judge_replicas(observations, topology, history),
    ]
    if not findings:
        return Verdict("clean", step)
    return _verdict(findings, topology, history, step)


def _verdict(findings: Sequence[_Finding], topology: Topology, history: History, step: int) -> Verdict:
    """Put the findings together: everybody named by any of them is named, since each stands on its own evidence."""
    named: dict[int, Persistence] = {}
    for finding in findings:
        for rank, found in finding.named.items():
            named[rank] = _worse(named.get(rank, found), found)
    # A finding that names somebody comes first: its kind and its check are the verdict's.
    ordered = sorted(findings, key=lambda finding: not finding.named)
    first = ordered[0]
    ranks = tuple(sorted(named))
    candidates = {rank for finding in findings for rank in finding.candidates} - set(ranks)
    reasons = list(dict.fromkeys(finding.reason for finding in ordered))
    shown = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")
    nodes = topology.nodes_of(ranks)
    crowded = [node for node in nodes if sum(topology.node_of(rank) == node for rank in ranks) > 1]
    if crowded:  # rule 5
        shown += f"; several ranks of {', '.join(crowded)} are named: suspect the node, not only its devices"
    persistence: Persistence = "unknown"
    for value in named.values():
        persistence = _worse(persistence, value)
    return Verdict(
        status="attributed" if ranks else "unattributed",
        step=step,
        ranks=ranks,
        nodes=nodes,
        devices=tuple(dict.fromkeys(topology.device_of(rank) for rank in ranks)),
        candidates=tuple(sorted(candidates)),
        kind=first.kind,
        persistence=persistence,
        persistences=tuple(named[rank] for rank in ranks),
        reason=shown,
        window=(history.last_passed.get(first.check, -1), step),
        check=first.check,
    )


def _worse(one: Persistence, other: Persistence) -> Persistence:
    order: tuple[Persistence, ...] = ("unknown", "transient", "persistent")
    return max(one, other, key=order.index)


# Replays and rebuilt inputs: rules 1, 4 and 6 ------------------------------------------------------------------------


def _judge_replays(observations: Sequence[Observation], topology: Topology) -> list[_Finding]:
    groups: dict[tuple[str, int, int], list[Observation]] = defaultdict(list)
    for seen in observations:
        if seen.check in ("replay", "input") and seen.owner is not None:
            groups[seen.check, seen.owner, -1 if seen.micro is None else seen.micro].append(seen)
    findings = [_judge_runs(group, topology) for _, group in sorted(groups.items())]
    return [finding for finding in findings if finding is not None]


def _judge_runs(group: Sequence[Observation], topology: Topology) -> _Finding | None:
    """Judge all runs of one rank's micro-batch: the owner's original, its witnesses' replays, everybody's repeats."""
    runs = {seen.rank: seen.runs for seen in group if seen.runs and not seen.error}
    values = {value for of_rank in runs.values() for value in of_rank}
    nonfinite_everywhere = values == {NONFINITE}
    if not values or (len(values) == 1 and not nonfinite_everywhere):
        return None
    check, owner = group[0].check, group[0].owner
    assert owner is not None
    if any(seen.place == "original" and seen.value == NONFINITE for seen in group):
        check = "numerics"  # the replay was forced by it, and only says whose it is
    what = f"the {'input' if check == 'input' else 'result'} of {_micro(group[0])} of rank {owner}"
    kind: Kind = "input" if check == "input" else "compute"
    if nonfinite_everywhere:  # rule 0
        if len(runs) == 1:
            reason = f"{what} is non-finite on rank {owner}, and no other rank could replay it"
            return _Finding(check, "numeric", reason, candidates=tuple(runs))
        return _Finding(
            check,
            "software",
            f"{what} is non-finite wherever it was run (ranks {_ranks(runs)}): software or data, not a device; the "
            "micro-batch was saved for reproduction",
            candidates=(owner,),
        )
    reference = _reference(runs, topology)
    if reference is None:
        return _nobody(check, kind, what, runs, topology)
    named: dict[int, Persistence] = {}
    for rank, of_rank in runs.items():
        supporters = {other for other in runs if set(runs[other]) == {reference}}
        nodes = {topology.node_of(other) for other in supporters} - {topology.node_of(rank)}
        if set(of_rank) != {reference} and len(nodes) >= 2:
            repeats = of_rank[1:]
            named[rank] = "transient" if repeats and set(repeats) == {reference} else "persistent"
            if NONFINITE in of_rank and kind == "compute":
                kind = "numeric"
    if not named:
        return _nobody(check, kind, what, runs, topology)
    wrong, persistence = next(iter(named.items()))
    others = [rank for rank in runs if set(runs[rank]) == {reference}]
    tail = (
        "its own repeats were right, so it was transient: a strike, not broken hardware"
        if persistence == "transient"
        else "its own repeats were wrong too, so it is persistent: take its device out"
    )
    reason = (
        f"{_who(wrong, topology)} alone differs in {what}: {_whos(others, topology)} agree bit for bit in every "
        f"repeat, and {tail}"
    )
    return _Finding(check, kind, reason, named, tuple(rank for rank in runs if rank not in named))


def _reference(runs: Mapping[int, Sequence[str]], topology: Topology) -> str | None:
    """The value that ranks on two nodes produced in every one of several runs; None where there is none, or two."""
    nodes: dict[str, set[str]] = defaultdict(set)
    for rank, of_rank in runs.items():
        if len(of_rank) > 1 and len(set(of_rank)) == 1 and of_rank[0] != NONFINITE:
            nodes[of_rank[0]].add(topology.node_of(rank))
    backed = [value for value, where in nodes.items() if len(where) >= 2]
    return backed[0] if len(backed) == 1 else None


def _nobody(
    check: CheckName, kind: Kind, what: str, runs: Mapping[int, Sequence[str]], topology: Topology
) -> _Finding:
    """Why nobody is named, as one sentence a person can act on."""
    involved = tuple(sorted(runs))
    # The owner's repeats alone tell whether it repeats; its original may differ from them by a single transient.
    restless = [rank for rank, of_rank in runs.items() if len(set(of_rank[1:])) > 1]
    if len({topology.node_of(rank) for rank in restless}) > 1 or (restless and len(runs) == 1):
        return _Finding(
            check,
            "software",
            f"{what} does not repeat on ranks {_ranks(restless)}: the workload is not deterministic there, or several "
            "devices fail at once; run it with deterministic_audits=True",
            candidates=involved,
        )
    if any(NONFINITE in of_rank for of_rank in runs.values()) and kind == "compute":
        kind = "numeric"
    nodes = topology.nodes_of(runs)
    reason = f"{what} differs between ranks {_ranks(runs)}, and no value was produced on two nodes in every repeat"
    if len(nodes) < 3:  # rule 6
        reason = f"{what} differs between ranks {_ranks(runs)} on {len(nodes)} node(s): three are needed to name anybody"
        healed = [rank for rank, own in runs.items() if len(own) > 1 and len(set(own[1:])) == 1 and own[0] != own[1]]
        if len(healed) == 1 and all(set(own[1:]) == set(runs[healed[0]][1:]) for own in runs.values()):
            reason += f"; all repeats agree, rank {healed[0]}'s too, which points to a transient there but proves nothing"
    return _Finding(check, kind, reason, candidates=involved)


# Numbers before and after the all-reduce: rules 0 and 3 --------------------------------------------------------------


def _judge_numerics(observations: Sequence[Observation], topology: Topology, history: History) -> list[_Finding]:
    numerics = [seen for seen in observations if seen.check == "numerics"]
    local = [seen.rank for seen in numerics if seen.place == "local" and seen.value == NONFINITE]
    if local:
        if any(seen.check == "replay" and seen.value == NONFINITE for seen in observations):
            return []  # the forced audit has judged them, see _judge_runs
        reason = f"non-finite local gradient, first on rank {local[0]}, and no replay could tell hardware from software"
        return [_Finding("numerics", "numeric", reason, candidates=tuple(local))]
    reduced = {seen.rank: seen.value for seen in numerics if seen.place == "reduced"}
    finding = _judge_reduced(reduced, topology, history) if reduced else None
    return [finding] if finding else []


def _judge_reduced(reduced: Mapping[int, str], topology: Topology, history: History) -> _Finding | None:
    values = Counter(reduced.values())
    if len(values) == 1:
        only = next(iter(values))
        if only == NONFINITE:
            return _nonfinite_sum(history, reduced)
        if only == ZERO:
            reason = (
                "the all-reduce returned zero in every element on every rank although the local gradients are not zero: "
                "suspect the network or the collective library"
            )
            return _Finding("numerics", "collective", reason, candidates=tuple(reduced))
        return None
    nonfinite = [rank for rank, value in reduced.items() if value == NONFINITE]
    finite = {value for value in values if value != NONFINITE}
    if len(nonfinite) == 1 and len(finite) == 1:
        rank = nonfinite[0]
        others = topology.nodes_of(other for other in reduced if other != rank)
        if len(set(others) - {topology.node_of(rank)}) >= 2:
            reason = (
                f"the reduced gradient is non-finite on {_who(rank, topology)} alone while every local gradient was "
                "finite and all other ranks hold the same finite result: suspect this device, or the link into it"
            )
            return _Finding("numerics", "collective", reason, {rank: "unknown"})
    if "numerics" not in history.compared_before:
        return _configuration("numerics", "reduced gradients", reduced)
    most = values.most_common(1)[0][1]
    common = [value for value, count in values.items() if count == most]
    holders = tuple(rank for rank, value in sorted(reduced.items()) if len(common) > 1 or value != common[0])
    reason = (
        f"the all-reduce ended differently on ranks {_ranks(holders)} than elsewhere; a ring forwards a corrupt chunk, so "
        "the majority can hold the wrong value and nobody is named"
    )
    return _Finding("numerics", "collective", reason, candidates=holders)


ZERO = "zero"
"""The value of a reduced gradient that is zero in every element although some local gradient is not."""


def _nonfinite_sum(history: History, reduced: Mapping[int, str]) -> _Finding:
    if history.sum_may_overflow:
        reason = (
            "finite local gradients are so large that their sum overflows on every rank: software or data (learning "
            "rate, loss scale, initialisation), not a device"
        )
        return _Finding("numerics", "software", reason)
    reason = (
        "the reduced gradient is non-finite on every rank although the local gradients were finite and far from "
        "overflow: the reduction itself went wrong, and no vote can say where"
    )
    return _Finding("numerics", "collective", reason, candidates=tuple(reduced))


# Replicas: rule 3 ----------------------------------------------------------------------------------------------------


def _judge_replicas(observations: Sequence[Observation], topology: Topology, history: History) -> list[_Finding]:
    values = {seen.rank: seen.value for seen in observations if seen.check == "replicas" and seen.value}
    counts = Counter(values.values())
    if len(counts) < 2:
        return []
    if "replicas" not in history.compared_before:
        return [_configuration("replicas", "parameters or optimizer state", values)]
    tensors = {seen.rank: seen.detail.get("differs", ()) for seen in observations if seen.check == "replicas"}
    value, count = counts.most_common(1)[0]
    outliers = [rank for rank, held in sorted(values.items()) if held != value]
    if 2 * count <= len(values):
        reason = (
            f"the replicas hold {len(counts)} different states and none has a majority (ranks {_ranks(outliers)} differ "
            f"from the most common): restart from the last verified checkpoint"
        )
        return [_Finding("replicas", "memory", reason, candidates=tuple(sorted(values)))]
    if not history.reductions_agreed:
        reason = (
            f"ranks {_ranks(outliers)} hold other weights than the majority, but the reduced gradients had already "
            "differed: a corrupt reduction can leave the wrong value with the majority"
        )
        return [_Finding("replicas", "collective", reason, candidates=tuple(outliers))]
    named: dict[int, Persistence] = {}
    supporters = topology.nodes_of(rank for rank, held in values.items() if held == value)
    for rank in outliers:
        if len(set(supporters) - {topology.node_of(rank)}) >= 2:
            named[rank] = "unknown"
    unnamed = tuple(rank for rank in outliers if rank not in named)
    who = _whos(named or outliers, topology)
    differs = ", ".join(list(tensors.get(outliers[0], ()))[:3]) or "a tensor"
    reason = f"{who} holds another value of {differs} than {count} of {len(values)} replicas: memory or update"
    if not named:
        reason += f"; the majority sits on {len(supporters)} node(s), and two others are needed to name anybody"
    return [_Finding("replicas", "memory", reason, named, unnamed)]


def _configuration(check: CheckName, what: str, values: Mapping[int, str]) -> _Finding:
    reason = (
        f"{what} differ between ranks at the very first comparison: this is configuration (a seed, an initialisation, a "
        "communication hook that does not average over all ranks), not a device"
    )
    return _Finding(check, "software", reason, candidates=tuple(sorted(values)))


# Words ---------------------------------------------------------------------------------------------------------------


def _micro(seen: Observation) -> str:
    return "the micro-batches" if seen.micro is None else f"micro-batch {seen.micro}"


def _who(rank: int, topology: Topology) -> str:
    return f"rank {rank} on node {topology.node_of(rank)} (device {topology.device_of(rank)})"


def _whos(ranks: Sequence[int] | Mapping[int, object], topology: Topology) -> str:
    return " and ".join(f"rank {rank} on node {topology.node_of(rank)}" for rank in ranks)


def _ranks(ranks: Sequence[int] | Mapping[int, object]) -> str:
    listed = sorted(ranks)
    return ", ".join(map(str, listed[:8])) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
