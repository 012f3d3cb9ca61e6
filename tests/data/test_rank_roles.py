"""Which rank reads what: of modules, plans, folders, an mpu, and explicit."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import shardwright
from shardwright import data
from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.data.rank_roles import _of_readers
from shardwright.frontend.cli.main import main
from shardwright.runtime.errors import ArgumentError, ConfigError, UsageError
from shardwright.runtime.input_readers import InputReader
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.manifest import Manifest
from shardwright.runtime.ranks.threads import run_ranks

TP = Mesh((("tp", 2),))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.down(self.up(x).relu()), y)


def compiled(folder, policy, plan_ngpus, runtime_ngpus, **options):
    config = shardwright.ComputeConfig(
        plan_ngpus=plan_ngpus, runtime_ngpus=runtime_ngpus, use_end2end=True
    )
    example = {"x": torch.zeros(4, 8), "y": torch.zeros(4, 8)}
    return shardwright.parallelize(
        Net(), example, policy, config, gen_savedir=folder, instance_name=policy, **options
    )


def folder_of(root, policy):
    (found,) = root.rglob(f"{policy}/manifest.json")
    return found.parent


def test_the_example_of_the_document():
    """Data 2 x pipeline 2 x tensor 2, data outermost: the first stage reads."""
    readers = (InputReader("tokens", (0, 1), TP, Layout.whole((4, 8))),)
    roles = _of_readers(readers, 4, 5, 8)
    assert [role.rank for role in roles.all if role.reads] == [0, 1, 4, 5]
    assert [role.rank for role in roles.all if role.saves] == [0, 4]
    assert roles.data_groups() == [(0, 4), (1, 5)]
    assert (roles.replica, roles.num_replicas, roles.twins) == (1, 2, (4, 5))
    assert roles.reads and not roles.on(2).reads and not roles.saves and roles.inputs == ("tokens",)


def test_stages_read_what_they_use_and_twins_are_found(tmp_path):
    def on_rank(rank):
        module = compiled(tmp_path, "hybrid", 4, 8)
        mpu = module.mpu
        places.append((rank, mpu.get_pipeline_parallel_rank(), mpu.ranks("pipeline")))
        return data.roles(module)

    places: list[tuple[int, int, tuple[int, ...]]] = []
    made = run_ranks(8, on_rank)
    assert sorted(places)[4:6] == [(4, 0, (4, 6)), (5, 0, (5, 7))]
    assert sorted(places)[6:] == [(6, 1, (4, 6)), (7, 1, (5, 7))]
    assert [roles.rank for roles in made] == list(range(8))
    assert len({str(roles) for roles in made}) == 1
    everyone = made[0].all
    assert [role.inputs for role in everyone] == 2 * [("x",), ("x",), ("y",), ("y",)]
    assert [role.twins for role in everyone[4:]] == [(4, 5), (4, 5), (6, 7), (6, 7)]
    assert made[0].takes_list and made[0].num_microbatches and made[0].microbatch == 4


def test_inspect_prints_the_table(tmp_path, capsys):
    compiled(tmp_path, "tp", 2, 4, load_module=False)
    folder = folder_of(tmp_path, "tp")
    assert main(["inspect", str(folder), "--data"]) == 0
    assert capsys.readouterr().out == (
        "rank  replica  reads  takes       twins  saves\n"
        "0     0/2      x, y   everything  0, 1   yes\n"
        "1     0/2      x, y   everything  0, 1\n"
        "2     1/2      x, y   everything  2, 3   yes\n"
        "3     1/2      x, y   everything  2, 3\n"
    )
    assert main(["inspect", str(folder), "--data", "--ranks", "2"]) == 0
    assert "2, 3" not in capsys.readouterr().out
    assert main(["inspect", str(folder), "--data", "--ranks", "3"]) == 1
    assert "3 ranks do not divide into units of 2" in capsys.readouterr().err


def test_axes_that_cut_inputs_are_read_from_the_plan():
    """Batch over dp and sequence over cp, before the model: four different parts, tp has twins."""
    mesh = Mesh((("dp", 2), ("cp", 2), ("tp", 2)))
    plan = Plan(mesh, inputs={"ids": Layout.parse("[8/dp, 16/cp]")})
    roles = data.roles(plan, num_ranks=16, rank=11)
    mine = roles.mine
    assert (roles.replica, mine.part, mine.twins) == (1, (0, 2), (10, 11))
    assert (mine.data_rank, mine.data_size) == (2, 4)
    (cut,) = mine.cuts["ids"]
    assert cut.runs(16) == ((8, 16),)
    assert "samples 0/2; ids dim 1 contiguous 16/cp at cp=1" in str(roles).splitlines()[12]


def test_an_input_that_is_not_cut_like_the_others_is_cut_after_it_was_read():
    mesh = Mesh((("dp", 2),))
    layouts = {"ids": Layout.parse("[8/dp, 16]"), "table": Layout.parse("[8, 3]")}
    mine = data.roles(Plan(mesh, inputs=layouts), rank=1).mine
    assert mine.part == (0, 1) and list(mine.cuts) == ["ids"]


def test_of_a_pipeline_that_is_not_compiled_first_and_last_stage_read():
    stages = tuple(StagePlan(f"op{i}", TP, (2 * i, 2 * i + 1)) for i in range(3))
    plan = Plan(Mesh((("rank", 6),)), stages=stages, num_microbatches=4)
    roles = data.roles(plan)
    assert [role.reads for role in roles.all] == [True, True, False, False, True, True]
    assert roles.num_microbatches == 4 and roles.takes_list


def test_explicit_roles():
    roles = data.roles(replica=1, num_replicas=3)
    assert (roles.rank, roles.replica, roles.num_replicas, roles.saves) == (1, 1, 3, True)
    cut = data.roles(replica=0, num_replicas=1, cuts={"": [data.EvenCut(1, 0, 2, "zigzag")]})
    assert "dim 1 zigzag 0/2" in str(cut)
    assert data.roles(cut) is cut
    assert [roles.replica for roles in run_ranks(2, lambda rank: data.roles())] == [0, 1]


@dataclass
class Mpu:
    """The part of Megatron's functions that is asked."""

    data_rank: int = 1
    stage: int = 0
    context: int = 1

    def get_data_parallel_rank(self):
        return self.data_rank

    def get_data_parallel_world_size(self):
        return 2

    def get_pipeline_model_parallel_world_size(self):
        return 3

    def is_pipeline_first_stage(self):
        return self.stage == 0

    def is_pipeline_last_stage(self):
        return self.stage == 2

    def get_context_parallel_world_size(self):
        return self.context

    def get_context_parallel_rank(self):
        return self.context - 1


