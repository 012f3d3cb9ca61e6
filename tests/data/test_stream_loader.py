"""Iterable datasets: one stream, of which every rank keeps its own rows."""

import json

import pytest
from datasets_by_hand import Counting, CountingWithStates, global_batches, on_replicas

from shardwright import data
from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.runtime.errors import ConfigError, DataError
from shardwright.runtime.layout import Mesh


@pytest.mark.parametrize("kind", [Counting, CountingWithStates])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_goes_on_exactly_on_any_number_of_ranks(kind, num_workers):
    whole = global_batches(on_replicas(kind(14), 1, global_batch=4), 9)
    assert whole[:4] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [1000, 1001, 1002, 1003]]
    for stop in (0, 2, 3, 4, 8):
        first = on_replicas(kind(14), 2, global_batch=4, num_workers=num_workers)
        found = global_batches(first, stop)
        state = json.loads(json.dumps(first[1].state_dict()))
        again = on_replicas(kind(14), 4, global_batch=4)
        for loader in again:
            loader.load_state_dict(state)
        assert found + global_batches(again, 9 - stop) == whole
        for loader in first:
            loader.close()


def test_states_spare_reading_again():
    (loader,) = on_replicas(CountingWithStates(100), 1, global_batch=10)
    global_batches([loader], 5)
    for kind, expected in ((CountingWithStates, 10), (Counting, 60)):
        state = loader.state_dict()
        if kind is Counting:
            state["dataset"] = None
        (again,) = on_replicas(kind(100), 1, global_batch=10)
        again.load_state_dict(state)
        assert global_batches([again], 1) == [list(range(50, 60))]
        assert again._fetcher.sources[0].num_read == expected


def test_short_tails_and_ranks_that_read_nothing():
    (loader,) = on_replicas(Counting(5), 1, global_batch=2, drop_last=False)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    stages = tuple(StagePlan(f"op{i}", Mesh((("tp", 1),)), (i,)) for i in range(3))
    plan = Plan(Mesh((("rank", 3),)), stages=stages, num_microbatches=2)
    loaders = [
        data.loader(Counting(9), data.roles(plan, rank=rank), global_batch=4) for rank in range(3)
    ]
    steps = list(zip(*loaders, strict=True))
    assert len(steps) == 2 and steps[0][1] == [None, None]
    assert [part.tolist() for part in steps[1][2]] == [[4, 5], [6, 7]]


def test_what_a_stream_cannot_do_is_refused():
    for options, message in [
        ({"shuffle": True}, "shuffle does not work with an iterable dataset"),
        ({"packing": data.Packing(4)}, "packing does not work"),
        ({"wrap": True}, "wrap does not work"),
        ({"on_error": "skip"}, "on_error='skip' does not work"),
        ({"seed_samples": True}, "seed_samples does not work"),
        ({"num_workers": 2}, "at most one worker, not 2"),
    ]:
        with pytest.raises(ConfigError, match=message):
            on_replicas(Counting(9), 1, global_batch=2, **options)
    (few,) = on_replicas(Counting(3), 1, global_batch=4)
    with pytest.raises(DataError, match="gives no global batch of 4"):
        next(iter(few))
    (loader,) = on_replicas(Counting(9), 1, global_batch=2)
    loader.load_state_dict({**loader.state_dict(), "position": 20})
    with pytest.raises(DataError, match="the dataset ends after 9 samples"):
        next(iter(loader))
    failing = data.loader((1 // number for number in (1, 1, 0)), global_batch=1)
    with pytest.raises(
        DataError, match="raised an error after 2 samples of epoch 0\n.*ZeroDivision"
    ):
        list(failing)
