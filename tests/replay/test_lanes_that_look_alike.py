"""Steps of agents whose observations are all alike: only the runner can tell which of them belong together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from corral import DQNConfig
from corral.data.replay import ReplayBuffer
from corral.runners.runner import EnvRunner
from random_agents import Log, RandomAgents


class BlindAgents(RandomAgents):
    """All observations are 0, and each step has a reward that no other step has."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.count = 1e4 * (config.vector_index + 3 * config["made"])

    def _see(self, agent: str) -> Any:
        return 0 * super()._see(agent)

    def _reward(self, alive: list[str]) -> dict[str, float]:
        rewards = {}
        for agent in self.open:
            self.count += 1
            rewards[agent] = self.count if self.open[agent].reward == 0 else 0.0
            self.open[agent].reward += rewards[agent]
        return rewards


@pytest.mark.slow_cases("12-1")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_timesteps", [1, 12])
@pytest.mark.parametrize("trouble", ["none", "resets", "failures"])
def test_a_transition_has_the_rewards_of_one_episode_of_one_agent(trouble: str, num_timesteps: int, seed: int) -> None:
    logs: list[Log] = []

    def make_env(config: Any) -> BlindAgents:
        config["made"] = len(logs)
        env = BlindAgents(config)
        logs.append(env.log)
        return env

    env_config = {"seed": seed, "num_agents": 3, **({"fails_at": 25} if trouble == "failures" else {})}
    config = DQNConfig().environment(make_env, env_config=env_config, disable_env_checking=True)
    config.env_runners(num_envs_per_env_runner=2, vectorization="sync")
    config.fault_tolerance(restart_failed_sub_environments=True).multi_agent(
        policies=["one", "other"],
        policy_mapping_fn=lambda agent, episode: ("one", "other")[(int(agent[1:]) + int(episode.id_[-8:], 16)) % 2],
    )
    runner = EnvRunner(config.debugging(seed=seed).freeze())
    buffers = {module_id: ReplayBuffer(10_000, seed=0) for module_id in ("one", "other")}
    rng = np.random.default_rng(seed)
    for _ in range(300 // num_timesteps):
        resets = trouble == "resets" and rng.random() < 0.3
        for module_id, part in runner.sample(num_timesteps=num_timesteps, force_reset=resets).modules.items():
            buffers[module_id].add(part)
    after = {}
    for log in logs:
        for steps in log.steps.values():
            for step, later in zip(steps, [*steps[1:], None], strict=True):
                follows = later is not None and later.episode == step.episode and later.next_obs is not None
                after[step.reward] = later.reward if follows and later is not None else 0.0
    for buffer in buffers.values():
        buffer._rng = np.random.default_rng(9)
        firsts = buffer.sample(2000, n_step=1, gamma=0.5)
        buffer._rng = np.random.default_rng(9)
        both = buffer.sample(2000, n_step=2, gamma=0.5)
        assert np.array_equal(firsts["indices"], both["indices"])
        second = 2 * (both["rewards"] - firsts["rewards"])
        is_known = [reward in after for reward in firsts["rewards"].tolist()]
        assert np.mean(is_known) > 0.9
        expected = np.array([after.get(reward, -1.0) for reward in firsts["rewards"].tolist()])
        is_cut = second == 0  # a reset dropped what came next
        np.testing.assert_allclose(second[~is_cut], expected[~is_cut])
        if trouble == "none":
            assert (expected[is_cut] == 0).all()
