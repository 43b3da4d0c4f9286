"""Config and stop criteria from the options of the command line and a YAML file."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import yaml

from corral.algorithms.config.config import AlgorithmConfig
from corral.algorithms.registry import config_from_dict
from corral.algorithms.stopping import Below, criteria_from_file
from corral.algorithms.tuned_settings import tuned_settings
from corral.errors import ConfigError
from corral.runs.loggers.named import add_named, names_of


def load_experiment(options: argparse.Namespace) -> tuple[AlgorithmConfig, dict[str, float | Below]]:
    """Return the config and the stop criteria; options override the file.

    Raises:
        ConfigError: A name is unknown, a value is wrong, or algorithm, env or stop criterion is missing.
    """
    if options.resume is not None:
        settings = _settings_of_run(options)
    elif options.tuned is not None:
        settings = _tuned_settings(options)
    else:
        settings = read_experiment(options.config) if options.config else {}
    if "search" in settings:
        raise ConfigError(
            f"{options.config} has a group 'search': `corral search --config {options.config}` reads it, and writes "
            "the best settings to best.yaml, which `corral train --config` takes."
        )
    return experiment_of(settings, options)


def experiment_of(
    settings: dict[str, Any], options: argparse.Namespace
) -> tuple[AlgorithmConfig, dict[str, float | Below]]:
    """Return the config and the stop criteria of the settings of a file; options override them.

    Raises:
        ConfigError: A name is unknown, a value is wrong, or algorithm, env or stop criterion is missing.
    """
    stop = settings.pop("stop", None) or {}
    if not isinstance(stop, dict):
        raise ConfigError(f"{options.config}: 'stop' must hold names and numbers, got {stop!r}.")
    if options.algo:
        settings["algo"] = options.algo
    if "algo" not in settings:
        raise ConfigError(
            "no algorithm: give --algo PPO or --algo my_algo:MyConfig, or 'algo' in the file of --config."
        )
    config = config_from_dict(settings)
    _override(config, options)
    if options.stop:
        # The schedules of tuned settings end at their number of env steps: it stays, unless another one is given.
        own = stop if options.resume is None and options.tuned is not None else {}
        stop = own | dict(parse_criterion(text) for text in options.stop)
    if not stop:
        raise ConfigError("no stop criterion: give --stop episode_return_mean=450, or 'stop' in the file of --config.")
    # Here, since it imports torch.
    from corral.algorithms.config.without_effect import warn_of_rounds_that_nothing_plays

    warn_of_rounds_that_nothing_plays(config)
    return config, criteria_from_file(stop)


def _tuned_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the tuned settings that `--tuned` names; with `--env`, they are used for that env.

    Raises:
        ConfigError: There are none, or `--config` is given too.
    """
    if options.config is not None:
        raise ConfigError("--tuned and --config both name settings: give one of them, and change it with --set.")
    try:
        return tuned_settings(options.tuned, options.algo)
    except ConfigError as error:
        raise ConfigError(f"--tuned: {error} `corral list tuned` shows all.") from error


def _override(config: AlgorithmConfig, options: argparse.Namespace) -> None:
    """Change the settings that options give."""
    own = {"env": options.env, "seed": options.seed, "checkpoint_every_s": options.checkpoint_every}
    own |= {"input_": options.data, "output": options.record}
    for name, value in own.items():
        if value is not None:
            setattr(config, name, value)
    for text in options.settings:
        config.set_path(*parse_pair(text, "--set"))
    if options.resume is not None:
        from corral.algorithms.checkpoint import warn_of_first_setting
        from corral.algorithms.fitting import has_just_begun, read_config

        saved = (read_config(options.resume).get("debugging") or {}).get("seed")
        if config.seed != saved and not has_just_begun(options.resume):
            warn_of_first_setting("seed", config.seed)
    if named := _named_loggers(options):
        config.loggers = add_named(names_of(options.resume) if config.loggers is None else config.loggers, named)


def _named_loggers(options: argparse.Namespace) -> list[str]:
    return [*options.loggers, *(["tensorboard"] if options.tensorboard else [])]


