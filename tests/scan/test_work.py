from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bitwitness import mutate
from bitwitness.errors import ConfigurationError
from bitwitness.scan import mixing, suites, work
from bitwitness.scan.items import Item
from bitwitness.scan.operands import PERIOD, Operands, Operation
from bitwitness.scan.operations import OPERATIONS
from tests.scan import freeze

CPU = torch.device("cpu")
EXHAUSTIVE = os.environ.get("BITWITNESS_EXHAUSTIVE") == "1"
ALL = suites.items(("train", "ops", "mix"))
ONE_OF_EACH = tuple({(item.kind, item.variant): item for item in reversed(ALL)}.values())
ONE_OF_EACH_OPERATION = tuple({(item.suite, item.operation): item for item in reversed(ALL)}.values())


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """Of every item, all of them finite. Prepared anew twice and computed twice each time, the outputs spoiled in between; items that
    differ from another only by their range or shape once, unless everything is asked for.
    """
    found: dict[str, str] = {}
    with work.settled(CPU):
        for item in ALL:
            digests = []
            often = EXHAUSTIVE or item in ONE_OF_EACH
            for _ in range((3 if EXHAUSTIVE else 2) if often else 1):
                prepared = work.prepare(item, CPU)
                outputs = prepared()
                assert all(bool(one.isfinite().all()) for one in outputs), item.id
                digests.append(work.digest(outputs))
                if often:
                    for one in outputs:
                        one.view(torch.uint8).fill_(0x55)
                    digests.append(work.digest(prepared()))
            assert len(set(digests)) == 1, (item.id, digests)
            found[item.id] = digests[0]
    return found


def flipped(tensor: Tensor, index: int, bit: int) -> None:
    where = torch.tensor([index])
    mutate.put_words(
        tensor, where, mutate.mutated(mutate.words_of(tensor, where), tensor.dtype, mutate.FlipBits((bit,)))
    )


def telling_bit(item: Item, operand: int, tensor: Tensor) -> int:
    """The highest of a mantissa, which rounding does not hide; the lowest of an integer, so that an index stays one, unless that is lost."""
    mantissas = {torch.float64: 51, torch.float32: 22, torch.bfloat16: 6, torch.float16: 9}
    if tensor.dtype in mantissas:
        return mantissas[tensor.dtype]
    if item.operation in ("floor_div", "modulo"):
        return 5  # never to zero
    if item.operation == "shift_right" and operand == 0:
        return torch.iinfo(tensor.dtype).bits - 2
    if tensor.dtype == torch.int64 and tensor.abs().max() > 1 << 50:
        return 45  # survives a conversion to float32
    return 0


def test_every_item_repeats_and_is_finite_whatever_is_done_with_its_outputs(answers: dict[str, str]) -> None:
    assert len(set(answers.values())) == len(ALL)
    assert all(len(digest) == 32 for digest in answers.values())


def test_another_process_gives_the_same_answers(answers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "17")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    some = [item.id for item in (ALL if EXHAUSTIVE else ONE_OF_EACH)]
    found = freeze.lap(freeze.ROOT / "src", some)
    assert found["answers"] == {name: answers[name] for name in some}
    assert not found["compiler"], "each rank of a scan would take seconds more to start"


def test_every_answer_depends_on_every_operand(answers: dict[str, str], seed: int) -> None:
    """Of each operation in a dtype that is drawn, unless everything is asked for."""
    draw = random.Random(seed)
    drawn = {(item.suite, item.operation, item.variant): item for item in draw.sample(ONE_OF_EACH, len(ONE_OF_EACH))}
    with work.settled(CPU):
        for item in ONE_OF_EACH if EXHAUSTIVE else drawn.values():
            right = answers[item.id]
            prepared = work.prepare(item, CPU)
            for number, operand in enumerate(prepared.operands):
                # Many, because one may be hidden with good reason: by dropout, a mask, a larger one, a shift that leaves nothing (4 of 5).
                bit = telling_bit(item, number, operand)
                for _ in range(200):
                    where = draw.randrange(operand.numel())
                    flipped(operand, where, bit)
                    differs = work.digest(prepared()) != right
                    flipped(operand, where, bit)
                    if differs:
                        break
                assert differs, (item.id, number, tuple(operand.shape))
            assert work.digest(prepared()) == right, item.id


