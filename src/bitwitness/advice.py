"""From an incident to what a person should do next.

Whoever reads an incident at three in the morning is told that rank 4711 is suspect, and must not have to know how the
verdict came about to do the right thing: take out a node that is broken, leave alone one that had an accident, and drain
nothing where nobody is named. Pure: what was found in, sentences and command lines out. It lies below the command line, the console and
the reports, because all of them must advise the same.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitwitness.topology import Placement


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do, and command lines that do it, if there are any."""

    text: str
    commands: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {"text": self.text, "commands": list(self.commands)}


@dataclass(frozen=True, slots=True)
class Matter:
    """What advice depends on: a verdict, and where its ranks are.

    Attributes:
        id: of the incident.
        status, step, ranks, candidates, kind, persistence, persistences, window, check: as in `evidence.Verdict`.
        places: of the ranks involved, as far as known; a rank without one is left out of what is to be done about nodes.
        nodes: how many nodes the job has; 0 where that is not known.
        on_detection: of the policy; "" where it is not known.
        saved: absolute paths of the micro-batches that were saved beside it.
    """

    id: str
    status: str
    step: int
    ranks: tuple[int, ...]
    candidates: tuple[int, ...]
    kind: str
    persistence: str
    persistences: tuple[str, ...]
    window: tuple[int, int]
    check: str
    places: Mapping[int, Placement]
    nodes: int
    on_detection: str
    saved: tuple[str, ...] = ()

    def nodes_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """The nodes of some ranks, each once, in order of their lowest rank."""
        wanted = {self.places[rank].node for rank in ranks if rank in self.places}
        return tuple(dict.fromkeys(place.node for _, place in sorted(self.places.items()) if place.node in wanted))

    def pods_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Their pods, each once, in order of rank."""
        placed = [self.places[rank] for rank in sorted(ranks) if rank in self.places]
        return tuple(dict.fromkeys(place.pod for place in placed if place.pod))


def advise(matter: Matter) -> list[Advice]:
    """What to do, most urgent first."""
    if matter.status == "clean":
        return [Advice("Nothing: the verdict is clean.")]
    steps = list(_about_ranks(matter)) if matter.status == "attributed" else list(_about_nobody(matter))
    return [*steps, *_restart(matter), *_evidence(matter)]


# Somebody is named ---------------------------------------------------------------------------------------------------


def _about_ranks(matter: Matter) -> Iterator[Advice]:
    each = matter.persistences or (matter.persistence,) * len(matter.ranks)
    lost = [rank for rank in matter.ranks if rank not in matter.places]
    if lost:
        yield Advice(f"Find out where {listed('rank', lost)} ran: it is named, and its place is not on record.")
    for persistence in ("persistent", "transient", "unknown"):
        ranks = [
            rank
            for rank, found in zip(matter.ranks, each, strict=False)
            if found == persistence and rank in matter.places
        ]
        if ranks:
            yield from _about(ranks, persistence, matter)
    if matter.kind == "input":
        yield Advice(
            "What was wrong is the batch, not the arithmetic: check the storage and the host memory of that node first; the "
            "accelerator may be healthy."
        )
    if matter.kind == "collective":
        yield Advice(
            "The result of the all-reduce was wrong there alone: look at the link into that device (cable, port, NIC, NVLink "
            "error counters) before the device."
        )


def _about(ranks: Sequence[int], persistence: str, matter: Matter) -> Iterator[Advice]:
    nodes = matter.nodes_of(ranks)
    which = f"{listed('rank', ranks)} on {listed('node', nodes)}"
    devices = listed("device", list(dict.fromkeys(matter.places[rank].device for rank in ranks)))
    shared = [node for node in nodes if sum(matter.places[rank].node == node for rank in ranks) > 1]
    unknown = [rank for rank in ranks if not matter.places[rank].node_is_known]
    if unknown:
        pods = matter.pods_of(unknown)
        yield Advice(
            f"Find out which node ran {listed('pod', pods)}, before the cluster forgets it: the pod was not told the name of its node "
            "(NODE_NAME), so it stands in its place here. No node can be called that.",
            tuple(line for pod in pods for line in _node_of(pod)),
        )
    if persistence == "persistent":
        known = matter.nodes_of(rank for rank in ranks if rank not in unknown)
        yield Advice(
            f"Take {listed('node', nodes)} out of service now, so that no job starts there: {which} ({devices}) gave wrong "
            f"results again when it repeated its work.{' On Slurm or Kubernetes:' if known else ''}",
            tuple(line for node in known for line in _drain(node, matter)),
        )
        yield Advice(
            "Diagnose the idle node before anybody gets it back; keep this incident with the ticket.",
            _diagnose(ranks, matter),
        )
        if known:
            yield Advice(
                "For its vendor: see how it is wrong, beside two healthy nodes of its kind; started on all three, with DIR on storage that they "
                "share, it writes a report and the smallest operation that shows it:",
                tuple(_compare(node) for node in known),
            )
    elif persistence == "transient":
        yield Advice(
            f"Leave {listed('node', nodes)} in service: {which} was right when it repeated its work. One transient is a strike, "
            "not broken hardware, and a rare race in software looks the same."
        )
        yield Advice(
            f"Note the strike against {devices}. If strikes gather on one device, take it out; if they are scattered over "
            "devices, suspect software."
        )
    else:
        yield Advice(
            f"Leave {listed('node', nodes)} in service for now, under suspicion: {which} ({devices}) was wrong, and whether it "
            "would be again is not known. A second incident on the same device: take it out. Look at its error counters:",
            _counters(ranks, matter),
        )
    if shared:
        yield Advice(
            f"Several ranks of {listed('node', shared)} are named: suspect what they share (host memory, power, cooling)."
        )


def _drain(node: str, matter: Matter) -> tuple[str, str]:
    reason = shlex.quote(f"bitwitness {matter.id}")
    # `--` and `=`: a name that begins with a dash is no option
    return (
        f"scontrol update {shlex.quote(f'nodename={node}')} state=drain reason={reason}",
        f"kubectl cordon -- {shlex.quote(node)}",
    )


def _node_of(pod: str) -> tuple[str, str]:
    """What tells the node of a pod: the pod while it is there, and for about an hour after it the event of its being placed."""
    space, _, name = pod.rpartition("/")
    where = f" {shlex.quote(f'--namespace={space}')}" if space else ""
    placed = shlex.quote(f"--field-selector=reason=Scheduled,involvedObject.name={name}")
    return f"kubectl get pod{where} --output=wide -- {shlex.quote(name)}", f"kubectl get events{where} {placed}"


def _diagnose(ranks: Sequence[int], matter: Matter) -> tuple[str, ...]:
    return ("dcgmi diag -r 4",) if _have_gpus(ranks, matter) else ()


def _compare(node: str) -> str:
    meeting = "--nnodes 3 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HEALTHY:29500"
    return f"torchrun {meeting} -m bitwitness compare --suspect {shlex.quote(node)} --out DIR --bundle DIR/evidence"


def _counters(ranks: Sequence[int], matter: Matter) -> tuple[str, ...]:
    kernel = "dmesg --ctime | grep --ignore-case --extended-regexp 'xid|edac|mce|hardware error'"
    gpu = ("nvidia-smi --query --display=ECC,ROW_REMAPPER",) if _have_gpus(ranks, matter) else ()
    return (*gpu, kernel)


def _have_gpus(ranks: Sequence[int], matter: Matter) -> bool:
    return any(matter.places[rank].device.startswith(("GPU-", "MIG-")) for rank in ranks)


# Nobody is named -----------------------------------------------------------------------------------------------------


def _about_nobody(matter: Matter) -> Iterator[Advice]:
    involved = f" {listed('Rank', matter.candidates)} took part, without blame." if matter.candidates else ""
    yield Advice(f"Drain nothing: the evidence names nobody.{involved}")
    if matter.kind == "software":
        yield Advice(
            "Look for the cause in software or data: that batch, the learning rate, the loss scale, code that does not repeat. "
            "Hardware is the unlikely explanation, and a restart will probably end here again."
        )
        return
    if matter.kind == "collective":
        yield Advice("Look at the network between these ranks (links, NICs, switches) and at the collective library.")
    if matter.kind == "input":
        yield Advice(
            "Look at the data: what the loader reads, and whether rebuild_batch makes the same batch every time."
        )
    if 0 < matter.nodes < 3:
        yield Advice(
            f"Run on at least three nodes to have somebody named: there were {matter.nodes}, and one opinion against "
            "another names nobody. Or swap one node for another and see whether it happens again."
        )
    yield Advice(
        "If the restarted job, auditing every step, ends in an unattributed incident again, do not restart it a third time: a "
        "person must look, with both incidents side by side."
    )


# Going on ------------------------------------------------------------------------------------------------------------


def _restart(matter: Matter) -> Iterator[Advice]:
    if matter.on_detection == "record":
        yield Advice(
            f'The job was not stopped (on_detection="record"): its weights since step {matter.step} may hold the damage. '
            "Decide whether to stop it now."
        )
    elif matter.check in ("replicas", "update"):
        yield Advice(
            "Save nothing from this job: the weights or the optimizer state themselves differ between replicas."
        )
    elif not matter.on_detection:
        yield Advice(
            f'Find out whether the job was stopped. Unless its policy is on_detection="record", the update of step {matter.step} was not '
            "made; where it is, the weights since may hold the damage."
        )
    else:
        yield Advice(f"The update of step {matter.step} was not made: the job stopped before it, on every rank.")
    last = matter.window[0]
    if last < 0:
        point = f"The check {matter.check} had not passed before in this run: restart from a checkpoint older than the run, or from the beginning"
    else:
        point = (
            f"Restart from the newest checkpoint saved at the end of step {last} or earlier: what went wrong did so after "
            f"step {last} and up to step {matter.window[1]}; later checkpoints may hold it"
        )
    yield Advice(f"{point}. {_where(matter)}")


def _where(matter: Matter) -> str:
    if matter.kind == "software":
        return "Mend the cause first."
    if matter.status == "attributed" and "persistent" in (matter.persistence, *matter.persistences):
        return "Use other nodes in place of those taken out."
    return "The same nodes will do; check every step for a while: Policy.every_step()."


def _evidence(matter: Matter) -> Iterator[Advice]:
    if matter.saved:
        yield Advice(
            "To run the failing micro-batch again: its batch, random state and buffers are saved (load the weights from a "
            "checkpoint). The file is a pickle, so open only what your own job wrote:",
            tuple(_load(file) for file in matter.saved),
        )


def _load(file: str) -> str:
    code = f"import torch; print(torch.load({json.dumps(file)}, weights_only=False))"
    return f"python -c {shlex.quote(code)}"


def listed(noun: str, items: Sequence[object], most: int = 8) -> str:
    """`rank 3`, `ranks 3, 4 and 5`; at most so many, and how many more there are."""
    words = [str(item) for item in items[:most]]
    if len(items) > most:
        words.append(f"{len(items) - most} more")
    joined = " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
    return f"{noun}{'s' if len(items) > 1 else ''} {joined}" if noun else joined
