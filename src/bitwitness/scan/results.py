"""What a scan concludes, as records: the judge makes them, commands print them, the fleet reads them from `result.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Standing = Literal["pass", "fail", "not judged"]
"""pass: nothing wrong was seen, which bounds the rate of errors and rules out nothing. not judged: never a pass."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Wrong answers of one device to one item.

    Attributes:
        item: its id.
        expected: the answer of the others, a digest in hexadecimal.
        answers: by answer, how often this device gave it; the right one among them, if it ever did.
        backed_by: some of the devices that gave `expected` every time.
        golden: whether a golden file says the same.
        backers: how many devices gave `expected` every time.
        events: from how many sets of operands wrong answers came: those from one set are one piece of evidence.
    """

    item: str
    expected: str
    answers: Mapping[str, int]
    backed_by: tuple[str, ...]
    golden: bool = False
    backers: int = 0
    events: int = 0

    @property
    def calls(self) -> int:
        """How often the item was computed."""
        return sum(self.answers.values())

    @property
    def wrong(self) -> int:
        """How often the answer was wrong."""
        return self.calls - self.answers.get(self.expected, 0)


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """What is concluded about one device.

    Attributes:
        rank, node, device, kind: who; the kind in one line.
        standing: pass, fail or not judged.
        reason: why, in a sentence that a person can act on.
        calls: computations of items whose right answer is known.
        wrong: of these, how many were wrong.
        bound: upper bound of its error rate per call at `confidence`, where nothing was wrong; None else.
        calls_by_kind: the calls by what was computed, `ops/matmul/float32`.
        findings: its wrong answers.
    """

    rank: int
    node: str
    device: str
    kind: str
    standing: Standing
    reason: str
    calls: int = 0
    wrong: int = 0
    bound: float | None = None
    calls_by_kind: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkResult:
    """What is concluded about what two ranks sent each other.

    Attributes:
        ranks, nodes, devices: the two ends.
        standing, reason: as of a device.
        transfers, wrong: how many were looked at, in both directions, and how many of them had arrived otherwise.
    """

    ranks: tuple[int, int]
    nodes: tuple[str, str]
    devices: tuple[str, str]
    standing: Standing
    reason: str
    transfers: int = 0
    wrong: int = 0


@dataclass(frozen=True, slots=True)
class Unjudged:
    """An item that judged nobody, and why."""

    item: str
    reason: str


@dataclass(frozen=True, slots=True)
class Voice:
    """What somebody else says of a device, beside the answers: a diagnostic of its vendor.

    Attributes:
        source: who: `dcgm-diag`, `ascend-dmi`, `rvs`.
        node, device: about whom; device "" is the whole node.
        standing: what it says. A pass of it is weak evidence and changes no standing of ours.
        reason: in a sentence.
        weight: of a failure, as in `fleet.signals.record`.
    """

    source: str
    node: str
    device: str
    standing: Standing
    reason: str
    weight: str = "none"


@dataclass(frozen=True, slots=True)
class Judgement:
    """All of it.

    Attributes:
        devices: one record a rank.
        links: what ranks sent each other, where that was looked at; only pairs that are not a plain pass need be here.
        unjudged: items that judged nobody.
        voices: of vendors' diagnostics.
        confidence: of the bounds.
    """

    devices: tuple[DeviceResult, ...]
    links: tuple[LinkResult, ...] = ()
    unjudged: tuple[Unjudged, ...] = ()
    voices: tuple[Voice, ...] = ()
    confidence: float = 0.95

    @property
    def standing(self) -> Standing:
        """Of the whole: fail if anything failed, not judged if anything was not judged, else pass."""
        found = {one.standing for one in self.devices} | {one.standing for one in self.links}
        found |= {one.standing for one in self.voices if one.standing == "fail"}
        if "fail" in found:
            return "fail"
        return "pass" if found == {"pass"} else "not judged"

    @property
    def failed_nodes(self) -> tuple[str, ...]:
        """Nodes with a device that failed, in order."""
        return tuple(dict.fromkeys(one.node for one in self.devices if one.standing == "fail"))

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "standing": self.standing,
            "confidence": self.confidence,
            "failed_nodes": list(self.failed_nodes),
            "devices": [asdict(one) for one in self.devices],
            "links": [asdict(one) for one in self.links],
            "voices": [asdict(one) for one in self.voices],
            "unjudged": [asdict(one) for one in self.unjudged],
        }
