"""The prover: does an operator's rule hold?

For every strategy its rule allows, the operator runs on random shards as the ranks would run it,
the results are put together and compared with the unsplit call; then gradients are sent back, in
the encoding that each result's placement asks for, and what arrives at the operands is compared
with the unsplit gradients. A strategy is right only if both agree.

    >>> report = prove(F.linear, (torch.randn(4, 6), torch.randn(5, 6)))
    >>> report.ok
    True

The calls are those that lowering makes (``localise``) in the source text that is generated; those
that communicate run on one thread per rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.compiler.ir.identifier import axis_variable
from shardwright.compiler.ir.op import AxisRef, IROp, leaves, map_leaves
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops import dense_rows, registry
from shardwright.compiler.ops.annotation import instantiate
from shardwright.compiler.ops.local_shards import (
    DisagreementError,
    accepted,
    dual,
    is_continuous,
    joined,
    largest_difference,
    shards,
)
from shardwright.compiler.ops.localise import localise
from shardwright.compiler.ops.opdef import OpDef
from shardwright.compiler.ops.render import call_source, imports_of
from shardwright.compiler.ops.rule import OpRule
from shardwright.compiler.ops.strategy import Assignment, allowed, layouts, strategies
from shardwright.runtime.arguments import checked, wrong_argument
from shardwright.runtime.errors import AnnotationError, malformed
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.mesh import in_turns
from shardwright.runtime.ops.random import RngState
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.runs import PlaceOnAxis

Operator = Callable[..., Any] | OpDef
"""A function that has a rule, or an entry of the registry."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One strategy per axis of one mesh, tried. ``failure`` says in words what was wrong; ``error``
    is the largest difference.

    ``skipped``: it was not run, as the rule forbids it: some rank would hold nothing, say.
    """

    mesh: Mesh
    assignment: Assignment
    source: str
    error: float = 0.0
    failure: str | None = None
    skipped: bool = False

    @property
    def name(self) -> str:
        """The strategies of a trial in words: ``split:k over 2`` or ``split:b over 2, split:k over
        3``.
        """
        return ", ".join(
            f"{strategy} over {self.mesh.axis_size(axis)}" + in_turns(self.mesh.turns_of(axis))
            for axis, strategy in self.assignment.items()
        )


@dataclass(frozen=True, slots=True)
class ProofReport:
    """All trials of one operator call."""

    operator: str
    rule: OpRule
    trials: tuple[Trial, ...]

    @property
    def failures(self) -> tuple[Trial, ...]:
        """The trials that failed."""
        return tuple(trial for trial in self.trials if trial.failure is not None)

    @property
    def ok(self) -> bool:
        """Whether every strategy that was run is right."""
        return not self.failures

    def __str__(self) -> str:
        sizes = " ".join(
            f"{factor.name}{factor.kind.value}={factor.size}" for factor in self.rule.factors
        )
        proved = [trial for trial in self.trials if trial.failure is None and not trial.skipped]
        skipped = [trial.name for trial in self.trials if trial.skipped]
        worst = max((trial.error for trial in proved), default=0.0)
        lines = [
            f"{self.operator}: {self.rule.annotation}",
            f"  factors: {sizes or 'none'}",
            (
                f"  {len(proved)} of {len(self.trials)} strategies proved, largest difference "
                f"{worst:.1e}"
            ),
        ]
        lines += (
            [f"  not allowed, a rank would hold nothing: {'; '.join(skipped)}"] if skipped else []
        )
        for trial in self.failures:
            lines += [f"  WRONG {trial.name}: {trial.failure}", f"        {trial.source}"]
        return "\n".join(lines)


MOST_SEED = 2**63 - 2
"""A generator takes one more at most, and the one of the incoming gradients gets it."""


@checked
def prove(
    operator: Operator,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_ranks: Sequence[int | Mapping[str, int] | Mesh] = (2, 3),
    training: bool = True,
    seed: int = 0,
) -> ProofReport:
    """Try every strategy of an operator's rule on one call of it.

    ``operator``: a registered function (``register_op``, or one of torch's), or an entry of the
    registry. ``args`` and
    ``kwargs``: example arguments, floating tensors in float64 (lower precisions are compared less
    strictly). Gradients are compared for the tensors that require one; if none does, for all
    floating ones. ``num_ranks``: the sizes of the mesh axis to split over, or meshes of several
    axes (``{"a": 2, "b": 2}``, or a :class:`Mesh`), on which every combination of strategies is
    tried. ``training``:
    what ``self.training`` means where the call depends on it.

    Raises :class:`AnnotationError` for a function without a rule, or a rule that does not fit the
    shapes.
    """
    if not 0 <= seed <= MOST_SEED:
        raise wrong_argument(prove, "seed", f"a whole number from 0 to {MOST_SEED:,}", seed)
    call = OperatorCall.of(operator, tuple(args), dict(kwargs or {}), training, seed)
    return ProofReport(call.op.target, call.rule, tuple(call.trials(num_ranks)))


@dataclass(frozen=True)
class _Outcome:
    """What a call gave: results, gradients of the operands (``None`` for those without), operands
    as they are afterwards.
    """

    results: list[Tensor]
    grads: list[Tensor | None]
    operands: list[Tensor]


@dataclass(frozen=True)
class _Whole:
    """What the unsplit call gave, and the gradients sent back through it."""

    outcome: _Outcome
    sent: list[Tensor]


def operands_in(bound: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a call, in order."""
    return [leaf for arg in bound.values() for leaf in leaves(arg) if isinstance(leaf, Tensor)]


def call_of(opdef: OpDef, bound: Mapping[str, Any], values: Iterable[IRValue]) -> IROp:
    """A call whose tensors, in the order of :func:`operands_in`, are values of a graph. It has no
    results yet.
    """
    left = iter(values)
    named = map_leaves(
        tuple(bound.values()), lambda leaf: next(left) if isinstance(leaf, Tensor) else leaf
    )
    return IROp("call", opdef.name, tuple(zip(bound, named, strict=True)), ())


@dataclass(frozen=True)
class OperatorCall:
    """One operator call with concrete operands, and what it gives on one device.

    ``device``: where it runs. ``within``: a context that it runs in.
    """

    op: IROp
    rule: OpRule
    operands: list[Tensor]
    training: bool = True
    seed: int = 0
    device: str = "cpu"
    within: Callable[[], AbstractContextManager[Any]] = nullcontext

    @classmethod
    def of(
        cls,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        training: bool,
        seed: int,
    ) -> OperatorCall:
        # Arguments by parameter; each tensor is an operand, and becomes a value of a graph of one
        # call.
        opdef, bound_args, bound_kwargs = _resolve(operator, args, kwargs)
        bound = dict(opdef.bind(bound_args, bound_kwargs))
        operands = operands_in(bound)
        # In an example call without a word on gradients all that can have one is checked.
        explicit = any(x.requires_grad for x in operands)
        made = []
        for number, x in enumerate(operands):
            name, wants = f"x{number}", x.requires_grad if explicit else is_continuous(x)
            value = IRValue(name, tuple(x.shape), x.dtype, wants)
            if isinstance(x, nn.Parameter):
                value = replace(value, kind=ValueKind.PARAMETER, fqn=name)
            made.append(value)
        op = call_of(opdef, bound, made)
        call = cls(op, OpRule("", (), (), ()), [x.detach() for x in operands], training, seed)
        # Results are known by running the call; rules may depend on their shapes.
        results = call._example_results(operator, args, kwargs)
        op = replace(
            op,
            results=tuple(IRValue(f"y{i}", tuple(y.shape), y.dtype) for i, y in enumerate(results)),
        )
        rule = instantiate(opdef, op)
        return replace(call, op=replace(op, rule=rule), rule=rule)

    def trials(self, num_ranks: Sequence[int | Mapping[str, int] | Mesh]) -> Iterator[Trial]:
        """Every strategy on one mesh after the other."""
        whole = self.run_whole()
        for mesh in (
            Mesh((("a", size),)) if isinstance(size, int) else Mesh.of(size) for size in num_ranks
        ):
            for chosen in itertools.product(strategies(self.rule), repeat=len(mesh.axes)):
                yield self.trial(dict(zip(mesh.names, chosen, strict=True)), mesh, whole)

    def run_plain(self) -> list[Tensor]:
        """The results of the unsplit call; the operands are left alone."""
        return self._run(
            self.op, self.operands, {"self": self._module(Mesh((("a", 1),)), {"a": 0})}, None
        ).results

    def _example_results(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Tensor]:
        """The results of the plain call, for their shapes."""

        def copy(arg: Any) -> Any:
            return map_leaves(
                arg, lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
            )

        # The function may draw from the global generator, which is the caller's.
        with torch.random.fork_rng(devices=[]):
            if isinstance(operator, OpDef):
                return self._run(self.op, self.operands, {}, None).results
            function = getattr(operator, "apply", operator)  # of an autograd Function
            with malformed(
                AnnotationError,
                "the operator fails with these arguments",
                hint="pass arguments it can be called with",
            ):
                return tensors_in(
                    function(*copy(args), **{key: copy(value) for key, value in kwargs.items()})
                )

    def trial(self, assignment: Assignment, mesh: Mesh, whole: _Whole) -> Trial:
        """Run the call split as ``assignment`` says and compare."""
        if not allowed(self.rule, assignment, mesh):
            return Trial(mesh, assignment, "", skipped=True)
        # What a rank would do: its pieces of the operands, and its local call.
        operand_layouts, result_layouts = layouts(self.rule, assignment, mesh)
        local = localise(self.op, self.rule, assignment, mesh)
        source = call_source(local, lambda value: value.name, to_python)
        trial = Trial(mesh, assignment, source)
        # All ranks as threads, then the pieces of results and gradients put together.
        outcomes = self._run_split(local, assignment, mesh, whole)
        if isinstance(outcomes, Exception):
            known = isinstance(outcomes, DisagreementError)
            return replace(
                trial, failure=str(outcomes) if known else f"{type(outcomes).__name__}: {outcomes}"
            )
        # A rank without a gradient would leave the others waiting in backward.
        lost = self._lost_gradient(whole, outcomes)
        if lost is not None:
            return replace(trial, failure=lost)
        tolerance = max(accepted(x) for x in (*self.operands, *whole.outcome.results))
        worst = 0.0
        # Each result and each gradient of an operand, against that of the unsplit call.
        for what, reference, pieces, layout in self._comparisons(
            whole, outcomes, operand_layouts, result_layouts
        ):
            try:
                error = largest_difference(joined(pieces, layout, mesh, tolerance), reference)
            except DisagreementError as disagreement:
                return replace(trial, failure=f"{what}: {disagreement}")
            # Also true of NaN, which compares with nothing.
            if not error <= tolerance:
                return replace(trial, failure=f"{what} is wrong by {error:.1e}", error=error)
            worst = max(worst, error)
        return replace(trial, error=worst)

    def _lost_gradient(self, whole: _Whole, outcomes: list[_Outcome]) -> str | None:
        """Which operand gets no gradient on one of the ranks: what communicates above it in a
        backward is left out there, while the other ranks wait for it.
        """
        for i, name in enumerate(self.op.operand_names):
            for rank, outcome in enumerate(outcomes):
                if whole.outcome.grads[i] is not None and outcome.grads[i] is None:
                    return f"no gradient reaches {name} on rank {rank} of {len(outcomes)}"
        return None

    def run_whole(self) -> _Whole:
        """The unsplit call, and the gradients sent back through it."""
        alone = Mesh((("a", 1),))
        op = localise(self.op, self.rule, {}, alone) if self.op.rule is not None else self.op
        env = {"self": self._module(alone, {"a": 0})}
        generator = torch.Generator().manual_seed(self.seed)
        results = self._run(op, self.operands, env, None).results
        grads = [
            torch.randn(y.shape, dtype=y.dtype, generator=generator) if is_continuous(y) else y
            for y in results
        ]
        return _Whole(self._run(op, self.operands, env, grads), grads)

    def _run_split(
        self, local: IROp, assignment: Assignment, mesh: Mesh, whole: _Whole
    ) -> list[_Outcome] | Exception:
        """Make the local calls of all ranks, on threads if they communicate. The result is their
        outcomes, or the exception that one of them raised.
        """
        operand_layouts, result_layouts = layouts(self.rule, assignment, mesh)
        # Another seed than that of the gradients: equal random numbers could cancel a mistake.
        generator = torch.Generator().manual_seed(self.seed + 1)
        pieces = [
            shards(x, layout, mesh, generator)
            for x, layout in zip(self.operands, operand_layouts, strict=True)
        ]
        grads = []
        for grad, layout in zip(whole.sent, result_layouts, strict=True):
            # What has no gradient gets something in its place, which nobody uses.
            parts = [grad] * mesh.size
            if is_continuous(grad):
                parts = shards(grad, dual(layout), mesh, generator)
            grads.append(parts)

        def run(rank: int, axes: Mapping[str, Any]) -> _Outcome:
            env = {**axes, "self": self._module(mesh, mesh.coords(rank))}
            return self._run(
                local, [piece[rank] for piece in pieces], env, [grad[rank] for grad in grads]
            )

        def run_thread(rank: int) -> _Outcome:
            groups = RankMesh(mesh)
            return run(rank, {axis_variable(name): groups.axis(name) for name in mesh.names})

        try:
            # Threads cost more than most calls, so only calls that communicate get them.
            if any(isinstance(leaf, AxisRef) for _, arg in local.args for leaf in leaves(arg)):
                return run_ranks(mesh.size, run_thread)
            outcomes = []
            for rank, coords in enumerate(mesh.all_coords()):
                # What the call asks of an axis is a size and an index: a stand-in has both.
                places = {
                    axis_variable(name): _Place(size, coords[name]) for name, size in mesh.axes
                }
                outcomes.append(run(rank, places))
            return outcomes
        except Exception as error:  # whatever a wrong rule makes of the call
            return error

    def _comparisons(
        self,
        whole: _Whole,
        outcomes: list[_Outcome],
        operand_layouts: Sequence[Layout],
        result_layouts: Sequence[Layout],
    ) -> Iterator[tuple[str, Tensor, list[Tensor], Layout]]:
        """``(what it is, the reference, what the ranks hold, the layout they hold it in)``."""
        reference = whole.outcome
        if any(len(outcome.results) != len(reference.results) for outcome in outcomes):
            raise AnnotationError(f"{self.op.target} gives another number of results on a shard")
        for i, (y, layout) in enumerate(zip(reference.results, result_layouts, strict=True)):
            yield f"result {i}", y, [outcome.results[i] for outcome in outcomes], layout
        for i, (grad, layout) in enumerate(zip(reference.grads, operand_layouts, strict=True)):
            held = [outcome.grads[i] for outcome in outcomes]
            if grad is not None or any(g is not None for g in held):
                # Where a rank has no gradient it counts as zeros: its piece may not have been used.
                zeros = [torch.zeros_like(outcome.operands[i]) for outcome in outcomes]
                pieces = [zero if g is None else g for g, zero in zip(held, zeros, strict=True)]
                expected = torch.zeros_like(self.operands[i]) if grad is None else grad
                yield f"gradient of {self.op.operand_names[i]}", expected, pieces, dual(layout)
        # Running statistics are a result that the call does not return.
        for i in self.rule.updates:
            yield (
                f"{self.op.operand_names[i]} after the call",
                reference.operands[i],
                [outcome.operands[i] for outcome in outcomes],
                operand_layouts[i],
            )

    def _run(
        self,
        op: IROp,
        operands: Sequence[Tensor],
        env: Mapping[str, Any],
        grads: Sequence[Tensor] | None,
    ) -> _Outcome:
        """Evaluate a call's source on one rank; with ``grads`` also send these back."""
        inputs = [
            x.to(self.device, copy=True).requires_grad_(value.requires_grad)
            for x, value in zip(operands, self.op.operands, strict=True)
        ]
        scope: dict[str, Any] = {**env, **{f"x{i}": x for i, x in enumerate(inputs)}}
        for statement in sorted(imports_of(op)):
            exec(statement, scope)
        with self.within():
            return self._evaluate(
                call_source(op, lambda value: value.name, to_python), scope, inputs, grads
            )

    def _results(self, source: str, scope: dict[str, Any], inputs: list[Tensor]) -> list[Tensor]:
        densities = self.rule.densities
        if densities is None:
            return tensors_in(eval(source, scope))
        given = dense_rows.stored(inputs, densities[0])
        made = eval(source, {**scope, **{f"x{i}": x for i, x in enumerate(given)}})
        return dense_rows.dense(made if isinstance(made, tuple) else (made,), given, densities)

    def _evaluate(
        self,
        source: str,
        scope: dict[str, Any],
        inputs: list[Tensor],
        grads: Sequence[Tensor] | None,
    ) -> _Outcome:
        results = self._results(source, scope, inputs)
        wanted = [i for i, x in enumerate(inputs) if x.requires_grad]
        received: list[Tensor | None] = [None] * len(inputs)
        # Gradients are sent into the results as the trial says, and received at the inputs.
        if grads is not None and wanted:
            sent = [(y, g) for y, g in zip(results, grads, strict=True) if y.requires_grad]
            for i, (y, g) in enumerate(zip(results, grads, strict=True)):
                if is_continuous(y) and y.shape != g.shape:
                    raise DisagreementError(
                        f"result {i} of a rank is {list(y.shape)} where its piece is "
                        f"{list(g.shape)}"
                    )
            if sent:
                found = torch.autograd.grad(
                    [y for y, _ in sent],
                    [inputs[i] for i in wanted],
                    [g.to(self.device) for _, g in sent],
                    allow_unused=True,
                )
                for i, grad in zip(wanted, found, strict=True):
                    dense = grad.to_dense() if grad is not None and grad.is_sparse else grad
                    received[i] = dense if dense is None else dense.cpu()
        return _Outcome(
            [y.detach().cpu() for y in results], received, [x.detach().cpu() for x in inputs]
        )

    def _module(self, mesh: Mesh, coords: Mapping[str, int]) -> SimpleNamespace:
        """What ``self`` is in the source of a call."""
        rng = RngState(self.seed, "plan_independent", mesh, coords)
        device = torch.device(self.device)
        return SimpleNamespace(training=self.training, device=device, draw=rng.draw)


@dataclass(frozen=True, slots=True)
class _Place(PlaceOnAxis):
    """Stands for the axis group in calls that only ask for sizes."""

    size: int
    index: int


def _resolve(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[OpDef, tuple[Any, ...], dict[str, Any]]:
    if isinstance(operator, OpDef):
        return operator, args, kwargs
    found = registry.find(operator)
    if found is None:
        raise AnnotationError(
            f"{getattr(operator, '__name__', operator)} has no rule to prove",
            hint="give it one with shardwright.register_op",
        )
    opdef, normalise = found
    return (opdef, *normalise(args, kwargs)) if normalise else (opdef, args, kwargs)


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors of a call's result, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [tensor for item in result for tensor in tensors_in(item)]
    return []
