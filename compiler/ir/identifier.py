"""Names from names: what a value or a variable is called after a module, a dotted path or a mesh
axis.
"""

from __future__ import annotations

import builtins
import functools
import keyword
import re
import unicodedata

_NOT_FOR_AXES = frozenset(
    (
        *keyword.kwlist,
        *keyword.softkwlist,
        *dir(builtins),
        "self",
        "torch",
        "F",
        "math",
        "operator",
        "block",
        "layer",
    )
)
"""What means something else in generated code, or in the scopes that the cost model and the prover
run calls in.
"""


@functools.lru_cache(maxsize=65536)
def identifier(text: str) -> str:
    """``text`` as a Python identifier: ``blocks.0.attn`` becomes ``blocks_0_attn``.

    Python reads identifiers in the normal form NFKC, so two names that differ before it only would
    be one variable.
    """
    if text.isidentifier() and text.isascii():  # most are names already
        text = text.strip("_") or "value"
        return text if text.isidentifier() else f"_{text}"
    if not text.isascii():
        text = "".join(
            c if f"a{c}".isidentifier() else "_" for c in unicodedata.normalize("NFKC", text)
        )
    name = "_".join(re.split(r"[^\w\u0080-\U0010ffff]+", text)).strip("_") or "value"
    return name if name.isidentifier() else f"_{name}"


def is_name(text: str) -> bool:
    """Whether generated code can write ``text`` as a variable or behind a dot, and mean that name:
    no keyword, nothing that Python normalises to another name, nothing that it changes inside of a
    class (``__x``).
    """
    is_plain = text.isidentifier() and not keyword.iskeyword(text) and not text.startswith("__")
    return is_plain and unicodedata.is_normalized("NFKC", text)


def axis_variable(axis: str) -> str:
    """What generated code calls the group of a mesh axis: its own name, unless that means something
    else there.

    Different axes have different variables: whatever begins with ``axis_`` is prefixed again.
    """
    is_taken = (
        axis in _NOT_FOR_AXES
        or axis.startswith(("axis_", "__"))
        or re.fullmatch(r"(operand_|x)\d+", axis)
    )
    if re.fullmatch(r"\w+", axis) and not is_taken:
        return axis
    return f"axis_{''.join(c if c.isascii() else f'u{ord(c):x}' for c in axis)}"
