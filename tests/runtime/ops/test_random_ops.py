"""Random operators: which ranks draw the same numbers, which do not, and that the numbers have the
right distribution.
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from op_ranks import on_mesh

from shardwright.runtime import ops
from shardwright.runtime.errors import InputError, LoadError
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.ops.random import RngState, read_layout
from shardwright.runtime.ranks.groups import AxisGroup

MESH = Mesh((("dp", 2), ("tp", 3)))
LAYOUT = "[5/dp, 2, 4/tp * 3]"
MODES = pytest.mark.parametrize("mode", ["fast", "plan_independent"])


@pytest.fixture(autouse=True)
def _the_global_generator_is_untouched():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


def draws(op, mode, layout=LAYOUT, seed=1, **keywords):
    """What every rank of MESH draws, by coordinates."""

    def on_rank(ranks):
        rng = RngState(seed, mode, MESH, ranks.coords, ranks.unit)
        return op(
            Layout.parse(layout).local_shape(MESH, ranks.coords),
            draw=rng.draw("op", layout=layout),
            **keywords,
        )

    return {tuple(MESH.coords(rank).values()): x for rank, x in enumerate(on_mesh(MESH, on_rank))}


def mask(shape, **keywords):
    return ops.dropout(torch.ones(shape), 0.5, True, **keywords)


def assemble(pieces, layout=LAYOUT):
    parsed = Layout.parse(layout)
    whole = torch.full(parsed.shape, math.nan)
    for rank in range(MESH.size):
        coords = MESH.coords(rank)
        index = [
            torch.tensor([i for run in parsed.runs(dim, MESH, coords) for i in range(*run)])
            for dim in range(whole.ndim)
        ]
        if all(i.numel() for i in index):
            whole[torch.meshgrid(*index, indexing="ij")] = pieces[tuple(coords.values())]
    return whole


def test_plan_independent_draws_are_those_of_one_rank():
    alone = mask((5, 2, 12), draw=RngState(1, "plan_independent").draw("op", layout="[5, 2, 12]"))
    for layout in (
        LAYOUT,
        "[5, 2/dp, 12/tp]",
        "[5/dp/tp, 2, 12]",
        "[5, 2, 3+9/tp]",
        "[5/dp, 2, 12]",
    ):
        assert torch.equal(assemble(draws(mask, "plan_independent", layout), layout), alone), layout


@MODES
def test_copies_draw_the_same(mode):
    pieces = draws(mask, mode, "[5, 2, 4/tp * 3]")
    for tp in range(3):
        assert torch.equal(pieces[0, tp], pieces[1, tp])


def test_fast_pieces_draw_differently():
    pieces = draws(mask, "fast", "[6/dp, 8, 6/tp * 3]")
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(pieces.values(), 2))


@pytest.mark.parametrize(("mode", "shape"), [("fast", (2, 8)), ("plan_independent", (4, 8))])
def test_what_is_drawn(mode, shape):
    """Fast draws no more than this rank's piece."""
    rng = RngState(0, mode, Mesh((("dp", 2),)), {"dp": 1})
    draw = rng.draw("op", layout="[4/dp, 8]")
    drawn = []

    def make(shape, generator):
        drawn.append(shape)
        return torch.zeros(shape)

    assert draw.piece((2, 8), torch.device("cpu"), make).shape == (2, 8) and drawn == [shape]