def overriding_arguments(options: argparse.Namespace) -> list[str]:
    """Return the options that override settings and stop criteria, as arguments for another `corral train`."""
    given = [("--env", options.env), ("--checkpoint-every", options.checkpoint_every)]
    given += [("--data", options.data), ("--record", options.record)]
    given += [("--stop", text) for text in options.stop] + [("--set", text) for text in options.settings]
    given += [("--logger", name) for name in _named_loggers(options)]
    return [f"{name}={value}" for name, value in given if value is not None]


def read_experiment(path: Path) -> dict[str, Any]:
    """Return the groups of settings in a YAML file.

    Raises:
        ConfigError: The file cannot be read, or does not hold a mapping.
    """
    try:
        settings = _read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--config {path}: expected groups of settings by name, got {type(settings).__name__}.")
    return settings


def _settings_of_run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the run to continue, without those that no file can name and that options give.

    Raises:
        ConfigError: An option does not go with `--resume`, or a setting that no file can name is missing.
        RunDirectoryError: The directory holds no run, or another process runs it.
        CheckpointError: The run has no checkpoint.
    """
    from corral.algorithms.fitting import check_resumable, read_config

    for name in ("config", "tuned", "algo", "run_dir"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} cannot be used with --resume, which keeps this setting of the run."
            )
    settings = read_config(options.resume)
    given = {text.partition("=")[0] for text in options.settings} | ({"environment.env"} if options.env else set())
    unsaved = check_resumable(options.resume)
    missing = {place: unsaved[place] for place in unsaved if not any(f"{place}.".startswith(f"{g}.") for g in given)}
    if missing:
        shown = "; ".join(f"{place}: {text}" for place, text in missing.items())
        raise ConfigError(
            f"{options.resume}: the run has settings that no file can name ({shown}): give them with --set, or "
            "continue it from Python with fit(resume=...)."
        )
    for place in given:  # so that the old value, which a file may not hold, is not read
        group, _, name = place.partition(".")
        if isinstance(settings.get(group), dict):
            settings[group].pop(name, None)
    return settings


def parse_criterion(text: str) -> tuple[str, Any]:
    """Return name and value of `name=number` or `name<number`; the value is in the form of `criteria_from_file`.

    Raises:
        ConfigError: The text is something else.
    """
    match = re.fullmatch(r"[^=<>]+([=<])[^=<>]*", text)
    if match is None:
        raise ConfigError(
            f"--stop {text!r}: expected NAME=NUMBER, which is reached from below, or 'NAME<NUMBER' in quotes."
        )
    name, limit = parse_pair(text.replace("<", "=", 1), "--stop")
    return name, limit if match[1] == "=" else {"below": limit}


def parse_pair(text: str, option: str) -> tuple[str, Any]:
    """Return the name and the YAML value of `name=value`.

    Raises:
        ConfigError: There is no `=`, or the value is not YAML.
    """
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise ConfigError(f"{option} {text!r}: expected NAME=VALUE.")
    try:
        return name, _read_yaml(value)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        raise ConfigError(
            f"{option} {text!r}: the value is not valid YAML: {problem}. Lists are as in '[64, 64]', dicts as in "
            "'{a: 1, b: text}', and quotes around the whole argument keep the shell from changing it."
        ) from error


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number, as YAML 1.2 does, and refuses a key that a mapping has twice.

    For YAML 1.1, 1e-3 is a string, since it has no dot. Of a key that is there twice, PyYAML takes the last one.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the node of a mapping.

        Raises:
            yaml.composer.ComposerError: It has a key twice.
        """
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                problem = f"{key.value!r} is there twice: write what belongs to it in one place"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            names.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return node


_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, [*"-+.0123456789"])


def _read_yaml(text: str) -> Any:
    """Return what a text holds.

    Raises:
        yaml.YAMLError: It is not YAML, is nested too deeply, or holds a date that does not exist.
    """
    try:
        return yaml.load(text, _Loader)
    except (RecursionError, ValueError) as error:
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error
