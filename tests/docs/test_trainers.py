"""The page about trainers of other libraries: its two scripts run on four ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from spawn import run_script
from tiny_folder import tiny_gpt2

PAGE = (Path(__file__).resolve().parents[2] / "docs/trainers.md").read_text()

MY_PROJECT = """
import torch

torch.manual_seed(0)
dataset = [{"input_ids": x, "labels": x} for x in torch.randint(0, 101, (32, 8))]
samples = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 2))


class MyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 2)

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.down(self.up(x).relu()), y)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1], ids=["transformers", "fabric"])
def test_the_scripts_of_the_page_train_on_four_ranks(number: int, tmp_path: Path) -> None:
    tiny_gpt2(tmp_path / "tiny-gpt2")
    script = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[number]
    (tmp_path / "my_project.py").write_text(MY_PROJECT)
    # The key-value store lies in the process of rank 0, which must not end first.
    end = "\nimport torch\ntorch.distributed.barrier()\n"
    script = script.replace('TrainingArguments("out"', 'TrainingArguments("out", use_cpu=True')
    (tmp_path / "train.py").write_text(script + end)
    run_script(4, tmp_path, "train.py")
    if number:
        assert (tmp_path / "out/fabric/LATEST").exists()
        return
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert (tmp_path / "out/checkpoint-4/shardwright/LATEST").exists()
