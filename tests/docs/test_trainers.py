"""The page about trainers of other libraries: its scripts run on four ranks."""

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

TEXTS = """
import datasets, tokenizers, transformers

words = {f"w{number}": number for number in range(99)} | {"<pad>": 99, "<end>": 100}
made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=made, pad_token="<pad>", eos_token="<end>"
)
texts = datasets.Dataset.from_list(
    [{"text": " ".join(f"w{int(token)}" for token in row["input_ids"])} for row in dataset]
)
"""


CLIPPED_BY_VALUE = """
optimizer.zero_grad()
fabric.backward(module(x=x, y=y))
weights = [parameter.detach().clone() for parameter in module.parameters()]
fabric.clip_gradients(module, optimizer, clip_val=1e-4)
for parameter, weight in zip(module.parameters(), weights):
    assert torch.equal(parameter, weight) and 0 < parameter.grad.abs().max() <= 1e-4
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4), ids=["transformers", "pipelines", "fabric", "trl"])
def test_the_scripts_of_the_page_train_on_four_ranks(number: int, tmp_path: Path) -> None:
    if number == 3:
        pytest.importorskip("trl")
    tiny_gpt2(tmp_path / "tiny-gpt2")
    script = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[number]
    (tmp_path / "my_project.py").write_text(MY_PROJECT + (TEXTS if number == 3 else ""))
    # The key-value store lies in the process of rank 0, which must not end first.
    end = "\nimport torch\ntorch.distributed.barrier()\n"
    script = script.replace('TrainingArguments("out"', 'TrainingArguments("out", use_cpu=True')
    script = script.replace('SFTConfig("out"', 'SFTConfig("out", use_cpu=True, save_steps=4')
    script += CLIPPED_BY_VALUE if number == 2 else ""
    (tmp_path / "train.py").write_text(script + end)
    run_script(4, tmp_path, "train.py")
    if number == 2:
        assert (tmp_path / "out/fabric/LATEST").exists()
        return
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    last = "checkpoint-2" if number == 1 else "checkpoint-4"
    assert (tmp_path / "out" / last / "shardwright/LATEST").exists()
