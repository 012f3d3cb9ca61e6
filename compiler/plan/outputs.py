"""Which outputs of the model are needed, and how."""

from __future__ import annotations

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.value import IRValue
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError, did_you_mean
from shardwright.runtime.layout import Layout


def output_wishes(graph: IRGraph, config: ComputeConfig) -> dict[str, Layout | str | None]:
    """``config.outputs`` as wishes by output path: ``None`` for what is not needed.

    Raises:
        PlanError: it names an output that the model does not return.
    """
    paths = [path for path, value in graph.output.leaves() if isinstance(value, IRValue)]
    if config.outputs == "all":
        return {}
    if config.outputs == "loss":
        loss = "loss" if "loss" in paths else paths[0]
        return {path: None for path in paths if path != loss}
    assert not isinstance(config.outputs, str)
    unknown = sorted(config.outputs.keys() - set(paths))
    if unknown:
        what = f"ComputeConfig.outputs names {unknown[0]!r}, which the model does not return"
        raise PlanError(what, hint=did_you_mean(unknown[0], paths))
    return {path: None if wish == "drop" else wish for path, wish in config.outputs.items()}
