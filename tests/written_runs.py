"""Directories of runs as `fit` writes them, made by hand so that every number is known."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


def result(iteration: int, episode_return: float | None, *, steps: int = 100, seconds: float = 2.0) -> dict[str, Any]:
    """Return a result of an iteration of `steps` env steps and `seconds` seconds."""
    return {
        "training_iteration": iteration,
        "num_env_steps_sampled_lifetime": steps * iteration,
        "time_total_s": seconds * iteration,
        "env_runners": {"episode_return_mean": episode_return, "num_env_steps_sampled": steps},
        "learners": {"default_policy": {"total_loss": 1 / iteration}, "__all_modules__": {"num_steps": 7}},
        "timers": {"iteration_s": seconds, "env_step_share": 0.25, "learning_share": 0.75},
        "bottleneck": {"part": "learning", "share": 0.75},
        "fault_tolerance": {"num_env_runner_failures": 0},
    }


def evaluated(row: dict[str, Any], mean: float | None, *, fresh: bool = True) -> dict[str, Any]:
    """Return a result with a round of evaluation, whose interval reaches 5 below and 10 above the mean."""
    low, high = (None, None) if mean is None else (mean - 5, mean + 10)
    found = {
        "episode_return_mean": mean,
        "episode_return_interval_low": low,
        "episode_return_interval_high": high,
    }
    return {**row, "evaluation": {"fresh": fresh, "env_runners": found}}


def config(seed: int = 0, *, algo: str = "PPO", env: str = "CartPole-v1", lr: float = 0.001) -> dict[str, Any]:
    return {
        "algo": algo,
        "environment": {"env": env, "env_config": {}},
        "training": {"lr": lr},
        "debugging": {"seed": seed},
        "stop": {"num_env_steps": 1000},
    }


def write_run(
    path: Path,
    returns: Sequence[float | None] = (1.0, 2.0, 3.0),
    *,
    settings: Mapping[str, Any] | None = None,
    results: Sequence[Mapping[str, Any]] | None = None,
    log: str = "",
) -> Path:
    """Write the directory of a run with one result for each return, or with the given results, and return it."""
    path.mkdir(parents=True)
    rows = [result(i, value) for i, value in enumerate(returns, 1)] if results is None else results
    (path / "config.yaml").write_text(yaml.safe_dump(dict(settings or config())), encoding="utf-8")
    (path / "result.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    lines = [f"2026-01-01 00:00:00,000 INFO corral: Run in {path}, seed 0.", log]
    lines.append("2026-01-01 00:00:09,000 INFO corral: Run finished.")
    (path / "run.log").write_text("\n".join(line for line in lines if line) + "\n", "utf-8", "replace")
    return path
