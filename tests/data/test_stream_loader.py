"""Iterable datasets: one stream, of which every rank keeps its own rows."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from covers import spread
from datasets_by_hand import Counting, CountingWithStates, global_batches, on_replicas

from shardwright import data
from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.data.global_generators import Generators
from shardwright.data.sample_digest import sample_digest
from shardwright.runtime.errors import ConfigError, DataError
from shardwright.runtime.layout import Mesh


@pytest.mark.parametrize("kind", spread([Counting, CountingWithStates], 2, first=1))
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
    # The last samples that were given out are read once more, and compared.
    for replay, expected in ((False, 14), (True, 60)):
        (again,) = on_replicas(CountingWithStates(100), 1, global_batch=10, replay=replay)
        again.load_state_dict(loader.state_dict())
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
    with pytest.raises(ConfigError, match="replay=True is for iterable datasets"):
        data.loader([1, 2], global_batch=1, replay=True)
    split = Counting(9)
    split._distributed = SimpleNamespace(rank=0, world_size=2)  # as Hugging Face's note it
    with pytest.raises(ConfigError, match="one of 2 parts, by split_dataset_by_node"):
        data.loader(split, global_batch=1)
    (few,) = on_replicas(Counting(3), 1, global_batch=4)
    with pytest.raises(DataError, match="gives no global batch of 4"):
        next(iter(few))
    (loader,) = on_replicas(Counting(9), 1, global_batch=2)
    loader.load_state_dict({**loader.state_dict(), "position": 20})
    with pytest.raises(DataError, match="up to sample 19 of epoch 0; it ends after 9\n"):
        next(iter(loader))
    failing = data.loader((1 // number for number in (1, 1, 0)), global_batch=1)
    with pytest.raises(
        DataError, match="raised an error after 2 samples of epoch 0\n.*ZeroDivision"
    ):
        list(failing)


def test_a_state_of_another_stream_is_refused():
    (loader,) = on_replicas(Counting(20), 1, global_batch=4)
    global_batches([loader], 2)
    state = loader.state_dict()
    (other,) = on_replicas(CountingWithStates(20), 1, global_batch=4)
    with pytest.raises(DataError, match="source was .*Counting.* and is .*CountingWithStates"):
        other.load_state_dict(state)
    (reversed_,) = on_replicas(Backwards(20), 1, global_batch=4)
    with pytest.raises(DataError, match="source was"):
        reversed_.load_state_dict(state)
    # Of the same class, but with other samples: seen when it goes on.
    (fewer,) = on_replicas(Counting(20, first=1), 1, global_batch=4)
    fewer.load_state_dict(state)
    with pytest.raises(DataError) as error:
        next(iter(fewer))
    assert str(error.value) == (
        "the dataset goes on with other samples than those that were given out\n"
        "  where: up to sample 7 of epoch 0\n"
        "  why:   it is another dataset, or another order of it\n"
        "  try:   give the dataset that the state was saved with"
    )
    with pytest.raises(DataError, match="has no 'last'"):
        loader.load_state_dict({k: v for k, v in state.items() if k != "last"})


class Backwards(Counting):
    def __iter__(self):
        return reversed(list(super().__iter__()))


class Buffered(CountingWithStates):
    """A stream whose state leaves out what it holds back."""

    def __iter__(self):
        held = None
        for sample in super().__iter__():
            if held is not None:
                yield held
            held = sample
        yield held


def test_a_dataset_whose_state_leaves_something_out_is_refused_or_read_again():
    whole = global_batches(on_replicas(Buffered(20), 1, global_batch=4), 5)
    for replay in (False, True):
        first, again = (
            on_replicas(Buffered(20), 1, global_batch=4, replay=replay)[0] for _ in range(2)
        )
        found = global_batches([first], 2)
        again.load_state_dict(first.state_dict())
        if replay:
            assert found + global_batches([again], 3) == whole
        else:
            with pytest.raises(
                DataError, match="its own state does not say everything.*\n.*replay"
            ):
                next(iter(again))


class Drawing(Counting):
    """A stream in an order that it draws from the global generator."""

    def __iter__(self):
        order = list(range(self.size))
        random.shuffle(order)
        return iter(order)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_that_draws_from_global_generators_is_refused(num_workers):
    before = Generators.now()
    (loader,) = on_replicas(Drawing(20), 1, global_batch=4, num_workers=num_workers)
    with pytest.raises(DataError, match="global generator of random\n.*\n.*set_epoch"):
        next(iter(loader))
    assert before.moved() == []


def test_digests_tell_samples_apart():
    samples = [
        1, 1.0, True, None, "1", b"1", [1], (1,), [[1], 2], [1, [2]], {"a": 1}, {"b": 1},
        torch.tensor(1), torch.tensor([1]), torch.tensor([1], dtype=torch.int32), np.array([1]),
        torch.zeros(9999), torch.cat([torch.zeros(9998), torch.ones(1)]), [0] * 999, "a" * 9999,
    ]  # fmt: skip
    digests = [sample_digest(sample) for sample in samples]
    assert len(set(digests)) == len(samples)
    assert digests == [sample_digest(sample) for sample in samples]
