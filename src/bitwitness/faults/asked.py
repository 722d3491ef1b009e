"""What the environment asks for: which faults are to strike a script, and the seed of what they draw.

Read twice, and therefore by itself: by `bitwitness run` before anything is started, because a slip must not cost a place in the
queue, and by every worker. No torch, unless a record is to be done again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bitwitness.errors import ConfigurationError
from bitwitness.faults.grammar import parse_all
from bitwitness.faults.spec import Fault

if TYPE_CHECKING:
    from bitwitness.faults.record import Strike

FAULT, SEED, RECORD = "BITWITNESS_FAULT", "BITWITNESS_FAULT_SEED", "BITWITNESS_FAULT_RECORD"
"""The faults, in the grammar or as `@` and a record; the seed of what they draw; the folder of records, by default that of the run."""


def asked(environment: Mapping[str, str], world_size: int) -> tuple[tuple[Fault, ...] | tuple[Strike, ...], int]:
    """The faults that are asked for, or the strikes of a record, and the seed.

    Args:
        environment: holds the variables.
        world_size: the number of ranks of the job.

    Raises:
        ConfigurationError: they cannot be understood, or are on a rank that is not there; names the variable.
    """
    text = environment.get(FAULT, "")
    try:
        seed = int(environment.get(SEED, "0"))
    except ValueError:
        raise ConfigurationError(f"{SEED}={environment[SEED]!r}: must be a whole number") from None
    try:
        if text.startswith("@"):
            strikes = _recorded(text[1:])
            _check_ranks({one.site.rank: one.spec for one in strikes}, world_size)
            return strikes, seed
        faults = parse_all(text)
        _check_ranks({one.where.rank: str(one) for one in faults if isinstance(one.where.rank, int)}, world_size)
        return faults, seed
    except ConfigurationError as error:
        raise ConfigurationError(f"{FAULT}: {error}") from error


def _recorded(path: str) -> tuple[Strike, ...]:
    from bitwitness.faults.record import read  # noqa: PLC0415  (needs torch)

    if not path.strip():
        raise ConfigurationError("after '@' the path of a record is missing")
    return read(Path(path))


def _check_ranks(hit: Mapping[int, str], world_size: int) -> None:
    for rank, spec in sorted(hit.items()):
        if rank >= world_size:
            raise ConfigurationError(
                f"{spec}: there is no rank {rank}, the job has {world_size} (0 to {world_size - 1})"
            )
