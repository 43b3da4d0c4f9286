"""Trains one row of the leaderboard with one seed and prints a JSON line (see `quality.py`).

    python benchmarks/quality_side.py Pendulum-v1 "Corral SAC" --seed 0

Both libraries get one thread. Evaluations are played by the same code for both, without exploration, and their CPU
seconds do not count.
"""

import argparse
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

from learning_side import Act, play_greedily
from measuring import THREAD_VARIABLES, Fields, print_line
from quality_rows import ROWS, TASKS, Row, Task

EPISODES, LAST_EPISODES = 10, 20


class Course:
    """What a run has reached at each evaluation.

    Attributes:
        points: Env steps, CPU seconds of training until then, and the score of an evaluation.
    """

    def __init__(self, env_id: str, task: Task) -> None:
        """Begin before the first env step; imports of libraries count."""
        self.points: list[tuple[int, float, float]] = []
        self._env_id, self._task, self._evaluation_seconds = env_id, task, 0.0

    def look(self, num_env_steps: int, act: Act) -> None:
        """Evaluate if that is due after so many env steps."""
        last = self.points[-1][0] if self.points else 0
        if num_env_steps // self._task.every == last // self._task.every:
            return
        start = time.process_time()
        seconds = start - self._evaluation_seconds
        is_last = num_env_steps >= self._task.num_steps
        mean = score(self._env_id, self._task, act, LAST_EPISODES if is_last else EPISODES)
        self._evaluation_seconds += time.process_time() - start
        self.points.append((num_env_steps, round(seconds, 2), round(mean, 2)))


def score(env_id: str, task: Task, act: Act, num_episodes: int) -> float:
    """Return the mean return of episodes without exploration, or the percentage of those that end at their goal."""
    played = list(play_greedily(env_id, act, num_episodes))
    return sum(100.0 * is_success if task.has_goals else total for total, is_success in played) / num_episodes


def train_corral(row: Row, env_id: str, seed: int, look: Callable[[int, Act], None], task: Task) -> str:
    """Train with Corral; return its version."""
    from corral import __version__
    from corral.algorithms.registry import config_class

    config = config_class(row.algo)().environment(env_id).debugging(seed=seed).learners(num_threads=1)
    for path, value in row.settings.items():
        config.set_path(path, value)
    if config.algo_class.__name__ != "PPO":
        config.reporting(min_sample_timesteps_per_iteration=task.every)

    def act(obs: Any) -> Any:
        return algo.compute_single_action(obs, explore=False)

    num_env_steps = 0
    with config.build() as algo:
        while num_env_steps < task.num_steps:
            num_env_steps = int(algo.train()["num_env_steps_sampled_lifetime"])
            look(num_env_steps, act)
    return __version__


def train_sb3(row: Row, env_id: str, seed: int, look: Callable[[int, Act], None], task: Task) -> str:
    """Train with Stable-Baselines3 or its contrib package; return the version."""
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", PYGAME_HIDE_SUPPORT_PROMPT="1")
    import sb3_contrib
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback

    class Looks(BaseCallback):
        def _on_step(self) -> bool:
            look(self.num_timesteps, lambda obs: self.model.predict(obs, deterministic=True)[0])
            return True

    library: Any = stable_baselines3 if hasattr(stable_baselines3, row.algo) else sb3_contrib
    model = getattr(library, row.algo)("MlpPolicy", env_id, seed=seed, device="cpu", **row.settings)
    model.learn(total_timesteps=task.num_steps, callback=Looks())
    return str(library.__version__)


def measure(env_id: str, row: Row, seed: int) -> Fields:
    """Train, and evaluate on the way."""
    import torch

    torch.set_num_threads(1)
    task = TASKS[env_id]
    course = Course(env_id, task)
    train = train_corral if row.library == "corral" else train_sb3
    version = train(row, env_id, seed, course.look, task)
    return {"env": env_id, "row": row.name, "seed": seed, "version": version, "points": course.points}


def main() -> None:
    """Parse the command line, train, and print the line."""
    parser = argparse.ArgumentParser(description="Trains one row of the leaderboard and prints a JSON line.")
    parser.add_argument("env", choices=list(ROWS))
    parser.add_argument("row")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = {row.name: row for row in ROWS[options.env]}
    if options.row not in rows:
        parser.error(f"{options.env} has no row {options.row!r}; it has {', '.join(rows)}")
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))  # before NumPy and PyTorch are imported
    warnings.simplefilter("ignore")
    print_line(lambda: measure(options.env, rows[options.row], options.seed))


if __name__ == "__main__":
    main()
