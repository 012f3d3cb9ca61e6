"""Rules of autograd Functions of well-known libraries: what :func:`register_op` would be told of
them.

They are known by where they are imported from and by their parameters; nothing is imported for
this. A Function registers when a model first applies it, unless its user has done so. All of them
compute derivatives, so their gradients may be partial.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.register import proved_by_tests, register_op
from shardwright.compiler.ops.rule import OpRule
from shardwright.compiler.ops.rule_builder import RuleBuilder, broadcast

Annotation = str | Callable[..., str | OpRule]


def _masked_softmax(input: IRValue, mask: IRValue, dim: int) -> OpRule:
    build = RuleBuilder()
    scores = build.tensor(input.shape, frozen=(dim % input.ndim,))
    return build.rule([scores, broadcast(mask.shape, scores)], [scores])


KNOWN: dict[str, tuple[str, Annotation]] = {
    "transformers.models.bloom.modeling_bloom.GeLUFunction": ("input", "* -> *"),
    "transformers.models.recurrent_gemma.modeling_recurrent_gemma.SqrtBoundDerivative": (
        "x",
        "* -> *",
    ),
    "transformers.models.phimoe.modeling_phimoe.PhimoeMultiplier": (
        "scores, multiplier, selected_experts, masked_gates, mask_for_one",
        "t e^, t 1, t 1, t e^, t 1 -> t 1",
    ),
    "transformers.models.sew_d.modeling_sew_d.XSoftmax": ("input, mask, dim", _masked_softmax),
}
"""The parameters that each rule is for, and its annotation, by import path of the function."""


def register_known(function: type[torch.autograd.Function]) -> None:
    """Register a Function of the table. Any other, or one with other parameters than the rule is
    for, is left as it is.
    """
    known = KNOWN.get(f"{function.__module__}.{function.__qualname__}")
    if known is None or registry.find(function) is not None:
        return
    parameters, annotation = known
    if ", ".join(list(inspect.signature(function.forward).parameters)[1:]) == parameters:
        register_op(annotation, grad_linear=True)(function)
        proved_by_tests(registry.CALLABLES[function][0])
