"""Which gradients are zero in exact arithmetic, and hold nothing but the rounding of what was summed.

A bias in front of a batch norm is one: the norm takes its effect away, and the terms of its gradient cancel. What is left
depends on the order of summation, so two right answers agree in no digit, and how large it is depends on the terms, not on
other gradients. The reference tells: trained again from weights and inputs that differ in their last bit only, it
is as far from itself as such a gradient is from zero. Every other tensor stays at the bound of :mod:`deviation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.compiler.verification.deviation import BOUND, Deviation, distance
from shardwright.compiler.verification.reference import Reference
from shardwright.compiler.verification.samples import copied
from shardwright.runtime import structure

NUM_REPEATS = 3
INSIGNIFICANT = 0.25
"""How much of a gradient changes with the last bits of what it is computed from, where no digit of it means anything."""
ORDERS = 100.0
"""How much further than one device from itself a plan may be in such a gradient: it adds other partial sums."""


def allow_rounding(
    found: Mapping[str, Sequence[Deviation]], reference: Reference, repeats: Sequence[Reference]
) -> dict[str, list[Deviation]]:
    """``found`` with what is allowed for gradients that hold rounding only, for parameters that they update, and for buffers,
    which see those parameters in later steps: ``ORDERS`` times the noise of the reference, where that is more than allowed
    before, and ``BOUND`` of the kind's largest tensor at most.
    """
    only_rounding = {
        d.name for d in found["gradients"] if _noise(d, "gradients", reference, repeats) >= INSIGNIFICANT * d.magnitude > 0.0
    }
    if not only_rounding:
        return {kind: list(deviations) for kind, deviations in found.items()}

    def allowed(kind: str, d: Deviation, most: float) -> Deviation:
        if kind == "losses" or kind != "buffers" and d.name not in only_rounding:
            return d
        noise = _noise(d, kind, reference, repeats)
        if kind == "buffers" and ORDERS * noise <= d.allowed:
            return d
        return replace(d, allowed=max(d.allowed, min(ORDERS * noise, most)), noise=noise)

    result = {}
    for kind, deviations in found.items():
        most = BOUND * max((d.magnitude for d in deviations if d.allowed), default=0.0)
        result[kind] = sorted((allowed(kind, d, most) for d in deviations), key=lambda d: d.excess, reverse=True)
    return result


def _noise(d: Deviation, kind: str, reference: Reference, repeats: Sequence[Reference]) -> float:
    """How far a tensor of the reference is from that of its repetitions at most."""
    expected = getattr(reference, kind)[d.name]
    return max(distance(getattr(repeat, kind)[d.name], expected) for repeat in repeats)


def repeated(
    run: Callable[[nn.Module, Sequence[Sequence[Mapping[str, Any]]]], Reference],
    model: nn.Module,
    samples: Sequence[Sequence[Mapping[str, Any]]],
) -> Iterator[Reference]:
    """What ``run`` computes from weights and inputs whose last bits were changed, at random but always alike."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_REPEATS):
        changed = copied(model)
        with torch.no_grad():
            for parameter in changed.parameters():
                parameter.copy_(_last_bits_changed(parameter, generator))
        yield run(changed, [[_inputs_changed(inputs, generator) for inputs in unit] for unit in samples])


def _inputs_changed(inputs: Mapping[str, Any], generator: torch.Generator) -> dict[str, Any]:
    def change(path: str, leaf: Any) -> Any:
        return _last_bits_changed(leaf, generator) if isinstance(leaf, Tensor) else leaf

    return {name: structure.map_leaves(value, change, name) for name, value in inputs.items()}


def _last_bits_changed(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    steps = torch.randint(-1, 2, tensor.shape, generator=generator)
    return tensor * (1 + torch.finfo(tensor.dtype).eps * steps.to(torch.float64)).to(tensor.dtype)
