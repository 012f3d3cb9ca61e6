"""Models as chains of blocks."""

from __future__ import annotations

import itertools

import pytest
from plans import zoo_graph

from shardwright.policies.autodist.stages.chain import MAX_BLOCKS, SHARE, block_starts, layer_blocks


def test_layers_are_blocks_and_named() -> None:
    graph = zoo_graph("llama")
    starts, layers = layer_blocks(graph)
    assert set(layers.values()) == {"model.layers.0", "model.layers.1"}
    for block, path in layers.items():
        stop = starts[block + 1] if block + 1 < len(starts) else len(graph.ops)
        assert {op.name for op in graph.ops if op.module_path.startswith(path)} == {
            op.name for op in graph.ops[starts[block] : stop]
        }


@pytest.mark.parametrize("name", ["gpt2", "t5", "unet", "mlp"])
@pytest.mark.parametrize("num_stages", [1, 2, 8])
def test_blocks_are_short_enough_for_the_stages(name: str, num_stages: int) -> None:
    graph = zoo_graph(name)
    times = [1.0 + (index % 3) for index in range(len(graph.ops))]
    starts = block_starts(graph, times, num_stages)
    assert starts[0] == 0 and starts == sorted(set(starts)) and num_stages <= len(starts) <= MAX_BLOCKS
    blocks = [sum(times[a:b]) for a, b in itertools.pairwise([*starts, len(times)])]
    assert max(blocks) <= max(SHARE * sum(times) / num_stages, 1.25 * max(times)) + sum(times) / (8 * MAX_BLOCKS)


def test_stages_begin_where_least_crosses() -> None:
    graph = zoo_graph("gpt2")
    times = [1.0 if "mlp_c" in op.name or "attn_c" in op.name else 0.0 for op in graph.ops]
    names = [graph.ops[start].name for start in block_starts(graph, times, 1)]
    assert not any("attn_view" in name or "act" in name for name in names)  # there q, k and v, or 4 times the width cross
