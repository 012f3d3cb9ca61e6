"""Train a compiled plan with all its ranks as threads of this process, and put together what they
hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.frontend.verification.one_device import OptimizerFactory, Reference, loss_of
from shardwright.runtime import structure
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.loader import load_class
from shardwright.runtime.manifest import Manifest
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.training.build_optimizer import build_optimizer
from shardwright.runtime.zero.gathering import gathered_gradients

Samples = Sequence[Sequence[Mapping[str, Any]]]
"""Per unit, the inputs of every sample of a step; one sample where the module is no end2end
module.
"""

Spans = tuple[tuple[tuple[int, int], ...], ...]
"""Per dim, the global runs of indices that a rank holds."""


@dataclass
class Held:
    """What one rank has after training: the losses of every step, and its pieces of every
    tensor.
    """

    losses: list[list[Tensor]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    spans: dict[str, Spans] = field(default_factory=dict)

    def on_cpu(self) -> Held:
        """What the rank has, in the memory of the host."""
        cpu = torch.device("cpu")
        return Held(
            moved(self.losses, cpu),
            moved(self.outputs, cpu),
            moved(self.gradients, cpu),
            moved(self.parameters, cpu),
            moved(self.buffers, cpu),
            self.spans,
        )


def moved(tree: Any, device: torch.device) -> Any:
    """The structure with all tensors on ``device``."""
    return structure.map_leaves(tree, lambda _, x: x.to(device) if isinstance(x, Tensor) else x)


def train_plan(
    directory: Path,
    config: ComputeConfig,
    samples: Samples,
    steps: int,
    optimizer: OptimizerFactory,
    training: bool,
    reference: Reference | None = None,
    device: str | torch.device = "cpu",
) -> Reference:
    """What the ranks compute, put together again on the CPU; the buffers are those of the first
    unit.

    ``reference``: of copies that differ, the one farthest from it is taken. ``device``: what all
    ranks compute on; ``samples`` stay where they are.
    """
    manifest = Manifest.read(directory)

    def on_rank(index: int) -> Held:
        given = moved(samples, current_world().device)
        return train_rank(directory, config, given, index, steps, optimizer, training).on_cpu()

    results = run_ranks(config.runtime_ngpus, on_rank, device=device)
    # The first rank of each unit: all ranks of a unit return the same losses.
    unit_starts = results[:: config.plan_ngpus]
    losses = [
        [loss for result in unit_starts for loss in result.losses[step]] for step in range(steps)
    ]
    gradients: dict[str, Tensor | None] = {}
    parameters, buffers = {}, {}
    for name, declaration in manifest.tensors.items():
        zeros = torch.zeros(tuple(declaration.layout.shape), dtype=declaration.dtype)
        holders = [result for result in results if name in result.spans]
        if declaration.kind == "parameter":
            # Where pieces of several ranks overlap, the one that is farther from the reference
            # counts.
            expected = reference.gradients[name] if reference else None
            pieces = [(h.spans[name], h.gradients[name]) for h in holders if name in h.gradients]
            merged = whole(pieces, zeros if expected is None else expected)
            gradients[name] = None if all(piece is None for _, piece in pieces) else merged
            expected = reference.parameters[name] if reference else zeros
            parameters[name] = whole(
                [(h.spans[name], h.parameters[name]) for h in holders], expected
            )
        elif declaration.kind == "buffer":
            first_unit = [result for result in results[: config.plan_ngpus] if name in result.spans]
            expected = reference.buffers[name] if reference else zeros
            buffers[name] = whole([(h.spans[name], h.buffers[name]) for h in first_unit], expected)
    return Reference(
        losses,
        [out for result in unit_starts for out in result.outputs],
        gradients,
        parameters,
        buffers,
    )


def train_rank(
    directory: Path,
    config: ComputeConfig,
    samples: Samples,
    index: int,
    steps: int,
    optimizer: OptimizerFactory,
    training: bool,
) -> Held:
    """Train as rank ``index`` of the current world, with ``samples`` on its device; what the rank
    has afterwards.
    """
    module = load_class(directory)()
    return _train(module, config, samples[index // config.plan_ngpus], steps, optimizer, training)


def _train(
    module: ParallelModule,
    config: ComputeConfig,
    samples: Sequence[Mapping[str, Any]],
    steps: int,
    optimizer: OptimizerFactory,
    training: bool,
) -> Held:
    module.train(training)
    stepper = build_optimizer(module, optimizer, config)
    held = Held()
    for step in range(steps):
        stepper.zero_grad()
        if config.use_end2end:
            results = module.train_step([sample_of(module, inputs) for inputs in samples])
        else:
            (inputs,) = samples
            results = [module(**module.cut_inputs(**inputs))]
            loss_of(results[0]).backward()  # type: ignore[no-untyped-call]
        held.losses.append([loss_of(result).detach().clone() for result in results])
        if step == 0:
            held.outputs = results
            # Gradients of this step, reduced over all units as the optimizer will see them.
            stepper.sync_shard_grad()
            found = gathered_gradients(stepper._reducer.buckets)
            trained = [declaration.name for declaration, _ in module.trained_parameters()]
            held.gradients = {
                n: None if (grad := found.get(n)) is None else grad.clone() for n in trained
            }
        stepper.step()
    held.parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
    held.buffers = {name: b.clone() for name, b in module.named_buffers()}
    for declaration in module.declarations:
        layout, ranks = declaration.layout, module.ranks_of(declaration)
        held.spans[declaration.name] = tuple(
            layout.runs(d, ranks.mesh, ranks.coords) for d in range(len(layout.dims))
        )
    return held


def sample_of(module: Any, inputs: Mapping[str, Any]) -> Any:
    """The inputs as a sample of ``train_step``: the one argument's value, or all by name."""
    return inputs[module.arguments[0]] if len(module.arguments) == 1 else dict(inputs)


def whole(pieces: Sequence[tuple[Spans, Tensor | None]], reference: Tensor) -> Tensor:
    """The tensor that ranks hold pieces of, each element from the rank where it is farthest from
    ``reference``, so that a copy that went astray is seen. A missing piece is zeros; what nobody
    holds is not a number.
    """
    dtype = torch.complex128 if reference.is_complex() else torch.float64
    result = torch.full(tuple(reference.shape), math.nan, dtype=dtype)
    for spans, piece in pieces:
        runs = [
            torch.tensor([i for start, stop in span for i in range(start, stop)], dtype=torch.long)
            for span in spans
        ]
        where = torch.meshgrid(*runs, indexing="ij") if runs else ...
        held = torch.zeros_like(result[where]) if piece is None else piece.to(result.dtype)
        known, wanted = result[where], reference.to(result.dtype)[where]
        # Not `>`: a piece that is not a number must count as farther, and compares false.
        farther = known.isnan() | ~((held - wanted).abs() <= (known - wanted).abs())
        result[where] = torch.where(farther, held, known)
    return result.to(reference.dtype)