def test_a_bit_of_an_output_changes_the_answer(answers: dict[str, str], seed: int) -> None:
    draw = random.Random(seed)
    with work.settled(CPU):
        for item in ONE_OF_EACH_OPERATION:
            outputs = work.prepare(item, CPU)()
            one = draw.choice([output for output in outputs if output.dtype != torch.bool])
            flipped(one, draw.randrange(one.numel()), draw.randrange(mutate.bits_of(one.dtype)))
            assert work.digest(outputs) != answers[item.id]


def test_a_digest_tells_order_shape_and_dtype() -> None:
    one, two = torch.ones(4), torch.zeros(4)
    found = [[one, two], [two, one], [one], [one.view(2, 2)], [one.double()], [one.view(torch.int32)], []]
    assert len({work.digest(outputs) for outputs in found}) == len(found)


def test_digests_of_many_calls_are_those_of_each(answers: dict[str, str]) -> None:
    with work.settled(CPU):
        calls = [work.prepare(item, CPU)() for item in ONE_OF_EACH_OPERATION]
        assert work.digests([*calls, []]) == [*(answers[item.id] for item in ONE_OF_EACH_OPERATION), work.digest([])]
    assert work.digests([]) == []
    assert work.digests([[], []]) == [work.digest([])] * 2


# Operands -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_factors_move_the_operands(dtype: str) -> None:
    item = Item("ops", "mul", dtype, (4096,), 100.0, 0.01)
    operands = Operands(item, CPU)
    a, b = operands.a(4096).double().abs(), operands.b(4096).double().abs()
    assert 50 < a.max() <= 100
    assert 0.005 < b.max() <= 0.0101
    assert a.min() < 0.1


@pytest.mark.parametrize(("dtype", "most"), [("int64", 10**18), ("int32", 10**9), ("int8", 126)])
def test_factors_move_integers_as_far_as_the_dtype_goes(dtype: str, most: int) -> None:
    alpha = {"int64": 1e16, "int32": 1e7, "int8": 1e5}[dtype]
    drawn = Operands(Item("ops", "mul", dtype, (4096,), alpha), CPU).a(4096).to(torch.int64).abs()
    assert 0.9 * most < drawn.max() <= most


def test_operands_have_full_mantissas() -> None:
    for dtype, bits in (("float64", 53), ("float32", 24)):
        drawn = Operands(Item("ops", "mul", dtype, (1000,)), CPU).a(1000).double()
        mantissa, _ = torch.frexp(drawn)
        odd = mantissa.mul(2.0**bits).to(torch.int64) % 2
        assert 150 < odd.abs().sum() < 700


def test_a_long_operand_repeats_a_short_one_with_no_two_rows_alike() -> None:
    drawn = Operands(Item("ops", "mul", "float32", (1024, 1024)), CPU).a(1024, 1024)
    assert torch.equal(drawn.view(-1)[:100], drawn.view(-1)[PERIOD : PERIOD + 100])
    assert len(drawn.unique(dim=0)) == 1024


def test_nothing_is_drawn_that_cannot_be_divided_by() -> None:
    for dtype in ("float16", "float32", "int8", "int64"):
        operands = Operands(Item("ops", "div", dtype, (5000,)), CPU)
        assert operands.away_from_zero((5000,)).abs().min() > 0
    assert Operands(Item("ops", "log", "float16", (5000,)), CPU).positive((5000,)).min() > 0


# Surroundings ---------------------------------------------------------------------------------------------------------------


def surroundings() -> dict[str, Any]:
    backends = torch.backends
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": [str(part) for part in np.random.get_state()],  # noqa: NPY002
        "dtype": torch.get_default_dtype(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "threads": torch.get_num_threads(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "precision": (torch.get_float32_matmul_precision(), *(one.fp32_precision for one in work._precisions())),
    }


@contextmanager
def odd_surroundings() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(threads + 1)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            yield
    finally:
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)


def test_surroundings_change_no_answer_and_are_left_as_they_were(answers: dict[str, str]) -> None:
    with odd_surroundings():
        before = surroundings()
        for item in ONE_OF_EACH_OPERATION:
            with work.settled(CPU):
                assert work.digest(work.prepare(item, CPU)()) == answers[item.id]
        assert surroundings() == before


