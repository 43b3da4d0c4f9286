"""`corral list`: algorithms, explorations, envs and tuned settings by name."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterable
from itertools import chain

from rich.columns import Columns
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from corral.errors import ConfigError

MOST_LISTED = 60
"""Ids of one package that a terminal shows without a word and without `--all`."""


def print_names(options: argparse.Namespace) -> int:
    """Print algorithms, explorations, envs or tuned settings, and return the exit status 0.

    Raises:
        ConfigError: No name has the word in it.
    """
    console = Console(highlight=False)
    if options.what == "envs":
        num_found = _print_envs(console, options.word, everything=options.all)
        if not num_found:  # the word may name an old version
            num_found = _print_envs(console, options.word, everything=True)
    elif options.what == "tuned":
        num_found = _print_tuned(console, options.word)
    else:
        described = _algorithms() if options.what == "algorithms" else _explorations()
        num_found = _print_described(console, described, options.word)
    if not num_found:
        raise ConfigError(
            f"list {options.what}: no name contains {options.word!r}: leave the word out to see all names."
        )
    return 0


def _has(name: str, word: str) -> bool:
    return word.lower() in name.lower()


def _algorithms() -> Iterable[tuple[str, str, str]]:
    """Yield name, a text that follows it, and meaning of each algorithm."""
    from corral.algorithms.config.description import summary_of
    from corral.algorithms.registry import ALGORITHMS, algorithm_names, config_class

    for name in algorithm_names():
        cls = config_class(name)
        yield name, "" if name in ALGORITHMS else f"{cls.__module__}:{cls.__qualname__}", summary_of(cls().algo_class)


def _explorations() -> Iterable[tuple[str, str, str]]:
    """Yield name, a text that follows it, and meaning of each exploration."""
    from corral.exploration.build import BUILT_IN, exploration_class

    for name in BUILT_IN:
        cls = exploration_class(name)
        actions = ", ".join(space.__name__ for space in cls.action_spaces)
        text = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0]
        yield name, f"actions: {actions}", " ".join(text.split())


def _print_described(console: Console, described: Iterable[tuple[str, str, str]], word: str) -> int:
    found = [entry for entry in described if _has(entry[0], word)]
    for name, more, meaning in found:
        console.print(Text.assemble((name, "bold cyan"), (f"  {more}" if more else "", "dim")))
        console.print(Padding(Text(meaning.replace("`", "")), (0, 0, 0, 4), expand=False))
    return len(found)


def _print_tuned(console: Console, word: str) -> int:
    """Print the ids of envs with tuned settings and the algorithms that have them; return how many were found."""
    from corral.algorithms.tuned_settings import tuned_algorithms

    found = {env: algos for env, algos in tuned_algorithms().items() if _has(env, word)}
    width = max(map(len, found), default=0)
    for env, algos in found.items():
        console.print(Text.assemble((f"{env:{width}}", "bold cyan"), f"  {' '.join(algos)}"))
    return len(found)


def _print_envs(console: Console, word: str, *, everything: bool) -> int:
    """Print ids of envs in columns on a terminal, and one per line elsewhere; return how many were found."""
    from corral.envs.listing import env_ids, newest_versions

    num_found, by_package = 0, env_ids()
    # Over all packages: Gymnasium-Robotics registers old versions of Gymnasium's envs.
    shown = {*newest_versions(chain.from_iterable(by_package.values()))}
    for package, ids in by_package.items():
        found = [env_id for env_id in ids if (everything or env_id in shown) and _has(env_id, word)]
        num_found += len(found)
        if not console.is_terminal:
            print("\n".join(found), end="\n" if found else "")
        elif found:
            _print_columns(console, package, found, everything=everything or bool(word))
    return num_found


def _print_columns(console: Console, package: str, found: list[str], *, everything: bool) -> None:
    how = ' for --env pettingzoo:make --set environment.env_config.id="..."' if package == "pettingzoo" else ""
    console.print(Text.assemble((package, "bold underline"), (f"  {len(found)} ids{how}", "dim")), soft_wrap=True)
    shown = found if everything else found[:MOST_LISTED]
    console.print(Columns([Text(env_id) for env_id in shown], padding=(0, 2), column_first=True))
    if len(found) > len(shown):
        more = f"and {len(found) - len(shown):,} more: add a word, such as `corral list envs pong`, or --all"
        console.print(Text(more, "dim"))
    console.print()
