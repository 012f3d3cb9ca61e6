"""What one device must get right: plans of several ranks, each a thread, held to the model alone on
the CPU in float64; checkpoints between CPU and GPU; autocast with scaled losses; CUDA graphs. Used
by ``one_gpu.py``.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from one_gpu_attention import distance
from one_gpu_tables import Line
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import shardwright
from shardwright.frontend.verification.deviation import deviations
from shardwright.frontend.verification.one_device import adamw, reference_run
from shardwright.frontend.verification.precision import float64_casts
from shardwright.frontend.verification.sample_inputs import rolled
from shardwright.frontend.verification.trained_ranks import moved, train_plan
from shardwright.frontend.verification.verify import compile_into, samples_per_step

BATCH, SEQ, VOCAB = 4, 12, 64
SHAPE = {"vocab_size": VOCAB, "use_cache": False}
STEPS = 3


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, **SHAPE,
        )
    )  # fmt: skip


def _gpt2() -> nn.Module:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=SEQ, **SHAPE)
    for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, dropout, 0.0)
    return GPT2LMHeadModel(config)


def _qwen3_moe() -> nn.Module:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=6,
            num_experts_per_tok=2, **SHAPE,
        )
    )  # fmt: skip


def _recomputed() -> nn.Module:
    model = _llama()
    model.gradient_checkpointing_enable()
    return model


MODELS = {
    "llama": _llama,
    "llama, recomputed": _recomputed,
    "gpt2": _gpt2,
    "qwen3-moe": _qwen3_moe,
}


@dataclass(frozen=True)
class Plan:
    """A plan of ``num_ranks`` ranks. ``fields``: of the config; ``dtype``: of all parameters."""

    name: str
    model: str
    policy: str
    unit: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 4
    dtype: torch.dtype = torch.float64

    def config(self) -> shardwright.ComputeConfig:
        return shardwright.ComputeConfig(
            plan_ngpus=self.unit, runtime_ngpus=self.num_ranks, **self.fields
        )


END2END = {"use_end2end": True}
_RING = {"pas_config": {"cp_mode": "ring"}}
PLANS = (
    Plan("dp", "gpt2", "dp", 1),
    Plan("ZeRO-1", "gpt2", "dp", 1, {"use_zero": 1}),
    Plan("ZeRO-2", "llama", "dp", 1, {"use_zero": 2, "use_async_reducer": True}),
    Plan("ZeRO-3", "gpt2", "dp", 1, {"use_zero": 3}),
    Plan("tp", "llama", "tp", 4),
    Plan("tp, sequence parallel", "llama", "tp", 2, {"pas_config": {"sequence_parallel": True}}),
    Plan("tensor 2d", "llama", "tensor", 4, {"pas_config": {"mode": "2d"}}),
    Plan("pp, 1F1B", "gpt2", "pp", 2, END2END),
    Plan("pp x tp, ZeRO-1", "llama", "hybrid", 4, {**END2END, "use_zero": 1}),
    Plan("cp, ring", "llama", "cp", 4, _RING),
    Plan("cp, Ulysses", "llama", "cp", 2, {"pas_config": {"cp_mode": "ulysses"}}),
    Plan("ep", "qwen3-moe", "ep", 4),
    Plan("tp, recompute", "llama, recomputed", "tp", 2),
)
ALONE = Plan("alone", "llama", "dp", 1, num_ranks=1)
"""One rank, which goes on with what ``tp`` has saved."""

STEPPED = Plan("alone, end to end", "llama", "dp", 1, END2END, num_ranks=1)
"""One rank, whose ``train_step`` is captured as a CUDA graph."""

KERNEL_PLANS = (
    Plan("cp, ring, float32", "llama", "cp", 4, _RING, dtype=torch.float32),
    Plan("cp, ring, bfloat16", "llama", "cp", 4, _RING, dtype=torch.bfloat16),
    Plan("ep, bfloat16", "qwen3-moe", "ep", 4, dtype=torch.bfloat16),
)
"""Plans whose attention and experts have kernels on a GPU, which there are none of in float64."""


def inputs() -> dict[str, Tensor]:
    """The inputs of all plans."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def compile_plans(folder: Path) -> None:
    """Compile all plans in float64, and keep the values of the models beside them."""
    with float64_casts():
        for name, make in MODELS.items():
            torch.manual_seed(0)
            save_file(_values(make().double()), folder / f"{name}.safetensors")
        for plan in (*PLANS, ALONE, STEPPED):
            compile_into(
                _folder_of(folder, plan), _model(folder, plan.model), inputs(), plan.policy,
                plan.config(),
            )  # fmt: skip
    for plan in KERNEL_PLANS:
        model = _model(folder, plan.model).to(plan.dtype)
        compile_into(_folder_of(folder, plan), model, inputs(), plan.policy, plan.config())
    # Regions of autocast are kept for whichever type of device runs the files.
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            compile_into(
                folder / _name(dtype), _model(folder, "llama").float(), inputs(), "tp", _PAIR
            )


