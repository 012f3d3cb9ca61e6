"""The verbs of custom policies: what they plan, and what they refuse, in full."""

from __future__ import annotations

import json
import re

import plans
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.check import suggestion
from shardwright.compiler.plan.plan import Plan
from shardwright.runtime.errors import LoadError, PlanError
from shardwright.runtime.layout import Layout, Mesh


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        y = self.down(F.relu(self.up(x)))
        return {"loss": F.mse_loss(y, target), "y": y}


INPUTS = {
    "x": torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6),
    "target": torch.ones(4, 3, dtype=torch.float64),
}
HERE = r"\S+test_builder\.py:\d+"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().double()


@pytest.fixture(scope="module")
def graph(model: nn.Module) -> PlannableGraph:
    return plans.annotated(plans.traced(model, INPUTS))


def refused(function, *args, **kwargs) -> str:
    with pytest.raises(PlanError) as caught:
        function(*args, **kwargs)
    return re.sub(HERE, "HERE", str(caught.value))


# ------------------------------------------------------------------------------------------------
# verbs


def test_verbs_make_a_plan_and_leave_the_graph_alone(graph: PlannableGraph) -> None:
    b = graph.builder(mesh={"dp": 2, "tp": 2})
    built = (
        b.split("batch", "dp")
        .partition("up", "n", "tp")
        .partition("relu", "hidden", "tp")
        .strategy("down", "tp", "split:k")
        .replicate("mse_loss", "tp", partial_gradient=True)
        .store("down.weight", "[3, 8/tp]")
        .output("y", "sharded")
        .note(graph.op("relu"), "tp", "a word")
        .build("mine")
    )
    assert graph.plan is None and built.ops is graph.ops and built.plan is not None
    plan = built.plan
    assert (plan.policy, plan.mesh) == ("mine", Mesh((("dp", 2), ("tp", 2))))
    assert plan.assignment("up") == {"dp": "split:*0", "tp": "split:n"}
    assert plan.assignment("relu") == {"dp": "split:a", "tp": "split:b"}
    assert plan.assignment("down")["tp"] == "split:k" and plan.assignment("mse_loss")["tp"] == "G"
    assert plan.stored == {"down.weight": Layout.parse("[3, 8/tp]")} and plan.outputs == {
        "y": "sharded"
    }
    (note,) = plan.notes
    assert (note.op, note.axis, note.reason) == ("relu", "tp", "a word") and note.source.startswith(
        "test_builder.py:"
    )


def test_order_is_major_to_minor(graph: PlannableGraph) -> None:
    assert graph.builder(mesh={"tp": 2, "dp": 4}, order="dp-tp").mesh == Mesh(
        (("dp", 4), ("tp", 2))
    )
    assert graph.builder(mesh={"tp": 2, "dp": 4}).mesh == Mesh((("tp", 2), ("dp", 4)))


def test_split_takes_every_operator_that_has_the_dim(graph: PlannableGraph) -> None:
    plan = graph.builder(mesh={"dp": 2}).split("batch", "dp").plan()
    assert set(plan.strategies) == {"up", "relu", "down", "mse_loss"}
    (dim,) = graph.dims.named("batch")
    assert graph.builder(mesh={"dp": 2}).split(dim, "dp").plan() == plan
    only = (
        graph.builder(mesh={"dp": 2})
        .split("batch", "dp", where=lambda op: op.target == "linear")
        .plan()
    )
    assert set(only.strategies) == {"up", "down"}


def test_a_later_word_wins(graph: PlannableGraph) -> None:
    plan = graph.builder(mesh={"tp": 2}).partition("up", "n", "tp").replicate("up", "tp").plan()
    assert plan.assignment("up") == {"tp": "R"}


# ------------------------------------------------------------------------------------------------
# refusals


