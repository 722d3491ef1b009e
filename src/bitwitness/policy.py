"""Every setting of the guard, validated once.

Settings are plain data that is agreed on by all ranks before the first step, so they live apart from what they steer.
In code they are arguments of `Policy`; a TOML file or `BITWITNESS_*` variables fill in only what the code leaves open,
so that no environment silently overrides a program.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from bitwitness.errors import PolicyError
from bitwitness.evidence import Verdict

AuditLevel = Literal["auto", "gradients", "loss", "off"]
Reaction = Literal["raise", "record", "retry", "skip"]
OnDetection = Reaction | Callable[[Verdict, Path | None], Reaction]
"""What to do on a hit, or a function of the verdict and of the incident's directory that says it, alike on every rank."""

REACTIONS: tuple[Reaction, ...] = ("raise", "record", "retry", "skip")

_AUDITS: tuple[AuditLevel, ...] = ("auto", "gradients", "loss", "off")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How often to check, what to compare, and what to do on a hit. An interval N is due when `(step + 1) % N == 0`.

    Attributes:
        audit: what a replay compares: every parameter's local gradient and the loss (`"gradients"`), the loss
            (`"loss"`), nothing (`"off"`), or the strongest of these that the workload repeats bit for bit (`"auto"`).
        audit_every: steps between replays. The first step is always audited.
        check_every: steps between comparisons of the replicas.
        checkpoint_every: steps between the saves of the job, if known: the step before a save is always audited. 0: unknown.
        keep_checkpoints: how many of the newest checkpoints are kept; of the older ones fewer with age.
        deterministic_audits: run audited steps, original and replay, under deterministic algorithms. This is the one
            setting that may change the bits of what is trained.
        on_detection: `"raise"` `CorruptionDetected` on every rank; `"record"` the incident and go on (shadow mode);
            `"retry"` the step once from the untouched weights and go on if it was transient; `"skip"` the update on every
            rank; or a function `(verdict, incident_path) -> one of these`. Retry and skip exist before the update only.
        max_skips: how many updates in a row may be skipped; the next hit raises.
        replica_buffers: compare buffers across replicas as well; only right where the job keeps them equal.
        timeout: seconds after which a collective of the guard ends with an error that names the missing ranks.
        checkpoint_timeout: likewise for the phases of a save or a resume, which wait for storage.

    Raises:
        PolicyError: a value is impossible; names the setting.
    """

    audit: AuditLevel = "auto"
    audit_every: int = 100
    check_every: int = 10
    checkpoint_every: int = 0
    deterministic_audits: bool = False
    on_detection: OnDetection = "raise"
    replica_buffers: bool = False
    timeout: float = 300.0
    keep_checkpoints: int = 3
    checkpoint_timeout: float = 1800.0
    max_skips: int = 3

    def __post_init__(self) -> None:
        _check_choice("audit", self.audit, _AUDITS)
        if not callable(self.on_detection):
            _check_choice("on_detection", self.on_detection, REACTIONS)
        for name, (least, what) in _WHOLE_NUMBERS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise PolicyError(f"Policy({name}={value!r}): must be a whole number of {what}, at least {least}")
        for name in ("deterministic_audits", "replica_buffers"):
            if not isinstance(getattr(self, name), bool):
                raise PolicyError(f"Policy({name}={getattr(self, name)!r}): must be True or False")
        for name in ("timeout", "checkpoint_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 86_400:
                raise PolicyError(f"Policy({name}={value!r}): must be seconds between 1 and 86400")

    @classmethod
    def every_step(cls, **settings: Any) -> Policy:
        """Check everything at every step: the setting for campaigns and for suspicion."""
        return cls(**{"audit_every": 1, "check_every": 1, **settings})

    @classmethod
    def load(
        cls, file: str | Path | None = None, environment: Mapping[str, str] | None = None, **settings: Any
    ) -> Policy:
        """A policy from `settings`, else from the TOML `file`, else from `BITWITNESS_*` variables, else the defaults.

        In the file the settings stand at the top level or in a table `[policy]`; the variables are named after the
        settings, e.g. `BITWITNESS_AUDIT_EVERY=50`.

        Raises:
            PolicyError: an unknown setting, an unreadable file or an impossible value; names where it came from.
        """
        _check_known(settings, "Policy.load()")
        chosen = _from_environment(os.environ if environment is None else environment)
        if file is not None:
            chosen |= _from_file(Path(file))
        return cls(**(chosen | settings))

    def due(self, every: int, step: int) -> bool:
        """Whether a check with this interval is due at `step` (from 0)."""
        return (step + 1) % every == 0

    def audit_due(self, step: int) -> bool:
        """Whether a replay is due at `step`: a pure function, so that every rank knows it before the forward."""
        if self.audit == "off":
            return False
        before_save = self.checkpoint_every > 0 and self.due(self.checkpoint_every, step)
        return before_save or self.due(self.audit_every, step)

    def replicas_due(self, step: int) -> bool:
        """Whether the replicas are compared after the update of `step`."""
        before_save = self.checkpoint_every > 0 and self.due(self.checkpoint_every, step)
        return before_save or self.due(self.check_every, step)

    def replace(self, **settings: Any) -> Policy:
        """A copy with some settings changed."""
        return replace(self, **settings)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values, every setting present."""
        settings = {one.name: getattr(self, one.name) for one in fields(self)}
        if callable(self.on_detection):
            # No address in it: the ranks compare this text.
            named = self.on_detection if hasattr(self.on_detection, "__qualname__") else type(self.on_detection)
            settings["on_detection"] = f"function {named.__qualname__}"
        return settings


