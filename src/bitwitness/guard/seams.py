"""Where somebody may look into a step, or disturb it: what the guard does is told to a probe, if there is one.

Faults must be placed where no hook of PyTorch reaches: in a witness's replay only, between the look at a gradient and its
reduction, between a file and its read-back. Were the injector to patch the guard for that, every change here would silently
break it; so the guard says what it is doing, at these places and no others, and knows nothing of whoever listens. Without a
probe each of them costs one comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

if TYPE_CHECKING:
    from bitwitness.guard.job import Job

Work = Literal["replay", "arbiter", "rerun", "save"]
"""What is done beside training: a witness's replay, the one of the third node, everybody's repeats after a disagreement (and
those of the calibration), the writing of a checkpoint."""


class Probe:
    """Is told what the guard does, and may change what it is given in place. Does nothing: a subclass overrides what it needs."""

    def guarded(self, job: Job) -> None:
        """A guard was made for this job."""

    def micro_batch(self, step: int, micro: int, batch: Any) -> None:
        """A micro-batch of training begins; nothing of it was looked at yet."""

    def begins(self, work: Work, step: int) -> None:
        """Work other than training begins."""

    def ends(self, work: Work, step: int) -> None:
        """It has ended, by an error perhaps."""

    def rebuilt(self, batch: Any) -> None:
        """A batch was made anew, for a replay."""

    def loss(self, loss: Tensor) -> None:
        """The loss function has returned, in training or in a replay."""

    def sends(self, bucket: Tensor) -> None:
        """The local gradient was looked at and is about to be reduced, flat."""

    def reduced(self, bucket: Tensor) -> None:
        """The reduction of a bucket has come back, flat."""

    def written(self, folder: Path) -> None:
        """The files of a checkpoint are written, and not read back yet."""

    def published(self, folder: Path) -> None:
        """A checkpoint has appeared under its name."""


probe: Probe | None = None
"""Who is told; set by `watched`."""


@contextmanager
def watched(by: Probe) -> Iterator[None]:
    """Tell this probe, until the end of the context. One at a time.

    Raises:
        RuntimeError: somebody else is being told.
    """
    global probe  # noqa: PLW0603  (one process trains one job; a parameter through every layer would say no more)
    if probe is not None:
        raise RuntimeError("the guard already has a probe: leave the other one's context first")
    probe = by
    try:
        yield
    finally:
        probe = None


@contextmanager
def doing(work: Work, step: int) -> Iterator[None]:
    """Around work other than training."""
    told = probe
    if told is None:
        yield
        return
    try:
        told.begins(work, step)
        yield
    finally:
        told.ends(work, step)
