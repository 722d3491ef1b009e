"""Which items each suite has, and in which order: what shows most faults per second comes first.

The order is that of field reports: arithmetic on single numbers and the FP32 and FP64 pipes fail more often than matrix units; then
scatter and integer modulo, then matrix products, layers, sums, conversions, memory (OpGuard, SDCHunter, AEGIS). Whether a fault shows
depends on dtype and on the range of the operands, so each operation comes in several of both; the plain range of all of them first, then
the others. Factors are such that healthy devices give neither NaN nor infinity.

The sizes are those of the type of device: a call takes about a millisecond on one core of a CPU, and fills a large GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

from bitwitness.scan.items import SUITES, Item, Suite

Range = tuple[float, float]
"""α and β."""

_PLAIN: Range = (1, 1)
_CROSSED: tuple[Range, ...] = ((1e3, 1e-3), (1e-3, 1e3))
_FLOATS = ("float32", "float64", "bfloat16", "float16")
_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The shapes for one type of device.

    Attributes:
        numbers: of an element-wise operation.
        moved: of one that moves numbers by index.
        products, odd_product, stack: of matrices; `odd_product` fills no tile, `stack` is many small ones.
        attention, table, batch, images: of attention, of rows, of batch normalisation, and of convolution.
        words: of 8 bytes, of a block of memory.
        transformer, convnet, mix: of those items.
    """

    numbers: int
    moved: int
    products: tuple[tuple[int, ...], ...]
    odd_product: tuple[int, ...]
    stack: tuple[int, ...]
    attention: tuple[int, ...]
    table: tuple[int, ...]
    batch: tuple[int, ...]
    images: tuple[int, ...]
    words: int
    transformer: tuple[tuple[int, ...], ...]
    convnet: tuple[tuple[int, ...], ...]
    mix: tuple[int, ...]


_CPU = _Sizes(
    numbers=16384,
    moved=16384,
    products=((96, 96, 96), (16, 512, 64)),
    odd_product=(67, 131, 41),
    stack=(8, 33, 32, 17),
    attention=(2, 2, 40, 32),
    table=(64, 200),
    batch=(4, 16, 12, 12),
    images=(2, 8, 12, 16, 3),
    words=16384,
    transformer=((2, 32, 64, 2, 2), (3, 24, 48, 1, 3)),
    convnet=((4, 16, 16, 2),),
    mix=(96, 5),
)
_GPU = _Sizes(
    numbers=1 << 25,
    moved=1 << 22,
    products=((4096, 4096, 4096), (256, 16384, 2048)),
    odd_product=(4033, 3967, 4099),
    stack=(256, 257, 256, 129),
    attention=(4, 16, 1024, 64),
    table=(8192, 4096),
    batch=(64, 128, 56, 56),
    images=(64, 128, 56, 128, 3),
    words=1 << 24,
    transformer=((8, 1024, 1024, 4, 2), (4, 2048, 768, 2, 3)),
    convnet=((64, 128, 64, 3),),
    mix=(4096, 9),
)


def items(suites: Sequence[Suite], device_type: str = "cpu") -> tuple[Item, ...]:
    """The items of some suites, most telling first. Those of *comm* need other ranks and are none of these."""
    wanted = [suite for suite in SUITES if suite in suites]
    return tuple(chain.from_iterable(_of_suite(suite, "cpu" if device_type == "cpu" else "cuda") for suite in wanted))


def known(item: Item) -> bool:
    """Whether it is an item of a suite of this version, for any type of device."""
    return item in _all()


@cache
def _all() -> frozenset[Item]:
    return frozenset(chain(items(SUITES, "cpu"), items(SUITES, "cuda")))


@cache
def _of_suite(suite: Suite, device_type: str) -> tuple[Item, ...]:
    sizes = _CPU if device_type == "cpu" else _GPU
    if suite == "train":
        return tuple(_train(sizes, device_type))
    if suite == "mix":
        return tuple(_mix(sizes, device_type))
    if suite == "ops":
        found = tuple(chain.from_iterable(one(sizes, device_type) for one in _CLASSES))
        # Stable: within each half the classes keep their order.
        return tuple(sorted(found, key=lambda item: (item.alpha, item.beta) != _PLAIN))
    return ()


