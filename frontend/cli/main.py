"""The command line: parses it, runs the command, and prints errors in words.

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
from collections.abc import Sequence

from shardwright.frontend.cli.commands import BROKEN_PIPE, INTERRUPTED, parse
from shardwright.frontend.cli.progress_text import ProgressText
from shardwright.runtime.activity import listening
from shardwright.runtime.errors import ShardwrightError, format_error

_BOLD_RED, _PLAIN = "\033[1;31m", "\033[0m"

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
        with _progress():
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


def _print_error(text: str) -> None:
    # Not with rich: it is no dependency of the commands that need only the runtime.
    what, _, rest = f"error: {text}".partition("\n")
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        what = f"{_BOLD_RED}{what}{_PLAIN}"
    print(what, *rest.splitlines(), sep="\n", file=sys.stderr)
