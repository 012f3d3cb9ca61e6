"""``as_strided`` becomes slices and windows of dims: memory is not the same on a rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from tracing import traced

from shardwright.compiler.trace import trace
from shardwright.compiler.trace.calls.strided import strided
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.errors import TraceError


class Chunks(nn.Module):
    """Windows of four rows that overlap by two, as Longformer makes them, of a transposed
    product.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:  # [B, 8, 6]
        # [B, 4, 8, 2].
        rows = self.up(x).transpose(0, 1).view(8, x.shape[0], 4, 2).permute(1, 2, 0, 3)
        step = rows.stride(2) * 2
        chunks = rows.as_strided(
            (*rows.shape[:2], 3, 4, 2), (*rows.stride()[:2], step, rows.stride(2), 1)
        )
        return self.down(chunks.sin().sum(3).permute(0, 2, 1, 3).flatten(2)).square().mean()


X = torch.randn(4, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_windows_are_those_of_one_device() -> None:
    graph = traced(Chunks(), {"x": X}, exact=False)
    assert "unfold" in {op.target for op in graph.ops}
    assert not any("as_strided" in op.target for op in graph.ops)


@pytest.mark.parametrize("policy", ["data", "tp"])
def test_ranks_read_what_one_device_reads(policy: str) -> None:
    report = verify(Chunks(), {"x": X}, policy, {"plan_ngpus": 2, "runtime_ngpus": 2}, steps=1)
    assert report.ok, str(report)


def test_memory_of_others_is_refused() -> None:
    class Neighbours(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2)[:2].as_strided((4, 8, 6), (48, 6, 1))

    with pytest.raises(TraceError) as caught:
        trace(Neighbours(), {"x": X})
    first, where, why, hint = str(caught.value).split("\n")
    assert first == "as_strided() reads memory in a way that is not along the dims of its tensor"
    assert __file__ in where
    assert (
        why
        == "  why:   a rank's tensors lie in memory in another way than the model's on one device"
    )
    assert hint == "  try:   index, slice or unfold the tensor instead"


@st.composite
def calls(draw: st.DrawFn) -> tuple[Tensor, list[int], list[int], int | None]:
    """A tensor, permuted and sliced, and sizes and strides in its memory."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    x = (
        torch.arange(torch.Size(shape).numel())
        .reshape(shape)
        .permute(draw(st.permutations(range(len(shape)))))
    )
    if draw(st.booleans()) and x.shape[0] > 2:
        x = x[1:]
    if draw(st.booleans()) and x.shape[-1] > 2:
        x = x[..., ::2]
    steps = sorted({0, 1, 2, 3, *(s * k // 2 for s in x.stride() for k in (1, 2, 4))})
    size = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    stride = draw(st.lists(st.sampled_from(steps), min_size=len(size), max_size=len(size)))
    return (
        x,
        size,
        stride,
        draw(
            st.sampled_from(
                [None, x.storage_offset(), x.storage_offset() + 1, x.storage_offset() + 3]
            )
        ),
    )


@given(calls())
def test_any_that_is_found_is_the_same(
    call: tuple[Tensor, list[int], list[int], int | None],
) -> None:
    x, size, stride, offset = call
    try:
        expected = x.as_strided(size, stride, offset)
    except RuntimeError:  # beyond its memory
        return
    found = strided(x, size, stride, offset)
    assert found is None or torch.equal(found, expected)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_the_tensor_itself_is_found(shape: list[int], data: st.DataObject) -> None:
    x = (
        torch.arange(torch.Size(shape).numel())
        .reshape(shape)
        .permute(data.draw(st.permutations(range(len(shape)))))
    )
    found = strided(x, x.shape, x.stride())
    assert torch.Size(shape).numel() == 1 or (found is not None and torch.equal(found, x))
