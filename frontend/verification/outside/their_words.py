"""What ``spmd_types`` says of a call, in our words.

Invariant type on axis MeshAxis(2:1) cannot mix with other types. Found types: [V, I]
the operands are S, R over tp=2, and one that is R goes with others that are R only
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from spmd_types import SpmdTypeError

from shardwright.frontend.verification.outside.spmd_layouts import Refusal, TypedMesh

_THEIR_LETTERS: Mapping[str, str] = {
    "Invariant": "I",
    "Replicate": "R",
    "Partial": "P",
    "Varying": "V",
}
_OURS: Mapping[str, str] = {"I": "R", "R": "G", "V": "S", "P": "P"}

_ADVICE = ("\n\nSet SPMD", "\nAre you missing a collective", "\n\nHint:")
"""How the calls of its own begin that it proposes."""

_TO_SUM = "an operand is P over {}, which must be summed up before a call that is not linear"

_PHRASES = (
    # Letters that do not go together.
    (
        r"R on axis (\S+) cannot mix with other types\. Found types: \[(.*)\]",
        r"the operands are \2 over \1, and one that is R goes with others that are R only",
    ),
    (
        r"P on axis (\S+) cannot combine with S\. .* Found types: \[(.*)\]",
        r"the operands are \2 over \1, and what is P must be summed up before it meets a piece",
    ),
    (
        r"P on axis (\S+) in a linear op requires .* Found types: \[(.*)\]",
        r"the operands are \2 over \1, and what is P may be added to what is P only",
    ),
    (
        r"P in multiple factors of multilinear op on axis (\S+) is .*",
        r"several factors of a product are P over \1, and one may be",
    ),
    (r"P on axis (\S+) cannot propagate through non-linear ops.*", _TO_SUM.format(r"\1")),
    (r"\w+: P in nonlinear argument on axis (\S+) is not .*", _TO_SUM.format(r"\1")),
    (r"operand\(s\) \[.*\] are P on axis (\S+); a P may only .*", _TO_SUM.format(r"\1")),
    (
        r"operands \[.*\] are declared jointly linear, so on axis (\S+) either all .*",
        r"an operand is P over \1, and may be added to what is P only",
    ),
    (
        r"operand \d+ is (\S+) on axis (\S+) while operand\(s\) \[.*\] are P there; .*",
        r"the operands are P, \1 over \2, and what is P goes with what is G only",
    ),
    (r"Incompatible types on axis (\S+): \[(.*)\]", r"the operands are \2 over \1"),
    (
        r"SPMD type mismatch on axis (\S+): tensor has (\w), expected (\w).*",
        r"a value is \2 over \1, and must be \3",
    ),
    # What adapters take.
    (
        r"rules\.\w+\('[^']*', src=\S+, dst=(\S+)\) expects its input to be (\S+) on axis (\S+), "
        r"but it is (\S+)",
        r"the call makes \1 of \2 over \3, and its operand is \4",
    ),
    (
        r"rules\.\w+\('[^']*', src=(\S+), dst=(\S+)\) expects its input sharded on dim \d+ along "
        r"(\S+), but it is (not sharded there|sharded on dim (\d+))",
        r"the call makes \2 of \1 over \3, and its operand is cut in another dim, or in none",
    ),
    # Dims.
    (
        r"No valid sharding strategy for (\S+) on axis (\S+)",
        r"spmd_types has no rule for \1 of operands that \2 cuts like this",
    ),
    (
        r"DTensor produced _StridedShard placement for (\S+) on axis (\S+), .*",
        r"\2 cuts an inner one of the dims that \1 joins, and spmd_types has no type for that",
    ),
    (
        r"Only sum-P is supported, .*",
        r"each rank has that of its own piece, and nothing puts these together",
    ),
    (
        r"operand \d+ \(.*\) has (\d+) label\(s\) but (\d+) dim\(s\)",
        r"an operand has \2 dims, where the call takes \1",
    ),
    (
        r"operand \d+ \(.*\) needs at least (\d+) dim\(s\) for its .* but has (\d+)",
        r"an operand has \2 dims, where the call takes \1 or more",
    ),
    (
        r"operand \d+ of '[^']*' is sharded on \((.*)\) at dim (\d+), which the equation .*",
        r"\1 cuts dim \2 of an operand, where the call needs the whole",
    ),
    (
        r"label '.' of '[^']*' is sharded inconsistently: \(?(.*?)\)? vs \(?(.*?)\)? \(operand .*",
        r"a dim is cut over \1 in one operand, and over \2 in another",
    ),
    (
        r"over None\b",
        r"over no axis",
    ),
    (
        r"axis (\S+) shards both '.' and '.' in '[^']*'; .*",
        r"\1 cuts different dims of the operands, and may cut one dim of a call only",
    ),
    (
        r"operand \d+ of '[^']*' broadcasts over '.', which is sharded on (\S+), so .*",
        r"an operand, which is repeated along a dim, has other numbers on each rank of \1",
    ),
    (
        r"PartitionSpec device ordering conflict: (.*) before (.*) vs .*",
        r"\1 and \2 cut a dim of one operand in this order, and of another in the other order",
    ),
    (
        r"Op (\S+): axes (\S+) and (\S+) both shard output dim (\d+) but .*",
        r"both \2 and \3 would cut dim \4 of what \1 makes",
    ),
    (
        r"Tensor has S on axis (\S+) but no PartitionSpec entry.*",
        r"each rank of \1 has numbers of its own, and it is not known which dim is cut",
    ),
    (
        r"output has (\d+) dim\(s\) but its declared type has (\d+)",
        r"the result has \1 dims, where the call makes \2",
    ),
    # What has no type.
    (
        r"args\[\d+\] missing axis .*",
        r"an operand has no type: nothing tells whether all ranks have the same numbers",
    ),
)
"""What ``spmd_types`` says in letters of ours, and how it is said here. Anything else keeps its
words.
"""


def in_our_words(error: SpmdTypeError, mesh: TypedMesh) -> str:
    """What was said of a call, with our axes, letters and words, and without the calls of its own
    that ``spmd_types`` proposes. What we say ourselves is left as it is.
    """
    text = str(error.args[0])
    if isinstance(error, Refusal):
        return text
    for advice in _ADVICE:
        text = text.partition(advice)[0]
    for (name, size), axis in zip(mesh.mesh.axes, mesh.axes().values(), strict=True):
        text = text.replace(repr(axis), f"{name}={size}")
    text = text.replace("PerMeshAxisLocalSpmdType.", "")
    for word, letter in _THEIR_LETTERS.items():
        text = re.sub(rf"\b{word}( type\b)?", letter, text)
    text = re.sub(r"\b[IRVP]\b", lambda found: _OURS[found[0]], text)
    text = re.sub(r"rules\.(einsum|output): ('[^']*': )?", "", text)
    for theirs, words in _PHRASES:
        text = re.sub(theirs, words, text, flags=re.DOTALL)
    return text
