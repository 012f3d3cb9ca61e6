"""States of Megatron-Energon's own loaders in our checkpoints; a stand-in where it is not
installed.
"""

import dataclasses
import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import shardwright
from shardwright.runtime.checkpoint.energon_values import from_plain, to_plain
from shardwright.runtime.errors import CheckpointError


@dataclasses.dataclass
class SliceState:
    index: int
    current: tuple[int, ...]


class FlexState(dict):
    pass


@pytest.fixture
def energon(monkeypatch):
    package, module = ModuleType("megatron"), ModuleType("megatron.energon")
    for cls in (SliceState, FlexState):
        monkeypatch.setattr(cls, "__module__", "megatron.energon")
        setattr(module, cls.__name__, cls)
    module.run = print
    monkeypatch.setitem(sys.modules, "megatron", package)
    monkeypatch.setitem(sys.modules, "megatron.energon", module)
    return module


class Loader:
    """The part of their loader that is used."""

    def __init__(self, state=None):
        self.worker_config = SimpleNamespace(rank=0, world_size=1)
        self.state = state

    def save_state_rank(self):
        return self.state

    def restore_state_global(self, states):
        (self.state,) = states

    restore_state_rank = None


def test_their_states_go_through_a_checkpoint(energon, tmp_path):
    state = FlexState(slices=[SliceState(3, (1, 2)), None], rng=b"\x00\xff", epoch=4, own={1: "a"})
    assert from_plain(json.loads(json.dumps(to_plain({"s": [state["rng"], 5]})))) == {
        "s": [b"\x00\xff", 5]
    }
    # Their state without workers has that of numpy's generator.
    keys = np.arange(6, dtype=np.uint32).reshape(2, 3)
    (read,) = from_plain(json.loads(json.dumps(to_plain([keys.T]))))
    assert read.dtype == keys.dtype and np.array_equal(read, keys.T)
    module = torch.nn.Linear(1, 1)
    shardwright.save_checkpoint(tmp_path, module, loader=Loader(state))
    again = Loader()
    shardwright.load_checkpoint(tmp_path, module, loader=again)
    assert again.state == state and type(again.state) is FlexState
    assert type(again.state["slices"][0]) is SliceState and again.state["own"] == {1: "a"}


@pytest.mark.parametrize(
    "name", ["os:system", "megatron.energon:run", "megatron.energon:Other", "megatron.energonx:A"]
)
def test_nothing_else_is_made(energon, name):
    with pytest.raises(CheckpointError, match="is no state of a loader of megatron-energon"):
        from_plain({"energon object": [name, {}]})


def test_where_it_is_not_installed_it_says_so():
    with pytest.raises(CheckpointError, match="not installed|is no state"):
        from_plain({"energon mapping": ["megatron.energon.nothing:A", {}]})
