"""Graphs that the tests of a process share: what a trace finds does not depend on the plan."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.trace import trace
from shardwright.frontend import search_plan as search
from shardwright.frontend.files import module_files as generate
from shardwright.frontend.verification.deviation import tensors_of

_GRAPHS: dict[tuple[Any, ...], IRGraph] = {}


@contextmanager
def shared_traces(name: str) -> Iterator[None]:
    """Compiles and searches inside trace a model once for each set of shapes and dtypes.

    ``name`` says which model it is, and everything about its inputs but their tensors.
    """
    shared = functools.partial(shared_trace, name)
    with mock.patch.object(generate, "trace", shared), mock.patch.object(search, "trace", shared):
        yield


def shared_trace(
    name: str,
    module: nn.Module,
    dummy_args: Mapping[str, Any],
    *,
    dynamic_dims: Mapping[str, Any] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> IRGraph:
    """The graph of a model, the same one for equal names, shapes and dtypes."""
    inputs = ((path, tensor.shape, tensor.dtype) for path, tensor in tensors_of(dummy_args).items())
    weights = (tensor.dtype for tensor in module.state_dict().values())
    # Under float64_casts the name float32 means another dtype.
    key = (
        name,
        repr(dynamic_dims or {}),
        repr(constants or {}),
        torch.float32,
        torch.get_default_dtype(),
        *weights,
        *inputs,
    )
    if key not in _GRAPHS:
        _GRAPHS[key] = trace(module, dummy_args, dynamic_dims=dynamic_dims, constants=constants)
    return _GRAPHS[key]
