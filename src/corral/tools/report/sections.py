"""The parts of a report that are figures: which numbers of the results are drawn, and where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from corral.tools.report.curves import NO_POINTS, X_AXES, Curve, curve_of, speed_curve
from corral.tools.report.figures import Figure, evaluation_figure, line_figure
from corral.tools.report.groups import Group, env_of
from corral.tools.report.runs import RunFiles
from corral.tools.report.time_figures import bottleneck_figure, shares_figure, totals_figure

RETURN = "env_runners/episode_return_mean"
EVALUATED = "evaluation/env_runners/episode_return_mean"
ENDS = ("evaluation/env_runners/episode_return_interval_low", "evaluation/env_runners/episode_return_interval_high")
MISSING = "evaluation/num_episodes_missing"
FAULTS = (
    "fault_tolerance/num_env_runner_failures",
    "fault_tolerance/num_remote_worker_restarts",
    "fault_tolerance/num_sub_environment_restarts",
    "fault_tolerance/num_env_steps_lost",
    "fault_tolerance/num_callback_errors",
    "evaluation/num_env_runner_failures",
    "evaluation/num_remote_worker_restarts",
    MISSING,
)
MAX_OPEN = 4
"""Number of groups up to which the figures of single groups are open when the page is opened."""

MAX_MORE = 60
"""Number of figures of other numbers."""

_SHOWN_ELSEWHERE = ("timers/", "bottleneck/", "fault_tolerance/", "restored/", "runner_group/by_runner/")
_COUNTS = ("num_", "module_train_batch_size")


@dataclass(frozen=True)
class FigureBlock:
    """Figures that are shown together.

    Attributes:
        title: Title; empty for figures at the start of a section.
        figures: The figures.
        is_open: Whether they are shown before the reader opens the block.
    """

    title: str
    figures: tuple[Figure, ...]
    is_open: bool = True


@dataclass(frozen=True)
class Section:
    """A section of a report with figures.

    Attributes:
        title: Title.
        note: Sentences on what the figures show; if there is no figure, why.
        blocks: Blocks of figures.
    """

    title: str
    note: str
    blocks: tuple[FigureBlock, ...]


def _section(title: str, note: str, without: str, blocks: Sequence[FigureBlock]) -> Section:
    blocks = tuple(block for block in blocks if block.figures)
    return Section(title, note if blocks else without, blocks)


def _lines(groups: Sequence[Group], key: str, title: str, *, show_runs: bool = False) -> tuple[Figure, ...]:
    """Return the curve of a number by env steps and by seconds; of several envs, in figures of their own."""
    envs = dict.fromkeys(env_of(run) for group in groups for run in group.runs)
    figures = (
        line_figure(
            groups,
            partial(_curve_in, env=env, key=key, x_axis=x_axis),
            x_axis,
            f"{title}, {env or 'unknown env'}" if len(envs) > 1 else title,
            show_runs=show_runs,
        )
        for env in envs
        for x_axis in X_AXES
    )
    return tuple(figure for figure in figures if figure is not None)


def _curve_in(run: RunFiles, env: str, key: str, x_axis: str) -> Curve:
    """Return the points of a number of a run; none if the run is in another env."""
    return curve_of(run, key, x_axis) if env_of(run) == env else NO_POINTS


def learning_section(groups: Sequence[Group]) -> Section:
    """Return the learning curves."""
    note = "Mean return of the latest training episodes, which explore."
    if any(len(group.runs) > 1 for group in groups):
        note += (
            " A thick line is the mean of the runs of an experiment, with its 95% interval (Student's t over runs); it"
            " is dotted where only a part of the runs has values. Thin lines are single runs."
        )
    blocks = [FigureBlock("", _lines(groups, RETURN, "Mean return in training", show_runs=True))]
    return _section("Learning curves", note, "No run has finished an episode yet.", blocks)


def evaluation_section(groups: Sequence[Group]) -> Section:
    """Return the returns of evaluation rounds."""
    blocks = [FigureBlock("", _lines(groups, EVALUATED, "Mean return in evaluation"))]
    singles = [evaluation_figure(group, index, EVALUATED, ENDS, "steps") for index, group in enumerate(groups)]
    found = tuple(figure for figure in singles if figure is not None)
    blocks.append(FigureBlock("Each round, with the interval over its episodes", found, len(found) <= MAX_OPEN))
    note = (
        "Each point is a round of evaluation. The bars of single runs are 95% intervals over the episodes of a round."
    )
    without = "No round of evaluation was played; evaluation_interval sets how often one is."
    return _section("Evaluation", note, without, blocks)


def losses_section(groups: Sequence[Group]) -> Section:
    """Return what the learners report, for each module."""
    by_module: dict[str, list[Figure]] = {}
    for key in _keys(groups):
        if _is_loss(key):
            _, module, name = [*key.split("/", 2), ""][:3]
            by_module.setdefault(module, []).extend(_by_steps(groups, key, name))
    is_open = len(by_module) <= MAX_OPEN
    blocks = [
        FigureBlock("" if len(by_module) == 1 else module, tuple(figures), is_open)
        for module, figures in by_module.items()
    ]
    return _section("Losses", "Numbers of the learners, by env steps.", "No run has learned yet.", blocks)


def _is_loss(key: str) -> bool:
    """Return whether a number is one of a learner, and no count."""
    group, module, name = [*key.split("/", 2), "", ""][:3]
    return group == "learners" and module != "__all_modules__" and not name.startswith(_COUNTS)


def time_section(groups: Sequence[Group]) -> Section:
    """Return where the time went."""
    runs = [run for group in groups for run in group.runs]
    speed = line_figure(groups, partial(speed_curve, x_axis="time"), "time", "Env steps per second")
    wide = (totals_figure(runs), bottleneck_figure(runs, "steps"), speed)
    shares = tuple(figure for group in groups if (figure := shares_figure(group, "steps")) is not None)
    blocks = [
        FigureBlock("", tuple(figure for figure in wide if figure is not None)),
        FigureBlock("Shares of the parts over training", shares, len(shares) <= MAX_OPEN),
    ]
    note = "The parts are the timers of the result. With several runners they are shares of the work of all of them."
    return _section("Where the time went", note, "No run has timers.", blocks)


def faults_figures(groups: Sequence[Group]) -> FigureBlock:
    """Return the counters of faults over training, of those that counted anything."""
    counted = [key for key in FAULTS if any(count_of(run, key) > 0 for group in groups for run in group.runs)]
    figures = [figure for key in counted for figure in _by_steps(groups, key, key.rpartition("/")[2])]
    return FigureBlock("Counters over training", tuple(figures))


def count_of(run: RunFiles, key: str) -> float:
    """Return the last number of a counter; the episodes that rounds of evaluation miss are counted in each round."""
    return float(curve_of(run, key, "steps").y.sum()) if key == MISSING else run.last(key)


def more_section(groups: Sequence[Group]) -> Section:
    """Return all other numbers that changed during training, such as the numbers that callbacks log."""
    shown = {RETURN, EVALUATED, *ENDS, *FAULTS, *X_AXES.values(), "training_iteration", "evaluation/fresh"}
    keys = [
        key
        for key in _keys(groups)
        if key not in shown and not (key.startswith(_SHOWN_ELSEWHERE) or "_lifetime" in key or _is_loss(key))
        if _varies(groups, key)
    ]
    figures = tuple(figure for key in keys[:MAX_MORE] for figure in _by_steps(groups, key, key))
    note = "All other numbers that changed during training, by env steps."
    if len(keys) > MAX_MORE:
        note += f" Not drawn: {', '.join(keys[MAX_MORE:])}; corral plot --y draws any of them."
    blocks = [FigureBlock(f"{len(figures)} figures", figures, is_open=False)]
    return _section("More numbers", note, "There are no other numbers that changed during training.", blocks)


def _keys(groups: Sequence[Group]) -> Iterator[str]:
    """Yield the numbers that any run has, once each, in the order of the results."""
    yield from dict.fromkeys(key for group in groups for run in group.runs for key in run.numbers)


def _varies(groups: Sequence[Group], key: str) -> bool:
    found = [run.numbers[key] for group in groups for run in group.runs if key in run.numbers]
    values = np.concatenate(found)
    values = values[~np.isnan(values)]
    return bool(values.size) and bool((values != values[0]).any())


def _by_steps(groups: Sequence[Group], key: str, title: str) -> Iterator[Figure]:
    figure = line_figure(groups, partial(curve_of, key=key, x_axis="steps"), "steps", title)
    if figure is not None:
        yield figure
