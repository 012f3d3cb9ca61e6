"""Plans under the names of transformers' ``tp_plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plans
import pytest
import zoo

from shardwright.frontend.cli.main import main
from shardwright.frontend.huggingface.tp_plan import _starred, tp_plan_of
from shardwright.runtime.errors import PlanError


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_plan_of_tp_is_that_of_transformers(name: str) -> None:
    theirs: Any = zoo.get(name).build()
    assert tp_plan_of(plans.compile_with(plans.zoo_traced(name), "tp", 2).program) == (
        theirs._tp_plan
    )


def test_a_bias_that_two_modules_have_is_left_whole() -> None:
    """transformers cannot cut the head of BERT, nor the embedding that has its weight."""
    program = plans.compile_with(plans.zoo_traced("bert"), "tp", 2).program
    with pytest.warns(UserWarning, match="leaves bert.embeddings.word_embeddings, cls.predictions"):
        found = tp_plan_of(program)
    assert set(found.values()) == {"colwise", "rowwise"} and len(found) == 6


def test_layers_that_differ_have_their_numbers() -> None:
    graph = plans.zoo_traced("llama")
    some = {"model.layers.0.mlp.up_proj": "colwise", "model.layers.1.mlp.up_proj": "rowwise"}
    assert _starred({**some, "lm_head": "colwise"}, graph) == {**some, "lm_head": "colwise"}
    one = {"model.layers.1.mlp.up_proj": "colwise"}
    assert _starred(one, graph) == one


@pytest.mark.parametrize(
    ("name", "policy", "options", "why"),
    [
        ("llama", "hybrid", {"use_end2end": True}, "it puts layers on different ranks"),
        ("llama", "data", {}, "it cuts no layer"),
        ("gpt2", "tp", {}, "c_attn.bias is cut, and belongs to no linear layer or embedding"),
        ("t5", "tp", {}, "relative_attention_bias is held as"),
    ],
)
def test_what_cannot_be_said_is_refused(
    name: str, policy: str, options: dict[str, Any], why: str
) -> None:
    ranks = 4 if policy == "hybrid" else 2
    compiled = plans.compile_with(plans.zoo_traced(name), policy, ranks, **options)
    with pytest.raises(PlanError, match=why):
        tp_plan_of(compiled.program)


def test_the_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_zoo.py").write_text(
        'import zoo\ndef make():\n    return zoo.get("llama").build(), zoo.get("llama").inputs()\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "tp_plan.json"
    arguments = ["simulate", "of_zoo:make", "--policy", "tp", "--plan-ngpus", "2"]
    assert main([*arguments, "--tp-plan", str(out)]) == 0
    assert json.loads(out.read_text())["lm_head"] == "colwise_gather_output"
