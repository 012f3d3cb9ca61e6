"""What is said of a collective that fails."""

import subprocess
import sys
from pathlib import Path

import faults
import pytest
import torch
from faults import DEADLINE_S, Fault, Job

from shardwright.runtime.errors import CollectiveError
from shardwright.runtime.pipeline.step_samples import SampleTable
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.counters import CommunicationCounters
from shardwright.runtime.ranks.failures import (
    concerning,
    first_line,
    listed,
    name_of,
    names_parameters,
)

TP = Job("tp", {"plan_ngpus": 2, "runtime_ngpus": 2})
DP = Job("dp", {"plan_ngpus": 1, "runtime_ngpus": 2})
ZERO = Job("dp", {"plan_ngpus": 1, "runtime_ngpus": 2, "use_zero": 2})
ZERO3 = Job("dp", {"plan_ngpus": 1, "runtime_ngpus": 2, "use_zero": 3})
SAVING = Job("tp", {"plan_ngpus": 2, "runtime_ngpus": 2}, saves=True)
HOST = Job("tp", {"plan_ngpus": 2, "runtime_ngpus": 2}, has_store=True)

GRADIENTS = "reducing the gradients of 'down2.bias', 'down2.weight', 'up2.bias' and 5 more"
SAID = {
    "forward": (TP, "all_reduce over tp with rank 1", "next to 'down.bias', gencode0.py:"),
    "backward": (TP, "all_reduce over tp with rank 1", "next to 'down.bias', in backward"),
    "reducer": (DP, "all_reduce over units with rank 1", GRADIENTS),
    "scattered": (ZERO, "reduce_scatter over units with rank 1", GRADIENTS),
    "parameters": (
        ZERO,
        "all_gather over units with rank 1",
        "gathering the new values of 'down2.bias', ",
    ),
    "weights": (
        ZERO3,
        "all_gather over zero with rank 1",
        "gathering the weight 'up.weight' for forward, gencode0.py:",
    ),
    "clip": (TP, "all_reduce over world with rank 1", "the norm of all gradients"),
}
"""What the survivor says at each moment: its job, in which collective it was, and where."""

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("moment", "signal"),
    [
        ("backward", "SIGKILL"),
        *(pytest.param(m, "SIGKILL", marks=SLOW) for m in SAID if m != "backward"),
        *(pytest.param(m, "SIGSTOP", marks=SLOW) for m in ("backward",)),
    ],
)
def test_a_rank_that_is_missed_is_named_with_what_for(tmp_path, moment, signal):
    """Real processes: one is killed, or stopped, when it should join a collective of its second
    step.
    """
    job, collective, where = SAID[moment]
    faults.compiled(tmp_path, job)
    fault = Fault(1, "reducer" if moment == "scattered" else moment, faults.SIGNALS[signal])
    outcome = faults.run(tmp_path, job, fault, timeout_s=600.0 if signal == "SIGKILL" else 5.0)
    assert not outcome.stuck
    lines = outcome.errors[0].splitlines()
    assert lines[0] == f"CollectiveError: rank 0: {collective} failed"
    assert lines[1].startswith(f"  where: {where}")
    assert lines[2].startswith("  why:   ") and lines[2].endswith(
        {"SIGKILL": " is gone", "SIGSTOP": " is stopped"}[signal]
    )
    assert (
        lines[3] == "  try:   look for the first error on rank 1; the limit is that of "
        "SHARDWRIGHT_TIMEOUT_S, in seconds"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "signal"), [(0, "SIGKILL"), (1, "SIGKILL"), (1, "SIGSTOP")])
