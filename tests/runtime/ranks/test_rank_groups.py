"""Groups of ranks by order and sizes, as numbers."""

import itertools
import math
import random

import pytest

import shardwright
from shardwright import rank_groups
from shardwright.runtime.errors import ConfigError

MEGATRON, COLOSSAL = "tp-cp-ep-dp-pp", "tp-pp-dp"


@pytest.mark.parametrize(
    "order, sizes, groups",
    [
        (
            MEGATRON,
            {"tp": 2, "dp": 2, "pp": 2},
            {
                "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
                "dp": [[0, 2], [1, 3], [4, 6], [5, 7]],
                "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
                "tp-dp": [[0, 1, 2, 3], [4, 5, 6, 7]],
                "tp-pp": [[0, 1, 4, 5], [2, 3, 6, 7]],
            },
        ),
        (
            COLOSSAL,
            {"tp": 2, "dp": 2, "pp": 2},
            {
                "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
                "dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
                "pp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            },
        ),
        (
            MEGATRON,
            {"tp": 2, "cp": 2, "dp": 2},
            {
                "dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
                "cp": [[0, 2], [1, 3], [4, 6], [5, 7]],
                "ep": [[rank] for rank in range(8)],
            },
        ),
    ],
)
def test_the_orders_of_megatron_and_colossal(order, sizes, groups):
    assert {axes: rank_groups(order, sizes, axes) for axes in groups} == groups


def by_definition(order, sizes, axes):
    """Ranks whose coordinates differ along ``axes`` only."""
    names = order.split("-")
    ranges = [range(sizes.get(name, 1)) for name in reversed(names)]
    groups = {}
    for rank, place in enumerate(itertools.product(*ranges)):
        coordinates = dict(zip(reversed(names), place, strict=True))
        others = tuple(c for name, c in sorted(coordinates.items()) if name not in axes)
        groups.setdefault(others, []).append(rank)
    return sorted(groups.values())


def test_random_orders_are_as_defined():
    for _ in range(40):
        names = random.sample(["tp", "cp", "ep", "dp", "pp"], random.randint(1, 5))
        sizes = {name: random.choice([1, 2, 3, 4]) for name in names}
        order, axes = "-".join(names), random.sample(names, random.randint(0, len(names)))
        assert rank_groups(order, sizes, axes) == by_definition(order, sizes, axes)
        assert rank_groups(order, sizes, "-".join(axes)) == by_definition(order, sizes, axes)


def test_ten_thousand_ranks():
    sizes = {"tp": 10, "dp": 100, "pp": 10}
    groups = rank_groups(MEGATRON, sizes, "dp")
    assert len(groups) == 100 and groups[-1] == list(range(9009, 10000, 10))
    assert sorted(itertools.chain(*groups)) == list(range(math.prod(sizes.values())))


@pytest.mark.parametrize(
    "order, sizes, axes, text",
    [
        (
            "tp-pp",
            {"tp": 2, "dp": 4},
            "tp",
            "the order 'tp-pp' lacks the axis 'dp'\n"
            "  why:   4 ranks differ along it\n"
            "  try:   name every axis, the fastest first: tp-pp-dp",
        ),
        ("tp-tp", {}, "tp", "order is names of axes joined by '-', each once"),
        ("tp--dp", {}, "tp", "order is names of axes joined by '-', each once"),
        ("tp-dp", {}, "dp-dp", "axes is names of axes joined by '-', each once"),
        ("tp-dp", {"tp": 0}, "tp", "the size of axis 'tp' is a whole number of at least 1"),
        ("tp-dp", {}, "pd", "there is no axis 'pd'"),
    ],
)
def test_what_is_refused(order, sizes, axes, text):
    with pytest.raises(ConfigError) as caught:
        shardwright.rank_groups(order, sizes, axes)
    assert str(caught.value).startswith(text)
