"""Operators that draw random numbers.

Each always runs as its runtime form, which draws from the module's own random state and knows where
its piece lies in the whole. Factors are free where one drawn number belongs to one element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.aliases import callables, through, without
from shardwright.compiler.ops.annotation import parse_rule
from shardwright.compiler.ops.definitions import Normalise, define
from shardwright.compiler.ops.rule import OpRule, TensorRefs
from shardwright.compiler.ops.rule_builder import dim_of, linear_sets
from shardwright.compiler.ops.terms import (
    DRAW,
    RUNTIME,
    annotation,
    broadcast,
    define_form,
    drawn,
    local_size,
    may_be,
    names,
)

_PLAIN = without(
    "inplace", "generator", "out", "layout", "requires_grad", "pin_memory", "memory_format"
)


def _result(rule: OpRule) -> TensorRefs:
    return rule.results[0]


def _runtime(op: IROp) -> str:
    return f"{RUNTIME}.{op.target}"


def _random(
    name: str,
    signature: str,
    rule: Callable[[IROp], OpRule],
    *aliases: Any,
    code: str | None = None,
    **renames: str,
) -> None:
    """An operator and its runtime form, which has the same name and arguments."""
    define_form(name, f"{signature}, {DRAW if '*' in signature else f'*, {DRAW}'}")
    define(name, signature, code or f"torch.{name}", rule, *aliases, renames=renames)


# ------------------------------------------------------------------------------------------------
# dropout


def _dropout(num_shared: int | None, linear: bool) -> Callable[[IROp], OpRule]:
    """The rule of a dropout whose trailing ``num_shared`` dims share one number; ``None``: all dims
    after the second.
    """

    # The numbers that are drawn: one for all of a shared dim.
    def mask(rule: OpRule) -> TensorRefs:
        term = rule.results[0]
        shared = max(len(term) - 2, 0) if num_shared is None else num_shared
        return (*term[: len(term) - shared], *[()] * shared)

    def rule(op: IROp) -> OpRule:
        rule = parse_rule("* -> *", op, linear_sets=linear_sets(op, ("input",)) if linear else ())
        # Functions that have no argument ``training`` always drop.
        training = op.arg(
            "training", op.target in ("dropout", "dropout1d", "dropout2d", "dropout3d", "rrelu")
        )
        random = may_be(training, bool) and may_be(op.arg("p", 0.5), lambda p: p > 0)
        return drawn(rule, _runtime(op), mask) if random else rule

    return rule


_NUM_SHARED = {"dropout": 0, "dropout1d": 1, "dropout2d": None, "dropout3d": 3}
for _name, _num in _NUM_SHARED.items():
    _aliases = through(
        _PLAIN, callables(_name, *(["feature_dropout"] if _name == "dropout2d" else []))
    )
    _random(
        _name,
        "input, p=0.5, training=True",
        _dropout(_num, True),
        *_aliases,
        code=f"F.{_name}",
        train="training",
    )
for _name, _num in {"alpha_dropout": 0, "feature_alpha_dropout": None}.items():
    _aliases = through(_PLAIN, callables(_name))
    _random(
        _name,
        "input, p=0.5, training=False",
        _dropout(_num, False),
        *_aliases,
        code=f"F.{_name}",
        train="training",
    )


def _rrelu(op: IROp) -> OpRule:
    rule = parse_rule("* -> *", op)
    return drawn(rule, _runtime(op), _result) if may_be(op.arg("training", False), bool) else rule


_RRELU = "input, lower=0.125, upper=0.3333333333333333, training=False"
_random("rrelu", _RRELU, _rrelu, *through(_PLAIN, callables("rrelu")), code="F.rrelu")


def _gumbel_softmax(op: IROp) -> OpRule:
    ndim = op.operands[0].ndim
    dim = dim_of(op, ndim, default=-1)
    term = ["c^" if i == dim else f"a{i}" for i in range(ndim)]
    return drawn(parse_rule(annotation([term], [term]), op), _runtime(op), _result)


_random(
    "gumbel_softmax",
    "logits, tau=1.0, hard=False, dim=-1",
    _gumbel_softmax,
    (F.gumbel_softmax, without("eps")),
    code="F.gumbel_softmax",
)

# -------------------------------------------------------------------------------------------------
# new tensors


def _created(op: IROp) -> OpRule:
    """A tensor of a given size: all dims come from the size argument."""
    rule = parse_rule(annotation([], [names(op.results[0].ndim, "a")]), op, localise=local_size)
    return drawn(rule, _runtime(op), _result)


def _like(op: IROp) -> OpRule:
    """A tensor with the shape of the first operand, whose values do not matter."""
    operands, result = broadcast([value.shape for value in op.operands])
    return drawn(parse_rule(annotation(operands, [result]), op), _runtime(op), _result)


def _with_low(*order: str) -> Normalise:
    """Arguments by name, ``low`` filled in where torch lets it be left out before the others."""

    def normalise(
        args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = _PLAIN((), kwargs)[1]
        missing = [name for name in order if name not in given]
        if len(args) < len(missing) and "low" in missing:
            missing.remove("low")
        return (), {"low": 0, **given, **dict(zip(missing, args, strict=False))}

    return normalise


_NEW = "*, dtype=None, device=None"
_random("rand", "*size, dtype=None, device=None", _created, (torch.rand, _PLAIN))
_random("randn", "*size, dtype=None, device=None", _created, (torch.randn, _PLAIN))
_random(
    "randint",
    f"low, high, size, {_NEW}",
    _created,
    (torch.randint, _with_low("low", "high", "size")),
)
_random("rand_like", f"input, {_NEW}", _like, (torch.rand_like, _PLAIN))
_random("randn_like", f"input, {_NEW}", _like, (torch.randn_like, _PLAIN))
_random(
    "randint_like",
    f"input, low, high, {_NEW}",
    _like,
    (torch.randint_like, _with_low("input", "low", "high")),
)


def _randperm(op: IROp) -> OpRule:
    return drawn(parse_rule("-> n^", op), _runtime(op), _result)


_random("randperm", f"n, {_NEW}", _randperm, (torch.randperm, _PLAIN))

# -------------------------------------------------------------------------------------------------
# draws from parameters


def _half(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``Tensor.bernoulli_()`` draws with probability one half."""
    args, kwargs = _PLAIN(args, kwargs)
    return args, kwargs if len(args) > 1 else {"p": 0.5, **kwargs}


def _normal(op: IROp) -> OpRule:
    return _created(op) if op.has_arg("size") else _like(op)


def _multinomial(op: IROp) -> OpRule:
    return drawn(parse_rule("* c^ -> * n^", op), _runtime(op), _result)


_random(
    "bernoulli",
    "input, p=None",
    _like,
    *through(_PLAIN, [torch.bernoulli, torch.Tensor.bernoulli]),
    (torch.Tensor.bernoulli_, _half),
)
_random(
    "normal",
    "mean, std=1.0, size=None, *, dtype=None, device=None",
    _normal,
    (torch.normal, _PLAIN),
)
_random(
    "multinomial",
    "input, num_samples, replacement=False",
    _multinomial,
    *through(_PLAIN, callables("multinomial")),
)
for _name, _signature, _in_place in (
    ("normal_like", "input, mean=0.0, std=1.0", torch.Tensor.normal_),
    ("uniform_like", "input, low=0.0, high=1.0", torch.Tensor.uniform_),
    ("exponential_like", "input, lambd=1.0", torch.Tensor.exponential_),
):
    _code = f"{RUNTIME}.{_name}"
    _random(
        _name, _signature, _like, (_in_place, _PLAIN), code=_code, **{"from": "low", "to": "high"}
    )
