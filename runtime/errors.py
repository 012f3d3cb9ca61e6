"""Every error a user can see: one exception tree, one formatter.

An error has four parts: *what* went wrong, *where* (the user's file:line and module path), *why*
(the numbers) and *what to try*. Checks of input raise one of these classes; ``assert`` is kept for
internal invariants.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

COMPILE_AGAIN = "compile again with reuse='override', which loses edits of the files"
"""What to try where files are not what they should be: people edit and accept generated files."""


class ShardwrightError(Exception):
    """Base of all errors raised on purpose.

    ``what`` is one sentence. ``where``, ``why`` and ``hint`` are printed below it, each on a line
    of its own. ``exit_code``: what the command line ends with.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.what, self.where, self.why, self.hint = what, where, why, hint
        super().__init__(format_error(what, where=where, why=why, hint=hint))


class ConfigError(ShardwrightError, ValueError):
    """A setting, or a combination of settings, that cannot be honoured."""


class ArgumentError(ShardwrightError, TypeError):
    """A function was called with an argument of the wrong type, or with other arguments than it
    has.
    """


class TraceError(ShardwrightError, RuntimeError):
    """The model could not be turned into a graph."""


class AnnotationError(ShardwrightError, ValueError):
    """An operator annotation that does not parse, or does not fit the shapes it is used with."""


class PlanError(ShardwrightError, ValueError):
    """A plan, or a request to a policy, that is not valid for the graph."""


class LoadError(ShardwrightError, RuntimeError):
    """Generated files that are missing, altered, or made for something else."""


class CheckpointError(ShardwrightError, RuntimeError):
    """A checkpoint that is incomplete, altered, or does not fit the module."""


class MissingFileError(CheckpointError, FileNotFoundError):
    """A file of a checkpoint is not there."""


class FileError(ShardwrightError, OSError):
    """Files that cannot be written: no room, no permission, something else in their place."""


class InputError(ShardwrightError, ValueError):
    """A call of a parallel module with arguments it was not compiled for."""


class DataError(ShardwrightError, RuntimeError):
    """A source of samples that is missing, damaged or changed, or gives what cannot be used; or a
    state of a loader that does not fit.
    """


class UsageError(ShardwrightError, RuntimeError):
    """A call at a time, or in an order, in which it cannot be honoured."""


class DistributedError(ShardwrightError, RuntimeError):
    """The process group, the ranks or a collective are not as the plan needs them."""


class CollectiveError(DistributedError):
    """A collective, or a message between ranks, that failed or took too long: some rank is gone,
    stuck or too slow.
    """


class InternalError(ShardwrightError, AssertionError):
    """A broken internal invariant: a defect of shardwright itself."""


def format_error(
    what: str, *, where: str | None = None, why: str | None = None, hint: str | None = None
) -> str:
    """The text of an error, one labelled line per part that is present."""
    lines = [what]
    lines += [f"  where: {where}"] if where else []
    lines += [f"  why:   {why}"] if why else []
    lines += [f"  try:   {hint}"] if hint else []
    return "\n".join(lines)


@contextmanager
def malformed(
    kind: type[ShardwrightError], what: str, *, where: str | None = None, hint: str | None = None
) -> Iterator[None]:
    """Inside the block, data from outside is taken apart: what Python says of it becomes the reason
    of an error of ``kind``.
    """
    try:
        yield
    # Said in words already, where more is known.
    except ShardwrightError:
        raise
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise kind(
            what, where=where, why=f"{type(error).__name__}: {brief_text(error)}", hint=hint
        ) from error


def brief_text(error: BaseException) -> str:
    """The text of an exception, if it has one, on one line."""
    try:
        return " ".join(str(error).split())[:300]
    except Exception:  # of a number with thousands of digits, say
        return "no text"


def on_lines(reasons: Iterable[str]) -> str:
    """Several reasons as one part of an error, a line each."""
    return "\n         ".join(reasons)


class _Brief(reprlib.Repr):
    """Values as Python writes them, as far as that is short."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 4, 200, 200, 100
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 8

    def repr_int(self, x: int, level: int) -> str:
        if abs(x) < 10**self.maxlong:
            return repr(x)
        # Long ones have no text at all
        return f"a whole number of about {int(math.log10(2) * x.bit_length())} digits"


def brief(value: object) -> str:
    """A value for a message, however large, deep or broken it is."""
    try:
        return _Brief().repr(value)
    except Exception:  # a class may do as it likes in __repr__, or have an odd name
        return f"<{type(value).__name__}>"


def _abbreviates(short: str, name: str) -> bool:
    """Whether ``short`` is two or more letters of ``name``, its first among them, in order."""
    letters = iter(name)
    return len(short) > 1 and short[0] == name[:1] and all(each in letters for each in short)


def did_you_mean(name: object, known: list[str] | tuple[str, ...]) -> str | None:
    """A hint naming the closest of ``known``, or all of them when nothing is close."""
    import difflib

    name = name[:200] if isinstance(name, str) else brief(name)
    # Without case: of all names ``AdamW`` is nearest to ``adamw``, not ``Adam``.
    spelled = {each.casefold(): each for each in known}
    close = difflib.get_close_matches(name.casefold(), spelled, n=1)
    if not close:
        # Abbreviations look like little of the name: ``hf`` stands for ``huggingface``.
        meant = [each for each in spelled if _abbreviates(name.casefold(), each)]
        close = meant if len(meant) == 1 else []
    return (
        f"did you mean {spelled[close[0]]!r}?"
        if close
        else f"one of {', '.join(map(repr, sorted(known)))}"
    )
