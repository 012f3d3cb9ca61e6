"""Which positions belong to which step and rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.data.global_batches import SampleBatching, Share
from shardwright.data.rank_roles import Role
from shardwright.runtime.errors import ConfigError, DataError


def positions(batch):
    return list(range(batch.bounds[0], batch.bounds[-1]))


def test_the_example_of_the_file():
    def starts(tail, count):
        batching, position, found = SampleBatching(10, 4, tail), 0, []
        for _ in range(count):
            batch = batching.at(position)
            found.append((batch.epoch, batch.bounds[0], batch.num_rows))
            position = batch.after
        return found, batching.num_steps()

    assert starts("drop", 3) == ([(0, 0, 4), (0, 4, 4), (1, 10, 4)], 2)
    assert starts("short", 4) == ([(0, 0, 4), (0, 4, 4), (0, 8, 2), (1, 10, 4)], 3)
    assert starts("wrap", 4) == ([(0, 0, 4), (0, 4, 4), (0, 8, 4), (1, 12, 4)], 3)


@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["drop", "short", "wrap"]),
    st.integers(0, 300),
)
def test_ranks_together_have_each_position_once(replicas, micros, size, parts, tail, position):
    """Whatever the replicas, microbatches and parts; and each microbatch of a replica is the same
    neighbours, however it is dealt to parts.
    """
    unit = size * parts
    global_batch = replicas * micros * unit
    batching = SampleBatching(97 + global_batch, global_batch, tail)
    batch = batching.at(position)
    everything, by_replica = [], []
    for replica in range(replicas):
        shares = [
            Share(Role(0, replica, replicas, part=(part, parts)), global_batch, unit, uneven=True)
            for part in range(parts)
        ]
        found = [share.microbatches(batch) for share in shares]
        assert len({len(listed) for listed in found}) == 1
        assert {share.num_microbatches(batch) for share in shares} == {len(found[0])}
        for pieces in zip(*found, strict=True):
            joined = [p for rows in pieces for p in range(rows[0], rows[-1])]
            assert joined == list(range(joined[0], joined[0] + len(joined)))
            everything += joined
            by_replica.append(replica)
    assert everything == positions(batch) and by_replica == sorted(by_replica)


@pytest.mark.parametrize(
    ("replicas", "part", "microbatch", "message"),
    [
        (3, (0, 1), None, "8 does not divide into 3 replicas"),
        (2, (0, 1), 3, "2 replicas with microbatches of 3"),
        (2, (0, 3), None, "microbatches of 4 into 3 parts"),
        (9, (0, 1), None, "has nothing for some of 9 data-parallel ranks"),
        (1, (0, 1), 0, "are counts of samples"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(replicas, part, microbatch, message):
    with pytest.raises(ConfigError, match=message):
        Share(Role(0, 0, replicas, part=part), 8, microbatch)


def test_short_batches_that_leave_a_rank_without_samples_are_refused():
    share = Share(Role(0, 0, 4), 8)
    share.check_short(4)
    share.check_short(0)
    for rows in (2, 6):
        with pytest.raises(ConfigError, match=f"last batch of an epoch has {rows} samples"):
            share.check_short(rows)
    Share(Role(0, 0, 4), 8, uneven=True).check_short(6)


def test_too_few_samples_are_refused():
    with pytest.raises(DataError, match="7 samples make no global batch of 8"):
        SampleBatching(7, 8)
    with pytest.raises(DataError, match="the dataset is empty"):
        SampleBatching(0, 8)
    assert SampleBatching(7, 8, "wrap").at(0).num_rows == 8
