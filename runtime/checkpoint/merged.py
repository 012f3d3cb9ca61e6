"""Merged state dicts: what all ranks hold as one, for the original module and its optimizer; and
back into the ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.runtime.arguments import checked, param_groups_of
from shardwright.runtime.checkpoint.holdings import EXTRA_STATE, Holding, Holdings
from shardwright.runtime.checkpoint.optimizer_state import (
    MASTERS,
    PARAM_NAMES,
    NamedState,
    StateDict,
    group_members,
    group_names,
    listed,
    same_class,
    state_dict_for,
)
from shardwright.runtime.checkpoint.ordering import ordered_groups, reordered, united, united_groups
from shardwright.runtime.checkpoint.state_place import (
    PARAM_SHARDS,
    Bounds,
    StatePlace,
    state_places,
)
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.regions import Region, copy_shared, num_covered
from shardwright.runtime.zero.state_masters import MASTER
from shardwright.runtime.zero.whole_tensors import WHOLE

RANDOM = "shardwright.random"
"""Where the metadata of a merged state dict keeps seed, step and microbatch of the compiled
modules.
"""


@checked
def merge_state_dicts(
    module_state_dicts: Sequence[Mapping[str, Any]],
    optimizer_state_dicts: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[StateDict, StateDict | None]:
    """One state dict for the original module, and one for its optimizer, of those of all ranks.

    The ranks' own state dicts or deduped ones (see :func:`deduped_state_dict`), those of the first
    unit or of all; under ZeRO those of all. Where units differ, in statistics of batch norm, the
    first unit's are taken. Tied parameters stay one tensor under all names. The optimizer's state
    is numbered in the order of the original ``parameters()``; its groups are those that
    ``build_optimizer`` made. Masters lie beside it under ``"masters"``, by number: other optimizers
    do not look there. Tensors are new, on the CPU.

    Raises :class:`CheckpointError` if pieces are missing, or if state of an optimizer cannot be
    merged.
    """
    if not module_state_dicts:
        raise CheckpointError("there is nothing to merge", why="module_state_dicts is empty")
    if optimizer_state_dicts is not None and len(optimizer_state_dicts) != len(module_state_dicts):
        raise CheckpointError(
            "the state dicts of module and optimizer do not belong together",
            why=f"there are {len(module_state_dicts)} of the module and "
            f"{len(optimizer_state_dicts)} of the optimizer",
            hint="pass one of each for every rank, in the same order",
        )
    ranks = [_RankState(state) for state in module_state_dicts]
    # The sort is stable and by unit: where copies differ, the first unit's are taken.
    order = sorted(range(len(ranks)), key=lambda index: ranks[index].unit)
    module_state = _merge_modules([ranks[index] for index in order])
    if optimizer_state_dicts is None:
        return module_state, None
    pairs = [(ranks[index], optimizer_state_dicts[index]) for index in order]
    return module_state, _merge_optimizers(pairs, tuple(module_state))


@checked
def load_merged_state_dicts(
    module: nn.Module,
    module_state_dict: Mapping[str, Any],
    optimizer: Optimizer | None = None,
    optimizer_state_dict: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
) -> None:
    """Load the state of the original module, and of its optimizer, into this rank's part under any
    plan.

    Every rank passes the whole state dicts and takes its pieces. ``device``: where the module moves
    first (default: it stays where it is). No communication.

    Raises :class:`CheckpointError` naming what is missing, left over or has another shape.
    """
    if device is not None:
        module.to(device)
    holdings = Holdings.of(module)
    # Refuse first, then write.
    values = _values_for(holdings, module_state_dict)
    own_state = None
    if optimizer is not None:
        named = _named_by_number(optimizer, holdings, optimizer_state_dict)
        own_state = state_dict_for(
            optimizer, holdings, _cut_state(named, state_places(optimizer, holdings))
        )
    # Each tensor takes its region of the whole.
    for holding, value in values:
        copy_shared(holding.tensor, holding.region, value, Region.whole(holding.shape))
    holdings.load_extra_states(module_state_dict)
    holdings.load_random_states(getattr(module_state_dict, "_metadata", {}).get(RANDOM, {}))
    if optimizer is not None and own_state is not None:
        with same_class(optimizer):
            optimizer.load_state_dict(own_state)


class _RankState:
    """One rank's state dict of a module, with what its extra states say about the pieces."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = state
        self.unit = 0
        self.random: dict[str, Mapping[str, int]] = {}
        self.orders: list[list[str]] = []
        self._places: dict[str, tuple[tuple[int, ...], Region]] = {}
        self._copies: set[str] = set()
        for key, extra in state.items():
            if is_plan(key, extra):
                # A part of a larger model writes its plan under its own path:
                # ``encoder._extra_state``.
                prefix = key.removesuffix(EXTRA_STATE)
                self.unit = max(self.unit, extra["unit"])
                self.random[prefix.removesuffix(".")] = extra["rng"]
                self.orders.append([prefix + name for name in extra["parameters"]])
                self._read(prefix, extra)

    def _read(self, prefix: str, extra: Mapping[str, Any]) -> None:
        for name, text in extra["layouts"].items():
            axes, index = extra["places"].get(name, (extra["mesh"], extra["rank"]))
            mesh = Mesh.from_json(axes)
            layout = Layout.parse(text)
            self._places[prefix + name] = layout.shape, Region.of(layout, mesh, mesh.coords(index))
        self._copies |= {prefix + name for name in extra.get("copies", ())}

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Without copies of what other ranks hold, which may be cut in another way there."""
        return (
            (name, x)
            for name, x in self.state.items()
            if isinstance(x, Tensor) and name not in self._copies
        )

    def others(self) -> dict[str, Any]:
        """Extra states of modules that were not compiled."""
        return {
            key: v
            for key, v in self.state.items()
            if not isinstance(v, Tensor) and not is_plan(key, v)
        }

    def place(self, name: str, local_shape: tuple[int, ...]) -> tuple[tuple[int, ...], Region]:
        """The shape of the whole and the region of this rank's piece; a tensor of an ordinary
        module is whole.
        """
        return self._places.get(name, (local_shape, Region.whole(local_shape)))

    def state_place(
        self, name: str, shapes: Mapping[str, tuple[int, ...]], bounds: Bounds | None
    ) -> StatePlace:
        """Where the state of a parameter lies. ``shapes``: of what compiled modules do not know.
        ``bounds``: under ZeRO, which elements of the flattened piece are the rank's.
        """
        if name not in self._places and name not in shapes:
            raise CheckpointError(
                f"the optimizer has state of {name!r}, which is in no state dict of the module",
                hint="pass the state dicts of module and optimizer of all ranks",
            )
        return StatePlace.saved(name, *self.place(name, shapes.get(name, ())), bounds)

    def has_copy(self, name: str) -> bool:
        """Whether other ranks train this parameter."""
        return name in self._copies


class _Assembly:
    """Whole tensors in the making, by name, or by the name of the parameter and the key of its
    state.
    """

    def __init__(self) -> None:
        self.wholes: dict[tuple[str, ...], Tensor] = {}
        self._seen: dict[tuple[str, ...], set[Region]] = {}
        self._covered: dict[tuple[str, ...], dict[Region, None]] = {}
        self._shapes: dict[tuple[str, ...], tuple[int, ...]] = {}

    def add(
        self, name: tuple[str, ...], value: Tensor, shape: tuple[int, ...], region: Region
    ) -> None:
        """Copy a piece into its place, unless it is a copy of one that was added before.

        Pieces may overlap: of parameters that lie in copies, ranks with other neighbours in a
        bucket split the state elsewhere.
        """
        if tuple(value.shape) != region.shape:
            raise CheckpointError(
                f"{'/'.join(name)!r} has another shape than its layout says",
                why=f"the state dict holds {list(value.shape)}, the layout gives "
                f"{list(region.shape)}",
            )
        seen = self._seen.setdefault(name, set())
        if region in seen:
            return
        seen.add(region)
        whole = self.wholes.setdefault(name, torch.empty(shape, dtype=value.dtype))
        copy_shared(whole, Region.whole(shape), value, region)
        self.cover(name, shape, (region,))

    def cover(
        self, name: tuple[str, ...], shape: tuple[int, ...], regions: Iterable[Region]
    ) -> None:
        """Take note that these elements are there, of a tensor that must be there as a whole."""
        self._shapes[name] = shape
        self._covered.setdefault(name, {}).update(dict.fromkeys(regions))

    def finish(self, hint: str) -> None:
        """Raise :class:`CheckpointError` if pieces are missing."""
        problems = []
        for name, regions in self._covered.items():
            whole = Region.whole(self._shapes[name])
            found = num_covered([whole], list(regions))
            if found < whole.num_elements:
                problems.append(f"{found} of {whole.num_elements} elements of {'/'.join(name)!r}")
        if problems:
            raise CheckpointError(
                "the state dicts do not cover the whole model", why=listed(problems), hint=hint
            )


def is_plan(key: str, value: Any) -> bool:
    """Whether an entry of a state dict is what a compiled module says about its plan."""
    return (
        key.endswith(EXTRA_STATE)
        and isinstance(value, Mapping)
        and {"mesh", "rank", "layouts", "unit"} <= value.keys()
    )


def set_random_states(state: StateDict, random: Mapping[str, Mapping[str, int]]) -> None:
    """Let a merged state dict carry seed, step and microbatch of compiled modules, which the
    original module has no place for.

    torch hands the metadata of a state dict on, and ignores what it does not know there.
    """
    state._metadata = OrderedDict({RANDOM: dict(random)})  # type: ignore[attr-defined]


def _merge_modules(ranks: Sequence[_RankState]) -> StateDict:
    assembly = _Assembly()
    tied: dict[str, str] = {}
    names: tuple[str, ...] = ()
    others: dict[str, Any] = {}
    # Every rank puts its pieces into the wholes; what is not tensor is taken from the first.
    for rank in ranks:
        first_names: dict[tuple[Any, ...], str] = {}
        # Two names of one piece of memory are tied.
        for name, value in rank.tensors():
            identity = (
                value.untyped_storage()._cdata,
                value.storage_offset(),
                value.shape,
                value.stride(),
            )
            if value.numel():
                tied.setdefault(name, first_names.setdefault(identity, name))
            shape, region = rank.place(name, tuple(value.shape))
            assembly.add((name,), value, shape, region)
        others = {**rank.others(), **others}
        # Names in the order of the model, also where stages hold different ones.
        names = united(
            names, tuple(name for name in rank.state if not is_plan(name, rank.state[name]))
        )
    assembly.finish("pass the state dicts of all ranks of a unit")
    for order in ranks[0].orders:
        names = tuple(reordered(names, order))
    result: StateDict = OrderedDict()
    for name in names:
        whole = assembly.wholes.get((tied.get(name, name),))
        result[name] = others[name] if whole is None else whole
    random: dict[str, Mapping[str, int]] = {}
    for rank in ranks:
        random = {**rank.random, **random}
    set_random_states(result, random)
    return result


def _merge_optimizers(
    ranks: Sequence[tuple[_RankState, Mapping[str, Any]]], order: Sequence[str]
) -> StateDict:
    assembly = _Assembly()
    state: dict[str, dict[str, Any]] = {}
    merged: NamedState | None = None
    # Deduped state dicts have the parameters of ordinary modules on one rank, and their state on
    # any.
    shapes = {
        name: tuple(value.shape)
        for rank, _ in ranks
        for name, value in rank.state.items()
        if isinstance(value, Tensor)
    }
    for rank, state_dict in ranks:
        names, bounds = _saved_names(state_dict), _saved_bounds(state_dict)
        named = NamedState.of(state_dict, names)
        merged = named if merged is None else _with_names(merged, named)
        # A parameter without state may have none anywhere, or lie on a rank that was left out.
        for name in bounds:
            place = rank.state_place(name, shapes, bounds[name])
            assembly.cover((name,), place.shape, place.regions)
        for name, entries in named.state.items():
            place = rank.state_place(name, shapes, bounds.get(name))
            if place.is_empty or rank.has_copy(name):
                continue
            for key, value in entries.items():
                if place.is_like_parameter(key, value):
                    for view, region in place.views(value):
                        assembly.add((name, key), view, place.shape, region)
                    value = assembly.wholes[name, key]
                elif isinstance(value, Tensor):
                    value = value.detach().to("cpu", copy=True)
                state.setdefault(name, {}).setdefault(key, value)
    assembly.finish(
        "pass the state dicts of all ranks; under ZeRO the units have different parts of the state"
    )
    assert merged is not None
    first = NamedState.of(ranks[0][1], _saved_names(ranks[0][1])).groups
    return NamedState(ordered_groups(merged.groups, first, order), state).to_whole_state_dict(order)


def _saved_names(state_dict: Mapping[str, Any]) -> list[list[str]]:
    groups = param_groups_of(state_dict)
    if not all(PARAM_NAMES in group for group in groups):
        raise CheckpointError(
            "the optimizer's state dict does not name its parameters",
            why=f"a parameter group has no {PARAM_NAMES!r}",
            hint="make the optimizer with shardwright.build_optimizer",
        )
    return [group[PARAM_NAMES] for group in groups]


def _saved_bounds(state_dict: Mapping[str, Any]) -> dict[str, Bounds]:
    """The elements of each parameter's flattened piece that are the rank's, by name, as far as the
    state dict says so.
    """
    return {
        name: WHOLE if bounds == WHOLE else (bounds[0], bounds[1])
        for group in param_groups_of(state_dict)
        for name, bounds in zip(group[PARAM_NAMES], group.get(PARAM_SHARDS, ()), strict=False)
        if bounds is not None
    }


def _with_names(merged: NamedState, named: NamedState) -> NamedState:
    """Unite the parameters of both in each group, as stages of a pipeline have different ones."""
    return NamedState(united_groups(merged.groups, named.groups), {})


def _values_for(holdings: Holdings, state: Mapping[str, Any]) -> list[tuple[Holding, Tensor]]:
    """The whole tensor for everything this rank holds."""
    found, problems = [], []
    known = holdings.all_names()
    # A tied tensor may be there under any of its names.
    for holding in holdings.tensors:
        name = next((name for name in holding.names if name in state), None)
        if name is None:
            problems.append(f"{holding.name!r} is missing")
        elif tuple(state[name].shape) != holding.shape:
            problems.append(
                f"{name!r} is {list(state[name].shape)} there and {list(holding.shape)} here"
            )
        else:
            found.append((holding, state[name]))
    problems += [f"{name!r} is not in the module" for name in state if name not in known]
    if problems:
        raise CheckpointError(
            f"the state dict does not fit {holdings.class_name}", why=listed(problems)
        )
    return found


def _named_by_number(
    optimizer: Optimizer, holdings: Holdings, state_dict: Mapping[str, Any] | None
) -> NamedState:
    """The state of the original optimizer by name: its numbers are those of the original order of
    the parameters.
    """
    if state_dict is None:
        raise CheckpointError(
            "there is no state for the optimizer", hint="pass optimizer_state_dict too"
        )
    mine = {name for group in group_names(optimizer, holdings) for name in group}
    members = {name for group in group_members(optimizer, holdings) for name in group}
    # The original optimizer numbers parameters in the order of the original model.
    order = [name for name in holdings.parameter_names() if name in members]
    numbers = sorted(number for group in param_groups_of(state_dict) for number in group["params"])
    if len(numbers) != len(order):
        raise CheckpointError(
            "the state dict does not fit the optimizer",
            why=f"it is for {len(numbers)} parameters, there are {len(order)}",
        )
    by_number = dict(zip(numbers, order, strict=True))
    names = [
        [by_number[number] for number in group["params"]] for group in param_groups_of(state_dict)
    ]
    named = NamedState.of(state_dict, names)
    state = {name: dict(entries) for name, entries in named.state.items() if name in mine}
    # Masters come beside the state, under the same numbers.
    for number, master in state_dict.get(MASTERS, {}).items():
        if by_number[number] in mine:
            state.setdefault(by_number[number], {})[MASTER] = master
    return NamedState(named.groups, state)


def _cut_state(named: NamedState, places: Mapping[str, StatePlace]) -> NamedState:
    """The parts that this rank has, of state whose tensors are whole. All are copies: optimizers
    count steps in place, and ranks that are threads may share the whole.
    """
    state: dict[str, dict[str, Any]] = {}
    for name, entries in named.state.items():
        state[name] = {}
        for key, value in entries.items():
            is_tensor = isinstance(value, Tensor)
            state[name][key] = _cut(value, places[name]) if is_tensor else value
    return NamedState(named.groups, state)


def _cut(whole: Tensor, place: StatePlace) -> Tensor:
    if tuple(whole.shape) != place.shape:
        return whole.clone()
    mine = place.new(whole.dtype)
    for view, region in place.views(mine):
        copy_shared(view, region, whole, Region.whole(place.shape))
    return mine
