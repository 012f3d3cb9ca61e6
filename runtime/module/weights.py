"""Initial weights: safetensors files beside the generated code, of which each rank reads its own
pieces only.

``weights.safetensors`` holds parameters and buffers of the whole model by FQN.
``constants.safetensors``, where it exists, holds what no checkpoint restores (non-persistent
buffers and captured constants); it travels with the code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shardwright.runtime.checkpoint.tensor_files import byte_ranges, header_bytes
from shardwright.runtime.errors import COMPILE_AGAIN, LoadError
from shardwright.runtime.file_digests import CheckedFile, ChunkDigests
from shardwright.runtime.layout import Mesh
from shardwright.runtime.mesh import Coords
from shardwright.runtime.module.declarations import Declaration

WEIGHTS_FILE = "weights.safetensors"
CONSTANTS_FILE = "constants.safetensors"


class WeightFiles:
    """The weight files of one directory, open while the ``with`` block lasts. A missing file is one
    without tensors.

    ``digests``: by file, those of its chunks; whatever is read is compared with them before. A file
    without any is taken as it is: somebody has put it there.
    """

    def __init__(self, directory: Path, digests: Mapping[str, ChunkDigests] | None = None) -> None:
        self.directory = directory
        self._digests = digests or {}
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        self._checked: dict[
            str, tuple[CheckedFile, int, int]
        ] = {}  # by tensor: its file, and its bytes there

    def __enter__(self) -> WeightFiles:
        # Constants lie in one file, weights in another.
        for name in (CONSTANTS_FILE, WEIGHTS_FILE):
            path = self.directory / name
            if path.exists():
                try:
                    if name in self._digests:
                        self._open_checked(path, self._digests[name])
                    handle = self._stack.enter_context(safe_open(path, framework="pt"))
                except LoadError:
                    self._stack.close()
                    raise
                except Exception as error:
                    self._stack.close()
                    hint = COMPILE_AGAIN
                    raise LoadError(f"{path} cannot be read", why=str(error), hint=hint) from error
                self._handles.update(dict.fromkeys(handle.keys(), handle))
        return self

    def _open_checked(self, path: Path, digests: ChunkDigests) -> None:
        """Check the header, which says where everything is, and note it."""
        file = CheckedFile(path, digests)
        self._stack.callback(file.close)
        file.check(0, 8)
        file.check(0, header_bytes(path))
        self._checked.update(
            {name: (file, start, stop) for name, (start, stop) in byte_ranges(path).items()}
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def read(self, declaration: Declaration, mesh: Mesh, coords: Coords) -> Tensor:
        """The piece of one tensor at ``coords``, in memory of its own. The file is mapped: other
        pieces are not read.

        Raises :class:`LoadError` if the files lack the tensor, hold another one under its name, or
        were altered there.
        """
        name, layout = declaration.name, declaration.layout
        if name not in self._handles:
            raise LoadError(
                f"{self.directory} has no initial value of {name!r}",
                why=self._why_missing(declaration),
                hint=f"put {WEIGHTS_FILE} there; or construct with init_params=False and load a "
                "checkpoint or broadcast_weights"
                if declaration.is_initial_weight
                else f"copy {CONSTANTS_FILE} and {WEIGHTS_FILE} there, or compile again",
            )
        stored = self._handles[name].get_slice(name)
        if tuple(stored.get_shape()) != layout.shape:
            raise LoadError(
                f"the initial value of {name!r} in {self.directory} has shape {stored.get_shape()}",
                why=f"the program was compiled for {list(layout.shape)}",
                hint=f"if its declaration was edited, edit it back; else {COMPILE_AGAIN}",
            )
        # The stretches of each dim that this rank holds.
        runs = [layout.runs(dim, mesh, coords) for dim in range(len(layout.dims))]
        if not all(runs):
            return torch.empty(layout.local_shape(mesh, coords), dtype=declaration.dtype)
        # Only what is read is compared with the digests.
        self._check(name, layout.shape, runs)
        value = _read_runs(stored, runs, ())
        if value.dtype != declaration.dtype:
            raise LoadError(
                f"the initial value of {name!r} in {self.directory} is {value.dtype}",
                why=f"the program was compiled for {declaration.dtype}",
                hint=f"if its declaration was edited, edit it back; else {COMPILE_AGAIN}",
            )
        return value

    def _check(
        self, name: str, shape: Sequence[int], runs: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        """Compare what is about to be read with its digests: of a tensor that is cut by rows these
        rows, else all of it.
        """
        if name not in self._checked:
            return
        file, first, last = self._checked[name]
        if not shape:
            file.check(first, last)
            return
        # Tensors lie row by row, so a rank that reads some rows need not read the others for a
        # digest.
        row_bytes = (last - first) // shape[0]
        for start, stop in runs[0]:
            file.check(first + start * row_bytes, first + stop * row_bytes)

    def _why_missing(self, declaration: Declaration) -> str:
        if not (self.directory / WEIGHTS_FILE).exists():
            return f"there is no {WEIGHTS_FILE}"
        return (
            "the model was compiled without weights (on the meta device)"
            if declaration.is_initial_weight
            else "not stored"
        )


def _read_runs(
    stored: Any, runs: Sequence[Sequence[tuple[int, int]]], index: tuple[slice, ...]
) -> Tensor:
    """The blocks of ``stored`` at the given runs per dim, joined; always a copy, as slices are
    views of the mapped file.
    """
    dim = len(index)
    if dim == len(runs):
        block: Tensor = stored[index]
        return block.clone(memory_format=torch.contiguous_format)
    blocks = [_read_runs(stored, runs, (*index, slice(start, stop))) for start, stop in runs[dim]]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim)
