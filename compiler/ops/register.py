"""``register_op``: the rule of a function of your own.

A registered function is one operator: tracing does not look inside, and the annotation says how it
may be split.

    @shardwright.register_op("b s h^, h^ -> b s h^")
    def scaled(x: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale

Check an annotation before you rely on it: ``prove`` runs every split it allows.

    print(prove(scaled, (torch.randn(4, 6, 8).double(), torch.randn(8).double())))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import handle_torch_function, has_torch_function

from shardwright.compiler.ir.op import IROp, leaves
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.annotation import parse_rule
from shardwright.compiler.ops.grammar import parse
from shardwright.compiler.ops.opdef import OpDef, parse_signature
from shardwright.compiler.ops.rule import FactorKind, Localise, OpRule, ParallelForm, TensorRefs
from shardwright.compiler.ops.rule_builder import linear_sets
from shardwright.compiler.ops.terms import indices
from shardwright.compiler.ops.user_function import (
    import_path,
    is_custom_op,
    is_function_class,
    is_native,
    module_of,
    overloads,
    signature_of,
)
from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import AnnotationError, ConfigError, did_you_mean

Function = TypeVar("Function", bound=Callable[..., Any])

Emit = Callable[[Mapping[str, str]], str]
"""Writes a call as Python source from the source of its arguments by name."""

InputGen = Callable[[IROp], Sequence[Tensor]]
"""Makes the tensors of a call: for profiling it, and for the proof of its rule."""

Proof = Literal["compile", "nobody", "tests"]
"""Who proves the rules of an operator: every compile; nobody, as the user asks; the tests of this
package.
"""


@dataclass(frozen=True)
class UserOpDef(OpDef):
    """An operator that came through :func:`register_op`.

    ``positional``: it takes no arguments by keyword. ``emit`` writes its calls, ``input_gen`` makes
    inputs to try them with.
    ``proof``: who proves the rules of its calls. ``function``: what was registered.
    """

    positional: bool = False
    emit: Emit | None = None
    input_gen: InputGen | None = None
    proof: Proof = "compile"
    function: Any = None

    def write(self, args: Mapping[str, str | tuple[str, ...]], by_keyword: Any = ()) -> str:
        """A call as Python source, by the user's own ``emit`` where there is one."""
        if self.emit is not None:
            return self.emit(
                {
                    name: text if isinstance(text, str) else ", ".join(text)
                    for name, text in args.items()
                }
            )
        return super().write(args, () if self.positional else by_keyword)


