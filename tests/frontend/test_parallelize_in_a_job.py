"""parallelize in a job of two processes with gloo: one compiles, both load, an error on one is an
error on both.
"""

import multiprocessing
from pathlib import Path

import api_jobs
import pytest
from api_jobs import X, net
from spawn import PRELOADED, run_processes

ALL_FILES = [
    "constants.safetensors",
    "gencode0.py",
    "gencode1.py",
    "manifest.json",
    "plan.json",
    "weights.safetensors",
]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder of the job, and per scenario what the two ranks returned or raised."""
    folder = tmp_path_factory.mktemp("job")
    first, second = run_processes(2, "api_jobs:everything", str(folder))
    return folder, {name: (first[name], second[name]) for name in first}


def result():
    return pytest.approx(net()(X).flatten().tolist(), abs=1e-12)


def files(folder):
    return sorted(
        path.name
        for path in Path(folder).rglob("*")
        if path.is_file() and not path.name.endswith(".lock")
    )


def test_rank_zero_compiles_and_both_load(job):
    for values, names in job[1]["load"]:
        assert values == result()
        assert names == ["down.bias", "down.weight", "up.bias", "up.weight"]


def test_a_failure_on_rank_zero_is_raised_on_all(job):
    text = "this model cannot be planned\n  why:   it is a test\n  try:   do not worry"
    assert job[1]["fail on 0"] == (
        ("PlanError", text, []),
        ("PlanError", text, ["raised on rank 0 of 2"]),
    )
    assert files(job[0] / "fail on 0") == []


def test_a_wrong_argument_on_one_rank_is_raised_on_all(job):
    text = "reuse cannot be 'mtach'\n  try:   did you mean 'match'?"
    assert job[1]["fail on 1"] == (
        ("ConfigError", text, ["raised on rank 1 of 2"]),
        ("ConfigError", text, []),
    )
    assert not (job[0] / "fail on 1").exists()


def test_ranks_that_disagree(job):
    text = (
        "compiling Net: the ranks ask for different things\n"
        "  why:   ComputeConfig.seed is 0 on rank 0, 1 on rank 1\n"
        "  try:   all ranks make the same calls in the same order"
    )
    assert job[1]["disagree"] == (("DistributedError", text, []),) * 2


def test_without_a_broadcast_the_other_node_has_nothing(job):
    (kind, text, notes), (other_kind, other_text, other_notes) = job[1]["none"]
    assert kind == other_kind == "LoadError" and text == other_text
    assert text.startswith(
        f"{job[0]}/none/node1/_parallel_modules/api_jobs/Net/_ holds no compiled module\n"
    )
    assert (notes, other_notes) == (["raised on rank 1 of 2"], [])


def test_all_files_reach_the_other_node(job):
    assert job[1]["all"] == (result(), result())
    for node in ("node0", "node1"):
        assert files(job[0] / "all" / node) == ALL_FILES


def test_without_weights_the_constants_still_arrive(job):
    assert job[1]["no_weights"] == ([float(i) for i in range(8)],) * 2
    assert files(job[0] / "no_weights" / "node1") == [
        name for name in ALL_FILES if name != "weights.safetensors"
    ]


def test_code_alone(job):
    (kind, text, notes), other = job[1]["code"]
    assert other == (kind, text, []) and notes == ["raised on rank 1 of 2"]
    folder = job[0] / "code" / "node1" / "_parallel_modules" / "api_jobs" / "Net" / "_"
    assert kind == "LoadError" and text.startswith(f"{folder} has no initial value of ")
    assert files(job[0] / "code" / "node1") == ["gencode0.py", "gencode1.py", "manifest.json"]


def test_stale_files_on_the_other_node_are_refused_and_replaced(job):
    for rank, ((kind, text, notes), values) in enumerate(job[1]["stale"]):
        assert kind == "LoadError" and notes == ([] if rank else ["raised on rank 1 of 2"])
        assert text == (
            f"{job[0]}/stale/node1/_parallel_modules/api_jobs/Net/_ on this node is not what "
            "rank 0 has there\n"
            "  why:   the manifests differ: the model, the plan, or the initial weights are "
            "others\n"
            "  try:   share the directory between nodes, copy it, or pass broadcast_strategy='all'"
        )
        assert values == result()


@pytest.mark.slow
def test_two_processes_that_compile_into_one_folder(tmp_path):
    """Outside a job nobody waits for anybody: the lock keeps the directory whole, and the second
    finds what the first made.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=api_jobs.compile_alone, args=(tmp_path,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert files(tmp_path) == ALL_FILES
