"""What a checkpoint holds of a job, collected and put back.

The ranks of a job share their weights and optimizer state, so one rank writes those for all (`shared.pt`); what differs
from rank to rank (random states, buffers, the position of its data loader) each writes for itself (`rank-00003.pt`). Both are
plain PyTorch files: whoever has only them can load them with `torch.load`.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from bitwitness.errors import CheckpointError, ConfigurationError
from bitwitness.guard import loaders
from bitwitness.guard.job import Job
from bitwitness.guard.replication import digest_table
from bitwitness.guard.rewind import RandomState, random_state_kept
from bitwitness.runfiles.label import FileDigest

SHARED = "shared.pt"


def rank_file(rank: int) -> str:
    """The name of what a rank writes for itself."""
    return f"rank-{rank:05d}.pt"


# What is saved -------------------------------------------------------------------------------------------------------


def shared_state(job: Job) -> dict[str, Any]:
    """What every rank holds alike: model, optimizers, scaler. Refers to the live tensors."""
    return {
        "model": job.module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in job.optimizers],
        "kinds": [type(optimizer).__name__ for optimizer in job.optimizers],
        "slots": _slots(job),
        "scaler": job.scaler.state_dict() if job.scaler is not None else None,
    }


def _slots(job: Job) -> list[list[str]]:
    """The parameter of every slot of each optimizer, by name: its state is stored by position."""
    names = {id(parameter): name for name, parameter in job.module.named_parameters()}
    return [
        [names.get(id(parameter), "") for group in optimizer.param_groups for parameter in group["params"]]
        for optimizer in job.optimizers
    ]


def rank_state(job: Job, stateful: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank alone holds. Collecting it draws nothing, whatever the objects draw when they are asked.

    Raises:
        CheckpointError: one of the objects has no state to give; names it.
    """
    generators = job.workload.generators
    with random_state_kept(job.device, generators):
        random = RandomState.capture(job.device, generators)
        states = {name: _state_of(name, one) for name, one in stateful.items()}
    return {
        "rank": job.rank,
        "random": {name: getattr(random, name) for name in RandomState.__slots__},
        "buffers": {name: buffer.detach() for name, buffer in job.module.named_buffers()},
        "stateful": states,
        "stateful_kinds": {name: type(one).__name__ for name, one in stateful.items()},
    }


def _state_of(name: str, one: Any) -> Any:
    try:
        return loaders.capture(one) if loaders.is_loader(one) else one.state_dict()
    except Exception as error:
        raise CheckpointError(
            f"stateful[{name!r}].state_dict() raised {type(error).__name__}: {error}. Nothing was saved"
        ) from error


def fingerprints(tree: Any, seed: int) -> dict[str, str]:
    """Each tensor of nested dictionaries and lists by its path: dtype, shape and fingerprint, as text."""
    tensors = dict(_named_tensors(tree, ""))
    rows = digest_table(list(tensors.values()), seed).cpu().tolist() if tensors else []
    return {name: _described(tensor, row) for (name, tensor), row in zip(tensors.items(), rows, strict=True)}


