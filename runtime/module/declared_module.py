"""The tensors of a compiled module on one rank: declared, made, found by name, replaced.

A generated class declares them:

    def declare(self):
        self.parameter("up.weight", "[32/tp, 8]", torch.float64)

On each of two ranks of ``tp`` that makes a parameter of shape ``[16, 8]``, which lies in a tree of
scopes under its original name: ``self.up.weight``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from shardwright.runtime.errors import DistributedError
from shardwright.runtime.file_digests import ChunkDigests
from shardwright.runtime.layout import Layout
from shardwright.runtime.mesh import ZERO
from shardwright.runtime.module.call_checks import (
    StepsWithoutSums,
    check_reduced,
    is_summed,
)
from shardwright.runtime.module.compiled import CompiledModule
from shardwright.runtime.module.declarations import Declaration, DeclaredParameter
from shardwright.runtime.module.extra_state import check_holds_wholes
from shardwright.runtime.module.scope import Place, place
from shardwright.runtime.module.weights import WeightFiles
from shardwright.runtime.ops.random import Draw
from shardwright.runtime.ops.random_functions import RandomFunctions, add_function
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.world import World
from shardwright.runtime.training.clipping import PART, PartOfModel, note_part
from shardwright.runtime.training.gradnorm import counts_here


class DeclaredModule(CompiledModule):
    """One rank's part of a compiled module, as far as its tensors are concerned.

    Set by the generated class: ``joined_axes``, the sets of axes that one adapter goes over;
    ``zero``, over how many units parameters are stored in pieces. ``weight_digests``: what the
    files of initial values must be; the loader sets it.
    """

    joined_axes: ClassVar[Sequence[tuple[str, ...]]] = ()
    zero: ClassVar[int] = 1
    weight_digests: ClassVar[Mapping[str, ChunkDigests]] = {}

    random: RandomFunctions
    _declarations: dict[str, Declaration]
    _places: dict[str, tuple[Place, ...]]
    _parameters_declared: list[DeclaredParameter]
    _steps_without_sums: StepsWithoutSums
    _are_replaced: bool = False  # others may lie in the place of the parameters, for a good reason
    _unit: Communicator
    _stored_over_units: RankMesh
    _device: torch.device

    def _make_groups(self, world: World) -> None:
        self.ranks = RankMesh(self.mesh, world)
        if self.ranks.rank != self.rank:
            raise DistributedError(
                f"{type(self).__name__} is the part of plan rank {self.rank}, but this is "
                f"rank {world.rank}",
                why=f"in units of {self.mesh.size} that is plan rank {self.ranks.rank}",
                hint="let shardwright.parallelize or load_class choose the file of this rank",
            )
        self._unit = self.ranks.group(self.mesh.names)
        for axes in self.joined_axes:
            self.ranks.join(axes)
        if self.ranks.num_units % self.zero:
            raise DistributedError(
                f"{type(self).__name__} stores its parameters in pieces over {self.zero} units",
                why=f"{world.size} ranks in units of {self.mesh.size} are {self.ranks.num_units} "
                "unit(s)",
                hint=f"start a multiple of {self.zero * self.mesh.size} ranks, or compile for "
                "these with use_zero=3",
            )
        self._stored_over_units = self.ranks.over_units(self.zero)

    # What a generated ``declare`` calls

    def declare(self) -> None:
        """Name every tensor, and what draws random numbers. A generated class names tensors in the
        order of the original ``named_parameters()``.

        That order becomes the order of ``parameters()``, by which optimizers number their state.
        """
        raise NotImplementedError(
            f"{type(self).__name__} is no generated class: it does not declare its tensors"
        )

    def parameter(
        self,
        name: str,
        layout: str,
        dtype: torch.dtype,
        *,
        aliases: tuple[str, ...] = (),
        requires_grad: bool = True,
        stage: int | None = None,
    ) -> None:
        """Declare a parameter by FQN. ``aliases``: its other FQNs if it is tied. ``layout`` is the
        text of a layout, on the mesh of ``stage`` in a pipeline (the first one that this rank runs,
        if several hold it).
        """
        parsed = Layout.parse(layout)
        self._declare(
            Declaration(
                name, "parameter", parsed, dtype, aliases, requires_grad=requires_grad, stage=stage
            )
        )

    def buffer(
        self,
        name: str,
        layout: str,
        dtype: torch.dtype,
        *,
        aliases: tuple[str, ...] = (),
        persistent: bool = True,
        stage: int | None = None,
    ) -> None:
        """Declare a buffer by FQN."""
        self._declare(
            Declaration(
                name, "buffer", Layout.parse(layout), dtype, aliases, persistent, stage=stage
            )
        )

    def constant(
        self, name: str, layout: str, dtype: torch.dtype, *, stage: int | None = None
    ) -> None:
        """Declare a tensor that the traced code captured. ``name`` is an identifier that no module
        of the model has.
        """
        self._declare(
            Declaration(
                name, "constant", Layout.parse(layout), dtype, persistent=False, stage=stage
            )
        )

    def random_function(
        self,
        path: str,
        function: Callable[..., Any],
        *axes: str,
        layout: str | None = None,
        name: str = "",
    ) -> None:
        """Declare an operator that draws random numbers, as :attr:`random` has it at ``path``: see
        :meth:`RngState.draw`. The name of the draw is ``name``, or ``h_0_mlp_dropout`` where the
        path is ``h.0.mlp.dropout``.

        Raises :class:`LoadError` as that does.
        """
        name = name or path.replace(".", "_")
        draw = Draw(self.rng, name) if layout else self.rng.draw(name, *axes)
        add_function(self.random, path, function, draw, layout)

    def _declare(self, declaration: Declaration) -> None:
        assert declaration.name not in self._declarations, f"{declaration.name} is declared twice"
        self._declarations[declaration.name] = declaration

    def _make_tensors(self, init_params: bool) -> None:
        with WeightFiles(directory_of_class(type(self)), self.weight_digests) as files:
            for declaration in self._declarations.values():
                ranks = self.ranks_of(declaration)
                if init_params or not declaration.is_initial_weight:
                    value = files.read(declaration, ranks.mesh, ranks.coords).to(self._device)
                else:
                    shape = declaration.layout.local_shape(ranks.mesh, ranks.coords)
                    value = torch.empty(shape, dtype=declaration.dtype, device=self._device)
                tensor = (
                    nn.Parameter(value, declaration.requires_grad)
                    if declaration.kind == "parameter"
                    else value
                )
                self._put(declaration.name, declaration, tensor)
        self._note_parameters()
        self._steps_without_sums = StepsWithoutSums(self)
        # After all first names: a scope that holds nothing but an alias must not come before its
        # elder siblings.
        for declaration in self._declarations.values():
            for alias in declaration.aliases:
                self._put(alias, declaration, self.weights(declaration.name))

    def _put(self, fqn: str, declaration: Declaration, tensor: Tensor) -> None:
        where = place(self, fqn)
        if isinstance(tensor, nn.Parameter):
            where.put_parameter(tensor)
        else:
            where.put_buffer(tensor, persistent=declaration.persistent)
        self._places[declaration.name] = (*self._places.get(declaration.name, ()), where)

    def _note_parameters(self) -> None:
        """Remember which tensors the parameters are, and mark them as such whose gradients the
        ranks have to sum.

        Raises :class:`UsageError` if they are others than those whose gradients are summed already.
        """
        self._parameters_declared = []
        for declaration in self._declarations.values():
            if declaration.kind == "parameter":
                # Where its first name leads; further names lead to the same tensor.
                where, parameter = self._places[declaration.name][0], self.weights(declaration.name)
                for scope, leaf in self._places[declaration.name][1:]:
                    # Load_state_dict(assign=True) unties what is one tensor here.
                    scope._parameters[leaf] = parameter
                self._parameters_declared.append(
                    DeclaredParameter(where, parameter, declaration.requires_grad)
                )
                # For optimizers that nobody told of other ranks: they would step with a summand.
                if self.ranks.world.size > 1:
                    needs_sum = is_summed(declaration, self.ranks) and not self.is_summed_elsewhere
                    setattr(
                        parameter,
                        PART,
                        PartOfModel(type(self).__name__, declaration.name, needs_sum),
                    )
        if self.ranks.world.size > 1:
            note_part(self)
        self._are_replaced = False
        if self.reducer is not None and self.reducer.is_attached:
            check_reduced(self, self.reducer)

    def take_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold tensors of others, by first name, in the place of its own: those of the user's
        model, or of another program for the same weights. They are this rank's pieces.
        """
        for name, tensor in tensors.items():
            own = self.weights(name)
            assert tensor.shape == own.shape and tensor.dtype == own.dtype, (
                f"{name} is {own.dtype}{list(own.shape)} here, and {tensor.dtype}"
                f"{list(tensor.shape)} was given"
            )
            for scope, leaf in self._places[name]:
                held: dict[str, Any] = (
                    scope._parameters if leaf in scope._parameters else scope._buffers
                )
                held[leaf] = tensor
        self._note_parameters()

    def places(self, name: str) -> tuple[Place, ...]:
        """Where a tensor lies, under all its names."""
        return self._places[name]

    def put_also_at(self, name: str, places: Sequence[Place]) -> None:
        """Let a buffer be the same in other modules too, now and whenever the program updates
        it.
        """
        self._places[name] = tuple(dict.fromkeys((*self._places[name], *places)))
        for scope, leaf in self._places[name]:
            scope._buffers[leaf] = self.weights(name)

    def leave_sums(self) -> None:
        """See :meth:`CompiledModule.leave_sums`."""
        self.is_summed_elsewhere = True
        self._note_parameters()

    def own_parameters(self) -> list[DeclaredParameter]:
        """See :meth:`CompiledModule.own_parameters`."""
        if self._are_replaced:
            self._note_parameters()
        return self._parameters_declared

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """See :meth:`CompiledModule.__deepcopy__`."""
        made = super().__deepcopy__(memo)
        made._note_parameters()
        return made

    def weights(self, path: str) -> Any:
        """The parameter, buffer, constant or scope at a path of original names, whatever else the
        name may mean here.
        """
        return self[path]

    def update_buffer(self, fqn: str, value: Tensor) -> None:
        """Give a buffer a new value, under all its names.

        The buffer becomes a new tensor: the old one may have been saved for backward, and ``value``
        may be an input.
        """
        fresh = value.detach().clone()
        old = self.weights(fqn)
        assert fresh.shape == old.shape and fresh.dtype == old.dtype, (
            f"{fqn} is {old.dtype}{list(old.shape)}, its update is {fresh.dtype}{list(fresh.shape)}"
        )
        for scope, leaf in self._places[fqn]:
            scope._buffers[leaf] = fresh

    # For the reducer, optimizers and checkpoints

    @property
    def declarations(self) -> tuple[Declaration, ...]:
        """What the generated class declared, in order."""
        return tuple(self._declarations.values())

    def trained_parameters(self) -> Iterator[tuple[Declaration, nn.Parameter]]:
        """The parameters that get gradients, in order, each once."""
        for declaration in self._declarations.values():
            if declaration.requires_grad:
                parameter = self.weights(declaration.name)
                assert isinstance(parameter, nn.Parameter)
                yield declaration, parameter

    def ranks_of(self, declaration: Declaration) -> RankMesh:
        """The mesh that the layout of a tensor refers to, and where on it this rank is."""
        return self._stored_over_units if ZERO in declaration.layout.cut_axes else self.ranks

    def gradient_groups(self) -> dict[str, Communicator]:
        """See :meth:`CompiledModule.gradient_groups`."""
        groups = {}
        for declaration, _ in self.trained_parameters():
            axes = declaration.layout.grad_partial
            groups[declaration.name] = self.ranks_of(declaration).group(axes, across_units=True)
        return groups

    def is_counted(self, declaration: Declaration) -> bool:
        """See :meth:`CompiledModule.is_counted`."""
        return counts_here(declaration.layout, self.ranks_of(declaration))

    def note_loaded(self) -> None:
        """Parameters have other values now, for a good reason: not from an optimizer that nobody
        told about the other ranks.
        """
        self._steps_without_sums.forget()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *rest: Any
    ) -> None:
        """Also accept a state dict of the original module where every rank holds whole tensors."""
        key = f"{prefix}_extra_state"
        if key not in state_dict:
            check_holds_wholes(self, key)
        self.note_loaded()
        # With assign=True, those of the submodules are replaced after this.
        self._are_replaced = True
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *rest)
        # A state dict of the original module has no such entry, and is right without it.
        missing_keys = rest[0]
        if key in missing_keys:
            missing_keys.remove(key)


def directory_of_class(cls: type[DeclaredModule]) -> Path:
    """The folder of the file that defines a generated class."""
    file = sys.modules[cls.__module__].__file__
    assert file is not None, f"{cls.__module__} was not loaded from a file"
    return Path(file).parent
