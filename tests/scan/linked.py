"""Parts of what is concluded from transfers, as the tests ask for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bitwitness.runfiles.answers import Device
from bitwitness.scan.linking import judge_transfers
from bitwitness.scan.received import Received
from bitwitness.scan.results import LinkResult, Unjudged


def judge_links(
    devices: Sequence[Device], records: Iterable[Mapping[str, Any]]
) -> tuple[tuple[LinkResult, ...], dict[int, str]]:
    """The pairs that are no plain pass, and by rank why its device or its network card fails."""
    judged = judge_transfers(devices, records)
    return judged.links, dict(judged.failed)


def judge_collectives(devices: Sequence[Device], records: Iterable[Mapping[str, Any]]) -> tuple[Unjudged, ...]:
    """The collectives that gave somebody a wrong result, and what it looks like."""
    return Received.of(devices, records).of_collectives()
