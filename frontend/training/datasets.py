"""The samples of a run, as its settings name them: a dataset, and what makes a sample of each of
its entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from shardwright.data.formats.json_lines import JsonLines
from shardwright.data.formats.token_files import TokenWindows
from shardwright.data.make_loader import Loader, loader
from shardwright.data.rank_roles import roles
from shardwright.frontend.files.named_object import load_target
from shardwright.frontend.training.run_model import MadeModel, call_target
from shardwright.frontend.training.run_settings import DataSettings
from shardwright.runtime.errors import ConfigError, DataError, brief, brief_text

IGNORED = -100
"""The label that does not count in a loss, as in ``torch.nn.functional.cross_entropy``."""

Transform = Callable[[Any, torch.Generator], Any]


@dataclass(frozen=True)
class Tokenized:
    """Makes rows of ``length`` tokens of the texts of samples. What is padded is no label."""

    tokenizer: Any
    field: str
    length: int

    def __call__(self, sample: Any, generator: torch.Generator) -> dict[str, Tensor]:
        """``input_ids``, ``attention_mask`` and ``labels``, each ``[length]``."""
        if not isinstance(sample, Mapping) or not isinstance(sample.get(self.field), str):
            raise DataError(
                f"a sample has no text {self.field!r}",
                why=f"it is {brief(sample)}",
                hint="data.text names the field that holds the text",
            )
        ids = self.tokenizer(sample[self.field], truncation=True, max_length=self.length).input_ids
        tokens = torch.tensor(ids, dtype=torch.int64)
        padded = self.length - len(tokens)
        # Any id will do where the tokenizer has none: padding is masked, and is no label.
        pad = self.tokenizer.pad_token_id or 0
        return {
            "input_ids": torch.nn.functional.pad(tokens, (0, padded), value=pad),
            "attention_mask": (torch.arange(self.length) < len(tokens)).long(),
            # Labels are the inputs themselves: the model shifts them.
            "labels": torch.nn.functional.pad(tokens, (0, padded), value=IGNORED),
        }


def lists_as_tensors(sample: Any, generator: torch.Generator) -> Any:
    """A sample of JSON with its lists as tensors, so that samples are stacked."""
    if not isinstance(sample, Mapping):
        return sample
    return {
        name: torch.tensor(value) if isinstance(value, list) else value
        for name, value in sample.items()
    }


def labels_of_inputs(sample: Any, generator: torch.Generator) -> Any:
    """A window of tokens for a model that shifts labels itself: the label of a token is the token.

    ``labels`` of windows are those of the next token, of which the last would be lost; it is given
    up. A token whose predecessor is of another document is no label.
    """
    labels = sample["labels"]
    return {
        "input_ids": sample["input_ids"],
        # The label of place i of a window is token i + 1. Moved by one, it is that of the token
        # itself.
        "labels": torch.cat([labels.new_full((1,), IGNORED), labels[:-1]]),
    }


@dataclass(frozen=True)
class Both:
    """One transform after the other."""

    first: Transform
    second: Transform

    def __call__(self, sample: Any, generator: torch.Generator) -> Any:
        """What the second makes of what the first makes."""
        return self.second(self.first(sample, generator), generator)


def make_dataset(settings: DataSettings, model: MadeModel) -> tuple[Any, Transform | None]:
    """The dataset, and what makes of an entry a sample for ``model``.

    Raises :class:`ConfigError` and :class:`DataError` for what cannot be read.
    """
    if settings.function is not None:
        dataset = call_target(settings.function, settings.arguments, "data")
        first: Transform | None = None
    elif settings.tokens is not None:
        assert settings.length is not None
        dataset = TokenWindows(settings.tokens, length=settings.length)
        # Models of transformers shift labels themselves: for them labels are the inputs.
        first = labels_of_inputs if model.shifts_labels else None
    elif settings.jsonl is not None:
        dataset, first = JsonLines(settings.jsonl), lists_as_tensors
    else:
        assert settings.datasets is not None
        dataset, first = _from_disk(settings.datasets), None
    if settings.tokenizer is not None:
        assert settings.length is not None
        first = Tokenized(_tokenizer(settings.tokenizer), settings.text, settings.length)
    if settings.transform is not None:
        own = load_target(settings.transform)
        first = own if first is None else Both(first, own)
    return dataset, first


def make_loader(
    settings: DataSettings,
    dataset: Any,
    transform: Transform | None,
    module: Any,
    *,
    global_batch: int,
    microbatch: int,
    device: torch.device | None,
) -> Loader:
    """The loader of a parallel module."""
    is_indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return loader(
        dataset,
        module,
        global_batch=global_batch,
        microbatch=microbatch,
        seed=settings.seed,
        # A stream comes in its own order.
        shuffle=settings.shuffle and is_indexed,
        num_workers=settings.num_workers,
        collate=None if settings.collate is None else load_target(settings.collate),
        transform=transform,
        device=device,
        pin_memory=device is not None and device.type == "cuda",
    )


def example_of(
    settings: DataSettings,
    dataset: Any,
    transform: Transform | None,
    model: MadeModel,
    microbatch: int,
) -> dict[str, Any]:
    """The arguments of ``forward`` for a microbatch: its first samples, as the loader will give
    them.
    """
    # One rank alone reads it, with no workers to start and to end: every rank makes the same.
    alone = loader(
        dataset,
        roles(replica=0, num_replicas=1),
        global_batch=microbatch,
        seed=settings.seed,
        collate=None if settings.collate is None else load_target(settings.collate),
        transform=transform,
    )
    batch = next(iter(alone), None)
    if not isinstance(batch, Mapping):
        raise DataError(
            f"there is no microbatch of {microbatch} samples"
            if batch is None
            else "samples are dicts with the names of forward's arguments",
            why="the dataset is shorter" if batch is None else f"a batch is {brief(batch)}",
            hint="collate, or the dataset, makes them dicts",
        )
    known = model.input_names
    example = {name: value for name, value in batch.items() if name in known}
    if not example:
        raise DataError(
            f"samples have none of the arguments of {type(model.module).__name__}.forward",
            why=f"they have {', '.join(map(str, batch))}; forward takes {', '.join(known)}",
            hint="let the dataset, or data.transform, name them so",
        )
    return {**model.literals, **example}


def cast_to(dtype: torch.dtype | None) -> Callable[[str, Any], Any]:
    """What casts the floating tensors of samples to the dtype of the module."""

    def cast(path: str, leaf: Any) -> Any:
        is_floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if dtype is not None and is_floating else leaf

    return cast


def _tokenizer(name: str) -> Any:
    try:
        return import_module("transformers").AutoTokenizer.from_pretrained(name)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"there is no tokenizer {name!r}",
            why=brief_text(error),
            hint="name a folder that save_pretrained of a tokenizer wrote, or a cached model",
        ) from error


def _from_disk(folder: str) -> Any:
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise ConfigError(
            "data.datasets is read by Hugging Face datasets",
            why="it is not installed here",
            hint="pip install datasets, or write JSON lines and name them as data.jsonl",
        ) from error
    try:
        return datasets.load_from_disk(folder).with_format("torch")
    except Exception as error:  # the library raises many kinds
        raise DataError(
            f"{folder} is no folder that save_to_disk wrote", why=brief_text(error)
        ) from error
