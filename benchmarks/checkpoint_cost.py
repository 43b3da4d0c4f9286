"""What the checkpoints of a run cost: the same `fit` with the default checkpoints and without any."""

import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from measuring import Fields, Options

ROOT = Path(__file__).resolve().parent.parent
NONE = {"num_checkpoints_kept": 0, "best_checkpoint_metric": None}


def ppo(options: Options) -> Fields:
    """Percent of wall time for PPO with the settings of `examples/cartpole.yaml`."""
    from corral.algorithms.registry import config_from_dict
    from corral.cli.experiment import read_experiment

    settings = read_experiment(ROOT / "examples" / "cartpole.yaml")
    del settings["stop"]
    return _cost(config_from_dict(settings), 60_000, options)


def dqn(options: Options) -> Fields:
    """Percent of wall time for DQN, whose checkpoints hold the replay buffer of 50,000 steps."""
    from corral import DQNConfig

    config = DQNConfig().environment("CartPole-v1").training(store_buffer_in_checkpoints=True)
    return _cost(config.training(replay_buffer_config={"capacity": 50_000}), 15_000, options)


def _cost(config: Any, num_env_steps: int, options: Options) -> Fields:
    """Runs both forms in turns, which swap who goes first; they do the same steps, since they have the same seed."""
    forms = {True: config.copy(seed=options.seed), False: config.copy(seed=options.seed, **NONE)}
    percents: list[float] = []
    wall_s: dict[bool, list[float]] = {True: [], False: []}
    start = perf_counter()
    while len(percents) < 2 or perf_counter() - start < options.seconds:
        for keeps in (True, False) if len(percents) % 2 == 0 else (False, True):
            wall_s[keeps].append(_seconds(forms[keeps], num_env_steps))
        percents.append(100 * (wall_s[True][-1] / wall_s[False][-1] - 1))
    return {"percent": statistics.median(percents), "percents": percents, "wall_s": list(wall_s.values())}


def _seconds(config: Any, num_env_steps: int) -> float:
    with tempfile.TemporaryDirectory() as directory, config.build() as algo:
        start = perf_counter()
        algo.fit(stop={"num_env_steps": num_env_steps}, run_dir=Path(directory) / "run", progress=False)
        return perf_counter() - start
