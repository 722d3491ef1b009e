from __future__ import annotations

import json
import math

import pytest

from bitwitness.errors import ConfigurationError
from bitwitness.scan import suites
from bitwitness.scan.items import SUITES, Item
from tests.scan import freeze

TYPES = ("cpu", "cuda")


@pytest.mark.parametrize("device_type", TYPES)
def test_an_item_occurs_once_and_its_id_says_all_of_it(device_type: str) -> None:
    found = suites.items(SUITES, device_type)
    assert len({item.id for item in found}) == len(found) > 400
    assert [Item.parse(item.id) for item in found] == list(found)
    assert all(suites.known(item) for item in found)


@pytest.mark.parametrize("device_type", TYPES)
def test_what_tells_most_comes_first(device_type: str) -> None:
    found = suites.items(("mix", "ops", "train"), device_type)
    assert list(dict.fromkeys(item.suite for item in found)) == ["train", "ops", "mix"]
    ops = [item for item in found if item.suite == "ops"]
    plain = [(item.alpha, item.beta) == (1, 1) for item in ops]
    assert plain == sorted(plain, reverse=True)
    first = [
        ops.index(next(item for item in ops if item.operation == name))
        for name in ("fma", "scatter", "matmul", "memory")
    ]
    assert first == sorted(first)


def test_only_what_was_asked_for() -> None:
    assert {item.suite for item in suites.items(("mix",))} == {"mix"}
    assert suites.items(()) == ()
    assert suites.items(("comm",)) == ()


def test_dtypes_and_ranges_are_swept() -> None:
    products = [item for item in suites.items(("ops",)) if item.operation == "matmul"]
    assert {item.dtype for item in products} == {"float32", "float64", "bfloat16", "float16"}
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        ranges = {(item.alpha, item.beta) for item in products if item.dtype == dtype}
        assert ranges >= {(1, 1), (1e3, 1e-3), (1e-3, 1e3)}
        assert min(a * b for a, b in ranges) < 1e-5
        assert max(a * b for a, b in ranges) > 100
    assert {item.variant for item in products} == {"", "transposed"}
    assert {"tf32"} <= {item.variant for item in suites.items(("ops",), "cuda")}


@pytest.mark.parametrize("device_type", TYPES)
def test_no_item_is_larger_than_a_common_device(device_type: str) -> None:
    found = [item for item in suites.items(("ops",), device_type) if not item.operation.endswith(("conv2d", "matmul"))]
    assert max(math.prod(item.shape) for item in found) <= (1 << 25 if device_type == "cuda" else 1 << 14)


def test_items_of_nobody_are_not_known() -> None:
    assert not suites.known(Item("ops", "matmul", "float32", (3, 3, 3)))
    assert not suites.known(Item("comm", "all_reduce", "float32", (16,)))
    with pytest.raises(ConfigurationError):
        Item.parse("ops/matmul")


def test_answers_change_only_with_the_version() -> None:
    frozen, now = json.loads(freeze.FROZEN.read_text(encoding="utf-8")), freeze.now()
    if now["suite_version"] != frozen["suite_version"]:
        pytest.fail("SUITE_VERSION was raised: run `python -m tests.scan.freeze`")
    changed = [kind for kind in TYPES if now["items"][kind] != frozen["items"][kind]]
    changed += [name for name in freeze.COMPUTING if now["code"][name] != frozen["code"].get(name)]
    assert not changed, (
        f"{', '.join(changed)} changed: golden answers learned before may be wrong now. Raise SUITE_VERSION in scan/items.py and "
        "run `python -m tests.scan.freeze`; or, if no answer changes, `python -m tests.scan.freeze --same-as HEAD`"
    )


def test_only_code_is_frozen() -> None:
    code = freeze.code_of('"""Why."""\n\n# because\ndef f():\n    """What."""\n    return 1\n')
    assert code == "def f():\n    return 1"
    assert freeze.code_of("def f():\n    return 2\n") != code
