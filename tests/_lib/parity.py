"""Parity with one device: the reference run, and the bound its numbers are held to.

The bound, per tensor: ``max|ours - reference| <= 1e-10 * max(max|reference|, 1e-4 * M)``, where ``M`` is the largest
``max|reference|`` among the tensors of the same kind (losses, gradients, parameters). ``M`` is there because some gradients
are zero in exact arithmetic, such as those of attention key biases, and then hold rounding only. Never loosen the
bound: a model that casts to float32 inside is run under :func:`precision.float64_casts` instead.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from precision import float64_casts
from torch import Tensor, nn
from zoo import loss_of

BOUND = 1e-10
FLOOR = 1e-4
"""Relative to the largest tensor of a kind, where the bound stops shrinking with the tensor."""

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

adamw: OptimizerFactory = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
"""The optimizer of parity tests: AdamW's default eps of 1e-8 would amplify the rounding of gradients that are zero."""


@dataclass(frozen=True)
class Reference:
    """What one device computes: see :func:`reference_run`."""

    losses: list[list[Tensor]]
    """Loss of every unit in every step: ``losses[step][unit]``."""
    outputs: list[Any]
    """What ``forward`` returned for every unit in the first step, detached."""
    gradients: dict[str, Tensor | None]
    """Gradients of the first step by parameter name, ``None`` where a parameter has none."""
    parameters: dict[str, Tensor]
    """Parameters after the last step, by name."""
    buffers: dict[str, Tensor]
    """Buffers of the first unit after the last step, by name, non-persistent ones included."""


def reference_run(
    model: nn.Module,
    inputs_per_unit: Sequence[Mapping[str, Any]],
    optimizer: OptimizerFactory = adamw,
    steps: int = 3,
    *,
    reduction: str = "sum",
) -> Reference:
    """Train a copy of ``model`` on one device for ``steps`` steps, all under :func:`precision.float64_casts`.

    A step's loss is the sum (``reduction="mean"``: the mean) of the units' losses, each unit on its own inputs, the same ones
    in every step. Units keep buffers of their own, as they do at run time: batch norm of one unit does not see
    the others' statistics. ``model`` is left untouched.
    """
    model = copy.deepcopy(model)
    scale = {"sum": 1.0, "mean": 1.0 / len(inputs_per_unit)}[reduction]
    unit_buffers = [clone(dict(model.named_buffers())) for _ in inputs_per_unit]
    losses: list[list[Tensor]] = []
    outputs: list[Any] = []
    gradients: dict[str, Tensor | None] = {}
    with float64_casts():
        stepper = optimizer(model.parameters())
        for step in range(steps):
            stepper.zero_grad()
            losses.append([])
            for unit, inputs in enumerate(inputs_per_unit):
                load_buffers(model, unit_buffers[unit])
                result = model(**inputs)
                loss = loss_of(result)
                (scale * loss).backward()
                unit_buffers[unit] = clone(dict(model.named_buffers()))
                losses[-1].append(loss.detach().clone())
                if step == 0:
                    outputs.append(clone(tensors_of(result)))
            if step == 0:
                gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
            stepper.step()
    return Reference(losses, outputs, gradients, clone(dict(model.named_parameters())), unit_buffers[0])


def clone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detached copies."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def load_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Copy the values of ``buffers`` into the model's."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def tensors_of(tree: Any, path: str = "") -> dict[str, Tensor]:
    """The tensors and numbers in ``tree`` by their path, such as ``past_key_values.layers[0].keys``.

    Goes into mappings (model outputs of transformers among them), sequences, dataclasses and plain objects (caches).
    ``None``, strings and other things without numbers are left out.
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
    elif dataclasses.is_dataclass(tree) or type(tree).__module__.startswith("transformers."):
        children = ((f"{path}.{key}" if path else key, value) for key, value in vars(tree).items())
    return {name: tensor for child_path, child in children for name, tensor in tensors_of(child, child_path).items()}


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

    @property
    def excess(self) -> float:
        """``error / allowed``: above 1 is a failure. Not a number counts as infinite."""
        ratio = self.error / self.allowed if self.allowed else (0.0 if self.error == 0.0 else float("inf"))
        return ratio if ratio == ratio else float("inf")


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
            found, expected = (f"{tuple(t.shape)} {t.dtype}" for t in (got[name], wanted[name]))
            problems.append(f"{name}: {found}, the reference has {expected}")
    if problems:
        raise AssertionError("the trees differ in structure\n" + "\n".join(f"  {line}" for line in sorted(problems)))

    magnitudes = {name: largest(tensor.masked_fill(tensor.isinf(), 0)) for name, tensor in wanted.items()}
    floor = FLOOR * max((m for name, m in magnitudes.items() if wanted[name].is_floating_point()), default=0.0)
    found = []
    for name, tensor in wanted.items():
        difference = got[name].detach().to(torch.float64) - tensor.detach().to(torch.float64)
        # Infinity minus the same infinity (masks) is not a number, but nothing differs.
        difference = difference.masked_fill(got[name] == tensor, 0.0)
        allowed = BOUND * max(magnitudes[name], floor) if tensor.is_floating_point() else 0.0
        found.append(Deviation(name, tuple(tensor.shape), largest(difference), magnitudes[name], allowed))
    return sorted(found, key=lambda deviation: deviation.excess, reverse=True)


def largest(tensor: Tensor) -> float:
    """max|tensor|, 0 when empty, not a number if any element is none."""
    return tensor.detach().to(torch.float64).abs().max().item() if tensor.numel() else 0.0


def assert_close_tree(ours: Any, reference: Any, kind: str = "tensors", *, show: int = 10) -> None:
    """Assert the parity bound on every tensor of two trees; all of them are of one ``kind`` (losses, gradients, ...).

    Integers and booleans must be equal. Where something fails, the message is a table of the ``show`` worst tensors.

    Raises:
        AssertionError: a tensor is out of the bound, or the trees differ in structure.
    """
    found = deviations(ours, reference)
    failed = sum(deviation.excess > 1.0 for deviation in found)
    if failed:
        raise AssertionError(f"{failed} of {len(found)} {kind} out of the parity bound, worst first\n{table(found[:show])}")


def table(found: Sequence[Deviation]) -> str:
    """Deviations as aligned text, one per line."""
    width = max(len(deviation.name) for deviation in found)
    lines = [f"  {'name':{width}}  {'shape':>16}  {'max|a-b|':>9}  {'max|ref|':>9}  {'error/allowed':>13}"]
    for d in found:
        mark = "  <--" if d.excess > 1.0 else ""
        lines.append(f"  {d.name:{width}}  {d.shape!s:>16}  {d.error:9.2e}  {d.magnitude:9.2e}  {d.excess:13.3g}{mark}")
    return "\n".join(lines)
