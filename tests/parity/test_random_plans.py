"""Random plans: a random strategy for every operator and a random storage for every parameter, all
equal to one device.

This is the test of the algebra: any plan whose operators follow their strategies and whose edges
have adapters from the table must give the loss and every gradient of one device. The seed of a
failing plan is in its message.
"""

import functools
import random
import warnings
from pathlib import Path
from typing import Any

import plans
import pytest
import zoo
from layouts import in_random_turns

from shardwright.runtime.layout import Mesh

MESHES = [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3}]
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
NUM_PLANS = 24
QUICK = (1, 2, 3, 4, 7)
"""Seeds of the default tests: the models that are traced and run in a second or two."""


@functools.cache
def prepared(name: str) -> tuple[Any, ...]:
    """The model, its inputs, its graph, and what one device computes."""
    entry = zoo.get(name)
    model, inputs = entry.build(), entry.inputs()
    return model, inputs, plans.zoo_graph(name), plans.reference_run(model, [inputs], steps=1)


def check_random_plan(name: str, seed: int, directory: Path) -> None:
    rng = random.Random(f"{name} {seed}")
    model, inputs, graph, reference = prepared(name)
    mesh = in_random_turns(Mesh.of(rng.choice(MESHES)), rng)
    plan = plans.random_plan(graph, mesh, rng, in_places=True)
    try:
        plans.check(
            model, inputs, plans.compile_plan(graph, plan), directory / f"{name}-{seed}", reference
        )
    except Exception as error:
        raise AssertionError(f"random plan of {name} on {mesh}, seed {seed}") from error


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[] if seed in QUICK else [pytest.mark.slow])
        for seed in range(NUM_PLANS)
    ],
)
def test_random_plans(seed: int, tmp_path: Path) -> None:
    check_random_plan(MODELS[seed % len(MODELS)], seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in zoo.names() if "cache" not in n and n not in MODELS])
def test_random_plans_of_every_model(name: str, tmp_path: Path) -> None:
    check_random_plan(name, 1000, tmp_path)
