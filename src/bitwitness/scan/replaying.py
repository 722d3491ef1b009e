"""Computing the item of a piece of evidence again, on another device: who gives which answer there.

The second opinion of a person, or of a vendor, who was sent a file. It says only what it sees: an answer on a device of another
kind says nothing about who was right, and one on the suspect itself nothing about the suspect's innocence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bitwitness.errors import ConfigurationError
from bitwitness.runfiles.answers import Device
from bitwitness.scan.evidence import Element, Evidence, differences, wrong_output
from bitwitness.scan.items import SUITES, Item
from bitwitness.scan.keeping import raw, split
from bitwitness.scan.suites import items
from bitwitness.scan.work import Unsupported, digest, prepare, settled

Outcome = Literal["expected", "same as the suspect", "cannot conclude"]
CODES: Mapping[Outcome, int] = {"expected": 0, "same as the suspect": 1, "cannot conclude": 3}


@dataclass(frozen=True, slots=True)
class Replay:
    """What was seen.

    Attributes:
        outcome: what follows; `expected`: this device gives the answer that the suspect did not.
        reason: why, in a sentence.
        device: on what it was computed.
        answers: by digest, how often.
        differing: how many elements of the suspect's output differ from one that is as expected; None where not compared.
        elements: the first of them.
    """

    outcome: Outcome
    reason: str
    device: Device
    answers: Mapping[str, int]
    differing: int | None = None
    elements: tuple[Element, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "outcome": self.outcome,
            "reason": self.reason,
            "device": self.device.to_json(),
            "answers": dict(self.answers),
            "differing": self.differing,
            "elements": [
                {
                    "output": one.output,
                    "index": list(one.index),
                    "expected": one.expected,
                    "observed": one.observed,
                    "xor": one.xor,
                }
                for one in self.elements
            ],
        }


def replay(path: Path, evidence: Evidence, device: Device, torch_device: torch.device, calls: int) -> Replay:
    """Compute it again so often, on operands made anew for each tenth of the calls.

    Raises:
        ConfigurationError: this version or this device cannot compute it.
        RunFilesError: the wrong output cannot be read.
    """
    _refuse_absurd(evidence.item)
    observed = wrong_output(path, evidence)
    answers: Counter[str] = Counter()
    right: list[bytes] | None = None
    with settled(torch_device):
        while answers.total() < calls:
            try:
                compute = prepare(evidence.item, torch_device)
                for _ in range(min(max(1, calls // 10), calls - answers.total())):
                    outputs = compute()
                    answer = digest(outputs)
                    answers[answer] += 1
                    if answer == evidence.expected and right is None and observed is not None:
                        parts, content = raw(outputs)
                        right = split(content, parts) if parts == evidence.parts else None
            except Unsupported as error:
                raise ConfigurationError(f"this device cannot compute {evidence.item.id}: {error}") from error
    differing: int | None = None
    elements: tuple[Element, ...] = ()
    if right is not None and observed is not None:
        differing, elements = differences(right, observed, evidence.parts)
    outcome, reason = _concluded(evidence, device, answers)
    return Replay(outcome, reason, device, dict(answers), differing, elements)


_LARGER = 16
"""So many times what a scan computes may be asked for here: other versions may compute somewhat more."""


def _refuse_absurd(item: Item) -> None:
    """Refuse what no scan computes: a file from elsewhere must not fill the memory of this machine.

    Raises:
        ConfigurationError: it is many times larger than any item of its operation.
    """
    alike = [one for device in ("cpu", "cuda") for one in items(SUITES, device) if one.operation == item.operation]
    largest = max((math.prod(one.shape) for one in alike), default=0)
    if not alike or math.prod(item.shape) > _LARGER * largest:
        raise ConfigurationError(
            f"{item.id!s:.200}: no scan computes this, or nothing nearly so large: the file is damaged or forged"
        )


def _concluded(evidence: Evidence, device: Device, answers: Mapping[str, int]) -> tuple[Outcome, str]:
    calls = sum(answers.values())
    suspect = evidence.device
    if device.kind != suspect.kind:
        apart = sorted(
            name for name in {*device.kind, *suspect.kind} if device.kind.get(name) != suspect.kind.get(name)
        )
        said = "; ".join(
            f"{name}: {device.kind.get(name, 'none')} here, {suspect.kind.get(name, 'none')} there" for name in apart
        )
        return "cannot conclude", f"this device is of another kind, whose right answer may be another one ({said})"
    itself = not evidence.played and device.device == suspect.device
    if itself and set(answers) == {evidence.expected}:
        return (
            "cannot conclude",
            f"this is the suspect itself, and it now gave the expected answer {calls} times: repeat it on another device",
        )
    if set(answers) == {evidence.expected}:
        return "expected", f"this device gave the expected answer {calls} times of {calls}: the suspect's was wrong"
    if evidence.wrong in answers:
        who = "the suspect itself again gives its answer" if itself else "this device gives the suspect's answer too"
        more = "" if itself else ": both are wrong in the same way, or what was expected is; compare with a third"
        return "same as the suspect", f"{who}, {answers[evidence.wrong]} times of {calls}{more}"
    if len(answers) > 1:
        return (
            "cannot conclude",
            f"it does not repeat on this device: {len(answers)} different answers in {calls} calls",
        )
    return (
        "cannot conclude",
        "this device gives neither the expected answer nor the suspect's: its configuration is another one",
    )


def here(name: str, played: bool) -> torch.device:
    """The device to compute on: `name` as torch names devices, else a GPU where there is one and the suspect was no processor.

    Raises:
        ConfigurationError: there is no such device.
    """
    try:
        chosen = torch.device(name or ("cuda:0" if torch.cuda.is_available() and not played else "cpu"))
    except RuntimeError as error:
        raise ConfigurationError(
            f"--device {name!r:.40}: torch knows no such device; give e.g. cuda:3 or cpu"
        ) from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(f"--device {name!r:.40}: torch sees {torch.cuda.device_count()} GPU(s) here")
    if chosen.type not in ("cuda", "cpu"):
        raise ConfigurationError(f"--device {name!r:.40}: give cuda:N or cpu")
    return chosen if chosen.type == "cpu" or chosen.index is not None else torch.device("cuda", 0)
