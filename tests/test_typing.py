"""What type checkers see of the public names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs/getting-started.md"

MY_PROJECT = """
from collections.abc import Iterator

import torch
from torch import Tensor

class MyModel(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y).sum()

def my_batches() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.randn(8, 128), torch.randn(8, 10)
"""

SHOWN = """
reveal_type(model)
reveal_type(shardwright.parallelize(MyModel, {}, "tp", config))
reveal_type(shardwright.parallelize(MyModel, {}, "tp", config, load_module=False))
reveal_type(shardwright.verify(MyModel(), {}, "tp", config))
"""


@pytest.mark.slow
def test_the_example_of_the_readme_passes_mypy(tmp_path: Path) -> None:
    """It passes with the settings that the guide gives for checkouts."""
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    settings = re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
    settings = settings.replace("/path/to/checkout", str(ROOT))
    (tmp_path / "pyproject.toml").write_text(settings)
    (tmp_path / "my_project.py").write_text(MY_PROJECT)
    (tmp_path / "train.py").write_text(example + SHOWN)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    module = "shardwright.runtime.module.parallel_module.ParallelModule"
    report = "shardwright.frontend.verification.verify.VerifyReport"
    assert re.findall(r'Revealed type is "(.*)"', done.stdout) == [
        module,
        f"type[{module}]",
        "None",
        report,
    ]
