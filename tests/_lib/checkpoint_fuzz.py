"""Fuzzing checkpoints: a trained job is saved, its folder is altered or its process killed, and
what loads is compared.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from checkpoint_faults import alter_files, alter_index, current_step, killed_at, save
from torch import nn

import shardwright
from shardwright.runtime.checkpoint.folders import complete_folders
from shardwright.runtime.errors import ShardwrightError
from shardwright.runtime.ranks.threads import run_ranks

CONFIG = {
    "plan_ngpus": 1,
    "runtime_ngpus": 2,
    "grad_reduction": "mean",
    "use_zero": 1,
    "reducer_bucket_cap_mb": 1e-4,
}


class Counting(nn.Module):
    """A module with tied weights, a buffer, parameters of two dtypes, and something beside its
    tensors.
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((4, 3), value))
        self.b = self.a
        self.low = nn.Parameter(torch.full((5,), value, dtype=torch.bfloat16))
        self.c = nn.Linear(3, 2)
        nn.init.constant_(self.c.weight, value)
        nn.init.constant_(self.c.bias, -value)
        self.register_buffer("mean", torch.full((3,), value))
        self.calls = {"count": int(value)}

    def get_extra_state(self) -> dict[str, int]:
        return self.calls

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = {"count": state["count"] + 0}


class Falling:
    """A factor with a state of its own."""

    def __init__(self, start: float) -> None:
        self.start = start

    def __call__(self, step: int) -> float:
        return self.start / (step + 1)


def trained(value: float) -> tuple[Counting, Any, Any]:
    """A module, its optimizer after two steps, and a schedule with two groups."""
    module = Counting(value)
    groups = lambda name, p: {"weight_decay": 0.0} if p.ndim < 2 else {}  # noqa: E731
    optimizer = shardwright.build_optimizer(module, torch.optim.AdamW, CONFIG, param_groups=groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [Falling(value), Falling(2 * value)])
    for number in range(2):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, value + number)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return module, optimizer, scheduler


def everything(module: Counting, optimizer: Any, scheduler: Any) -> list[Any]:
    """All that loading changes, as values to compare."""
    state = optimizer.state_dict()
    return _values(
        [
            module.state_dict(),
            state,
            scheduler.state_dict(),
            [f.start for f in scheduler.lr_lambdas],
        ]
    )


def _values(value: Any) -> Any:
    """Copies in which tensors are their bytes."""
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            list(value.shape),
            value.detach().reshape(-1).clone().view(torch.uint8).tolist(),
        )
    if isinstance(value, dict):
        return {key: _values(item) for key, item in value.items()}
    return [_values(item) for item in value] if isinstance(value, list | tuple) else value


EXTRA = {"tokens": torch.arange(3), "name": ("a", 1.5)}


def write_original(directory: Path) -> list[Any]:
    """A checkpoint of two ranks; what each has then."""

    def rank(_: int) -> Any:
        module, optimizer, scheduler = trained(3.0)
        shardwright.save_checkpoint(
            directory, module, optimizer, scheduler=scheduler, step=7, extra=EXTRA
        )
        return everything(module, optimizer, scheduler)

    return run_ranks(2, rank)


def check_corruption(original: Path, expected: list[Any], directory: Path, seed: int) -> str:
    """Alter a copy of the checkpoint and load it. ``"refused"`` or ``"loaded"``; whatever else
    comes is a failure.
    """
    rng = random.Random(seed)
    shutil.copytree(original, directory)
    folder = directory / "000001-step-7"
    by_entry = rng.random() < 0.6
    done = alter_index(folder / "index.json", rng) if by_entry else alter_files(directory, rng)
    verify = by_entry or rng.random() < 0.9

    def rank(_: int) -> tuple[str, Any]:
        module, optimizer, scheduler = trained(5.0)
        before = everything(module, optimizer, scheduler)
        try:
            loaded = shardwright.load_checkpoint(
                directory, module, optimizer, scheduler=scheduler, verify=verify
            )
        except ShardwrightError as error:
            assert str(error), done
            assert everything(module, optimizer, scheduler) == before, (
                f"seed {seed}, {done}: refused, and changed"
            )
            return "refused", None
        after = everything(module, optimizer, scheduler)
        if not by_entry and verify:
            assert loaded.step == 7 and _values(loaded.extra) == _values(EXTRA), done
        return "loaded", after

    outcomes = run_ranks(2, rank)
    assert outcomes[0][0] == outcomes[1][0], f"seed {seed}, {done}: ranks disagree"
    outcome = outcomes[0][0]
    if outcome == "loaded" and not by_entry and verify:
        assert [after for _, after in outcomes] == expected, (
            f"seed {seed}, {done}: another checkpoint was loaded"
        )
    try:
        whole = shardwright.read_checkpoint(directory)
    except ShardwrightError:
        assert outcome == "refused" or not verify, (
            f"seed {seed}, {done}: read_checkpoint refuses what loads"
        )
    else:
        # An index that tells another story is believed, by all in the same way.
        if outcome == "loaded" and verify:
            mine = {
                name: _values(x) for name, x in whole.module.items() if isinstance(x, torch.Tensor)
            }
            theirs = outcomes[0][1][0]
            assert mine and all(theirs[name] == value for name, value in mine.items()), (
                f"seed {seed}, {done}"
            )
    return outcome


def corruption(trials: int, first_seed: int, folder: Path) -> Counter[str]:
    """How many of the trials were loaded, and how many refused."""
    original = folder / "original"
    expected = write_original(original)
    counts: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + trials):
        counts[check_corruption(original, expected, folder / "altered", seed)] += 1
        shutil.rmtree(folder / "altered")
    return counts


def kills(trials: int, first_seed: int, folder: Path) -> Counter[str]:
    """How often which checkpoint was current after a kill: the one before, or the one that was
    being saved.
    """
    counts: Counter[str] = Counter()
    rng = random.Random(first_seed)
    step = 0
    while counts.total() < trials:
        keep = rng.choice([1, 2, 3])
        step += 1
        save(folder, step, keep=keep)
        for _ in range(rng.randint(1, 4)):
            step += 1
            ranks, asynchronous, zero = rng.choice(
                [(1, False, 0), (2, False, 0), (2, True, 0), (2, False, 1), (2, True, 2)]
            )
            was_killed = killed_at(
                folder, rng.randint(1, 45), ranks, asynchronous, zero, step, keep
            )
            newest = current_step(folder)
            assert newest <= step and (was_killed or newest == step)
            for complete in complete_folders(folder):
                current_step(complete)
            numbered = [path for path in folder.iterdir() if path.is_dir()]
            unfinished = [path for path in numbered if not (path / "index.json").exists()]
            assert len(unfinished) <= 1 and len(numbered) <= keep + 3, numbered
            counts["new" if newest == step else "before"] += 1
    return counts
