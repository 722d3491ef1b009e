"""From observations to a verdict: pure functions, no torch, no I/O.

Blame is the one thing this library must never get wrong, so everything that can name a rank is on this page, works on
plain data that is equal on every rank, and can be tested over every combination of faults. The rules are those of
DESIGN section 3 ("Attribution"); the comments give their numbers.

What no vote can solve: the *same* wrong bits produced on two different nodes outvote a correct third, unless another
micro-batch of the same step exposes them. Independent devices that are wrong in their own ways never agree, so this
takes one common cause, and it is stated in the docs.

Sources: replay by another node, a third node on disagreement and "a suspect must not judge itself" follow the published
description of silent-data-corruption checks for data-parallel training on SageMaker HyperPod (AWS, 2026); a majority of
replicas is not proof of a correct reduction because ring all-reduce forwards a corrupt chunk to later ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bitwitness.evidence import NONFINITE, CheckName, History, Kind, Observation, Persistence, Verdict
from bitwitness.topology import Topology


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
        observations: everything that was seen, in any order. Values are compared within one step only.
        topology: the placement of the ranks.
        history: what was known before.
        step: the step of detection.
    """
    by_step: dict[int, list[Observation]] = defaultdict(list)
    for seen in sorted(observations, key=_order):
        by_step[seen.step].append(seen)
    findings: list[_Finding] = []
    for of_step in by_step.values():
        replicas = _judge_replicas(of_step, topology, history)
        explained = {
            rank for finding in replicas for rank in finding.named
        }  # a weight that is NaN makes a gradient NaN
        findings += _judge_replays(of_step, topology, history)
        findings += _judge_numerics(of_step, topology, history, explained)
        findings += replicas
    if not findings:
        return Verdict("clean", step)
    return _verdict(findings, topology, history, step)


def _order(seen: Observation) -> tuple[object, ...]:
    """Any order will do, as long as it depends on nothing but what was seen."""
    where = (seen.step, seen.check, -1 if seen.owner is None else seen.owner, -1 if seen.micro is None else seen.micro)
    detail = repr(sorted(seen.detail.items(), key=repr)) if seen.detail else ""
    return (*where, seen.rank, seen.place, seen.value, seen.repeats, seen.error, detail)


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


@dataclass(frozen=True, slots=True)
class _Work:
    """What one rank computed for one micro-batch.

    `first` is the run that counted (empty: it is not known), `values` are all different results, and `backs` is the
    finite value that this rank produced in every one of several runs, else None.
    """

    first: str
    repeats: tuple[str, ...]
    values: frozenset[str]
    backs: str | None

    @classmethod
    def of(cls, first: str, repeats: Sequence[str]) -> _Work:
        runs = [value for value in (first, *repeats) if value]
        steady = len(runs) > 1 and len(set(runs)) == 1 and runs[0] != NONFINITE
        return cls(first, tuple(filter(None, repeats)), frozenset(runs), runs[0] if steady else None)


@dataclass(frozen=True, slots=True)
class _Case:
    """One micro-batch whose results are not all one finite value: the owner's run and those of its witnesses.

    `work` holds who can be blamed or believed. `seen` also holds what ranks produced before they failed: it shows that
    there is a disagreement, and blames and backs nobody.
    """

    check: CheckName
    owner: int
    micro: int | None
    is_input: bool
    work: Mapping[int, _Work]
    seen: Mapping[int, frozenset[str]]
    reference: str | None

    def differs_without(self, ranks: Collection[int]) -> bool:
        """Whether a disagreement is left when some ranks are taken out."""
        return len(frozenset[str]().union(*(values for rank, values in self.seen.items() if rank not in ranks))) > 1

    def accused(self) -> list[int]:
        """The ranks that differ from the reference in some run."""
        return [] if self.reference is None else [r for r, own in self.work.items() if own.values != {self.reference}]


