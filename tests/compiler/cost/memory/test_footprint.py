"""What single instructions do to memory, by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from example_ops import example_op

from shardwright.compiler.cost.fake.live_bytes import LiveBytes
from shardwright.compiler.cost.memory.footprint import Footprints, TensorForm
from shardwright.compiler.ir.op import RankDraw
from shardwright.compiler.ir.size import DynamicSize
from shardwright.compiler.plan.conversion import convert
from shardwright.compiler.plan.program import Adapt, Compute
from shardwright.runtime.atoms import Atom
from shardwright.runtime.layout import Layout, Mesh

ALONE, TP = Footprints(Mesh()), Footprints(Mesh((("tp", 2),)))


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


def compute(function: Any, *args: Any, **kwargs: Any) -> tuple[Compute, list[TensorForm]]:
    op, operands = example_op((function, args, kwargs))
    layouts = tuple(Layout.whole(value.shape) for value in op.results)
    return Compute(op, op, {}, layouts), [TensorForm.of(x) for x in operands]


def adapt(source: str, target: str) -> tuple[Adapt, list[TensorForm]]:
    (step,) = convert(Layout.parse(source), Layout.parse(target), Mesh((("tp", 2),)))
    op, _ = example_op((F.gelu, (randn(4),)))
    value = op.operands[0]
    shape = Layout.parse(source).local_shape(Mesh((("tp", 2),)), {"tp": 0})
    return Adapt(value, value, value, step), [TensorForm.of(torch.empty(shape, requires_grad=True))]


def gradient(*shape: int) -> TensorForm:
    return TensorForm.of(torch.empty(shape))


def test_the_ranks_that_keep_nothing_of_a_value_make_zeros() -> None:
    kept, operands = adapt("[8, 4]", "[8, 4] P(tp)")
    assert kept.step.kind == "keep_one"
    forward = TP.forward(kept, operands)
    assert (forward.storages, forward.made) == ((1,), (8 * 4 * 4,))
    one, operands = adapt("[8, 4] G(tp)", "[8, 4]")
    assert one.step.kind == "grad_keep_one" and TP.forward(one, operands).made == ()
    assert TP.backward(one, operands, [gradient(8, 4)]).made == (8 * 4 * 4,)


def test_a_product_keeps_its_factors() -> None:
    linear, operands = compute(F.linear, randn(4, 8), randn(6, 8), randn(6))
    forward = ALONE.forward(linear, operands)
    assert (forward.storages, forward.made, forward.saved, forward.peak) == (
        (3,),
        (4 * 6 * 4,),
        (0, 1),
        4 * 6 * 4,
    )
    backward = ALONE.backward(linear, operands, [gradient(4, 6)])
    assert backward.wanted == (0, 1, 2)
    assert [form.shape for form in backward.gradients] == [(4, 8), (6, 8), (6,)]
    assert sorted(backward.made) == [24, 128, 192] and backward.peak == 24 + 128 + 192


def test_layers_that_differ_in_the_name_of_a_draw_run_once() -> None:
    dropout, operands = compute(F.dropout, randn(4, 8), 0.1)
    own = dropout.op.retarget("shardwright.runtime.ops.dropout")
    first, second, other = (
        ALONE.forward(replace(dropout, op=own.with_args(draw=draw)), operands)
        for draw in (RankDraw("a"), RankDraw("b"), RankDraw("b", layout="[4, 8]"))
    )
    assert first is second and first is not other
    assert first.exact


def test_without_training_nothing_is_kept() -> None:
    linear, operands = compute(F.linear, randn(4, 8), randn(6, 8))
    assert ALONE.forward(linear, operands, trains=False).saved == ()


def test_a_loss_has_two_tensors_of_logits_in_its_backward() -> None:
    """What it saved in the forward is there already."""
    loss, operands = compute(F.cross_entropy, randn(64, 512), torch.zeros(64, dtype=torch.long))
    logits = 64 * 512 * 4
    forward = ALONE.forward(loss, operands)
    assert max(forward.made) == logits and forward.peak == pytest.approx(logits, rel=0.01)
    backward = ALONE.backward(loss, operands, [gradient()])
    assert backward.made == (logits,) and backward.peak == pytest.approx(2 * logits, rel=0.01)


def test_residuals_pass_gradients_on() -> None:
    add, operands = compute(torch.add, randn(4, 8), randn(4, 8))
    assert ALONE.forward(add, operands).saved == ()
    backward = ALONE.backward(add, operands, [gradient(4, 8)])
    assert (backward.storages, backward.made, backward.peak) == ((0, 0), (), 0)


def test_views_share_and_know_strides() -> None:
    transpose, operands = compute(torch.transpose, randn(4, 8), 0, 1)
    forward = ALONE.forward(transpose, operands)
    assert (forward.storages, forward.made, forward.peak) == ((0,), (), 0)
    assert forward.results[0].strides == (1, 8)
    reshape, _ = compute(torch.reshape, torch.empty(8, 4).requires_grad_(), (32,))
    # A copy, of what does not lie in order.
    assert ALONE.forward(reshape, [forward.results[0]]).made == (4 * 32,)


def test_only_gradients_that_came_count() -> None:
    chunk, operands = compute(torch.chunk, randn(4, 8), 2)
    both = ALONE.backward(chunk, operands, [gradient(4, 4), gradient(4, 4)])
    one = ALONE.backward(chunk, operands, [gradient(4, 4), None])
    assert both.made == one.made == (4 * 8 * 4,) and one.peak >= both.peak


def test_a_backward_that_needs_numbers_is_said_to_be_assumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linear, operands = compute(F.linear, randn(4, 8), randn(5, 8))
    footprints = Footprints(Mesh())
    assert footprints.backward(linear, operands, [gradient(4, 5)]).exact

    def refuses(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("data-dependent")

    monkeypatch.setattr(torch.autograd, "grad", refuses)
    found = Footprints(Mesh()).backward(linear, operands, [gradient(4, 5)])
    assert (
        not found.exact and found.made == (4 * 8 * 4, 5 * 8 * 4) and found.peak == sum(found.made)
    )

    def broken(*arguments: Any, **options: Any) -> None:
        raise KeyError("an error of this package")

    monkeypatch.setattr(torch.autograd, "grad", broken)
    with pytest.raises(KeyError):
        Footprints(Mesh()).backward(linear, operands, [gradient(4, 5)])


@pytest.mark.parametrize(
    ("source", "target", "made", "grad_made"),
    [
        ("[8/tp, 6]", "[8, 6]", (192,), (96,)),
        ("[8, 6] P(tp)", "[8, 6]", (192,), ()),
        ("[8, 6]", "[8, 6] G(tp)", (), (192,)),
        ("[8, 6]", "[8/tp, 6]", (96,), (192,)),
        ("[8, 6] P(tp)", "[8/tp, 6]", (96,), (192,)),
    ],
)
def test_adapters_run_as_they_are(
    source: str, target: str, made: tuple[int, ...], grad_made: tuple[int, ...]
) -> None:
    adapter, operands = adapt(source, target)
    forward = TP.forward(adapter, operands)
    assert (forward.made, forward.saved) == (made, ())
    result = forward.results[0]
    assert TP.backward(adapter, operands, [gradient(*result.shape)]).made == grad_made


def test_live_bytes_count_storages_once_and_forget_them() -> None:
    with LiveBytes() as live:
        x = torch.zeros(256)
        assert live.now == 1024
        views = [x.view(16, 16), x[1:]]
        assert live.now == 1024
        y = x + 1
        assert live.now == live.peak == 2048
        del y
        assert (live.now, live.peak) == (1024, 2048)
        live.restart()
        assert live.peak == 1024
        del x, views
        assert live.now == 0


def test_an_exchange_between_two_cuts_of_one_dim_has_the_size_of_its_pieces() -> None:
    step, forms = adapt("[4, 2 * 2+2/tp]", "[4, 2/tp * 4]")
    assert step.step.kind == "all_to_all"
    found = TP.forward(step, forms)
    assert (
        [form.shape for form in found.results] == [(4, 4)]
        and found.made == (64,)
        and found.saved == ()
    )
    assert found.peak >= 64 and found.results[0].requires_grad


def test_a_forward_that_needs_numbers_has_the_sizes_of_the_dummy_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("data-dependent")

    gelu, operands = compute(F.gelu, randn(7, 2))
    footprints = Footprints(Mesh((("tp", 2),)))
    monkeypatch.setattr(footprints.rank, "run", refuses)
    found = footprints.forward(
        replace(gelu, layouts=(Layout(((Atom((DynamicSize("n", 7),), ("tp",)),), (Atom((2,)),))),)),
        operands,
    )
    assert (
        not found.exact
        and [form.shape for form in found.results] == [(4, 2)]
        and found.made == (4 * 2 * 4,)
    )
