"""A right program is accepted; changed in any way that would give wrong numbers it is refused."""

import functools
from collections.abc import Callable
from dataclasses import replace

import plans
import pytest
import torch
import zoo
from covers import spread

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.ir.graph import Tree
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.passes.verify_program import TABLE, verify_program
from shardwright.compiler.plan.conversion import CutSizes
from shardwright.compiler.plan.program import Adapt, Compute, Program
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import InternalError
from shardwright.runtime.layout import Layout
from shardwright.runtime.mesh import ZERO


@functools.cache
def program_of(name: str = "gpt2", policy: str = "tp") -> Program:
    program = plans.compile_with(plans.zoo_traced(name), policy, 2, outputs="all").program
    assert isinstance(program, Program)
    return program


@functools.cache
def zero_program(policy: str = "tp", num_ranks: int = 2) -> Program:
    """Parameters in pieces over two units."""
    graph = plans.zoo_traced("gpt2")
    config = ComputeConfig(plan_ngpus=num_ranks, runtime_ngpus=2 * num_ranks, use_zero=3)
    program = compile_graph(graph, find_policy(policy).apply, config).program
    assert isinstance(program, Program)
    return program


def refused(program: Program, match: str) -> None:
    with pytest.raises(InternalError, match=match):
        verify_program(program)


def first(program: Program, kind: str) -> Adapt:
    return next(a for a in program.adapters() if a.step.kind == kind)


def swapped(program: Program, old: object, *new: object) -> Program:
    """The program with one instruction replaced by others."""
    body = tuple(item for i in program.body for item in (new if i is old else (i,)))
    return replace(program, body=body)


def with_step(program: Program, adapter: Adapt, **changes: object) -> Program:
    return swapped(program, adapter, replace(adapter, step=replace(adapter.step, **changes)))


def compute(program: Program, path: str, target: str) -> Compute:
    return next(
        i
        for i in program.body
        if isinstance(i, Compute) and i.original.module_path == path and i.original.target == target
    )


@pytest.mark.parametrize("policy", spread(["tp", "data"], 2))
@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet"])
def test_programs_of_policies_hold(name: str, policy: str) -> None:
    verify_program(program_of(name, policy))


WRONG_BACKWARDS = {
    "all_gather": "reduce_scatter",
    "all_reduce": "all_reduce",
    "keep_one": "keep_one",
    "grad_all_reduce": "all_reduce",
}


@pytest.mark.parametrize(("kind", "backward"), WRONG_BACKWARDS.items())
def test_a_wrong_backward(kind: str, backward: str) -> None:
    program = program_of()
    refused(
        with_step(program, first(program, kind), backward=backward),
        f"adapter {kind} of .* goes from",
    )


def test_every_entry_of_the_table_is_told_from_every_other() -> None:
    """No two kinds of adapter, and no two backwards of one kind, go between the same placements
    with the same backward.
    """
    assert len(set(TABLE.values())) == len(TABLE) == 13
    assert {(a, b) for a in "SRPG" for b in "SRPG" if a != b} - set(TABLE.values()) == set()


def test_another_kind_of_adapter() -> None:
    program = program_of()
    adapter = first(program, "all_reduce")
    refused(
        with_step(program, adapter, kind="keep_one", backward="identity"),
        "adapter keep_one .* goes from P to R on tp",
    )


def test_a_missing_adapter() -> None:
    """Leaving out an all-reduce, or the adapter that sums a gradient, whoever reads on."""
    for kind in ("all_reduce", "grad_all_reduce", "keep_one"):
        program = program_of()
        adapter = first(program, kind)

        def read_unadapted(value, adapter=adapter):
            return adapter.value if value == adapter.result else value

        without = swapped(program, adapter)
        body = tuple(
            replace(i, op=i.op.map_args(read_unadapted)) if isinstance(i, Compute) else i
            for i in without.body
        )
        refused(replace(without, body=body), f"needs {adapter.of.name} as .* and gets")


def test_an_adapter_that_changes_nothing_or_something_else() -> None:
    program = program_of()
    adapter = first(program, "all_reduce")
    refused(with_step(program, adapter, after=adapter.step.before), "goes from P to P")
    refused(with_step(program, adapter, before=adapter.step.after), "expects .* and gets .* P.tp.")


def test_a_wrong_axis() -> None:
    program = two_axes()
    adapter = first(program, "all_reduce")
    other = "dp" if adapter.step.axis == "tp" else "tp"
    refused(with_step(program, adapter, axes=(other,)), "goes from|changes")


