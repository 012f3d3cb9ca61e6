"""Recomputation draws again what the first computation drew."""

import pytest
import torch
import zoo
from precision import float64_casts
from traces import shared_traces

from shardwright.frontend.parallelize import parallelize
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.ops.dropout import dropout
from shardwright.runtime.ops.random import RngState
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.recompute import recompute


def test_the_mask_is_that_of_the_forward_it_belongs_to():
    rng, weight = RngState(0), torch.ones(64, dtype=torch.float64, requires_grad=True)
    calls = []

    def block(x):
        calls.append(rng.moment)
        return dropout(
            x * weight, 0.5, draw=rng.draw("mask", layout="[64]")
        ).exp()  # exp keeps its result: it is recomputed

    x = torch.linspace(0, 1, 64, dtype=torch.float64)
    results = []
    for _ in range(2):
        rng.next_microbatch()
        results.append(recompute(block, x, rng=rng))
    assert not torch.equal(*results)
    rng.next_step()
    (results[0] + 3 * results[1]).sum().backward()
    assert sorted(calls) == [(0, 1), (0, 1), (0, 2), (0, 2)] and rng.moment == (1, 0)
    kept = [(result != 1) * 2 * result * x for result in results]
    torch.testing.assert_close(weight.grad, kept[0] + 3 * kept[1], rtol=1e-14, atol=0)


@pytest.mark.parametrize("policy", [pytest.param("tp", marks=pytest.mark.slow), "data"])
def test_checkpointed_gpt2_with_dropout(tmp_path, policy):
    """Gradients equal those of the same plan without recomputation, several forwards before the
    backward included.
    """
    dropouts = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    batches = [zoo.get("gpt2").inputs(seed=seed) for seed in (1, 2)]

    def gradients(checkpointed):
        model = zoo.get("gpt2").build(**dropouts)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, outputs="loss")
        folder = tmp_path / str(checkpointed)

        def rank(_):
            module = parallelize(model, batches[0], policy, config, gen_savedir=folder)
            sum(module(**batch).loss for batch in batches).backward()
            return {name: p.grad for name, p in module.named_parameters()}

        with float64_casts(), shared_traces(f"gpt2 {dropouts} {checkpointed}"):
            found = run_ranks(2, rank)[0]
        (source,) = folder.rglob("gencode0.py")
        assert ("self.recompute(" in source.read_text()) is checkpointed
        return found

    plain, checkpointed = gradients(False), gradients(True)
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-10, atol=1e-14, msg=name)
