"""Random numbers that are the same in every run, less work for the garbage collector, the option
that renews golden files, the fixture that compares with them.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from shardwright.compiler.collector import only_new_objects
from shardwright.compiler.trace.context.fakes import note_caches

# A loaded machine is no defect of the code under test. `--hypothesis-profile=explore` looks at
# other examples each time.
ANY_SPEED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("shardwright", derandomize=True, max_examples=40, **ANY_SPEED)
settings.register_profile("explore", **ANY_SPEED)
settings.load_profile("shardwright")

GOLDEN = Path(__file__).parent / "golden"

RUNNING = contextlib.ExitStack()
"""What lasts while tests run: compiles inside need not ask what is set aside, which takes long."""

# The collector would walk millions of objects of torch, transformers and pytest again and again,
# for a tenth of the time.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what the golden files should be instead of comparing",
    )


def pytest_collection_finish() -> None:
    """What was imported and collected stays: from here on the collector looks at what tests
    make.
    """
    freeze()
    RUNNING.enter_context(only_new_objects())
    gc.set_threshold(50_000, 10, 10)
    gc.enable()


def pytest_sessionfinish() -> None:
    RUNNING.close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """What a test leaves behind is in caches and stays, too."""
    young, *older = gc.get_count()
    if young > 10_000 or any(older):
        freeze()


def freeze() -> None:
    """Nobody walks again over what is alive now: not the collector, nor traces, which look for
    cached functions.
    """
    note_caches()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures of any scope: what a test draws does not depend on the tests before it."""
    random.seed(0)
    torch.default_generator.manual_seed(0)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: the text is that of ``tests/golden/<name>``, or with
    ``--update-golden`` becomes it.
    """

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
            return
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        if text != expected:
            diff = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm=""
            )
            pytest.fail(
                "\n".join(
                    ["differs from its golden file; `pytest --update-golden` renews it", *diff]
                ),
                pytrace=False,
            )

    return compare
