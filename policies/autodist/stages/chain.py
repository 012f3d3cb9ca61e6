"""The model as a chain of blocks: where pipeline stages may begin, thinned to the places that are
worth considering.

A stage may begin before any operator that is not inside a recompute region. Good places are those
that little crosses: in a transformer, between blocks and between attention and feed-forward. So
places are taken in the order of what crosses them, until no block between two places takes more
than a small share of the whole, and slivers are joined with their neighbours.

Where layers may have to be computed again, they are the blocks (:func:`layer_blocks`), and each may
be computed again as a whole, or modules that it consists of (:func:`layer_parts`). Layers are
numbered modules; of a model that has none worth it, the largest modules that are at most half of
it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.passes.stages import from_nothing
from shardwright.compiler.plan.repeated_blocks import MIN_RUN, container_of, container_path
from shardwright.policies.stage_places import cut_traffic

MAX_BLOCKS = 192
"""More places than that are thinned out, the ones that most crosses first."""

SHARE = 0.25
"""A block takes at most that share of a stage of average length in a search, where places allow
it.
"""


def block_starts(
    graph: IRGraph,
    times: Sequence[float],
    num_stages: int,
    share: float = SHARE,
    traffic: Sequence[float] | None = None,
) -> list[int]:
    """Positions in ``graph.ops`` at which blocks begin; the first is 0.

    ``times``: seconds of every operator. ``num_stages``: the most stages that the blocks will be
    dealt into. ``share``: of a stage of average length, the most that a block takes where places
    allow it. ``traffic``: what crosses each place, where that is known.
    """
    if traffic is None:
        traffic = cut_traffic(graph, from_nothing(graph))
    places = sorted(
        (i for i in range(1, len(graph.ops)) if math.isfinite(traffic[i])),
        key=lambda i: (traffic[i], i),
    )
    # One operator stays whole.
    limit = max(share * sum(times) / max(1, num_stages), (1 + share) * max(times, default=0.0))
    low, high = 0, len(places)
    while low < high:  # the fewest places that keep every block below the limit
        middle = (low + high) // 2
        if max(_block_times(places[:middle], times)) <= limit:
            high = middle
        else:
            low = middle + 1
    low = min(max(low, num_stages - 1), len(places))
    # What costs the same is taken together.
    while low < len(places) and traffic[places[low]] == traffic[places[low - 1]]:
        low += 1
    chosen = sorted(places[:low])
    joined = _joined(chosen, traffic, times, max(MAX_BLOCKS, num_stages))
    return joined if len(joined) >= num_stages else [0, *sorted(places[: num_stages - 1])]


def layer_blocks(graph: IRGraph) -> tuple[list[int], dict[int, str]]:
    """``(starts, layers)``: blocks that begin where a layer begins or ends; and the module path of
    each block that is a whole layer and not part of a recompute region yet.
    """
    paths = _layers(graph)
    # A place with infinite traffic cannot be a boundary.
    traffic = cut_traffic(graph, from_nothing(graph))
    starts = _layer_starts(paths, traffic)
    layers = {}
    for block, (start, stop) in enumerate(zip(starts, [*starts[1:], len(paths)], strict=True)):
        path = paths[start]
        # All operators of the layer, and no others.
        whole = (
            path is not None
            and set(paths[start:stop]) == {path}
            and paths.count(path) == stop - start
        )
        if whole and all(op.region is None for op in graph.ops[start:stop]):
            assert path is not None
            layers[block] = path
    return starts, layers


def _layer_starts(paths: Sequence[str | None], traffic: Sequence[float]) -> list[int]:
    """The places where blocks begin: where the path changes, and a stage may begin."""
    return [
        i
        for i in range(len(paths))
        if i == 0 or (paths[i] != paths[i - 1] and math.isfinite(traffic[i]))
    ]


MAX_DEPTH = 3
"""How deep numbered modules inside one another are told apart: ``stages.0`` has
``stages.0.layers.1`` inside.
"""


def nested_starts(graph: IRGraph) -> list[list[int]]:
    """The chains of blocks that begin where a numbered module inside a layer begins or ends, the
    coarsest first.

    Chains of too many blocks are left out, and such that are no finer than the one before. In a T5
    they cut between attention and feed-forward (``encoder.block.0.layer.1``), in a ResNet between
    the residual blocks of a stage.
    """
    traffic = cut_traffic(graph, from_nothing(graph))
    found: list[list[int]] = []
    known = _layer_starts(_layers(graph), traffic)
    for depth in range(2, MAX_DEPTH + 1):
        # Paths down to the numbered module of this depth.
        paths = [_numbered_path(op.module_path, depth) for op in graph.ops]
        starts = _layer_starts(paths, traffic)
        if starts != known and len(starts) <= MAX_BLOCKS:
            found.append(starts)
        known = starts
    return found


def _numbered_path(module_path: str, depth: int) -> str:
    """The path up to its number ``depth``, or up to its last number, if it has fewer."""
    names = module_path.split(".")
    places = [index for index, name in enumerate(names) if name.isdecimal()][:depth]
    return ".".join(names[: places[-1] + 1]) if places else ""


@dataclass(frozen=True, slots=True)
class Part:
    """A module whose operators stand together: ``graph.ops[start:stop]``. ``pattern``: its path,
    ``*`` for a layer's number.
    """

    path: str
    pattern: str
    start: int
    stop: int


def layer_parts(
    graph: IRGraph, starts: Sequence[int], layers: Mapping[int, str]
) -> dict[int, tuple[Part, ...]]:
    """The layer itself and the modules inside it that may be computed again by themselves, for each
    block that is a layer.
    """
    found = {}
    for block, layer in layers.items():
        start, stop = (
            starts[block],
            starts[block + 1] if block + 1 < len(starts) else len(graph.ops),
        )
        # ``model.layers.3.mlp`` is written ``model.layers.*.mlp``: one part for all layers.
        stem, length = layer_pattern(layer), layer.count(".") + 1
        # The operators of each module of the layer.
        places: dict[str, list[int]] = {}
        for index in range(start, stop):
            names = graph.ops[index].module_path.split(".")
            for end in range(length, len(names) + 1):
                places.setdefault(".".join(names[:end]), []).append(index)
        # Only modules whose operators stand together can be computed again as one.
        together = {path: at for path, at in places.items() if at[-1] - at[0] + 1 == len(at)}
        parts = (
            Part(path, stem + path.removeprefix(layer), at[0], at[-1] + 1)
            for path, at in together.items()
        )
        found[block] = tuple(parts)
    return found


def layer_pattern(path: str) -> str:
    """``model.layers.*`` of ``model.layers.3``, for all layers of that list; a layer without a
    number stands for itself.
    """
    stem, _, name = path.rpartition(".")
    return f"{stem}.*".removeprefix(".") if name.isdecimal() else path


def _layers(graph: IRGraph) -> list[str | None]:
    """The path of each operator's layer: the outermost numbered module, ``model.layers.3`` of
    ``model.layers.3.mlp``; or the outermost of the large modules where no numbered one has more
    than a few operators of its own.
    """
    paths = [op.module_path for op in graph.ops]
    numbered = [_numbered(path) for path in paths]
    sizes = Counter(numbered)
    # A numbered module counts as a layer if it holds modules of its own, or a run of operators. A
    # single ``Linear`` in a ``Sequential`` is none.
    if any(
        own and (path != own or sizes[own] >= MIN_RUN)
        for path, own in zip(paths, numbered, strict=True)
    ):
        return numbered
    large = _large_modules(paths)
    found = ([path for path in _with_those_around(own) if path in large] for own in paths)
    return [around[0] if around else own for around, own in zip(found, numbered, strict=True)]


def _numbered(module_path: str) -> str | None:
    found = container_of(module_path)
    return None if found is None else container_path(found)


def _large_modules(paths: Sequence[str]) -> set[str]:
    """Modules of several operators, at most half of all, that stand together."""
    places: dict[str, list[int]] = {}
    for index, own in enumerate(paths):
        for path in _with_those_around(own):
            places.setdefault(path, []).append(index)
    return {
        path for path, at in places.items() if 1 < len(at) == at[-1] - at[0] + 1 <= len(paths) / 2
    }


def _with_those_around(module_path: str) -> list[str]:
    """``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``."""
    return list(itertools.accumulate(module_path.split("."), "{}.{}".format)) if module_path else []


def _block_times(places: Sequence[int], times: Sequence[float]) -> list[float]:
    edges = [0, *sorted(places), len(times)]
    sums = [0.0]
    for time in times:
        sums.append(sums[-1] + time)
    return [sums[stop] - sums[start] for start, stop in itertools.pairwise(edges)]


def _joined(
    places: list[int], traffic: Sequence[float], times: Sequence[float], most: int
) -> list[int]:
    """The places without slivers: of two places with next to nothing between them, the one stays
    that less crosses. ``most``: blocks that they may make.
    """
    # An eighth of a block of even size counts as next to nothing.
    sliver = sum(times) / (8 * most)
    kept: list[int] = []
    since = sum(times[: places[0]]) if places else 0.0
    for index, place in enumerate(places):
        stop = places[index + 1] if index + 1 < len(places) else len(times)
        if since > sliver or not kept:
            kept.append(place)
            since = 0.0
        elif traffic[place] < traffic[kept[-1]]:
            kept[-1] = place
        since += sum(times[place:stop])
    # Too many blocks: the shortest goes, one after the other.
    lengths = [sum(times[start:stop]) for start, stop in itertools.pairwise([0, *kept])]
    while len(kept) + 1 > most:
        shortest = min(range(len(kept)), key=lengths.__getitem__)
        del kept[shortest], lengths[shortest]
        # The next one begins where it began.
        if shortest < len(kept):
            start = kept[shortest - 1] if shortest else 0
            lengths[shortest] = sum(times[start : kept[shortest]])
    return [0, *kept]
