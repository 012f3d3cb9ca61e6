"""The command line: ``shardwright ...``, or ``python -m shardwright ...``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardwright.runtime.commands import ALIASES, answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Torch and the compiler are imported for those that
    need them.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    given[:1] = [ALIASES.get(name, name) for name in given[:1]]
    if len(given) == 1 and given[0] in ("-h", "--help", "--version"):
        answer(given[0])
    from shardwright.runtime import cli

    if given[:1] and given[0] in cli.COMMANDS:
        return cli.main(given)
    from shardwright.frontend.cli.main import main as run

    return run(given)


if __name__ == "__main__":
    sys.exit(main())
