"""Masters and remainders in every kind of checkpoint, between plans and stages of ZeRO."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same
from low_precision import Case, Rank, adamw, compiled, merged_masters, model_of, train, train_steps
from torch import Tensor

import shardwright
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.training.build_optimizer import build_optimizer
from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer

REMAINDERS = {"distributed_optimizer": {"store_param_remainders": True}}
FIRST = Case("gpt2", "dp", 1, 2)
OTHERS = [
    Case("gpt2", "tp", 2, 2, {"use_zero": 1, **REMAINDERS}),
    Case("gpt2", "pp", 2, 2, {**REMAINDERS}),
    Case("gpt2", "data", 2, 1, {"use_zero": 3}),
    Case("gpt2", "hybrid", 4, 1, {"use_zero": 2}),
    Case("gpt2", "dp", 1, 1),
]
"""They are loaded one from the other, in this order."""

Prepare = Callable[[Any, ParallelOptimizer], Any]


def merged(ranks: list[Rank]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return shardwright.merge_state_dicts(
        [rank.module for rank in ranks], [rank.optimizer for rank in ranks]
    )


def flat(optimizer: dict[str, Any]) -> dict[str, Any]:
    state = {
        f"{number}.{key}": x
        for number, values in optimizer["state"].items()
        for key, x in values.items()
    }
    return state | {f"{number}.master": master for number, master in optimizer["masters"].items()}


def on_ranks(case: Case, directory: Path, prepare: Prepare, steps: range = range(0)) -> list[Rank]:
    """Build, ``prepare`` and train on all ranks."""

    def on_rank(rank: int) -> Rank:
        module = load_class(directory)()
        optimizer = build_optimizer(module, adamw)
        seen = prepare(module, optimizer)
        train_steps(case, module, optimizer, steps)
        return Rank(*copy.deepcopy((module.state_dict(), optimizer.state_dict())), seen)

    return run_ranks(case.config.runtime_ngpus, on_rank)


def saving(path: Path) -> Prepare:
    return lambda module, optimizer: shardwright.save_checkpoint(path, module, optimizer, step=2)


def loading(path: Path) -> Prepare:
    return lambda module, optimizer: shardwright.load_checkpoint(path, module, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("others", [OTHERS[:2], OTHERS[2:]], ids=["cut", "more"])
def test_masters_move_from_plan_to_plan(others: list[Case], tmp_path: Path) -> None:
    """Masters move on disk and merged: not a bit is lost on the way through several plans, nor on
    the way to one device.
    """
    module, optimizer = merged(train(FIRST, compiled(FIRST), saving(tmp_path / "0"), steps=2))
    masters = merged_masters("gpt2", module, optimizer)
    assert any(not torch.equal(master, module[name].float()) for name, master in masters.items())
    for number, case in enumerate(others):
        directory = compiled(case)

        def both(module: Any, optimizer: ParallelOptimizer, number: int = number) -> None:
            loading(tmp_path / str(number))(module, optimizer)
            saving(tmp_path / str(number + 1))(module, optimizer)

        def load_merged(
            module: Any, optimizer: ParallelOptimizer, state: Any = (module, optimizer)
        ) -> None:
            shardwright.load_merged_state_dicts(module, state[0], optimizer, state[1])

        for prepare in (both, load_merged):
            found = merged(on_ranks(case, directory, prepare))
            assert_same(found[0], module)
            assert_same(flat(found[1]), flat(optimizer))
    whole = shardwright.read_checkpoint(tmp_path / str(len(others)))
    assert_same(whole.module, module)
    assert_same(flat(whole.optimizer), flat(optimizer))
    wide = copy.deepcopy(model_of("gpt2", torch.bfloat16)).float()
    shardwright.load_checkpoint(tmp_path / str(len(others)), wide)
    assert_same({name: p.detach() for name, p in wide.named_parameters()}, masters)


SAME = [
    FIRST,
    Case("gpt2", "tp", 2, 2, {"use_zero": 3, **REMAINDERS}),
    Case("gpt2", "pp", 2, 1, {"use_zero": 0, **REMAINDERS}),
    Case("gpt2", "data", 2, 1, {"use_zero": 1, **REMAINDERS}),
]


@pytest.mark.parametrize(
    "case", [SAME[0], *(pytest.param(case, marks=pytest.mark.slow) for case in SAME[1:])], ids=str
)
def test_resuming_is_bit_for_bit(case: Case, tmp_path: Path) -> None:
    """Training resumes from a checkpoint, from the state dicts of the rank in either order, from
    deduped ones.
    """
    directory = compiled(case)

    def save(module: Any, optimizer: ParallelOptimizer) -> Any:
        saving(tmp_path / "run")(module, optimizer)
        states = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
        deduped = copy.deepcopy(shardwright.deduped_state_dict(module, optimizer))
        train_steps(case, module, optimizer, range(2, 4))
        return states, deduped, copy.deepcopy((module.state_dict(), optimizer.state_dict()))

    ranks = train(case, directory, save, steps=2)
    saved = [rank.seen for rank in ranks]
    goal = merged([Rank(*rank.seen[2], None) for rank in ranks])

    def mine(module: Any) -> Any:  # optimizers train on in the tensors that they are given
        return copy.deepcopy(saved[current_world().rank])

    def module_first(module: Any, optimizer: ParallelOptimizer) -> None:
        module.load_state_dict(mine(module)[0][0])
        optimizer.load_state_dict(mine(module)[0][1])

    def optimizer_first(module: Any, optimizer: ParallelOptimizer) -> None:
        optimizer.load_state_dict(mine(module)[0][1])
        module.load_state_dict(mine(module)[0][0])

    def deduped(module: Any, optimizer: ParallelOptimizer) -> None:
        shardwright.load_deduped_state_dict(
            module, mine(module)[1][0], optimizer, mine(module)[1][1]
        )

    for prepare in (loading(tmp_path / "run"), module_first, optimizer_first, deduped):
        found = merged(on_ranks(case, directory, prepare, range(2, 4)))
        assert_same(found[0], goal[0])
        assert_same(flat(found[1]), flat(goal[1]))
