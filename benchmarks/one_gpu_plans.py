"""Speed and memory on one device: generated code beside eager and compiled PyTorch, and plans
beside what the cost model says of them. Used by ``one_gpu.py``.

The model is a Llama, bfloat16 on a GPU: B samples of S tokens in a step. What memory holds is read
from CUDA's allocator, or counted storage by storage where the CPU stands in.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from one_gpu_tables import Line
from pairs import compare
from predict import rank_correlation
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright
from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import PlanCost, audit
from shardwright.compiler.cost.fake.live_bytes import LiveBytes
from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.plan.program import Program
from shardwright.compiler.trace.entry import trace
from shardwright.frontend.verification.verify import compile_into
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.module.parallel_module import ParallelModule

Sample = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A plan of one rank: ``batch`` samples of ``seq`` tokens in each microbatch. ``options``: of
    policy ``dp``. ``recompute``: backward computes the layers again.
    """

    name: str
    batch: int
    seq: int
    num_microbatches: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    recompute: bool = False

    def config(self) -> shardwright.ComputeConfig:
        return shardwright.ComputeConfig(
            plan_ngpus=1, runtime_ngpus=1, use_end2end=True, pas_config=dict(self.options)
        )


@dataclass(frozen=True)
class Size:
    """How large the models of this run are. ``kernels``: the case of generated code beside eager
    code; ``plans``: those that are predicted.
    """

    hidden: int
    inner: int
    heads: int
    vocab: int
    dtype: torch.dtype
    kernel_layers: int
    plan_layers: int
    kernels: Case
    plans: tuple[Case, ...]
    num_pairs: int
    compiles: bool

    def model(self, num_layers: int, device: torch.device | str) -> LlamaForCausalLM:
        """The Llama, with one set of values on one device."""
        torch.manual_seed(0)
        with torch.device(device):
            model: LlamaForCausalLM = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=self.vocab,
                    hidden_size=self.hidden,
                    intermediate_size=self.inner,
                    num_hidden_layers=num_layers,
                    num_attention_heads=self.heads,
                    num_key_value_heads=max(1, self.heads // 4),
                    max_position_embeddings=4096,
                    use_cache=False,
                )
            )
        return model.to(self.dtype)

    def sample(self, case: Case, device: torch.device | str) -> Sample:
        """The inputs of a microbatch."""
        tokens = torch.randint(
            self.vocab, (case.batch, case.seq), generator=torch.Generator().manual_seed(1)
        )
        return {name: tokens.to(device) for name in ("input_ids", "labels")}


