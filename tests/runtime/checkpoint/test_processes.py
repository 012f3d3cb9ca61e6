"""Checkpoints of ranks that are processes, with gloo."""

from mlp_files import make_model, write_files
from spawn import run_processes

import shardwright


def test_two_units_of_two_processes(tmp_path):
    """Save in the background, train on, load into fresh modules, train on: the same numbers; and deduped state in memory."""
    files = write_files(tmp_path / "files", make_model(), 1, 2, {"plan_ngpus": 2, "runtime_ngpus": 4})
    results = run_processes(4, "checkpoint_jobs:save_and_resume", str(files), str(tmp_path / "run"))
    assert results == [{"resumed": True, "deduped": True}] * 4
    whole = shardwright.read_checkpoint(tmp_path / "run")
    make_model(seed=1).load_state_dict(whole.module)
    assert whole.step == 2