FAST = {
    "dropout": lambda x, **how: ops.dropout(x, 0.4, **how),
    "alpha_dropout": lambda x, **how: ops.alpha_dropout(x, 0.4, **how),
    "rand": lambda x, **how: ops.rand(*x.shape, **how),
    "randn": lambda x, **how: ops.randn(*x.shape, **how),
    "randint": lambda x, **how: ops.randint(0, 99, tuple(x.shape), **how),
    "rand_like": ops.rand_like,
    "randn_like": ops.randn_like,
    "randint_like": lambda x, **how: ops.randint_like(x, 0, 99, **how),
    "bernoulli": lambda x, **how: ops.bernoulli(x * 0.4, **how),
    "normal": lambda x, **how: ops.normal(x, 2.0, **how),
    "normal of a size": lambda x, **how: ops.normal(1.0, 2.0, tuple(x.shape), **how),
    "normal_like": ops.normal_like,
    "uniform_like": ops.uniform_like,
    "exponential_like": ops.exponential_like,
    "gumbel_softmax": lambda x, **how: ops.gumbel_softmax(x, dim=1, **how),
    "rrelu": lambda x, **how: ops.rrelu(-x, training=True, **how),
    "multinomial": lambda x, **how: ops.multinomial(x[..., :1].expand(-1, 9), x.shape[-1], **how),
    "multinomial again": lambda x, **how: ops.multinomial(x, x.shape[-1], True, **how),
    "randperm": lambda x, **how: ops.randperm(len(x), **how),
}


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("layout", ["[5, 8, 4]", "[5/dp, 8, 4/tp]", "[5, 2, 4/tp * 3]"])
def test_fast_draws_need_no_layout(name, layout):
    """What is drawn for the piece at hand and the axes that cut it is what its layout says."""
    if name.startswith("multinomial"):
        layout = (
            layout.replace(", 8", "").replace(", 2", "").replace("4/tp * 3", "3").replace("/tp", "")
        )
    if name == "randperm":
        layout = "[5]"
    axes = [axis for axis in ("tp", "dp") if f"/{axis}" in layout]

    def both(shape, *, draw):
        x = torch.ones(shape)
        by_layout = FAST[name](x, draw=draw)
        assert torch.equal(FAST[name](x, draw=draw.rng.draw(draw.name, *axes)), by_layout)
        return by_layout

    pieces = draws(both, "fast", layout)
    assert name == "randperm" or not axes or not torch.equal(pieces[0, 0], pieces[1, 2])


def test_masks_of_every_plan_need_the_layout():
    rng = RngState(1, "plan_independent", Mesh((("tp", 2),)), {"tp": 0})
    with pytest.raises(LoadError) as caught:
        rng.draw("drop", "tp")
    assert str(caught.value) == (
        "drop cannot be drawn alike under every plan\n"
        '  why:   its call was written for rng="fast", and the module has rng_mode = '
        '"plan_independent"\n'
        "  try:   compile with ComputeConfig(rng=...), which writes other calls"
    )
    ops.dropout(torch.ones(2), draw=rng.draw("drop"))  # no axis cuts it: alike anyway


@MODES
def test_every_draw_step_microbatch_unit_and_seed_differs_and_repeats(mode):
    rng = RngState(1, mode)

    def mask(name, rng=rng):
        return ops.dropout(torch.ones(8, 8), draw=rng.draw(name, layout="[8, 8]"))

    first = mask("a")
    assert torch.equal(mask("a"), first)
    others = [mask("b")]
    moment = rng.moment
    rng.next_microbatch()
    others.append(mask("a"))
    with rng.at(moment):  # recomputation
        assert torch.equal(mask("a"), first)
    rng.next_step()
    assert rng.moment == (1, 0)
    others.append(mask("a"))
    others.append(mask("a", RngState(2, mode)))
    others.append(mask("a", RngState(1, mode, unit=1)))
    assert all(not torch.equal(a, b) for a, b in itertools.combinations([first, *others], 2))


def test_state_is_saved_as_json():
    rng = RngState(7, "fast", MESH, {"dp": 1, "tp": 2}, unit=3)
    rng.next_step()
    rng.next_microbatch()
    loaded = RngState(0, "fast", MESH, {"dp": 0, "tp": 1})
    loaded.load_json(rng.to_json())
    assert rng.to_json() == loaded.to_json() == {"seed": 7, "step": 1, "microbatch": 1}
    assert loaded.coords == {"dp": 0, "tp": 1}


def test_named_sizes():
    by_name = draws(mask, "fast", "[5/dp, 2, 4/tp * 3]")

    def on_rank(ranks):
        rng = RngState(1, "fast", MESH, ranks.coords)
        x = torch.ones(by_name[tuple(ranks.coords.values())].shape)
        draw = rng.draw("op", layout="[batch/dp, seq, heads/tp * 3]", sizes=sizes)
        return mask(x.shape, draw=draw)

    sizes = {"batch": 5, "seq": 2, "heads": 4}
    assert all(
        torch.equal(a, b) for a, b in zip(on_mesh(MESH, on_rank), by_name.values(), strict=True)
    )


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("[batch/dp, seq, heads/tp * 3]", "[6/dp, 8, 4/tp * 3]"),
        ("[batch*seq/dp, past + seq]", "[48/dp, 13]"),
        ("[seq - 1+3/tp * 2, floor(seq/3)]", "[7+3/tp * 2, 2]"),
        ("[2*batch + 4+past/dp/tp, seq/2] P(x)", "[16+5/dp/tp, 4] P(x)"),
        ("[batch**2, 7]", "[36, 7]"),
    ],
)
def test_sizes_may_be_expressions(text, numbers):
    sizes = (("batch", 6), ("seq", 8), ("heads", 4), ("past", 5))
    assert str(read_layout(text, sizes)) == numbers


