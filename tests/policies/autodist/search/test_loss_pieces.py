"""A search whose fastest plan is too large: it takes the loss in pieces, and says so."""

import functools
from typing import Any

import plans
import pytest
import torch
import zoo

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.cost.memory.step_memory import program_memory
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.policies.autodist.autodist_policy import POLICY, search
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.questions.explain import Request, explain_operator
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError

LIMIT_GB = 0.006


@functools.cache
def graph() -> PlannableGraph:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 4096, "n_positions": 64}
    ids = torch.randint(4096, (2, 64))
    model = zoo.get("gpt2").make(**sizes, use_cache=False)
    return plans.annotated(plans.traced(model, {"input_ids": ids, "labels": ids.clone()}))


def config(**options: Any) -> ComputeConfig:
    given = {"memory_limit_gb": LIMIT_GB, **options}
    return ComputeConfig(plan_ngpus=1, runtime_ngpus=1, pas_config=given)


def test_a_loss_in_pieces_is_found_where_memory_binds() -> None:
    compiled = compile_graph(graph(), POLICY.apply, config(), policy_name="autodist")
    assert set(compiled.plan.loops) == {"loss"}
    assert program_memory(compiled.program, config()).peak_bytes <= LIMIT_GB * 1e9
    (note,) = [note for note in compiled.plan.notes if note.axis == "loss"]
    assert "pieces: whole, the plan needs" in note.reason
    options = AutodistOptions(memory_limit_gb=LIMIT_GB)
    hardware = load_hardware(options.hardware, 1)
    found = search(graph(), config(), options, hardware).best
    assert found is not None
    request = Request(graph(), config(), options, hardware, found)
    loss = next(op.name for op in graph().ops if op.target == "cross_entropy")
    assert note.reason in explain_operator(request, loss, 1).binds


def test_it_may_be_forbidden() -> None:
    with pytest.raises(PlanError) as refused:
        POLICY.apply(graph(), config(loss_pieces=False))
    assert "pieces" not in str(refused.value)
