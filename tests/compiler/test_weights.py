"""Weight files: what safetensors reads back, digests, what is left out."""

import hashlib
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.weights import DTYPE_CODES, TensorSource, digest_tensors, initial_values, write_tensors
from shardwright.runtime.errors import ConfigError


def sources(**tensors):
    return {name: TensorSource(tensor, tensor.dtype) for name, tensor in tensors.items()}


def test_every_dtype_shape_and_stride_reads_back(tmp_path):
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPE_CODES}
    tensors |= {
        "transposed": torch.randn(3, 5).t(),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "trained": nn.Parameter(torch.randn(2)),
    }
    digest = write_tensors(tmp_path / "w.safetensors", sources(**tensors))
    read = load_file(tmp_path / "w.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor.detach()), name
    assert digest == hashlib.sha256((tmp_path / "w.safetensors").read_bytes()).hexdigest()


def test_data_is_aligned_and_sliced_without_reading_the_rest(tmp_path):
    tensors = sources(b=torch.ones(3, dtype=torch.bool), a=torch.randn(4, 2, dtype=torch.float64), c=torch.randn(5).half())
    write_tensors(tmp_path / "w.safetensors", tensors)
    data = (tmp_path / "w.safetensors").read_bytes()
    header_size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_size])
    for name, source in tensors.items():
        assert (8 + header_size + header[name]["data_offsets"][0]) % source.dtype.itemsize == 0
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert torch.equal(file.get_slice("a")[1:3], tensors["a"].tensor[1:3])


def test_the_digest_tells_values_names_and_dtypes_apart(tmp_path):
    x = torch.arange(4.0)
    base = digest_tensors(sources(x=x))
    assert base == digest_tensors(sources(x=x.clone())) == write_tensors(tmp_path / "w", sources(x=x))
    others = [sources(y=x), sources(x=x + 1), sources(x=x.reshape(2, 2)), {"x": TensorSource(x, torch.float64)}, {}]
    assert base not in {digest_tensors(other) for other in others}
    assert digest_tensors(sources(a=x, b=x + 1)) == digest_tensors(sources(b=x + 1, a=x))


def test_a_dtype_that_cannot_be_stored(tmp_path):
    with pytest.raises(ConfigError) as caught:
        write_tensors(tmp_path / "w", sources(phase=torch.zeros(1, dtype=torch.complex128)))
    assert str(caught.value).startswith(
        "phase has dtype torch.complex128, which cannot be stored\n  why:   safetensors has no such dtype\n  try:   one of "
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
    return IRGraph("Net", (), (weight,), (steps, table), (), Tree("leaf"), constants=((const, torch.tensor([1.0, 2.0])),))


def test_weights_and_constants_of_a_module():
    module = Net()
    weights, constants = initial_values(graph_of(module), module)
    assert list(weights) == ["embed.weight", "steps"] and list(constants) == ["table", "const_0"]
    assert weights["embed.weight"].tensor is module.embed.weight


def test_values_are_stored_in_the_dtype_of_the_graph(tmp_path):
    module = Net()
    weights, _ = initial_values(graph_of(module, torch.bfloat16), module)
    write_tensors(tmp_path / "w.safetensors", weights)
    read = load_file(tmp_path / "w.safetensors")
    assert torch.equal(read["embed.weight"], module.embed.weight.to(torch.bfloat16)) and read["steps"] == 3


def test_meta_tensors_are_left_out():
    with torch.device("meta"):
        module = Net()
    module.table = torch.zeros(2)
    weights, constants = initial_values(graph_of(module), module)
    assert list(weights) == [] and list(constants) == ["table", "const_0"]
