"""What making outputs whole costs: a model that returns no loss gives its caller everything, and
the caller may not need it whole.

Example: a language model under ``tp`` makes logits ``[2, 512, 32000]`` in pieces of the vocabulary.
Its loss stands outside, so each rank of 2 receives the other half, 65.5 MB in float32, in every
step. ``outputs={"logits": "sharded"}`` leaves them in pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.compiler.cost.local_calls import local_bytes
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Adapt, Program
from shardwright.runtime.config import ComputeConfig

LEAST_BYTES = 1e6
"""People are told of outputs for which a rank receives at least that many bytes in a step."""

_RECEIVING = ("all_gather", "all_reduce")


@dataclass(frozen=True)
class GatheredOutputs:
    """What a rank receives in a training step to have outputs whole. ``of``: the bytes of each, by
    path. ``others``: those of all other adapters of the forward.
    """

    of: dict[str, int]
    others: int

    @property
    def is_worth_saying(self) -> bool:
        """Whether it is much, beside what is exchanged anyway too."""
        return sum(self.of.values()) >= max(LEAST_BYTES, self.others)

    def __str__(self) -> str:
        """``65.5 MB, beside 4.7 MB of all other exchange forward (logits 65.5 MB)``."""
        total = amount(sum(self.of.values()), "B")
        each = ", ".join(f"{path} {amount(size, 'B')}" for path, size in self.of.items())
        return f"{total}, beside {amount(self.others, 'B')} of all other exchange forward ({each})"


def gathered_outputs(
    program: Program | PipelineProgram, config: ComputeConfig
) -> GatheredOutputs | None:
    """What outputs cost that nobody has asked to be whole; ``None`` where nothing is trained, or
    the config says what is wanted of outputs.
    """
    if config.outputs != "auto" or config.inference_only:
        return None
    programs = program.programs if isinstance(program, PipelineProgram) else (program,)
    found: dict[str, int] = {}
    others = 0
    for stage in programs:
        paths = {
            value.name: path for path, value in stage.output.leaves() if isinstance(value, IRValue)
        }
        for step in stage.steps:
            # Only adapters by which a rank receives what it did not have: a slice or a pad sends
            # nothing.
            if not isinstance(step, Adapt) or step.step.kind not in _RECEIVING:
                continue
            received = _received_bytes(step, stage)
            if step.result.name in paths:
                path = paths[step.result.name]
                found[path] = found.get(path, 0) + received
            else:
                others += received
    return GatheredOutputs(found, others)


def _received_bytes(adapter: Adapt, program: Program) -> int:
    """What the rank with the largest piece needs to get: what it has not, or once the sum."""
    plan, dtype = program.plan, adapter.of.dtype
    mesh = plan.with_loops(plan.storage_mesh)
    after = local_bytes(adapter.step.after, dtype, mesh)
    if adapter.step.kind == "all_reduce":
        return after
    return after - local_bytes(adapter.step.before, dtype, mesh)
