"""What ranks on CUDA devices run, besides the trainings of :mod:`device_parity`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import expert_models
import fake_cuda
import runtime_ranks
import torch
import zoo
from device_parity import host, on_device
from precision import float64_casts
from torch import nn

import shardwright
from shardwright.frontend.calibrate.calibrate import describe, measure
from shardwright.frontend.calibrate.effort import Effort
from shardwright.frontend.parallelize import parallelize
from shardwright.frontend.verification.deviation import deviations
from shardwright.frontend.verification.one_device import adamw
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import DistributedError
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.training.build_optimizer import build_optimizer


def collectives() -> tuple[str, dict[str, Any]]:
    """Every collective of a communicator: what was counted, and the results on the host."""
    world = current_world()
    with world.device:
        results = runtime_ranks.collectives()
        # No sum of complex numbers but by their parts; 10 is that of the factors of 4 ranks.
        numbers = torch.arange(8) * (1 - 2j)
        mine = slice(2 * world.rank, 2 * world.rank + 2)
        summed = world.everyone.reduce_scatter(numbers * (world.rank + 1))
        assert torch.equal(summed, numbers[mine] * 10)
        in_place = numbers * (world.rank + 1)
        world.everyone.reduce_scatter_async_(in_place, [2] * 4).wait()
        assert torch.equal(in_place[mine], summed)
    return results["volume"], host(results)


def calibrated() -> tuple[str, list[str]]:
    """The hardware file that the ranks measure together with next to no effort, and what was
    measured of it.
    """
    effort = Effort(
        (2, 4), 1.0, (256, 1024), (256, 4096), 1e-4, 1e-5, attention=((1, 2, 4, 8), (2, 2, 8, 4))
    )
    measured = measure(current_world(), effort)
    return describe(measured).dumps(), sorted(measured)


ONE_DEVICE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tp": ("llama", "tp", {}),
    "ZeRO-3": ("gpt2", "dp", {"plan_ngpus": 1, "use_zero": 3}),
    "pp": ("gpt2", "pp", {"use_end2end": True, "plan_ngpus": 2, "use_zero": 1}),
    "cp": ("llama", "cp", {"pas_config": {"cp_mode": "ring"}}),
    "ep": ("qwen3_moe", "ep", {"plan_ngpus": 2}),
}
"""Plans of four ranks: the model, the policy and fields of the config."""


def ranks_of_one_device(names: list[str]) -> dict[str, tuple[bool, str]]:
    """Whether plans of :data:`ONE_DEVICE` equal one device, with ranks that share a GPU, and the
    report.
    """
    found = {}
    for name in names:
        model, policy, fields = ONE_DEVICE[name]
        entry = (expert_models if policy == "ep" else zoo).get(model)
        config = ComputeConfig(**{"plan_ngpus": 4, "runtime_ngpus": 4, **fields})
        report = shardwright.verify(
            entry.build(), entry.inputs(), policy, config, steps=2, device="cuda"
        )
        found[name] = report.ok, str(report)
    return found


def same_gpu() -> str:
    """What a rank says whose GPU another rank has, ``""`` on the one that came first."""
    torch.cuda.set_device(0)
    try:
        current_world()
    except DistributedError as error:
        return str(error)
    return ""


def _built(
    folder: Path, model: nn.Module, inputs: dict[str, Any], policy: str, **fields: Any
) -> Any:
    world = current_world()
    config = ComputeConfig(**{"plan_ngpus": world.size, "runtime_ngpus": world.size, **fields})
    return parallelize(model, inputs, policy, config, gen_savedir=folder)


def _run(module: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """A forward and backward on this rank's device; the loss."""
    given = on_device(inputs)
    if module.end2end:
        return zoo.loss_of(module.train_step([given] * getattr(module, "num_microbatches", 2))[0])
    loss = zoo.loss_of(module(**given))
    loss.backward()
    return loss.detach()


