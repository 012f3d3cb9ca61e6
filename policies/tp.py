"""``tp``: tensor parallelism. Splits the inner dims of the model over all ranks of the plan.

Which dims: :mod:`shardwright.policies.choice`. What the other operators do:
:mod:`shardwright.policies.labels`. On a standard transformer block the result is Megatron's plan
(Shoeybi et al. 2019, section 3): column- then row-parallel products, heads split in attention,
vocabulary-parallel embedding and loss, two all-reduces of [B, S, H] forward and two backward per
layer. A layer of experts sends as much, however many of them a token meets; one whose branches are
parallel, as GPT-J's, half of it.

Where there are fewer groups of heads than ranks, as in models whose heads share keys and values,
there may be two axes: 4 groups on 8 ranks are split over ``tp=4``, all else over ``tp=4`` and
``tp2=2``. There are as many all-reduces of [B, S, H] as with one: each goes over both axes at once.

Whether the channels of convolutions are split depends on the machine: an image is large beside the
work that makes it. Where convolutions that stay whole are much of the model's work, ``tp`` also
tries plans that split more of them, and takes the one whose step is the fastest on the hardware
given, by the cost model. Where convolutions between whole values are left, such as those that embed
patches or positions, it tries to split each of these by itself. So it does with convolutions that a
chosen dim divides unevenly, such as 3 colours on 2 ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.compiler.cost.work_share import share_left_uneven
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Program
from shardwright.policies.choice import choose_dims
from shardwright.policies.expert_axes import expert_axes
from shardwright.policies.memory_options import MemoryOptions, saving_memory
from shardwright.policies.pipeline_mesh import hardware_files
from shardwright.policies.policy import Policy, read_options
from shardwright.policies.sequences import Positions, check_sequence, positions_of
from shardwright.policies.splits import inner_axes, split_dims, split_on_expert_axes
from shardwright.policies.step_seconds import lowered, step_seconds
from shardwright.policies.weight_operands import is_convolution
from shardwright.runtime.config import ComputeConfig

CHANNEL_PRICES = (1 / 8, 1 / 32, 0.0)
"""What the traffic of convolutions costs in the other plans that are tried."""

MUCH = 0.05
"""The share of a model's work in convolutions that stay whole, or are split unevenly, from which
other plans are tried.
"""

CLEARLY = 0.02
"""The share of a step by which another plan must be faster."""


@dataclass(frozen=True, kw_only=True)
class TensorOptions(MemoryOptions):
    """Options of ``tp`` in ``pas_config``. ``hardware``: the preset or file whose times say which
    channels are split. ``ep``: the ranks that share the experts, or nodes and ranks within each;
    ``etp``: those that share the inner dims of an expert (default: the others).
    ``sequence_parallel``: what no inner dim is split of is split along the sequence. ``sequence``:
    the names of its dims (default: they are found). ``gathers_again``: what products then gather is
    gathered again in backward, not kept. Others: :class:`MemoryOptions`.
    """

    hardware: str = "a100-80gb"
    ep: int | tuple[int, ...] | None = None
    etp: int | None = None
    sequence_parallel: bool = False
    sequence: tuple[str, ...] = ()
    gathers_again: bool = False

    @property
    def positions(self) -> Positions | None:
        """What is split along the sequence, if anything is."""
        return positions_of(self.sequence_parallel, self.sequence, self.gathers_again, "tp")


def apply(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """The plan for ``config.plan_ngpus`` ranks on one axis, ``tp``, or on two."""
    options = read_options(TensorOptions, config.pas_config, policy="tp")
    if options.sequence_parallel:
        check_sequence(graph, config.plan_ngpus, "tp", options.sequence)
    if options.ep is not None or options.etp is not None:
        return _with_experts(graph, config, options)
    plan = _plan(graph, config, options, 1.0)
    # Only channels depend on the machine; for all else the rule is as good anywhere.
    if config.plan_ngpus > 1 and any(is_convolution(op) for op in graph.ops):
        plan = _fastest(graph, config, options, plan)
    return replace(graph, plan=saving_memory(graph, plan, options, config, "tp"))


def _with_experts(
    graph: PlannableGraph, config: ComputeConfig, options: TensorOptions
) -> PlannableGraph:
    """The plan with experts on axes of their own."""
    ranks = config.plan_ngpus
    ep = 1 if options.ep is None else options.ep
    axes = expert_axes(1, ranks, ep, options.etp, "tp")
    mesh = {axis.name: axis.size for axis in axes} or {"tp": 1}
    builder = graph.builder(mesh=mesh, order=config.rank_order)
    split_on_expert_axes(builder, axes, "tp", choose_dims(graph, ranks), options.positions)
    plan = saving_memory(graph, builder.plan("tp"), options, config, "tp")
    return replace(graph, plan=plan)


def _plan(
    graph: PlannableGraph,
    config: ComputeConfig,
    options: TensorOptions,
    channel_price: float,
    *,
    alone: bool = False,
) -> Plan:
    axes = inner_axes(graph, config.plan_ngpus, config.rank_order, channel_price)
    builder = graph.builder(mesh={name: axis.axis_size for name, axis in axes.items()} or {"tp": 1})
    for name, axis in axes.items():
        split_dims(builder, name, axis.classes, positions=options.positions, alone=alone)
    return builder.plan("tp")


def _fastest(
    graph: PlannableGraph, config: ComputeConfig, options: TensorOptions, plan: Plan
) -> Plan:
    """The plan, or another that splits more channels if its step is clearly faster."""
    first = lowered(graph, config, plan)
    # Little is computed everywhere, so nothing is left to win.
    if share_left_uneven(first, is_convolution) <= MUCH:
        return plan

    def seconds(program: Program) -> float:
        return step_seconds(program, config, options.hardware, config.plan_ngpus)

    # Another plan must be clearly faster, as the estimate is none of its best.
    best, least = plan, (1 - CLEARLY) * seconds(first)
    price, program = 1.0, first
    others = ((other, _plan(graph, config, options, other)) for other in CHANNEL_PRICES)
    for other_price, other in _different(others, plan):
        tried = lowered(graph, config, other)
        if (found := seconds(tried)) < least:
            best, least, price, program = other, found, other_price, tried
    # A convolution between whole values, as one that embeds patches or positions.
    if share_left_uneven(program, is_convolution) > MUCH:
        other = _plan(graph, config, options, price, alone=True)
        limit = least if best is plan else (1 - CLEARLY) * least
        if seconds(lowered(graph, config, other)) < limit:
            best = other
    return best


def _different(plans: Iterable[tuple[float, Plan]], plan: Plan) -> Iterable[tuple[float, Plan]]:
    """The plans, each with its price, that are neither ``plan`` nor the one before."""
    for price, other in plans:
        if (other.mesh, other.strategies) != (plan.mesh, plan.strategies):
            yield price, other
            plan = other


def files(config: ComputeConfig) -> list[Path]:
    """The files that describe the machine, if it is none of the presets."""
    return hardware_files(read_options(TensorOptions, config.pas_config, policy="tp").hardware)


POLICY = Policy("tp", apply, TensorOptions, built_in=True, files=files)
