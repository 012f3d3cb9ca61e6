"""Attention is found where a model writes it out, and attention whose mask says which keys a query
sees becomes ``attention_where``, which is told so in marks and bands and needs no mask of all
pairs.

Two forms have such masks: torch's operator with a boolean one, and attention written out, as models
have it that cap their scores or have sinks:

    scores = cap * tanh(query @ key.T * scale / cap) + where(mask, 0, least)
    probs = softmax(cat([scores, sinks], -1), -1)[..., :-1]
    out = probs @ value

Scores that are capped and have no mask are attention to all keys. Other attention that is written
out becomes torch's operator: with dropout, with a bias that leaves each query a key
(``hiding_bias.py``), or with a mask that tells no marks, which is its ``attn_mask``. Beside a cap
or sinks it is that of ``attention_where``. Heads of keys and values that were repeated for the
heads of queries are read as they were before. What others read on the way stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.size import Size
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.rule import KERNEL_ATTENTION
from shardwright.compiler.ops.terms import may_be
from shardwright.compiler.passes.attention_spelling import Spelled, spelled, unused
from shardwright.compiler.passes.hiding_bias import hides_nothing, masks_of_keys
from shardwright.compiler.passes.mask_marks import MaskMarks, MaskReader
from shardwright.compiler.passes.written_out import Bias, Chain, Products, broadcast

_LEAST = -1e30
"""What is added to a score that does not count: this or less."""


def with_marks(graph: IRGraph) -> IRGraph:
    """The graph with attention as ``attention_where`` where its mask is known to be one of marks;
    without what made the masks, if nothing else reads them.
    """
    read = spelled(graph)
    finder = _Finder(read)
    found = {op.name: (made,) for op in read.read.ops if (made := finder.of(op)) is not None}
    if not found:
        return graph
    several = {name: (*finder.before.get(name, ()), *made) for name, made in found.items()}
    several |= {op.name: (op,) for op in finder.sums}
    return read.with_found(finder.checked | several)


@dataclass(frozen=True, slots=True)
class _Scores:
    """What a query, a key and their mask make. ``blind``: what a query gets that sees no key."""

    products: Products
    mask: MaskMarks
    blind: str


@dataclass(frozen=True, slots=True)
class _Hidden:
    """Scores, and the mask of those that count. ``blind``: what a query without keys gets by the
    number that hides the others, as ``attention_where`` says; ``None``: nothing that it knows.
    """

    kept: IRValue
    mask: IRValue
    blind: str | None


class _Finder:
    def __init__(self, read: Spelled) -> None:
        graph = read.read
        self._reader = MaskReader(graph)
        self._chain = Chain(graph, self._reader)
        self._taken = read.taken
        self.sums: list[IROp] = []
        """Operators that add up what is added to scores."""
        self.before: dict[str, tuple[IROp, ...]] = {}
        """Operators that are new in front of one that was found, by its name."""
        self.checked: dict[str, tuple[IROp, ...]] = {}
        """Choices whose masks are checked at run time, by their names."""

    def of(self, op: IROp) -> IROp | None:
        """The operator as ``attention_where``; ``None`` if it stays."""
        if op.target == KERNEL_ATTENTION:
            return self._of_kernel(op)
        return self._written_out(op) if op.target == "matmul" else None

    def _of_kernel(self, op: IROp) -> IROp | None:
        query, key, value = op.operands[:3]
        mask = op.arg("attn_mask")
        if not isinstance(mask, IRValue) or mask.dtype != torch.bool or op.arg("is_causal"):
            return None
        if not _are_plain(query, key, value):
            return None
        marks = self._reader.of(mask, (query.shape[-2], key.shape[-2]))
        if marks is None:
            return None
        others = {"scale": op.arg("scale"), "dropout_p": op.arg("dropout_p", 0.0)}
        if self._is_causal(marks, query, key, others["scale"]):
            causal = {**others, "is_causal": True}
            return self._grouped(op, query, key, value, causal, op.arg("enable_gqa", False))
        return self._attention(op, query, key, value, {**marks.arguments, **others})

    def _grouped(
        self,
        op: IROp,
        query: IRValue,
        key: IRValue,
        value: IRValue,
        others: Mapping[str, Arg],
        enable_gqa: Arg = False,
    ) -> IROp | None:
        """The operator as torch's own, with heads of keys as they were before they were
        repeated.
        """
        before = [self._unrepeated(x) for x in (key, value)]
        if before[0].shape[1] == before[1].shape[1]:
            key, value = before
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
            return None
        gqa = key.shape[1] != query.shape[1] or enable_gqa
        return self._made(op, KERNEL_ATTENTION, (query, key, value), {**others, "enable_gqa": gqa})

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
    def _is_causal(marks: MaskMarks, query: IRValue, key: IRValue, scale: Arg) -> bool:
        """Whether torch's operator may be told ``is_causal`` in the place of a mask."""
        # Its kernels scale what they have hidden: minus infinity becomes nan or infinity where the
        # scale is zero or less. A mask they add behind the scale.
        is_positive = scale is None or (isinstance(scale, int | float) and scale > 0)
        return is_positive and marks.is_causal((query.shape[-2], key.shape[-2]))

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
        at, rate = self._chain.dropped(probs)
        sliced = self._chain.step(at, "getitem")
        if sliced is not None:
            at = self._chain.back(sliced.operands[0], "to")
        softmax = self._chain.step(at, "softmax", "safe_softmax")
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
        logits, drops = self._chain.back(logits, "to"), may_be(rate, lambda p: p > 0)
        # Beside dropout torch's operator serves where there are no marks to read.
        plain = None
        if drops and sinks is None:
            plain = self._plain(op, logits, value, rate, gives_zeros)
        # A sink takes the weight of a query that sees no key.
        has_zeros = gives_zeros or sinks is not None
        scores = None if plain is not None else self._scores(logits, has_zeros)
        if scores is None:
            if plain is None and (sinks is not None or not drops):
                plain = self._plain(op, logits, value, rate, gives_zeros, sinks)
            return plain
        products = scores.products
        if not _are_plain(products.query, products.key, value):
            return None
        is_plain = products.cap is None and sinks is None
        if is_plain and self._is_causal(scores.mask, products.query, products.key, products.scale):
            # Torch's own kernel skips what is hidden, and takes no marks or bands for it.
            causal = {"scale": products.scale, "dropout_p": rate, "is_causal": True}
            return self._grouped(op, products.query, products.key, value, causal)
        others = {
            **scores.mask.arguments,
            "scale": products.scale,
            "cap": products.cap,
            "sinks": sinks,
            "blind": scores.blind,
            "dropout_p": rate,
        }
        return self._attention(op, products.query, products.key, value, others)

    def _plain(
        self,
        op: IROp,
        logits: IRValue,
        value: IRValue,
        rate: Arg,
        gives_zeros: bool,
        sinks: IRValue | None = None,
    ) -> IROp | None:
        """Attention without marks: torch's operator, or where scores are capped or there are sinks
        ``attention_where`` with a mask as it is.
        """
        mask, kept, hides = self._chosen(logits) or (None, logits, 0.0)
        found = self._chain.biased(kept)
        if found is None:
            return None
        products, bias = found
        query, key = products.query, products.key
        lengths = query.shape[-2], key.shape[-2]
        if not _are_plain(query, key, value):
            return None
        if mask is not None and bias is not None:
            is_plain = products.cap is None and sinks is None
            others = {"scale": products.scale, "dropout_p": rate}
            made = self._grouped(op, query, key, value, others) if is_plain else None
            return made and self._with_hidden_bias(made, mask, bias, hides, gives_zeros)
        hidden = mask
        if bias is not None:
            hidden, _ = self._of_added(bias.value) or (None, 0.0)
        marks = None if hidden is None else self._reader.of(hidden, lengths)
        others = {"scale": products.scale, "dropout_p": rate}
        if products.cap is not None or sinks is not None:
            # A query without keys would have the mean of all values, unless a sink takes its
            # weight.
            if marks is not None or not (mask is None or gives_zeros or sinks is not None):
                return None
            if bias is not None and sinks is None and not self._keeps_keys(bias, lengths):
                return None
            added = mask if bias is None else bias.value
            others |= {"cap": products.cap, "sinks": sinks, "attn_mask": added}
            return self._with_sums(self._attention(op, query, key, value, others), bias)
        if marks is not None and self._is_causal(marks, query, key, products.scale):
            return self._grouped(op, query, key, value, {**others, "is_causal": True})
        # Marks are read elsewhere, unless a query may see no key by them.
        if marks is not None and (mask is None or gives_zeros or marks.all_see):
            return None
        if mask is not None:
            # Torch's operator gives zeros for a query without keys. Softmax gives nan, or the mean
            # of all values if scores are filled with a number.
            made = self._grouped(op, query, key, value, {**others, "attn_mask": mask})
            if gives_zeros or made is None:
                return made
            return self._with_nan(made, mask) if hides == -math.inf else None
        if bias is None:
            return self._grouped(op, query, key, value, others)
        if bias.value.dtype != query.dtype or not self._keeps_keys(bias, lengths):
            return None
        made = self._grouped(op, query, key, value, {**others, "attn_mask": bias.value})
        return self._with_sums(made, bias)

    def _with_hidden_bias(
        self, made: IROp, mask: IRValue, bias: Bias, hides: float, gives_zeros: bool
    ) -> IROp | None:
        """Attention to scores to which a bias is added, and of which some are then filled with a
        number. What is added is the bias, or that number.
        """
        query, key, value = made.operands[:3]
        lengths = query.shape[-2], key.shape[-2]
        marks = self._reader.of(mask, lengths)
        all_see = marks is not None and marks.all_see
        # A query without keys has the mean of all values, where it has heads of its own and nothing
        # is dropped.
        has_mean = value.shape[1] == query.shape[1] and not may_be(
            made.arg("dropout_p", 0.0), lambda rate: rate > 0
        )
        if not all_see and not has_mean:
            return None
        # Scores that a wider bias made wider are not torch's.
        if torch.promote_types(bias.value.dtype, query.dtype) != query.dtype:
            return None
        if not hides_nothing(self._reader, self._terms(bias), lengths):
            return None
        new = _NewOps(made, self._taken)
        added = bias.value
        if added.dtype != query.dtype:
            added = new.make("to", "bias", added, added.shape, (added,), {"dtype": query.dtype})
        shape = broadcast([mask.shape, added.shape])
        added = new.make("where", "bias", added, shape, (mask, added), {"other": hides})
        made = made.with_args(attn_mask=added)
        # What a query without keys gives is chosen behind the kernel, whose gradients are not exact
        # there.
        if not all_see:
            shape = (*mask.shape[:-1], 1)
            sees = new.make("any", "sees", mask, shape, (mask,), {"dim": -1, "keepdim": True})
            other: Arg = 0.0 if gives_zeros else math.nan
            if not gives_zeros and hides != -math.inf:
                shape = (*value.shape[:2], 1, value.shape[3])
                keep = {"dim": -2, "keepdim": True}
                other = new.make("mean", "mean", value, shape, (value,), keep)
            (result,) = made.results
            attended = new.make(made.target, "attended", result, result.shape, (), dict(made.args))
            made = self._made(made, "where", (sees, attended), {"other": other})
        self.before[made.name] = tuple(new.ops)
        return self._with_sums(made, bias)

    @staticmethod
    def _terms(bias: Bias) -> list[IRValue]:
        """All that a bias adds, without its sums."""
        terms = [bias.value, *(value for op in bias.sums for value in op.operands)]
        made = {result.name for op in bias.sums for result in op.results}
        # Sums are new, and known by what they add.
        return [value for value in terms if value.name not in made]

    def _keeps_keys(self, bias: Bias, lengths: tuple[Size, Size]) -> bool:
        """Whether a bias leaves each query a key. If it does as long as samples have keys, that is
        checked from here on.
        """
        choices = masks_of_keys(self._reader, self._terms(bias), lengths)
        for choice in choices or ():
            self.checked.setdefault(choice.name, self._checked(choice))
        return choices is not None

    def _checked(self, choice: IROp) -> tuple[IROp, ...]:
        """``where`` by a mask of keys, which is checked to leave each sample a key."""
        mask = choice.arg("condition")
        found = replace(mask, name=unused(f"{choice.name}_keys", self._taken), fqn=None)
        found = replace(found, kind=ValueKind.ACTIVATION)
        check = replace(
            self._made(choice, "any_chosen", (mask,), {}), name=found.name, results=(found,)
        )
        return check, choice.with_args(condition=found)

    def _with_nan(self, made: IROp, mask: IRValue) -> IROp:
        """Attention that is nan for a query without keys."""
        (result,) = made.results
        attended = replace(result, name=unused(f"{made.name}_attended", self._taken))
        shape = (*mask.shape[:-1], 1)
        sees = IRValue(unused(f"{made.name}_sees", self._taken), shape, torch.bool)
        self.before[made.name] = (
            replace(made, name=attended.name, results=(attended,)),
            replace(
                self._made(made, "any", (mask,), {"dim": -1, "keepdim": True}),
                name=sees.name,
                results=(sees,),
            ),
        )
        return self._made(made, "where", (sees, attended), {"other": math.nan})

    def _with_sums(self, made: IROp | None, bias: Bias | None) -> IROp | None:
        """An operator that was made; it reads the sums of a bias."""
        if made is not None and bias is not None:
            self.sums += bias.sums
        return made

    def _with_sinks(self, logits: IRValue) -> tuple[IRValue, IRValue] | None:
        """The scores and the sinks, by head, of both end to end, the largest taken off or not."""
        shifted = self._chain.step(logits, "sub")
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
        if self._chain.num_uses(joined.results[0]) != uses:
            return None
        scores, sinks = joined.operands
        if self._chain.num_uses(scores) != 1 or sinks.shape[-1] != 1:
            return None
        expanded = self._reader.made_by(sinks, "expand")
        views = "reshape", "view", "getitem"
        viewed = self._reader.made_by(expanded.operands[0], *views) if expanded else None
        if viewed is None or viewed.operands[0].ndim != 1 or len(viewed.operands) != 1:
            return None
        heads = viewed.operands[0]
        return (scores, heads) if viewed.results[0].shape == (1, *heads.shape, 1, 1) else None

    def _scores(self, scores: IRValue, gives_zeros: bool) -> _Scores | None:
        """What makes scores of a query and a key, and hides some of them. ``gives_zeros``: a query
        that sees no key has no weights.
        """
        hidden = self._hidden(scores)
        products = None if hidden is None else self._chain.products(hidden.kept)
        if hidden is None or products is None:
            return None
        marks = self._reader.of(hidden.mask, (products.query.shape[-2], products.key.shape[-2]))
        if marks is None:
            return None
        if gives_zeros or marks.all_see:
            return _Scores(products, marks, "zeros")
        return None if hidden.blind is None else _Scores(products, marks, hidden.blind)

    def _hidden(self, scores: IRValue) -> _Hidden | None:
        """The scores, and the mask of those that count."""
        added = self._chain.step(scores, "add")
        if added is not None and not added.has_arg("alpha") and len(added.operands) == 2:
            for kept, other in (added.operands, added.operands[::-1]):
                found = self._of_added(other)
                if found is not None:
                    mask, hides = found
                    return _Hidden(kept, mask, "nan" if hides == -math.inf else "mean")
        chosen = self._chosen(scores)
        if chosen is None:
            return None
        mask, kept, hides = chosen
        # Infinity in the place of scores is nan, which torch's operator and a choice behind it say.
        return _Hidden(kept, mask, None if hides == -math.inf else "constant")

    def _chosen(self, scores: IRValue) -> tuple[IRValue, IRValue, float] | None:
        """The mask, the scores and the number of ``where(mask, scores, least)``."""
        chosen = self._chain.step(scores, "where")
        if chosen is None:
            return None
        mask, kept = (chosen.arg(name) for name in ("condition", "input"))
        hides = self._reader.number(chosen.arg("other"))
        if hides is None or hides > _LEAST:
            return None
        both = isinstance(mask, IRValue) and isinstance(kept, IRValue)
        return (mask, kept, hides) if both else None

    def _of_added(self, added: IRValue) -> tuple[IRValue, float] | None:
        """The mask ``m`` of ``where(m, 0, least)``, and the number."""
        chosen = self._reader.made_by(added, "where")
        if chosen is None:
            return None
        mask, kept, other = (chosen.arg(name) for name in ("condition", "input", "other"))
        zero = self._reader.number(kept)
        if zero is None or zero != 0 or not isinstance(mask, IRValue):
            return None
        # The least number of the dtype, or -inf: its softmax is 0. Any other number is a bias.
        hides = self._reader.number(other)
        return (mask, hides) if hides is not None and hides <= _LEAST else None


class _NewOps:
    """Operators that are new in front of one that was ``made``."""

    def __init__(self, made: IROp, taken: set[str]) -> None:
        self._made, self._taken = made, taken
        self.ops: list[IROp] = []

    def make(
        self,
        target: str,
        name: str,
        like: IRValue,
        shape: tuple[Size, ...],
        tensors: tuple[IRValue, ...],
        others: Mapping[str, Arg],
    ) -> IRValue:
        """The result of a new operator: a value like another one, of a shape."""
        name = unused(f"{self._made.name}_{name}", self._taken)
        value = replace(like, name=name, shape=shape, kind=ValueKind.ACTIVATION, fqn=None)
        if "dtype" in others:
            value = replace(value, dtype=others["dtype"])
        opdef = registry.get(target)
        assert opdef is not None
        args = opdef.bind(tensors, others)
        self.ops.append(replace(self._made, name=name, target=target, args=args, results=(value,)))
        return value


def _are_plain(*tensors: IRValue) -> bool:
    """Whether these have samples, heads, positions and width, and the same samples."""
    return all(x.ndim == 4 and x.shape[0] == tensors[0].shape[0] for x in tensors)
