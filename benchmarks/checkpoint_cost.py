"""What the checkpoints of a run cost: the same `fit` with the default checkpoints and without any."""

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

from measuring import Fields, Options

ROOT = Path(__file__).resolve().parent.parent
NONE = {"num_checkpoints_kept": 0, "best_checkpoint_metric": None}


def ppo(options: Options) -> Fields:
    """Percent of wall time for PPO with the settings of `examples/cartpole.yaml`."""
    from corral.algorithms.registry import config_from_dict
    from corral.tools.cli.experiment import read_experiment

    settings = read_experiment(ROOT / "examples" / "cartpole.yaml")
    del settings["stop"]
    return _cost(config_from_dict(settings), 60_000, options)


def dqn(options: Options) -> Fields:
    """Percent of wall time for DQN, whose checkpoints hold the replay buffer of 50,000 steps."""
    from corral import DQNConfig

    config = DQNConfig().environment("CartPole-v1").training(store_buffer_in_checkpoints=True)
    return _cost(config.training(replay_buffer_config={"capacity": 50_000}), 15_000, options)


def _cost(config: Any, num_env_steps: int, options: Options) -> Fields:
    """Measures the share of a `fit` that its checkpoints take; the same `fit` without any follows, or goes first.

    The share is the value: on a machine that does other work, two runs differ by more than it. Both forms have the same
    seed and take the same steps, and the percents of their wall times are in the raw results.
    """
    forms = {True: config.copy(seed=options.seed), False: config.copy(seed=options.seed, **NONE)}
    shares: list[float] = []
    pairs: list[float] = []
    start = perf_counter()
    while len(pairs) < 2 or perf_counter() - start < options.seconds:
        wall_s = {}
        for keeps in (True, False) if len(pairs) % 2 == 0 else (False, True):
            wall_s[keeps], checkpoints_s = _seconds(forms[keeps], num_env_steps)
            if keeps:
                shares.append(100 * checkpoints_s / (wall_s[keeps] - checkpoints_s))
        pairs.append(100 * (wall_s[True] / wall_s[False] - 1))
    return {"percent": statistics.median(shares), "percents": shares, "percents_of_wall_times": pairs}


def _seconds(config: Any, num_env_steps: int) -> tuple[float, float]:
    """Returns the wall time of a `fit`, and how much of it went into checkpoints."""
    from corral.algorithms.run_checkpoints import RunCheckpoints

    spent_s = 0.0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal spent_s
            start = perf_counter()
            try:
                return method(*arguments)
            finally:
                spent_s += perf_counter() - start

        return call

    with (
        mock.patch.object(RunCheckpoints, "update", timed(RunCheckpoints.update)),
        mock.patch.object(RunCheckpoints, "__exit__", timed(RunCheckpoints.__exit__)),
        tempfile.TemporaryDirectory() as directory,
        config.build() as algo,
    ):
        start = perf_counter()
        algo.fit(stop={"num_env_steps": num_env_steps}, run_dir=Path(directory) / "run", progress=False)
        return perf_counter() - start, spent_s
