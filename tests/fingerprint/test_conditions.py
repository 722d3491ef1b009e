"""Digests depend on dtype, shape and elements only, whatever state torch is in; wrong arguments are named; memory is bounded."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bitwitness.errors import ConfigurationError
from bitwitness.fingerprint import backends, combine, fingerprint_tensors, row_sums, torch_ops

MIB = 1 << 20


class LiveStorage(TorchDispatchMode):
    """Counts the bytes of every storage that operations under it make and that still lives; keeps the peak."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: set[int] = {known.untyped_storage()._cdata}
        self.live: int = 0
        self.peak: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._seen:
                storage = leaf.untyped_storage()
                self._seen.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
        return out

    def forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def peak_of(tensor: Tensor, tensors: list[Tensor]) -> int:
    """Most bytes that `fingerprint_tensors(tensors)` held at once, `tensor` being the owner of their memory."""
    fingerprint_tensors(tensors[:1], 3)
    torch_ops._places.cache_clear()
    mode = LiveStorage(tensor)
    with mode:
        fingerprint_tensors(tensors, 3)
    return mode.peak


def test_the_memory_meter_sees_a_full_copy() -> None:
    tensor = torch.zeros(4 * MIB)
    mode = LiveStorage(tensor)
    with mode:
        (tensor + 1).sum()
        (tensor + 1).sum()
        assert mode.live < MIB, "what is freed must not count"
        kept = [tensor + 1 for _ in range(3)]
    assert 48 * MIB <= mode.peak < 64 * MIB
    assert len(kept) == 3


def test_memory_stays_below_64_mib() -> None:
    tensor = torch.zeros(128 * MIB, dtype=torch.float32)
    assert peak_of(tensor, [tensor]) < 64 * MIB


@pytest.mark.parametrize("kind", ["transposed", "stepped", "expanded", "conjugate", "table", "misaligned"])
def test_memory_stays_below_64_mib_for_every_layout(kind: str) -> None:
    base = torch.zeros(32 * MIB, dtype=torch.float32)
    made: dict[str, Callable[[], list[Tensor]]] = {
        "transposed": lambda: [base.view(8192, 4096).t()],
        "stepped": lambda: [base[::2]],
        "expanded": lambda: [base[: 1 << 16].expand(512, 1 << 16)],
        "conjugate": lambda: [base.view(torch.complex64).conj()],
        "table": lambda: list(base.split(1 << 14)),
        "misaligned": lambda: [base.view(torch.uint8)[1:-2]],
    }
    assert peak_of(base, made[kind]()) < 64 * MIB


