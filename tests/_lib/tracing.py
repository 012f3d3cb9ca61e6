"""Holds what the tracer recorded against the module it came from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from interpret import run_graph

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.graph_grammar import verify
from shardwright.compiler.trace import trace
from shardwright.runtime import structure


def traced(
    module: torch.nn.Module, args: Mapping[str, Any], *, exact: bool = True, **options: Any
) -> IRGraph:
    """The verified graph of ``module``, after holding it against the module in both modes, see
    :func:`same_as_eager`.
    """
    state = _state(module)
    graph = trace(module, args, **options)
    assert _state(module) == state, "tracing changed the module"
    verify(graph)
    same_as_eager(graph, module, args, exact=exact)
    return graph


def same_as_eager(
    graph: IRGraph, module: torch.nn.Module, args: Mapping[str, Any], *, exact: bool = True
) -> None:
    """Results, gradients of parameters and inputs, and buffers are bit-equal, in training and in
    eval mode.

    Not ``exact``: floating ones to a relative 1e-12, where the graph calls another kernel than the
    module does.
    """

    def same(what: str, found: Any, expected: Any) -> None:
        if not exact and isinstance(expected, torch.Tensor) and expected.is_floating_point():
            torch.testing.assert_close(
                found, expected, rtol=0, atol=1e-12 * max(1.0, float(expected.abs().max()))
            )
        else:
            _same(what, found, expected)

    for training in (True, False):
        eager, other = (copy.deepcopy(module).train(training) for _ in range(2))
        eager_args, other_args = _with_gradients(args), _with_gradients(args)
        torch.manual_seed(0)
        expected = structure.flatten(eager(**eager_args))
        torch.manual_seed(0)
        found = structure.flatten(run_graph(graph, other, other_args))
        assert found.keys() == expected.keys()
        for path, leaf in expected.items():
            same(f"result {path}", found[path], leaf)
        _backward(expected.values())
        _backward(found.values())
        pairs = [("parameter", dict(eager.named_parameters()), dict(other.named_parameters()))]
        pairs.append(("argument", structure.flatten(eager_args), structure.flatten(other_args)))
        for word, left, right in pairs:
            for name, tensor in left.items():
                if isinstance(tensor, torch.Tensor) and tensor.is_leaf:
                    same(
                        f"gradient of {word} {name} (training={training})",
                        right[name].grad,
                        tensor.grad,
                    )
        for name, buffer in eager.named_buffers():
            same(f"buffer {name} (training={training})", dict(other.named_buffers())[name], buffer)


def _with_gradients(args: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the arguments; floating ones have gradients, and are no leaves so that forward may
    change them.
    """

    def copied(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach().clone()
        if not leaf.is_floating_point():
            return leaf
        leaf = leaf.requires_grad_().clone()
        leaf.retain_grad()
        return leaf

    return {name: structure.map_leaves(value, copied, name) for name, value in args.items()}


def _backward(leaves: Any) -> None:
    total = sum(
        (
            leaf.double().sin().sum()
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ),
        torch.zeros(()),
    )
    if total.requires_grad:
        total.backward()


def _same(what: str, found: Any, expected: Any) -> None:
    if not isinstance(expected, torch.Tensor):
        assert type(found) is type(expected) and found == expected, (
            f"{what}: {found} is not {expected}"
        )
        return
    assert isinstance(found, torch.Tensor), f"{what} is {found}"
    assert found.dtype == expected.dtype and found.shape == expected.shape, what
    assert torch.equal(found, expected) or bool(expected.isnan().any()), (
        f"{what} differs by {(found - expected).abs().max()}"
    )


def _state(module: torch.nn.Module) -> dict[str, Any]:
    """Everything a module holds, tensors by identity."""
    state: dict[str, Any] = {}
    for path, submodule in module.named_modules():
        for name, value in submodule.__dict__.items():
            content = (
                {key: id(item) for key, item in value.items()} if isinstance(value, dict) else None
            )
            content = [id(item) for item in value] if isinstance(value, list) else content
            state[f"{path}.{name}"] = (id(value), content)
    return state
