"""``flex_attention`` while tracing: the functions of masks and scores run on all positions at once.

torch compiles such a function for one pair of a query and a key. Here it is called once, with
positions that broadcast: samples ``[B, 1, 1, 1]``, heads ``[1, H, 1, 1]``, queries ``[1, 1, L, 1]``
and keys ``[1, 1, 1, S]``. What it computes is recorded like any other code of the model, so a mask
is read as one of comparisons (``compiler/passes/mask_marks.py``), and is never whole where it says
intervals. A function that does more than compute element by element and read captured tensors at
its positions would mean something else on all of them; that one runs under ``torch.vmap``, as torch
itself runs it.

Models import ``flex_attention`` by name, and compile it. So what is replaced is what it calls.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.compiler.ops import registry
from shardwright.compiler.trace.calls.transforms import Modes

FLEX = "torch.nn.attention.flex_attention"
"""The module of flex attention."""

_POINTWISE = tuple(f"shardwright.compiler.ops.tables.{name}" for name in ("pointwise", "cast"))
"""Where the rules of operators are that compute element by element."""

_FACTS = frozenset(("dtype", "device", "is_floating_point", "is_complex", "requires_grad"))
"""What may be asked of a tensor without its dims."""

Mod = Callable[..., Tensor]
"""A function of masks, or of scores."""


@contextmanager
def flex_attention_traced(modes: Modes, replaced: Callable[[Any, str, Any], Any]) -> Iterator[None]:
    """Record flex attention as operators that a plan can split. ``replaced`` replaces an attribute
    for the time of a ``with`` block.
    """
    flex: Any = sys.modules.get(FLEX)
    calls = {} if flex is None else _Flex(flex, modes).calls
    with ExitStack() as stack:
        for name, function in calls.items():
            stack.enter_context(replaced(flex, name, function))
        masks: Any = sys.modules.get("transformers.masking_utils")
        if calls and hasattr(masks, "fast_all"):
            stack.enter_context(replaced(masks, "fast_all", _padding_kept(masks.fast_all)))
        yield


def _padding_kept(fast_all: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A block mask of transformers leaves out padding where there is none. Here it is applied
    whether it hides anything or not, as the next batch may have some.
    """

    def has_no_padding(mask: Tensor) -> Any:
        return sys._getframe(1).f_code.co_name != "flex_attention_mask" and fast_all(mask)

    return has_no_padding


