"""The command about this shell: ``completion``."""

from __future__ import annotations

import argparse

from shardwright.frontend.cli.commands import ALIASES, COMMANDS, command_flags

_SCRIPT = """_shardwright() {
    local word="${COMP_WORDS[COMP_CWORD]}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "NAMES --help --version" -- "$word"))
        return
    fi
    case "${COMP_WORDS[1]}" in
CASES
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _shardwright shardwright"""


def run_completion(options: argparse.Namespace) -> int:
    """Run ``completion``: print a script of a few lines. The shell itself knows files."""
    options_by_command = command_flags()
    for alias, name in ALIASES.items():
        options_by_command[alias] = options_by_command[name]
    cases = "\n".join(
        f'        {name}) words="{" ".join(flags)}" ;;'
        for name, flags in options_by_command.items()
    )
    names = " ".join((*COMMANDS, *ALIASES))
    if options.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print(_SCRIPT.replace("NAMES", names).replace("CASES", cases))
    return 0
