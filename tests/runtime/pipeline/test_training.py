"""Training pipelines: losses, gradients, norms, parameters and running statistics are those of one
device, whatever the schedule, the placement of the stages, their meshes and the number of
microbatches.
"""

import pytest
from covers import spread
from pipeline_files import Net
from pipeline_training import adamw, assert_equal, samples_of, train_rank, train_reference, write
from pipelines import make_pipe
from schedules import sizes_of

from shardwright.compiler.schedule.published import SCHEDULES
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import ThreadMessages, _Posted, run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.training.build_optimizer import build_optimizer

TRAINING = [name for name in SCHEDULES if name != "infer_pipe"]


def train(tmp_path, pipe, *, num_units=1, config=None, dummies=(), steps=3):
    """Train on threads and compare with one device; what each rank recorded."""
    directory = write(tmp_path / "files", pipe)
    results = run_ranks(
        pipe.num_ranks * num_units, lambda rank: train_rank(directory, config, dummies, steps)
    )
    reference = train_reference(pipe, Net(pipe.num_stages, pipe.tied), num_units, dummies, steps)
    assert_equal(pipe, reference, results)
    return results


@pytest.mark.parametrize("name", spread(TRAINING, 2))
def test_every_schedule_with_fewer_and_more_microbatches_than_ranks(tmp_path, name):
    for num_ranks, num_microbatches, chunks in sizes_of(name, 4, 8, 2):
        if (num_ranks == 2 and num_microbatches < 6) or (chunks < 2 and num_microbatches in (1, 8)):
            folder = tmp_path / f"{num_ranks}-{num_microbatches}-{chunks}"
            train(folder, make_pipe(name, num_ranks, num_microbatches, chunks), steps=1)


@pytest.mark.parametrize(
    ("name", "tp", "cut"),
    spread(
        [
            ("1f1b", (2, 1), ()),
            ("zb_v", (2, 1), (0,)),
            ("zb_h1", (1, 3), ()),
            ("1f1b", (2, 2), (0,)),
            ("zb_v", (3, 2), (0,)),
            ("zb_h1", (3, 2), (0,)),
        ],
        2,
        first=1,
    ),
)
def test_stages_on_unequal_meshes(tmp_path, name, tp, cut):
    chunks = SCHEDULES[name].min_chunks
    train(tmp_path, make_pipe(name, 2, 4, chunks, tp, cut=cut), steps=2)


@pytest.mark.parametrize("name", spread(TRAINING, 2))
def test_units_add_their_gradients(tmp_path, name):
    train(tmp_path, make_pipe(name, 2, 2, SCHEDULES[name].min_chunks), num_units=2)


def test_slices_handed_over_on_the_ranks_that_have_them(tmp_path):
    """The middle of a V is where two stages have the same ranks: a part of what each needs is
    there, the other one comes.
    """
    train(tmp_path, make_pipe("zb_v", 2, 3, 2, (2, 2), cut=(0, 1, 2)))
    train(tmp_path / "3", make_pipe("zb_v", 2, 2, 2, (1, 3), cut=(1,)))


def test_units_of_unequal_meshes(tmp_path):
    train(tmp_path, make_pipe("1f1b", 2, 3, tp=(2, 1), cut=(0,)), num_units=2)


@pytest.mark.parametrize("name", spread(TRAINING, 2, first=1))
def test_an_asynchronous_reducer(tmp_path, name):
    pipe = make_pipe(name, 2, 4, SCHEDULES[name].min_chunks)
    train(
        tmp_path,
        pipe,
        num_units=2,
        config={"plan_ngpus": 2, "runtime_ngpus": 4, "use_async_reducer": True},
    )


def test_an_asynchronous_reducer_starts_in_the_last_backward_of_a_stage(tmp_path):
    pipe = make_pipe("1f1b_interleaved", 2, 2, 2)
    directory = write(tmp_path / "files", pipe)
    config = {
        "plan_ngpus": 2,
        "runtime_ngpus": 4,
        "use_async_reducer": True,
        "reducer_bucket_cap_mb": 1e-6,
    }

    def on_rank(rank):
        module = load_class(directory)()
        optimizer = build_optimizer(module, adamw, config)
        started = []
        optimizer.register_reducer_pre_hook(
            lambda reducer, x: started.append(sum(module.in_flight.now.values()))
        )
        module.train_step(samples_of(0, module.ranks.unit, 2))
        return started

    for rank, started in enumerate(run_ranks(4, on_rank)):
        # The first backwards on a rank are those of its later stage. Rank 1 holds none of the tied
        # embedding in stage 1.
        assert len(set(started)) > 1 and started[0] > 0, (rank, started)


