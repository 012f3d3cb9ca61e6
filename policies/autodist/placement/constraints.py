"""What a user may fix before the search: strategies of operators or modules, dims that an axis must
leave alone, storage.

A constraint that no operator, dim or tensor answers to is refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardwright.compiler.ir.dims import ModelDims
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.strategy import allowed, split_factor, strategies
from shardwright.compiler.plan.check import check_layout, suggestion
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.placement.strategies import Allowed
from shardwright.runtime.errors import PlanError, did_you_mean
from shardwright.runtime.layout import Layout, Mesh


@dataclass(frozen=True)
class Constraints:
    """``pin``: an operator, or a module path with everything below it, to what it does along an
    axis: ``R``, ``G``, ``linear:<i>``, ``split:<factor>``, or the name of a dim (``heads``), which
    holds for the operators that have it. ``*`` in a path stands for any one name; what says more of
    an operator's path counts, and a path without ``*`` before one with it.
    ``forbid``: a dim's name to the axes that must not cut it. ``stored``: how a parameter or buffer
    is held, by FQN.
    """

    pin: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    forbid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stored: Mapping[str, Layout | str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.pin or self.forbid or self.stored)

    def stored_layout(self, fqn: str | None) -> Layout | None:
        """How a parameter or buffer must be held, if anything is said of it."""
        found = self.stored.get(fqn or "")
        return Layout.parse(found) if isinstance(found, str) else found


def allowed_strategies(graph: IRGraph, constraints: Constraints, mesh: Mesh) -> dict[str, Allowed]:
    """Operator name to what its constraints leave it; operators that are free are left out.

    Raises:
        PlanError: a constraint names something that the graph or the mesh does not have, or leaves
            an operator nothing.
    """
    _check(graph, constraints, mesh)
    found: dict[str, Allowed] = {}
    for body in graph.bodies:
        assert body.dims is not None
        for op in body.ops:
            only = _of_op(op, body.dims, constraints, mesh)
            if only:
                found[op.name] = only
    return found


def constrained(plan: Plan, graph: IRGraph, constraints: Constraints) -> Plan | None:
    """A plan of the whole model with tensors held as the constraints say; None if an operator does
    what they do not leave it.

    Raises what :func:`allowed_strategies` raises.
    """
    # Strategies that the constraints leave, of the operators that they say anything of.
    for name, only in (
        allowed_strategies(graph, constraints, plan.mesh) if constraints else {}
    ).items():
        if any(
            plan.strategies.get(name, {}).get(axis, "R") not in left for axis, left in only.items()
        ):
            return None
    # How tensors are stored may be said of any plan: lowering gathers or cuts where an operator
    # wants something else.
    held = {
        fqn: layout
        for fqn in constraints.stored
        if (layout := constraints.stored_layout(fqn)) is not None
    }
    return replace(plan, stored={**plan.stored, **held}) if held else plan


def _of_op(
    op: IROp, dims: ModelDims, constraints: Constraints, mesh: Mesh
) -> dict[str, frozenset[str]]:
    assert op.rule is not None
    only: dict[str, frozenset[str]] = {}
    every = strategies(op.rule)
    # Each axis by itself: first what is forbidden there, then what is pinned.
    for axis in mesh.names:
        left = [s for s in every if axis not in constraints.forbid.get(_dim(op, s, dims) or "", ())]
        pinned = _pin_of(op, constraints, axis)
        if pinned is not None:
            what, wanted = pinned
            # A pin names a strategy, or a dim of the model to split.
            named = [s for s in every if s == wanted or _dim(op, s, dims) == wanted]
            if not named and what == op.name:
                raise _no_such_strategy(op, wanted, axis, dims)
            # An operator of a pinned module that has no such dim is left free.
            if named:
                left = [s for s in left if s in named and allowed(op.rule, {axis: s}, mesh)]
        if not left:
            raise _nothing_left(
                op,
                axis,
                pinned,
                [d for d, axes in constraints.forbid.items() if axis in axes],
                mesh,
            )
        if len(left) < len(every):
            only[axis] = frozenset(left)
    return only


def _dim(op: IROp, strategy: str, dims: ModelDims) -> str | None:
    """The name of the dim a strategy cuts."""
    factor = split_factor(strategy)
    found = dims.of_factor(op.name, factor) if factor is not None else None
    return found.name if found is not None else None


def _pin_of(op: IROp, constraints: Constraints, axis: str) -> tuple[str, str] | None:
    """The name that pins an operator along an axis, and what it is pinned to: its own name before
    the longest module path.
    """
    pins = {name: by_axis[axis] for name, by_axis in constraints.pin.items() if axis in by_axis}
    if op.name in pins:
        return op.name, pins[op.name]
    found = [name for name in pins if _is_below(op.module_path, name)]
    longest = max(found, key=lambda name: (name.count("."), "*" not in name), default=None)
    return None if longest is None else (longest, pins[longest])


def _is_below(module_path: str, pattern: str) -> bool:
    """Whether a path names the module of the pattern, or one inside of it."""
    parts, wanted = module_path.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(
        b in (a, "*") for a, b in zip(parts, wanted, strict=False)
    )


def _paths(module_path: str) -> list[str]:
    """``a.b.c``, ``a.b``, ``a``."""
    parts = module_path.split(".") if module_path else []
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _nothing_left(
    op: IROp, axis: str, pinned: tuple[str, str] | None, forbidden: list[str], mesh: Mesh
) -> PlanError:
    assert op.rule is not None
    said = [] if pinned is None else [f"{pinned[0]!r} is pinned to {pinned[1]!r}"]
    said += [f"cutting {' and '.join(map(repr, forbidden))} is forbidden"] if forbidden else []
    return PlanError(
        f"constraints leave operator {op.name} ({op.target}) nothing to do along axis {axis!r}",
        where=op.place,
        why=f"{' and '.join(said)} there; mesh {mesh}, and its strategies along one axis: "
        f"{', '.join(strategies(op.rule))}",
        hint="take back a pin, or what is forbidden",
    )


def _no_such_strategy(op: IROp, wanted: str, axis: str, dims: ModelDims) -> PlanError:
    assert op.rule is not None
    every = strategies(op.rule)
    names = sorted({name for s in every if (name := _dim(op, s, dims)) is not None})
    return PlanError(
        f"operator {op.name} ({op.target}) cannot be pinned to {wanted!r} along axis {axis!r}",
        where=op.place,
        why=f"its rule is {op.rule.annotation!r}",
        hint=f"one of {', '.join(every)}" + (f", or the dims {', '.join(names)}" if names else ""),
    )


def _check(graph: IRGraph, constraints: Constraints, mesh: Mesh) -> None:
    """Refuse names that nothing has."""
    every = [op for body in graph.bodies for op in body.ops]
    # A pin is for an operator, or for all operators of a module.
    names = {op.name for op in every} | {path for op in every for path in _paths(op.module_path)}
    for name, by_axis in constraints.pin.items():
        if name not in names and not any(_is_below(op.module_path, name) for op in every):
            raise PlanError(
                f"the model has no operator or module {name!r} to pin", hint=suggestion(name, names)
            )
        for axis, wanted in by_axis.items():
            _check_axis(axis, mesh)
            if name not in {op.name for op in every}:
                _check_answered(graph, name, wanted, axis)
    # Dims that the model has.
    dims = {c.name for body in graph.bodies if body.dims for c in body.dims.classes}
    for dim, axes in constraints.forbid.items():
        if dim not in dims:
            raise PlanError(
                f"the model has no dim {dim!r} to forbid", hint=suggestion(dim, sorted(dims))
            )
        for axis in axes:
            _check_axis(axis, mesh)
    values = {value.fqn: value for value in (*graph.parameters, *graph.buffers) if value.fqn}
    for fqn in constraints.stored:
        if fqn not in values:
            raise PlanError(
                f"the model has no parameter or buffer {fqn!r}", hint=suggestion(fqn, values)
            )
        layout = constraints.stored_layout(fqn)
        assert layout is not None
        check_layout(fqn, layout, values[fqn], mesh)


def _check_answered(graph: IRGraph, module: str, wanted: str, axis: str) -> None:
    """Refuse what no operator of a pinned module can do."""
    # What operators of the module could do, for the hint.
    dims: set[str] = set()
    for body in graph.bodies:
        assert body.dims is not None
        for op in body.ops:
            if not _is_below(op.module_path, module):
                continue
            assert op.rule is not None
            every = strategies(op.rule)
            # A pin is answered by a strategy (``split:n``), or by the name of a dim that one
            # splits.
            named = {name for s in every if (name := _dim(op, s, body.dims)) is not None}
            if wanted in every or wanted in named:
                return
            dims |= named
    raise PlanError(
        f"nothing in module {module!r} can be pinned to {wanted!r} along axis {axis!r}",
        why=f"its operators have the dims {', '.join(sorted(dims))}"
        if dims
        else "its operators have no dims with a name",
        hint=suggestion(wanted, sorted(dims)) or "R, G, or one of the dims",
    )


def _check_axis(axis: str, mesh: Mesh) -> None:
    if axis not in mesh.names:
        raise PlanError(
            f"the mesh has no axis {axis!r}",
            why=f"mesh {mesh}",
            hint=did_you_mean(axis, mesh.names),
        )