def test_an_adapter_over_several_axes() -> None:
    """Each must go between the placements of the adapter, all others must stay; and what is cut
    along several is not joined.
    """
    entry = zoo.get("mlp")

    def policy(graph, config):
        return (
            graph.builder(mesh={"a": 2, "b": 2}).split("hidden", "a").split("hidden", "b").build()
        )

    program = plans.compile_with(plans.traced(entry.build(), entry.inputs()), policy, 4).program
    adapter = first(program, "all_reduce")
    assert adapter.step.axes == ("a", "b")
    refused(with_step(program, adapter, axes=("a",)), "on a changes b")
    refused(with_step(program, adapter, axes=("a", "a")), "cannot go over a and a")
    refused(with_step(program, adapter, axes=()), "cannot go over no axis")
    refused(
        with_step(program, adapter, after=replace(adapter.step.after, partial=("b",))),
        "goes from P to P on b",
    )
    whole = Layout.whole(adapter.of.shape)
    gather = {
        "kind": "all_gather",
        "backward": "slice",
        "dim": 0,
        "cut": CutSizes((4,)),
        "after": whole,
    }
    refused(with_step(program, adapter, **gather), "cannot go over a and b")


@functools.cache
def two_axes() -> Program:
    entry = zoo.get("mlp")

    def policy(graph, config):
        b = graph.builder(mesh={"dp": 2, "tp": 2}).split("batch", "dp")
        return b.partition("up", "n", "tp").partition("hidden", "hidden", "tp").build()

    graph = plans.traced(entry.build(), entry.inputs())
    program = plans.compile_with(graph, policy, 4).program
    assert isinstance(program, Program)
    return program


def test_two_axes_hold() -> None:
    verify_program(two_axes())


def test_an_adapter_that_touches_two_axes() -> None:
    program = two_axes()
    adapter = next(a for a in program.adapters() if a.step.after.cut_axes)
    stripped = Layout.whole(adapter.step.after.shape)
    refused(with_step(program, adapter, after=stripped), "changes|goes from|needs")


def test_a_wrong_strategy() -> None:
    program = program_of()
    product = compute(program, "transformer.h.0.mlp.c_fc", "addmm")
    for assignment, match in (
        ({"tp": "R"}, "as .* and gets"),
        ({"tp": "G"}, "as .* and gets"),
        ({}, "as .* and gets"),
        ({"tp": "split:nope"}, "cannot follow"),
        ({"tp": "linear:9"}, "cannot follow"),
    ):
        refused(swapped(program, product, replace(product, assignment=assignment)), match)


def test_a_layout_of_a_result_that_the_strategy_does_not_give() -> None:
    program = program_of()
    product = compute(program, "transformer.h.0.mlp.c_fc", "addmm")
    whole = (Layout.whole(product.original.results[0].shape),)
    refused(
        swapped(program, product, replace(product, layouts=whole)),
        r"gives \[32, 64/tp\], not \[32, 64\]",
    )


def test_use_before_definition() -> None:
    program = program_of()
    body = list(program.body)
    position = next(
        i
        for i, item in enumerate(body)
        if isinstance(item, Compute) and item.original.module_path == "transformer.ln_f"
    )
    body[position], body[position + 1] = body[position + 1], body[position]
    refused(replace(program, body=tuple(body)), "is used before it is made")


def test_operators_left_out_or_doubled() -> None:
    program = program_of()
    last = next(i for i in reversed(program.body) if isinstance(i, Compute))
    refused(swapped(program, last), "used before it is made|every operator of the graph once")
    refused(swapped(program, last, last, last), "is made twice")


def test_a_version_of_another_value() -> None:
    """Two weights of one shape and layout, exchanged: every layout is right, every number wrong."""
    program = program_of()
    norm = compute(program, "transformer.h.0.ln_1", "layer_norm")
    weight, bias = norm.op.arg("weight"), norm.op.arg("bias")
    exchanged = replace(norm, op=norm.op.with_args(weight=bias, bias=weight))
    refused(
        swapped(program, norm, exchanged), "transformer_h_0_ln_1 needs .*weight and gets .*bias"
    )
    adapter = first(program, "all_reduce")
    refused(swapped(program, adapter, replace(adapter, of=adapter.result)), "gets transformer_wte")


def test_parameters_stored_otherwise() -> None:
    program = program_of()

    def stored(change: Callable[[Layout], Layout], fqn: str) -> Program:
        declarations = tuple(
            replace(d, layout=change(d.layout)) if d.value.fqn == fqn else d
            for d in program.declarations
        )
        return replace(program, declarations=declarations)

    weight = "transformer.h.0.mlp.c_fc.weight"
    refused(
        stored(lambda layout: Layout.whole(layout.shape), weight),
        r"needs .* as \[16, 64/tp\] G?.*and gets \[16, 64\]",
    )
    refused(
        stored(lambda layout: replace(layout, dims=layout.dims[::-1]), weight),
        r"of shape \[16, 64\] is declared as \[64/tp, 16\]",
    )
    refused(
        stored(lambda layout: replace(layout, partial=("tp",)), "transformer.ln_f.weight"),
        "stored partial",
    )
    refused(
        stored(lambda layout: replace(layout, grad_partial=("tp",)), "transformer.ln_f.weight"),
        r"and gets \[16\] G\(tp\)",
    )


