"""Which adapters a program has, and where: counted on small graphs and on models."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import plans
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.compiler.compile import Compiled
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.passes import lower
from shardwright.compiler.passes.copy_trees import routes
from shardwright.compiler.plan.program import Adapt, Compute, Program
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Layout

X = {"x": torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}


def compiled_by(model: nn.Module, policy, inputs=X, num_ranks: int = 2, **options) -> Compiled:
    return plans.compile_with(plans.traced(model.double(), inputs), policy, num_ranks, **options)


def adapters_of(program: Program, value: str) -> list[tuple[str, str]]:
    """``(kind, transition)`` of every adapter of a value, in order."""
    return [(a.step.kind, a.step.transition) for a in program.adapters() if a.of.name == value]


def operands_of(program: Program, op: str) -> list[str]:
    """The values an operator reads after adaptation."""
    return next(
        [v.name for v in i.op.operands]
        for i in program.body
        if isinstance(i, Compute) and i.op.name == op
    )


class Shared(nn.Module):
    """One hidden value read by three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return (self.a(hidden) * self.b(hidden) + self.c(hidden)).square().mean()


def columns(names: str):
    """A policy that splits the output dims of the layers named, over tp."""

    def policy(graph, config):
        b = graph.builder(mesh={"tp": config.plan_ngpus})
        for name in names.split():
            b.partition(name, "n", "tp")  # out features
        return b.build()

    return policy


def test_one_adapter_serves_all_consumers_that_agree(tmp_path: Path) -> None:
    compiled = compiled_by(Shared(), columns("a b c"))
    (adapter,) = [a for a in compiled.program.adapters() if a.of.name == "hidden"]
    assert adapter.step.kind == "grad_all_reduce"
    for op in ("a", "b", "c"):
        assert operands_of(compiled.program, op)[0] == adapter.result.name
    plans.check_policy(Shared().double(), X, columns("a b c"), 2, tmp_path)


def sharded_then_both(graph, config):
    """``first`` split over rows of the batch; ``a`` reads it whole with whole gradients, ``b`` and
    ``c`` with summands.
    """
    b = graph.builder(mesh={"tp": 2})
    for op in ("first", "hidden"):
        b.partition(op, "batch", "tp")
    return b.partition("b", "n", "tp").partition("c", "n", "tp").build()


def test_a_slice_wanted_as_r_and_as_g_is_gathered_once(tmp_path: Path) -> None:
    """S -> G -> R: the gradients of both kinds of use go home in one reduce-scatter."""
    program = compiled_by(Shared(), sharded_then_both).program
    assert isinstance(program, Program)
    assert adapters_of(program, "hidden") == [
        ("all_gather", "S(0) -> G"),
        ("grad_keep_one", "G -> R"),
    ]
    gathered, kept = (a for a in program.adapters() if a.of.name == "hidden")
    assert gathered.step.backward == "reduce_scatter" and kept.value.name == gathered.result.name
    _, outcome = plans.check_policy(Shared().double(), X, sharded_then_both, 2, tmp_path)
    calls = Counter(
        {
            (k.phase, k.collective): v.calls
            for k, v in outcome.traffic[0].items()
            if k.phase == "backward"
        }
    )
    assert calls["backward", "reduce_scatter"] == 1 and calls["backward", "all_gather"] == 0


def partial_then_both(graph, config):
    """``first`` leaves a sum over tp that ``a`` reads as R and ``b`` as G."""
    b = graph.builder(mesh={"tp": 2})
    (inner,) = [f.name for f in graph.op("first").rule.factors if f.kind.value == "+"]
    return (
        b.partition("first", inner, "tp").replicate("hidden", "tp", partial_gradient=True).build()
    )


def test_a_sum_read_with_partial_gradients_is_reduced_both_ways() -> None:
    program = compiled_by(Shared(), partial_then_both).program
    assert adapters_of(program, "first") == [("all_reduce", "P -> G")]
    assert {kind for kind, _ in adapters_of(program, "hidden")} == {"grad_keep_one"}


