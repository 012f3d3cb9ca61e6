"""Calls of a model, as far as programs differ by them.

A program is compiled for arguments of certain names, dtypes and numbers of dims, and for values of
what is no tensor. Batch and sequence vary:

    model(input_ids=[4, 64], attention_mask=[4, 64], labels=[4, 64])      # one program
    model(input_ids=[7, 12], attention_mask=[7, 12], labels=[7, 12])      # the same
    model(input_ids=[7, 12])                                              # another

Which dims these are is read off names and sizes: dim 0 where it has the size of the batch, dim 1 of
the arguments in :data:`TOKENS` where it has the length of the sequence.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, InputError, brief
from shardwright.runtime.structure import flatten, map_leaves

BATCH, SEQ, TARGET_SEQ, PAST, TOTAL = "batch", "seq", "target_seq", "past", "total"

EXAMPLE_SIZES = {BATCH: 2, SEQ: 6, TARGET_SEQ: 10, PAST: 3}
"""The sizes of the tensors that are traced. They do not depend on the first call, so that files
made beforehand are those that a job asks for; and they differ, so that the tracer keeps them apart.
"""

TOKENS = frozenset(
    {
        "input_ids",
        "attention_mask",
        "position_ids",
        "token_type_ids",
        "inputs_embeds",
        "labels",
        "encoder_outputs.last_hidden_state",
        "encoder_attention_mask",
        "encoder_hidden_states",
        "decoder_input_ids",
        "decoder_attention_mask",
        "decoder_position_ids",
        "decoder_inputs_embeds",
    }
)
"""The paths of arguments whose dim 1 counts tokens."""

FIRST = ("input_ids", "inputs_embeds", "encoder_outputs.last_hidden_state", "pixel_values")
"""Whose size the batch has, and the sequence: the first of these that a call has."""

FIRST_TARGET = ("decoder_input_ids", "decoder_inputs_embeds", "labels")

NEW_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
"""The arguments that hold the tokens behind those that a cache has, by falling precedence."""

CACHE = "past_key_values"
"""The argument and the result of a model that has its keys and values so far."""

READ_FROM_CONFIG = ("use_cache", "output_attentions", "output_hidden_states", "return_dict")
"""What ``forward`` looks up in the model's config where the call does not say it."""


