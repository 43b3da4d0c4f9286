"""Modules with memory in runners of other processes, and in envs with several agents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from several_agents import config_of

from corral import DQNConfig, PPOConfig
from corral.testing import CountingEnv
from memory_modules import CountsSteps

LSTM: dict[str, Any] = {"use_lstm": True, "lstm_cell_size": 8, "fcnet_hiddens": [8], "max_seq_len": 5}


@pytest.mark.slow
def test_fragments_of_other_processes_bring_their_states() -> None:
    config = PPOConfig().environment(CountingEnv, env_config={"episode_length": 5}).rl_module(module_class=CountsSteps)
    config.env_runners(num_env_runners=1, num_envs_per_env_runner=3).engine(engine_name="process")
    with config.build() as algo:
        for _ in range(2):
            [rollout] = algo.sample(21)
            steps, valid = rollout.obs[:-1, :, 1], rollout.valid
            assert np.array_equal(rollout.states["count"][:-1, :, 0][valid], steps[valid])


@pytest.mark.parametrize("base", [PPOConfig, DQNConfig])
def test_several_agents_learn_with_memory(base: Any) -> None:
    config = config_of(base).rl_module(model_config=LSTM)
    with config.build() as algo:
        for _ in range(2):
            results = algo.train()["learners"]
        learned = [result for name, result in results.items() if name != "__all_modules__"]
        assert learned and all(np.isfinite(result["total_loss"]) for result in learned)
