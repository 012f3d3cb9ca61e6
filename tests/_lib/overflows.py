"""Steps with a loss scaler in which gradients overflow at one place, on some ranks and on one
device for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

OPTIONS = {"init_scale": 2.0**10, "growth_interval": 2}
OVERFLOWS = (1, 2)
"""The steps in which they overflow."""
STEPS = 7
MAX_NORM = 1.0

Record = dict[str, Any]


@contextmanager
def overflow(parameter: nn.Parameter, element: int, value: float = float("inf")) -> Iterator[None]:
    """Backward passes inside give ``parameter`` a gradient with one ``value`` in it."""

    def poison(gradient: Tensor) -> Tensor:
        spoilt = gradient.clone()
        spoilt.view(-1)[element] = value
        return spoilt

    handle = parameter.register_hook(poison)
    try:
        yield
    finally:
        handle.remove()


def train(
    module: nn.Module,
    optimizer: Any,
    scaler: Any,
    backward: Callable[[int], None],
    poisoned: tuple[nn.Parameter, int] | None,
    steps: range = range(STEPS),
) -> Record:
    """Steps of ``backward(step)``, unscaled, clipped and scaled. What happened in each, and what is
    left in the end.
    """
    record: Record = {"scales": [], "norms": [], "taken": []}
    taken: list[bool] = []
    hook = optimizer.register_step_post_hook(lambda *_: taken.append(True))
    for step in steps:
        optimizer.zero_grad()
        if step in OVERFLOWS and poisoned is not None:
            with overflow(*poisoned):
                backward(step)
        else:
            backward(step)
        scaler.unscale_(optimizer)
        if hasattr(optimizer, "clip_gnorm"):
            record["norms"].append(optimizer.clip_gnorm(MAX_NORM))
        else:
            record["norms"].append(nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM))
        taken.clear()
        scaler.step(optimizer)
        scaler.update()
        record["taken"].append(bool(taken))
        record["scales"].append(scaler.get_scale())
    hook.remove()
    return {
        **record,
        "parameters": {name: p.detach().clone() for name, p in module.named_parameters()},
    }


def assert_same_course(record: Record, expected: Record) -> None:
    """Both took the same steps, at the same scales and with the same norms."""
    assert record["taken"] == expected["taken"] == [step not in OVERFLOWS for step in range(STEPS)]
    assert record["scales"] == expected["scales"]
    torch.testing.assert_close(
        torch.stack(record["norms"]),
        torch.stack(expected["norms"]).to(record["norms"][0].dtype),
        rtol=1e-12,
        atol=0,
    )