def _judge_replays(observations: Sequence[Observation], topology: Topology, history: History) -> list[_Finding]:
    groups: dict[tuple[str, int, int], list[Observation]] = defaultdict(list)
    for seen in observations:
        if seen.check in ("replay", "input") and seen.owner is not None:
            groups[seen.check, seen.owner, -1 if seen.micro is None else seen.micro].append(seen)
    every = [case for _, group in sorted(groups.items()) if (case := _case(group, topology)) is not None]
    cases = [case for case in every if case.differs_without(())]
    findings = [_nonfinite_everywhere(case) for case in every if not case.differs_without(())]
    restless = {rank for case in cases for rank, own in case.work.items() if len(set(own.repeats)) > 1}
    if len(topology.nodes_of(restless)) > 1:
        return [_not_deterministic(cases, restless), *findings]
    misled = {rank for case in cases if case.is_input for rank in case.accused()}
    if misled and ("input" not in history.compared_before or len(topology.nodes_of(misled)) > 1):
        findings.append(_not_rebuilt([case for case in cases if case.is_input], misled))
        cases = [case for case in cases if not case.is_input]
    blame = _blame(cases, topology)
    named = {rank for rank, _ in blame}
    unsteady = {rank for case in cases for rank, own in case.work.items() if len(own.values) > 1}
    for (rank, is_input), against in blame.items():
        alone = not set(topology.nodes_of(unsteady)) - {topology.node_of(rank)}
        if not is_input and "replay" not in history.compared_before and _always_wrong(rank, against):
            findings.append(_wrong_from_the_start(rank, against, topology))
        else:
            findings.append(_name(rank, against, alone, topology))
    return findings + _nobody([case for case in cases if case.differs_without(named)], topology)


def _case(group: Sequence[Observation], topology: Topology) -> _Case | None:
    """Put one micro-batch's observations together; None where all of them are one finite value, or there is none."""
    values = {value for one in group for value in one.runs}
    if not values or (len(values) == 1 and NONFINITE not in values):
        return None
    seen: dict[int, frozenset[str]] = defaultdict(frozenset)
    parts: dict[int, dict[tuple[str, ...], Observation]] = defaultdict(dict)  # what arrives twice counts once
    for one in group:
        if one.runs:
            seen[one.rank] |= frozenset(one.runs)
            if not one.error:
                parts[one.rank][one.value, *one.repeats] = one
    work: dict[int, _Work] = {}
    for rank, (one, *others) in ((rank, several.values()) for rank, several in parts.items()):
        work[rank] = _Work.of(one.value, [*one.repeats, *(value for other in others for value in other.runs)])
    check, owner = group[0].check, group[0].owner
    assert owner is not None
    if any(one.check == "replay" and one.place == "original" and one.value == NONFINITE for one in group):
        check = "numerics"  # the replay was forced by it, and only says whose it is
    is_input = group[0].check == "input"
    return _Case(check, owner, group[0].micro, is_input, work, seen, _reference(work, topology))


def _reference(work: Mapping[int, _Work], topology: Topology) -> str | None:
    """The value that ranks on two nodes produced in every one of several runs; None where there is none, or two."""
    nodes: dict[str, set[str]] = defaultdict(set)
    for rank, own in work.items():
        if own.backs is not None:
            nodes[own.backs].add(topology.node_of(rank))
    backed = [value for value, where in nodes.items() if len(where) >= 2]
    return backed[0] if len(backed) == 1 else None


def _blame(cases: Sequence[_Case], topology: Topology) -> dict[tuple[int, bool], list[_Case]]:
    """Who is named, by which cases, for computing (False) and for rebuilding inputs (True).

    A rank that was itself wrong or did not repeat, in whatever case of this step, is no witness against another: where
    two devices fail in the same way they would otherwise outvote a healthy one in the case that the three share, while
    other cases expose them.
    """
    doubtful = {rank for case in cases for rank in case.accused()}
    doubtful |= {rank for case in cases for rank, own in case.work.items() if len(own.values) > 1}
    blame: dict[tuple[int, bool], list[_Case]] = defaultdict(list)
    for case in cases:
        backers = [rank for rank, own in case.work.items() if own.backs == case.reference and rank not in doubtful]
        for rank in case.accused():
            if len(_independent(rank, backers, topology)) >= 2:
                blame[rank, case.is_input].append(case)
    return dict(sorted(blame.items()))


