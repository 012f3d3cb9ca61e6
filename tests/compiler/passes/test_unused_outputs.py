"""What nobody needs is left out of a graph."""

from __future__ import annotations

from typing import Any

import pytest
from plans import traced
from watched import inputs, watched

from shardwright.compiler.passes.unused_outputs import needed
from shardwright.compiler.plan.outputs import output_wishes, training_wishes
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError


def config(outputs: Any) -> ComputeConfig:
    return ComputeConfig(plan_ngpus=2, runtime_ngpus=2, outputs=outputs)


@pytest.mark.parametrize(
    ("outputs", "means"),
    [
        ("all", 4),
        ("auto", 0),
        ("loss", 0),
        ({"1.1": "drop"}, 3),
        ({"1.1": "sharded"}, 4),
        ({"1.1": "drop", "1.2": "drop"}, 2),
    ],
)
def test_operators_of_outputs_that_are_dropped_go_with_them(outputs: Any, means: int) -> None:
    graph = traced(watched(), inputs())
    left = needed(graph, config(outputs))
    assert sum(op.target == "mean" for op in left.ops) == 1 + means, "one is the loss"
    said, again = (training_wishes(which, config(outputs)) for which in (graph, left))
    assert again == said, "said once more, they are the same"
    assert needed(left, config(outputs)) == left


def test_an_output_that_there_is_not_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"ComputeConfig\.outputs names '1\.7', which the model does not return"
    ):
        needed(traced(watched(), inputs()), config({"1.7": "drop"}))


def test_what_is_left_out_can_only_be_dropped() -> None:
    left = needed(traced(watched(), inputs()), config({"1.1": "drop"}))
    with pytest.raises(PlanError, match=r"names '1\.1'"):
        output_wishes(left, config({"1.1": "whole"}))
