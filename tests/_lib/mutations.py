"""Changes of programs and rules, each of which makes what is computed wrong.

A mutation is a function from a program to a program, or from a rule to a rule. Programs and rules
are immutable, so the originals stay as they are.

    >>> wrong = without("grad_all_reduce", "norm_1")(program)
    >>> verify_program(wrong)
    InternalError: q needs norm_1 as [2, 4, 8] G(tp) and gets [2, 4, 8]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardwright.compiler.ir.graph import Tree
from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.rule import (
    FactorKind,
    LocalSizes,
    OpRule,
    ParallelFactor,
    ParallelForm,
)
from shardwright.compiler.plan.conversion import convert
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Adapt, Compute, Instruction, Program
from shardwright.runtime.layout import Layout

ProgramMutation = Callable[[Program], Program]
PipelineMutation = Callable[[PipelineProgram], PipelineProgram]
RuleMutation = Callable[[OpRule], OpRule]


def adapter(program: Program, kind: str, of: str) -> Adapt:
    """The first adapter of that kind that makes a version of the value called ``of``."""
    found = (a for a in program.adapters() if a.step.kind == kind and a.of.name == of)
    return next(found)


def compute(program: Program, name: str) -> Compute:
    """The call of the operator called ``name``."""
    calls = (i for i in program.body if isinstance(i, Compute))
    return next(call for call in calls if call.original.name == name)


def swapped(program: Program, old: Instruction, *new: Instruction) -> Program:
    """The program with one instruction replaced by others."""
    body = tuple(item for i in program.body for item in (new if i is old else (i,)))
    return replace(program, body=body)


def reading(instruction: Instruction, old: IRValue, new: IRValue) -> Instruction:
    """The instruction, which reads ``new`` where it read ``old``."""
    if isinstance(instruction, Adapt):
        return replace(instruction, value=new) if instruction.value == old else instruction
    op = instruction.op.map_args(lambda leaf: new if leaf == old else leaf)
    return instruction if op == instruction.op else replace(instruction, op=op)


def returning(tree: Tree, old: IRValue, new: IRValue) -> Tree:
    """The result, with ``new`` in the place of ``old``."""
    if tree.kind == "leaf":
        return replace(tree, value=new) if tree.value == old else tree
    return replace(tree, children=tuple((k, returning(c, old, new)) for k, c in tree.children))


# ------------------------------------------------------------------------------------------------
# adapters


def without(kind: str, of: str, /) -> ProgramMutation:
    """An adapter is left out: its readers get what it would have read."""

    def mutate(program: Program) -> Program:
        gone = adapter(program, kind, of)
        kept = swapped(program, gone)
        body = tuple(reading(i, gone.result, gone.value) for i in kept.body)
        output = returning(program.output, gone.result, gone.value)
        return replace(kept, body=body, output=output)

    return mutate


def twice(kind: str, of: str, /) -> ProgramMutation:
    """An adapter is applied to its own result once more."""

    def mutate(program: Program) -> Program:
        first = adapter(program, kind, of)
        again = replace(first.result, name=f"{first.result.name}_again")
        second = replace(first, value=first.result, result=again)
        body: list[Instruction] = []
        for instruction in program.body:
            body.append(reading(instruction, first.result, again))
            if instruction is first:
                body.append(second)
        return replace(program, body=tuple(body))

    return mutate


def changed(kind: str, of: str, /, **changes: Any) -> ProgramMutation:
    """An adapter is of another kind, or has another backward, or goes over other axes."""

    def mutate(program: Program) -> Program:
        old = adapter(program, kind, of)
        return swapped(program, old, replace(old, step=replace(old.step, **changes)))

    return mutate


def gathered(value: str, reader: str) -> ProgramMutation:
    """An operator reads the whole of a value whose pieces it should read."""

    def mutate(program: Program) -> Program:
        call = compute(program, reader)
        position = next(i for i, v in enumerate(call.original.operands) if v.name == value)
        piece, known = call.op.operands[position], call.original.operands[position]
        held = compute(program, value).layouts[0]
        (step,) = convert(held, Layout.whole(held.shape), program.plan.storage_mesh)
        whole = replace(known, name=f"{value}_whole")
        body = reading(call, piece, whole)
        return swapped(program, call, Adapt(piece, whole, known, step), body)

    return mutate


# ------------------------------------------------------------------------------------------------
# parameters, operators, results


def stored(fqn: str, layout: str) -> ProgramMutation:
    """A parameter is declared in another layout, so that other ranks sum its gradient."""

    def mutate(program: Program) -> Program:
        return replace(
            program,
            declarations=tuple(
                replace(d, layout=Layout.parse(layout)) if d.value.fqn == fqn else d
                for d in program.declarations
            ),
        )

    return mutate


def moved(fqn: str, layout: str) -> ProgramMutation:
    """A parameter is declared in another layout, and brought into its own before it is used."""

    def mutate(program: Program) -> Program:
        held = next(d for d in program.declarations if d.value.fqn == fqn)
        (step,) = convert(Layout.parse(layout), held.layout, program.plan.storage_mesh)
        own = replace(
            held.value, name=f"{held.value.name}_own", kind=ValueKind.ACTIVATION, fqn=None
        )
        body = tuple(reading(i, held.value, own) for i in program.body)
        return stored(fqn, layout)(
            replace(program, body=(Adapt(held.value, own, held.value, step), *body))
        )

    return mutate


def called(name: str, function: str | None = None, /, **arguments: Arg) -> ProgramMutation:
    """A rank makes another call: other arguments (``None`` leaves one out), or another function."""

    def mutate(program: Program) -> Program:
        call = compute(program, name)
        op = call.op.with_args(**arguments)
        gone = {key for key, value in arguments.items() if value is None}
        op = replace(op, args=tuple((key, arg) for key, arg in op.args if key not in gone))
        return swapped(program, call, replace(call, op=op.retarget(function or op.target)))

    return mutate


def following(name: str, layouts: tuple[str, ...], /, **strategies: str) -> ProgramMutation:
    """An operator follows other strategies, and gives its results in other layouts."""

    def mutate(program: Program) -> Program:
        call = compute(program, name)
        results = tuple(map(Layout.parse, layouts))
        assignment = {**call.assignment, **strategies}
        return swapped(program, call, replace(call, assignment=assignment, layouts=results))

    return mutate


def detached(name: str) -> ProgramMutation:
    """The result of an operator is cut from its gradient."""

    def mutate(program: Program) -> Program:
        call = compute(program, name)
        cut = tuple(replace(value, requires_grad=False) for value in call.op.results)
        return swapped(program, call, replace(call, op=replace(call.op, results=cut)))

    return mutate


def bypassing(name: str, operand: str) -> ProgramMutation:
    """Readers of an operator's result get one of its operands: what it does has no effect."""

    def mutate(program: Program) -> Program:
        call = compute(program, name)
        (result,) = call.op.results
        kept = next(v for v in call.op.operands if v.name == operand)
        body = tuple(i if i is call else reading(i, result, kept) for i in program.body)
        return replace(program, body=body, output=returning(program.output, result, kept))

    return mutate


