"""Optimizer state by parameter name, so that it can move between plans and between groupings of the
parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from shardwright.runtime.checkpoint.holdings import Holdings
from shardwright.runtime.checkpoint.ordering import Groups
from shardwright.runtime.checkpoint.state_place import PARAM_SHARDS, shards_of, state_places
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.zero.state_masters import MASTER

StateDict = dict[str, Any]

GroupNames = Sequence[Sequence[str]]
"""The names of the parameters of each group, in order."""

PARAM_NAMES = "param_names"
"""Where torch keeps the names of a group's parameters, in groups that have them."""

MASTERS = "masters"
"""Where the state dict for the original optimizer keeps masters, by number: beside its state, as it
would load them as such.
"""

_NO_OPTIONS = frozenset({"params", PARAM_NAMES, PARAM_SHARDS})


@dataclass(frozen=True, slots=True)
class NamedState:
    """``groups``: the names and options of each parameter group. ``state``: by parameter name, then
    by key.
    """

    groups: Groups
    state: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, state_dict: Mapping[str, Any], names: GroupNames) -> NamedState:
        """Read an optimizer's state dict, given the names of its parameters.

        Raises :class:`CheckpointError` if it holds state that belongs to no parameter.
        """
        groups: list[tuple[tuple[str, ...], Mapping[str, Any]]] = []
        # Torch numbers parameters through all groups.
        by_number: dict[Any, str] = {}
        for group, group_names in zip(state_dict["param_groups"], names, strict=True):
            by_number.update(zip(group["params"], group_names, strict=True))
            groups.append(
                (tuple(group_names), {k: v for k, v in group.items() if k not in _NO_OPTIONS})
            )
        foreign = [key for key in state_dict["state"] if key not in by_number]
        if foreign:
            raise CheckpointError(
                f"the optimizer keeps state under {foreign[0]!r}, which is no parameter",
                why="only state that belongs to one parameter can be merged or moved",
            )
        return cls(
            tuple(groups),
            {by_number[number]: state for number, state in state_dict["state"].items()},
        )

    @property
    def names(self) -> list[str]:
        return [name for names, _ in self.groups for name in names]

    def to_state_dict(self, order: Iterable[str]) -> StateDict:
        """A state dict that numbers the parameters in ``order``; groups keep theirs."""
        mine = set(self.names)
        numbers = {
            name: number for number, name in enumerate(name for name in order if name in mine)
        }
        state = {numbers[name]: dict(self.state[name]) for name in numbers if name in self.state}
        groups = [
            {**options, "params": [numbers[name] for name in names]}
            for names, options in self.groups
        ]
        return {"state": state, "param_groups": groups}

    def to_whole_state_dict(self, order: Iterable[str]) -> StateDict:
        """The state dict for the original optimizer, which has no masters. If there are any, they
        lie apart, as :data:`MASTERS`.
        """
        state_dict = self.to_state_dict(order)
        masters = {
            number: entries.pop(MASTER)
            for number, entries in state_dict["state"].items()
            if MASTER in entries
        }
        # State that was a master alone is none for an optimizer that knows no masters.
        state_dict["state"] = {
            n: entries for n, entries in state_dict["state"].items() if entries or n not in masters
        }
        return {**state_dict, MASTERS: masters} if masters else state_dict

    def sources(self, members: GroupNames) -> list[int]:
        """Which saved group each group of another optimizer of the same parameters continues.
        ``members``: the names of its parameters, by group, those on other ranks too.

        Raises :class:`CheckpointError` if the parameters are not the same, or if a group would get
        the options of several.
        """
        # The saved group of each parameter.
        origin = {name: index for index, (group, _) in enumerate(self.groups) for name in group}
        problems = [
            f"{name!r} is not in the saved optimizer"
            for group in members
            for name in group
            if name not in origin
        ]
        wanted = {name for group in members for name in group}
        problems += [
            f"{name!r} is in the saved optimizer only" for name in origin if name not in wanted
        ]
        chosen = []
        # A group continues the one that all of its parameters come from.
        for number, group in enumerate(members):
            sources = {origin[name]: name for name in reversed(group) if name in origin}
            if len(sources) > 1:
                examples = ", ".join(repr(name) for _, name in sorted(sources.items()))
                problems.append(
                    f"group {number} has parameters of several saved groups, such as {examples}"
                )
            # A group without parameters on any rank takes the options at its position.
            chosen.append(next(iter(sources), min(number, len(self.groups) - 1)))
        if problems:
            raise CheckpointError(
                "the saved optimizer state does not fit the optimizer",
                why=listed(problems),
                hint="build the optimizer of the same parameters in the same groups",
            )
        return chosen

    def regrouped(self, names: GroupNames, members: GroupNames) -> NamedState:
        """A state with the groups of another optimizer of the same parameters.

        ``names`` are those on this rank, ``members`` all.

        Raises :class:`CheckpointError` as :meth:`sources` does.
        """
        options = [self.groups[source][1] for source in self.sources(members)]
        groups = tuple((tuple(group), chosen) for group, chosen in zip(names, options, strict=True))
        return NamedState(groups, self.state)


