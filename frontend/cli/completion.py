"""The command about this shell: ``completion``.

The script that it prints is a table, so that a shell need not start Python for each key:

    after "convert --to"        shardwright huggingface full dcp
    anywhere else in "convert"  --to --config --max-file-size ...
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from shardwright.compiler.cost.machine.hardware import preset_names
from shardwright.frontend.cli.commands import ALIASES, COMMANDS, command_parsers
from shardwright.frontend.cli.model_arguments import floating_dtypes
from shardwright.frontend.training.read_settings import types_of_settings
from shardwright.frontend.training.run_optimizer import optimizer_names
from shardwright.policies.known_policies import policy_names
from shardwright.runtime.config import ComputeConfig

_SCRIPT = """_shardwright() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""
    # The shell makes three words of --to=dcp.
    if [ "$word" = "=" ]; then
        word=""
    elif [ "$before" = "=" ]; then
        before="${COMP_WORDS[COMP_CWORD-2]}"
    fi
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "NAMES --help --version" -- "$word"))
        return
    fi
    case "${COMP_WORDS[1]} $before" in
VALUES
    *) case "${COMP_WORDS[1]}" in
FLAGS
    esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _shardwright shardwright"""


def run_completion(options: argparse.Namespace) -> int:
    """Run ``completion``: print a script of a few lines. The shell itself knows files."""
    values, flags = [], []
    for name, parser in command_parsers().items():
        known = dict(_options_of(parser), **(_settings() if name == "train" else {}))
        first = _first_words(parser)
        for alias in (name, *(other for other, meant in ALIASES.items() if meant == name)):
            # Right behind the command comes what is no option, such as an action of `data`.
            known_here = {alias: first} | known if first else known
            values += [
                f'    "{alias} {flag}") words="{" ".join(words)}" ;;'
                for flag, words in known_here.items()
                if words
            ]
            flags.append(f'        {alias}) words="{" ".join(known)}" ;;')
    if options.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    text = _SCRIPT.replace("NAMES", " ".join((*COMMANDS, *ALIASES)))
    print(text.replace("VALUES", "\n".join(values)).replace("FLAGS", "\n".join(flags)))
    return 0


def _options_of(parser: argparse.ArgumentParser) -> dict[str, Sequence[str]]:
    """The long options of a command, with the values that each may have where they are known."""
    named: Mapping[str, Sequence[str]] = {
        "--policy": policy_names(),
        "--hardware": preset_names(),
        "--optimizer": optimizer_names(),
        "--dtype": floating_dtypes(),
        "--set": [f"{field.name}=" for field in fields(ComputeConfig)],
    }
    return {
        flag: [str(choice) for choice in action.choices or named.get(flag, ())]
        for flag, action in parser._option_string_actions.items()
        if flag.startswith("--")
    }


def _first_words(parser: argparse.ArgumentParser) -> list[str]:
    """The values of the first argument that is no option, where they are known."""
    first = next((action for action in parser._actions if not action.option_strings), None)
    return [] if first is None else [str(choice) for choice in first.choices or ()]


def _settings() -> dict[str, Sequence[str]]:
    """The settings of a training run as options of ``train``."""
    named: Mapping[str, Sequence[str]] = {
        "parallel.policy": policy_names(),
        "hardware": preset_names(),
        "optimizer.name": optimizer_names(),
        "checkpoints.resume": ("auto", "never"),
    }
    return {
        f"--{path}": named.get(path) or _values_of(annotation)
        for path, annotation in types_of_settings()
    }


def _values_of(annotation: Any) -> list[str]:
    """The values of a type that has few."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is bool:
        return ["true", "false"]
    if origin is typing.Literal:
        return [str(value) for value in arguments]
    if origin in (typing.Union, types.UnionType):
        return [value for argument in arguments for value in _values_of(argument)]
    return []
