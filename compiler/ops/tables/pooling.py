"""Pooling: each channel of each sample by itself, space stays whole."""

from __future__ import annotations

import torch.nn.functional as F

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.aliases import callables, through, without
from shardwright.compiler.ops.annotation import parse_rule
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.opdef import RuleMaker
from shardwright.compiler.ops.rule import OpRule
from shardwright.compiler.ops.rule_builder import linear_sets
from shardwright.compiler.ops.terms import annotation, names


def _pool(num_spatial: int, linear: bool) -> RuleMaker:
    """The rule of a pooling over ``num_spatial`` dims; leading dims are batch and channels, or
    channels alone.
    """

    def rule(op: IROp) -> OpRule:
        lead = names(op.operands[0].ndim - num_spatial, "c")
        text = annotation(
            [[*lead, *names(num_spatial, "y", "^")]],
            [[*lead, *names(num_spatial, "z", "^")]] * len(op.results),
        )
        return parse_rule(
            text, op, linear_sets=linear_sets(op, ("input",)) if linear else (), nonempty=True
        )

    return rule


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
    _adaptive = f"adaptive_avg_pool{_n}d"
    define(
        _adaptive, "input, output_size", f"F.{_adaptive}", _pool(_n, True), *callables(_adaptive)
    )
    _adaptive = f"adaptive_max_pool{_n}d"
    _function = getattr(F, _adaptive)
    define(
        _adaptive,
        "input, output_size, return_indices=False",
        f"F.{_adaptive}",
        _pool(_n, False),
        _function,
    )
    _adaptive = f"adaptive_max_pool{_n}d_with_indices"
    define(
        _adaptive,
        "input, output_size",
        f"F.{_adaptive}",
        _pool(_n, False),
        *through(_NO_INDICES, callables(_adaptive)),
    )
    _signature = "input, norm_type, kernel_size, stride=None, ceil_mode=False"
    define(
        f"lp_pool{_n}d",
        _signature,
        f"F.lp_pool{_n}d",
        _pool(_n, False),
        *callables(f"lp_pool{_n}d"),
    )
