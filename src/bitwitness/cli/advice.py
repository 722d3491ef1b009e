"""From an incident to what a person should do next.

Whoever reads an incident at three in the morning is told that rank 4711 is suspect, and must not have to know how the
verdict came about to do the right thing: take out a node that is broken, leave alone one that had an accident, and drain
nothing where nobody is named. Pure: the incident in, sentences and command lines out.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwitness.evidence import Persistence, Verdict
from bitwitness.runfiles import Incident


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do, and command lines that do it, if there are any."""

    text: str
    commands: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {"text": self.text, "commands": list(self.commands)}


def next_steps(incident: Incident) -> list[Advice]:
    """What to do, most urgent first."""
    verdict = incident.verdict
    if verdict.status == "clean":
        return [Advice("Nothing: the verdict is clean.")]
    steps = list(_about_ranks(incident)) if verdict.status == "attributed" else list(_about_nobody(incident))
    return [*steps, *_restart(incident), *_evidence(incident)]


# Somebody is named ---------------------------------------------------------------------------------------------------


def _about_ranks(incident: Incident) -> Iterator[Advice]:
    verdict = incident.verdict
    each = verdict.persistences or (verdict.persistence,) * len(verdict.ranks)
    for persistence in ("persistent", "transient", "unknown"):
        ranks = [rank for rank, found in zip(verdict.ranks, each, strict=False) if found == persistence]
        if ranks:
            yield from _about(ranks, persistence, incident)
    if verdict.kind == "input":
        yield Advice(
            "What was wrong is the batch, not the arithmetic: check the storage and the host memory of that node first; the "
            "accelerator may be healthy."
        )
    if verdict.kind == "collective":
        yield Advice(
            "The result of the all-reduce was wrong there alone: look at the link into that device (cable, port, NIC, NVLink "
            "error counters) before the device."
        )


def _about(ranks: Sequence[int], persistence: Persistence, incident: Incident) -> Iterator[Advice]:
    topology = incident.topology
    nodes = topology.nodes_of(ranks)
    which = f"{_list('rank', ranks)} on {_list('node', nodes)}"
    devices = _list("device", list(dict.fromkeys(topology.device_of(rank) for rank in ranks)))
    shared = [node for node in nodes if sum(topology.node_of(rank) == node for rank in ranks) > 1]
    unknown = [rank for rank in ranks if not topology.placements[rank].node_is_known]
    if unknown:
        pods = topology.pods_of(unknown)
        yield Advice(
            f"Find out which node ran {_list('pod', pods)}, before the cluster forgets it: the pod was not told the name of its node "
            "(NODE_NAME), so it stands in its place here. No node can be called that.",
            tuple(line for pod in pods for line in _node_of(pod)),
        )
    if persistence == "persistent":
        known = topology.nodes_of(rank for rank in ranks if rank not in unknown)
        yield Advice(
            f"Take {_list('node', nodes)} out of service now, so that no job starts there: {which} ({devices}) gave wrong "
            f"results again when it repeated its work.{' On Slurm or Kubernetes:' if known else ''}",
            tuple(line for node in known for line in _drain(node, incident)),
        )
        yield Advice(
            "Diagnose the idle node before anybody gets it back; keep this incident with the ticket.",
            _diagnose(ranks, incident),
        )
    elif persistence == "transient":
        yield Advice(
            f"Leave {_list('node', nodes)} in service: {which} was right when it repeated its work. One transient is a strike, "
            "not broken hardware, and a rare race in software looks the same."
        )
        yield Advice(
            f"Note the strike against {devices}. If strikes gather on one device, take it out; if they are scattered over "
            "devices, suspect software."
        )
    else:
        yield Advice(
            f"Leave {_list('node', nodes)} in service for now, under suspicion: {which} ({devices}) was wrong, and whether it "
            "would be again is not known. A second incident on the same device: take it out. Look at its error counters:",
            _counters(ranks, incident),
        )
    if shared:
        yield Advice(
            f"Several ranks of {_list('node', shared)} are named: suspect what they share (host memory, power, cooling)."
        )


def _drain(node: str, incident: Incident) -> tuple[str, str]:
    reason = shlex.quote(f"bitwitness {incident.path.name}")
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


def _diagnose(ranks: Sequence[int], incident: Incident) -> tuple[str, ...]:
    return ("dcgmi diag -r 4",) if _have_gpus(ranks, incident) else ()