@checked
def register_op(
    annotation: str | Callable[..., str | OpRule],
    name: str | None = None,
    code_impl_pattern: str | None = None,
    *,
    linear: bool | Sequence[str | Sequence[str]] = False,
    additive: Sequence[str] = (),
    grad_linear: bool | None = None,
    localise: Localise | None = None,
    parallel: ParallelForm | None = None,
    nonempty: bool = False,
    emit: Emit | None = None,
    imports: Sequence[str] = (),
    input_gen: InputGen | None = None,
    fake: Callable[..., Any] | None = None,
    prove: bool = True,
) -> Callable[[Function], Function]:
    """Make a function one operator, with a rule.

    Works on Python functions, ``torch.autograd.Function`` classes (their ``apply``), compiled and
    scripted functions, custom operators, and functions of torch that have no rule. Use what it
    returns in the model: for a function of somebody else's module, ``theirs.f =
    register_op(...)(theirs.f)``.

    ``annotation``: the dims of arguments and results, see ``annotation.py``. Terms stand for the
    parameters in order, ``?`` for those that are no tensors (at the end they may be left out). Or a
    function that gets the arguments of a call, with an ``IRValue`` (``.shape``, ``.dtype``) in the
    place of every tensor, and returns the annotation.

    ``name``: the operator's name in graphs and plans; by default its import path.
    ``code_impl_pattern``: ``"import"``, the only way a generated file gets at a function. ``emit``
    writes the call instead, from the source of its arguments; ``imports`` are the import statements
    that source needs.

    ``linear``: the parameters in which the function is linear when all others are fixed, each by
    itself or, in a tuple, several together; ``True``: all tensors together. Partial sums may then
    pass through. ``additive``: parameters that are simply added to the result, like a bias. Both
    matter only for communication, and both must be true.

    ``grad_linear``: the backward is linear in the incoming gradient and made of derivatives. True
    for functions made of torch's operators; an autograd Function or a custom operator must declare
    it, without it its replicated gradients stay whole.

    ``localise(op, rule, local)``: arguments that differ on a rank, such as sizes. ``parallel``: a
    function that computes the operator when further factors are split, with communication of its
    own. ``nonempty``: the function refuses empty tensors, so that no dim may be split among more
    ranks than its size. ``fake``: called instead while tracing, where tensors have shapes but no
    values; returns empty tensors like the results.

    A compile proves the annotation: it runs every split that the annotation allows on small random
    tensors, and compares results and gradients with the unsplit call. ``input_gen(op)``: the
    tensors for that, and for profiling, where random ones do not do; ``op.operands`` have the
    shapes to make. ``prove=False``: take the annotation on trust, which generated files say.

    Raises :class:`AnnotationError` for a bad annotation, or a function generated code cannot
    import; :class:`ConfigError` for a ``code_impl_pattern`` other than ``"import"``.
    """
    if code_impl_pattern not in (None, "import"):
        raise ConfigError(
            f"register_op: code_impl_pattern={code_impl_pattern!r}",
            why="generated files import registered functions, so that there is one definition of "
            "each",
            hint="leave it out and keep the function at the top level of a module, or pass emit=",
        )
    # A wrong annotation is refused here, at the decorator.
    if isinstance(annotation, str):
        parse(annotation)

    def register(function: Function) -> Function:
        # The name under which a generated file imports it.
        path = import_path(function)
        _check_free(function, name or path)
        registered = _dispatched(function, fake)
        signature, normalise = signature_of(function)
        is_torch_function = is_function_class(function)
        derivative = (
            not (is_torch_function or is_custom_op(function))
            if grad_linear is None
            else grad_linear
        )
        # From here on it is an operator like those of the tables.
        opdef = UserOpDef(
            name or path,
            signature,
            f"{path}.apply" if is_torch_function else path,
            _rule_maker(
                annotation, linear, tuple(additive), derivative, localise, parallel, nonempty
            ),
            {parameter.name: parameter.name for parameter in parse_signature(signature)},
            (f"import {module_of(path)}",) if emit is None else tuple(imports),
            is_torch_function,
            emit,
            input_gen,
            "compile" if prove else "nobody",
            function,
        )
        registry.OPS[opdef.name] = opdef
        # A model may call it by any of these: a custom operator dispatches as its overload.
        for known in (registered, function, *overloads(function)):
            registry.CALLABLES[known] = (opdef.name, normalise)
        return registered

    return register


def proved_by_tests(name: str) -> None:
    """Take an operator's rule as proved: the tests of this package have done it."""
    opdef = registry.OPS[name]
    assert isinstance(opdef, UserOpDef), f"{name} did not come through register_op"
    registry.OPS[name] = replace(opdef, proof="tests")


def _check_free(function: Any, name: str) -> None:
    """Neither the function nor the name may belong to an operator of ours; registering one's own
    again replaces it.
    """
    found, named = registry.find(function), registry.get(name)
    if found is not None and not isinstance(found[0], UserOpDef):
        raise AnnotationError(
            f"register_op: {name} has a rule already, as the operator {found[0].name!r}"
        )
    if named is not None and not isinstance(named, UserOpDef):
        raise AnnotationError(
            f"register_op: there is an operator named {name!r} already", hint="pass another name="
        )


