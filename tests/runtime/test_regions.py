"""Regions against brute force: every element of the whole has a number, pieces are what layouts
say.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import decode, dim_indices, encode

from shardwright.runtime.atoms import Atom
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.regions import Region, cells, copy_shared, num_covered, untiled

MESHES = [Mesh(), Mesh((("a", 2),)), Mesh((("a", 3),)), Mesh((("a", 2), ("b", 3)))]


@st.composite
def placed(draw, sizes):
    """A mesh and a layout of a tensor whose dims are products of the given sizes."""
    mesh = draw(st.sampled_from(MESHES))
    free = list(mesh.names)
    dims = []
    for factors in sizes:
        atoms = []
        for factor in factors:
            axes = [axis for axis in list(free) if draw(st.booleans())]
            free = [axis for axis in free if axis not in axes]
            cuts = draw(st.booleans()) and factor > 2
            atoms.append(Atom((factor - 2, 2) if cuts else (factor,), tuple(axes)))
        dims.append(tuple(atoms))
    return mesh, Layout(tuple(dims))


SIZES = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), max_size=3)


@st.composite
def two_layouts(draw):
    sizes = draw(SIZES)
    return draw(placed(sizes)), draw(placed(sizes))


@st.composite
def placed_with_range(draw):
    """Also a rank, and which elements of its flattened piece."""
    mesh, layout = draw(placed(draw(SIZES)))
    rank = draw(st.integers(0, mesh.size - 1))
    size = Region.of(layout, mesh, mesh.coords(rank)).num_elements
    start, stop = sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    return mesh, layout, rank, start, stop


@given(two_layouts())
@settings(max_examples=150, deadline=None)
def test_pieces_of_one_layout_become_those_of_another(case):
    (mesh, layout), (to_mesh, to_layout) = case
    whole = torch.arange(1.0, 1 + torch.Size(layout.shape).numel(), dtype=torch.float64).view(
        layout.shape
    )
    pieces = encode(whole, layout, mesh)
    results = []
    for to_coords in to_mesh.all_coords():
        region = Region.of(to_layout, to_mesh, to_coords)
        assert region.shape == to_layout.local_shape(to_mesh, to_coords)
        target = torch.zeros(region.shape, dtype=torch.float64)
        copied = 0
        for coords in layout.owners(mesh):
            source_region = Region.of(layout, mesh, coords)
            source = pieces[mesh.rank(coords)]
            count = copy_shared(target, region, source, source_region)
            assert count == num_covered([region], [source_region])
            copied += count
        assert copied == region.num_elements
        results.append(target)
    assert torch.equal(decode(results, to_layout, to_mesh), whole)


@given(two_layouts())
@settings(max_examples=50, deadline=None)
def test_runs_are_the_indices(case):
    (mesh, layout), _ = case
    for coords in mesh.all_coords():
        region = Region.from_json(Region.of(layout, mesh, coords).to_json())
        for dim, runs in enumerate(region.runs):
            assert [i for start, stop in runs for i in range(start, stop)] == dim_indices(
                layout, dim, mesh, coords
            )


def test_only_what_is_shared_is_written():
    target = torch.zeros(4)
    assert (
        copy_shared(
            target, Region((((0, 4),),)), torch.tensor([5.0, 6.0]), Region((((1, 2), (3, 4)),))
        )
        == 2
    )
    assert target.tolist() == [0, 5, 0, 6]
    assert copy_shared(target, Region((((0, 4),),)), torch.ones(2), Region((((4, 6),),))) == 0


def test_many_fragments_are_copied_by_index():
    whole = torch.arange(128.0).view(64, 2)
    even = Region((tuple((i, i + 1) for i in range(0, 64, 2)), ((0, 2),)))
    target = torch.zeros(32, 2, dtype=torch.float64)  # the dtype is converted
    assert copy_shared(target, even, whole, Region.whole(whole.shape)) == 64
    assert torch.equal(target, whole[::2].double())


def test_scalars_and_empty_tensors():
    target = torch.zeros(())
    assert copy_shared(target, Region(()), torch.tensor(3.0), Region(())) == 1 and target == 3
    assert (
        copy_shared(
            torch.zeros(0, 2), Region.whole((0, 2)), torch.zeros(0, 2), Region.whole((0, 2))
        )
        == 0
    )


@given(placed_with_range())
@settings(max_examples=100, deadline=None)
def test_parts_follow_each_other_in_the_flattened_piece(case):
    mesh, layout, coords, start, stop = case
    whole = torch.arange(torch.Size(layout.shape).numel()).view(layout.shape)
    region = Region.of(layout, mesh, mesh.coords(coords))
    piece = torch.empty(region.shape, dtype=torch.int64)
    copy_shared(piece, region, whole, Region.whole(layout.shape))
    found = []
    for part in region.parts(start, stop):
        assert part.num_elements and part.shape != (0,)
        values = torch.empty(part.shape, dtype=torch.int64)
        copy_shared(values, part, whole, Region.whole(layout.shape))
        found.append(values.reshape(-1))
    assert torch.equal(
        torch.cat([torch.empty(0, dtype=torch.int64), *found]), piece.reshape(-1)[start:stop]
    )
    assert len(found) <= max(1, 2 * piece.ndim - 1)


@st.composite
def some_regions(draw):
    """Any regions of one tensor, in runs, empty ones too."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    sizes = [st.sets(st.integers(0, size)).map(sorted) for size in shape]
    cut = st.tuples(*sizes).map(
        lambda found: Region(
            tuple(tuple(zip(cuts[::2], cuts[1::2], strict=False)) for cuts in found)
        )
    )
    return tuple(shape), draw(st.lists(cut, max_size=5))


