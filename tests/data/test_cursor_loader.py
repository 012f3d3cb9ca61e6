"""The loader: the same global batches for every number of ranks and workers, and exact resume."""

from __future__ import annotations

import io
import json
import random

import numpy as np
import pytest
import torch
from datasets_by_hand import (
    Noisy,
    Numbers,
    augmented,
    global_batches,
    ids_of,
    on_replicas,
    shortened,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright
from shardwright import data
from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.data.global_generators import Generators
from shardwright.data.rank_roles import Role, Roles
from shardwright.runtime.errors import ArgumentError, ConfigError, DataError, InputError
from shardwright.runtime.layout import Layout, Mesh


def one(dataset, **options):
    (loader,) = on_replicas(dataset, 1, **options)
    return loader


@settings(max_examples=40)
@given(
    st.integers(12, 60),
    st.sampled_from([(1, 2), (2, 3), (3, 6), (4, 12)]),
    st.sampled_from([{}, {"shuffle": True}, {"shuffle": True, "shuffle_block": 5}]),
    st.booleans(),
    st.data(),
)
def test_same_batches_everywhere_and_each_sample_once(size, dealt, order, wrap, draw):
    replicas, micros = dealt
    options = {"global_batch": 12, "seed": 3, "wrap": wrap, **order}
    num_steps = 2 * (-(-size // 12))
    whole = global_batches([one(Numbers(size), **options)], num_steps)
    stopped = draw.draw(st.integers(0, num_steps))
    first = on_replicas(Numbers(size), replicas, **options)
    found = global_batches(first, stopped)
    again = on_replicas(
        Numbers(size), replicas, microbatch=12 // replicas // (micros // replicas), **options
    )
    for loader in again:
        loader.load_state_dict(json.loads(json.dumps(first[-1].state_dict())))
    assert found + global_batches(again, num_steps - stopped) == whole
    flat = [number for batch in whole for number in batch]
    if wrap:
        assert sorted(flat[:size]) == list(range(size))
    else:
        epoch = flat[: size // 12 * 12]
        assert len(set(epoch)) == len(epoch)


def test_workers_neither_lose_nor_repeat_what_they_read_ahead():
    options = {"global_batch": 4, "shuffle": True, "seed": 1}
    whole = global_batches([one(Numbers(22), **options)], 15)
    found, state = [], None
    for stop, workers, prefetch in ((2, 2, 3), (4, 0, 2), (7, 3, 2), (12, 1, 4), (15, 2, 2)):
        loader = one(Numbers(22), num_workers=workers, prefetch_factor=prefetch, **options)
        if state is not None:
            loader.load_state_dict(state)
        found += global_batches([loader], stop - len(found))
        state = loader.state_dict()
        loader.close()
    assert found == whole


def test_a_loop_goes_on_where_the_last_one_was_left():
    loader = one(Numbers(10), global_batch=2)
    first = [ids_of(batch) for _, batch in zip(range(2), loader, strict=False)]
    assert loader.epoch == 0 and loader.position == 4
    assert first + [ids_of(batch) for batch in loader] == [[i, i + 1] for i in range(0, 10, 2)]
    assert loader.epoch == 1 and len(loader) == 5


def test_a_state_taken_within_a_step_counts_it():
    loader = one(Numbers(8), global_batch=2)
    states = [loader.state_dict()["position"] for _ in loader]
    assert states == [2, 4, 6, 8]
    buffer = io.BytesIO()
    torch.save(loader.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer) == loader.state_dict()
    assert len(json.dumps(loader.state_dict())) < 500


def test_no_global_generator_moves():
    before = Generators.now()
    loader = one(Numbers(20), global_batch=5, shuffle=True, transform=augmented, num_workers=1)
    plain = one(Numbers(20), global_batch=5, shuffle=True, transform=augmented)
    assert [b[1].tolist() for b in loader] == [b[1].tolist() for b in plain]
    loader.close()
    noisy = one(Noisy(20), global_batch=5, seed_samples=True)
    assert len(list(noisy)) == 4
    assert before.moved() == []


@pytest.mark.parametrize("seeded", [{"seed_samples": True}, {"transform": augmented}])
def test_augmentations_follow_from_the_sample(seeded):
    """Not from ranks, workers, or what was drawn before."""
    dataset = Noisy(12) if "seed_samples" in seeded else Numbers(12)

    def drawn(loaders):
        rows = []
        for _ in range(2):
            for parts in zip(*loaders, strict=True):
                rows += [
                    row for part in parts for row in zip(*[x.tolist() for x in part], strict=True)
                ]
        return rows

    options = {"global_batch": 4, "shuffle": True, **seeded}
    alone = drawn(on_replicas(dataset, 1, **options))
    random.random(), np.random.rand(), torch.rand(3)
    pair = on_replicas(dataset, 2, num_workers=1, **options)
    assert drawn(pair) == alone
    for loader in pair:
        loader.close()
    epochs = [{row[0]: row[1] for row in alone[:12]}, {row[0]: row[1] for row in alone[12:]}]
    assert all(epochs[0][number] != epochs[1][number] for number in epochs[0])


def test_a_dataset_that_draws_from_global_generators_is_refused():
    before = Generators.now()
    with pytest.raises(DataError, match="global generator of torch and numpy and random"):
        next(iter(one(Noisy(12), global_batch=4)))
    assert before.moved() == []


def test_blends_keep_their_weights_and_go_on_exactly():
    sources = [Numbers(30), [{"x": 1000 + i} for i in range(20)]]
    options = {"weights": [3, 1], "global_batch": 8, "shuffle": True}
    whole = global_batches([one(sources, **options)], 12)
    assert [sum(number < 1000 for number in batch) for batch in whole] == [6] * 12
    pair = on_replicas(sources, 2, **options)
    found = global_batches(pair, 5)
    again = one(sources, num_workers=1, **options)
    again.load_state_dict(pair[0].state_dict())
    assert found + global_batches([again], 7) == whole
    again.close()
    with pytest.raises(DataError, match=r"weights was \[3.0, 1.0\] and is \[1.0, 1.0\]"):
        one(sources, **{**options, "weights": [1, 1]}).load_state_dict(pair[0].state_dict())


STAGES = tuple(StagePlan(f"op{i}", Mesh((("tp", 2),)), (2 * i, 2 * i + 1)) for i in range(3))
PIPELINE = Plan(Mesh((("rank", 6),)), stages=STAGES, num_microbatches=2)
CUT = Plan(
    Mesh((("dp", 2), ("cp", 2))),
    inputs={"ids": Layout.parse("[4/dp, 8/cp]"), "mask": Layout.parse("[4/dp]")},
)


def test_a_pipeline_gets_its_microbatches_and_nothing_is_sent():
    with shardwright.count_communication() as volume:
        loaders = [
            data.loader(Numbers(24), data.roles(PIPELINE, num_ranks=12, rank=rank), global_batch=8)
            for rank in range(12)
        ]
        (first, *_) = steps = list(zip(*loaders, strict=True))
    assert len(steps) == 3
    assert [ids_of(part) for part in first[:6]] == [[0, 1, 2, 3]] * 2 + [[]] * 2 + [
        [0, 1, 2, 3]
    ] * 2
    assert [len(part) for part in first] == [2] * 12 and first[2] == [None, None]
    assert first[6][1]["x"].tolist() == [6, 7]
    assert not volume.total().calls
    with pytest.raises(ConfigError, match="does not fit a pipeline of 2 microbatches on 2 replica"):
        data.loader(Numbers(24), data.roles(PIPELINE, num_ranks=12), global_batch=6)


def test_inputs_that_the_plan_cuts_come_in_pieces():
    rows = [
        {"ids": 10 * i + torch.arange(8), "mask": torch.tensor(i), "key": str(i)} for i in range(8)
    ]
    loaders = [data.loader(rows, data.roles(CUT, rank=rank), global_batch=4) for rank in range(4)]
    first = [next(iter(loader)) for loader in loaders]
    assert first[0]["ids"].tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert first[3]["ids"].tolist() == [[24, 25, 26, 27], [34, 35, 36, 37]]
    assert first[3]["mask"].tolist() == [2, 3]
    zigzag = data.roles(replica=0, num_replicas=1, cuts={"": [data.EvenCut(1, 0, 2, "zigzag")]})
    batch = next(iter(data.loader(rows, zigzag, global_batch=2)))
    assert batch["ids"][0].tolist() == [0, 1, 6, 7] and batch["mask"].tolist() == [0, 1]
    tensors = [torch.arange(8)] * 2
    alone = data.roles(replica=0, num_replicas=1, cuts={"x": [data.EvenCut(1, 1, 2)]})
    assert next(iter(data.loader(tensors, alone, global_batch=1))).tolist() == [[4, 5, 6, 7]]
    with pytest.raises(InputError, match="a batch whose inputs are cut is a mapping"):
        next(iter(data.loader([(1, 2)] * 2, alone, global_batch=1)))


def test_uneven_replicas_have_to_be_asked_for():
    with pytest.raises(ConfigError, match="uneven=True"):
        on_replicas(Numbers(24), 3, global_batch=8)
    loaders = on_replicas(Numbers(24), 3, global_batch=8, uneven=True)
    assert global_batches(loaders, 3) == global_batches([one(Numbers(24), global_batch=8)], 3)


def test_a_sample_that_raises_is_named_or_replaced():
    with pytest.raises(DataError) as error:
        list(one(Numbers(8, bad=(5,)), global_batch=4))
    assert str(error.value) == (
        "sample 5 of Numbers (picture-5) could not be read\n"
        "  why:   ValueError: no such picture\n"
        "  try:   mend the sample, or pass on_error='skip', which counts and replaces such samples"
    )
    options = {"global_batch": 4, "on_error": "skip", "shuffle": True}
    skipping = one(Numbers(8, bad=(5, 6)), **options)
    whole = global_batches([skipping], 4)
    assert all(len(batch) == 4 and not {5, 6} & set(batch) for batch in whole)
    names = [name for name, _ in skipping.skipped]
    assert names.count("sample 5 of Numbers (picture-5)") >= 2
    pair = on_replicas(Numbers(8, bad=(5, 6)), 2, num_workers=1, **options)
    assert global_batches(pair, 4) == whole
    assert sorted(name for loader in pair for name, _ in loader.skipped) == sorted(names)
    for loader in pair:
        loader.close()
    with pytest.raises(DataError, match="20 samples in a row could not be read\n.*sample"):
        list(one(Numbers(8, bad=tuple(range(8))), **options))


def test_an_error_of_transform_is_told_as_its_own():
    options = {"global_batch": 4, "transform": lambda sample, generator: 1 // (sample["x"] - 2)}
    with pytest.raises(DataError) as error:
        list(one(Numbers(8), **options))
    assert str(error.value) == (
        "transform raised an error for sample 2 of Numbers (picture-2)\n"
        "  why:   ZeroDivisionError: integer division or modulo by zero\n"
        "  try:   mend transform, or pass on_error='skip', which counts and replaces such samples"
    )
    skipping = one(Numbers(8), **options, on_error="skip")
    assert len(list(skipping)) == 2 and len(skipping.skipped) >= 1
    assert skipping.skipped[0][1].startswith("transform raised an error for sample 2")


def test_batches_that_the_module_was_not_compiled_for_are_refused():
    shapes = {"x": (4, 3), "mask": (4, None)}
    role = Role(0, 0, 1, inputs=("x", "mask"), twins=(0,), saves=True, shapes=shapes)
    roles = Roles((role,), microbatch=4)
    rows = [{"x": torch.zeros(3), "mask": torch.zeros(i), "name": "a"} for i in (2, 2, 2, 2)]
    assert set(next(iter(data.loader(rows, roles, global_batch=4)))) == {"x", "mask"}
    with pytest.raises(InputError) as error:
        next(iter(data.loader(rows, roles, global_batch=2)))
    assert str(error.value) == (
        "the input 'x' of a batch is [2, 3], and the module was compiled for [4, 3]\n"
        "  where: from sample 0 of list to sample 1 of list\n"
        "  why:   a microbatch of this rank has 2 samples\n"
        "  try:   choose global_batch= and microbatch= so that it has 4, or compile with "
        "ComputeConfig(dynamic_dims={'x': (0,)})"
    )
    wide = [{"x": torch.zeros(5), "mask": torch.zeros(2)}] * 4
    with pytest.raises(InputError, match=r"is \[4, 5\], and .* for \[4, 3\]\n.*\n.*another shape"):
        next(iter(data.loader(wide, roles, global_batch=4)))
    listed = Roles((role,), microbatch=4, takes_list=True)
    with pytest.raises(ConfigError, match="microbatches have 2 samples, and .* compiled for 4"):
        data.loader(rows, listed, global_batch=4, microbatch=2)


def test_what_an_interrupt_cuts_off_is_read_again():
    class Interrupted(Numbers):
        def __getitem__(self, index):
            if index == 4 and not interrupts:
                interrupts.append(index)
                raise KeyboardInterrupt
            return super().__getitem__(index)

    interrupts = []
    loader = data.loader(Interrupted(8), data.roles(replica=0, num_replicas=1), global_batch=4)
    found = [ids_of(next(iter(loader)))]
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    assert found + [ids_of(batch) for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_errors_of_workers_are_the_same():
    loader = one(Numbers(8, bad=(5,)), global_batch=4, num_workers=1)
    with pytest.raises(DataError, match="^sample 5 of Numbers \\(picture-5\\) could not be read\n"):
        list(loader)
    assert loader.position == 4


def test_a_collate_that_loses_samples_is_refused():
    with pytest.raises(DataError) as error:
        list(one(Numbers(8), global_batch=4, collate=shortened))
    assert str(error.value).startswith(
        "collate was given 4 samples and made a batch of another size\n"
        "  where: from sample 0 of Numbers (picture-0) to sample 3 of Numbers (picture-3)\n"
        "  why:   it made batch [3, 2]"
    )
    with pytest.raises(DataError, match="collate raised an error\n.*\n.*ZeroDivisionError"):
        list(one(Numbers(8), global_batch=4, collate=lambda samples: 1 / 0))
    with pytest.raises(DataError, match="collate returned None\n.*from sample 0 of Numbers"):
        list(one(Numbers(8), global_batch=4, collate=lambda samples: None))
    with pytest.raises(DataError, match="another size\n.*\n.*batch.x \\[3\\]"):
        list(one(Numbers(8), global_batch=4, collate=lambda samples: {"x": np.zeros(3)}))
    ragged = [torch.zeros(3), torch.zeros(3), torch.zeros(4), torch.zeros(3)]
    with pytest.raises(DataError) as error:
        list(one(ragged, global_batch=4))
    assert "sample 0 of list has shape [3], and sample 2 of list has shape [4]" in str(error.value)


@pytest.mark.parametrize(
    ("dataset", "options", "kind", "message"),
    [
        ([], {}, DataError, "list is empty"),
        ([1, 2], {}, DataError, "2 samples make no global batch of 4"),
        (3, {}, ArgumentError, "3 is no dataset"),
        ([1], {"weights": [1]}, ArgumentError, "1 is no dataset"),
        (3, {"weights": [1]}, ArgumentError, "with weights= the dataset is a list of datasets"),
        ([[1], []], {"weights": [1, 1]}, DataError, "source 1 is empty"),
        ([1] * 9, {"wrap": True, "drop_last": False}, ConfigError, "contradict each other"),
        ([1] * 9, {"shuffle_block": 0}, ConfigError, "shuffle_block=0"),
        ([1] * 9, {"shuffle_block": 3}, ConfigError, "shuffle_block=3 shuffles nothing"),
        ([1] * 9, {"prefetch_factor": 0}, ConfigError, "prefetch_factor=0"),
        ([1] * 9, {"multiprocessing_context": "fork"}, ConfigError, "starts no process"),
        ([1] * 9, {"num_workers": -1}, ConfigError, "num_workers=-1"),
        ([1] * 9, {"device": "bogus"}, ConfigError, "cannot be moved to device='bogus'"),
        ({"train": [1] * 9}, {}, ArgumentError, "a dict is no dataset: it takes names"),
        ([1] * 9, {"global_batch": "4"}, ArgumentError, "'global_batch' is a whole number"),
    ],
)
def test_bad_requests_are_refused_in_words(dataset, options, kind, message):
    with pytest.raises(kind, match=message):
        one(dataset, **{"global_batch": 4, **options})


def test_states_that_do_not_fit_are_refused_in_words():
    loader = one(Numbers(12), global_batch=4, seed=1)
    state = loader.state_dict()
    other = one(Numbers(13), global_batch=4, seed=2)
    with pytest.raises(DataError) as error:
        other.load_state_dict(state)
    assert str(error.value) == (
        "the state is that of another loader\n"
        "  why:   seed was 1 and is 2; num_samples was 12 and is 13\n"
        "  try:   make the loader as in the run that saved the state, or begin anew without it"
    )
    for wrong, message in [
        (None, "this is no state of a loader: None"),
        ({**state, "kind": "stream"}, "state of a 'stream' loader, version 1"),
        ({**state, "version": 9}, "state of a 'cursor' loader, version 9"),
        ({k: v for k, v in state.items() if k != "seed"}, "has no 'seed'"),
        ({**state, "position": -1}, "position -1 is no place"),
        ({**state, "fingerprint": ["x"]}, r"fingerprint was \['x'\] and is \[None\]"),
    ]:
        with pytest.raises(DataError, match=message):
            loader.load_state_dict(wrong)
    # Another global batch goes on at the same sample: that is how a batch size is ramped up.
    larger = one(Numbers(12), global_batch=6, seed=1)
    larger.load_state_dict({**state, "position": 4})
    assert ids_of(next(iter(larger))) == [4, 5, 6, 7, 8, 9]


def test_what_cannot_be_sent_to_spawned_workers_is_told():
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    loader = one(Numbers(9), global_batch=3, transform=lambda sample, _: sample, **options)
    with pytest.raises(ConfigError, match="cannot be sent to worker processes\n.*pickle.*\n.*fork"):
        next(iter(loader))


def test_ten_million_samples_need_no_list():
    loader = one(range(10_000_000), global_batch=100, shuffle=True)
    first = next(iter(loader))
    assert len(set(first.tolist())) == 100 and first.max() > 1_000_000
    assert len(json.dumps(loader.state_dict())) < 500


def test_a_worker_that_dies_is_told_in_words():
    loader = one(Numbers(400), global_batch=2, num_workers=1)
    next(iter(loader))
    (worker,) = loader._ahead._workers
    worker.kill()
    with pytest.raises(
        DataError, match="a worker that loads samples has ended\n  why:   \\w+Error"
    ):
        for _ in loader:
            pass
    assert loader.position >= 2
    left = list(loader)  # goes on with a new worker
    assert sorted(i for batch in left for i in ids_of(batch))[-1] == 399
    loader.close()
