"""``dict(pipeline=..., tensor=...)`` as a policy: what it may be, what it stands for, what it
refuses.
"""

import json

import pytest
import torch

import shardwright
from shardwright import ComputeConfig
from shardwright.__main__ import main
from shardwright.policies.parallel_form import without_form
from shardwright.runtime.errors import ConfigError


def on_16(form, **fields):
    policy, config = without_form(form, {"runtime_ngpus": 16, **fields})
    assert policy == "tensor"
    return config.plan_ngpus, config.num_units, dict(config.pas_config)


@pytest.mark.parametrize(
    "form, plan, units, options",
    [
        ({}, 1, 16, {"mode": "1d"}),
        ({"pipeline": 2}, 2, 8, {"mode": "1d", "num_stages": 2}),
        ({"pipeline": {"size": 2}}, 2, 8, {"mode": "1d", "num_stages": 2}),
        ({"tensor": {"size": 4, "mode": "1d"}}, 4, 4, {"mode": "1d"}),
        ({"tensor": {"size": 1, "mode": None}}, 1, 16, {"mode": "1d"}),
        (
            {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}},
            8,
            2,
            {"mode": "2d", "num_stages": 2},
        ),
        ({"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, 8, 2, {"mode": "2.5d", "depth": 2}),
        ({"tensor": {"size": 8, "mode": "3d"}, "data": 2}, 8, 2, {"mode": "3d"}),
        ({"data": {"size": 16}}, 1, 16, {"mode": "1d"}),
    ],
)
def test_what_it_stands_for(form, plan, units, options):
    assert on_16(form) == (plan, units, options)


FORMS = "dict(size=4, mode='1d'), dict(size=4, mode='2d')"


@pytest.mark.parametrize(
    "form, kind, text",
    [
        ({"tensor": 4}, ValueError, "tensor=4 does not say its mode"),
        ({"tensor": {"size": 4}}, ValueError, "tensor=dict(size=4) does not say its mode"),
        ({"data": 3}, ValueError, "data=3 is not what remains"),
        (
            {"tensor": {"size": 4, "mode": "4d"}},
            ValueError,
            "there is no tensor mode '4d'\n  try:   one of '1d', '2d', '2.5d', '3d', 'sequence'",
        ),
        (
            {"tensor": {"size": 8, "mode": "2d"}},
            ValueError,
            "tensor size 8 is not q x q, as mode '2d' wants it\n"
            "  try:   4, 9, 16 or 25 ranks would do; or policy 'tensor' with the shape of a",
        ),
        ({"tensor": {"size": 8, "mode": "2.5d"}}, ValueError, "tensor mode '2.5d' needs its depth"),
        (
            {"tensor": {"size": 8, "mode": "2.5d", "depth": 3}},
            ValueError,
            "tensor size 8 is not q x q x 3, as mode '2.5d' wants it\n"
            "  try:   12, 27, 48 or 75 ranks would do",
        ),
        ({"tensor": {"size": 4, "mode": "2d", "depth": 1}}, ValueError, "tensor mode '2d' has no"),
        ({"tensor": {"size": 4, "mode": "3d"}}, ValueError, "tensor size 4 is not l x l x l"),
        ({"tensor": "2d"}, TypeError, "tensor is a dict, not '2d'"),
        (
            {"tensor": {"size": "4", "mode": "2d"}},
            TypeError,
            "the size of tensor is a whole number",
        ),
        ({"pipeline": 2.5}, TypeError, "pipeline is a whole number, not 2.5"),
        ({"pipeline": 0}, ValueError, "pipeline is at least 1"),
        ({"pipeline": 3}, ValueError, "16 ranks are not data x pipeline x tensor"),
        ({"pipelines": 2}, ValueError, "parallel has no part 'pipelines'"),
        ({"tensor": {"size": 4, "mod": "2d"}}, ValueError, "tensor has no 'mod'"),
    ],
)
def test_what_is_refused(form, kind, text):
    with pytest.raises(kind) as caught:
        on_16(form)
    assert str(caught.value).startswith(text)
    if "does not say its mode" in text:
        assert FORMS in str(caught.value)


def test_a_sequence_in_pieces_is_another_policy():
    tensor = {"size": 4, "mode": "sequence"}
    policy, config = without_form({"tensor": tensor}, {"runtime_ngpus": 8})
    assert (policy, config.pas_config, config.num_units) == ("cp", {"cp": 4}, 2)
    policy, config = without_form({"tensor": tensor, "pipeline": 2}, {})
    assert policy == "hybrid" and config.plan_ngpus == config.runtime_ngpus == 8
    assert config.pas_config == {"cp": 4, "num_stages": 2, "tp": 1}


def test_what_the_config_says_besides():
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=8, dynamic_dims={"x": [0]}, seed=3)
    form = {"tensor": {"size": 4, "mode": "2d"}}
    _, made = without_form(form, config)
    assert made.seed == 3 and made.dim_symbols() == config.dim_symbols()
    assert without_form("tp", config) == ("tp", config)
    assert on_16(form, pas_config={"recompute": ["a"]})[2] == {"recompute": ["a"], "mode": "2d"}
    with pytest.raises(ConfigError, match="plan_ngpus=2 contradicts parallel"):
        without_form(form, {"plan_ngpus": 2, "runtime_ngpus": 8})
    with pytest.raises(ConfigError, match="pas_config says 'mode', and so does parallel"):
        on_16(form, pas_config={"mode": "3d"})


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()


EXAMPLE = {"x": torch.zeros(4, 8)}


def test_parallelize_infers_the_data_parallel_size(tmp_path):
    """Eight ranks, two stages of 2d: none is told how many ranks share a copy of the model."""
    form = {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}

    def on_rank(rank):
        config = {"use_end2end": True, "pas_config": {"num_microbatches": 2}}
        module = shardwright.parallelize(Net(), EXAMPLE, form, config, gen_savedir=tmp_path)
        mpu = module.mpu
        return (
            mpu.get_data_parallel_world_size(),
            mpu.get_pipeline_parallel_world_size(),
            mpu.get_tensor_parallel_world_size(),
        )

    assert set(shardwright.run_ranks(8, on_rank)) == {(2, 2, 2)}


@pytest.mark.parametrize("text", ["{tensor: {size: 4, mode: 2d}}", "parallel.yaml", "p.json"])
def test_the_command_line_takes_it(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parallel.yaml").write_text("parallel:\n  tensor:\n    size: 4\n    mode: 2d\n")
    (tmp_path / "p.json").write_text(json.dumps({"tensor": {"size": 4, "mode": "2d"}}))
    (tmp_path / "my_net.py").write_text(
        "import torch\n\n\ndef make():\n"
        "    return torch.nn.Linear(8, 8), {'input': torch.zeros(4, 8)}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["compile", "my_net:make", "--parallel", text, "--runtime-ngpus", "8"]) == 0
    assert "4 ranks" in capsys.readouterr().out
    assert main(["compile", "my_net:make", "--parallel", "[1]"]) == 1
    assert "--parallel is a mapping" in capsys.readouterr().err
    assert main(["compile", "my_net:make", "--policy", "tp"]) == 1
    assert "--policy tp needs --plan-ngpus" in capsys.readouterr().err
