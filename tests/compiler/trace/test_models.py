"""Every model of the zoo: traced, executed operator by operator, bit-equal to eager in both
modes.
"""

from __future__ import annotations

import pytest
import torch
import zoo
from covers import spread
from plans import zoo_traced
from precision import float64_casts
from tracing import same_as_eager, traced

from shardwright.compiler.ir.graph_grammar import verify
from shardwright.compiler.ir.serialize import digest
from shardwright.compiler.trace import trace


@pytest.mark.parametrize("name", spread(zoo.names("even"), 3))
def test_bit_equal_to_eager(name: str) -> None:
    entry, graph = zoo.get(name), zoo_traced(name)
    with float64_casts():
        verify(graph)
        same_as_eager(graph, entry.build(), entry.inputs())
        assert graph.eval_graph is None
        assert all(op.source is not None for op in graph.ops)


def test_dropout_draws_the_same_numbers() -> None:
    entry = zoo.get("gpt2")
    with float64_casts():
        graph = traced(entry.build(resid_pdrop=0.1, attn_pdrop=0.2, embd_pdrop=0.3), entry.inputs())
    text = "\n".join(
        str(op.args) for op in graph.ops if "dropout" in op.target or "attention" in op.target
    )
    assert "WhenTraining(train=0.2, eval=0.0)" in text
    assert "WhenTraining(train=True, eval=False)" in text


def test_the_digest_tells_graphs_apart() -> None:
    entry = zoo.get("mlp")
    with float64_casts():
        model = entry.build()
        first = digest(trace(model, entry.inputs()))
        assert digest(trace(entry.build(seed=3), entry.inputs(seed=4))) == first, (
            "values of parameters and inputs do not count"
        )
        assert digest(trace(model, entry.inputs(batch=3))) != first
        model.up.weight.requires_grad_(False)
        assert digest(trace(model, entry.inputs())) != first


def test_a_meta_model_gives_the_same_graph() -> None:
    entry = zoo.get("llama")
    with float64_casts():
        model = entry.build()
        real = digest(trace(model, entry.inputs()))
        assert digest(trace(model.to("meta"), entry.inputs())) == real
        assert all(parameter.is_meta for parameter in model.parameters())


def test_inputs_on_meta() -> None:
    entry = zoo.get("gpt2")
    with float64_casts():
        inputs = {
            name: x.to("meta") if isinstance(x, torch.Tensor) else x
            for name, x in entry.inputs().items()
        }
        assert digest(trace(entry.build(), inputs)) == digest(trace(entry.build(), entry.inputs()))
