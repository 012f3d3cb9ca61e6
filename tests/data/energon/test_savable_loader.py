"""Loaders with Energon's interface: who reads what, exact states, states dealt anew."""

from __future__ import annotations

import io
import json
from collections import Counter
from unittest import mock

import pytest
import torch
from datasets_by_hand import Numbers, ids_of, steps_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_files import numbered_shards, write_tar

import shardwright
from shardwright import data
from shardwright.data.energon import savable_loader
from shardwright.data.energon.source_mix import SourceMix
from shardwright.data.global_generators import Generators
from shardwright.frontend.cli.main import main
from shardwright.runtime.errors import ConfigError, DataError, UsageError


def loaders(size, ranks, workers, *, batch_size=2, seed_offset=0, redistributes=False, **options):
    """The loaders of all ranks, in this process: samples do not depend on who reads them."""
    found = []
    for rank in range(ranks):
        config = data.WorkerConfig(
            rank=rank, world_size=ranks, num_workers=workers, seed_offset=seed_offset
        )
        source = Numbers(size)
        if "weights" in options:  # a second source of another size
            source = [source, [{"x": 1000 + i} for i in range(size + 5)]]
        dataset = data.SavableDataset(
            source=source, batch_size=batch_size, worker_config=config, **options
        )
        found.append(data.get_savable_loader(dataset, redistributes=redistributes))
    return found


def in_process(source, entries, handing, seed):
    """Stands in for workers where none are wanted: they are slow."""
    return map(source.__getitem__, entries)


def without_processes():
    return mock.patch.object(savable_loader, "read_ahead", in_process)


def read(loader, count):
    return [ids_of(batch) for batch in steps_of(loader, count)]


SHUFFLED = {"shuffle_buffer_size": 100, "max_samples_per_sequence": 3}


@pytest.mark.parametrize("options", [{}, SHUFFLED])
@without_processes()
def test_each_worker_reads_its_own_samples_in_turn(options):
    (first, second) = loaders(10, 2, 3, batch_size=1, **options)
    for loader, bounds in ((first, [0, 2, 4, 5]), (second, [5, 7, 9, 10])):
        found = [number for batch in read(loader, 12) for number in batch]
        for worker in range(3):
            mine = found[worker::3]
            own = list(range(bounds[worker], bounds[worker + 1]))
            size = len(own)
            assert sorted(mine[:size]) == own and sorted(mine[size : 2 * size]) == own[: 4 - size]
        loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_restored_stream_is_the_uninterrupted_one(workers):
    before = Generators.now()
    options = {"batch_size": 3, **SHUFFLED}
    (whole,) = loaders(20, 1, workers, **options)
    expected = read(whole, 16)
    assert whole.save_state_rank()["position"] == 16
    (first,) = loaders(20, 1, workers, **options)
    assert first.save_state_rank() is None
    found = read(first, 5)
    buffer = io.BytesIO()
    torch.save(first.save_state_rank(), buffer)
    assert len(json.dumps(first.save_state_rank())) < 500
    buffer.seek(0)
    (again,) = loaders(20, 1, workers, **options)
    again.restore_state_rank(torch.load(buffer))
    assert found + read(again, 11) == expected
    assert before.moved() == []
    with pytest.raises(UsageError, match="while batches are being read"):
        again.restore_state_rank(None)
    for loader in (whole, first, again):
        loader.close()
    again.restore_state_rank(None)
    assert again.save_state_rank() is None and read(again, 2) == expected[:2]
    again.close()


@without_processes()
def test_validation_reads_each_sample_once_in_as_many_steps_on_all_ranks():
    for size in (8, 9, 11, 23):
        made = loaders(size, 2, 2, batch_size=2, repeat=False)
        steps = [[ids_of(batch) for batch in loader] for loader in made]
        assert len(steps[0]) == len(steps[1]) == len(made[0])
        flat = [number for rank in steps for batch in rank for number in batch]
        assert sorted(flat) == list(range(size))
        assert [ids_of(batch) for batch in made[0]] == steps[0]


