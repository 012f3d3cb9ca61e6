"""``Layout.parse`` reads what ``str(layout)`` writes."""

import pytest

from shardwright.runtime.atoms import Atom
from shardwright.runtime.errors import LoadError
from shardwright.runtime.layout import Layout


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[4]",
        "[50257/tp, 768]",
        "[768, 3 * 12/tp * 64]",
        "[32+8+8/tp * 96, 7/a/b] P(dp) G(pp, units)",
        "[4, 1/tp] P(a, b)",
        "[] G(dp)",
        "[3 of 8/ep * 64/tp, 32] G(dp)",
    ],
)
def test_round_trip(text):
    assert str(Layout.parse(text)) == text


def test_atoms():
    layout = Layout.parse("[3*12/dp/tp * 64,5] P(a)")
    assert layout == Layout(
        ((Atom((3,)), Atom((12,), ("dp", "tp")), Atom((64,))), (Atom((5,)),)), ("a",)
    )
    assert layout.shape == (3 * 12 * 64, 5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4, 5",
        "[4,, 5]",
        "[4/]",
        "[n-1/tp]",
        "[4 5]",
        "[4] P(a b)",
        "[4] G()x",
        "[4] X(a)",
        "[+4]",
        "[3 of 8]",
        "[8 of 8/ep]",
    ],
)
def test_refuses(text):
    with pytest.raises(LoadError, match="does not parse"):
        Layout.parse(text)


@pytest.mark.parametrize("text", ["[4/tp, 4/tp]", "[4/tp] P(tp)", "[4] P(a) G(a)"])
def test_an_axis_occurs_once(text):
    with pytest.raises(LoadError, match="twice"):
        Layout.parse(text)
