"""What this rank holds of a model: every tensor of its state dict, as a piece of the whole
tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwright.runtime.module.compiled import compiled_parts
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.module.parameter_names import parameter_names
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.regions import Region

EXTRA_STATE = "_extra_state"
"""The last part of a state dict key that holds no tensor."""


def is_extra_state(key: str) -> bool:
    """Whether a key of a state dict is that of what a module keeps beside its tensors, which may be
    a tensor too.
    """
    return key.rpartition(".")[2] == EXTRA_STATE


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """One parameter or persistent buffer. ``names``: all names the state dict has for it, its first
    one first.

    ``shape``: of the whole tensor; ``region``: what of it ``tensor`` is. ``is_owned``: this rank is
    the first of those that hold the piece, so it is the one to save it. ``is_copy``: other ranks
    train these elements and have the optimizer's state.
    """

    names: tuple[str, ...]
    tensor: Tensor
    shape: tuple[int, ...]
    region: Region
    is_owned: bool
    is_copy: bool = False

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_cut(self) -> bool:
        return self.region != Region.whole(self.shape)


@dataclass(frozen=True, slots=True)
class Holdings:
    """Everything a rank holds of ``module``.

    ``tensors``: in the order of the state dict, each once. ``compiled``: the compiled parts by
    path. ``extra_states``: what other modules keep beside tensors, by state dict key.
    """

    module: nn.Module
    tensors: tuple[Holding, ...]
    compiled: Mapping[str, ParallelModule]
    extra_states: Mapping[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> Holdings:
        """What this rank holds. Ordinary parts are whole on every rank, and rank 0 owns them."""
        parts = {
            path: part
            for path, part in compiled_parts(module).items()
            if isinstance(part, ParallelModule)
        }
        # Tensors of compiled modules by identity, as tied ones have several names.
        declared = {
            id(part.weights(declaration.name)): (part, declaration)
            for part in parts.values()
            for declaration in part.declarations
            if declaration.is_initial_weight
        }
        names: dict[int, list[str]] = {}
        tensors: dict[int, Tensor] = {}
        extra_states = {}
        # The state dict says what is saved, under which names.
        for key, value in module.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor) and not is_extra_state(key):
                names.setdefault(id(value), []).append(key)
                tensors[id(value)] = value
            elif key.removesuffix(EXTRA_STATE).removesuffix(".") not in parts:
                extra_states[key] = value
        holdings = []
        # Compiled: a piece with a region. Ordinary: all of it, owned by rank 0.
        for identity, tensor in tensors.items():
            if identity in declared:
                part, declaration = declared[identity]
                ranks, layout = part.ranks_of(declaration), declaration.layout
                region, is_owned = (
                    Region.of(layout, ranks.mesh, ranks.coords),
                    part.is_counted(declaration),
                )
                is_copy = part.is_copy(declaration)
                holdings.append(
                    Holding(tuple(names[identity]), tensor, layout.shape, region, is_owned, is_copy)
                )
            else:
                shape = tuple(tensor.shape)
                is_owned = current_world().rank == 0
                holdings.append(
                    Holding(tuple(names[identity]), tensor, shape, Region.whole(shape), is_owned)
                )
        return cls(module, tuple(holdings), parts, extra_states)

    @property
    def class_name(self) -> str:
        """The name of the class of the module, which a generated class shares with the user's."""
        return type(self.module).__name__

    def parameter_names(self) -> list[str]:
        """The first names of all parameters of the model in the original order, those of other
        pipeline stages too.
        """
        return parameter_names(self.module)

    def first_names(self) -> dict[str, str]:
        """The first name of every tensor of the model by each of its names, those on other pipeline
        stages too.
        """
        first = {name: holding.name for holding in self.tensors for name in holding.names}
        for path, part in self.compiled.items():
            prefix = f"{path}." if path else ""
            for declaration in part.all_declarations():
                for name in declaration.names:
                    first.setdefault(prefix + name, prefix + declaration.name)
        return first

    def all_names(self) -> set[str]:
        """All names of what the state dicts of all ranks hold."""
        names = {name for holding in self.tensors for name in holding.names} | set(
            self.extra_states
        )
        for path, part in self.compiled.items():
            prefix = f"{path}." if path else ""
            names |= {
                prefix + name
                for d in part.all_declarations()
                if d.is_initial_weight
                for name in d.names
            }
        return names

    def random_states(self) -> dict[str, dict[str, int]]:
        """Seed, step and microbatch of each compiled part."""
        return {path: part.rng.to_json() for path, part in self.compiled.items()}

    def load_random_states(self, states: Mapping[str, Mapping[str, int]]) -> None:
        """Continue the random numbers of those parts that ``states`` has."""
        for path, part in self.compiled.items():
            if path in states:
                part.rng.load_json(states[path])

    def load_extra_states(self, states: Mapping[str, Any]) -> None:
        """Give modules back what they keep beside tensors."""
        for key in self.extra_states:
            if key in states:
                path = key.removesuffix(EXTRA_STATE).removesuffix(".")
                self.module.get_submodule(path).set_extra_state(states[key])
