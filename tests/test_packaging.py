"""What is installed is what is in the folders, and importing it stays cheap."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOP_FOLDERS = (
    "data",
    "experts",
    "frontend",
    "integrations",
    "compiler",
    "runtime",
    "policies",
    "codegen_templates",
)


def test_the_packages_list_names_every_package_folder() -> None:
    folders = {init.parent for top in TOP_FOLDERS for init in (ROOT / top).rglob("__init__.py")}
    found = {"shardwright"} | {
        ".".join(("shardwright", *folder.relative_to(ROOT).parts)) for folder in folders
    }
    assert sorted(found) == sorted(PROJECT["tool"]["setuptools"]["packages"])


def test_every_folder_with_python_files_is_a_package_with_content() -> None:
    for top in TOP_FOLDERS:
        for folder in {path.parent for path in (ROOT / top).rglob("*.py")}:
            assert (folder / "__init__.py").exists(), f"{folder} has modules but no __init__.py"
            files = {path.name for path in folder.iterdir() if path.suffix in (".py", ".jinja")}
            assert files != {"__init__.py"} or (folder / "__init__.py").stat().st_size, (
                f"{folder} is empty"
            )


def test_only_two_modules_lie_at_the_root() -> None:
    """Any other would be installed as a part of the package; a conftest.py would be imported under
    a second name.
    """
    assert {path.name for path in ROOT.glob("*.py")} <= {"__init__.py", "__main__.py"}
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_templates_are_package_data() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["shardwright.codegen_templates"]
    files = [
        path
        for path in (ROOT / "codegen_templates").iterdir()
        if path.is_file() and path.suffix not in (".py", ".md")
    ]
    assert files and all(any(path.match(pattern) for pattern in patterns) for path in files)


def test_importing_imports_nothing_that_is_not_needed() -> None:
    """Neither torch with the package, nor the compiler with the runtime, nor solvers with the
    compiler.
    """
    code = """
import importlib, pkgutil, sys

def require_without(*names):
    there = sys.modules.keys() & set(names)
    assert not there, sorted(there)

import shardwright
require_without("torch")
shardwright.ParallelModule
require_without("shardwright.data")
shardwright.data.roles
import shardwright.experts, shardwright.runtime
for module in pkgutil.walk_packages(shardwright.runtime.__path__, "shardwright.runtime."):
    importlib.import_module(module.name)
require_without(
    "networkx", "ortools", "jinja2", "rich", "shardwright.compiler", "shardwright.policies"
)
shardwright.parallelize
importlib.import_module("shardwright.policies.dp")
require_without("ortools", "shardwright.policies.autodist")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