def _train(sizes: _Sizes, device_type: str) -> Iterator[Item]:
    for dtype in ("float32", "bfloat16"):
        for shape in sizes.transformer:
            yield Item("train", "transformer", dtype, shape)
        for shape in sizes.convnet:
            yield Item("train", "convnet", dtype, shape)
    if device_type != "cpu":
        yield Item("train", "transformer", "float32", sizes.transformer[0], variant="tf32")
        yield Item("train", "convnet", "float32", sizes.convnet[0], variant="tf32")


def _mix(sizes: _Sizes, device_type: str) -> Iterator[Item]:
    for dtype in ("bfloat16", "float32") if device_type != "cpu" else ("float32", "float64"):
        yield Item("mix", "burn", dtype, sizes.mix)
        yield Item("mix", "model", dtype, sizes.mix)


# Classes of operations, in the order of the suite -------------------------------------------------------------------------


def _ops(
    operation: str, dtype: str, shape: tuple[int, ...], ranges: Sequence[Range], variant: str = ""
) -> Iterator[Item]:
    for alpha, beta in ranges:
        yield Item("ops", operation, dtype, shape, alpha, beta, variant)


_FACTORS: dict[str, tuple[Range, ...]] = {
    # Plain; one large, one small; products near the smallest number, most of them subnormal; products near the largest.
    "float32": (_PLAIN, *_CROSSED, (1e-30, 1e-9), (1e19, 1e18)),
    "float64": (_PLAIN, *_CROSSED, (1e-300, 1e-9), (1e150, 1e150)),
    "bfloat16": (_PLAIN, *_CROSSED, (1e-28, 1e-9), (1e19, 1e18)),
    "float16": (_PLAIN, *_CROSSED, (1e-2, 1e-2), (80, 80)),
}
_TERMS: dict[str, tuple[Range, ...]] = {
    # As far apart as both still count in the sum.
    "float32": (_PLAIN, *_CROSSED, (1e-38, 1e-38), (1e38, 1e38)),
    "float64": (_PLAIN, *_CROSSED, (1e-308, 1e-308), (1e307, 1e307)),
    "bfloat16": (_PLAIN, (8, 0.5), (1e-37, 1e-37), (1e38, 1e38)),
    "float16": (_PLAIN, (8, 0.5), (1e-4, 1e-4), (2e4, 2e4)),
}


def _arithmetic(sizes: _Sizes, device_type: str) -> Iterator[Item]:
    for dtype in _FLOATS:
        for operation in ("fma", "mul"):
            yield from _ops(operation, dtype, (sizes.numbers,), _FACTORS[dtype])
        for operation in ("add", "sub"):
            yield from _ops(operation, dtype, (sizes.numbers,), _TERMS[dtype])
        # A quotient of crossed factors leaves the range of float16.
        quotients = _FACTORS[dtype] if dtype != "float16" else (_PLAIN, (100, 1e-2), (1e-2, 10), (1e-3, 1e-3), (80, 80))
        yield from _ops("div", dtype, (sizes.numbers,), quotients)
        for operation in ("sqrt", "rsqrt", "reciprocal"):
            yield from _ops(operation, dtype, (sizes.numbers,), (_PLAIN, (1e3, 1), (1e-2, 1)))
    for dtype in ("float32", "float64"):
        yield from _ops("modulo", dtype, (sizes.numbers,), ((20, 1), (1e3, 1), (1e6, 1)))
        yield from _ops("sqrt", dtype, (sizes.numbers,), ((1e30, 1), (1e-38, 1)))


def _special_functions(sizes: _Sizes, device_type: str) -> Iterator[Item]:
    far = {"exp": 80.0, "tanh": 6.0, "erf": 3.0, "sigmoid": 12.0}
    for dtype in _FLOATS:
        half = dtype in _HALVES
        for operation in ("exp", "sin", "log", "tanh", "erf", "gelu", "sigmoid", "silu"):
            large = far.get(operation, 80.0)
            large = min(large, 10.0) if dtype == "float16" else large
            # Near zero these two are near a constant, in whose last bits halves hide everything.
            near = () if half and operation in ("exp", "sigmoid") else ((1e-3, 1),)
            yield from _ops(operation, dtype, (sizes.numbers,), (_PLAIN, (large, 1), *near))
        yield from _ops("pow", dtype, (sizes.numbers,), (_PLAIN, (1, 1.5), (30, 1)))
    for dtype in ("float32", "float64"):
        # Far from zero the argument must first be reduced, which is code of its own.
        yield from _ops("cos", dtype, (sizes.numbers,), (_PLAIN, (1e6, 1)))
        yield from _ops("sin", dtype, (sizes.numbers,), ((1e6, 1),))
        yield from _ops("log1p", dtype, (sizes.numbers,), (_PLAIN, (1e-6, 1), (1e6, 1)))


