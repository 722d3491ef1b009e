"""One fault as data: where, when, which elements, what becomes of them, and whether it stays.

The split into selection and mutation follows MRFI, the targets follow the three phases of LLM-PRISM (arXiv 2604.10390) and the
operands of He et al. (ISCA 2023), the persistence NVBitFI. `str()` of a fault is its one line in the grammar, which
`grammar.parse` reads back as the same fault. No torch: a campaign file is checked before anything heavy is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

Target = Literal[
    "fwd_in",
    "fwd_w",
    "fwd_out",
    "grad_out",
    "grad_in",
    "grad_w",
    "param",
    "buffer",
    "exp_avg",
    "exp_avg_sq",
    "momentum_buffer",
    "loss",
    "input",
    "comm.pre",
    "comm.reduce",
    "comm.post",
    "ckpt",
    "rng",
    "digest",
]
"""What is hit. Of a module: its input and weight as operands of its forward (`fwd_in`, `fwd_w`: memory stays right), its output,
the gradients that its backward is given and passes on (`grad_out`, `grad_in`). By the name of a parameter: its local gradient
(`grad_w`), the parameter, its moments. The loss; the batch; what is sent to the all-reduce, its result on all ranks alike
or on one; a file of a checkpoint; the random state; the guard's own fingerprints (`digest`)."""

MODULE_TARGETS: tuple[Target, ...] = ("fwd_in", "fwd_w", "fwd_out", "grad_out", "grad_in")
PARAMETER_TARGETS: tuple[Target, ...] = ("grad_w", "param", "exp_avg", "exp_avg_sq", "momentum_buffer")
MEMORY_TARGETS: tuple[Target, ...] = ("param", "buffer", "exp_avg", "exp_avg_sq", "momentum_buffer")
"""Numbers that are stored: changed once a step at most, after its update unless `during` says otherwise."""

Work = Literal["train", "update", "replay", "arbiter", "rerun", "fingerprint", "save"]
"""Whose work it is that goes wrong: training itself, the optimizer's update (memory targets: right before it), the replay of
a witness, the one of the third node, everybody's repeats after a disagreement, a fingerprint (the tensor is read wrongly while
it is hashed), the writing of a checkpoint."""

SelectKind = Literal["n", "rate", "run", "groups", "grid", "tile", "row", "frac", "index", "largest", "all"]
MutateKind = Literal[
    "bit",
    "bits",
    "profile",
    "stuck0",
    "stuck1",
    "zero",
    "nan",
    "inf",
    "random",
    "copy",
    "swap",
    "scale",
    "add",
    "set",
    "sign",
]
PersistKind = Literal["once", "intermittent", "permanent"]

MOST_ELEMENTS, MOST_STEPS, MOST_MICRO_BATCHES, MOST_RANKS = 10**15, 10**12, 10**9, 10**7
"""What a line may count up to: more than any job has, and far from where 64 bits end. What is more was meant otherwise."""

LEAST_CHANCE = 1e-18
"""What is less likely comes in no job: neither in `MOST_STEPS` steps nor in `MOST_ELEMENTS` elements."""

TARGETS: tuple[Target, ...] = get_args(Target)
WORKS: tuple[Work, ...] = get_args(Work)


@dataclass(frozen=True, slots=True)
class Where:
    """`[rank=R|rank=*] [node=NAME] [during=WORK] [each] target[:glob]`.

    Attributes:
        target: what is hit.
        glob: names of modules, of parameters (for `PARAMETER_TARGETS`), of buffers, of tensors in the batch (`input`), of files
            (`ckpt`) or of a source (`rng`: torch, cuda, numpy, python); empty: any. Shell style, `*` matches dots as well.
        rank: on which rank; `"*"` on every rank alike; None: drawn by the seed.
        node: on the ranks of this node only, wherever ranks move: a fault belongs to a device.
        during: only in this work; None: in training and in whatever is replayed.
        each: at every name that matches, where otherwise one is drawn; `once` is then once at each name.
    """

    target: Target
    glob: str = ""
    rank: int | Literal["*"] | None = None
    node: str = ""
    during: Work | None = None
    each: bool = False

    def __str__(self) -> str:
        words = [f"rank={self.rank}"] if self.rank is not None else []
        words += [f"node={self.node}"] if self.node else []
        words += [f"during={self.during}"] if self.during is not None else []
        words += ["each"] if self.each else []
        return " ".join([*words, self.target + (f":{self.glob}" if self.glob else "")])


