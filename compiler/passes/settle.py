"""Settle what the config and the plan say together: the stage of ZeRO, the inputs, the outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.input_layouts import input_layouts
from shardwright.compiler.plan.outputs import settled_wishes
from shardwright.compiler.plan.zero import settled_config, units_of_storage
from shardwright.runtime.config import ComputeConfig


@dataclass(frozen=True)
class SettleZero:
    """The pass ``zero``: the plan says over how many units parameters are stored in pieces.

    Raises :class:`PlanError` if the plan was made for another stage of ZeRO than the config names.
    """

    name: ClassVar[str] = "zero"
    config: ComputeConfig

    def __call__(self, graph: PlannableGraph) -> PlannableGraph:
        plan = graph.decided
        units = units_of_storage(settled_config(plan, self.config))
        return graph if plan.zero == units else replace(graph, plan=replace(plan, zero=units))


@dataclass(frozen=True)
class SettleInputs:
    """The pass ``inputs``: the plan says in which layout every input is given that is not whole.

    Raises :class:`PlanError` if the config names an input that there is not.
    """

    name: ClassVar[str] = "inputs"
    config: ComputeConfig

    def __call__(self, graph: PlannableGraph) -> PlannableGraph:
        plan = graph.decided
        if not self.config.inputs and (plan.stages or not plan.inputs):
            return graph
        inputs = input_layouts(graph, self.config, plan)
        return graph if plan.inputs == inputs else replace(graph, plan=replace(plan, inputs=inputs))


@dataclass(frozen=True)
class SettleOutputs:
    """The pass ``outputs``: the plan says of every output what its ranks get of it.

    Raises :class:`PlanError` if the config names an output that the model does not return.
    """

    name: ClassVar[str] = "outputs"
    config: ComputeConfig

    def __call__(self, graph: PlannableGraph) -> PlannableGraph:
        plan = graph.decided
        outputs = settled_wishes(graph, self.config, plan.outputs)
        return (
            graph
            if plan.outputs == outputs
            else replace(graph, plan=replace(plan, outputs=outputs))
        )