def plans(folder: Path, device: torch.device) -> Iterator[Line]:
    """All plans on ranks that share the device, against the model alone on the CPU."""
    for plan in PLANS:
        config, directory = plan.config(), _files(folder, plan)
        with float64_casts():
            model = _model(folder, plan.model)
            units = config.runtime_ngpus // config.plan_ngpus
            count = samples_per_step(directory, config)
            samples = [
                [rolled(inputs(), unit + units * number) for number in range(count)]
                for unit in range(units)
            ]
            alone = reference_run(model, samples, adamw, STEPS)
            ours = train_plan(directory, config, samples, STEPS, adamw, True, alone, device)
        excess = {
            "losses": deviations({"loss": ours.losses}, {"loss": alone.losses}),
            "gradients": deviations(ours.gradients, alone.gradients),
            "parameters": deviations(ours.parameters, alone.parameters),
        }
        worst = {kind: max(d.excess for d in found) for kind, found in excess.items()}
        words = ", ".join(f"{kind} {value:.1e}" for kind, value in worst.items())
        yield Line(
            f"{plan.name} ({plan.model}, 4 ranks)",
            f"worst error / allowed: {words}",
            max(worst.values()) <= 1,
        )


def kernels(folder: Path, device: torch.device) -> Iterator[Line]:
    """Plans in float32 and bfloat16. Their gradients may be as far from those in float64 as those
    of the model alone on the same device are, and as much again.
    """
    for plan in KERNEL_PLANS:
        config = plan.config()
        exact = reference_run(_model(folder, plan.model), [inputs()], adamw, 1).gradients
        model = _model(folder, plan.model).to(plan.dtype).to(device)
        alone = reference_run(model, [moved(inputs(), device)], adamw, 1).gradients
        ours = train_plan(
            _files(folder, plan), config, [[inputs()]], 1, adamw, True, device=device
        ).gradients
        error, alone_error = _error(ours, exact), _error(alone, exact)
        yield Line(
            f"{plan.name} (4 ranks)",
            f"error of the gradients {error:.1e}, of the model alone {alone_error:.1e}",
            error <= 2 * alone_error,
        )


def _error(gradients: Mapping[str, Tensor | None], exact: Mapping[str, Tensor | None]) -> float:
    """The largest error of a gradient, relative to its norm."""
    errors = []
    for name, expected in exact.items():
        found = gradients[name]
        assert expected is not None and found is not None, name
        errors.append(distance(found.cpu(), expected))
    return max(errors)


def checkpoints(folder: Path, device: torch.device) -> Iterator[Line]:
    """Two steps under ``tp`` on the CPU, one more on one rank of the device, and one more on the
    CPU, through checkpoints; against four steps of the model alone.
    """
    (tensor_parallel,) = (plan for plan in PLANS if plan.name == "tp")
    with tempfile.TemporaryDirectory() as saved, float64_casts():
        alone = reference_run(_model(folder, "llama"), [inputs()], adamw, 4)
        cpu = torch.device("cpu")
        parts = ((tensor_parallel, cpu, 2), (ALONE, device, 1), (tensor_parallel, cpu, 1))
        for number, (plan, place, steps) in enumerate(parts):
            go_on = partial(_go_on, _files(folder, plan), Path(saved), number, steps)
            held = shardwright.run_ranks(plan.num_ranks, go_on, device=place)
        found = deviations({"loss": held[0]}, {"loss": alone.losses[-1][0]})
        excess = max(d.excess for d in found)
    yield Line(
        f"checkpoints: tp on 4 CPU ranks, one {device.type} rank, tp again",
        f"worst error / allowed: loss of the fourth step {excess:.1e}",
        excess <= 1,
    )


def _go_on(directory: Path, saved: Path, number: int, steps: int, rank: int) -> Tensor:
    """Train on from the checkpoint of the part before; the loss of the last step, on the host."""
    module = shardwright.load_class(directory)()
    optimizer = shardwright.build_optimizer(module, adamw)
    if number:
        shardwright.load_checkpoint(saved / str(number - 1), module, optimizer)
    given = moved(inputs(), module.device)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = _loss(module(**module.cut_inputs(**given)))
        loss.backward()
        optimizer.step()
    shardwright.save_checkpoint(saved / str(number), module, optimizer, step=number).wait()
    return loss.detach().cpu()


def low_precision(folder: Path, device: torch.device) -> Iterator[Line]:
    """Three steps in autocast with a scaled loss, beside the model alone on the same device."""
    dtypes = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.bfloat16,)
    for dtype in dtypes:
        model = _model(folder, "llama").float()
        scaled = partial(_scaled, _manifest_in(folder / _name(dtype)), dtype)
        found = shardwright.run_ranks(2, scaled, device=device)
        expected = _scaled_alone(model, device, dtype)
        pairs = list(zip(found[0], expected, strict=True))
        worst = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
        yield Line(
            f"autocast to {_name(dtype)} with a scaled loss, tp on 2 ranks",
            f"losses differ by {worst:.1e} at most from those of the model",
            worst <= 1e-2,
        )


_PAIR = shardwright.ComputeConfig(plan_ngpus=2, runtime_ngpus=2)


