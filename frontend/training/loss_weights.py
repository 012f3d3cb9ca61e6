"""What the losses of microbatches and units add up to.

Two ways (``loss`` of a run):

- ``mean``: the mean over all microbatches of the step. Each loss is divided by the number of
  microbatches, and gradients are averaged over units.
- ``tokens``: as if all samples were one batch. Each microbatch's ``forward`` is told the number of
  labels of the whole step, ``num_items_in_batch``, and divides its sum by it; gradients are summed.
  Where samples are padded the two differ: two microbatches with 10 and 30 labels count as 10 and 30
  then, not as halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shardwright.data.rank_roles import Roles, roles
from shardwright.frontend.training.datasets import IGNORED
from shardwright.frontend.training.fake_runs import CannotRunError, depends_on
from shardwright.frontend.training.run_model import MadeModel
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.ranks.world import World

COUNT = "num_items_in_batch"
"""The argument by which models of transformers are told the number of labels."""


@dataclass(frozen=True)
class LossWeights:
    """How losses are weighed. ``shifts``: the first label of a sample does not count."""

    kind: Literal["mean", "tokens"]
    shifts: bool = False

    @classmethod
    def of(cls, wanted: str, model: MadeModel, example: dict[str, Any]) -> LossWeights:
        """What is wanted, if the model can do it; ``auto`` is decided.

        Raises :class:`ConfigError` for ``tokens`` with a model that cannot be told a number.
        """
        if wanted == "mean" or not isinstance(example.get("labels"), Tensor):
            why_not: str | None = "samples have no labels"
        elif not model.counts_labels:
            why_not = f"its forward takes no {COUNT}"
        else:
            why_not = cls("tokens").unheard(model, example, trusts=wanted == "tokens")
        if wanted == "tokens" and why_not is not None:
            raise ConfigError(
                f"loss: tokens does not work with {type(model.module).__name__}",
                why=why_not,
                hint=f"divide the summed loss by an argument {COUNT} in forward, or use loss: mean",
            )
        return cls("tokens" if why_not is None else "mean", model.shifts_labels)

    def unheard(self, model: MadeModel, example: dict[str, Any], *, trusts: bool) -> str | None:
        """Why the number that ``forward`` is told changes nothing, if it does not: many a model
        takes any argument. ``trusts``: take it on trust where that cannot be seen.
        """
        try:
            if depends_on(model.module, self.example(example), COUNT):
                return None
        except CannotRunError as error:
            return None if trusts else f"whether it uses {COUNT} cannot be seen: {error}"
        return f"its forward takes {COUNT}, and does not use it"

    @property
    def reduction(self) -> str:
        """``grad_reduction`` of the compile."""
        return "mean" if self.kind == "mean" else "sum"

    def example(self, example: dict[str, Any]) -> dict[str, Any]:
        """The arguments to compile for."""
        if self.kind == "mean":
            return example
        dtype = torch.get_default_dtype()
        return {**example, COUNT: torch.ones((), dtype=dtype)}

    def told(self, samples: Sequence[Any], module: ParallelModule) -> Sequence[Any]:
        """The microbatches of a step with what ``forward`` is to be told. Collective."""
        if self.kind == "mean":
            return samples
        found, world = roles(module), module.ranks.world
        count = self._count(samples) if _counts_here(found) else 0
        total = torch.tensor(float(count), device=world.device)
        total = world.everyone.all_reduce(total, phase="setup")
        # Behind the collective, which every rank must join.
        if not found.mine.reads_input(COUNT):
            return samples
        return [
            {**sample, COUNT: total} if isinstance(sample, dict) else sample for sample in samples
        ]

    def scaled(self, loss: Tensor, num_microbatches: int) -> Tensor:
        """What is differentiated of the loss of a microbatch."""
        return loss / num_microbatches if self.kind == "mean" else loss

    def total(self, losses: Sequence[Tensor], world: World, num_units: int) -> Tensor:
        """The loss of the step, as a float64 scalar on all ranks. Collective."""
        total = torch.stack([loss.detach().double() for loss in losses]).sum()
        if self.kind == "mean":
            total = total / len(losses)
        # The ranks of a unit have the same, so the mean over ranks is that over units.
        total = world.everyone.all_reduce(total.to(world.device), phase="setup") / world.size
        return total if self.kind == "mean" else total * num_units

    def _count(self, samples: Sequence[Any]) -> int:
        counted = 0
        for sample in samples:
            labels = sample["labels"]
            counted += int((labels[..., 1:] if self.shifts else labels).ne(IGNORED).sum())
        return counted


def _counts_here(found: Roles) -> bool:
    """Whether this rank counts: the first of those that read the same labels."""
    mine = found.mine
    if not mine.reads_input("labels"):
        return False
    if mine.cuts:
        raise ConfigError(
            "loss: tokens does not work where the plan cuts inputs before the model",
            why="a rank sees a part of each label row",
            hint="use loss: mean",
        )
    # Ranks that share a model read the same labels, which must count once.
    same = [
        role.rank
        for role in found.all
        if role.replica == mine.replica and role.part == mine.part and role.reads_input("labels")
    ]
    return mine.rank == min(same)
