"""The figures that the study of silent data corruption in LLM training published, as far as they are known here.

Beside every figure of ours stands theirs, and where there is none it says so: a table in which gaps look like agreement would show
nothing. They are data, so that nobody copies them into prose by hand.

Source: Ma, Pei, Lausen, Karypis, "Understanding Silent Data Corruption in LLM Training", ACL 2025 (arXiv 2502.12340): 15 nodes that
failed production stress tests, each beside one that passed, in a model like Llama-3-8B of 16 layers; Mistral-7B for fine-tuning. Read
at second hand; the rows of the other nodes, the table of severities and how they are summed over layers and steps were not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Submodule = Literal["attention", "ffn"]
Direction = Literal["fwd", "bwd"]
Cell = tuple[Direction, Submodule]
CELLS: tuple[Cell, ...] = tuple((way, part) for way in get_args(Direction) for part in get_args(Submodule))
"""Forward attention, forward FFN, backward attention, backward FFN: as the published table has them."""

LARGEST_NOISE = 0.051
"""The largest noise-to-signal ratio of the gradient, of node 11."""

ONSET, LATE = 450, 13
"""The step until about which node 13 was clean."""

CONTROL = "reseeded"
HEALTHY = "healthy"


@dataclass(frozen=True, slots=True)
class PublishedNode:
    """What is known of one node.

    Attributes:
        frequencies: share of elements that mismatch, by cell; what is not there was not seen by us.
        noise: worst-case noise-to-signal ratio of the gradient; None: likewise.
        silent: nothing was found on it in pretraining.
    """

    frequencies: Mapping[Cell, float] = field(default_factory=dict)
    noise: float | None = None
    silent: bool = False


def _frequencies(*of_cells: float) -> dict[Cell, float]:
    return dict(zip(CELLS, of_cells, strict=True))


NODES: Mapping[int, PublishedNode] = {
    1: PublishedNode(_frequencies(1.55e-5, 5.06e-7, 1.56e-4, 2.81e-6), 0.037),
    2: PublishedNode(silent=True),
    3: PublishedNode(silent=True),
    4: PublishedNode(noise=0.019),
    10: PublishedNode(_frequencies(4.78e-3, 1.03e-3, 1.92e-3, 7.98e-5)),
    11: PublishedNode(_frequencies(2.89e-2, 2.25e-3, 6.71e-3, 1.08e-4), 0.051),
}
"""By number; nodes that are not here: nothing is known of their figures."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """One row of the table of fine-tuning.

    Attributes:
        task: multiple-choice set. who: `healthy`, `reseeded`, or a node.
        accuracy: share of right answers. divergence: share of answers that differ from the healthy one's; None: itself.
    """

    task: str
    who: str
    accuracy: float
    divergence: float | None = None


FINE_TUNING: tuple[Tuned, ...] = (
    Tuned("CosmosQA", HEALTHY, 0.9079),
    Tuned("CosmosQA", CONTROL, 0.8950, 0.0670),
    Tuned("CosmosQA", "node 1", 0.9053, 0.0515),
    Tuned("CosmosQA", "node 6", 0.0, 1.0),
    Tuned("MathQA", HEALTHY, 0.3722),
    Tuned("MathQA", CONTROL, 0.3883, 0.5675),
    Tuned("MathQA", "a node, which one is not known here", 0.3678, 0.4224),
    Tuned("MathQA", "another node, likewise", 0.3692, 0.3682),
)