@pytest.mark.parametrize("dummies", [(1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("name", spread(TRAINING, 2))
def test_dummies_add_nothing(tmp_path, name, dummies):
    pipe = make_pipe(name, 2, 4, SCHEDULES[name].min_chunks)
    results = train(tmp_path, pipe, dummies=dummies, steps=2)
    if len(dummies) == 4:
        assert all(not result["gradients"] for result in results)


def test_1f1b_holds_as_many_microbatches_as_stages_follow(tmp_path):
    results = train(tmp_path, make_pipe("1f1b", 4, 8), steps=1)
    assert [result["peak"] for result in results] == [{rank: 4 - rank} for rank in range(4)]


def test_gpipe_holds_all_microbatches(tmp_path):
    results = train(tmp_path, make_pipe("gpipe", 2, 5), steps=1)
    assert [result["peak"] for result in results] == [{0: 5}, {1: 5}]


@pytest.mark.parametrize("name", spread(["1f1b", "zb_h1"], 2, first=1))
def test_what_was_sent_lives_until_an_answer_comes(tmp_path, monkeypatch, name):
    """Not until the end of the step, where the transport does not tell when a message is gone (gloo
    does not).
    """

    class Untold:
        def __init__(self):
            open_messages[-1].append(self)

        def is_completed(self):
            return False

        def wait(self):
            open_messages[-1].remove(self)

    def start_send(self, x, dst, number, what):
        self._hub.post((self._rank, dst, number), x.clone())
        if self._rank != rank:
            return _Posted()
        sent = Untold()
        counts.append(len(open_messages[-1]))
        return sent

    monkeypatch.setattr(ThreadMessages, "start_send", start_send)
    for rank in (0, 1):
        most = []
        for num_microbatches in (4, 7):
            open_messages, counts = [[]], []
            train(
                tmp_path / f"{rank}-{num_microbatches}",
                make_pipe(name, 2, num_microbatches),
                steps=1,
            )
            assert not open_messages[0] and len(counts) % num_microbatches == 0
            most.append(max(counts) / (len(counts) / num_microbatches))
        assert most == [2, 2], f"microbatches of which rank {rank} held messages"


def test_every_value_is_sent_once_to_where_it_is_needed(tmp_path):
    pipe = make_pipe("1f1b", 2, 3, tp=(2, 1), cut=(0,))
    directory = write(tmp_path / "files", pipe)

    def on_rank(rank):
        module = load_class(directory)()
        with count_communication() as volume:
            module.train_step(samples_of(0, 0, 3))
        return {
            (phase, collective): volume.elements(collective, axis="stages", phase=phase)
            for phase in ("forward", "backward")
            for collective in ("send", "receive")
        }

    hidden, skip, even = 4 * 6, 4 * 6, 4
    first, second, third = run_ranks(3, on_rank)
    # Two ranks send a half of the hidden state each; rank 0 sends the rest; each gets what it needs
    # of the gradients.
    assert first == {
        ("forward", "send"): 3 * (hidden // 2 + skip + even),
        ("forward", "receive"): 0,
        ("backward", "send"): 0,
        ("backward", "receive"): 3 * (hidden // 2 + skip),
    }
    assert second[("forward", "send")] == 3 * hidden // 2
    assert second[("backward", "receive")] == 3 * (hidden // 2 + skip)
    assert third == {
        ("forward", "send"): 0,
        ("forward", "receive"): 3 * (hidden + skip + even),
        ("backward", "send"): 3 * (hidden + 2 * skip),
        ("backward", "receive"): 0,
    }


@pytest.mark.parametrize("name", spread(TRAINING, 2))
def test_recomputed_regions_run_twice(tmp_path, name):
    """Also where the backward is split: it is not, then."""
    pipe = make_pipe(name, 2, 4, SCHEDULES[name].min_chunks, (2, 1), recompute=True)
    for result in train(tmp_path, pipe, dummies=(1,), steps=1):
        assert result["runs"] == (4 + 3) * pipe.num_stages // 2
