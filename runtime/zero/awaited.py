"""Parameters that are on their way: code that reads one from its module waits for this one, and for
nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn


class Arrival(Protocol):
    """Parameters that arrive together."""

    @property
    def parameters(self) -> list[nn.Parameter]: ...

    @property
    def is_under_way(self) -> bool: ...

    def finish(self) -> None:
        """Wait for them; does nothing if they are there."""


def await_parameters(module: nn.Module, arrivals: Sequence[Arrival]) -> None:
    """Let every read of a parameter in ``arrivals`` from its module finish that arrival first.

    Every forward reads its parameters from their modules, whether it is generated, a user's or a
    hook's. So nobody has to be told which module runs next. When all parameters have arrived, the
    modules are what they were.
    """
    by_parameter = {
        id(parameter): arrival for arrival in arrivals for parameter in arrival.parameters
    }
    for part in module.modules():
        parameters = part._parameters
        # From an earlier gathering, of which nobody has read everything.
        if isinstance(parameters, _Awaited):
            parameters.restore()
            parameters = part._parameters
        expected = {
            name: by_parameter[id(parameter)]
            for name, parameter in parameters.items()
            if parameter is not None and id(parameter) in by_parameter
        }
        # From here on a read of the module finds the arrival first.
        if expected:
            part.__dict__["_parameters"] = _Awaited(part, parameters, expected)


class _Awaited(dict[str, Any]):
    """A dict in the place of a module's ``_parameters`` while those named in ``expected`` are on
    their way. It has the same entries, but reading one waits for it.

    ``nn.Module`` reads single entries when an attribute is read. Everything else (``items``,
    ``copy``, writing) waits for all of them and puts the module's own dict back.
    """

    def __init__(
        self, module: nn.Module, parameters: dict[str, Any], expected: dict[str, Arrival]
    ) -> None:
        super().__init__(parameters)
        self._module, self._original, self._expected = module, parameters, expected

    def restore(self) -> dict[str, Any]:
        """Wait for everything that is expected, and give the module back its own dict."""
        for arrival in self._expected.values():
            arrival.finish()
        # Somebody may have put another dict there meanwhile; that one stays.
        if self._module.__dict__["_parameters"] is self:
            self._module.__dict__["_parameters"] = self._original
        return self._original

    def __getitem__(self, name: str) -> Any:
        arrival = self._expected.get(name)
        if arrival is not None:
            arrival.finish()
        if not any(arrival.is_under_way for arrival in self._expected.values()):
            self.restore()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def items(self) -> Any:
        return self.restore().items()

    def values(self) -> Any:
        return self.restore().values()

    def copy(self) -> dict[str, Any]:
        return self.restore().copy()

    def __setitem__(self, name: str, value: Any) -> None:
        self.restore()[name] = value
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        del self.restore()[name]
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        super().pop(name, *default)
        return self.restore().pop(name, *default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self.restore().update(*args, **kwargs)
        super().update(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self.restore()),)
