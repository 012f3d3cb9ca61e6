"""Convolutions, resizing and sampling of images. Batch and channels may be split, and space too
where an exchange of edges is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.nn.functional as F

from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.size import Size, divides, is_static, quotient
from shardwright.compiler.ops.aliases import callables
from shardwright.compiler.ops.annotation import parse_rule
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.edges import over_space, per_dim, space
from shardwright.compiler.ops.rule import LocalSizes, OpRule
from shardwright.compiler.ops.rule_builder import linear_sets
from shardwright.compiler.ops.terms import RUNTIME, annotation, define_form, indices, names


def _spatial(op: IROp) -> tuple[list[str], list[str], list[str], list[str]]:
    """Batch (none for an unbatched input), input, kernel and output dims of a convolution."""
    num_spatial = op.operands[1].ndim - 2
    batch = ["b"] if op.operands[0].ndim == num_spatial + 2 else []
    y, z = space(op, num_spatial)
    return batch, y, names(num_spatial, "k", "^"), z


def _windows(op: IROp) -> list[tuple[Size, ...]] | None:
    """What a place of the result reads, for each dim of space; ``None`` where the size of the
    kernel is dynamic.
    """
    kernel = op.operands[1].shape[2:]
    if not all(map(is_static, kernel)):
        return None
    strides, dilations = (per_dim(op.arg(name, 1), len(kernel)) for name in ("stride", "dilation"))
    padding = op.arg("padding", 0)
    found: list[tuple[Size, ...]] = []
    for i, (k, stride, dilation) in enumerate(zip(kernel, strides, dilations, strict=True)):
        # From the first to the last place that a kernel of ``k`` touches.
        reach = dilation * (k - 1) + 1
        same = {"valid": 0, "same": (reach - 1) // 2}
        before = same[padding] if isinstance(padding, str) else per_dim(padding, len(kernel))[i]
        found.append((stride, before, reach))
    return found


def _transposed_windows(op: IROp) -> list[tuple[Size, ...]] | None:
    """What a place of the result of a transposed convolution reads.

    Place ``p`` gets from each input ``i`` that has ``i * stride - padding + dilation * j = p`` for
    some ``j`` of the kernel.
    """
    kernel = op.operands[1].shape[2:]
    if not all(map(is_static, kernel)):
        return None
    strides, dilations = (per_dim(op.arg(name, 1), len(kernel)) for name in ("stride", "dilation"))
    paddings = per_dim(op.arg("padding", 0), len(kernel))
    found: list[tuple[Size, ...]] = []
    for k, stride, dilation, padding in zip(kernel, strides, dilations, paddings, strict=True):
        last = dilation * (k - 1)
        # The first input is (p + padding - last) / stride, rounded up, the last one
        # (p + padding) / stride, rounded down.
        window: tuple[Size, ...] = (1, last - padding - stride + 1, last - stride + 2, stride)
        if last < stride - 1:  # some places get nothing: the next input reaches over them
            window = (1, -padding, stride - last, stride)
        found.append(window)
    return found


def _rule(
    op: IROp, text: str, groups: int, channels: int, windows: list[tuple[Size, ...]] | None
) -> OpRule:
    """The rule of a convolution. The argument ``groups`` of a rank is its number of channels,
    divided by that of one group, which dim 1 of the weight has.
    """

    def local_groups(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
        tensor = rule.operands[0] if channels == 0 else rule.results[0]
        channel_dim = len(tensor) - (op.operands[1].ndim - 1)
        return {
            "groups": quotient(local.shape(tensor)[channel_dim], local.shape(rule.operands[1])[1])
        }

    rule = parse_rule(
        text,
        op,
        additive=indices(op, "bias"),
        linear_sets=linear_sets(op, ("input", "bias"), ("weight", "bias")),
        localise=local_groups if groups > 1 else None,
        nonempty=True,  # without channels torch computes the wrong shape, or refuses
    )
    if windows is None:
        return rule
    knows_runs = not op.target.startswith("conv_transpose")
    return over_space(op, rule, f"{RUNTIME}.{op.target}", windows, knows_runs=knows_runs)


def _conv(op: IROp) -> OpRule:
    batch, y, k, z = _spatial(op)
    groups = op.arg("groups", 1)
    inner, outer = ("c+", "o") if groups == 1 else (f"(g={groups} c+)", "(g o)")
    operands = [[*batch, inner, *y], [outer, "c", *k], *([[outer]] if op.has_arg("bias") else [])]
    return _rule(op, annotation(operands, [[*batch, outer, *z]]), groups, 0, _windows(op))


def _conv_transpose(op: IROp) -> OpRule:
    batch, y, k, z = _spatial(op)
    groups = op.arg("groups", 1)
    inner, outer = ("c+", "o") if groups == 1 else (f"(g={groups} c+)", "(g o)")
    operands = [[*batch, inner, *y], [inner, "o", *k], *([[outer]] if op.has_arg("bias") else [])]
    text = annotation(operands, [[*batch, outer, *z]])
    return _rule(op, text, groups, 1, _transposed_windows(op))


_CONV = "input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1"
_TRANSPOSED = (
    "input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1"
)
for _n in (1, 2, 3):
    define(f"conv{_n}d", _CONV, f"F.conv{_n}d", _conv, *callables(f"conv{_n}d"))
    define_form(f"conv{_n}d", f"{_CONV}, *, edges=()")
    define_form(f"conv_transpose{_n}d", f"{_TRANSPOSED}, *, edges=()")
    define(
        f"conv_transpose{_n}d",
        _TRANSPOSED,
        f"F.conv_transpose{_n}d",
        _conv_transpose,
        *callables(f"conv_transpose{_n}d"),
    )

# -------------------------------------------------------------------------------------------------
# resizing, sampling


def channelwise(op: IROp) -> OpRule:
    """Each channel of each sample by itself; space stays whole."""
    ndim = op.operands[0].ndim
    text = annotation(
        [["n", "c", *names(ndim - 2, "y", "^")]], [["n", "c", *names(ndim - 2, "z", "^")]]
    )
    return parse_rule(text, op, linear_sets=linear_sets(op, ("input",)), nonempty=True)


def _interpolate(op: IROp) -> OpRule:
    """Space may be split where it gets a power of two as long: then a place of the result reads the
    same places, in numbers without rounding, wherever the piece begins.
    """
    ndim = op.operands[0].ndim
    before, after = space(op, ndim - 2)
    found = parse_rule(
        annotation([["n", "c", *before]], [["n", "c", *after]]),
        op,
        linear_sets=linear_sets(op, ("input",)),
        nonempty=True,
    )
    scales = _scales(op)
    # How many places beside its own a place of the result reads, on each side.
    neighbours = {"nearest": 0, "nearest-exact": 0, "linear": 1, "bilinear": 1, "trilinear": 1}
    mode = op.arg("mode", "nearest")
    if scales is None or mode not in neighbours or op.arg("align_corners"):
        return found
    if op.arg("antialias", False):
        return found
    beside = neighbours[mode]
    windows = [(1, beside * scale, 2 * beside * scale + 1, scale) for scale in scales]
    rule = over_space(op, found, f"{RUNTIME}.interpolate", windows)
    form = rule.parallel
    if form is None or form.local_args is None:
        return rule
    edges = form.local_args
    return replace(
        rule,
        parallel=replace(
            form, local_args=lambda op, local: {**edges(op, local), "scales": tuple(scales)}
        ),
    )


def _scales(op: IROp) -> list[int] | None:
    """How many times as long each dim of space gets, if these are powers of two."""
    given = op.arg("scale_factor")
    num_spatial = op.operands[0].ndim - 2
    factors = [None] * num_spatial if given is None else per_dim(given, num_spatial)
    scales = []
    for size, made, factor in zip(
        op.operands[0].shape[2:], op.results[0].shape[2:], factors, strict=True
    ):
        if not divides(size, made):
            return None
        scale = quotient(made, size)
        # ``scale & (scale - 1)`` is 0 for powers of two. Other factors are rounded in float32, and
        # would give other neighbours at another beginning.
        if not is_static(scale) or scale & (scale - 1) or factor not in (None, scale):
            return None
        scales.append(scale)
    return scales


def _resampling(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A list of sizes or scale factors as a tuple."""
    return args, {
        key: tuple(value) if isinstance(value, list) else value for key, value in kwargs.items()
    }


