"""Optimizer state by parameter name, so that it can move between plans and between groupings of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardwright.runtime.checkpoint.holdings import Holdings
from shardwright.runtime.checkpoint.ordering import Groups
from shardwright.runtime.errors import CheckpointError

StateDict = dict[str, Any]

GroupNames = Sequence[Sequence[str]]
"""The names of the parameters of each group, in order."""

PARAM_NAMES = "param_names"
"""Where torch keeps the names of a group's parameters, in groups that have them."""


@dataclass(frozen=True, slots=True)
class NamedState:
    """``groups``: the names and options of each parameter group. ``state``: by parameter name, then by key."""

    groups: Groups
    state: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, state_dict: Mapping[str, Any], names: GroupNames) -> NamedState:
        """Read an optimizer's state dict, given the names of its parameters.

        Raises :class:`CheckpointError` if it holds state that belongs to no parameter.
        """
        groups: list[tuple[tuple[str, ...], Mapping[str, Any]]] = []
        by_number: dict[Any, str] = {}
        for group, group_names in zip(state_dict["param_groups"], names, strict=True):
            by_number.update(zip(group["params"], group_names, strict=True))
            groups.append((tuple(group_names), {k: v for k, v in group.items() if k not in ("params", PARAM_NAMES)}))
        foreign = [key for key in state_dict["state"] if key not in by_number]
        if foreign:
            raise CheckpointError(
                f"the optimizer keeps state under {foreign[0]!r}, which is no parameter",
                why="only state that belongs to one parameter can be merged or moved",
            )
        return cls(tuple(groups), {by_number[number]: state for number, state in state_dict["state"].items()})

    @property
    def names(self) -> list[str]:
        return [name for names, _ in self.groups for name in names]

    def to_state_dict(self, order: Iterable[str]) -> StateDict:
        """A state dict that numbers the parameters in ``order``; groups keep theirs."""
        mine = set(self.names)
        numbers = {name: number for number, name in enumerate(name for name in order if name in mine)}
        state = {numbers[name]: dict(self.state[name]) for name in numbers if name in self.state}
        groups = [{**options, "params": [numbers[name] for name in names]} for names, options in self.groups]
        return {"state": state, "param_groups": groups}

    def regrouped(self, names: GroupNames) -> NamedState:
        """With the groups of another optimizer of the same parameters.

        Raises :class:`CheckpointError` if they are not the same, or if a group here would get the options of several.
        """
        origin = {name: index for index, (group, _) in enumerate(self.groups) for name in group}
        problems = [f"{name!r} is not in the saved optimizer" for group in names for name in group if name not in origin]
        wanted = {name for group in names for name in group}
        problems += [f"{name!r} is in the saved optimizer only" for name in origin if name not in wanted]
        options: list[Mapping[str, Any]] = []
        for number, group in enumerate(names):
            sources = {origin[name]: name for name in group if name in origin}
            if len(sources) > 1:
                examples = ", ".join(repr(name) for name in sources.values())
                problems.append(f"group {number} has parameters of several saved groups, such as {examples}")
            # A group that is empty here, on some rank of a pipeline, takes the options at its position.
            source = next(iter(sources), min(number, len(self.groups) - 1))
            options.append(self.groups[source][1])
        if problems:
            raise CheckpointError(
                "the saved optimizer state does not fit the optimizer",
                why=listed(problems),
                hint="build the optimizer of the same parameters in the same groups",
            )
        groups = tuple((tuple(group), chosen) for group, chosen in zip(names, options, strict=True))
        return NamedState(groups, self.state)


def group_names(optimizer: Optimizer, holdings: Holdings) -> list[tuple[str, ...]]:
    """The names of an optimizer's parameters, by group.

    Raises :class:`CheckpointError` if one is not a parameter of the module, or if its state is split over ranks.
    """
    if getattr(optimizer, "shards", ()):
        raise sharded_state_error()
    names = {id(holding.tensor): holding.name for holding in holdings.tensors}
    groups = []
    for group in optimizer.param_groups:
        foreign = [p for p in group["params"] if id(p) not in names]
        if foreign:
            raise CheckpointError(
                "the optimizer updates a parameter that the module does not have",
                why=f"one of shape {list(foreign[0].shape)}",
                hint="pass the module that the optimizer was built for",
            )
        groups.append(tuple(names[id(p)] for p in group["params"]))
    return groups


def named_state(optimizer: Optimizer, holdings: Holdings) -> NamedState:
    """The state of an optimizer by name. Tensors are the optimizer's own."""
    return NamedState.of(optimizer.state_dict(), group_names(optimizer, holdings))


def load_named_state(optimizer: Optimizer, holdings: Holdings, state: NamedState) -> None:
    """Give ``optimizer`` the state, in which tensors are this rank's pieces. They become the optimizer's own."""
    names = group_names(optimizer, holdings)
    copies = {holding.name for holding in holdings.tensors if holding.is_copy}
    regrouped = NamedState(state.groups, {name: kept for name, kept in state.state.items() if name not in copies}).regrouped(
        names
    )
    optimizer.load_state_dict(regrouped.to_state_dict(name for group in names for name in group))


def sharded_state_error() -> CheckpointError:
    """What is raised for the state of a distributed optimizer."""
    return CheckpointError(
        "the state of a distributed optimizer cannot be saved, merged or moved yet",
        why="with use_zero each rank has the state of pieces of the parameters, and checkpoints know whole ones only",
        hint="save optimizer.state_dict() of every rank for the same ranks, or train without use_zero",
    )


def is_like_parameter(name: str, key: str, value: Any, piece_shape: tuple[int, ...], is_cut: bool) -> bool | None:
    """How a value of a parameter's state lies: ``True`` if it is a tensor with an element for each of the parameter's,
    ``False`` if it is a tensor that is whole on every rank, ``None`` for what is no tensor or a single number.

    Raises :class:`CheckpointError` for a tensor of another shape beside a piece: how it would be cut is unknown.
    """
    if not isinstance(value, Tensor):
        return None
    if tuple(value.shape) == piece_shape:
        return True
    if value.numel() == 1:
        return None
    if is_cut:
        raise CheckpointError(
            f"the optimizer state {key!r} of {name!r} cannot be saved",
            why=f"it has shape {list(value.shape)}, and this rank holds a piece {list(piece_shape)} of the parameter",
            hint="state of a parameter that is split over ranks must have the shape of the piece, or be a single number",
        )
    return False


def listed(problems: Sequence[str], limit: int = 20) -> str:
    """Problems as one text, cut short after ``limit``."""
    rest = [f"and {len(problems) - limit} more"] if len(problems) > limit else []
    return "; ".join([*problems[:limit], *rest])
