"""How far numbers are from those of one device, and the bound they are held to.

The bound, per tensor: ``max|ours - reference| <= 1e-10 * max(max|reference|, 1e-4 * M)``, where
``M`` is the largest ``max|reference|`` among the tensors of the same kind (losses, gradients,
parameters). ``M`` is there because some gradients are zero in exact arithmetic, such as those of
attention key biases, and then hold rounding only. Where that rounding is more than ``M`` accounts
for, :mod:`rounding` finds out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BOUND = 1e-10
FLOOR = 1e-4
"""Relative to the largest tensor of a kind, where the bound stops shrinking with the tensor."""


def tensors_of(tree: Any, path: str = "") -> dict[str, Tensor]:
    """The tensors and numbers in ``tree`` by their path, such as
    ``past_key_values.layers[0].keys``.

    Goes into mappings (model outputs of transformers among them), sequences, dataclasses and plain
    objects (caches). ``None``, strings and other things without numbers are left out.
    """
    if isinstance(tree, Tensor):
        return {path: tree}
    if isinstance(tree, bool | int | float):
        return {path: torch.tensor(tree, dtype=torch.float64 if isinstance(tree, float) else None)}
    children: Iterable[tuple[str, Any]] = ()
    if isinstance(tree, Mapping):
        children = ((f"{path}.{key}" if path else str(key), value) for key, value in tree.items())
    elif isinstance(tree, list | tuple):
        children = ((f"{path}[{index}]", value) for index, value in enumerate(tree))
    # Caches of transformers are plain objects.
    elif dataclasses.is_dataclass(tree) or type(tree).__module__.startswith("transformers."):
        children = ((f"{path}.{key}" if path else key, value) for key, value in vars(tree).items())
    return {
        name: tensor
        for child_path, child in children
        for name, tensor in tensors_of(child, child_path).items()
    }


@dataclass(frozen=True)
class Deviation:
    """How far one tensor is from its reference."""

    name: str
    shape: tuple[int, ...]
    error: float
    """max|ours - reference|"""
    magnitude: float
    """max|reference|"""
    allowed: float
    noise: float | None = None
    """The distance of one device from itself, where no digit of a gradient means anything
    (``rounding.py``).
    """

    @property
    def excess(self) -> float:
        """The ratio ``error / allowed``: above 1 is a failure. NaN counts as infinite."""
        if not self.allowed:
            return 0.0 if self.error == 0.0 else math.inf
        ratio = self.error / self.allowed
        return math.inf if math.isnan(ratio) else ratio


@dataclass(frozen=True)
class LoneGradient:
    """A gradient that the plan or one device has, and the other has none.

    Zeros are not the same as none: an optimizer with weight decay or momentum moves a parameter
    whose gradient is zero, and leaves one without a gradient as it is.
    """

    name: str
    of_plan: bool
    """Whether it is the plan that has one."""
    magnitude: float
    """max|gradient|"""

    def __str__(self) -> str:
        holder, other = ("the plan", "one device") if self.of_plan else ("one device", "the plan")
        held = (
            f"one of up to {self.magnitude:.2e}"
            if self.magnitude
            else "one of zeros, which weight decay and momentum see"
        )
        return f"{self.name}: {other} has no gradient, {holder} has {held}"


def lone_gradients(
    ours: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None]
) -> list[LoneGradient]:
    """The gradients that only one of both has, by the names of ``reference``."""
    found = []
    for name, expected in reference.items():
        one = ours.get(name)
        held = expected if one is None else one
        if held is not None and (one is None or expected is None):
            found.append(LoneGradient(name, one is not None, largest(held)))
    return found


def deviations(ours: Any, reference: Any) -> list[Deviation]:
    """The deviation of every tensor of two trees of the same structure, worst first.

    Raises:
        AssertionError: a tensor is missing, one too many, of another shape, or of another dtype.
    """
    got, wanted = tensors_of(ours), tensors_of(reference)
    problems = [f"{name}: missing" for name in wanted.keys() - got.keys()]
    problems += [f"{name}: not in the reference" for name in got.keys() - wanted.keys()]
    for name in wanted.keys() & got.keys():
        if (got[name].shape, got[name].dtype) != (wanted[name].shape, wanted[name].dtype):
            one, other = (f"{tuple(t.shape)} {t.dtype}" for t in (got[name], wanted[name]))
            problems.append(f"{name}: {one}, the reference has {other}")
    if problems:
        raise AssertionError(
            "the trees differ in structure\n" + "\n".join(f"  {line}" for line in sorted(problems))
        )

    magnitudes = {
        # An infinity of a mask would make the bound of all tensors infinite.
        name: largest(tensor.masked_fill(tensor.isinf(), 0))
        for name, tensor in wanted.items()
    }
    floor = FLOOR * max(
        (m for name, m in magnitudes.items() if _is_rounded(wanted[name])), default=0.0
    )
    compared = []
    for name, tensor in wanted.items():
        allowed = BOUND * max(magnitudes[name], floor) if _is_rounded(tensor) else 0.0
        compared.append(
            Deviation(
                name, tuple(tensor.shape), distance(got[name], tensor), magnitudes[name], allowed
            )
        )
    return sorted(compared, key=lambda deviation: deviation.excess, reverse=True)


def largest(tensor: Tensor) -> float:
    """max|tensor|, 0 when empty, not a number if any element is none."""
    return _numbers(tensor).abs().max().item() if tensor.numel() else 0.0


def distance(one: Tensor, other: Tensor) -> float:
    """max|one - other|; infinity minus the same infinity (masks) is not a number, but nothing
    differs.
    """
    a, b = _numbers(one), _numbers(other)
    return largest((a - b).masked_fill(a == b, 0.0))


def _numbers(tensor: Tensor) -> Tensor:
    """The elements in float64, real and imaginary parts of complex ones beside each other."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).to(
        torch.float64
    )


def _is_rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def table(found: Sequence[Deviation]) -> str:
    """Deviations as aligned text, one per line."""
    width = max(len(deviation.name) for deviation in found)
    lines = [
        (
            f"  {'name':{width}}  {'shape':>16}  {'max|a-b|':>9}  {'max|ref|':>9}  "
            f"{'error/allowed':>13}"
        )
    ]
    for d in found:
        mark = "  <--" if d.excess > 1.0 else ""
        mark += f"  one device is {d.noise:.1e} from itself" if d.noise is not None else ""
        lines.append(
            f"  {d.name:{width}}  {d.shape!s:>16}  {d.error:9.2e}  {d.magnitude:9.2e}  "
            f"{d.excess:13.3g}{mark}"
        )
    return "\n".join(lines)
