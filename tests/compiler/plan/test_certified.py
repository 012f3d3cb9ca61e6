"""A certificate stays with the plan that it is of, and leaves any other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import plans
import pytest
import torch

from shardwright.compiler.ir.size import DynamicSize
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.certified import certified_digest
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh


@pytest.fixture(scope="module")
def mlp() -> PlannableGraph:
    return plans.zoo_graph("mlp")


@pytest.fixture(scope="module")
def found(mlp: PlannableGraph) -> dict[str, Any]:
    plan = find_policy("autodist").apply(mlp, ComputeConfig(plan_ngpus=2, runtime_ngpus=2))
    assert isinstance(plan, Plan) and plan.certificate is not None
    return plan.to_json()


def loaded(
    data: dict[str, Any],
    graph: PlannableGraph,
    path: Path,
    num_ranks: int = 2,
    num_units: int = 1,
    **settings: Any,
) -> Plan:
    (path / "plan.json").write_text(json.dumps(data))
    config = ComputeConfig(
        plan_ngpus=num_ranks,
        runtime_ngpus=num_ranks * num_units,
        pas_config={"load_plan": str(path / "plan.json")},
        **settings,
    )
    plan = find_policy("saved").apply(graph, config)
    assert isinstance(plan, Plan)
    return plan


def test_the_plan_that_was_found_keeps_it(
    found: dict[str, Any], mlp: PlannableGraph, tmp_path: Path
) -> None:
    kept = loaded({**found, "dims": {}, "notes": []}, mlp, tmp_path).certificate
    assert kept is not None and kept.to_json() == found["certificate"]


def test_others_do_not(found: dict[str, Any], mlp: PlannableGraph, tmp_path: Path) -> None:
    edited = {**found, "recompute": ["up"]}
    assert loaded(edited, mlp, tmp_path).certificate is None
    assert loaded(found, mlp, tmp_path, num_ranks=4).certificate is None
    assert loaded(found, mlp, tmp_path, num_units=2).certificate is None
    first, *others = mlp.inputs
    taller = replace(
        mlp, inputs=(replace(first, shape=(2 * first.shape[0], *first.shape[1:])), *others)
    )
    assert loaded(found, taller, tmp_path).certificate is None
    for change in ({"dtype": torch.bfloat16}, {"requires_grad": False}):
        other = replace(mlp, parameters=tuple(replace(value, **change) for value in mlp.parameters))
        assert loaded(found, other, tmp_path).certificate is None


def test_it_is_of_the_settings_of_the_search(mlp: PlannableGraph, tmp_path: Path) -> None:
    """A search that chooses the stage of ZeRO has none of its settings where it chooses none."""
    config = ComputeConfig(
        plan_ngpus=2, runtime_ngpus=4, use_async_reducer=True, reducer_bucket_cap_mb=8,
        use_zero="auto", zero_use_reduce_scatter=True, pas_config={"zero": [0]},
    )  # fmt: skip
    plan = find_policy("autodist").apply(mlp, config)
    assert isinstance(plan, Plan) and plan.certificate is not None and plan.zero_stage == 0
    own = {"use_async_reducer": True, "reducer_bucket_cap_mb": 8}
    assert plan.certificate.settings == own
    data = plan.to_json()

    def kept(**settings: Any) -> bool:
        return loaded(data, mlp, tmp_path, num_units=2, **settings).certificate is not None

    left_open = {"use_zero": "auto", "zero_use_reduce_scatter": True}
    assert kept(**own) and kept(**own, **left_open)
    assert not kept() and not kept(**own | {"reducer_bucket_cap_mb": 9})
    del data["certificate"]["settings"]  # a file of before
    assert kept() and kept(**own)


def test_dynamic_sizes_are_those_of_the_dummy_arguments(mlp: PlannableGraph) -> None:
    first, *others = mlp.inputs
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1)

    def digest(example: int) -> str:
        sized = replace(first, shape=(DynamicSize("batch", example), *first.shape[1:]))
        return certified_digest(Plan(Mesh()), replace(mlp, inputs=(sized, *others)), config)

    assert digest(4) == digest(4) != digest(8)
