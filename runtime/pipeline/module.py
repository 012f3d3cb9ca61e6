"""The base of generated classes of pipelined modules: one rank's stages, and the order in which it
runs them.

A generated class looks like this (rank 2 of 4, two stages of tp=2):

    class GPT2LMHeadModel(PipelineModule):
        stages = (
            Stage(Mesh((("tp", 2),)), (0, 1)),
            Stage(Mesh((("tp", 2),)), (2, 3)),
        )
        rank = 2                                             # its number in the unit
        inputs = {"input_ids": ("[4, 8]", torch.int64), "labels": ("[4, 8]", torch.int64)}
        arguments = ("input_ids", "labels")
        num_microbatches = 4
        schedule = "1f1b"
        actions = {
            "train": "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
            "infer": "1F0 1F1 1F2 1F3",
        }
        segments = {1: Segment(...)}              # see shardwright.runtime.pipeline.segment
        output_stages = {"loss": (1, (), torch.float32), "logits": (1, (4, 8, 32), torch.float32)}
        shared = {"transformer.wte.weight": (0, 1)}

        def declare(self):
            self.parameter("transformer.wte.weight", "[32/tp, 16]", torch.float32,
                           aliases=("lm_head.weight",), stage=1)
            ...

        def stage1(self, labels, hidden):                    # reads, then receives
            tp = self.axis("tp")
            ...
            return (loss, logits)                            # sends, then outputs

        def output(self, leaves):
            return CausalLMOutput(loss=leaves["loss"], logits=leaves["logits"])

Gradients that flow between stages are those of one sample; see
:mod:`shardwright.runtime.module.end2end` for steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardwright.runtime.arguments import checked_late
from shardwright.runtime.errors import UsageError
from shardwright.runtime.layout import Mesh
from shardwright.runtime.manifest import Manifest
from shardwright.runtime.mesh import ZERO
from shardwright.runtime.module.call_checks import check_parameters
from shardwright.runtime.module.declarations import Declaration
from shardwright.runtime.module.declared_module import directory_of_class
from shardwright.runtime.module.end2end import (
    ScaleFunction,
    check_dummies,
    check_samples,
    checked_loss,
    reducer_of,
    scaled,
)
from shardwright.runtime.module.extra_state import check_stages
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.pipeline.executor import Executor, InFlight, Leaves, Step
from shardwright.runtime.pipeline.sample_sizes import Body, Sizes
from shardwright.runtime.pipeline.segment import Segment, Stage
from shardwright.runtime.pipeline.shared_parameters import Copies
from shardwright.runtime.pipeline.step_samples import SampleTable
from shardwright.runtime.pipeline.transfers import Exchange
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.groups import UNITS, AxisGroup, RankMesh
from shardwright.runtime.ranks.messages import STAGES, Messages
from shardwright.runtime.ranks.role_table import RoleTable
from shardwright.runtime.ranks.world import World
from shardwright.runtime.schedule_actions import ActionKind, ScheduleAction, parse_actions
from shardwright.runtime.training.gradnorm import counts_here


class PipelineModule(ParallelModule):
    """One rank's stages of a pipelined module. It is called by ``train_step`` and ``infer_step``.

    Set by the generated class: ``stages``, ``segments`` (those of this rank, by stage), ``actions``
    (of this rank, as text), ``num_microbatches``, ``schedule`` (its name), ``output_stages`` (by
    path of the result, the stage that makes it, and its shape and dtype; the first is the loss) and
    ``shared`` (parameters that several stages hold, with these stages; their meshes and layouts are
    equal) and ``owned`` (those of which the meshes differ, with the layout in each stage; see
    ``pipeline/shared_parameters.py``). ``inputs`` are the leaves of one sample.

    Where the model runs other operators in evaluation, there are ``segments_eval``,
    ``output_stages_eval``, and methods ``stage<number>_eval`` and ``output_eval`` besides. Where
    sizes vary between samples, ``sizes`` names them, and the methods ``layouts`` and
    ``output_shapes`` tell what depends on them. ``left_out_of_training``: the results, by path,
    that a training step neither makes whole nor delivers.

    ``in_flight``: how many microbatches held activations in the last step.

    ``named_parameters``, ``state_dict`` and optimizers see the tensors of this rank's stages.
    """

    stages: ClassVar[tuple[Stage, ...]]
    segments: ClassVar[Mapping[int, Segment]]
    actions: ClassVar[Mapping[str, str]]
    num_microbatches: ClassVar[int]
    schedule: ClassVar[str]
    output_stages: ClassVar[Mapping[str, tuple[int, tuple[int, ...] | None, torch.dtype]]]
    segments_eval: ClassVar[Mapping[int, Segment] | None] = None
    output_stages_eval: ClassVar[Mapping[str, tuple[int, tuple[int, ...] | None, torch.dtype]]] = {}
    left_out_of_training: ClassVar[tuple[str, ...]] = ()
    sizes: ClassVar[tuple[str, ...]] = ()
    owned: ClassVar[Mapping[str, Mapping[int, str]]] = {}
    end2end: ClassVar[bool] = True
    is_called: ClassVar[bool] = False

    in_flight: InFlight
    _stage_ranks: tuple[RankMesh, ...]
    _stages_over_units: tuple[RankMesh, ...]
    _of_all_stages: tuple[Declaration, ...]
    _running: int
    _base_microbatch: int
    _bodies: tuple[Body, ...]
    _body: Body
    _compiled: dict[str, Callable[..., tuple[Tensor, ...]]]
    _sizes: Sequence[Sizes]
    _sample_table: SampleTable
    _copies: Copies
    _has_stale_copies: bool = False
    _messages: Messages
    _parsed: dict[str, dict[int, tuple[ScheduleAction, ...]]]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "stages" in cls.__dict__:
            cls.mesh = Mesh(
                (("rank", 1 + max(rank for stage in cls.stages for rank in stage.ranks)),)
            )

    def __init__(self, init_params: bool = True) -> None:
        super().__init__(init_params)
        self._of_all_stages = tuple(Manifest.read(directory_of_class(type(self))).tensors.values())
        # Which microbatches each stage holds activations of.
        self.in_flight = InFlight(list(self.segments))
        self._running = min(self.segments)
        self._base_microbatch = 0
        self._trains = False
        # One body for training, and one for evaluation where that runs something else.
        self._bodies = tuple(
            self._made_body(ending)
            for ending in ("", "_eval")[: 1 + (self.segments_eval is not None)]
        )
        self._body = self._bodies[0]
        self._compiled = {}
        self._sizes = []
        self._sample_table = SampleTable(
            type(self).__name__, self.inputs, self.arguments, self.sizes
        )
        self._connect()

    def _made_body(self, ending: str) -> Body:
        methods = [
            getattr(self, name + ending) if self.sizes else None
            for name in ("layouts", "output_shapes")
        ]
        segments, output_stages = (
            getattr(self, f"segments{ending}"),
            getattr(self, f"output_stages{ending}"),
        )
        return Body(ending, self.rank, self.stages, segments, output_stages, *methods)

    def _make_groups(self, world: World) -> None:
        super()._make_groups(world)
        made: dict[Stage, RankMesh] = {}
        for stage in self.stages:  # on all ranks in this order: groups are made by all of them
            assert list(stage.ranks) == sorted(stage.ranks), (
                f"the ranks of {stage} are not ascending"
            )
            if stage not in made:
                made[stage] = RankMesh(stage.mesh, world, stage.ranks, self.mesh.size)
            for axes in stage.joined_axes:
                made[stage].join(axes)
        self._stage_ranks = tuple(made[stage] for stage in self.stages)
        self._copies = Copies(self.rank, self.owned, self.stages, self._stage_ranks)
        over_units = {stage: ranks.over_units(self.zero) for stage, ranks in made.items()}
        self._stages_over_units = tuple(over_units[stage] for stage in self.stages)

    def _role_table(self) -> RoleTable:
        stages = [(stage.mesh, stage.ranks) for stage in self.stages]
        return RoleTable.of_plan(stages, self.mesh.size, self.ranks.num_units)

    def _connect(self) -> None:
        """Learn what the peers of this rank do, and connect to them. Collective."""
        world = self.ranks.world
        # What others have to know: when this rank acts, and to whom it sends.
        mine = {
            "actions": dict(self.actions),
            "receivers": sorted(
                self._copies.peers.union(*(body.receivers for body in self._bodies))
            ),
        }
        everyone = world.all_gather_object(mine)
        channels = []
        # Each unit has the same channels among its own ranks.
        for sender, other in enumerate(everyone):
            first = sender - sender % self.mesh.size
            channels += [(sender, first + receiver) for receiver in other["receivers"]]
        self._messages = world.connect(channels)
        # Actions of the ranks that send to this one, to post receives in their order.
        senders = set().union(*(body.senders for body in self._bodies))
        ranks = sorted({self.rank, *senders})
        told = {rank: everyone[self._to_world(rank)]["actions"] for rank in ranks}
        self._parsed = {
            mode: {rank: parse_actions(told[rank][mode]) for rank in ranks} for mode in self.actions
        }

    def _to_world(self, rank: int) -> int:
        return self.ranks.unit * self.mesh.size + rank

    # What generated code calls

    def axis(self, *names: str, stage: int | None = None) -> AxisGroup:
        """The ranks of a stage that differ from this one along an axis only, or along several; by
        default of the stage that runs.
        """
        ranks = self._stages_over_units if ZERO in names else self._stage_ranks
        return ranks[self._running if stage is None else stage].axis(*names)

    def output(self, leaves: Mapping[str, Any], **sizes: int) -> Any:
        """The result of the whole module from its leaves by path, and from those of the sizes that
        ``output_sizes`` names. Defined by the generated class.
        """
        raise NotImplementedError(
            f"{type(self).__name__} is no generated class: it does not build its result"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a pipeline runs whole steps."""
        self.check_inputs({})
        raise AssertionError("check_inputs refuses calls of an end-to-end module")

    # What the executor calls

    def enter(self, stage: int, microbatch: int) -> None:
        """Compute for this stage and microbatch from now on: random numbers and mesh axes are
        theirs.
        """
        ranks = self._stage_ranks[stage]
        self._running = stage
        self.rng.mesh, self.rng.coords = ranks.mesh, dict(ranks.coords)
        # Counted from 1, as ParallelModule.check_inputs does.
        self.rng.microbatch = self._base_microbatch + (microbatch + 1 if self.training else 0)

    def run_stage(
        self, stage: int, microbatch: int, arguments: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The forward of one stage."""
        sizes = dict(zip(self.sizes, self._sizes[microbatch], strict=True))
        wanted = {name: sizes[name] for name in self._body.segments[stage].sizes}
        name = f"stage{stage}{self._body.ending}"
        run: Callable[..., tuple[Tensor, ...]] = self._compiled.get(name) or getattr(self, name)
        if not self.gathers_weights:
            return run(*arguments, **wanted)
        with self._gathering.forward((stage, self.training, torch.is_grad_enabled())):
            return run(*arguments, **wanted)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Let ``torch.compile`` compile every stage of this rank, from now on. What runs stages and
        sends between them stays as it is. ``args``, ``kwargs``: those of ``torch.compile``.
        """
        for body in self._bodies:
            for stage in body.segments:
                name = f"stage{stage}{body.ending}"
                self._compiled[name] = torch.compile(getattr(self, name), *args, **kwargs)

    # Steps

    @checked_late
    def train_step(
        self,
        samples: Sequence[Any],
        is_dummy_batch: Sequence[bool] | None = None,
        scale_fn: ScaleFunction | None = None,
    ) -> list[Any]:
        """See :meth:`ParallelModule.train_step`. There are ``num_microbatches`` samples; ranks that
        read nothing may pass ``None`` for each. All ranks of the unit get all results.
        """
        owner = type(self).__name__
        if "train" not in self.actions:
            raise UsageError(
                f"{owner} has no schedule for training",
                hint="compile it without inference_only, or call infer_step",
            )
        check_samples(f"{owner}.train_step", samples, self.num_microbatches)
        dummies = check_dummies(f"{owner}.train_step", is_dummy_batch, len(samples))
        # Training or evaluation, by the mode of the module.
        self._choose_body()
        loss_path = self._checked_loss_path()
        leaves = self._read(samples, "train_step")
        check_parameters(self, self.own_parameters())
        reducer = reducer_of(self)
        reducer.clear()
        # Everything that the executor needs of this step.
        step = Step(leaves, dummies, loss_path, lambda loss: scaled(owner, loss, scale_fn), reducer)
        with self._as_compiled(), self.ranks.world.telling_errors():
            results = self._run("train", step)
        # Gradients of copies go to the stage that owns the parameter, before they are summed.
        if not all(dummies):
            self._copies.bring_gradients_home(self.weights, self._messages, self._to_world)
            self._has_stale_copies = bool(self._copies)
        reducer.sum_gradients()
        return results

    @checked_late
    def infer_step(self, samples: Sequence[Any]) -> list[Any]:
        """See :meth:`ParallelModule.infer_step`, and :meth:`train_step` for samples and results."""
        check_samples(f"{type(self).__name__}.infer_step", samples, self.num_microbatches)
        self._choose_body()
        leaves = self._read(samples, "infer_step")
        with self._as_compiled(), self.ranks.world.telling_errors():
            return self._run("infer", Step(leaves, [True] * len(samples)))

    def refresh_copies(self) -> None:
        """See :meth:`CompiledModule.refresh_copies`."""
        self._copies.fetch_values(self.weights, self._messages, self._to_world)
        self._has_stale_copies = False

    @property
    def trains(self) -> bool:
        """See :attr:`ParallelModule.trains`."""
        return self._trains

    def _run(self, mode: str, step: Step) -> list[Any]:
        self._trains = mode == "train" and self.training
        if self._has_stale_copies:  # trained by other means than an optimizer of build_optimizer
            self.refresh_copies()

        def runs(action: ScheduleAction) -> bool:
            # A microbatch that only fills up the step has no backward, on no rank: messages of a
            # backward that one rank leaves out would never come.
            return action.kind is ActionKind.FORWARD or not step.dummies[action.microbatch]

        actions = {rank: list(filter(runs, listed)) for rank, listed in self._parsed[mode].items()}
        # The routes depend on the sizes of the sample.
        routes = [self._body.routes(sizes) for sizes in self._sizes]
        exchange = Exchange(self.rank, routes, actions, self._messages, self._to_world, self.device)
        executor = Executor(
            self, actions[self.rank], exchange, routes, self._linked(), self._open_stages()
        )
        self.in_flight = executor.in_flight
        # Random numbers follow the microbatch, whatever the order of the actions.
        self._base_microbatch = self.rng.microbatch
        made = executor.run(step)
        self.rng.microbatch = self._base_microbatch + (len(step.samples) if self.training else 0)
        output = getattr(self, f"output{self._body.ending}")
        left_out = {path: self.left_out(path) for path in self.left_out_of_training if self.trains}
        wanted = getattr(self, f"output_sizes{self._body.ending}", ())
        # One result for each sample, on all ranks.
        results = []
        for leaves, sizes in zip(self._delivered(made), self._sizes, strict=True):
            by_name = dict(zip(self.sizes, sizes, strict=True))
            asked = {name: size for name, size in by_name.items() if name in wanted}
            results.append(output(_Result(leaves | left_out), **asked))
        return results

    def _choose_body(self) -> None:
        """Run what the model does in its present mode from now on."""
        self.check_mode()
        self._body = self._bodies[0 if self.training else -1]

    def _checked_loss_path(self) -> str:
        path, (_, shape, dtype) = next(iter(self._body.output_stages.items()))
        assert shape is not None, "a loss has no size that varies"
        checked_loss(type(self).__name__, torch.empty(shape, dtype=dtype, device="meta"))
        return path

    def _linked(self) -> list[tuple[int, int]]:
        """Pairs of stages of this rank that hold a parameter in common."""
        pairs: list[tuple[int, int]] = []
        for stages in self.shared.values():
            own = [stage for stage in stages if stage in self.segments]
            pairs += list(itertools.combinations(own, 2))
        return pairs

    def _open_stages(self) -> list[int]:
        """The stages of this rank that get gradients from copies at the end of a step."""
        return [
            stage for stage in self.segments if self._copies.awaits_gradients(self.stages[stage])
        ]

    # Samples and results

    def _read(self, samples: Sequence[Any], method: str) -> list[Leaves]:
        """The tensors of each sample that this rank was given, checked. It must be given those that
        its stages read.
        """
        needed = {path for segment in self._body.segments.values() for path in segment.reads}
        # A rank needs the leaves that its stages read; others may be missing.
        checked = self._sample_table.check(samples, needed, method)
        if not self._inputs_compared:
            self._inputs_compared = True
            self._sample_table.compare(
                checked, self._unit, self.ranks.num_units, self.device, method
            )
        self._sizes = self._sample_table.agreed_sizes(checked, self._unit, self.device, method)
        return [
            {path: x.to(self.device) for path, x in tensors.items() if path in needed}
            for tensors in checked
        ]

    def _delivered(self, made: Sequence[Leaves]) -> list[Leaves]:
        """All outputs on all ranks of the unit, from the first rank of the stage that makes each,
        taken out of ``made``.
        """
        if self.mesh.size == 1:
            return list(made)
        # Outputs that other ranks have as well; a sharded one stays where it is.
        everywhere = self._body.output_stages
        delivered: list[Leaves] = [
            {path: x for path, x in leaves.items() if path not in everywhere} for leaves in made
        ]
        for path, (stage, _, dtype) in self._body.output_stages.items():
            if self.trains and path in self.left_out_of_training:
                continue
            source = self.stages[stage].ranks[0]
            # All samples' outputs of one path travel as one message.
            shapes = [self._body.shapes(sizes)[path] for sizes in self._sizes]
            lengths = [math.prod(shape) for shape in shapes]
            own = [leaves.pop(path).reshape(-1) for leaves in made if path in leaves]
            if source == self.rank:
                flat = torch.cat(own)
            else:
                flat = torch.empty(sum(lengths), dtype=dtype, device=self.device)
            del own
            self._unit.broadcast_(flat, source, phase="forward")
            for leaves, x, shape in zip(delivered, torch.split(flat, lengths), shapes, strict=True):
                leaves[path] = x.view(shape)
        return delivered

    # For the reducer, optimizers and checkpoints

    @property
    def is_staged(self) -> bool:
        """See :attr:`CompiledModule.is_staged`."""
        return len({tuple(stage.ranks) for stage in self.stages}) > 1

    def all_declarations(self) -> tuple[Declaration, ...]:
        """See :meth:`CompiledModule.all_declarations`; those of other stages are known from the
        manifest.
        """
        return self._of_all_stages

    def ranks_of(self, declaration: Declaration) -> RankMesh:
        """See :meth:`CompiledModule.ranks_of`."""
        return self._stage_of(
            declaration, min(self.segments) if declaration.stage is None else declaration.stage
        )

    def _stage_of(self, declaration: Declaration, stage: int) -> RankMesh:
        """The ranks of a stage, on the mesh that the layout of a tensor refers to."""
        ranks = (
            self._stages_over_units if ZERO in declaration.layout.cut_axes else self._stage_ranks
        )
        return ranks[stage]

    def is_copy(self, declaration: Declaration) -> bool:
        """See :meth:`CompiledModule.is_copy`."""
        return self._copies.is_copy(declaration.name)

    def trained_parameters(self) -> Iterator[tuple[Declaration, nn.Parameter]]:
        """See :meth:`CompiledModule.trained_parameters`. Copies are trained where their owner
        is.
        """
        return (
            (d, parameter) for d, parameter in super().trained_parameters() if not self.is_copy(d)
        )

    def copied_parameters(self) -> Iterator[nn.Parameter]:
        """See :meth:`CompiledModule.copied_parameters`."""
        return (parameter for d, parameter in super().trained_parameters() if self.is_copy(d))

    def gradient_groups(self) -> dict[str, Communicator]:
        """See :meth:`CompiledModule.gradient_groups`."""
        # For each parameter: the ranks that hold summands of its gradient, and a label for errors.
        wanted: dict[str, tuple[tuple[int, ...], str]] = {}
        for declaration, _ in self.trained_parameters():
            home, axes = self.ranks_of(declaration), declaration.layout.grad_partial
            # The stages that share it all add to its gradient.
            holders = [
                self._stage_of(declaration, stage)
                for stage in self.shared.get(declaration.name, ())
            ] or [home]
            assert all(ranks.mesh == home.mesh for ranks in holders), (
                f"{declaration.name} is shared by unequal meshes"
            )
            members = [rank for ranks in holders for rank in ranks.alike(home.coords, axes)]
            label = "+".join([*axes, *([STAGES] if len(holders) > 1 else []), UNITS])
            wanted[declaration.name] = (home.world_ranks(members), label)
        # Ranks hold different parameters, but all of them make all groups, in one order.
        world = self.ranks.world
        listed = world.all_gather_object(sorted({ranks for ranks, _ in wanted.values()}))
        for group in sorted({tuple(ranks) for of_rank in listed for ranks in of_rank}):
            world.group(group, UNITS)
        groups = {}
        for name, (group, label) in wanted.items():
            communicator = world.group(group, label)
            assert communicator is not None, (
                f"rank {world.rank} holds {name} and is not in its group {group}"
            )
            groups[name] = communicator
        return groups

    def is_counted(self, declaration: Declaration) -> bool:
        """See :meth:`CompiledModule.is_counted`. Of stages that share a parameter, the first one
        counts it.
        """
        stages = self.shared.get(declaration.name)
        if self.is_copy(declaration):
            return False
        ranks = self._stage_of(declaration, stages[0]) if stages else self.ranks_of(declaration)
        return counts_here(declaration.layout, ranks)

    def get_extra_state(self) -> dict[str, Any]:
        """See :meth:`ParallelModule.get_extra_state`; also the stages, with their meshes and ranks,
        and which tensors are copies of what other stages own.
        """
        stages = [[stage.mesh.to_json(), list(stage.ranks)] for stage in self.stages]
        copies = [
            name
            for declaration in self.declarations
            if self.is_copy(declaration)
            for name in declaration.names
        ]
        return {**super().get_extra_state(), "stages": stages, "copies": copies}

    def set_extra_state(self, state: Any) -> None:
        """See :meth:`ParallelModule.set_extra_state`."""
        check_stages(self, state.get("stages"), self.get_extra_state()["stages"])
        super().set_extra_state(state)

    def extra_repr(self) -> str:
        """The stages, and which of them this rank runs."""
        own = ", ".join(map(str, self.segments))
        return (
            f"stage {own} of {len(self.stages)}; {self.schedule}, {self.num_microbatches} "
            "microbatches; "
            f"rank {self.rank}; unit {self.ranks.unit} of {self.ranks.num_units}"
        )


class _Result(dict[str, Any]):
    """Leaves of a result; those that were not asked for are ``None``."""

    def __missing__(self, path: str) -> None:
        return None
