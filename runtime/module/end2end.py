"""End-to-end modules: those whose first result is the loss, trained by ``train_step(samples)``.

A sample is what one call of the module takes, and one microbatch. It is the module's first
argument; where the module was compiled with several that hold tensors, a mapping of them by name,
or a tuple of them in order. Gradients of the samples are added up.

Here is what all such modules share, and the steps of those without pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.runtime.errors import InputError, UsageError
from shardwright.runtime.module.compiled import CompiledModule
from shardwright.runtime.structure import flatten, map_leaves
from shardwright.runtime.training.gradients import TrainedModel
from shardwright.runtime.training.reducer import Reducer

ScaleFunction = Callable[[Tensor], Tensor]
"""Makes of a loss what is differentiated in its place, e.g. ``lambda loss: loss / num_samples``."""


def check_samples(owner: str, samples: Any, expected: int | None = None) -> None:
    """Refuse anything but a sequence of samples. ``expected``: how many the schedule of a pipeline
    is made for.
    """
    if isinstance(samples, Tensor | Mapping | str) or not isinstance(samples, Sequence):
        raise InputError(
            f"{owner} takes a list of samples, one per microbatch",
            why=f"it was given a {type(samples).__name__}",
            hint="put a single sample into a list: [sample]"
            if isinstance(samples, Tensor | Mapping | str)
            else "put them into a list: list(samples)",
        )
    if expected is not None and len(samples) != expected:
        raise InputError(
            f"{owner} was given {len(samples)} sample{'' if len(samples) == 1 else 's'}, but "
            f"its schedule is for {expected}",
            why="the order of all forward and backward passes was fixed for this number of "
            "microbatches",
            hint=f"pass {expected} samples (further ones may be dummies, see is_dummy_batch), "
            "or compile for another number of microbatches",
        )
    if not samples:
        raise InputError(
            f"{owner} was given no samples",
            hint="pass at least one; it may be a dummy, see is_dummy_batch",
        )


def check_dummies(
    owner: str, is_dummy_batch: Sequence[bool] | None, num_samples: int
) -> list[bool]:
    """Which samples are dummies: they are computed, but add no gradients."""
    if is_dummy_batch is None:
        return [False] * num_samples
    dummies = [bool(dummy) for dummy in is_dummy_batch]
    if len(dummies) != num_samples:
        raise InputError(
            f"{owner} was given {num_samples} samples, but is_dummy_batch has {len(dummies)} "
            "entries",
            hint="is_dummy_batch tells of each sample whether it is a dummy",
        )
    return dummies


def arguments_of(sample: Any, names: Sequence[str], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a sample stands for, by name.

    ``names``: of the arguments that hold tensors. ``inputs``: all leaves of the compiled call by
    path, as a generated class lists them; arguments that are no tensors have the value they were
    compiled with, unless the sample has them too.
    """
    if not names:
        return {}
    literals = {
        path: value for path, value in inputs.items() if "." not in path and path not in names
    }
    # The first argument may itself be a dict: then its leaves are the paths that the file knows.
    if not inputs.keys() & flatten({names[0]: sample}).keys():
        if isinstance(sample, Mapping):
            return {**literals, **sample}
        if isinstance(sample, list | tuple) and len(sample) == len(names):
            return {**literals, **dict(zip(names, sample, strict=True))}
    return {**literals, names[0]: sample}


def checked_loss(owner: str, loss: Any) -> Tensor:
    """``loss``, unless it cannot be differentiated as one. ``owner``: the class of the module."""
    if isinstance(loss, Tensor):
        if loss.ndim == 0 and loss.is_floating_point():
            return loss
        found = f"a tensor {str(loss.dtype).removeprefix('torch.')}{list(loss.shape)}"
    else:
        found = f"a {type(loss).__name__}"
    raise InputError(
        f"the first result of {owner} is no scalar loss",
        why=f"it is {found}; train_step differentiates the first result",
        hint="let forward return the loss first, a floating-point tensor of shape []",
    )


def scaled(owner: str, loss: Tensor, scale_fn: ScaleFunction | None) -> Tensor:
    """What is differentiated. Raises :class:`UsageError` where that is nothing."""
    if not loss.requires_grad:
        raise UsageError(
            f"the loss of {owner} does not depend on any trained parameter",
            hint="let some of its parameters require gradients",
        )
    if scale_fn is None:
        return loss
    result = scale_fn(loss)
    if not isinstance(result, Tensor) or result.ndim:
        raise InputError(
            f"scale_fn of {owner}.train_step did not return a scalar tensor",
            why=f"it returned a {type(result).__name__}"
            + (f" of shape {list(result.shape)}" if isinstance(result, Tensor) else ""),
            hint="return the loss, scaled: lambda loss: loss * 0.5",
        )
    return result


def reducer_of(module: CompiledModule) -> Reducer:
    """What sums the gradients of ``module``: the reducer of its optimizer, or one made now.
    Collective.
    """
    if module.reducer is None or not module.reducer.is_attached:
        TrainedModel(module, None).make_reducer()
    assert module.reducer is not None
    return module.reducer


def detached(result: Any) -> Any:
    """A copy of a nested result whose tensors keep no graph alive."""
    return map_leaves(
        result, lambda path, leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf
    )


def train_step(
    module: CompiledModule,
    call: Callable[[Any], Any],
    samples: Sequence[Any],
    is_dummy_batch: Sequence[bool] | None,
    scale_fn: ScaleFunction | None,
) -> list[Any]:
    """The forward and backward of one sample after another. ``call(sample)`` calls the module."""
    owner = type(module).__name__
    check_samples(f"{owner}.train_step", samples)
    dummies = check_dummies(f"{owner}.train_step", is_dummy_batch, len(samples))
    reducer = reducer_of(module)
    reducer.clear()
    last = max((index for index, dummy in enumerate(dummies) if not dummy), default=None)
    results = []
    for index, (sample, dummy) in enumerate(zip(samples, dummies, strict=True)):
        with torch.set_grad_enabled(not dummy):
            result = call(sample)
            loss = checked_loss(owner, next(iter(flatten(result).values()), None))
            if not dummy:
                # An asynchronous reducer starts to sum in the last backward; one that frees
                # gradients sums in each of them.
                with (
                    nullcontext() if index == last or reducer.frees_gradients else reducer.no_sync()
                ):
                    torch.autograd.backward(scaled(owner, loss, scale_fn))
                if index != last:
                    reducer.end_round()
        results.append(detached(result))
        del result, loss
    reducer.sum_gradients()
    return results


def infer_step(module: nn.Module, call: Callable[[Any], Any], samples: Sequence[Any]) -> list[Any]:
    """The forward of one sample after another, without gradients."""
    check_samples(f"{type(module).__name__}.infer_step", samples)
    with torch.no_grad():
        return [call(sample) for sample in samples]
