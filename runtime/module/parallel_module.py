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

**Reading tensors.** They lie in a tree of scopes under their original names:
``self.blocks[0].attn.weight``. A path with a name that is no identifier is indexed,
``block["a-b.weight"]``. On the first level a name may be one that a ``ParallelModule`` uses itself,
such as ``mesh`` or ``rank``: ``self.weights("mesh.weight")`` reads any path. Constants of the trace
are read by the name they are declared with, ``self.const_0``.

**Updating buffers.** Generated code calls ``self.update_buffer("bn.running_mean", value)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from shardwright.runtime.arguments import check_call, checked_late
from shardwright.runtime.autocast import as_compiled
from shardwright.runtime.config import RngMode
from shardwright.runtime.errors import (
    InputError,
    ShardwrightError,
    UsageError,
    format_error,
)
from shardwright.runtime.gathered_weights import WeightGathering
from shardwright.runtime.in_pieces import in_pieces
from shardwright.runtime.layout import Cut
from shardwright.runtime.left_out import LeftOut
from shardwright.runtime.mesh import ZERO
from shardwright.runtime.module.call_checks import (
    check_devices,
    check_parameters,
    compare_inputs,
)
from shardwright.runtime.module.declared_module import DeclaredModule
from shardwright.runtime.module.distributed_checkpoints import watch_distributed_checkpoints
from shardwright.runtime.module.end2end import ScaleFunction, arguments_of, infer_step, train_step
from shardwright.runtime.module.extra_state import (
    check_extra_state,
    extra_state,
)
from shardwright.runtime.module.global_hooks import warn_of_global_hooks
from shardwright.runtime.module.graph_checks import GraphChecks
from shardwright.runtime.module.initialising import watch_initialising
from shardwright.runtime.module.inputs import InputTable
from shardwright.runtime.module.known_buffers import KnownBuffers
from shardwright.runtime.module.programs import Programs
from shardwright.runtime.module.tracers import refuse_onnx, refuse_tracers
from shardwright.runtime.module.wrappers import watch_wrappers
from shardwright.runtime.ops.random import RngState
from shardwright.runtime.ops.random_functions import RandomFunctions
from shardwright.runtime.ranks.failures import names_parameters
from shardwright.runtime.ranks.groups import AxisGroup
from shardwright.runtime.ranks.mpu import MPU
from shardwright.runtime.ranks.role_table import RoleTable
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.recompute import recompute
from shardwright.runtime.training.asked_gradients import watch_asked_gradients
from shardwright.runtime.training.clipping import watch_clipping
from shardwright.runtime.training.foreign_steps import watch_steps

_WITHOUT_SYNC = "with optimizer.no_sync(): around all backward passes of a step but the last"
_AT_THE_OPTIMIZER = {
    "no_sync": _WITHOUT_SYNC,
    "set_requires_gradient_sync": _WITHOUT_SYNC,
    "clip_grad_norm_": "optimizer.clip_gnorm(max_norm), or torch.nn.utils.clip_grad_norm_ of "
    "module.parameters()",
}
"""What to call instead of methods of DDP and FSDP modules: reductions belong to the optimizer."""


class _ArgumentsFitError(Exception):
    """Ends a call that only checks its arguments."""