class TwoResults(nn.Module):
    """A loss, and logits and a probe that follow the columns of their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 10)
        self.probe = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.down(F.relu(self.up(x)))
        logits = self.head(hidden)
        return {"loss": logits.square().mean(), "logits": logits, "probe": self.probe(hidden).sin()}


def follow_columns(graph, config):
    b = graph.builder(mesh={"tp": 2})
    for name in ("head", "probe"):
        (columns,) = (c for c in graph.dims.classes if f"{name}.weight:0" in c.parameters)
        b.split(columns, "tp")
    return b.build()


def leaf(program: Program, path: str) -> IRValue:
    value = dict(program.output.leaves())[path]
    assert isinstance(value, IRValue)
    return value


def layouts_of(program: Program) -> dict[str, str]:
    """The layout of every value that an instruction makes."""
    made = {a.result.name: str(a.step.after) for a in program.adapters()}
    computed = (i for i in program.body if isinstance(i, Compute))
    return made | {
        v.name: str(layout)
        for i in computed
        for v, layout in zip(i.op.results, i.layouts, strict=True)
    }


@pytest.mark.parametrize(
    ("outputs", "gathered", "held"),
    [
        ("all", {"head", "sin"}, {"loss": "[]", "logits": "[4, 10]", "probe": "[4, 12]"}),
        (
            {"logits": "sharded", "probe": "sharded"},
            set(),
            {"loss": "[]", "logits": "[4, 10/tp]", "probe": "[4, 12/tp]"},
        ),
        ({"probe": "drop"}, {"head"}, {"loss": "[]", "logits": "[4, 10]"}),
        ({"logits": "sharded", "probe": "drop"}, set(), {"loss": "[]", "logits": "[4, 10/tp]"}),
        ("loss", set(), {"loss": "[]"}),
    ],
    ids=["all", "sharded", "drop one", "sharded and drop", "loss"],
)
def test_outputs_are_whole_by_default_and_cost_nothing_otherwise(
    outputs, gathered: set[str], held: dict[str, str]
) -> None:
    program = compiled_by(TwoResults(), follow_columns, outputs=outputs).program
    assert {a.of.name for a in program.adapters() if a.step.kind == "all_gather"} == gathered
    found = {path for path, value in program.output.leaves() if isinstance(value, IRValue)}
    layouts = layouts_of(program)
    assert {path: layouts[leaf(program, path).name] for path in found} == held
    names = {i.op.name for i in program.body if isinstance(i, Compute)}
    # What only a dropped output needed is gone.
    assert ("probe" in names) == ("sin" in names) == ("probe" in held)


def test_an_output_in_a_layout_of_choice() -> None:
    def policy(graph, config):
        return graph.builder(mesh={"tp": 2}).output("logits", Layout.parse("[4/tp, 10]")).build()

    program = compiled_by(TwoResults(), policy).program
    assert adapters_of(program, "head") == [("narrow", "R -> S(0)")]


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)).square().mean()


def test_buffers_that_are_updated_are_held_like_the_operand() -> None:
    """Running statistics of a split channel dim are cut with it: the update is local."""

    def policy(graph, config):
        return graph.builder(mesh={"tp": 2}).split("hidden", "tp").build()

    program = compiled_by(WithNorm(), policy).program
    for name in ("running_mean", "running_var"):
        assert str(program.layout_of(f"norm.{name}")) == "[8/tp]"
    assert (
        str(program.layout_of("norm.weight")) == "[8/tp]"
        and str(program.layout_of("norm.num_batches_tracked")) == "[]"
    )
    assert not [a for a in program.adapters() if a.of.fqn and a.of.fqn.startswith("norm.")]


def test_updates_return_to_the_layout_the_buffer_is_held_in(tmp_path: Path) -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 8)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            with torch.no_grad():
                self.mean.lerp_(y.mean(0), 0.1)
            return y.square().mean()

    def policy(graph, config):
        return graph.builder(mesh={"tp": 2}).split("up_dim", "tp").store("mean", "[8/tp]").build()

    for plan, held in ((columns("up"), "[8]"), (policy, "[8/tp]")):
        program = compiled_by(Average(), plan).program
        ((_, after),) = program.buffer_updates
        assert str(program.layout_of("mean")) == layouts_of(program)[after.name] == held
        plans.check_policy(Average().double(), X, plan, 2, tmp_path / held.replace("/", "-"))


# ------------------------------------------------------------------------------------------------
# best storage


def stored(model: nn.Module, policy, fqn: str, num_ranks: int = 2) -> str:
    return str(compiled_by(model, policy, num_ranks=num_ranks).program.layout_of(fqn))


def test_parameters_are_held_as_they_are_used() -> None:
    assert stored(Shared(), columns("a b c"), "a.weight") == "[8/tp, 6]"
    assert stored(Shared(), columns("a b c"), "a.bias") == "[8/tp]"
    assert stored(Shared(), columns("a b c"), "first.weight") == "[6, 6]"


def test_parameters_of_a_split_batch_are_gradient_partial() -> None:
    """One reduction of the gradient, which the reducer does, rather than an adapter at each use."""
    assert stored(Shared(), "data", "a.weight") == "[8, 6] G(dp)"


def test_a_frozen_parameter_has_no_gradient_to_be_partial() -> None:
    model = Shared()
    model.a.requires_grad_(False)
    assert stored(model, "data", "a.weight") == "[8, 6]"


class Tied(nn.Module):
    """One weight as a table and as a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(4, device=x.device)
        return (F.embedding(ids, self.table) * x @ self.table.t()).square().mean()


