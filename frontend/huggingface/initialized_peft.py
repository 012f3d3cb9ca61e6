"""What a model of peft is, once the model inside it was initialized.

peft's wrapper stays what it was: its ``forward`` and its ``generate`` call the model inside. What
would save, merge or exchange the values of layers is here, or refused: every rank has pieces.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import nn

from shardwright.frontend.huggingface.initialized_model import refusal
from shardwright.frontend.huggingface.parallel_folders import ParallelFolders
from shardwright.frontend.huggingface.peft_folders import load_peft, save_adapter
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.module.parallel_module import ParallelModule

_PIECES = "every rank has pieces of its own"
_COMPILED = "the programs are compiled with the adapter that was active"
_BEFORE = "call it before shardwright.initialize"
_AFTER = "save the adapter, and do it on one device"

REFUSED: dict[str, tuple[str, str]] = {
    "push_to_hub": (_PIECES, "model.save_pretrained(directory), then upload it on one rank"),
    "add_adapter": (_COMPILED, _BEFORE),
    "add_weighted_adapter": (_COMPILED, _AFTER),
    "delete_adapter": (_COMPILED, _BEFORE),
    "disable_adapter": (_COMPILED, "initialize a model without the adapter for it"),
    "disable_adapter_layers": (_COMPILED, "initialize a model without the adapter for it"),
    "enable_adapter_layers": (_COMPILED, _BEFORE),
    "merge_adapter": (_PIECES, _AFTER),
    "merge_and_unload": (_PIECES, _AFTER),
    "set_adapter": (_COMPILED, _BEFORE),
    "unload": (_PIECES, _BEFORE),
    "unmerge_adapter": (_PIECES, _BEFORE),
}
"""Methods of peft that would do nothing here, or harm: why, and what to do instead."""


class InitializedPeft(ParallelFolders, nn.Module):
    """What a model of peft is besides, once it was initialized."""

    @property
    def _initialized(self) -> Any:
        """The model of transformers inside."""
        own: Any = self
        return own.get_base_model()

    @property
    def parallel_module(self) -> ParallelModule:
        """The program that was compiled first, of the model inside."""
        program: ParallelModule = self._initialized.parallel_module
        return program

    @property
    def mpu(self) -> Any:
        """The roles of this rank, and their process groups."""
        return self._initialized.mpu

    def _saved(self) -> tuple[nn.Module, Any]:
        return self, self._initialized

    def _save_merged(
        self, directory: Path, *, save_config: bool, max_file_bytes: int | None
    ) -> None:
        # An adapter is one small file, and has a config of its own.
        self.save_pretrained(directory)

    def save_pretrained(self, save_directory: str | Path, adapter_name: str = "default") -> None:
        """Save the adapter as ``PeftModel.from_pretrained`` reads it, from all ranks. Other files
        of the folder stay. Collective.
        """
        save_adapter(self, Path(save_directory), self, adapter_name=adapter_name)

    def load_adapter(self, model_id: str | Path, adapter_name: str = "default") -> None:
        """Load the values of an adapter's folder into the adapter that the model has. Collective.

        Raises :class:`CheckpointError` if it is of another adapter.
        """
        load_peft(self, self, Path(model_id), adapter_name=adapter_name)


def become_initialized(model: nn.Module) -> None:
    """Let a model of peft, whose inside is initialized, be an :class:`InitializedPeft`."""
    model.__class__ = _class_of(type(model))  # type: ignore[arg-type]


def check_can_wrap(model: Any) -> None:
    """Refuse adapters that are more than layers of the model inside.

    Raises :class:`ConfigError`.
    """
    for name, config in model.peft_config.items():
        if config.is_prompt_learning:
            raise ConfigError(
                f"the adapter {name!r} of {type(model).__name__} is a prompt",
                why="peft computes it around the model, and the model alone is made parallel",
                hint="shardwright.parallelize compiles the whole",
            )


@functools.cache
def _class_of(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of an initialized model of peft of class ``cls``, under the same name."""
    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        **{name: refusal(name, why, hint) for name, (why, hint) in REFUSED.items()},
    }
    return type(cls.__name__, (InitializedPeft, cls), members)
