"""What a model may ask of gradients while it is traced: whether a tensor requires one, is a leaf,
or is to require one.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.compiler.trace.context.source import called_by_user
from shardwright.compiler.trace.recorder import Recorder
from shardwright.runtime.errors import TraceError

FACTS = {"requires_grad", "is_leaf", "grad_fn"}
"""Properties of tensors."""


@dataclass(frozen=True)
class GradientFacts:
    """What the tensors of one trace say of their gradients: ``requires_grad``, ``is_leaf``,
    ``grad_fn``.
    """

    recorder: Recorder

    def read(self, func: Any, name: str, tensor: torch.Tensor) -> Any:
        """``x.requires_grad`` and the like as they are outside of a trace, in which all floating
        inputs require a gradient.
        """
        recorder = self.recorder
        # What the trace has not made says the truth itself.
        if not isinstance(tensor, FakeTensor) or id(tensor) not in recorder.variables:
            return func(tensor)
        if recorder.follows_inputs(tensor) and called_by_user():
            does = "does" if recorder.requires_gradient(tensor) else "does not"
            warnings.warn(
                f"forward reads {name} of a tensor made of its arguments: "
                f"{recorder.where()}; as made of the dummy arguments "
                f"it {does} require a gradient, and the compiled module goes on like this "
                "for all arguments",
                stacklevel=3,
            )
        if name == "requires_grad":
            return recorder.requires_gradient(tensor)
        is_leaf = recorder.is_leaf(tensor)
        if name == "is_leaf":
            return is_leaf
        return None if is_leaf else func(tensor)

    def ask(self, func: Any, name: str, tensor: torch.Tensor, *, asks: bool) -> Any:
        """``x.requires_grad_(asks)``, or an assignment to ``x.requires_grad``."""
        recorder = self.recorder
        result = tensor if name == "requires_grad_" else None
        if not isinstance(tensor, FakeTensor):
            return func(tensor, asks)
        requires = recorder.requires_gradient(tensor)
        if asks:
            if not tensor.requires_grad:  # others made of floating inputs do already
                func(tensor, asks)
            recorder.ask_gradient(recorder.value(tensor), leaf=not requires)
        elif requires:
            raise TraceError(
                "forward sets requires_grad of a tensor to False that requires a gradient",
                where=recorder.where(),
                why="the tensor may be the caller's, and in a graph it would still take its "
                "gradient",
                hint="use x.detach(), which leaves the other tensor as it is",
            )
        return result
