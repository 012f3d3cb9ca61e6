"""What any optimizer keeps for a parameter. The optimizer itself is asked: it runs a step on
tensors without memory.

A text names the optimizer. ``"SGD(momentum=0.9)"`` is a class of ``torch.optim`` with settings.
``"my_project.optim:make(lr=0.1)"`` is a class or function of the user's own that takes a list of
parameters.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.compiler.cost.optimizers.optimizer_step import (
    MakeOptimizer,
    StepWork,
    tensors_of_state,
    work_of_step,
)
from shardwright.runtime.errors import ConfigError, did_you_mean
from shardwright.runtime.zero.update_split import ELEMENTWISE

SMALL = 4
"""The largest size of each dim of a small parameter that stands for a larger one."""


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer by the text that names it; two of one text are the same.

    Raises:
        ConfigError: what it names is not there, or is no optimizer.
    """

    text: str

    def __post_init__(self) -> None:
        self.state_bytes((SMALL, SMALL), torch.float32)

    @property
    def is_elementwise(self) -> bool:
        """Whether it treats every element by itself, as far as that is known."""
        return _makes_elementwise(self.text)

    def state_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> float:
        """The bytes of the state of one parameter, after a step."""
        return _state_bytes(self.text, shape, dtype)

    def step(self, shape: tuple[int, ...], dtype: torch.dtype) -> StepWork:
        """What a step does to one parameter."""
        return _work_of_step(self.text, shape, dtype)


@functools.lru_cache(maxsize=64)
def _makes_elementwise(text: str) -> bool:
    return (
        type(_found(text)([torch.nn.Parameter(torch.empty(SMALL, SMALL, device="meta"))]))
        in ELEMENTWISE
    )


@functools.lru_cache(maxsize=4096)
def _work_of_step(text: str, shape: tuple[int, ...], dtype: torch.dtype) -> StepWork:
    return work_of_step(_found(text), shape, dtype) if 0 not in shape else StepWork((), 0)


@functools.lru_cache(maxsize=4096)
def _state_bytes(text: str, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    if 0 in shape:  # a rank without a piece
        return 0.0
    make = _found(text)
    state, failed = _state_after_step(text, make, shape, dtype, "meta")
    if failed is not None:
        # Some optimizers ask for numbers after they have made their state, which tensors without
        # memory do not have. A step on a small real tensor tells whether that was all of the state.
        small = tuple(min(size, SMALL) for size in shape)
        known, failed = _state_after_step(text, make, small, dtype, "cpu")
        if failed is not None or known.keys() != state.keys():
            raise ConfigError(
                f"the state of optimizer {text!r} cannot be told",
                why=f"a step of it on a parameter of shape {list(shape)} failed: "
                f"{failed or 'it needs numbers'}",
                hint="a function that takes a list of parameters and returns an optimizer whose "
                "step takes no arguments",
            ) from failed
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in state.values()}
    return float(sum(storages.values()))


def _state_after_step(
    text: str, make: MakeOptimizer, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> tuple[Mapping[Any, torch.Tensor], Exception | None]:
    """The tensors of the state after one step, by their place in it, and the exception if the step
    failed. Views of the parameter are no state.
    """
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer = make([parameter])
    except Exception as error:
        raise ConfigError(
            f"optimizer {text!r} cannot be made for a parameter of shape {list(shape)}",
            why=f"{type(error).__name__}: {error}",
            hint="name a function of your own, 'my_module:make', that makes for each parameter "
            "what it takes",
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"{text!r} makes no optimizer", why=f"it returns a {type(optimizer).__name__}"
        )
    failed = None
    try:
        optimizer.step()
    except Exception as error:  # whatever a user's optimizer raises
        failed = error
    # State may be a view of the parameter, which costs nothing.
    updated = parameter.untyped_storage()._cdata
    state = tensors_of_state(optimizer, parameter)
    return {path: x for path, x in state.items() if x.untyped_storage()._cdata != updated}, failed


def _found(text: str) -> MakeOptimizer:
    # ``my_module:Muon(lr=0.1)``: a module, a name, settings. Without a module it is one of torch's.
    target, bracket, rest = text.partition("(")
    settings = _settings(text, bracket + rest)
    module_name, colon, name = target.strip().rpartition(":")
    module = torch.optim if not colon else _module(text, module_name)
    made = getattr(module, name, None)
    if colon and made is not None and not callable(made):
        raise ConfigError(
            f"{text!r} names no optimizer",
            why=f"it is a {type(made).__name__}",
            hint="name a class, or a function that takes a list of parameters and returns an "
            "optimizer",
        )
    # ``torch.optim`` has more names than optimizers: ``lr_scheduler``, for example.
    if not callable(made) or (not colon and not _is_optimizer(made)):
        known = (
            [n for n, item in vars(torch.optim).items() if _is_optimizer(item)]
            if not colon
            else list(vars(module))
        )
        raise ConfigError(
            f"there is no optimizer {target!r}",
            hint=f"{did_you_mean(name, known)} (a class of torch.optim; one of your own is "
            "'my_module:name')",
        )
    return functools.partial(made, **settings)


def _is_optimizer(item: object) -> bool:
    return (
        inspect.isclass(item)
        and issubclass(item, torch.optim.Optimizer)
        and item is not torch.optim.Optimizer
    )


def _module(text: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"optimizer {text!r} cannot be imported", why=str(error)) from error


def _settings(text: str, call: str) -> dict[str, Any]:
    """The settings in ``(momentum=0.9)`` as a dict."""
    if not call:
        return {}
    try:
        node = ast.parse(f"f{call}", mode="eval").body
        if isinstance(node, ast.Call) and not node.args:
            return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    except (SyntaxError, ValueError):
        pass
    raise ConfigError(
        f"{text!r} does not name an optimizer", hint="for example AdamW, or SGD(momentum=0.9)"
    )
