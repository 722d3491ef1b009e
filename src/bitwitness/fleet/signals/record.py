"""The one record in which every source of hardware signals speaks: pure data, so that a decision can be tested in a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

SignalClass = Literal["memory", "link", "loud", "application", "noise", "no-evidence"]
"""What a signal speaks for.

    memory       a memory or a memory path of this device: supports that the device computes wrongly
    link         a link between devices: supports a *communication* cause, and blames none of its ends alone
    loud         a fault that does not go unnoticed (bus loss, firmware, power): a broken device, but not silent corruption
    application  what a program did wrong: says nothing about the device
    noise        what happens on healthy devices too
    no-evidence  a source that is absent, could not be read or skipped its test: never health
"""

Weight = Literal["strong", "medium", "weak", "none"]
"""How much it weighs beside an incident that names the device."""

WEIGHTS: Mapping[Weight, int] = {"strong": 0, "medium": 1, "weak": 2, "none": 3}
"""The order of weights: what weighs most comes first."""

_SHORT = ("source", "code", "device", "time", "class", "weight", "reason")


@dataclass(frozen=True, slots=True)
class Signal:
    """One thing that the hardware, its driver or a diagnostic said.

    Attributes:
        source: who said it: `kernel`, `nvml`, `dcgm`, `dcgm-diag`, `edac`, `rasdaemon`, `mce`, `amd-smi`, `ascend-dmi`,
            `rvs`, `scan`.
        code: what, in a vocabulary that survives renaming: `xid:63`, `sxid:12022`, `edac:ue`, `dcgm:395`, `dcgm-diag:52`.
        device: the device's UUID where the source gives one, else its PCI address (`0000:9b:00`), the label of a DIMM, or "".
        time: UTC in ISO 8601, or None where the source does not say.
        kind: what it speaks for; `class` in JSON.
        weight: how much, beside an incident.
        reason: why, in a sentence.
        host: the node that it is about, or "" where the source does not say.
        count: how often it was seen; the time is that of the last.
        evidence: what was read, cut to a readable length.
        origin: the file, address or command that it was read from.
        via: the list of ours that quotes it, where it was read from one; not a part of the record.

    Raises:
        ValueError: class or weight is none of the above, or the time is not ISO 8601 with a zone.
    """

    source: str
    code: str
    device: str
    time: str | None
    kind: SignalClass
    weight: Weight
    reason: str
    host: str = ""
    count: int = 1
    evidence: str = ""
    origin: str = ""
    via: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for value, allowed in ((self.kind, SignalClass), (self.weight, Weight)):
            if value not in get_args(allowed):
                raise ValueError(f"{value!r} is none of {', '.join(get_args(allowed))}")
        if self.time is not None and datetime.fromisoformat(self.time).tzinfo is None:
            raise ValueError(f"the time of a signal needs a zone, got {self.time!r}")

    @property
    def moment(self) -> datetime | None:
        """The time as a datetime."""
        return None if self.time is None else datetime.fromisoformat(self.time)

    def to_json(self, *, details: bool = False) -> dict[str, Any]:
        """The record as JSON values: source, code, device, time, class, weight and reason; with `details` all fields."""
        values = asdict(self)
        values["class"] = values.pop("kind")
        more = sorted(set(values) - {*_SHORT, "via"}) if details else ()
        return {name: values[name] for name in (*_SHORT, *more)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Signal:
        """The inverse of `to_json`; unknown keys are ignored.

        Raises:
            KeyError, TypeError, ValueError: it is not one of these.
        """
        texts = {name: record[name] for name in _SHORT if name != "class"} | {"kind": record["class"]}
        texts |= {name: record[name] for name in ("host", "evidence", "origin") if name in record}
        for name, value in texts.items():
            if not isinstance(value, str) and not (name == "time" and value is None):
                raise TypeError(f"{name} is no text: {value!r:.80}")
        count = record.get("count", 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"count is a whole number from 1 on, got {count!r:.80}")
        return cls(**texts, count=count)


def no_evidence(source: str, code: str, reason: str, *, origin: str = "", host: str = "", device: str = "") -> Signal:
    """A source that could not be read, is absent, or skipped its test: said aloud, because silence would read as health."""
    return Signal(source, code, device, None, "no-evidence", "none", reason, host=host, origin=origin)


def within(signals: Iterable[Signal], at: datetime, before: timedelta, after: timedelta) -> list[Signal]:
    """The signals of the window [at - before, at + after], and those that do not say when."""
    return [one for one in signals if one.moment is None or at - before <= one.moment <= at + after]
