"""Checkpoints of torch.distributed.checkpoint: read under any plan, and written."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import checkpoints as c
import pytest
import torch
import torch.distributed.checkpoint as dcp
from spawn import run_processes
from torch import nn

import shardwright
from shardwright.__main__ import main
from shardwright.runtime.checkpoint.inert_pickle import read_pickle
from shardwright.runtime.errors import CheckpointError

NAME = "llama-tied"
TP = ("tp+zero1", 2, 4)


def load_under(plan: c.Plan, folder: Path) -> Any:
    """What all ranks together have loaded."""

    def load() -> Any:
        trainer = c.trainer(NAME, plan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = shardwright.load_checkpoint(folder, trainer.module, trainer.optimizer).step
        return trainer.module.state_dict(), trainer.optimizer.state_dict(), step

    modules, optimizers, steps = zip(*c.on(NAME, plan, load), strict=True)
    return *shardwright.merge_state_dicts(list(modules), list(optimizers)), steps[0]


def by_number(optimizer_state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """State by names of parameters, as by number."""
    found = {}
    for number, name in enumerate(names):
        state = optimizer_state["state"][name]
        found.update({f"{number}.{key}": value for key, value in state.items()})
    return found


def numbered(optimizer_state: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{number}.{key}": value
        for number, state in optimizer_state["state"].items()
        for key, value in state.items()
    }


@pytest.mark.slow
def test_fsdp_loads_under_a_plan_and_back(tmp_path: Path) -> None:
    """What FSDP2 saved loads under other plans, and what was trained there loads into FSDP2."""
    (module, optimizer), *_ = run_processes(2, "fsdp_jobs:save", NAME, str(tmp_path))
    names = [name for name, _ in c.model_of(NAME).named_parameters()]
    for plan, saved in ((TP, "nested"), (("data+zero3", 2, 4), "flat")):
        merged, state, step = load_under(plan, tmp_path / saved)
        c.assert_same(dict(merged), module)
        c.assert_same(numbered(state), by_number(optimizer, names))
        assert step == (2 if saved == "nested" else None)
        assert state["param_groups"][0]["weight_decay"] == c.ADAMW["weight_decay"]

    def train() -> None:
        trainer = c.trainer(NAME, TP)
        trainer.steps(range(3))
        shardwright.save_checkpoint(tmp_path / "ours", trainer.module, trainer.optimizer, step=3)

    c.on(NAME, TP, train)
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    whole = shardwright.read_checkpoint(tmp_path / "ours")
    (module, optimizer, step), *_ = run_processes(2, "fsdp_jobs:load", NAME, str(tmp_path / "dcp"))
    c.assert_same(module, dict(whole.module))
    c.assert_same(by_number(optimizer, names), numbered(whole.optimizer))
    assert step == 3


class Tied(nn.Module):
    """A vocabulary's table whose weight is that of the head, too, as GPT-2 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight
        # Tensors without elements lie nowhere: that makes them no tied ones.
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("nothing", torch.zeros(0, 3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


def test_tied_weights_there_and_back(tmp_path: Path) -> None:
    """What we wrote of a model with tied weights is read with all names, and loads."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), **c.ADAMW)
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    shardwright.save_checkpoint(tmp_path / "ours", model, optimizer, step=1)
    ours = shardwright.read_checkpoint(tmp_path / "ours")
    there = ["convert", str(tmp_path / "ours"), str(tmp_path / "dcp"), "--to", "dcp"]
    assert main(there) == 0
    for form in ("shardwright", "full"):
        assert main(["convert", str(tmp_path / "dcp"), str(tmp_path / form), "--to", form]) == 0
        back = shardwright.read_checkpoint(tmp_path / form)
        assert back.module.keys() == model.state_dict().keys()
        c.assert_same(dict(back.module), dict(ours.module))
        assert back.module["head.weight"] is back.module["table.weight"]
        c.assert_same(numbered(back.optimizer), numbered(ours.optimizer))
    other = Tied()
    others = torch.optim.AdamW(other.parameters(), **c.ADAMW)
    assert shardwright.load_checkpoint(tmp_path / "dcp", other, others).step == 1
    c.assert_same(other.state_dict(), model.state_dict())
    assert other.head.weight is other.table.weight


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    model[1].weight.data = torch.randn(5, 3).T  # not contiguous
    optimizer = torch.optim.AdamW(model.parameters(), **c.ADAMW)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_there_and_back(tmp_path: Path) -> None:
    """Nothing of a checkpoint is lost on the way to DCP and back."""
    model, optimizer = small()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    states = {"extra": {"name": ("x", torch.arange(3))}, "step": 4, "scheduler": scheduler}
    shardwright.save_checkpoint(tmp_path / "ours", model, optimizer, **states)
    size = ["--to", "dcp", "--max-file-size", "1KB"]
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "dcp"), *size]) == 0
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 1
    assert main(["convert", str(tmp_path / "dcp"), str(tmp_path / "back"), "--to", "full"]) == 0
    ours, back = (shardwright.read_checkpoint(tmp_path / name) for name in ("ours", "back"))
    c.assert_same(dict(back.module), dict(ours.module))
    c.assert_same(numbered(back.optimizer), numbered(ours.optimizer))
    assert back.optimizer["param_groups"] == ours.optimizer["param_groups"]
    assert (back.step, back.scheduler) == (ours.step, ours.scheduler)
    assert torch.equal(back.extra["name"][1], torch.arange(3))


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    model, optimizer = small()
    whole = {"model": model, "optimizer": optimizer, "loader": {"position": 3}}
    dcp.save(whole, checkpoint_id=tmp_path, no_dist=True)
    # Numbers of parameters say nothing without the order in which the optimizer got them.
    with pytest.warns(UserWarning, match="loader.position; optimizer.param_groups.0"):
        shardwright.load_checkpoint(tmp_path, model)
    with (
        pytest.warns(UserWarning),
        pytest.raises(CheckpointError, match="has no state of the optimizer"),
    ):
        shardwright.load_checkpoint(tmp_path, model, optimizer)


def test_nothing_of_a_pickle_is_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    made = read_pickle(pickle.dumps({"a": Bomb(), "b": torch.Size([2])}))
    assert (made["a"].name, made["a"].given) == ("posix.mkdir", (str(tmp_path / "ran"),))
    state = {"model": {"w": torch.ones(2)}, "b": Bomb()}
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    with pytest.warns(UserWarning, match="1 entries are left out: b"):
        assert list(shardwright.read_checkpoint(tmp_path / "x").module) == ["w"]
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="it holds a posix.mkdir"):
        shardwright.read_checkpoint(tmp_path / "x")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Whatever bits are changed: it is refused in words, with nothing loaded, or what is loaded is
    right. A tensor may have another name, as torch takes no digest of names.
    """
    model, _ = small()
    dcp.save({"model": model}, checkpoint_id=tmp_path, no_dist=True)
    right = dict(shardwright.read_checkpoint(tmp_path).module)
    target = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    before = c.state_of(target)
    refused = 0
    for path in (tmp_path / ".metadata", *tmp_path.glob("*.distcp")):
        content = path.read_bytes()
        for position in range(3, len(content), 61):
            changed = bytearray(content)
            changed[position] ^= 20
            path.write_bytes(changed)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = shardwright.read_checkpoint(tmp_path).module
                c.assert_same(
                    {name: x for name, x in found.items() if name in right},
                    {name: x for name, x in right.items() if name in found},
                )
            except CheckpointError:
                refused += 1
                with pytest.raises(CheckpointError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    shardwright.load_checkpoint(tmp_path, target)
                c.assert_same(c.state_of(target), before)
        path.write_bytes(content[:-200])
        with pytest.raises(CheckpointError, match="cannot be read"):
            shardwright.read_checkpoint(tmp_path)
        path.write_bytes(content)
    assert refused > 30
