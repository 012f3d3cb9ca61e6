"""Layouts and meshes remember their hash, in the process that worked it out."""

import copy
import pickle

import pytest

from shardwright.runtime.layout import Layout, Mesh


@pytest.mark.parametrize("value", [Layout.parse("[8/dp, 4] G(tp)"), Mesh.of({"dp": 2, "tp": 4})])
def test_a_hash_is_remembered_and_travels_nowhere(value):
    def reconstructed():
        return type(value)(*(getattr(value, name) for name in type(value).__dataclass_fields__))

    assert hash(value) == hash(value) == hash(reconstructed())
    # Texts hash to other numbers in another process: a hash from here would find nothing there.
    assert value._hash == hash(value)
    for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
        assert not hasattr(other, "_hash")
        assert other == value and hash(other) == hash(value)


def test_equal_layouts_are_one_key_and_others_are_not():
    first, same, other = map(Layout.parse, ("[8/dp, 4]", "[8/dp, 4]", "[8, 4/dp]"))
    assert {first: 1}[same] == 1
    assert other not in {first: 1}
