"""Batch and sequence length declared dynamic: one program, calls of several sizes, each equal to
one device.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from precision import float64_casts
from traces import shared_traces

from shardwright.frontend.parallelize import parallelize
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.loader import load_class
from shardwright.runtime.manifest import Manifest
from shardwright.runtime.pieces import local_piece
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer

DIMS = {name: {0: "batch", 1: "seq"} for name in ("input_ids", "labels")}
SIZES = [(4, 8), (6, 5), (3, 15)]
"""The sizes compiled with, and others; the last ones do not divide by two."""


@pytest.mark.parametrize(
    ("name", "policy", "num_ranks", "options"),
    [
        ("llama", "tp", 2, {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gpt2", "tp", 2, {}),
                ("gpt2", "data", 2, {}),
                ("llama", "data", 2, {}),
                ("llama", "cp", 3, {"cp_mode": "ring"}),
                ("gpt2", "cp", 3, {"cp_mode": "gather"}),
                ("mistral", "cp", 2, {"cp_mode": "ring", "cp_turns": 2}),
                ("llama", "cp", 2, {"cp_mode": "ulysses"}),
            )
        ),
    ],
)
def test_dynamic_batch_and_sequence(
    tmp_path: Path, name: str, policy: str, num_ranks: int, options: dict[str, Any]
) -> None:
    entry = zoo.get(name)
    # With two positions the last of three ranks has none.
    sizes = [*SIZES, (2, 2)] if policy == "cp" else SIZES
    model = entry.build(num_hidden_layers=1) if policy == "cp" else entry.build()
    batches = [entry.inputs(batch=batch, seq=seq) for batch, seq in sizes]
    config = ComputeConfig(
        plan_ngpus=num_ranks,
        runtime_ngpus=num_ranks,
        dynamic_dims=DIMS,
        outputs="all",
        pas_config=options,
    )
    with float64_casts(), shared_traces(name):
        parallelize(model, batches[0], policy, config, gen_savedir=tmp_path, load_module=False)
        (directory,) = {path.parent for path in tmp_path.rglob("manifest.json")}
        manifest = Manifest.read(directory)

        def rank(_: int) -> list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]:
            module = load_class(directory)()
            optimizer = build_optimizer(module, torch.optim.SGD, lr=0.0)
            results = []
            for batch in batches:
                optimizer.zero_grad()
                output = module(**batch)
                output.loss.backward()
                optimizer.sync_shard_grad()
                gradients = {
                    n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None
                }
                results.append((output.loss.detach(), output.logits.detach(), gradients))
            return results

        ranks = run_ranks(num_ranks, rank)
        for index, batch in enumerate(batches):
            model.zero_grad()
            expected = model(**batch)
            expected.loss.backward()
            for number, results in enumerate(ranks):
                loss, logits, gradients = results[index]
                torch.testing.assert_close(loss, expected.loss.detach(), rtol=1e-12, atol=0)
                torch.testing.assert_close(logits, expected.logits.detach(), rtol=1e-10, atol=1e-12)
                for fqn, parameter in model.named_parameters():
                    layout, coords = manifest.tensors[fqn].layout, manifest.mesh.coords(number)
                    piece = local_piece(parameter.grad, layout, manifest.mesh, coords)
                    torch.testing.assert_close(
                        gradients[fqn], piece, rtol=1e-9, atol=1e-13, msg=fqn
                    )


class Scaled(torch.nn.Module):
    """Takes a function of a size as an argument of an operator, and nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.up(x) * math.sqrt(x.shape[1])).square().mean()


def test_a_function_of_a_size_in_an_operator_alone(tmp_path: Path) -> None:
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, dynamic_dims={"x": {1: "seq"}})
    model, x = Scaled().double(), torch.randn(4, 9, 8, dtype=torch.float64)

    def loss(rank: int) -> torch.Tensor:
        module = parallelize(model, {"x": x[:, :6]}, "tp", config, gen_savedir=tmp_path)
        return module(x).detach()

    for found in run_ranks(2, loss):
        torch.testing.assert_close(found, model(x).detach(), rtol=1e-12, atol=0)


class Sized(torch.nn.Module):
    """Computes with sizes, in the ways that take them as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, object]]:
        num, seq = x.shape[:2]
        h = (
            self.down(torch.tanh(self.up(x))) / math.sqrt(seq)
            + math.log(seq) * math.exp(-seq)
            + math.pow(seq, 0.5) * abs(seq - 4)
        )
        h = (
            h * torch.linspace(0, 1, seq, dtype=x.dtype)[None, :, None]
            + torch.logspace(0, 1, seq, dtype=x.dtype)[:, None]
        )
        last = h[:, seq - 1] * math.cos(seq) + h[:, seq // 2 - 1] * torch.sym_float(num)
        h[:, seq - 1] = 0
        part = h[:, : math.ceil(seq / 2)].square().sum()
        return last.square().sum() + h.sin().sum() + part, {
            "rows": num * seq,
            "root": math.sqrt(seq) + math.isqrt(seq),
            "h": h,
        }


@pytest.mark.parametrize(
    ("policy", "cut"),
    [
        ("pp", True),
        ("tp", False),
        pytest.param("data", False, marks=pytest.mark.slow),
    ],
)
def test_what_is_computed_with_sizes(tmp_path: Path, policy: str, cut: bool) -> None:
    """Results and gradients of one device for several sizes; numbers among the results, of stages
    too.
    """
    torch.manual_seed(0)
    model = Sized().double()
    batches = [torch.randn(batch, seq, 8, dtype=torch.float64) for batch, seq in SIZES]
    fields: dict[str, Any] = (
        {"use_end2end": True, "pas_config": {"num_microbatches": 3}} if cut else {}
    )
    fields |= {"dynamic_dims": {"x": {0: "batch", 1: "seq"}}, "outputs": "all"}
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, **fields)
    parallelize(model, {"x": batches[0]}, policy, config, gen_savedir=tmp_path, load_module=False)
    (directory,) = {path.parent for path in tmp_path.rglob("manifest.json")}
    manifest = Manifest.read(directory)

    def rank(_: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
        module = load_class(directory)()
        optimizer = build_optimizer(module, torch.optim.SGD, lr=0.0)
        if cut:
            results = module.train_step([{"x": x} for x in batches])
        else:
            results = [module(x) for x in batches]
            torch.stack([result[0] for result in results]).sum().backward()
        optimizer.sync_shard_grad()
        return results, {
            n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None
        }

    expected = [model(x) for x in batches]
    torch.stack([loss for loss, _ in expected]).sum().backward()
    whole = {name: p.grad for name, p in model.named_parameters()}
    for number, (results, gradients) in enumerate(run_ranks(2, rank)):
        for (loss, others), (wanted, numbers) in zip(results, expected, strict=True):
            torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0, check_device=False)
            assert others["rows"] == numbers["rows"] and others["root"] == numbers["root"]
            torch.testing.assert_close(others["h"], numbers["h"], rtol=1e-10, atol=1e-12)
        for name, gradient in gradients.items():
            piece = whole[name]
            if not cut:
                piece = local_piece(
                    piece,
                    manifest.tensors[name].layout,
                    manifest.mesh,
                    manifest.mesh.coords(number),
                )
            torch.testing.assert_close(gradient, piece, rtol=1e-9, atol=1e-13, msg=name)
