"""How much of a difference rounding explains: what one device is away from itself.

Some gradients hold rounding only. A bias in front of a batch norm has a gradient of zero: the norm
takes its effect away, and the terms of its gradient cancel. A scale in front of one has nearly
none. Others have most of their digits, and still fewer than the bound of :mod:`deviation` asks for:
a batch norm over values that are nearly equal loses digits for all that comes after it, and Adam
divides small gradients by themselves. How many digits there are the reference tells: trained again
from weights and inputs that differ in their last bit only, it is as far from itself as the numbers
are uncertain.

Where a difference is above the bound, three rules hold:

- A tensor that has six digits or more may differ by :data:`OWN` times its own noise, and never in
  its sixth digit. Example: one of 4e-3 that is 3e-13 from itself may differ by 1.5e-12; one of 4e-3
  that is 3e-9 from itself by 4e-9.
- A gradient that has fewer may differ by :data:`ORDERS` times its noise, but not by a hundredth of
  itself where its exact value is not zero. Example: one of 4e-9 that is 3e-13 from itself has four
  digits, and may differ by 3e-12.
- A gradient without any digit, or one that is zero exactly, may differ by as much. Example: one of
  up to 4e-13 that is 3e-13 from itself means nothing, and a plan may differ in it by 3e-12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.frontend.verification.deviation import Deviation, distance
from shardwright.frontend.verification.one_device import Reference
from shardwright.frontend.verification.sample_inputs import copied
from shardwright.runtime import structure

Samples = Sequence[Sequence[Mapping[str, Any]]]
Run = Callable[[nn.Module, Samples], Reference]
"""Trains a model on samples, on one device."""

NUM_REPEATS = 3
UNCERTAIN = 1e-6
"""How much of a gradient changes with the last bits of what it is computed from, where fewer than
six digits mean anything.
"""
INSIGNIFICANT = 0.25
"""How much of a gradient changes where no digit means anything. If less changes, the loss is asked
whether the exact gradient is zero.
"""
UNREAL = 0.01
"""What is left of the change in the loss that a gradient promises, where its exact value is
zero.
"""
LEAST_MISTAKE = 0.01
"""A plan with a mistake changes such a gradient by a larger part: a sum that is missing, or one
term too many.
"""
OWN = 5.0
"""How much further than one device from itself a plan may be in a tensor that has most of its
digits. (Measured: twice.)
"""
ORDERS: Mapping[str, float] = {"gradients": 10.0, "parameters": 10.0, "buffers": 10.0}
"""How much further than one device from itself a plan may be, by kind: it adds other partial sums.
What has been updated by a gradient without meaning is anywhere within its own noise, however large
that is beside other tensors.
"""


def allow_rounding(
    found: Mapping[str, Sequence[Deviation]],
    reference: Reference,
    repeats: Sequence[Reference],
    is_zero: Callable[[str], bool],
) -> dict[str, list[Deviation]]:
    """Deviations with more allowed where the reference itself is uncertain.

    Uncertain gradients, parameters that they update, and buffers, which see these parameters in
    later steps, may differ by :data:`ORDERS` times the noise of the reference. Other tensors beyond
    the bound may differ by :data:`OWN` times their noise. Losses stay at the bound.

    ``is_zero``: whether the exact value of a gradient is zero, by its name. Where it is not, a
    difference of :data:`LEAST_MISTAKE` is refused whatever the noise.
    """
    noises = {d.name: _noise(d, "gradients", reference, repeats) for d in found["gradients"]}
    uncertain = {
        d.name for d in found["gradients"] if noises[d.name] >= UNCERTAIN * d.magnitude > 0.0
    }

    def allowed(kind: str, d: Deviation) -> Deviation:
        if kind == "losses":
            return d
        # A parameter follows from its own gradient. A buffer may follow from any parameter.
        follows = d.name in uncertain or (kind == "buffers" and bool(uncertain))
        if not follows and d.excess <= 1.0:
            return d
        noise = _noise(d, kind, reference, repeats)
        most = ORDERS[kind] * noise if follows else min(OWN * noise, UNCERTAIN * d.magnitude)
        if (
            kind == "gradients"
            and follows
            and d.excess > 1.0
            and noise < INSIGNIFICANT * d.magnitude
            and not is_zero(d.name)
        ):
            most = min(most, LEAST_MISTAKE * d.magnitude)
        return replace(d, noise=noise, allowed=most) if most > d.allowed else d

    return {
        kind: sorted((allowed(kind, d) for d in deviations), key=lambda d: d.excess, reverse=True)
        for kind, deviations in found.items()
    }


def has_most_digits(d: Deviation) -> bool:
    """Whether a tensor that rounding was allowed for has six digits or more."""
    return d.noise is not None and d.noise < UNCERTAIN * d.magnitude


def is_rounding_only(d: Deviation) -> bool:
    """Whether hardly a digit of the reference means anything."""
    return d.noise is not None and d.noise >= LEAST_MISTAKE * d.magnitude


def is_zero_exactly(
    name: str, run: Run, model: nn.Module, samples: Samples, reference: Reference
) -> bool:
    """Whether the gradient of a parameter is zero in exact arithmetic, whatever was computed: then
    the loss stays where it is when the parameter moves along that gradient, and far.
    """
    gradient = reference.gradients[name]
    assert gradient is not None
    promised, losses = gradient.abs().sum().item(), []
    # The slope between two far points: near ones would differ by less than rounding.
    for sign in (1.0, -1.0):
        moved = copied(model)
        with torch.no_grad():
            # Each element by 1 along the sign of its gradient: to first order the loss then changes
            # by the sum of the absolute values, which is ``promised``.
            moved.get_parameter(name).add_(sign * gradient.sign().to(gradient.dtype))
        losses.append(
            float(torch.stack([loss.sum() for loss in run(moved, samples).losses[0]]).sum())
        )
    return abs(losses[0] - losses[1]) / 2 <= UNREAL * promised


def _noise(d: Deviation, kind: str, reference: Reference, repeats: Sequence[Reference]) -> float:
    """How far a tensor of the reference is from that of its repetitions at most."""
    expected = getattr(reference, kind)[d.name]
    return max(distance(getattr(repeat, kind)[d.name], expected) for repeat in repeats)


def repeated(run: Run, model: nn.Module, samples: Samples) -> Iterator[Reference]:
    """What ``run`` computes from weights and inputs whose last bits were changed, at random but
    always alike.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_REPEATS):
        changed = copied(model)
        with torch.no_grad():
            for parameter in changed.parameters():
                parameter.copy_(_last_bits_changed(parameter, generator))
        yield run(
            changed, [[_inputs_changed(inputs, generator) for inputs in unit] for unit in samples]
        )


def _inputs_changed(inputs: Mapping[str, Any], generator: torch.Generator) -> dict[str, Any]:
    def change(path: str, leaf: Any) -> Any:
        return _last_bits_changed(leaf, generator) if isinstance(leaf, Tensor) else leaf

    return {name: structure.map_leaves(value, change, name) for name, value in inputs.items()}


def _last_bits_changed(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    # One unit in the last place up, down, or none.
    steps = torch.randint(-1, 2, tensor.shape, generator=generator)
    return tensor * (1 + torch.finfo(tensor.dtype).eps * steps.to(torch.float64)).to(tensor.dtype)