def _plans(batch: int, seq: int) -> tuple[Case, ...]:
    """A dozen plans around ``batch`` samples of ``seq`` tokens."""
    return (
        Case("quarter batch", batch // 4, seq),
        Case("half batch", batch // 2, seq),
        Case("batch", batch, seq),
        Case("half batch, long", batch // 2, 2 * seq),
        Case("quarter batch, very long", batch // 4, 4 * seq),
        Case("batch, recompute", batch, seq, recompute=True),
        Case("half batch, long, recompute", batch // 2, 2 * seq, recompute=True),
        Case("batch, loss in 4 pieces", batch, seq, options={"loss_pieces": 4}),
        Case("batch, MLPs in 2 pieces", batch, seq, options={"mlp_pieces": 2}),
        Case("batch, both", batch, seq, options={"loss_pieces": 4, "mlp_pieces": 2}),
        Case("2 microbatches of half", batch // 2, seq, 2),
        Case("4 microbatches of a quarter", batch // 4, seq, 4),
    )


ON_GPU = Size(
    2048, 8192, 32, 32000, torch.bfloat16, 8, 4, Case("kernels", 4, 2048), _plans(8, 1024), 10, True
)
"""The width of Llama-3.2-1B, with fewer layers, so that compiling them takes seconds."""

STAND_IN = Size(
    64, 256, 4, 512, torch.float32, 2, 2, Case("kernels", 2, 64), _plans(4, 32), 5, False
)
"""What a CPU runs in seconds."""


def compile_plans(folder: Path, size: Size) -> None:
    """Compile everything that this file runs; no device is needed, and no memory for weights."""
    for case, num_layers in _cases(size):
        compile_into(
            folder / _folder_of(case), traced(size, case, num_layers), size.sample(case, "cpu"),
            "dp", case.config(),
        )  # fmt: skip


def traced(size: Size, case: Case, num_layers: int) -> LlamaForCausalLM:
    """The model as it is compiled: without memory for its weights."""
    model = size.model(num_layers, "meta")
    # The rotary frequencies are no weights that could be loaded later.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    if case.recompute:
        model.gradient_checkpointing_enable()
    return model


def _cases(size: Size) -> list[tuple[Case, int]]:
    return [(size.kernels, size.kernel_layers), *((case, size.plan_layers) for case in size.plans)]


def _folder_of(case: Case) -> str:
    return case.name.replace(", ", "-").replace(" ", "-")


def kernels(folder: Path, size: Size, device: torch.device, flops_per_s: float) -> Iterator[Line]:
    """Steps of generated code beside those of the model itself, both as they are and both compiled.

    ``flops_per_s``: what the device does at most, for the share of it that a step makes use of.
    """
    case, sample = size.kernels, size.sample(size.kernels, device)
    num_tokens = case.batch * case.seq
    ways: list[tuple[str, bool]] = [("eager", False)]
    if size.compiles:
        ways.append(("compiled", True))
    for name, compiled in ways:
        model = size.model(size.kernel_layers, device)
        ours = loaded(folder, case, model)
        weights = sum(p.numel() for p in model.parameters())
        if compiled:
            ours.compile()
            model = torch.compile(model)  # type: ignore[assignment]
        steps = _step(ours, sample), _step_alone(model, sample)
        peaks = [_peak_of_step(step, device) for step in steps]
        ratio = compare(
            *steps, num_pairs=size.num_pairs, num_warmup=2, barrier=partial(_wait, device)
        )
        losses = [step() for step in steps]
        share = 6 * weights * num_tokens / flops_per_s / ratio.ours_s
        yield Line(
            f"step of generated code, {name}",
            f"{ratio}, peak {peaks[0] / 1e6:.0f} against {peaks[1] / 1e6:.0f} MB, MFU {share:.1%}",
            _near(*losses, 0.02),
            f"losses {losses[0]:.4f} and {losses[1]:.4f}",
        )
        del ours, model, steps
        _forget(device)


def plans(
    folder: Path,
    size: Size,
    device: torch.device,
    hardware: Hardware,
    preset: Hardware | None,
    peak_bound: float,
) -> Iterator[Line]:
    """Peaks and step times of all plans beside what is predicted: for the hardware as it was
    calibrated, and for the preset of its name.
    """
    predicted, measured, by_preset = [], [], []
    losses: dict[str, float] = {}
    for case in size.plans:
        program = program_of(size, case)
        cost = _cost(program, case, hardware)
        if preset is not None:
            by_preset.append(_cost(program, case, preset).step_s)
        seconds, peak, losses[case.name] = _measured(folder, size, case, device)
        predicted.append(cost.step_s)
        measured.append(seconds)
        error = cost.memory[0].peak_bytes / peak - 1
        yield Line(
            f"plan: {case.name}",
            f"step {cost.step_s * 1e3:.2f} ms predicted, {seconds * 1e3:.2f} measured; "
            f"peak {cost.memory[0].peak_bytes / 1e6:.1f} MB, {peak / 1e6:.1f} measured "
            f"({error:+.1%})",
            abs(error) <= peak_bound,
            f"the peak is more than {peak_bound:.0%} off",
        )
    order = rank_correlation(predicted, measured)
    # Steps of milliseconds on a processor that others use have no order of their own.
    is_judged = device.type == "cuda"
    yield Line(
        "order of the plans' steps",
        _agreement(predicted, measured) + ("" if is_judged else " (not judged on the stand-in)"),
        order >= 0.9 or not is_judged,
    )
    if preset is not None:
        yield Line(f"the same by preset {preset.name}", _agreement(by_preset, measured))
    # Recomputation and pieces change what is held, not what is computed.
    same = [losses[name] for name in losses if name.startswith("batch")]
    yield Line(
        "losses of one batch, however it is computed",
        f"{min(same):.5f} to {max(same):.5f}",
        _near(min(same), max(same), 0.01),
    )


def _agreement(predicted: Sequence[float], measured: Sequence[float]) -> str:
    ratios = [p / m for p, m in zip(predicted, measured, strict=True)]
    error = statistics.fmean(abs(ratio - 1) for ratio in ratios)
    return (
        f"rank correlation {rank_correlation(predicted, measured):.3f}, predicted over measured "
        f"{min(ratios):.2f} to {max(ratios):.2f}, mean error {error:.1%}"
    )


def program_of(size: Size, case: Case) -> Program:
    graph = trace(traced(size, case, size.plan_layers), size.sample(case, "cpu"))
    found = compile_graph(graph, find_policy("dp").apply, case.config(), policy_name="dp")
    return found.program


def _cost(program: Program, case: Case, hardware: Hardware) -> PlanCost:
    return audit(program, case.config(), hardware, num_microbatches=case.num_microbatches)


def loaded(folder: Path, case: Case, model: nn.Module | None = None) -> Any:
    """The compiled module on the device of the world, with the values of ``model``."""
    (manifest,) = (folder / _folder_of(case)).rglob("manifest.json")
    module: ParallelModule = shardwright.load_class(manifest.parent)(init_params=False)
    if model is not None:
        missing = module.load_state_dict(model.state_dict(), strict=False)
        assert not missing.unexpected_keys, missing
    return module


def _measured(
    folder: Path, size: Size, case: Case, device: torch.device
) -> tuple[float, int, float]:
    """Seconds of the fastest step, bytes at the peak of a step, and the loss of the first."""
    with _memory(device) as memory:
        module = loaded(folder, case)
        module.load_state_dict(size.model(size.plan_layers, device).state_dict(), strict=False)
        _forget(device)
        samples = [size.sample(case, device) for _ in range(case.num_microbatches)]
        step = _step(module, *samples)
        loss = step()
        memory.restart()
        step()
        peak = memory.peak()
    seconds = []
    for _ in range(size.num_pairs):
        _wait(device)
        start = time.perf_counter()
        step()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds), peak, loss


def _step(module: Any, *samples: Sample) -> Callable[[], float]:
    """One training step of a compiled module; it returns the loss of the first sample."""
    optimizer = shardwright.build_optimizer(module, torch.optim.Adam, lr=1e-4)

    def step() -> float:
        outputs = module.train_step(list(samples))
        optimizer.step()
        optimizer.zero_grad()
        return _loss(outputs[0])

    return step


def _step_alone(model: nn.Module, sample: Sample) -> Callable[[], float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> float:
        outputs = model(**sample)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return _loss(outputs)

    return step


def _loss(outputs: Any) -> float:
    return float(outputs["loss"] if isinstance(outputs, dict) else outputs.loss)


def _near(one: float, other: float, relative: float) -> bool:
    return abs(one - other) <= relative * abs(other)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget(device: torch.device) -> None:
    """Let go of what nobody holds, so that the next measurement does not count it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _peak_of_step(step: Callable[[], float], device: torch.device) -> int:
    """The bytes at the peak of a step above those before its first: activations, gradients and the
    state of the optimizer.
    """
    with _memory(device) as memory:
        step()
        memory.restart()
        step()
        return memory.peak()


class CudaMemory:
    """The bytes that CUDA's allocator has given away since this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.cuda.memory_allocated(device)

    def restart(self) -> None:
        """Measure the peak from now on."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """The most bytes at once since then."""
        return torch.cuda.max_memory_allocated(self._device) - self._before


class HostMemory:
    """The bytes of storages that were made since ``live`` counts."""

    def __init__(self, live: LiveBytes) -> None:
        self._live = live

    def restart(self) -> None:
        """Measure the peak from now on."""
        self._live.restart()

    def peak(self) -> int:
        """The most bytes at once since then."""
        return self._live.peak


@contextlib.contextmanager
def _memory(device: torch.device) -> Iterator[CudaMemory | HostMemory]:
    """Count what lives on the device, of what is made inside."""
    if device.type == "cuda":
        _forget(device)
        yield CudaMemory(device)
    else:
        with LiveBytes() as live:
            yield HostMemory(live)