def counts_of(shape, regions):
    """How many of the regions hold each element, by brute force."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for region in regions:
        copy = torch.zeros(shape, dtype=torch.int64)
        copy_shared(copy, Region.whole(shape), torch.ones(region.shape, dtype=torch.int64), region)
        counts += copy
    return counts


@given(some_regions(), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_what_regions_have_in_common(case, split):
    shape, regions = case
    counts = counts_of(shape, regions)
    assert sum(len(members) * count for members, count in cells(regions).items()) == counts.sum()
    assert sum(cells(regions).values()) == (counts > 0).sum()
    needed, given_ones = regions[:split], regions[split:]
    assert (
        num_covered(needed, given_ones)
        == ((counts_of(shape, needed) > 0) & (counts_of(shape, given_ones) > 0)).sum()
    )
    if (counts == 1).all():
        assert untiled(regions, shape) is None
    elif (counts == 0).any():
        assert (
            untiled(regions, shape)
            == f"{(counts == 0).sum()} of {counts.numel()} elements are in no piece"
        )
    else:
        assert (
            untiled(regions, shape)
            == f"{(counts > 1).sum()} of {counts.numel()} elements are in several pieces"
        )


@given(placed_with_range(), st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_of_all_ranks_tile_and_others_do_not(case, data):
    """Pieces of a layout, one of them in parts as ZeRO cuts it; then one is moved, left out, or
    there twice.
    """
    mesh, layout, rank, start, stop = case
    regions = list({Region.of(layout, mesh, coords) for coords in mesh.all_coords()})
    piece = Region.of(layout, mesh, mesh.coords(rank))
    if piece in regions:
        regions.remove(piece)
        bounds = (0, start), (start, stop), (stop, piece.num_elements)
        regions += [part for low, high in bounds for part in piece.parts(low, high)]
    assert untiled(regions, layout.shape) is None
    changed = data.draw(
        st.sampled_from([region for region in regions if region.num_elements] or [None])
    )
    if changed is None:
        return
    others = [region for region in regions if region is not changed]
    assert "are in no piece" in untiled(others, layout.shape)
    assert "are in several pieces" in untiled([*regions, changed], layout.shape)
    for dim, size in enumerate(layout.shape):
        moved = tuple((first + 1, last + 1) for first, last in changed.runs[dim])
        shifted = Region((*changed.runs[:dim], moved, *changed.runs[dim + 1 :]))
        problem = untiled([*others, shifted], layout.shape)
        assert problem is not None and (
            moved[-1][1] <= size or problem == f"a piece lies outside of {list(layout.shape)}"
        )


def test_many_pieces_are_compared_in_little_time():
    """A grid of 40 x 40 pieces and a list of 4,000 rows: pairs would be millions."""
    grid = [
        Region((((3 * i, 3 * i + 3),), ((5 * j, 5 * j + 5),))) for i in range(40) for j in range(40)
    ]
    assert (
        untiled(grid, (120, 200)) is None
        and untiled(grid[:-1], (120, 200)) == "15 of 24000 elements are in no piece"
    )
    rows = [Region((((i, i + 1),),)) for i in range(4000)]
    assert untiled(rows, (4000,)) is None and num_covered(rows, [Region.whole((4000,))]) == 4000
