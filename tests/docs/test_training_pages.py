"""The examples of the pages about optimizers and about speed run."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", ["distributed-optimizer.md", "performance.md", "precision.md"])
def test_the_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = "\n".join(
        re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), flags=re.DOTALL)
    )
    (tmp_path / "page.py").write_text(source)
    exec(compile(source, str(tmp_path / "page.py"), "exec"), {"__name__": "page"})
