"""Copies of one value in several layouts: the tree is the cheapest, whatever the order of the
readers.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from shardwright.compiler.passes.copy_trees import best_tree, routes, tree_weights, trees
from shardwright.runtime.layout import Layout, Mesh

MESH = Mesh((("dp", 2), ("tp", 4)))
L = Layout.parse


def kinds(
    source: str, *targets: str, differentiable: bool = True, takes_gradient: bool = True
) -> dict[str, tuple[str, list[str]]]:
    """Target to (where its copy starts, the kinds of the steps)."""
    goals = [L(target) for target in targets]
    found = routes(
        L(source),
        goals,
        MESH,
        differentiable=differentiable,
        takes_gradient=takes_gradient and differentiable,
    )
    return {
        str(goal): (str(route.start), [step.kind for step in route.steps])
        for goal, route in found.items()
    }


def test_a_sliced_value_wanted_whole_twice_is_gathered_once() -> None:
    found = kinds("[8/tp, 16]", "[8, 16]", "[8, 16] G(tp)")
    assert found == {
        "[8, 16] G(tp)": ("[4/tp * 2, 16]", ["all_gather"]),
        "[8, 16]": ("[8, 16] G(tp)", ["grad_keep_one"]),
    }


def test_the_value_as_produced_and_equal_wishes_need_nothing() -> None:
    assert kinds("[8, 16]", "[8, 16]", "[8, 16]") == {}
    assert list(kinds("[8, 16]", "[8/tp, 16]", "[4/tp * 2, 16]")) == ["[4/tp * 2, 16]"]


def test_without_gradients_g_is_r() -> None:
    assert kinds("[8, 16]", "[8, 16] G(tp)", differentiable=False) == {}


def test_gradients_that_nobody_takes_do_not_count() -> None:
    """Cutting a whole copy anew sends nothing on the way there, and gathers all of the gradient on
    the way back.
    """
    wanted = "[8, 16]", "[8, 4/tp * 4]"
    assert kinds("[8/tp, 16]", *wanted)["[8, 4/tp * 4]"][1] == ["all_to_all"]
    assert kinds("[8/tp, 16]", *wanted, takes_gradient=False)["[8, 4/tp * 4]"] == (
        "[8, 16]",
        ["narrow"],
    )


@pytest.mark.parametrize("source", ["[8/tp, 16]", "[8, 16] P(tp)", "[8, 16]"])
def test_the_order_of_readers_does_not_matter(source: str) -> None:
    targets = ["[8, 16]", "[8, 16] G(tp)", "[8, 16/tp]"]
    found = [kinds(source, *order) for order in itertools.permutations(targets)]
    assert all(other == found[0] for other in found)


def test_there_are_as_many_trees_as_cayley_says() -> None:
    assert [len(trees(n)) for n in range(1, 5)] == [(n + 1) ** (n - 1) for n in range(1, 5)]


def test_few_copies_are_exact_and_many_are_connected() -> None:
    rng = np.random.default_rng(0)
    for num_goals in (1, 2, 3, 4, 6):
        from_source, between = rng.random(num_goals), rng.random((num_goals, num_goals))
        parents = best_tree(from_source, between)
        for goal in range(num_goals):
            seen = set()
            while goal >= 0:
                assert goal not in seen
                seen.add(goal)
                goal = parents[goal]
        if num_goals <= 4:
            total = sum(from_source[g] if p < 0 else between[p, g] for g, p in enumerate(parents))
            assert math.isclose(total, tree_weights(from_source, between).min())
