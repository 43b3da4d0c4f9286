"""`write_plot`: one picture of one number of runs, for papers and pages."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.core.metrics.named_number import find_value
from corral.core.paths import resolve_path
from corral.errors import ConfigError, nearest
from corral.tools.report.curves import X_AXES, X_TITLES, curve_of, mean_curve
from corral.tools.report.figures import group_color, group_dash
from corral.tools.report.groups import Group, env_of, group_runs, repeated_seeds
from corral.tools.report.output import missing_package, write_file
from corral.tools.report.runs import RunFiles, read_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT_FILE = "curves.png"
FORMATS = (".png", ".svg", ".pdf")
RETURN = "episode_return_mean"
DOTS_PER_INCH = 150


def write_plot(
    runs: str | Path | Sequence[str | Path],
    path: str | Path = PLOT_FILE,
    *,
    x: str = "steps",
    y: str = RETURN,
) -> Path:
    """Draw a number of runs over training, and return the path of the picture.

    Runs that differ only in the seed are one line: their mean, with its 95% interval by Student's t distribution. Where
    only a part of them has values, the line is dotted. Each env has its own axes: returns of two envs share no scale.

    Args:
        runs: Directories of runs, or directories that hold such directories, up to three levels below.
        path: The file to write, .png, .svg or .pdf; an existing one is replaced.
        x: `"steps"` for env steps, or `"time"` for seconds of training.
        y: Path of a number in the result, such as `learners/default_policy/total_loss`; a name in `env_runners` may
            stand alone.

    Raises:
        RunDirectoryError: A directory does not exist, or holds no run.
        ReportError: The file cannot be written.
        ConfigError: No run has the number, another setting has no such value, or the packages of the extra `report` are
            not installed.
    """
    path = resolve_path(path, "the figure")
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"{path}: the name of a picture ends with {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.")
    if x not in X_AXES:
        raise ConfigError(f"x={x!r}: use {' or '.join(map(repr, X_AXES))}.")
    found = read_runs([runs] if isinstance(runs, (str, Path)) else runs)
    key = _find_key(found, y)
    figure = _draw(group_runs(found), key, x)
    picture = io.BytesIO()
    file_format = path.suffix[1:].lower()
    # Without the date, the same runs give the same file.
    metadata: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(file_format, {})
    figure.savefig(picture, format=file_format, dpi=DOTS_PER_INCH, metadata=metadata)
    return write_file(path, picture.getvalue())


def _find_key(runs: Sequence[RunFiles], name: str) -> str:
    """Return the path of a number by the name that a user gave."""
    paths = {key: key for run in runs for key in run.numbers}
    key = find_value(paths, name)
    if not paths:
        raise ConfigError("these runs have no results yet, so there is nothing to draw.")
    if key is None:
        raise ConfigError(f"y={name!r} is no number in the results of these runs. {nearest(name, paths)}")
    return str(key)


def _draw(groups: Sequence[Group], key: str, x_axis: str) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_package("a plot", error) from error

    envs = [*dict.fromkeys(env_of(group.runs[0]) for group in groups)]
    figure = Figure(figsize=(7.0, 1.0 + 3.2 * len(envs)), layout="constrained")
    for env, axes in zip(envs, figure.subplots(len(envs), squeeze=False)[:, 0], strict=True):
        for index, group in enumerate(groups):
            if env_of(group.runs[0]) == env:
                _draw_group(axes, index, group, key, x_axis)
        axes.set_title(_plain(env or "unknown env") if len(envs) > 1 else "")
        axes.set_ylabel(_plain(key.removeprefix("env_runners/")))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(X_TITLES[x_axis])
    figure.legend(loc="outside lower center", ncols=1 if len(groups) < 3 else 2, frameon=False, fontsize="small")
    return figure


def _draw_group(axes: Axes, index: int, group: Group, key: str, x_axis: str) -> None:
    """Draw a group, whose place gives its colour: the curve of its run, or the mean of its runs with the interval."""
    line: dict[str, Any] = {"color": group_color(index), "linewidth": 1.6}
    curves = [curve for run in group.runs if (curve := curve_of(run, key, x_axis)).x.size]
    if not curves:
        axes.plot([], [], label=_plain(f"{group.label}: no values"), **line)
        return
    found = mean_curve(curves)
    is_whole = found.num_curves == len(curves)
    repeated = repeated_seeds(group)
    label = group.label if len(curves) == 1 else f"{group.label}, {len(curves)} runs"
    label += f" (several with seed {', '.join(repeated)})" if repeated else ""
    marker = "o" if is_whole.sum() == 1 else None
    linestyle = {"dash": "dashed", "dot": "dotted"}.get(group_dash(index), group_dash(index))
    whole = np.where(is_whole, found.mean, np.nan)
    axes.plot(found.x, whole, label=_plain(label), linestyle=linestyle, marker=marker, **line)
    if not is_whole.all():
        axes.plot(found.x, found.mean, **line | {"linewidth": 1.0}, linestyle="dotted")
    axes.fill_between(found.x, found.low, found.high, color=group_color(index), alpha=0.18, linewidth=0)


def _plain(text: str) -> str:
    """Return a text that matplotlib shows as it is: no formula, and not left out because it begins with "_"."""
    shown = text.encode("utf-8", errors="replace").decode("utf-8").replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