class ParallelModule(DeclaredModule):
    """One rank's part of a compiled module. Otherwise an ordinary ``nn.Module`` with the original
    names.

    ``mesh``, ``rank``, ``inputs``, ``seed`` and ``rng_mode`` are set by the generated class: the
    mesh of a unit, the plan rank the file is for, the leaves of the arguments (see
    :mod:`shardwright.runtime.module.inputs`), and how random numbers are drawn. ``joined_axes``:
    the sets of axes that one adapter goes over. ``gathers_weights``: some parameters are stored in
    pieces and used whole; ``zero``: over how many units. With ``end2end`` the module is called by
    :meth:`train_step` and :meth:`infer_step` only; ``arguments`` are those that a sample gives.
    ``known_buffers``: by name, the values of buffers that forward has read when it was compiled.
    ``autocast``: the dtype of the autocast block that the module was compiled in, if any, see
    :mod:`shardwright.runtime.autocast`. ``training_only``: there is no program for evaluation.
    ``weight_digests``: what the files of initial values must be; the loader sets it.
    ``other_programs``: the classes of programs for other inputs, which run on the same tensors.

    Constructing one is collective: all ranks of the world do it, in the same order. With
    ``init_params`` the tensors get the values the model was compiled with. Without, parameters and
    persistent buffers are uninitialised and wait for ``load_state_dict`` or ``broadcast_weights``;
    non-persistent buffers and constants are real in both cases, as no checkpoint holds them.

    Raises :class:`DistributedError` if the file is for another rank or number of ranks, and
    :class:`LoadError` if the values are missing.
    """

    inputs: ClassVar[Mapping[str, Any]]
    seed: ClassVar[int] = 0
    rng_mode: ClassVar[RngMode] = "fast"
    end2end: ClassVar[bool] = False
    gathers_weights: ClassVar[bool] = False
    arguments: ClassVar[Sequence[str]] = ()
    autocast: ClassVar[torch.dtype | None] = None
    is_called: ClassVar[bool] = True
    training_only: ClassVar[bool] = False
    known_buffers: ClassVar[Mapping[str, Any]] = {}
    other_programs: ClassVar[Sequence[type[ParallelModule]]] = ()

    _input_table: InputTable
    _graph_checks: GraphChecks
    _mpu: MPU | None = None
    _in_step: bool = False
    _checks_only: bool = False  # a call ends when its arguments have been checked
    _programs: Programs | None = None
    _gathering: WeightGathering

    def __init__(self, init_params: bool = True) -> None:
        super().__init__()
        # Habits that would be wrong on a part of a model, silently: these watch for them.
        watch_asked_gradients()
        watch_clipping()
        watch_initialising()
        watch_steps()
        watch_wrappers()
        world = current_world()
        # Groups first: what follows is collective.
        self._make_groups(world)
        self.rng = RngState(self.seed, self.rng_mode, self.mesh, self.ranks.coords, self.ranks.unit)
        self._device = world.device
        self._make_input_table()
        self._declarations = {}
        self._places = {}
        self._parameters_declared = []
        self._gathering = WeightGathering()
        self._known_buffers = KnownBuffers(self)
        self.random = RandomFunctions()
        # The generated class names its tensors, and they are made.
        self.declare()
        self._make_tensors(init_params)
        names_parameters(self)
        watch_distributed_checkpoints(self)
        for other in self.other_programs:
            self.add_program(other)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """See :meth:`CompiledModule.__deepcopy__`."""
        made = super().__deepcopy__(memo)
        made._graph_checks = GraphChecks(made)
        return made

    def add_program(self, program_class: type[ParallelModule]) -> None:
        """Add a program for other inputs, which runs on the tensors of this module: a class that
        the same call of ``parallelize`` made of other dummy arguments. Collective.

        Raises :class:`LoadError` if the class is for other tensors.
        """
        self.programs().add(program_class)

    def _make_input_table(self) -> None:
        name, inputs = type(self).__name__, self.inputs
        self._input_table = InputTable(name, inputs, "forward", self.mesh, self.ranks.coords)
        self._graph_checks = GraphChecks(self)

    def cut_inputs(self, **arguments: Any) -> dict[str, Any]:
        """The arguments of a call, with this rank's pieces of what the module takes in pieces
        (``ComputeConfig(inputs={...: "sharded"})``). ``arguments``: whole on every rank.

        Raises :class:`InputError` for tensors of another shape.
        """
        return self._input_table.cut(arguments)

    def programs(self) -> Programs:
        """The programs of this module; see :mod:`shardwright.runtime.module.programs`."""
        if self._programs is None:
            self._programs = Programs(self)
        return self._programs

    def __getattr__(self, name: str) -> Any:
        """What ``nn.Module`` finds; :class:`AttributeError` says in words what of the original a
        parallel module has.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            text = format_error(
                f"the parallel module {type(self).__name__!r} has no attribute {name!r}",
                why="it has the forward, the parameters and the buffers of the original module, "
                "not its other attributes",
                hint=_AT_THE_OPTIMIZER.get(name)
                or "read it from the original; methods of the original that call forward, such "
                "as generate(), run this "
                "module after original.forward = parallel",
            )
        raise AttributeError(text, name=name, obj=self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``forward``. Other ranks that miss this one are told the error with which it
        fails.
        """
        if torch.compiler.is_compiling():
            return self._call(*args, **kwargs)
        warn_of_global_hooks(type(self).__name__)
        return self.call_program(None, args, kwargs)

    def call_program(
        self, program: ParallelModule | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run ``forward`` of one of the programs; ``None``: of the one that the arguments fit."""
        with self.ranks.world.telling_errors():
            try:
                if self._programs is None:
                    return self._call(*args, **kwargs)
                program = program or self._programs.chosen(args, kwargs)
                self._programs.prepare(program)
                result = program._call(*args, **kwargs)
                # Inputs are compared over ranks in the first call only, whichever program runs it.
                self._inputs_compared = program._inputs_compared
                return result
            except ShardwrightError:
                raise
            except TypeError as error:
                check_call((program or self).forward, args, kwargs, error)
                raise
            except RuntimeError:
                self._check_tensors()
                # What the compiler says of a call that was not compiled for is no help.
                (program or self).check_arguments(args, kwargs)
                raise

    def check_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise what a call raises for arguments that the module was not compiled for, and run
        nothing of it.
        """
        self._checks_only = True
        try:
            self.forward(*args, **kwargs)
        except _ArgumentsFitError:
            return
        except TypeError as error:
            check_call(self.forward, args, kwargs, error)
            raise
        finally:
            self._checks_only = False

    def _check_tensors(self) -> None:
        """Refuse parameters and buffers of other shapes or dtypes than those of this rank's pieces,
        after a call has failed.
        """
        for declaration in self._declarations.values():
            ranks, found = self.ranks_of(declaration), self.weights(declaration.name)
            name = f"{declaration.name!r} of {type(self).__name__}"
            expected = declaration.layout.local_shape(ranks.mesh, ranks.coords)
            if tuple(found.shape) != tuple(expected):
                raise UsageError(
                    f"{name} has the shape {list(found.shape)}",
                    why=f"this rank's piece of it is {list(expected)}, of {declaration.layout}",
                    hint="give whole tensors to load_merged_state_dict, or load_checkpoint",
                )
            if found.dtype != declaration.dtype:
                raise UsageError(
                    f"{name} has the dtype {found.dtype}",
                    why=f"it was compiled as {declaration.dtype}",
                    hint="convert the original, and compile again",
                )

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled(self._device.type):
            with self._as_compiled():
                return self._call(*args, **kwargs)
        if not self.gathers_weights:
            return super().__call__(*args, **kwargs)
        return self._call_gathering(*args, **kwargs)

    # Which weights are whole is the business of one moment, so no graph of torch.compile holds it:
    # it compiles what lies between two gathers. (``torch.compiler.disable`` would import
    # torch._dynamo for everybody.)

    @partial(_disable_dynamo, recursive=False)
    def _call_gathering(self, *args: Any, **kwargs: Any) -> Any:
        with self._gathering.forward((self.training, torch.is_grad_enabled())):
            return super().__call__(*args, **kwargs)

    @property
    def mpu(self) -> MPU:
        """The roles of this rank under the plan, and their process groups; see
        :class:`~shardwright.MPU`. Data-parallel ranks are the units.
        """
        if self._mpu is None:
            self._mpu = MPU.of_table(self._role_table(), self.ranks.world)
        return self._mpu

    def _role_table(self) -> RoleTable:
        stages = [(self.mesh, self.ranks.ranks)]
        return RoleTable.of_plan(stages, self.mesh.size, self.ranks.num_units)

    # Steps of end-to-end modules

    @checked_late
    def train_step(
        self,
        samples: Sequence[Any],
        is_dummy_batch: Sequence[bool] | None = None,
        scale_fn: ScaleFunction | None = None,
    ) -> list[Any]:
        """Clear the gradients, add up those of all samples, and sum them over the ranks.
        Collective.

        Returns the detached result for each sample, with the loss unscaled. ``is_dummy_batch``:
        which samples are computed without adding gradients; the same on all ranks. ``scale_fn``
        makes of each loss what is differentiated.

        Raises :class:`InputError` for samples that the module was not compiled for, or if the loss
        is no scalar, and :class:`UsageError` if the module was not compiled end to end.
        """
        self._check_end2end("train_step")
        with self._as_compiled():
            return train_step(self, self._call_in_step, samples, is_dummy_batch, scale_fn)

    @checked_late
    def infer_step(self, samples: Sequence[Any]) -> list[Any]:
        """The result for each sample, without gradients; the module is in training or evaluation
        mode as it was set.

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
                hint="call it like an ordinary module, or compile with "
                "ComputeConfig(use_end2end=True)",
            )

    def _call_in_step(self, sample: Any) -> Any:
        self._in_step = True
        try:
            return self(**arguments_of(sample, self.arguments, self.inputs))
        finally:
            self._in_step = False

    # What a generated ``forward`` calls

    def axis(self, *names: str) -> AxisGroup:
        """The ranks of the unit that differ from this one along a mesh axis only, or along several
        of ``joined_axes``; for ``zero`` those of other units.
        """
        return (self._stored_over_units if ZERO in names else self.ranks).axis(*names)

    @_disable_dynamo
    def gathered(
        self,
        weight: Tensor,
        axis: AxisGroup,
        dim: int,
        cut: Cut | None = None,
        backward: Literal["slice", "reduce_scatter"] = "reduce_scatter",
        then: Literal["keep", "again"] = "again",
    ) -> Tensor:
        """A parameter or an activation whole along ``axis``, for a moment: see
        :mod:`shardwright.runtime.gathered_weights`.
        """
        return self._gathering.gathered(weight, axis, dim, cut, backward, then)

    @_disable_dynamo
    def gathered_together(
        self,
        weights: Sequence[Tensor],
        axis: AxisGroup,
        backward: Literal["slice", "reduce_scatter"] = "reduce_scatter",
    ) -> tuple[Tensor, ...]:
        """Several parameters of one dtype whole along ``axis``, in one collective. Each is cut in
        its first dim, into pieces of one length.
        """
        return self._gathering.gathered_together(weights, axis, backward)

    @property
    def trains(self) -> bool:
        """Whether a call is part of a training step: outputs that such a step leaves out are not
        made whole.
        """
        return self.training and torch.is_grad_enabled()

    def recompute(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, computed again in the backward: see
        :func:`shardwright.runtime.recompute.recompute`.
        """
        return recompute(
            function,
            *args,
            rng=self.rng if self.random else None,
            gathering=self._gathering if self.gathers_weights else None,
        )

    def in_pieces(self, *args: Any) -> Any:
        """A part of the program in pieces, one after the other: see
        :func:`shardwright.runtime.in_pieces.in_pieces`.
        """
        return in_pieces(*args, rng=self.rng if self.random else None)

    def left_out(self, path: str) -> LeftOut:
        """What stands in a result for an output that a training step leaves out."""
        return LeftOut(type(self).__name__, path)

    @property
    def device(self) -> torch.device:
        """Where the module's tensors live; it follows ``to()``, ``cuda()`` and the like."""
        return self._device

    def check_inputs(
        self, given: Mapping[str, Any], absent: Mapping[str, Any] | None = None
    ) -> None:
        """Begin a call, and refuse one that the program was not made for. ``given``: the arguments
        it was compiled with, by name (or their leaves, by path); ``absent``: the others, which must
        be ``ABSENT``.

        Shapes, dtypes, devices, literals and the parameters are checked at every call. At the first
        call, and in training now and then (see :mod:`shardwright.runtime.training.agreement`), the
        ranks of the unit compare the values, by checksums.

        Raises :class:`InputError`.
        """
        if self.end2end and not self._in_step:
            # A pipeline runs whole steps, whatever its config says.
            or_else = ", or compile with use_end2end=False" if self.is_called else ""
            raise UsageError(
                f"{type(self).__name__} was compiled end to end and is not called directly",
                why="it accumulates gradients over samples, and its schedule was made for whole "
                "steps",
                hint=f"call train_step(samples) or infer_step(samples){or_else}",
            )
        refuse_tracers(type(self).__name__, given.values())
        self.check_mode()
        tensors = self._input_table.check(given, absent or {})
        if self._checks_only:
            raise _ArgumentsFitError
        begin = self._graph_checks if torch.compiler.is_dynamo_compiling() else self
        begin.begin_call(tensors, torch.is_grad_enabled())

    def argument_names(self) -> tuple[str, ...]:
        """The paths of the tensors among the arguments, in order."""
        return self._input_table.tensors

    def begin_call(self, tensors: Mapping[str, Tensor], trains: bool) -> None:
        """Check what depends on the moment of a call, and draw for a microbatch of its own.

        ``tensors``: the arguments by path; ``trains``: whether gradients are recorded.
        """
        # First what is checked without the other ranks.
        check_devices(type(self).__name__, tensors, self._device)
        if trains:
            check_parameters(self, self.own_parameters())
            if self.reducer is None:
                self._steps_without_sums.check(self)
            elif self.training and not self.end2end:
                self.reducer.note_call()
        # Then, once, that all of them were given the same.
        if not self._inputs_compared:
            self._inputs_compared = True
            same = {p: x for p, x in tensors.items() if p not in self._input_table.pieces}
            compare_inputs(type(self).__name__, same, self._unit, self.ranks.num_units)
        if self.training:
            self.rng.next_microbatch()
            # torch.utils.checkpoint around the module calls it again in backward.
            self.rng.repeats = torch._C._current_graph_task_id() != -1

    def check_mode(self) -> None:
        """Raise :class:`UsageError` in eval mode if there is no program for it, and where buffers
        hold other values than those that are compiled in.
        """
        self._known_buffers.check()
        if self.training_only and not self.training:
            raise UsageError(
                f"{type(self).__name__} was compiled for training only, and is in eval mode",
                why="the model changes its parameters when it is evaluated, and a rank's pieces "
                "are changed by optimizers only",
                hint="merge a checkpoint and evaluate the original model, or turn off what "
                "changes the parameters",
            )

    def require(self, holds: bool, condition: str) -> None:
        """Check a relation between dynamic sizes that the traced control flow took for granted.

        Raises :class:`InputError` where the sizes of a call do not have it.
        """
        if not holds:
            raise InputError(
                f"{type(self).__name__} was traced for sizes with {condition}, and this call "
                "has others",
                why="the model does something else for such sizes, and the traced graph does not "
                "have it",
                hint="compile for these sizes too, under another instance_name, or leave the dim "
                "static",
            )

    def get_extra_state(self) -> dict[str, Any]:
        """See ``extra_state``."""
        refuse_onnx(type(self).__name__)
        return extra_state(self)

    def set_extra_state(self, state: Any) -> None:
        """Check that a state dict is one of this rank under this plan, and take over its random
        numbers.

        Raises :class:`CheckpointError` if it is not.
        """
        check_extra_state(self, state)
        self.rng.load_json(state["rng"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelModule:
        super()._apply(fn, recurse)
        if self._programs is not None:
            self._programs.move(fn)
        self._are_replaced = True  # with torch.__future__.set_overwrite_module_params_on_conversion
        self._device = fn(torch.empty(0, device=self._device)).device
        return self

    def _get_name(self) -> str:
        return type(self).__name__

    def extra_repr(self) -> str:
        """The mesh, and where on it this rank is."""
        coords = ", ".join(f"{name}={index}" for name, index in self.ranks.coords.items())
        place_in_unit = f"rank {self.rank} ({coords})" if coords else f"rank {self.rank}"
        return (
            f"mesh {self.mesh}; {place_in_unit}; unit {self.ranks.unit} of {self.ranks.num_units}"
        )