def _named_tensors(tree: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield prefix, tree.detach()
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _named_tensors(value, f"{prefix}/{key}" if prefix else str(key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _named_tensors(value, f"{prefix}/{index}")


def _described(tensor: Tensor, row: Sequence[int]) -> str:
    words = " ".join(f"{value & (2**64 - 1):016x}" for value in row)
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {words}"


# Files ---------------------------------------------------------------------------------------------------------------


def write(path: Path, content: Mapping[str, Any]) -> FileDigest:
    """Write a PyTorch file durably; the digest is of what was handed to the system, not of what came back from it.

    Raises:
        CheckpointError: it could not be written, or something in it cannot be pickled.
    """
    try:
        with path.open("xb") as file:
            sink = _HashingFile(file)
            torch.save(dict(content), sink)  # type: ignore[arg-type]  # it writes, and that is all that is asked for
            if sink.failure is not None:
                raise sink.failure
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror or error}") from error
    except Exception as error:  # whatever the objects of a user raise when they are pickled
        raise CheckpointError(
            f"{path} could not be written: {_culprit(content)} cannot be pickled ({type(error).__name__}: {error})"
        ) from error
    return FileDigest(sink.bytes, sink.digest.hexdigest())


def read(path: Path, mapped: bool = False) -> dict[str, Any]:
    """Read such a file. `mapped`: its tensors are views of the file, to be copied before the file may go.

    Raises:
        CheckpointError: it is not one.
    """
    try:
        # Everything a job may hand to `stateful` is in these files, so they are pickles: load only what your own jobs wrote.
        content = torch.load(path, map_location="cpu", mmap=mapped, weights_only=False)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}: it was not written by bitwitness")
    return content


def forget_cached(path: Path) -> None:
    """Ask the system to read this file from the storage when it is next read, and not from memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


class _HashingFile:
    """Counts and hashes what is written. Keeps an error for later: PyTorch's writer would turn it into another."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.bytes = 0
        self.failure: OSError | None = None

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        if self.failure is None:
            try:
                self._file.write(view)
                self.digest.update(view)
                self.bytes += len(view)
            except OSError as error:
                self.failure = error
        return len(view)

    def flush(self) -> None:
        """Nothing: the file is flushed when it is whole."""


def _culprit(content: Mapping[str, Any]) -> str:
    """Which part of a rank's state cannot be pickled."""
    for name, state in content.get("stateful", {}).items():
        try:
            pickle.dumps(state)
        except Exception:  # noqa: BLE001  (whatever it is, it is this one)
            return f"the state of stateful[{name!r}]"
    return "its content"


# What is put back ----------------------------------------------------------------------------------------------------


def check_fits(job: Job, stateful: Mapping[str, Any], shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ConfigurationError unless this state is that of this model, these optimizers and these objects.

    Everything that can be told is told here, before anything is changed on any rank.
    """
    _check_model(job.module.state_dict(), shared["model"])
    _check_optimizers(job.optimizers, shared)
    _check_slots(_slots(job), shared.get("slots"))
    if (shared["scaler"] is None) != (job.scaler is None):
        whose = "the job has a GradScaler and the checkpoint has none"
        raise ConfigurationError(whose if job.scaler is not None else "the checkpoint is of a job with a GradScaler")
    _check_stateful(stateful, own)
    here = [_kind_of(state) for state in RandomState.capture(job.device, job.workload.generators).own]
    there = [_kind_of(state) for state in own["random"]["own"]]
    if here != there:
        raise ConfigurationError(
            f"the checkpoint holds the states of {len(there)} generators ({_few(there)}), the guard was given {len(here)} "
            f"({_few(here)}): give generators= what it was saved with, in the same order"
        )


def _check_stateful(stateful: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    absent, unknown = sorted(set(stateful) - set(own["stateful"])), sorted(set(own["stateful"]) - set(stateful))
    if absent or unknown:
        raise ConfigurationError(
            f"{_both('the checkpoint', 'holds no state for', absent, 'holds that of', unknown)}: give stateful= what it was saved "
            "with"
        )
    for name, saved in own.get("stateful_kinds", {}).items():
        if type(stateful[name]).__name__ != saved:
            raise ConfigurationError(
                f"the checkpoint holds the state of a {saved} as stateful[{name!r}], the guard was given a "
                f"{type(stateful[name]).__name__}: give it what it was saved with"
            )


def _check_model(live: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    missing, unknown = sorted(set(live) - set(saved)), sorted(set(saved) - set(live))
    if missing or unknown:
        raise ConfigurationError(f"the checkpoint is of another model: {_both('it', 'lacks', missing, 'has', unknown)}")
    for name, value in live.items():
        if isinstance(value, Tensor) and _form(value) != _form(saved[name]):
            raise ConfigurationError(
                f"the checkpoint is of another model: {name} is {_form(saved[name])} there, {_form(value)} here"
            )


def _check_optimizers(optimizers: Sequence[torch.optim.Optimizer], shared: Mapping[str, Any]) -> None:
    here, there = [type(one).__name__ for one in optimizers], list(shared["kinds"])
    if here != there:
        raise ConfigurationError(
            f"the checkpoint holds the state of {_few(there)}, the guard was given {_few(here)}: give it the same optimizers, "
            "in the same order"
        )
    for index, (optimizer, saved) in enumerate(zip(optimizers, shared["optimizers"], strict=True)):
        own, stored = (
            [len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved["param_groups"])
        )
        if own != stored:
            raise ConfigurationError(
                f"the checkpoint does not fit optimizer {index}: its groups have {stored} parameters there, {own} here"
            )


def _check_slots(here: Sequence[Sequence[str]], there: Sequence[Sequence[str]] | None) -> None:
    """States are stored by position: in another order each parameter would be given the moments of another."""
    for index, (own, stored) in enumerate(zip(here, there or here, strict=True)):
        for position, (mine, saved) in enumerate(zip(own, stored, strict=True)):
            if mine != saved:
                raise ConfigurationError(
                    f"the checkpoint does not fit optimizer {index}: its parameter {position} is {saved or 'one outside the model'} "
                    f"there, {mine or 'one outside the model'} here: give it the same parameters in the same order"
                )


def _form(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _kind_of(state: Any) -> str:
    """Of the state of a generator: whose it is."""
    if isinstance(state, Tensor):
        return "torch"
    return f"numpy {state['bit_generator']}" if isinstance(state, dict) else "random"


def restore(job: Job, stateful: Mapping[str, Any], shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Put everything back, after `check_fits`; random states last.

    Raises:
        CheckpointError: one of the objects refused its state; names it.
    """
    job.module.load_state_dict(shared["model"])
    restore_buffers(job.module, own["buffers"])
    for optimizer, state in zip(job.optimizers, shared["optimizers"], strict=True):
        _load_optimizer(optimizer, state)
    if job.scaler is not None:
        job.scaler.load_state_dict(shared["scaler"])
    generators = job.workload.generators
    for name, one in stateful.items():
        state = own["stateful"][name]
        try:
            if loaders.is_loader(one):
                loaders.restore(one, state, lambda: random_state_kept(job.device, generators))
            else:
                one.load_state_dict(state)
        except Exception as error:
            raise CheckpointError(
                f"stateful[{name!r}].load_state_dict() raised {type(error).__name__}: {error}. The model and what was before it "
                "have been restored already: start again once that is mended"
            ) from error
    RandomState(**own["random"]).restore(job.device, generators)


def _load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """As `load_state_dict`, but bit for bit: that one casts moments to the dtype of their parameter."""
    copied = tree_map_only(Tensor, Tensor.clone, dict(state))
    optimizer.load_state_dict(copied)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    positions = [position for group in copied["param_groups"] for position in group["params"]]
    for parameter, position in zip(parameters, positions, strict=True):
        for key, value in copied["state"].get(position, {}).items():
            loaded = optimizer.state[parameter][key]
            if isinstance(value, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


@torch.no_grad()
def restore_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Give the buffers of this rank the values that they had."""
    for name, buffer in module.named_buffers():
        if name in buffers and buffer.shape == buffers[name].shape:
            buffer.copy_(buffers[name])


def _both(what: str, lacks: str, absent: Sequence[str], has: str, unknown: Sequence[str]) -> str:
    """`it lacks a, b and has c beside`, or the half of it that is so."""
    said = [f"{lacks} {_few(absent)}"] * bool(absent) + [f"{has} {_few(unknown)} beside"] * bool(unknown)
    return f"{what} {' and '.join(said)}"


def _few(names: Sequence[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
