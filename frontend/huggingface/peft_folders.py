"""Folders of peft, written from checkpoints and read under any plan.

    adapter/                       what peft calls an adapter: LoRA and its kin
        adapter_config.json  adapter_model.safetensors

peft wraps the layers that it adapts, so a tensor has up to three names:

    in the model     base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight
    in the adapter   base_model.model.model.layers.0.mlp.up_proj.lora_A.weight
    in the model     base_model.model.model.layers.0.mlp.up_proj.base_layer.weight
    in the base      model.layers.0.mlp.up_proj.weight

The first pair is asked of peft, which has rules of its own for every method. Files are written by
peft, too.
"""

from __future__ import annotations

import copy
import os
import secrets
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.frontend.huggingface.model_folders import (
    HINT,
    check_folder,
    load_whole,
    move_into,
    names_in_folder,
    pieces_aside,
)
from shardwright.runtime.arguments import checked
from shardwright.runtime.checkpoint.contents import Contents
from shardwright.runtime.checkpoint.failing_together import together
from shardwright.runtime.checkpoint.folders import find_folder
from shardwright.runtime.checkpoint.holdings import is_extra_state
from shardwright.runtime.checkpoint.merge_files import checked_index
from shardwright.runtime.checkpoint.optimizer_state import listed
from shardwright.runtime.checkpoint.pretrained import files_of, load_pretrained
from shardwright.runtime.checkpoint.tensor_files import MappedFiles
from shardwright.runtime.errors import CheckpointError, ConfigError, brief_text
from shardwright.runtime.json_text import parse_json
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.swap import write_folder, writing

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

PREFIX = "base_model.model."
"""What peft puts before the names of the model that it wraps."""

_MAY_DIFFER = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode",
        "init_lora_weights", "init_weights", "layers_pattern", "layers_to_transform",
        "lora_dropout", "modules_to_save", "peft_version", "revision", "runtime_config",
        "target_modules", "task_type",
    }
)  # fmt: skip
"""Fields of an adapter's config that do not change what its values mean, or that show in names."""


@dataclass(frozen=True)
class PeftNames:
    """What the tensors of a model of peft are called. ``in_adapter``, ``in_base``: the name in the
    adapter's file, and in the folder of the base model, by the name in the model. A layer that is
    trained whole is in both.
    """

    in_adapter: Mapping[str, str]
    in_base: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module, adapter_name: str) -> PeftNames:
        """Ask peft. Raises :class:`ConfigError` for an adapter that the model does not have, or
        whose file has more than tensors of the model.
        """
        from peft import get_peft_model_state_dict

        _check_peft(model, adapter_name)
        state = {k: x for k, x in model.state_dict().items() if not is_extra_state(k)}
        names = {id(tensor): name for name, tensor in state.items()}
        with warnings.catch_warnings():  # peft says it again when it saves
            warnings.simplefilter("ignore")
            saved = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter_name)
        computed = [key for key, tensor in saved.items() if id(tensor) not in names]
        if computed:
            raise ConfigError(
                f"the adapter {adapter_name!r} cannot be read from pieces",
                why=f"peft computes what it saves as {listed(computed)}",
                hint="merge the checkpoint, load it into the model on one device, and save there",
            )
        return cls(
            {names[id(tensor)]: key for key, tensor in saved.items()},
            {name: base for name in state if (base := _base_name(model, name)) is not None},
        )


def is_peft_model(model: object) -> bool:
    """Whether peft made ``model`` of another one."""
    return any(base.__name__ == "PeftModel" for base in type(model).__mro__)


@checked
def export_peft(
    directory: Path | str, out: Path | str, model: nn.Module, *, adapter_name: str = "default"
) -> Path:
    """Write the adapter in the current checkpoint of ``directory`` as a new folder ``out`` that
    ``PeftModel.from_pretrained`` reads. Returns ``out``. No communication.

    ``model``: what ``get_peft_model`` returned, or the same made again; its values are not looked
    at, and it may lie on the meta device. Weights that are frozen are not read. ``adapter_name``:
    which of its adapters, if it has several.

    Raises :class:`CheckpointError` if there is no checkpoint, if it is of another model, or if
    ``out`` exists.
    """
    folder, out = find_folder(Path(directory)), Path(out)
    _refuse_existing(out)
    names = PeftNames.of(model, adapter_name)
    index = checked_index(folder)
    records = {
        name: record for first, record in index.tensors.items() for name in (first, *record.aliases)
    }
    # A model that was initialized has the names of the model inside.
    found = {
        name: records.get(name) or records.get(name.removeprefix(PREFIX))
        for name in names.in_adapter
    }
    missing = [name for name, record in found.items() if record is None]
    if missing:
        raise CheckpointError(
            f"{folder} is no checkpoint of this model",
            why=f"it lacks {listed(missing)}",
            hint="pass the model that was trained, with the same adapter",
        )
    with Contents(folder, index) as contents:
        state = {name: contents.read(record) for name, record in found.items() if record}
    write_adapter(out, model, state, adapter_name)
    return out