def _scaled(directory: Path, dtype: torch.dtype, rank: int) -> list[float]:
    module = shardwright.load_class(directory)()
    optimizer, scaler = shardwright.build_optimizer(module, adamw), shardwright.LossScaler(2.0**8)
    given, losses = moved(inputs(), module.device), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(module.device.type, dtype=dtype):
            loss = _loss(module(**module.cut_inputs(**given)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_gnorm(1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def _scaled_alone(model: nn.Module, device: torch.device, dtype: torch.dtype) -> list[float]:
    model = copy.deepcopy(model).to(device)
    optimizer, given, losses = adamw(model.parameters()), moved(inputs(), device), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype):
            loss = _loss(model(**given))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def cuda_graphs(folder: Path, device: torch.device) -> Iterator[Line]:
    """What was captured as a CUDA graph and is replayed on three inputs, beside the same called."""
    if device.type != "cuda":
        return
    for name, prepare in (
        ("forward and backward", partial(_backward, folder)),
        ("train_step", partial(_train_step, folder)),
        ("train_step, clipping and AdamW", partial(_training_step, folder)),
    ):
        called = shardwright.run_ranks(1, partial(_called, prepare), device=device)[0]
        replayed = shardwright.run_ranks(1, partial(_replayed, prepare), device=device)[0]
        worst = max(abs(a - b) / abs(b) for a, b in zip(replayed, called, strict=True))
        yield Line(
            f"{name} in a CUDA graph",
            f"losses and norms differ by {worst:.1e} at most",
            worst <= 1e-9,
        )


@dataclass(frozen=True)
class _Work:
    """Something that can be captured: ``run`` reads ``inputs``, and makes a loss and gradients."""

    module: Any
    inputs: Mapping[str, Tensor]
    run: Callable[[], Tensor]
    is_stepping: bool = False
    """Whether it changes the parameters."""

    def numbers(self, loss: Tensor) -> list[float]:
        """The loss, and the norm of all gradients or, of a step, of all parameters."""
        found = [p if self.is_stepping else p.grad for p in self.module.parameters()]
        norms = [x.norm() for x in found if x is not None]
        return [loss.item(), torch.stack(norms).norm().item()]

    def fill(self, number: int) -> None:
        """Put other tokens, by their number, where ``run`` reads them."""
        for name, tokens in inputs().items():
            self.inputs[name].copy_((tokens + number) % VOCAB)


def _backward(folder: Path) -> _Work:
    module = shardwright.load_class(_files(folder, ALONE))()
    static = moved(inputs(), module.device)

    def run() -> Tensor:
        for parameter in module.parameters():
            parameter.grad = None
        loss = _loss(module(**static))
        loss.backward()
        return loss

    return _Work(module, static, run)


def _train_step(folder: Path) -> _Work:
    module = shardwright.load_class(_files(folder, STEPPED))()
    static = moved(inputs(), module.device)
    return _Work(module, static, lambda: _loss(module.train_step([static])[0]))


def _training_step(folder: Path) -> _Work:
    module = shardwright.load_class(_files(folder, STEPPED))()
    static = moved(inputs(), module.device)
    optimizer = shardwright.build_optimizer(
        module, partial(torch.optim.AdamW, lr=1e-3, capturable=True)
    )

    def run() -> Tensor:
        loss = _loss(module.train_step([static])[0])
        optimizer.clip_gnorm(1.0)
        optimizer.step()
        return loss

    return _Work(module, static, run, is_stepping=True)


_WARM_UP = 3


def _called(prepare: Callable[[], _Work], rank: int) -> list[float]:
    """The numbers of three inputs, after the steps that a capture takes to warm up."""
    work = prepare()
    for _ in range(_WARM_UP):
        work.run()
    found: list[float] = []
    for number in range(3):
        work.fill(number)
        found += work.numbers(work.run())
    return found


def _replayed(prepare: Callable[[], _Work], rank: int) -> list[float]:
    """Replay a graph on the same inputs, and take the same numbers."""
    work = prepare()
    # A graph is captured on a stream of its own, after some steps on it.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            work.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # captures, and runs nothing
        loss = work.run()
    found: list[float] = []
    for number in range(3):
        work.fill(number)
        graph.replay()
        found += work.numbers(loss)
    return found


def _loss(outputs: Any) -> Tensor:
    return outputs["loss"] if isinstance(outputs, dict) else outputs.loss


def _model(folder: Path, name: str) -> nn.Module:
    """The model with the values it was compiled with, whatever this version of torch draws."""
    model = MODELS[name]().double()
    model.load_state_dict(load_file(folder / f"{name}.safetensors"))
    return model


def _values(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of the model, each with memory of its own."""
    return {name: x.detach().clone().contiguous() for name, x in model.state_dict().items()}


def _folder_of(folder: Path, plan: Plan) -> Path:
    return folder / plan.name.replace(", ", "-").replace(" ", "-")


def _files(folder: Path, plan: Plan) -> Path:
    return _manifest_in(_folder_of(folder, plan))


def _manifest_in(folder: Path) -> Path:
    """The folder of the compiled files."""
    (manifest,) = folder.rglob("manifest.json")
    return manifest.parent


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
