"""Taking back what objects of the user have loaded, where they or another rank cannot go on."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.optim import Optimizer

from shardwright.runtime.checkpoint.holdings import Holdings
from shardwright.runtime.checkpoint.loader_state import give_state, state_of
from shardwright.runtime.errors import CheckpointError, ShardwrightError


@contextmanager
def undone_on_error(
    holdings: Holdings, optimizer: Optimizer | None, scheduler: Any, loader: Any = None
) -> Iterator[None]:
    """If the block raises, random numbers, extra states, the optimizer, the scheduler and the
    loader are what they were before.

    Tensors that the block writes into keep what it wrote: those of the module and masters are no
    business of it.
    """
    random, extra_states = holdings.random_states(), copy.deepcopy(dict(holdings.extra_states))
    with ExitStack() as stack:
        stack.callback(_quietly, lambda: holdings.load_random_states(random))
        stack.callback(_quietly, lambda: holdings.load_extra_states(extra_states))
        if optimizer is not None:
            stack.callback(_attributes_of(optimizer))
        if scheduler is not None:
            stack.callback(_attributes_of(scheduler))
            stack.callback(_quietly, _reloading(scheduler))
        if loader is not None:
            stack.callback(_quietly, _states_again(loader))
        yield
        # Nothing was raised: what would undo is let go of.
        stack.pop_all()


@contextmanager
def taking(title: str) -> Iterator[None]:
    """Say in words that an object of the user did not take what was saved. ``title`` names it."""
    try:
        yield
    except ShardwrightError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{title} does not take its saved state",
            why=f"{type(error).__name__}: {error}",
            hint="load with objects of the classes that were saved, made with the same arguments",
        ) from error


def _attributes_of(owner: Any) -> Callable[[], None]:
    """Gives an object back its attributes; the groups and the state of an optimizer as they are
    now, without their tensors.
    """
    before = dict(vars(owner))
    if isinstance(owner, Optimizer):
        state, groups = owner.state, owner.param_groups
        entries = {
            key: dict(value) if isinstance(value, dict) else value for key, value in state.items()
        }
        options = [dict(group) for group in groups]

    def restore() -> None:
        # The same dicts are filled again, not replaced: schedulers hold references to them.
        vars(owner).clear()
        vars(owner).update(before)
        if isinstance(owner, Optimizer):
            state.clear()
            state.update(entries)
            for group, own in zip(groups, options, strict=True):
                group.clear()
                group.update(own)

    return restore


def _reloading(scheduler: Any) -> Callable[[], None]:
    """Schedulers hold objects of the user, such as the functions of LambdaLR, which they load
    into.
    """
    before = copy.deepcopy(scheduler.state_dict())
    return lambda: scheduler.load_state_dict(before)


def _states_again(loader: Any) -> Callable[[], None]:
    before = state_of(loader)
    return lambda: give_state(loader, before)


def _quietly(undo: Callable[[], None]) -> None:
    """What fails while it is undone must not hide why."""
    with contextlib.suppress(Exception):
        undo()
