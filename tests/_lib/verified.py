"""Models of the zoo verified under a plan, each traced once in a process: what a trace finds does not depend on the plan."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any
from unittest import mock

import zoo
from torch import nn

from shardwright.compiler import generate
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.trace import trace
from shardwright.compiler.verification.deviation import tensors_of
from shardwright.compiler.verification.verify import VerifyReport, verify
from shardwright.policies.policy import PolicyFunction

_GRAPHS: dict[tuple[Any, ...], IRGraph] = {}


def verify_zoo(name: str, policy: str | PolicyFunction, config: Mapping[str, Any], **options: Any) -> VerifyReport:
    """:func:`verify` of the entry called ``name`` as it is, on its default inputs."""
    entry = zoo.get(name)
    with mock.patch.object(generate, "trace", functools.partial(_traced, name)):
        return verify(entry.build(), entry.inputs(), policy, config, **options)


def _traced(name: str, module: nn.Module, dummy_args: Mapping[str, Any], *, dynamic_dims: Mapping[str, Any]) -> IRGraph:
    assert not dynamic_dims, "a graph with sizes left open is another one"
    key = (name, *((path, tensor.shape, tensor.dtype) for path, tensor in tensors_of(dummy_args).items()))
    if key not in _GRAPHS:
        _GRAPHS[key] = trace(module, dummy_args)
    return _GRAPHS[key]