@pytest.mark.parametrize("text", ["[batch, other]", "[batch.x]", "[batch +]", "[-batch]"])
def test_sizes_that_cannot_be_read(text):
    with pytest.raises(LoadError, match="does not parse"):
        read_layout(text, (("batch", 6),))


def one(shape, **more):
    return {"draw": RngState(0).draw("op", layout=str(Layout.whole(tuple(shape)))), **more}


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", ["dropout", "alpha_dropout"])
def test_dropout_values_and_gradients(name, p):
    x = torch.randn(
        200, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    y = getattr(ops, name)(x, p, True, **one(x.shape))
    (grad,) = torch.autograd.grad(y.sum(), x)
    if p == 0:
        assert y is x
    elif p == 1:
        assert not y.any() and not grad.any()
    elif name == "dropout":
        kept = y != 0
        torch.testing.assert_close(y[kept], x[kept] / 0.7)
        torch.testing.assert_close(grad, kept.double() / 0.7)
        assert abs(kept.double().mean() - 0.7) < 0.02
    else:  # mean and variance survive
        assert abs(y.mean()) < 0.03 and abs(y.var() - 1) < 0.05
        assert abs((grad == 0).double().mean() - 0.3) < 0.02
    assert getattr(ops, name)(x, p, False, **one(x.shape)) is x


CHANNELS = [
    (ops.dropout1d, (6, 50, 4), (6, 50, 1)),
    (ops.dropout1d, (50, 4), (50, 1)),
    (ops.dropout2d, (6, 50, 4, 3), (6, 50, 1, 1)),
    (ops.dropout2d, (6, 50, 4), (6, 50, 1)),
    (ops.dropout3d, (6, 50, 4, 3, 2), (6, 50, 1, 1, 1)),
    (ops.dropout3d, (50, 4, 3, 2), (50, 1, 1, 1)),
    (ops.feature_alpha_dropout, (6, 50, 4, 3), (6, 50, 1, 1)),
    (ops.feature_alpha_dropout, (6, 50), (6, 50)),
]


@pytest.mark.parametrize(("op", "shape", "mask_shape"), CHANNELS)
def test_channelwise_dropout_drops_channels(op, shape, mask_shape):
    """They draw the same with a layout of the mask and without one."""
    y = op(torch.ones(shape), 0.5, True, **one(mask_shape))
    one_each = y[tuple(slice(size) for size in mask_shape)]
    assert torch.equal(y, one_each.expand_as(y)) and one_each.unique().numel() == 2
    assert torch.equal(y, op(torch.ones(shape), 0.5, training=True, draw=RngState(0).draw("op")))


def test_dropout_probability_is_checked():
    with pytest.raises(
        InputError, match=r"a dropout probability lies between 0 and 1\n  why:   it is 1\.5"
    ):
        ops.dropout(torch.ones(2), 1.5, **one((2,)))


N = 20_000


def test_distributions():
    kw = one((N,))
    x = torch.zeros(N, dtype=torch.float64)
    for sample, mean, std in [
        (ops.rand(N, dtype=torch.float64, **kw), 0.5, 12**-0.5),
        (ops.randn(N, **kw), 0, 1),
        (ops.rand_like(x, **kw), 0.5, 12**-0.5),
        (ops.randn_like(x, torch.float32, **kw), 0, 1),
        (ops.randint(2, 5, (N,), **kw), 3, (2 / 3) ** 0.5),
        (ops.randint_like(x, 2, 5, **kw), 3, (2 / 3) ** 0.5),
        (ops.bernoulli(x + 0.3, **kw), 0.3, 0.21**0.5),
        (ops.bernoulli(x, 0.3, **kw), 0.3, 0.21**0.5),
        (ops.normal(x + 2, 3.0, **kw), 2, 3),
        (ops.normal(2.0, 3.0, (N,), **kw), 2, 3),
        (ops.normal_like(x, 2.0, 3.0, **kw), 2, 3),
        (ops.uniform_like(x, 2.0, 5.0, **kw), 3.5, 3 * 12**-0.5),
        (ops.exponential_like(x, 4.0, **kw), 0.25, 0.25),
    ]:
        assert sample.shape == (N,)
        assert abs(sample.double().mean() - mean) < 0.03 * (std + 0.1), (mean, std)
        assert abs(sample.double().std() - std) < 0.03 * std
    assert (
        ops.randint(0, 9, (N,), **kw).dtype == torch.int64
        and ops.randint_like(x, 0, 9, **kw).dtype == x.dtype
    )
    assert (
        ops.randn_like(x, torch.float32, **kw).dtype == torch.float32
        and ops.rand(N, **kw).dtype == torch.get_default_dtype()
    )


def test_a_draw_from_a_normal_distribution_has_gradients_of_zero():
    mean, std = torch.zeros(4, 5, requires_grad=True), torch.ones(5, requires_grad=True)
    for sample in (
        ops.normal(mean, std, **one((4, 5))),
        torch.normal(mean, std, generator=torch.Generator()),
    ):
        grads = torch.autograd.grad(sample.sum(), [mean, std])
        assert torch.equal(grads[0], torch.zeros(4, 5)) and torch.equal(grads[1], torch.zeros(5))


@pytest.mark.parametrize("replacement", [False, True])
def test_multinomial(replacement):
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0, 4.0, 0.0]).expand(N // 10, 6)
    drawn = ops.multinomial(weights, 3, replacement, **one((N // 10, 3)))
    assert drawn.shape == (N // 10, 3) and drawn.dtype == torch.int64
    if replacement:
        share = drawn.flatten().bincount(minlength=6) / drawn.numel()
        torch.testing.assert_close(share, weights[0] / 8, atol=0.02, rtol=0)
    else:
        assert torch.equal(drawn.sort(-1).values, torch.tensor([1, 2, 4]).expand_as(drawn))
        first = drawn[:, 0].bincount(minlength=6) / len(drawn)
        torch.testing.assert_close(first, weights[0] / 8, atol=0.04, rtol=0)


def test_randperm():
    perm = ops.randperm(50, **one((50,)))
    assert torch.equal(perm.sort().values, torch.arange(50)) and not torch.equal(
        perm, torch.arange(50)
    )


def test_gumbel_softmax():
    logits = torch.tensor([0.0, math.log(3.0)], dtype=torch.float64).repeat(N, 1).requires_grad_()
    hard = ops.gumbel_softmax(logits, 0.5, True, **one(logits.shape))
    assert abs(hard.detach()[:, 1].mean() - 0.75) < 0.02 and torch.equal(
        hard.detach().round().unique(), torch.tensor([0.0, 1.0]).double()
    )
    soft = ops.gumbel_softmax(logits, 0.5, **one(logits.shape))
    torch.testing.assert_close(soft.sum(-1), torch.ones(N, dtype=torch.float64))
    (by_hard,) = torch.autograd.grad(hard[:, 0].sum(), logits)
    (by_soft,) = torch.autograd.grad(soft[:, 0].sum(), logits)
    torch.testing.assert_close(by_hard, by_soft)


def test_rrelu():
    x = torch.linspace(-1, 1, N, dtype=torch.float64).requires_grad_()
    y = ops.rrelu(x, 0.1, 0.3, True, **one((N,)))
    slope = (y / x).detach()
    assert torch.equal(slope[x > 0], torch.ones(N // 2).double())
    assert (
        slope[x < 0].min() >= 0.1
        and slope[x < 0].max() <= 0.3
        and abs(slope[x < 0].mean() - 0.2) < 0.01
    )
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], slope)
    torch.testing.assert_close(
        ops.rrelu(x, 0.1, 0.3, False, **one((N,))), F.rrelu(x, 0.1, 0.3, False)
    )


QKV_MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.ones(5, 7).tril(1).bool()},
    "empty row": {"attn_mask": torch.ones(5, 7).tril(-1).bool()},
    "float": {"attn_mask": torch.linspace(-2, 2, 35, dtype=torch.float64).view(5, 7)},
    "scale": {"scale": 0.3},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("case", QKV_MASKS)
def test_attention(case, monkeypatch):
    """Given a mask that drops nothing it is torch's attention; with one that drops, weights are
    dropped before the product.
    """
    generator = torch.Generator().manual_seed(0)
    heads = 2 if case == "grouped" else 4
    shapes = [(2, 4, 5, 3), (2, heads, 7, 3), (2, heads, 7, 6)]
    q, k, v = (
        torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes
    )
    keywords = {"draw": RngState(0).draw("a", layout="[2, 4, 5, 7]"), **QKV_MASKS[case]}
    expected = F.scaled_dot_product_attention(q, k, v, **QKV_MASKS[case])
    torch.testing.assert_close(ops.scaled_dot_product_attention(q, k, v, **keywords), expected)
    gradient = torch.randn(expected.shape, dtype=torch.float64, generator=generator)

    # The probability is too small to drop one of 280 weights, but the written-out form runs.
    tiny = ops.scaled_dot_product_attention(q, k, v, dropout_p=1e-15, **keywords)
    torch.testing.assert_close(tiny, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        *(torch.autograd.grad(y, (q, k, v), gradient) for y in (tiny, expected)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    dropped = ops.scaled_dot_product_attention(q, k, v, dropout_p=0.5, **keywords)
    kept = mask((2, 4, 5, 7), draw=RngState(0).draw("a", layout="[2, 4, 5, 7]")).double()
    ones = torch.eye(7, dtype=torch.float64).expand(2, heads, 7, 7)
    weights = F.scaled_dot_product_attention(q, k, ones, **QKV_MASKS[case])
    values = v.repeat_interleave(4 // heads, 1)
    torch.testing.assert_close(dropped, (weights * kept) @ values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_recurrent(name):
    kinds = {"lstm": (torch.nn.LSTM, {}), "gru": (torch.nn.GRU, {})}
    kind, options = kinds.get(name, (torch.nn.RNN, {"nonlinearity": name.removeprefix("rnn_")}))
    with torch.random.fork_rng([]):
        net = kind(3, 16, 2, dropout=0.5, **options).double()
    x, h = torch.ones(6, 2, 3, dtype=torch.float64), torch.zeros(2, 2, 16, dtype=torch.float64)
    hx = (h, h) if name == "lstm" else h

    def run(train, rng=None, draw="net"):
        arguments = (x, hx, net._flat_weights, True, 2, 0.5, train, False, False)
        return getattr(ops, name)(*arguments, draw=(rng or RngState(0)).draw(draw))[0]

    net.eval()
    torch.testing.assert_close(run(False), net(x)[0])
    assert torch.equal(run(True), run(True))
    assert not torch.equal(run(True), run(True, draw="other")) and not torch.equal(
        run(True), run(False)
    )


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("turns", [0, 1])
def test_causal_attention_of_a_part_of_the_queries(heads, turns):
    """Every rank's queries see the keys up to their own positions in the sequence; dropout does not
    change which.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 6, 3), (2, heads, 7, 3), (2, heads, 7, 5)]
    q, k, v = (
        torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes
    )
    keywords = {"is_causal": True, "enable_gqa": heads == 2}
    whole = F.scaled_dot_product_attention(q, k, v, **keywords)
    axes = [_axis(index, turns) for index in range(2)]

    def drawn(*args, **keywords):
        """The form that is written out, with a probability too small to drop anything."""
        layout = f"[2, 4, {args[0].shape[2]}, 7]"
        return ops.scaled_dot_product_attention(
            *args, dropout_p=1e-15, draw=RngState(0).draw("a", layout=layout), **keywords
        )

    def of(axis, x):
        return torch.cat([x.narrow(2, *run) for run in axis.runs(6)], 2)

    for attention in (ops.split_attention, drawn):
        parts = [
            attention(of(axis, q), k, v, query_axes=(axis,), lengths=(6, 7), **keywords)
            for axis in axes
        ]
        for axis, part in zip(axes, parts, strict=True):
            torch.testing.assert_close(part, of(axis, whole), rtol=1e-12, atol=1e-12)
        gradients = (
            torch.autograd.grad(y.square().sum(), (q, k, v), retain_graph=True)
            for y in (torch.cat(parts, 2), whole)
        )
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def _axis(index, turns):
    """One of two ranks along an axis that sends nothing."""
    return AxisGroup("cp", SimpleNamespace(size=2, index=index), turns)
