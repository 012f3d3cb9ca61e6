"""What a rank takes of a dim that the plan cuts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.data.cuts import EvenCut, LayoutCut, even_piece, joined, take
from shardwright.runtime.errors import ArgumentError, ConfigError, InputError
from shardwright.runtime.layout import Layout, Mesh

MESH = Mesh((("cp", 2), ("tp", 2)))


@given(st.integers(0, 40), st.integers(1, 5), st.sampled_from(["contiguous", "zigzag"]))
def test_the_pieces_tile_the_dim_and_stay_in_order(length, size, kind):
    x = torch.arange(length)
    pieces = [take(x, EvenCut(0, index, size, kind), "x") for index in range(size)]
    assert sorted(torch.cat(pieces).tolist()) == x.tolist()
    assert all(piece.tolist() == sorted(piece.tolist()) for piece in pieces)


def test_zigzag_gives_each_rank_the_same_number_of_causal_pairs():
    cuts = [EvenCut(0, index, 4, "zigzag") for index in range(4)]
    assert cuts[0].runs(16) == ((0, 2), (14, 16)) and cuts[3].runs(16) == ((6, 10),)
    pairs = [sum(i + 1 for start, stop in cut.runs(16) for i in range(start, stop)) for cut in cuts]
    assert len(set(pairs)) == 1
    assert str(cuts[0]) == "dim 0 zigzag 0/4"


@pytest.mark.parametrize(
    ("text", "cp", "taken"),
    [
        ("[8/cp]", 1, [4, 5, 6, 7]),
        ("[2 * 4/cp]", 0, [0, 1, 4, 5]),
        ("[4+4/cp]", 1, [2, 3, 6, 7]),
    ],
)
def test_a_layout_of_the_plan_is_followed(text, cp, taken):
    (atoms,) = Layout.parse(text).dims
    cut = LayoutCut(0, atoms, MESH, (("cp", cp), ("tp", 0)))
    assert take(torch.arange(8), cut, "x").tolist() == taken


def test_a_mesh_that_deals_in_zigzag_is_followed_and_told():
    mesh = Mesh((("cp", 3),), turns=(("cp", 1),))
    (atoms,) = Layout.parse("[12/cp]").dims
    cuts = [LayoutCut(0, atoms, mesh, (("cp", index),)) for index in range(3)]
    taken = [take(torch.arange(12), cut, "x").tolist() for cut in cuts]
    assert taken == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert {cut.kind for cut in cuts} == {"zigzag"}
    assert all(even_piece(atoms, mesh, {"cp": index}) is None for index in range(3))
    (plain,) = Layout.parse("[8/cp]").dims
    assert LayoutCut(0, plain, MESH, (("cp", 1), ("tp", 0))).kind == "contiguous"


def test_a_dim_of_one_atom_may_vary_and_others_may_not():
    (single,) = Layout.parse("[8/cp]").dims
    (double,) = Layout.parse("[2 * 4/cp]").dims
    at = (("cp", 0), ("tp", 0))
    assert LayoutCut(0, single, MESH, at).runs(12) == ((0, 6),)
    with pytest.raises(InputError, match="12 elements\n.*cuts it as 2 \\* 4/cp, which are 8"):
        LayoutCut(0, double, MESH, at).runs(12)
    with pytest.raises(InputError, match=r"the input 'mask' has shape \[3\]"):
        take(torch.zeros(3), EvenCut(1, 0, 2), "mask")


def test_even_pieces_are_told_from_others():
    at = {"cp": 1, "tp": 0}

    def found(text):
        return even_piece(Layout.parse(text).dims[0], MESH, at)

    assert found("[8]") == (0, 1)
    assert found("[8/cp]") == (1, 2)
    assert found("[8/cp/tp]") is found("[2 * 4/cp]") is found("[4+4/cp]") is None


def test_runs_are_joined():
    assert joined(((4, 6), (0, 2), (2, 4), (7, 7))) == ((0, 6),)


@pytest.mark.parametrize("arguments", [(0, 2, 2), (-1, 0, 2), (0, -1, 2), (0, 0, 2, "striped")])
def test_wrong_cuts_are_refused(arguments):
    with pytest.raises((ArgumentError, ConfigError)):
        EvenCut(*arguments)
