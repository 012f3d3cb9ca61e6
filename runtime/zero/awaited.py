"""Parameters that are on their way: whoever reads one from its module waits for it, and for nothing
else.
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
    """From now on, reading a parameter of ``arrivals`` from the module that has it finishes its
    arrival.

    That is the one moment that every forward has, whether it is generated, a user's or a hook's, so
    that nobody has to be told which module runs next. When all have arrived the modules are what
    they were.
    """
    by_parameter = {
        id(parameter): arrival for arrival in arrivals for parameter in arrival.parameters
    }
    for part in module.modules():
        parameters = part._parameters
        if isinstance(parameters, _Awaited):
            parameters.restore()
            parameters = part._parameters
        expected = {
            name: by_parameter[id(parameter)]
            for name, parameter in parameters.items()
            if parameter is not None and id(parameter) in by_parameter
        }
        if expected:
            part.__dict__["_parameters"] = _Awaited(part, parameters, expected)


class _Awaited(dict[str, Any]):
    """The parameters of ``module`` while those named in ``expected`` are on their way: the same,
    but reading waits.
    """

    def __init__(
        self, module: nn.Module, parameters: dict[str, Any], expected: dict[str, Arrival]
    ) -> None:
        super().__init__(parameters)
        self._module, self._original, self._expected = module, parameters, expected

    def restore(self) -> dict[str, Any]:
        """Wait for all that are expected, and give the module back its own parameters."""
        for arrival in self._expected.values():
            arrival.finish()
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