def _independent(rank: int, backers: Iterable[int], topology: Topology) -> set[str]:
    """The nodes, other than the rank's own, of those backers whose device and software would give the same bits."""
    alike = (other for other in backers if _make(other, topology) == _make(rank, topology))
    return {topology.node_of(other) for other in alike} - {topology.node_of(rank)}


def _make(rank: int, topology: Topology) -> tuple[str, str]:
    """What must be equal for two ranks to compute the same bits."""
    return topology.placements[rank].model, topology.placements[rank].software


def _name(rank: int, cases: Sequence[_Case], alone: bool, topology: Topology) -> _Finding:
    """Name a rank for what it did in some cases; `alone`: no other node had a result that changed from run to run."""
    persistence, advice = _persistence(
        [[value == case.reference for value in case.work[rank].repeats] for case in cases], alone
    )
    kind: Kind = "numeric" if any(NONFINITE in case.work[rank].values for case in cases) else "compute"
    if cases[0].is_input:
        kind, advice = "input", advice + " (a batch is rebuilt from storage and host memory: check these first)"
    backers = sorted({other for case in cases for other, own in case.work.items() if own.backs == case.reference})
    reason = (
        f"{_who(rank, topology)} alone differs in {_what(cases)}: {_whos(backers, topology)} agree bit for bit in every "
        f"repeat; {advice}"
    )
    check = next((case.check for case in cases if case.check == "numerics"), cases[0].check)
    return _Finding(check, kind, reason, {rank: persistence})


def _always_wrong(rank: int, cases: Sequence[_Case]) -> bool:
    """Whether a rank gets one and the same wrong result in all that it does, as a program would that treats it apart."""
    return all(len(case.work[rank].values) == 1 for case in cases)


def _wrong_from_the_start(rank: int, cases: Sequence[_Case], topology: Topology) -> _Finding:
    """The first comparison cannot tell a device from a program that does something else on one rank."""
    reason = (
        f"{_who(rank, topology)} gets another result in every run of {_what(cases)}, and did so at the very first comparison: "
        "code or settings that depend on the rank, or a device that was bad from the start. Put another node in its place: "
        "what stays with the rank is software, what goes with the node is its device"
    )
    return _Finding(cases[0].check, "software", reason, candidates=(rank,))


def _not_rebuilt(cases: Sequence[_Case], misled: Collection[int]) -> _Finding:
    reason = (
        f"{_what(cases)} is not what ranks {_ranks(misled)} were given, and either no comparison of inputs had passed before, or "
        "it is so on several nodes at once: rebuild_batch does not make the batches that the loop is fed (epoch, shuffling, "
        "augmentation), which is software"
    )
    return _Finding(cases[0].check, "software", reason, candidates=tuple(sorted(misled)))


def _persistence(right: Sequence[Sequence[bool]], alone: bool) -> tuple[Persistence, str]:
    """What the repeats in each case (right or wrong) make of the rank, and what to do about it."""
    if any(case and not any(case) for case in right) or (alone and not all(map(all, right))):
        return "persistent", "its repeats were wrong, so it is persistent: take it out of the job"
    if not all(map(all, right)):
        return (
            "unknown",
            "it is wrong now and then, and another node does not repeat either: audit every step to tell why",
        )
    if any(right):
        return "transient", "its repeats were right, so it was transient: a strike, not broken hardware"
    return "unknown", "it was not repeated: audit every step to tell transient from persistent"


def _nonfinite_everywhere(case: _Case) -> _Finding:
    """Rule 0."""
    if len(case.seen) == 1:
        reason = f"{_what([case])} is non-finite on rank {_ranks(case.seen)}, and no other rank could replay it"
        return _Finding(case.check, "numeric", reason, candidates=tuple(case.seen))
    reason = (
        f"{_what([case])} is non-finite wherever it was run (ranks {_ranks(case.seen)}): software or data, not a device; "
        "look at that batch, the learning rate and the loss scale"
    )
    return _Finding(case.check, "software", reason, candidates=(case.owner,))


