"""Checkpoints of ranks that are processes, with gloo."""

import pytest
from mlp_files import make_model, write_files
from mlp_training import adamw
from spawn import run_processes

import shardwright


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "zero"),
    [
        (2, {}),
        (2, {"use_zero": 2, "reducer_bucket_cap_mb": 4e-4}),
        (2, {"use_zero": 1, "zero_ngroups": 2}),
    ],
    ids=str,
)
def test_two_units_of_processes(tmp_path, tp, zero):
    """Save in the background, train on, load into fresh modules, train on: the same numbers; and
    deduped state in memory.
    """
    config = {"plan_ngpus": tp, "runtime_ngpus": 2 * tp, **zero}
    files, run = write_files(tmp_path / "files", make_model(), 1, tp, config), tmp_path / "run"
    results = run_processes(2 * tp, "checkpoint_jobs:save_and_resume", str(files), str(run))
    assert results == [{"resumed": True, "deduped": True}] * (2 * tp)
    whole = shardwright.read_checkpoint(tmp_path / "run")
    model = make_model(seed=1)
    model.load_state_dict(whole.module)
    adamw(model.parameters()).load_state_dict(whole.optimizer)
    assert whole.step == 2
