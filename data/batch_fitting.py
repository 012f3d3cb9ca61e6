"""What a rank's model takes of a batch: its own inputs, of the sizes it was compiled for, cut as
the plan says.

An example: a module was compiled for ``x: [8, 16]`` and ``y: [8]``, and the plan cuts dim 1 of
``x`` over two ranks. Of the batch ``{"x": [8, 16], "y": [8], "key": [...]}`` rank 0 gets
``{"x": [8, 8], "y": [8]}``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from shardwright.data.cuts import Cut, take
from shardwright.data.rank_roles import ALL_INPUTS, Role
from shardwright.runtime.arguments import MOST_LEVELS
from shardwright.runtime.errors import InputError
from shardwright.runtime.runs import piece
from shardwright.runtime.structure import flatten, map_leaves


def fit(batch: Any, role: Role, where: Callable[[], str]) -> Any:
    """The part of a collated batch that a rank's model takes. ``where``: which samples are in it,
    for messages.

    Raises :class:`InputError` for a batch that the model was not compiled for.
    """
    named = isinstance(batch, Mapping)
    if named and role.inputs is not None:
        wanted = {path.partition(".")[0] for path in role.inputs}
        # A batch that calls its entries otherwise is the user's own affair: the model will say so.
        if wanted & set(batch):
            batch = {name: value for name, value in batch.items() if name in wanted}
    if named and role.shapes:
        _check_shapes(batch, role, where)
    if not role.cuts:
        return batch
    if not named:
        only = next(iter(role.cuts))
        if len(role.cuts) == 1 and isinstance(batch, Tensor):
            return cut_all(batch, role.cuts[only], only)
        raise InputError(
            "a batch whose inputs are cut is a mapping of inputs by name",
            where=where(),
            why=f"it is a {type(batch).__name__}, and the plan cuts "
            + ", ".join(map(repr, role.cuts)),
            hint="let the dataset or collate= give dicts with the names of forward's arguments",
        )

    def cut(path: str, leaf: Any) -> Any:
        cuts = role.cuts.get(path, role.cuts.get(ALL_INPUTS, ()))
        # A cut of every input is meant for those that have the dim; one named by path must fit.
        fitting = cuts if path in role.cuts else [c for c in cuts if _has_dim(leaf, c)]
        return cut_all(leaf, fitting, path) if isinstance(leaf, Tensor) else leaf

    return {name: map_leaves(value, cut, name) for name, value in batch.items()}


def _has_dim(leaf: Any, cut: Cut) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > cut.dim


def cut_all(x: Tensor, cuts: Sequence[Cut], path: str) -> Tensor:
    """The part of ``x`` that all cuts leave."""
    for cut in cuts:
        x = take(x, cut, path)
    return x


def _check_shapes(batch: Mapping[str, Any], role: Role, where: Callable[[], str]) -> None:
    """Compare a batch with what the module was compiled for: its step would fail with less to tell
    than is known here.
    """
    index, parts = role.part
    for path, leaf in flatten(dict(batch)).items():
        compiled = role.shapes.get(path)
        if compiled is None or not isinstance(leaf, Tensor):
            continue
        expected = list(compiled)
        if parts > 1 and expected[0] is not None:
            expected[0] = piece(expected[0], parts, index)[1]
        fits = len(expected) == leaf.ndim and all(
            size in (None, found) for size, found in zip(expected, leaf.shape, strict=True)
        )
        if fits:
            continue
        wanted = f"[{', '.join('any' if size is None else str(size) for size in expected)}]"
        # Only the number of samples differs: then the global batch is what is wrong.
        is_count = len(expected) == leaf.ndim and list(leaf.shape)[1:] == expected[1:]
        raise InputError(
            f"the input {path!r} of a batch is {list(leaf.shape)}, and the module was compiled for "
            f"{wanted}",
            where=where(),
            why=f"a microbatch of this rank has {leaf.shape[0]} samples"
            if is_count
            else "the samples, or what collate= makes of them, have another shape",
            hint="choose global_batch= and microbatch= so that it has "
            f"{expected[0]}, or compile with ComputeConfig(dynamic_dims={{{path!r}: (0,)}})"
            if is_count
            else "give samples of that shape, or compile with an example of this one",
        )


def other_size(batch: Any, num_samples: int) -> str | None:
    """The shapes of what ``collate`` made, if none of its arrays has a row for each sample."""
    found = [(path, x) for path, x in arrays_in(batch, "batch") if len(x.shape) > 0]
    if not found or any(x.shape[0] == num_samples for _, x in found):
        return None
    return "it made " + ", ".join(f"{path} {list(x.shape)}" for path, x in found)


def arrays_in(value: Any, path: str, level: int = 0) -> Iterator[tuple[str, Any]]:
    """The tensors and numpy arrays in dicts, lists and tuples, with their paths; none where these
    are nested too deeply, or in themselves. ``level``: how deep ``value`` lies.
    """
    if isinstance(value, Tensor | np.ndarray):
        yield path, value
        return
    items: Iterable[tuple[Any, Any]] = ()
    if level > MOST_LEVELS:
        return
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        yield from arrays_in(item, f"{path}.{key}" if path else str(key), level + 1)


def shapes_in_words(sample: Any) -> str:
    """The shapes of a sample's tensors and arrays."""
    named = [f"{path or 'shape'} {list(x.shape)}" for path, x in arrays_in(sample, "")]
    return ", ".join(named) or type(sample).__name__