def _scatter(sizes: _Sizes, device_type: str) -> Iterator[Item]:
    for dtype in ("float32", "int64", "bfloat16", "float64"):
        for operation in ("scatter", "scatter_add", "gather"):
            yield from _ops(operation, dtype, (sizes.moved,), (_PLAIN, (1e3, 1e3)))
        yield from _ops("index_add", dtype, sizes.table, (_PLAIN, (1e3, 1e3)))
    for dtype in ("float32", "bfloat16"):
        yield from _ops("embedding", dtype, sizes.table, (_PLAIN,))


def _integers(sizes: _Sizes, device_type: str) -> Iterator[Item]:
    # Numbers up to 100 α, as far as the dtype goes.
    most = {"int64": 1e16, "int32": 2e7, "int16": 300.0, "int8": 1.2}
    for dtype, large in most.items():
        for operation in ("modulo", "floor_div"):
            yield from _ops(
                operation, dtype, (sizes.numbers,), ((1, 0.1), (large, 0.1), (large, max(large / 100, 0.05)))
            )
        for operation in ("mul", "shift_left", "shift_right"):
            yield from _ops(operation, dtype, (sizes.numbers,), (_PLAIN, (large, 1)))
    for dtype in ("int64", "int32"):
        for operation in ("add", "sub", "bitwise_and", "bitwise_or", "bitwise_xor"):
            yield from _ops(operation, dtype, (sizes.numbers,), ((most[dtype], most[dtype]),))


def _products(sizes: _Sizes, device_type: str) -> Iterator[Item]:
    ranges: dict[str, tuple[Range, ...]] = {
        "float32": (_PLAIN, *_CROSSED, (1e-22, 1e-17), (1e17, 1e16)),
        "float64": (_PLAIN, *_CROSSED, (1e-160, 1e-150), (1e150, 1e150)),
        "bfloat16": (_PLAIN, *_CROSSED, (1e-20, 1e-17), (1e17, 1e16)),
        "float16": (_PLAIN, *_CROSSED, (1e-3, 1e-3), (20, 20)),
    }
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        yield from _ops("matmul", dtype, sizes.products[0], ranges[dtype])
        yield from _ops("matmul", dtype, sizes.products[0], (_PLAIN,), "transposed")
        yield from _ops("matmul", dtype, sizes.products[1], (_PLAIN, *_CROSSED))
        yield from _ops("matmul", dtype, sizes.odd_product, (_PLAIN, *_CROSSED))
        yield from _ops("matmul", dtype, sizes.odd_product, _CROSSED, "transposed")
        yield from _ops("matmul", dtype, sizes.stack, (_PLAIN, *_CROSSED))
        yield from _ops("matvec", dtype, sizes.table, (_PLAIN, *_CROSSED))
    yield from _ops("int_matmul", "int8", sizes.products[0], (_PLAIN, (0.1, 1)))
    if device_type != "cpu":
        yield from _ops("matmul", "float32", sizes.products[0], (_PLAIN, *_CROSSED), "tf32")
        yield from _ops("matmul", "float32", sizes.odd_product, (_PLAIN,), "tf32")
        yield from _ops("fp8_matmul", "float8_e4m3fn", sizes.products[0], (_PLAIN, (100, 0.1)))


