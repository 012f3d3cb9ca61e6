"""Which outputs of the model are needed, and how."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.value import IRValue
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError, did_you_mean
from shardwright.runtime.layout import Layout


def output_wishes(graph: IRGraph, config: ComputeConfig) -> dict[str, Layout | str | None]:
    """``config.outputs`` as wishes by output path: ``None`` for what is not needed. They are the same for a graph from which
    that has been left out.

    Raises:
        PlanError: it names an output that the model does not return.
    """
    leaves = [(path, value) for path, value in graph.output.leaves() if value is None or isinstance(value, IRValue)]
    paths = [path for path, value in leaves if value is not None]
    if config.outputs == "all":
        return {}
    if config.outputs == "loss":
        return {path: None for path, _ in leaves if path != _loss_of(paths)}
    assert not isinstance(config.outputs, str)
    wishes: dict[str, Layout | str | None] = {p: None if wish == "drop" else wish for p, wish in config.outputs.items()}
    unknown = sorted(path for path, wish in wishes.items() if path not in paths and (path, wish) not in leaves)
    if unknown:
        what = f"ComputeConfig.outputs names {unknown[0]!r}, which the model does not return"
        raise PlanError(what, hint=did_you_mean(unknown[0], paths))
    return wishes


def returns_more_than_loss(graph: IRGraph, config: ComputeConfig) -> bool:
    """Whether all outputs are asked for, of a model that returns a loss, which is a number to be trained, and other tensors."""
    values = {path: value for path, value in graph.output.leaves() if isinstance(value, IRValue)}
    if config.outputs != "all" or len(values) < 2:
        return False
    loss = values[_loss_of(list(values))]
    return not loss.shape and loss.requires_grad


def _loss_of(paths: Sequence[str]) -> str:
    """Which output is the loss: that of the name, or the first."""
    return "loss" if "loss" in paths else paths[0]