def resumed(folder: Path, policy: str, **fields: Any) -> float:
    """How far training that goes on from a checkpoint, or from a deduped state, is from training
    that just goes on, in units of what is allowed.
    """
    entry = zoo.get("gpt2")
    inputs = entry.inputs()

    def build() -> tuple[Any, Any]:
        with float64_casts():
            module = _built(folder / "files", entry.build(), inputs, policy, **fields)
        return module, build_optimizer(module, adamw)

    def train(module: Any, optimizer: Any, steps: int) -> None:
        with float64_casts():
            for _ in range(steps):
                optimizer.zero_grad()
                _run(module, inputs)
                optimizer.clip_gnorm(1.0)
                optimizer.step()

    module, optimizer = build()
    train(module, optimizer, 2)
    save = shardwright.save_checkpoint(folder / "saved", module, optimizer, step=2, async_save=True)
    deduped = copy.deepcopy(shardwright.deduped_state_dict(module, optimizer))
    train(module, optimizer, 1)
    save.wait()
    excess = 0.0
    for how in ("checkpoint", "deduped"):
        fresh, stepper = build()
        if how == "checkpoint":
            assert shardwright.load_checkpoint(folder / "saved", fresh, stepper).step == 2
        else:
            shardwright.load_deduped_state_dict(fresh, deduped[0], stepper, deduped[1])
        train(fresh, stepper, 1)
        excess = max(
            excess,
            *(d.excess for d in deviations(host(fresh.state_dict()), host(module.state_dict()))),
        )
    return excess


