"""Which tokens chose an expert, asked for one expert after the other.

A loop over experts by hand asks for the tokens of each:

    for index, expert in enumerate(self.experts):
        token, choice = torch.where(chosen == index)        # chosen [tokens, top_k]
        y.index_add_(0, token, expert(x[token]) * weights[token, choice, None])

How many there are depends on values, so no graph can hold such a loop. But it holds the same, run
for all experts at once. So for the time of the trace the answer is a row for each of
:data:`NUM_ROWS` tokens, and ``merge_lanes.py`` makes one dispatch of all of these questions, or
refuses the loop.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.stand_ins import rows_of_expert
from shardwright.compiler.trace.context.source import user_frame
from shardwright.compiler.trace.recorder import Call, Recorder, TensorType, Variable
from shardwright.runtime.errors import TraceError

NUM_ROWS = 1_000_003
"""How many tokens each expert seems to have while its loop is traced: a prime that no model has for
a size, so that what forward computes of it is recognised.
"""


ROWS = "shardwright.compiler.ops.stand_ins.rows_of_expert"
"""The target of the operators that stand for the answers, until they are merged."""


@dataclass(frozen=True, slots=True)
class Question:
    """Which tokens chose ``expert``: where ``chosen [tokens, top_k]`` or ``[tokens]`` has its
    number. ``dims``: the dims of the mask that asks, by the dim of ``chosen`` that each one is.
    """

    chosen: IRValue
    expert: int
    dims: tuple[int, ...]


_VIEWS = {"getitem", "select", "squeeze", "unsqueeze", "view", "reshape", "flatten", "to"}
_CHOOSERS = {"topk", "argmax", "sort", "argsort", "max"}


def chooser_of(chosen: IRValue, made_by: dict[str, IROp]) -> str | None:
    """The operator that chose experts by their scores; ``None`` for numbers of another kind, such
    as tokens or labels.
    """
    op = _chooser(chosen, made_by)
    return None if op is None else op.target


def num_choices(chosen: IRValue, made_by: dict[str, IROp]) -> int | None:
    """The number of things that were chosen from, if it is known."""
    op = _chooser(chosen, made_by)
    dim = None if op is None else op.arg("dim", -1)
    if op is None or not isinstance(dim, int):
        return None
    size = op.operands[0].shape[dim]
    return size if isinstance(size, int) else None


def _chooser(chosen: IRValue, made_by: dict[str, IROp]) -> IROp | None:
    op = made_by.get(chosen.name)
    while op is not None and op.target in _VIEWS:
        op = made_by.get(op.operands[0].name)
    return op if op is not None and op.target in _CHOOSERS else None


def question_of(mask: IRValue, made_by: dict[str, IROp]) -> Question | None:
    """The question that a mask asks, if it compares chosen experts with one of them.

    It is ``chosen == 3``, or index 3 of ``F.one_hot(chosen, num_experts)`` with experts moved to
    the front.
    """
    found = _compared(mask, made_by)
    return None if found is None or chooser_of(found.chosen, made_by) is None else found


def _compared(mask: IRValue, made_by: dict[str, IROp]) -> Question | None:
    op = made_by.get(mask.name)
    if op is None:
        return None
    if op.target in ("to", "bool") or (op.target in ("ne", "gt") and op.arg("other") == 0):
        return _compared(op.operands[0], made_by)
    if op.target == "eq" and type(op.arg("other")) is int:
        chosen = op.operands[0]
        # ``[tokens]``, or ``[tokens, top_k]``.
        whole = not chosen.dtype.is_floating_point and chosen.ndim in (1, 2)
        return Question(chosen, op.arg("other"), tuple(range(chosen.ndim))) if whole else None
    index = op.arg("index")
    if op.target == "getitem" and isinstance(index, tuple) and len(index) == 1:
        return _of_one_hot(op.operands[0], index[0], made_by)
    return None


def _of_one_hot(masks: IRValue, expert: object, made_by: dict[str, IROp]) -> Question | None:
    op = made_by.get(masks.name)
    if op is not None and op.target == "to":
        return _of_one_hot(op.operands[0], expert, made_by)
    if type(expert) is not int or expert < 0 or op is None or op.target != "permute":
        return None
    one_hot = made_by.get(op.operands[0].name)
    while one_hot is not None and one_hot.target == "to":
        one_hot = made_by.get(one_hot.operands[0].name)
    if one_hot is None or one_hot.target != "one_hot":
        return None
    chosen = one_hot.operands[0]
    # ``one_hot(chosen).permute(2, 1, 0)``: experts come first, as each is asked for its row.
    first, *dims = (dim % masks.ndim for dim in op.arg("dims"))
    if first != chosen.ndim or chosen.ndim not in (1, 2):
        return None
    return Question(chosen, expert, tuple(dims))


class ChosenExperts:
    """The answers of one trace."""

    def __init__(self, recorder: Recorder, mode: AbstractContextManager[Any]) -> None:
        self._recorder, self._mode = recorder, mode
        self._known: dict[str, tuple[Tensor, ...]] = {}

    def answer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What stands for ``torch.where(mask)``, ``mask.nonzero(as_tuple=True)``, ``x[mask]`` and
        ``bool(mask.any())``, if the mask asks for the tokens of an expert; else ``None``.
        """
        if name == "__getitem__":
            rows = self.index(args[1], None)
            if rows is None:
                return None
            with self._mode:
                return args[0][rows]
        if name in ("__bool__", "is_nonzero", "item"):
            return self._has_tokens(args[0])
        wanted = {"where": {}, "nonzero": {"as_tuple": True}}.get(name)
        return self.rows(args[0]) if kwargs == wanted and len(args) == 1 else None

    def index(self, index: Any, other: Any) -> Any:
        """An index with rows in the place of a mask that asks for the tokens of an expert;
        ``other`` for any other one.
        """
        mask = index[0] if isinstance(index, tuple) and len(index) == 1 else index
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            return other
        # What argmax has predicted may choose for other reasons.
        question = question_of(self._recorder.value(mask), self._recorder.makers)
        if question is None or chooser_of(question.chosen, self._recorder.makers) != "topk":
            return other
        return self.rows(mask)

    def _has_tokens(self, found: Any) -> bool | None:
        """``True`` for whether an expert has any tokens, which the loop may ask; else ``None``."""
        if not isinstance(found, Tensor):
            return None
        op = self._recorder.makers.get(self._recorder.value(found).name)
        if op is None or op.target != "any" or len(op.args) != 1:
            return None
        if question_of(op.operands[0], self._recorder.makers) is None:
            return None
        _check_branches(user_frame(), self._recorder)
        return True

    def rows(self, mask: Any) -> tuple[Tensor, ...] | None:
        """The token of each row, and its choice; ``None`` if the mask asks for something else."""
        if not isinstance(mask, Tensor):
            return None
        recorder = self._recorder
        value = recorder.value(mask)
        question = question_of(value, recorder.makers)
        if question is None:
            return None
        # The same mask may be asked several times: rows are found once.
        if value.name not in self._known:
            _check_branches(user_frame(), recorder)
            # As many rows as no other size of a model is likely to be, so that they can be told
            # apart.
            fakes = tuple(torch.empty(NUM_ROWS, dtype=torch.int64) for _ in range(mask.ndim))
            call = Call(rows_of_expert, "rows_of_expert", (value,), {})
            made = recorder.emit(call, [TensorType((NUM_ROWS,), torch.int64, False)] * mask.ndim)
            for fake, row in zip(fakes, made, strict=True):
                recorder.bind(fake, Variable(row))
            self._known[value.name] = fakes
        return self._known[value.name]


