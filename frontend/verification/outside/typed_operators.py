"""The typing rules of operators that communicate, or of which ``spmd_types`` knows no sharding.

Each rule says what its operator computes as einsums and transitions of ``spmd_types.rules``, dim
by dim. A dim that must be whole has no name there (``_``), unless the operator sums over the ranks
that cut it and says so (``norm_axes=(tp,)``).
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, P, R, S, V, rules
from torch import Tensor

from shardwright.frontend.verification.outside.spmd_layouts import (
    Refusal,
    Typed,
    listed,
    local_types,
    needs_gradient,
    shard_axes,
    stand_in,
)
from shardwright.frontend.verification.outside.typed_moves import moved, ordered
from shardwright.runtime import ops
from shardwright.runtime.ops.edges import EdgeWords
from shardwright.runtime.ops.random import Draw
from shardwright.runtime.ranks.groups import AxisGroup

Rule = Callable[..., Any]

LETTERS = "abcdefghijklm"
CASTS = ("to", "float", "double", "half", "bfloat16")
"""The methods of a tensor that change its dtype."""

RULES: dict[str, Rule] = {}
"""The rule of a function of torch or of ours, by its name: a function of the arguments it needs."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Make a function the rule of operators."""

    def note(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return note


def named(axes: Iterable[AxisGroup]) -> set[str]:
    """The names of axes."""
    return {name for axis in axes for name in axis.name.split("+")}


def agreed(*tensors: Typed | None) -> list[Typed]:
    """Tensors of one call. One that needs no gradient is I or R like those that do."""
    found = [x for x in tensors if x is not None]
    rules.ignore(*(x for x in found if isinstance(x, Tensor)))
    free = [isinstance(x, Tensor) and not needs_gradient(x) for x in found]
    flavours: dict[str, set[Any]] = {}
    for x, is_free in zip(found, free, strict=True):
        for axis, letter in local_types(x).items():
            # By axis, the letters that are fixed: those of tensors with a gradient, and pieces.
            if not is_free or letter not in (I, R):
                flavours.setdefault(axis, set()).add(letter)
    made = []
    for x, is_free in zip(found, free, strict=True):
        local = local_types(x)
        for axis, letter in local.items():
            if is_free and letter in (I, R):
                local[axis] = I if flavours.get(axis, {I}) == {I} else R
        made.append(stand_in(local, shard_axes(x)) if is_free else x)
    return made


def einsum(equation: str, *operands: Typed, linear_in: Sequence[Any] = ()) -> Typed:
    """``rules.einsum`` of tensors, some of which may need no gradient."""
    return ordered(rules.einsum(equation, *agreed(*operands), linear_in=linear_in))


def check_whole(
    x: Typed, dims: Iterable[int], what: str, besides: Iterable[AxisGroup] = ()
) -> None:
    """Refuse a tensor that is cut in some dims, except along axes that the call speaks of."""
    cut = shard_axes(x)
    wrong = {axis for dim in dims for axis in cut[dim]} - named(besides)
    if wrong:
        raise Refusal(f"{what} is cut over {listed(wrong)}, where the call needs the whole")


def dims_of(x: Typed, dim: Any) -> list[int]:
    """The dims that an argument ``dim`` names; none names all."""
    if dim is None:
        return list(range(x.ndim))
    return [d % x.ndim for d in (dim if isinstance(dim, list | tuple) else (dim,))]


def reduced(x: Typed, dims: Iterable[int], keepdim: bool = False) -> Typed:
    """The sum of ``x`` over some dims."""
    gone = set(dims)
    labels = LETTERS[: x.ndim]
    kept = "".join(
        l if i not in gone else "_" for i, l in enumerate(labels) if i not in gone or keepdim
    )
    return einsum(f"{labels}->{kept}", x, linear_in=(0,))


def summed(x: Typed, axes: Iterable[AxisGroup]) -> Typed:
    """A partial sum after it was summed over the ranks of some axes, within an operator."""
    for name in named(axes):
        if local_types(x).get(name) is P:
            x = moved(x, "all_reduce", name, P, I)
    return x


# ------------------------------------------------------------------------------------------------
# operators whose results are like their operands


def check_cut(x: Typed, dims: Iterable[int], axes: Iterable[AxisGroup], what: str) -> None:
    """Refuse a tensor that is whole along axes over which the call takes it for cut."""
    cut = shard_axes(x)
    whole = named(axes) - {axis for dim in dims for axis in cut[dim]}
    if whole:
        raise Refusal(f"{what} is whole over {listed(whole)}, where the call has pieces")


def check_drawn(x: Typed, draw: Draw | None, num_dims: int | None = None) -> None:
    """Refuse random numbers for the first ``num_dims`` dims of a tensor, if not just the ranks that
    hold different pieces draw different ones. Without a draw they are those of torch's generator,
    see ``process_draws.py``.
    """
    if draw is None:
        return
    drawn = set(draw.axes)
    cut = {axis for axes in shard_axes(x)[:num_dims] for axis in axes}
    if drawn != cut:
        raise Refusal(
            f"random numbers differ over {listed(drawn)}, and what they are drawn for is cut over "
            f"{listed(cut)}"
        )


@rule("dropout")
def dropout(*, input: Typed, draw: Draw | None = None) -> Typed:
    check_drawn(input, draw)
    return einsum("...->...", input, linear_in=(0,))


@rule("dropout1d")
def dropout1d(*, input: Typed, draw: Draw | None = None) -> Typed:
    check_drawn(input, draw, input.ndim - 1)  # channels share a number
    return einsum("...->...", input, linear_in=(0,))


@rule("dropout2d")
def dropout2d(*, input: Typed, draw: Draw | None = None) -> Typed:
    check_drawn(input, draw, 2)
    return einsum("...->...", input, linear_in=(0,))


@rule("dropout3d")
def dropout3d(*, input: Typed, draw: Draw | None = None) -> Typed:
    check_drawn(input, draw, input.ndim - 3)
    return einsum("...->...", input, linear_in=(0,))


@rule("alpha_dropout", "rrelu", "rand_like", "randn_like", "randint_like", "bernoulli",
      "normal_like", "uniform_like", "exponential_like")  # fmt: skip
def random_like(*, input: Typed, draw: Draw | None = None) -> Typed:
    check_drawn(input, draw)
    return einsum("...->...", input)


@rule("feature_alpha_dropout")
def feature_alpha_dropout(*, input: Typed, draw: Draw | None = None) -> Typed:
    check_drawn(input, draw, 2)
    return einsum("...->...", input)


@rule(*CASTS)
def cast(*, input: Typed, results: Tensor) -> Typed:
    """Floats of another dtype: the sum of what was rounded is the sum that is rounded, but for
    rounding. Integers are not.
    """
    is_linear = results.is_floating_point() or results.is_complex()
    return einsum("...->...", input, linear_in=(0,) if is_linear else ())


@rule("only_finite", "unclamped")
def same(*, input: Typed) -> Typed:
    return einsum("...->...", input)


@rule("gumbel_softmax")
def gumbel_softmax(*, logits: Typed, dim: Any = -1, draw: Draw | None = None) -> Typed:
    check_drawn(logits, draw)
    return along_a_dim(input=logits, dim=dim)


@rule("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp")
def along_a_dim(*, input: Typed, dim: Any, dim_axes: Sequence[AxisGroup] = ()) -> Typed:
    check_whole(input, dims_of(input, dim), "the dim", dim_axes)
    return einsum("...->...", input)


@rule("logsumexp")
def logsumexp(
    *, input: Typed, dim: Any, keepdim: bool = False, dim_axes: Sequence[AxisGroup] = ()
) -> Typed:
    check_whole(input, dims_of(input, dim), "the dim", dim_axes)
    return summed(reduced(input, dims_of(input, dim), keepdim), dim_axes)


@rule("cat")
def cat(*, tensors: Sequence[Typed]) -> Typed:
    """All are cut alike. Where the joined dim is cut, a rank joins its pieces: one run of each."""
    labels = LETTERS[: tensors[0].ndim]
    words = ",".join([labels] * len(tensors))
    return einsum(f"{words}->{labels}", *tensors, linear_in=(tuple(range(len(tensors))),))


# ------------------------------------------------------------------------------------------------
# norms


@rule("layer_norm", "rms_norm")
def layer_norm(
    *,
    input: Typed,
    normalized_shape: Sequence[int],
    weight: Typed | None = None,
    bias: Typed | None = None,
    norm_axes: Sequence[AxisGroup] = (),
) -> Typed:
    count = len(normalized_shape)
    check_whole(input, range(input.ndim - count, input.ndim), "a normalised dim", norm_axes)
    labels = LETTERS[:count]
    return scaled(f"...{labels}", input, labels, weight, bias)


def scaled(
    labels: str, input: Typed, weight_labels: str, weight: Typed | None, bias: Typed | None
) -> Typed:
    """``input * weight + bias``, of which either may be missing."""
    given = [x for x in (weight, bias) if x is not None]
    words = ",".join([labels, *([weight_labels] * len(given))])
    return einsum(f"{words}->{labels}", input, *given)


@rule("group_norm")
def group_norm(
    *,
    input: Typed,
    weight: Typed | None = None,
    bias: Typed | None = None,
    space_axes: Sequence[AxisGroup] = (),
) -> Typed:
    check_whole(input, range(2, input.ndim), "an image", space_axes)
    rest = LETTERS[2 : input.ndim]
    return scaled(f"ab{rest}", input, "b", weight, bias)


@rule("batch_norm")
def batch_norm(
    *,
    input: Typed,
    running_mean: Typed | None = None,
    running_var: Typed | None = None,
    weight: Typed | None = None,
    bias: Typed | None = None,
    training: bool = False,
    batch_axes: Sequence[AxisGroup] = (),
) -> Typed:
    over = [d for d in range(input.ndim) if d != 1]
    if training:
        check_whole(input, over, "the batch", batch_axes)
    for statistic in (running_mean, running_var):
        if statistic is not None and shard_axes(statistic)[0] != shard_axes(input)[1]:
            raise Refusal("running statistics are not cut as the channels are")
    rest = LETTERS[2 : input.ndim]
    return scaled(f"ab{rest}", input, "b", weight, bias)


# ------------------------------------------------------------------------------------------------
# products and lookups


@rule("linear")
def linear(*, input: Typed, weight: Typed, bias: Typed | None = None) -> Typed:
    """A product and a sum: a partial bias joins a partial product. ``weight`` may be a vector."""
    out = "o" if weight.ndim > 1 else ""
    product = einsum(f"...i,{out}i->...{out}", input, weight, linear_in=(0, 1))
    return product if bias is None else plus(product, bias, f"...{out}", out)


@rule("matmul")
def matmul(*, input: Typed, other: Typed) -> Typed:
    """A product of matrices or vectors, or of batches of them, whose dims are matched from the
    last one on.
    """
    rows, columns = "x" * (input.ndim > 1), "z" * (other.ndim > 1)
    batches = [max(x.ndim - 2, 0) for x in (input, other)]
    lead = LETTERS[: max(batches)]
    first, second = (lead[len(lead) - count :] for count in batches)
    equation = f"{first}{rows}y,{second}y{columns}->{lead}{rows}{columns}"
    return written_einsum(equation=equation, operands=(input, other))


@rule("addmm")
def addmm(
    *, input: Typed, mat1: Typed, mat2: Typed, beta: Any = 1, alpha: Any = 1, **_: Any
) -> Typed:
    product = einsum("mk,kn->mn", mat1, mat2, linear_in=(0, 1))
    return plus(product, input, "mn", "mn"[2 - input.ndim :])


@rule("einsum")
def written_einsum(*, equation: str, operands: Sequence[Typed]) -> Typed:
    """``torch.einsum``, whose dims of size 1 may meet longer ones, and whose results need not be
    written.
    """
    words, arrow, result = equation.replace(" ", "").partition("->")
    terms = words.split(",")
    if not arrow:  # the letters that occur once, in their order
        letters = words.replace(",", "").replace("...", "")
        result = "..." if "..." in words else ""
        result += "".join(sorted(letter for letter in letters if letters.count(letter) == 1))
    cut = {
        letter
        for term, x in zip(terms, operands, strict=True)
        for letter, axes in labelled(term, shard_axes(x))
        if axes
    }
    found = []
    for term, x in zip(terms, operands, strict=True):
        # A dim of size 1 that meets a cut one is whole: each rank repeats it along its piece.
        ones = [letter for letter, size in labelled(term, shape_of(x)) if size == 1]
        kept = {letter for letter, axes in labelled(term, shard_axes(x)) if axes}
        for letter in (cut - kept).intersection(ones):
            term = term.replace(letter, "_")
        found.append(term)
    linear_in = tuple(range(len(operands)))
    return einsum(f"{','.join(found)}->{result}", *operands, linear_in=linear_in)


def labelled(term: str, dims: Sequence[Any]) -> list[tuple[str, Any]]:
    """The letters of an operand in an equation, each with what is given of its dim. The dims of an
    ellipsis have none.
    """
    front, dots, back = term.partition("...")
    last = [(letter, dims[i - len(back)]) for i, letter in enumerate(back)] if dots else []
    return [*zip(front, dims, strict=False), *last]


def shape_of(x: Typed) -> Sequence[int]:
    """The shape of a tensor, no dim of which is known to be 1 where only its type is known."""
    return x.shape if isinstance(x, Tensor) else (0,) * x.ndim


@rule("pad")
def padded(*, input: Typed, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Typed:
    """``F.pad``: the pairs of ``pad`` are for the last dim, the one before it, and so on."""
    changed = [input.ndim - 1 - i for i in range(len(pad) // 2) if any(pad[2 * i : 2 * i + 2])]
    check_whole(input, changed, "a dim that is padded")
    return einsum("...->...", input, linear_in=() if value else (0,))


@rule("embedding")
def embedding(
    *,
    input: Typed,
    weight: Typed,
    vocab_axes: Sequence[AxisGroup] = (),
) -> Typed:
    check_whole(weight, [0], "the vocabulary", vocab_axes)
    check_cut(weight, [0], vocab_axes, "the vocabulary")
    labels = LETTERS[: input.ndim]
    return einsum(f"{labels},vw->{labels}w", input, weight, linear_in=(1,))


def axes_of(edges: Sequence[EdgeWords]) -> list[AxisGroup]:
    """The axes that cut dims of which a rank reads beyond its piece."""
    return [axis for words in edges for axis in words[4]]


@rule("conv1d", "conv2d", "conv3d")
def convolution(
    *,
    input: Typed,
    weight: Typed,
    bias: Typed | None = None,
    groups: int = 1,
    edges: Sequence[EdgeWords] = (),
) -> Typed:
    check_whole(input, range(2, input.ndim), "an image", axes_of(edges))
    check_whole(weight, range(2, weight.ndim), "a kernel")
    rest, kernel = "xyz"[: input.ndim - 2], "_" * (weight.ndim - 2)
    # With groups each has channels of its own: in and out are cut together.
    equation = f"no{rest},o_{kernel}->no{rest}" if groups > 1 else f"nc{rest},oc{kernel}->no{rest}"
    # Where neighbours exchange edges, what a rank has of its result is still its piece.
    product = einsum(equation, input, weight, linear_in=(0, 1))
    return product if bias is None else plus(product, bias, f"no{rest}", "o")


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(
    *,
    input: Typed,
    weight: Typed,
    bias: Typed | None = None,
    groups: int = 1,
    edges: Sequence[EdgeWords] = (),
) -> Typed:
    check_whole(input, range(2, input.ndim), "an image", axes_of(edges))
    check_whole(weight, range(2, weight.ndim), "a kernel")
    rest, kernel = "xyz"[: input.ndim - 2], "_" * (weight.ndim - 2)
    equation = f"no{rest},o_{kernel}->no{rest}" if groups > 1 else f"nc{rest},co{kernel}->no{rest}"
    product = einsum(equation, input, weight, linear_in=(0, 1))
    return product if bias is None else plus(product, bias, f"no{rest}", "o")


def plus(x: Typed, bias: Typed, labels: str, bias_labels: str) -> Typed:
    """``x + bias``: both are summands, or none is."""
    return einsum(f"{labels},{bias_labels}->{labels}", x, bias, linear_in=((0, 1),))


@rule(*(f"{kind}_pool{n}d" for n in (1, 2, 3) for kind in ("max", "avg", "lp")))
def pooling(*, input: Typed, edges: Sequence[EdgeWords] = ()) -> Typed:
    check_whole(input, range(2, input.ndim), "an image", axes_of(edges))
    return einsum("...->...", input)


@rule("scaled_dot_product_attention", "split_attention", "attention_where")
def attention(
    *,
    query: Typed,
    key: Typed,
    value: Typed,
    attn_mask: Typed | None = None,
    is_causal: bool = False,
    query_axes: Sequence[AxisGroup] = (),
    key_axes: Sequence[AxisGroup] = (),
) -> Typed:
    check_whole(query, [query.ndim - 1], "the width of queries")
    check_whole(key, [key.ndim - 1], "the width of keys")
    check_whole(key, [key.ndim - 2], "the keys", key_axes)
    if is_causal:
        check_whole(query, [query.ndim - 2], "the positions of a causal mask", query_axes)
    # Keys that go round among the ranks: as if each rank had gathered them.
    for name in named(key_axes):
        key = moved(key, "all_gather", name, S(key.ndim - 2), R)
        value = moved(value, "all_gather", name, S(value.ndim - 2), R)
    if query.ndim > 2:
        key, value = (like_heads(x, query) for x in (key, value))
    lead = LETTERS[: query.ndim - 2]
    result = einsum(f"{lead}q_,{lead}__,{lead}_w->{lead}qw", query, key, value)
    masks = [] if attn_mask is None else [attn_mask]
    for mask in masks:
        result = with_mask(result, mask)
    return result


def like_heads(x: Typed, query: Typed) -> Typed:
    """Keys or values, of which several heads of queries read one: a rank that has some of these
    queries reads what it needs of a head that other ranks have, too.
    """
    for name in shard_axes(query)[-3]:
        if name not in shard_axes(x)[-3]:
            x = moved(x, "convert", name, R, S(x.ndim - 3))
    return x


def with_mask(x: Typed, mask: Typed) -> Typed:
    """Attention under a mask ``[..., queries, keys]`` that broadcasts: cut where queries are."""
    cut = shard_axes(mask)
    check_whole(mask, [mask.ndim - 1], "the keys of a mask")
    for back in range(2, min(mask.ndim, x.ndim) + 1):
        whole = isinstance(mask, Tensor) and mask.shape[-back] == 1
        if not whole and cut[-back] != shard_axes(x)[-back]:
            raise Refusal(
                f"a mask is cut over {listed(cut[-back])}, and its queries over "
                f"{listed(shard_axes(x)[-back])}"
            )
    if needs_gradient(mask):
        # A bias that is trained is G wherever it is not cut.
        for axis, letter in local_types(mask).items():
            if letter is I and local_types(x)[axis] is V:
                raise Refusal(f"a mask that is trained is R over {axis}")
    return x


# ------------------------------------------------------------------------------------------------
# losses


@rule("cross_entropy", "nll_loss")
def cross_entropy(
    *,
    input: Typed,
    target: Typed,
    weight: Typed | None = None,
    reduction: str = "mean",
    class_axes: Sequence[AxisGroup] = (),
    row_axes: Sequence[AxisGroup] = (),
) -> Typed:
    class_dim = 1 if input.ndim > 1 else 0
    check_whole(input, [class_dim], "the classes", class_axes)
    check_cut(input, [class_dim], class_axes, "a dim of classes")
    check_cut(input, [d for d in range(input.ndim) if d != class_dim], row_axes, "a loss's rows")
    labels = LETTERS[: input.ndim]
    rows = labels[:class_dim] + labels[class_dim + 1 :]
    of_target = rows if target.ndim < input.ndim else labels
    operands, words = [input, target], [labels, of_target]
    if weight is not None:
        operands.append(weight)
        words.append(labels[class_dim])
    found = summed(einsum(f"{','.join(words)}->{rows}", *operands), class_axes)
    return of_rows(found, reduction, row_axes)


def of_rows(rows: Typed, reduction: str, row_axes: Sequence[AxisGroup]) -> Typed:
    """The loss of rows: a mean needs the number of rows of all ranks, a sum does not."""
    if reduction == "none":
        return rows
    if reduction == "mean":
        check_whole(rows, range(rows.ndim), "the rows of a mean", row_axes)
    return reduced(rows, range(rows.ndim))


@rule("linear_cross_entropy")
def linear_cross_entropy(
    *,
    input: Typed,
    weight: Typed,
    target: Typed,
    bias: Typed | None = None,
    reduction: str = "mean",
    class_axes: Sequence[AxisGroup] = (),
    row_axes: Sequence[AxisGroup] = (),
    **_: Any,
) -> Typed:
    check_whole(weight, [0], "the classes", class_axes)
    check_whole(input, [input.ndim - 1], "the width")
    lead = LETTERS[: input.ndim - 1]
    operands, words = [input, weight, target], [f"{lead}_", "v_", lead]
    if bias is not None:
        operands.append(bias)
        words.append("v")
    rows = summed(einsum(f"{','.join(words)}->{lead}", *operands), class_axes)
    return of_rows(rows, reduction, row_axes)


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
      "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss",
      "soft_margin_loss")  # fmt: skip
def elementwise_loss(
    *,
    input: Typed,
    target: Typed,
    weight: Typed | None = None,
    reduction: str = "mean",
    count: int | None = None,
) -> Typed:
    labels = LETTERS[: input.ndim]
    if isinstance(input, Tensor) and isinstance(target, Tensor) and input.shape != target.shape:
        raise Refusal("an elementwise loss of tensors of two shapes")
    given = [x for x in (weight,) if x is not None]
    words = [labels, labels, *(labels[input.ndim - x.ndim :] for x in given)]
    rows = einsum(f"{','.join(words)}->{labels}", input, target, *given)
    # With a count of all ranks a mean is a sum.
    return of_rows(rows, reduction if count is None else "sum", ())


def check_count(x: Typed, dims: Iterable[int], count: int) -> None:
    """Refuse a mean over ``count`` elements, if all ranks together cannot hold so many.

    What is cut has at least two elements, and ranks hold as many or one less. So of n elements on k
    ranks one holds at most n / 1.5 (2 of 3 on two ranks), and if any at least n / (2 k - 1).
    """
    sizes = {name: axis.size() for name, axis in (spmd.current_mesh_names() or {}).items()}
    shape, cut = shape_of(x), shard_axes(x)
    dims = list(dims)
    held = math.prod(shape[dim] for dim in dims)
    ranks = [math.prod(sizes[axis] for axis in cut[dim]) for dim in dims if cut[dim]]
    least, most = held * 1.5 ** len(ranks), held * math.prod(2 * k - 1 for k in ranks)
    if held and not least <= count <= most:
        raise Refusal(
            f"a mean is taken over {count} elements, and a rank alone holds {held} of those that "
            f"{math.prod(ranks)} ranks have"
        )


@rule("mean")
def mean(
    *, input: Typed, dim: Any = None, keepdim: bool = False, count: int | None = None
) -> Typed:
    if count is None:
        check_whole(input, dims_of(input, dim), "what a mean is taken of")
    else:
        check_count(input, dims_of(input, dim), count)
    return reduced(input, dims_of(input, dim), keepdim)


# ------------------------------------------------------------------------------------------------
# experts


class Routings(threading.local):
    """The axes that cut the experts of each routing, and those along which tokens are exchanged."""

    def __init__(self) -> None:
        self.axes: dict[int, tuple[Any, set[str], set[str]]] = {}

    def note(self, routing: Any, experts: set[str], exchanged: set[str]) -> None:
        """Remember what a dispatch did. The routing is kept, as it is known by its address."""
        self.axes[id(routing)] = routing, experts, exchanged

    def of(self, routing: Any) -> tuple[set[str], set[str]]:
        """What was noted of a routing."""
        if id(routing) not in self.axes:
            raise Refusal("rows of experts come from a dispatch")
        return self.axes[id(routing)][1:]


ROUTINGS = Routings()


@rule("dispatch")
def dispatch(
    *,
    x: Typed,
    chosen: Typed,
    weights: Typed | None = None,
    expert_axes: Sequence[AxisGroup] = (),
    exchange: Sequence[AxisGroup] = (),
    results: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Rows of tokens for experts. Along an axis of experts each rank takes what its experts get of
    all tokens, or tokens are exchanged: cut before, and rows are cut after.
    """
    check_cut(x, [0], exchange, "a dim of tokens")
    for given in (chosen, *([] if weights is None else [weights])):
        if shard_axes(given)[0] != shard_axes(x)[0]:
            raise Refusal("the choices of tokens are not cut as the tokens are")
    experts, exchanged = named(expert_axes), named(exchange)
    ROUTINGS.note(results[-1], experts, exchanged)
    found = [einsum("t...->t...", x)]
    if weights is not None:
        found.append(einsum("t_->t", weights))
    for axis in experts - exchanged:
        found = [moved(one, "convert", axis, R, S(0)) for one in found]
    return (*found, None)


@rule("grouped_linear")
def grouped_linear(
    *, rows: Typed, weight: Typed, routing: Any, bias: Typed | None = None, transposed: bool = False
) -> Typed:
    """Rows of experts times their matrices: both are cut along the axes of the experts."""
    experts, _ = ROUTINGS.of(routing)
    own = []
    for x in agreed(weight, bias):
        if set(shard_axes(x)[0]) != experts:
            raise Refusal(
                f"matrices are cut over {listed(shard_axes(x)[0])}, and their experts over "
                f"{listed(experts)}"
            )
        letters = {a: R if a in experts else letter for a, letter in local_types(x).items()}
        own.append(stand_in(letters, [(), *shard_axes(x)[1:]]))
    equation = "ri,_io->ro" if transposed else "ri,_oi->ro"
    product = einsum(equation, rows, own[0], linear_in=(0, 1))
    return product if bias is None else plus(product, own[1], "ro", "_o")


@rule("combine")
def combine(*, rows: Typed, routing: Any, exchange: Sequence[AxisGroup] = ()) -> Typed:
    """The sums of tokens: summands along axes of experts, unless rows go back to their tokens."""
    experts, exchanged = ROUTINGS.of(routing)
    if named(exchange) != exchanged:
        raise Refusal(
            f"rows go back over {listed(named(exchange))}, and came over {listed(exchanged)}"
        )
    found = einsum("r...->r...", rows, linear_in=(0,))
    for axis in experts - exchanged:
        found = moved(found, "convert", axis, S(0), P)
    return found


# ------------------------------------------------------------------------------------------------
# calls


def typed_call(
    function: Callable[..., Any], found: Rule, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """The result of a call, with the type that its rule derives."""
    wanted = inspect.signature(found).parameters
    given = bound(function, args, kwargs)
    with spmd.no_typecheck():
        result = function(*args, **kwargs)
    given["results"] = result
    open_ended = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
    arguments = {k: v for k, v in given.items() if k in wanted or open_ended}
    typed = found(**arguments)
    if result is not given.get("input"):
        retyped(result, typed)
    return result


def retyped(result: Any, typed: Any) -> None:
    """Give results the types that were derived for them."""
    if isinstance(result, tuple | list):
        for one, its_type in zip(result, typed, strict=True):
            retyped(one, its_type)
    elif isinstance(result, Tensor):
        rules.output(result, typed)


_SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "cat": ("tensors", "dim"),
    "linear": ("input", "weight", "bias"),
    "addmm": ("input", "mat1", "mat2"),
    **dict.fromkeys(("matmul", "__matmul__"), ("input", "other")),
    **dict.fromkeys(CASTS, ("input",)),
    "pad": ("input", "pad", "mode", "value"),
    "mean": ("input", "dim", "keepdim", "dtype"),
    "softmax": ("input", "dim", "dtype"),
    "log_softmax": ("input", "dim", "dtype"),
    "logsumexp": ("input", "dim", "keepdim"),
    "cumsum": ("input", "dim"),
    "cumprod": ("input", "dim"),
    "scaled_dot_product_attention": (
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal",
    ),
    **{f"conv{n}d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
       for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": (
        "input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation",
    ) for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d": ("input",) for kind in ("max", "avg", "lp") for n in (1, 2, 3)},
}  # fmt: skip
"""The arguments of torch's functions that Python cannot tell."""


def bound(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name."""
    name = function.__name__.removeprefix("boolean_dispatch.")
    if function is torch.einsum:
        equation, *operands = args
        several = len(operands) == 1 and isinstance(operands[0], list | tuple)
        return {"equation": equation, "operands": operands[0] if several else operands}
    if getattr(ops, name, None) is not function and name in _SIGNATURES:
        return {**dict(zip(_SIGNATURES[name], args, strict=False)), **kwargs}
    signature = inspect.signature(function)
    if any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
        names = list(inspect.signature(getattr(F, function.__name__)).parameters)
        return {**dict(zip(names, args, strict=False)), **kwargs}
    return dict(signature.bind(*args, **kwargs).arguments)


TORCH: dict[Callable[..., Any], Rule] = {
    torch.cat: cat,
    torch.addmm: addmm,
    torch.einsum: written_einsum,
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), matmul),
    **{getattr(F, name): found for name, found in RULES.items() if hasattr(F, name)},
    **{getattr(torch.Tensor, name): cast for name in CASTS},
    **{
        getattr(owner, name): RULES[name]
        for owner in (torch, torch.Tensor)
        for name in ("softmax", "log_softmax", "logsumexp", "cumsum", "cumprod", "mean")
    },
}
"""The rules of torch's own functions."""
