"""Who answers in a scan: the identity of a device, and the kind by which it may be compared with others.

The guard asks the same of its ranks, so identity, model and settings come from there. A scan needs more of the kind: its answers are
compared across nodes that nobody has set up together, and kept as golden answers for years, so all that is known to change bits must be
in it. What is missing there looks like a fault; what is there too much only costs comparisons.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import torch

from bitwitness.guard.rewind import process_settings
from bitwitness.guard.start import facts_of_rank
from bitwitness.runfiles.answers import Device
from bitwitness.scan import work
from bitwitness.scan.items import SUITE_VERSION

DRIVER = Path("/proc/driver/nvidia/version")
CPU = Path("/proc/cpuinfo")

_CPU_LINES = (
    "vendor_id",
    "cpu family",
    "model",
    "stepping",
    "cache size",
    "flags",
    "Features",
    "CPU implementer",
    "CPU part",
)
"""What libraries choose their kernels and their blocks by."""
_INSTRUCTIONS = re.compile(r"(sse|ssse|avx|amx|fma|f16c|bmi|popcnt|asimd|sve|i8mm|bf16|fphp|neon)\w*")
"""Of all that a kernel says a processor can do: the rest differs between versions of the kernel and changes no bit."""

_LIBRARIES = re.compile(r"nvidia-(cublas|cudnn|cuda-nvrtc|cusparselt)(-cu\d+)?")
_VARIABLES = re.compile(
    r"ATEN_CPU_CAPABILITY|(MKL|ONEDNN|DNNL|OPENBLAS|BLIS|CUBLAS|CUBLASLT|CUDNN|NVIDIA_TF32|TORCH_BLAS|TORCH_CUDNN|TORCH_ALLOW)_\w+"
)
_NO_BITS = re.compile(r"\w*(VERBOSE|LOG\w*|NUM_THREADS|CACHE_DIR|PATH)")
"""Variables with such names change no bits; threads are settled."""


def this_device(rank: int, torch_device: torch.device, node: str, slot: int | None = None) -> Device:
    """Who answers as this rank.

    Args:
        rank: its number in the scan.
        torch_device: what it computes on.
        node: the node's name.
        slot: its position among the processor ranks of the node, by which one without a GPU is called; else LOCAL_RANK, or 0.
    """
    with work.settled(torch_device):
        facts = facts_of_rank(rank, torch_device)
        kind = kind_of(torch_device)
    local = os.environ.get("LOCAL_RANK", "")
    place = slot if slot is not None else int(local) if local.isdecimal() else 0
    identity = str(facts["device"]) or f"{node}/{torch_device.type}-{place}"
    return Device(rank, node, identity, kind, os.getpid())


def kind_of(torch_device: torch.device) -> dict[str, str]:
    """What must be equal for equal answers, under the settings that hold now. Changes none of them: a job may be training."""
    model = str(facts_of_rank(0, torch_device)["model"])
    kind = {"device": model, "suites": str(SUITE_VERSION), **_software(), "settings": settings_of(torch_device)}
    kind |= _gpu(torch_device) if torch_device.type == "cuda" else _processor()
    return dict(sorted(kind.items()))


def temperature(torch_device: torch.device) -> float | None:
    """In degrees Celsius; None where nothing tells it (no GPU, no NVML)."""
    if torch_device.type != "cuda":
        return None
    try:
        return float(torch.cuda.temperature(torch_device))
    except Exception:  # noqa: BLE001  (NVML raises errors of its own types, and a scan goes on without a thermometer)
        return None


def _software() -> dict[str, str]:
    """Of torch, with the revision it was built of and the libraries built in."""
    found = {
        "torch": torch.__version__,
        "git": str(torch.version.git_version)[:12],
        "build": _short(torch.__config__.show()),
    }
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if _VARIABLES.fullmatch(name) and not _NO_BITS.fullmatch(name)
    }
    if variables:
        found["environment"] = ",".join(f"{name}={value}" for name, value in variables.items())
    return found


def settings_of(device: torch.device) -> str:
    """What the process has set that changes bits, as it is now, in one line."""
    said = ", ".join(f"{name} {value}" for name, value in process_settings(device).items())
    # There is no way to ask torch for it: 2^-1074 is the smallest subnormal number.
    kept = torch.tensor([2.0**-1074], dtype=torch.float64, device="cpu").mul(1.0).item() != 0
    if device.type == "cuda":
        cuda = torch.backends.cuda.matmul
        reduced = (cuda.allow_fp16_reduced_precision_reduction, cuda.allow_bf16_reduced_precision_reduction)
        said += f", reduced precision {reduced}, BLAS {torch.backends.cuda.preferred_blas_library()}"
    return said if kept else f"{said}, subnormal numbers flushed"


def _gpu(device: torch.device) -> dict[str, str]:
    """The parts of a model that choose kernels (a MIG slice has fewer multiprocessors), and the libraries at run time."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "multiprocessors": str(properties.multi_processor_count),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": str(torch.version.cuda or torch.version.hip),
        "cudnn": str(torch.backends.cudnn.version()),
        "driver": driver_version(),
        **libraries(),
    }


@cache
def libraries() -> Mapping[str, str]:
    """The versions of NVIDIA's libraries that are installed as packages. Reads many files, once."""
    found = {}
    for one in distributions():
        name = one.metadata["Name"] or ""
        if _LIBRARIES.fullmatch(name):
            found[name.removeprefix("nvidia-")] = one.version
    return dict(sorted(found.items()))


def driver_version(file: Path = DRIVER) -> str:
    """Of the NVIDIA driver; "unknown" where the kernel does not tell it."""
    with suppress(OSError, ValueError):
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", file.read_text(encoding="utf-8", errors="replace"))
        if found:
            return found[0]
    return "unknown"


def _processor() -> dict[str, str]:
    return {"processor": _short("\n".join(f"{name} {value}" for name, value in processor_facts().items()))}


def processor_facts(file: Path = CPU) -> Mapping[str, str]:
    """What of a processor chooses kernels: family, cache, instruction sets. Empty where the kernel does not tell."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            words = value.split()
            if name.strip() in ("flags", "Features"):
                words = sorted(word for word in words if _INSTRUCTIONS.fullmatch(word))
            if name.strip() in _CPU_LINES:
                # The first core speaks for all: a scan compares nothing on machines that mix cores.
                found.setdefault(name.strip(), " ".join(words))
    return found


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
