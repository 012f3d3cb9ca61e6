"""The examples of the page about the distributed optimizer run."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "distributed-optimizer.md"


def test_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL))
    (tmp_path / "page.py").write_text(source)
    exec(compile(source, str(tmp_path / "page.py"), "exec"), {"__name__": "page"})
