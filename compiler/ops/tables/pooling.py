"""Pooling: each channel of each sample by itself. Space may be split where an exchange of edges is
enough.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F

from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.size import Size, is_static
from shardwright.compiler.ops.aliases import callables, through, without
from shardwright.compiler.ops.annotation import parse_rule
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.edges import Way, over_space, per_dim, space, with_edges
from shardwright.compiler.ops.opdef import RuleMaker
from shardwright.compiler.ops.rule import LocalSizes, OpRule, ParallelFactor, ParallelForm
from shardwright.compiler.ops.rule_builder import linear_sets
from shardwright.compiler.ops.terms import RUNTIME, annotation, define_form, names


def _pool(num_spatial: int, linear: bool) -> RuleMaker:
    """The rule of a pooling over ``num_spatial`` dims; leading dims are batch and channels, or
    channels alone.
    """

    def rule(op: IROp) -> OpRule:
        lead = names(op.operands[0].ndim - num_spatial, "c")
        before, after = space(op, num_spatial)
        text = annotation([[*lead, *before]], [[*lead, *after]] * len(op.results))
        found = parse_rule(
            text, op, linear_sets=linear_sets(op, ("input",)) if linear else (), nonempty=True
        )
        windows = _windows(op, num_spatial)
        # Places that are counted among all dims of space cannot be told on a piece.
        if windows is None or len(op.results) > 1:
            return found
        return over_space(op, found, f"{RUNTIME}.{op.target}", windows)

    return rule


def _windows(op: IROp, num_spatial: int) -> list[tuple[Size, ...]] | None:
    """What a place of the result reads, for each dim of space."""
    if op.target.startswith("lp_pool") and op.arg("ceil_mode", False):
        return None  # torch takes the mean of a shorter window at the end times a whole one's size
    kernel = per_dim(op.arg("kernel_size"), num_spatial)
    stride = op.arg("stride") or kernel
    strides = per_dim(stride, num_spatial)
    paddings, dilations = (
        per_dim(op.arg(name, default), num_spatial)
        for name, default in (("padding", 0), ("dilation", 1))
    )
    return [
        (stride, padding, dilation * (size - 1) + 1)
        for size, stride, padding, dilation in zip(
            kernel, strides, paddings, dilations, strict=True
        )
    ]


def _adaptive(num_spatial: int, linear: bool) -> RuleMaker:
    """The rule of an adaptive pooling. Its windows are equal where the size of the result divides
    that of the input. An average over all of a dim is a sum over its pieces.
    """

    def rule(op: IROp) -> OpRule:
        first = op.operands[0].ndim - num_spatial
        lead = names(first, "c")
        sizes, made = (value.shape[first:] for value in (op.operands[0], op.results[0]))
        before, after = space(op, num_spatial)
        averaged = [linear and size == 1 for size in made]
        # ``+``: a dim that is averaged away is summed over the pieces of all ranks.
        before = [
            name.replace("^", "+") if a else name for name, a in zip(before, averaged, strict=True)
        ]
        after = ["1" if size == 1 else name for name, size in zip(after, made, strict=True)]
        found = parse_rule(
            annotation([[*lead, *before]], [[*lead, *after]] * len(op.results)),
            op,
            linear_sets=linear_sets(op, ("input",)) if linear else (),
            nonempty=True,
        )
        # Max pooling with indices: these count from the beginning of the whole dim, which a piece
        # does not know.
        if len(op.results) > 1:
            return found
        windows: list[tuple[int, int, int] | None] = []
        for size, count in zip(sizes, made, strict=True):
            window = None
            if is_static(size) and is_static(count) and count > 1 and size % count == 0:
                window = (size // count, 0, size // count)
            windows.append(window)
        target = f"{RUNTIME}.{op.target}"
        found = with_edges(
            found,
            target,
            [Way(first + i, first + i, window) for i, window in enumerate(windows) if window],
        )
        return _with_shares(found, target, [first + i for i, a in enumerate(averaged) if a])

    return rule


def _with_shares(rule: OpRule, target: str, dims: list[int]) -> OpRule:
    """The rule with a form that averages a dim over pieces."""
    names = [rule.operands[0][dim][0].factor for dim in dims if rule.operands[0][dim]]
    if not names:
        return rule
    edges = rule.parallel

    def local_args(op: IROp, local: LocalSizes) -> dict[str, Arg]:
        assert op.rule is not None
        given = edges.local_args(op, local) if edges and edges.local_args else {}
        shares = []
        for dim in dims:
            refs = op.rule.operands[0][dim]
            if any(local.axes.get(ref.factor) for ref in refs):
                shares.append((dim, op.operands[0].shape[dim]))
        words = {**given, "shares": tuple(shares)}
        return {name: word for name, word in words.items() if word}

    # The average over a cut dim is a sum over ranks of averages times shares, so it may be cut at
    # any place, and a rank may have none of it.
    averaged = dict.fromkeys(names, ParallelFactor(anywhere=True, empty=True))
    form = ParallelForm(target, {**(edges.factors if edges else {}), **averaged}, {}, local_args)
    return replace(rule, parallel=form)


_MAX = (
    "input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False"
)
_NO_INDICES = without("return_indices")
for _n in (1, 2, 3):
    _options = "" if _n == 1 else ", divisor_override=None"
    _avg = (
        "input, kernel_size, stride=None, padding=0, ceil_mode=False, "
        f"count_include_pad=True{_options}"
    )
    define(
        f"max_pool{_n}d", _MAX, f"F.max_pool{_n}d", _pool(_n, False), *callables(f"max_pool{_n}d")
    )
    define_form(f"max_pool{_n}d", f"{_MAX.removesuffix(', return_indices=False')}, *, edges=()")
    _indexed = f"max_pool{_n}d_with_indices"
    _aliases = through(_NO_INDICES, callables(_indexed))
    define(
        _indexed,
        _MAX.removesuffix(", return_indices=False"),
        f"F.{_indexed}",
        _pool(_n, False),
        *_aliases,
    )
    define(
        f"avg_pool{_n}d", _avg, f"F.avg_pool{_n}d", _pool(_n, True), *callables(f"avg_pool{_n}d")
    )
    define_form(f"avg_pool{_n}d", f"{_avg}, *, edges=()")
    _ADAPTIVE = "input, output_size"
    _adaptive_name = f"adaptive_avg_pool{_n}d"
    define(
        _adaptive_name,
        _ADAPTIVE,
        f"F.{_adaptive_name}",
        _adaptive(_n, True),
        *callables(_adaptive_name),
    )
    define_form(_adaptive_name, f"{_ADAPTIVE}, *, edges=(), shares=()")
    _adaptive_name = f"adaptive_max_pool{_n}d"
    define(
        _adaptive_name,
        f"{_ADAPTIVE}, return_indices=False",
        f"F.{_adaptive_name}",
        _adaptive(_n, False),
        getattr(F, _adaptive_name),
    )
    define_form(_adaptive_name, f"{_ADAPTIVE}, *, edges=()")
    _adaptive_name = f"adaptive_max_pool{_n}d_with_indices"
    define(
        _adaptive_name,
        _ADAPTIVE,
        f"F.{_adaptive_name}",
        _adaptive(_n, False),
        *through(_NO_INDICES, callables(_adaptive_name)),
    )
    _signature = "input, norm_type, kernel_size, stride=None, ceil_mode=False"
    define(
        f"lp_pool{_n}d",
        _signature,
        f"F.lp_pool{_n}d",
        _pool(_n, False),
        *callables(f"lp_pool{_n}d"),
    )
    define_form(f"lp_pool{_n}d", f"{_signature}, *, edges=()")
