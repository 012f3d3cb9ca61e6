"""Checks one operator call by brute force: cut its operands by hand under every strategy, run every
rank's call, reassemble. Calls that communicate are left to the prover.

Results and the gradients of all operands must equal those of the whole call.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from shardwright.compiler.ir.op import AxisRef, IROp, leaves, map_leaves
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.annotation import instantiate
from shardwright.compiler.ops.localise import localise
from shardwright.compiler.ops.render import call_source, imports_of
from shardwright.compiler.ops.strategy import Assignment, layouts, strategies
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.runs import piece

Tensors = dict[str, torch.Tensor]


class Axis:
    """What generated code sees of one axis at one coordinate."""

    def __init__(self, size: int, index: int) -> None:
        self.size, self.index = size, index

    def local_size(self, count: int) -> int:
        return piece(count, self.size, self.index)[1]

    def offset(self, count: int) -> int:
        return piece(count, self.size, self.index)[0]


class Rank:
    """Stands for ``self`` in a call's source."""

    device = torch.device("cpu")
    training = True


def trace(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[IROp, Tensors, list[torch.Tensor]]:
    """The call as an operator with its rule, the tensors of its operands, and its results."""
    values: dict[int, IRValue] = {}
    tensors: Tensors = {}

    def value_of(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in values:
            values[id(leaf)] = IRValue(
                f"t{len(values)}", tuple(leaf.shape), leaf.dtype, leaf.requires_grad
            )
            tensors[values[id(leaf)].name] = leaf
        return values[id(leaf)]

    bound = [
        value_of(arg) if isinstance(arg, torch.Tensor) else keep_lists(arg, value_of)
        for arg in args
    ]
    named = {key: keep_lists(arg, value_of) for key, arg in kwargs.items()}
    found = registry.find(function)
    assert found is not None, f"{function} is not registered"
    opdef, normalise = found
    canonical = normalise(tuple(bound), named) if normalise else (tuple(bound), named)
    results = listed(function(*args, **kwargs))
    op = IROp(
        "op",
        opdef.name,
        opdef.bind(*canonical),
        tuple(
            IRValue(f"r{i}", tuple(result.shape), result.dtype) for i, result in enumerate(results)
        ),
    )
    op = replace(op, rule=instantiate(opdef, op))
    return op, tensors, results


def keep_lists(arg: Any, function: Callable[[Any], Any]) -> Any:
    """``map_leaves``, but lists stay lists, as in the arguments a trace sees."""
    if isinstance(arg, list):
        return [keep_lists(item, function) for item in arg]
    if isinstance(arg, tuple):
        return tuple(keep_lists(item, function) for item in arg)
    return map_leaves(arg, function)


def listed(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def run(
    op: IROp, tensors: Mapping[str, torch.Tensor], axes: Mapping[str, Axis] | None = None
) -> list[torch.Tensor]:
    """Execute the source of a call."""
    env: dict[str, Any] = {"torch": torch, "F": F, "self": Rank(), **(axes or {}), **tensors}
    for statement in imports_of(op):
        exec(statement, env)
    return listed(eval(call_source(op, lambda value: value.name, to_python), env))


def check(function: Callable[..., Any], *args: Any, **kwargs: Any) -> IROp:
    """Check every strategy of the call on small meshes; returns the operator for further
    questions.
    """
    op, tensors, expected = trace(function, *args, **kwargs)
    assert op.rule is not None
    for value, refs in zip(
        (*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True
    ):
        sizes = {factor.name: factor for factor in op.rule.factors}
        shape = tuple(
            product(
                sizes[ref.factor].size
                if ref.segment is None
                else sizes[ref.factor].segments[ref.segment]
                for ref in dim
            )
            for dim in refs
        )
        assert shape == value.shape, (
            f"{value} has shape {value.shape}, its factors {op.rule.annotation} give {shape}"
        )
    assert len(op.rule.operands) == len(op.operands)
    for result, reference in zip(run(op, tensors), expected, strict=True):
        assert result.dtype == reference.dtype
        torch.testing.assert_close(result, reference, rtol=0, atol=0, equal_nan=True)
    names = strategies(op.rule)
    for index, name in enumerate(names):
        for size in (2, 3):
            check_strategy(op, tensors, Mesh((("u", size),)), {"u": name})
        for other in (name, names[index - 1]):
            check_strategy(op, tensors, Mesh((("u", 2), ("v", 2))), {"u": name, "v": other})
    return op


def canonical(annotation: str) -> str:
    """The annotation with factors renamed in the order they appear, so that two can be compared."""
    names: dict[str, str] = {}
    return re.sub(
        r"[a-z]\d*", lambda match: names.setdefault(match.group(), f"f{len(names)}"), annotation
    )


def product(sizes: Iterator[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def check_strategy(op: IROp, tensors: Tensors, mesh: Mesh, assignment: Assignment) -> None:
    """Run every rank's call under one strategy per axis; compare results and gradients with the
    whole call.
    """
    assert op.rule is not None
    generator = torch.Generator().manual_seed(0)
    operand_layouts, result_layouts = layouts(op.rule, assignment, mesh)
    local_op = localise(op, op.rule, assignment, mesh)
    if any(isinstance(leaf, AxisRef) for _, arg in local_op.args for leaf in leaves(arg)):
        return
    # each operand position is a variable of its own: a value used twice has one layout per position
    order = iter(range(len(op.operands)))
    local_op = rename_operands(local_op, [f"p{i}" for i in order])
    wholes = [tensors[value.name].detach() for value in op.operands]
    wholes = [
        whole.requires_grad_(whole.is_floating_point() or whole.is_complex())
        for whole in map(torch.clone, wholes)
    ]
    whole_op = rename_operands(op, [f"p{i}" for i in range(len(op.operands))])
    expected = run(whole_op, {f"p{i}": whole for i, whole in enumerate(wholes)})
    weights = [
        torch.randn(r.shape, dtype=r.dtype, generator=generator) if r.requires_grad else None
        for r in expected
    ]
    expected_grads = gradients(expected, wholes, weights)

    where = f"{op.target}({op.rule.annotation}) under {dict(assignment)} on {mesh}"
    pieces = [
        scatter(w.detach(), layout.partial, layout, mesh, generator)
        for w, layout in zip(wholes, operand_layouts, strict=True)
    ]
    cotangents = [
        w if w is None else scatter(w, layout.grad_partial, layout, mesh, generator)
        for w, layout in zip(weights, result_layouts, strict=True)
    ]
    results: list[list[torch.Tensor]] = []
    grads: list[list[torch.Tensor | None]] = []
    for rank, coords in enumerate(mesh.all_coords()):
        local = [
            p[rank].clone().requires_grad_(w.requires_grad)
            for p, w in zip(pieces, wholes, strict=True)
        ]
        axes = {name: Axis(mesh.axis_size(name), coords[name]) for name in mesh.names}
        outputs = run(local_op, {f"p{i}": x for i, x in enumerate(local)}, axes)
        results.append([output.detach() for output in outputs])
        grads.append(gradients(outputs, local, [c if c is None else c[rank] for c in cotangents]))
    for i, (whole, layout) in enumerate(zip(expected, result_layouts, strict=True)):
        gathered = gather(
            [r[i] for r in results], layout.partial, layout, mesh, f"{where}: result {i}"
        )
        close(gathered, whole.detach(), f"{where}: result {i}")
    for i, (grad, layout) in enumerate(zip(expected_grads, operand_layouts, strict=True)):
        if grad is not None:
            local_grads = [
                torch.zeros_like(p) if g[i] is None else g[i]
                for g, p in zip(grads, pieces[i], strict=True)
            ]
            gathered = gather(
                local_grads, layout.grad_partial, layout, mesh, f"{where}: gradient {i}"
            )
            close(gathered, grad, f"{where}: gradient of operand {i}")


def rename_operands(op: IROp, names: list[str]) -> IROp:
    remaining = iter(names)
    return op.map_args(
        lambda arg: replace(arg, name=next(remaining)) if isinstance(arg, IRValue) else arg
    )


def gradients(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], weights: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    pairs = [
        (o, w) for o, w in zip(outputs, weights, strict=True) if w is not None and o.requires_grad
    ]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    found = iter(
        torch.autograd.grad([o for o, _ in pairs], wanted, [w for _, w in pairs], allow_unused=True)
    )
    return [next(found) if x.requires_grad else None for x in inputs]


def take(
    whole: torch.Tensor, layout: Layout, mesh: Mesh, coords: Mapping[str, int]
) -> tuple[torch.Tensor, ...]:
    """The index tensors of a rank's piece, one per dim."""
    return tuple(
        torch.cat(
            [torch.arange(a, b) for a, b in layout.runs(dim, mesh, coords)] or [torch.arange(0)]
        )
        for dim in range(whole.dim())
    )


def scatter(
    whole: torch.Tensor,
    summed: tuple[str, ...],
    layout: Layout,
    mesh: Mesh,
    generator: torch.Generator,
) -> list[torch.Tensor]:
    """Each rank's piece: cut as the layout says, random summands along the ``summed`` axes."""
    summands: dict[tuple[int, ...], torch.Tensor] = {}
    keys = list(itertools.product(*(range(mesh.axis_size(axis)) for axis in summed)))
    rest = whole.clone()
    for key in keys[1:]:
        random = torch.randn(whole.shape, dtype=torch.float64, generator=generator) * (
            3 if not whole.is_floating_point() else 1
        )
        summands[key] = random.to(whole.dtype)
        rest = rest - summands[key]
    summands[keys[0]] = rest
    pieces = []
    for coords in mesh.all_coords():
        part = summands[tuple(coords[axis] for axis in summed)]
        for dim, index in enumerate(take(whole, layout, mesh, coords)):
            part = part.index_select(dim, index)
        pieces.append(part)
    return pieces


def gather(
    pieces: list[Any], summed: tuple[str, ...], layout: Layout, mesh: Mesh, where: str
) -> torch.Tensor:
    """The whole tensor: cut axes put together, ``summed`` axes added, copies along all others
    compared.
    """
    whole = torch.zeros(layout.shape, dtype=pieces[0].dtype)
    copies = [axis for axis in mesh.names if axis not in layout.cut_axes and axis not in summed]
    for rank, coords in enumerate(mesh.all_coords()):
        assert pieces[rank].shape == layout.local_shape(mesh, coords), (
            f"{where}: {tuple(pieces[rank].shape)} at {coords}"
        )
        first = mesh.rank({**coords, **dict.fromkeys(copies, 0)})
        if first != rank:
            close(pieces[rank], pieces[first], f"{where}: copies differ")
            continue
        index = take(whole, layout, mesh, coords)
        if summed:
            whole[torch.meshgrid(*index, indexing="ij") if index else ()] += pieces[rank]
        else:
            whole[torch.meshgrid(*index, indexing="ij") if index else ()] = pieces[rank]
    return whole


def close(actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    exact = not (expected.is_floating_point() or expected.is_complex())
    tolerance = 0.0 if exact else 1e-11
    torch.testing.assert_close(
        actual,
        expected,
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
        msg=lambda text: f"{where}\n{text}",
    )


def title(function: Callable[..., Any]) -> str:
    """A callable of torch in words without addresses: the processes that share the tests must agree
    on their names.
    """
    if type(function).__name__ == "method-wrapper":  # the getter of a property such as Tensor.T
        return f"property {function.__self__.__name__}"  # type: ignore[attr-defined]
    return re.sub(r" at 0x[0-9a-f]+", "", repr(function))