def _layers(sizes: _Sizes, device_type: str) -> Iterator[Item]:
    for dtype in ("float32", "bfloat16", "float16"):
        yield from _ops("attention", dtype, sizes.attention, (_PLAIN, *_CROSSED, (10, 10)))
        yield from _ops("attention", dtype, sizes.attention, (_PLAIN,), "causal")
        # Gradients are divided by the deviation of A, which is at least the square root of epsilon, 3e-3.
        norms = (_PLAIN, *_CROSSED) if dtype != "float16" else (_PLAIN, (1e3, 1e-3), (1e-3, 10))
        yield from _ops("layer_norm", dtype, sizes.table, norms)
        yield from _ops("rms_norm", dtype, sizes.table, norms)
        yield from _ops("softmax", dtype, sizes.table, (_PLAIN, (8, 1), *(() if dtype in _HALVES else ((1e-3, 1),))))
        yield from _ops("log_softmax", dtype, sizes.table, (_PLAIN, (30, 1)))
    for dtype in ("float32", "bfloat16"):
        yield from _ops("batch_norm", dtype, sizes.batch, (_PLAIN, *_CROSSED))
        yield from _ops("conv2d", dtype, sizes.images, (_PLAIN, *_CROSSED))
        yield from _ops("conv2d", dtype, sizes.images, (_PLAIN,), "strided")
        batch, channels, side, _, kernel = sizes.images
        yield from _ops("conv2d", dtype, (batch, channels, side, channels, kernel), (_PLAIN,), "depthwise")
    yield from _ops("attention", "float64", sizes.attention, (_PLAIN,))
    yield from _ops("softmax", "float64", sizes.table, (_PLAIN,))
    yield from _ops("layer_norm", "float64", sizes.table, (_PLAIN,))


def _sums_and_order(sizes: _Sizes, device_type: str) -> Iterator[Item]:
    for dtype in ("float32", "float64", "bfloat16"):
        large = 1e150 if dtype == "float64" else 1e17
        for operation in ("sum", "mean_var", *(() if dtype == "bfloat16" else ("norm",))):
            yield from _ops(operation, dtype, sizes.table, (_PLAIN, (1e3, 1), (1e-3, 1), (large, 1)))
        if dtype != "bfloat16":  # whose 8 bits hide nearly every error in one term, as in a norm
            yield from _ops("logsumexp", dtype, sizes.table, (_PLAIN, (30, 1)))
        yield from _ops("extremes", dtype, sizes.table, (_PLAIN,))
        yield from _ops("sort", dtype, sizes.table, (_PLAIN,))
        yield from _ops("topk", dtype, sizes.table, (_PLAIN,))
        yield from _ops("compare", dtype, (sizes.numbers,), (_PLAIN, (1e-3, 1e3)))
    if device_type == "cpu":
        # On CUDA PyTorch has no deterministic sum of floating-point numbers up to each.
        yield from _ops("cumsum", "float32", sizes.table, (_PLAIN, (1e3, 1)))
    yield from _ops("cumsum", "int64", sizes.table, ((1e9, 1),))
    yield from _ops("sort", "int64", sizes.table, ((1e16, 1),))
    yield from _ops("sum", "int64", sizes.table, ((1e9, 1),))


def _casts(sizes: _Sizes, device_type: str) -> Iterator[Item]:
    for source, target in (
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("float64", "float32"),
        ("bfloat16", "float32"),
    ):
        yield from _ops("cast", source, (sizes.numbers,), (_PLAIN, (1e3, 1), (1e-6, 1)), f"to_{target}")
    yield from _ops("cast", "float16", (sizes.numbers,), (_PLAIN, (1e3, 1)), "to_float32")
    for source, target, large in (
        ("float32", "int32", 1e9),
        ("float64", "int64", 1e18),
        ("float32", "int8", 120.0),
        ("int64", "float32", 1e16),
        ("int32", "float64", 2e7),
    ):
        yield from _ops("cast", source, (sizes.numbers,), ((large, 1),), f"to_{target}")


def _memory(sizes: _Sizes, device_type: str) -> Iterator[Item]:
    for pattern in (
        "host_copy",
        "inversions",
        "kept",
        "walking_ones",
        "walking_zeros",
        "checkerboard",
        "solid",
        "address",
        "strided",
    ):
        # Between host and device there is less room than in the device.
        words = sizes.words // 4 if pattern == "host_copy" else sizes.words
        yield from _ops("memory", "int64", (words,), (_PLAIN,), pattern)


_CLASSES = (
    _arithmetic,
    _special_functions,
    _scatter,
    _integers,
    _products,
    _layers,
    _sums_and_order,
    _casts,
    _memory,
)
