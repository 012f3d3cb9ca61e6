"""The command line: ``shardwright ...``, or ``python -m shardwright ...``."""

from __future__ import annotations

import sys

from shardwright.frontend.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