def _not_deterministic(cases: Sequence[_Case], restless: Collection[int]) -> _Finding:
    involved = {rank for case in cases for rank in case.accused()} | set(restless)
    reason = (
        f"{_counted(restless)} on several nodes get other bits when they repeat their own work ({_what(cases)}): the "
        "workload is not deterministic, or several devices fail at once; deterministic_audits=True tells these apart"
    )
    return _Finding(cases[0].check, "software", reason, candidates=tuple(sorted(involved)))


def _nobody(cases: Sequence[_Case], topology: Topology) -> list[_Finding]:
    """The disagreements in which nobody is named, those with the same reason together."""
    alike: dict[tuple[CheckName, bool, Kind, str], list[_Case]] = defaultdict(list)
    everybody = {rank for case in cases for rank in case.accused()} == set(range(topology.world_size))
    for case in cases:
        alike[case.check, case.is_input, *_why_nobody(case, everybody, topology)].append(case)
    findings = []
    for (check, _, kind, why), group in alike.items():
        involved = tuple(sorted({rank for case in group for rank in case.seen}))
        differ = "differs" if len(group) == 1 else "differ"
        reason = f"{_what(group)} {differ} between runs on {_counted(involved)}, {why}"
        findings.append(_Finding(check, kind, reason, candidates=involved))
    return findings


def _why_nobody(case: _Case, everybody: bool, topology: Topology) -> tuple[Kind, str]:
    """Of what kind a disagreement is, and the end of a sentence a person can act on; `everybody`: all ranks are accused."""
    involved = tuple(case.seen)
    nodes = len(topology.nodes_of(involved))
    if len(involved) == 1 and case.is_input:
        return "input", (
            "for it is not what it was when its forward began: the loop or loss_fn changes it in place, or the memory of that rank "
            "does; only a batch made anew (rebuild_batch) could tell"
        )
    if len(involved) == 1:
        return "software", "and no other rank could replay it: make it deterministic, or run on three nodes"
    if everybody:
        return "software", (
            "and so does everybody's: loss_fn or the loop depends on something that changes between the forward and the audit (a "
            "counter, a schedule, a mode)"
        )
    if len({_make(rank, topology) for rank in involved}) > 1:
        return "software", "whose device models or software differ: they need not agree bit for bit; make them alike"
    kind: Kind = "input" if case.is_input else "compute"
    if any(NONFINITE in values for values in case.seen.values()) and not case.is_input:
        kind = "numeric"
    if nodes < 3:  # rule 6
        where = f"on {nodes} node{'s' * (nodes > 1)}: three are needed to name anybody"
        return kind, f"{where}; run on three, or swap one node and audit again{_healed(case.work)}"
    if case.reference is None:
        return kind, "and no value was produced on two nodes in every repeat: restart, and audit every step"
    return (
        kind,
        "and too few ranks were right in all that they did in this step to testify: restart, and audit every step",
    )


def _healed(work: Mapping[int, _Work]) -> str:
    """What repeats on the same device say where there is no third opinion: a hint, never a name."""
    healed = [rank for rank, own in work.items() if own.first and len({*own.repeats} - {own.first}) == 1]
    if len(healed) != 1 or len({own.repeats for own in work.values()}) != 1:
        return ""
    return f" (all repeats agree, rank {healed[0]}'s too: perhaps a transient there, which proves nothing)"


# Numbers before and after the all-reduce: rules 0 and 3 --------------------------------------------------------------


def _judge_numerics(
    observations: Sequence[Observation], topology: Topology, history: History, explained: Collection[int]
) -> list[_Finding]:
    """Judge numbers before and after the all-reduce; `explained`: ranks on which something else is known to be wrong."""
    numerics = [seen for seen in observations if seen.check == "numerics"]
    local = {seen.rank for seen in numerics if seen.place == "local" and NONFINITE in seen.runs}
    if local:  # the reduced gradients are then non-finite of necessity
        audited = {seen.owner for seen in observations if seen.check == "replay" and NONFINITE in seen.runs}
        silent = tuple(sorted(local - audited - set(explained)))  # the others are judged by the audit that they forced
        reason = (
            f"the local gradient is non-finite on ranks {_ranks(silent)}, and no replay could tell hardware from software: "
            "look at that batch and the loss scale, and audit every step"
        )
        return [_Finding("numerics", "numeric", reason, candidates=silent)] if silent else []
    reduced = _values(seen for seen in numerics if seen.place == "reduced" and not seen.error)
    finding = _judge_reduced(reduced, topology, history) if reduced else None
    return [finding] if finding else []


