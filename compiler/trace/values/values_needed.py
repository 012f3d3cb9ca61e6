"""What to do instead of reading the values of a tensor, which do not exist while a model is
traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.compiler.ops import registry
from shardwright.compiler.ops.register import UserOpDef

_DECIDES = (
    "choose between results with torch.where, apply a mask whether it masks anything or not, "
    "let loops run to their end, leave out checks of values"
)
_NUMBER = "keep it a tensor: x * y.max() computes what x * y.max().item() does"
_PLACE = (
    "use the tensor itself as an index (x[(torch.arange(n) + k) % n] is x.roll(-k)), or a mask "
    "over all places (torch.arange(n) < length) instead of a size"
)
_OUTSIDE = "compute with torch's own operators on the tensor"
_LISTED = (
    f"{_OUTSIDE}; rows that were sorted by expert are multiplied by F.grouped_mm(rows, weights, "
    "offs=counts.cumsum(0).to(torch.int32)), not by a split and a loop"
)
_ANY_SIZE = (
    "keep all elements, and give those that do not count the weight 0 or torch.where(mask, x, 0)"
)
_FIRST = (
    "mark first occurrences with a mask over all elements, or find them before the model is "
    "called; a loop over the experts that tokens chose: see shardwright.experts"
)
_COUNT = "F.one_hot(x, n).sum(0) counts n values"

_DRAWN = (
    "set the rate at which something is skipped at random to 0 (layerdrop=0.0), or multiply "
    "what is added by "
    "a number that is drawn: x + torch.bernoulli(p) * layer(x)"
)

_CHOICE = f"{_ANY_SIZE}; a loop over the experts that tokens chose: see shardwright.experts"

_SIZES = (_ANY_SIZE, _CHOICE, _FIRST, _COUNT)

_REMEDIES = {
    "__bool__": _DECIDES,
    "is_nonzero": _DECIDES,
    "equal": _DECIDES,
    "allclose": _DECIDES,
    "__contains__": _DECIDES,
    "item": _NUMBER,
    "__float__": _NUMBER,
    "__complex__": _NUMBER,
    "__int__": _PLACE,
    "__index__": _PLACE,
    "tolist": _OUTSIDE,
    "numpy": _OUTSIDE,
    "__array__": _OUTSIDE,
    "__format__": "leave printing out of forward, or print what it returns",
    "nonzero": _CHOICE,
    "argwhere": _ANY_SIZE,
    "masked_select": _ANY_SIZE,
    "__getitem__": _ANY_SIZE,
    "unique": _FIRST,
    "unique_consecutive": _FIRST,
    "bincount": _COUNT,
    "repeat_interleave": "pass output_size=, the sum of the repeats",
    "_pack_padded_sequence": "run over the padded sequences, and mask what lies behind their ends",
}

VALUE_READERS = frozenset(_REMEDIES) - {
    "__getitem__", "repeat_interleave", "_pack_padded_sequence"
}  # fmt: skip
"""Functions that always read values, by name; others may."""

TRUTH_VALUES = frozenset(name for name, remedy in _REMEDIES.items() if remedy == _DECIDES)
"""Functions whose values ``forward`` branches on, by name."""

_OF_ANY_SIZE = {name for name, remedy in _REMEDIES.items() if remedy in _SIZES}


def explained(
    function: Any, name: str, *, drawn: bool, inputs: Sequence[str] = ()
) -> tuple[str, str]:
    """Why a function cannot be traced that reads values, and what to do. ``drawn``: random ones.
    ``inputs``: the integer inputs that the values follow from, if they follow from nothing else.
    """
    why = "the traced graph must be right for all inputs, and no values exist while tracing"
    found = registry.find(function)
    if found is not None and isinstance(found[0], UserOpDef):
        return (
            why,
            "pass fake= to register_op, a function that is called instead and returns empty "
            "tensors like the results",
        )
    if drawn:
        return (
            "a graph does the same in every call, and what this draws differs from call to call",
            _DRAWN,
        )
    if name in _OF_ANY_SIZE:
        why = f"the size of what it returns depends on values; {why}"
    remedy = _REMEDIES.get(name, "use torch.where or masking instead")
    if inputs:
        named = ", ".join(f'"{input}": [...]' for input in inputs)
        whose = f"{inputs[0]} is" if len(inputs) == 1 else f"{', '.join(inputs)} are"
        return (
            why,
            f"if {whose} the same in every call, declare so: "
            f"ComputeConfig(constants={{{named}}}); else {remedy}",
        )
    if name == "tolist":
        remedy = _LISTED  # counts that the model makes itself
    return why, f"{remedy}; or put the code into a function, and register_op it with fake="
