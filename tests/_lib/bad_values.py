"""Values that are wrong for nearly every argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright import ComputeConfig

DEPTH = 100_000


def cyclic_list() -> list[Any]:
    value: list[Any] = [1]
    value.append(value)
    return value


def cyclic_dict() -> dict[str, Any]:
    value: dict[str, Any] = {"x": 1}
    value["again"] = value
    return value


def deep(make: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(DEPTH):
        value = make(value)
    return value


class Odd:
    """An object that refuses whatever is asked of it."""

    def __repr__(self) -> str:
        raise ValueError("no text")

    def __eq__(self, other: object) -> bool:
        raise ValueError("not comparable")

    __hash__ = None  # type: ignore[assignment]


VALUES: Mapping[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "1": lambda: 1,
    "-1": lambda: -1,
    "10**30": lambda: 10**30,
    "10**5000": lambda: 10**5000,
    "0.5": lambda: 0.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1j": lambda: 1j,
    "''": lambda: "",
    "'nope'": lambda: "nope",
    "'a\\0b'": lambda: "a\0b",
    "'\\ud800'": lambda: "\ud800",
    "'x'*5000": lambda: "x" * 5000,
    "'9'*5000": lambda: "9" * 5000,
    "'['*100000": lambda: "[" * DEPTH,
    "b''": lambda: b"",
    "b'x'": lambda: b"x",
    "[]": list,
    "[1]": lambda: [1],
    "['x']": lambda: ["x"],
    "[None]": lambda: [None],
    "[[]]": lambda: [[]],
    "()": lambda: (),
    "(1, 2, 3)": lambda: (1, 2, 3),
    "{}": dict,
    "{1: 2}": lambda: {1: 2},
    "{'x': 1}": lambda: {"x": 1},
    "{'x': None}": lambda: {"x": None},
    "{'x': {}}": lambda: {"x": {}},
    "set": lambda: {1, 2},
    "object": object,
    "odd": Odd,
    "{'x': odd}": lambda: {"x": Odd()},
    "cyclic list": cyclic_list,
    "cyclic dict": cyclic_dict,
    "deep list": lambda: deep(lambda value: [value]),
    "deep dict": lambda: deep(lambda value: {"x": value}),
    "lambda: 1": lambda: lambda: 1,
    "lambda *a, **k: None": lambda: lambda *a, **k: None,
    "int": lambda: int,
    "nn.Linear": lambda: nn.Linear,
    "Linear": lambda: nn.Linear(2, 2),
    "tensor": lambda: torch.zeros(2, 2),
    "scalar tensor": lambda: torch.tensor(1.0),
    "meta tensor": lambda: torch.zeros(2, device="meta"),
    "torch.float16": lambda: torch.float16,
    "SGD": lambda: torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1),
    "ComputeConfig": lambda: ComputeConfig(plan_ngpus=1, runtime_ngpus=1),
    "Path": lambda: Path("/nonexistent/folder"),
    "/dev/null": lambda: "/dev/null",
    "generator": lambda: (i for i in range(3)),
    "range": lambda: range(3),
    "Exception": lambda: ValueError("x"),
}


def as_json(value: Any) -> str:
    """JSON as a person might write it: what has no form is written as its text, however deep it
    is.
    """
    parts: list[str] = []
    stack: list[Any] = [value]
    seen: set[int] = set()
    while stack:
        item = stack.pop()
        if isinstance(item, _Text):
            parts.append(item.text)
        elif isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            stack += _parts(item)
        else:
            parts.append(_scalar(item))
    return "".join(parts)


@dataclass(frozen=True)
class _Text:
    text: str


def _parts(item: Any) -> list[Any]:
    """What a container is written as, last thing first."""
    out: list[Any] = []
    if isinstance(item, dict):
        for index, (key, value) in enumerate(item.items()):
            out += [_Text(f"{', ' if index else ''}{_scalar(str(key))}: "), value]
        return [_Text("}"), *reversed(out), _Text("{")]
    for index, value in enumerate(item):
        out += [*([_Text(", ")] if index else []), value]
    return [_Text("]"), *reversed(out), _Text("[")]


def _scalar(item: Any) -> str:
    if item is None or isinstance(item, bool):
        return {None: "null", True: "true", False: "false"}[item]
    if isinstance(item, int):
        return "9" * 5000 if abs(item) > 10**100 else str(item)
    if isinstance(item, float):
        return {"nan": "NaN", "inf": "Infinity"}.get(str(item), str(item))
    text = item if isinstance(item, str) else type(item).__name__
    return (
        '"'
        + "".join(c if c.isalnum() or c in " .[]*/+-()" else f"\\u{ord(c):04x}" for c in text)
        + '"'
    )
