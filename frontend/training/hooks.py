"""Hooks: functions of the user that run at places of a run.

    def on_step_end(run, record):
        if record["loss"] < 1.0:
            run.stop.ask("the loss is low enough")

All ranks call them, with the :class:`~shardwright.frontend.training.run_state.Run` and the record
of what happened, so they may do what is collective. Where a record is of logged steps only, so is
the call of the hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shardwright.frontend.files.named_object import load_target
from shardwright.runtime.errors import ConfigError, brief, did_you_mean

Hook = Callable[[Any, Mapping[str, Any]], object]

PLACES = ("on_start", "on_step_end", "on_evaluate", "on_save", "on_end")
"""Before the first step; after every step; after an evaluation, a save, and the last step."""


def check_places(places: Iterable[str]) -> None:
    """Raise :class:`ConfigError` for a place that there is not."""
    for place in places:
        if place not in PLACES:
            raise ConfigError(f"there is no hook {place!r}", hint=did_you_mean(place, PLACES))


class Hooks:
    """The hooks of a run by place: functions, or ``package.module:name`` of them.

    Raises :class:`ConfigError` for a place that there is not, and for what is no function.
    """

    def __init__(self, hooks: Mapping[str, Hook | str]) -> None:
        self._hooks: dict[str, Hook] = {}
        check_places(hooks)
        for place, hook in hooks.items():
            function = load_target(hook) if isinstance(hook, str) else hook
            if not callable(function):
                raise ConfigError(f"hooks.{place} is a function", why=f"it is {brief(function)}")
            self._hooks[place] = function

    def __contains__(self, place: str) -> bool:
        return place in self._hooks

    def call(self, place: str, run: Any, record: Mapping[str, Any]) -> None:
        """Call the hook of a place, if there is one."""
        if place in self._hooks:
            self._hooks[place](run, record)
