"""Outputs beside the loss: left out of training steps, whole in evaluation; never at the price of a
gradient.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from covers import spread
from parity import assert_close_tree
from precision import float64_casts
from torch import Tensor
from traces import shared_traces

from shardwright.frontend.verification.verify import compile_into
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import UsageError
from shardwright.runtime.left_out import LeftOut
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication


def gpt2() -> Any:
    return zoo.get("gpt2-cache").build()


def compiled(folder: Path, policy: str, inputs: Any, **fields: Any) -> Path:
    with float64_casts(), shared_traces("gpt2-cache"):
        return compile_into(folder, gpt2(), inputs, policy, ComputeConfig(**fields))


def sent(volume: Any) -> int:
    return sum(total.num_bytes for key, total in volume.items() if key.phase != "setup")


@pytest.mark.parametrize("policy", spread(["tp", "data"], 2))
def test_a_step_gives_the_loss_and_evaluation_gives_everything(policy: str, tmp_path: Path) -> None:
    inputs, model = zoo.get("gpt2-cache").inputs(), gpt2()
    directory = compiled(tmp_path / "auto", policy, inputs, plan_ngpus=2, runtime_ngpus=2)
    directory_all = compiled(
        tmp_path / "all", policy, inputs, plan_ngpus=2, runtime_ngpus=2, outputs="all"
    )

    def rank(_: int) -> tuple[Any, Any, Any, int, int]:
        module, other = load_class(directory)(), load_class(directory_all)()
        with count_communication() as volume:
            step = module(**inputs)
            step.loss.backward()
        with count_communication() as volume_all:
            step_all = other(**inputs)
            step_all.loss.backward()
        gradients = [
            (p.grad, q.grad) for p, q in zip(module.parameters(), other.parameters(), strict=True)
        ]
        assert all(torch.equal(a, b) for a, b in gradients)
        with torch.no_grad():
            ungraded = module(**inputs)
        return step, step_all, (ungraded, module.eval()(**inputs)), sent(volume), sent(volume_all)

    with float64_casts():
        expected = model(**inputs)
        evaluated = model.eval()(**inputs)
        ranks = run_ranks(2, rank)
    for step, step_all, (ungraded, whole), num_bytes, num_bytes_all in ranks:
        assert_close_tree(step.loss.detach(), expected.loss.detach())
        assert isinstance(step.logits, LeftOut) and isinstance(step.past_key_values, LeftOut)
        with pytest.raises(UsageError, match="leaves the output 'logits' out of training steps"):
            step.logits.argmax(-1)
        assert_close_tree(step_all.logits.detach(), expected.logits.detach())
        for outcome in (ungraded, whole):
            assert_close_tree(outcome.logits.detach(), evaluated.logits.detach())
            mine, theirs = (
                result.past_key_values.layers[1].values for result in (outcome, evaluated)
            )
            assert_close_tree(mine.detach(), theirs.detach())
        cache = [layer.keys for layer in expected.past_key_values.layers] * 2
        assert num_bytes_all - num_bytes == sum(x.numel() * 8 for x in (expected.logits, *cache))


def test_a_pipeline_delivers_the_loss_alone(tmp_path: Path) -> None:
    inputs = zoo.get("gpt2-cache").inputs()
    fields = {
        "plan_ngpus": 4,
        "runtime_ngpus": 4,
        "use_end2end": True,
        "pas_config": {"num_microbatches": 2},
    }
    made = {
        word: compiled(tmp_path / word, "hybrid", inputs, outputs=word, **fields)
        for word in ("auto", "all")
    }

    def rank(_: int) -> tuple[Any, ...]:
        found: list[Any] = []
        for directory in made.values():
            module = load_class(directory)()
            with count_communication() as volume:
                found += [module.train_step([inputs, inputs])[0]]
            found += [sent(volume), module.infer_step([inputs, inputs])[1]]
        return tuple(found)

    with float64_casts():
        expected = gpt2()(**inputs)
        ranks = run_ranks(4, rank)
    for step, num_bytes, inferred, step_all, num_bytes_all, inferred_all in ranks:
        assert isinstance(step.logits, LeftOut) and isinstance(
            step.past_key_values.layers[0].keys, LeftOut
        )
        for result in (step_all, inferred, inferred_all):
            assert_close_tree(result.logits, expected.logits.detach())
            assert_close_tree(
                result.past_key_values.layers[0].keys,
                expected.past_key_values.layers[0].keys.detach(),
            )
        assert_close_tree(step.loss, expected.loss.detach())
        assert num_bytes < num_bytes_all / 2


class Extra(torch.nn.Module):
    """Returns what nothing of the loss needs, whose weight gets no gradient, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.extra = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.table = torch.arange(3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.up(x).relu()
        return {
            "loss": hidden.square().mean(),
            "extra": self.extra(hidden),
            "sizes": (hidden.sum(-1), 3),
            "table": self.table,
        }


@pytest.mark.parametrize(
    ("outputs", "left_out"),
    [
        ("auto", {"extra", "sizes"}),
        ({"extra": "eval"}, {"extra"}),
        ({"extra": "whole"}, set()),
        ("all", set()),
    ],
)
def test_operators_that_only_serve_what_is_left_out_are_not_run(
    outputs: Any, left_out: set[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Extra().double(), torch.randn(4, 8, dtype=torch.float64)

    def policy(graph: Any, config: Any) -> Any:
        builder = graph.builder({"tp": 2})
        builder.split(graph.dims.of_factor("up", "n"), "tp")
        return builder.build()

    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, outputs=outputs)
    directory = compile_into(tmp_path, model, {"x": x}, policy, config)
    source = (directory / "gencode0.py").read_text()
    head, _, tail = source.partition("if self.trains:")
    assert ("self.extra.weight" in tail) == ("extra" in left_out)
    assert ("self.extra.weight" in head) == ("extra" not in left_out)

    def rank(_: int) -> Any:
        module = load_class(directory)()
        step = module(x=x)
        step["loss"].backward()
        assert (module.extra.weight.grad is None) and module.up.weight.grad is not None
        return step, module.eval()(x=x)

    expected = model(x)
    for step, evaluated in run_ranks(2, rank):
        assert {name for name, value in step.items() if isinstance(value, LeftOut)} == left_out
        assert_close_tree(evaluated["extra"].detach(), expected["extra"].detach())
        assert evaluated["sizes"][1] == 3 and evaluated["table"].tolist() == [0, 1, 2]
        assert_close_tree(evaluated["sizes"][0].detach(), expected["sizes"][0].detach())


def test_without_a_loss_everything_is_whole(tmp_path: Path) -> None:
    class Pair(Extra):
        def forward(self, x: Tensor) -> Any:
            return self.extra(self.up(x)), x.mean()

    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)
    directory = compile_into(
        tmp_path, Pair().double(), {"x": torch.zeros(4, 8, dtype=torch.float64)}, "tp", config
    )
    assert "self.trains" not in (directory / "gencode0.py").read_text()
