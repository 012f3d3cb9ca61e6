"""What one device computes: the model itself, trained for a few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.frontend.verification.dense_attention import dense_attention
from shardwright.frontend.verification.deviation import tensors_of
from shardwright.frontend.verification.precision import float64_casts
from shardwright.frontend.verification.sample_inputs import copied
from shardwright.runtime.errors import UsageError, brief
from shardwright.runtime.module.end2end import scaled

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

adamw: OptimizerFactory = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
"""The optimizer of parity tests: AdamW's default eps of 1e-8 would amplify the rounding of
gradients that are zero.
"""


@dataclass(frozen=True)
class Reference:
    """What one device computes: see :func:`reference_run`."""

    losses: list[list[Tensor]]
    """Loss of every sample in every step, unit after unit: ``losses[step][sample]``."""
    outputs: list[Any]
    """What ``forward`` returned for every sample in the first step, detached."""
    gradients: dict[str, Tensor | None]
    """Gradients of the first step by parameter name, ``None`` where a parameter has none."""
    parameters: dict[str, Tensor]
    """Parameters after the last step, by name."""
    buffers: dict[str, Tensor]
    """Buffers of the first unit after the last step, by name, non-persistent ones included."""
    paused: frozenset[str] = frozenset()
    """Parameters that had a gradient in the first step and none in a later one: an expert that is a
    module of its own, and that no token chose there.
    """


def reference_run(
    model: nn.Module,
    inputs_per_unit: Sequence[Mapping[str, Any] | Sequence[Mapping[str, Any]]],
    optimizer: OptimizerFactory = adamw,
    steps: int = 3,
    *,
    reduction: str = "sum",
) -> Reference:
    """Train a copy of ``model`` on one device for ``steps`` steps, all under
    :func:`precision.float64_casts`.

    A step's loss is the sum (``reduction="mean"``: the mean) of the units' losses, each unit on its
    own inputs, the same ones in every step. A unit with a sequence of inputs accumulates over them,
    as ``train_step`` does over its samples. Units keep buffers of their own, as they do at run
    time: batch norm of one unit does not see the others' statistics. ``model`` is left untouched.
    """
    model = copied(model)
    scale = {"sum": 1.0, "mean": 1.0 / len(inputs_per_unit)}[reduction]
    # Units share parameters, and each has buffers (running statistics) of its own.
    unit_buffers = [clone(dict(model.named_buffers())) for _ in inputs_per_unit]
    losses: list[list[Tensor]] = []
    outputs: list[Any] = []
    gradients: dict[str, Tensor | None] = {}
    paused: set[str] = set()
    with float64_casts(model), dense_attention():
        stepper = optimizer(model.parameters())
        if not isinstance(stepper, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer gives {brief(stepper)} for the parameters of a module",
                why="it is a function that makes an optimizer of torch",
                hint="lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
            )
        for step in range(steps):
            stepper.zero_grad()
            losses.append([])
            for unit, inputs in enumerate(inputs_per_unit):
                load_buffers(model, unit_buffers[unit])
                for sample in [inputs] if isinstance(inputs, Mapping) else inputs:
                    result = model(**sample)
                    loss = loss_of(result)
                    (scale * scaled(type(model).__name__, loss, None)).backward()  # type: ignore[no-untyped-call]
                    losses[-1].append(loss.detach().clone())
                    if step == 0:
                        outputs.append(clone(tensors_of(result)))
                # What this unit's samples have made of them, for its next step.
                unit_buffers[unit] = clone(dict(model.named_buffers()))
            if step == 0:
                gradients = {
                    name: None if p.grad is None else p.grad.clone()
                    for name, p in model.named_parameters()
                }
            paused |= {
                name
                for name, p in model.named_parameters()
                if p.grad is None and gradients[name] is not None
            }
            stepper.step()
    return Reference(
        losses,
        outputs,
        gradients,
        clone(dict(model.named_parameters())),
        unit_buffers[0],
        frozenset(paused),
    )


def clone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detached copies."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def load_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Copy the values of ``buffers`` into the model's."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def loss_of(outputs: Any) -> Tensor:
    """The loss in what a model returns: its ``loss``, the first item of a tuple, or the thing
    itself. Raises :class:`UsageError` for what is no single number.
    """
    if isinstance(outputs, Mapping) and "loss" in outputs:
        loss = outputs["loss"]
    elif isinstance(outputs, Mapping):
        loss = next(iter(outputs.values()))
    else:
        loss = (
            outputs[0] if isinstance(outputs, tuple | list) else getattr(outputs, "loss", outputs)
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(
            "the model returns no loss whose gradients could be compared",
            why=f"where one is looked for is {brief(loss)}, and a loss is a single number",
            hint="verify a module that returns the loss, by itself, under the name loss, or first",
        )
    return loss