def _counters(ranks: Sequence[int], incident: Incident) -> tuple[str, ...]:
    kernel = "dmesg --ctime | grep --ignore-case --extended-regexp 'xid|edac|mce|hardware error'"
    gpu = ("nvidia-smi --query --display=ECC,ROW_REMAPPER",) if _have_gpus(ranks, incident) else ()
    return (*gpu, kernel)


def _have_gpus(ranks: Sequence[int], incident: Incident) -> bool:
    return any(incident.topology.device_of(rank).startswith(("GPU-", "MIG-")) for rank in ranks)


# Nobody is named -----------------------------------------------------------------------------------------------------


def _about_nobody(incident: Incident) -> Iterator[Advice]:
    verdict, topology = incident.verdict, incident.topology
    involved = f" {_list('Rank', verdict.candidates)} took part, without blame." if verdict.candidates else ""
    yield Advice(f"Drain nothing: the evidence names nobody.{involved}")
    if verdict.kind == "software":
        yield Advice(
            "Look for the cause in software or data: that batch, the learning rate, the loss scale, code that does not repeat. "
            "Hardware is the unlikely explanation, and a restart will probably end here again."
        )
        return
    if verdict.kind == "collective":
        yield Advice("Look at the network between these ranks (links, NICs, switches) and at the collective library.")
    if verdict.kind == "input":
        yield Advice(
            "Look at the data: what the loader reads, and whether rebuild_batch makes the same batch every time."
        )
    if len(topology.nodes) < 3:
        yield Advice(
            f"Run on at least three nodes to have somebody named: there were {len(topology.nodes)}, and one opinion against "
            "another names nobody. Or swap one node for another and see whether it happens again."
        )
    yield Advice(
        "If the restarted job, auditing every step, ends in an unattributed incident again, do not restart it a third time: a "
        "person must look, with both incidents side by side."
    )


# Going on ------------------------------------------------------------------------------------------------------------


def _restart(incident: Incident) -> Iterator[Advice]:
    verdict = incident.verdict
    if incident.record.get("policy", {}).get("on_detection") == "record":
        yield Advice(
            f'The job was not stopped (on_detection="record"): its weights since step {verdict.step} may hold the damage. '
            "Decide whether to stop it now."
        )
    elif verdict.check in ("replicas", "update"):
        yield Advice(
            "Save nothing from this job: the weights or the optimizer state themselves differ between replicas."
        )
    else:
        yield Advice(f"The update of step {verdict.step} was not made: the job stopped before it, on every rank.")
    last = verdict.window[0]
    if last < 0:
        point = f"The check {verdict.check} had not passed before in this run: restart from a checkpoint older than the run, or from the beginning"
    else:
        point = (
            f"Restart from the newest checkpoint saved at the end of step {last} or earlier: what went wrong did so after "
            f"step {last} and up to step {verdict.window[1]}; later checkpoints may hold it"
        )
    yield Advice(f"{point}. {_where(verdict)}")


def _where(verdict: Verdict) -> str:
    if verdict.kind == "software":
        return "Mend the cause first."
    if verdict.status == "attributed" and "persistent" in (verdict.persistence, *verdict.persistences):
        return "Use other nodes in place of those taken out."
    return "The same nodes will do; check every step for a while: Policy.every_step()."


def _evidence(incident: Incident) -> Iterator[Advice]:
    saved = saved_micro_batches(incident)
    if saved:
        yield Advice(
            "To run the failing micro-batch again: its batch, random state and buffers are saved (load the weights from a "
            "checkpoint). The file is a pickle, so open only what your own job wrote:",
            tuple(_load(file) for file in saved),
        )


def saved_micro_batches(incident: Incident) -> list[Path]:
    """The files from which the owners' micro-batches can be run again."""
    return sorted(incident.path.glob("micro-batches-rank-*.pt"))


def _load(file: Path) -> str:
    code = f"import torch; print(torch.load({json.dumps(str(file.absolute()))}, weights_only=False))"
    return f"python -c {shlex.quote(code)}"


def _list(noun: str, items: Sequence[object], most: int = 8) -> str:
    """`rank 3`, `ranks 3, 4 and 5`."""
    words = [str(item) for item in items[:most]]
    if len(items) > most:
        words.append(f"{len(items) - most} more")
    joined = " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
    return f"{noun}{'s' if len(items) > 1 else ''} {joined}"