define(
    "interpolate",
    "input, size=None, scale_factor=None, mode='nearest', align_corners=None, "
    "recompute_scale_factor=None, antialias=False",
    "F.interpolate",
    _interpolate,
    (F.interpolate, _resampling),
)
define_form(
    "interpolate",
    "input, size=None, scale_factor=None, mode='nearest', align_corners=None, "
    "recompute_scale_factor=None, antialias=False, *, edges=(), scales=()",
)


def _grid_sample(op: IROp) -> OpRule:
    spatial = op.operands[0].ndim - 2
    operands = [["b", "c", *names(spatial, "y", "^")], ["b", *names(spatial, "z"), "d^"]]
    return parse_rule(
        annotation(operands, [["b", "c", *names(spatial, "z")]]),
        op,
        linear_sets=linear_sets(op, ("input",)),
    )


define(
    "grid_sample",
    "input, grid, mode='bilinear', padding_mode='zeros', align_corners=None",
    "F.grid_sample",
    _grid_sample,
    F.grid_sample,
)


def _affine_grid(op: IROp) -> OpRule:
    def local_size(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
        return {"size": (local.shape(rule.results[0])[0], *op.arg("size")[1:])}

    spatial = op.results[0].ndim - 2
    text = annotation([["b", "i^", "j^"]], [["b", *names(spatial, "z", "^"), "d^"]])
    return parse_rule(
        text, op, linear_sets=linear_sets(op, ("theta",)), localise=local_size, nonempty=True
    )


define(
    "affine_grid", "theta, size, align_corners=None", "F.affine_grid", _affine_grid, F.affine_grid
)


def _unfold(op: IROp) -> OpRule:
    """Sliding blocks as columns: ``c`` channels times the ``k`` places of a block."""
    batch = ["n"] if op.operands[0].ndim == 4 else []
    channels = op.operands[0].shape[-3]
    text = annotation([[*batch, "c", "y^", "x^"]], [[*batch, "(c k^)", "l^"]])
    return parse_rule(
        text, op, sizes={"c": channels}, linear_sets=linear_sets(op, ("input",)), nonempty=True
    )


def _fold(op: IROp) -> OpRule:
    batch = ["n"] if op.operands[0].ndim == 3 else []
    channels = op.results[0].shape[-3]
    text = annotation([[*batch, "(c k^)", "l^"]], [[*batch, "c", "y^", "x^"]])
    return parse_rule(
        text, op, sizes={"c": channels}, linear_sets=linear_sets(op, ("input",)), nonempty=True
    )


define(
    "unfold_blocks",
    "input, kernel_size, dilation=1, padding=0, stride=1",
    "F.unfold",
    _unfold,
    F.unfold,
)
define(
    "fold",
    "input, output_size, kernel_size, dilation=1, padding=0, stride=1",
    "F.fold",
    _fold,
    F.fold,
)


def _pixel_shuffle(op: IROp) -> OpRule:
    r = op.arg("upscale_factor")
    text = f"* (c i={r}^ j={r}^) y x -> * c (y i) (x j)"
    # the gradient of an empty result has the wrong shape
    return parse_rule(text, op, linear_sets=linear_sets(op, ("input",)), nonempty=True)


def _pixel_unshuffle(op: IROp) -> OpRule:
    r = op.arg("downscale_factor")
    text = f"* c (y i={r}^) (x j={r}^) -> * (c i j) y x"
    # An empty result has the wrong shape.
    return parse_rule(text, op, linear_sets=linear_sets(op, ("input",)), nonempty=True)


define(
    "pixel_shuffle",
    "input, upscale_factor",
    "F.pixel_shuffle",
    _pixel_shuffle,
    *callables("pixel_shuffle"),
)
define(
    "pixel_unshuffle",
    "input, downscale_factor",
    "F.pixel_unshuffle",
    _pixel_unshuffle,
    *callables("pixel_unshuffle"),
)


def _channel_shuffle(op: IROp) -> OpRule:
    spatial = names(op.operands[0].ndim - 2, "y")
    return parse_rule(
        annotation([["n", "c^", *spatial]], [["n", "c", *spatial]]),
        op,
        linear_sets=linear_sets(op, ("input",)),
    )


define(
    "channel_shuffle",
    "input, groups",
    "F.channel_shuffle",
    _channel_shuffle,
    *callables("channel_shuffle"),
)
