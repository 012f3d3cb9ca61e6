"""Where loaders of data are, beside the weights: on any number of ranks, all or nothing."""

import json
from itertools import chain

import pytest
from datasets_by_hand import Numbers, global_batches, ids_of, on_replicas
from mlp_files import make_model, write_files

import shardwright
from shardwright import data
from shardwright.data.stream_loader import StreamLoader
from shardwright.runtime.errors import ArgumentError, CheckpointError, DataError, ShardwrightError
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks

SIZE, BATCH = 50, 12


def loader_here(module, **options):
    roles = data.roles(replica=module.ranks.unit, num_replicas=module.ranks.num_units)
    return data.loader(Numbers(SIZE), roles, global_batch=BATCH, shuffle=True, **options)


def steps(folder, directory, num_steps, *, resume, keeps_loader=lambda rank: True):
    """Some steps on each rank of a job that saves after each of them."""

    def on_rank(rank):
        module = load_class(folder)()
        loader = loader_here(module)
        if resume:
            shardwright.load_checkpoint(directory, module, loader=loader)
        found = []
        while len(found) < num_steps:
            for batch in loader:
                found.append(ids_of(batch))
                kept = loader if keeps_loader(rank) else None
                shardwright.save_checkpoint(directory, module, loader=kept, step=len(found))
                if len(found) == num_steps:
                    break
        return module.ranks.unit, module.ranks.rank, found

    return on_rank


def by_step(made):
    """What all units together had in each step; the ranks of a unit had the same."""
    units = {}
    for unit, _, found in made:
        assert units.setdefault(unit, found) == found
    return [
        list(chain.from_iterable(parts))
        for parts in zip(*(units[u] for u in sorted(units)), strict=True)
    ]


def test_a_run_goes_on_under_another_plan_on_another_number_of_ranks(tmp_path):
    folders = {
        tp: write_files(tmp_path / f"mlp{tp}", make_model(), dp=1, tp=tp) for tp in (1, 2, 3)
    }
    directory = tmp_path / "checkpoints"
    whole = global_batches(on_replicas(Numbers(SIZE), 1, global_batch=BATCH, shuffle=True), 10)
    found, resume = [], False
    for tp, ranks, count in ((1, 2, 3), (2, 6, 2), (3, 3, 3), (1, 4, 2)):
        on_rank = steps(folders[tp], directory, count, resume=resume)
        found += by_step(run_ranks(ranks, on_rank))
        resume = True
    assert found == whole


def test_ranks_that_read_nothing_may_have_no_loader(tmp_path):
    folder = write_files(tmp_path / "mlp", make_model(), dp=1, tp=2)
    run_ranks(
        2, steps(folder, tmp_path / "c", 1, resume=False, keeps_loader=lambda rank: rank == 1)
    )
    (index,) = (tmp_path / "c").glob("*/index.json")
    assert json.loads(index.read_text())["loader"].keys() == {""}
    run_ranks(2, steps(folder, tmp_path / "c", 1, resume=True))


def test_a_loader_takes_it_back_where_that_of_another_rank_refuses(tmp_path):
    folder = write_files(tmp_path / "mlp", make_model(), dp=1, tp=1)

    def on_rank(rank):
        module = load_class(folder)()
        loader = loader_here(module)
        next(iter(loader))
        shardwright.save_checkpoint(tmp_path / "c", module, loader=loader)
        other = loader_here(module) if rank == 0 else loader_here(module, seed=3)
        with pytest.raises(ShardwrightError, match="seed was 0 and is 3"):
            shardwright.load_checkpoint(tmp_path / "c", module, loader=other)
        return other.position

    assert run_ranks(2, on_rank) == [0, 0]


def test_what_does_not_fit_changes_nothing(tmp_path):
    model = make_model()
    folder = write_files(tmp_path / "mlp", model, dp=1, tp=1)
    module = load_class(folder)()
    loader = loader_here(module)
    next(iter(loader))
    saved = tmp_path / "c"
    shardwright.save_checkpoint(saved, module, loader=loader)
    other = data.loader(Numbers(SIZE + 1), global_batch=BATCH, shuffle=True)
    next(iter(other))
    before, weights = other.state_dict(), module.get_parameter("gain").clone()
    with pytest.raises(DataError) as error:
        shardwright.load_checkpoint(saved, module, loader=other)
    assert "num_samples was 50 and is 51" in str(error.value)
    assert other.state_dict() == before and module.get_parameter("gain").equal(weights)
    shardwright.save_checkpoint(tmp_path / "without", module)
    with pytest.raises(CheckpointError, match="has no state of the loader\n.*without loader="):
        shardwright.load_checkpoint(tmp_path / "without", module, loader=loader)
    stream = data.loader(iter(range(3)), global_batch=1)
    assert isinstance(stream, StreamLoader)
    with pytest.raises(DataError, match="state of a 'cursor' loader"):
        shardwright.load_checkpoint(saved, module, loader=stream)
    with pytest.raises(ArgumentError, match="no loader whose state can be saved"):
        shardwright.save_checkpoint(saved, module, loader=[1, 2])


def test_a_state_that_is_not_taken_is_told(tmp_path):
    folder = write_files(tmp_path / "mlp", make_model(), dp=1, tp=1)
    directory = tmp_path / "checkpoints"
    run_ranks(1, steps(folder, directory, 2, resume=False))

    def load(_):
        shardwright.load_checkpoint(directory, load_class(folder)())

    with pytest.warns(UserWarning, match="has the state of a loader, which is not restored"):
        run_ranks(1, load)


def test_loaders_at_different_places_are_refused_by_a_save(tmp_path):
    folder = write_files(tmp_path / "mlp", make_model(), dp=1, tp=1)

    def on_rank(rank):
        module = load_class(folder)()
        loader = loader_here(module)
        for _ in range(1 + rank):
            next(iter(loader))
        with pytest.raises(ShardwrightError) as error:
            shardwright.save_checkpoint(tmp_path / "c", module, loader=loader)
        return str(error.value)

    for message in run_ranks(2, on_rank):
        assert "the loaders of ranks 0 and 1 are not at the same place" in message
        assert "position is 12 on rank 0 and 24 on rank 1" in message
    assert not (tmp_path / "c" / "LATEST").exists()


def test_a_merged_checkpoint_keeps_where_the_loader_was(tmp_path):
    folder = write_files(tmp_path / "mlp", make_model(), dp=1, tp=2)
    run_ranks(2, steps(folder, tmp_path / "c", 2, resume=False))
    shardwright.merge_checkpoint(tmp_path / "c", tmp_path / "merged")
    model = make_model()
    loader = data.loader(Numbers(SIZE), global_batch=BATCH, shuffle=True)
    shardwright.load_checkpoint(tmp_path / "merged", model, loader=loader)
    assert loader.position == 2 * BATCH
