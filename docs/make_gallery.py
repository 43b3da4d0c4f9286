"""Draws the pictures of docs/examples.md: `python docs/make_gallery.py [NAME...]`; needs matplotlib and Pillow.

Each picture comes from runs of the scripts in examples/, with the settings that they have, and takes minutes at most.
"""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
from make_pictures import GREY, IMAGES, make_figure, save_figure
from PIL import Image

from corral import Algorithm

sys.path.insert(0, str(IMAGES.parents[1] / "examples"))

Line = list[tuple[float, float]]
COLOURS = ("#1f9e89", "#9467bd", "#d98c21")


def record(module: str, run: Callable[[Any], Any]) -> list[Any]:
    """Return the result of each iteration that the code of an example trains."""
    results, train = [], Algorithm.train

    def train_and_keep(self: Algorithm) -> Any:
        results.append(train(self))
        return results[-1]

    with mock.patch.object(Algorithm, "train", train_and_keep):
        run(importlib.import_module(module))
    return results


def line_of(results: list[Any], *path: str) -> Line:
    """Return a metric over env steps."""
    line = []
    for result in results:
        value: Any = result
        for name in path:
            value = value.get(name, {}) if isinstance(value, dict) else value
        if isinstance(value, (int, float)):
            line.append((result["num_env_steps_sampled_lifetime"], float(value)))
    return line


def mean_line(lines: list[Line]) -> Line:
    """Return the mean of runs of the same length."""
    return [(points[0][0], statistics.fmean(y for _, y in points)) for points in zip(*lines, strict=False)]


def draw_lines(name: str, lines: dict[str, Line], ylabel: str) -> None:
    """Draw one line for each key over env steps."""
    figure, axes = make_figure(6, 2.6)
    for (label, line), colour in zip(lines.items(), COLOURS, strict=False):
        axes.plot(*zip(*line, strict=True), color=colour, label=label)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("env steps", color=GREY)
    axes.set_ylabel(ylabel, color=GREY)
    axes.legend(frameon=False, labelcolor=GREY)
    save_figure(figure, IMAGES / name)


RETURN = ("env_runners", "episode_return_mean")


def draw_heat_map(name: str) -> None:
    """Show the cells that the agent visits in the first iterations, and later."""
    results = record("callbacks.heat_map", lambda example: example.main(20))
    images = [np.asarray(results[i]["env_runners"]["visited_cells"]) for i in (0, 4, 19)]
    gap = np.full((len(images[0]), 8, 3), 128, np.uint8)
    Image.fromarray(np.concatenate([images[0], gap, images[1], gap, images[2]], axis=1)).save(IMAGES / name)


def draw_curiosity(name: str) -> None:
    """Show what the bonus of the example changes."""
    lines = {
        label: mean_line(
            [
                line_of(record("callbacks.curiosity", lambda example: example.main(curious, seed=seed)), *RETURN)  # noqa: B023
                for seed in range(3)
            ]
        )
        for label, curious in (("with curiosity", True), ("without", False))
    }
    draw_lines(name, lines, "mean return")


def draw_algorithms(name: str) -> None:
    """Show the learning curves of the algorithms of one file each."""
    names = {"A2C": "a2c", "REINFORCE": "reinforce", "double Q-learning": "double_q"}
    lines = {}
    for label, module in names.items():
        lines[label] = line_of(record(f"algorithms.{module}", lambda example: example.main()), *RETURN)
    draw_lines(name, lines, "mean return")


def draw_exploration(name: str) -> None:
    """Show what repeated random actions change."""
    kinds = {
        "repeated random actions": None,
        "single random actions": {"type": "EpsilonGreedy", "epsilon_schedule": 0.1},
    }
    lines = {}
    for label, kind in kinds.items():
        lines[label] = line_of(record("exploration.own_exploration", lambda example: example.main(kind)), *RETURN)  # noqa: B023
    draw_lines(name, lines, "mean return")


def draw_modules(name: str) -> None:
    """Show how soon two agents learn with a module for both, and with a module for each."""
    lines = {}
    for modules, label in {"shared": "one module for both agents", "separate": "a module for each agent"}.items():
        results = record("multi_agent.two_cartpoles", lambda example: example.train(0, modules))  # noqa: B023
        lines[label] = line_of(results, "env_runners", "agent_episode_return_mean", "0")
    draw_lines(name, lines, "mean return of agent 0")


def draw_shaping(name: str) -> None:
    """Show the weight that the driver controls, and the episodes that arrive."""
    results = record("coordination.central_hyperparameter", lambda example: example.main())
    lines = {
        "weight of the shaping reward": line_of(results, "env_runners", "shaping_weight"),
        "episodes that reach the end": line_of(results, "env_runners", "arrived"),
    }
    draw_lines(name, lines, "weight, share")


PICTURES = {
    "heat-map.png": draw_heat_map,
    "curiosity.svg": draw_curiosity,
    "own-algorithms.svg": draw_algorithms,
    "own-exploration.svg": draw_exploration,
    "two-cartpoles.svg": draw_modules,
    "central-hyperparameter.svg": draw_shaping,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name](name)
