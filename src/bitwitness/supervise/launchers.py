"""Who starts the wrappers, as far as the leader can know and use it: what differs between one machine and a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bitwitness.runfiles.supervision import Member


class Launcher(Protocol):
    """Whoever starts the wrappers, as far as the leader can know and use it."""

    @property
    def expected(self) -> int:
        """How many wrappers are known to come."""

    @property
    def patience(self) -> float:
        """Seconds to wait for one more after the last that came."""

    def names(self) -> Sequence[str | None]:
        """Names of the nodes by index, where they are known beforehand; None where not."""

    def dead(self, member: Member) -> str:
        """Why a wrapper is known to be dead, or ""."""

    def exit_code(self, node: str) -> int | None:
        """What the wrapper of that name has ended with, -n for signal n; None where that is not known."""

    def coming(self, node: str, pid: int) -> bool:
        """Whether a wrapper of that name, other than the process `pid`, is on its way."""

    def revive(self, node: str) -> bool:
        """Start a wrapper again, where that is possible; whether one may still come."""


class Scattered:
    """The launcher of a cluster: wrappers come as the cluster starts them, and are known by their beats alone."""

    def __init__(self, expected: int, patience: float = 10.0) -> None:
        self.expected, self.patience = expected, patience

    def names(self) -> Sequence[str | None]:
        """None is known."""
        return ()

    def dead(self, member: Member) -> str:
        """Never known."""
        return ""

    def exit_code(self, node: str) -> int | None:
        """Never known."""
        return None

    def coming(self, node: str, pid: int) -> bool:
        """Never known."""
        return False

    def revive(self, node: str) -> bool:
        """The cluster's business, which may well do it."""
        return True
