"""What a generated class declares: the tensors a rank holds, with the layout of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from shardwright.runtime.layout import Layout
from shardwright.runtime.module.scope import Place

Kind = Literal["parameter", "buffer", "constant"]


@dataclass(frozen=True, slots=True)
class Declaration:
    """One tensor. ``name`` is its FQN in the user's model, or for a constant the name generated
    code gave it.

    ``aliases``: the other FQNs of a tied parameter or shared buffer. ``persistent``: saved in the
    state dict (a constant never is). ``requires_grad``: whether the parameter is trained; the plan
    relies on it. ``stage``: of a pipeline, the stage whose mesh the layout refers to.
    """

    name: str
    kind: Kind
    layout: Layout
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()
    persistent: bool = True
    requires_grad: bool = False
    stage: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All its FQNs, the first one first."""
        return (self.name, *self.aliases)

    @property
    def is_initial_weight(self) -> bool:
        """Whether a checkpoint restores it. What no checkpoint holds must be real from the
        start.
        """
        return self.kind == "parameter" or self.persistent

    def to_json(self) -> dict[str, Any]:
        """JSON values beside the name; :meth:`from_json` is the inverse."""
        return {
            "kind": self.kind,
            "shape": list(self.layout.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "layout": str(self.layout),
            "aliases": list(self.aliases),
            "persistent": self.persistent,
            "requires_grad": self.requires_grad,
            **({} if self.stage is None else {"stage": self.stage}),
        }

    @classmethod
    def from_json(cls, name: str, data: dict[str, Any]) -> Declaration:
        """The reverse of :meth:`to_json`."""
        return cls(
            name,
            data["kind"],
            Layout.parse(data["layout"]),
            getattr(torch, data["dtype"]),
            tuple(data["aliases"]),
            data["persistent"],
            data["requires_grad"],
            data.get("stage"),
        )


class DeclaredParameter(NamedTuple):
    """Where a parameter lives, what lies there, and whether it was trained when the module was
    compiled.
    """

    place: Place
    parameter: nn.Parameter
    requires_grad: bool
