"""The public names: complete, lazy, and the same for type checkers."""

import ast
import dataclasses
import enum
import inspect
import re
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

import shardwright
from shardwright.runtime.original_names import ORIGINAL_FUNCTION_NAMES

SOURCE = Path(__file__).resolve().parent.parent / "__init__.py"


@pytest.mark.parametrize("name", shardwright.__all__)
def test_every_public_name_is_there(name):
    assert getattr(shardwright, name) is not None
    assert name in dir(shardwright)


def test_the_three_lists_of_names_agree():
    tree = ast.parse(SOURCE.read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    aliases = [(alias, node.module) for node in typed.body for alias in node.names]
    from_imports = {alias.asname or alias.name: module for alias, module in aliases}
    renamed = {alias.asname: alias.name for alias, _ in aliases if alias.asname}
    assert renamed == ORIGINAL_FUNCTION_NAMES
    packages = dict.fromkeys(shardwright._PACKAGES, "shardwright")
    assert from_imports == shardwright._MODULES | packages
    assert sorted({*from_imports, "__version__"}) == sorted(shardwright.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'shardwright' has no attribute 'paralelize'"):
        shardwright.paralelize  # noqa: B018


def test_the_version_is_the_installed_one():
    assert shardwright.__version__ == version("shardwright")


DOCUMENTED = [
    *(
        f"shardwright.{name}"
        for name in set(shardwright.__all__) - {"__version__", "data", "experts"}
    ),
    *(f"shardwright.data.{name}" for name in shardwright.data.__all__),
    *(f"shardwright.experts.{name}" for name in shardwright.experts.__all__),
]


@pytest.mark.parametrize("path", sorted(DOCUMENTED))
def test_help_names_every_field_member_and_option(path):
    owner, _, name = path.rpartition(".")
    value = getattr(import_module(owner), name)
    text = value.__doc__
    if isinstance(value, enum.EnumType):
        wanted = list(value.__members__)
    elif isinstance(value, type):
        wanted = (
            [field.name for field in dataclasses.fields(value)]
            if dataclasses.is_dataclass(value)
            else []
        )
        wanted = [field for field in wanted if field not in ("name", "axes")]
    else:
        parameters = inspect.signature(value).parameters.values()
        wanted = [
            parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
        ]
    missing = [
        option for option in wanted if not re.search(rf"``{option}\b|\b{option}=|<{option}>", text)
    ]
    assert not missing, f"help({name}) says nothing of {missing}"
