"""Envs for evaluation rounds: episodes with lengths that seeds decide, and runners whose envs fail or hang."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from corral import PPOConfig
from corral.engines.lazy import LazyEngine
from corral.runners.runner_group import EnvRunnerGroup
from corral.testing import CountingEnv
from faulty import hang

SHORT, LONG = 1, 20
"""Lengths of episodes, equally frequent."""
TRUE_MEAN = (SHORT + LONG) / 2
"""Mean return."""


class Uneven(CountingEnv):
    """Episodes are short or long, and their return is their length."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        answer = super().reset(seed=seed, options=options)
        self._length = int(self.np_random.choice([SHORT, LONG]))
        return answer

    def step(self, action: int) -> Any:
        obs, _, *rest = super().step(action)
        return obs, 1.0, *rest


class Troubled(Uneven):
    """Has trouble in the runners that its task names; the first task is in the config, under `trouble`.

    Task:
        runners: Indices of the runners.
        how: `"raise"`, `"interrupt"`, `"endless"`, `"slow"` (5 ms per step), `"waits"` (until an env of another runner
            has ended 12 episodes, and made the file `gate`), or one of the ways of `faulty.hang`.
        at: Step from which on there is trouble, counted since the task was set, from 1.
        once: A file, if there is to be trouble only once.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._worker_index = config.worker_index
        self.set_task(config.get("trouble"))

    def get_task(self) -> Any:
        return self._task

    def set_task(self, task: Any) -> None:
        self._task, self._num_steps, self._num_ended = task, 0, 0

    def _claims_trouble(self) -> bool:
        """Return whether to have trouble now."""
        task = self._task
        if task is None or self._worker_index not in task["runners"] or self._num_steps < task["at"]:
            return False
        if "once" in task:
            try:
                Path(task["once"]).touch(exist_ok=False)
            except FileExistsError:
                return False
        return True

    def step(self, action: int) -> Any:
        self._num_steps += 1
        obs, reward, terminated, truncated, info = super().step(action)
        self._num_ended += terminated
        if self._task is not None and "gate" in self._task and self._num_ended == 12:
            Path(self._task["gate"]).touch()
        if self._claims_trouble():
            how = self._task["how"]
            if how == "raise":
                raise OSError("as it was told")
            if how == "interrupt":
                raise KeyboardInterrupt
            if how == "slow":
                time.sleep(0.005)
            elif how == "waits":
                while not Path(self._task["gate"]).exists():
                    time.sleep(0.005)
            elif how == "endless":
                terminated = False
            else:
                hang(how)
        return obs, reward, terminated, truncated, info


def trouble(*runners: int, how: str, at: int = 1, **once: str) -> dict[str, Any]:
    """Return a task of `Troubled`."""
    return {"runners": runners, "how": how, "at": at, **once}


def choose_nothing() -> None:
    """Leave resets as they are; with an `env_reset_fn`, a round can choose them."""


@contextmanager
def evaluation_group(engine: str, num_env_runners: int, num_envs: int = 1, **settings: Any) -> Iterator[EnvRunnerGroup]:
    """Start evaluation runners on an engine of their own, and end both."""
    config = PPOConfig().environment(Troubled, disable_env_checking=True).engine(engine).debugging(seed=0)
    config.env_runners(num_envs_per_env_runner=num_envs)
    config.evaluation(evaluation_num_env_runners=num_env_runners, evaluation_config={"env_reset_fn": choose_nothing})
    config.rl_module(model_config={"fcnet_hiddens": [4]})
    lazy = LazyEngine(engine)
    group = EnvRunnerGroup(config.copy(**settings).for_evaluation().freeze(), lazy)
    try:
        yield group
    finally:
        group.stop()
        lazy.stop()


def returns_of_seeds(seeds: Any) -> list[float]:
    """Return the return of the episode that each seed begins."""
    env = Uneven()
    found = []
    for seed in seeds:
        env.reset(seed=int(seed))
        found.append(float(env._length))
    return found


def standard_errors(returns: Any) -> float:
    """Return how many standard errors the mean return is off; the deviation of one episode is known."""
    deviation = (LONG - SHORT) / 2
    return float((np.mean(returns) - TRUE_MEAN) / (deviation / np.sqrt(len(returns))))
