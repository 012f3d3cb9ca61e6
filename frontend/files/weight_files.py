"""The initial values of a model, as they are stored beside the generated code.

Two files (see ``shardwright.runtime.module.weights``): the weights, which a checkpoint may replace,
and the constants, which no checkpoint holds. Tensors on the meta device have no values and are left
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from shardwright.compiler.ir.graph import IRGraph
from shardwright.runtime.checkpoint.tensor_files import CODES, TensorSource
from shardwright.runtime.errors import ConfigError

Tensors = Mapping[str, TensorSource]


def initial_values(graph: IRGraph, module: nn.Module) -> tuple[Tensors, Tensors]:
    """The weights and the constants of ``graph`` that are real, by name; ``module`` is what it was
    traced from.

    Parameters and buffers go by FQN, a tied one by its first; constants by their name in the graph.
    The graph's dtypes hold: they differ from the module's under ``module_dtype``.

    Raises :class:`ConfigError` for a dtype that safetensors does not have.
    """
    own: dict[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    weights: dict[str, tuple[Tensor, torch.dtype]] = {}
    constants: dict[str, tuple[Tensor, torch.dtype]] = {}
    for value in (*graph.parameters, *graph.buffers):
        assert value.fqn is not None
        # What is in no state dict comes back with the files, never from a checkpoint.
        (weights if value.persistent else constants)[value.fqn] = (own[value.fqn], value.dtype)
    for body in graph.bodies:
        constants |= {value.name: (tensor, value.dtype) for value, tensor in body.constants}
    return _sources(weights), _sources(constants)


def _sources(values: Mapping[str, tuple[Tensor, torch.dtype]]) -> Tensors:
    return {
        name: source_of(name, tensor, dtype)
        for name, (tensor, dtype) in values.items()
        if not tensor.is_meta
    }


def source_of(name: str, tensor: Tensor, dtype: torch.dtype) -> TensorSource:
    """One tensor to be stored in ``dtype``; it is converted when it is its turn."""
    if dtype not in CODES:
        raise ConfigError(
            f"{name} has dtype {dtype}, which cannot be stored",
            why="safetensors has no such dtype",
            hint=f"one of {', '.join(str(known).removeprefix('torch.') for known in CODES)}",
        )
    return TensorSource(tuple(tensor.shape), dtype, partial(_converted, tensor, dtype))


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to("cpu", dtype)
