"""Trains one algorithm once with the settings of one library and prints a JSON line (see `defaults.py`).

    python benchmarks/learning_side.py corral PPO Hopper-v5 --seed 0 --steps 200000

Both libraries get one thread: the runs are compared by what they learn per env step and by their CPU time. No wrapper
normalises observations or rewards. With `--tuned`, Corral takes the tuned settings of the env; see `tuned.py`.
"""

import argparse
import importlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from measuring import THREAD_VARIABLES, Fields, print_line

GREEDY_EPISODES = 20  # if `--episodes` does not say otherwise
# Seeds of the greedy episodes, the same for both libraries and apart from the seeds of training.
FIRST_GREEDY_SEED = 100_000

Act = Callable[[Any], Any]
Curve = list[tuple[int, float]]
"""Env steps, and the mean return of the last 100 episodes of training at that time; NaN before the first episode."""

CURVE_POINTS = 50


def train_corral(options: argparse.Namespace) -> tuple[Curve, Act]:
    """Train with Corral; return the learning curve and the greedy policy."""
    from corral.algorithms.registry import config_class, config_from_dict
    from corral.algorithms.tuned_settings import tuned_settings
    from corral.tools.cli.experiment import parse_pair

    config = config_class(options.algo)()
    if options.tuned:
        settings = tuned_settings(options.env, options.algo)
        del settings["stop"]  # `--steps` says it
        config = config_from_dict(settings)
    config = config.environment(options.env).debugging(seed=options.seed).learners(num_threads=1)
    for text in options.set:
        config.set_path(*parse_pair(text, "--set"))
    algo = config.build()
    curve: Curve = []
    while not curve or curve[-1][0] < options.steps:
        result = algo.train()
        mean = float(result["env_runners"].get("episode_return_mean", float("nan")))
        curve.append((int(result["num_env_steps_sampled_lifetime"]), mean))

    def act(obs: Any) -> Any:
        return algo.compute_single_action(obs, explore=False)

    return curve, act


def train_sb3(options: argparse.Namespace) -> tuple[Curve, Act]:
    """Train with Stable-Baselines3; return the last point of the learning curve and the greedy policy."""
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", PYGAME_HIDE_SUPPORT_PROMPT="1")
    import stable_baselines3
    from stable_baselines3.common.utils import safe_mean

    algorithm = getattr(stable_baselines3, options.algo)
    model = algorithm("MlpPolicy", options.env, seed=options.seed, device="cpu")
    model.learn(total_timesteps=options.steps)

    def act(obs: Any) -> Any:
        return model.predict(obs, deterministic=True)[0]

    mean = float(safe_mean([episode["r"] for episode in model.ep_info_buffer or ()]))
    return [(int(model.num_timesteps), mean)], act


def thin_out(curve: Curve) -> Curve:
    """Return at most 50 points with a return, evenly spread; the last one is among them."""
    points = [(num_env_steps, round(mean, 2)) for num_env_steps, mean in curve if mean == mean]
    stride = -(-len(points) // CURVE_POINTS) or 1
    return points[::-1][::stride][::-1]


def greedy_return(env_id: str, act: Act, num_episodes: int) -> float:
    """Return the mean return of episodes in which the policy does not explore."""
    return sum(total for total, _ in play_greedily(env_id, act, num_episodes)) / num_episodes


def play_greedily(env_id: str, act: Act, num_episodes: int) -> Iterator[tuple[float, bool]]:
    """Yield the return of each episode, and whether its last `info` has `is_success`."""
    env = make_env(env_id)
    for episode in range(num_episodes):
        obs, info = env.reset(seed=FIRST_GREEDY_SEED + episode)
        total, done = 0.0, False
        while not done:
            obs, reward, terminated, truncated, info = env.step(act(obs))
            total += float(reward)
            done = terminated or truncated
        yield total, bool(info.get("is_success"))
    env.close()


def make_env(env_id: str) -> Any:
    """Return an env of Gymnasium, or of a class that is named by its import path, `module:Class`.

    An id may name the module that registers it, as Gymnasium reads it: `module:Id-v0`.
    """
    import gymnasium

    module, _, name = env_id.rpartition(":")
    env_class = getattr(importlib.import_module(module), name, None) if module else None
    return gymnasium.make(env_id) if env_class is None else env_class()


def measure(options: argparse.Namespace) -> Fields:
    """Train, then evaluate greedily; CPU seconds are of imports and training."""
    import torch

    torch.set_num_threads(1)
    curve, act = (train_corral if options.library == "corral" else train_sb3)(options)
    cpu_seconds = time.process_time()
    return {
        "library": options.library,
        "algo": options.algo,
        "env": options.env,
        "seed": options.seed,
        "settings": options.set,
        "env_steps": curve[-1][0],
        "training_return": curve[-1][1],
        "greedy_return": greedy_return(options.env, act, options.episodes),
        "cpu_seconds": cpu_seconds,
        **({"curve": thin_out(curve)} if options.tuned else {}),
    }


def main() -> None:
    """Parse the command line, train, and print the line."""
    parser = argparse.ArgumentParser(description="Trains one algorithm once and prints a JSON line.")
    parser.add_argument("library", choices=("corral", "sb3"))
    parser.add_argument("algo")
    parser.add_argument("env")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, required=True, help="env steps to train for")
    parser.add_argument("--episodes", type=int, default=GREEDY_EPISODES, help="greedy episodes after training")
    parser.add_argument("--tuned", action="store_true", help="the tuned settings of Corral")
    parser.add_argument("--set", action="append", default=[], metavar="GROUP.NAME=VALUE", help="a setting of Corral's")
    options = parser.parse_args()
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))  # before NumPy and PyTorch are imported
    warnings.simplefilter("ignore")
    print_line(lambda: measure(options))


if __name__ == "__main__":
    main()
