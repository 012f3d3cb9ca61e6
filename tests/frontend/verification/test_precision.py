"""Casts to float32 that are casts to float64 for a while."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import torch
from torch import Tensor, nn

from shardwright.frontend.verification.precision import float64_casts


def test_threads_may_leave_in_any_order() -> None:
    entered, left = Event(), Event()

    def first() -> None:
        with float64_casts():
            entered.wait()
        left.set()

    def second() -> str:
        with float64_casts():
            entered.set()
            left.wait()
            return str(torch.float32)

    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(first)
        assert pool.submit(second).result(60) == "torch.float64"
        running.result(60)
    assert str(torch.float32) == str(torch.get_default_dtype()) == "torch.float32"
    assert torch.ones(1).double().float().dtype == torch.float32


class EagerAttention(nn.Module):
    """Closes places by the least number of its dtype, and takes softmax in float32, as the eager
    attention of Gemma 2 does it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        closed = torch.where(mask, torch.zeros((), dtype=x.dtype), torch.finfo(x.dtype).min)
        scores = self.query(x) @ self.key(x).transpose(1, 2) + closed
        return (scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ x).square().mean()


def test_the_reference_is_the_model_in_a_dtype_of_its_own() -> None:
    """A token that may see nothing is finite in float32, and NaN in ``model.double()`` alone."""
    generator = torch.Generator().manual_seed(0)
    model, x = EagerAttention(), torch.randn(2, 4, 6, generator=generator)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[0] = False
    wide = copy.deepcopy(model).double()
    with float64_casts(wide):
        reference = wide(x.double(), mask)
    assert reference.dtype == torch.float64
    torch.testing.assert_close(reference, model(x, mask).double(), rtol=1e-6, atol=0)
    assert wide(x.double(), mask).isnan(), "of its own, the float64 model makes minus infinity"