def test_a_rank_that_is_missed_in_a_save_is_named(tmp_path, victim, signal):
    faults.compiled(tmp_path, SAVING)
    timeout_s = 600.0 if signal == "SIGKILL" else 5.0
    outcome = faults.run(
        tmp_path, SAVING, Fault(victim, "save", faults.SIGNALS[signal]), timeout_s=timeout_s
    )
    assert not outcome.stuck
    lines = outcome.errors[1 - victim].splitlines()
    assert lines[0].startswith(f"DistributedError: a checkpoint: rank {1 - victim} has waited ")
    assert lines[0].endswith(f" s for rank {victim}, and nothing has come")
    assert lines[1].endswith({"SIGKILL": " is gone", "SIGSTOP": " is stopped"}[signal])


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_the_rank_that_has_the_store_is_missed(tmp_path, signal):
    """The job runs without torchrun, where the key-value store lies in rank 0."""
    outcome = faults.run(
        tmp_path,
        HOST,
        Fault(0, 4, faults.SIGNALS[signal]),
        timeout_s=5.0,
        target="compile_together",
    )
    assert not outcome.stuck
    what = outcome.errors[1].splitlines()[0]
    assert (
        what == "DistributedError: compiling Net: the job's key-value store does not answer rank 1"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "victim"),
    [
        *((stage, 1) for stage in ("world", "weights", "groups")),
        *(
            (stage, 0)
            for stage in (
                "world",
                "arguments",
                "compile",
                "packing",
                "loading",
                "weights",
            )
        ),
    ],
)
def test_an_error_of_one_rank_reaches_the_others_from_every_stage_of_a_compile(
    tmp_path, stage, victim
):
    """It reaches them with its whole text. Where the others are in a collective by then, they say
    so after its time limit at the latest.
    """
    outcome = faults.run(
        tmp_path, TP, Fault(victim, stage), timeout_s=6.0, target="compile_together"
    )
    assert not outcome.stuck
    assert outcome.errors[1 - victim].startswith(
        f"DistributedError: compiling Net failed on rank {victim}\n"
    )
    assert outcome.errors[1 - victim].endswith("ValueError: broken on purpose")


NOBODY = Fault(9, "nowhere")
CHECK = (
    "rank 1 has failed: InputError: a number is infinite or no number where forward branches on "
    "that"
)


@pytest.mark.slow
def test_a_check_that_fails_on_one_rank_ends_the_others_soon(tmp_path):
    """Long before the limit, though the rank lives on."""
    outcome = faults.run(
        tmp_path, TP, Fault(1, "stays"), timeout_s=DEADLINE_S, target="check_fails_on_rank_1"
    )
    assert not outcome.stuck
    lines = outcome.errors[0].splitlines()
    assert lines[0] == "CollectiveError: rank 0: all_reduce over tp with rank 1 failed"
    assert (
        lines[1].startswith("  where: next to 'net.")
        and lines[2] == f"  why:   rank 1 will not come to it; {CHECK}"
    )


@pytest.mark.slow
def test_a_rank_does_not_go_on_after_an_error_that_others_did_not_have(tmp_path):
    outcome = faults.run(tmp_path, TP, NOBODY, timeout_s=DEADLINE_S, target="check_fails_on_rank_1")
    assert (
        not outcome.stuck
        and outcome.errors[0].endswith("in seconds")
        and CHECK in outcome.errors[0]
    )
    lines = outcome.errors[1].splitlines()
    assert (
        lines[0] == "DistributedError: rank 1 cannot go on after an error that rank 0 did not have"
    )
    assert lines[1].endswith("; there: it missed rank 1")


@pytest.mark.slow
def test_ranks_go_on_after_an_error_that_all_had(tmp_path):
    outcome = faults.run(
        tmp_path, TP, NOBODY, timeout_s=DEADLINE_S, target="check_fails_on_all_ranks"
    )
    assert not outcome.stuck and outcome.errors == {0: "", 1: ""}