def _dispatched(function: Function, fake: Callable[..., Any] | None) -> Function:
    """The function as something torch's dispatch knows of, so that a trace sees the call and not
    what is in it.
    """
    if is_native(function) or is_function_class(function) or is_custom_op(function):
        return function

    @functools.wraps(function)
    def dispatched(*args: Any, **kwargs: Any) -> Any:
        tensors = tuple(
            leaf
            for arg in (*args, *kwargs.values())
            for leaf in leaves(arg)
            if isinstance(leaf, Tensor)
        )
        # A trace is a function mode, which torch asks about every function that hands itself over
        # here. The trace then records one call, and nothing of what the function does inside.
        if has_torch_function(tensors):
            return handle_torch_function(dispatched, tensors, *args, **kwargs)
        if fake is not None and any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return _differentiable(fake(*args, **kwargs), tensors)
        return function(*args, **kwargs)

    return dispatched  # type: ignore[return-value]


def _differentiable(result: Any, inputs: Sequence[Tensor]) -> Any:
    """What ``fake`` returned, requiring gradients as the real results would."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        for leaf in leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaf.requires_grad_()
    return result


def _rule_maker(
    annotation: str | Callable[..., str | OpRule],
    linear: bool | Sequence[str | Sequence[str]],
    additive: tuple[str, ...],
    grad_linear: bool,
    localise: Localise | None,
    parallel: ParallelForm | None,
    nonempty: bool,
) -> Callable[[IROp], OpRule]:
    def make(op: IROp) -> OpRule:
        opdef = registry.OPS[op.target]
        # The annotation may depend on the call.
        text = annotation if isinstance(annotation, str) else annotation(*_positional(opdef, op))
        if isinstance(text, OpRule):
            return text
        parameters = [parameter.name for parameter in opdef.parameters]
        rule = parse_rule(
            text, op, parameters=parameters, by_parameter=True, localise=localise, parallel=parallel
        )
        _check_sources(rule, op)
        joint: list[tuple[str, ...]] = []  # the sets of parameters in which the call is linear
        if linear is True:
            joint = [tuple(parameters)]
        elif linear is not False:
            joint = [_tuple(names) for names in linear]
        unknown = [name for names in (*joint, additive) for name in names if name not in parameters]
        if unknown:
            hint = did_you_mean(unknown[0], parameters)
            raise AnnotationError(
                f"register_op: {op.target} has no parameter {unknown[0]!r}", hint=hint
            )
        # Joint in all operands, or in the groups that the user has named.
        everything = (frozenset(range(len(op.operands))),) if op.operands else ()
        sets: tuple[frozenset[int], ...] = everything if linear is True else linear_sets(op, *joint)
        return replace(
            rule,
            linear_sets=sets,
            additive=indices(op, *additive),
            grad_linear=grad_linear,
            nonempty=nonempty,
        )

    return make


def _tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _positional(opdef: OpDef, op: IROp) -> list[Any]:
    """The arguments of a call in the order of the signature, defaults included."""
    values: list[Any] = []
    for parameter in opdef.parameters:
        value = op.arg(parameter.name, parameter.default)
        values += value if parameter.star else [value]
    return values


def _check_sources(rule: OpRule, op: IROp) -> None:
    """Refuse a factor that no operand has. It comes from an argument, which must then be told to
    shrink with it.
    """
    if rule.localise is not None:
        return

    def found(tensors: tuple[TensorRefs, ...]) -> set[str]:
        dims = (dim for tensor in tensors for dim in tensor)
        return {ref.factor for dim in dims for ref in dim}

    for factor in rule.factors:
        free = factor.kind is not FactorKind.FROZEN and (
            rule.parallel is None or factor.name not in rule.parallel.factors
        )
        # ``x -> n x`` with ``n`` from an argument: a rank with half of ``n`` would still make all
        # of it.
        if free and factor.name in found(rule.results) - found(rule.operands):
            raise AnnotationError(
                f"annotation of {op.target}: no argument has the dim {factor.name}",
                where=str(op.source) if op.source else None,
                why=rule.annotation,
                hint=f"mark it {factor.name}^, or pass localise= to shrink the argument its size "
                "comes from",
            )
