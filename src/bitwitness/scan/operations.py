"""Every operation of a scan by its name: the one list that says what can be computed."""

from __future__ import annotations

from bitwitness.scan import elementwise, indexing, layers, memory_patterns, mixing, training
from bitwitness.scan.operands import Operation

_SINGLE: dict[str, Operation] = {
    **elementwise.OPERATIONS,
    **indexing.OPERATIONS,
    **layers.OPERATIONS,
    **memory_patterns.OPERATIONS,
}

OPERATIONS: dict[str, dict[str, Operation]] = {
    "ops": _SINGLE,
    "train": training.OPERATIONS,
    "mix": mixing.operations(_SINGLE),
}
"""By suite, by name. What *comm* does needs other ranks, and is no operation of one device."""
