"""Random plans: a random strategy for every operator and a random storage for every parameter, all
equal to one device.

This is the test of the algebra: any plan whose operators follow their strategies and whose edges
have adapters from the table must give the loss and every gradient of one device. The seed of a
failing plan is in its message. More seeds of more models:
``python tests/product/random_plans.py --run``.
"""

from pathlib import Path

import pytest
from random_plans import run_random

MODELS = [
    "gpt2",
    "llama",
    "mlp",
    "gpt2-uneven",
    "resnet",
    "llama-uneven",
    "encoder-decoder",
    "unet",
]
SEEDS = (*range(5), *range(6, 22))
QUICK = (1, 2, 3, 4, 7)
"""Seeds of the default tests: the models that are traced and run in a second or two."""


OTHERS = [
    *("bert", "dit", "t5", "transformer", "vit", "gpt2-untied", "gpt2-frozen", "gpt2-padded"),
    *("llama-mqa", "llama-tied", "mistral", "mlp-uneven", "qwen2-uneven", "resnet-uneven"),
]


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[] if seed in QUICK else [pytest.mark.slow]) for seed in SEEDS],
)
def test_random_plans(seed: int, tmp_path: Path) -> None:
    run_random(MODELS[seed % len(MODELS)], seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_random_plans_of_more_models(name: str, tmp_path: Path) -> None:
    run_random(name, 1000, tmp_path)