def test_inputs_given_otherwise() -> None:
    program = program_of()
    layouts = {**program.input_layouts, "input_ids": Layout.parse("[4/tp, 8]")}
    refused(replace(program, input_layouts=layouts), r"input_ids is taken as \[4/tp, 8\]")


def test_cuts_that_do_not_fit() -> None:
    program = program_of()
    gather = first(program, "all_gather")
    assert gather.step.cut is not None
    for changes in (
        {"dim": 1},
        {"dim": None},
        {"cut": None},
        {"cut": CutSizes((4,))},
        {"cut": replace(gather.step.cut, outer=3)},
        {"cut": replace(gather.step.cut, inner=5)},
    ):
        refused(with_step(program, gather, **changes), "adapter all_gather of lm_head cuts dim")
    data = program_of("resnet", "data")
    narrow = first(data, "narrow")
    refused(with_step(data, narrow, cut=CutSizes((3, 5))), "cuts dim 0")


def test_results_that_are_not_what_was_asked_for() -> None:
    program = program_of()
    logits = dict(program.graph.output.leaves())["logits"]

    def with_logits(tree: Tree) -> Tree:
        children = tuple(
            (key, replace(child, value=logits) if key == "logits" else child)
            for key, child in tree.children
        )
        return replace(tree, children=children)

    refused(
        replace(program, output=with_logits(program.output)),
        r"output 'logits' needs lm_head as \[4, 8, 32\] and gets",
    )


def test_buffers_updated_with_something_else() -> None:
    program = program_of("resnet", "data")
    (before, after), (second, other), *rest = program.buffer_updates
    refused(
        replace(program, buffer_updates=((before, other), (second, other), *rest)),
        "buffer .* needs .* and gets",
    )
    assert after != other
    refused(
        replace(program, buffer_updates=((before, after), *rest)),
        rf"the program updates the buffers {before.name}, .*, the graph {before.name}, ",
    )


def test_the_evaluation_body_is_verified_too() -> None:
    class TwoBodies(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).relu().sum(1) if self.training else self.inner(x).softmax(1).sum(1)

    graph = plans.traced(TwoBodies().double(), {"x": torch.randn(4, 4, dtype=torch.float64)})
    program = plans.compile_with(graph, "tp", 2).program
    assert isinstance(program, Program) and program.eval_program is not None
    verify_program(program)
    adapter = first(program.eval_program, "all_reduce")
    refused(
        replace(
            program, eval_program=with_step(program.eval_program, adapter, backward="all_reduce")
        ),
        "goes from P to R",
    )


# ------------------------------------------------------------------------------------------------
# ZeRO-3


@pytest.mark.parametrize(
    ("policy", "num_ranks"), spread([("dp", 1), ("tp", 2), ("data", 2)], 2, first=1)
)
def test_parameters_in_pieces_over_units(policy: str, num_ranks: int) -> None:
    program = zero_program(policy, num_ranks)
    verify_program(program)
    assert all(
        (ZERO in d.layout.cut_axes) == (d.value.fqn is not None and len(d.value.shape) > 1)
        for d in program.declarations
    )
    over_units = [a for a in program.adapters() if a.step.axis == ZERO]
    assert {(a.step.kind, a.step.backward) for a in over_units} == {
        ("all_gather", "reduce_scatter")
    }


def test_a_gradient_that_is_not_summed_over_units() -> None:
    """Stored as R, the loss would be right too."""
    program = zero_program()
    adapter = next(a for a in program.adapters() if a.step.axis == ZERO)
    after = replace(adapter.step.after, grad_partial=())
    refused(with_step(program, adapter, after=after, backward="slice"), "needs .* as .* and gets")
    refused(
        with_step(program, adapter, backward="slice"),
        "adapter all_gather of .* goes from S to G on zero",
    )


def test_a_piece_in_the_place_of_the_weight() -> None:
    program = zero_program("dp", 1)
    adapter = next(a for a in program.adapters() if a.step.axis == ZERO)
    reader = next(
        i for i in program.body if isinstance(i, Compute) and adapter.result in i.op.operands
    )
    operands = {adapter.result: adapter.value}
    op = reader.op.map_args(
        lambda leaf: operands.get(leaf, leaf) if isinstance(leaf, IRValue) else leaf
    )
    refused(swapped(program, reader, replace(reader, op=op)), "needs .* and gets")


def test_nothing_but_parameters_lies_over_units() -> None:
    program = zero_program("dp", 1)
    wrong = tuple(
        d if d.value.kind is ValueKind.PARAMETER else replace(d, layout=Layout.parse("[8/zero]"))
        for d in program.declarations
    )
    buffer = IRValue("table", (8,), torch.float64, kind=ValueKind.BUFFER, fqn="table")
    wrong = (
        *wrong,
        replace(program.declarations[0], value=buffer, layout=Layout.parse("[8/zero]")),
    )
    refused(replace(program, declarations=wrong), "is no parameter and stored over units")
