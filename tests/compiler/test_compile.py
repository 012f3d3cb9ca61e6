"""What is compiled of a module whose outputs are not all needed."""

from collections import namedtuple
from pathlib import Path

import pytest
import torch
import zoo
from precision import float64_casts
from torch import nn

from shardwright.frontend.parallelize import parallelize
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication

CONFIG = {"plan_ngpus": 2, "runtime_ngpus": 2}
Pair = namedtuple("Pair", ["logits", "loss"])


class Head(nn.Module):
    """Logits that are split over the ranks, as what is in front of them takes a gradient, and their
    loss; ``kind`` says in what they are returned.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.ones(4).double())
        self.up, self.out = nn.Linear(4, 8).double(), nn.Linear(8, 16).double()

    def forward(self, x, target):
        logits = self.out(torch.relu(self.up(x * self.scale)))
        loss = nn.functional.cross_entropy(logits, target)
        return {
            "tuple": (loss, logits),
            "named tuple": Pair(logits=logits, loss=loss),
            "dict": {"logits": logits, "loss": loss},
            "loss alone": loss,
        }[self.kind]


BATCH = {
    "x": torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4),
    "target": torch.tensor([0, 5, 15]),
}


def outcome(folder: Path, model: nn.Module, batch: dict, outputs) -> tuple:
    """What rank 0 returns, and how many elements it gathered for it."""

    def rank(_):
        module = parallelize(
            model,
            batch,
            "tp",
            ComputeConfig(**CONFIG, outputs=outputs),
            gen_savedir=folder,
            reuse="moo",
        )
        with count_communication() as volume:
            return module(**batch), volume.elements("all_gather", phase="forward")

    return run_ranks(2, rank)[0]


@pytest.mark.parametrize("kind", ["tuple", "named tuple", "dict", "loss alone"])
def test_the_loss_alone(tmp_path, kind):
    """It is the one called loss, wherever it stands, or else the first; the logits are neither
    gathered nor returned.
    """
    model = Head(kind)
    expected = model(**BATCH)
    result, gathered = outcome(tmp_path, model, BATCH, "loss")
    assert gathered == 0
    if kind == "loss alone":
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)
        return
    assert type(result) is type(expected)
    loss, logits, reference = {
        "tuple": lambda: (*result, expected[0]),
        "named tuple": lambda: (result.loss, result.logits, expected.loss),
        "dict": lambda: (result["loss"], result["logits"], expected["loss"]),
    }[kind]()
    torch.testing.assert_close(loss, reference, rtol=1e-12, atol=0)
    assert logits is None
    _, gathered = outcome(tmp_path, model, BATCH, "all")
    assert gathered == 3 * 16


@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_the_loss_of_hugging_face_models(tmp_path, name):
    model, batch = zoo.get(name).build(), zoo.get(name).inputs()
    with float64_casts():
        expected = model(**batch).loss
        result, gathered = outcome(tmp_path, model, batch, "loss")
    torch.testing.assert_close(result.loss, expected, rtol=1e-10, atol=0)
    assert result.logits is None and gathered == 0


def test_outputs_by_name(tmp_path):
    result, gathered = outcome(tmp_path, Head("dict"), BATCH, {"loss": "drop", "logits": "sharded"})
    assert result["loss"] is None and result["logits"].shape == (3, 8) and gathered == 0


def test_an_output_that_is_not_there(tmp_path):
    with pytest.raises(PlanError) as error:
        outcome(tmp_path, Head("tuple"), BATCH, {"logits": "drop"})
    assert str(error.value) == (
        "ComputeConfig.outputs names 'logits', which the model does not return\n  try:   one "
        "of '0', '1'"
    )
