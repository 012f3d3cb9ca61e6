"""``verify``: compile a model, run all its ranks as threads of this process, and compare with one
device.

Everything is float64, casts to float32 inside the model included, so that what is left is rounding:
a wrong formula, a missing reduction or a doubled gradient stands out by ten orders of magnitude.
"""

from __future__ import annotations

import importlib.util
import random
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright.frontend.files.cache import read_plan
from shardwright.frontend.files.further_programs import constants_of
from shardwright.frontend.parallelize import parallelize
from shardwright.frontend.verification.deviation import (
    BOUND,
    Deviation,
    LoneGradient,
    deviations,
    lone_gradients,
    table,
)
from shardwright.frontend.verification.one_device import (
    OptimizerFactory,
    Reference,
    adamw,
    reference_run,
)
from shardwright.frontend.verification.precision import float64_casts
from shardwright.frontend.verification.rounding import (
    allow_rounding,
    has_most_digits,
    is_rounding_only,
    is_zero_exactly,
    repeated,
)
from shardwright.frontend.verification.sample_inputs import in_float64, model_in_float64, rolled
from shardwright.frontend.verification.trained_ranks import Samples, train_plan
from shardwright.policies.parallel_form import without_form
from shardwright.policies.policy import PolicyFunction
from shardwright.runtime.activity import activity, tell
from shardwright.runtime.arguments import checked
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, brief
from shardwright.runtime.layout import Mesh
from shardwright.runtime.manifest import Manifest
from shardwright.runtime.ranks.threads import shared_device
from shardwright.runtime.structure import flatten

if TYPE_CHECKING:
    from shardwright.frontend.verification.outside.outside_run import OutsideReport


@dataclass(frozen=True)
class VerifyReport:
    """How far the plan is from one device. ``deviations``: kind (losses, gradients, parameters,
    buffers) to its tensors, worst first. ``lone``: gradients that only one side has.
    ``compared_with`` names the reference: the model itself, or for a model that draws random
    numbers the program of one rank, which draws the same.
    """

    deviations: Mapping[str, Sequence[Deviation]]
    lone: Sequence[LoneGradient]
    losses: tuple[float, ...]
    num_ranks: int
    mesh: Mesh
    compared_with: str
    outside: OutsideReport | None = None
    """What ``spmd_types`` says, where it was asked."""
    paused: frozenset[str] = frozenset()
    """Parameters without a gradient in a step after the first on one device, where zeros are not
    the same.
    """

    @property
    def ok(self) -> bool:
        """Whether nothing differs by more than rounding, both sides have gradients for the same
        parameters, and nothing was refused from outside.
        """
        accepted = self.outside is None or self.outside.ok
        return (
            accepted
            and not self.lone
            and all(d.excess <= 1.0 for found in self.deviations.values() for d in found)
        )

    def __str__(self) -> str:
        lines = [
            f"{self.num_ranks} ranks in units of {self.mesh}, compared with {self.compared_with}"
        ]
        lines.append("losses  " + "  ".join(f"{loss:.12g}" for loss in self.losses))
        for kind, found in self.deviations.items():
            bad = [d for d in found if d.excess > 1.0]
            worst = max(found, key=lambda d: d.excess, default=None)
            verdict = f"{len(bad)} of {len(found)} differ" if bad else "equal"
            lines.append(
                f"{kind:<10}  {len(found):4} tensors  worst error / allowed "
                f"{worst.excess if worst else 0:8.2g}  {verdict}"
            )
            lines += [table(bad[:10])] if bad else []
            lines += self._lone() if kind == "gradients" else []
            lines += self._paused(bad) if kind == "parameters" else []
        lines += self._rounding()
        lines += [str(self.outside)] if self.outside is not None else []
        return "\n".join(lines)

    def _lone(self) -> list[str]:
        if not self.lone:
            return []
        count = f"{len(self.lone)} more are" if len(self.lone) > 1 else "1 more is"
        more = ["  ..."] if len(self.lone) > 10 else []
        return [
            f"{count} there on one side only",
            *(f"  {gradient}" for gradient in self.lone[:10]),
            *more,
        ]

    def _paused(self, bad: Sequence[Deviation]) -> list[str]:
        names = [d.name for d in bad if d.name in self.paused]
        if not names:
            return []
        return [
            f"of {len(names)} of these one device has no gradient in a later step: {_first(names)}",
            "  zeros, as the plan has for an expert that no token chose, are moved by weight decay",
            "  and momentum. One step (--steps 1) compares without",
        ]

    def _rounding(self) -> list[str]:
        noted = [
            d
            for kind in self.deviations.values()
            for d in kind
            if has_most_digits(d) and d.error > BOUND * d.magnitude
        ]
        noisy = [
            d
            for d in self.deviations["gradients"]
            if d.noise is not None and not has_most_digits(d)
        ]
        none = [d.name for d in noisy if is_rounding_only(d)]
        few = [d.name for d in noisy if not is_rounding_only(d)]
        lines = []
        if none:
            lines += [
                f"of {len(none)} gradients no digit means anything: {_first(none)}",
                "  they are zero in exact arithmetic (a bias in front of a norm, say)",
            ]
        if few:
            lines += [
                f"of {len(few)} gradients only a few digits mean anything: {_first(few)}",
                "  their terms nearly cancel (a scale in front of a norm, say)",
            ]
        if lines:
            lines += [
                "  One device computes others when last bits of its weights and inputs change.",
                "  They are compared with the size of that rounding",
            ]
        if noted:
            lines += [
                (
                    f"of {len(noted)} tensors the last digits are rounding: "
                    f"{_first([d.name for d in noted])}"
                ),
                (
                    "  One device is as far from itself when last bits of its weights and inputs "
                    "change"
                ),
            ]
        return lines


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