@checked
def load_peft(
    module: nn.Module,
    model: nn.Module,
    adapter: Path | str,
    *,
    base: Path | str | None = None,
    adapter_name: str = "default",
) -> None:
    """Load the values of a folder of peft into a module under any plan. Every rank reads its own
    elements. Collective.

    ``model``: what ``module`` was compiled from. ``adapter``: a folder that ``save_pretrained`` of
    peft wrote. ``base``: a folder of the base model, for a module that has no values yet; without
    it only the adapter's tensors change. ``adapter_name``: which adapter of the model gets them.

    Raises :class:`CheckpointError` on all ranks if the folder is of another adapter.
    """
    adapter = Path(adapter)
    with together(current_world()):
        names = PeftNames.of(model, adapter_name)
        _check_config(adapter, model, adapter_name)
    if base is not None:
        inner: Any = model.get_base_model()  # type: ignore[operator]
        load_whole(inner, module, Path(base), named=lambda name: names.in_base.get(_whole(name)))
    load_pretrained(
        adapter, module, rename=lambda name: names.in_adapter.get(_whole(name)), file=ADAPTER_FILE
    )


@checked
def start_peft(
    model: nn.Module, base: Path | str, out: Path | str, *, adapter_name: str = "default"
) -> Path:
    """Write an adapter with its first values as a new folder ``out``, as ``get_peft_model`` would
    make them of the model in the folder ``base``. Returns ``out``. No communication.

    For a ``model`` on the meta device: one layer of the base is in memory at a time. Values are
    drawn from torch's generator, in peft's order: after the same ``torch.manual_seed`` they are
    those of peft. ``adapter_name``: which adapter of the model.

    Raises :class:`ConfigError` for a method that changes the base weights as it begins (PiSSA,
    OLoRA), or whose values do not follow from single layers.
    """
    out, base = Path(out), Path(base)
    _refuse_existing(out)
    names = PeftNames.of(model, adapter_name)
    wrapper: Any = model
    shapes, inner = model.state_dict(), wrapper.get_base_model()
    state: dict[str, Tensor] = {}
    with MappedFiles(base) as files:
        where = files_of(base, files)
        there = names_in_folder(inner, where)

        def read(name: str) -> Tensor:
            """A tensor of the base, by its name in the model."""
            key = there(names.in_base[name])
            if key not in where:
                raise CheckpointError(f"{base} lacks {key!r}")
            return files.view(where[key], key).to(shapes[name].dtype, copy=True)

        for path in wrapper.base_model.targeted_module_names:
            made = _first_values(model, path, read, adapter_name)
            state |= {name: value for name, value in made.items() if name in names.in_adapter}
        rest = [name for name in names.in_adapter if name not in state]
        unknown = [name for name in rest if name not in names.in_base]
        if unknown:
            raise ConfigError(
                "the first values of this adapter do not follow from single layers",
                why=f"nobody knows those of {listed(unknown)}",
                hint="make the adapter on one device, and save it there with save_pretrained",
            )
        # Layers that are trained whole begin as those of the base.
        state |= {name: read(name) for name in rest}
    cast = {name: value.to(shapes[name].dtype) for name, value in state.items()}
    config = wrapper.peft_config[adapter_name]
    # So that AutoPeftModel finds the base.
    config.base_model_name_or_path = config.base_model_name_or_path or str(base)
    write_adapter(out, model, cast, adapter_name)
    return out


def save_adapter(
    module: nn.Module, directory: Path, model: nn.Module, *, adapter_name: str = "default"
) -> None:
    """Save the adapter of ``module``, which is compiled from ``model``, into ``directory`` as
    ``PeftModel.from_pretrained`` reads it. Other files that are there stay. Collective.
    """
    world = current_world()
    check_folder(world, directory)
    with pieces_aside(world, module, directory) as pieces, together(world):
        if world.rank == 0:
            with writing("the adapter", directory, HINT):
                aside = directory.with_name(f".{directory.name}.merged.{secrets.token_hex(4)}")
                try:
                    export_peft(pieces, aside, model, adapter_name=adapter_name)
                    move_into(aside, directory)
                finally:
                    shutil.rmtree(aside, ignore_errors=True)


def write_adapter(
    out: Path, model: Any, state: Mapping[str, Tensor], adapter_name: str = "default"
) -> None:
    """Let peft write an adapter of these values, given by their names in the model."""
    from peft import PeftModel

    with write_folder(out) as fresh:
        # Its own method: that of an initialized model saves from all ranks.
        PeftModel.save_pretrained(
            model, str(fresh), state_dict=dict(state), selected_adapters=[adapter_name]
        )
        inner = fresh / adapter_name
        if inner.is_dir():  # peft puts adapters of other names into folders of their own
            for file in inner.iterdir():
                os.replace(file, fresh / file.name)
            inner.rmdir()


