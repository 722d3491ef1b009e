"""What a wrapper knows of itself: which of the nodes it is, how others reach it, which devices it has.

Each launcher says so in variables of its own; where none does, the user must.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from bitwitness.errors import ConfigurationError
from bitwitness.topology import node_name

INDICES = ("BITWITNESS_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX", "PET_NODE_RANK", "REPLICA_INDEX")
"""What launchers call the place of a process among its kind: Slurm, indexed Jobs and JobSet, Kubeflow's PyTorchJob."""

_PORTS = range(20_000, 32_768)
"""Below the ports that Linux gives to connections going out, which come and go."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One wrapper: its node, its place among the wrappers, its address, its devices in the order of local ranks."""

    node: str
    index: int
    address: str
    devices: tuple[str, ...]


def index_of(given: int | None, environment: Mapping[str, str]) -> int | None:
    """The place of this wrapper: as given, else by the first variable that says so; None where nobody does.

    Raises:
        ConfigurationError: a variable holds no number.
    """
    if given is not None:
        return given
    for name in INDICES:
        text = environment.get(name, "").strip()
        if text:
            if not text.isdecimal():
                raise ConfigurationError(f"{name}={text!r} is no node rank: give --node-rank")
            return int(text)
    return None


def identify(index: int, processes: int, environment: Mapping[str, str], address: str = "") -> Identity:
    """Find out who this wrapper is. `processes`: how many of the node's devices are used."""
    node = node_name(environment)
    own = address or environment.get("BITWITNESS_ADDRESS", "") or environment.get("POD_IP", "") or own_address()
    return Identity(node, index, own, devices_of(node, processes, environment))


def devices_of(node: str, processes: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The identities of a node's devices: as given in BITWITNESS_DEVICES, else its GPUs, else its processor slots.

    Raises:
        ConfigurationError: fewer are given than there are processes.
    """
    given = tuple(filter(None, (name.strip() for name in environment.get("BITWITNESS_DEVICES", "").split(","))))
    if given:
        if len(given) < processes:
            raise ConfigurationError(f"BITWITNESS_DEVICES names {len(given)} devices for {processes} processes a node")
        return given[:processes]
    gpus = _visible(gpu_uuids(), environment.get("CUDA_VISIBLE_DEVICES"))
    if len(gpus) >= processes:
        return gpus[:processes]
    return tuple(f"{node}/cpu-{slot}" for slot in range(processes))


def gpu_uuids() -> tuple[str, ...]:
    """The GPUs of this machine as its driver lists them; none where there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = [line.strip() for line in done.stdout.splitlines()]
    return tuple(line for line in lines if line.startswith("GPU-")) if done.returncode == 0 else ()


def _visible(gpus: tuple[str, ...], chosen: str | None) -> tuple[str, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order; it names them by number or by the beginning of the UUID."""
    if chosen is None:
        return gpus
    found = []
    for word in (word.strip() for word in chosen.split(",")):
        if word.isdecimal() and int(word) < len(gpus):
            found.append(gpus[int(word)])
        else:
            found += [gpu for gpu in gpus if word and gpu.startswith(word)][:1]
    return tuple(found)


def own_address() -> str:
    """An address by which other nodes reach this one: what its name resolves to, else that of the way out, else its name."""
    name = socket.gethostname()
    try:
        for found in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM):
            address = str(found[4][0])
            if not address.startswith("127."):
                return address
    except OSError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(
                ("192.0.2.1", 9)
            )  # reserved for documentation; no packet is sent by connecting a datagram socket
            return str(probe.getsockname()[0])
        except OSError:
            return name


def free_port() -> int:
    """A port that nobody listens on now, chosen anew each time."""
    for _ in range(200):
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise ConfigurationError(f"no free port between {_PORTS.start} and {_PORTS.stop} on {os.uname().nodename}")
