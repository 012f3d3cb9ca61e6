"""Dynamic loss scaling for float16 (Micikevicius et al., "Mixed Precision Training", 2018, section
3.2), alike on all ranks.

Small gradients vanish in float16. So the loss is multiplied by a large scale before backward and
gradients are divided by it afterwards. Where they have overflowed the step is skipped and the scale
shrinks; after many good steps it grows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import ConfigError, UsageError, malformed
from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer

_LARGEST = torch.finfo(torch.float32).max


class LossScaler:
    """``torch.amp.GradScaler`` for optimizers of :func:`build_optimizer`: the same methods, numbers
    and state dict.

        scaler = LossScaler()
        model.train_step(samples, scale_fn=scaler.scale)  # or: scaler.scale(loss).backward()
        scaler.unscale_(optimizer)                        # before gradients are looked at
        optimizer.clip_gnorm(1.0)
        scaler.step(optimizer)
        scaler.update()

    Each rank holds its own pieces of the gradients, and one overflow is a reason for all ranks to
    skip the step. Torch's scaler looks at one rank's tensors, synchronised or not, and has no hook
    by which it could be told what others found; in a pipeline most ranks never see a loss, without
    which it refuses to step. This one synchronises first, sums what the ranks have found (one
    number), and has its scale from the beginning.

    ``init_scale``: the first scale. ``backoff_factor``: what it is multiplied by after an overflow.
    ``growth_factor``: after ``growth_interval`` steps in a row without one. With ``enabled=False``
    losses and gradients are left alone and every step is taken.
    """

    @checked
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        _check_options(init_scale, growth_factor, backoff_factor, growth_interval)
        self._scale = float(init_scale)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._num_good = 0  # steps without overflow since the scale has changed
        self._enabled = enabled
        # By identity of the optimizer, since the last update.
        self._overflowed: dict[int, bool] = {}
        self._stepped: set[int] = set()

    @checked
    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale. It is what ``train_step(scale_fn=...)`` takes."""
        if not self._enabled:
            return loss
        # A tensor as in torch's scaler: by a plain number a float16 loss would be multiplied in
        # float16.
        return loss * torch.full((), self._scale, dtype=torch.float32, device=loss.device)

    @checked
    def unscale_(self, optimizer: Optimizer) -> None:
        """Synchronise the gradients and divide them by the scale, all that the reducer looks after.
        Collective.

        Raises :class:`UsageError` for a second call before :meth:`update`, for an optimizer that
        :func:`build_optimizer` has not made, and if gradients are float16 themselves.
        """
        if not self._enabled:
            return
        if not isinstance(optimizer, ParallelOptimizer):
            raise UsageError(
                f"LossScaler was given a {type(optimizer).__name__} that build_optimizer has "
                "not made",
                why="only its optimizers know which gradients are summed over which ranks",
                hint="make it by build_optimizer(module, ...), or use torch.amp.GradScaler for it",
            )
        if id(optimizer) in self._overflowed:
            raise UsageError(
                "unscale_() was called twice for one optimizer",
                why="gradients would be divided by the scale twice",
                hint="call scaler.update() at the end of every step",
            )
        # In float64 first, as torch does: the reciprocal is rounded once.
        self._overflowed[id(optimizer)] = optimizer.unscale_grads(1.0 / self._scale)

    @checked
    def step(self, optimizer: Optimizer) -> Any:
        """Take a step, unless a gradient on any rank is infinite or not a number. Collective.

        Calls :meth:`unscale_` if that has not happened. What ``optimizer.step()`` returns, ``None``
        where it is skipped: then parameters, optimizer state and the step count of random numbers
        stay as they are.
        """
        if not self._enabled:
            return optimizer.step()
        if id(optimizer) in self._stepped:
            raise UsageError(
                "step() was called twice for one optimizer",
                hint="call scaler.update() at the end of every step",
            )
        if id(optimizer) not in self._overflowed:
            self.unscale_(optimizer)
        self._stepped.add(id(optimizer))
        return None if self._overflowed[id(optimizer)] else optimizer.step()

    @checked
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End a step: shrink or grow the scale, or set it to ``new_scale``.

        Raises :class:`UsageError` if no optimizer was unscaled or stepped since the last update.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            with malformed(UsageError, "new_scale is a number"):
                self._scale = float(new_scale)
        elif not self._overflowed:
            raise UsageError(
                "update() was called without a step since the last one",
                why="whether gradients have overflowed is not known",
                hint="call scaler.step(optimizer) first",
            )
        # Some gradient was infinite: smaller from here on.
        elif any(self._overflowed.values()):
            self._scale, self._num_good = self._scale * self._backoff_factor, 0
        else:
            # Long enough without an overflow: larger again.
            self._num_good += 1
            if self._num_good == self._growth_interval:
                grown = self._scale * self._growth_factor
                self._scale, self._num_good = grown if grown <= _LARGEST else self._scale, 0
        self._overflowed, self._stepped = {}, set()

    def get_scale(self) -> float:
        """The scale; 1 if scaling is not enabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether losses are scaled at all."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on all ranks, under the keys of ``torch.amp.GradScaler``; empty
        if not enabled.
        """
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._num_good,
        }

    @checked
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` of this class or of torch's gave.

        Raises :class:`UsageError` for the empty state of a scaler that was not enabled.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise UsageError(
                "the state dict of the loss scaler is empty",
                why="it was saved by a scaler with enabled=False",
                hint="do not load it, or make this scaler with enabled=False too",
            )
        with malformed(
            UsageError, "this is no state dict of a loss scaler", hint="load what state_dict() gave"
        ):
            # The names are those of torch's GradScaler.
            scale, num_good = float(state_dict["scale"]), int(state_dict["_growth_tracker"])
            names = ("growth_factor", "backoff_factor", "growth_interval")
            growth_factor, backoff_factor, growth_interval = (state_dict[name] for name in names)
            _check_options(scale, growth_factor, backoff_factor, growth_interval)
        self._scale, self._num_good = scale, num_good
        self._growth_factor, self._backoff_factor, self._growth_interval = (
            growth_factor,
            backoff_factor,
            growth_interval,
        )


@checked
def _check_options(
    init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int
) -> None:
    if not (0 < init_scale <= _LARGEST and math.isfinite(init_scale)):
        raise ConfigError("init_scale is a positive finite number", why=f"it is {init_scale!r}")
    if growth_factor <= 1:
        raise ConfigError(
            "growth_factor is above 1", why=f"it is {growth_factor!r}: the scale would never grow"
        )
    if not 0 < backoff_factor < 1:
        raise ConfigError(
            "backoff_factor is between 0 and 1",
            why=f"it is {backoff_factor!r}: the scale would never shrink",
        )
    if growth_interval < 1:
        raise ConfigError(
            "growth_interval is a number of steps, at least 1", why=f"it is {growth_interval!r}"
        )