MOST_STEPS = 10_000
"""The most steps, and samples of a step, that are compared: all samples are made beforehand."""


@checked
def verify(
    module: nn.Module,
    dummy_forward_args: Mapping[str, Any],
    pas_policy: str | PolicyFunction | Mapping[str, Any],
    compute_config: ComputeConfig | Mapping[str, Any],
    *,
    inputs_per_unit: Sequence[Mapping[str, Any]] | None = None,
    steps: int = 3,
    optimizer: OptimizerFactory = adamw,
    directory: Path | None = None,
    num_samples: int | None = None,
    outside: bool = False,
    device: str | torch.device = "cpu",
) -> VerifyReport:
    """Train ``module`` for ``steps`` steps under the plan and on one device, and compare.

    ``inputs_per_unit``: the inputs of every unit (default: the dummy ones, rolled along the batch).
    ``optimizer``: a function of the parameters to train with (default: AdamW).
    ``directory``: where the files go (default: a temporary folder). ``num_samples``: how many a
    step of an end2end module accumulates (default: two, or what its schedule says). ``outside``:
    run the files under ``spmd_types``, too. ``device``: what all ranks compute on, each as a thread
    of this process, ``"cuda"`` for one GPU; the model alone runs on the CPU. The module is left as
    it was.

    Raises what :func:`parallelize` raises, and :class:`ConfigError` for a model without values,
    less than a step, a device that is not there, or where ``spmd_types`` is asked for and not
    installed.
    """
    _check_numbers(steps, num_samples)
    device = shared_device(device)
    certify = outside_certificate() if outside else None
    policy, config = without_form(pas_policy, compute_config)
    model = model_in_float64(module)
    dummy_args = in_float64(dummy_forward_args)
    units = config.runtime_ngpus // config.plan_ngpus
    with (
        activity("verifying"),
        tempfile.TemporaryDirectory() as temporary,
        float64_casts(model),
    ):
        folder = directory or Path(temporary)
        compiled = compile_into(folder / "plan", model, dummy_args, policy, config)
        # Policies of users may cut into stages without being asked for whole steps.
        if read_plan(compiled).stages:
            config = replace(config, use_end2end=True)
        num_samples = samples_per_step(compiled, config) if num_samples is None else num_samples
        # Declared or found, the values of these inputs are the same in every call.
        constants = constants_of(compiled) if _has_integers(dummy_args) else []
        # Units must differ, or a reduction that takes one unit's gradient for all would pass.
        given = inputs_per_unit or [rolled(dummy_args, unit, constants) for unit in range(units)]
        # Each unit gets samples of its own: their numbers are dealt in turns.
        numbers = [number * units for number in range(num_samples)]
        samples = [[rolled(in_float64(x), number, constants) for number in numbers] for x in given]
        reduction = config.grad_reduction

        def alone(model: nn.Module, samples: Samples) -> Reference:
            return reference_run(model, samples, optimizer, steps, reduction=reduction)

        tell("the model alone")
        before = _random_state()
        reference, run_alone = alone(model, samples), alone
        compared_with = "the model on one device"
        # The model itself draws from torch's generator, whose numbers no plan can repeat.
        if _random_state() != before:
            compared_with = "its program on one rank, as the model draws random numbers"
            # Fast random numbers depend on how a plan cuts; these are the same under every plan.
            config = replace(config, rng="plan_independent")
            compiled = _compiled_again(folder / "plan", model, dummy_args, policy, config)
            single = replace(
                config, plan_ngpus=1, runtime_ngpus=units, rank_order=None, pas_config={}
            )

            def program_alone(model: nn.Module, samples: Samples) -> Reference:
                directory = _compiled_again(folder / "reference", model, dummy_args, "dp", single)
                # On the same device, whose generator draws numbers of its own.
                return train_plan(
                    directory, single, samples, steps, optimizer, model.training, None, device
                )

            reference, run_alone = program_alone(model, samples), program_alone
        certificate = certify and certify(compiled, config, samples, model.training)
        tell(f"the plan on {config.runtime_ngpus} ranks")
        ours = train_plan(
            compiled, config, samples, steps, optimizer, model.training, reference, device
        )
        mesh = Manifest.read(compiled).mesh
        lone = lone_gradients(ours.gradients, reference.gradients)
        found = _deviations(ours, reference, {one.name for one in lone})
        if any(
            d.excess > 1.0 for kind in ("gradients", "parameters", "buffers") for d in found[kind]
        ):

            def is_zero(name: str) -> bool:
                return is_zero_exactly(name, run_alone, model, samples, reference)

            found = allow_rounding(
                found, reference, list(repeated(run_alone, model, samples)), is_zero
            )
    losses = tuple(loss.item() for loss in ours.losses[-1])
    return VerifyReport(
        found,
        lone,
        losses,
        config.runtime_ngpus,
        mesh,
        compared_with,
        certificate,
        reference.paused,
    )


