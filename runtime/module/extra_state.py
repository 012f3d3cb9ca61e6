"""What the state dict of a rank holds besides tensors: of which part of which plan it is, and where
random numbers stood.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.module.compiled import CompiledModule

_HINT = "load it where it was saved, or merge the state dicts of all ranks and load the merged one"


def extra_state(module: CompiledModule) -> dict[str, Any]:
    """Layouts, coordinates and random numbers of this rank, as JSON values.

    ``places``: the mesh and the rank on it of tensors that lie on another mesh than the unit's, in
    a pipeline.
    ``parameters``: those of the whole model, in the original order.
    """
    # What a checkpoint restores; the rest is made anew with the module.
    saved = [declaration for declaration in module.declarations if declaration.is_initial_weight]
    staged = [(d, module.ranks_of(d)) for d in saved if module.ranks_of(d) is not module.ranks]
    return {
        "mesh": module.mesh.to_json(),
        "rank": module.rank,
        "unit": module.ranks.unit,
        "layouts": {
            name: str(declaration.layout) for declaration in saved for name in declaration.names
        },
        "places": {
            name: [ranks.mesh.to_json(), ranks.mesh.rank(ranks.coords)]
            for declaration, ranks in staged
            for name in declaration.names
        },
        "parameters": [d.name for d in module.all_declarations() if d.kind == "parameter"],
        "rng": module.rng.to_json(),
    }


def check_extra_state(module: CompiledModule, state: Mapping[str, Any]) -> None:
    """Refuse a state that is not of this rank under this plan. Raises :class:`CheckpointError`."""
    mine, owner = extra_state(module), type(module).__name__
    # Shapes alone would not tell: the pieces of two ranks are mostly of one size.
    for part, title in (("mesh", "mesh"), ("rank", "plan rank")):
        if state[part] != mine[part]:
            raise CheckpointError(
                f"the state dict of {owner} is of another {title}",
                why=f"it was saved with {title} {state[part]}, here it is {mine[part]}",
                hint=_HINT,
            )
    for name in sorted(state["places"].keys() & mine["places"].keys()):
        if state["places"][name] != mine["places"][name]:
            raise CheckpointError(
                f"the state dict of {owner} holds another piece of {name!r}",
                why=f"it was saved at place {state['places'][name]} (mesh, rank on it), here is "
                f"{mine['places'][name]}",
                hint=_HINT,
            )
    for name in sorted(state["layouts"].keys() & mine["layouts"].keys()):
        if state["layouts"][name] != mine["layouts"][name]:
            raise CheckpointError(
                f"the state dict of {owner} holds {name!r} in another layout",
                why=f"it was saved as {state['layouts'][name]}, here it is {mine['layouts'][name]}",
                hint=_HINT,
            )


def check_stages(module: CompiledModule, saved: Any, mine: Any) -> None:
    """Refuse the state of a pipeline cut otherwise. ``saved``, ``mine``: mesh and ranks of every
    stage, as JSON values.
    """
    if saved != mine:
        raise CheckpointError(
            f"the state dict of {type(module).__name__} is of other pipeline stages",
            why=f"it was saved with stages (mesh, ranks) {saved}, here they are {mine}",
            hint=_HINT,
        )


def check_holds_wholes(module: CompiledModule, key: str) -> None:
    """Refuse a state dict of the original module, which lacks ``key``, where this rank holds a
    piece of some tensor.
    """
    for declaration in module.declarations:
        layout, ranks = declaration.layout, module.ranks_of(declaration)
        if (
            declaration.is_initial_weight
            and layout.local_shape(ranks.mesh, ranks.coords) != layout.shape
        ):
            raise CheckpointError(
                f"the state dict has no layouts for {type(module).__name__}",
                why=f"{key!r} is missing, and this rank holds a piece of {declaration.name!r}: "
                f"{layout}",
                hint="load the state dict that this rank saved, or a merged one with "
                "load_merged_state_dicts",
            )
