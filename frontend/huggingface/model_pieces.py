"""Cut a whole model into this rank's pieces, in the same ``nn.Parameter`` objects.

An optimizer that was made before holds these objects, and goes on with the pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from shardwright.frontend.huggingface.model_programs import place_in
from shardwright.runtime.errors import UsageError
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.pieces import local_piece


def check_can_be_cut(model: nn.Module) -> None:
    """Refuse a model that has been trained in part: gradients would be of other shapes than their
    parameters.

    Raises :class:`UsageError`.
    """
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise UsageError(
                f"parameter {name!r} has a gradient already",
                why="it is that of the whole parameter, and this rank keeps a piece of it",
                hint="initialize before the first backward, or clear gradients with "
                "model.zero_grad()",
            )
        if parameter.requires_grad and _is_in_a_graph(parameter):
            raise UsageError(
                f"parameter {name!r} is part of a graph that something holds",
                why="what was computed from it before could still be differentiated, and expects "
                "a gradient of the whole parameter",
                hint="let go of losses and outputs of earlier calls; copy values with "
                "parameter.detach().clone()",
            )


def _is_in_a_graph(parameter: nn.Parameter) -> bool:
    """Whether torch still keeps the node that accumulates the gradient of ``parameter``. A node has
    the shape that the parameter had when it was made.
    """
    values = parameter.data
    try:
        parameter.data = values.new_empty(0)
        node: Any = get_gradient_edge(parameter).node
        return tuple(node._input_metadata[0].shape) != (0,)
    finally:
        parameter.data = values


def cut(model: nn.Module, program: ParallelModule) -> None:
    """Let ``model`` and ``program`` have the same parameters and persistent buffers: this rank's
    pieces of the model's values. Of a model on the meta device they have no values yet.
    """
    taken: dict[str, Tensor] = {}
    for one in program.declarations:
        if not one.is_initial_weight:
            continue
        owner, leaf = place_in(model, one.name)
        piece = program.weights(one.name)
        whole = owner._parameters[leaf] if one.kind == "parameter" else owner._buffers[leaf]
        assert whole is not None
        if not whole.is_meta:
            ranks = program.ranks_of(one)
            with torch.no_grad():
                piece.copy_(local_piece(whole.detach(), one.layout, ranks.mesh, ranks.coords))
        # The model's own ``nn.Parameter`` objects stay, as an optimizer may hold them already.
        taken[one.name] = _become(whole, piece) if one.kind == "parameter" else piece
    program.take_tensors(taken)
    _fill_tables(model, program)


def _become(whole: Tensor, piece: Tensor) -> Tensor:
    """The parameter ``whole``, which from now on is ``piece``."""
    assert isinstance(whole, nn.Parameter)
    if whole.is_meta:
        # torch keeps tensors of the meta device apart: nothing else can become their data. The two
        # objects exchange what they are, so that whoever holds this one holds the piece.
        fresh = nn.Parameter(piece.detach(), whole.requires_grad)
        torch.utils.swap_tensors(whole, fresh)  # type: ignore[no-untyped-call]
    else:
        whole.data = piece.detach()
    return whole


def _fill_tables(model: nn.Module, program: ParallelModule) -> None:
    """Give the model's own modules the tables that no checkpoint holds, where they are on the meta
    device. The program has real ones.
    """
    tables: Mapping[str, Tensor] = {
        name: program.weights(one.name)
        for one in program.declarations
        if one.kind == "buffer" and not one.persistent
        for name in one.names
    }
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if buffer.is_meta and name in tables:
            owner, leaf = place_in(model, name)
            owner._buffers[leaf] = tables[name]
