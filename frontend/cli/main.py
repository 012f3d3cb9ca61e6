"""The command line: parses it, runs the command, and prints errors and warnings in words.

Exit codes: 0 done; 1 an error, printed in words (``--debug``: with its traceback), or a plan that
``verify`` finds to differ from one device; 2 a command line that does not parse; 130 interrupted by
Ctrl-C; 141 nobody reads what is printed. ``train`` has more (docs/cluster.md).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pkgutil
import select
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TextIO

from shardwright.frontend.cli.commands import BROKEN_PIPE, INTERRUPTED, parse
from shardwright.frontend.cli.progress_text import ProgressText
from shardwright.runtime.activity import listening
from shardwright.runtime.errors import ShardwrightError, format_error

_BOLD_RED, _BOLD_YELLOW, _PLAIN = "\033[1;31m", "\033[1;33m", "\033[0m"

SECONDS_BETWEEN_LINES = 20.0
"""Without a terminal a command says at most once in so many seconds that it does something new."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    began = time.monotonic()
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options is None:
        return 2
    options.began = began  # before torch is imported: limits of time count from here
    # Errors of ours are shown as they are; others ask for a report.
    try:
        with _progress(), _warnings_in_words():
            code: int = pkgutil.resolve_name(options.function)(options)
    except ShardwrightError as error:
        if options.debug:
            raise
        _print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        if options.debug:
            raise
        _print_error(
            format_error("interrupted", why="by Ctrl-C, before there was anything to answer with")
        )
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return BROKEN_PIPE
        if options.debug:
            raise
        what = f"{type(error).__name__}: {error}"
        _print_error(
            format_error(what, hint="run the command again with --debug to see where it was raised")
        )
        return 1
    return code


def _nobody_reads() -> bool:
    """Whether what is printed goes into a pipe that was closed, as by ``| head``."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in watched.poll(0)):
        return False
    # Python writes out the rest when it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _progress() -> contextlib.AbstractContextManager[None]:
    """What shows the progress of a command: a line on a terminal. Where there is none, what takes
    long says now and then that it does something new.
    """
    if not sys.stderr.isatty():
        return listening(ProgressText(SECONDS_BETWEEN_LINES))
    if importlib.util.find_spec("rich") is None:
        return contextlib.nullcontext()
    from shardwright.frontend.cli.progress_line import ProgressLine

    return listening(ProgressLine())


@contextlib.contextmanager
def _warnings_in_words() -> Iterator[None]:
    """Print warnings for users as errors are printed. Where they come from is said of those of
    others, such as the model's own.
    """
    usual = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not issubclass(category, UserWarning):
            usual(message, category, filename, lineno, file, line)
            return
        text = str(message)
        if "\n  where: " not in text and not _is_ours(filename):
            text += f"\n  where: {filename}:{lineno}"
        _print_told("warning", text, _BOLD_YELLOW)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual


def _is_ours(filename: str) -> bool:
    """Whether a file is a module of this package."""
    package = __name__.partition(".")[0]
    return any(
        getattr(module, "__file__", None) == filename
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == package
    )


def _print_error(text: str) -> None:
    _print_told("error", text, _BOLD_RED)


def _print_told(kind: str, text: str, colour: str) -> None:
    # Not with rich: it is no dependency of the commands that need only the runtime.
    what, _, rest = f"{kind}: {text}".partition("\n")
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        what = f"{colour}{what}{_PLAIN}"
    print(what, *rest.splitlines(), sep="\n", file=sys.stderr)
