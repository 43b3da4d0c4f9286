"""States of modules with memory in runners: reset where episodes begin, kept over fragments, and restored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from corral import PPOConfig
from corral.core.tree import map_tree
from corral.errors import CheckpointError
from corral.runners.runner import EnvRunner
from corral.runners.runner_state import check_runner_state, get_runner_state, set_runner_state
from corral.testing import FaultyEnv
from memory_modules import CountsSteps
from random_agents import RandomAgents

STAGGERED: dict[str, Any] = {"episode_length": 4, "stagger": True, "ends": "alternate"}


def assert_states_count_steps(rollout: Any) -> int:
    """Check that each state is the number of the step, as the observations have it; return the number of steps."""
    valid, count = rollout.valid, rollout.states["count"][..., 0]
    assert np.array_equal(count[:-1][valid], rollout.obs[:-1, :, 1][valid])
    values, next_values = rollout.compute_values(lambda obs, states: states["count"][:, 0])
    steps = rollout.obs[:-1, :, 1]
    assert np.array_equal(values[valid], steps[valid])
    assert np.array_equal(next_values[valid], steps[valid] + 1)  # of final observations and at the fragment's end too
    return int(valid.sum())


@pytest.mark.parametrize(
    "settings",
    [{"autoreset_mode": "next_step"}, {"autoreset_mode": "same_step"}, {"vectorization": "async"}],
    ids=["next_step", "same_step", "async"],
)
@pytest.mark.parametrize("fragment", [1, 2, 7, 30])
def test_states_are_reset_where_episodes_begin_and_kept_over_fragments(
    make_runner: Any, settings: dict[str, Any], fragment: int
) -> None:
    if fragment != 7 and "vectorization" in settings:
        pytest.skip("one length is enough for processes")
    runner = make_runner(num_envs=3, env_config=STAGGERED, module_class=CountsSteps, **settings)
    num_steps = sum(assert_states_count_steps(runner.sample(num_timesteps=3 * fragment)) for _ in range(60 // fragment))
    assert num_steps >= 150
    assert_states_count_steps(runner.sample(num_episodes=4))
    assert_states_count_steps(runner.sample(num_timesteps=5, force_reset=True))


def test_a_sub_env_that_is_made_again_begins_with_the_initial_state(make_runner: Any) -> None:
    runner = make_runner(
        FaultyEnv,
        num_envs=2,
        env_config={"at_step": 5, "episode_length": 9},
        module_class=CountsSteps,
        restart_failed_sub_environments=True,
        disable_env_checking=True,
    )
    rollouts = [runner.sample(num_timesteps=20) for _ in range(3)]
    assert runner.num_sub_env_restarts
    for rollout in rollouts:
        valid = rollout.valid
        assert np.array_equal(rollout.states["count"][:-1, :, 0][valid], rollout.obs[:-1, :, 1][valid])


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_a_saved_runner_continues_with_its_states(make_runner: Any, mode: str) -> None:
    settings = {"env_config": STAGGERED, "module_class": CountsSteps, "autoreset_mode": mode}
    first, second = (make_runner(num_envs=3, **settings) for _ in range(2))
    first.sample(num_timesteps=22)
    state = get_runner_state(first)
    check_runner_state(second, state)
    set_runner_state(second, state)
    for runner in (first, second):
        assert_states_count_steps(runner.sample(num_timesteps=24))


def test_a_state_of_other_shapes_is_refused(make_runner: Any) -> None:
    runner, plain = make_runner(module_class=CountsSteps), make_runner()
    runner.sample(num_timesteps=2)
    state = get_runner_state(runner)
    with pytest.raises(CheckpointError, match="without memory, and the state of a runner is of a module with"):
        check_runner_state(plain, state)
    bad = {**state, "episodes": {**state["episodes"], "states": {"count": np.zeros((1, 3), np.float32)}}}
    with pytest.raises(CheckpointError, match=r"count is float32\[1, 3\] and must be float32\[1, 1\]"):
        check_runner_state(runner, bad)
    before = map_tree(np.copy, runner.actors["default_policy"].memory.states)
    runner.sample(num_timesteps=1)
    set_runner_state(runner, state)
    assert np.array_equal(runner.actors["default_policy"].memory.states["count"], before["count"])


class OwnSteps(RandomAgents):
    """Agents that see the number of their own steps in the episode."""

    _KEPT = (*RandomAgents._KEPT, "counts")

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_spaces = dict.fromkeys(self.possible_agents, box)

    def _see(self, agent: str) -> Any:
        return np.array([super()._see(agent)[0], self.counts.get(agent, 0)], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.counts: dict[str, int] = {}
        return super().reset(seed=seed, options=options)

    def step(self, actions: dict[str, int]) -> Any:
        self.counts |= {agent: self.counts.get(agent, 0) + 1 for agent in actions}
        return super().step(actions)


@pytest.mark.parametrize("fragment", [5, 40])
def test_each_agent_has_a_state_of_its_own(fragment: int) -> None:
    config = PPOConfig().environment(OwnSteps, disable_env_checking=True).rl_module(module_class=CountsSteps)
    config.env_runners(num_envs_per_env_runner=3, vectorization="sync").multi_agent(policies=("shared",))
    runners = [EnvRunner(config.copy().freeze()) for _ in range(2)]
    num_steps = 0
    for number in range(120 // fragment):
        rollout = runners[0].sample(num_timesteps=fragment)
        for part in rollout.by_module().values():
            num_steps += assert_states_count_steps(part)
        if number == 1:  # another runner continues from here
            state = get_runner_state(runners[0])
            check_runner_state(runners[1], state)
            set_runner_state(runners[1], state)
            for part in runners[1].sample(num_timesteps=fragment).by_module().values():
                assert_states_count_steps(part)
    assert num_steps > 150
    for runner in runners:
        runner.stop()