def test_names_that_are_not_there(graph: PlannableGraph) -> None:
    b = graph.builder(mesh={"tp": 2})
    assert (
        refused(b.replicate, "dow", "tp")
        == "the graph has no operator 'dow'\n  try:   did you mean 'down'?"
    )
    assert (
        refused(b.replicate, "q", "tp")
        == "the graph has no operator 'q'\n  try:   one of 'down', 'mse_loss', 'relu', 'up'"
    )
    assert refused(b.replicate, "up", "tq") == (
        "the mesh has no axis 'tq'\n  why:   mesh tp=2\n  try:   one of 'tp'"
    )
    assert (
        refused(b.split, "batches", "tp")
        == "the model has no dim 'batches'\n  try:   did you mean 'batch'?"
    )
    assert refused(b.store, "up.weigth", "[8/tp, 6]") == (
        "the model has no parameter or buffer 'up.weigth'\n  try:   did you mean 'up.weight'?"
    )
    assert (
        refused(b.output, "logits", None)
        == "the model has no output 'logits'\n  try:   did you mean 'loss'?"
    )
    assert (
        refused(graph.builder, {"tp": 2}, "dp-tp")
        == "order 'dp-tp' does not name the axes of the mesh\n  why:   axes ('tp',)"
    )


def test_the_nearest_of_many_names() -> None:
    known = [f"h_{i}_{part}" for i in range(7) for part in ("norm", "attention", "mlp")]
    assert suggestion("h_3_atention", known) == "did you mean 'h_3_attention'?"
    assert (
        suggestion("ml", known)
        == "names that contain it: 'h_0_mlp', 'h_1_mlp', 'h_2_mlp', 'h_3_mlp', 'h_4_mlp' and 2 more"
    )
    hint = suggestion("transformer.h.3.attention.softmax_of_scores", known)
    assert hint is not None and hint.startswith("of 21 names the nearest are 'h_3_attention', 'h_")
    assert hint.count("attention") == 5
    assert suggestion("x", []) is None


def test_strategies_that_an_operator_lacks(graph: PlannableGraph) -> None:
    b = graph.builder(mesh={"dp": 2, "tp": 2})
    assert refused(b.strategy, "up", "tp", "split:q") == (
        "operator up (linear) cannot follow 'split:q' over tp=2\n"
        "  where: HERE (up)\n"
        "  why:   its rule is '* k, n k+, n -> * n'\n"
        "  try:   strategies along one axis: R, G, split:*0, split:k, split:n, linear:0, linear:1"
    )
    assert refused(b.partition, "up", "heads", "tp") == (
        "operator up (linear) has no dim 'heads'\n"
        "  where: HERE (up)\n"
        "  why:   its rule is '* k, n k+, n -> * n'\n"
        "  try:   one of '*0' (batch), 'k' (up_dim), 'n' (hidden)"
    )


def test_layouts_that_a_tensor_cannot_have(graph: PlannableGraph) -> None:
    b = graph.builder(mesh={"tp": 2})
    assert refused(b.store, "up.weight", "[6/tp, 8]") == (
        "layout [6/tp, 8] does not fit up.weight\n  why:   its shape is [8, 6]"
    )
    assert refused(b.store, "up.weight", "[8/dp, 6]") == (
        "layout [8/dp, 6] of up.weight has axis 'dp', which the mesh does not have\n  why:   "
        "mesh tp=2\n  try:   one of 'tp'"
    )
    assert refused(b.store, "up.weight", "[8, 6] P(tp)") == (
        "up.weight cannot be held as [8, 6] P(tp)\n"
        "  why:   what a user gives or loads is whole or cut, never a summand (P)\n"
        "  try:   leave out P: a copy on every rank, or with G one whose gradients are summed"
    )
    with pytest.raises(LoadError, match="the layout '8/tp, 6' does not parse"):
        b.store("up.weight", "8/tp, 6")
    assert refused(b.output, "y", "cut") == (
        "output 'y' cannot be 'cut'\n  try:   'whole', 'eval', 'sharded', a Layout, or None "
        "to drop it"
    )


# ------------------------------------------------------------------------------------------------
# JSON


def megatron(graph: PlannableGraph, config: object) -> PlannableGraph:
    b = graph.builder(mesh={"dp": 2, "tp": 2}).split("batch", "dp")
    for op, factor in (("up", "n"), ("down", "k")):
        b.partition(op, factor, "tp")
    (hidden,) = (c for c in graph.dims.classes if "up.weight:0" in c.parameters)
    b.split(hidden, "tp", where=lambda op: op.name == "relu")
    b.store("up.bias", Layout.parse("[8/tp] G(dp)")).output("y", Layout.parse("[4/dp, 3]"))
    return b.note(graph.op("mse_loss"), "tp", "small").build("megatron")


