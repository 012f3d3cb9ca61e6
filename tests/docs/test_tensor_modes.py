"""The examples of the page about tensor modes run."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tensor-modes.md"


def test_the_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example: dict[str, object] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        exec(block.replace("load_module=False", "load_module=False, reuse='moo'"), example)
    assert len(list(tmp_path.rglob("gencode3.py"))) == 1
