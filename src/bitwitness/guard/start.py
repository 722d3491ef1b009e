"""What must be known and right before the first step: the model, the optimizers, the placement.

Everything that can be refused is refused here, by name and on every rank, before a hook is registered or a file written.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from bitwitness._version import __version__
from bitwitness.errors import ConfigurationError, RunFilesError, WorkloadError
from bitwitness.guard.job import Job
from bitwitness.guard.rewind import process_settings
from bitwitness.policy import Policy
from bitwitness.runfiles import RunFiles, new_incident_id, utc_now
from bitwitness.runfiles.drills import start_of
from bitwitness.runfiles.label import Label
from bitwitness.topology import (
    NODE_NAME_YAML,
    Placement,
    Topology,
    is_same_place,
    machine,
    node_name,
    pod_name,
    scheduler_job,
    unclear_job,
)

logger = logging.getLogger("bitwitness")


def look_at(
    model: object, policy: object, run_dir: object
) -> tuple[nn.Module, nn.Module, torch.device, Policy, RunFiles]:
    """What the ranks must have before they can talk: the model, the module inside it, its device, the policy, the files.

    Raises:
        ConfigurationError: one of them is not what it should be.
    """
    chosen = Policy.load() if policy is None else policy
    if not isinstance(chosen, Policy):
        raise ConfigurationError(f"policy is a {type(policy).__name__}: give a bitwitness.Policy")
    if os.environ.get("BITWITNESS_SUSPICION") == "1":
        logger.warning("restarted under suspicion: every step is audited, whatever the policy says")
        chosen = chosen.replace(audit_every=1, check_every=1)
    outer, module = unwrap(model)
    return outer, module, device_of(module), chosen, RunFiles(check_run_dir(run_dir))


def unwrap(model: object) -> tuple[nn.Module, nn.Module]:
    """The model to guard and the module inside it: through torch.compile and through DDP.

    Raises:
        ConfigurationError: not a module, or a kind of parallelism that is not supported.
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"model is a {type(model).__name__}: give the DDP-wrapped torch.nn.Module that is trained"
        )
    outer = getattr(model, "_orig_mod", model)
    assert isinstance(outer, nn.Module)
    if not isinstance(outer, DistributedDataParallel):
        sharded = {type(module).__name__ for module in outer.modules() if _is_sharded(module)}
        if sharded:
            raise ConfigurationError(f"{', '.join(sorted(sharded))}: sharded models are not supported yet, only DDP")
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigurationError(
                f"the job has {dist.get_world_size()} ranks, but the model is a plain {type(outer).__name__}: wrap it in "
                "torch.nn.parallel.DistributedDataParallel, then give it to the guard"
            )
        return outer, outer
    if dist.get_world_size(outer.process_group) != dist.get_world_size():
        raise ConfigurationError("DDP over a part of the ranks is not supported yet: DDP must span the whole job")
    if outer.mixed_precision is not None:
        raise ConfigurationError("DDP(mixed_precision=...) is not supported: use torch.autocast inside loss_fn")
    if outer.parameters_to_ignore:
        names = ", ".join(sorted(outer.parameters_to_ignore)[:3])
        raise ConfigurationError(
            f"DDP ignores some parameters ({names}): ranks then differ by design and cannot be compared"
        )
    return outer, outer.module


def is_compiled(model: nn.Module, outer: nn.Module, module: nn.Module, loss_fn: object) -> bool:
    """Whether torch.compile looks into the module or a part of it: what is hooked to it then becomes a part of the code that is built."""
    parts = (outer, *module.modules())
    within = any(one._compiled_call_impl is not None or "_orig_mod" in one._modules for one in parts)
    return model is not outer or within or hasattr(loss_fn, "_torchdynamo_orig_callable")


def _is_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ in ("FullyShardedDataParallel", "FSDPModule") for kind in type(module).__mro__)


