"""What the compiler writes into files: the kinds of statements, and the names that these may use.

    up = F.linear(x, self.up.weight).view(8, local_heads, 4)

uses the operators ``F.linear`` and ``.view`` of our tables, a declared weight, and a variable of
the file. Files are held to these lists by :mod:`.by_rank`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from operator import attrgetter
from types import BuiltinFunctionType, MethodDescriptorType

import torch

from shardwright.compiler.codegen.file_names import BUILTINS
from shardwright.compiler.ops import originals, registry
from shardwright.runtime.pipeline.module import PipelineModule

KINDS = (
    # statements
    *(ast.Module, ast.ClassDef, ast.FunctionDef, ast.arguments, ast.arg, ast.Import),
    *(ast.ImportFrom, ast.alias, ast.Assign, ast.Expr, ast.Return, ast.Delete, ast.Pass),
    *(ast.If, ast.For, ast.With, ast.withitem),
    # expressions
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Constant, ast.Call, ast.keyword),
    *(ast.Starred, ast.Tuple, ast.List, ast.Dict, ast.JoinedStr, ast.FormattedValue, ast.IfExp),
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.DictComp),
    *(ast.comprehension, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop),
)
"""What the parts of a file may be."""

IN_WORDS: Mapping[type[ast.AST], str] = {
    ast.NamedExpr: "assignment inside an expression (`:=`)",
    ast.AugAssign: "assignment that changes a value in place (`+=` and the like)",
    ast.AnnAssign: "assignment with an annotation",
    ast.Try: "`try`",
    ast.TryStar: "`try` with `except*`",
    ast.AsyncFunctionDef: "`async def`",
    ast.AsyncFor: "`async for`",
    ast.AsyncWith: "`async with`",
    ast.YieldFrom: "`yield from`",
    ast.ListComp: "list made by a loop (`[... for ...]`)",
    ast.SetComp: "set made by a loop (`{... for ...}`)",
    ast.GeneratorExp: "generator (`(... for ...)`)",
    ast.Set: "set (`{...}`)",
}
"""What other kinds are called. Those that are not listed have a keyword of their own."""

CONTEXTS = ("torch.no_grad()", "torch.autocast(")
"""How what a ``with`` enters may begin."""

CONDITIONS = frozenset({"self.training", "self.trains"})
"""What a condition may ask: it is the same on all ranks."""

OF_SELF = frozenset(
    {
        *("parameter", "buffer", "constant", "random_function", "weights", "update_buffer"),
        *("axis", "device", "device.type", "training", "trains", "check_inputs", "require"),
        *("left_out", "gathered", "gathered_together", "in_pieces", "recompute", "random", "draw"),
    }
)
"""What a file may read of its module, beside weights and methods of the class."""

MODULES = frozenset({"ParallelModule", "PipelineModule"})
"""What the class of a file may be made from."""

METHODS = frozenset({"declare", "forward", "output", "output_shapes", "layouts"})
"""The methods of a module that a file may define anew."""

SIZES = frozenset({"local_size", "holds"})
"""What an axis is asked for to know sizes of pieces. They may differ between ranks."""

OF_AN_AXIS = frozenset({"size", "offset", "place_of", *SIZES})
"""What an axis may be asked for."""

ROWS_FROM = frozenset({"embedding", "cross_entropy", "nll_loss", "linear_cross_entropy"})
"""The functions of ours with an argument ``start``: which row the first one of a piece is."""

TAKE_SIZES: Mapping[str, frozenset[int | str]] = {
    **dict.fromkeys(("view", "reshape", "expand", "repeat", "Cut", "Told"), frozenset()),
    **dict.fromkeys(OF_AN_AXIS, frozenset()),
    **dict.fromkeys(("empty", "zeros", "ones", "full"), frozenset({0, "size"})),
    **dict.fromkeys(("dispatch", "combine"), frozenset({"token_dims"})),
    **dict.fromkeys((f"conv{n}d" for n in (1, 2, 3)), frozenset({"groups"})),
    **dict.fromkeys((f"conv_transpose{n}d" for n in (1, 2, 3)), frozenset({"groups"})),
    "unflatten": frozenset({1, "sizes"}),
    "repeat_interleave": frozenset({0, "repeats"}),
    "split": frozenset({0, "split_size_or_sections"}),
    "tensor_split": frozenset({0, "indices_or_sections"}),
    "narrow": frozenset({1, 2, "start", "length"}),
    "stacked": frozenset({"shape"}),
    "group_norm": frozenset({1, "num_groups"}),
    "affine_grid": frozenset({1, "size"}),
}
"""The functions that may be told the size of a piece, by the last part of their names, with the
places and names of these arguments. Without any it may be each of them.
"""

NUMBERS = (*(f"{name}(" for name in sorted(BUILTINS)), "math.")
"""How calls begin that make a number of numbers."""

TELL_THE_RANK = frozenset(
    {"get_rank", "get_group_rank", "get_node_local_rank", "current_world", "environ", "getenv"}
)
"""The names of other objects that tell the rank, wherever they come from."""

IMPORTS = frozenset({"import torch", "import torch.nn.functional as F", "import math"})
"""The modules that a file may import, beside what the model brings along."""

RUNTIME = frozenset(
    {
        *("layout", "told", "adapters", "in_pieces", "structure", "started", "ops"),
        *("module.inputs", "module.parallel_module", "pipeline.module", "pipeline.segment"),
    }
)
"""The modules of ``shardwright.runtime`` that a file may import from."""

OURS = frozenset({"torch", "F", "math", "shardwright"})
"""The names of modules that a model does not bring along."""


METHOD = "torch.Tensor."
"""How the names of methods of tensors begin."""


@cache
def operators() -> frozenset[str]:
    """The operators of our tables under all their names in torch: ``torch.nn.functional.gelu``,
    ``torch.Tensor.view``, and both ``torch.ones`` and ``torch.ones_like``. Those that change a
    tensor in place are left out, as its other names would mean the changed one, too.
    """
    codes = {full_name(opdef.code) for opdef in registry.OPS.values()}
    names = {
        f"{originals.TITLES[owner]}.{name}"
        for places in registry.NAMES.values()
        for owner, name in places
    }
    found = {code for code in codes if code.startswith("torch.")} | names
    return frozenset(name for name in found if not name.endswith("_"))


@cache
def makes_tensors(name: str) -> bool:
    """Whether a function of torch in C++ takes tensors, changes none, and returns tensors only, as
    its schemas say: ``torch.kron``, but not ``torch.Tensor.item``. The compiler has each rank
    compute it on whole tensors, if no table has it.
    """
    with suppress(AttributeError):
        function = attrgetter(name.removeprefix("torch."))(torch)
        operator = getattr(torch.ops.aten, function.__name__)
        if isinstance(function, BuiltinFunctionType | MethodDescriptorType):
            schemas = [getattr(operator, overload)._schema for overload in operator.overloads()]
            # Those with ``out=`` are for calls with that argument.
            plain = [s for s in schemas if not any(given.is_out for given in s.arguments)]
            return bool(plain) and all(map(_makes_tensors, plain))
    return False


def _makes_tensors(schema: torch.FunctionSchema) -> bool:
    given = [argument for argument in schema.arguments if "Tensor" in str(argument.type)]
    returned = ["Tensor" in str(result.type) for result in schema.returns]
    return bool(given and returned) and all(returned) and not schema.is_mutable


def full_name(code: str) -> str:
    """The name of a function in torch, which a file calls ``F.gelu``, or ``.view`` of a tensor."""
    if code.startswith("F."):
        return f"torch.nn.functional.{code.removeprefix('F.')}"
    return f"{METHOD}{code[1:]}" if code.startswith(".") else code


@cache
def torch_names() -> frozenset[str]:
    """What else of torch a file may name: dtypes and the like."""
    literals = torch.dtype | torch.layout | torch.memory_format
    found = {name for name, value in vars(torch).items() if isinstance(value, literals)}
    return frozenset(f"torch.{name}" for name in {*found, "device", "no_grad", "autocast"})


def is_in_place(name: str) -> bool:
    """Whether an operator with this name changes a tensor: ``add_``."""
    return name.endswith("_") and not name.endswith("__")


def is_taken(name: str) -> bool:
    """Whether a module has a method or a property of this name, which a file would replace."""
    found = getattr(PipelineModule, name, None)
    return name not in METHODS and (callable(found) or isinstance(found, property))