def mixed(
    folder: Path, policy: str, dtype: torch.dtype, **fields: Any
) -> tuple[list[float], list[float]]:
    """The losses of some steps in autocast with a scaled loss, and those of the model alone on this
    rank's device.
    """
    model, inputs = zoo.get("gpt2").build().float(), zoo.get("gpt2").inputs()
    device = current_world().device
    autocast = partial(torch.autocast, device.type, dtype=dtype)
    with autocast():
        module = _built(folder, model, inputs, policy, **fields)
    optimizer, scaler = build_optimizer(module, adamw), shardwright.LossScaler(init_scale=2.0**8)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        if module.end2end:
            samples = [on_device(inputs)] * getattr(module, "num_microbatches", 2)
            loss = zoo.loss_of(module.train_step(samples, scale_fn=scaler.scale)[0])
        else:
            with autocast():
                loss = zoo.loss_of(module(**on_device(inputs)))
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_gnorm(1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    alone = copy.deepcopy(model).to(device)
    stepper, expected = adamw(alone.parameters()), []
    for _ in range(3):
        stepper.zero_grad()
        with autocast():
            loss = zoo.loss_of(alone(**on_device(inputs)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        stepper.step()
        expected.append(loss.item())
    return losses, expected


def random_numbers(folder: Path, policy: str, **fields: Any) -> list[list[float]]:
    """Losses of three steps with dropout, without recomputing the blocks and with it."""
    entry = zoo.get("gpt2")
    losses: list[list[float]] = []
    for recomputes in (False, True):
        with float64_casts():
            model = entry.build(resid_pdrop=0.3, attn_pdrop=0.2, embd_pdrop=0.1)
            if recomputes:
                model.gradient_checkpointing_enable()
            module = _built(folder / str(recomputes), model, entry.inputs(), policy, **fields)
            optimizer = build_optimizer(module, adamw)
            losses.append([])
            for _ in range(3):
                optimizer.zero_grad()
                losses[-1].append(_run(module, entry.inputs()).item())
                optimizer.step()
    return losses


def evaluated(folder: Path, policy: str, **fields: Any) -> tuple[float, float]:
    """The loss in evaluation mode, and that of the model itself on the CPU."""
    entry = zoo.get("gpt2")
    with float64_casts(), torch.no_grad():
        model = entry.build()
        module = _built(folder, model, entry.inputs(), policy, **fields).eval()
        given = on_device(entry.inputs())
        outputs = (
            module.infer_step([given] * getattr(module, "num_microbatches", 2))[0]
            if module.end2end
            else module(**given)
        )
        return zoo.loss_of(outputs).item(), zoo.loss_of(model.eval()(**entry.inputs())).item()


def waits(folder: Path, policy: str, **fields: Any) -> list[str]:
    """What the host waits for the device in the seventh step, in which ranks compare nothing."""
    entry = zoo.get("gpt2")
    with float64_casts():
        module = _built(folder, entry.build(), entry.inputs(), policy, **fields)
        optimizer = build_optimizer(module, adamw)
        for _ in range(7):
            fake_cuda.synchronisations()
            optimizer.zero_grad()
            _run(module, entry.inputs())
            optimizer.clip_gnorm(1.0)
            optimizer.step()
    return fake_cuda.synchronisations()


END2END = {"use_end2end": True, "plan_ngpus": 2}

ACTS: dict[str, Callable[[Path], Any]] = {
    "resumed dp": partial(resumed, policy="dp", plan_ngpus=1),
    "resumed tp": partial(resumed, policy="tp"),
    "resumed ZeRO-1": partial(resumed, policy="dp", plan_ngpus=1, use_zero=1),
    "resumed ZeRO-3": partial(resumed, policy="dp", plan_ngpus=1, use_zero=3),
    "resumed pp": partial(resumed, policy="pp", **END2END),
    "mixed dp": partial(mixed, policy="dp", dtype=torch.bfloat16, plan_ngpus=1),
    "mixed tp": partial(mixed, policy="tp", dtype=torch.bfloat16),
    "mixed data": partial(mixed, policy="data", dtype=torch.bfloat16),
    "mixed ZeRO-2": partial(mixed, policy="dp", dtype=torch.bfloat16, plan_ngpus=1, use_zero=2),
    "mixed pp": partial(mixed, policy="pp", dtype=torch.bfloat16, **END2END),
    "float16 tp": partial(mixed, policy="tp", dtype=torch.float16),
    "random tp": partial(random_numbers, policy="tp"),
    "random dp": partial(random_numbers, policy="dp", plan_ngpus=1),
    "random pp": partial(random_numbers, policy="pp", **END2END),
    "waits dp": partial(waits, policy="dp", plan_ngpus=1),
    "waits ZeRO-1": partial(waits, policy="dp", plan_ngpus=1, use_zero=1),
    "waits ZeRO-3": partial(waits, policy="dp", plan_ngpus=1, use_zero=3),
    "waits tp": partial(waits, policy="tp"),
    "waits data": partial(waits, policy="data"),
    "waits pp": partial(waits, policy="pp", **END2END),
    "evaluated tp": partial(evaluated, policy="tp"),
    "evaluated pp": partial(evaluated, policy="pp", **END2END),
}


def _near(found: list[float], expected: list[float], relative: float) -> bool:
    return all(math.isclose(a, b, rel_tol=relative) for a, b in zip(found, expected, strict=True))


RIGHT: dict[str, Callable[[Any], bool]] = {
    "resumed": lambda excess: excess <= 1,
    "mixed": lambda losses: _near(*losses, 2e-3),
    "float16": lambda losses: _near(*losses, 2e-3),
    "random": lambda losses: _near(*losses, 1e-10) and losses[0][0] != losses[0][1],
    "waits": lambda found: found == ["to device", "to device"],  # the inputs
    "evaluated": lambda losses: math.isclose(*losses, rel_tol=1e-10),
}
"""Whether the result of an act is right, by the first word of the act."""


def act(folder: str, names: list[str]) -> dict[str, Any]:
    """The acts of these names, each in a folder of its own. Collective."""
    results = {}
    for number, name in enumerate(names):
        try:
            results[name] = ACTS[name](Path(folder) / str(number))
        except Exception as error:
            error.add_note(f"in the act {name!r}")
            raise
    return results