def device_of(module: nn.Module) -> torch.device:
    """The one device of a module.

    Raises:
        WorkloadError: several devices, no parameters, or none that is trained.
    """
    devices = sorted({str(tensor.device) for tensor in (*module.parameters(), *module.buffers())})
    if len(devices) > 1:
        raise WorkloadError(
            f"the model is on several devices ({', '.join(devices)}): one rank, one device. Move it to one with model.to(device), "
            "before it is wrapped in DDP"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise WorkloadError("the model has no parameter that requires a gradient: there is nothing to guard")
    if devices == ["meta"]:
        raise WorkloadError("the model is on the meta device: materialise it before the guard is made")
    return torch.device(devices[0])


def check_optimizers(optimizer: object, module: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    """One optimizer or several, as a tuple.

    Raises:
        ConfigurationError: something else, none at all, or one that trains parameters outside the model.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        given: tuple[object, ...] = (optimizer,)
    elif isinstance(optimizer, Mapping):
        given = tuple(optimizer.values())
    elif isinstance(optimizer, Iterable):
        given = tuple(optimizer)
    else:
        given = (optimizer,)
    optimizers = []
    for one in given:
        if not isinstance(one, torch.optim.Optimizer):
            raise ConfigurationError(f"optimizer is a {type(one).__name__}: give a torch.optim.Optimizer, or several")
        if type(one).__name__ == "ZeroRedundancyOptimizer":
            raise ConfigurationError(
                "ZeroRedundancyOptimizer shards its state: sharded optimizers are not supported yet"
            )
        optimizers.append(one)
    if not optimizers:
        raise ConfigurationError("optimizer is empty: give at least one")
    own = {id(parameter) for parameter in module.parameters()}
    for one in optimizers:
        if not any(id(parameter) in own for group in one.param_groups for parameter in group["params"]):
            raise ConfigurationError(
                f"{type(one).__name__} trains no parameter of this model: was the model replaced after the optimizer was made?"
            )
    return tuple(optimizers)


def check_callables(policy: Policy, loss_fn: object, rebuild_batch: object) -> None:
    """Raise ConfigurationError unless these can be called, and the loss function is there if it is needed."""
    if loss_fn is None and policy.audit != "off":
        raise ConfigurationError('loss_fn= is needed to replay a micro-batch; without it set Policy(audit="off")')
    for name, value in (("loss_fn", loss_fn), ("rebuild_batch", rebuild_batch)):
        if value is not None and not callable(value):
            raise ConfigurationError(f"{name} is a {type(value).__name__}: it must be callable")


def check_stateful(stateful: object) -> None:
    """Raise ConfigurationError unless these are objects, by name, whose state can be saved and loaded."""
    if stateful is None:
        return
    if not isinstance(stateful, Mapping):
        raise ConfigurationError(f"stateful is a {type(stateful).__name__}: give a dictionary of objects by name")
    for name, one in stateful.items():
        lacking = [what for what in ("state_dict", "load_state_dict") if not callable(getattr(one, what, None))]
        if not isinstance(name, str) or lacking:
            raise ConfigurationError(
                f"stateful[{name!r}] is a {type(one).__name__} without {' and '.join(lacking) or 'a name'}: its state cannot be saved"
            )


def refuse_quarantined(files: RunFiles, place: Placement) -> None:
    """Raise ConfigurationError if this device or its node is in quarantine, whatever rank or name it has now."""
    quarantine = files.quarantine.read()
    why = quarantine.why_denied(place.node, [place.device])
    if why:
        name = place.device if place.device in quarantine.denied_devices else place.node
        raise ConfigurationError(
            f"{why}. It takes no part in this run; once it is repaired: bitwitness quarantine clear {files.path} {name}"
        )


def check_modes(policy: Policy, device: torch.device, scaler: object) -> None:
    """Raise ConfigurationError for modes under which healthy ranks need not compute equal bits, or a foreign scaler."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ConfigurationError(f"scaler is a {type(scaler).__name__}: give a torch.amp.GradScaler")
    if policy.audit == "off" or device.type != "cuda":
        return
    if torch.backends.cudnn.benchmark:
        raise ConfigurationError(
            "torch.backends.cudnn.benchmark=True lets each rank choose its own kernels, and equal kernels are needed for equal "
            'bits: set it to False, or Policy(audit="off")'
        )
    if policy.deterministic_audits and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        raise ConfigurationError(
            "deterministic_audits=True needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before the process starts"
        )


def limits(topology: Topology, policy: Policy, rebuilds: bool, compiled: bool) -> tuple[str, ...]:
    """What this guard cannot do, each a sentence; empty where there is nothing it was asked for and cannot."""
    found = list(topology.limits())
    if compiled and policy.audit not in ("off", "auto"):
        found.append(
            "the model is compiled and a replay is not: where the compiler's code rounds otherwise than PyTorch's, audits "
            "raise a false alarm"
        )
    elif compiled and policy.audit == "auto":
        found.append("the model is compiled, and its code may round otherwise than a replay: nothing is replayed")
    if not topology.is_uniform:
        found.append("replicas and replays are not compared, because equal bits need equal devices and software")
    if policy.audit == "off" or (compiled and policy.audit == "auto"):
        found.append("replays are off: finite wrong arithmetic in forward and backward is not detected")
    elif not rebuilds:
        found.append("no rebuild_batch: a wrong input is not detected, because the witness is sent the same one")
    if problem := unclear_job(os.environ):
        found.append(problem)
    return tuple(found)


def allowed(policy: Policy, topology: Topology, compiled: bool) -> Policy:
    """What of a policy is possible on this placement. Only equal devices and equal code compute equal bits.

    Raises:
        ConfigurationError: replays were asked for by name.
    """
    if policy.audit == "auto" and compiled:
        return policy.replace(audit="off")
    if topology.is_uniform or policy.audit == "off":
        return policy
    if policy.audit != "auto":
        raise ConfigurationError(
            f'Policy(audit="{policy.audit}") on {"; ".join(topology.limits())}: use equal devices and software, or audit="off"'
        )
    return policy.replace(audit="off")


def facts_of_rank(rank: int, device: torch.device) -> dict[str, Any]:
    """Where this rank stands: what `Placement` needs, but for the slot, which depends on the other ranks."""
    node = node_name(os.environ)
    settings = ", ".join(f"{name} {value}" for name, value in process_settings(device).items())
    software = f"torch {torch.__version__}, {settings}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        identity, model = f"GPU-{properties.uuid}", properties.name
        software += f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    else:
        identity, model = "", f"{_cpu_model()} ({torch.backends.cpu.get_cpu_capability()})"
    listed = [one.strip() for one in os.environ.get("BITWITNESS_DEVICES", "").split(",") if one.strip()]
    local = os.environ.get("LOCAL_RANK", "")
    if not identity and local.isdecimal() and int(local) < len(listed):
        identity = listed[int(local)]
    where = {"pod": pod_name(os.environ), "machine": machine(os.environ)}
    return {"rank": rank, "node": node, "device": identity, "model": model, "software": software, **where}


def place(facts: Sequence[Mapping[str, Any]]) -> Topology:
    """The topology from what every rank said of itself. A rank without a GPU is its node's n-th processor slot.

    Raises:
        ConfigurationError: one machine has two names.
    """
    _refuse_two_names_of_one_machine(facts)
    placed: list[Placement] = []
    for one in facts:
        slot = sum(other.node == one["node"] for other in placed)
        device = one["device"] or f"{one['node']}/cpu-{slot}"
        placed.append(
            Placement(one["rank"], one["node"], device, slot, one["model"], one["software"], one.get("pod", ""))
        )
    return Topology(tuple(placed))


def _refuse_two_names_of_one_machine(facts: Sequence[Mapping[str, Any]]) -> None:
    """A witness in another container of the same machine is no witness from elsewhere: two of them could have a third one blamed."""
    known: dict[str, Mapping[str, Any]] = {}
    for one in facts:
        if not one.get("machine"):
            continue
        other = known.setdefault(one["machine"], one)
        if other["node"] != one["node"]:
            raise ConfigurationError(
                f"ranks {other['rank']} and {one['rank']} are on one machine (boot id {one['machine']}) that calls itself "
                f"{other['node']!r} and {one['node']!r}: these are names of containers, and a witness on the same machine is none. In "
                f"Kubernetes add to the container in the pod template: {NODE_NAME_YAML}; elsewhere set BITWITNESS_NODE to the name of the "
                "machine. Only where nodes are played on one machine (kind, minikube) set BITWITNESS_NODE to the name of each"
            )


def supervision_id() -> str:
    """The id of the supervised run that this process belongs to; empty where nobody supervises."""
    return os.environ.get("BITWITNESS_SUPERVISION", "")


def supervision() -> dict[str, Any]:
    """What ties a record to a start of a supervised run: its id and the number of the start; nothing where nobody supervises."""
    generation = os.environ.get("BITWITNESS_GENERATION", "")
    if not supervision_id() or not generation.isdecimal():
        return {}
    return {"supervision": supervision_id(), "generation": int(generation)}


def start_id() -> str:
    """What names this start of the job and no other: as its supervision tells, else drawn, for all ranks by one of them."""
    return start_of(supervision()) or new_incident_id()


def is_same_run(label: Label, topology: Topology) -> bool:
    """Whether a checkpoint is of the same supervised run, with every rank on the device where it is now, in whatever pod."""
    return (
        bool(label.supervision)
        and label.supervision == supervision_id()
        and is_same_place(label.placement, topology.to_json())
    )


def run_id(files: RunFiles) -> str:
    """What names the run in this directory: made at its first start, and kept over the others."""
    with suppress(RunFilesError):
        known = files.read_run().get("run")
        if isinstance(known, str) and known:
            return known
    return new_incident_id()


def description(job: Job, limits: Sequence[str], run: str) -> dict[str, Any]:
    """The content of run.json."""
    return {
        "run": run,
        "started": utc_now(),
        "bitwitness": __version__,
        "torch": torch.__version__,
        "world_size": job.channel.world_size,
        "placement": job.topology.to_json(),
        "policy": job.policy.to_json(),
        "fingerprint_seed": job.seed,
        "limits": list(limits),
        "scheduler_job": scheduler_job(os.environ),
        **supervision(),
    }


def check_run_dir(run_dir: object) -> Path:
    """A path, or a ConfigurationError that says what to give."""
    if not isinstance(run_dir, str | os.PathLike) or not str(run_dir) or "\0" in str(run_dir):
        raise ConfigurationError(f"run_dir is {run_dir!r}: give a directory on storage that all nodes share")
    return Path(run_dir)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
