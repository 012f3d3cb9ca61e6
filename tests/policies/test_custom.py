"""Parallelisms that no built-in policy makes, written with the builder as a user would, and held to
one device.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import plans
import pytest
import tiny_gpt
import torch
import zoo
from covers import spread
from torch import Tensor, nn

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.program import Compute
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh


def gpt() -> nn.Module:
    """The GPT of the golden files in float64, without dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tiny_gpt.GPT(num_layers=2).double()
    for block in model.blocks:
        block.dropout.p = 0.0
    return model


# ------------------------------------------------------------------------------------------- two
# axes on one mesh


def data_by_tensor(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """The batch over dp, heads, ffn and vocabulary over tp."""
    b = graph.builder(
        mesh={"tp": 2, "dp": config.plan_ngpus // 2}, order=config.user_config.get("order", "dp-tp")
    )
    b.split("batch", "dp")
    for dim in ("heads", "kv_heads", "ffn", "vocab"):
        if graph.dims.named(dim):
            b.split(dim, "tp")
    return b.build("data x tensor")


@pytest.mark.parametrize("name", spread(["gpt2", "llama", "gpt2-uneven"], 3, first=2))
def test_two_axes_on_one_mesh(name: str, tmp_path: Path) -> None:
    entry = zoo.get(name)
    compiled, outcome = plans.check_policy(
        entry.build(), entry.inputs(), data_by_tensor, 4, tmp_path
    )
    assert compiled.plan.mesh == Mesh((("dp", 2), ("tp", 2)))
    assert {key.axis for key in outcome.traffic[0]} == {"dp", "tp"}


@pytest.mark.parametrize("order", ["dp-tp", pytest.param("tp-dp", marks=pytest.mark.slow)])
def test_the_order_decides_which_ranks_are_neighbours(order: str) -> None:
    """Parameters after several steps, over two units, in either order; the rank order of the config
    must agree.
    """
    entry = zoo.get("gpt2")
    config = {
        "plan_ngpus": 4,
        "runtime_ngpus": 8,
        "user_config": {"order": order},
        "rank_order": order,
    }
    report = verify(entry.build(), entry.inputs(), data_by_tensor, config, steps=2)
    assert report.ok, str(report)
    assert report.mesh.names == tuple(order.split("-"))


# ------------------------------------------------------------------------------------------------
# sequence parallel


def on_the_residual_stream(op: IROp) -> bool:
    return op.target in ("add", "dropout", "layer_norm")


def sequence_parallel(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """Megatron's tensor and sequence parallelism: activations between the products are cut along
    the sequence.
    """
    b = graph.builder(mesh={"tp": config.plan_ngpus})
    for dim in ("heads", "up_dim", "vocab"):
        b.split(dim, "tp")
    return b.split("seq", "tp", where=on_the_residual_stream).build("sequence parallel")


@pytest.mark.parametrize("num_ranks", spread([2, 3, 4], 2, first=1))
def test_sequence_parallelism(num_ranks: int, tmp_path: Path) -> None:
    model, inputs = gpt(), tiny_gpt.dummy_args()
    compiled, outcome = plans.check_policy(
        model, inputs, sequence_parallel, num_ranks, tmp_path, outputs={"1": "drop"}
    )
    program = compiled.program
    layers = 2
    kinds = Counter(
        (a.step.kind, a.step.backward)
        for a in program.adapters()
        if a.module_path.startswith("blocks")
    )
    # nobody had to say it: two all-gathers and two reduce-scatters per layer, and biases that enter
    # once
    assert kinds == {
        ("all_gather", "reduce_scatter"): 2 * layers,
        ("reduce_scatter", None): 2 * layers,
        ("keep_one", "identity"): 2 * layers,
    }
    for layer in range(layers):
        for name in ("norm1", "norm2"):
            # Reduced with the gradients.
            assert str(program.layout_of(f"blocks.{layer}.{name}.weight")) == "[16] G(tp)"
        assert str(program.layout_of(f"blocks.{layer}.up.weight")) == "[64/tp, 16]"
    assert not [
        key
        for key in outcome.traffic[0]
        if key.collective == "all_reduce" and key.phase == "backward"
    ]


# ------------------------------------------------------------------------------------------------
# FSDP and ZeRO-3


def fully_sharded(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """The batch split, every parameter held in slices of its first dim."""
    b = graph.builder(mesh={"dp": config.plan_ngpus}).split("batch", "dp")
    for value in graph.parameters:
        assert value.fqn is not None
        rest = "".join(f", {size}" for size in value.shape[1:])
        b.store(value.fqn, f"[{value.shape[0]}/dp{rest}]")
    return b.build("fully sharded")


def test_parameters_held_in_slices(tmp_path: Path) -> None:
    compiled, _ = plans.check_policy(gpt(), tiny_gpt.dummy_args(), fully_sharded, 2, tmp_path)
    of_parameters = [a for a in compiled.program.adapters() if a.of.fqn is not None]
    uses_of_positions = {("all_gather", "slice"), ("all_gather", "reduce_scatter")}
    assert {(a.step.kind, a.step.backward) for a in of_parameters} <= uses_of_positions
    # One gather for each use: the tied table has two, far apart.
    assert len(of_parameters) == len(compiled.program.graph.parameters) + 1
    assert all(adapter.gathers_weight for adapter in of_parameters)


# ------------------------------------------------------------------------------------------------
# two-dimensional products


class Chain(nn.Module):
    """Three products without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Linear(i, o, bias=False) for i, o in ((8, 16), (16, 12), (12, 4))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))).square().mean()


def two_dimensional(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """X[M/row, K/col] and W[N/col, K/row]: X is gathered over the columns, W over the rows, before
    each product.
    """
    side = round(config.plan_ngpus**0.5)
    b = graph.builder(mesh={"row": side, "col": side})
    b.split("batch", "row")
    for op in graph.ops:
        if op.target == "linear":
            weight = op.arg("weight")
            b.partition(op, "n", "col").store(
                weight.fqn, f"[{weight.shape[0]}/col, {weight.shape[1]}/row]"
            )
        else:  # what follows the columns: tanh, square, mean
            b.strategy(op, "col", f"split:{op.rule.operands[0][1][0].factor}")
    return b.build("2d")


@pytest.mark.parametrize("side", [2, 3])
def test_two_dimensional_products_send_what_they_should(side: int, tmp_path: Path) -> None:
    """Forward ``(q - 1) / q² (X + W)`` elements received per rank and product; the first input is
    whole everywhere.
    """
    batch = 6 * side
    x = {
        "x": torch.randn(batch, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Chain().double()
    _, outcome = plans.check_policy(model, x, two_dimensional, side * side, tmp_path)
    weights = 16 * 8 + 12 * 16 + 4 * 12
    activations = batch * 16 + batch * 12
    received = {
        phase: sum(
            volume.received
            for traffic in outcome.traffic
            for key, volume in traffic.items()
            if key.phase == phase and key.collective in ("all_gather", "reduce_scatter")
        )
        / side**2
        for phase in ("forward", "backward")
    }
    expected = (side - 1) / side**2 * (activations + weights)
    assert received["forward"] == pytest.approx(expected, rel=1e-12)
    # Gradients move as their operands did. Gathered activations are kept; weights are gathered
    # again where an input's gradient needs them, not for the first product.
    again = (side - 1) / side**2 * (12 * 16 + 4 * 12)
    assert received["backward"] == pytest.approx(expected + again, rel=1e-12)


# ------------------------------------------------------------------------------------------------
# the order of the axes that cut one dim


def turned(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """Heads, feed-forward and vocabulary over two axes, the first axis of the mesh within the
    second; the batch over a third.
    """
    b = graph.builder(mesh={"a": 2, "b": config.plan_ngpus // 4, "dp": 2}).split("batch", "dp")
    for dim in ("heads", "kv_heads", "ffn", "vocab"):
        if graph.dims.named(dim):
            b.split(dim, "a", place=1).split(dim, "b")
    return b.build("turned")


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "llama")), "gpt2-uneven"],
)
def test_axes_cut_a_dim_in_the_order_of_their_places(name: str, tmp_path: Path) -> None:
    entry = zoo.get(name)
    compiled, _ = plans.check_policy(entry.build(), entry.inputs(), turned, 8, tmp_path)
    stored = {str(d.layout) for d in compiled.program.declarations}
    assert any("/b/a" in layout for layout in stored), stored
    assert not any("/a/b" in layout for layout in stored), stored


def test_one_dim_in_two_orders(tmp_path: Path) -> None:
    """Two neighbours cut the batch, 7 rows, in other orders, so that rows are sent between."""

    def policy(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
        b = graph.builder(mesh={"row": 2, "col": 3})
        b.split("batch", "row", where=lambda op: op.module_path != "b").split("batch", "col")
        return b.split("batch", "row", where=lambda op: op.module_path == "b", place=1).build()

    x = {"x": torch.randn(7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Chain().double()
    compiled, outcome = plans.check_policy(model, x, policy, 6, tmp_path)
    layouts = {str(step.layouts[0]) for step in compiled.program.body if isinstance(step, Compute)}
    assert {"[7/row/col, 16]", "[7/col/row, 12]"} <= layouts, layouts
    assert any(key.phase == "backward" for key in outcome.traffic[0])


def test_a_place_that_is_none() -> None:
    graph = plans.annotated(plans.traced(Chain().double(), {"x": torch.zeros(6, 8).double()}))
    b = PlannableGraph.of(graph).builder(mesh={"row": 2})
    for place in (-1, 100):
        with pytest.raises(PlanError, match=f"place {place} is none"):
            b.split("batch", "row", place=place)
        with pytest.raises(PlanError, match=f"place {place} is none"):
            b.partition("a", "n", "row", place=place)
    for strategy in ("split:n@", "split:n@0", "split:n@01", "split:n@-1", "R@1", "split:n@1@1"):
        with pytest.raises(PlanError, match="cannot follow"):
            b.strategy(graph.ops[0], "row", strategy)