@pytest.mark.parametrize("num_split", [1, 2])
def test_a_parameter_used_twice_is_held_for_the_cheaper_of_its_uses(
    num_split: int, tmp_path: Path
) -> None:
    """Split in both uses: no adapter. Split in the head only: one adapter from what is held to what
    the other use needs.
    """

    def policy(graph, config):
        b = graph.builder(mesh={"tp": 2})
        (rows,) = (c for c in graph.dims.classes if "table:0" in c.parameters)
        return b.split(
            rows, "tp", where=lambda op: num_split == 2 or op.target != "embedding"
        ).build()

    compiled, _ = plans.check_policy(Tied().double(), X, policy, 2, tmp_path)
    assert str(compiled.program.layout_of("table")) == "[8/tp, 6]"
    assert len(adapters_of(compiled.program, "table")) == 2 - num_split


def test_a_stored_layout_is_kept(tmp_path: Path) -> None:
    """FSDP: held in slices, gathered for use, the gradient reduce-scattered."""

    def policy(graph, config):
        b = graph.builder(mesh={"dp": 2}).split("batch", "dp")
        return b.store("a.weight", "[8/dp, 6]").build()

    compiled, outcome = plans.check_policy(Shared().double(), X, policy, 2, tmp_path)
    assert str(compiled.program.layout_of("a.weight")) == "[8/dp, 6]"
    assert adapters_of(compiled.program, "a_weight") == [("all_gather", "S(0) -> G")]
    calls = {(k.phase, k.collective): v.elements for k, v in outcome.traffic[0].items()}
    assert calls["forward", "all_gather"] == calls["backward", "reduce_scatter"] == 48


# ------------------------------------------------------------------------------------------------
# refusals


def test_strategies_that_do_not_exist_are_refused() -> None:
    graph = plans.traced(Shared().double(), X)
    plan = plans.compile_with(graph, columns("a"), 2).plan
    with pytest.raises(PlanError, match="operator b .linear. cannot follow 'split:nope' over tp=2"):
        plans.compile_plan(graph, replace(plan, strategies={"b": {"tp": "split:nope"}}))
    with pytest.raises(
        PlanError, match="operator b is given a strategy on axis 'dp', which the mesh does not have"
    ):
        plans.compile_plan(graph, replace(plan, strategies={"b": {"dp": "R"}}))


def test_adapters_stand_right_before_their_first_use() -> None:
    program = plans.compile_with(plans.zoo_traced("gpt2"), "tp", 2).program
    for position, instruction in enumerate(program.body):
        if isinstance(instruction, Adapt):
            following = next((i for i in program.body[position:] if isinstance(i, Compute)), None)
            readers = [
                i
                for i in program.body
                if isinstance(i, Compute) and instruction.result in i.op.operands
            ]
            chained = [
                i for i in program.body if isinstance(i, Adapt) and i.value == instruction.result
            ]
            assert not readers or chained or following is readers[0]


def test_a_value_is_asked_once_how_its_readers_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at all where all readers take it as it is made."""
    asked: list[Layout] = []

    def counted(source: Layout, *others, **options):
        asked.append(source)
        return routes(source, *others, **options)

    monkeypatch.setattr(lower, "routes", counted)
    program = compiled_by(Shared(), columns("a b c")).program
    assert isinstance(program, Program)
    assert len(asked) == len({adapter.of.name for adapter in program.adapters()}) > 1
