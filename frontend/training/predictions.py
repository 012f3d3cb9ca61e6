"""What a step is predicted to cost, and how much arithmetic the model asks for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.cost.optimizers.named_optimizer import NamedOptimizer
from shardwright.compiler.cost.optimizers.optimizer_memory import ADAM, OptimizerMemory
from shardwright.compiler.cost.time.operator_file import load_times
from shardwright.compiler.trace import trace
from shardwright.frontend.files.cache import read_plan
from shardwright.frontend.files.module_source import in_dtype
from shardwright.frontend.training.fake_runs import CannotRunError, count_flops
from shardwright.policies.policy import Policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ShardwrightError
from shardwright.runtime.module.declared_module import directory_of_class
from shardwright.runtime.module.parallel_module import ParallelModule


@dataclass(frozen=True)
class Prediction:
    """The cost of a step by the model of costs: its seconds, the bytes of the rank that needs most,
    and the part of the time that goes into communication. ``flops_per_s``: what all devices do at
    most, in the dtype of the model. ``note``: what could not be said, and why.
    """

    step_s: float | None = None
    peak_bytes: int | None = None
    communication_share: float | None = None
    flops_per_s: float | None = None
    flops: float | None = None
    note: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return dict(vars(self))

    def mfu(self, step_s: float) -> float | None:
        """The part of the devices' arithmetic that a step of these seconds makes use of, counting
        what the model asks for and not what is computed again (Chowdhery et al., "PaLM", 2022,
        appendix B).
        """
        if not self.flops or not self.flops_per_s or step_s <= 0:
            return None
        return self.flops / self.flops_per_s / step_s


def predict(
    module: nn.Module,
    parallel: ParallelModule,
    example: Mapping[str, Any],
    policy: Policy,
    config: ComputeConfig,
    *,
    hardware: str,
    optimizer: str,
    dtype: torch.dtype | None,
    num_microbatches: int,
) -> Prediction:
    """Price the program that runs, on a machine: ``hardware`` is a preset or a hardware file.

    The model is traced and lowered once more, with the plan that was made.
    """
    machine = load_hardware(hardware, config.runtime_ngpus)
    plan = read_plan(directory_of_class(type(parallel)))
    with in_dtype(module, dtype):
        graph = trace(
            module, example, dynamic_dims=config.dim_symbols(), constants=config.constants
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compile has said them
        compiled = compile_graph(graph, policy.apply, config, policy_name=policy.name, plan=plan)
    cost = audit(
        compiled.program,
        compiled.config,
        machine,
        optimizer=_memory_of(optimizer),
        times=load_times(hardware),
        num_microbatches=num_microbatches,
    )
    flops, note = None, None
    try:
        flops = count_flops(module, example)
    except CannotRunError as error:
        note = f"no MFU: {error} while operations were counted without values"
    peak = None
    # The utilisation of a model in several dtypes has no single peak to be measured by.
    kinds = {str(p.dtype).removeprefix("torch.") for p in parallel.parameters()}
    if len(kinds) == 1 and (kind := kinds.pop()) in machine.device.flops_per_s:
        peak = machine.device.peak_flops_per_s(kind) * config.runtime_ngpus
    return Prediction(
        step_s=cost.step_s,
        peak_bytes=cost.peak_bytes,
        communication_share=cost.communication_s / cost.step_s if cost.step_s else None,
        flops_per_s=peak,
        flops=None if flops is None else flops * num_microbatches * config.num_units,
        note=note,
    )


def _memory_of(optimizer: str) -> OptimizerMemory:
    try:
        return OptimizerMemory(named=NamedOptimizer(optimizer))
    except ShardwrightError:  # one of the user's, with arguments that only the user knows
        return ADAM
