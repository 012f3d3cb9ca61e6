"""Checkpoints of pipelines: stages in turn or in a V, with shared parameters, on unequal meshes,
and to and from one device.
"""

import copy

import pytest
import torch
from checkpoints import assert_same
from covers import spread
from pipeline_files import Net
from pipeline_training import adamw, samples_of, scale, train_reference, write
from pipelines import make_pipe
from torch import Tensor

import shardwright
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer

TOLERANCE = 1e-11
# All have four stages, and so are pipelines of one model, tied or not.
TIED = [
    make_pipe("gpipe", 4, 3),
    make_pipe("zb_v", 2, 3, 2),
    make_pipe("1f1b_interleaved", 2, 4, 2),
]
CUT = [make_pipe("1f1b", 4, 3, tp=(2, 1, 2, 1)), make_pipe("gpipe", 4, 3, tp=(1, 2, 1, 3))]


def built(files, zero=None):
    """``zero``: the options of ZeRO, for two units."""
    module = load_class(files)()
    config = (
        None
        if zero is None
        else {"plan_ngpus": module.mesh.size, "runtime_ngpus": 2 * module.mesh.size, **zero}
    )
    return module, build_optimizer(module, adamw, config)


def train(pipe, module, optimizer, steps):
    for step in steps:
        module.train_step(
            samples_of(step, module.ranks.unit, pipe.num_microbatches), scale_fn=scale
        )
        optimizer.clip_gnorm(0.5)
        optimizer.step()


def on(pipe, fn, num_units=1):
    return run_ranks(pipe.num_ranks * num_units, lambda rank: fn())


@pytest.mark.parametrize(
    ("pipe", "num_units"),
    spread([(pipe, 1 + number % 2) for number, pipe in enumerate([*TIED, *CUT])], 2),
    ids=lambda value: f"{getattr(value, 'ranks', value)}",
)
def test_saved_by_a_pipeline(tmp_path, pipe, num_units):
    check_saved(tmp_path, pipe, num_units)


ZERO = [
    {"use_zero": 1, "reducer_bucket_cap_mb": 1e-6},
    {"use_zero": 2, "zero_ngroups": 2},
    {"distributed_optimizer": {"overlap_param_sync": True, "bucket_cap_mb": 1e-4}},
]


