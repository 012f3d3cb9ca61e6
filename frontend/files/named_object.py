"""Objects that settings and command lines name: ``package.module:name``."""

from __future__ import annotations

import os
import sys
from functools import reduce
from importlib import import_module
from typing import Any

from shardwright.runtime.errors import ConfigError, did_you_mean


def load_target(text: str) -> Any:
    """The object that ``package.module:name`` names; modules of the working directory are found
    too.

    Raises :class:`ConfigError` if there is no such module or name.
    """
    module_name, separator, path = text.partition(":")
    if not module_name or not separator or not path:
        raise ConfigError(
            f"{text!r} is not of the form module:name",
            hint="for example my_package.models:make_gpt",
        )
    # A console script has the folder of the script there, where `python -m` has this one.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # an import inside the user's module
        raise ConfigError(
            f"there is no module {module_name!r}",
            why=str(error),
            hint="run in the folder that holds it, or add that folder to PYTHONPATH",
        ) from error
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError as error:
        names = tuple(name for name in vars(module) if not name.startswith("_"))
        hint = did_you_mean(path, names) if names else None
        raise ConfigError(
            f"module {module_name!r} has no {path!r}", where=module.__file__, hint=hint
        ) from error
