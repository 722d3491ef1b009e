"""Item -> outputs -> digest: computes what a scan asks for, in surroundings in which equal devices must give equal bits.

Apart from the operations, because here is what must hold for all of them: operands made anew by each `prepare` from the item's id
alone, settings that are the same for everybody, and nothing left changed. A process that trains may call this between two steps.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from bitwitness.errors import ConfigurationError
from bitwitness.fingerprint import fingerprint_tensors
from bitwitness.scan.items import Item
from bitwitness.scan.operands import Compute, Operands, Operation, Unsupported
from bitwitness.scan.operations import OPERATIONS

__all__ = ["SEED", "Unsupported", "Work", "digest", "digests", "operation_of", "prepare", "settled"]

SEED = 0x5CA9
"""Of the digests; the same for everybody and always, because answers are compared over years."""

_DIGEST_BYTES = 16

CUBLAS = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Without it cuBLAS may give other bits on several streams (its documentation, "Results reproducibility")."""

_NO_KERNEL = (
    "not implemented for",
    "does not have a deterministic implementation",
    "is only supported",
    "not supported on",
    "only Tensors of floating point",
)
"""What torch says where there is no kernel. An error of any other kind is the device's, and is raised as it is."""

_tried: dict[tuple[str, str], str] = {}
"""Items that were tried on a device, and why they cannot be computed there; "" where they can."""


@dataclass(frozen=True, slots=True)
class Work:
    """An item that is ready: call it to compute.

    Attributes:
        item: which.
        operands: what it reads, as it was drawn.
        compute: gives new outputs at each call, the same bits each time.
    """

    item: Item
    operands: tuple[Tensor, ...]
    compute: Compute

    def __call__(self) -> list[Tensor]:
        """The outputs. Enter `settled` first."""
        return self.compute()


def operation_of(item: Item) -> Operation:
    """How an item is computed.

    Raises:
        ConfigurationError: no operation has this name, this many sizes or this variant.
    """
    found = OPERATIONS.get(item.suite, {}).get(item.operation)
    if found is None:
        raise ConfigurationError(f"{item.id}: the suite {item.suite!r} has no operation {item.operation!r}")
    if len(item.shape) not in found.sizes or min(item.shape) < 1:
        sizes = " or ".join(map(str, found.sizes))
        raise ConfigurationError(f"{item.id}: {item.operation} has {sizes} sizes, all of them at least 1")
    if item.variant not in found.variants and (item.variant or found.needs_variant):
        raise ConfigurationError(
            f"{item.id}: {item.operation} has no variant {item.variant!r}, only {', '.join(sorted(found.variants)) or 'none'}"
        )
    return found


def prepare(item: Item, device: torch.device) -> Work:
    """Make the operands of an item anew and put them on the device. The first time it is also computed once, to see whether it can be.

    Call it inside `settled`.

    Raises:
        ConfigurationError: an operation, a dtype, a number of sizes or a variant that is not known.
        Unsupported: this device has no kernel for it.
    """
    operation = operation_of(item)
    key = item.id, str(device)
    if _tried.get(key):
        raise Unsupported(_tried[key])
    try:
        operands = Operands(item, device)
        compute = operation.build(operands)
        if key not in _tried:
            compute()
            _tried[key] = ""
    except NotImplementedError as error:
        _tried[key] = f"{item.id} on {device}: {_first_line(error)}"
        raise Unsupported(_tried[key]) from error
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ConfigurationError) or not any(words in str(error) for words in _NO_KERNEL):
            raise
        _tried[key] = f"{item.id} on {device}: {_first_line(error)}"
        raise Unsupported(_tried[key]) from error
    return Work(item, tuple(operands.kept), compute)


def digest(outputs: Sequence[Tensor]) -> str:
    """The outputs as 32 hexadecimal digits: bits, dtypes, shapes and order. They may lie on several devices."""
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for _, tensors in groupby(outputs, key=lambda one: one.device):
        found.update(fingerprint_tensors(list(tensors), SEED).cpu().numpy().tobytes())
    return found.hexdigest()


def digests(calls: Sequence[Sequence[Tensor]]) -> list[str]:
    """The digest of each of several calls. Of small outputs they are made together in a fraction of the time."""
    tensors = [one for outputs in calls for one in outputs]
    if len({one.device for one in tensors}) != 1:
        return [digest(outputs) for outputs in calls]
    table, start, found = fingerprint_tensors(tensors, SEED).cpu().numpy(), 0, []
    for outputs in calls:
        rows = table[start : start + len(outputs)]
        found.append(hashlib.blake2b(rows.tobytes(), digest_size=_DIGEST_BYTES).hexdigest())
        start += len(outputs)
    return found


@contextmanager
def settled(device: torch.device) -> Iterator[None]:
    """Surroundings that decide the bits, the same for everybody; all is put back afterwards.

    Deterministic algorithms, no autocast, no gradients but where an item takes some, float32 in full, float32 as default
    dtype, and one thread on a CPU: how many threads there are decides how sums are divided.

    Raises:
        ConfigurationError: the process has mixed torch's two ways to set the precision of float32, so that it cannot be put back.
    """
    try:
        torch.get_float32_matmul_precision()
    except RuntimeError as error:
        raise ConfigurationError(
            "torch.set_float32_matmul_precision (or allow_tf32) and torch.backends...fp32_precision say different things: use one of them"
        ) from error
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for kind in sorted({"cpu", device.type}):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_put_back())
        stack.enter_context(_deterministic())
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        _settle(device)
        yield


@contextmanager
def _deterministic() -> Iterator[None]:
    """As the guard does it; but `torch.use_deterministic_algorithms` loads the compiler to tell it as well, which costs seconds in
    each rank, and nothing is compiled here.
    """
    before, benchmark = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_deterministic_debug_mode("error")
    torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.backends.cudnn.benchmark = benchmark
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _settle(device: torch.device) -> None:
    torch.set_float32_matmul_precision("highest")
    for backend in _precisions():
        backend.fp32_precision = "ieee"
    torch.backends.cudnn.deterministic = True
    if torch.get_default_dtype() != torch.float32:
        torch.set_default_dtype(torch.float32)
    if device.type == "cpu":
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)
    else:
        os.environ.setdefault(*CUBLAS)


@contextmanager
def _put_back() -> Iterator[None]:
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    matmul, precisions = torch.get_float32_matmul_precision(), [one.fp32_precision for one in _precisions()]
    cudnn, cublas = torch.backends.cudnn.deterministic, os.environ.get(CUBLAS[0])
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(matmul)  # first: it changes the others too
        for backend, precision in zip(_precisions(), precisions, strict=True):
            backend.fp32_precision = precision
        torch.backends.cudnn.deterministic = cudnn
        if cublas is None:
            os.environ.pop(CUBLAS[0], None)


def _precisions() -> list[Any]:
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    return [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]  # type: ignore[attr-defined]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
