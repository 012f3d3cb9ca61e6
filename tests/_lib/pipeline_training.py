"""Training the model of :mod:`pipeline_files` on some ranks, and on one device for comparison."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import leaving
import torch
from pipeline_files import Net, Pipe, declarations, make_sample, write_files
from torch import Tensor

from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.training.build_optimizer import build_optimizer

STEPS = 3

Factory = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-4, weight_decay=0.1)


def scale(loss: Tensor) -> Tensor:
    return loss * 0.7


def samples_of(step: int, unit: int, count: int) -> list[dict[str, Tensor]]:
    return [make_sample(1000 * step + 100 * unit + m) for m in range(count)]


def train_reference(
    pipe: Pipe,
    model: Net,
    num_units: int = 1,
    dummies: tuple[int, ...] = (),
    steps: int = STEPS,
    make: Factory = adamw,
) -> dict[str, Any]:
    """One device: the sum over units and samples. Statistics of batch norms are those of unit 0."""
    optimizer = make(model.parameters())
    record: dict[str, Any] = {"losses": [], "norms": [], "logits": [], "counts": []}
    for step in range(steps):
        optimizer.zero_grad()
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for unit in reversed(range(num_units)):
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
            losses = []
            for m, sample in enumerate(samples_of(step, unit, pipe.num_microbatches)):
                loss, rest = model(sample)
                if m not in dummies:
                    scale(loss).backward()
                losses.append(loss.item())
        record["losses"].append(losses)
        record["logits"].append(rest["logits"].detach())
        record["counts"].append(int(rest["count"]))
        record["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        record["gradients"] = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        optimizer.step()
    record["tensors"] = {name: x.detach().clone() for name, x in model.state_dict().items()}
    return record


def train_rank(
    directory: str,
    config: dict[str, Any] | None = None,
    dummies: tuple[int, ...] = (),
    steps: int = STEPS,
    make: Factory = adamw,
) -> dict[str, Any]:
    """What one rank has after the same steps."""
    module = load_class(directory)()
    optimizer = build_optimizer(module, make, config)
    record: dict[str, Any] = {"losses": [], "norms": [], "logits": [], "counts": []}
    for step in range(steps):
        samples = samples_of(step, module.ranks.unit, module.num_microbatches)
        reads = any(segment.reads for segment in module.segments.values())
        results = module.train_step(
            samples if reads else [None] * len(samples),
            [m in dummies for m in range(len(samples))],
            scale,
        )
        record["losses"].append([loss.item() for loss, _ in results])
        record["logits"].append(results[-1][1]["logits"])
        record["counts"].append(int(results[-1][1]["count"]))
        assert results[-1][1]["any"].dtype == torch.bool and results[-1][1]["dropped"] is None
        record["norms"].append(optimizer.clip_gnorm(0.5))
        record["gradients"] = {
            name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
        }
        optimizer.step()
    record["tensors"] = {
        name: x.detach().clone()
        for name, x in module.state_dict().items()
        if name != "_extra_state"
    }
    record["rank"] = current_world().rank
    record["runs"] = module.runs
    record["peak"] = dict(module.in_flight.peak)
    return record


def assert_equal(
    pipe: Pipe, reference: dict[str, Any], results: list[dict[str, Any]], rtol: float = 1e-12
) -> None:
    """Every rank's losses, norms, gradients, parameters and buffers are those of one device, or its
    pieces of them.
    """
    for result in results:
        rank = result["rank"] % pipe.num_ranks
        if result["rank"] < pipe.num_ranks:
            _close(
                "losses", torch.tensor(result["losses"]), torch.tensor(reference["losses"]), rtol
            )
            for mine, expected in zip(result["logits"], reference["logits"], strict=True):
                _close("logits", mine, expected, rtol)
            assert result["counts"] == reference["counts"]
        _close("norms", torch.stack(result["norms"]), torch.stack(reference["norms"]), rtol)
        declared = {name: d for d in declarations(pipe, rank) for name in d.names}
        for kind in ("gradients", "tensors"):
            for name, x in result[kind].items():
                if result["rank"] >= pipe.num_ranks and "running" in name:
                    continue  # statistics are those of each unit
                expected = piece_of(pipe, rank, declared[name], reference[kind][name])
                _close(f"{kind} {name} of rank {result['rank']}", x, expected, rtol)
        assert set(declared) == set(result["tensors"])


def piece_of(pipe: Pipe, rank: int, declaration: Any, whole: Tensor) -> Tensor:
    stage = pipe.stages[declaration.stage]
    coords = stage.mesh.coords(stage.ranks.index(rank))
    for dim in range(whole.ndim):
        runs = declaration.layout.runs(dim, stage.mesh, coords)
        whole = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in runs], dim)
    return whole


def _close(title: str, mine: Tensor, expected: Tensor, rtol: float) -> None:
    assert mine.shape == expected.shape, f"{title}: {mine.shape} is not {expected.shape}"
    difference = (mine - expected).abs().max().item()
    assert difference <= rtol * max(1.0, expected.abs().max().item()), (
        f"{title}: off by {difference}"
    )


def write(directory: Path, pipe: Pipe) -> str:
    return str(write_files(directory, pipe, Net(pipe.num_stages, pipe.tied)))


def die_in_step(directory: str, folder: str) -> None:
    """Rank 2 dies, without a word, in its first forward; the others write down what they raise."""
    module = load_class(directory)()
    rank = current_world().rank
    if rank == 2:
        module.stage2 = lambda *arguments: leaving.leave_when_awaited(Path(folder), (0, 1))
    leaving.tell_of_waiting(Path(folder))
    try:
        module.train_step(samples_of(0, 0, module.num_microbatches))
    except Exception as error:
        Path(folder, f"error{rank}.txt").write_text(str(error))
    leaving.tell(Path(folder))
    os._exit(0)
