"""`corral completion`: a script with which a shell completes commands, options and names."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

import shtab

from corral.algorithms.config.description import describe_config
from corral.algorithms.registry import ALGORITHMS, config_class
from corral.algorithms.tuned_settings import tuned_algorithms
from corral.envs.listing import newest_versions, registered_ids
from corral.runs.loggers.named import NAMES as LOGGERS
from corral.tools.cli.parser import make_parser

DIRECTORIES = ("run_dir", "resume", "record", "runs")
FILES = {"config": shtab.FILE, "output": shtab.FILE, **dict.fromkeys(DIRECTORIES, shtab.DIRECTORY)}
"""What completes options and arguments that are paths, by the name that they are stored under."""

# shtab adds a space after each name, and a setting continues with its value.
NO_SPACE = """
_corral_complete() {
  _shtab_corral "$@"
  [[ "${COMPREPLY[0]-}" == *= ]] && compopt -o nospace 2>/dev/null
  return 0
}
complete -o bashdefault -F _corral_complete corral
"""


def print_completion(options: argparse.Namespace) -> int:
    """Print the script for a shell, and return the exit status 0."""
    parser = make_parser()
    names = {
        "algo": [*ALGORITHMS],
        "env": newest_versions(registered_ids()["gymnasium"]),
        "tuned": [*tuned_algorithms()],
        "settings": _assignments(),
        "loggers": [*LOGGERS],
        "name": [path.removesuffix("=") for path in _assignments()],
    }
    _complete(parser, names)
    functions = "\n".join(_function(options.shell, place, words) for place, words in names.items())
    preamble: Any = {options.shell: functions}  # the annotation of shtab names the text alone
    print(shtab.complete(parser, options.shell, preamble=preamble))
    if options.shell == "bash":
        print(NO_SPACE)
    return 0


def _assignments() -> list[str]:
    """Return `group.name=` for each setting of the built-in algorithms."""
    described = [describe_config(config_class(name)) for name in ALGORITHMS]
    paths = [f"{group}.{setting.name}=" for groups in described for group in groups for setting in groups[group]]
    return [*dict.fromkeys(paths)]


def _complete(parser: argparse.ArgumentParser, names: dict[str, list[str]]) -> None:
    """Say what completes the options of a parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                _complete(sub, names)
            continue
        completed: Any = FILES.get(action.dest)
        if action.dest == "path":
            completed = shtab.FILE
        elif action.dest in names:
            completed = dict.fromkeys(("bash", "zsh"), f"_corral_{action.dest}")
        if completed is not None:
            action.complete = completed  # type: ignore[attr-defined]


def _function(shell: str, place: str, words: list[str]) -> str:
    """Return a function of the shell that completes a word with one of several."""
    if shell == "bash":
        return f'_corral_{place}() {{ compgen -W {shlex.quote(" ".join(words))} -- "$1"; }}'
    suffix = "-S ''" if place == "settings" else ""
    return f"_corral_{place}() {{ compadd {suffix} -- {shlex.join(words)}; }}"
