"""``hybrid``: pipeline stages, each split by tensor parallelism, along the batch and along the
sequence; units copy it all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.batches import batch_classes
from shardwright.policies.choice import Chosen, choose_dims
from shardwright.policies.context_axes import (
    ContextAxis,
    Modes,
    cheapest_modes,
    context_axes,
    split_context,
    turns_of_axes,
)
from shardwright.policies.expert_axes import ExpertAxis, expert_axes
from shardwright.policies.memory_options import saving_memory
from shardwright.policies.partition import with_regions
from shardwright.policies.pipeline_mesh import (
    PipelineOptions,
    add_stages,
    check_end2end,
    hardware_files,
)
from shardwright.policies.policy import Policy, read_options
from shardwright.policies.sequences import (
    Positions,
    check_sequence,
    positions_of,
    sequence_classes,
)
from shardwright.policies.splits import (
    InsideExperts,
    inner_axes,
    inside_experts,
    split_dims,
    split_on_expert_axes,
)
from shardwright.policies.step_seconds import lowered, step_seconds
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh


@dataclass(frozen=True, kw_only=True)
class HybridOptions(PipelineOptions):
    """``tp``: ranks that share the inner dims of a stage. ``dp``: ranks of a stage that share a
    sample's batch. ``ep``: those of its ``dp x cp x tp`` ranks that share the experts, or
    nodes and ranks within each, as in ``(4, 8)``: a token then crosses to a node once; ``etp``:
    that share the inner dims of an expert (default: as much of ``tp`` as there are ranks for).

    ``cp``: ranks of a stage that share a sample's sequence, or the sizes of several axes;
    ``cp_mode``: how attention does along them, see :mod:`shardwright.policies.context_axes`.
    ``cp_turns``: how often each of them gets an early and a late piece; 0: it gets one piece
    (default: 1 where attention is causal).
    ``sequence_parallel``: along tp, what no inner dim is split of is split along the sequence.
    ``sequence``: the names of the dims of the sequence (default: they are found).
    ``gathers_again``: what products gather along tp is gathered again in backward, not kept.
    """

    tp: int | None = None
    dp: int = 1
    ep: int | tuple[int, ...] | None = None
    etp: int | None = None
    cp: int | tuple[int, ...] = 1
    cp_mode: str | tuple[str, ...] = "auto"
    cp_turns: int | None = None
    sequence_parallel: bool = False
    sequence: tuple[str, ...] = ()
    gathers_again: bool = False

    @property
    def positions(self) -> Positions | None:
        """What tp splits along the sequence, if anything."""
        return positions_of(self.sequence_parallel, self.sequence, self.gathers_again, "hybrid")

    @property
    def cp_size(self) -> int:
        """The ranks that share a sequence."""
        return self.cp if isinstance(self.cp, int) else math.prod(self.cp)


def apply(graph: PlannableGraph, config: ComputeConfig) -> Plan:
    """``num_stages x dp x cp x tp`` ranks; of stages and tp, a size left out is what remains of
    ``plan_ngpus`` (two stages if both are).
    """
    check_end2end("policy 'hybrid'", config)
    options = read_options(HybridOptions, config.pas_config, policy="hybrid")
    axes = context_axes(options.cp, options.cp_mode, "hybrid")
    num_stages, tp = _sizes(options, config.plan_ngpus)
    # The ranks among which positions are dealt: both kinds of splitting a sequence go together.
    shared = options.cp_size * (tp if options.sequence_parallel else 1)
    if shared > 1:
        check_sequence(graph, shared, "hybrid", options.sequence)
    stage = _Stage.of(graph, config, options, tp, axes)
    plan = add_stages(graph, config, stage.plan({"pp": num_stages}), options, num_stages)
    return saving_memory(graph, plan, options, config, "hybrid")


@dataclass(frozen=True)
class _Stage:
    """How the operators of a stage are split: over which axes, major to minor, and what over each.
    ``modes``: of attention along the axes of the sequence where the user left that open.
    """

    graph: PlannableGraph
    config: ComputeConfig
    options: HybridOptions
    tp: int
    context: Sequence[ContextAxis]
    inner: Mapping[str, Chosen]
    experts: Sequence[ExpertAxis]
    sequence_outside: bool = True
    modes: Modes = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        graph: PlannableGraph,
        config: ComputeConfig,
        options: HybridOptions,
        tp: int,
        context: Sequence[ContextAxis],
    ) -> _Stage:
        """The stage as the options have it; what they leave open is decided by the time of a step
        without stages.
        """
        has_experts = options.ep is not None or options.etp is not None
        ep = 1 if options.ep is None else options.ep
        stage = cls(
            graph,
            config,
            options,
            tp,
            context,
            # ``tp`` may need two axes, where no dim of the model is long enough.
            {} if has_experts else inner_axes(graph, tp, config.rank_order),
            # Experts lie on a grid of their own over the same ranks.
            expert_axes(
                options.dp,
                tp,
                ep,
                options.etp,
                "hybrid",
                [(axis.name, axis.size) for axis in context],
            )
            if has_experts
            else [],
            # Heads that tp cuts first are cut further by an axis within, without leaving the rank.
            sequence_outside=all(axis.mode != "ulysses" for axis in context),
        )
        modes = {axis.mode for axis in context}
        # Heads want the sequence's axes inside, sequence parallelism wants them outside.
        torn = "ulysses" in modes and options.sequence_parallel
        if "auto" not in modes and not torn:
            return stage
        orders = [True, False] if tp > 1 else [True]
        stages = [replace(stage, sequence_outside=outside)._decided() for outside in orders]
        return min(stages, key=_Stage.seconds)

    def _decided(self) -> _Stage:
        """The stage with the cheapest modes."""
        modes = cheapest_modes(
            self.graph,
            self.context,
            lambda modes: replace(self, modes=modes).seconds(),
            self.options.sequence,
        )
        return replace(self, modes=modes)

    def seconds(self) -> float:
        """The time of a step without stages."""
        marked = with_regions(self.graph, self.options.recompute)
        program = lowered(marked, self.config, self.plan({}))
        num_ranks = self.options.dp * self.options.cp_size * self.tp
        return step_seconds(program, self.config, self.options.hardware, num_ranks)

    def plan(self, outer: Mapping[str, int]) -> Plan:
        """The plan on a mesh with further axes outside."""
        options = self.options
        sizes = {**outer, **self._sizes()}
        axes = tuple((name, size) for name, size in sizes.items() if size > 1 or name == "pp")
        turns = turns_of_axes(self.graph, self.context, options.cp_turns, "hybrid")
        mesh = Mesh(axes, turns)
        # A stage alone lies on its own ranks; the order is that of the whole unit.
        order = self.config.rank_order if "pp" in outer else None
        builder = self.graph.builder(mesh=mesh, order=order)
        positions = options.positions
        if self.experts:
            split_on_expert_axes(builder, self.experts, "hybrid", self._chosen, positions)
        elif options.dp > 1:
            split_dims(builder, "dp", batch_classes(self.graph))
        for name, axis in self.inner.items():
            split_dims(builder, name, axis.classes, positions=positions)
        inside = self._inside_of_sequence()
        split_context(builder, self.context, self.modes, options.sequence, inside)
        return builder.plan("hybrid")

    @property
    def _chosen(self) -> set[int] | None:
        """The classes that axes for tensors split, where experts have axes of their own."""
        return choose_dims(self.graph, self.tp) if self.tp > 1 else None

    def _inside_of_sequence(self) -> dict[str, InsideExperts]:
        """What axes of the sequence split of experts, if these have no copies along them."""
        sequence = sequence_classes(self.graph, self.options.sequence)
        return {
            axis.name: inside_experts(self.graph, axis, "hybrid", sequence, self._chosen)
            for axis in self.experts
            if axis.outside not in ("dp", "tp") and axis.inside != "edp"
        }

    def _sizes(self) -> dict[str, int]:
        """The sizes of the axes, major to minor."""
        data = {axis.name: axis.size for axis in self.experts if axis.outside == "dp"}
        tensors = {axis.name: axis.size for axis in self.experts if axis.outside == "tp"}
        if not self.experts:
            data = {"dp": self.options.dp}
            tensors = {name: axis.axis_size for name, axis in self.inner.items()}
        context = {axis.name: axis.size for axis in self.context}
        return data | (context | tensors if self.sequence_outside else tensors | context)


def _sizes(options: HybridOptions, plan_ngpus: int) -> tuple[int, int]:
    num_stages, tp, shared = options.num_stages, options.tp, options.dp * options.cp_size
    for name, size in (("num_stages", num_stages), ("dp", options.dp), ("tp", tp)):
        if size is not None and size < 1:
            raise PlanError(
                f"policy 'hybrid' cannot place {name}={size} on ranks", hint="pass 1 or more"
            )
    # What is left out is what remains.
    if num_stages is None and tp is None:
        num_stages = 2 if plan_ngpus % (2 * shared) == 0 else 1
    if num_stages is None:
        assert tp is not None
        num_stages = plan_ngpus // (shared * tp)
    if tp is None:
        tp = plan_ngpus // (shared * num_stages)
    if num_stages * shared * tp != plan_ngpus or min(num_stages, tp) < 1:
        cp = f" x cp={options.cp_size}" if options.cp_size > 1 else ""
        number = "four" if cp else "three"
        raise PlanError(
            "policy 'hybrid' cannot place its sizes on the ranks of the plan",
            why=f"num_stages={num_stages} x dp={options.dp}{cp} x tp={tp} is not "
            f"plan_ngpus={plan_ngpus}",
            hint=f"make the product of the {number} equal to plan_ngpus",
        )
    return num_stages, tp


def files(config: ComputeConfig) -> list[Path]:
    """The files that describe the machine, if it is none of the presets."""
    return hardware_files(read_options(HybridOptions, config.pas_config, policy="hybrid").hardware)


POLICY = Policy("hybrid", apply, HybridOptions, built_in=True, files=files)
