"""What one operator is called, how its arguments bind, how a call of it is written, and where its
rule comes from.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.compiler.ir.op import Arg, IROp, RankDevice, WhenTraining
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.rule import OpRule
from shardwright.runtime.errors import AnnotationError

RuleMaker = Callable[[IROp], OpRule | str]
"""Makes the rule of a call from its shapes and arguments, or an annotation string that gives it."""

CommonRenames = {"axis": "dim", "keepdims": "keepdim", "self": "input"}


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an operator. ``star``: takes the remaining positional arguments, or one
    tuple of them.
    """

    name: str
    default: Any = REQUIRED
    keyword_only: bool = False
    star: bool = False


@functools.cache
def parse_signature(text: str) -> tuple[Parameter, ...]:
    """Read ``"input, *shape"`` or ``"input, other, *, alpha=1"``; defaults are Python literals."""
    arguments = ast.parse(f"def f({text}): pass").body[0].args  # type: ignore[attr-defined]
    # Python keeps the defaults of the last arguments.
    defaults = [REQUIRED] * (len(arguments.args) - len(arguments.defaults)) + [
        ast.literal_eval(d) for d in arguments.defaults
    ]
    parameters = [Parameter(a.arg, d) for a, d in zip(arguments.args, defaults, strict=True)]
    if arguments.vararg:
        parameters.append(Parameter(arguments.vararg.arg, REQUIRED, star=True))
    for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(
            Parameter(a.arg, REQUIRED if d is None else ast.literal_eval(d), keyword_only=True)
        )
    return tuple(parameters)


@dataclass(frozen=True)
class OpDef:
    """One operator of the registry.

    ``name``: its canonical name. ``signature``: see :func:`parse_signature`. ``code``: how a call
    is written: ``"F.linear"`` a function, ``".view"`` a method of the first argument, ``"+"`` infix
    between two arguments (prefix if there is one; with keyword-only options the function
    ``torch.<name>`` is called instead), ``"[]"`` indexing; ``"shardwright.runtime.ops.x.f"`` is
    imported and called by its last name. ``rule`` makes the rule. ``renames``: other names of its
    parameters. ``imports``: the import statements a call needs, where ``code`` does not tell them.
    """

    name: str
    signature: str
    code: str
    rule: RuleMaker
    renames: Mapping[str, str] | None = None
    imports: tuple[str, ...] | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return parse_signature(self.signature)

    def bind(self, args: tuple[Arg, ...], kwargs: Mapping[str, Arg]) -> tuple[tuple[str, Arg], ...]:
        """Arguments by name in signature order, without those equal to their default."""
        # ``dim`` and ``axis`` are one parameter, for example.
        renames = {**CommonRenames, **(self.renames or {})} if kwargs else {}
        named = {renames.get(key, key): value for key, value in kwargs.items()}
        positional = list(args)
        # Positional arguments fill the parameters that are not named, in order.
        for parameter in self.parameters:
            if parameter.name in named or not positional or parameter.keyword_only:
                continue
            if parameter.star:
                # x.view(2, 3) and x.view((2, 3)) are one call.
                one = len(positional) == 1 and isinstance(positional[0], tuple | list)
                named[parameter.name] = tuple(positional[0]) if one else tuple(positional)
                positional = []
            else:
                named[parameter.name] = positional.pop(0)
        known = {parameter.name: parameter.default for parameter in self.parameters}
        if positional or not named.keys() <= known.keys():
            extra = [*positional, *(key for key in named if key not in known)]
            raise AnnotationError(f"arguments {extra} do not fit {self.name}({self.signature})")
        return tuple(
            (key, named[key])
            for key in known
            if key in named and not _is_default(named[key], known[key])
        )

    @property
    def is_sign(self) -> bool:
        """Whether calls are written with an operator sign, like ``+``."""
        return (
            self.code != "[]"
            and not self.code.strip(".").replace(".", "").replace("_", "").isalnum()
        )

    @property
    def function_code(self) -> str:
        """The function that means the same as the operator sign, with all its options."""
        return f"torch.{self.name}"

    def fits_sign(self, names: Collection[str]) -> bool:
        """Whether a call with these arguments can be written with the sign: it has no options
        beside its operands.
        """
        return not any(
            parameter.name in names for parameter in self.parameters if parameter.keyword_only
        )

    def write(
        self, args: Mapping[str, str | tuple[str, ...]], by_keyword: Collection[str] = ()
    ) -> str:
        """The call as Python source, from the source of each argument (a tuple of sources for a
        star parameter).

        ``by_keyword``: the parameters to name even where they could stand by position.
        """
        if self.code == "[]":
            return f"{_atomic(args['input'])}[{args['index']}]"
        code = self.code
        if self.is_sign:
            if self.fits_sign(args):
                texts = [_atomic(text) for text in args.values()]
                # As the formatter writes it: x**2, but (a + b) ** 2.
                close = self.code == "**" and all(map(is_simple, texts))
                sign = self.code if close or len(texts) == 1 else f" {self.code} "
                return f"{sign}{texts[0]}" if len(texts) == 1 else sign.join(texts)
            code = self.function_code
        words: list[str] = []
        in_order = True  # no parameter was left out so far: the next one may be positional
        for parameter in self.parameters:
            text = args.get(parameter.name)
            if text is None:
                in_order = False
            elif parameter.star:
                words += list(text) or ["()"]
            elif in_order and not parameter.keyword_only and parameter.name not in by_keyword:
                words.append(str(text))
            else:
                in_order = False
                words.append(f"{parameter.name}={text}")
        if code.startswith("."):
            return f"{_atomic(words[0])}{code}({', '.join(words[1:])})"
        return f"{code}({', '.join(words)})"


def _is_default(value: Arg, default: Any) -> bool:
    if default is REQUIRED or isinstance(value, IRValue | WhenTraining | RankDevice | torch.Tensor):
        return False
    # Their source tells apart what is equal: -0.0 is not 0.0, (True,) is not (1,).
    return type(value) is type(default) and bool(value == default) and repr(value) == repr(default)


def is_simple(text: str) -> bool:
    """Whether formatters put a power sign or the colon of a slice next to this source without
    spaces: a number, a name, attributes of a name.
    """
    node = ast.parse(text, mode="eval").body
    while isinstance(node, ast.Attribute | ast.UnaryOp):
        node = node.value if isinstance(node, ast.Attribute) else node.operand
    return isinstance(node, ast.Name | ast.Constant)


def _atomic(text: str | tuple[str, ...]) -> str:
    """Source that binds tightly: parenthesised unless it is a name, a call or a literal."""
    assert isinstance(text, str)
    node = ast.parse(text, mode="eval").body
    simple = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant)
    return text if simple else f"({text})"