@pytest.mark.slow
def test_a_collective_that_takes_long_is_told_of_once(tmp_path):
    faults.compiled(tmp_path, TP)
    outcome = faults.run(tmp_path, TP, NOBODY, target="comes_late")
    assert outcome.errors == {0: "", 1: ""}
    (said,) = [text for text in outcome.said[0] if "all_reduce" in text]
    assert said.startswith(
        "rank 0 waits in all_reduce over tp with rank 1, next to 'down.bias', gencode0.py:"
    )
    assert (
        "= all_reduce(down, tp, " in said
        and "s so far; rank 1 has not come to it: rank 1 (process " in said
    )
    assert said.endswith(" runs") and not any("all_reduce" in text for text in outcome.said[1])


@pytest.mark.slow
def test_random_kills_and_stops_end_in_words():
    """A short run of the script that does so for as long as one likes."""
    script = Path(__file__).parents[2] / "product" / "faults.py"
    command = [sys.executable, script, "--runs", "4", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.startswith("4 runs: ") and " in words" in done.stdout


class Failing:
    """A transport of which every call fails."""

    def __getattr__(self, name):
        def fail(*arguments):
            raise RuntimeError(
                "[/build/gloo/pair.cc:537] Read error: reset. This is typically caused by a "
                "crash. Good luck!"
            )

        return fail

    def peers(self):
        return "rank 7 (process 12 on node3) is gone"


def failing():
    return Communicator(Failing(), (3, 7), 0, "tp", CommunicationCounters())


CALLS = {
    "all_reduce": lambda c, x: c.all_reduce(x),
    "all_gather": lambda c, x: c.all_gather_cat(x, 0),
    "reduce_scatter": lambda c, x: c.reduce_scatter(x),
    "all_to_all": lambda c, x: c.all_to_all([x, x], [x.shape, x.shape]),
    "broadcast": lambda c, x: c.broadcast(x, 0),
    "send": lambda c, x: c.send(x, 1),
    "receive": lambda c, x: c.receive((2,), x.dtype, 1),
    "barrier": lambda c, x: c.barrier(),
}


@pytest.mark.parametrize("collective", CALLS)
def test_every_collective_says_who_missed_whom(collective):
    with pytest.raises(CollectiveError) as caught, concerning("the test"):
        CALLS[collective](failing(), torch.ones(4))
    assert str(caught.value) == (
        f"rank 3: {collective} over tp with rank 7 failed\n"
        "  where: the test\n"
        "  why:   Read error: reset; rank 7 (process 12 on node3) is gone\n"
        "  try:   look for the first error on rank 7; the limit is that of "
        "SHARDWRIGHT_TIMEOUT_S, in seconds"
    )


def test_comparisons_of_a_step_say_what_they_compare():
    table = SampleTable("Net", {"sample.x": ("[n, 4]", torch.float32)}, ("sample",), ("n",))
    samples = [{"sample.x": torch.ones(2, 4)}]
    for compare in (
        lambda: table.compare(samples, failing(), 1, torch.device("cpu"), "train_step"),
        lambda: table.agreed_sizes(samples, failing(), torch.device("cpu"), "train_step"),
    ):
        with pytest.raises(CollectiveError, match="where: the .*samples of a step"):
            compare()


def test_no_memory_is_no_failure_of_another_rank():
    class Full(Failing):
        def barrier(self):
            raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        Communicator(Full(), (0, 1), 0, "tp", CommunicationCounters()).barrier()


def test_parameters_are_called_by_their_names():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4))
    names_parameters(model)
    assert name_of(model[1].weight) == "1.weight"
    assert name_of(model[1].weight.detach()) == "1.weight"
    assert name_of(torch.ones(3)) is None
    assert listed(["a", "b"]) == "'a', 'b'" and listed(list("abcde")) == "'a', 'b', 'c' and 2 more"
    with pytest.raises(CollectiveError) as caught:
        failing().all_reduce(model(torch.ones(1, 2)))
    assert caught.value.where in ("next to '1.bias'", "next to '1.weight'")


def test_what_gloo_says_is_cut_to_the_point():
    assert first_line(RuntimeError("Timed out\nException raised from ...")) == "Timed out"
