"""Known work in a process that trains: the world around it is put back bit for bit, and what could not be is never touched.

Here and not in the loop of a scan, which has its process for itself. The number of threads and the precision of float32 products
stay the job's own: to set them and set them back is not the same as not to have set them (MKL then no longer chooses its threads,
PyTorch no longer its default precision), and a bit of the job could change. The kind of the device says what they are instead, so
that devices that differ in them are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from bitwitness.guard.rewind import process_settings, random_state_kept


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Inside: no gradients, no autocast, no inference mode, float32 by default, kernels that repeat. Afterwards all is as before.

    What has no kernel that repeats runs all the same: its answers then do not repeat, and judge nobody.

    Raises:
        RuntimeError: afterwards something is not as before; names it.
    """
    before = _modes(device)
    with ExitStack() as stack:
        stack.callback(_put_back, device, before)
        stack.enter_context(random_state_kept(device, ()))
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.cuda.stream(stream))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in {"cpu", device.type}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if torch.get_default_dtype() != torch.float32:
            torch.set_default_dtype(torch.float32)
        _repeat(deterministic=True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = False
            torch.backends.cudnn.deterministic = True
        yield


def _put_back(device: torch.device, before: dict[str, Any]) -> None:
    if torch.get_default_dtype() != before["default dtype"]:
        torch.set_default_dtype(before["default dtype"])
    _repeat(before["deterministic"], before["warn only"])
    torch.utils.deterministic.fill_uninitialized_memory = before["fill"]  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = before["benchmark"]
        torch.backends.cudnn.deterministic = before["cuDNN deterministic"]
    after = _modes(device)
    changed = sorted(name for name, value in before.items() if after[name] != value)
    if changed:
        raise RuntimeError(f"known work left the job with other settings than it found: {', '.join(changed)}")


def _repeat(deterministic: bool, warn_only: bool) -> None:
    """As `torch.use_deterministic_algorithms`, which loads the compiler to tell it as well: seconds, in a step of the job."""
    torch._C._set_deterministic_algorithms(deterministic, warn_only=warn_only)


def _modes(device: torch.device) -> dict[str, Any]:
    """What decides how something is computed, as it is now."""
    found: dict[str, Any] = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "threads": torch.get_num_threads(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "settings": process_settings(device),
    }
    for kind in sorted({"cpu", device.type}):
        found[f"autocast {kind}"] = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    if device.type == "cuda":
        cudnn = torch.backends.cudnn
        found |= {"benchmark": cudnn.benchmark, "cuDNN deterministic": cudnn.deterministic}
        found |= {"device": torch.cuda.current_device(), "stream": torch.cuda.current_stream(device)}
    return found
