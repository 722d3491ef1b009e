"""`bitwitness run` as a child of an example, which ends with it however that ends.

A person who starts `bitwitness run` wants it to go on when a terminal closes badly; an example that started it must leave
nothing behind. So it is started through this module, which first asks the kernel to be killed with its parent:
`python -m bitwitness.examples.supervised run ...` is then `python -m bitwitness run ...`.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from bitwitness.supervise.processes import PARENT, die_with_parent

_PATIENCE = 30.0
"""Seconds it has to end its nodes when told to, before it is killed, and they with it."""

_STRANGERS = (
    "BITWITNESS_DEVICES",
    "BITWITNESS_NODE",
    "BITWITNESS_SUSPICION",
    "BITWITNESS_FAULT",
    "BITWITNESS_FAULT_SEED",
    "BITWITNESS_FAULT_RECORD",
)
"""What may be set for another job: it would tell every node that is played the same, or hit an example by another's fault."""


class Supervised:
    """A supervised job, from entering to leaving the context.

    Args:
        arguments: of `bitwitness run`.
        log: where its output goes, and that of its workers.
    """

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._command = [sys.executable, "-P", "-m", "bitwitness.examples.supervised", "run", *arguments]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        inherited = {name: value for name, value in os.environ.items() if name not in _STRANGERS}
        environment = {
            **inherited,
            # One thread each, or eight ranks on two cores mostly wait for one another.
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
            "GLOO_SOCKET_IFNAME": "lo",  # a container's own name need not resolve
            "CUDA_VISIBLE_DEVICES": "",  # the nodes share this machine's processor, and no accelerator is of one of them
            "PYTHONUNBUFFERED": "1",
            PARENT: str(os.getpid()),
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """End it and all of its nodes, at once, and wait until they have ended."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
        ):  # the first asks its workers to save and leave, the second ends them
            process.send_signal(number)
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    die_with_parent()
    runpy.run_module("bitwitness", run_name="__main__", alter_sys=True)