def _values(observations: Iterable[Observation]) -> dict[int, str]:
    """What each rank holds; two values of one rank, e.g. of two kinds of state, count as one that is made of both."""
    held: dict[int, set[str]] = defaultdict(set)
    for seen in observations:
        if seen.value:
            held[seen.rank].add(seen.value)
    return {rank: NONFINITE if NONFINITE in own else "+".join(sorted(own)) for rank, own in sorted(held.items())}


def _judge_reduced(reduced: Mapping[int, str], topology: Topology, history: History) -> _Finding | None:
    values = Counter(reduced.values())
    if len(values) == 1:
        return _all_alike(next(iter(values)), history, reduced)
    if "numerics" not in history.compared_before:
        return _configuration("numerics", "reduced gradients", reduced)
    nonfinite = [rank for rank, value in reduced.items() if value == NONFINITE]
    # A ring hands the NaN on: only where every other rank is known to hold the same finite value is it alone.
    if len(nonfinite) == 1 and len(values) == 2 and len(reduced) == topology.world_size:
        rank = nonfinite[0]
        if len(_independent(rank, reduced, topology)) >= 2:
            reason = (
                f"the reduced gradient is non-finite on {_who(rank, topology)} alone while every local gradient was "
                "finite and all other ranks hold the same finite result: suspect this device, or the link into it"
            )
            return _Finding("numerics", "collective", reason, {rank: "unknown"})
    most = values.most_common(1)[0][1]
    common = [value for value, count in values.items() if count == most]
    holders = tuple(rank for rank, value in reduced.items() if len(common) > 1 or value != common[0])
    reason = (
        f"the all-reduce ended differently on ranks {_ranks(holders)} than elsewhere; a ring forwards a corrupt chunk, so "
        "the majority can hold the wrong value and nobody is named: look at the links between these ranks"
    )
    return _Finding("numerics", "collective", reason, candidates=holders)


ZERO = "zero"
"""The value of a reduced gradient that is zero in every element although some local gradient is not."""


def _all_alike(value: str, history: History, reduced: Mapping[int, str]) -> _Finding | None:
    """Agreement on NaN or on all zeros is never health."""
    kind: Kind = "collective"
    if value == ZERO:
        reason = (
            "the all-reduce returned zero in every element on every rank although the local gradients are not zero: "
            "suspect the network or the collective library"
        )
    elif value != NONFINITE:
        return None
    elif history.sum_may_overflow:
        kind = "software"
        reason = (
            "finite local gradients are so large that their sum overflows on every rank: software or data (learning "
            "rate, loss scale, initialisation), not a device"
        )
    else:
        reason = (
            "the reduced gradient is non-finite on every rank although the local gradients were finite and far from "
            "overflow: the reduction itself went wrong, and no vote can say where; suspect the network"
        )
    return _Finding("numerics", kind, reason, candidates=() if kind == "software" else tuple(reduced))


# Replicas: rule 3 ----------------------------------------------------------------------------------------------------


