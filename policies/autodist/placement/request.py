"""What a placement is asked for: one graph on one mesh, and what may be chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.optimizers.optimizer_memory import OptimizerMemory
from shardwright.compiler.cost.time.after_backward import all_gradients_bytes
from shardwright.compiler.cost.time.call_times import OperatorTimes
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.policies.autodist.placement.constraints import Constraints
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout, Mesh


@dataclass(frozen=True)
class PlacementRequest:
    """One mesh, one graph: a whole model, or a stage of one as a graph of its own.

    ``ranks``: the unit's ranks that the mesh lies on, in its order. ``microbatches``: how often
    forward and backward run per step; gradients are reduced once. ``inputs`` and ``outputs`` are as
    in a plan: layouts by input name, what is wanted by output path (``None``: not needed,
    ``"whole"``, ``"sharded"``, a layout), and for what leaves a stage ``"sent"``: as it is made,
    without P and G. ``memory_limit_bytes``: of one rank, everything included. ``recompute``: module
    paths whose activations are computed again. ``in_flight``: microbatches whose activations are
    alive at once. ``target_gap``: how near to the bound is near enough, relative to the cost.
    ``time_limit_s``: of the solver. ``deadline``: until when, by ``time.monotonic()``, the memory
    is corrected by what a lowered plan takes; ``hurried``: in larger steps.

    ``hides_gathers``: whether the messages of gathers of weights count nothing, as far as the
    device can hide any. The program begins gathers one weight ahead, so no plan takes less than
    this price; else each is priced as if it were waited for. Example: gathers of 3 s and work of
    4 s take 7 s if they are waited for, and 4 s at least.
    """

    graph: PlannableGraph
    mesh: Mesh
    ranks: tuple[int, ...]
    hardware: Hardware
    config: ComputeConfig
    optimizer: OptimizerMemory = field(default_factory=OptimizerMemory)
    memory_limit_bytes: float | None = None
    constraints: Constraints = field(default_factory=Constraints)
    time_limit_s: float = 60.0
    target_gap: float = 0.0
    microbatches: int = 1
    inputs: Mapping[str, Layout] = field(default_factory=dict)
    outputs: Mapping[str, Layout | str | None] = field(default_factory=dict)
    recompute: tuple[str, ...] = ()
    in_flight: int = 1
    times: OperatorTimes | None = None
    deadline: float = float("inf")
    hurried: bool = False
    hides_gathers: bool = False

    @cached_property
    def gradients_bytes(self) -> float:
        """The bytes of all gradients of the graph, whole, as they are summed."""
        return all_gradients_bytes(self.config, self.graph.used_parameters)

    @property
    def hidden_share(self) -> float:
        """The share of a gather's message that counts nothing."""
        return self.hardware.device.overlap if self.hides_gathers else 0.0

    def differs_in_limits(self, other: PlacementRequest) -> bool:
        """Whether two requests differ in nothing but what limits the memory and the search."""
        if self.graph is not other.graph:
            return False
        limits = {name: getattr(other, name) for name in LIMITS}
        return replace(self, **limits) == other


LIMITS = ("memory_limit_bytes", "time_limit_s", "target_gap", "deadline", "hurried")
"""The fields of a request that its problem does not depend on, but for the limit of its row."""
