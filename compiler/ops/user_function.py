"""What is known of a function that a user registers: its kind, its import path, its signature.

It may be a plain Python function, a function of torch, an ``autograd.Function``, or a custom
operator (``torch.library.custom_op``, ``torch.ops.x.y``). Each of these tells its name and its
parameters in another way:

    my_project.scaled       import path "my_project.scaled", signature "x, scale, eps=1e-06"
    torch.ops.my.scaled     import path "torch.ops.my.scaled", the signature of its schema
"""

from __future__ import annotations

import ast
import inspect
import sys
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch.overrides import get_testing_overrides, resolve_name

from shardwright.compiler.ops import registry
from shardwright.runtime.errors import AnnotationError


def is_native(function: Any) -> bool:
    """Whether it is a function of torch, which dispatches itself."""
    # Functions of C have no module that says so, and dispatch themselves as well.
    of_torch = str(getattr(_python(function), "__module__", "")).startswith("torch.")
    return of_torch or isinstance(function, BuiltinFunctionType | MethodDescriptorType)


def is_function_class(function: Any) -> bool:
    return isinstance(function, type) and issubclass(function, torch.autograd.Function)


def is_custom_op(function: Any) -> bool:
    return isinstance(function, CustomOpDef | torch._ops.OpOverload | torch._ops.OpOverloadPacket)


def overloads(function: Any) -> list[Any]:
    """The other callables that a custom operator is known by."""
    if isinstance(function, CustomOpDef):
        return [function._opoverload, function._opoverload.overloadpacket]
    if isinstance(function, torch._ops.OpOverloadPacket):
        return [getattr(function, overload) for overload in function.overloads()]  # type: ignore[no-untyped-call]
    return []


def _python(function: Any) -> Any:
    """The Python function that a class, a custom operator or a scripted function was made from."""
    if isinstance(function, CustomOpDef):
        return function._init_fn
    return getattr(function, "_torchdynamo_inline", function)


def import_path(function: Any) -> str:
    """Where generated code finds the function."""
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"torch.ops.{str(function).replace('::', '.')}"
    if is_native(function) and (name := resolve_name(function)):
        return str(name)
    python = _python(function)
    module, qualname = getattr(python, "__module__", None), getattr(python, "__qualname__", None)
    if not module or not qualname or "<" in qualname:
        raise AnnotationError(
            f"register_op: generated code cannot import {qualname or function}",
            why="it has no name at the top level of a module",
            hint="move it to the top level of a module",
        )
    return f"{module}.{qualname}"


def module_of(path: str) -> str:
    """The module part of an import path; the loaded modules tell how long it is."""
    parts = path.split(".")
    return next(
        ".".join(parts[:n])
        for n in range(len(parts) - 1, 0, -1)
        if ".".join(parts[:n]) in sys.modules
    )


def signature_of(function: Any) -> tuple[str, registry.Normalise | None]:
    """The parameters as ``parse_signature`` reads them.

    Where a default has no literal, or arguments must be positional, no defaults are written; the
    second result fills them in.
    """
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        schema = (
            function if isinstance(function, torch._ops.OpOverload) else function.default
        )._schema
        return ", ".join(argument.name for argument in schema.arguments), None
    signature = _inspected(function)
    parameters = list(signature.parameters.values())
    if (
        is_function_class(function)
        and function.setup_context is torch.autograd.Function.setup_context
    ):
        # The first parameter is ``ctx``.
        parameters = parameters[1:]  # ctx
        signature = signature.replace(parameters=parameters)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        raise AnnotationError(
            f"register_op: {getattr(function, '__qualname__', function)} takes "
            f"**{parameters[-1].name}",
            why="the arguments of an operator are known by name",
            hint="spell out the parameters",
        )
    complete = is_function_class(function) or any(
        parameter.kind is inspect.Parameter.POSITIONAL_ONLY or not _is_literal(parameter.default)
        for parameter in parameters
    )
    # Annotations may hold commas and brackets, which the parser of signatures does not read.
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    if not complete:
        return str(inspect.Signature(plain))[1:-1], None
    bare = [p.replace(default=inspect.Parameter.empty, kind=_named(p.kind)) for p in plain]

    # Called with the arguments of the model: it makes them complete.
    def filled(
        args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return (), dict(bound.arguments)

    return str(inspect.Signature(bare))[1:-1], filled


def _inspected(function: Any) -> inspect.Signature:
    python = function.forward if is_function_class(function) else _python(function)
    try:
        return inspect.signature(
            get_testing_overrides().get(python, python) if is_native(function) else python
        )
    except ValueError:
        raise AnnotationError(
            f"register_op: the parameters of {import_path(function)} are not known",
            hint="call it from a Python function, and register that",
        ) from None


def _named(kind: Any) -> Any:
    return (
        inspect.Parameter.POSITIONAL_OR_KEYWORD
        if kind is inspect.Parameter.POSITIONAL_ONLY
        else kind
    )


def _is_literal(default: Any) -> bool:
    if default is inspect.Parameter.empty:
        return True
    try:
        return bool(ast.literal_eval(repr(default)) == default)
    except (ValueError, SyntaxError):
        return False