def group_members(optimizer: Optimizer, holdings: Holdings) -> GroupNames:
    """The names of an optimizer's parameters by group, those on other ranks too."""
    return getattr(optimizer, "group_members", None) or group_names(optimizer, holdings)


def group_names(optimizer: Optimizer, holdings: Holdings) -> list[tuple[str, ...]]:
    """The names of an optimizer's parameters, by group.

    Raises :class:`CheckpointError` if one is not a parameter of the module.
    """
    names = {id(holding.tensor): holding.name for holding in holdings.tensors}
    # With ZeRO an optimizer is given shards in the place of parameters; they go by the same names.
    names |= {
        id(shard.tensor): names[id(shard.parameter)]
        for shard in shards_of(optimizer)
        if id(shard.parameter) in names
    }
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


@contextmanager
def same_class(optimizer: Optimizer) -> Iterator[None]:
    """Refuse the state of an optimizer of another class, which the block has loaded.

    ``torch.optim`` takes the options of any: SGD would miss its ``momentum`` in the next step.
    Those that came with later versions of torch, a class adds by itself while it loads.

    Raises :class:`CheckpointError` naming the options that a group has lost.
    """
    # What is no default, a scheduler has added. Loading adds to the defaults, not to the groups.
    before = [[name for name in optimizer.defaults if name in g] for g in optimizer.param_groups]
    yield
    for number, (names, group) in enumerate(zip(before, optimizer.param_groups, strict=False)):
        missing = [name for name in names if name not in group]
        if missing:
            raise CheckpointError(
                "the saved state is that of another optimizer",
                why=f"group {number} has no {', '.join(map(repr, missing))} in it",
                hint="load into the class that was saved, or leave out optimizer=, which then "
                "starts afresh",
            )


def state_dict_for(
    optimizer: Optimizer, holdings: Holdings, state: NamedState, members: GroupNames | None = None
) -> StateDict:
    """What ``optimizer`` can load of the state, in which tensors are this rank's pieces. They
    become the optimizer's own.

    ``members``: the names that the groups of ``state`` have to have (default: those of the
    optimizer's on all ranks).

    Masters that ``state`` lacks are the parameters as they are then. Those that ``optimizer`` has
    no place for are left out.

    Raises :class:`CheckpointError` if the state is of other parameters, or of others in one group.
    """
    names, places = group_names(optimizer, holdings), state_places(optimizer, holdings)
    copies = {holding.name for holding in holdings.tensors if holding.is_copy}
    empty = {name for name, place in places.items() if place.is_empty}
    kept = {}
    for name, entries in state.state.items():
        if name in copies | empty:
            continue
        has_master = places[name].has_master
        kept[name] = {key: x for key, x in entries.items() if key != MASTER or has_master}
    # Some optimizers make their state when they are made, and miss it later even for nothing at
    # all.
    kept |= {
        name: dict(entries)
        for name, entries in named_state(optimizer, holdings).state.items()
        if name in empty
    }
    regrouped = NamedState(
        state.groups, {name: entries for name, entries in kept.items() if entries}
    ).regrouped(names, group_members(optimizer, holdings) if members is None else members)
    state_dict = regrouped.to_state_dict(name for group in names for name in group)
    for group, own in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        if PARAM_SHARDS in own:
            group[PARAM_SHARDS] = own[PARAM_SHARDS]
    return state_dict


MAX_LISTED = 20
"""How many problems an error names."""


def listed(problems: Sequence[str]) -> str:
    """Problems as one text, cut short after :data:`MAX_LISTED`."""
    rest = [f"and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
    return "; ".join([*problems[:MAX_LISTED], *rest])
