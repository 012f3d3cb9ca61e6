"""Batch and sequence length declared dynamic: one program, calls of several sizes, each equal to one device."""

from pathlib import Path

import pytest
import torch
import zoo
from precision import float64_casts

from shardwright.compiler.api import parallelize
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.loader import load_class
from shardwright.runtime.manifest import Manifest
from shardwright.runtime.pieces import local_piece
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.optimizer import build_optimizer

DIMS = {name: {0: "batch", 1: "seq"} for name in ("input_ids", "labels")}
SIZES = [(4, 8), (6, 5), (3, 15)]
"""The sizes compiled with, and others; the last ones do not divide by two."""


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("gpt2", "tp"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt2", "data"), ("llama", "data"), ("llama", "tp"))),
    ],
)
def test_dynamic_batch_and_sequence(tmp_path: Path, name: str, policy: str) -> None:
    entry = zoo.get(name)
    model, batches = entry.build(), [entry.inputs(batch=batch, seq=seq) for batch, seq in SIZES]
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, dynamic_dims=DIMS, outputs="all")
    with float64_casts():
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
                gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
                results.append((output.loss.detach(), output.logits.detach(), gradients))
            return results

        ranks = run_ranks(2, rank)
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
                    torch.testing.assert_close(gradients[fqn], piece, rtol=1e-9, atol=1e-13, msg=fqn)