@without_processes()
@settings(max_examples=25)
@given(
    st.integers(16, 50),
    st.sampled_from([{}, SHUFFLED, {"weights": [3, 1]}, {**SHUFFLED, "weights": [1, 2]}]),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=2, max_size=4),
    st.data(),
)
def test_states_dealt_anew_lose_and_repeat_nothing(size, options, sizes, draw):
    """Through several numbers of ranks and workers; every epoch has each sample once."""
    seen, states = [], None
    for ranks, workers in sizes:
        made = loaders(size, ranks, workers, redistributes=True, **options)
        for loader in made:
            loader.restore_state_global(states)
        count = draw.draw(st.integers(1, 12))
        seen += [n for loader in made for batch in read(loader, count) for n in batch]
        states = [json.loads(json.dumps(loader.save_state_rank())) for loader in made]
    # What is left of the epochs under way, and what was seen, is each sample equally often.
    (last,) = data.redistribute(states, world_size=1, num_workers=0)
    (stream,) = loaders(size, 1, 0, **options)
    stream.restore_state_rank(last)
    seen += dealt_to(stream)
    sources = [range(size), *([range(1000, 1005 + size)] if "weights" in options else [])]
    for numbers in sources:
        own = [number for number in seen if (number >= 1000) == (numbers[0] >= 1000)]
        assert sorted(own) == sorted(list(numbers) * (len(own) // len(numbers)))


def dealt_to(loader):
    """What was dealt to the workers of a rank, of all sources."""
    numbers = []
    for stream in loader._streams:
        for source, own in enumerate(getattr(stream, "_streams", (stream,))):
            runs = own.runs(0, own.dealt)
            numbers += [1000 * source + index for run in runs for index in run.indices]
    return numbers


@without_processes()
def test_another_number_of_ranks_or_workers_is_refused_unless_asked_for(tmp_path, capsys):
    made = loaders(20, 2, 2)
    for loader in made:
        read(loader, 2)
    states = [loader.save_state_rank() for loader in made]
    (other,) = loaders(20, 1, 4)
    with pytest.raises(DataError) as error:
        other.restore_state_rank(states[0])
    assert str(error.value).startswith(
        "the state is that of 2 ranks with 2 workers each\n"
        "  why:   here are 1 ranks with 4 workers each\n"
        "  try:   deal the states of all ranks anew: shardwright data redist"
    )
    with pytest.raises(DataError, match="there are states of 2 ranks for 1"):
        other.restore_state_global(states)
    for rank, state in enumerate(states):
        torch.save(state, tmp_path / f"rank{rank}.pt")
    torch.save(states, tmp_path / "all.pt")
    for names in (["rank0.pt", "rank1.pt"], ["all.pt"]):
        command = [str(tmp_path / name) for name in (*names, "out.json")]
        sizes = ["--world-size", "1", "--num-workers", "4"]
        assert main(["data", "redist", *command, *sizes]) == 0
        assert "2 ranks with 2 workers each to 1 ranks with 4" in capsys.readouterr().out
        dealt = json.loads((tmp_path / "out.json").read_text())
        (again,) = loaders(20, 1, 4, batch_size=1)
        with pytest.raises(DataError, match="batch_size was 2 and is 1"):
            again.restore_state_global(dealt)
        (again,) = loaders(20, 1, 4)
        again.restore_state_global(dealt)
        assert len(dealt_to(again)) == 20 - 8
    one_each = str(tmp_path / "new{rank}.pt")
    assert main(["data", "redist", str(tmp_path / "all.pt"), one_each, *sizes]) == 0
    assert torch.load(tmp_path / "new0.pt")["dealt"]["first_epoch"] == [1]


@without_processes()
def test_states_that_do_not_belong_together_are_refused(tmp_path, capsys):
    made = loaders(20, 2, 2)
    read(made[0], 1), read(made[1], 1)
    first, second = (loader.save_state_rank() for loader in made)
    sizes = {"world_size": 1, "num_workers": 1}
    for states, message in [
        ([], "a state of a rank is missing"),
        ([first, None], "2, of which 1 say that nothing was read"),
        ([first], "not the states of all 2 ranks\n.*ranks \\[0\\]"),
        ([first, {**second, "seed_offset": 3}], "seed_offset was 3 and is 0"),
        ([first, 3], "this is no state of a loader: 3"),
    ]:
        with pytest.raises(DataError, match=message):
            data.redistribute(states, **sizes)
    with pytest.raises(ConfigError, match="20 samples do not give each of 21 workers one"):
        data.redistribute([first, second], world_size=7, num_workers=3)
    (tmp_path / "bad.pt").write_bytes(b"no")
    arguments = ["--world-size", "1", "--num-workers", "1"]
    for name, message in (("bad.pt", "holds no states of loaders"), ("no.pt", "cannot be read")):
        command = [str(tmp_path / name), str(tmp_path / "o.pt"), *arguments]
        assert main(["data", "redist", *command]) == 1
        assert message in capsys.readouterr().err


@without_processes()
def test_requests_that_cannot_be_served_are_refused():
    with pytest.raises(DataError, match="3 samples do not give each of 4 workers one"):
        loaders(3, 2, 2)
    with pytest.raises(ConfigError, match="batch_size=0"):
        loaders(9, 1, 1, batch_size=0)
    with pytest.raises(ConfigError, match="max_samples_per_sequence=0"):
        loaders(9, 1, 1, max_samples_per_sequence=0)
    (loader,) = loaders(9, 1, 1)
    other = data.WorkerConfig(rank=0, world_size=1, num_workers=2)
    with pytest.raises(ConfigError, match="different worker configs"):
        data.get_loader(loader.dataset, worker_config=other)
    with pytest.raises(TypeError, match="repeats has no length"):
        len(loader)
    assert loader.save_state_global(0) == [None]
    bad = data.SavableDataset(
        source=Numbers(9, bad=(1,)), batch_size=3, worker_config=other, repeat=False
    )
    with pytest.raises(DataError, match="sample 1 of Numbers"):
        list(data.get_savable_loader(bad))


def test_datasets_are_found_as_energon_finds_them(tmp_path):
    config = data.WorkerConfig(rank=0, world_size=1, num_workers=0)
    folder = numbered_shards(tmp_path / "coyo", 3, 4)
    (tmp_path / "a.yaml").write_text("splits:\n  train:\n    path: coyo\n  val: {path: coyo}\n")
    (tmp_path / "b.yaml").write_text("path: ./coyo\n")
    options = {"batch_size": 2, "worker_config": config}
    for path in (folder, tmp_path / "a.yaml", tmp_path / "b.yaml"):
        assert len(data.get_train_dataset(path, **options).source) == 12
    loader = data.get_loader(data.get_val_dataset(tmp_path / "a.yaml", **options))
    assert [batch["cls"].tolist() for batch in loader] == [[2 * i, 2 * i + 1] for i in range(6)]
    (folder / ".nv-meta").mkdir()
    (folder / ".nv-meta" / "split.yaml").write_text(
        "split_parts:\n  train: [shard-000.tar, shard-002.tar]\n  val: [shard-001.tar]\n"
    )
    assert len(data.get_train_dataset(folder, **options).source) == 8
    assert len(data.get_val_dataset(folder, **options).source) == 4
    with pytest.raises(DataError, match="has no shards of 'test'"):
        data.get_val_dataset(folder, split_part="test", **options)
    (tmp_path / "e.yaml").write_text("blend_epochized: [{repetitions: 2, path: coyo}]")
    for text, message in [
        ("splits: {train: {blend: []}}", "blends nothing for 'train'"),
        ("splits: {train: {blend: [{weight: 1}]}}", "has no path"),
        ("splits: {train: {blend: [{weight: 0, path: coyo}]}}", "weight of coyo .* is 0"),
        ("blend_epochized: [{repetitions: 1.5, path: coyo}]", "repetitions of coyo .* is 1.5"),
        ("blend: [{weight: 1, path: e.yaml}]", "by weights what e.yaml blends by repetitions"),
        ("path: c.yaml", "names itself"),
        ("{path: coyo, subset: {range: [0, 1]}}", "'subset' in .* is not served"),
        ("a: 1", "names no dataset for 'train'"),
        ("[", "is no YAML"),
        ("3", "describes no dataset"),
    ]:
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises((ConfigError, DataError), match=message):
            data.get_train_dataset(tmp_path / "c.yaml", **options)


def test_its_states_go_into_checkpoints(tmp_path):
    module = torch.nn.Linear(2, 2)
    (first,) = loaders(20, 1, 0)
    expected = read(loaders(20, 1, 0)[0], 6)
    found = read(first, 2)
    shardwright.save_checkpoint(tmp_path / "c", module, loader=first)
    shardwright.merge_checkpoint(tmp_path / "c", tmp_path / "merged")
    for saved in ("c", "merged"):
        (again,) = loaders(20, 1, 0)
        shardwright.load_checkpoint(tmp_path / saved, module, loader=again)
        assert found + read(again, 4) == expected
    pair = loaders(20, 2, 1, redistributes=True)
    with pytest.raises(DataError, match="states of 1 ranks for 2"):
        shardwright.load_checkpoint(tmp_path / "c", module, loader=loaders(20, 2, 1)[0])
    for loader in pair:
        shardwright.load_checkpoint(tmp_path / "c", module, loader=loader)
    rest = [number for loader in pair for number in dealt_to(loader)]
    assert sorted([*rest, *expected[0], *expected[1]]) == list(range(20))


def test_indexes_are_made_by_a_command(tmp_path, capsys):
    folder = numbered_shards(tmp_path / "s", 1, 4)
    shard = folder / "shard-000.tar"
    data.TarShards(folder)
    write_tar(shard, {"k": {"txt": b"x"}})
    with pytest.raises(DataError, match="has changed"):
        data.TarShards(folder)
    (folder / "a.jsonl").write_text("1\n2\n")
    assert main(["data", "index", str(folder)]) == 0
    assert "a.jsonl: 2 samples" in capsys.readouterr().out
    assert len(data.TarShards(folder)) == 1


@without_processes()
def test_blends_of_energons_files(tmp_path):
    numbered_shards(tmp_path / "coco", 2, 5)
    numbered_shards(tmp_path / "coyo", 2, 2, first=100)
    (tmp_path / "inner.yaml").write_text(
        "blend: [{weight: 2, path: coyo}, {weight: 2, path: coco}]"
    )
    for name, text, of_coco in [
        ("blend", "blend: [{weight: 3, path: coco}, {weight: 1, path: coyo}]", 30),
        ("nested", "blend: [{weight: 3, path: coco}, {weight: 1, path: inner.yaml}]", 35),
        ("old", "splits: {train: {datasets: [{path: coco}, {path: coyo, weight: 1.5}]}}", 16),
        ("epochs", "blend_epochized: [{path: coco}, {repetitions: 3, path: coyo}]", 18),
    ]:
        (tmp_path / f"{name}.yaml").write_text(text)

        def make(name=name):
            config = data.WorkerConfig(rank=0, world_size=1, num_workers=2)
            path = tmp_path / f"{name}.yaml"
            return data.get_savable_loader(
                data.get_train_dataset(
                    path, batch_size=2, worker_config=config, shuffle_buffer_size=9
                )
            )

        whole = [batch["cls"].tolist() for batch in steps_of(make(), 20)]
        first, again = make(), make()
        found = [batch["cls"].tolist() for batch in steps_of(first, 7)]
        again.restore_state_rank(first.save_state_rank())
        assert found + [batch["cls"].tolist() for batch in steps_of(again, 13)] == whole
        # Two workers, each within one sample of the proportion.
        assert abs(sum(n < 100 for batch in whole for n in batch) - of_coco) <= 2
    config = data.WorkerConfig(rank=0, world_size=1, num_workers=0)
    epoch = data.get_train_dataset(tmp_path / "epochs.yaml", batch_size=1, worker_config=config)
    numbers = [batch["cls"].item() for batch in steps_of(data.get_loader(epoch), 22)]
    assert sorted(numbers) == sorted([*range(10), *[*range(100, 104)] * 3])
    once = data.get_val_dataset(
        tmp_path / "epochs.yaml", batch_size=5, worker_config=config, split_part="val"
    )
    numbers = [number for batch in data.get_loader(once) for number in batch["cls"].tolist()]
    assert sorted(numbers) == [*range(10), *range(100, 104)]
    weights = {"batch_size": 1, "worker_config": config, "weights": [1, 1]}
    with pytest.raises(ConfigError, match="2 weights need a list of as many datasets"):
        data.SavableDataset(source=Numbers(4), **weights)
    with pytest.raises(ConfigError, match="a blend by weights repeats"):
        data.SavableDataset(source=[Numbers(4)] * 2, repeat=False, **weights)
    with pytest.raises(ConfigError, match="positive numbers"):
        data.SavableDataset(source=[Numbers(4)] * 2, **{**weights, "weights": [1, -1]})
    (validation,) = loaders(8, 1, 1, repeat=False)
    read(validation, 1)
    with pytest.raises(DataError, match="a dataset that does not repeat"):
        data.redistribute([validation.save_state_rank()], world_size=2, num_workers=1)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4))
def test_a_mix_has_each_sample_as_often_as_was_said_and_spread(sizes):
    mix = SourceMix([range(size) for size, _ in sizes], [n for _, n in sizes])
    places = [mix.place(index) for index in range(len(mix))]
    assert Counter(places) == {(s, i): n for s, (size, n) in enumerate(sizes) for i in range(size)}
    size, times = sizes[0]
    for count in range(len(mix)):
        early = sum(source == 0 for source, _ in places[:count])
        assert early == count * size * times // len(mix)