def test_a_plan_survives_json(graph: PlannableGraph) -> None:
    plan = megatron(graph, None).plan
    assert plan is not None
    text = plan.dumps()
    assert Plan.from_json(json.loads(text)) == plan
    assert json.loads(text)["stored"] == {"up.bias": "[8/tp] G(dp)"} and json.loads(text)[
        "outputs"
    ] == {"y": "[4/dp, 3]"}
    assert Plan.from_json(json.loads(text)).dumps() == text


def test_a_plan_read_back_compiles_to_the_same_files(
    model: nn.Module, graph: PlannableGraph
) -> None:
    bare = plans.traced(model, INPUTS)
    first = plans.compile_with(bare, megatron, 4)
    again = plans.compile_plan(bare, Plan.from_json(json.loads(first.files["plan.json"])))
    assert again.files == first.files


def test_an_edited_plan_compiles_and_is_right(model: nn.Module, tmp_path) -> None:
    """A person moves the weight of ``down`` to other ranks and computes the activation whole."""
    bare = plans.traced(model, INPUTS)
    data = json.loads(plans.compile_with(bare, megatron, 4).files["plan.json"])
    data["strategies"]["relu"]["tp"] = "R"
    data["stored"]["down.weight"] = "[3, 8/dp]"
    compiled = plans.compile_plan(bare, Plan.from_json(data))
    assert str(compiled.program.layout_of("down.weight")) == "[3, 8/dp]"
    plans.check(model, INPUTS, compiled, tmp_path, plans.reference_run(model, [INPUTS], steps=1))


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (
            lambda d: d["strategies"].update(upp={"tp": "R"}),
            "the model has no operator 'upp'\n  try:   did you mean 'up'?",
        ),
        (
            lambda d: d["strategies"]["up"].update(tq="R"),
            "operator up is given a strategy on axis 'tq', which the mesh does not have\n"
            "  why:   mesh dp=2 x tp=2\n  try:   one of 'dp', 'tp'",
        ),
        (
            lambda d: d["strategies"]["relu"].update(tp="split:z"),
            "operator relu (relu) cannot follow 'split:a' over dp=2, 'split:z' over tp=2",
        ),
        (
            lambda d: d["stored"].update(bias="[8/tp]"),
            "the model has no parameter or buffer 'bias'",
        ),
        (
            lambda d: d["stored"].update({"up.bias": "[6/tp]"}),
            "layout [6/tp] does not fit up.bias\n  why:   its shape is [8]",
        ),
        (
            lambda d: d["outputs"].update(z=None),
            "the model has no output 'z'\n  try:   one of 'loss', 'y'",
        ),
        (lambda d: d["inputs"].update(y="[4/dp, 6]"), "the model has no input 'y'"),
        (
            lambda d: d["mesh"].update(tp=3),
            "the plan's mesh has another number of ranks than plan_ngpus\n  why:   mesh dp=2 "
            "x tp=3 has 6, plan_ngpus=4",
        ),
    ],
    ids=["operator", "axis", "strategy", "parameter", "shape", "output", "input", "mesh"],
)
def test_an_edit_that_does_not_fit_is_refused(model: nn.Module, edit, text: str) -> None:
    bare = plans.traced(model, INPUTS)
    data = json.loads(plans.compile_with(bare, megatron, 4).files["plan.json"])
    edit(data)
    plan = Plan.from_json(data)
    assert refused(plans.compile_with, bare, lambda graph, config: plan, 4).startswith(text)


def test_what_is_no_plan_is_refused(model: nn.Module) -> None:
    bare = plans.traced(model, INPUTS)
    for policy, kind in (
        (lambda g, c: None, "NoneType"),
        (lambda g, c: g, "PlannableGraph"),
        (lambda g, c: {}, "dict"),
    ):
        text = refused(plans.compile_with, bare, policy, 2)
        assert (
            f"returned no plan\n  why:   it returned {kind}\n  try:   return what "
            "builder.build() gives, or a Plan" in text
        )