def _judge_replicas(observations: Sequence[Observation], topology: Topology, history: History) -> list[_Finding]:
    seen = [one for one in observations if one.check == "replicas"]
    values = _values(seen)
    counts = Counter(values.values())
    if len(counts) < 2:
        return []
    errors = {one.rank: one.error for one in seen if one.error}
    if errors:
        rank, error = min(errors.items())
        reason = f"the replicas differ, and on ranks {_ranks(errors)} they could not be compared: {error} (rank {rank})"
        return [_Finding("replicas", "software", reason, candidates=tuple(values))]
    if "replicas" not in history.compared_before:
        return [_configuration("replicas", "parameters or optimizer state", values)]
    value, count = counts.most_common(1)[0]
    outliers = tuple(rank for rank, held in values.items() if held != value)
    if 2 * count <= topology.world_size or value == NONFINITE:
        kind, advice = _no_majority(counts, values)
        reason = (
            f"the replicas hold {len(counts)} different states of {_differing(seen, outliers)}, and no finite one is known to be "
            f"held by a majority of {topology.world_size}: {advice}"
        )
        return [_Finding("replicas", kind, reason, candidates=tuple(values))]
    reduced = {one.value for one in observations if one.check == "numerics" and one.place == "reduced"}
    if not history.reductions_agreed or len(reduced) > 1:
        reason = (
            f"ranks {_ranks(outliers)} hold other weights than the majority, but the reduced gradients had already "
            "differed: a corrupt reduction can leave the wrong value with the majority; suspect the network"
        )
        return [_Finding("replicas", "collective", reason, candidates=outliers)]
    holders = [rank for rank, held in values.items() if held == value]
    return [_outliers(outliers, holders, _differing(seen, outliers), topology)]


def _no_majority(counts: Mapping[str, int], values: Mapping[int, str]) -> tuple[Kind, str]:
    if len(counts) == len(values) > 2:
        return "software", (
            "every rank holds its own, as where a layer updates itself from its rank's data (Embedding(max_norm=...)), or a state "
            "depends on the rank; such state cannot be compared"
        )
    return "memory", "restart from the last verified checkpoint, and audit every step"


def _outliers(outliers: Sequence[int], holders: Sequence[int], tensors: str, topology: Topology) -> _Finding:
    """Name those outliers that the majority, on two nodes other than theirs, speaks against."""
    named: dict[int, Persistence] = {
        rank: "unknown" for rank in outliers if len(_independent(rank, holders, topology)) >= 2
    }
    reason = (
        f"{_whos(list(named) or outliers, topology)} does not hold the value of {tensors} that {len(holders)} of "
        f"{topology.world_size} replicas hold, although all reduced gradients agreed: memory or update"
    )
    if not named:
        reason += ", and two like nodes other than its own must hold the majority's value to name anybody"
    return _Finding("replicas", "memory", reason, named, tuple(rank for rank in outliers if rank not in named))


def _differing(seen: Sequence[Observation], outliers: Sequence[int]) -> str:
    """The names of the first tensors in which the outliers differ, as their observations tell them."""
    names: list[str] = []
    for one in seen:
        told = one.detail.get("differs", ()) if one.rank in outliers else ()
        names += [str(name) for name in told] if isinstance(told, list | tuple) else []
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - 3} more" if len(distinct) > 3 else ""
    return ", ".join(distinct[:3]) + more if distinct else "some tensor"


def _configuration(check: CheckName, what: str, values: Mapping[int, str]) -> _Finding:
    reason = (
        f"{what} differ between ranks at the very first comparison: this is configuration (a seed, an initialisation, a "
        "communication hook that does not average over all ranks), not a device"
    )
    return _Finding(check, "software", reason, candidates=tuple(sorted(values)))


# Words ---------------------------------------------------------------------------------------------------------------


def _what(cases: Sequence[_Case]) -> str:
    noun = "rebuilt input" if cases[0].is_input else "result"
    if len(cases) == 1:
        micro = "the micro-batches" if cases[0].micro is None else f"micro-batch {cases[0].micro}"
        return f"the {noun} of {micro} of rank {cases[0].owner}"
    return f"the {noun}s of the micro-batches of ranks {_ranks({case.owner for case in cases})}"


def _who(rank: int, topology: Topology) -> str:
    return f"rank {rank} on node {topology.node_of(rank)} (device {topology.device_of(rank)})"


def _whos(ranks: Collection[int], topology: Topology) -> str:
    listed = [f"rank {rank} on node {topology.node_of(rank)}" for rank in sorted(ranks)]
    return " and ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def _counted(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_ranks(ranks)}"


def _ranks(ranks: Collection[int]) -> str:
    listed = sorted(ranks)
    return ", ".join(map(str, listed[:8])) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
