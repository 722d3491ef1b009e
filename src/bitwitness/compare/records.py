"""What a participant of a comparison writes down, step by step: plain data, and no opinion on who is right.

    DIR/compare.json                     what was asked
    DIR/participants/NAME.json           who it is: role, device, kind, what is simulated
    DIR/journal/NAME.MODE.jsonl          `site`, `layout`, `step`, `ranges` and `end` records
    DIR/report.json, DIR/report.html     what was concluded; written last

A journal is written in one system call a line, so that whatever kills a participant leaves all whole steps. Read without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

from bitwitness.errors import RunFilesError
from bitwitness.runfiles.answers import Device
from bitwitness.runfiles.files import read_json, write_json
from bitwitness.runfiles.journal import Journal, read_journal

Mode = Literal["lock-step", "parameters", "free"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""After each submodule everything is made equal again; after each step parameters and optimizer state are; nothing is."""

Role = Literal["leader", "reference", "suspect", "control"]
"""The leader is a healthy device whose tape all others are compared with; a control is healthy, with another seed."""

Phase = Literal["batch", "fwd_in", "fwd_out", "loss", "grad_out", "grad_in", "grad_w", "update", "state", "memory"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""What was computed: the batch; what arrives at a module, which the code between the chosen modules made; its output; the loss; the
gradient that arrives at it on the way back; the one that it passes on; those of its parameters; parameters after the update; the
state of the optimizer and buffers after it; and of these what the leader's step has left as it was, which nobody computed."""

BORDERS_OF_BACKWARD: tuple[Phase, ...] = ("grad_out", "grad_in")

WordClass = Literal["zero", "special", "sign", "stale", "moved", "other"]
"""Of a wrong element, the first that holds: it is 0 and the right one is not; NaN or infinite; the right one negated; what the right one in this place was in the
step before; the right one of another place of the same tensor; none of these."""

DECADES: tuple[float, ...] = (0.0, 1e-12, 1e-9, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1e4, 1e6, 1e9)
"""Lower ends of the ranges of magnitude by which right values are counted: the first holds exact zeros only, the second whatever is
smaller than the third's lower end, the last all above, with what is not finite."""


_BEGINNINGS = 8


def begins_anew(mode: Mode, step: int, steps: int) -> bool:
    """Whether all workloads are made anew before this step, with what is stored carried over and nothing else.

    What a workload keeps elsewhere, a mean in a plain attribute or a cache, would carry one event on through all steps that follow. Who
    is wrong again after it was made anew is wrong a second time. At least eight times in a run; in the free run never, since nothing is
    made equal there.
    """
    return mode != "free" and step > 0 and step % max(1, steps // _BEGINNINGS) == 0


@dataclass(frozen=True, slots=True)
class Participant:
    """Who takes part.

    Attributes:
        name: short and unique, e.g. `suspect`, `reference-1`.
        role: what it is here for.
        device: identity and kind. `device.rank` is its number in this comparison, from 0.
        simulated: the fault that is played on it, in the grammar; "" for a device that is what it is.
    """

    name: str
    role: Role
    device: Device
    simulated: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"name": self.name, "role": self.role, "device": self.device.to_json(), "simulated": self.simulated}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`.

        Raises:
            RunFilesError: it is none.
        """
        try:
            role = record["role"]
            if role not in get_args(Role):
                raise ValueError(f"{role!r:.60} is no role")
            device, simulated = record["device"], record.get("simulated", "")
            texts = {"name": record["name"], "node": device["node"], "device": device["device"], "simulated": simulated}
            for field_name, value in texts.items():
                if not isinstance(value, str) or (not value and field_name != "simulated"):
                    raise ValueError(f"{field_name} is {value!r:.60}")
            numbers = {"rank": device["rank"], "pid": device.get("pid", 0)}
            for field_name, value in numbers.items():
                if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
                    raise ValueError(f"{field_name} is {value!r:.60}")
            return cls(record["name"], role, Device.from_json(device), simulated)
        except KeyError as error:
            raise RunFilesError(f"a record of a participant without {error.args[0]}: it is damaged") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise RunFilesError(f"a record of a participant that is none: {error}") from error


@dataclass(frozen=True, slots=True)
class Site:
    """One tensor at one place of the step: what is compared with what.

    Attributes:
        module: name of the chosen module; "" for what belongs to none (batch, loss, parameters outside of all chosen ones).
        phase: what of it.
        tensor: which of its tensors: a position ("0"), or the name of a parameter, or `NAME.exp_avg` of an optimizer's state.
        call: the how manieth call of the module in this step, from 0.
        dtype: e.g. "bfloat16"; shape: of the tensor.
    """

    module: str
    phase: Phase
    tensor: str
    call: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        tensor = f"[{self.tensor}]" if self.tensor != "0" else ""
        call = f" call {self.call}" if self.call else ""
        return f"{self.module or 'outside'} {self.phase}{tensor}{call}"

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`; raises KeyError, TypeError or ValueError where it is none."""
        if record["phase"] not in PHASES:
            raise ValueError(f"{record['phase']!r} is no phase")
        shape = tuple(int(size) for size in record["shape"])
        if any(size < 0 for size in shape):
            raise ValueError("a negative size")
        return cls(
            str(record["module"]),
            record["phase"],
            str(record["tensor"]),
            int(record["call"]),
            str(record["dtype"]),
            shape,
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """How one tensor differs from the leader's, bit for bit. Sums over elements are exact; `elements` are some of them.

    Attributes:
        site: its number in this journal.
        mismatches: elements with other bits.
        severity_sum, severity_of, severity_largest: of |ŷ - y| / |y| over those with finite ŷ and finite y != 0: sum, count, maximum.
        zeros, zero_largest: mismatches whose y is 0 (no severity): count, largest finite |ŷ|.
        nonfinite: mismatches where ŷ or y is NaN or infinite.
        ulp_largest: most representable numbers of the dtype between ŷ and y, both finite; 0 for integers' plain distance.
        noise, signal: sums of (ŷ - y)² and of y² over all elements where both are finite.
        classes: mismatches by `WordClass`.
        elements: (index in logical order, expected word, observed word) of the first ones in order of index, words unsigned.
        answer: short digest of all observed bits: two participants with equal ones gave the same wrong answer.
    """

    site: int
    mismatches: int
    severity_sum: float = 0.0
    severity_of: int = 0
    severity_largest: float = 0.0
    zeros: int = 0
    zero_largest: float = 0.0
    nonfinite: int = 0
    ulp_largest: int = 0
    noise: float = 0.0
    signal: float = 0.0
    classes: Mapping[str, int] = field(default_factory=dict)
    elements: tuple[tuple[int, int, int], ...] = ()
    answer: str = ""

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`; raises KeyError, TypeError or ValueError where it is none."""
        numbers = ("severity_sum", "severity_largest", "zero_largest", "noise", "signal")
        counts = ("severity_of", "zeros", "nonfinite", "ulp_largest")
        if int(record["mismatches"]) < 1:
            raise ValueError("a difference without a mismatch")
        return cls(
            int(record["site"]),
            int(record["mismatches"]),
            **{name: _number(record.get(name, 0.0)) for name in numbers},  # type: ignore[arg-type]
            **{name: int(record.get(name, 0)) for name in counts},
            classes={str(name): int(count) for name, count in record.get("classes", {}).items()},
            elements=tuple((int(a), int(b), int(c)) for a, b, c in record.get("elements", ())),
            answer=str(record.get("answer", "")),
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one participant, after it.

    Attributes:
        step: from 0.
        layout: number of the list of sites that this step had, see `Account`.
        seconds: that it took, comparison included.
        loss: its own loss; None: not finite.
        gradient_noise: ‖ĝ - g‖ / ‖g‖ over all parameters (LM-wide NSR of this step), None where not measured; inf as None with
            `gradient_lost` true.
        gradient_lost: its gradient is not finite where the leader's is.
        drift: ‖ŵ - w‖ after the update and before parameters are made equal again; None: not measured or not finite.
        weights: ‖w‖ of the leader.
        temperature: degrees Celsius; clock: MHz; None where nothing tells.
        differences: from the leader's tape; () where all is equal.
    """

    step: int
    layout: int
    seconds: float = 0.0
    loss: float | None = None
    gradient_noise: float | None = None
    gradient_lost: bool = False
    drift: float | None = None
    weights: float | None = None
    temperature: float | None = None
    clock: float | None = None
    differences: tuple[Difference, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values; what is at its default in a difference is left out."""
        record = {name: getattr(self, name) for name in self.__slots__ if name != "differences"}
        return record | {"differences": [_short(one) for one in self.differences]}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; raises KeyError, TypeError or ValueError where it is none."""
        optional = ("loss", "gradient_noise", "drift", "weights", "temperature", "clock")
        return cls(
            int(record["step"]),
            int(record["layout"]),
            _number(record.get("seconds", 0.0)),
            gradient_lost=bool(record.get("gradient_lost", False)),
            differences=tuple(Difference.from_json(one) for one in record.get("differences", ())),
            **{name: None if record.get(name) is None else float(record[name]) for name in optional},
        )


@dataclass(slots=True)
class Account:
    """All that one participant wrote in one mode.

    Attributes:
        participant: who.
        mode: in which.
        sites: in the order of their numbers.
        layouts: lists of numbers of sites, in the order of their numbers: which a step had.
        steps: in order.
        ranges: of the leader: by number of a site, how many right elements were in each range of `DECADES`, over all steps.
        results: what the workload's `evaluate` gave at the end: by name, a list of answers (JSON values), or numbers.
        ended: `done`, or why not; "" where it was killed.
    """

    participant: Participant
    mode: Mode
    sites: list[Site] = field(default_factory=list)
    layouts: list[tuple[int, ...]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    ranges: dict[int, tuple[int, ...]] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    ended: str = ""

    def take(self, record: Mapping[str, Any]) -> None:
        """Add a record of a journal; one that is damaged is left out, and with it the steps that need it."""
        try:
            match record.get("kind"):
                case "site":
                    self.sites.append(Site.from_json(record["site"]))
                case "layout":
                    self.layouts.append(tuple(int(number) for number in record["sites"]))
                case "step":
                    step = Step.from_json(record["step"])
                    known = 0 <= step.layout < len(self.layouts)
                    if known and all(0 <= one.site < len(self.sites) for one in step.differences):
                        self.steps.append(step)
                case "ranges":
                    for number, counts in record["ranges"].items():
                        self.ranges[int(number)] = tuple(int(count) for count in counts)
                case "results":
                    self.results = dict(record["results"])
                case "end":
                    self.ended = str(record["why"])
                case _:
                    pass
        except (KeyError, TypeError, ValueError, AttributeError):
            return

    def seen(self) -> Iterator[tuple[Step, tuple[Site, ...]]]:
        """Each step with the sites that it had."""
        for step in self.steps:
            yield step, tuple(self.sites[number] for number in self.layouts[step.layout] if number < len(self.sites))


class CompareFiles:
    """The files of a comparison: the one place that knows their names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked = path / "compare.json"
        self.report = path / "report.json"
        self.page = path / "report.html"
        self.participants = path / "participants"
        self.journals = path / "journal"

    def create(self) -> None:
        """Make the folders.

        Raises:
            RunFilesError: they cannot be made.
        """
        for folder in (self.path, self.participants, self.journals):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RunFilesError(f"{folder} cannot be made: {error.strerror or error}") from error

    def introduce(self, who: Participant) -> None:
        """Write down who takes part."""
        write_json(self.participants / f"{who.name}.json", who.to_json())

    def journal(self, who: Participant, mode: Mode) -> Journal:
        """Open the journal of a participant in a mode."""
        return Journal(self.journals / f"{who.name}.{mode}.jsonl", who.device.rank)

    def introduced(self) -> list[Participant]:
        """Who takes part, by number.

        Raises:
            RunFilesError: a file is damaged.
        """
        found = []
        for file in sorted(self.participants.glob("*.json")):
            record = read_json(file)
            try:
                who = Participant.from_json(record)
            except RunFilesError as error:
                raise RunFilesError(f"{file}: {error}") from error
            if who.name != file.stem:
                raise RunFilesError(f"{file}: it is of {who.name!r:.60}: was it renamed?")
            found.append(who)
        return sorted(found, key=lambda one: one.device.rank)

    def account(self, who: Participant, mode: Mode) -> Account | None:
        """What a participant wrote in a mode; None where it wrote nothing."""
        file = self.journals / f"{who.name}.{mode}.jsonl"
        if not file.exists():
            return None
        account = Account(who, mode)
        for record in read_journal(file):
            account.take(record)
        return account


def _short(one: Difference) -> dict[str, Any]:
    record = {name: getattr(one, name) for name in Difference.__slots__}
    return {name: value for name, value in record.items() if name in ("site", "mismatches") or value}


def _number(value: Any) -> float:
    number = float(value) if value is not None else math.inf
    if math.isnan(number):
        raise ValueError("not a number")
    return number