@dataclass(frozen=True, slots=True)
class When:
    """`step=N` | `steps=A..B` | `every=N [from=N]` | `p=0.01 [from=N]`, each with `[micro=K]`; `every` and `p` go with all.

    Attributes:
        first: the first step, from 0.
        last: the last one, included; None: no end. `step=N` prints where `first == last`, and with `permanent` means from N on.
        every: each so many steps from `first`.
        p: in a step that is due, with this probability (one draw a step).
        micro: in this micro-batch of a step only; None: in the first that comes.
    """

    first: int = 0
    last: int | None = None
    every: int = 1
    p: float = 1.0
    micro: int | None = None

    def __str__(self) -> str:
        open_ended = self.last is None
        words = []
        if not open_ended:
            words += [f"step={self.first}" if self.last == self.first else f"steps={self.first}..{self.last}"]
        words += [f"p={self.p!r}"] if self.p < 1.0 else []
        words += [f"every={self.every}"] if self.every != 1 or not words else []
        words += [f"from={self.first}"] if open_ended and self.first else []
        words += [f"micro={self.micro}"] if self.micro is not None else []
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Select:
    """Which elements of the tensor, in logical order.

    `n=K` drawn; `rate=R` each with this probability; `run=K[,stride=S][,align=A]` from a drawn start; `groups=K` whole aligned
    groups of K from a drawn one to a drawn one; `grid=K,rows=R,columns=C`: K consecutive in every C columns of every R-th
    row; `tile=RxC[,frac=A..B]` a drawn tile of the last two axes, or a drawn share of it; `row` a drawn row of the last axis;
    `frac=A..B` a drawn share of all; `index=I+J+...` these; `largest` the largest in magnitude; `all`.

    Attributes:
        kind: which of these.
        count: K, or the rows of a tile; columns: its columns, or C of a grid; rows: R of a grid.
        stride, align: of a run.
        rate: R; low, high: of a share.
        indices: of `index`.
        channels_last: count the elements of an image with its channels as the last axis (`channels_last`).
    """

    kind: SelectKind
    count: int = 0
    columns: int = 0
    rows: int = 0
    stride: int = 1
    align: int = 1
    rate: float = 0.0
    low: float = 0.0
    high: float = 0.0
    indices: tuple[int, ...] = ()
    channels_last: bool = False

    def __str__(self) -> str:
        return ",".join([*self._words(), *(["channels_last"] if self.channels_last else [])])

    def _words(self) -> list[str]:
        share = [f"frac={self.low!r}..{self.high!r}"] if self.high else []
        match self.kind:
            case "n" | "groups":
                return [f"{self.kind}={self.count}"]
            case "rate":
                return [f"rate={self.rate!r}"]
            case "run":
                stride = [f"stride={self.stride}"] if self.stride != 1 else []
                return [f"run={self.count}", *stride, *([f"align={self.align}"] if self.align != 1 else [])]
            case "grid":
                return [f"grid={self.count}", f"rows={self.rows}", f"columns={self.columns}"]
            case "tile":
                return [f"tile={self.count}x{self.columns}", *share]
            case "frac":
                return share
            case "index":
                return ["index=" + "+".join(map(str, self.indices))]
            case _:
                return [self.kind]


@dataclass(frozen=True, slots=True)
class Mutate:
    """What becomes of each selected element.

    `bit=B` flips this bit, from the least significant, -1 being the uppermost, or `bit=any` one that is drawn for all elements
    together; `bits=K` K different ones, drawn for each; `profile=anatomy` a drawn class of damage (zero, flips falling from the
    least significant bit, non-finite); `stuck0=B`, `stuck1=B`; `zero`, `nan`, `inf`; `random` any finite bits; `copy=other`
    from elsewhere in the same tensor, `copy=stale` what was there the time before; `swap` with another element; `scale=F`;
    `add=F` a share F of itself more; `set=V`; `sign`.

    Attributes:
        kind: which of these.
        bit: B, or None for `any`.
        count: K.
        value: F or V.
        source: of a copy.
        profile: by name.
    """

    kind: MutateKind
    bit: int | None = None
    count: int = 0
    value: float = 0.0
    source: Literal["", "other", "stale"] = ""
    profile: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "bit" | "stuck0" | "stuck1":
                return f"{self.kind}={'any' if self.bit is None else self.bit}"
            case "bits":
                return f"bits={self.count}"
            case "profile":
                return f"profile={self.profile}"
            case "copy":
                return f"copy={self.source}"
            case "scale" | "add" | "set":
                return f"{self.kind}={self.value!r}"
            case _:
                return self.kind


@dataclass(frozen=True, slots=True)
class Persist:
    """`once` | `intermittent=P` | `permanent`, with `[redraw]` and `[if=A..B]`.

    Attributes:
        kind: `once`, until it has landed (with `each`, at each name); else at every opportunity that is due, `intermittent`
            with probability `p` at each.
        redraw: draw site, elements and damage anew in each step; without it they stay, as in a broken circuit.
        only_if: only elements whose magnitude is in this range: a fault that depends on its operands.
    """

    kind: PersistKind = "once"
    p: float = 1.0
    redraw: bool = False
    only_if: tuple[float, float] | None = None

    def __str__(self) -> str:
        words = [f"intermittent={self.p!r}" if self.kind == "intermittent" else self.kind]
        words += ["redraw"] if self.redraw else []
        words += [f"if={self.only_if[0]!r}..{self.only_if[1]!r}"] if self.only_if is not None else []
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `preset`: the name of the published model that it was made from, for reports; no part of the line."""

    where: Where
    when: When
    select: Select
    mutate: Mutate
    persist: Persist = Persist()
    preset: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.where} @ {self.when} : {self.select} -> {self.mutate} ; {self.persist}"
