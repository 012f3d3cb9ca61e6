"""Runs of the original model on fake tensors, which have shapes and no values: what can be known of
a model without computing anything.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from shardwright.compiler.trace.calls.fake_forms import GROUPED_PRODUCTS
from shardwright.runtime.structure import flatten, map_leaves


class CannotRunError(Exception):
    """A forward that looks at values, which are not there."""


class _GroupedProducts(TorchFunctionMode):
    """Runs products of groups in the form that fake tensors take in every dtype."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return GROUPED_PRODUCTS.get(func, func)(*args, **(kwargs or {}))


def count_flops(module: nn.Module, example: Mapping[str, Any]) -> float:
    """The operations of the matrix products of one forward and backward.

    Raises :class:`CannotRunError`.
    """
    with FlopCounterMode(display=False) as counter:
        _differentiated(module, example, None)
    return float(counter.get_total_flops())


def depends_on(module: nn.Module, example: Mapping[str, Any], name: str) -> bool:
    """Whether the loss depends on a floating argument. Raises :class:`CannotRunError`."""
    return _differentiated(module, example, name) is not None


def _differentiated(
    module: nn.Module, example: Mapping[str, Any], name: str | None
) -> Tensor | None:
    """Run forward and backward; the gradient of the argument called ``name``."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def faked(path: str, leaf: Any) -> Any:
        return mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf

    arguments = map_leaves(dict(example), faked)
    if name is not None:
        arguments[name].requires_grad_()
    try:
        with mode, _GroupedProducts():
            result = _without_values(module, mode)(**arguments)
            loss = next(leaf for leaf in flatten(result).values() if isinstance(leaf, Tensor))
            loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # each library raises another one where values are missing
        raise CannotRunError(type(error).__name__) from error
    return None if name is None else arguments[name].grad


def _without_values(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy without values. Small tables stay real: a forward may look at them."""
    # deepcopy takes what is in the memo for a copy that it has made already.
    memo: dict[int, Any] = {id(buffer): buffer for buffer in module.buffers()}
    for parameter in module.parameters():
        with mode:
            stand_in = torch.empty(parameter.shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(stand_in, requires_grad=parameter.requires_grad)
    config = getattr(module, "config", None)
    if config is not None:
        # Modules look at their config by identity, and a copy would only take time.
        memo[id(config)] = config
    return copy.deepcopy(module, memo)
