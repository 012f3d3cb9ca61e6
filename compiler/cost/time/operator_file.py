"""The file of measured times of operators. It lies beside the file of the machine:
``laptop.operators.json`` beside ``laptop.json``.
"""

from __future__ import annotations

import json
from pathlib import Path

from shardwright.compiler.cost.machine.json_fields import Fields
from shardwright.compiler.cost.time.call_times import OperatorTimes
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.json_text import parse_json

FORMAT = 1
"""The version of the JSON form."""


def times_file(hardware: str) -> Path | None:
    """The path of the times that were measured on a machine; ``None`` for a preset, which is no
    machine that anybody measured.
    """
    return Path(hardware).with_suffix(".operators.json") if hardware.endswith(".json") else None


def load_times(hardware: str) -> OperatorTimes | None:
    """The times beside a hardware file, if there are any.

    Raises:
        ConfigError: a file that is no such file; names path and key.
    """
    file = times_file(hardware)
    if file is None or not file.is_file():
        return None
    try:
        data = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read", why=str(error), hint="measure again with shardwright profile"
        ) from error
    fields = Fields(data, str(file))
    if fields.count("format") != FORMAT:
        raise fields.error("format", f"is {FORMAT} in this version")
    operators = fields.child("operators")
    times = {}
    # Every entry is ``[forward_s, backward_s]``.
    for name in operators.names():
        value = operators.value(name)
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(isinstance(s, int | float) and s >= 0 for s in value)
        ):
            raise operators.error(
                name, "has two numbers of at least 0, seconds of the forward and of the backward"
            )
        times[name] = value
    fields.finish()
    return OperatorTimes.from_json(times)


def dumps_times(times: OperatorTimes) -> str:
    """The text of such a file."""
    return json.dumps({"format": FORMAT, "operators": times.to_json()}, indent=1) + "\n"
