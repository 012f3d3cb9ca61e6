"""The commands of the README, of docs/ and of every ``--help`` parse: their options exist, and so
do the settings they name.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from shardwright.frontend.cli.commands import COMMANDS, parse
from shardwright.frontend.cli.searches import read_batch_dims, read_sizes, read_sizes_listed
from shardwright.frontend.cli.targets import read_settings
from shardwright.policies.known_policies import find_policy
from shardwright.policies.policy import read_options
from shardwright.runtime.config import ComputeConfig

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "examples/train_gpt2.py")


def told() -> list[str]:
    """Every line that begins with a command, continued lines joined, comments taken off."""
    pages = [(ROOT / name).read_text() for name in NAMES] + [
        page.read_text() for page in (ROOT / "docs").glob("*.md")
    ]
    pages += [command.text for command in COMMANDS.values()]
    lines = re.findall(
        r"^ *(?:cd \S+ && |torchrun .* -m )?shardwright (.+)$",
        "\n".join(pages).replace("\\\n", " "),
        re.MULTILINE,
    )
    return sorted({line for line in lines if line.split()[0] in COMMANDS})


def test_every_command_has_an_example() -> None:
    assert {line.split()[0] for line in told()} == set(COMMANDS) and len(told()) >= 25


@pytest.mark.parametrize("line", told())
def test_it_parses(line: str) -> None:
    options = parse(shlex.split(line, comments=True))
    assert options is not None
    fields = {field.name for field in dataclasses.fields(ComputeConfig)}
    settings = read_settings(getattr(options, "settings", []))
    assert set(settings) <= fields
    if getattr(options, "policy", None) is not None:
        policy = find_policy(options.policy)
        assert policy.options is not None or not settings.get("pas_config")
        if policy.options is not None:
            read_options(policy.options, settings.get("pas_config", {}), policy=policy.name)
    for name, read in (
        ("microbatch", read_sizes_listed),
        ("batch_dims", read_batch_dims),
        ("against", read_sizes),
    ):
        text = getattr(options, name, None)
        assert text is None or read(text)
