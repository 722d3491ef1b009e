"""The surroundings of slices: what is of the whole process they neither draw from nor set, and what a thread has is as before."""

from __future__ import annotations

import os
import random
import threading
import time
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bitwitness.scan import devices, suites, work
from bitwitness.scan.items import Item
from bitwitness.scan.undisturbed import kind_of, left_out, undisturbed

CPU = torch.device("cpu")


def of_each_kind() -> list[Item]:
    """The smallest item of each operation, dtype and variant: a shape says nothing about what is drawn or set."""
    found: dict[tuple[str, str, str], Item] = {}
    for item in sorted(suites.items(("ops",), "cpu"), key=lambda one: np.prod(one.shape)):
        found.setdefault((item.operation, item.dtype, item.variant), item)
    return list(found.values())


def answers_to(items: list[Item]) -> dict[str, str]:
    found = {}
    for item in items:
        with undisturbed(CPU):
            try:
                found[item.id] = work.digest(work.prepare(item, CPU)())
            except work.Unsupported:
                found[item.id] = "none"
    return found


class Counted(TorchFunctionMode):
    """A mode of the job that sees each call of a function."""

    calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    """A mode of the job that sees each operation."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def of_the_process() -> list[Any]:
    """What is of the whole process, as it is."""
    drawn: Any = np.random.get_state()  # noqa: NPY002
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        drawn[1].tolist(),
        drawn[2:],
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        dict(os.environ),
        warnings.filters,
    ]


SETTERS = (
    (torch, "set_default_dtype"),
    (torch, "set_num_threads"),
    (torch, "set_float32_matmul_precision"),
    (torch, "use_deterministic_algorithms"),
    (torch, "set_deterministic_debug_mode"),
    (torch, "set_rng_state"),
    (torch, "manual_seed"),
    (torch._C, "_set_deterministic_algorithms"),
    (torch._C, "_set_default_dtype"),
    (torch, "clear_autocast_cache"),
    (random, "seed"),
    (random, "setstate"),
    (np.random, "seed"),
    (np.random, "set_state"),
)


def test_slices_neither_draw_nor_set_what_is_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set back was set, for other threads too. And their answers are the same, whatever the job has set and overridden."""
    items = of_each_kind()
    expected = answers_to(items)
    saved: list[int] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(1)
        return tensor

    counted, dispatched = Counted(), Dispatched()
    torch.set_default_dtype(torch.float64)
    try:
        before = of_the_process()
        with (
            torch.device("meta"),
            torch.autocast("cpu", dtype=torch.bfloat16),
            torch.inference_mode(),
            torch.autograd.graph.saved_tensors_hooks(save, save),
            counted,
            dispatched,
            monkeypatch.context() as patched,
        ):
            for module, name in SETTERS:
                patched.setattr(module, name, lambda *args, **kwargs: pytest.fail("it sets what is of the process"))
            counted.calls = dispatched.calls = 0
            found = answers_to(items)
            assert (counted.calls, dispatched.calls, saved) == (0, 0, [])
        assert of_the_process() == before
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == expected


def test_what_another_thread_draws_meanwhile_is_as_without_slices() -> None:
    """A thread that fetches batches draws one after another; which numbers, is a function of the seeds."""
    item = Item("ops", "matmul", "float32", (64, 64, 64))

    def drawn(slices: bool) -> list[tuple[Any, ...]]:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)
        found: list[tuple[Any, ...]] = []
        working, done = threading.Event(), threading.Event()

        def fetch() -> None:
            working.wait(30)
            for _ in range(300):
                found.append((random.random(), np.random.rand(), torch.rand(()).item(), torch.empty(1).dtype))  # noqa: NPY002
                time.sleep(0)
            done.set()

        thread = threading.Thread(target=fetch)
        thread.start()
        working.set()
        while not done.is_set():
            if slices:
                answers_to([item])
            time.sleep(0)
        thread.join()
        return found

    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    torch.set_default_dtype(torch.float64)
    try:
        assert drawn(slices=True) == drawn(slices=False)
    finally:
        torch.set_default_dtype(torch.float32)
        random.setstate(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002
        torch.set_rng_state(kept[2])


@pytest.mark.parametrize("fails", [False, True])
def test_the_modes_of_the_thread_are_as_before(fails: bool) -> None:
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        try:
            with undisturbed(CPU):
                assert torch.ones(1).device == CPU
                assert not torch.is_autocast_enabled("cpu")
                assert not torch.is_inference_mode_enabled()
                assert not torch.is_grad_enabled()
                if fails:
                    raise OSError("in the middle")
        except OSError:
            assert fails
        assert torch.ones(1).device.type == "meta"
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_inference_mode_enabled()


def test_a_mode_that_stays_is_told() -> None:
    before = torch.is_autocast_cache_enabled()
    try:
        with pytest.raises(RuntimeError, match="autocast cache"), undisturbed(CPU):
            torch.set_autocast_cache_enabled(not before)
    finally:
        torch.set_autocast_cache_enabled(before)


def test_the_kind_says_whether_algorithms_are_deterministic() -> None:
    assert ", algorithms not deterministic" in kind_of(CPU)["settings"]
    torch.use_deterministic_algorithms(True)
    try:
        assert kind_of(CPU) == devices.kind_of(CPU), "as in a scan, whose golden answers judge it"
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_needs_another_setting_is_left_out() -> None:
    """No GPU is asked: the words alone decide."""
    cuda = torch.device("cuda")
    plain = Item("ops", "matmul", "float32", (64, 64, 64))
    assert left_out(plain, cuda) == ""
    assert "precision" in left_out(replace(plain, variant="tf32"), cuda)
    adding = Item("ops", "scatter_add", "float32", (64,))
    assert left_out(adding, CPU) == ""
    assert "deterministic" in left_out(adding, cuda)
    torch.use_deterministic_algorithms(True)
    try:
        assert left_out(adding, cuda) == ""
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_compiled_model_is_not_compiled_again() -> None:
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    model = torch.compile(nn.Linear(8, 8), backend=backend)
    batch = torch.ones(2, 8)
    before = model(batch)
    answers_to(of_each_kind()[:10])
    assert torch.equal(model(batch), before)
    assert compiled == [1]
