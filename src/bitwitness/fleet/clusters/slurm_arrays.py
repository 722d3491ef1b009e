"""Which record of Slurm's is the job that is meant: one task of a job array has the number of the array and its own.

Slurm shows all tasks of an array for the number of the array, and whatever is asked for that number happens to all of them. The
last task of an array even has that number as its own job id. So a plain number that stands for an array is refused: a requeue
of it would kill healthy tasks and run ended ones again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bitwitness.errors import ClusterError, ConfigurationError

_SPAN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([1-9][0-9]{0,8}))?)?")


@dataclass(frozen=True, slots=True)
class Names:
    """What a record calls itself.

    Attributes:
        array: number of the array, or "".
        task: its number in the array; of tasks that wait together a list such as `4-9,11%2`; or "".
        parts: number of the heterogeneous job of which it is a part, or "".
    """

    array: str = ""
    task: str = ""
    parts: str = ""


def array_of(job: str) -> str:
    """The number by which Slurm is asked for a job, or for the whole array of a task."""
    return job.partition("_")[0]


def chosen(job: str, there: Sequence[Names]) -> int | None:
    """Which of the records that Slurm shows is the job; None where none is. `job`: `7`, or `7_3` for a task of an array.

    Raises:
        ConfigurationError: the number stands for more than one job, so nothing may be asked of it.
        ClusterError: there are several, and nothing says why.
    """
    array, _, task = job.partition("_")
    if any(one.parts for one in there):
        raise ConfigurationError(
            f"job {job} is a heterogeneous job of Slurm's, whose parts cannot be started again alone: submit it again by hand"
        )
    if task:
        mine = [place for place, one in enumerate(there) if one.array == array]
        exact = [place for place in mine if there[place].task == task]
        return next(iter(exact or [place for place in mine if _holds(there[place].task, int(task))]), None)
    if any(one.array == job for one in there):
        raise ConfigurationError(
            f"job {job} is a job array of Slurm's, and which of its tasks is meant is not said. What is asked of {job} would "
            f"happen to all of them, so nothing is: start the task again by hand (scontrol requeue {job}_TASK)"
        )
    if len(there) > 1:
        raise ClusterError(f"Slurm shows {len(there)} jobs for {job}, and does not say that it is an array")
    return 0 if there else None


def _holds(tasks: str, task: int) -> bool:
    """Whether a list of tasks that wait together has this one: `4-9,11%2`, `0-20:5`."""
    for piece in tasks.partition("%")[0].split(","):
        found = _SPAN.fullmatch(piece.strip())
        if found is not None and int(found[1]) <= task <= int(found[2] or found[1]):
            return (task - int(found[1])) % int(found[3] or 1) == 0
    return False
