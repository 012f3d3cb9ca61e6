"""Roles of ranks and their groups: by sizes and order, and under a plan."""

import mpu_jobs
import pytest
from spawn import run_processes

from shardwright import MPU, Mesh, data, run_ranks
from shardwright.runtime.errors import ConfigError, UsageError
from shardwright.runtime.ranks.role_table import RoleTable, Sizes
from shardwright.runtime.ranks.world import count_communication, current_world


def test_oslos_coordinates():
    def coordinates(rank):
        mpu = MPU(tensor_parallel_size=2)
        return (
            (mpu.get_data_parallel_rank(), mpu.get_tensor_parallel_rank()),
            mpu.ranks("tensor"),
            mpu.ranks("data"),
            mpu.get_model_parallel_world_size(),
        )

    assert run_ranks(4, coordinates) == [
        ((0, 0), (0, 1), (0, 2), 2),
        ((0, 1), (0, 1), (1, 3), 2),
        ((1, 0), (2, 3), (0, 2), 2),
        ((1, 1), (2, 3), (1, 3), 2),
    ]


def test_stages_and_neighbours():
    def stage(rank):
        mpu = MPU(tensor_parallel_size=2, pipeline_parallel_size=3)
        with count_communication() as volume:
            found = (
                mpu.get_pipeline_parallel_rank(),
                mpu.is_pipeline_first_stage(),
                mpu.is_pipeline_last_stage(),
                mpu.get_pipeline_parallel_prev_rank(),
                mpu.get_pipeline_parallel_next_rank(),
            )
        assert not volume.items()
        return found

    found = run_ranks(6, stage)
    assert found[0] == (0, True, False, 4, 2)
    assert found[3] == (1, False, False, 1, 5)
    assert found[5] == (2, False, True, 3, 1)


def test_expert_layers_lie_on_a_grid_of_their_own():
    """Tensor 4 outside of experts; of the same 8 ranks 4 share experts, each expert whole."""
    table = RoleTable.of_sizes(Sizes(tensor=4, expert=4, expert_tensor=1), 8, "tp-cp-ep-dp-pp")
    assert table.groups["tensor"] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert table.groups["data"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert table.groups["expert"] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert table.groups["expert_tensor"] == tuple((rank,) for rank in range(8))
    assert table.groups["expert_data"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    plain = RoleTable.of_sizes(Sizes(tensor=2, context=2), 8, "tp-cp-pp-dp")
    assert plain.groups["expert_tensor"] == plain.groups["tensor"]
    assert plain.groups["expert_data"] == ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize(
    "sizes, order, text",
    [
        (
            {"tensor_parallel_size": 3},
            "tp-dp",
            "8 ranks do not divide into groups of 3\n"
            "  why:   tp 3 x cp 1 x pp 1 is 3, and data-parallel ranks are what remains\n"
            "  try:   start a multiple of 3 ranks, or choose sizes whose product divides 8",
        ),
        ({"tensor_parallel_size": 2}, "tp-pp", "the order 'tp-pp' lacks the axis 'dp'"),
        ({"expert_parallel_size": 2}, "tp-pp-dp", "the order 'tp-pp-dp' lacks the axis 'ep'"),
        ({"context_parallel_size": 0}, "tp-dp", "context_parallel_size is a whole number of at"),
        ({}, "tp-dp-data", "the order 'tp-dp-data' has an unknown axis 'data'"),
        (
            {"pipeline_parallel_size": 2, "expert_parallel_size": 2},
            "ep-tp-pp-dp",
            "the stages of expert layers would be other ranks than those of the rest\n"
            "  why:   in the order 'ep-tp-pp-dp' neighbouring stages are 1 ranks apart outside of "
            "experts, and 2 within them",
        ),
    ],
)
def test_what_does_not_fit_is_refused(sizes, order, text):
    with pytest.raises(ConfigError) as caught:
        run_ranks(8, lambda rank: MPU(**sizes, order=order))
    assert str(caught.value).startswith(text)


def test_experts_over_nodes_are_one_group():
    table = RoleTable.of_plan([(Mesh.of({"ep": 2, "ep2": 2}), range(4))], 4, 2)
    assert table.groups["expert"] == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_the_units_of_a_plan_are_data_parallel():
    table = RoleTable.of_plan([(Mesh.of({"dp": 2, "tp": 2}), range(4))], 4, 2)
    assert table.groups["data"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert table.groups["tensor"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert table.groups["model"] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert str(table.grid) == "units=2 x pp=1 x dp=2 x tp=2"


def test_stages_of_a_plan():
    tp, one = Mesh.of({"tp": 2}), Mesh.of({})
    # Interleaved: the last stage runs on the second place, stages 0 and 2 on the first.
    table = RoleTable.of_plan([(tp, (0, 2)), (tp, (1, 3)), (tp, (0, 2)), (tp, (1, 3))], 4, 2)
    assert table.positions == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert table.groups["pipeline"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert table.groups["tensor"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert table.first == {0, 2, 4, 6} and table.last == {1, 3, 5, 7}
    assert table.grid_ranks == (0, 2, 1, 3, 4, 6, 5, 7)

    uneven = RoleTable.of_plan([(tp, (0, 1)), (one, (2,))], 3, 1)
    assert uneven.positions == ((0, 1), (2,)) and uneven.grid is None

    def group(rank):
        mpu = MPU.of_table(uneven, current_world())
        assert mpu.get_pipeline_parallel_world_size() == 2
        with pytest.raises(UsageError, match="its stages have 1 and 2 ranks"):
            mpu.communicator("pipeline")

    run_ranks(3, group)


def test_roles_of_data_follow_an_mpu():
    def roles(rank):
        mpu = MPU(tensor_parallel_size=2, pipeline_parallel_size=2, order="tp-pp-dp")
        return data.roles(mpu)

    made = run_ranks(8, roles)[1]
    assert made.rank == 1 and made.num_replicas == 2
    assert [role.replica for role in made.all] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [role.rank for role in made.all if role.saves] == [0, 4]
    assert made.data_groups() == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert made.twins == (0, 1, 2, 3)
    pieces = run_ranks(2, lambda rank: data.roles(MPU(context_parallel_size=2)).mine.cuts[""])
    assert [cut.runs(8) for (cut,) in pieces] == [((0, 2), (6, 8)), ((2, 6),)]


def test_threads_have_communicators_and_no_process_groups():
    def use(rank):
        mpu = MPU(tensor_parallel_size=2)
        with pytest.raises(UsageError, match="the ranks are threads of one process"):
            mpu.get_tensor_parallel_group()
        with pytest.raises(UsageError, match="a DeviceMesh needs torch.distributed"):
            mpu.device_mesh()
        return mpu.communicator("data").ranks, repr(mpu)

    assert run_ranks(4, use)[1] == (
        (1, 3),
        "MPU(rank 1 of 4: data 0/2, tensor 1/2, model 1/2, expert_tensor 1/2, expert_data 0/2)",
    )
    assert MPU().get_data_parallel_group() is None


@pytest.mark.slow
def test_process_groups():
    """The groups of an MPU, of a plan where only some ranks ask, and a DeviceMesh, on processes."""
    assert run_processes(4, "mpu_jobs:groups") == mpu_jobs.EXPECTED
