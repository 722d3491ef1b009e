"""The faults of the demo: wrong bits from one device, from one step on, each a line of the grammar.

Each stands for something that is seen in the field: a matrix unit that returns wrong products, a gradient that is wrong but
looks right, a NaN, a cell of memory under a weight or an optimizer moment. They are struck by the injector that strikes
anybody's job, so a line that the demo shows does the same in `BITWITNESS_FAULT`. No torch: the command answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FaultKind = Literal["matmul", "gradient", "nan", "weight", "moment"]

WIDTH = 64
"""Of the demo's model: a column of what its head is given is one element in so many."""

_WEIGHT = "blocks.1.mlp.up.weight"


@dataclass(frozen=True, slots=True)
class Damage:
    """What a kind of fault does, but for where and when.

    Attributes:
        words: what is wrong, for a person.
        target: what is hit, in the grammar.
        change: which elements, and what becomes of each, in the grammar.
    """

    words: str
    target: str
    change: str


DAMAGE: Mapping[FaultKind, Damage] = {
    # One lane of a matrix unit, for every token. It is the product of the backward that carries the gradient on: a wrong one
    # in the forward of one rank in eight is mostly normalised away, and its loss shows it at once. This one spreads through
    # the rest of the backward while the loss of its step is right.
    "matmul": Damage(
        "matrix product in the backward of head", "grad_in:head", f"grid=1,rows=1,columns={WIDTH} -> scale=4096.0"
    ),
    "gradient": Damage(f"gradient of {_WEIGHT}", f"grad_w:{_WEIGHT}", "all -> scale=4.0"),
    "nan": Damage(f"gradient of {_WEIGHT}", f"grad_w:{_WEIGHT}", "index=0 -> nan"),
    # The largest, where it is sure to matter.
    "weight": Damage(_WEIGHT, f"param:{_WEIGHT}", "largest -> sign"),
    "moment": Damage(f"exp_avg_sq of {_WEIGHT}", f"exp_avg_sq:{_WEIGHT}", "largest -> scale=16.0"),
}


def line(kind: FaultKind, rank: int, node: str, step: int, once: bool) -> str:
    """The fault in the grammar.

    Args:
        kind: what goes wrong.
        rank: on which rank.
        node: and only while that rank is on this node, since a fault belongs to a device.
        step: from which step on.
        once: whether it is gone after its first strike.
    """
    damage = DAMAGE[kind]
    persist = "once" if once else "permanent"
    return f"rank={rank} node={node} {damage.target} @ step={step} : {damage.change} ; {persist}"
