"""Small datasets for tests of loaders; also for processes that tests start."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from shardwright import data


class Numbers:
    """``{"x": i}`` for each index; ``bad`` ones raise."""

    def __init__(self, size: int, bad: tuple[int, ...] = ()) -> None:
        self.size = size
        self.bad = bad

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, int]:
        if index in self.bad:
            raise ValueError("no such picture")
        return {"x": index}

    def key(self, index: int) -> str:
        return f"picture-{index}"


class Noisy(Numbers):
    """Numbers that are augmented from the global generators."""

    def __getitem__(self, index: int) -> Any:
        return [index, torch.rand(()).item(), float(np.random.rand()), random.random()]


class Documents:
    """Token lists of given lengths; token ``i`` of document ``d`` is ``100 d + i``."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = 100 * index + torch.arange(self.lengths[index])
        return {"input_ids": tokens, "labels": tokens + 1}


class Counting(IterableDataset[int]):
    """A stream of ``size`` numbers from ``first`` on."""

    def __init__(self, size: int, first: int = 0) -> None:
        self.size = size
        self.first = first
        self.epoch = 0
        self.num_read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for number in range(self.size):
            self.num_read += 1
            yield 1000 * self.epoch + self.first + number


class CountingWithStates(Counting):
    """Numbers in a stream that has states."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        first, self.at = self.at, 0
        for number in range(first, self.size):
            self.num_read += 1
            self.at = number + 1
            yield 1000 * self.epoch + number
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def augmented(sample: dict[str, int], generator: torch.Generator) -> list[float]:
    """A sample with something drawn for it."""
    return [sample["x"], torch.rand((), generator=generator).item()]


def shortened(samples: list[Any]) -> Tensor:
    """A collate function that loses a sample."""
    return torch.zeros(len(samples) - 1, 2)


def ids_of(batch: Any) -> list[int]:
    """The numbers in what one rank was given in a step."""
    found: list[int] = []
    for part in batch if isinstance(batch, list) else [batch]:
        if part is not None:
            found += (part["x"] if isinstance(part, dict) else part).reshape(-1).tolist()
    return found


def on_replicas(dataset: Any, num_replicas: int, **options: Any) -> list[Any]:
    """The loaders of all replicas, each with a dataset of its own."""
    return [
        data.loader(
            deepcopy(dataset), data.roles(replica=replica, num_replicas=num_replicas), **options
        )
        for replica in range(num_replicas)
    ]


def global_batches(loaders: list[Any], num_steps: int) -> list[list[int]]:
    """What all ranks together are given in each of the next steps, over the ends of epochs."""
    by_rank = [[ids_of(batch) for batch in steps_of(loader, num_steps)] for loader in loaders]
    return [list(chain.from_iterable(parts)) for parts in zip(*by_rank, strict=True)]


def steps_of(loader: Any, num_steps: int) -> Iterator[Any]:
    """The next steps of one rank, over the ends of epochs."""
    given = 0
    while given < num_steps:
        for batch in loader:
            given += 1
            yield batch
            if given == num_steps:
                break
