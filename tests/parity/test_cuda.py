"""Training on CUDA devices and with NCCL's rules, held to one device. The devices are fake: see
tests/_lib/fake_cuda.py.
"""

from pathlib import Path
from typing import Any

import cuda_jobs
import fake_cuda
import pytest
import runtime_ranks
import torch
from device_parity import cases, host
from parity import assert_close_tree
from spawn import run_processes

from shardwright.runtime.ranks.threads import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is not None,
        reason="this build of torch has CUDA: run tests/product/gpus.py",
    ),
    pytest.mark.skipif(fake_cuda.compiler() is None, reason="the fake device needs a C++ compiler"),
]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    fake_cuda.build()


CASES = {num_ranks: {case.name for case in cases(num_ranks)} for num_ranks in (1, 2, 4)}
COVER = {1: {"ZeRO-1"}, 2: CASES[2], 4: CASES[4] - CASES[2] | {"tp", "data"}}


@pytest.mark.parametrize("num_ranks", COVER)
def test_training_equals_one_device(tmp_path: Path, num_ranks: int) -> None:
    job = "device_parity:compare_all", str(tmp_path), sorted(COVER[num_ranks])
    for rank, results in enumerate(run_processes(num_ranks, *job, fake_cuda=True)):
        assert results.keys() == COVER[num_ranks]
        for name, found in results.items():
            assert max(found.values()) <= 1, f"{name}, rank {rank}: {found}"


def test_ranks_of_one_device_equal_the_cpu() -> None:
    """Threads that share a GPU, whose backward would share a thread, too."""
    names = list(cuda_jobs.ONE_DEVICE)
    (found,) = run_processes(1, "cuda_jobs:ranks_of_one_device", names, fake_cuda=True)
    for name, (equal, report) in found.items():
        assert equal, f"{name}: {report}"


def test_collectives_are_those_of_the_cpu() -> None:
    on_cuda = run_processes(4, "cuda_jobs:collectives", fake_cuda=True)
    on_cpu = run_ranks(4, lambda rank: runtime_ranks.collectives())
    for rank, ((volume, found), expected) in enumerate(zip(on_cuda, on_cpu, strict=True)):
        assert volume == expected["volume"]
        assert_close_tree(found, host(expected), f"collectives of rank {rank}")


def test_two_ranks_with_one_gpu_are_refused() -> None:
    (text,) = filter(None, run_processes(2, "cuda_jobs:same_gpu", fake_cuda=True))
    first, second = ("0", "1") if text.startswith("ranks 0") else ("1", "0")
    assert text == (
        f"ranks {first} and {second} have the same GPU\n"
        f"  why:   both made it their current device (cuda:0 on rank {second}), and NCCL "
        "wants one GPU per rank\n"
        "  try:   call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before "
        "init_process_group; with more ranks "
        "than GPUs initialise 'gloo', and they run on the CPU"
    )


@pytest.fixture(scope="module")
def acts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has to say of every act."""
    return run_processes(
        2,
        "cuda_jobs:act",
        str(tmp_path_factory.mktemp("acts")),
        list(cuda_jobs.ACTS),
        fake_cuda=True,
    )


@pytest.mark.parametrize("name", cuda_jobs.ACTS)
def test_besides_plain_training(acts: list[dict[str, Any]], name: str) -> None:
    for results in acts:
        assert cuda_jobs.RIGHT[name.partition(" ")[0]](results[name]), results[name]
