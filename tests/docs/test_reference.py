"""The reference has every public name, and each of them has a docstring to show."""

import re
from importlib import import_module
from pathlib import Path

import shardwright
from shardwright import data, experts

PAGE = Path(shardwright.__file__).resolve().parent / "docs/api/index.md"


def test_every_public_name_is_in_the_reference():
    found: dict[str, set[str]] = {}
    module = ""
    for line in PAGE.read_text().splitlines():
        if match := re.fullmatch(r"\.\. currentmodule:: (\S+)", line):
            module = match[1]
        elif match := re.fullmatch(r"\.\. auto\w+:: (\w+)", line):
            found.setdefault(module, set()).add(match[1])
    elsewhere = {"__version__", "data", "experts"}
    assert found["shardwright"] == set(shardwright.__all__) - elsewhere
    assert found["shardwright.data"] == set(data.__all__)
    assert found["shardwright.experts"] == set(experts.__all__)
    for path, names in found.items():
        if "integrations" not in path:  # their libraries take seconds to import
            undocumented = [n for n in names if not getattr(import_module(path), n).__doc__]
            assert not undocumented, f"{path} has names without a docstring"
