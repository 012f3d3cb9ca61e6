"""Samples of different lengths in rows of one."""

import pytest
import torch
from datasets_by_hand import Documents, on_replicas
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright import data
from shardwright.data.packing import PackedBatching, pack_row, packable
from shardwright.data.permutation import Order
from shardwright.data.sample_stream import SingleStream
from shardwright.runtime.errors import ConfigError, DataError

LENGTHS = [3, 4, 2, 5, 8, 1, 1, 6, 7, 2, 3, 3, 5, 4]


def test_the_row_of_the_file():
    documents = Documents([3, 4])
    row = pack_row([documents[0], documents[1]], data.Packing(8))
    assert row["input_ids"].tolist() == [0, 1, 2, 100, 101, 102, 103, 0]
    assert row["labels"].tolist() == [1, 2, 3, 101, 102, 103, 104, -100]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert row["document_ids"].tolist() == [1, 1, 1, 2, 2, 2, 2, 0]
    padded = pack_row([packable([5], 1)], data.Packing(3, padding={"input_ids": 9}))
    assert padded["input_ids"].tolist() == [5, 9, 9]


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.integers(9, 20),
    st.integers(1, 3),
    st.sampled_from(["short", "wrap"]),
)
def test_rows_are_full_and_every_sample_is_packed_once(lengths, length, rows, tail):
    stream = SingleStream(Order(len(lengths), 1, shuffle=True))
    own = data.packing.as_lengths(lengths, len(lengths), "Documents")
    batching = PackedBatching(stream, [own], data.Packing(length), rows, tail)
    position, found = 0, []
    while position < 2 * len(lengths):
        batch = batching.at(position)
        assert PackedBatching(stream, [own], data.Packing(length), rows, tail).at(position) == batch
        found += zip(batch.bounds, batch.bounds[1:], strict=False)
        assert batch.num_rows == rows or tail == "short"
        position = batch.after
    assert [start for start, _ in found] == [0, *(stop for _, stop in found)][:-1]
    for (start, stop), after in zip(found, [*found[1:], None], strict=True):
        used = [lengths[i] for run in stream.runs(start, stop) for i in run.indices]
        assert sum(used) <= length
        if after is not None and (tail == "wrap" or after[0] % len(lengths)):
            (run,) = stream.runs(stop, stop + 1)
            assert sum(used) + lengths[run.indices[0]] > length  # else it would have fitted


@pytest.mark.parametrize("num_workers", [0, 2])
def test_packed_batches_are_those_of_one_rank_on_any_and_go_on_exactly(num_workers):
    options = {"global_batch": 2, "shuffle": True, "packing": data.Packing(8)}
    (alone,) = on_replicas(Documents(LENGTHS), 1, **options)
    whole = [batch for _ in range(2) for batch in alone]
    assert len(alone) == len(whole) // 2 >= 2
    pair = on_replicas(Documents(LENGTHS), 2, num_workers=num_workers, **options)
    first = next(zip(*pair, strict=True))
    again = on_replicas(Documents(LENGTHS), 2, num_workers=num_workers, **options)
    for loader, other in zip(again, pair, strict=True):
        loader.load_state_dict(other.state_dict())
    steps = [first] + [step for _ in range(2) for step in zip(*again, strict=True)]
    assert len(steps) == len(whole)
    for parts, batch in zip(steps, whole, strict=True):
        for name, value in batch.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), value)
    for loader in (*pair, *again):
        loader.close()


def test_documents_do_not_see_each_other():
    ids = torch.tensor([[1, 1, 2, 2, 0, 0]])
    mask = data.document_mask(ids)[0, 0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert data.document_mask(ids, causal=False)[0, 0, 0].int().tolist() == [1, 1, 0, 0, 0, 0]


def test_what_cannot_be_packed_is_refused_in_words():
    options = {"global_batch": 1}
    for packing, message in [
        (data.Packing(8, lengths=[3]), "1 lengths for 14 samples of Documents"),
        (data.Packing(8, lengths=[0] * 14), "sample 0 of Documents has the length 0"),
        (data.Packing(8, lengths="abc"), "are no lengths"),
        (data.Packing(7), "sample 4 has 8 elements and does not fit into a row of 7"),
    ]:
        with pytest.raises(DataError, match=message):
            on_replicas(Documents(LENGTHS), 1, packing=packing, **options)
    with pytest.raises(DataError, match="lengths of the samples of list are not known"):
        on_replicas([1, 2], 1, packing=data.Packing(4), **options)
    with pytest.raises(ConfigError, match="a row of 0 elements"):
        data.Packing(0)
    with pytest.raises(DataError, match="packed into 8 rows, which make no global batch of 40"):
        on_replicas(Documents(LENGTHS), 1, packing=data.Packing(8), global_batch=40)
    (cut,) = on_replicas(
        Documents(LENGTHS), 1, packing=data.Packing(7, overlong="cut"), global_batch=8
    )
    assert next(iter(cut))["input_ids"].shape == (8, 7)
    for sample, message in [
        ({"a": [1], "b": [1, 2]}, "different lengths\n.*a: 1, b: 2"),
        ({"a": [[1]]}, r"'a' has shape \[1, 1\]"),
        ({"a": "text"}, "something else than numbers"),
        ([1, 2, 3], "has 3 elements, and its length was given as 1"),
    ]:
        with pytest.raises(DataError, match=message):
            packable(sample, 1)
    with pytest.raises(
        DataError, match="different keys\n  where: from sample 0 of list to sample 1"
    ):
        next(iter(packed([{"a": [1]}, {"b": [1]}], [1, 1])))


def packed(samples, lengths, **options):
    packing = data.Packing(4, lengths=lengths)
    (loader,) = on_replicas(samples, 1, packing=packing, **{"global_batch": 1, **options})
    return loader


def test_samples_are_held_to_their_lengths_and_named():
    samples = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    with pytest.raises(DataError) as error:
        list(packed(samples, [3, 1, 4]))
    assert str(error.value) == (
        "a sample that is packed has 2 elements, and its length was given as 1\n"
        "  where: sample 1 of list\n"
        "  why:   every rank packs rows by the lengths, of samples that others read, too\n"
        "  try:   give Packing the lengths that samples have after transform="
    )
    # What replaces a sample has the room of that sample, not more.
    skipping = packed(samples, [3, 1, 4], on_error="skip")
    rows = [batch["document_ids"][0].tolist() for batch in skipping]
    assert rows == [[1, 1, 1, 2], [1, 1, 1, 1]]
    assert skipping.skipped[0][0] == "sample 1 of list"
    with pytest.raises(DataError, match="packed was .* and is"):
        packed(samples, [3, 2, 4]).load_state_dict(skipping.state_dict())


def test_a_short_batch_of_rows_that_leaves_ranks_without_any_is_refused_on_all():
    samples, packing = [[1, 2, 3]] * 5, data.Packing(4, lengths=[3] * 5)
    options = {"packing": packing, "global_batch": 4, "drop_last": False}
    for loader in on_replicas(samples, 2, **options):
        with pytest.raises(ConfigError, match="last batch of an epoch has 1 samples"):
            list(loader)
