"""Products by groups of rows, with torch's kernel and without, beside dense products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwright.runtime.errors import UsageError
from shardwright.runtime.ops import grouped_products
from shardwright.runtime.ops.grouped_products import grouped_linear
from shardwright.runtime.ops.routing import Routing

BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def _routing(counts: list[int]) -> Routing:
    return Routing(torch.empty(0), torch.tensor(counts).cumsum(0).int(), 0, 1)


def _product(
    dtype: torch.dtype, transposed: bool, counts: list[int], width: int, shift: int
) -> None:
    """``shift``: elements from the beginning of the memory of the rows to the first of them."""
    torch.manual_seed(0)
    size = sum(counts) * 8
    rows = torch.randn(size + shift, dtype=dtype)[shift:].view(-1, 8).requires_grad_()
    shape = (3, 8, width) if transposed else (3, width, 8)
    weight = torch.randn(shape, dtype=dtype, requires_grad=True)
    out = grouped_linear(rows, weight, _routing(counts), transposed=transposed)
    # A gradient that is expanded, as that of a sum.
    (out.sum() + out.square().sum()).backward()

    dense_rows, dense_weight = (x.detach().double().requires_grad_() for x in (rows, weight))
    matrices = dense_weight if transposed else dense_weight.mT
    parts = zip(dense_rows.split(counts), matrices, strict=True)
    wanted = torch.cat([part @ matrix for part, matrix in parts])
    (wanted.sum() + wanted.square().sum()).backward()
    assert weight.grad is not None and weight.grad.is_contiguous()
    pairs = ((out, wanted), (rows.grad, dense_rows.grad), (weight.grad, dense_weight.grad))
    for found, right in pairs:
        assert isinstance(found, Tensor) and isinstance(right, Tensor)
        assert found.dtype == dtype and found.shape == right.shape
        if found.numel():
            assert (found - right).abs().max() <= 10 * BOUNDS[dtype] * (1 + right.abs().max())


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_by_groups_are_those_of_each_expert(dtype: torch.dtype, transposed: bool) -> None:
    for counts in ([2, 0, 5], [0, 0, 0], [0, 0, 9], [1, 1, 1]):
        for width in (16, 7):  # whole 16 bytes, and not
            for shift in (0, 1):
                _product(dtype, transposed, counts, width, shift)


def test_gradients_of_any_strides_come_to_the_kernel_and_of_gradients_none() -> None:
    rows, weight = torch.randn(7, 8, requires_grad=True), torch.randn(3, 16, 8, requires_grad=True)
    out = grouped_linear(rows, weight, _routing([2, 0, 5]))
    ones = torch.ones(7 * 16 + 1)
    (wanted,) = torch.autograd.grad(out, rows, ones[1:].view(7, 16).clone(), retain_graph=True)
    for grad in (ones[:1].expand(7, 16), ones[1:].view(16, 7).T, ones[1:].view(7, 16)):
        (found,) = torch.autograd.grad(out, rows, grad, retain_graph=True)
        assert torch.equal(found, wanted)
    with pytest.raises(UsageError, match="no gradients of gradients"):
        torch.autograd.grad(out.sum(), rows, create_graph=True)


def test_the_kernel_is_called_where_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    has_kernel = grouped_products._has_kernel

    def noted(*args: Tensor) -> bool:
        found.append(has_kernel(*args))
        return found[-1]

    monkeypatch.setattr(grouped_products, "_has_kernel", noted)
    for width, shift, allowed in ((16, 0, True), (7, 0, False), (16, 1, False)):
        found.clear()
        _product(torch.float32, False, [2, 0, 5], width, shift)
        assert found[0] is allowed  # forward
    found.clear()
    _product(torch.float64, False, [2, 0, 5], 16, 0)
    assert not any(found)
