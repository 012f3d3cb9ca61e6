"""Recurrent layers: only the batch may be split."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.annotation import parse_rule
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.rule import OpRule
from shardwright.compiler.ops.rule_builder import whole_rule
from shardwright.compiler.ops.terms import DRAW, RUNTIME, annotation, define_form, drawn, may_be

_LAYER = "input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first"


def _layer(num_states: int) -> Callable[[IROp], OpRule]:
    """Input ``[sequence, batch, features]`` or batch first, states ``[layers, batch, hidden]``."""

    def rule(op: IROp) -> OpRule:
        params = op.arg("params")
        random = may_be(op.arg("train"), bool) and may_be(op.arg("dropout"), lambda p: p > 0)
        # A packed sequence, or one without batch.
        if isinstance(params, IRValue) or op.operands[0].ndim != 3 or random:
            rule = whole_rule(op)
            return (
                drawn(rule, f"{RUNTIME}.{op.target}", lambda rule: rule.results[0])
                if random
                else rule
            )
        sequence, out = ("b s^", "b s o^") if op.arg("batch_first") else ("s^ b", "s b o^")
        weights = [
            [f"w{i}d{dim}^" for dim in range(value.ndim)]
            for i, value in enumerate(op.operands[1 + num_states :])
        ]
        operands = [[sequence, "i^"], *[[f"l{i}^ b h{i}^"] for i in range(num_states)], *weights]
        states = [[f"m{i}^ b n{i}^"] for i in range(num_states)]
        return parse_rule(annotation(operands, [[out], *states]), op)

    return rule


for _name, _num_states in {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}.items():
    define_form(_name, f"{_LAYER}, *, {DRAW}")
    define(_name, _LAYER, f"torch.{_name}", _layer(_num_states), getattr(torch, _name))


def _cell(num_states: int) -> Callable[[IROp], OpRule]:
    def rule(op: IROp) -> OpRule:
        biases = [["g"]] * (len(op.operands) - 3 - num_states)
        operands = [["b", "i^"], *[["b", "h^"]] * num_states, ["g^", "i"], ["g", "h"], *biases]
        return parse_rule(annotation(operands, [["b", "h"]] * num_states), op)

    return rule


for _name, _num_states in {
    "lstm_cell": 2,
    "gru_cell": 1,
    "rnn_tanh_cell": 1,
    "rnn_relu_cell": 1,
}.items():
    define(
        _name,
        "input, hx, w_ih, w_hh, b_ih=None, b_hh=None",
        f"torch.{_name}",
        _cell(_num_states),
        getattr(torch, _name),
    )
