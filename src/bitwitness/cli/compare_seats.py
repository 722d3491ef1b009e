"""Who takes part in a comparison: from what the command line names, or from what torchrun has started, to seats.

Roles are given here and nowhere else: the suspect is number 0, then come the leader and the other references, and last a control, which
computes on the device of the last reference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bitwitness.compare.exchange import Ranks
from bitwitness.compare.participant import Seat
from bitwitness.compare.records import Participant, Role
from bitwitness.compare.simulated import Simulated, read
from bitwitness.compare.workload import Make
from bitwitness.errors import ConfigurationError
from bitwitness.runfiles.answers import Device
from bitwitness.scan.devices import this_device
from bitwitness.scan.launching import Torchrun
from bitwitness.topology import node_name

_NAMED = re.compile(r"(suspect|control|reference-\d+)\s*:\s+(.*)", re.DOTALL)
_GPU = re.compile(r"(?:cuda:)?(\d+)")

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Assembly:
    """Who takes part.

    Attributes:
        seats: of this process. everybody: of all processes, by number. suspect: its name.
    """

    seats: tuple[Seat, ...]
    everybody: tuple[Participant, ...]
    suspect: str


def faults_of(texts: Sequence[str]) -> dict[str, str]:
    """What is played on whom: `FAULT` on the suspect, `NAME: FAULT` on another.

    Raises:
        ConfigurationError: one is no fault that can be played.
    """
    found: dict[str, str] = {}
    for text in texts:
        named = _NAMED.fullmatch(text.strip())
        name, fault = (named[1], named[2]) if named else ("suspect", text.strip())
        try:
            read(fault)
        except ConfigurationError as error:
            raise ConfigurationError(f"--simulate {text!r:.120}: {error}") from error
        found[name] = f"{found[name]} & {fault}" if name in found else fault
    return found


def of_this_machine(options: Options, make: Make, faults: Mapping[str, str], *, control: bool, seed: int) -> Assembly:
    """All participants in this process: GPUs that were named, or stand-ins.

    Raises:
        ConfigurationError: there are no such devices.
    """
    if options["devices"] is not None:
        devices = [(torch.device("cpu"), slot) for slot in range(options["devices"])]
    else:
        devices = [(device, device.index) for device in _gpus(options["suspect"], options["references"])]
    node = node_name(os.environ)
    found = [this_device(number, device, node, slot) for number, (device, slot) in enumerate(devices)]
    everybody = _named(found, 0, 1, control=control, faults=faults)
    where = [device for device, _ in devices] + [devices[-1][0]]
    seats = tuple(
        _seat(who, device, make, seed) for who, device in zip(everybody, where[: len(everybody)], strict=True)
    )
    return Assembly(seats, everybody, everybody[0].name)


def of_ranks(
    options: Options, make: Make, faults: Mapping[str, str], among: Torchrun, ranks: Ranks, *, control: bool, seed: int
) -> Assembly:
    """This rank of torchrun, among all; says to the exchange who leads.

    Raises:
        ConfigurationError: there is no GPU for this rank, or nobody or several are the suspect.
        RankLost: a rank did not answer.
    """
    device = _device_of_rank(among, cpu=options["cpu"])
    own: Device | str = (
        device
        if isinstance(device, str)
        else this_device(among.rank, device, node_name(os.environ), None if device.type == "cuda" else among.slot)
    )
    found = ranks.gather(own)
    problems = [f"rank {rank}: {one}" for rank, one in enumerate(found) if isinstance(one, str)]
    if problems:
        raise ConfigurationError("; ".join(problems[:8]))
    devices = [one for one in found if isinstance(one, Device)]
    suspect = _suspect_among(devices, options["suspect"], options["suspect_rank"])
    ranks.leader = 1 if suspect == 0 else 0
    everybody = _named(devices, suspect, ranks.leader, control=control, faults=faults)
    assert isinstance(device, torch.device)
    here = [one for one in everybody if one.device.rank == among.rank]
    if control and among.rank == _last_reference(everybody).device.rank:
        here.append(everybody[-1])
    return Assembly(
        tuple(_seat(who, device, make, seed) for who in here),
        everybody,
        next(one.name for one in everybody if one.role == "suspect"),
    )


def _named(
    devices: Sequence[Device], suspect: int, leader: int, *, control: bool, faults: Mapping[str, str]
) -> tuple[Participant, ...]:
    """Roles by number. A control is one more participant, on the device of the last reference.

    Raises:
        ConfigurationError: a fault is to be played on nobody.
    """
    found: list[Participant] = []
    for number, device in enumerate(devices):
        role: Role = "suspect" if number == suspect else "leader" if number == leader else "reference"
        count = sum(one.role != "suspect" for one in found)
        found.append(Participant("suspect" if role == "suspect" else f"reference-{count + 1}", role, device))
    if control and any(one.role == "reference" for one in found):
        device = _last_reference(found).device
        found.append(Participant("control", "control", replace(device, rank=len(devices))))
    strangers = faults.keys() - {one.name for one in found}
    if strangers:
        raise ConfigurationError(
            f"--simulate {min(strangers)}: there is no such participant, only {', '.join(one.name for one in found)}"
        )
    return tuple(replace(one, simulated=faults.get(one.name, "")) for one in found)


def _last_reference(everybody: Sequence[Participant]) -> Participant:
    return [one for one in everybody if one.role == "reference"][-1]


def _seat(who: Participant, device: torch.device, make: Make, seed: int) -> Seat:
    return Seat(who, device, make, Simulated(who.simulated, seed) if who.simulated else None)


# Devices ----------------------------------------------------------------------------------------------------------


def _gpus(suspect: str | None, references: Sequence[str]) -> list[torch.device]:
    """The suspect and the references, as devices of this machine.

    Raises:
        ConfigurationError: there are none, or one is not named.
    """
    count = torch.cuda.device_count()
    if not count:
        raise ConfigurationError(
            "torch sees no GPU on this machine. If it has some: look at its driver. To see how a comparison works without GPUs give "
            "--devices 3: so many stand-ins, computed by this machine's processor"
        )
    if suspect is None:
        raise ConfigurationError(
            f"which device is under suspicion? Give --suspect cuda:N; this machine has cuda:0 to cuda:{count - 1}"
        )
    numbers = [_index(suspect, "--suspect", count), *(_index(one, "--reference", count) for one in references)]
    if not references:
        others = [number for number in range(count) if number != numbers[0]]
        numbers += others[:2]
    return [torch.device("cuda", number) for number in numbers]


def _index(name: str, option: str, count: int) -> int:
    named = _GPU.fullmatch(name.strip())
    if named is None:
        raise ConfigurationError(
            f"{option} {name!r:.60} is no GPU of this machine: give cuda:N. Processors are compared by --devices N, and nodes by their name "
            "under torchrun"
        )
    if int(named[1]) >= count:
        raise ConfigurationError(f"{option} {name}: this machine has cuda:0 to cuda:{count - 1}")
    return int(named[1])


def _device_of_rank(among: Torchrun, *, cpu: bool) -> torch.device | str:
    """What this rank computes on, or why on nothing."""
    count = torch.cuda.device_count()
    if among.slot < count:
        device = torch.device("cuda", among.slot)
        torch.cuda.set_device(device)
        return device
    if count:
        return (
            f"{node_name(os.environ)} has {count} GPU(s), none for local rank {among.slot}: start as many ranks as GPUs"
        )
    if not cpu:
        return f"torch sees no GPU on {node_name(os.environ)}; to compare processors give --cpu"
    return torch.device("cpu")


def _suspect_among(devices: Sequence[Device], node: str | None, rank: int | None) -> int:
    """The rank under suspicion, by its number or its node.

    Raises:
        ConfigurationError: it is none or several.
    """
    if rank is not None:
        if rank >= len(devices):
            raise ConfigurationError(f"--suspect-rank {rank}: torchrun has started the ranks 0 to {len(devices) - 1}")
        return rank
    nodes = sorted({one.node for one in devices})
    if node is None:
        raise ConfigurationError(
            f"which is under suspicion? Give --suspect NODE, one of {', '.join(nodes[:16])}, or --suspect-rank R"
        )
    there = [one.rank for one in devices if node in (one.node, one.device)]
    if not there:
        raise ConfigurationError(
            f"--suspect {node!r:.80}: no rank runs there; the nodes are {', '.join(nodes[:16])}. A GPU may be named by its UUID"
        )
    if len(there) > 1:
        raise ConfigurationError(
            f"--suspect {node}: {len(there)} ranks run there ({', '.join(map(str, there[:16]))}): say which with --suspect-rank R, and "
            "compare one after the other"
        )
    return there[0]