@dataclass(frozen=True)
class Call:
    """A kind of call of one module.

    ``arguments``: those of one such call, by name. ``dims``: by path of a tensor, its dims that may
    vary. ``fixed``: the paths of inputs whose values are compiled in. ``key``: what programs are
    told apart by. ``heads``: by path, how many heads the whole of keys and values has, of which the
    call has a piece.
    """

    arguments: Mapping[str, Any]
    dims: Mapping[str, Mapping[int, str]]
    fixed: frozenset[str]
    key: str
    heads: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        arguments: Mapping[str, Any],
        device: torch.device,
        config: ComputeConfig,
        *,
        names_dims: bool,
        heads: Mapping[str, int] = MappingProxyType({}),
    ) -> Call:
        """The kind of a call of ``module`` on ``device``. ``names_dims``: the dims that vary are
        those that ``config`` names, and no others.
        """
        leaves = flatten(dict(arguments))
        tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
        symbols = config.dim_symbols()
        dims = _given(symbols, tensors) if names_dims else _varying(module, tensors)
        kinds = {path: repr(leaf) for path, leaf in leaves.items() if path not in tensors}
        for path, tensor in tensors.items():
            kinds[path] = _kind(tensor, dims.get(path, {}), heads.get(path))
        own = getattr(module, "config", None)
        # ``forward`` asks the model's config where an argument is left out.
        kinds |= {f"config.{name}": repr(getattr(own, name, None)) for name in READ_FROM_CONFIG}
        if torch.is_autocast_enabled(device.type):
            kinds["autocast"] = str(torch.get_autocast_dtype(device.type))
        key = json.dumps(kinds, sort_keys=True)
        return cls(arguments, dims, frozenset(config.constants), key, heads)

    def sizes(self) -> dict[str, int]:
        """The sizes that the dims which may vary have in this call, and in calls like it."""
        found = dict(EXAMPLE_SIZES)
        for path, leaf in flatten(dict(self.arguments)).items():
            if isinstance(leaf, Tensor):
                found |= {name: leaf.shape[dim] for dim, name in self.dims.get(path, {}).items()}
        # What a model has read when it is asked for the next token is about what it trains on.
        return {**found, PAST: found[SEQ]}

    def examples(self, sizes: Mapping[str, int] = EXAMPLE_SIZES) -> dict[str, Any]:
        """Arguments of this kind, the same whatever sizes the first call had. ``sizes``: of the
        dims that may vary.
        """
        tokens = next((path for path in NEW_TOKENS if path in self.dims), "")
        length = sizes.get(self.dims.get(tokens, {}).get(1, ""), 1)
        # A mask covers the cache and the new tokens.
        sizes = {**sizes, TOTAL: sizes[PAST] + length}

        def example(path: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or path in self.fixed:
                return leaf
            names = self.dims.get(path, {})
            shape = [sizes.get(names.get(dim, ""), size) for dim, size in enumerate(leaf.shape)]
            if path in self.heads:
                shape[1] = self.heads[path]
            return torch.zeros(shape, dtype=leaf.dtype)

        made: dict[str, Any] = map_leaves(dict(self.arguments), example)
        return made

    def digest(self, *more: str) -> str:
        """A short name of the call and of what else a program depends on."""
        return hashlib.sha256("|".join([self.key, *more]).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        kinds = json.loads(self.key)
        return ", ".join(f"{path} {kind}" for path, kind in kinds.items() if "config." not in path)


def given_arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, without those that are left at ``None``."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"forward cannot be called so: {error}") from error
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise InputError(f"forward takes {name} by position only, which no program does")
        arguments.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    # ``None`` is what transformers passes for what is not there, and means the same as leaving it
    # out.
    return {name: value for name, value in arguments.items() if value is not None}


def default_arguments(model: nn.Module, *, with_labels: bool) -> dict[str, Any]:
    """The call that a model is compiled for when nobody says another one: that of a training step,
    if the model has labels for every token.

    Raises :class:`ConfigError` for a model that does not read tokens.
    """
    names = inspect.signature(model.forward).parameters
    if "input_ids" not in names:
        raise ConfigError(
            f"{type(model).__name__} takes no input_ids, so its call is not known",
            why=f"it takes {', '.join(list(names)[:8])}",
            hint="pass dummy_forward_args=: an example of the arguments that you will pass",
        )
    sizes = (EXAMPLE_SIZES[BATCH], EXAMPLE_SIZES[SEQ])
    found = {"input_ids": torch.zeros(sizes, dtype=torch.int64)}
    if "attention_mask" in names:
        found["attention_mask"] = torch.ones(sizes, dtype=torch.int64)
    if with_labels and "labels" in names and _predicts_tokens(model):
        length = EXAMPLE_SIZES[TARGET_SEQ if _is_encoder_decoder(model) else SEQ]
        found["labels"] = torch.zeros((sizes[0], length), dtype=torch.int64)
    elif _is_encoder_decoder(model):
        shape = (sizes[0], EXAMPLE_SIZES[TARGET_SEQ])
        found["decoder_input_ids"] = torch.zeros(shape, dtype=torch.int64)
    return found


def _predicts_tokens(model: nn.Module) -> bool:
    name = type(model).__name__
    words = ("CausalLM", "LMHeadModel", "MaskedLM", "ConditionalGeneration")
    return any(word in name for word in words)


def _is_encoder_decoder(module: nn.Module) -> bool:
    # An encoder has the config of its model, and no decoder.
    config = getattr(module, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False)) and "labels" in (
        inspect.signature(module.forward).parameters
    )


def _varying(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    """The dims that are the batch and the sequence, by path. With a cache the sequence is that of
    the new tokens, of which one alone is a program of its own.
    """
    batch, length = _sizes_of(tensors, FIRST)
    target_batch, target = _sizes_of(tensors, FIRST_TARGET)
    batch = target_batch if batch is None else batch
    two_lengths = _is_encoder_decoder(module)
    past = _length_of_cache(tensors)
    found: dict[str, dict[int, str]] = {}
    for path, tensor in tensors.items():
        dims = {0: BATCH} if tensor.ndim and tensor.shape[0] == batch else {}
        if tensor.ndim == 4 and path.startswith(f"{CACHE}."):
            # The batch of a piece is not that of the call.
            dims = {0: BATCH, 2: SEQ if ".cross_attention_cache." in path else PAST}
        elif tensor.ndim > 1 and path in TOKENS:
            is_target = two_lengths and (path.startswith("decoder_") or path == "labels")
            new = target if is_target else length
            grows = past is not None and (is_target or not two_lengths)
            if grows and path.endswith("attention_mask"):
                # It covers the cache, too.
                if new is not None and past is not None and tensor.shape[1] == past + new:
                    dims[1] = TOTAL
            # One token at a time is a program of its own: its attention needs no mask among new
            # tokens.
            elif tensor.shape[1] == new and not (grows and new == 1):
                dims[1] = TARGET_SEQ if is_target else SEQ
        if dims:
            found[path] = dims
    return found


def _length_of_cache(tensors: Mapping[str, Tensor]) -> int | None:
    """The number of positions in a cache, ``None`` without one."""
    for path, tensor in tensors.items():
        own = path.startswith(f"{CACHE}.") and ".cross_attention_cache." not in path
        if own and tensor.ndim == 4:
            return tensor.shape[2]
    return None


def _sizes_of(
    tensors: Mapping[str, Tensor], names: tuple[str, ...]
) -> tuple[int | None, int | None]:
    """The first two sizes of the first tensor of these names."""
    for name in names:
        if name in tensors and tensors[name].ndim:
            shape = tensors[name].shape
            return shape[0], shape[1] if len(shape) > 1 else None
    return None, None


def _given(
    named: Mapping[str, Mapping[int, str]], tensors: Mapping[str, Tensor]
) -> dict[str, dict[int, str]]:
    found = {path: dict(dims) for path, dims in named.items() if path in tensors}
    for path, dims in found.items():
        for dim in dims:
            if dim >= tensors[path].ndim:
                raise ConfigError(
                    f"dynamic_dims names dim {dim} of {brief(path)}",
                    why=f"it has {tensors[path].ndim} dims",
                )
    return found


def _kind(tensor: Tensor, names: Mapping[int, str], heads: int | None) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    sizes = [names.get(dim, str(size)) for dim, size in enumerate(tensor.shape)]
    if heads is not None:
        sizes[1] = str(heads)
    return f"{dtype}[{', '.join(sizes)}]"
