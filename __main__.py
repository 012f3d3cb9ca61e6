"""The command line: ``shardwright ...``, or ``python -m shardwright ...``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardwright.runtime.cli import COMMANDS
from shardwright.runtime.cli import main as run_without_compiler


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. The compiler is imported for those that need it."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] and given[0] in COMMANDS:
        return run_without_compiler(given)
    from shardwright.frontend.cli.main import main as run

    return run(given)


if __name__ == "__main__":
    sys.exit(main())
