"""bitwitness finds silent data corruption in distributed PyTorch training.

The public names, and nothing else. They are loaded when first used, so that the parts without torch import without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bitwitness._version import __version__ as __version__

if TYPE_CHECKING:
    from bitwitness.errors import BitwitnessError as BitwitnessError
    from bitwitness.errors import CheckFailed as CheckFailed
    from bitwitness.errors import CheckpointError as CheckpointError
    from bitwitness.errors import ConfigurationError as ConfigurationError
    from bitwitness.errors import CorruptionDetected as CorruptionDetected
    from bitwitness.errors import GuardFailure as GuardFailure
    from bitwitness.errors import MissingExtra as MissingExtra
    from bitwitness.errors import PolicyError as PolicyError
    from bitwitness.errors import RankLost as RankLost
    from bitwitness.errors import RunFilesError as RunFilesError
    from bitwitness.errors import WorkloadError as WorkloadError
    from bitwitness.evidence import Observation as Observation
    from bitwitness.evidence import Verdict as Verdict
    from bitwitness.fingerprint import fingerprint_tensors as fingerprint_tensors
    from bitwitness.guard.guard import Guard as Guard
    from bitwitness.policy import Policy as Policy
    from bitwitness.runfiles import read_incident as read_incident
    from bitwitness.runfiles import read_label as read_label

_HOMES = {
    "BitwitnessError": "errors",
    "CheckFailed": "errors",
    "CheckpointError": "errors",
    "ConfigurationError": "errors",
    "CorruptionDetected": "errors",
    "Guard": "guard.guard",
    "GuardFailure": "errors",
    "MissingExtra": "errors",
    "Observation": "evidence",
    "Policy": "policy",
    "PolicyError": "errors",
    "RankLost": "errors",
    "RunFilesError": "errors",
    "Verdict": "evidence",
    "WorkloadError": "errors",
    "fingerprint_tensors": "fingerprint",
    "read_incident": "runfiles",
    "read_label": "runfiles",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  (the names are strings, kept in one place)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'bitwitness' has no attribute {name!r}")
    try:
        value = getattr(import_module(f"bitwitness.{home}"), name)
    except ModuleNotFoundError as error:
        if error.name in ("torch", "numpy"):
            from bitwitness.errors import MissingExtra as Missing

            raise Missing(f"bitwitness.{name} needs {error.name}: pip install 'bitwitness[train]'") from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
