"""`corral config`: the settings of an algorithm, with type, default, bounds and meaning."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from corral.algorithms.config.config import AlgorithmConfig
from corral.algorithms.config.description import SettingDescription, describe_config, summary_of
from corral.algorithms.config.settings import GROUPS
from corral.algorithms.registry import config_class
from corral.errors import ConfigError, nearest_name
from corral.runs.loggers.run import plain

Settings = Mapping[str, SettingDescription]  # by path, such as "training.lr"


def print_settings(options: argparse.Namespace) -> int:
    """Print all settings of an algorithm, one group of them or one setting, and return the exit status 0.

    Raises:
        ConfigError: There is no such algorithm, group or setting.
    """
    cls = config_class(options.algo)
    groups = describe_config(cls)
    settings = {f"{group}.{setting.name}": setting for group, entries in groups.items() for setting in entries}
    shown = settings if options.name is None else _named(cls, options.name, settings, [*groups])
    if options.json:
        print(json.dumps({"algo": options.algo, "settings": [_as_json(path, shown[path]) for path in shown]}, indent=1))
        return 0
    console = Console(highlight=False)
    for group in groups:
        paths = [path for path in shown if path.rpartition(".")[0] == group]
        if paths and len(shown) > 1:
            what = summary_of(GROUPS[group]) if group in GROUPS else "Settings of the default module."
            console.print(Text(group, "bold underline"), Text(what, "dim"), "")
        for path in paths:
            _print_setting(console, path, shown[path])
    if len(shown) == 1:
        [path] = shown
        console.print(Text(f"corral train --algo {options.algo} --set {path}=VALUE", "dim"), soft_wrap=True)
    return 0


def _named(
    cls: type[AlgorithmConfig], name: str, settings: Settings, groups: list[str]
) -> dict[str, SettingDescription]:
    """Return the settings with a name or path, or of a group."""
    if name in groups or name == "model_config":
        group = name if name in groups else "rl_module.model_config"
        return {path: setting for path, setting in settings.items() if path.rpartition(".")[0] == group}
    found = {path: setting for path, setting in settings.items() if name in (path, setting.name)}
    if not found:
        known = [*settings, *groups] if "." in name else [*(setting.name for setting in settings.values()), *groups]
        close = nearest_name(name, known)
        nearest = f"Groups: {', '.join(groups)}." if close is None else f"Did you mean {close!r}?"
        hint = cls.meaning_of(name.rpartition(".")[2]) or nearest
        raise ConfigError(f"there is no setting or group {name!r}. {hint}")
    return found


def _as_json(path: str, setting: SettingDescription) -> dict[str, object]:
    return {
        "path": path,
        "group": path.rpartition(".")[0],
        "name": setting.name,
        "types": setting.types,
        "default": plain(setting.default),
        "bounds": setting.bounds,
        "meaning": setting.meaning,
    }


def _print_setting(console: Console, path: str, setting: SettingDescription) -> None:
    bounds = "".join(f", {bound}" for bound in setting.bounds)
    facts = f"  {' or '.join(setting.types)}, default {_shown(setting.default)}{bounds}"
    console.print(Text.assemble((path, "bold cyan"), (facts, "green")))
    meaning = setting.meaning.replace("``", "").replace("`", "") or "It is not described."
    console.print(Padding(Text(meaning), (0, 0, 1, 4), expand=False))


def _shown(default: object) -> str:
    """Return a default as the command line takes it."""
    if isinstance(default, str):
        return default or "''"
    value = plain(default)
    return json.dumps(value) if isinstance(value, (bool, dict, list, type(None))) else str(value)