class _Flex:
    """The functions in the place of torch's own; ``flex`` is its module."""

    def __init__(self, flex: Any, modes: Modes) -> None:
        self._flex, self._modes = flex, modes

    @property
    def calls(self) -> Mapping[str, Any]:
        """What stands in for functions that torch calls, by their names there."""
        return {
            "flex_attention_hop": self.attention,
            "create_mask": self.mask,
            "_convert_mask_to_block_mask": lambda mask, **blocks: (mask, None),
            "_create_sparse_block_from_block_mask": self.block_mask,
            "_transpose_ordered": lambda counts, indices: (counts, indices),
            # A CPU trains here, whatever torch's own kernels do.
            "_validate_device": lambda query, key, value: None,
            # The function is called as it is, not compiled for the one call.
            "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
        }

    def mask(
        self, mod: Mod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None
    ) -> Tensor:
        """``create_mask``: which keys the queries see, with dims of 1 where that is alike."""
        return self._on_positions(mod, (), (B or 1, H or 1, Q_LEN, KV_LEN))

    def block_mask(
        self, blocks: tuple[Tensor, None], mod: Mod, lengths: tuple[int, int], *block_size: int
    ) -> Any:
        """The block mask that :meth:`mask` was asked for. Its blocks say nothing, its function
        keeps the mask, which all layers share.
        """
        batch, heads = blocks[0].shape[:2]
        with self._modes.unseen():
            return self._flex.BlockMask.from_kv_blocks(
                torch.ones(batch, heads, 1, dtype=torch.int32),
                torch.zeros(batch, heads, 1, 1, dtype=torch.int32),
                BLOCK_SIZE=block_size,
                mask_mod=_Made(mod, blocks[0]),
                seq_lengths=lengths,
            )

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Mod,
        block_mask: tuple[Any, ...],
        scale: float,
        kernel_options: Mapping[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What attention gives, with the logarithm of the sum of exponentials to the base of 2 and
        the largest score.
        """
        key, value = (
            x if x.shape[0] == query.shape[0] else x.expand(query.shape[0], -1, -1, -1)
            for x in (key, value)
        )
        sizes = (*query.shape[:3], key.shape[2])
        mask = self._mask_of(block_mask[-1], sizes)
        groups = query.shape[1] // key.shape[1]
        repeated = key if groups == 1 else key.repeat_interleave(groups, 1)
        working = torch.promote_types(query.dtype, torch.float32)
        scores = (query @ repeated.transpose(-2, -1)).to(working) * scale
        is_plain = score_mod is self._flex._identity
        if not is_plain:
            scores = self._on_positions(score_mod, (scores,), sizes).to(working)
        if mask is not None:
            scores = scores + torch.where(mask, 0.0, -math.inf)
        # Nothing reads what is asked for by no one, and such operators are dropped from the graph.
        lse = scores.logsumexp(-1) / math.log(2)
        most = scores.amax(-1)
        if is_plain:
            out = F.scaled_dot_product_attention(
                query, key, value, mask, scale=scale, enable_gqa=groups > 1
            )
            return out, lse, most
        values = value if groups == 1 else value.repeat_interleave(groups, 1)
        # A query without keys gives zeros, not nan.
        weights = torch._safe_softmax(scores, -1).to(query.dtype)
        return weights @ values, lse, most

    def _mask_of(self, mod: Mod, sizes: tuple[int, ...]) -> Tensor | None:
        """The mask of a block mask's function; ``None`` where queries see all keys."""
        if mod is self._flex.noop_mask:
            return None
        lengths = sizes[-2:]
        if isinstance(mod, _Made):
            if all(n in (1, size) for n, size in zip(mod.mask.shape[-2:], lengths, strict=True)):
                return mod.mask
            mod = mod.mod
        return self._on_positions(mod, (), sizes)

    def _on_positions(self, mod: Mod, given: tuple[Tensor, ...], sizes: tuple[int, ...]) -> Tensor:
        """What a function gives of all samples, heads, queries and keys."""
        places = [torch.arange(size) for size in sizes]
        dims = [tuple(-1 if i == dim else 1 for i in range(4)) for dim in range(4)]
        spread = [place.view(shape) for place, shape in zip(places, dims, strict=True)]
        with _ByElement(given, spread) as watched:
            try:
                out = mod(*given, *spread)
            except _NotByElement:
                out = None
        if out is not None and watched.is_element(out):
            return out if out.ndim else out.view(1, 1, 1, 1)
        # The innermost function of torch's own sees one pair.
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        with TransformGetItemToIndex():
            mapped: Mod = self._flex._vmap_for_bhqkv(mod, prefix=(0,) * len(given))
            return mapped(*given, *places)


class _Made:
    """A function of masks whose mask is made."""

    def __init__(self, mod: Mod, mask: Tensor) -> None:
        self.mod, self.mask = mod, mask

    def __call__(self, *places: Tensor) -> Tensor:
        return self.mod(*places)


class _NotByElement(Exception):
    """A call that means something else on all positions than on one."""


class _ByElement(TorchFunctionMode):
    """Lets calls pass that mean the same on all positions as on one after the other: what computes
    element by element, and what reads a captured tensor at one place. ``given``: scores.
    ``places``: positions, one tensor for each dim of what is computed.
    """

    def __init__(self, given: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        super().__init__()
        self._places = places
        self._elements = {id(x): x for x in (*given, *places)}

    def is_element(self, x: Any) -> bool:
        """Whether something is one number for each position."""
        if isinstance(x, Tensor):
            return id(x) in self._elements or x.ndim == 0
        return x is not None and not isinstance(x, list | tuple | slice) and x is not Ellipsis

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(id(x) in self._elements for x in _flat([*args, *kwargs.values()])):
            return func(*args, **kwargs)  # of captured tensors alone
        name = getattr(func, "__name__", "")
        if name == "__getitem__":
            out = self._read(*args)
        elif self._asks_no_dims(func, name, args, kwargs):
            return func(*args, **kwargs)
        elif self._is_pointwise(func, (*args, *kwargs.values())):
            out = func(*args, **kwargs)
        else:
            raise _NotByElement
        self._elements[id(out)] = out
        return out

    def _read(self, whole: Any, index: Any) -> Any:
        """A captured tensor at one place for each position."""
        places = index if isinstance(index, tuple) else (index,)
        is_captured = isinstance(whole, Tensor) and id(whole) not in self._elements
        if not is_captured or whole.ndim != len(places) or not all(map(self.is_element, places)):
            raise _NotByElement
        # In its own order it is all of the tensor: ``documents[b, q]``.
        dims = [next((i for i, x in enumerate(self._places) if x is at), -1) for at in places]
        sizes = [x.shape[dim] for dim, x in enumerate(self._places)]
        if -1 in dims or dims != sorted(set(dims)) or [sizes[i] for i in dims] != [*whole.shape]:
            return whole[index]
        return whole.reshape([size if i in dims else 1 for i, size in enumerate(sizes)])

    @staticmethod
    def _asks_no_dims(
        func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether a call asks for a fact of a tensor that has nothing to do with dims, or makes one
        number.
        """
        if name.startswith("new_"):
            return (args[1] if len(args) > 1 else kwargs.get("size")) == ()
        return name in _FACTS or getattr(getattr(func, "__self__", None), "__name__", "") in _FACTS

    def _is_pointwise(self, func: Any, given: Sequence[Any]) -> bool:
        found = registry.find(func)
        is_known = found is not None and found[0].rule.__module__ in _POINTWISE
        return is_known and all(map(self.is_element, given))


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flat(value)
        else:
            yield value
