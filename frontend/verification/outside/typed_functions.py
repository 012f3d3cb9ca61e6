"""The typing rules of functions that a model brings along: autograd Functions, custom operators,
and what ``register_op`` has made one operator.

``spmd_types`` cannot look into them, and neither could the compiler. It took the annotation that
such a function is registered with, and proved it on random numbers. Here the same annotation is
said as an einsum of ``spmd_types``:

    registered as   t e^, t 1 -> t 1
    typed as        a_,a_->a_

A dim that must be whole, ``e^``, has no name there (``_``). A function that has no annotation is
computed whole by every rank, so none of its operands may be cut.
"""

from __future__ import annotations

import string
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import R, rules
from torch import Tensor

from shardwright.compiler.ir.op import map_leaves
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.annotation import instantiate
from shardwright.compiler.ops.known_functions import register_known
from shardwright.compiler.ops.known_loops import LIBRARY
from shardwright.compiler.ops.prover import call_of, operands_in, tensors_in
from shardwright.compiler.ops.register import UserOpDef
from shardwright.compiler.ops.rule import DimRefs, OpRule, TensorRefs
from shardwright.compiler.ops.user_function import is_custom_op, is_function_class
from shardwright.compiler.trace.calls.time_loops import known_functions_of
from shardwright.compiler.trace.context.patches import replaced
from shardwright.frontend.verification.outside.spmd_layouts import (
    Refusal,
    Typed,
    local_types,
    needs_gradient,
    shard_axes,
)
from shardwright.frontend.verification.outside.typed_operators import einsum
from shardwright.runtime.errors import AnnotationError


@contextmanager
def known_loops() -> Iterator[None]:
    """Functions of a library that graphs have as one operator are one call inside the ``with``
    block.
    """
    files = [name for name in sys.modules if name.startswith(LIBRARY)]
    with ExitStack() as stack:
        for owner, name, function in known_functions_of(files):
            stack.enter_context(replaced(owner, name, function))
        yield


def brought_along(function: Any) -> Any:
    """What a model brings along, if a call is one of it: the class of an ``apply``, or the function
    itself. ``None`` for what torch and this project have.
    """
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and is_function_class(owner):
        register_known(owner)
        return None if hasattr(owner, "spmd_typecheck") else owner
    found = registry.find(function)
    if found is not None:
        return function if isinstance(found[0], UserOpDef) else None
    is_of_torch = str(function).startswith(("aten.", "prims.", "prim."))
    return function if is_custom_op(function) and not is_of_torch else None


def typed_function(
    owner: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of a call of what a model brings along, with the type of its rule. ``function`` is
    what is called, ``owner`` what may be registered.
    """
    with spmd.no_typecheck():
        result = function(*args, **kwargs)
        if registry.find(owner) is None:
            operands = operands_in({"": args, **kwargs})
            rule = _of_whole(operands, tensors_in(result))
        else:
            operands = operands_in(_bound(owner, args, kwargs))
            rule = _rule_of(owner, function, args, kwargs)
    for one, its_type in zip(tensors_in(result), derived(rule, operands), strict=True):
        rules.output(one, its_type)
    return result


def _of_whole(operands: Sequence[Tensor], results: Sequence[Tensor]) -> OpRule:
    """The rule of a function that nothing is known of: it needs all dims whole."""
    whole = [tuple(() for _ in range(x.ndim)) for x in operands]
    made = [tuple(() for _ in range(x.ndim)) for x in results]
    return OpRule("", (), tuple(whole), tuple(made), grad_linear=False)


def _bound(owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a registered function by name."""
    opdef, normalise = registry.CALLABLES[owner]
    given, words = normalise(args, dict(kwargs)) if normalise else (args, kwargs)
    return dict(registry.OPS[opdef].bind(given, words))


def _rule_of(
    owner: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> OpRule:
    """The rule of a call of a registered function.

    Rules tell dims of size 1 from others, and a piece may have one element of many. So the rule is
    that of a call in which each such piece has two.
    """
    opdef, _ = registry.find(owner)  # type: ignore[misc]
    pairs = [(name, map_leaves(arg, _at_least_two)) for name, arg in kwargs.items()]
    seen, words = map_leaves(args, _at_least_two), dict(pairs)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        results = tensors_in(function(*seen, **words))
    bound = _bound(owner, seen, words)
    op = call_of(opdef, bound, _values("x", operands_in(bound)))
    try:
        return instantiate(opdef, replace(op, results=_values("y", results)))
    except AnnotationError as error:
        raise Refusal(f"{opdef.name}: its annotation does not fit this call") from error


def _at_least_two(leaf: Any) -> Any:
    """A tensor with two elements along each dim that is cut into pieces of one."""
    if not isinstance(leaf, Tensor):
        return leaf
    ones = [
        bool(axes) and size == 1 for axes, size in zip(shard_axes(leaf), leaf.shape, strict=True)
    ]
    return leaf.detach().repeat([2 if one else 1 for one in ones])


def _values(letter: str, tensors: Sequence[Tensor]) -> tuple[IRValue, ...]:
    """Values of a graph that stand for tensors."""
    return tuple(
        IRValue(f"{letter}{number}", tuple(x.shape), x.dtype, x.requires_grad)
        for number, x in enumerate(tensors)
    )


def derived(rule: OpRule, operands: Sequence[Tensor]) -> tuple[Typed, ...]:
    """The types of the results of a call with this rule."""
    if not rule.grad_linear:
        _check_gradients(operands)
    labels = _labels(rule)
    added = set(rule.additive)
    main = [number for number in range(len(operands)) if number not in added]
    # Positions among those that are not added, of operands that may be summands together.
    linear_in = [
        tuple(main.index(number) for number in sorted(group - added))
        for group in rule.linear_sets
        if group - added
    ]
    found = []
    for term in rule.results:
        result = labels(term)
        terms = ",".join(labels(rule.operands[number]) for number in main)
        typed = einsum(f"{terms}->{result}", *(operands[n] for n in main), linear_in=linear_in)
        for number in sorted(added):
            equation = f"{result},{labels(rule.operands[number])}->{result}"
            typed = einsum(equation, typed, operands[number], linear_in=((0, 1),))
        found.append(typed)
    return tuple(found)


def _check_gradients(operands: Sequence[Tensor]) -> None:
    """Refuse gradients that are summands, where a backward need not be linear in them."""
    for x in operands:
        parts = [axis for axis, letter in local_types(x).items() if letter is R]
        if needs_gradient(x) and parts:
            raise Refusal(
                f"an operand is G over {', '.join(parts)}, and nobody has said that the backward "
                "of this function may get a summand of a gradient"
            )


def _labels(rule: OpRule) -> Callable[[TensorRefs], str]:
    """The letters in an einsum of an operand or a result, from its dims.

    Dims of the same factors have one letter. A dim has none if its outermost factor must be whole,
    or if a factor of it is also in a dim of other factors: an einsum cannot say where it goes.
    """
    dims_with: dict[str, set[DimRefs]] = defaultdict(set)
    for dim in (dim for term in (*rule.operands, *rule.results) for dim in term):
        for ref in dim:
            dims_with[ref.factor].add(dim)
    letters: dict[DimRefs, str] = {}

    def letter(dim: DimRefs) -> str:
        plain = all(len(dims_with[ref.factor]) == 1 for ref in dim)
        if not dim or rule.frozen(dim[0].factor) or not plain:
            return "_"
        return letters.setdefault(dim, string.ascii_letters[len(letters)])

    return lambda term: "".join(map(letter, term))
