"""Further programs of a module: their orders, and the files of each, made by all ranks together.

A program for other arguments has a folder of its own. What it stores, it stores as the first one
does (``Order.like``), since it will run on that one's tensors.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwright.compiler.trace.values.known_inputs import holds_sizes
from shardwright.frontend.files.broadcast_files import share_files
from shardwright.frontend.files.job import Job, exchange_about
from shardwright.frontend.files.module_files import Order, generate
from shardwright.runtime.config import BroadcastGenFilesStrategy, ReuseType
from shardwright.runtime.errors import ConfigError, LoadError, brief
from shardwright.runtime.loader import load_class
from shardwright.runtime.manifest import MANIFEST_FILE, read_file, sha256
from shardwright.runtime.module.inputs import compiled_in
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.structure import flatten
from shardwright.runtime.told import told


def make_files(job: Job, order: Order, strategy: BroadcastGenFilesStrategy) -> str:
    """The fingerprint of the files that rank 0 has made, or found made, and shared."""
    made = job.first_rank_does(lambda: _fingerprint(generate(order).directory))
    share_files(job, order.directory, strategy)
    return made


def make_program(order: Order, strategy: BroadcastGenFilesStrategy) -> type[ParallelModule]:
    """The class of this rank for a further program, which a call has asked for. Collective."""
    title = f"compiling {order.source.cls.__name__} for another call"
    with Job(title, exchange_about(title)) as job:
        job.agree(program=order.directory.name)
        made = make_files(job, order, strategy)
        return job.every_rank_does(lambda: load_made(order.directory, made))


def order_like(order: Order, given: Mapping[str, Any], read: Collection[str]) -> Order:
    """The order of a program on the tensors of another one, in a folder inside that one's.
    ``read``: the inputs whose values the programs made so far have compiled in.

    The folder's name is the digest of what the program is made for: the arguments that are no
    tensors, the forms of the others, and the values of those that may decide sizes.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(
            "more_dummy_args lists the arguments of forward, by name", why=f"it has {brief(given)}"
        )
    leaves, known = flatten(dict(given)), {*order.config.constants, *read}

    def fact(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return list(leaf.shape), str(leaf.dtype), _values(path, leaf, known)
        return told(leaf)

    # What tells kinds of calls apart: shapes, dtypes, and values that are compiled in.
    facts = [(path, fact(path, leaf)) for path, leaf in sorted(leaves.items())]
    constants = {
        path: leaves[path].tolist() if isinstance(leaves[path], Tensor) else values
        for path, values in order.config.constants.items()
        if path in leaves
    }
    return replace(
        order,
        dummy_args=given,
        config=replace(order.config, constants=constants),
        directory=order.directory / "programs" / sha256(json.dumps(facts).encode())[:16],
        # The folder is named by what it is made for. Where the model has changed it is made anew.
        reuse=ReuseType.MOO if order.reuse is ReuseType.MATCH else order.reuse,
        dump=None,
        like=order.directory,
    )


def _values(path: str, leaf: Tensor, known: Collection[str]) -> Any:
    """The values of an input where they may decide sizes."""
    return leaf.tolist() if path in known or holds_sizes(leaf) else None


def constants_of(directory: Path) -> list[str]:
    """The inputs whose values the program in a directory has compiled in."""
    return compiled_in(load_class(directory, rank=0).inputs)


def _fingerprint(directory: Path) -> str:
    """The digest of a manifest, which holds the digests of all other files."""
    return sha256(read_file(directory, MANIFEST_FILE))


def load_made(directory: Path, made: str) -> type[ParallelModule]:
    """The class of this rank, from files that must be those rank 0 made or found, by their
    fingerprint.
    """
    loaded = load_class(directory)
    if _fingerprint(directory) != made:
        raise LoadError(
            f"{directory} on this node is not what rank 0 has there",
            why="the manifests differ: the model, the plan, or the initial weights are others",
            hint="share the directory between nodes, copy it, or pass broadcast_strategy='all'",
        )
    return loaded
