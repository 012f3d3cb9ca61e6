"""Lightning Fabric, for modules that several ranks share.

    fabric = Fabric(devices=4, strategy=ShardwrightStrategy())
    fabric.launch()
    module = shardwright.parallelize(model, dummy_args, "tp", config)
    optimizer = shardwright.build_optimizer(module, torch.optim.AdamW, lr=1e-3)
    module, optimizer = fabric.setup(module, optimizer)

Nothing wraps the module. Ranks that share it get the same batches, ``fabric.clip_gradients`` gives
the norm of one device, and ``fabric.save`` writes a checkpoint that loads under another plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.runtime.checkpoint.load import load_checkpoint
from shardwright.runtime.checkpoint.save import save_checkpoint
from shardwright.runtime.errors import CheckpointError, ConfigError, UsageError
from shardwright.runtime.module.compiled import compiled_parts
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer


def _fabric(module: str) -> Any:
    """A module of Lightning Fabric, which goes by two names, with classes of their own each: that
    which the user has imported.
    """
    names = ("lightning.fabric", "lightning_fabric")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return import_module(f"{name}.strategies.{module}")
        except ImportError as error:
            missing = error
    raise ConfigError(
        "Lightning Fabric is not installed", why=str(missing), hint="pip install lightning-fabric"
    )


DDPStrategy: Any = _fabric("ddp").DDPStrategy
BackwardSyncControl: Any = _fabric("strategy")._BackwardSyncControl


class _Accumulating(BackwardSyncControl):  # type: ignore[misc]
    """``fabric.no_backward_sync``, by our optimizer's ``no_sync``."""

    def __init__(self, strategy: ShardwrightStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        optimizer = self._strategy.optimizer
        return optimizer.no_sync() if enabled and optimizer is not None else nullcontext()


class ShardwrightStrategy(DDPStrategy):  # type: ignore[misc]
    """A strategy of Fabric for one module that several ranks share, and its optimizer.

    Processes and their group are made as by Fabric's ``"ddp"``, whose arguments it takes; nothing
    is wrapped in ``DistributedDataParallel``. ``optimizer``: the one that was set up.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _Accumulating(self)
        self._ranks: RankMesh | None = None
        self.optimizer: ParallelOptimizer | None = None

    def setup_module(self, module: nn.Module) -> nn.Module:
        """The module as it is. Raises :class:`UsageError` if none of its parts was compiled."""
        compiled = list(compiled_parts(module).values())
        if not compiled:
            raise UsageError(
                f"a {type(module).__name__} was set up, of which no part is parallel",
                hint="pass what shardwright.parallelize or shardwright.initialize returned",
            )
        self._ranks = compiled[0].ranks
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer as it is. Raises :class:`UsageError` for one that is not ours."""
        if not isinstance(optimizer, ParallelOptimizer):
            raise UsageError(
                f"a {type(optimizer).__name__} was set up",
                why="it would update the pieces of this rank with gradients that nobody sums",
                hint="shardwright.build_optimizer(module, torch.optim.AdamW, lr=...)",
            )
        self.optimizer = optimizer
        return optimizer

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Batches are dealt to units: ranks that share the module get the same."""
        if self._ranks is None:
            raise UsageError(
                "a loader was set up before the module",
                why="the plan says which ranks get the same batches",
                hint="call fabric.setup(module, optimizer) first",
            )
        return {"num_replicas": self._ranks.num_units, "rank": self._ranks.unit}

    # Gradients

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """The norm of one device; gradients are scaled down to it."""
        if norm_type != 2.0:
            raise ConfigError(
                f"norm_type={norm_type} is not for modules that several ranks share",
                why="build_optimizer's clip_gnorm has the 2-norm",
                hint="leave norm_type out",
            )
        assert isinstance(optimizer, ParallelOptimizer)
        self.precision.unscale_gradients(optimizer)
        norm = optimizer.clip_gnorm(float(max_norm))
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {float(norm)}")
        return norm

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        """Every element of the summed gradients, cut off at ``clip_val``."""
        assert isinstance(optimizer, ParallelOptimizer)
        self.precision.unscale_gradients(optimizer)
        optimizer.sync_shard_grad()
        for _, holder in optimizer.gradient_holders:
            if holder.grad is not None:
                holder.grad.clamp_(-float(clip_val), float(clip_val))

    # Checkpoints

    def save_checkpoint(
        self,
        path: Path | str,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save into the folder ``path``, from all ranks. Of ``state``, values other than the module
        and the optimizer are kept as the checkpoint's extra.
        """
        if filter or storage_options is not None:
            raise ConfigError(
                "fabric.save cannot be given filter or storage options",
                why="pieces of the module and the optimizer are saved whole, by all ranks",
                hint="leave them out",
            )
        module, optimizer = _module_of(state), _optimizer_of(state)
        extra = {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in state.items()
            if value is not module and value is not optimizer
        }
        save_checkpoint(path, module, optimizer, extra=extra)

    def load_checkpoint(
        self,
        path: Path | str,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load what :meth:`save_checkpoint` saved, under any plan, into the objects of ``state``.
        Returns what ``state`` did not ask for.
        """
        if isinstance(state, nn.Module):
            state = {"model": state}
        if not isinstance(state, dict):
            raise UsageError(
                "fabric.load was given no module",
                why="pieces are read into the module that the plan was compiled for",
                hint="fabric.load(path, {'model': module, 'optimizer': optimizer})",
            )
        module, optimizer = _module_of(state), _optimizer_of(state)
        extra = dict(load_checkpoint(path, module, optimizer).extra or {})
        for name, value in state.items():
            # Already loaded, piece by piece.
            if value is module or value is optimizer:
                continue
            if name not in extra:
                if strict:
                    raise CheckpointError(
                        f"{path} has no {name!r}",
                        why=f"it has {', '.join(map(repr, extra)) or 'nothing besides the module'}",
                        hint="leave it out of the state, or pass strict=False",
                    )
                continue
            found = extra.pop(name)
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(found)
            else:
                state[name] = found
        return extra


def _module_of(state: dict[str, Any]) -> nn.Module:
    found = [value for value in state.values() if isinstance(value, nn.Module)]
    if len(found) != 1:
        raise UsageError(
            f"the state has {len(found)} modules",
            why="a checkpoint is that of one module",
            hint="one folder for each module, with one of them in the state",
        )
    return found[0]


def _optimizer_of(state: dict[str, Any]) -> Optimizer | None:
    found = [value for value in state.values() if isinstance(value, Optimizer)]
    if len(found) > 1:
        raise UsageError(
            f"the state has {len(found)} optimizers",
            why="a module has one",
            hint="leave the others out",
        )
    return found[0] if found else None
