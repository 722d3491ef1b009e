"""What every check has in common. A new check is one new file beside this one and one line in the guard's list."""

from __future__ import annotations

from typing import ClassVar

from bitwitness.evidence import CheckName
from bitwitness.guard.job import Job, Outcome, Step


class Check:
    """One detector.

    The guard calls these in a fixed order at fixed places of a step, on every rank alike: a check may use the channel in
    any of them, so whether it does must follow from what all ranks know. None says that the check was not due.
    """

    name: ClassVar[CheckName]

    def __init__(self, job: Job) -> None:
        self.job = job

    def start(self) -> None:
        """Before the first step, when everything that is to be compared exists."""

    def wants_gradients(self, step: Step, micro: int) -> bool:
        """Before a micro-batch's forward: whether the digests of its own local gradient are needed."""
        return False

    def before_update(self, step: Step) -> Outcome | None:
        """After the last backward of a step, before clipping and the update."""
        return None

    def after_update(self, step: Step) -> Outcome | None:
        """After the update."""
        return None