def test_roles_of_an_mpu():
    first = data.roles(Mpu())
    assert (first.replica, first.num_replicas, first.reads, first.saves) == (1, 2, True, True)
    assert not data.roles(Mpu(stage=1)).reads
    assert data.roles(Mpu(stage=2)).reads and not data.roles(Mpu(stage=2)).saves
    (cut,) = data.roles(Mpu(context=2)).mine.cuts[""]
    assert cut.runs(8) == ((2, 6),)
    with pytest.raises(ConfigError, match="data-parallel rank 7 of 2"):
        data.roles(Mpu(data_rank=7))


def test_what_has_no_roles_is_refused_in_words(tmp_path):
    with pytest.raises(ArgumentError, match="roles cannot be read off"):
        data.roles(SimpleNamespace(mesh=3))
    with pytest.raises(ConfigError, match="no replica 2 of 2"):
        data.roles(replica=2, num_replicas=2)
    with pytest.raises(ConfigError, match="no replica 0 of None"):
        data.roles(replica=0)
    with pytest.raises(ConfigError, match="roles are those of a plan, or explicit"):
        data.roles(Mpu(), replica=0, num_replicas=1)
    with pytest.raises(ConfigError, match="no folder of a compiled module"):
        data.roles(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="there is no rank 9"):
        data.roles(Plan(TP), rank=9)
    with pytest.raises(ConfigError, match="there is no rank 2"):
        data.roles(Plan(TP)).on(2)
    with pytest.raises(ConfigError, match=r"the cut of 'x' is 3"):
        data.roles(replica=0, num_replicas=1, cuts={"x": [3]})


def test_a_manifest_that_says_nothing_of_inputs_is_refused(tmp_path):
    Manifest("0" * 64, "Net", TP, "by hand", {}, {}).write(tmp_path)
    with pytest.raises(UsageError, match="nobody has noted which ranks read which inputs of Net"):
        data.roles(tmp_path)
