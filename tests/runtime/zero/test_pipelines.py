"""Split optimizer state in pipelines: every schedule, stages of unequal meshes, embeddings that
stages share.
"""

import pytest
from covers import spread
from pipeline_files import Net
from pipeline_training import assert_equal, train_rank, train_reference, write
from pipelines import make_pipe

from shardwright.compiler.schedule.published import SCHEDULES
from shardwright.runtime.ranks.threads import run_ranks

OPTIONS = [
    {"use_zero": 1, "reducer_bucket_cap_mb": 1e-6},
    {"use_zero": 1, "zero_use_reduce_scatter": True, "use_async_reducer": True},
    {"use_zero": 2, "reducer_bucket_cap_mb": 1e-6},
    {"use_zero": 2, "use_async_reducer": True, "reducer_bucket_cap_mb": 1e-6, "zero_ngroups": 2},
    {
        "distributed_optimizer": {
            "overlap_param_sync": True,
            "contiguous_grad_buffer": False,
            "bucket_cap_mb": 1e-4,
        }
    },
]


def train(tmp_path, pipe, options, *, dummies=()):
    """Two units on threads, with clipped steps, compared with one device."""
    directory = write(tmp_path / "files", pipe)
    config = {"plan_ngpus": pipe.num_ranks, "runtime_ngpus": 2 * pipe.num_ranks, **options}
    results = run_ranks(2 * pipe.num_ranks, lambda rank: train_rank(directory, config, dummies))
    assert_equal(pipe, train_reference(pipe, Net(pipe.num_stages, pipe.tied), 2, dummies), results)


TRAINING = [name for name in SCHEDULES if name != "infer_pipe"]
CASES = [
    pytest.param(name, options, marks=() if (i + k) % len(OPTIONS) == 0 else pytest.mark.slow)
    for i, name in enumerate(TRAINING)
    for k, options in enumerate(OPTIONS)
]


@pytest.mark.parametrize(("name", "options"), spread(CASES, 2))
def test_every_schedule(tmp_path, name, options):
    train(tmp_path, make_pipe(name, 2, 4, SCHEDULES[name].min_chunks), options)


@pytest.mark.parametrize("options", spread(OPTIONS[2:4], 2, first=1), ids=str)
def test_stages_on_unequal_meshes(tmp_path, options):
    train(tmp_path, make_pipe("zb_h1", 2, 3, tp=(2, 1), cut=(0,)), options)


@pytest.mark.parametrize("dummies", [(3,), (0, 1, 2, 3)], ids=str)
def test_dummies_add_nothing(tmp_path, dummies):
    train(tmp_path, make_pipe("1f1b", 2, 4), OPTIONS[2], dummies=dummies)
