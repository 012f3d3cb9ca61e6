"""docs/errors.md: every example fails with the text it shows, and what stands there instead
works.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from shardwright.compiler.ops import registry
from shardwright.runtime.errors import ShardwrightError

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "errors.md").read_text()
BEGINNING, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
PARTS = [
    re.search(
        r"(.*?)\n.*?```python\n(.*?)```.*?```text\n(.*?)```.*?```python\n(.*?)```", s, re.DOTALL
    )
    for s in SECTIONS
]
EXAMPLES = [match.groups() for match in PARTS if match]


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    """A folder to work in, and the registry as it was."""
    monkeypatch.setattr(registry, "OPS", dict(registry.OPS))
    monkeypatch.setattr(registry, "CALLABLES", dict(registry.CALLABLES))
    monkeypatch.chdir(tmp_path)


def printed(source: str) -> str:
    """The warnings or the error of an example after the common beginning, as Python would print
    it.
    """
    found = re.search(r"```python\n(.*?)```", BEGINNING, re.DOTALL)
    assert found
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            names = {"__name__": "my_models"}
            exec(compile(found[1], "my_models.py", "exec"), names)
            exec(compile(source, "example.py", "exec"), names)
        except ShardwrightError as error:
            return f"{type(error).__name__}: {error}\n"
    return "".join(f"{type(warning.message).__name__}: {warning.message}\n" for warning in caught)


def comparable(text: str) -> str:
    """Without what differs between runs and releases: the working directory, digests, versions, and
    which of the ranks that raise an error was first.
    """
    text = re.sub(r"gencode\d+\.py", "gencode<rank>.py", text)
    return re.sub(
        r"\b[0-9a-f]{12}\b",
        "<digest>",
        re.sub(r"\d+\.\d+\.\d+", "<version>", text.replace(f"{Path.cwd()}/", "")),
    )


def test_every_section_is_complete():
    assert len(EXAMPLES) == len(SECTIONS) >= 16


def test_the_list_at_the_top_has_every_section_in_order():
    assert re.findall(r"^- \[(.+)\]\(#", BEGINNING, re.MULTILINE) == [
        section.splitlines()[0] for section in SECTIONS
    ]


@pytest.mark.parametrize(
    ("title", "fails", "text", "works"), EXAMPLES, ids=[example[0] for example in EXAMPLES]
)
def test_the_example(title: str, fails: str, text: str, works: str) -> None:
    assert comparable(printed(fails)) == comparable(text)


@pytest.mark.parametrize(
    ("title", "fails", "text", "works"), EXAMPLES, ids=[example[0] for example in EXAMPLES]
)
def test_what_works_instead(title: str, fails: str, text: str, works: str) -> None:
    assert printed(works) == ""