def test_plain_surroundings_are_left_as_they_were_after_an_error_too() -> None:
    before = surroundings()

    def fails() -> None:
        with work.settled(CPU):
            torch.set_num_threads(3)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert surroundings() == before


def test_settings_that_could_not_be_put_back_are_refused() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(ConfigurationError, match="say different things"), work.settled(CPU):
            pass
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_the_workspace_of_cublas_is_set_for_a_gpu_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with work._put_back():
        work._settle(torch.device("cuda"))
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


# What cannot be computed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "ops/conjure/float32/8",
        "comm/all_reduce/float32/8",
        "train/matmul/float32/8x8x8",
        "ops/matmul/float32/8x8",
        "ops/exp/float32/0",
        "ops/exp/float32/8/backwards",
        "ops/memory/int64/64",
        "ops/exp/float33/8",
        "ops/exp/matmul/8",
    ],
)
def test_what_nobody_knows_is_refused(name: str) -> None:
    with work.settled(CPU), pytest.raises(ConfigurationError, match=r"has|is no dtype"):
        work.prepare(Item.parse(name), CPU)


@pytest.mark.parametrize("name", ["ops/layer_norm/int64/4x8", "ops/exp/float8_e5m2/8", "ops/bitwise_and/float32/8"])
def test_what_has_no_kernel_here_is_unsupported_each_time(name: str) -> None:
    with work.settled(CPU):
        for _ in range(2):
            with pytest.raises(work.Unsupported, match=name):
                work.prepare(Item.parse(name), CPU)


def test_an_error_of_the_device_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(operands: Operands) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(OPERATIONS["ops"], "broken", Operation(build, (1,)))
    with work.settled(CPU), pytest.raises(RuntimeError, match="illegal memory access"):
        work.prepare(Item("ops", "broken", "float32", (8,)), CPU)


# Items that are not computed on a CPU ---------------------------------------------------------------------------------------


def test_every_item_for_gpus_has_an_operation() -> None:
    for item in suites.items(("train", "ops", "mix"), "cuda"):
        work.operation_of(item)


def test_the_variants_for_gpus_compute() -> None:
    with work.settled(CPU):
        before = surroundings()
        for name in (
            "ops/matmul/float32/33x17x9/tf32",
            "ops/fp8_matmul/float8_e4m3fn/32x32x32",
            "train/transformer/float32/2x8x32x1x1/tf32",
            "train/convnet/float32/2x4x8x1/tf32",
        ):
            prepared = work.prepare(Item.parse(name), CPU)
            assert work.digest(prepared()) == work.digest(prepared())
        assert surroundings() == before


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_long_sums_for_gpus_stay_finite(dtype: str) -> None:
    with work.settled(CPU):
        for item in suites.items(("ops",), "cuda"):
            if item.operation == "matmul" and item.dtype == dtype and len(item.shape) == 3 and not item.variant:
                rows, inner, columns = (min(item.shape[0], 8), item.shape[1], min(item.shape[2], 8))
                small = Item("ops", "matmul", dtype, (rows, inner, columns), item.alpha, item.beta)
                assert bool(work.prepare(small, CPU)()[0].isfinite().all()), item.id


# Several at once, and training ----------------------------------------------------------------------------------------------


def test_an_error_in_one_round_of_a_mix_changes_the_answer() -> None:
    calls: list[int] = []

    def answer(wrong: int) -> str:
        calls.clear()

        def part() -> list[Tensor]:
            calls.append(1)
            return [torch.full((4,), 2.0 if len(calls) == wrong else 1.0)]

        return work.digest(mixing._one_after_another([part], 5))

    assert answer(0) not in {answer(number) for number in range(1, 6)}


def test_the_rounds_of_a_mix_are_odd_in_number() -> None:
    found = [item for kind in ("cpu", "cuda") for item in suites.items(("mix",), kind)]
    assert found
    assert all(item.shape[-1] % 2 for item in found)


def test_training_leaves_losses_weights_and_moments() -> None:
    with work.settled(CPU):
        for item in suites.items(("train",)):
            losses, *rest = work.prepare(item, CPU)()
            assert losses.shape == item.shape[-1:]
            weights = 11 if item.operation == "convnet" else 3 + 8 * item.shape[3]
            moments = 1 if item.operation == "convnet" else 2
            assert len(rest) == weights * (1 + moments)
            assert all(not one.requires_grad for one in rest)
