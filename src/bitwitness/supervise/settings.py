"""What a supervised run was asked for: one frozen record that leader and members share."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

from bitwitness.errors import ConfigurationError

WhenShort = Literal["stop", "wait"]

AGENT = (sys.executable, "-P", "-m", "bitwitness.supervise.agent")
"""The agent of a node: torchrun, tied to the life of its wrapper."""

PLAIN_AGENT = (sys.executable, "-P", "-m", "bitwitness.supervise.plain_agent")
"""An agent without torch that takes the same arguments: for tests, and for jobs that are not torch's."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A job and how it is supervised. Times are seconds.

    Attributes:
        run_dir: on storage that all nodes share.
        script: path of a script, or name of a module where `module`.
        args: its arguments.
        nodes, nproc_per_node: how many agents train together, and how many processes each starts.
        local: the nodes are played by processes of this machine.
        spares: of a local run: further nodes that wait to take the place of one that is left out.
        max_restarts: restarts after failures that are no corruption.
        max_recoveries: restarts after corruption.
        when_short: what to do where too few nodes are left.
        strikes, strike_window: so many strikes of a device within this time, and it is denied.
        hang_timeout: without any sign of progress on a node; 0: never.
        grace: for workers that were asked to stop.
        lost_after: without a beat.
        join_timeout: for enough nodes, or for a new leader.
        settle: how long others that fail at the same time are waited for, so that the cause is among them.
        tick: between two looks.
        agent: the command of an agent, to which torchrun's arguments are added.
    """

    run_dir: Path
    script: str
    module: bool = False
    args: tuple[str, ...] = ()
    nodes: int = 1
    nproc_per_node: int = 1
    local: bool = False
    spares: int = 0
    max_restarts: int = 0
    max_recoveries: int = 3
    when_short: WhenShort = "stop"
    strikes: int = 3
    strike_window: float = 7 * 86_400.0
    hang_timeout: float = 1800.0
    grace: float = 30.0
    lost_after: float = 60.0
    join_timeout: float = 600.0
    settle: float = 5.0
    tick: float = 0.25
    agent: tuple[str, ...] = AGENT

    def __post_init__(self) -> None:
        least = {"nodes": 1, "nproc_per_node": 1, "spares": 0, "max_restarts": 0, "max_recoveries": 0, "strikes": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ConfigurationError(f"{_option(name)} {value}: must be a whole number, at least {lowest}")
        for name in ("strike_window", "hang_timeout", "grace", "lost_after", "join_timeout", "settle", "tick"):
            value = getattr(self, name)
            shortest = 0.0 if name in ("hang_timeout", "grace", "settle") else 0.01
            if not math.isfinite(value) or value < shortest:
                raise ConfigurationError(f"{_option(name)} {value}: must be a number of seconds, at least {shortest}")
        if self.spares and not self.local:
            raise ConfigurationError(
                "--spares is for nodes played on this machine (--local); on a cluster start more wrappers than --nodes"
            )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.nproc_per_node

    @property
    def beat(self) -> float:
        """Seconds between two beats: twenty fit into the time after which one who is silent counts as lost."""
        return min(3.0, self.lost_after / 20)

    @property
    def job(self) -> dict[str, Any]:
        """What all wrappers must have been started with alike."""
        names = ("nodes", "nproc_per_node", "script", "module", "args")
        return {name: value for name, value in self.to_json().items() if name in names}

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values, every field present."""
        record = asdict(self)
        return {**record, "run_dir": str(self.run_dir), "args": list(self.args), "agent": list(self.agent)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        known = {one.name: record[one.name] for one in fields(cls) if one.name in record}
        known["run_dir"] = Path(known["run_dir"])
        for name in ("args", "agent"):
            known[name] = tuple(known.get(name, ()))
        return cls(**known)


def check_script(settings: Settings) -> None:
    """Raise ConfigurationError where the script is not there: better here, once, than in every worker."""
    if settings.module:
        return
    path = Path(settings.script)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise ConfigurationError(f"script {path} {what} (from {Path.cwd()}): give a Python file, or -m MODULE")
    if not os.access(path, os.R_OK):
        raise ConfigurationError(f"script {path} may not be read: mend its permissions")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
