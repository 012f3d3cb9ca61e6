"""Pipelines in real processes with gloo."""

import os
import re
import subprocess
import sys

import pytest
from pipeline_files import Net
from pipeline_training import assert_equal, train_reference, write
from pipelines import make_pipe
from spawn import run_processes


@pytest.mark.parametrize(
    ("num_ranks", "pipe"),
    [
        pytest.param(3, make_pipe("zb_h1", 2, 4, tp=(2, 1), cut=(0,)), id="tp=2 to tp=1"),
        pytest.param(4, make_pipe("zb_v", 2, 3, 2), id="two units", marks=pytest.mark.slow),
    ],
)
def test_training_equals_one_device(tmp_path, num_ranks, pipe):
    results = run_processes(
        num_ranks, "pipeline_training:train_rank", write(tmp_path / "files", pipe)
    )
    assert_equal(
        pipe,
        train_reference(pipe, Net(pipe.num_stages, pipe.tied), num_ranks // pipe.num_ranks),
        results,
    )


def test_a_process_that_dies_is_missed_by_name(tmp_path):
    """The others end with an error that says in which action they waited, and for what."""
    files = write(tmp_path / "files", make_pipe("1f1b", 3, 4))
    with pytest.raises(FileNotFoundError):  # nobody left a result
        run_processes(3, "pipeline_training:die_in_step", files, str(tmp_path))
    assert (
        (tmp_path / "error1.txt")
        .read_text()
        .startswith(
            "rank 1 waits in 1B0 for the gradient of 'hidden' from rank 2, and it does not "
            "come\n  why:   "
        )
    )
    assert (
        (tmp_path / "error1.txt")
        .read_text()
        .endswith("  try:   look for the first error on rank 2, or on the ranks that it waits for")
    )
    assert (
        (tmp_path / "error0.txt")
        .read_text()
        .startswith("rank 0 waits in 0B0 for the gradient of '")
    )


@pytest.mark.slow
def test_a_job_ends_on_all_ranks_when_one_dies_in_a_step(tmp_path):
    """Under torchrun, with what a policy made: no rank hangs, and the others name the action they
    waited in.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [*torchrun, "-m", "dying_job", tmp_path],
        capture_output=True, text=True, timeout=900, check=False, env=found,
    )  # fmt: skip
    assert ended.returncode != 0
    errors = re.findall(r"CollectiveError: (rank [01] waits in .*)", ended.stderr)
    assert errors, ended.stderr[-3000:]
    assert any(
        re.match(
            r"rank 1 waits in 1B0 for the gradient of '\w+' from rank 2, and it does not come", e
        )
        for e in errors
    )
