"""Random samples against a slow loop over what each call of each sub-env gave: rows, steps, episodes and their ids."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from corral.data.episodes.rollout import Rollout, episode_id
from handmade import MakeRunner
from memory_modules import CountsSteps


class Noting(gym.Env[Any, Any]):
    """Random episodes, which break at random; each call and what it gave is appended to the log of the sub-env.

    Config:
        seed: Seed of the episodes.
        logs: A list of calls for each sub-env: `("reset", obs, info)`, `("failed",)` or
            `("step", action, obs, reward, terminated, truncated, info)`.
        fails: Probability of a call to fail, from the second step of an env on.
        ends: Probability of a step to end its episode.
    """

    observation_space: Any = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space: Any = spaces.Discrete(5)

    def __init__(self, config: Any) -> None:
        self.config, self.log = config, config["logs"][config.vector_index]
        self.rng = np.random.default_rng([config["seed"], config.vector_index, len(self.log)])
        self.num_steps = 0

    def _fail(self) -> None:
        if self.num_steps > 1 and self.rng.random() < self.config["fails"]:
            self.log.append(("failed",))
            raise OSError("the simulator is gone")

    def _see(self) -> tuple[Any, dict[str, Any]]:
        number = float(len(self.log))
        return np.array([number, self.t], np.float32), {"number": number} if self.rng.random() < 0.5 else {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._fail()
        self.t = 0
        obs, info = self._see()
        self.log.append(("reset", obs, info))
        return obs, info

    def step(self, action: Any) -> Any:
        self._fail()
        self.t, self.num_steps = self.t + 1, self.num_steps + 1
        obs, info = self._see()
        over, terminates = self.rng.random() < self.config["ends"], bool(self.rng.random() < 0.5)
        result = obs, float(self.rng.integers(100)), bool(over and terminates), bool(over and not terminates), info
        self.log.append(("step", int(action), *result))
        return result


class SlowLane:
    """One sub-env, row by row, by the calls in its log."""

    def __init__(self, calls: Iterator[Any], *, same_step: bool) -> None:
        self.calls, self.same_step = calls, same_step

    def begin(self) -> None:
        """Begin after a reset of all envs."""
        self.count, self.is_over = 0, False
        self._begin_episode()

    def _begin_episode(self) -> None:
        while (call := next(self.calls))[0] != "reset":
            assert call == ("failed",)
        self.obs, self.info, self.length, self.total = call[1], call[2], 0, 0.0

    def check_row(self, rollout: Rollout, t: int, i: int) -> tuple[bool, list[tuple[float, int]]]:
        """Compare a row; return whether a step was taken, and the return and length of the episode that it ended."""
        assert np.array_equal(rollout.obs[t, i], self.obs) and rollout.info_at(t, i) == self.info
        if self.is_over:
            self.is_over = False
            self._begin_episode()
            return False, []
        if (call := next(self.calls)) == ("failed",):
            assert (t, i) in rollout.broken and rollout.rewards[t, i] == 0
            self.count += 1
            self._begin_episode()
            return False, []
        _, action, obs, reward, terminated, truncated, info = call
        assert (t, i) not in rollout.broken
        columns = rollout.actions, rollout.rewards, rollout.terminated, rollout.truncated
        assert [column[t, i] for column in columns] == [action, reward, terminated, truncated]
        assert rollout.states["count"][t, i, 0] == self.length  # the memory of a module begins with the episode
        assert np.array_equal(rollout.next_obs_at(t, i), obs) and rollout.next_info_at(t, i) == info
        self.obs, self.info, self.length, self.total = obs, info, self.length + 1, self.total + reward
        if not (terminated or truncated):
            return True, []
        ended = [(self.total, self.length)]
        self.count, self.length, self.total = self.count + 1, 0, 0.0
        if self.same_step:
            self._begin_episode()
        self.is_over = not self.same_step
        return True, ended


@pytest.mark.slow_cases("same_step")
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("fails", [0.0, 0.2])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_rollouts_are_what_the_calls_of_the_envs_gave(
    make_runner: MakeRunner, seed: int, fails: float, mode: str
) -> None:
    rng = random.Random(f"{seed} {fails} {mode}")
    num_envs = 1 + seed
    logs: list[list[Any]] = [[] for _ in range(num_envs)]
    runner = make_runner(
        Noting,
        num_envs=num_envs,
        env_config={"logs": logs, "seed": seed, "fails": fails, "ends": rng.choice([0.1, 0.3, 0.8])},
        autoreset_mode=mode,
        disable_env_checking=True,
        restart_failed_sub_environments=True,
        module_class=CountsSteps,
        on_sample_end=lambda: None,
    )
    lanes = [SlowLane(iter(log), same_step=mode == "same_step") for log in logs]
    needs_reset, sampled = True, 0
    for _ in range(30):
        wanted, force_reset = rng.choice([0, 1, 2, 7, rng.randrange(40)]), rng.random() < 0.2
        whole = rng.random() < 0.2
        request: dict[str, Any] = {"num_episodes" if whole else "num_timesteps": wanted, "force_reset": force_reset}
        rollout = runner.sample(**request)
        needs_reset |= force_reset
        sampled += rollout.num_env_steps
        assert sampled + runner.num_env_steps_lost == sum(call[0] == "step" for log in logs for call in log)
        if not wanted:
            assert rollout.num_rows == 0
            continue
        assert rollout.continues != (needs_reset or whole)
        if not rollout.continues:
            for lane in lanes:
                lane.begin()
        assert rollout.carry is not None
        ended: list[tuple[float, int]] = []
        taken, prefix = np.zeros((rollout.num_rows, num_envs), np.bool_), rollout.carry.id_prefix
        ids = [episode_id(prefix, i, lane.count) for i, lane in enumerate(lanes)]
        for t in range(rollout.num_rows):
            for i, lane in enumerate(lanes):
                taken[t, i], found = lane.check_row(rollout, t, i)
                ended += found
        ids += [episode_id(prefix, i, lane.count) for i, lane in enumerate(lanes)]
        assert {min(ids) <= episode.id_ <= max(ids) for episode in rollout} <= {True}
        if whole:
            assert (rollout.valid <= taken).all() and len(runner.last_statistics.returns) == wanted
        else:
            assert np.array_equal(rollout.valid, taken) and wanted <= taken.sum() < wanted + num_envs
            assert list(zip(runner.last_statistics.returns, runner.last_statistics.lengths, strict=True)) == ended
        needs_reset = whole