@pytest.fixture(params=["int8", "int64"])
def inner_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both inner loops, whichever this CPU would take."""
    if request.param == "int8" and not row_sums.int8_products_are_exact():
        pytest.skip("this CPU has no 8-bit dot products")
    monkeypatch.setattr(row_sums, "int8_products_are_exact", lambda: request.param == "int8")


@pytest.mark.usefixtures("inner_loop")
def test_both_inner_loops_give_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(5)
    table = [
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in (0, 1, 9, 70_001, 3 * MIB)
    ]
    table += [torch.full((9000,), byte, dtype=torch.uint8) for byte in (0, 127, 128, 255)]
    known = combine(fingerprint_tensors(table, 77), 77).tolist()
    assert known == KNOWN


# By reference.fingerprint_bytes and combine_digests; must never change, because labels of checkpoints hold such numbers.
KNOWN = [3213467503944351824, -3609371828099609451, 1798980610574390999]


def sample() -> list[Tensor]:
    """A small, a large and a 2-byte tensor, and parameters, always the same."""
    generator = torch.Generator().manual_seed(11)
    large = torch.randn(300_000, generator=generator)
    parameter = nn.Parameter(torch.randn(7, 5, generator=generator))
    return [torch.arange(10.0, dtype=torch.float32), large, large.to(torch.bfloat16)[1:], parameter, parameter * 2]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


AMBIENT: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "default dtype": default_float64,
    "deterministic": deterministic,
}


@pytest.mark.parametrize("ambient", AMBIENT)
def test_ambient_modes_change_nothing(ambient: str) -> None:
    tensors = sample()
    expected = fingerprint_tensors(tensors, 9)
    together = combine(expected, 9)
    for cache in (torch_ops._places, row_sums.inner_weights, row_sums._int8_weights, row_sums._powers_of_256):
        cache.cache_clear()
    with AMBIENT[ambient]():
        digests = fingerprint_tensors(tensors, 9)
        assert combine(digests, 9).tolist() == together.tolist()
    assert digests.tolist() == expected.tolist()
    assert not digests.requires_grad
    assert not digests.is_inference()
    assert fingerprint_tensors(tensors, 9).tolist() == expected.tolist(), "a cache kept something from the mode"


def test_tensors_made_in_inference_mode() -> None:
    with torch.inference_mode():
        tensors = [tensor.clone() for tensor in sample()]
    assert fingerprint_tensors(tensors).tolist() == fingerprint_tensors(sample()).tolist()


def test_nothing_is_touched() -> None:
    tensors = sample()
    copies = [tensor.detach().clone() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    state = torch.get_rng_state()
    fingerprint_tensors(tensors, 4)
    assert torch.equal(torch.get_rng_state(), state)
    assert [tensor._version for tensor in tensors] == versions
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))
    assert tensors[3].requires_grad
    assert tensors[4].grad_fn is not None


def test_lazy_conjugation_and_negation_count_as_carried_out() -> None:
    value = torch.randn(5, 7, dtype=torch.complex64)
    for lazy in (value.conj(), value.conj().imag, value.t().conj()[1:], value.to(torch.complex128).conj()):
        done = lazy.resolve_conj().resolve_neg()
        assert fingerprint_tensors([lazy]).tolist() == fingerprint_tensors([done]).tolist()
    big = torch.randn(1 << 18, dtype=torch.complex64).conj()
    assert fingerprint_tensors([big]).tolist() == fingerprint_tensors([big.resolve_conj()]).tolist()


def test_nan_payloads_and_signed_zeros_are_told_apart() -> None:
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0x7FC00001, -0x400000, 0, -0x80000000], dtype=torch.int32)
    digests = fingerprint_tensors(list(bits.view(torch.float32)))
    assert len({tuple(row) for row in digests.tolist()}) == len(bits)


def test_scalars_and_tensors_without_elements() -> None:
    assert fingerprint_tensors([]).shape == (0, 3)
    assert fingerprint_tensors([]).dtype == torch.int64
    assert fingerprint_tensors([torch.empty(0), torch.tensor(1.5)]).shape == (2, 3)
    assert combine(torch.empty(0, 3, dtype=torch.int64), 1).tolist() == [0, 0, 0]


def test_storage_at_any_byte_offset() -> None:
    memory = torch.arange(4 * 70_001, dtype=torch.int32).view(torch.uint8)
    for offset in (1, 2, 3, 5):
        part = memory[offset : offset + 200_001]
        assert fingerprint_tensors([part]).tolist() == fingerprint_tensors([part.clone()]).tolist()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.empty(2, device="meta"), "meta"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (lambda: FakeTensorMode().from_tensor(torch.ones(2)), "FakeTensor"),
        (lambda: 3.0, "float"),
    ],
)
def test_what_has_no_dense_bytes_is_refused_by_index(make: Callable[[], Any], word: str) -> None:
    bad = make()
    with pytest.raises(ConfigurationError, match=rf"tensors\[1\].*{word}") as caught:
        fingerprint_tensors([torch.ones(1), bad])
    assert isinstance(caught.value, ValueError)


def test_combine_refuses_other_shapes() -> None:
    for bad in (torch.zeros(3, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 3)):
        with pytest.raises(ConfigurationError, match=r"\[N, 3\]"):
            combine(bad, 0)


def test_a_backend_takes_over_its_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_backends", {})
    backends.register_backend("cpu", lambda tensors, seed: torch.full((len(tensors), 3), seed, dtype=torch.int64))
    assert fingerprint_tensors([torch.ones(2)], 7 + 2**64).tolist() == [[7, 7, 7]]
