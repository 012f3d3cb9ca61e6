"""Values: what operators read and write."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath

import torch

from shardwright.compiler.ir.size import Size


class ValueKind(Enum):
    """Where a value comes from."""

    INPUT = "input"  # a tensor leaf of the arguments of forward
    PARAMETER = "parameter"  # has an FQN; tied parameters are one value
    BUFFER = "buffer"  # has an FQN; may be updated by the program
    CONSTANT = "constant"  # a tensor the model captured that is neither parameter nor buffer
    ACTIVATION = "activation"  # the result of an operator


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A line of the user's code (or of the library the user's model comes from)."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def portable(self) -> str:
        """The location as it is wherever packages are installed:
        ``transformers/models/gpt2/modeling_gpt2.py:273``.

        It is the path from the outermost package in which the file lies, or the file's name.
        """
        path = PurePath(self.file)
        parts = [path.name]
        # A folder without ``__init__.py`` is where packages are installed, or the user's own
        # folder: it differs between machines, and generated files must not.
        for folder in path.parents:
            if not os.path.isfile(folder / "__init__.py"):
                break
            parts.insert(0, folder.name)
        return f"{'/'.join(parts)}:{self.line}"


@dataclass(frozen=True, slots=True, eq=False)
class IRValue:
    """One tensor of the graph. ``name`` is unique in its graph, stable between runs, and a Python
    identifier.

    ``shape`` is the global shape. ``requires_grad`` says whether a gradient may flow to it in
    training; inputs of floating dtype count as differentiable, as the caller may pass one that is.
    ``takes_gradient``: whether one does where the caller passes none, which is what time and memory
    are counted for: it is a trained parameter, or is made of one. ``fqn`` is the original dotted
    name of a parameter or buffer; ``aliases`` are its other names where it is tied.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    kind: ValueKind = ValueKind.ACTIVATION
    fqn: str | None = None
    aliases: tuple[str, ...] = ()
    persistent: bool = True  # of a buffer: saved in the state dict
    takes_gradient: bool = False

    def __post_init__(self) -> None:
        assert self.kind not in (ValueKind.PARAMETER, ValueKind.BUFFER) or self.fqn, (
            f"{self.name} has no FQN"
        )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IRValue) and self.name == other.name and self.shape == other.shape

    def __repr__(self) -> str:
        return f"%{self.name}"
