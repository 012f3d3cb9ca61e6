"""What a dataflow refuses."""

from __future__ import annotations

import pytest

from shardwright.compiler.schedule.dataflow import Dataflow
from shardwright.runtime.errors import PlanError


@pytest.mark.parametrize(
    "consumers, without_gradient, text",
    [
        (
            {1: [0]},
            [],
            "stage 0 cannot use what stage 1 produces\n"
            "  why:   activations go from earlier to later stages, and there are 2, counted "
            "from 0\n"
            "  try:   number the stages in the order in which the model runs them",
        ),
        (
            {0: [2]},
            [],
            "stage 2 cannot use what stage 0 produces\n"
            "  why:   activations go from earlier to later stages, and there are 2, counted "
            "from 0\n"
            "  try:   number the stages in the order in which the model runs them",
        ),
    ],
)
def test_what_no_dataflow_can_be(consumers: dict, without_gradient: list, text: str) -> None:
    with pytest.raises(PlanError) as error:
        Dataflow.of(2, consumers, without_gradient)
    assert str(error.value) == text


def test_a_gradient_needs_an_activation() -> None:
    with pytest.raises(PlanError) as error:
        Dataflow(3, frozenset({(0, 1)}), frozenset({(0, 2)}))
    assert str(error.value) == (
        "a gradient from stage 2 to stage 0, which sends it no activation\n"
        "  try:   name gradients only between stages that activations connect"
    )
