"""The command that shows what this is: ``demo``."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from shardwright.runtime.errors import UsageError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_demo(options: argparse.Namespace) -> int:
    """Run ``demo``: the script ``examples/demo.py`` of a checkout."""
    script = EXAMPLES / "demo.py"
    if not script.is_file():
        raise UsageError(
            "the demo is not installed",
            why=f"it is a script of the repository, and {EXAMPLES} is not there",
            hint="clone the repository: make demo",
        )
    return subprocess.run([sys.executable, str(script)], check=False).returncode