_WHOLE_NUMBERS = {
    "audit_every": (1, "steps"),
    "check_every": (1, "steps"),
    "checkpoint_every": (0, "steps"),
    "keep_checkpoints": (1, "checkpoints"),
    "max_skips": (0, "steps"),
}
_TYPES: dict[str, type] = {f.name: type(f.default) for f in fields(Policy)}


def _check_values(settings: Mapping[str, Any], where: str) -> None:
    """Settings are independent of each other, so each can be tried where it is known where it came from."""
    try:
        Policy(**settings)
    except PolicyError as error:
        raise PolicyError(f"{where}: {error}") from error


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(f'"{choice}"' for choice in allowed)
        raise PolicyError(f"Policy({name}={value!r}): must be one of {choices}")


def _check_known(settings: Mapping[str, Any], where: str) -> None:
    unknown = sorted(set(settings) - set(_TYPES))
    if unknown:
        raise PolicyError(f"{where}: no such setting: {', '.join(unknown)}; settings are {', '.join(_TYPES)}")


def _from_file(file: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PolicyError(f"policy file {file} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolicyError(f"policy file {file} is not TOML: {error}") from error
    table = content.get("policy", content)
    if not isinstance(table, dict):
        raise PolicyError(f"policy file {file}: [policy] must be a table")
    stray = sorted(set(content) & set(_TYPES)) if table is not content else []
    if stray:
        raise PolicyError(f"policy file {file}: move {', '.join(stray)} into [policy]; beside it nothing is read")
    _check_known(table, f"policy file {file}")
    _check_values(table, f"policy file {file}")
    return table


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for name, kind in _TYPES.items():
        variable = f"BITWITNESS_{name.upper()}"
        text = environment.get(variable)
        if text is None:
            continue
        try:
            chosen[name] = _BOOLEANS[text.strip().lower()] if kind is bool else kind(text.strip())
        except (ValueError, KeyError) as error:
            raise PolicyError(f"{variable}={text!r}: must be {_WORDS[kind]}") from error
        _check_values({name: chosen[name]}, f"{variable}={text!r}")
    return chosen


_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_WORDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number"}
