"""Transformers models with dynamic batch and sequence length, losses and caches included."""

from __future__ import annotations

import pytest
import zoo
from precision import float64_casts
from tracing import same_as_eager, traced

DYNAMIC = {path: {0: "batch", 1: "seq"} for path in ("input_ids", "labels")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gpt2-cache",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama-padded", "gpt2", "llama")),
    ],
)
def test_dynamic_batch_and_sequence(name: str) -> None:
    """Equal but for the last digits: with sizes unknown, attention gets its causal mask as a tensor
    and another kernel.
    """
    entry = zoo.get(name)
    inputs = entry.inputs()
    dims = DYNAMIC | ({"attention_mask": DYNAMIC["labels"]} if "attention_mask" in inputs else {})
    with float64_casts():
        model = entry.build()
        graph = traced(model, inputs, exact=False, dynamic_dims=dims)
        assert {
            str(symbol)
            for value in graph.inputs
            for size in value.shape
            for symbol in size.free_symbols
        } == {
            "batch",
            "seq",
        }
        assert graph.conditions == ()
        same_as_eager(graph, model, entry.inputs(batch=3, seq=11), exact=False)
        same_as_eager(graph, model, entry.inputs(batch=1, seq=5), exact=False)


@pytest.mark.slow
def test_an_encoder_and_a_decoder_of_two_lengths() -> None:
    entry = zoo.get("t5")
    dims = {
        "input_ids": {0: "batch", 1: "length"},
        "attention_mask": {0: "batch", 1: "length"},
        "labels": {0: "batch", 1: "target"},
    }
    with float64_casts():
        model = entry.build()
        graph = traced(model, entry.inputs(), exact=False, dynamic_dims=dims)
        assert [str(condition) for condition in graph.conditions] == [
            "Ne(target - 1, 1)",
            "target - 1 >= 2",
        ]
        same_as_eager(graph, model, entry.inputs(batch=3, seq=11), exact=False)
