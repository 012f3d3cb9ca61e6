"""The base of generated classes: one rank's part of a compiled module.

A generated class looks like this:

    class MLP(ParallelModule):
        mesh = Mesh((("tp", 2),))
        rank = 0                                              # plan rank: tp=0
        inputs = {"x": ("[batch, 8]", torch.float64)}

        def declare(self):
            self.parameter("up.weight", "[32/tp, 8]", torch.float64)
            self.parameter("up.bias", "[32/tp]", torch.float64)
            self.parameter("down.weight", "[8, 32/tp]", torch.float64)

        def forward(self, x=ABSENT):
            self.check_inputs({"x": x}, {})
            tp = self.axis("tp")
            ...
            y = linear(x, self.up.weight, self.up.bias)       # [batch, 32/tp]

**Reading tensors.** They lie in a tree of scopes under their original names: ``self.blocks[0].attn.weight``. A path with a
name that is no identifier is indexed, ``block["a-b.weight"]``. On the first level a name may be one that a
``ParallelModule`` uses itself (:data:`RESERVED_NAMES`, such as ``mesh`` or ``rank``): ``self.weights("mesh.weight")`` reads
any path. Constants of the trace are read by the name they are declared with, ``self.const_0``.

**Updating buffers.** Generated code calls ``self.update_buffer("bn.running_mean", value)``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from shardwright.runtime.autocast import as_compiled
from shardwright.runtime.checksum import differing
from shardwright.runtime.communicator import Communicator
from shardwright.runtime.compiled import CompiledModule
from shardwright.runtime.declarations import Declaration
from shardwright.runtime.end2end import ScaleFunction, arguments_of, infer_step, train_step
from shardwright.runtime.errors import CheckpointError, DistributedError, InputError, UsageError, format_error
from shardwright.runtime.gathered_weights import WeightGathering
from shardwright.runtime.gradnorm import counts_here
from shardwright.runtime.groups import AxisGroup, RankMesh
from shardwright.runtime.inputs import InputTable
from shardwright.runtime.layout import ZERO, Coords, Cut, Layout, Mesh
from shardwright.runtime.ops.random import RngMode, RngState
from shardwright.runtime.scope import Place, place
from shardwright.runtime.weights import WeightFiles
from shardwright.runtime.world import World, current_world


class ParallelModule(CompiledModule):
    """One rank's part of a compiled module. Otherwise an ordinary ``nn.Module`` with the original names.

    ``mesh``, ``rank``, ``inputs``, ``seed`` and ``rng_mode`` are set by the generated class: the mesh of a unit, the plan
    rank the file is for, the leaves of the arguments (see :mod:`shardwright.runtime.inputs`), and how random numbers are
    drawn. ``gathers_weights``: some parameters are stored in pieces and used whole; ``zero``: over how many units. With
    ``end2end`` the module is called by :meth:`train_step` and :meth:`infer_step` only; ``arguments`` are those that a sample
    gives. ``autocast``: the dtype of the autocast block that the module was compiled in, if any, see
    :mod:`shardwright.runtime.autocast`.

    Constructing one is collective: all ranks of the world do it, in the same order. With ``init_params`` the tensors get
    the values the model was compiled with. Without, parameters and persistent buffers are uninitialised and wait for
    ``load_state_dict`` or ``broadcast_weights``; non-persistent buffers and constants are real in both cases, as no
    checkpoint holds them.

    Raises :class:`DistributedError` if the file is for another rank or number of ranks, and :class:`LoadError` if the
    values are missing.
    """

    rank: ClassVar[int]
    inputs: ClassVar[Mapping[str, Any]]
    seed: ClassVar[int] = 0
    rng_mode: ClassVar[RngMode] = "fast"
    end2end: ClassVar[bool] = False
    gathers_weights: ClassVar[bool] = False
    zero: ClassVar[int] = 1
    arguments: ClassVar[Sequence[str]] = ()
    autocast: ClassVar[torch.dtype | None] = None

    _declarations: dict[str, Declaration]
    _places: dict[str, tuple[Place, ...]]
    _trained: list[tuple[dict[str, nn.Parameter | None], str, bool]]
    _summed: Declaration | None  # one of the parameters whose gradients are sums over ranks
    _summed_version: int = -1  # of that parameter, at the last call
    _input_table: InputTable
    _inputs_compared: bool
    _in_step: bool = False
    _unit: Communicator
    _stored_over_units: RankMesh
    _gathering: WeightGathering
    _device: torch.device

    def __init__(self, init_params: bool = True) -> None:
        super().__init__()
        world = current_world()
        self._make_groups(world)
        self.rng = RngState(self.seed, self.rng_mode, self.mesh, self.ranks.coords, self.ranks.unit)
        self._device = world.device
        self._input_table = InputTable(type(self).__name__, self.inputs)
        self._inputs_compared = False
        self._declarations = {}
        self._places = {}
        self._trained = []
        self._gathering = WeightGathering()
        self.declare()
        self._make_tensors(init_params)

    def _make_groups(self, world: World) -> None:
        self.ranks = RankMesh(self.mesh, world)
        if self.ranks.rank != self.rank:
            raise DistributedError(
                f"{type(self).__name__} is the part of plan rank {self.rank}, but this is rank {world.rank}",
                why=f"in units of {self.mesh.size} that is plan rank {self.ranks.rank}",
                hint="let shardwright.parallelize or load_class choose the file of this rank",
            )
        self._unit = self.ranks.group(self.mesh.names)
        if self.ranks.num_units % self.zero:
            raise DistributedError(
                f"{type(self).__name__} stores its parameters in pieces over {self.zero} units",
                why=f"{world.size} ranks in units of {self.mesh.size} are {self.ranks.num_units} unit(s)",
                hint=f"start a multiple of {self.zero * self.mesh.size} ranks, or compile for these with use_zero=3",
            )
        self._stored_over_units = self.ranks.over_units(self.zero)

    # What a generated ``declare`` calls

    def declare(self) -> None:
        """Name every tensor. A generated class does it in the order of the original ``named_parameters()``.

        That order becomes the order of ``parameters()``, by which optimizers number their state.
        """
        raise NotImplementedError(f"{type(self).__name__} is no generated class: it does not declare its tensors")

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
        """Declare a parameter by FQN. ``aliases``: its other FQNs if it is tied. ``layout`` is the text of a layout, on the
        mesh of ``stage`` in a pipeline (the first one that this rank runs, if several hold it).
        """
        parsed = Layout.parse(layout)
        self._declare(Declaration(name, "parameter", parsed, dtype, aliases, requires_grad=requires_grad, stage=stage))

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
        self._declare(Declaration(name, "buffer", Layout.parse(layout), dtype, aliases, persistent, stage=stage))

    def constant(self, name: str, layout: str, dtype: torch.dtype, *, stage: int | None = None) -> None:
        """Declare a tensor that the traced code captured. ``name`` is an identifier that no module of the model has."""
        self._declare(Declaration(name, "constant", Layout.parse(layout), dtype, persistent=False, stage=stage))

    def _declare(self, declaration: Declaration) -> None:
        assert declaration.name not in self._declarations, f"{declaration.name} is declared twice"
        self._declarations[declaration.name] = declaration

    def _make_tensors(self, init_params: bool) -> None:
        with WeightFiles(generated_directory(type(self))) as files:
            for declaration in self._declarations.values():
                if init_params or not declaration.is_initial_weight:
                    value = files.read(declaration, *self._place_of(declaration)).to(self._device)
                else:
                    shape = declaration.layout.local_shape(*self._place_of(declaration))
                    value = torch.empty(shape, dtype=declaration.dtype, device=self._device)
                tensor = nn.Parameter(value, declaration.requires_grad) if declaration.kind == "parameter" else value
                self._put(declaration.name, declaration, tensor)
                if declaration.kind == "parameter":
                    scope, leaf = self._places[declaration.name][0]
                    self._trained.append((scope._parameters, leaf, declaration.requires_grad))
        self._summed = next((declaration for declaration, _ in self.trained_parameters() if self._is_summed(declaration)), None)
        # After all first names: a scope that holds nothing but an alias must not come before its elder siblings.
        for declaration in self._declarations.values():
            for alias in declaration.aliases:
                self._put(alias, declaration, self.weights(declaration.name))

    def _is_summed(self, declaration: Declaration) -> bool:
        """Whether the gradient of a parameter is still to be summed over ranks when backward is done."""
        layout = declaration.layout
        return bool(layout.grad_partial) or (self.ranks.num_units > 1 and ZERO not in layout.cut_axes)

    def _place_of(self, declaration: Declaration) -> tuple[Mesh, Coords]:
        ranks = self.ranks_of(declaration)
        return ranks.mesh, ranks.coords

    def _put(self, fqn: str, declaration: Declaration, tensor: Tensor) -> None:
        where = place(self, fqn)
        if isinstance(tensor, nn.Parameter):
            where.put_parameter(tensor)
        else:
            where.put_buffer(tensor, persistent=declaration.persistent)
        self._places[declaration.name] = (*self._places.get(declaration.name, ()), where)

    def __getattr__(self, name: str) -> Any:
        """What ``nn.Module`` finds; :class:`AttributeError` says in words what of the original a parallel module has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            text = format_error(
                f"the parallel module {type(self).__name__!r} has no attribute {name!r}",
                why="it has the forward, the parameters and the buffers of the original module, not its other attributes",
                hint="read it from the original; methods of the original that call forward, such as generate(), run this "
                "module after original.forward = parallel",
            )
        raise AttributeError(text, name=name, obj=self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``forward``."""
        if torch.is_autocast_enabled(self._device.type):
            with self._as_compiled():
                return self(*args, **kwargs)
        if not self.gathers_weights:
            return super().__call__(*args, **kwargs)
        with self._gathering.forward((self.training, torch.is_grad_enabled())):
            return super().__call__(*args, **kwargs)

    # Steps of end-to-end modules

    def train_step(
        self, samples: Sequence[Any], is_dummy_batch: Sequence[bool] | None = None, scale_fn: ScaleFunction | None = None
    ) -> list[Any]:
        """Clear the gradients, add up those of all samples, and sum them over the ranks. Collective.

        Returns the detached result for each sample, with the loss unscaled. ``is_dummy_batch``: which samples are computed
        without adding gradients; the same on all ranks. ``scale_fn`` makes of each loss what is differentiated.

        Raises :class:`InputError` for samples that the module was not compiled for, or if the loss is no scalar, and
        :class:`UsageError` if the module was not compiled end to end.
        """
        self._check_end2end("train_step")
        with self._as_compiled():
            return train_step(self, self._call_in_step, samples, is_dummy_batch, scale_fn)

    def infer_step(self, samples: Sequence[Any]) -> list[Any]:
        """The result for each sample, without gradients; the module is in training or evaluation mode as it was set.

        Raises as :meth:`train_step` does.
        """
        self._check_end2end("infer_step")
        with self._as_compiled():
            return infer_step(self, self._call_in_step, samples)

    def _as_compiled(self) -> AbstractContextManager[None]:
        return as_compiled(type(self).__name__, self.autocast, self._device)

    def _check_end2end(self, method: str) -> None:
        if not self.end2end:
            raise UsageError(
                f"{type(self).__name__} has no {method}: it was not compiled end to end",
                hint="call it like an ordinary module, or compile with ComputeConfig(use_end2end=True)",
            )

    def _call_in_step(self, sample: Any) -> Any:
        self._in_step = True
        try:
            return self(**arguments_of(sample, self.arguments, self.inputs))
        finally:
            self._in_step = False

    # What a generated ``forward`` calls

    def axis(self, name: str) -> AxisGroup:
        """The ranks of the unit that differ from this one along a mesh axis only; for ``zero`` those of other units."""
        return (self._stored_over_units if name == ZERO else self.ranks).axis(name)

    def gathered(
        self,
        weight: Tensor,
        axis: AxisGroup,
        dim: int,
        cut: Cut | None = None,
        backward: Literal["slice", "reduce_scatter"] = "reduce_scatter",
    ) -> Tensor:
        """A parameter whole along ``axis``, for a moment: see :mod:`shardwright.runtime.gathered_weights`."""
        return self._gathering.gathered(weight, axis, dim, cut, backward)

    def weights(self, path: str) -> Any:
        """The parameter, buffer, constant or scope at a path of original names, whatever else the name may mean here."""
        return self[path]

    @property
    def device(self) -> torch.device:
        """Where the module's tensors live; it follows ``to()``, ``cuda()`` and the like."""
        return self._device

    def check_inputs(self, given: Mapping[str, Any], absent: Mapping[str, Any] | None = None) -> None:
        """Begin a call, and refuse one that the program was not made for. ``given``: the arguments it was compiled with, by
        name (or their leaves, by path); ``absent``: the others, which must be ``ABSENT``.

        Shapes, dtypes, devices, literals and ``requires_grad`` of the parameters are checked at every call. At the first
        call the ranks of the unit compare the values, by checksums.

        Raises :class:`InputError`.
        """
        if self.end2end and not self._in_step:
            raise UsageError(
                f"{type(self).__name__} was compiled end to end and is not called directly",
                why="it accumulates gradients over samples, and its schedule was made for whole steps",
                hint="call train_step(samples) or infer_step(samples), or compile with use_end2end=False",
            )
        tensors = self._input_table.check(given, absent or {})
        self._check_devices(tensors)
        if torch.is_grad_enabled():
            self._check_requires_grad()
            if self.reducer is None:
                self._warn_of_steps_without_sums()
        if not self._inputs_compared:
            self._inputs_compared = True
            self._compare_inputs(tensors)
        if self.training:
            self.rng.next_microbatch()

    def _check_devices(self, tensors: Mapping[str, Tensor]) -> None:
        for path, x in tensors.items():
            if x.device != self._device and x.ndim:  # operators take numbers from any device
                raise InputError(
                    f"{type(self).__name__}.forward: argument {path!r} is on {x.device}, but the module is on {self._device}",
                    hint=f"pass {path}.to(model.device)",
                )

    def _check_requires_grad(self) -> None:
        # Read from where they live: load_state_dict(assign=True) and some conversions put other Parameter objects there.
        for parameters, leaf, requires_grad in self._trained:
            parameter = parameters[leaf]
            assert parameter is not None
            if parameter.requires_grad is not requires_grad:
                self._refuse_requires_grad(parameter)

    def _refuse_requires_grad(self, parameter: nn.Parameter) -> None:
        name = next(name for name, other in self.named_parameters() if other is parameter)
        now, then = ("trained", "frozen") if parameter.requires_grad else ("frozen", "trained")
        raise InputError(
            f"parameter {name!r} of {type(self).__name__} is {now}, but was {then} when it was compiled",
            why="which gradients are communicated, and how, was decided then",
            hint=f"set its requires_grad back to {not parameter.requires_grad}, or set it on the original module "
            "and compile again",
        )

    def _warn_of_steps_without_sums(self) -> None:
        """Warn once if parameters change between calls and nobody has been asked to sum their gradients: an ordinary
        optimizer on ``parameters()`` steps along what this rank has of them.
        """
        if self._summed is None:
            return
        name, before = self._summed.name, self._summed_version
        self._summed_version = self.weights(name)._version
        if before in (-1, self._summed_version):
            return
        self._summed = None
        if self.rank == self.ranks.unit == 0:
            warnings.warn(
                format_error(
                    f"parameters of {type(self).__name__} have changed since it was called, and nobody sums their gradients",
                    why=f"that of {name!r} is the sum of what several ranks compute, and no optimizer was made by "
                    "build_optimizer",
                    hint="optimizer = shardwright.build_optimizer(model, torch.optim.AdamW, lr=...) in the place of your own",
                ),
                stacklevel=4,
            )

    def _compare_inputs(self, tensors: Mapping[str, Tensor]) -> None:
        found = differing(tensors, self._unit)
        if found is not None:
            name, alike = found
            raise InputError(
                f"{type(self).__name__}.forward: argument {name!r} is not the same on all ranks of a unit",
                why="these ranks agree with each other: " + "; ".join(", ".join(map(str, ranks)) for ranks in alike),
                hint=f"give the {self.mesh.size} ranks of a unit the same batch: shard the data over "
                f"{self.ranks.num_units} unit(s), by rank // {self.mesh.size}",
            )

    def require(self, holds: bool, condition: str) -> None:
        """Check a relation between dynamic sizes that the traced control flow took for granted.

        Raises :class:`InputError` where the sizes of a call do not have it.
        """
        if not holds:
            raise InputError(
                f"{type(self).__name__} was traced for sizes with {condition}, and this call has others",
                why="the model does something else for such sizes, and the traced graph does not have it",
                hint="compile for these sizes too, under another instance_name, or leave the dim static",
            )

    def update_buffer(self, fqn: str, value: Tensor) -> None:
        """Give a buffer a new value, under all its names.

        The buffer becomes a new tensor: the old one may have been saved for backward, and ``value`` may be an input.
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

    def all_declarations(self) -> tuple[Declaration, ...]:
        """The tensors of the whole model, those of other pipeline stages too, in the original order."""
        return self.declarations

    def ranks_of(self, declaration: Declaration) -> RankMesh:
        """The mesh that the layout of a tensor refers to, and where on it this rank is."""
        return self._stored_over_units if ZERO in declaration.layout.cut_axes else self.ranks

    def gradient_groups(self) -> dict[str, Communicator]:
        """See :meth:`CompiledModule.gradient_groups`."""
        return {
            declaration.name: self.ranks_of(declaration).group(declaration.layout.grad_partial, across_units=True)
            for declaration, _ in self.trained_parameters()
        }

    def is_counted(self, declaration: Declaration) -> bool:
        """See :meth:`CompiledModule.is_counted`."""
        return counts_here(declaration.layout, self.ranks_of(declaration))

    def get_extra_state(self) -> dict[str, Any]:
        """What a state dict of this rank holds besides tensors, as JSON values: layouts, coordinates, random numbers.

        ``places``: the mesh and the rank on it of tensors that lie on another mesh than the unit's, in a pipeline.
        ``parameters``: those of the whole model, in the original order.
        """
        saved = [declaration for declaration in self._declarations.values() if declaration.is_initial_weight]
        staged = [(d, *self._place_of(d)) for d in saved if self.ranks_of(d) is not self.ranks]
        return {
            "mesh": [list(axis) for axis in self.mesh.axes],
            "rank": self.rank,
            "unit": self.ranks.unit,
            "layouts": {name: str(declaration.layout) for declaration in saved for name in declaration.names},
            "places": {
                name: [[list(axis) for axis in mesh.axes], mesh.rank(coords)]
                for declaration, mesh, coords in staged
                for name in declaration.names
            },
            "parameters": [d.name for d in self.all_declarations() if d.kind == "parameter"],
            "rng": self.rng.to_json(),
        }

    def set_extra_state(self, state: Any) -> None:
        """Check that a state dict is one of this rank under this plan, and take over its random numbers.

        Raises :class:`CheckpointError` if it is not.
        """
        mine = self.get_extra_state()
        hint = "load it where it was saved, or merge the state dicts of all ranks and load the merged one"
        for part, title in (("mesh", "mesh"), ("rank", "plan rank")):
            if state[part] != mine[part]:
                raise CheckpointError(
                    f"the state dict of {type(self).__name__} is of another {title}",
                    why=f"it was saved with {title} {state[part]}, here it is {mine[part]}",
                    hint=hint,
                )
        for name in sorted(state["places"].keys() & mine["places"].keys()):
            if state["places"][name] != mine["places"][name]:
                raise CheckpointError(
                    f"the state dict of {type(self).__name__} holds another piece of {name!r}",
                    why=f"it was saved at place {state['places'][name]} (mesh, rank on it), here is {mine['places'][name]}",
                    hint=hint,
                )
        for name in sorted(state["layouts"].keys() & mine["layouts"].keys()):
            if state["layouts"][name] != mine["layouts"][name]:
                raise CheckpointError(
                    f"the state dict of {type(self).__name__} holds {name!r} in another layout",
                    why=f"it was saved as {state['layouts'][name]}, here it is {mine['layouts'][name]}",
                    hint=hint,
                )
        self.rng.load_json(state["rng"])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *rest: Any) -> None:
        """Also accept a state dict of the original module where every rank holds whole tensors."""
        key = f"{prefix}_extra_state"
        if key not in state_dict:
            saved = (d for d in self._declarations.values() if d.is_initial_weight)
            cut = next((d for d in saved if d.layout.local_shape(*self._place_of(d)) != d.layout.shape), None)
            if cut is not None:
                raise CheckpointError(
                    f"the state dict has no layouts for {type(self).__name__}",
                    why=f"{key!r} is missing, and this rank holds a piece of {cut.name!r}: {cut.layout}",
                    hint="load the state dict that this rank saved, or a merged one with load_merged_state_dicts",
                )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *rest)
        missing_keys = rest[0]
        if key in missing_keys:
            missing_keys.remove(key)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelModule:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._device = fn(torch.empty(0, device=self._device)).device
        return self

    def _get_name(self) -> str:
        return type(self).__name__

    def extra_repr(self) -> str:
        """The mesh, and where on it this rank is."""
        coords = ", ".join(f"{name}={index}" for name, index in self.ranks.coords.items())
        place_in_unit = f"rank {self.rank} ({coords})" if coords else f"rank {self.rank}"
        return f"mesh {self.mesh}; {place_in_unit}; unit {self.ranks.unit} of {self.ranks.num_units}"


RESERVED_NAMES = frozenset(
    {*dir(ParallelModule), *vars(nn.Module()), *ParallelModule.__annotations__, *CompiledModule.__annotations__}
)
"""Names that mean something else on a ``ParallelModule``: children of that name are read with ``weights()``."""


def generated_directory(cls: type[ParallelModule]) -> Path:
    """The folder of the file that defines a generated class."""
    file = sys.modules[cls.__module__].__file__
    assert file is not None, f"{cls.__module__} was not loaded from a file"
    return Path(file).parent
