"""Known work in a process that trains: nothing that belongs to the whole process is set, not even to be set back.

Here and not in the loop of a scan, which has its process for itself. A job has other threads, which fetch batches and draw from
the global generators meanwhile: a state that is put back is put back under their hands, and a setting that holds for a millisecond
holds for them as well. So slices draw from generators of their own, name each dtype and device, and enter only such modes as each
thread has for itself. All else stays as the job has set it: the number of threads, the precision of float32 products, whether
algorithms are deterministic. The kind of the device says what that is, so that devices that differ in it are not compared, and
what would need another setting is left out (`left_out`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from bitwitness.scan import devices
from bitwitness.scan.items import Item

_MAY_NOT_REPEAT = frozenset({"scatter_add", "index_add", "embedding", "cumsum", "attention", "conv2d"})
"""What has kernels on a GPU that add up in an order that is not said, unless algorithms are deterministic (the notes on
`torch.use_deterministic_algorithms`); kernels of cuDNN among them."""


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Inside, in this thread: no gradients, no autocast, no inference mode, and none of the job's overrides of functions, operations
    and saved tensors. Afterwards all is as before.

    Raises:
        RuntimeError: afterwards a mode of this thread is not as before; names it.
    """
    before = _modes(device)
    with ExitStack() as stack:
        stack.callback(_compare, device, before)
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        # Not `torch.autocast`, which clears the cache of casts that all threads share.
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(torch._C.DisableTorchFunction())  # with it, the default device
        stack.enter_context(torch._C._DisableTorchDispatch())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            # The innermost ones are called, and no others.
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is))
        yield


def settings_of(device: torch.device) -> str:
    """What the process has set that changes bits, as it is now. Where that is what a scan sets, the words are those of a scan."""
    said = devices.settings_of(device)
    return said if torch.are_deterministic_algorithms_enabled() else f"{said}, algorithms not deterministic"


def kind_of(device: torch.device) -> dict[str, str]:
    """What must be equal for equal answers of slices."""
    return {**devices.kind_of(device), "settings": settings_of(device)}


def left_out(item: Item, device: torch.device) -> str:
    """Why an item cannot be computed beside this job, as it is set; "" where it can."""
    if item.variant == "tf32":
        return "it sets the precision of the whole process"
    if device.type != "cuda" or item.operation not in _MAY_NOT_REPEAT:
        return ""
    if not torch.are_deterministic_algorithms_enabled():
        return "its kernels repeat with deterministic algorithms only"
    if item.operation == "conv2d" and torch.backends.cudnn.benchmark:
        return "its kernels are chosen by the clock"
    return ""


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _compare(device: torch.device, before: dict[str, Any]) -> None:
    after = _modes(device)
    changed = sorted(name for name, value in before.items() if after[name] != value)
    if changed:
        raise RuntimeError(f"known work left the job with other modes than it found: {', '.join(changed)}")


def _modes(device: torch.device) -> dict[str, Any]:
    """The modes that a thread has for itself, as they are now: what is of the whole process may be changed by others meanwhile.

    The default device is one of the overrides of functions, and asking torch for it makes a tensor.
    """
    found: dict[str, Any] = {
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "overrides of functions": torch._C._len_torch_function_stack(),
        "overrides of operations": torch._C._len_torch_dispatch_stack(),
    }
    for kind in sorted({"cpu", device.type}):
        found[f"autocast {kind}"] = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    if device.type == "cuda":
        found |= {"device": torch.cuda.current_device(), "stream": torch.cuda.current_stream(device)}
    return found
