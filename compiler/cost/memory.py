"""What training holds on a rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """What an optimizer keeps for each local element of a parameter, in bytes.

    ``state_bytes_per_element``: its state (two float32 moments of Adam by default). ``master_bytes_per_element``: a copy of
    the parameter in higher precision, if it keeps one. ``grad_bytes_per_element``: of a gradient, where that has not the
    dtype of its parameter.
    """

    state_bytes_per_element: float = 8.0
    master_bytes_per_element: float = 0.0
    grad_bytes_per_element: float | None = None

    def gradient_bytes(self, element_bytes: float) -> float:
        """Of one element, for a parameter of ``element_bytes`` an element."""
        return element_bytes if self.grad_bytes_per_element is None else self.grad_bytes_per_element

    @property
    def kept_bytes(self) -> float:
        """State and master copy of one element."""
        return self.state_bytes_per_element + self.master_bytes_per_element
