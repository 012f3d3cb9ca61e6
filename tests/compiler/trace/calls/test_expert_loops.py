"""LongCat's experts, some of which have no matrices, as products of groups."""

from __future__ import annotations

import expert_models
import pytest
import torch
from expert_models import verify_experts

from shardwright.compiler.trace.calls.expert_loops import _elsewhere
from shardwright.runtime.errors import TraceError

EP = {"plan_ngpus": 3, "runtime_ngpus": 3}


def test_choices_that_are_left_out_name_other_experts():
    chosen = torch.tensor([[5, 8, 9], [8, 5, 1], [1, 0, 7], [9, 8, 10]])
    assert _elsewhere(chosen, chosen >= 8, 8).tolist() == [
        [5, 6, 7], [0, 5, 1], [1, 0, 7], [1, 2, 3],
    ]  # fmt: skip


def test_experts_that_return_their_tokens_are_those_of_one_device():
    entry = expert_models.get("longcat_flash")
    model, choices = entry.build(), []
    router = model.model.layers[0].mlp.router
    router.register_forward_hook(lambda module, args, found: choices.append(found[2]))
    with torch.no_grad():
        model(**entry.inputs(batch=4))
    # A token may have none, some, or all of its choices among the three without matrices.
    assert {0, 1, 2} <= set((choices[0] >= 6).sum(-1).tolist())
    report = verify_experts("longcat_flash", "ep", EP)
    assert report.ok, str(report)


def test_too_few_experts_with_matrices():
    with pytest.raises(TraceError, match="a token of a LongcatFlashExperts chooses 3 experts"):
        verify_experts("longcat_flash", "ep", EP, sizes={"n_routed_experts": 2})
