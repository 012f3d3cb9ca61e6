"""Which operators run in pieces, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import plans
import pytest
import torch
from torch import Tensor, nn

from shardwright.compiler.compile import Compiled
from shardwright.compiler.passes.verify_program import verify_program
from shardwright.compiler.plan.plan import Plan, PlannedLoop
from shardwright.compiler.plan.program import Loop
from shardwright.runtime.errors import InternalError, PlanError
from shardwright.runtime.layout import Mesh


class Model(nn.Module):
    """Two products with a softmax along the places beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        a = self.up(x).relu()
        b = a.softmax(0)
        c = self.down(a * b)
        return c.sum()


def compiled(*names: str) -> Compiled:
    graph = plans.annotated(plans.traced(Model(), {"x": torch.randn(7, 6)}))
    strategies = {}
    for op in graph.ops:
        if op.name in names:
            assert op.rule is not None and graph.dims is not None
            place = next(
                f.name
                for f in op.rule.factors
                if graph.dims.classes[graph.dims.factors[op.name, f.name]].size == 7
            )
            strategies[op.name] = f"split:{place}"
    loops = {"rows": PlannedLoop(3, strategies)}
    return plans.compile_plan(graph, Plan(Mesh(), loops=loops))


def test_loops_are_what_hands_values_to_each_other() -> None:
    """The softmax between them needs all places, so what is on its two sides are two loops."""
    body = compiled("up", "mul", "down").program.body
    found = [[call.original.name for call in step.calls] for step in body if isinstance(step, Loop)]
    assert found == [["up"], ["mul", "down"]]


@pytest.mark.parametrize(
    ("names", "what", "why"),
    [
        (("up", "b"), "operator b (softmax) cannot run in 3 pieces of loop 'rows'", "depend on"),
        (("up", "a", "mul", "down"), "loop 'rows' cannot run as one", "operator b (softmax)"),
    ],
)
def test_what_cannot_run_in_pieces_is_refused(names: tuple[str, ...], what: str, why: str) -> None:
    with pytest.raises(PlanError) as refused:
        compiled(*names)
    assert refused.value.what.startswith(what) and why in str(refused.value.why)


def test_a_bias_is_added_once(tmp_path: Path) -> None:
    """The bias of a product that sums over the dim of the loop: one piece has it."""
    model, inputs = Model().double(), {"x": torch.randn(7, 6, dtype=torch.float64)}
    graph = plans.annotated(plans.traced(model, inputs))
    loops = {"inner": PlannedLoop(2, {"down": "split:k"})}
    made = plans.compile_plan(graph, Plan(Mesh(), loops=loops))
    (loop,) = (step for step in made.program.body if isinstance(step, Loop))
    assert {take.of.fqn: take.step.kind for take in loop.takes}["down.bias"] == "keep_one"
    plans.check(model, inputs, made, tmp_path, plans.reference_run(model, [inputs], steps=1))


def stepped() -> Compiled:
    """``down`` gathers its input along ``c`` in two steps."""
    graph = plans.annotated(plans.traced(Model(), {"x": torch.randn(7, 6)}))
    across = {"mul": {"c": "split:b"}, "down": {"c": "split:n"}}
    loops = {"steps": PlannedLoop(2, {"down": "split:k"}, {"down": 2})}
    return plans.compile_plan(graph, Plan(Mesh((("c", 2),)), across, loops=loops))


def test_the_verifier_knows_what_loops_gather() -> None:
    """A gather in a loop is of a piece: neither of the whole, nor gathered again."""
    program = stepped().program
    number, loop = next((n, step) for n, step in enumerate(program.body) if isinstance(step, Loop))
    (gather,) = loop.ahead.values()
    assert gather.step.axes == ("c",) and gather.step.backward == "reduce_scatter"
    others = tuple(step for step in loop.body if step is not gather)
    sliced = replace(gather, step=replace(gather.step, backward="slice"))
    wrong = [
        replace(loop, body=others),
        replace(loop, body=(sliced, *others)),
        replace(loop, body=(replace(gather, in_loop=False), *others)),
        replace(loop, body=(replace(gather, choice="again"), *others)),
    ]
    for broken in wrong:
        body = (*program.body[:number], broken, *program.body[number + 1 :])
        with pytest.raises(InternalError):
            verify_program(replace(program, body=body))


def test_a_dim_that_does_not_lie_in_blocks_is_refused() -> None:
    graph = plans.annotated(plans.traced(Model(), {"x": torch.randn(7, 6)}))
    loops = {"steps": PlannedLoop(2, {"down": "split:k"}, {"down": 3})}
    with pytest.raises(PlanError) as refused:
        plans.compile_plan(graph, Plan(Mesh(), loops=loops))
    assert refused.value.what == "operator down (linear) has no dim in 3 blocks for 'split:k'"


def test_pieces_that_two_operators_deal_differently_are_refused() -> None:
    """Rows are cut by the mesh first for the product, and by the loop alone for what follows."""
    graph = plans.annotated(plans.traced(Model(), {"x": torch.randn(12, 6)}))
    assignment = {"up": {"tp": "split:*0"}, "a": {"tp": "split:b"}}
    loops = {"rows": PlannedLoop(3, {"up": "split:*0", "a": "split:a"})}
    plan = Plan(Mesh((("tp", 2),)), assignment, loops=loops)
    with pytest.raises(PlanError) as refused:
        plans.compile_plan(graph, plan)
    assert refused.value.what == "loop 'rows' needs up in other pieces than it is made in"


@pytest.mark.parametrize(
    ("loops", "what"),
    [
        ({"rows": PlannedLoop(1, {})}, "loop 'rows' has 1 pieces"),
        ({"tp": PlannedLoop(2, {})}, "no loop is called 'tp'"),
        (
            {"a": PlannedLoop(2, {"up": "split:*0"}), "b": PlannedLoop(2, {"up": "split:*0"})},
            "operator up is in two loops, 'a' and 'b'",
        ),
        ({"rows": PlannedLoop(2, {"pu": "split:*0"})}, "the model has no operator 'pu'"),
        (
            {"rows": PlannedLoop(2, {"up": "split:k"}, {"down": 2})},
            "loop 'rows' gathers the operands of down, which is not in it",
        ),
    ],
)
def test_loops_of_a_plan_are_checked(loops: dict[str, PlannedLoop], what: str) -> None:
    graph = plans.annotated(plans.traced(Model(), {"x": torch.randn(7, 6)}))
    with pytest.raises(PlanError) as refused:
        plans.compile_plan(graph, Plan(Mesh((("tp", 2),)), loops=loops))
    assert refused.value.what == what


def test_the_verifier_knows_loops() -> None:
    """Each change of a right program is refused."""
    program = compiled("mul", "down").program
    number, loop = next((n, step) for n, step in enumerate(program.body) if isinstance(step, Loop))
    verify_program(program)
    (give,) = loop.gives
    wrong = [
        replace(loop, count=2),
        replace(loop, takes=loop.takes[1:]),
        replace(loop, gives=()),
        replace(loop, body=(*loop.body, give)),
        replace(loop, axis="columns"),
        replace(loop, late=frozenset((give.result.name,))),
        replace(loop, gives=(replace(give, value=loop.takes[0].value),)),
    ]
    for changed in wrong:
        body = (*program.body[:number], changed, *program.body[number + 1 :])
        with pytest.raises(InternalError):
            verify_program(replace(program, body=body))
