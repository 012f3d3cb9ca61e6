"""The page about models of Hugging Face: its script trains on four ranks, with all that follows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from spawn import run_script
from tiny_folder import tiny_gpt2

PAGE = (Path(__file__).resolve().parents[2] / "docs/huggingface.md").read_text()

WRONG = """
import pytest

with pytest.raises(shardwright.UsageError, match="would sum gradients of GPT2LM"):
    DistributedDataParallel(large)
with pytest.raises(shardwright.UsageError, match="DistributedDataParallel has not"):
    model_in_ddp(**inputs, labels=inputs["input_ids"]).loss.backward()
"""


@pytest.mark.slow
def test_the_script_of_the_page_trains_on_four_ranks(tmp_path: Path) -> None:
    tiny_gpt2(tmp_path / "tiny-gpt2")
    train, ours, searched, state, meta, beforehand = re.findall(
        r"```python\n(.*?)```", PAGE, re.DOTALL
    )
    lines = [
        train,
        "model_in_ddp = model",
        ours,
        searched,
        state,
        "save(model, optimizer, 3)",
        "assert go_on(model, optimizer) == 3",
        meta,
        WRONG,
        beforehand,
        # The key-value store lies in the process of rank 0, which must not end first.
        "torch.distributed.barrier()",
    ]
    (tmp_path / "train.py").write_text("\n".join(lines))
    run_script(4, tmp_path, "train.py")
    files = {file.name for file in (tmp_path / "merged_ckpt").iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors"}
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged_ckpt")
    assert (tmp_path / "parallel_ckpt" / "config.json").exists()
