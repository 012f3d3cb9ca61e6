"""What loaders of data cost, beside torch's DataLoader and Megatron-Energon's on the same samples.

    python benchmarks/data.py [--pairs 20] [--samples 20000]

Sides take turns, in CPU seconds of the process and its workers, from the start of the workers to
their end, so that other programs do not count. Every pass reads samples once, shuffled, in batches
of 100. It ends four batches before the end of the epoch: two workers have read these ahead by then.
Ours would read as far into the next epoch, and the sides would have read different numbers of
samples. Energon is measured where megatron-energon is installed; it decodes text as our side
does.

Also: the time to the first batch of 10 million samples, the size of a state, and the time that a
state takes.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import resource
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pairs import compare
from torch.utils.data import DataLoader

from shardwright import data

BATCH = 100
NUM_SHARDS = 8
READ_AHEAD = 4
"""Batches that two workers have read ahead."""


class Numbers:
    """The cheapest dataset there is: all the time is the loader's."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Vectors(Numbers):
    """Samples that take about 20 microseconds: a vector of 1,000 floats, scaled."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.values = torch.rand(64, 1000)

    def __getitem__(self, index: int) -> Any:
        return (self.values[index % 64] * 2 - 1).clamp(-1, 1)


def write_shards(folder: Path, num_samples: int) -> Path:
    """Shards of short texts."""
    folder.mkdir()
    each = num_samples // NUM_SHARDS
    for shard in range(NUM_SHARDS):
        with tarfile.open(folder / f"shard-{shard:03d}.tar", "w") as tar:
            for number in range(shard * each, (shard + 1) * each):
                text = f"{number} ".encode() * 60
                info = tarfile.TarInfo(f"s{number:07d}.txt")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))
    return folder


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def read(batches: Any, count: int) -> None:
    """Go through that many batches."""
    iterator = iter(batches)
    for _ in range(count):
        next(iterator)


def ours(dataset: Any, workers: int, count: int) -> Callable[[], None]:
    """A pass through our loader."""

    def run() -> None:
        loader = data.loader(dataset, global_batch=BATCH, shuffle=True, num_workers=workers)
        read(loader, count)
        loader.close()

    return run


def torchs(dataset: Any, workers: int, count: int) -> Callable[[], None]:
    """A pass through torch's loader."""

    def run() -> None:
        loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, drop_last=True)
        read(loader, count)

    return run


def energons(folder: Path, workers: int, count: int) -> Callable[[], None] | None:
    """A pass through Energon's loader; ``None`` where it is not installed."""
    try:
        from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset
        from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
    except ImportError:
        return None
    if not (folder / ".nv-meta").exists():
        from megatron.energon.epathlib import EPath

        names = sorted(path.name for path in folder.glob("*.tar"))
        WebdatasetPreparator.prepare_dataset(
            EPath(folder), names, split_parts_ratio=[("train", 1.0)], workers=1
        )
        (folder / ".nv-meta" / "dataset.yaml").write_text(
            "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\n"
            "field_map:\n  text: txt\n"
        )

    def run() -> None:
        config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
        dataset = get_train_dataset(
            folder,
            batch_size=BATCH,
            shuffle_buffer_size=100,
            max_samples_per_sequence=100,
            worker_config=config,
        )
        loader = get_savable_loader(dataset)
        read(loader, count)
        del loader
        gc.collect()

    return run


def mine_like_energon(shards: Any, workers: int, count: int) -> Callable[[], None]:
    """A pass through our loader with Energon's interface."""

    def run() -> None:
        config = data.WorkerConfig(rank=0, world_size=1, num_workers=workers)
        dataset = data.SavableDataset(
            source=shards,
            batch_size=BATCH,
            worker_config=config,
            shuffle_buffer_size=100,
            max_samples_per_sequence=100,
        )
        loader = data.get_savable_loader(dataset)
        read(loader, count)
        loader.close()

    return run


def small_numbers() -> None:
    """What needs no pairs: the start, the state, and what a state costs."""
    start = time.perf_counter()
    loader = data.loader(Numbers(10_000_000), global_batch=BATCH, shuffle=True)
    next(iter(loader))
    print(f"\nfirst batch of 10 million samples, shuffled: {time.perf_counter() - start:.4f} s")
    print(f"state: {len(json.dumps(loader.state_dict()))} bytes")
    start = time.perf_counter()
    for _ in range(1000):
        loader.load_state_dict(loader.state_dict())
    print(f"taking and loading a state: {time.perf_counter() - start:.4f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=20_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    count = arguments.samples // BATCH - READ_AHEAD
    print("| samples | workers | against | ours / theirs [95 % interval] |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = write_shards(Path(name) / "shards", arguments.samples)
        shards = data.TarShards(folder)
        cases: list[tuple[str, Any]] = [
            ("numbers", Numbers(arguments.samples)),
            ("vectors", Vectors(arguments.samples)),
            ("tar shards", shards),
        ]
        for title, dataset in cases:
            for workers in (0, 2):
                ratio = compare(
                    ours(dataset, workers, count),
                    torchs(dataset, workers, count),
                    num_pairs=arguments.pairs,
                    num_warmup=1,
                    clock=cpu_s,
                )
                print(f"| {title} | {workers} | torch | {ratio} |", flush=True)
        for workers in (0, 2):
            theirs = energons(folder, workers, count)
            if theirs is None:
                print(f"| tar shards | {workers} | Energon | megatron-energon is not installed |")
                continue
            for title, own in (
                ("tar shards", ours(shards, workers, count)),
                ("tar shards, its interface", mine_like_energon(shards, workers, count)),
            ):
                ratio = compare(own, theirs, num_pairs=arguments.pairs, num_warmup=1, clock=cpu_s)
                print(f"| {title} | {workers} | Energon | {ratio} |", flush=True)
    small_numbers()


if __name__ == "__main__":
    main()