# ------------------------------------------------------------------------------------------------
# pipelines


def unshared(fqn: str) -> PipelineMutation:
    """Nobody knows that several stages hold a parameter."""
    return lambda program: replace(
        program, shared={name: stages for name, stages in program.shared.items() if name != fqn}
    )


def in_stage(index: int, mutation: ProgramMutation) -> PipelineMutation:
    """One stage is mutated."""

    def mutate(program: PipelineProgram) -> PipelineProgram:
        programs = list(program.programs)
        programs[index] = mutation(programs[index])
        return replace(program, programs=tuple(programs))

    return mutate


def one_way(name: str) -> PipelineMutation:
    """A value crosses between stages, and its gradient does not come back."""
    return lambda program: replace(
        program,
        crossings=tuple(
            replace(c, value=replace(c.value, takes_gradient=False)) if c.value.name == name else c
            for c in program.crossings
        ),
    )


# ------------------------------------------------------------------------------------------------
# rules


def splittable(**kinds: str) -> RuleMutation:
    """The rule says that factors may be split, without anything that communicates: ``h0=""`` for a
    free one, ``n="+"`` for one that is summed.
    """

    def mutate(rule: OpRule) -> OpRule:
        factors = tuple(
            replace(f, kind=FactorKind(kinds[f.name])) if f.name in kinds else f
            for f in rule.factors
        )
        return replace(rule, factors=factors, parallel=None)

    return mutate


def with_local_shape(factor: str) -> RuleMutation:
    """The rule of a norm says that its dim may be split, and gives each rank the shape of its own
    piece of the weight.
    """

    def local_shape(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
        return {"normalized_shape": local.shape(rule.operands[1])}

    return lambda rule: replace(splittable(**{factor: ""})(rule), localise=local_shape)


def linear_in(*operands: int) -> RuleMutation:
    """The rule says that the operator is linear in some operands, so that partial sums may pass."""
    return lambda rule: replace(rule, linear_sets=(*rule.linear_sets, frozenset(operands)))


def not_additive(rule: OpRule) -> OpRule:
    """The rule does not say that an operand is added to a sum: every rank adds all of it."""
    return replace(rule, additive=())


def computed_by(target: str, factor: str) -> RuleMutation:
    """Another function computes the operator where a factor is split, the only one that may be."""

    def mutate(rule: OpRule) -> OpRule:
        form = rule.parallel
        assert form is not None
        rest = {f.name: FactorKind.FROZEN.value for f in rule.factors if f.name != factor}
        kept = replace(form, target=target, factors={factor: form.factors[factor]})
        return replace(splittable(**rest)(rule), parallel=kept)

    return mutate


def placed(factor: str, operands: tuple[str, ...], target: str) -> RuleMutation:
    """The rule gives operands other placements where a factor is split."""
    form = ParallelForm(target, {factor: ParallelFactor(operands)}, {})
    return lambda rule: replace(rule, parallel=form)
