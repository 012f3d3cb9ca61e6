"""The model of a run, as its settings name it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.frontend.files.module_source import RealTables
from shardwright.frontend.files.named_object import load_target
from shardwright.frontend.huggingface.model_folders import pretrained_folder
from shardwright.frontend.huggingface.peft_folders import is_peft_model
from shardwright.frontend.training.run_settings import ModelSettings
from shardwright.runtime.errors import ConfigError, brief, brief_text, did_you_mean

_SEEDED = threading.Lock()


@dataclass(frozen=True)
class MadeModel:
    """The original model. ``folder``: where its values are to be read from, if it lies on the meta
    device; ``is_transformers``: whether its class is one of transformers.
    """

    module: nn.Module
    folder: Path | None = None

    @property
    def _inner(self) -> Any:
        """The model itself, or what peft has put its adapter into."""
        module: Any = self.module
        return module.get_base_model() if is_peft_model(module) else module

    @property
    def is_transformers(self) -> bool:
        return any(base.__name__ == "PreTrainedModel" for base in type(self._inner).__mro__)

    @property
    def parameters_of_forward(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of ``forward`` by name."""
        return inspect.signature(self.module.forward).parameters

    @property
    def input_names(self) -> tuple[str, ...]:
        """The arguments of ``forward`` that have a name."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return tuple(name for name, p in self.parameters_of_forward.items() if p.kind in kinds)

    @property
    def counts_labels(self) -> bool:
        """Whether ``forward`` divides its loss by the number of labels that it is told, as
        ``num_items_in_batch``: by name, or as models of transformers take it.
        """
        if "num_items_in_batch" in self.parameters_of_forward:
            return True
        takes = getattr(self._inner, "accepts_loss_kwargs", None)
        if takes is None:
            kinds = [p.kind for p in inspect.signature(self._inner.forward).parameters.values()]
            takes = inspect.Parameter.VAR_KEYWORD in kinds
        return self.is_transformers and bool(takes)

    @property
    def shifts_labels(self) -> bool:
        """Whether the loss shifts labels by one itself, so that the first one does not count."""
        config = getattr(self._inner, "config", None)
        if not self.is_transformers or getattr(config, "is_encoder_decoder", False):
            return False
        # Not `loss_type`: some models have none, and take this loss by default.
        loss = getattr(self._inner, "loss_function", None)
        return getattr(loss, "__name__", "") == "ForCausalLMLoss"

    @property
    def literals(self) -> dict[str, Any]:
        """What a training step gives ``forward`` besides samples: it needs no cache."""
        names = inspect.signature(self._inner.forward).parameters
        return {"use_cache": False} if "use_cache" in names else {}


def make_model(settings: ModelSettings, seed: int) -> MadeModel:
    """Make the model; random values follow from ``seed``, and are the same on all ranks.

    Raises :class:`ConfigError` for what cannot be made.
    """
    # Ranks may be threads of one process, which draw from one generator: one after the other.
    with _SEEDED:
        torch.manual_seed(seed)
        if settings.function is not None:
            return MadeModel(_made_by_function(settings.function, settings.arguments))
        return _made_by_transformers(settings)


def _made_by_function(target: str, arguments: Mapping[str, Any]) -> nn.Module:
    made = call_target(target, arguments, "model")
    # A function for `shardwright compile` gives the dummy arguments, too.
    module = made[0] if isinstance(made, tuple) and len(made) == 2 else made
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"{target} gives no module",
            why=f"it gave {brief(made)}",
            hint="model.function names a function that returns the module",
        )
    return module


def call_target(target: str, arguments: Mapping[str, Any], section: str) -> Any:
    """What the function that ``package.module:name`` names returns.

    Raises :class:`ConfigError` if it does not take ``arguments``.
    """
    function = load_target(target if ":" in target else ":".join(target.rsplit(".", 1)))
    if not callable(function):
        raise ConfigError(f"{target} is no function", why=f"it is {brief(function)}")
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{target} does not take {section}.arguments", why=brief_text(error)
        ) from error
    except ValueError:  # a function without a signature
        pass
    return function(**arguments)


def _made_by_transformers(settings: ModelSettings) -> MadeModel:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "model.transformers needs the library transformers",
            why="it is not installed here",
            hint="pip install transformers, or name a function: model.function",
        ) from error
    name = settings.transformers
    cls: Any = getattr(transformers, settings.auto_class, None)
    if not settings.auto_class.startswith("Auto") or cls is None:
        known = tuple(n for n in dir(transformers) if n.startswith("AutoModel"))
        raise ConfigError(
            f"transformers has no class {settings.auto_class!r}",
            hint=did_you_mean(settings.auto_class, known),
        )
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"transformers finds no configuration of {name!r}",
            why=brief_text(error),
            hint="name a folder with config.json, or a model that is in the local cache",
        ) from error
    for key, value in settings.config.items():
        if not hasattr(config, key):
            raise ConfigError(
                f"the configuration of {name} has no {key!r}",
                hint=did_you_mean(key, tuple(config.to_dict())),
            )
        setattr(config, key, value)
    if settings.weights == "random":
        return MadeModel(cls.from_config(config).train())
    # Each rank reads its own pieces later: nobody holds the whole model.
    with RealTables(), torch.device("meta"):
        module = cls.from_config(config)
    return MadeModel(module.train(), pretrained_folder(module, name))
