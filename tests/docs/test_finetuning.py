"""The pages about whole runs: their settings exist, their code runs, their commands work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import transformers
from tiny_folder import tiny_gpt2

from shardwright.frontend.training.hooks import PLACES
from shardwright.frontend.training.read_settings import read_run
from shardwright.frontend.training.run_checks import check_settings
from shardwright.runtime.ranks.threads import run_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "finetuning.md").read_text()


def test_the_settings_of_the_page(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "run.yaml"
    file.write_text(text)
    (options,) = re.findall(r"train -c run.yaml (.*) --print-config", PAGE)
    read = read_run(file, options.split())
    check_settings(read.settings)
    known = [line.split(": ")[0] for line in str(read).splitlines()]
    # Every name of the table is a setting: `.name` continues the section before it.
    table = PAGE.split("| setting | what it says |")[1].split("\n\n")[0]
    for row in table.splitlines()[2:]:
        section = ""
        for name in re.findall(r"`([\w.]+)`", row.split("|")[1]):
            path = section + name if name.startswith(".") else name
            section = path.rpartition(".")[0]
            assert path in known, path
    for place in re.findall(r"`(on_(?!world)\w+)`", PAGE):
        assert place in PLACES, place
    # What --print-config is said to print.
    printed = {line.split("#")[0].strip() for line in str(read).splitlines()}
    (shown,) = re.findall(r"```text\n(global_batch.*?)```", PAGE, re.DOTALL)
    assert {line.split("#")[0].strip() for line in shown.strip().splitlines()} <= printed


def test_the_code_of_the_pages() -> None:
    names: dict[str, object] = {}
    for page in ("finetuning.md", "cluster.md"):
        text = (ROOT / "docs" / page).read_text()
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(block, names)
    asked: list[str] = []
    run = SimpleNamespace(
        step=3, world=SimpleNamespace(rank=0), stop=SimpleNamespace(ask=asked.append)
    )
    hook = names["on_step_end"]
    assert callable(hook) and callable(names["run_it"]) and callable(names["join"])
    hook(run, {"loss": 0.05})
    hook(run, {})
    assert asked == ["the loss is low enough"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_gpt2(tmp_path / "tiny-gpt2")
    (code,) = (x for x in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "peft" in x)
    names: dict[str, Any] = {}
    exec(code, names)
    names["prepare"]()
    run_ranks(2, names["tune"])
    names["export"]()
    base = transformers.AutoModelForCausalLM.from_pretrained("tiny-gpt2")
    read: Any = peft.PeftModel.from_pretrained(base, "adapter-1")
    tuned = [p for name, p in read.named_parameters() if "lora_B" in name]
    assert tuned and all(p.any() for p in tuned)


@pytest.mark.slow
def test_the_example_goes_on_with_other_ranks_and_another_plan(tmp_path: Path) -> None:
    def run(num_ranks: int, *flags: str) -> str:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={num_ranks}", str(ROOT / "examples" / "finetune.py")]
        done = subprocess.run(
            [*command, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    first = run(2, "--policy", "tp", "--steps", "20")
    second = run(3, "--policy", "dp", "--steps", "30")
    assert "goes on after step 20" in second
    losses = [float(found) for found in re.findall(r"^step .* loss (\S+)", first + second, re.M)]
    assert len(losses) == 3 and losses[2] < losses[1] < losses[0]
    assert (tmp_path / "finetuned" / "exported-30" / "config.json").exists()
