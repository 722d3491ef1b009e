"""A case made smaller: what is needed is found, what is asked has an end, and what is left still makes sense as an operation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from bitwitness.compare import cases, reproduce
from bitwitness.compare.cases import CannotBeRepeated, Case
from bitwitness.compare.minimising import Budget, Spent, ddmin, minimised, trials

CPU = torch.device("cpu")


def product(rows: int = 6, inner: int = 10, columns: int = 9) -> Case:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, inner, generator=generator)
    right = torch.randn(columns, inner, generator=generator).t()
    return Case("aten.mm.default", (left, right), {})


def answer(case: Case) -> torch.Tensor:
    return reproduce.computed(case.operation, case.args, case.kwargs, CPU)[0]


@pytest.mark.parametrize("needed", [{3}, {0, 31}, {5, 6, 7}, {2, 11, 19, 30}, set(range(32))], ids=str)
def test_just_what_is_needed_is_found(needed: set[int]) -> None:
    asked: list[int] = []

    def test(kept: Sequence[int]) -> bool:
        asked.append(len(kept))
        return needed <= set(kept)

    assert set(ddmin(range(32), test)) == needed
    assert len(asked) < 2000
    assert 0 not in asked


def test_when_no_more_may_be_asked_what_was_found_is_kept() -> None:
    left = 3

    def test(kept: Sequence[int]) -> bool:
        nonlocal left
        if not left:
            raise Spent
        left -= 1
        return 5 in kept

    kept = ddmin(range(64), test)
    assert 5 in kept
    assert len(kept) == 8


def test_a_fault_that_needs_one_element_of_a_product_is_left_with_one() -> None:
    def wrong(case: Case) -> bool:
        return bool((answer(case) > 1.5).any())

    budget = Budget(400)
    small = minimised(product(), wrong, budget)
    assert wrong(small)
    assert small.elements == 2  # of one row of the left and one column of the right factor
    assert small.nonzero == 2
    assert budget.asked + budget.left == 400
    assert minimised(product(), wrong, Budget(400)).elements == small.elements


def test_elements_that_are_not_needed_become_zero() -> None:
    def wrong(case: Case) -> bool:
        return case.sizes() == [10, 9, 6] and float(answer(case)[2, 4].abs()) > 0.1

    small = minimised(product(), wrong, Budget(4000))
    assert small.elements == 6 * 10 + 10 * 9
    assert small.nonzero == 2


def test_without_a_budget_a_case_stays_as_it_is() -> None:
    case = product()
    assert minimised(case, lambda _: True, Budget(0)) is case


def test_axes_of_one_size_are_narrowed_together_and_keep_their_order_in_memory() -> None:
    case = product().narrowed({10: [0, 3, 4], 9: [8]})
    left, right = case.args
    assert (tuple(left.shape), tuple(right.shape)) == ((6, 3), (3, 1))
    assert torch.equal(left, product().args[0][:, [0, 3, 4]])
    wide = product().narrowed({10: [0, 3, 4]}).args[1]
    assert wide.stride() == (1, 3)  # transposed, as it was
    assert wide.t().is_contiguous()


def test_a_shape_among_the_operands_follows() -> None:
    case = Case("aten.native_layer_norm.default", (torch.ones(4, 8), [8], torch.ones(8), torch.ones(8), 1e-5), {})
    narrow = case.narrowed({8: [0, 1, 7]})
    assert narrow.args[1] == [3]
    assert answer(narrow).shape == (4, 3)


def test_only_numbers_are_cleared_and_no_index() -> None:
    case = Case("aten.embedding.default", (torch.ones(5, 3), torch.tensor([4, 1])), {})
    cleared = case.cleared([(0, 14)])
    assert int(cleared.args[0].count_nonzero()) == 1
    assert cleared.args[1].tolist() == [4, 1]
    assert len(case.places()) == 15


def test_how_often_an_intermittent_fault_is_asked() -> None:
    assert trials(1.0, 100) == 1
    assert trials(0.2, 100) == 14  # 0.8 ** 14 = 0.044
    assert trials(1e-6, 100) == 100
    assert trials(0.0, 7) == 7


def test_operands_are_copied_and_what_cannot_be_handed_on_is_refused() -> None:
    live = torch.ones(3)
    kept = cases.host(live)
    live += 1
    assert kept.tolist() == [1, 1, 1]
    assert cases.host([torch.float16, torch.device("cpu"), None, 2.5]) == [
        {"torch": "float16"},
        {"device": ""},
        None,
        2.5,
    ]
    expanded = cases.host(torch.ones(1, 3).expand(4, 3))
    assert reproduce.placed(expanded, CPU).shape == (4, 3)
    with pytest.raises(CannotBeRepeated, match="Generator"):
        cases.host(torch.Generator())


def test_a_case_is_read_back_without_unpickling_anything(tmp_path: object) -> None:
    case = Case("aten._to_copy.default", (torch.ones(2),), {"dtype": {"torch": "float16"}, "device": {"device": ""}})
    file = f"{tmp_path}/operands.pt"
    torch.save(case.stored(), file)
    found = torch.load(file, weights_only=True)
    assert reproduce.computed(found["operation"], found["args"], found["kwargs"], CPU)[0].dtype == torch.float16
