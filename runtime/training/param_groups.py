"""Parameter groups of an optimizer that are the same on all ranks: one number, one order, equal
options.

Schedulers keep one value per group, by position, and a checkpoint has one scheduler. So a group
must have the same position on every rank, also where a rank of a pipeline holds none of its
parameters. Example: the options of the embedding are ``{"lr": 0.1}``, those of all blocks ``{}``.
The first of two stages would make the groups ``[lr=0.1, {}]`` of its own parameters, and the second
one ``[{}]``. Both make ``[lr=0.1, {}]`` here, and on the second stage the first group is empty.

Groups stand in the order of their first parameters in the original model, as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.runtime.checkpoint.json_values import decode, encode
from shardwright.runtime.checkpoint.ordering import alike
from shardwright.runtime.errors import CheckpointError, ConfigError, malformed
from shardwright.runtime.ranks.world import World

OptionsOf = Callable[[str, nn.Parameter], Mapping[str, Any]]
"""The options of a parameter, given its name: what users pass as ``param_groups``."""

NOT_OPTIONS = frozenset({"params", "param_names", "param_shards"})
"""What of a group says which parameters it has."""

Members = tuple[tuple[str, ...], ...]
"""The names of the parameters of each group, those on other ranks too, in the original order."""

_HINT = (
    "call build_optimizer with the same options on all ranks; with param_groups=fn(fqn, "
    "parameter) -> options, ranks agree on "
    "the groups that it makes"
)


@dataclass(frozen=True, slots=True)
class AskedGroup:
    """A group that the user asked for. ``names``: of its parameters on this rank, in the order of
    the module.
    """

    options: Mapping[str, Any]
    names: tuple[str, ...]


def asked_groups(
    world: World,
    order: Sequence[str],
    parameters: Mapping[str, nn.Parameter],
    options_of: OptionsOf,
) -> list[AskedGroup]:
    """The groups of parameters with equal options. Collective. ``order``: the names of all
    parameters of the model.

    Raises :class:`ConfigError` if ranks ask for different options of one parameter.
    """
    # The groups of this rank, by their options.
    mine: list[tuple[dict[str, Any], list[str]]] = []
    for name, parameter in parameters.items():
        with malformed(
            ConfigError, "param_groups gives a dict of options for a name and a parameter"
        ):
            options = dict(options_of(name, parameter))
        names = next((names for known, names in mine if alike(known, options)), None)
        if names is None:
            mine.append((options, [name]))
        else:
            names.append(name)
    # A set of parameters travels as a bit mask over the model's order.
    positions = {name: position for position, name in enumerate(order)}
    told = world.all_gather_object(
        [[_described(options), _mask(names, positions)] for options, names in mine]
    )
    # Groups of equal options on different ranks are one.
    joined = _joined([(described, mask) for groups in told for described, mask in groups], order)
    return [_own(described, mine) for described, _ in joined]


def agreed_members(
    world: World, order: Sequence[str], optimizer: Optimizer, names: Mapping[int, str]
) -> Members:
    """Which parameters each group of ``optimizer`` has on all ranks together. Collective.
    ``names``: of its tensors, by id.

    Raises :class:`ConfigError` if its groups have another number or other options on some rank.
    """
    positions = {name: position for position, name in enumerate(order)}
    mine = []
    for group in optimizer.param_groups:
        own = [names[id(tensor)] for tensor in group["params"]]
        mine.append([_described(_options(group)), _mask(own, positions)])
    told = world.all_gather_object(mine)
    members = [0] * len(told[0])
    # The same number of groups with the same options everywhere; their members are joined.
    for rank, groups in enumerate(told):
        _check_alike(told[0], groups, rank)
        members = [mask | int(text, 16) for mask, (_, text) in zip(members, groups, strict=True)]
    _check_apart([(f"group {number}", mask) for number, mask in enumerate(members)], order)
    return tuple(
        tuple(name for position, name in enumerate(order) if mask >> position & 1)
        for mask in members
    )


def _joined(groups: Sequence[tuple[Any, str]], order: Sequence[str]) -> list[tuple[Any, int]]:
    """Groups of all ranks with equal options as one, by their first parameters."""
    joined: list[tuple[Any, int]] = []
    for described, text in groups:
        place = next((i for i, (known, _) in enumerate(joined) if _equal(known, described)), None)
        if place is None:
            joined.append((described, int(text, 16)))
        else:
            joined[place] = (joined[place][0], joined[place][1] | int(text, 16))
    _check_apart([(_in_words(described), mask) for described, mask in joined], order)
    return sorted(joined, key=lambda group: group[1] & -group[1])  # by the lowest bit that is set


def _own(described: Any, mine: Sequence[tuple[dict[str, Any], list[str]]]) -> AskedGroup:
    """The group of these options on this rank; empty if the options are of other ranks' parameters
    only.
    """
    for options, names in mine:
        if _equal(_described(options), described):
            return AskedGroup(options, tuple(names))
    foreign = [key for key, value in described.items() if "object" in value]
    if foreign:
        raise ConfigError(
            f"param_groups gives parameters of another rank an option {foreign[0]!r} that "
            "this rank cannot be told",
            why=f"it is a {described[foreign[0]]['object']}, and all ranks have all groups",
            hint="give groups plain values: numbers, strings, lists, tuples, dicts, or tensors of "
            "one element",
        )
    return AskedGroup({key: decode(value["value"]) for key, value in described.items()}, ())


def _check_alike(first: Sequence[Any], other: Sequence[Any], rank: int) -> None:
    if len(first) != len(other):
        why = f"rank 0 has {len(first)}, rank {rank} has {len(other)}"
        raise ConfigError(
            "optimizer_fn makes another number of parameter groups on some ranks",
            why=why,
            hint=_HINT,
        )
    for number, ((ours, _), (theirs, _)) in enumerate(zip(first, other, strict=True)):
        if not _equal(ours, theirs):
            raise ConfigError(
                f"optimizer_fn makes group {number} with other options on some ranks",
                why=f"{_in_words(ours, theirs)} on rank 0, {_in_words(theirs, ours)} on rank "
                f"{rank}",
                hint=_HINT,
            )


def _check_apart(groups: Sequence[tuple[str, int]], order: Sequence[str]) -> None:
    seen = 0
    for title, mask in groups:
        both = seen & mask
        if both:
            name = order[(both & -both).bit_length() - 1]
            first = next(other for other, known in groups if known & both)
            raise ConfigError(
                f"parameter {name!r} is in different groups on different ranks",
                why=f"{first} and {title}",
                hint="decide by the name or the number of dims: ranks hold pieces, whose sizes "
                "may differ",
            )
        seen |= mask


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def _described(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON. Of values that are not plain, and of large tensors, other ranks are told the
    type only.
    """
    described: dict[str, Any] = {}
    for key, value in options.items():
        try:
            is_plain = not isinstance(value, Tensor) or value.numel() == 1
            described[key] = {"value": encode(value, key)} if is_plain else {"object": "tensor"}
        except CheckpointError:
            described[key] = {"object": type(value).__qualname__}
    return described


def _equal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return alike(_values(ours), _values(theirs))


def _values(described: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: decode(item["value"]) if "value" in item else ("object", item["object"])
        for key, item in described.items()
    }


def _in_words(described: Mapping[str, Any], other: Mapping[str, Any] | None = None) -> str:
    """Options as text; with ``other``, those that differ from it."""
    shown = _values(described)
    if other is not None:
        apart = _values(other)
        shown = {
            key: v
            for key, v in shown.items()
            if key not in apart or not alike({key: v}, {key: apart[key]})
        }
    return ", ".join(f"{key}={value!r}" for key, value in shown.items()) or "no options"


def _mask(names: Sequence[str], positions: Mapping[str, int]) -> str:
    """The parameters as bits of a number, which is short also for models of many parameters."""
    return format(sum(1 << positions[name] for name in names), "x")
