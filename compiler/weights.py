"""Writing the initial values of a model as safetensors, one tensor in memory at a time.

Two files (see ``shardwright.runtime.weights``): the weights, which a checkpoint may replace, and the constants, which no
checkpoint holds. Tensors on the meta device have no values and are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwright.compiler.ir.graph import IRGraph
from shardwright.runtime.errors import ConfigError

DTYPE_CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes safetensors can hold, by its names for them."""


@dataclass(frozen=True)
class TensorSource:
    """One tensor to store: the values, and the dtype they are stored in."""

    tensor: Tensor
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize

    def data(self) -> memoryview:
        """The values in row-major order, on the CPU."""
        flat = self.tensor.detach().to("cpu", self.dtype).contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().data


Tensors = Mapping[str, TensorSource]


def initial_values(graph: IRGraph, module: nn.Module) -> tuple[Tensors, Tensors]:
    """The weights and the constants of ``graph`` that are real, by name; ``module`` is what it was traced from.

    Parameters and buffers go by FQN, a tied one by its first; constants by their name in the graph. The graph's dtypes
    hold: they differ from the module's under ``module_dtype``.
    """
    own: dict[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    weights: dict[str, TensorSource] = {}
    constants: dict[str, TensorSource] = {}
    for value in (*graph.parameters, *graph.buffers):
        assert value.fqn is not None
        (weights if value.persistent else constants)[value.fqn] = TensorSource(own[value.fqn], value.dtype)
    for body in (graph, graph.eval_graph):
        if body is not None:
            constants |= {value.name: TensorSource(tensor, value.dtype) for value, tensor in body.constants}
    return _real(weights), _real(constants)


def _real(tensors: Tensors) -> Tensors:
    return {name: source for name, source in tensors.items() if not source.tensor.is_meta}


def digest_tensors(tensors: Tensors) -> str:
    """The hex sha256 of the file that :func:`write_tensors` would write."""
    digest = hashlib.sha256()
    for chunk in _chunks(tensors):
        digest.update(chunk)
    return digest.hexdigest()


def write_tensors(path: Path, tensors: Tensors) -> str:
    """Write the file and return its hex sha256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in _chunks(tensors):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _chunks(tensors: Tensors) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: the length of the header, the header, then the data of each tensor.

    Tensors go by falling size of their elements, so that each is aligned, then by name.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        source = tensors[name]
        if source.dtype not in DTYPE_CODES:
            raise ConfigError(
                f"{name} has dtype {source.dtype}, which cannot be stored",
                why="safetensors has no such dtype",
                hint=f"one of {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPE_CODES)}",
            )
        header[name] = {
            "dtype": DTYPE_CODES[source.dtype],
            "shape": list(source.tensor.shape),
            "data_offsets": [offset, offset + source.num_bytes],
        }
        offset += source.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        yield tensors[name].data()
