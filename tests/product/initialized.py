"""Every family that ``shardwright.initialize`` is tested with, on four processes:

    python tests/product/initialized.py
    python tests/product/initialized.py llama bert

Each is trained under DistributedDataParallel with two ranks to a model, ended, loaded in new
processes, trained on, merged, and asked for text. All of it equals one device.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "_lib"))

import initialized

if __name__ == "__main__":
    for name in sys.argv[1:] or list(initialized.MODELS):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            initialized.check_family(name, Path(folder))
        print(f"{name:8} equal, {time.monotonic() - began:.0f} s", flush=True)