def _first_values(model: Any, path: str, read: Any, adapter_name: str) -> dict[str, Tensor]:
    """What peft adds to the layer at ``path`` of the base model, by name in the model. peft is
    given a model of this layer alone.
    """
    from peft import inject_adapter_in_model

    wrapped = model.get_base_model().get_submodule(path)
    name = f"{PREFIX}{path}"
    layer = copy.deepcopy(wrapped.get_base_layer()).to_empty(device="cpu")
    real = {key: read(f"{name}.base_layer.{key}") for key in layer.state_dict()}
    layer.load_state_dict(real)
    config = copy.deepcopy(model.peft_config[adapter_name])
    config.target_modules = [path]
    config.exclude_modules = None
    for one in ("modules_to_save", "trainable_token_indices", "layers_to_transform"):
        if getattr(config, one, None):
            setattr(config, one, None)
    # Empty modules around the layer, so that peft finds it under its own path and names what it
    # adds as in the whole model.
    skeleton = nest = nn.Module()
    *folders, leaf = path.split(".")
    for folder in folders:
        nest.add_module(folder, nn.Module())
        nest = nest.get_submodule(folder)
    nest.add_module(leaf, layer)
    inject_adapter_in_model(config, skeleton, adapter_name)
    made = {f"{PREFIX}{key}": value for key, value in skeleton.state_dict().items()}
    # Some methods (PiSSA, OLoRA) take a part out of the base weight, which lies in pieces here.
    changed = [k for k, v in real.items() if not torch.equal(made[f"{name}.base_layer.{k}"], v)]
    if changed:
        raise ConfigError(
            f"the adapter changes {path}.{changed[0]} of the base as it begins",
            why="the base would be another one for every run",
            hint="prepare base and adapter on one device, and save both with save_pretrained",
        )
    return made


def _whole(name: str) -> str:
    """The name in the model of peft of a tensor that the model inside may call without prefix."""
    return name if name.startswith(PREFIX) else PREFIX + name


def _base_name(model: nn.Module, name: str) -> str | None:
    """What the base model called a tensor, before peft wrapped its layers; ``None`` for what peft
    has added.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    parts: list[str] = []
    rest = name.split(".")
    at: Any = model
    while rest:
        part = rest.pop(0)
        if isinstance(at, AuxiliaryTrainingWrapper):
            if part == "modules_to_save":
                at = at.get_submodule(f"{part}.{rest[0]}")
                rest.pop(0)
                continue
            if part not in ("original_module", "token_adapter"):
                return None
        elif isinstance(at, BaseTunerLayer):
            if part != "base_layer":
                return None
        else:
            parts.append(part)
        at = getattr(at, part)
    return ".".join(parts).removeprefix(PREFIX)


def _check_peft(model: Any, adapter_name: str) -> None:
    if not is_peft_model(model):
        raise ConfigError(
            f"a {type(model).__name__} has no adapter of peft",
            hint="pass what peft.get_peft_model returned",
        )
    if adapter_name not in model.peft_config:
        raise ConfigError(
            f"{type(model).__name__} has no adapter {adapter_name!r}",
            why=f"it has {', '.join(map(repr, model.peft_config))}",
        )
    if model.peft_config[adapter_name].is_prompt_learning:
        raise ConfigError(
            f"the adapter {adapter_name!r} is a prompt",
            why="its values are computed when it is saved, and pieces are not",
            hint="save it on one device",
        )


def _check_config(folder: Path, model: Any, adapter_name: str) -> None:
    """Refuse an adapter whose values mean something else in the model's config."""
    try:
        there = parse_json((folder / ADAPTER_CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is no folder of peft", why=f"{ADAPTER_CONFIG}: {brief_text(error)}"
        ) from error
    here = {key: _plain(value) for key, value in model.peft_config[adapter_name].to_dict().items()}
    different = [
        f"{key} is {there[key]!r} there and {here[key]!r} here"
        for key in sorted(there.keys() & here.keys() - _MAY_DIFFER)
        if there[key] != here[key]
    ]
    if different:
        raise CheckpointError(
            f"{folder} is another adapter than the model's",
            why=listed(different),
            hint="make the model with PeftConfig.from_pretrained(folder)",
        )


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset | tuple | list):
        plain = [_plain(one) for one in value]
        return sorted(plain) if isinstance(value, set | frozenset) else plain
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return getattr(value, "value", value)


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise CheckpointError(
            f"{out} exists", why="it would be replaced", hint="name a new folder, or delete it"
        )
