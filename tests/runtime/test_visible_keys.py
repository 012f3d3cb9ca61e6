"""Bands and tiles against masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwright.runtime import visible_keys
from shardwright.runtime.runs import dealt, joined
from shardwright.runtime.visible_keys import (
    Band,
    Bands,
    Tile,
    all_keys,
    earlier_keys,
    joined_tiles,
    keys_seen,
    local_bands,
    pairs,
    tiles,
)


def mask_of(bands: Bands, num_queries: int, num_keys: int) -> Tensor:
    seen = torch.zeros(num_queries, num_keys, dtype=torch.int)
    for band in bands:
        for passed, query in enumerate(range(band.start, band.stop)):
            low, end = band.low + passed * band.low_step, band.end + passed * band.end_step
            seen[query, max(low, 0) : max(end, 0)] = 1
    return seen


def drawn(tile: Tile) -> Tensor:
    """What a kernel would see of a tile."""
    rows, columns = tile.queries[1], tile.keys[1]
    if tile.kind == "full":
        return torch.ones(rows, columns, dtype=torch.int)
    if tile.kind == "masked":
        at, ends = torch.arange(columns), torch.tensor(tile.ends)
        return ((at >= ends[:, :1]) & (at < ends[:, 1:])).int()
    assert rows == columns
    square = torch.ones(rows, rows, dtype=torch.int)
    return square.tril() if tile.kind == "causal" else square.triu()


@pytest.mark.parametrize("num_queries", [0, 1, 4, 7])
@pytest.mark.parametrize("num_keys", [0, 1, 4, 7])
def test_earlier_keys(num_queries: int, num_keys: int) -> None:
    causal = torch.ones(num_queries, num_keys, dtype=torch.int).tril()
    for window in (None, 1, 2, 3, 5, 9):
        expected = causal if window is None else causal.triu(1 - window)
        found = mask_of(earlier_keys(num_queries, num_keys, window), num_queries, num_keys)
        assert torch.equal(found, expected), window


@st.composite
def attentions(draw: st.DrawFn) -> tuple[Bands, int, int]:
    num_queries, num_keys = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    kind = draw(st.sampled_from(("all", "causal", "window", "any")))
    if kind == "all":
        return all_keys(num_queries, num_keys), num_queries, num_keys
    if kind != "any":
        window = draw(st.integers(1, 9)) if kind == "window" else None
        return earlier_keys(num_queries, num_keys, window), num_queries, num_keys
    bands, start = [], 0
    while start < num_queries:
        low = draw(st.integers(0, num_keys - 1))
        end = draw(st.integers(low, num_keys))  # some see nothing at first
        low_step, end_step = draw(st.integers(0, 1)), draw(st.integers(0, 1))
        most = min(num_keys - end + 1 if end_step else 99, num_keys - low if low_step else 99)
        stop = min(num_queries, start + draw(st.integers(1, max(1, most))))
        bands.append(Band(start, stop, low, end, low_step, end_step))
        start = stop
    return tuple(bands), num_queries, num_keys


@given(attentions(), st.integers(0, 20), st.integers(0, 20), st.sampled_from((4, 64)))
def test_tiles_of_runs_are_the_mask(
    attention: tuple[Bands, int, int], cut: int, key_cut: int, narrow: int
) -> None:
    bands, num_queries, num_keys = attention
    expected = mask_of(bands, num_queries, num_keys)
    found = torch.zeros_like(expected)
    cut, key_cut = min(cut, num_queries), min(key_cut, num_keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visible_keys, "NARROW", narrow)
        for queries in ((0, cut), (cut, num_queries - cut)):
            for keys in ((0, key_cut), (key_cut, num_keys - key_cut)):
                for tile in tiles(bands, queries, keys):
                    seen = drawn(tile)
                    # Kernels disagree about a query that sees none.
                    assert bool(seen.any(-1).all())
                    (row, rows), (column, columns) = tile.queries, tile.keys
                    found[row : row + rows, column : column + columns] += seen
    assert torch.equal(found, expected)
    assert pairs(bands, [(0, num_queries)]) == int(expected.sum())


@given(
    attentions(),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(0, 3),
    st.sampled_from((0, 4, 64)),
)
def test_tiles_of_pieces_are_the_mask(
    attention: tuple[Bands, int, int], size: int, turns: int, other: int, call_pairs: int
) -> None:
    """Queries of one rank with keys of another, counted as they lie there."""
    bands, num_queries, num_keys = attention
    queries = joined(dealt(num_queries, size, 0, turns=turns))
    keys = joined(dealt(num_keys, size, other % size, turns=turns))
    rows, columns = (
        [i for start, count in runs for i in range(start, start + count)]
        for runs in (queries, keys)
    )
    expected = mask_of(bands, num_queries, num_keys)[rows][:, columns]
    found = torch.zeros_like(expected)
    for tile in joined_tiles(local_bands(bands, queries, keys), len(columns), call_pairs):
        (row, count), (column, width) = tile.queries, tile.keys
        found[row : row + count, column : column + width] += drawn(tile)
    assert torch.equal(found, expected)
    assert pairs(bands, queries) == int(mask_of(bands, num_queries, num_keys)[rows].sum())
    assert keys_seen(bands, queries, keys) == int(expected.any(0).sum())


def test_bands_of_pieces_are_joined() -> None:
    """A rank's own positions are causal as they lie there, however they were dealt."""
    own = joined(dealt(64, 4, 1, turns=4))
    causal = earlier_keys(64, 64)
    assert len(own) == 8
    assert local_bands(causal, own, own) == (Band(0, 16, 0, 1, 0, 1),)
    theirs = joined(dealt(64, 4, 2, turns=4))
    assert len(local_bands(causal, own, theirs)) == 4
    # Where a call costs much, they are one tile.
    assert [tile.kind for tile in joined_tiles(local_bands(causal, own, theirs), 16, 999)] == [
        "masked"
    ]


def test_no_query_at_a_border_is_a_tile_of_its_own() -> None:
    """An early and a late piece of causal attention, with all keys, are three tiles; pieces of a
    window begin and end with more than a query, too.
    """
    bands = earlier_keys(16, 16)
    found = joined_tiles(local_bands(bands, ((0, 4), (12, 4)), ((0, 16),)), 16)
    assert [(tile.queries, tile.keys, tile.kind) for tile in found] == [
        ((0, 4), (0, 4), "causal"),
        ((4, 4), (0, 12), "full"),
        ((4, 4), (12, 4), "causal"),
    ]
    # Keys 4 to 11 of a window of 8: the first key moves on from the fifth query that sees them.
    inside = tiles((Band(0, 16, -3, 5, 1, 1),), (0, 8), (4, 8))
    assert all(tile.queries[1] > 1 for tile in inside)