@pytest.mark.parametrize(
    ("pipe", "zero"),
    [
        pytest.param(TIED[0], ZERO[0], marks=pytest.mark.slow),
        (TIED[1], ZERO[2]),
        pytest.param(CUT[0], ZERO[0], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_saved_by_a_pipeline_with_split_state(tmp_path, pipe, zero):
    check_saved(tmp_path, pipe, 2, zero)


@pytest.mark.slow
@pytest.mark.parametrize("pipe", [*TIED, *CUT], ids=str)
@pytest.mark.parametrize("zero", ZERO, ids=str)
def test_saved_by_more_pipelines_with_split_state(tmp_path, pipe, zero):
    check_saved(tmp_path, pipe, 2, zero)


def check_saved(tmp_path, pipe, num_units, zero=None):
    files = write(tmp_path / "files", pipe)

    def save():
        module, optimizer = built(files, zero)
        train(pipe, module, optimizer, range(2))
        shardwright.save_checkpoint(tmp_path / "run", module, optimizer, step=2)
        states = copy.deepcopy(
            (
                module.state_dict(),
                optimizer.state_dict(),
                *shardwright.deduped_state_dict(module, optimizer),
            )
        )
        train(pipe, module, optimizer, [2])
        later = {
            name: x.clone() for name, x in module.state_dict().items() if isinstance(x, Tensor)
        }
        shardwright.load_deduped_state_dict(module, states[2], optimizer, states[3])
        train(pipe, module, optimizer, [2])
        for name, value in later.items():
            if "running" not in name or module.ranks.unit == 0:
                assert torch.equal(module.state_dict()[name], value), name
        return states

    results = on(pipe, save, num_units)
    reference = train_reference(pipe, model := Net(4, pipe.tied), num_units, steps=2)
    whole = shardwright.read_checkpoint(tmp_path / "run")
    merged = [
        shardwright.merge_state_dicts([r[i] for r in results], [r[i + 1] for r in results])
        for i in (0, 2)
    ]
    for module_state, optimizer_state in [(whole.module, whole.optimizer), *merged]:
        state = dict(module_state)
        assert_same(
            state, {name: x for name, x in reference["tensors"].items() if name in state}, TOLERANCE
        )
        assert all(name in state or "num_batches" in name for name in reference["tensors"])
        assert len(optimizer_state["state"]) == len(list(model.parameters()))
        for number, parameter in enumerate(model.parameters()):
            assert optimizer_state["state"][number]["exp_avg"].shape == parameter.shape
        assert optimizer_state["param_groups"][0]["params"] == list(
            range(len(optimizer_state["state"]))
        )
        assert_same(optimizer_state["state"][3], merged[0][1]["state"][3])


@pytest.mark.parametrize(
    "pipes",
    [TIED, pytest.param([*CUT, CUT[0]], marks=pytest.mark.slow)],
    ids=["tied", "cut"],
)
def test_between_pipelines(tmp_path, pipes):
    """A tour: each pipeline goes on from the last one's checkpoint, the last loads a merged state
    dict.
    """
    for number, pipe in enumerate(pipes):
        files = write(tmp_path / str(number), pipe)

        def step(pipe=pipe, files=files, number=number):
            module, optimizer = built(files)
            if number == len(pipes) - 1:
                whole = shardwright.read_checkpoint(tmp_path / "run")
                shardwright.load_merged_state_dicts(
                    module, whole.module, optimizer, whole.optimizer
                )
            elif number:
                assert (
                    shardwright.load_checkpoint(tmp_path / "run", module, optimizer).step == number
                )
            samples = samples_of(number, 0, 12)
            for first in range(0, 12, pipe.num_microbatches):
                module.train_step(samples[first : first + pipe.num_microbatches], scale_fn=scale)
                optimizer.step()
            shardwright.save_checkpoint(tmp_path / "run", module, optimizer, step=number + 1)

        on(pipe, step)
    model = Net(4, pipes[0].tied)
    optimizer = adamw(model.parameters())
    for number, pipe in enumerate(pipes):
        samples = samples_of(number, 0, 12)
        for first in range(0, 12, pipe.num_microbatches):
            optimizer.zero_grad()
            for sample in samples[first : first + pipe.num_microbatches]:
                scale(model(sample)[0]).backward()
            optimizer.step()
    whole = shardwright.read_checkpoint(tmp_path / "run")
    expected = {name: x for name, x in model.state_dict().items() if name in whole.module}
    assert_same(dict(whole.module), expected, TOLERANCE)
    state = optimizer.state_dict()["state"]
    for number, entries in whole.optimizer["state"].items():
        assert_same(entries, state[number], TOLERANCE)


class Frozen(torch.nn.Module):
    """One parameter of each stage is not trained."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)
        )
        for layer in (self.layers[1], self.layers[2]):
            layer.bias.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().sum()


@pytest.mark.parametrize("has_frozen", [False, True])
def test_merged_state_of_an_optimizer_with_or_without_frozen_parameters(tmp_path, has_frozen):
    def optimizer_of(parameters):
        return torch.optim.SGD(
            [p for p in parameters if has_frozen or p.requires_grad], lr=0.1, momentum=0.9
        )

    model, x = Frozen(), torch.ones(2, 4, dtype=torch.float64)
    config = {"plan_ngpus": 2, "runtime_ngpus": 2, "use_end2end": True}
    shardwright.parallelize(model, {"x": x}, "pp", config, gen_savedir=tmp_path, load_module=False)
    (files,) = {path.parent for path in tmp_path.rglob("manifest.json")}
    optimizer = optimizer_of(model.parameters())
    for _ in range(2):
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.zero_grad()
        (4 * model(x)).backward()
        optimizer.step()

    def go_on(rank):
        module = load_class(files)()
        parallel = build_optimizer(module, optimizer_of)
        shardwright.load_merged_state_dicts(module, saved[0], parallel, saved[1])
        module.train_step([x] * 4)
        parallel.step()
        return {name: p.detach().clone() for name, p in module.named_parameters()}

    first, second = run_ranks(2, go_on)
    torch.testing.assert_close(
        {**first, **second}, dict(model.named_parameters()), rtol=1e-12, atol=0
    )
