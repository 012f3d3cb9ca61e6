"""The samples of a step: what a rank was given of them, checked, and compared with what the other
ranks were given.

A rank must be given what its stages read. Of the rest it may be given anything that the model
takes, or ``None``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright.runtime.errors import InputError
from shardwright.runtime.module.end2end import arguments_of
from shardwright.runtime.module.inputs import InputTable, TensorSpec
from shardwright.runtime.pipeline.executor import Leaves
from shardwright.runtime.pipeline.sample_sizes import Sizes
from shardwright.runtime.ranks.checksum import checksum
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.failures import concerning
from shardwright.runtime.structure import flatten

UNKNOWN = -1
"""The size of a sample on a rank that was not given it."""


class SampleTable:
    """The samples that a class was compiled for.

    ``owner``: the name of the class, for messages. ``inputs``: the leaves of one sample, as a
    generated class lists them;
    ``arguments``: those that a sample gives; ``sizes``: the names of those that vary between
    samples.
    """

    def __init__(
        self, owner: str, inputs: Mapping[str, Any], arguments: Sequence[str], sizes: Sequence[str]
    ) -> None:
        self._owner = owner
        self._inputs = inputs
        self._arguments = arguments
        self._sizes = sizes
        self._leaves = InputTable(owner, inputs).leaves

    def check(self, samples: Sequence[Any], needed: set[str], method: str) -> list[Leaves]:
        """The tensors of each sample. ``needed``: the paths that the stages of this rank read.
        ``method``: what was called.

        Raises :class:`InputError` where one of these lacks, or where a sample is not what the class
        was compiled for.
        """
        checked = []
        for sample in samples:
            arguments = (
                {} if sample is None else arguments_of(sample, self._arguments, self._inputs)
            )
            present = flatten(arguments)
            # Checked is what the rank needs, and what it was given besides.
            table = {
                path: expected
                for path, expected in self._inputs.items()
                if path in needed or path in present
            }
            checked.append(InputTable(self._owner, table, method).check(arguments, {}))
        return checked

    def compare(
        self,
        samples: Sequence[Leaves],
        unit: Communicator,
        num_units: int,
        device: torch.device,
        method: str,
    ) -> None:
        """Refuse samples of which ranks of a unit were given different versions. Collective over
        ``unit``.
        """
        paths = list(self._inputs)
        # Whether there is one, and its sum.
        mine = torch.zeros(len(samples), len(paths), 2, dtype=torch.int64, device=device)
        for number, tensors in enumerate(samples):
            for path, x in tensors.items():
                mine[number, paths.index(path), 0] = 1
                mine[number, paths.index(path), 1] = checksum(x)
        everyone: list[list[list[list[int]]]] = []
        if unit.size > 1:
            with concerning("the samples of a step, of which ranks compare checksums"):
                everyone = [found.tolist() for found in unit.all_gather(mine, phase="setup")]
        # Of each leaf, the ranks that were given it must have one checksum.
        for (number, _), (index, path) in itertools.product(enumerate(samples), enumerate(paths)):
            alike: dict[int, list[int]] = {}
            for rank, found in zip(unit.ranks, everyone, strict=False):
                is_given, total = found[number][index]
                if is_given:
                    alike.setdefault(total, []).append(rank)
            if len(alike) > 1:
                raise InputError(
                    f"{self._owner}.{method}: {path!r} of sample {number} differs between "
                    "the ranks of a unit",
                    why="these ranks agree with each other: "
                    + "; ".join(", ".join(map(str, r)) for r in alike.values()),
                    hint=f"give the {unit.size} ranks of a unit the same samples: shard the data "
                    "over "
                    f"{num_units} unit(s), by rank // {unit.size}",
                )

    def agreed_sizes(
        self, samples: Sequence[Leaves], unit: Communicator, device: torch.device, method: str
    ) -> list[Sizes]:
        """The sizes of each sample, as ranks know them that were given it. Collective over ``unit``
        where sizes vary.

        Raises :class:`InputError` where ranks were given different ones.
        """
        if not self._sizes:
            return [()] * len(samples)
        # A rank that was not given a sample knows nothing of its sizes.
        mine = torch.full((len(samples), len(self._sizes)), UNKNOWN, device=device)
        for number, tensors in enumerate(samples):
            for path, x in tensors.items():
                expected = self._leaves[path]
                assert isinstance(expected, TensorSpec), f"{path} is a literal"
                for size, name in zip(x.shape, expected.shape, strict=True):
                    if isinstance(name, str):
                        mine[number, self._sizes.index(name)] = size
        # [ranks, samples, sizes].
        everyone = mine[None]
        if unit.size > 1:
            with concerning("the sizes of the samples of a step"):
                everyone = torch.stack(unit.all_gather(mine))
        agreed = everyone.amax(0)
        differs = ((everyone != agreed) & (everyone != UNKNOWN)).nonzero().tolist()
        for rank, number, index in differs[:1]:
            other = int(everyone[:, number, index].argmax())
            raise InputError(
                f"{self._owner}.{method}: {self._sizes[index]} of sample {number} differs "
                "between the ranks of a unit",
                why=f"it is {everyone[rank, number, index]} on rank {rank} and "
                f"{agreed[number, index]} on rank {other}",
                hint=f"give the {unit.size} ranks of a unit the same samples",
            )
        return [tuple(sizes) for sizes in agreed.tolist()]
