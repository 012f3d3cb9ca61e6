"""The option that renews golden files, and the fixture that compares with them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# a loaded machine is no defect of the code under test
settings.register_profile("shardwright", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shardwright")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what the golden files should be instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: the text is that of ``tests/golden/<name>``, or with ``--update-golden`` becomes it."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
            return
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        if text != expected:
            diff = difflib.unified_diff(expected.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm="")
            pytest.fail("\n".join(["differs from its golden file; `pytest --update-golden` renews it", *diff]), pytrace=False)

    return compare
