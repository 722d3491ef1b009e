"""A library of NVIDIA's driver that answers what a test wants, found by the loader where the real one would be."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml_stub.c")
HEALTHY: Mapping[str, str] = {
    "uuid": "GPU-11111111-2222-3333-4444-555555555555",
    "serial": "1652922014438",
    "pci": "00000000:9B:00.0",
    "temperature": "41",
    "power": "120500",
    "clocks": "0x1",
    "eccmode": "1 1",
    "ecc.0.0": "0",
    "ecc.1.0": "0",
    "ecc.0.1": "0",
    "ecc.1.1": "0",
    "rows": "0 0 0 0",
    "sram": "0",
    "link.0": "1",
    "link.1": "1",
    **{f"link.{link}.{counter}": "0" for link in range(2) for counter in range(4)},
    "field.230": "0",
    "mig": "0 0",
}
"""Of one device, everything that is asked, with nothing to tell."""


def build(folder: Path, *without: str) -> Path:
    """Compile the library into a folder; `without` names what an older driver does not have.

    Raises:
        AssertionError: there is no compiler, or it found a mistake.
    """
    compiler = shutil.which("gcc")
    assert compiler is not None, "these tests need gcc: apt-get install gcc libc6-dev"
    folder.mkdir(parents=True, exist_ok=True)
    defines = [f"-DWITHOUT_{name}" for name in without]
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-Wall",
        "-Werror",
        *defines,
        str(SOURCE),
        "-o",
        str(folder / "libnvidia-ml.so.1"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def install(
    monkeypatch: pytest.MonkeyPatch, library: Path, answers: Path, *devices: Mapping[str, str], **whole: str
) -> None:
    """Let processes that are started from now on find the library, with these devices and answers."""
    lines = {"count": str(len(devices)), **whole}
    lines |= {f"{index}.{key}": value for index, device in enumerate(devices) for key, value in device.items()}
    answers.write_text("".join(f"{key} {value}\n" for key, value in lines.items()), encoding="utf-8")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("NVML_STUB", str(answers))
