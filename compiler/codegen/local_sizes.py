"""Sizes of a rank's pieces by the dim and the axis that they come from: ``4 * local_heads``, not
``8``.

Programs hold numbers wherever a dim is cut evenly, as the cost model counts with them. A reader of
the file should see why a view has 2 heads and not 4: so the calls are written with expressions that
have the same values. A method names them once::

    local_heads = tp.local_size(4)
    ...
    qkv_1 = qkv.view(4, 8, 3, local_heads, 4)  # [batch, seq, qkv, heads/tp, head_dim]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import sympy

from shardwright.compiler.ir.dims import ModelDims
from shardwright.compiler.ir.identifier import identifier
from shardwright.compiler.ir.op import Arg, IROp, leaves
from shardwright.compiler.ir.size import LocalSize, Size, simplify
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.localise import local_sizes
from shardwright.compiler.ops.strategy import factor_axes
from shardwright.compiler.plan.program import Compute
from shardwright.runtime.layout import Mesh


def spelled(instruction: Compute, mesh: Mesh) -> IROp:
    """The local call with the sizes of pieces as expressions. Arguments that are otherwise not the
    same stay numbers.
    """
    op, original = instruction.op, instruction.original
    rule, axes = original.rule, factor_axes(instruction.assignment, mesh)
    if not axes or rule is None or rule.localise is None:
        return op
    sizes = local_sizes(rule, axes, mesh, spelled=True)
    # The rule's own function makes the local call of expressions now, where lowering gave it
    # numbers.
    made = rule.localise(original, rule, sizes)
    found = {name: _once(arg, op.arg(name)) for name, arg in made.items() if op.has_arg(name)}
    return op.with_args(
        **{name: arg for name, arg in found.items() if _same(arg, op.arg(name), mesh)}
    )


def size_names(
    instruction: Compute, mesh: Mesh, dims: ModelDims | None, loops: Collection[str] = ()
) -> dict[LocalSize, str]:
    """What to call the sizes of the pieces of an operator's dims, as far as the dims have names.
    Those along ``loops`` change while a method runs, so no variable holds them.
    """
    op, rule = instruction.original, instruction.original.rule
    axes = {
        factor: cut
        for factor, cut in factor_axes(instruction.assignment, mesh).items()
        if not any(axis in loops for axis in cut)
    }
    if dims is None or rule is None or not axes:
        return {}
    names = {}
    for factor, segments in local_sizes(rule, axes, mesh, spelled=True).segments.items():
        dim = dims.of_factor(op.name, factor)
        if (
            factor in axes
            and dim is not None
            # A dim that nothing names is called ``dim3``: a variable of that name would explain
            # nothing.
            and not dim.name.startswith("dim")
            and len(segments) == 1
        ):
            names[segments[0]] = f"local_{identifier(dim.name)}"
    return {size: name for size, name in names.items() if isinstance(size, LocalSize)}


def renamed(arg: Any, variables: Mapping[LocalSize, str]) -> Any:
    """A leaf of an argument with variables in the place of sizes."""
    if not isinstance(arg, sympy.Expr):
        return arg
    return arg.xreplace({size: sympy.Symbol(name) for size, name in variables.items()})


def sizes_in(op: IROp) -> set[LocalSize]:
    """The sizes of pieces that the arguments of a call speak of."""
    found = (leaf for _, arg in op.args for leaf in leaves(arg) if isinstance(leaf, sympy.Expr))
    return {size for leaf in found for size in leaf.atoms(LocalSize)}


def _once(spelled_arg: Arg, arg: Arg) -> Arg:
    """``8 * local_heads`` for three times that, where the program has one number for equal pieces:
    ``split(32)``. As expressions sizes may be 0, so the rule says each of them.
    """
    if isinstance(arg, int) and isinstance(spelled_arg, tuple) and len(set(spelled_arg)) == 1:
        return spelled_arg[0]
    return spelled_arg


def _same(spelled_arg: Arg, arg: Arg, mesh: Mesh) -> bool:
    """Whether an argument without tensors is another one, spelled out."""
    pairs = list(leaves(spelled_arg)), list(leaves(arg))
    # Sizes are spelled where every leaf comes to the number in the program. If one does not, the
    # rule chose another form of the call for numbers, and that form must stay.
    if len(pairs[0]) != len(pairs[1]) or any(isinstance(leaf, IRValue) for leaf in pairs[0]):
        return False
    return all(_number(one, mesh) == other for one, other in zip(*pairs, strict=True))


def _number(leaf: Arg, mesh: Mesh) -> Arg:
    """A size with a number for every piece that is the same on all ranks, as programs have it."""
    if not isinstance(leaf, sympy.Expr):
        return leaf

    def piece(size: Size, axis: sympy.Symbol) -> Size:
        num_pieces = mesh.axis_size(axis.name)
        size = simplify(size)
        return (
            # Even pieces: 64 over 4 ranks is 16 everywhere. Else each rank asks for its own size.
            size // num_pieces
            if isinstance(size, int) and size % num_pieces == 0
            else LocalSize(size, axis)
        )

    return simplify(leaf.replace(LocalSize, piece))
