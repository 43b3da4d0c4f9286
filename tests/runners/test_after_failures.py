"""An episode after a failure of its sub-env begins as any other: nothing of the dead episode is remembered."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from at_least import at_least
from corral import FrameStack, PPOConfig, PrevActionsPrevRewards, make_multi_agent
from corral.exploration.base import StochasticSampling
from corral.runners.runner import EnvRunner


class Fails(gym.Env[Any, Any]):
    """The observation is the step of the episode, from 1 on; an episode ends or fails after its third step."""

    observation_space = gym.spaces.Box(0, 10, (1,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, config: Any = None) -> None:
        self.t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t, self.fails = 0, bool(self.np_random.random() < 0.5)
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.fails and self.t == 4:
            raise RuntimeError("broken")
        return self._obs(), float(self.t), self.t == 3 and not self.fails, False, {}

    def _obs(self) -> Any:
        return np.array([self.t + 1], np.float32)


class NotesBegins(StochasticSampling):
    """Notes where episodes begin, and checks it against what the module sees."""

    def begin_episodes(self, begins: Any, *, timestep: int, explore: bool) -> None:
        self.begins = begins.copy()

    def get_exploration_action(self, *, action_distribution: Any, timestep: int, explore: bool = True) -> Any:
        newest = action_distribution.obs["observations"][:, -1, 0]
        acts = action_distribution.acts
        here = np.ones(len(newest), np.bool_) if acts is None else acts
        assert np.array_equal(self.begins[here], newest[here] == 1)
        return super().get_exploration_action(
            action_distribution=action_distribution, timestep=timestep, explore=explore
        )


def runner_of(autoreset_mode: str, *, several_agents: bool) -> EnvRunner:
    config = PPOConfig().environment(make_multi_agent(Fails) if several_agents else Fails)
    config.env_runners(
        num_envs_per_env_runner=3,
        transforms=[FrameStack(3), PrevActionsPrevRewards(num_actions=2, num_rewards=2)],
        **({} if several_agents else {"autoreset_mode": autoreset_mode}),
    )
    config.exploration(exploration_config={"type": NotesBegins})
    config.rl_module(model_config={"use_lstm": True, "max_seq_len": 4})
    if several_agents:
        config.environment(env_config={"num_agents": 2}).multi_agent(policies={"main"})
    return EnvRunner(config.fault_tolerance(restart_failed_sub_environments=True).debugging(seed=0).freeze())


@pytest.mark.parametrize("kind", ["next_step", "same_step", "several_agents"])
def test_stacks_previous_actions_and_states_begin_again(kind: str) -> None:
    runner = runner_of(kind, several_agents=kind == "several_agents")
    num_failures = num_first = 0
    for _ in range(4):  # failures in the last row of a rollout are among them
        whole = runner.sample(num_timesteps=45)
        num_failures += len(whole.broken)
        for rollout in whole.by_module().values():
            stored, states = rollout.stored, rollout.states
            for t, n in np.argwhere(rollout.valid).tolist():
                step = int(stored["observations"][t, n, -1, 0])
                assert stored["observations"][t, n, :, 0].tolist() == [max(1, step + k) for k in (-2, -1, 0)]
                assert stored["prev_rewards"][t, n].tolist() == [max(0, step + k) for k in (-2, -1)]
                if step == 1:
                    num_first += 1
                    assert not stored["prev_actions"][t, n].any()
                    assert all(not np.asarray(leaf)[t, n].any() for leaf in at_least(1, states.values()))
    runner.stop()
    assert num_failures > 5
    assert num_first > 20
