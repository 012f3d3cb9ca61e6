"""Saving and loading a model from all ranks: what initialized models of transformers, those of peft
and those that are trained by whole steps have alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from torch import nn

from shardwright.frontend.huggingface.model_folders import check_pieces, save_pieces
from shardwright.runtime.checkpoint.load import LoadedCheckpoint, load_checkpoint
from shardwright.runtime.errors import ConfigError

_STATE = ("optimizer", "scheduler", "loader", "step", "extra")


class ParallelFolders:
    """A model with :meth:`save_parallelized` and :meth:`from_parallelized`."""

    loaded_checkpoint: LoadedCheckpoint

    def _saved(self) -> tuple[nn.Module, Any]:
        """The module whose pieces are saved, and the model whose config is."""
        raise NotImplementedError

    def _save_merged(
        self, directory: Path, *, save_config: bool, max_file_bytes: int | None
    ) -> None:
        """Save what ``from_pretrained`` reads. Collective."""
        raise NotImplementedError

    def save_parallelized(
        self,
        save_directory: str | Path,
        save_config: bool = True,
        merge_checkpoints: bool = False,
        *,
        max_file_bytes: int | None = 50 * 10**9,
        **state: Any,
    ) -> None:
        """Save the model into a folder, from all ranks. Collective.

        Each rank saves its pieces, of which copies are written once; an earlier save there is
        replaced when this one is complete. With ``merge_checkpoints`` the folder is what
        ``from_pretrained`` reads, and what can be uploaded to the hub; files grow to
        ``max_file_bytes`` at most. Of a model of peft that is its adapter alone. ``save_config``:
        write ``config.json`` and ``generation_config.json``, too.

        ``optimizer``, ``scheduler``, ``loader``, ``step`` and ``extra`` are saved with pieces, as
        by :func:`shardwright.save_checkpoint`.

        Raises :class:`FileError` where it cannot be written.
        """
        for name in state:
            if name not in _STATE:
                raise ConfigError(
                    f"save_parallelized has no option {name!r}",
                    hint="save_config, merge_checkpoints, max_file_bytes, " + ", ".join(_STATE),
                )
        directory = Path(save_directory)
        if not merge_checkpoints:
            module, config_of = self._saved()
            save_pieces(module, directory, save_config=save_config, config_of=config_of, **state)
            return
        if state:
            raise ConfigError(
                f"a merged folder has no {next(iter(state))}",
                why="from_pretrained reads a model and nothing else",
                hint="save it with pieces: save_parallelized(another folder, ...)",
            )
        self._save_merged(directory, save_config=save_config, max_file_bytes=max_file_bytes)

    def from_parallelized(self, load_directory: str | Path, **state: Any) -> Self:
        """Load what :meth:`save_parallelized` saved in pieces, on any number of ranks, and return
        the model. Collective.

        ``optimizer``, ``scheduler`` and ``loader`` go on as they were saved. ``loaded_checkpoint``
        then has the step and the extra.

        Raises :class:`CheckpointError` on all ranks if something is missing, altered or of another
        model; nothing is changed then. A missing file is a ``FileNotFoundError`` as well.
        """
        check_pieces(Path(load_directory))
        loaded = load_checkpoint(Path(load_directory), self._saved()[0], **state)
        self.__dict__["loaded_checkpoint"] = loaded
        return self
