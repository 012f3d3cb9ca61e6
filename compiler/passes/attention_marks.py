"""Attention whose mask says which keys a query sees becomes ``attention_where``, which is told so
in marks and bands and needs no mask of all pairs.

Two forms are found: torch's operator with a boolean mask, and attention written out, as models have
it that cap their scores or have sinks:

    scores = cap * tanh(query @ key.T * scale / cap) + where(mask, 0, least)
    probs = softmax(cat([scores, sinks], -1), -1)[..., :-1]
    out = probs @ value

Heads of keys and values that were repeated for the heads of queries are read as they were before.
What has no such mask, or is read by others on the way, stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.terms import may_be
from shardwright.compiler.passes.mask_marks import MaskMarks, MaskReader

_LEAST = -1e30
"""What is added to a score that does not count: this or less."""


def with_marks(graph: IRGraph) -> IRGraph:
    """The graph with attention as ``attention_where`` where its mask is known to be one of marks;
    without what made the masks, if nothing else reads them.
    """
    finder = _Finder(graph)
    found = {op.name: finder.of(op) for op in graph.ops}
    if not any(found.values()):
        return graph
    ops = tuple(found[op.name] or op for op in graph.ops)
    return graph.with_ops(ops).live()


@dataclass(frozen=True, slots=True)
class _Scores:
    """What a query, a key and their mask make."""

    query: IRValue
    key: IRValue
    mask: MaskMarks
    scale: float
    cap: float | None


class _Finder:
    def __init__(self, graph: IRGraph) -> None:
        self._reader = MaskReader(graph)
        self._uses = graph.uses()
        self._outputs = {value.name for value in graph.outputs}
        self._outputs |= {after.name for _, after in graph.buffer_updates}

    def of(self, op: IROp) -> IROp | None:
        """The operator as ``attention_where``; ``None`` if it stays."""
        if op.target == "scaled_dot_product_attention":
            return self._of_kernel(op)
        return self._written_out(op) if op.target == "matmul" else None

    def _of_kernel(self, op: IROp) -> IROp | None:
        query, key, value = op.operands[:3]
        mask = op.arg("attn_mask")
        if not isinstance(mask, IRValue) or mask.dtype != torch.bool or op.arg("is_causal"):
            return None
        if may_be(op.arg("dropout_p", 0.0), lambda p: p > 0) or not _are_plain(query, key, value):
            return None
        marks = self._reader.of(mask, (query.shape[-2], key.shape[-2]))
        if marks is None:
            return None
        scale = op.arg("scale")
        if marks.is_causal((query.shape[-2], key.shape[-2])):
            return self._causal(op, query, key, value, scale)
        return self._attention(op, query, key, value, {**marks.arguments, "scale": scale})

    def _causal(
        self, op: IROp, query: IRValue, key: IRValue, value: IRValue, scale: Arg
    ) -> IROp | None:
        """The operator as torch's own, which needs no mask to be causal."""
        before = [self._unrepeated(x) for x in (key, value)]
        if before[0].shape[1] == before[1].shape[1]:
            key, value = before
        others = {
            "is_causal": True,
            "scale": scale,
            "enable_gqa": key.shape[1] != query.shape[1] or op.arg("enable_gqa", False),
        }
        return self._made(op, op.target, (query, key, value), others)

    def _attention(
        self, op: IROp, query: IRValue, key: IRValue, value: IRValue, others: Mapping[str, Arg]
    ) -> IROp | None:
        # Keys and values travel before their heads are repeated: grouped attention sends less.
        before = [self._unrepeated(x) for x in (key, value)]
        if before[0].shape[1] == before[1].shape[1]:
            key, value = before
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
            return None
        return self._made(op, "attention_where", (query, key, value), others)

    @staticmethod
    def _made(
        op: IROp, target: str, tensors: tuple[IRValue, ...], others: Mapping[str, Arg]
    ) -> IROp:
        opdef = registry.get(target)
        assert opdef is not None
        return replace(op, target=target, args=opdef.bind(tensors, others))

    def _unrepeated(self, value: IRValue) -> IRValue:
        """What was repeated for each group of query heads: ``x[:, :, None].expand(...)`` as
        heads, or ``repeat_interleave``.
        """
        reader = self._reader
        direct = reader.made_by(value, "repeat_interleave")
        if direct is not None and isinstance(direct.arg("repeats"), int):
            return direct.operands[0] if direct.arg("dim") in (1, -3) else value
        heads = reader.made_by(value, "reshape", "view", "flatten")
        repeated = reader.made_by(heads.operands[0], "expand") if heads else None
        opened = reader.made_by(repeated.operands[0], "getitem", "unsqueeze") if repeated else None
        if opened is None or repeated is None:
            return value
        before, (wide,) = opened.operands[0], repeated.results
        # [B, groups, T, D] to [B, groups, repeats, T, D]; the reshape then joins groups and
        # repeats.
        is_group = (*wide.shape[:2], *wide.shape[3:]) == before.shape and wide.ndim == 5
        shape = (before.shape[0], *value.shape[1:])
        fits = opened.results[0].shape == (*before.shape[:2], 1, *before.shape[2:])
        return before if is_group and fits and shape == value.shape else value

    # --------------------------------------------------------------------------------------------
    # attention written out

    def _written_out(self, op: IROp) -> IROp | None:
        """``probs @ value``, followed back to the query."""
        probs, value = op.operands
        # From the end to the beginning: value product, dropout, softmax, mask, scale, query times
        # key.
        at = self._back(probs, "dropout", "to", "contiguous")
        sliced = self._step(at, "getitem")
        if sliced is not None:
            at = self._back(sliced.operands[0], "to")
        softmax = self._step(at, "softmax", "safe_softmax")
        if softmax is None or softmax.arg("dim") not in (-1, 3):
            return None
        logits, sinks = softmax.operands[0], None
        if sliced is not None:
            # ``probs[..., :-1]``: the last column is the sink's, which has no value.
            if sliced.arg("index") != (Ellipsis, slice(None, -1)):
                return None
            found = self._with_sinks(logits)
            if found is None:
                return None
            logits, sinks = found
        gives_zeros = softmax.target == "safe_softmax"
        scores = self._scores(self._back(logits, "to"), gives_zeros)
        if scores is None or not _are_plain(scores.query, scores.key, value):
            return None
        # A query without keys has the mean of all values there, unless a sink takes its weight.
        gives_mean = sinks is None and not gives_zeros and not scores.mask.all_see
        blind = "mean" if gives_mean else "zeros"
        others = {
            **scores.mask.arguments,
            "scale": scores.scale,
            "cap": scores.cap,
            "sinks": sinks,
            "blind": blind,
        }
        return self._attention(op, scores.query, scores.key, value, others)

    def _step(self, value: Arg, *targets: str) -> IROp | None:
        """The operator of one of these kinds that makes a value for one reader alone."""
        op = self._reader.made_by(value, *targets)
        if op is None or len(op.results) != 1 or op.results[0].name in self._outputs:
            return None
        return op if len(self._uses[op.results[0].name]) == 1 else None

    def _back(self, value: IRValue, *targets: str) -> IRValue:
        """The value before operators of these kinds that change no number: casts, and dropout that
        drops nothing.
        """
        while (op := self._step(value, *targets)) is not None:
            if op.target == "dropout" and may_be(op.arg("p", 0.5), lambda p: p > 0):
                break
            if not op.operands[0].dtype.is_floating_point:
                break
            value = op.operands[0]
        return value

    def _with_sinks(self, logits: IRValue) -> tuple[IRValue, IRValue] | None:
        """The scores and the sinks, by head, of both end to end, the largest taken off or not."""
        shifted = self._step(logits, "sub")
        joined = self._reader.made_by(shifted.arg("input") if shifted else logits, "cat")
        if joined is None or joined.arg("dim") not in (-1, 3) or len(joined.operands) != 2:
            return None
        # Nothing else may read what the pattern replaces, or it would be computed twice.
        uses = 1
        if shifted is not None:
            # ``logits - logits.max(-1, keepdim=True)``, as GPT-OSS writes it: softmax is the same
            # without.
            most = self._reader.made_by(shifted.arg("other"), "max", "amax")
            if most is None or most.operands != joined.results or not most.arg("keepdim"):
                return None
            uses = 2
        if len(self._uses[joined.results[0].name]) != uses:
            return None
        scores, sinks = joined.operands
        if len(self._uses[scores.name]) != 1 or sinks.shape[-1] != 1:
            return None
        expanded = self._reader.made_by(sinks, "expand")
        viewed = self._reader.made_by(expanded.operands[0], "reshape", "view") if expanded else None
        if viewed is None or viewed.operands[0].ndim != 1:
            return None
        heads = viewed.operands[0]
        return (scores, heads) if viewed.results[0].shape == (1, *heads.shape, 1, 1) else None

    def _scores(self, scores: IRValue, gives_zeros: bool) -> _Scores | None:
        """What makes scores of a query and a key, and hides some of them. ``gives_zeros``: a query
        that sees no key has no weights.
        """
        products, mask, chosen = self._hidden(scores)
        if products is None or mask is None:
            return None
        # From the mask backwards: a cap, ``cap * tanh(s / cap)``, then any number of scales, then
        # the product of queries and turned keys.
        scale, cap = 1.0, None
        capped = self._step(products, "mul")
        curved = self._step(capped.arg("input"), "tanh") if capped else None
        divided = self._step(curved.operands[0], "div") if curved else None
        if capped is not None and divided is not None:
            cap = capped.arg("other")
            if not isinstance(cap, int | float) or divided.arg("other") != cap:
                return None
            products = divided.arg("input")
        while (scaled := self._step(products, "mul", "div")) is not None:
            number = scaled.arg("other")
            if not isinstance(number, int | float) or not isinstance(scaled.arg("input"), IRValue):
                return None
            scale *= number if scaled.target == "mul" else 1 / number
            products = scaled.arg("input")
        product = self._step(self._back(products, "to"), "matmul")
        if product is None:
            return None
        query, turned = product.operands
        transposed = self._reader.made_by(turned, "transpose")
        if transposed is None or query.ndim != 4:
            return None
        # Only the last two dims may be turned: positions and width.
        if sorted(transposed.arg(name) % 4 for name in ("dim0", "dim1")) != [2, 3]:
            return None
        key = transposed.operands[0]
        marks = self._reader.of(mask, (query.shape[-2], key.shape[-2]))
        if marks is None or (chosen and not gives_zeros and not marks.all_see):
            return None
        return _Scores(query, key, marks, scale, cap)

    def _hidden(self, scores: IRValue) -> tuple[IRValue | None, IRValue | None, bool]:
        """The scores, and the mask of those that count; and whether others are not added to but
        replaced, so that of a query without keys no gradient reaches its scores.
        """
        added = self._step(scores, "add")
        if added is not None and not added.has_arg("alpha") and len(added.operands) == 2:
            for kept, other in (added.operands, added.operands[::-1]):
                mask = self._of_added(other)
                if mask is not None:
                    return kept, mask, False
        chosen = self._step(scores, "where")
        if chosen is not None:
            mask, kept = (chosen.arg(name) for name in ("condition", "input"))
            hides = self._reader.number(chosen.arg("other"))
            if hides is not None and hides <= _LEAST and isinstance(kept, IRValue):
                return kept, mask, True
        return None, None, False

    def _of_added(self, added: IRValue) -> IRValue | None:
        """The mask ``m`` of ``where(m, 0, least)``."""
        chosen = self._reader.made_by(added, "where")
        if chosen is None:
            return None
        mask, kept, other = (chosen.arg(name) for name in ("condition", "input", "other"))
        zero = self._reader.number(kept)
        if zero is None or zero != 0 or not isinstance(mask, IRValue):
            return None
        # The least number of the dtype, or -inf: its softmax is 0. Any other number is a bias.
        hides = self._reader.number(other)
        return mask if hides is not None and hides <= _LEAST else None


def _are_plain(*tensors: IRValue) -> bool:
    """Whether these have samples, heads, positions and width, and the same samples."""
    return all(x.ndim == 4 and x.shape[0] == tensors[0].shape[0] for x in tensors)
