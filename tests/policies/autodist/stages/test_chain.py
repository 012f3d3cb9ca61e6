"""Models as chains of blocks."""

from __future__ import annotations

import itertools

import planning
import pytest
import torch
from plans import zoo_graph
from torch import Tensor, nn

from shardwright.policies.autodist.stages.chain import (
    MAX_BLOCKS,
    SHARE,
    block_starts,
    layer_blocks,
    layer_parts,
)


def test_layers_are_blocks_and_named() -> None:
    graph = zoo_graph("llama")
    starts, layers = layer_blocks(graph)
    assert set(layers.values()) == {"model.layers.0", "model.layers.1"}
    for block, path in layers.items():
        stop = starts[block + 1] if block + 1 < len(starts) else len(graph.ops)
        assert {op.name for op in graph.ops if op.module_path.startswith(path)} == {
            op.name for op in graph.ops[starts[block] : stop]
        }


class Halves(nn.Module):
    """``first`` and ``second`` are most of it, ``rest`` is more than half; ``net`` is a list of
    single operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.rest = nn.ModuleDict(
            {"net": nn.Sequential(nn.Linear(4, 8), nn.GELU()), "out": nn.Linear(8, 4)}
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.rest["out"](self.rest["net"](self.first(x)).sin())
        return y.square().mean()


def test_large_modules_are_layers_where_no_numbers_are() -> None:
    graph = planning.graph_of(Halves(), {"x": torch.randn(2, 4)})
    assert [op.module_path for op in graph.ops[:7]] == [
        "first.0", "first.1", "first.2", "rest.net.0", "rest.net.1", "", "rest.out",
    ]  # fmt: skip
    starts, layers = layer_blocks(graph)
    assert starts == [0, 3, 5] and layers == {0: "first", 1: "rest.net"}
    paths = [(part.path, part.pattern) for part in layer_parts(graph, starts, layers)[1]]
    assert paths == [(path, path) for path in ("rest.net", "rest.net.0", "rest.net.1")]


def test_lists_of_single_operators_are_cut_anywhere() -> None:
    graph = planning.graph_of(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), {"input": torch.randn(2, 4)}
    )
    assert layer_blocks(graph) == ([0, 1, 2], {0: "0", 1: "1", 2: "2"})


@pytest.mark.parametrize("name", ["gpt2", "t5", "unet", "mlp"])
@pytest.mark.parametrize("num_stages", [1, 2, 8])
def test_blocks_are_short_enough_for_the_stages(name: str, num_stages: int) -> None:
    graph = zoo_graph(name)
    times = [1.0 + (index % 3) for index in range(len(graph.ops))]
    starts = block_starts(graph, times, num_stages)
    assert (
        starts[0] == 0 and starts == sorted(set(starts)) and num_stages <= len(starts) <= MAX_BLOCKS
    )
    blocks = [sum(times[a:b]) for a, b in itertools.pairwise([*starts, len(times)])]
    assert max(blocks) <= max(SHARE * sum(times) / num_stages, 1.25 * max(times)) + sum(times) / (
        8 * MAX_BLOCKS
    )


def test_there_are_no_more_blocks_than_stages_where_few_operators_take_time() -> None:
    graph = zoo_graph("gpt2")
    times = [1.0 if index in (10, 20) else 0.0 for index in range(len(graph.ops))]
    assert len(block_starts(graph, times, 8)) == 8


def test_stages_begin_where_least_crosses() -> None:
    graph = zoo_graph("gpt2")
    times = [1.0 if "mlp_c" in op.name or "attn_c" in op.name else 0.0 for op in graph.ops]
    names = [graph.ops[start].name for start in block_starts(graph, times, 1)]
    # There q, k and v, or 4 times the width cross.
    assert not any("attn_view" in name or "act" in name for name in names)
