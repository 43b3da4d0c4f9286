"""Runs that differ only in their seed are one experiment: groups, their names, and what differs between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corral.core.settings import flat_settings
from corral.tools.report.runs import RunFiles

SEED = "debugging.seed"
IGNORED = (SEED, "stop", "checkpointing", "debugging.log_level", "reporting.loggers")
"""Settings, and groups of them, in which runs of one experiment may differ: they do not change what is learned."""

UNLEARNED = (
    *("fault_tolerance", "engine", "evaluation", "debugging", "callbacks.on_error", "environment.disable_env_checking"),
    *("env_runners.vectorization", "env_runners.sample_timeout_s", "env_runners.custom_resources_per_env_runner"),
    *("env_runners.num_cpus_per_env_runner", "env_runners.num_gpus_per_env_runner", "learners.num_threads"),
    *("learners.num_cpus_per_learner", "learners.num_gpus_per_learner", "training.store_buffer_in_checkpoints"),
    *("offline_data.output", "offline_data.output_max_rows_per_file", "offline_data.output_infos"),
    *("offline_data.map_directory", "reporting.metrics_num_episodes_for_smoothing"),
)
"""Settings, and groups of them, that change no learning: a label names one only where no other tells groups apart."""

MAX_NAMED = 3
"""Number of settings that the label of a group names."""

MAX_VALUE = 40
"""Number of characters of a value in a label."""


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed, in when they stop, and in what they write.

    Attributes:
        label: Name in figures and tables, which no other group has.
        runs: The runs, at least one.
    """

    label: str
    runs: tuple[RunFiles, ...]


def group_runs(runs: Sequence[RunFiles]) -> list[Group]:
    """Return the groups of runs, in the order of their first runs.

    A run without `config.yaml` is a group of its own.

    Args:
        runs: The runs.
    """
    grouped: dict[str, list[RunFiles]] = {}
    for run in runs:
        settings = sorted((path, repr(value)) for path, value in comparable_settings(run).items())
        key = str(settings) if run.config else run.name
        grouped.setdefault(key, []).append(run)
    members = [*grouped.values()]
    labels = _labels([group[0] for group in members])
    return [Group(label, tuple(group)) for label, group in zip(labels, members, strict=True)]


def repeated_seeds(group: Group) -> list[str]:
    """Return the seeds that several runs of a group have: such runs say nothing about other seeds."""
    counts = Counter(str(seed) for run in group.runs if (seed := run.setting(*SEED.split("."))) is not None)
    return [seed for seed, count in counts.items() if count > 1]


def comparable_settings(run: RunFiles) -> dict[str, Any]:
    """Return the settings of a run by dotted path, such as `training.lr`, without those that a group ignores."""
    return {path: value for path, value in flat_settings(run.config) if not _is_among(path, IGNORED)}


def differing_settings(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Return the settings that are not the same in all groups.

    Returns:
        The value of each group as text, by the dotted path of the setting; `"-"` where a group has no such setting.
    """
    settings = [comparable_settings(group.runs[0]) for group in groups]
    paths = dict.fromkeys(path for found in settings for path in found)
    texts = {path: [show_value(found[path]) if path in found else "-" for found in settings] for path in paths}
    return {path: values for path, values in texts.items() if len(set(values)) > 1}


def show_value(value: Any) -> str:
    """Return a setting as short text."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def title_of(run: RunFiles) -> str:
    """Return algorithm and env of a run, such as `PPO CartPole-v1`; its name if its config is not known."""
    algo = str(run.config.get("algo") or "").rpartition(":")[2]
    return " ".join(part for part in (algo, env_of(run)) if part) or run.name


def env_of(run: RunFiles) -> str:
    """Return the env of a run, without the module of an import path; an empty text if it is not known."""
    env = run.setting("environment", "env")
    return "" if env is None else str(env).rpartition(":")[2]


def _labels(runs: Sequence[RunFiles]) -> list[str]:
    """Return a label for each group, whose first runs are given."""
    titles, settings = [title_of(run) for run in runs], [comparable_settings(run) for run in runs]
    telling = {
        title: _most_telling([found for found, other in zip(settings, titles, strict=True) if other == title])
        for title in dict.fromkeys(titles)
    }
    labels = [f"{title}{_difference(found, telling[title])}" for title, found in zip(titles, settings, strict=True)]
    counts = Counter(labels)
    return [label if counts[label] == 1 else f"{label} ({run.name})" for label, run in zip(labels, runs, strict=True)]


def _difference(settings: Mapping[str, Any], telling: Sequence[str]) -> str:
    """Return as the end of a label the settings that a config has, and by which it differs from other configs."""
    differing = [path for path in telling if path in settings]
    named = [f"{path.rpartition('.')[2]}={_shortened(show_value(settings[path]))}" for path in differing[:MAX_NAMED]]
    return "".join(f", {text}" for text in named) + (", ..." if len(differing) > MAX_NAMED else "")


def _most_telling(alike: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings in which configs differ, first those by which the most configs are told apart together.

    Settings that change no learning are left out where the others tell all configs apart.
    """
    texts = {path: [show_value(other.get(path)) for other in alike] for settings in alike for path in settings}
    differing = [path for path, values in texts.items() if len(set(values)) > 1]
    learned = [path for path in differing if not _is_among(path, UNLEARNED)]
    num_told = len({*zip(*(texts[path] for path in learned), strict=True)})
    left = learned if num_told == len(alike) else differing
    ordered: list[str] = []
    told = [""] * len(alike)
    while left and len(ordered) < MAX_NAMED:
        best = max(left, key=lambda path: len({*zip(told, texts[path], strict=True)}))  # the first one of the best
        told = [str(pair) for pair in zip(told, texts[best], strict=True)]
        ordered.append(best)
        left.remove(best)
    return [*ordered, *left]


def _is_among(path: str, settings: Sequence[str]) -> bool:
    """Return whether a setting, or its group, is one of these."""
    return path in settings or path.partition(".")[0] in settings


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."
