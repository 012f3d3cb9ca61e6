"""Digests of functions, and of what the operators of a user's own bring to a program.

Two digests answer two questions. :func:`operator_digests` covers everything that ``register_op``
was told and that decides a plan or a generated file; it is part of what a compile is recognised by.
:func:`function_digest` covers what a function computes: its code, and that of the functions it
calls, as far as they are no library's.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.serialize import tensor_digest
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.annotation import instantiate
from shardwright.compiler.ops.register import UserOpDef
from shardwright.compiler.ops.render import call_source
from shardwright.compiler.ops.rule import OpRule

_LIBRARIES = {"torch", "numpy", "shardwright", *sys.stdlib_module_names}
"""Packages whose functions are known by name: other versions of them change other parts of the
digests.
"""

_WRAPPERS = (functools.partial, CustomOpDef, MethodType, staticmethod, classmethod, property)

_MOST_OBJECTS = 2000
"""How many functions and values a digest looks at: a bound for functions that reach into large
packages.
"""


def operator_digests(graph: IRGraph) -> dict[str, str]:
    """A digest of what each operator of ``register_op`` in a graph brings to a program: the rules
    of its calls, functions that fit arguments to a rank, and how calls are written.

    Raises :class:`AnnotationError` for an annotation that does not fit a call.
    """
    parts: dict[str, dict[str, None]] = {}
    for op in (op for body in graph.bodies for op in body.ops):
        opdef = registry.get(op.target)
        if isinstance(opdef, UserOpDef):
            words = parts.setdefault(op.target, dict.fromkeys([_definition(opdef)]))
            words[rule_text(instantiate(opdef, op))] = None
            words[call_source(op, lambda value: value.name, to_python)] = None
    return {target: digest_of(sorted(words)) for target, words in sorted(parts.items())}


def _definition(opdef: UserOpDef) -> str:
    emit = function_digest(opdef.emit) if opdef.emit is not None else None
    return repr((opdef.code, opdef.signature, opdef.imports, opdef.positional, opdef.proof, emit))


def rule_text(rule: OpRule) -> str:
    """A rule as text: equal for rules from which the same programs follow."""
    # Functions count by what they compute, not by where they stand.
    form = rule.parallel
    parallel = form and (
        form.target,
        sorted(form.factors.items()),
        sorted(form.keywords.items()),
        form.local_args and function_digest(form.local_args),
    )
    return repr(
        # Sets have no order of their own.
        (
            *(rule.annotation, rule.factors, rule.operands, rule.results, rule.additive),
            *(
                [sorted(positions) for positions in rule.linear_sets],
                rule.grad_linear,
                rule.random,
                rule.updates,
            ),
            *(rule.nonempty, rule.localise and function_digest(rule.localise), parallel),
            *(rule.exchanges, rule.densities),
        )
    )


def digest_of(words: Iterable[str]) -> str:
    """One digest of several texts."""
    content = hashlib.sha256()
    for word in words:
        content.update(f"{len(word)}:{word}".encode())
    return content.hexdigest()


def function_digest(function: Any) -> str:
    """The digest of what a function computes: code, defaults, what it holds, and the functions and
    constants it names.

    Libraries' functions count by name, objects by their class. Equal in every process for equal
    sources.
    """
    return digest_of(_Reader().read(function))


class _Reader:
    """Reads functions and all they lead to, each once."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # kept alive, so that no other object gets its identity

    def read(self, value: Any) -> list[str]:
        """Words that say what a value is."""
        if isinstance(value, type(None) | bool | int | float | complex | str | bytes | torch.dtype):
            return [repr(value)]
        if id(value) in self._seen or len(self._seen) >= _MOST_OBJECTS:
            return ["seen"]
        # Noted before its parts are read, as functions may refer to themselves.
        self._seen[id(value)] = value
        if isinstance(value, tuple | list):
            return ["sequence", *(word for item in value for word in self.read(item))]
        if isinstance(value, set | frozenset):
            # The order of a set differs from process to process.
            return ["set", *sorted("".join(self.read(item)) for item in value)]
        if isinstance(value, Mapping):
            words = ["mapping"]
            for key, item in value.items():
                words += [*self.read(key), *self.read(item)]
            return words
        if isinstance(value, torch.Tensor):
            return [tensor_digest(value)]
        if isinstance(value, CodeType):
            return self._code(value)
        # A library's version is a part of the request itself, so its functions need no reading.
        if _is_of_library(value) or isinstance(value, ModuleType):
            return [_name(value)]
        return [_name(value), *self._callable(value)]

    def _callable(self, value: Any) -> list[str]:
        if isinstance(value, functools.partial):
            return [
                word
                for part in (value.func, value.args, value.keywords)
                for word in self.read(part)
            ]
        if isinstance(value, MethodType):
            return self.read(value.__func__)
        if isinstance(value, staticmethod | classmethod):
            return self.read(value.__func__)
        if isinstance(value, property):
            return [word for part in (value.fget, value.fset) for word in self.read(part)]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, type):
            # A class is what it and its bases define; those of libraries change with the version of
            # these.
            words: list[str] = []
            for base in value.__mro__:
                if _is_of_library(base):
                    continue
                for name, part in vars(base).items():
                    if not _is_bookkeeping(name):
                        words += [name, *self.read(part)]
            return words
        if isinstance(value, CustomOpDef):
            parts = (
                value._init_fn,
                value._backward_fn,
                value._setup_context_fn,
                *value._backend_fns.values(),
            )
            return [word for part in parts for word in self.read(part)]
        # Other callables, such as builtins, have no source to read.
        script = getattr(value, "_torchdynamo_inline", None)  # a scripted or compiled function
        return self.read(script) if script is not None else []

    def _function(self, function: FunctionType) -> list[str]:
        # What a function computes with: its code, defaults, captured variables and globals.
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        parts: list[Any] = [
            function.__code__,
            function.__defaults__,
            function.__kwdefaults__,
            cells,
        ]
        names = sorted(set(_names(function.__code__)))
        for name in names:
            if name not in function.__globals__:
                continue
            found = function.__globals__[name]
            parts.append(found)
            # ``helpers.scale``: of a module of the user's, the attributes that this code may mean.
            if isinstance(found, ModuleType) and found.__name__.partition(".")[0] not in _LIBRARIES:
                parts += [vars(found)[attribute] for attribute in names if attribute in vars(found)]
        return [word for part in parts for word in self.read(part)]

    def _code(self, code: CodeType) -> list[str]:
        """Line numbers do not count."""
        words = [code.co_code.hex(), *code.co_names, *code.co_varnames, *code.co_freevars]
        return [*words, *(word for constant in code.co_consts for word in self.read(constant))]


def _names(code: CodeType) -> list[str]:
    """The names that code reads from outside, those of functions within it included."""
    found = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found += _names(constant)
    return found


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that is not bound yet
        return False


def _is_of_library(value: Any) -> bool:
    """Whether a function, a class, or the class of an object, is a library's. What wraps a function
    is looked into.
    """
    if isinstance(value, _WRAPPERS) or hasattr(value, "_torchdynamo_inline"):
        return False
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).partition(".")[0] in _LIBRARIES


def _is_bookkeeping(name: str) -> bool:
    """Whether Python sets this attribute of classes itself."""
    own = ("__module__", "__dict__", "__weakref__", "__doc__", "__qualname__")
    return name in (*own, "__firstlineno__", "__static_attributes__")


def _name(value: Any) -> str:
    """An import path, of a value's class where it has none; no address."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"
