"""The examples of the page about data run."""

import re
from pathlib import Path

from shardwright.runtime.ranks.threads import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


def test_the_examples(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example = {"__name__": "my_project"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        exec(block, example)
    assert "0     0/2      all inputs" in capsys.readouterr().out
    assert example["again"].save_state_rank() == example["state"]
    assert example["batch"]["x"].shape == (4, 16)
    assert example["mask"].shape == (4, 1, 16, 16)
    assert next(iter(example["blend"]))["x"].shape == (10, 16)
    assert next(iter(example["pretraining"]))["labels"].tolist()[0] == [6, 7, -100, 9]

    first = run_ranks(2, lambda rank: example["train"](20))
    assert {state["position"] for state in first} == {160}
    second = run_ranks(2, lambda rank: example["train"](30))
    assert {state["position"] for state in second} == {240}