def _has_integers(args: Mapping[str, Any]) -> bool:
    """Whether a model may read sizes from the values of an argument."""
    tensors = (leaf for leaf in flatten(dict(args)).values() if isinstance(leaf, torch.Tensor))
    return any(not (x.is_floating_point() or x.is_complex()) for x in tensors)


def _check_numbers(steps: int, num_samples: int | None) -> None:
    if steps < 1:
        raise ConfigError(
            f"there is nothing to compare after {steps} steps", hint="compare at least one step"
        )
    if num_samples is not None and num_samples < 1:
        raise ConfigError(
            f"there is nothing to compare of {num_samples} samples",
            hint="compare at least one in a step",
        )
    for name, number in (("steps", steps), ("num_samples", num_samples or 1)):
        if number > MOST_STEPS:
            raise ConfigError(
                f"{name}={brief(number)} is too many to compare",
                hint=f"compare at most {MOST_STEPS:,}",
            )


def _deviations(
    ours: Reference, reference: Reference, lone_names: Collection[str]
) -> dict[str, list[Deviation]]:
    """How far the ranks are from one device, by kind. ``lone_names``: parameters of which one side
    only has a gradient; these are told of by themselves.
    """
    both, expected = (
        {name: g for name, g in side.gradients.items() if name not in lone_names}
        for side in (ours, reference)
    )
    return {
        "losses": deviations({"loss": ours.losses}, {"loss": reference.losses}),
        "gradients": deviations(both, expected),
        "parameters": deviations(ours.parameters, reference.parameters),
        "buffers": deviations(ours.buffers, reference.buffers),
    }


def outside_certificate() -> Callable[..., OutsideReport]:
    """The function that runs files under ``spmd_types``, which few have installed."""
    if importlib.util.find_spec("spmd_types") is None:
        raise ConfigError(
            "the package spmd_types is not installed",
            why="it is what checks generated files from outside",
            hint="pip install 'shardwright[outside]', or leave out outside=True (--outside)",
        )
    found = importlib.import_module("shardwright.frontend.verification.outside.outside_run")
    certify: Callable[..., OutsideReport] = found.outside_certificate
    return certify


def _random_state() -> tuple[bytes, object]:
    """The state of the generators from which a model on one device draws. It differs once something
    has been drawn.
    """
    return torch.get_rng_state().numpy().tobytes(), random.getstate()


def compile_into(
    folder: Path,
    model: nn.Module,
    dummy_args: Mapping[str, Any],
    policy: str | PolicyFunction,
    config: ComputeConfig,
) -> Path:
    """Compile, and return the directory of the generated files."""
    parallelize(
        model, dummy_args, policy, config, gen_savedir=folder, load_module=False, reuse="override"
    )
    (directory,) = {path.parent for path in folder.rglob("manifest.json")}
    return directory


def _compiled_again(*args: Any) -> Path:
    """Compile what was compiled before, without saying the same warnings once more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile_into(*args)


def samples_per_step(directory: Path, config: ComputeConfig) -> int:
    """The number of samples of a step: what the plan says, or two if it says nothing. It is one
    outside of end2end modules.
    """
    plan = read_plan(directory)
    if not config.use_end2end:
        return 1
    if plan.batch is not None:
        return plan.batch.num_microbatches
    return plan.num_microbatches if plan.stages else 2
