"""Operators with a split factor equal the plain call: values and gradients, uneven and empty pieces
included.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from op_ranks import assert_parallel, on_mesh
from placements import Sharded

from shardwright.runtime import ops
from shardwright.runtime.errors import InputError
from shardwright.runtime.layout import Cut, Mesh
from shardwright.runtime.runs import piece

RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3])


def split(dim, length):
    return Sharded(dim, Cut((length,)))


def randn(*shape, grad=True):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(grad)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@RANKS
@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(name, length, num_ranks):
    for dim in (1, -2):
        assert_parallel(
            num_ranks,
            lambda x: getattr(F, name)(x, dim),  # noqa: B023
            lambda axis, x: getattr(ops, name)(x, dim, dim_axes=(axis,)),  # noqa: B023
            [(randn(3, length, 2), split(1, length))],
            split(1, length),
        )


@RANKS
@pytest.mark.parametrize("length", [1, 2, 7])
def test_logsumexp(length, num_ranks):
    for dim, keepdim in [(1, False), (1, True), ((-2, 2), False), ((0, 1), True)]:
        assert_parallel(
            num_ranks,
            lambda x: torch.logsumexp(x, dim, keepdim),  # noqa: B023
            lambda axis, x: ops.logsumexp(x, dim, keepdim, dim_axes=(axis,)),  # noqa: B023
            [(randn(3, length, 2), split(1, length))],
            "R",
        )


@RANKS
def test_softmax_of_minus_infinity(num_ranks):
    x = randn(4, 6, grad=False)
    x[0, 0:3] = -math.inf  # a whole piece
    x[1, 4] = -math.inf
    x[2] = -math.inf  # a whole row
    for name, plain in (
        ("softmax", F.softmax),
        ("log_softmax", F.log_softmax),
        ("logsumexp", torch.logsumexp),
    ):
        assert_parallel(
            num_ranks,
            lambda x: plain(x, 1),  # noqa: B023
            lambda axis, x: getattr(ops, name)(x, 1, dim_axes=(axis,)),  # noqa: B023
            [(x.clone().requires_grad_(), split(1, 6))],
            "R" if name == "logsumexp" else split(1, 6),
        )


def test_softmax_dtype():
    x = torch.randn(3, 5)
    for name in ("softmax", "log_softmax"):
        assert_parallel(
            2,
            lambda x: getattr(F, name)(x, 1, dtype=torch.float64),  # noqa: B023
            lambda axis, x: getattr(ops, name)(x, 1, torch.float64, dim_axes=(axis,)),  # noqa: B023
            [(x, split(1, 5))],
            split(1, 5),
        )


NUM_CLASSES = [2, 7]
REDUCTIONS = ["none", "sum", "mean"]


def targets(*shape, num_classes):
    target = torch.randint(num_classes, shape)
    target.view(-1)[::3] = -100
    target.view(-1)[-1] = num_classes - 1
    return target


@RANKS
@pytest.mark.parametrize("num_classes", NUM_CLASSES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_over_classes(num_classes, reduction, smoothing, weighted, num_ranks):
    weight = torch.rand(num_classes, dtype=torch.float64) if weighted else None
    for shape in ((5,), (3, 2)):
        target = targets(*shape, num_classes=num_classes)

        def parallel(axis, x, target, *weight):
            start = axis.offset(num_classes)
            keywords = {"class_axes": (axis,), "num_classes": num_classes, "start": start}
            return ops.cross_entropy(
                x, target, *(weight or (None,)), -100, reduction, smoothing, **keywords
            )

        assert_parallel(
            num_ranks,
            lambda x, target, *weight: F.cross_entropy(
                x,
                target,
                *weight,
                ignore_index=-100,
                reduction=reduction,
                label_smoothing=smoothing,
            ),
            parallel,
            [
                (randn(shape[0], num_classes, *shape[1:]), split(1, num_classes)),
                (target, "R"),
                *([(weight, split(0, num_classes))] if weighted else []),
            ],
            "R",
        )


@RANKS
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_over_rows(reduction, smoothing, weighted, num_ranks):
    weight = torch.rand(4, dtype=torch.float64) if weighted else None
    for shape, dim in (((2,), 0), ((7,), 0), ((3, 5), 1)):
        where = split(dim, shape[dim])
        at_input = split(dim + (dim > 0), shape[dim])
        assert_parallel(
            num_ranks,
            lambda x, target: F.cross_entropy(
                x, target, weight, reduction=reduction, label_smoothing=smoothing
            ),
            lambda axis, x, target: ops.cross_entropy(
                x, target, weight, -100, reduction, smoothing, row_axes=(axis,), num_classes=4
            ),
            [(randn(shape[0], 4, *shape[1:]), at_input), (targets(*shape, num_classes=4), where)],
            where if reduction == "none" else "P",
        )


@RANKS
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy_with_probabilities(reduction, smoothing, num_ranks):
    weight = torch.rand(7, dtype=torch.float64)
    target = torch.rand(5, 7, dtype=torch.float64).requires_grad_()
    keywords = {"reduction": reduction, "label_smoothing": smoothing, "num_classes": 7, "count": 5}

    def plain(x, target, weight):
        return F.cross_entropy(x, target, weight, reduction=reduction, label_smoothing=smoothing)

    assert_parallel(
        num_ranks,
        plain,
        lambda axis, x, t, w: ops.cross_entropy(
            x, t, w, class_axes=(axis,), start=axis.offset(7), **keywords
        ),
        [(randn(5, 7), split(1, 7)), (target, split(1, 7)), (weight, split(0, 7))],
        "R",
    )
    assert_parallel(
        num_ranks,
        plain,
        lambda axis, x, t, w: ops.cross_entropy(x, t, w, row_axes=(axis,), **keywords),
        [(randn(5, 7), split(0, 5)), (target, split(0, 5)), (weight, "R")],
        split(0, 5) if reduction == "none" else "P",
    )


def test_cross_entropy_of_one_row_without_batch():
    assert_parallel(
        2,
        lambda x, target: F.cross_entropy(x, target),
        lambda axis, x, target: ops.cross_entropy(
            x, target, class_axes=(axis,), num_classes=5, start=axis.offset(5)
        ),
        [(randn(5), split(0, 5)), (torch.tensor(4), "R")],
        "R",
    )


def test_cross_entropy_with_all_rows_ignored_is_nan():
    target = torch.full((4,), -100)
    assert_parallel(
        2,
        lambda x, target: F.cross_entropy(x, target),
        lambda axis, x, target: ops.cross_entropy(
            x, target, class_axes=(axis,), num_classes=5, start=axis.offset(5)
        ),
        [(randn(4, 5, grad=False), split(1, 5)), (target, "R")],
        "R",
    )


def test_cross_entropy_is_stable():
    x = randn(4, 5, grad=False) * 1e4
    x[0, 1] = -math.inf
    assert_parallel(
        3,
        lambda x, target: F.cross_entropy(x, target, reduction="none"),
        lambda axis, x, t: ops.cross_entropy(
            x, t, reduction="none", class_axes=(axis,), num_classes=5, start=axis.offset(5)
        ),
        [(x.requires_grad_(), split(1, 5)), (torch.tensor([0, 1, 2, 4]), "R")],
        "R",
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_over_rows_and_two_axes_of_classes(smoothing):
    """Rows over dp, classes over two axes: the pieces of a piece."""
    mesh = Mesh((("dp", 2), ("a", 2), ("b", 2)))
    x, target, weight = randn(5, 7), targets(5, num_classes=7), torch.rand(7, dtype=torch.float64)
    expected = F.cross_entropy(x, target, weight, label_smoothing=smoothing)
    (expected_grad,) = torch.autograd.grad(expected, x)

    def on_rank(ranks):
        dp, a, b = map(ranks.axis, ("dp", "a", "b"))
        row, num_rows = piece(5, 2, dp.index)
        outer, outer_size = piece(7, 2, a.index)
        inner, size = piece(outer_size, 2, b.index)
        rows, classes = slice(row, row + num_rows), slice(outer + inner, outer + inner + size)
        local = x.detach()[rows, classes].clone().requires_grad_()
        keywords = {
            "class_axes": (a, b),
            "row_axes": (dp,),
            "num_classes": 7,
            "start": outer + inner,
        }
        loss = ops.cross_entropy(
            local, target[rows], weight[classes], label_smoothing=smoothing, **keywords
        )
        (grad,) = torch.autograd.grad(loss, local)
        torch.testing.assert_close(grad, expected_grad[rows, classes], rtol=1e-12, atol=1e-12)
        return loss.detach()

    losses = on_mesh(mesh, on_rank)
    torch.testing.assert_close(losses[0] + losses[4], expected.detach(), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(losses[r], losses[4 * (r // 4)]) for r in range(8))


@RANKS
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss(reduction, weighted, num_ranks):
    weight = torch.rand(2, dtype=torch.float64) if weighted else None
    for shape in ((5,), (3, 2)):
        x, target = randn(shape[0], 2, *shape[1:]), targets(*shape, num_classes=2)
        plain = lambda x, target, *w: F.nll_loss(x, target, *w, reduction=reduction)  # noqa: E731
        by_class = [(x, split(1, 2)), (target, "R"), *([(weight, split(0, 2))] if weighted else [])]
        assert_parallel(
            num_ranks,
            plain,
            lambda axis, x, t, *w: ops.nll_loss(
                x, t, *(w or (None,)), -100, reduction, class_axes=(axis,), start=axis.offset(2)
            ),
            by_class,
            "R",
        )
        where = split(0, shape[0])
        assert_parallel(
            num_ranks,
            plain,
            lambda axis, x, t, *w: ops.nll_loss(
                x, t, *(w or (None,)), -100, reduction, row_axes=(axis,)
            ),
            [(x, where), (target, where), *([(weight, "R")] if weighted else [])],
            where if reduction == "none" else "P",
        )


@RANKS
@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_embedding(num_rows, num_ranks):
    for padding_idx in (None, 0, num_rows - 1):
        assert_parallel(
            num_ranks,
            lambda ids, w: F.embedding(ids, w, padding_idx),  # noqa: B023
            lambda axis, ids, w: ops.embedding(
                ids,
                w,
                padding_idx,  # noqa: B023
                vocab_axes=(axis,),
                start=axis.offset(num_rows),
            ),
            [(torch.randint(num_rows, (3, 4)), "R"), (randn(num_rows, 5), split(0, num_rows))],
            "P",
        )


@pytest.mark.parametrize("wrong", [-1, 7])
@pytest.mark.parametrize("num_ranks", [2, 9])
def test_an_id_that_no_rank_has_is_refused(num_ranks, wrong):
    """One device refuses it, too; each rank by itself would take it for another's. Of nine ranks
    two have no row.
    """
    ids, table = torch.tensor([[0, 6], [wrong, 3]]), randn(7, 5)

    def look_up(ranks):
        axis = ranks.axis("tp")
        rows = slice(axis.offset(7), axis.offset(7) + axis.local_size(7))
        keywords = {"vocab_axes": (axis,), "start": axis.offset(7), "num_embeddings": 7}
        ops.embedding(ids.clamp(0, 6), table[rows], **keywords)
        with pytest.raises(InputError) as caught:
            ops.embedding(ids, table[rows], **keywords)
        return str(caught.value)

    assert set(on_mesh(Mesh((("tp", num_ranks),)), look_up)) == {
        "an id that an embedding looks up is out of range\n"
        "  why:   all of them are from 0 to 6\n"
        "  try:   compare the inputs with the sizes of the model"
    }


@pytest.mark.parametrize("loss", [ops.cross_entropy, ops.nll_loss])
@pytest.mark.parametrize("wrong", [-1, 7])
def test_a_class_that_no_rank_has_is_refused(loss, wrong):
    target, scores = torch.tensor([0, -100, 6, wrong]), randn(4, 7).log_softmax(1)

    def compute(ranks):
        axis = ranks.axis("tp")
        local = scores[:, axis.offset(7) : axis.offset(7) + axis.local_size(7)]
        keywords = {"class_axes": (axis,), "start": axis.offset(7), "num_classes": 7}
        loss(local[:3], target[:3], **keywords)
        with pytest.raises(InputError) as caught:
            loss(local, target, **keywords)
        return str(caught.value)

    assert set(on_mesh(Mesh((("tp", 2),)), compute)) == {
        "a class that is no ignore_index (-100) is out of range\n"
        "  why:   all of them are from 0 to 6\n"
        "  try:   compare the inputs with the sizes of the model"
    }


@RANKS
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((2, 3), 0), ((7, 3), 0), ((5, 3, 2, 3), 0), ((2, 3, 4), 2), ((1, 3, 5, 2), 2)],
)
def test_batch_norm(shape, dim, affine, num_ranks):
    whole = [torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64) + 1]
    expected_running = [x.clone() for x in whole]
    running = [[x.clone() for x in whole] for _ in range(num_ranks)]
    count = math.prod(shape) // 3

    def plain(x, *affine):
        return F.batch_norm(x * 3 + 2, *expected_running, *affine, training=True, momentum=0.3)

    def parallel(axis, x, *affine):
        keywords = {"training": True, "momentum": 0.3, "batch_axes": (axis,), "count": count}
        return ops.batch_norm(x * 3 + 2, *running[axis.index], *affine, **keywords)

    parameters = [(randn(3), "G"), (randn(3), "G")] if affine else []
    assert_parallel(
        num_ranks,
        plain,
        parallel,
        [(randn(*shape), split(dim, shape[dim])), *parameters],
        split(dim, shape[dim]),
    )
    for local in running:
        torch.testing.assert_close(local, expected_running, rtol=1e-13, atol=1e-13)
        assert all(torch.equal(a, b) for a, b in zip(local, running[0], strict=True))


def test_batch_norm_in_evaluation():
    """Running statistics are used if there are any; else those of the whole batch."""
    running, where = (
        [torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64) + 1],
        split(0, 5),
    )
    assert_parallel(
        2,
        lambda x: F.batch_norm(x, *running),
        lambda axis, x: ops.batch_norm(x, *running, batch_axes=(axis,), count=5),
        [(randn(5, 3), where)],
        where,
    )
    assert_parallel(
        2,
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda axis, x: ops.batch_norm(x, None, None, batch_axes=(axis,), count=5),
        [(randn(5, 3), where)],
        where,
    )


def test_batch_norm_of_one_value_per_channel():
    with pytest.raises(InputError, match="more than one value per channel"):
        on_mesh(
            Mesh((("dp", 2),)),
            lambda ranks: ops.batch_norm(
                torch.ones(1 - ranks.rank, 3),
                None,
                None,
                training=True,
                batch_axes=(ranks.axis("dp"),),
                count=1,
            ),
        )


def test_half_precision_accumulates_wide():
    """bfloat16 results are the rounded exact ones."""
    x = torch.randn(64, 8).bfloat16()
    exact = x.double()

    def on_rank(ranks):
        axis = ranks.axis("tp")
        rows, columns = piece(64, 2, axis.index), piece(8, 2, axis.index)
        by_rows, by_columns = x.narrow(0, *rows), x.narrow(1, *columns)
        norm = ops.batch_norm(by_rows, None, None, training=True, batch_axes=(axis,), count=64)
        soft = ops.softmax(by_columns, 1, dim_axes=(axis,))
        target = torch.arange(64) % 8
        loss = ops.cross_entropy(
            by_columns, target, class_axes=(axis,), num_classes=8, start=columns[0]
        )
        return norm, soft, loss, ops.mean(by_rows, count=64 * 8)

    (norm, soft, loss, mean), (norm2, soft2, _, mean2) = on_mesh(Mesh((("tp", 2),)), on_rank)
    assert {t.dtype for t in (norm, soft, loss, mean)} == {torch.bfloat16}
    close = {"rtol": 2**-8, "atol": 2**-12}
    torch.testing.assert_close(
        torch.cat([norm, norm2]).double(), F.batch_norm(exact, None, None, training=True), **close
    )
    torch.testing.assert_close(torch.cat([soft, soft2], 1).double(), exact.softmax(1), **close)
    torch.testing.assert_close(loss.double(), F.cross_entropy(exact, torch.arange(64) % 8), **close)
    torch.testing.assert_close(
        (mean.double() + mean2.double()), exact.mean(), rtol=2**-7, atol=2**-9
    )
