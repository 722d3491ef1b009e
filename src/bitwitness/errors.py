"""The whole exception tree on one page.

It lives below everything else because every layer raises from it, and because a reader who catches one of these wants
to see at a glance what else there is to catch.

BitwitnessError
  ConfigurationError (ValueError)   the caller asked for something that cannot be: nothing has started
    PolicyError                     a setting of Policy
    WorkloadError                   the model, the loss function or the batch cannot be witnessed as it is
  CorruptionDetected                numbers were wrong: carries the verdict and the path of the incident
  GuardFailure                      the guard itself failed; says nothing about the numbers
    CheckFailed                     a check raised on some rank
    RankLost                        ranks did not take part in a collective within the time-out
  RunFilesError                     a file of a run cannot be read or written
    StorageBusy                     it is not damaged, and cannot be used now: a full disk, a lock, a server that is away
    CheckpointError                 a checkpoint cannot be written, read or trusted
  StoreError                        the console's database cannot be used, or is not ours
  NotFound                          there is no such run, incident, node or device in it
  ClusterError                      a cluster refused, could not be reached, or answered what is not understood
  MissingExtra                      a part of bitwitness that is not installed
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitwitness.evidence import Verdict


class BitwitnessError(Exception):
    """Every error that bitwitness raises on purpose. `exit_code` is what the command line ends with."""

    exit_code = 1


class ConfigurationError(BitwitnessError, ValueError):
    """Something was asked for that cannot be done. Raised before any work starts or any file is written."""

    exit_code = 2


class PolicyError(ConfigurationError):
    """A setting of `Policy` has an impossible value; the message names the setting, the value and what is allowed."""


class WorkloadError(ConfigurationError):
    """The model, the loss function or the batch cannot be witnessed as it is; the message says what would make it."""


class CorruptionDetected(BitwitnessError):
    """Wrong numbers were found. Raised on every rank at the same step, before the update where the check runs before it.

    `verdict` says who, how sure and of what kind; `incident_path` is the directory of the incident on disk, written
    durably before any rank raised (None only where the disk refused, which the message then says). `note` is what was
    done about it, if anything.
    """

    def __init__(self, verdict: Verdict, incident_path: Path | None, note: str = "") -> None:
        self.verdict = verdict
        self.incident_path = incident_path
        self.note = note
        where = f"incident: {incident_path}" if incident_path is not None else "the incident could not be written"
        said = ". ".join(part.strip().removesuffix(".") for part in (verdict.headline(), verdict.reason, note) if part)
        super().__init__(f"{said}. [{where}]")

    def __reduce__(self) -> tuple[type[CorruptionDetected], tuple[Verdict, Path | None, str], dict[str, Any]]:
        """Exceptions are pickled by their message unless they say otherwise; process pools pickle them."""
        return type(self), (self.verdict, self.incident_path, self.note), self.__dict__

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """160: attributed, retry elsewhere. 3: unattributed, a person must look (DESIGN section 5)."""
        return 160 if self.verdict.status == "attributed" else 3


class GuardFailure(BitwitnessError):
    """The guard itself failed. Distinct from corruption: nothing is said about the numbers of the job."""

    exit_code = 4


class CheckFailed(GuardFailure):
    """A check raised on some rank; every rank raises this with the rank, the check and the original error."""


class RankLost(GuardFailure):
    """A collective of the guard did not complete; names the ranks that did not take part, with their last heartbeat."""


class RunFilesError(BitwitnessError):
    """A file of a run cannot be read or written; names the file and what to do."""

    exit_code = 2


class StorageBusy(RunFilesError):
    """A file is not damaged and cannot be used now: a full disk, a lock, a server that is away. Trying again may help."""

    exit_code = 1


class CheckpointError(RunFilesError):
    """A checkpoint cannot be written, read or trusted; names it and says why."""


class StoreError(BitwitnessError):
    """The console's database cannot be used: it does not answer, is damaged, of a newer version, or of something else."""


class NotFound(BitwitnessError):
    """There is nothing of this name in the console's database; the message says what was looked for."""

    exit_code = 2


class ClusterError(BitwitnessError):
    """A cluster refused, could not be reached, or answered what is not understood; names the call and what it said.

    `refused`: it said no, so that nothing has happened for certain, and even what must not be done twice may be asked for again.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        self.refused = refused
        super().__init__(message)


class MissingExtra(BitwitnessError):
    """A part of bitwitness needs an extra that is not installed; the message is the install line."""

    exit_code = 2
