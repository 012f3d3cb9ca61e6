"""Round trips over random plans and layouts: save under one, load under another, merge; and the
same in memory.
"""

import random
import warnings

import checkpoints as c
import plans
import pytest
import torch
from layouts import in_random_turns
from precision import float64_casts

import shardwright
from shardwright.runtime.layout import Mesh
from shardwright.runtime.loader import load_class
from shardwright.runtime.manifest import Manifest
from shardwright.runtime.ranks.threads import run_ranks

MESHES = [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3}]
MODELS = ["gpt2", "mlp-uneven", "llama-uneven", "resnet-uneven", "encoder-decoder"]


def compiled(name, rng, directory):
    """The files of a random plan, and how many ranks they are for."""
    mesh = in_random_turns(Mesh.of(rng.choice(MESHES)), rng)
    plan = plans.random_plan(plans.zoo_graph(name), mesh, rng)
    plans.write(directory, plans.compile_plan(plans.zoo_graph(name), plan), c.model_of(name))
    return directory, mesh.size * rng.choice([1, 1, 2])


def options(directory, num_ranks, zero):
    """What ``build_optimizer`` is told of a plan, with a number of ZeRO groups that suits it."""
    plan_ngpus = Manifest.read(directory).mesh.size
    config = {"plan_ngpus": plan_ngpus, "runtime_ngpus": num_ranks, **zero}
    if num_ranks == plan_ngpus:
        config.pop("zero_ngroups", None)
    return config


def check_round_trip(name, seed, tmp_path, zero=({}, {})):
    rng = random.Random(f"{name} {seed}")
    source, num_ranks = compiled(name, rng, tmp_path / "from")
    target, num_targets = compiled(name, rng, tmp_path / "to")
    reference = c.original(name)
    generator = torch.Generator().manual_seed(seed)
    for parameter in reference.module.parameters():
        if rng.random() < 0.9:  # the others were not used
            parameter.grad = torch.randn(
                parameter.shape, dtype=parameter.dtype, generator=generator
            )
    reference.optimizer.step()
    expected = reference.module.state_dict(), reference.optimizer.state_dict()

    def save(rank):
        module = load_class(source)()
        optimizer = shardwright.build_optimizer(
            module, c.adamw, options(source, num_ranks, zero[0])
        )
        shardwright.load_merged_state_dicts(module, expected[0], optimizer, expected[1])
        shardwright.save_checkpoint(tmp_path / "run", module, optimizer)
        return shardwright.deduped_state_dict(module, optimizer)

    def load(rank):
        module = load_class(target)(init_params=False)
        optimizer = shardwright.build_optimizer(
            module, c.adamw, options(target, num_targets, zero[1])
        )
        shardwright.load_checkpoint(tmp_path / "run", module, optimizer)
        return module.state_dict(), optimizer.state_dict()

    deduped = run_ranks(num_ranks, save)
    loaded = run_ranks(num_targets, load)
    whole = shardwright.read_checkpoint(tmp_path / "run")
    merged = [
        shardwright.merge_state_dicts(*zip(*states, strict=True)) for states in (deduped, loaded)
    ]
    for module_state, optimizer_state in [(whole.module, whole.optimizer), *merged]:
        c.assert_same(dict(module_state), expected[0])
        assert optimizer_state["state"].keys() == expected[1]["state"].keys()
        for number, state in expected[1]["state"].items():
            c.assert_same(optimizer_state["state"][number], state)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings(), float64_casts():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(
    "seed",
    [3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 2, 7, 8))],
)
def test_round_trip(seed, tmp_path):
    check_round_trip(MODELS[seed % len(MODELS)], seed, tmp_path)


def random_zero(rng):
    found = {
        "use_zero": rng.choice([0, 1, 1, 2]),
        "reducer_bucket_cap_mb": rng.choice([1e-6, 1e-3, 25.0]),
    }
    return {**found, "zero_ngroups": rng.choice([1, 2])} if found["use_zero"] else found


def check_round_trip_with_zero(name, seed, tmp_path):
    rng = random.Random(f"zero {name} {seed}")
    check_round_trip(name, seed, tmp_path, (random_zero(rng), random_zero(rng)))


@pytest.mark.parametrize(
    "seed",
    [201, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (200, *range(202, 206)))],
)
def test_round_trip_with_split_state(seed, tmp_path):
    check_round_trip_with_zero(MODELS[seed % len(MODELS)], seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama-frozen", "bert", "resnet"])
def test_round_trip_of_more_models_with_split_state(name, tmp_path):
    check_round_trip_with_zero(name, 300, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama", "llama-tied", "llama-frozen", "bert", "t5", "resnet", "unet", "dit-uneven"],
)
def test_round_trip_of_more_models(name, tmp_path):
    check_round_trip(name, 100, tmp_path)