# ------------------------------------------------------------------------------------------------
# branches on whether an expert has tokens

_SIZES = {"numel", "shape", "size", "len", "nelement", "any"}


def _check_branches(frame: FrameType | None, recorder: Recorder) -> None:
    """Refuse a loop that does something for an expert without tokens: only the branch for those
    that have some is traced.
    """
    line = None if frame is None else _other_branch(frame.f_code, frame.f_lineno)
    if line is not None:
        raise TraceError(
            "a loop over experts does something else for an expert without tokens",
            where=recorder.where(frame),
            why=f"line {line} branches on how many tokens an expert has, and one graph holds for "
            "all numbers of them",
            hint="leave the branch out, as no rows add nothing, or only skip the expert in it "
            "(continue)",
        )


@functools.lru_cache(maxsize=1024)
def _other_branch(code: CodeType, asked_at: int) -> int | None:
    """The line of a branch on the number of tokens that does more than skip an expert without any,
    in the loop that asks for them at a line; ``None`` if there is none, or no source.
    """
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        return None
    ast.increment_lineno(tree, first - 1)
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.While)
        and node.lineno <= asked_at <= (node.end_lineno or 0)
    ]
    if not loops:
        return None
    loop = loops[-1]  # the innermost: a walk goes from the outside in
    answers = _names_that_follow(loop, asked_at)
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and _words(node.test) & answers and _words(node.test) & _SIZES:
            skips = all(isinstance(child, ast.Continue) for child in node.body)
            if node.orelse and not skips:
                return node.lineno
    return None


def _names_that_follow(loop: ast.AST, asked_at: int) -> set[str]:
    """The variables that hold the answer to a question, or what is computed of it."""
    found: set[str] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign | ast.If | ast.AugAssign | ast.Expr):
            value = node.test if isinstance(node, ast.If) else node.value
            asks = value.lineno <= asked_at <= (value.end_lineno or 0)
            if asks or _words(value) & found:
                if asks and isinstance(node, ast.If):  # if mask.any():
                    found |= _words(value) - _SIZES
                for target in getattr(node, "targets", []):
                    found |= _words(target)
    return found


def _words(node: ast.AST) -> set[str]:
    """The names and attributes in an expression."""
    return {
        inner.attr if isinstance(inner, ast.Attribute) else inner.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute | ast.Name)
    } - {"torch", "self"}
