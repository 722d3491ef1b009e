"""Names that may go into a command of Slurm, and lists of nodes that come out of one.

Slurm takes `ALL` for every node of the cluster where the name of one is expected, and `LOCALHOST` for the machine on which the
command runs. No node of an incident may be called so.
"""

from __future__ import annotations

import re

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clusters.base import valid_node

_WORDS = frozenset({"all", "default", "localhost", "none"})
_JOB = re.compile(r"[1-9][0-9]{0,9}(_[0-9]{1,9})?")
_PART = re.compile(r"[1-9][0-9]{0,9}\+[0-9]{1,9}")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_MOST = 100_000
_DIMENSIONS = 8


def node_name(name: str) -> str:
    """The name of one node.

    Raises:
        ConfigurationError: it is no name, or a word by which Slurm would understand more than one node.
    """
    if valid_node(name).lower() in _WORDS:
        raise ConfigurationError(f"{name!r} is a word of Slurm's and no name of a node: nothing is done to it")
    return name


def job_id(job: str) -> str:
    """The id of a job, or of a task of a job array (`7_3`), without the `slurm:` with which runs record it.

    Raises:
        ConfigurationError: it is no id of a job, or of a part of a heterogeneous one.
    """
    plain = job.removeprefix("slurm:")
    if _PART.fullmatch(plain):
        raise ConfigurationError(
            f"{plain} is a part of a heterogeneous job of Slurm's, which cannot be started again alone: submit it again by hand"
        )
    if not _JOB.fullmatch(plain):
        raise ConfigurationError(f"{job!r:.80} is no id of a Slurm job (123, or 123_4 for a task of an array)")
    return plain


def expand(text: str) -> tuple[str, ...]:
    """The nodes of a list as Slurm prints it: `n[1-3,07],gpu-a` is n1, n2, n3, n07 and gpu-a.

    Raises:
        ClusterError: it cannot be understood, or names more than 100,000 nodes.
    """
    if text.strip() in {"", "(null)", "None", "N/A"}:
        return ()
    names: dict[str, None] = {}
    for part in _parts(text.strip()):
        for name in _expand(part, text):
            names[name] = None
            if len(names) > _MOST:
                raise ClusterError(f"more than {_MOST} nodes in {text!r:.80}")
    return tuple(names)


def _parts(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def _expand(part: str, text: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if part.count("[") > _DIMENSIONS:
        raise ClusterError(f"not understood as a list of nodes: {text!r:.200}")
    if not bracket:
        if not head or "]" in head:
            raise ClusterError(f"not understood as a list of nodes: {text!r:.200}")
        return [head]
    inside, closed, tail = rest.partition("]")
    if not closed:
        raise ClusterError(f"not understood as a list of nodes: {text!r:.200}")
    tails = _expand(tail, text) if tail else [""]
    numbers = _numbers(inside, text)
    if len(numbers) * len(tails) > _MOST:
        raise ClusterError(f"more than {_MOST} nodes in {text!r:.80}")
    return [f"{head}{number}{end}" for number in numbers for end in tails]


def _numbers(inside: str, text: str) -> list[str]:
    numbers: list[str] = []
    for piece in inside.split(","):
        found = _RANGE.fullmatch(piece.strip())
        if found is None:
            raise ClusterError(f"not understood as a list of nodes: {text!r:.200}")
        first, last = found[1], found[2] or found[1]
        if not 0 <= int(last) - int(first) <= _MOST - len(numbers):
            raise ClusterError(f"not understood as a list of nodes: {text!r:.200}")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
