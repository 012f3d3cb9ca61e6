"""Intervals and bands found from marks, against the mask that the marks say."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.runtime.marks import (
    MOST_BANDS,
    Marks,
    bands_of,
    intervals,
    marks_of,
    remembered,
    seen,
)
from shardwright.runtime.visible_keys import Band, tiles

SIZES = st.integers(1, 12)


@st.composite
def documents(draw: st.DrawFn) -> Marks:
    """Packed documents with positions that start again, a window, and padding."""
    size, samples = draw(SIZES), draw(st.integers(1, 3))
    starts = torch.tensor(
        draw(st.lists(st.booleans(), min_size=samples * size, max_size=samples * size))
    ).view(samples, size)
    document = starts.long().cumsum(1)
    place = torch.arange(size).expand(samples, size)
    first = torch.where(starts, place, 0).cummax(1).values
    position = place - first
    counts = torch.tensor(
        draw(st.lists(st.booleans(), min_size=samples * size, max_size=samples * size))
    ).view(samples, size)
    window = draw(st.integers(1, 5))
    atoms = [
        (document, "eq", document),
        (position, "le", position),
        (place - window, "gt", place),
        (True, "eq", counts),
        (position // 2, "eq", position),  # marks that ascend nowhere
    ]
    chosen = [atom for atom in atoms if draw(st.booleans())] or atoms[:2]

    def of_query(x: object) -> object:
        return x[:, None, :, None] if isinstance(x, torch.Tensor) else x

    def of_key(x: object) -> object:
        return x[:, None, None, :] if isinstance(x, torch.Tensor) else x

    return marks_of(
        [of_query(q) for q, _, _ in chosen],
        [of_key(k) for _, _, k in chosen],
        [name for _, name, _ in chosen],
        None,
        (size, size),
        torch.device("cpu"),
    )


@given(documents())
def test_no_key_is_seen_beyond_the_interval_and_all_in_it_if_it_is_exact(marks: Marks) -> None:
    low, end, exact = intervals(marks)
    size = marks.num_keys
    place = torch.arange(size)
    for sample in range(len(exact)):
        mask = marks.mask((sample, 1), ((0, size),), ((0, size),))[0, 0]
        bounds = (place >= low[sample][:, None]) & (place < end[sample][:, None])
        assert not (mask & ~bounds).any()
        if exact[sample]:
            assert torch.equal(mask, bounds)
        assert torch.equal(marks.blind(sample), ~mask.any(1))


@given(documents(), st.booleans())
def test_tiles_of_what_is_seen_are_what_the_marks_say(marks: Marks, all_of_blind: bool) -> None:
    size = marks.num_keys
    samples = max(x.shape[0] for x in (*marks.queries, *marks.keys))
    found = seen(marks, samples, blind_see_all=all_of_blind)
    assert [i for s in found for i in range(s.samples[0], sum(s.samples))] == list(range(samples))
    for some in found:
        for sample in range(some.samples[0], sum(some.samples)):
            mask = marks.mask((sample, 1), ((0, size),), ((0, size),))[0, 0]
            wanted = mask | (marks.blind(sample)[:, None] & all_of_blind)
            covered = torch.zeros_like(mask)
            for tile in tiles(some.bands, (0, size), (0, size)):
                (q, rows), (k, columns) = tile.queries, tile.keys
                inside = torch.ones(rows, columns, dtype=torch.bool)
                if tile.kind == "causal":
                    inside = inside.tril()
                elif tile.kind == "flipped":
                    inside = inside.triu()
                elif tile.kind == "masked":
                    at, ends = torch.arange(columns), torch.tensor(tile.ends)
                    inside = (at >= ends[:, :1]) & (at < ends[:, 1:])
                if not some.exact and tile.kind != "flat":
                    inside = mask[q : q + rows, k : k + columns]
                covered[q : q + rows, k : k + columns] |= inside
            assert torch.equal(covered, wanted)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=12), st.booleans())
def test_bands_are_the_intervals(ends: list[tuple[int, int]], ascending: bool) -> None:
    low, end = (
        torch.tensor(part, dtype=torch.int64)
        for part in ([a for a, _ in ends], [b for _, b in ends])
    )
    if ascending:
        low, end = low.sort().values, end.sort().values
    found: list[tuple[int, int, int]] = []
    for band in bands_of(low, end):
        for passed in range(band.stop - band.start):
            low_here, end_here = (
                band.low + passed * band.low_step,
                band.end + passed * band.end_step,
            )
            found.append((band.start + passed, low_here, end_here))
    wanted = [(i, a, b) for i, (a, b) in enumerate(zip(low.tolist(), end.tolist(), strict=True))]
    assert found == [(i, a, b) for i, a, b in wanted if a < b]


def test_few_bands() -> None:
    """One for each document, two for a window; many are bounded by one and ask the marks."""
    place = torch.arange(1000)
    assert len(bands_of(place // 100 * 100, place + 1)) == 10
    assert bands_of((place - 9).clamp(min=0), place + 1) == (
        Band(0, 10, 0, 1, 0, 1),
        Band(10, 1000, 1, 11, 1, 1),
    )
    ragged = torch.where(place % 2 == 0, 0, 5)[:, None]
    marks = marks_of((ragged,), (place[None],), ("ge",), None, (1000, 1000), place.device)
    (found,) = seen(marks, 1)
    assert not found.exact and len(found.bands) == 1 < MOST_BANDS


def test_what_is_found_is_remembered_until_the_marks_change() -> None:
    mark, other = torch.arange(4), torch.arange(4)
    calls: list[int] = []

    def ask(*marks: torch.Tensor) -> int:
        return remembered(marks, ("how many",), lambda: calls.append(0) or len(calls))

    assert ask(mark, other) == ask(mark, other) == 1
    assert ask(mark, other.clone()) == 2
    other.add_(1)
    assert ask(mark, other) == 3
