"""Draws the pictures of the documentation: `python docs/make_pictures.py`; needs matplotlib, Pillow and pygame.

The figures of the chart come from benchmarks/results.json, which `make bench` writes, and the learning curves from
benchmarks/tuned.json, which `make tuned` writes. The frames come from the code of
docs/getting-started.md, and from envs of Gymnasium.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import matplotlib
import numpy as np
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import EngFormatter
from PIL import Image

import corral

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"
sys.path.insert(0, str(DOCS.parent / "benchmarks"))

CHART = {
    "Sampling, 64 envs": "sampling_64",
    "PPO": "ppo",
    "PPO with memory": "ppo_memory",
    "DQN": "dqn",
    "CartPole to 450": "time_to_450",
}
SYSTEMS = {"rllib": ("RLlib", "#9467bd"), "sb3": ("Stable-Baselines3", "#1f9e89")}
GREY = "#808080"
"""Colour of text and axes, readable on light and dark pages."""


def make_figure(width: float, height: float, num_rows: int = 1, num_columns: int = 1) -> tuple[Any, Any]:
    """Return a figure of a size in inches, and its axes: an array `[num_rows, num_columns]` if there are several."""
    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "path", "svg.hashsalt": "corral", "font.size": 11}
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(num_rows, num_columns, figsize=(width, height), squeeze=False)
    for axes in grid.flat:
        axes.tick_params(colors=GREY)
        axes.spines[:].set_visible(False)
    return figure, grid if grid.size > 1 else grid[0, 0]


def save_figure(figure: Any, path: Path) -> None:
    """Write an SVG file, the same one for the same figure."""
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})


def speed_ratios() -> dict[str, dict[str, float]]:
    """Return how many times faster Corral is, by measure and by system: medians of the ratios within pairs."""
    import cases
    import report
    from statistics_of_pairs import ratio_of_pairs

    results = report.from_json(json.loads((DOCS.parent / "benchmarks/results.json").read_text()))
    known = {case.name: case for case in cases.CASES}
    found: dict[str, dict[str, float]] = {}
    for label, name in CHART.items():
        ratios = {
            system: ratio_of_pairs(report.pair_ratios(known[name], results[name].runs, system)) for system in SYSTEMS
        }
        found[label] = {system: ratio.median for system, ratio in ratios.items() if ratio is not None}
    return found


def draw_speed(path: Path) -> None:
    """Draw the chart of the home page."""
    figure, axes = make_figure(8, 3.2)
    for row, (label, by_system) in enumerate(speed_ratios().items()):
        axes.text(-0.4, row + 0.15, label, ha="right", va="center", color=GREY)
        for place, (system, ratio) in enumerate(by_system.items()):
            name, colour = SYSTEMS[system]
            y = row + 0.36 * place
            axes.barh(y, ratio, 0.32, color=colour, label=name if row == 0 else None)
            axes.text(ratio + 0.3, y, f"{ratio:.1f}x", va="center", color=GREY, fontsize=10)
    axes.axvline(1, color=GREY, linewidth=1)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_xlabel("times as fast as the other library", color=GREY)
    axes.legend(frameon=False, labelcolor=GREY, loc="center right")
    save_figure(figure, path)


def draw_tuned(folder: Path) -> None:
    """Draw the learning curves of the runs in benchmarks/tuned.json, one picture for each algorithm."""
    runs = json.loads((DOCS.parent / "benchmarks/tuned.json").read_text())
    for algo in sorted({run["algo"] for run in runs}):
        envs = list(dict.fromkeys(run["env"] for run in runs if run["algo"] == algo))
        num_columns = min(3, len(envs))
        num_rows = -(-len(envs) // num_columns)
        figure, grid = make_figure(3.4 * num_columns, 2.3 * num_rows, num_rows, num_columns)
        for place in range(num_rows * num_columns):
            axes = np.atleast_1d(grid).flat[place]
            if place >= len(envs):
                axes.set_visible(False)
                continue
            curves = [run["curve"] for run in runs if (run["algo"], run["env"]) == (algo, envs[place])]
            for curve in curves:
                axes.plot(*zip(*curve, strict=True), color=SYSTEMS["sb3"][1], linewidth=0.8, alpha=0.5)
            ends = [(curve[0][0], curve[-1][0]) for curve in curves]
            steps = np.linspace(max(first for first, _ in ends), min(last for _, last in ends), 100)
            mean = np.mean([np.interp(steps, *zip(*curve, strict=True)) for curve in curves], axis=0)
            axes.plot(steps, mean, color=SYSTEMS["sb3"][1], linewidth=2)
            axes.set_title(envs[place], color=GREY, fontsize=10)
            axes.locator_params(nbins=4)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 500k, 1M
        figure.tight_layout()
        save_figure(figure, folder / f"tuned-{algo.lower()}.svg")


def draw_parts(path: Path) -> None:
    """Draw the parts of a run, and what travels between them."""
    figure, axes = make_figure(8, 3.4)
    axes.set_axis_off()
    axes.set(xlim=(0, 100), ylim=(0, 46))
    dark, green, violet = "#202020", "#cfe8e2", "#e2d6ee"

    def box(x: float, y: float, width: float, height: float, text: str, colour: str, size: float = 10) -> None:
        shape = {"boxstyle": "round,pad=0,rounding_size=1.2", "facecolor": colour, "edgecolor": GREY}
        axes.add_patch(FancyBboxPatch((x, y), width, height, **shape))
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=dark, fontsize=size)

    def arrow(start: tuple[float, float], end: tuple[float, float], text: str, x: float, y: float) -> None:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": GREY, "linewidth": 1.5})
        axes.text(x, y, text, ha="center", va="center", color=GREY, fontsize=9)

    box(1, 1, 30, 44, "", green)
    axes.text(16, 41.5, "algorithm", ha="center", va="center", color=dark)
    box(3, 23, 26, 15, "advantages,\nor a replay buffer", "white", 9)
    box(3, 3, 26, 13, "learner:\nmodule and optimizer", violet, 9)
    arrow((16, 22.7), (16, 16.3), "batch", 20.5, 19.6)
    box(63, 1, 36, 44, "", green)
    axes.text(81, 41.5, "env runners", ha="center", va="center", color=dark)
    for row, bottom in enumerate((21, 3)):
        box(65, bottom, 32, 17, "", "white")
        axes.text(66.5, bottom + 14, f"runner {row + 1}", va="center", color=dark, fontsize=9)
        box(66.5, bottom + 7.3, 29, 4.6, "copy of the module", violet, 9)
        for env in range(3):
            box(66.5 + 9.9 * env, bottom + 1.5, 9.2, 4.6, "sub-env", green, 8)
    arrow((62.5, 30.5), (29.5, 30.5), "rollouts:\ncolumns [T, N, ...],\nT steps of N sub-envs", 47, 37)
    arrow((29.5, 9.5), (62.5, 9.5), "weights of the module", 47, 12)
    save_figure(figure, path)


def docking_env() -> Any:
    """Return the env class of docs/getting-started.md."""
    page = (DOCS / "getting-started.md").read_text()
    block = re.search(r"```python[^\n]*\n(import[^`]*?class Docking.*?)```", page, re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1], names)
    return names["Docking"]


def record_docking(path: Path) -> None:
    """Train as the page does, and record two episodes."""
    env_class = docking_env()
    with corral.PPOConfig().environment(env_class).training(lr=1e-3).debugging(seed=0).build() as algo:
        with tempfile.TemporaryDirectory() as directory:
            algo.fit(stop={"episode_return_mean": 7.5}, run_dir=f"{directory}/run", progress=False)
        env, frames = env_class({"render_mode": "rgb_array"}), []
        for seed in (2, 5):
            obs, _ = env.reset(seed=seed)
            is_over = False
            while not is_over:
                obs, _, terminated, truncated, _ = env.step(algo.compute_single_action(obs, explore=False))
                frames.append(Image.fromarray(env.render()))
                is_over = terminated or truncated
            frames += [frames[-1]] * 10
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=60, loop=0, optimize=True)


def draw_envs(path: Path) -> None:
    """Draw a strip of envs that the examples use."""
    frames = []
    for name in ("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0"):
        env = gym.make(name, render_mode="rgb_array")
        env.reset(seed=1)
        for _ in range(12):
            env.step(env.action_space.sample())
        frames.append(Image.fromarray(np.asarray(env.render())).resize((200, 140)))
        env.close()
    strip = Image.new("RGB", (200 * len(frames), 140))
    for place, frame in enumerate(frames):
        strip.paste(frame, (200 * place, 0))
    strip.quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    draw_speed(IMAGES / "speed.svg")
    draw_tuned(IMAGES)
    draw_parts(IMAGES / "parts.svg")
    draw_envs(IMAGES / "envs.png")
    record_docking(IMAGES / "docking.gif")
