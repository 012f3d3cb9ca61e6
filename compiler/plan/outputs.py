"""Which outputs of the model are needed, and how."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.value import IRValue
from shardwright.runtime.atoms import Atom, Size
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError, did_you_mean
from shardwright.runtime.layout import Layout

Wishes = dict[str, Layout | str | None]
"""What is wanted of each output, by its path: a layout, ``"whole"``, ``"sharded"``, ``"cut 0/dp
1/tp"`` (dim 0 over ``dp`` and dim 1 over ``tp``), ``"eval"`` (left out of training steps), ``None``
(not needed).
"""


def wished_layout(wish: Layout | str | None, shape: tuple[Size, ...], made: Layout) -> Layout:
    """The layout in which an output of ``shape`` leaves a program that makes it as ``made``."""
    if isinstance(wish, Layout):
        return wish
    if wish == "sharded":
        return made
    layout = Layout.whole(shape)
    if wish is not None and wish.startswith(CUT):
        for word in wish.removeprefix(CUT).split():
            # ``"0/dp 1/cp"``: dim 0 over dp, dim 1 over cp.
            dim, *axes = word.split("/")
            layout = layout.with_dim(int(dim), (Atom((shape[int(dim)],), tuple(axes)),))
    return layout


def cut_wish(layout: Layout, dims: Collection[int]) -> str:
    """The wish for an output that is cut as ``layout`` is, in these dims alone."""
    words = ["/".join((str(dim), *layout.dim_axes(dim))) for dim in dims if layout.dim_axes(dim)]
    return CUT + " ".join(words)


CUT = "cut "


def output_wishes(graph: IRGraph, config: ComputeConfig) -> Wishes:
    """``config.outputs`` as wishes. They are the same for a graph from which what is not needed has
    been left out.

    Raises:
        PlanError: it names an output that the model does not return.
    """
    leaves = [
        (path, value)
        for path, value in graph.output.leaves()
        if value is None or isinstance(value, IRValue)
    ]
    paths = [path for path, value in leaves if value is not None]
    # "auto": training makes the loss alone, where that is known to be the loss.
    if config.outputs == "auto":
        loss = None if config.plan_ngpus == 1 or config.inference_only else _trained_loss(graph)
        return {} if loss is None else {path: "eval" for path, _ in leaves if path != loss}
    if config.outputs == "all":
        return {}
    if config.outputs == "loss":
        return {path: None for path, _ in leaves if path != _loss_of(paths)}
    assert not isinstance(config.outputs, str)
    wishes: Wishes = {}
    for asked, mode in config.outputs.items():
        wish = None if mode == "drop" else mode
        found = below(asked, paths)
        # A ``None`` may be dropped: the model has left it out by itself.
        if not found and (asked, wish) not in leaves:
            what = f"ComputeConfig.outputs names {asked!r}, which the model does not return"
            raise PlanError(what, hint=did_you_mean(asked, paths))
        wishes |= dict.fromkeys(found or [asked], wish)
    return wishes


def below(path: str, paths: Sequence[str]) -> list[str]:
    """The ones of ``paths`` that lie at ``path``, or in the container there."""
    return [one for one in paths if one == path or one.startswith(f"{path}.")]


def training_wishes(graph: IRGraph, config: ComputeConfig) -> Wishes:
    """The wishes for a training step, which is what plans are priced for: what it leaves out is not
    needed.
    """
    return {
        path: None if wish == "eval" else wish
        for path, wish in output_wishes(graph, config).items()
    }


def settled_wishes(
    graph: IRGraph, config: ComputeConfig, planned: Mapping[str, Layout | str | None]
) -> Wishes:
    """The wishes of a config, and those of a plan, which come first. A plan is made for training
    steps, so that it does not need what these leave out; and what another config has left out
    counts for no config that asks for all.
    """
    asked = output_wishes(graph, config)
    if config.outputs in ("all", "loss"):
        planned = {path: wish for path, wish in planned.items() if wish != "eval"}
    kept = {
        path: wish
        for path, wish in planned.items()
        if wish is not None or asked.get(path) != "eval"
    }
    return {**asked, **kept}


def _trained_loss(graph: IRGraph) -> str | None:
    """The path of the loss, a scalar with a gradient, of a model that returns other tensors too;
    they may be gone already.
    """
    leaves = [
        (path, value)
        for path, value in graph.output.leaves()
        if value is None or isinstance(value, IRValue)
    ]
    values = {path: value for path, value in leaves if value is not None}
    if not values or len(leaves) < 2:
        return None
    path = _loss_of(list(values))
    return path if not values[path].shape and values[path].requires_grad else None


def returns_more_than_loss(graph: IRGraph, config: ComputeConfig) -> bool:
    """Whether all outputs are asked for, of a model that returns a loss, which is a number to be
    trained, and other tensors.
    """
    number = sum(isinstance(value, IRValue) for _, value in graph.output.leaves())
    return config.outputs == "all" and number > 1 and _trained_loss(graph) is not None


def _loss_of(paths: Sequence[str]) -> str:
    """Which output is the loss: that of the name, or the first."""
    return "loss" if "loss" in paths else paths[0]
