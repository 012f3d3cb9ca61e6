"""Where ZeRO-3 cuts a parameter."""

import json

import plans
import pytest
import torch

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Program
from shardwright.compiler.plan.zero import cut_further, is_large
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Layout, Mesh

CUTS = [
    ("[768, 3072]", "[768/zero, 3072]"),
    ("[12 * 64, 768]", "[768/zero, 768]"),  # atoms that nothing cuts are one
    ("[7, 768]", "[7, 768/zero]"),  # 4 + 3 rows would be a seventh more than half
    ("[63, 768]", "[63/zero, 768]"),  # 32 + 31 are nearly equal, and lie end to end
    ("[1, 77, 768]", "[1, 77/zero, 768]"),
    ("[3072/tp, 768]", "[3072/tp/zero, 768]"),  # each piece of the major axis is cut again
    ("[768, 3072/tp]", "[768/zero, 3072/tp]"),
    ("[3 * 12/tp * 64, 768]", "[3 * 12/tp/zero * 64, 768]"),
    ("[3 * 4/tp * 64, 767]", "[3 * 4/tp/zero * 64, 767]"),
    ("[3 * 6/tp * 5, 768]", "[3 * 6/tp * 5, 768/zero]"),
    ("[1, 1]", "[1/zero, 1]"),
]


@pytest.mark.parametrize(("layout", "expected"), CUTS)
def test_the_first_dim_that_cuts_about_best(layout: str, expected: str) -> None:
    mesh = Mesh((("tp", 2),)).over_units(2)
    found = cut_further(Layout.parse(layout), ["zero"], mesh)
    assert str(found) == expected
    assert found.shape == Layout.parse(layout).shape


def test_several_axes_cut_one_dim() -> None:
    mesh = Mesh((("dp", 2), ("tp", 2))).over_units(3)
    assert (
        str(cut_further(Layout.parse("[768/tp, 64]"), ["dp", "zero"], mesh))
        == "[768/tp/dp/zero, 64]"
    )


def test_vectors_stay_whole_unless_they_are_large() -> None:
    sizes = {(8, 1): True, (65535,): False, (65536,): True, (): False, (2, 3, 4): True}
    assert {shape: is_large(IRValue("x", shape, torch.float32)) for shape in sizes} == sizes


def program(policy: str, num_ranks: int, units: int, **options: object) -> Program:
    graph = plans.zoo_traced("gpt2")
    config = ComputeConfig(
        plan_ngpus=num_ranks, runtime_ngpus=num_ranks * units, use_zero=3, **options
    )
    found = compile_graph(graph, find_policy(policy).apply, config).program
    assert isinstance(found, Program)
    return found


@pytest.mark.parametrize(
    ("policy", "num_ranks", "units", "layout", "vector"),
    [
        ("dp", 1, 4, "[16/zero, 64]", "[64]"),
        ("tp", 2, 2, "[16/zero, 64/tp]", "[64/tp]"),
        (
            "data",
            2,
            1,
            "[16/dp, 64]",
            "[64] G(dp)",
        ),  # one unit: over the ranks that split the batch
        ("data", 2, 2, "[16/dp/zero, 64]", "[64] G(dp)"),
    ],
)
def test_over_units_and_over_axes_that_split_the_batch(
    policy: str, num_ranks: int, units: int, layout: str, vector: str
) -> None:
    found = program(policy, num_ranks, units)
    assert str(found.layout_of("transformer.h.0.mlp.c_fc.weight")) == layout
    assert str(found.layout_of("transformer.h.0.mlp.c_fc.bias")) == vector
    assert not found.layout_of("transformer.h.0.mlp.c_fc.weight").grad_partial


def test_the_plan_remembers_it() -> None:
    plan = program("dp", 1, 4, zero_ngroups=2).plan
    assert plan.zero == 2 and plan.storage_mesh == Mesh((("zero", 2),))
    assert Plan.from_json(json.loads(plan.dumps())).zero == 2
    assert "zero" not in json.loads(Plan(Mesh()).dumps())


def test_the_name_of_the_axis_is_taken() -> None:
    graph = plans.zoo_traced("gpt2")
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)
    with pytest.raises(PlanError) as error:
        compile_graph(graph, lambda g, c: g.builder(mesh={"zero": 2}).build(), config)
    assert str(error.value) == (
        "no axis of a plan's mesh is called 'zero'\n"
        "  why:   the axis of that name runs over units: along it ZeRO-3 stores parameters "
        "in pieces\n"
        "  try:   give the axis another name"
    )
