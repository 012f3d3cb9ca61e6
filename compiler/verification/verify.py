"""``verify``: compile a model, run all its ranks as threads of this process, and compare with one device.

Everything is float64, casts to float32 inside the model included, so that what is left is rounding: a wrong formula, a
missing reduction or a doubled gradient stands out by ten orders of magnitude.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.compiler.api import parallelize
from shardwright.compiler.verification.deviation import Deviation, deviations, table
from shardwright.compiler.verification.precision import float64_casts
from shardwright.compiler.verification.reference import OptimizerFactory, Reference, adamw, loss_of, reference_run
from shardwright.policies.policy import PolicyFunction
from shardwright.runtime import structure
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.declarations import Declaration
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.loader import load_class
from shardwright.runtime.manifest import Manifest
from shardwright.runtime.optimizer import build_optimizer
from shardwright.runtime.threads import run_ranks


@dataclass(frozen=True)
class VerifyReport:
    """How far the plan is from one device. ``deviations``: kind (losses, gradients, parameters, buffers) to its tensors, worst
    first. ``compared_with`` names the reference: the model itself, or for a model that draws random numbers the program
    of one rank, which draws the same.
    """

    deviations: Mapping[str, Sequence[Deviation]]
    losses: tuple[float, ...]
    num_ranks: int
    mesh: Mesh
    compared_with: str

    @property
    def ok(self) -> bool:
        return all(d.excess <= 1.0 for found in self.deviations.values() for d in found)

    def __str__(self) -> str:
        lines = [f"{self.num_ranks} ranks in units of {self.mesh}, compared with {self.compared_with}"]
        lines.append("losses  " + "  ".join(f"{loss:.12g}" for loss in self.losses))
        for kind, found in self.deviations.items():
            bad = [d for d in found if d.excess > 1.0]
            worst = max(found, key=lambda d: d.excess, default=None)
            verdict = f"{len(bad)} of {len(found)} differ" if bad else "equal"
            lines.append(
                f"{kind:<10}  {len(found):4} tensors  worst error / allowed {worst.excess if worst else 0:8.2g}  {verdict}"
            )
            lines += [table(bad[:10])] if bad else []
        return "\n".join(lines)


def verify(
    model: nn.Module,
    dummy_args: Mapping[str, Any],
    policy: str | PolicyFunction,
    config: ComputeConfig | Mapping[str, Any],
    *,
    inputs_per_unit: Sequence[Mapping[str, Any]] | None = None,
    steps: int = 3,
    optimizer: OptimizerFactory = adamw,
    directory: Path | None = None,
) -> VerifyReport:
    """Train ``model`` for ``steps`` steps under the plan and on one device, and compare.

    ``inputs_per_unit``: the inputs of every unit (default: the dummy ones, rolled along the batch). ``directory``: where the
    files go (default: a temporary folder). The model is left as it was.

    Raises what :func:`parallelize` raises.
    """
    config = ComputeConfig.of(config)
    model = copy.deepcopy(model).double()
    dummy_args = in_float64(dummy_args)
    units = config.runtime_ngpus // config.plan_ngpus
    inputs = (
        [in_float64(x) for x in inputs_per_unit] if inputs_per_unit else [rolled(dummy_args, unit) for unit in range(units)]
    )
    with tempfile.TemporaryDirectory() as temporary, float64_casts():
        folder = directory or Path(temporary)
        reference = reference_run(model, inputs, optimizer, steps, reduction=config.grad_reduction)
        again = reference_run(model, inputs, optimizer, 1, reduction=config.grad_reduction)
        compared_with = "the model on one device"
        if not all(torch.equal(a, b) for a, b in zip(reference.losses[0], again.losses[0], strict=True)):
            compared_with = "its program on one rank, as the model draws random numbers"
            config = replace(config, rng="plan_independent")
            single = replace(config, plan_ngpus=1, runtime_ngpus=units, rank_order=None)
            reference, _ = trained(model, dummy_args, "dp", single, inputs, steps, optimizer, folder / "reference")
        ours, mesh = trained(model, dummy_args, policy, config, inputs, steps, optimizer, folder / "plan", reference)
    found = {
        "losses": deviations({"loss": ours.losses}, {"loss": reference.losses}),
        "gradients": deviations(ours.gradients, reference.gradients),
        "parameters": deviations(ours.parameters, reference.parameters),
        "buffers": deviations(ours.buffers, reference.buffers),
    }
    losses = tuple(loss.item() for loss in ours.losses[-1])
    return VerifyReport(found, losses, config.runtime_ngpus, mesh, compared_with)


def trained(
    model: nn.Module,
    dummy_args: Mapping[str, Any],
    policy: str | PolicyFunction,
    config: ComputeConfig,
    inputs_per_unit: Sequence[Mapping[str, Any]],
    steps: int,
    optimizer: OptimizerFactory,
    folder: Path,
    reference: Reference | None = None,
) -> tuple[Reference, Mesh]:
    """What the ranks of a plan compute, put together again; the buffers are those of the first unit.

    ``reference``: of copies that differ, the one farthest from it is taken.
    """
    parallelize(model, dummy_args, policy, config, gen_savedir=folder, load_module=False, reuse="override")
    (directory,) = {path.parent for path in folder.rglob("manifest.json")}
    manifest = Manifest.read(directory)
    mesh = manifest.mesh

    def rank(index: int) -> tuple[list[Tensor], Any, dict[str, Tensor | None], dict[str, Tensor], dict[str, Tensor]]:
        module = load_class(directory)()
        module.train(model.training)
        stepper = build_optimizer(module, optimizer, config)
        inputs = inputs_per_unit[index // mesh.size]
        losses, outputs, gradients = [], None, {}
        for step in range(steps):
            stepper.zero_grad()
            result = module(**inputs)
            loss = loss_of(result)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach().clone())
            if step == 0:
                outputs = result
                stepper.sync_shard_grad()
                gradients = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
            stepper.step()
        parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
        return losses, outputs, gradients, parameters, {name: b.clone() for name, b in module.named_buffers()}

    results = run_ranks(config.runtime_ngpus, rank)
    losses = [[results[unit * mesh.size][0][step] for unit in range(len(inputs_per_unit))] for step in range(steps)]
    gradients: dict[str, Tensor | None] = {}
    parameters, buffers = {}, {}
    for name, declaration in manifest.tensors.items():
        if declaration.kind == "parameter":
            pieces = [result[2].get(name) for result in results]
            expected = reference.gradients[name] if reference else None
            shape = torch.zeros(tuple(declaration.layout.shape), dtype=declaration.dtype)
            gradients[name] = whole(declaration, pieces, mesh, shape if expected is None else expected)
            if all(piece is None for piece in pieces):
                gradients[name] = None
            parameters[name] = whole(
                declaration, [r[3][name] for r in results], mesh, reference.parameters[name] if reference else shape
            )
        elif declaration.kind == "buffer":
            held = [r[4][name] for r in results[: mesh.size]]
            buffers[name] = whole(declaration, held, mesh, reference.buffers[name] if reference else held[0])
    return Reference(losses, [result[1] for result in results[:: mesh.size]], gradients, parameters, buffers), mesh


def whole(declaration: Declaration, pieces: Sequence[Tensor | None], mesh: Mesh, reference: Tensor) -> Tensor:
    """The tensor that ranks hold pieces of, each element from the rank where it is farthest from ``reference``, so that a
    copy that went astray is seen. Units follow each other; a missing piece is zeros; what nobody holds is not a number.
    """
    layout: Layout = declaration.layout
    result = torch.full(tuple(layout.shape), math.nan, dtype=torch.float64)
    for index, piece in enumerate(pieces):
        coords = mesh.coords(index % mesh.size)
        spans = [layout.runs(dim, mesh, coords) for dim in range(len(layout.dims))]
        runs = [torch.tensor([i for start, stop in span for i in range(start, stop)], dtype=torch.long) for span in spans]
        where = torch.meshgrid(*runs, indexing="ij") if runs else ...
        held = torch.zeros_like(result[where]) if piece is None else piece.to(result.dtype)
        known, wanted = result[where], reference.to(result.dtype)[where]
        farther = known.isnan() | ~((held - wanted).abs() <= (known - wanted).abs())
        result[where] = torch.where(farther, held, known)
    return result.to(reference.dtype)


def in_float64(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with floating tensors in float64."""

    def cast(path: str, leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return {name: structure.map_leaves(value, cast, name) for name, value in args.items()}


def rolled(args: Mapping[str, Any], unit: int) -> dict[str, Any]:
    """Other inputs for another unit: the rows of every tensor moved on by ``unit``, values of floating ones scaled."""

    def move(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or unit == 0 or leaf.ndim == 0:
            return leaf
        moved = leaf.roll(unit, 0)
        return moved * (1 + 0.1 * unit) if leaf.is_floating_point() else moved

    return {name: structure.map_leaves(value, move, name) for name, value in args.items()}
