"""The host of a runner's envs: it needs no runner, and the seeds of its envs depend on the role."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from corral import PPOConfig
from corral.core.seeding import runner_seeds
from corral.envs.env_host import EnvHost
from corral.envs.host_state import get_host_state, set_host_state
from corral.errors import EnvError
from corral.runners.runner import EnvRunner
from corral.testing import CountingEnv


class TaskEnv(CountingEnv):
    """Keeps the seeds that it was reset with, and a task."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.seeds: list[int | None] = []
        self.task = 0

    def get_task(self) -> int:
        return self.task

    def set_task(self, task: int) -> None:
        self.task = task

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        return super().reset(seed=seed, options=options)


def config(env: Any = TaskEnv, **settings: Any) -> PPOConfig:
    made = PPOConfig().environment(env, disable_env_checking=True)
    return made.env_runners(num_envs_per_env_runner=2, vectorization="sync").debugging(seed=1).copy(**settings)


class Log:
    """Makes hosts, and notes what they announce."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def host(self, of: PPOConfig) -> EnvHost:
        return EnvHost(
            of,
            3,
            runner_seeds(1, 3, 0, False)[0],
            env_created=lambda env, context: self.events.append(("env", env.num_envs, context.worker_index)),
            sub_env_created=lambda sub_env, context, index: self.events.append((context.vector_index, index)),
            sub_env_restarted=lambda failure: None,
            needs_sub_envs=False,
            has_own_process=False,
        )


def test_announces_sub_envs_then_the_vector_env() -> None:
    log = Log()
    host = log.host(config())
    assert log.events == []  # nothing is made before it is asked for
    host.make()
    assert log.events == [(0, 0), (1, 1), ("env", 2, 3)]
    host.close()


def test_recovers_with_tasks_that_the_envs_changed_themselves() -> None:
    host = Log().host(config())
    host.make()
    for index, sub_env in enumerate(host.env.envs):  # type: ignore[attr-defined]
        sub_env.unwrapped.task = index + 5  # as an env does that chooses its next task
    host.recover()
    assert host.get_tasks() == [5, 6]
    host.close()


def test_recovers_with_the_tasks_of_the_envs_and_other_seeds() -> None:
    host = Log().host(config())
    host.make()
    host.foreach(lambda env: env.set_task(7))
    host.reset()
    host.reset()
    first = host.foreach(lambda env: env.seeds)
    host.recover()
    host.reset()
    assert host.get_tasks() == [7, 7]
    [[again], [_]] = host.foreach(lambda env: env.seeds)
    assert again is not None and again not in first[0]
    assert all(seeds[0] is not None and seeds[1] is None for seeds in first)  # another reset continues its generator
    host.close()


def test_an_error_names_env_and_row() -> None:
    host = Log().host(config())
    host.make()
    host.num_rows = 40
    with pytest.raises(EnvError, match=r"env 'TaskEnv', sub-env 1, step 42: reward is nan\."):
        raise host.bad_value(2, 1, "reward is nan")
    assert "step 43: raised in step(): OSError: full" in str(host.error("step", 3, OSError("full")))
    host.close()


def drawn(in_evaluation: bool, num_restarts: int = 0, worker_index: int = 1) -> tuple[tuple[int, ...], Any]:
    """Return the seeds of a runner's envs, and the actions of a sample."""
    made = config(in_evaluation=in_evaluation).freeze()
    runner = EnvRunner(made, worker_index, num_restarts=num_restarts)
    rollout = runner.sample(num_timesteps=200)
    seeds = tuple(seeds[0] for seeds in runner.foreach_env(lambda env: env.seeds))
    runner.stop()
    return seeds, rollout.actions


def test_runners_that_differ_in_role_or_restarts_draw_other_numbers() -> None:
    runners = [(False, 0), (False, 1), (True, 0), (True, 1)]
    seeds, actions = zip(*(drawn(*which) for which in runners), strict=True)
    assert len({seed for pair in seeds for seed in pair}) == 2 * len(runners)
    for i, one in enumerate(actions):
        assert all((one != other).any() for other in actions[i + 1 :])
    again = drawn(True, 1)
    assert again[0] == seeds[3]
    np.testing.assert_array_equal(again[1], actions[3])


class Careless(CountingEnv):
    """Draws its rewards from NumPy's global generator, and has a state of its own."""

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return (obs, float(np.random.random()), *rest)

    def get_state(self) -> int:
        return self._t

    def set_state(self, state: int) -> None:
        self._t = state


def test_the_global_generators_of_processes_of_sub_envs_continue() -> None:
    of = config(Careless, vectorization="async")
    hosts = [Log().host(of) for _ in range(2)]
    try:
        for host in hosts:
            host.make()
        actions = np.zeros(2, np.int64)
        hosts[0].reset()
        hosts[0].step(actions)
        assert set_host_state(hosts[1], get_host_state(hosts[0]), np.zeros(2, np.bool_), [None] * 2) == [""] * 2
        first, again = (host.step(actions)[1] for host in hosts)
        assert first.tolist() == again.tolist() and first[0] != first[1]
    finally:
        for host in hosts:
            host.close()
