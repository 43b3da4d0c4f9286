"""Durations of episodes: the seconds in which they are played, without the time between two samples."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from corral.testing import CountingEnv
from handmade import MakeRunner

STEP_S, PAUSE_S = 0.002, 0.25


class Slow(CountingEnv):
    """Each step and each reset takes a known time."""

    def reset(self, **kwargs: Any) -> Any:
        time.sleep(STEP_S)
        return super().reset(**kwargs)

    def step(self, action: int) -> Any:
        time.sleep(STEP_S)
        return super().step(action)


@pytest.mark.parametrize("mode", ["next_step", pytest.param("same_step", marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_timesteps", [6, 8, 2], ids=["ends_with_episodes", "ends_within", "short"])
def test_time_between_samples_does_not_count(make_runner: MakeRunner, mode: str, num_timesteps: int) -> None:
    seen: list[float] = []
    runner = make_runner(
        Slow,
        num_envs=2,
        env_config={"episode_length": 3},
        autoreset_mode=mode,
        on_episode_end=lambda episode: seen.append(episode.get_duration_s()),
    )
    views: list[float] = []
    for _ in range(8):
        rollout = runner.sample(num_timesteps=num_timesteps)
        views += [episode.get_duration_s() for episode in rollout if episode.is_done]
        time.sleep(PAUSE_S)
    # Three rows of two sub-envs, one after the other; the scheduler may add to it, but not as much as a pause.
    assert len(seen) >= 4 and min(seen) >= 3 * STEP_S
    assert max(seen) < PAUSE_S
    # Callbacks read the clock a little later, how much later is up to the scheduler.
    assert runner.metrics.peek("episode_duration_sec_mean") == pytest.approx(np.mean(seen), abs=PAUSE_S / 2)
    assert sorted(views) == pytest.approx(sorted(seen), abs=PAUSE_S / 2)
    assert np.mean(views) == pytest.approx(runner.metrics.peek("episode_duration_sec_mean"))  # from the same clock


def test_the_reset_is_no_part_of_the_episode(make_runner: MakeRunner) -> None:
    class SlowReset(CountingEnv):
        def reset(self, **kwargs: Any) -> Any:
            time.sleep(PAUSE_S / 2)
            return super().reset(**kwargs)

    runner = make_runner(SlowReset, env_config={"episode_length": 2}, autoreset_mode="next_step")
    runner.sample(num_timesteps=6)
    assert runner.metrics.peek("episode_duration_sec_mean") < PAUSE_S / 2
