"""Checkpoints of ranks that are processes, with gloo."""

import pytest
from mlp_files import make_model, write_files
from mlp_training import adamw
from spawn import run_processes

import shardwright


@pytest.mark.parametrize(
    "zero",
    [
        pytest.param({}, id="plain"),
        pytest.param({"use_zero": 2, "reducer_bucket_cap_mb": 4e-4}, marks=pytest.mark.slow),
        pytest.param({"use_zero": 1, "zero_ngroups": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_units_of_two_processes(tmp_path, zero):
    """Save in the background, train on, load into fresh modules, train on: the same numbers; and
    deduped state in memory.
    """
    files = write_files(
        tmp_path / "files", make_model(), 1, 2, {"plan_ngpus": 2, "runtime_ngpus": 4, **zero}
    )
    results = run_processes(4, "checkpoint_jobs:save_and_resume", str(files), str(tmp_path / "run"))
    assert results == [{"resumed": True, "deduped": True}] * 4
    whole = shardwright.read_checkpoint(tmp_path / "run")
    model = make_model(seed=1)
    model.load_state_dict(whole.module)
    adamw(model.parameters()).load_state_dict(whole.optimizer)
    assert whole.step == 2
