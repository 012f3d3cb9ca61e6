"""Initial values: which tensors they are, in which dtype, and what is left out."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.frontend.files.weight_files import initial_values, source_of
from shardwright.runtime.checkpoint.tensor_files import write_tensors
from shardwright.runtime.errors import ConfigError


def test_a_dtype_that_cannot_be_stored():
    with pytest.raises(ConfigError) as caught:
        source_of("phase", torch.zeros(1), torch.complex128)
    assert str(caught.value).startswith(
        "phase has dtype torch.complex128, which cannot be stored\n  why:   safetensors has "
        "no such dtype\n  try:   one of "
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("table", torch.randn(2), persistent=False)


def graph_of(module, dtype=torch.float32):
    def value(name, fqn, kind, dtype, **more):
        return IRValue(name, (), dtype, kind=kind, fqn=fqn, **more)

    weight = value("w", "embed.weight", ValueKind.PARAMETER, dtype, aliases=("head.weight",))
    steps = value("s", "steps", ValueKind.BUFFER, torch.int64)
    table = value("t", "table", ValueKind.BUFFER, dtype, persistent=False)
    const = IRValue("const_0", (2,), torch.float32, kind=ValueKind.CONSTANT)
    return IRGraph(
        "Net",
        (),
        (weight,),
        (steps, table),
        (),
        Tree("leaf"),
        constants=((const, torch.tensor([1.0, 2.0])),),
    )


def test_weights_and_constants_of_a_module():
    module = Net()
    weights, constants = initial_values(graph_of(module), module)
    assert list(weights) == ["embed.weight", "steps"] and list(constants) == ["table", "const_0"]
    assert weights["embed.weight"].read().data_ptr() == module.embed.weight.data_ptr()


def test_values_are_stored_in_the_dtype_of_the_graph(tmp_path):
    module = Net()
    weights, _ = initial_values(graph_of(module, torch.bfloat16), module)
    write_tensors(tmp_path / "w.safetensors", weights)
    read = load_file(tmp_path / "w.safetensors")
    assert (
        torch.equal(read["embed.weight"], module.embed.weight.to(torch.bfloat16))
        and read["steps"] == 3
    )


def test_meta_tensors_are_left_out():
    with torch.device("meta"):
        module = Net()
    module.table = torch.zeros(2)
    weights, constants = initial_values(graph_of(module), module)
    assert list(weights) == [] and list(constants) == ["table", "const_0"]
