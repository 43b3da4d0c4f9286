"""`SampleRequest.time_limit_s`: a runner ends a sample in time, whatever its envs do, and returns what is complete."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from corral.errors import EnvTimeoutError
from corral.runners.requests import SampleRequest
from corral.runners.runner import EnvRunner
from corral.testing import CountingEnv
from faulty import TroubleEnv
from handmade import MakeRunner

LIMIT_S = 0.3
LATE_S = 0.5


class SteppedEnv(TroubleEnv):
    """Counts its steps in a list that all envs of a runner share."""

    def step(self, action: int) -> Any:
        answer = super().step(action)
        self._config["steps"].append(self.index)
        return answer


def make_trouble(make_runner: MakeRunner, how: str, **settings: Any) -> EnvRunner:
    names = ("step_faults", "reset_faults", "make_faults", "vector_index", "episode_length", "steps")
    config = {name: settings.pop(name) for name in names if name in settings}
    env = SteppedEnv if "steps" in config else TroubleEnv
    return make_runner(env, env_config={"how": how, "counts": {}, **config}, disable_env_checking=True, **settings)


def collect_in_time(runner: EnvRunner, **request: Any) -> Any:
    start = time.perf_counter()
    rollout = runner.collect(SampleRequest(time_limit_s=LIMIT_S, **request))
    assert LIMIT_S <= time.perf_counter() - start < LIMIT_S + LATE_S
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    return rollout


def lengths(rollout: Any) -> list[int]:
    return [len(episode) for episode in rollout.episodes() if episode.is_done]


@pytest.mark.parametrize("how", ["sleep", "loop", "read", "lock", "swallow", "swallow_all_once"])
def test_episodes_before_a_step_that_hangs_are_kept(make_runner: MakeRunner, how: str) -> None:
    runner = make_trouble(make_runner, how, num_envs=2, step_faults=[8], vector_index=1, episode_length=3)
    assert lengths(collect_in_time(runner, num_episodes=8)) == [3, 3, 3, 3]
    assert runner.last_statistics.env_indices.tolist() == [0, 1, 0, 1]
    # The next sample begins with a reset, in the same envs.
    after = runner.collect(SampleRequest(num_episodes=4, time_limit_s=30))
    assert lengths(after) == [3] * 4 and after.obs[0, :, 1].tolist() == [0, 0]


@pytest.mark.parametrize("how", ["sleep", "SIGSTOP"])
def test_sub_envs_in_their_own_processes(make_runner: MakeRunner, how: str) -> None:
    runner = make_trouble(
        make_runner, how, num_envs=2, step_faults=[8], vector_index=1, episode_length=3, vectorization="async"
    )
    assert lengths(collect_in_time(runner, num_episodes=8)) == [3, 3, 3, 3]
    assert lengths(runner.collect(SampleRequest(num_episodes=2))) == [3, 3]  # in new processes


@pytest.mark.parametrize(("fault", "rows"), [({"reset_faults": [1]}, 0), ({"reset_faults": [2]}, 3)])
def test_resets_that_hang(make_runner: MakeRunner, fault: dict[str, Any], rows: int) -> None:
    runner = make_trouble(make_runner, "sleep", episode_length=3, **fault)
    rollout = collect_in_time(runner, num_episodes=2)
    assert rollout.num_rows == rollout.num_env_steps == rows
    assert lengths(runner.collect(SampleRequest(num_episodes=2))) == [3, 3]


@pytest.mark.parametrize("request_", [{"num_episodes": 2}, {"num_timesteps": 10**9}], ids=str)
def test_episodes_that_never_end(make_runner: MakeRunner, request_: dict[str, int]) -> None:
    runner = make_runner(CountingEnv, env_config={"episode_length": 10**9}, num_envs=2)
    rollout = collect_in_time(runner, **request_)
    assert rollout.num_env_steps == 2 * rollout.num_rows > 0 and lengths(rollout) == []
    assert rollout.valid.all() and np.isfinite(rollout.columns["logp"]).all()


def test_outside_of_the_main_thread(make_runner: MakeRunner) -> None:
    """There nothing can be interrupted; the sample ends after the step that took too long."""
    runner = make_trouble(make_runner, "nap", step_faults=range(10**6), episode_length=10**9)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(collect_in_time(runner, num_episodes=1)))
    thread.start()
    thread.join()
    assert 2 <= found[0].num_env_steps <= 1 + LIMIT_S / 0.05


@pytest.mark.parametrize("how", ["nap", "sleep"])
def test_the_limit_of_a_step_stays(make_runner: MakeRunner, how: str) -> None:
    """Whichever of the two limits is over first ends what it is for: the step, with an error, or the sample."""
    hanging = {"step_faults": [3], "episode_length": 4}
    runner = make_trouble(make_runner, how, env_step_timeout_s=0.1, **hanging)
    request = SampleRequest(num_episodes=2, time_limit_s=30)
    if how == "nap":
        assert lengths(runner.collect(request)) == [4, 4]
    else:
        with pytest.raises(EnvTimeoutError, match=r"env_step_timeout_s=0\.1"):
            runner.collect(request)
    runner = make_trouble(make_runner, "sleep", env_step_timeout_s=30, **hanging)
    assert collect_in_time(runner, num_episodes=2).num_env_steps == 2


@pytest.mark.parametrize("restarts", [False, True])
def test_a_sub_env_is_not_restarted_because_the_sample_is_over(make_runner: MakeRunner, restarts: bool) -> None:
    runner = make_trouble(make_runner, "sleep", step_faults=[2], restart_failed_sub_environments=restarts)
    assert collect_in_time(runner, num_episodes=2).num_env_steps == 1
    assert runner.num_sub_env_restarts == 0


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("request_", [{"num_episodes": 8}, {"num_timesteps": 40}], ids=str)
def test_every_step_is_counted_once(make_runner: MakeRunner, mode: str, request_: dict[str, int]) -> None:
    steps: list[int] = []
    runner = make_trouble(
        make_runner,
        "sleep",
        num_envs=3,
        autoreset_mode=mode,
        step_faults=[8],
        vector_index=1,
        episode_length=3,
        steps=steps,
    )
    first = collect_in_time(runner, **request_)
    second = runner.collect(SampleRequest(**request_))
    assert len(steps) == first.num_env_steps + second.num_env_steps + runner.num_env_steps_lost
    assert runner.metrics.peek("num_env_steps_sampled_lifetime") == first.num_env_steps + second.num_env_steps
    complete = sum(int((rollout.done & rollout.valid).sum()) for rollout in (first, second))
    assert runner.metrics.peek("num_episodes_lifetime") == complete


def test_making_new_envs_counts(make_runner: MakeRunner) -> None:
    runner = make_trouble(make_runner, "sleep", make_faults=[2])
    del runner.host.env  # as after a restart that failed
    start = time.perf_counter()
    with pytest.raises(EnvTimeoutError, match="the time limit of the sample"):
        runner.collect(SampleRequest(num_episodes=1, time_limit_s=LIMIT_S))
    assert time.perf_counter() - start < LIMIT_S + LATE_S
    assert lengths(runner.collect(SampleRequest(num_episodes=1, time_limit_s=30))) == [3]


def test_a_sub_env_that_was_restarted_in_the_step_that_hangs(make_runner: MakeRunner) -> None:
    """The step is in no row, so nothing in the rollout is broken."""

    class FailsFirst(TroubleEnv):
        def step(self, action: int) -> Any:
            if self.index == 0 and self._t == 1 and self._episode == 2:
                raise OSError("the simulator is gone")
            return super().step(action)

    runner = make_runner(
        FailsFirst,
        num_envs=2,
        env_config={"how": "sleep", "counts": {}, "step_faults": [8], "vector_index": 1, "episode_length": 3},
        disable_env_checking=True,
        restart_failed_sub_environments=True,
    )
    rollout = collect_in_time(runner, num_timesteps=50)
    assert runner.num_sub_env_restarts == 1
    assert rollout.broken == [] and rollout.num_env_steps == 14
    assert runner.num_env_steps_lost == 0
    assert lengths(rollout) == [3] * 4
