"""Runs one command of Slurm: a list of words that no shell sees, within a time, in an environment that fixes its answers.

It is a function and no method, so that tests can put a recorded one in its place.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bitwitness.errors import ClusterError
from bitwitness.fleet.clusters.base import Call, one_line


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str = ""


Runner = Callable[[Sequence[str], float], Answer]
"""Runs a command, words and seconds. May raise `ClusterError` where it cannot be run or does not end."""

_FIXED = {"TZ": "UTC", "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
_FOREIGN = ("SLURM_CLUSTERS", "SINFO_", "SQUEUE_", "SCONTROL_")
"""Variables that would have commands print other things, or of another cluster."""


def run(words: Sequence[str], timeout: float) -> Answer:
    """Run a command on this machine."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)} | _FIXED
    shown = one_line(str(Call(tuple(words))))
    try:
        done = subprocess.run(
            list(words), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, env=env, check=False
        )
    except FileNotFoundError as error:
        raise ClusterError(f"{words[0]} is not installed here, or not in PATH: install Slurm's commands") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{shown} did not end within {timeout:g} s: is slurmctld up? (scontrol ping)") from error
    except (OSError, ValueError) as error:
        raise ClusterError(f"{shown} could not be run: {error}") from error
    return Answer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
