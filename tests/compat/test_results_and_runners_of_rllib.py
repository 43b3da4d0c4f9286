"""What user code reads from results and default modules, and runners that it makes by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from corral.compat.rllib.algorithm import Algorithm, DQNConfig, PPOConfig
from corral.compat.rllib.config import AlgorithmConfig
from corral.compat.rllib.metrics import MetricsLogger
from corral.compat.rllib.native import to_native
from corral.compat.rllib.results import add_rllib_keys
from corral.compat.rllib.runners import MultiAgentEnvRunner, SingleAgentEnvRunner
from corral.envs.agent_copies import make_multi_agent
from corral.envs.multi_agent_env import MultiAgentEnv
from corral.errors import CheckpointError, ConfigError


def small_ppo() -> PPOConfig:
    config: PPOConfig = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0)
        .training(train_batch_size=64, minibatch_size=32, num_epochs=1)
        .debugging(seed=0)  # with some seeds, no episode ends within 64 steps
    )
    return config


def test_a_result_has_the_numbers_of_the_only_agent_and_module() -> None:
    algorithm = small_ppo().build_algo()
    result = algorithm.train()
    algorithm.stop()
    runners, module = result["env_runners"], result["learners"]["default_policy"]
    mean = runners["episode_return_mean"]
    assert runners["agent_episode_returns_mean"] == {"default_agent": mean}
    assert runners["module_episode_return_mean"] == {"default_policy": mean}
    assert runners["num_agent_steps_sampled"] == {"default_agent": 64}
    assert runners["num_module_steps_sampled_lifetime"] == {"default_policy": 64}
    assert runners["episode_reward_mean"] == mean
    assert module["num_module_steps_trained_lifetime"] == 64
    assert 0 < result["time_this_iter_s"] <= result["time_total_s"] + 1
    weights = sum(each.numel() for each in algorithm.get_module().parameters())
    assert module["weights_seq_no"] == 1 and module["num_trainable_parameters"] == weights
    together = result["learners"]["__all_modules__"]
    assert together["num_trainable_parameters"] == weights and together["num_non_trainable_parameters"] == 0
    assert together["num_env_steps_trained"] == 64


class _InTurns(MultiAgentEnv):
    """The agent a acts in every step, b in every second one."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.agents = self.possible_agents = ["a", "b"]
        self.observation_spaces = dict.fromkeys("ab", gym.spaces.Box(-1, 1, (2,)))
        self.action_spaces = dict.fromkeys("ab", gym.spaces.Discrete(2))

    def _obs(self, agents: str) -> dict[str, Any]:
        return {agent: np.zeros(2, np.float32) for agent in agents}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = 0
        return self._obs("ab"), {}

    def step(self, action_dict: Any) -> Any:
        self.t += 1
        obs = self._obs("a" if self.t % 2 else "ab")
        return obs, dict.fromkeys(obs, 1.0), {"__all__": self.t == 10}, {"__all__": False}, {}


def test_steps_of_several_agents_are_counted_by_agent_and_module() -> None:
    config = small_ppo().environment(_InTurns)
    config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda agent, *a, **k: "p0" if agent == "a" else "p1")
    algorithm = config.training(train_batch_size=40, minibatch_size=None, num_epochs=2).build_algo()
    result = [algorithm.train() for _ in range(2)][-1]
    algorithm.stop()
    runners, learners = result["env_runners"], result["learners"]
    assert runners["num_agent_steps_sampled"] == {"a": 40, "b": 20}
    assert runners["num_agent_steps_sampled_lifetime"] == {"a": 80, "b": 40}
    assert result["agent_timesteps_total"] == 120
    assert learners["p0"]["num_module_steps_trained"] == 80 and learners["p1"]["num_module_steps_trained"] == 40
    assert learners["p1"]["weights_seq_no"] == 2


def test_returns_by_agent_and_module_have_both_names_of_rllib() -> None:
    runners = {"agent_episode_return_mean": {"a": 1.0}, "module_episode_return_mean": {"p": 2.0}}
    result = add_rllib_keys({"env_runners": runners})["env_runners"]
    assert result["agent_episode_returns_mean"] == {"a": 1.0}
    assert result["module_episode_returns_mean"] == {"p": 2.0}
    assert "num_agent_steps_sampled" not in result


def test_a_mean_with_a_coefficient_is_a_moving_average_as_until_2_50() -> None:
    logger = MetricsLogger()
    for value in (1.0, 3.0):
        logger.log_value("x", value, reduce="mean", ema_coeff=0.5)
    assert logger.peek("x") == 2.0
    logger.log_value("y", 1.0, reduce="mean")
    logger.log_value("y", 9.0, reduce="mean")
    assert logger.peek("y") == 5.0


def test_a_dict_of_values_is_logged_as_means_without_a_reduction() -> None:
    logger = MetricsLogger()
    logger.log_value("count", 1.0, reduce="sum")
    for value in (1.0, 3.0):
        logger.log_dict({"x": value, "group": {"y": 2 * value}, "count": value})
        logger.log_dict({"latest": value}, window=1)
    assert logger.peek() == {"count": 5.0, "x": 2.0, "group": {"y": 4.0}, "latest": 3.0}


def test_peek_returns_throughputs_and_lists_and_what_was_merged_last() -> None:
    logger, worker = MetricsLogger(), MetricsLogger()
    logger.log_value(("a", "steps"), 100.0, reduce="sum", with_throughput=True)
    assert 0 < logger.peek(("a", "steps"), throughput=True) != 100.0
    with pytest.raises(KeyError):
        logger.peek(("a", "other"), throughput=True)
    assert logger.peek("a", compile=False)["steps"] == [100.0]
    for value in (1.0, 5.0):
        worker.log_value("x", value, reduce="sum")
        logger.aggregate([worker.take()], key="b")
    assert (logger.peek(("b", "x")), logger.peek(("b", "x"), latest_merged_only=True)) == (6.0, 5.0)
    assert logger.peek(("b", "y"), 0, latest_merged_only=True) == 0


def test_a_module_with_memory_follows_sequences_as_it_follows_steps() -> None:
    algorithm = small_ppo().rl_module(model_config={"use_lstm": True, "lstm_cell_size": 8}).build_algo()
    module = algorithm.get_module()
    assert module.model_config["lstm_cell_size"] == 8
    assert module.is_stateful()
    obs = torch.randn(1, 3, 4)
    state = {name: part.unsqueeze(0) for name, part in module.get_initial_state().items()}
    whole = module.forward_inference({"obs": obs, "state_in": state})
    assert whole["action_dist_inputs"].shape == (1, 3, 2)
    for t in range(3):
        step = module.forward_inference({"obs": obs[:, t], "state_in": state})
        torch.testing.assert_close(step["action_dist_inputs"], whole["action_dist_inputs"][:, t])
        state = step["state_out"]
    torch.testing.assert_close(state["h"], whole["state_out"]["h"])
    algorithm.stop()


def test_a_q_network_returns_the_best_actions() -> None:
    algorithm = DQNConfig().environment("CartPole-v1").build_algo()
    found = algorithm.get_module().forward_inference({"obs": np.random.default_rng(0).normal(size=(5, 4)).astype("f")})
    assert found["actions"].tolist() == found["action_dist_inputs"].argmax(-1).tolist()
    algorithm.stop()


@pytest.mark.slow
def test_weights_that_were_read_can_be_set_in_another_algorithm() -> None:
    first, second = small_ppo().build_algo(), small_ppo().build_algo()
    second.set_weights(first.get_weights())
    obs = {"obs": torch.randn(3, 4)}
    modules: list[Any] = [first.get_module(), second.get_module(), second.env_runner.module]
    inputs = [module.forward_inference(obs)["action_dist_inputs"] for module in modules]
    torch.testing.assert_close(inputs[1], inputs[0])
    torch.testing.assert_close(inputs[2], inputs[0])
    remote = small_ppo().env_runners(num_env_runners=1).build_algo()
    remote.set_weights(first.get_weights())
    torch.testing.assert_close(remote.env_runner.module.forward_inference(obs)["action_dist_inputs"], inputs[0])
    remote.stop()
    with pytest.raises(CheckpointError, match="do not fit"):
        second.set_weights({"default_policy": {"x": np.zeros(1, np.float32)}})
    first.stop(), second.stop()


def test_a_runner_is_made_from_a_config_alone() -> None:
    config = (
        AlgorithmConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=5, rollout_fragment_length=8)
    )
    runner = SingleAgentEnvRunner(config=config, worker_index=1, num_workers=2)
    assert runner.worker_index == 1
    episodes = runner.sample(num_episodes=10, random_actions=True)
    assert len(episodes) == 10
    assert all(episode.is_done and episode.t_started == 0 for episode in episodes)
    assert 40 <= sum(map(len, runner.sample(random_actions=True))) < 45
    with pytest.raises(AssertionError, match="not both"):
        runner.sample(num_timesteps=1, num_episodes=1)


def test_a_runner_of_several_agents_is_made_from_a_config_alone() -> None:
    config = PPOConfig().environment(make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
    config.multi_agent(policies={"p"}, policy_mapping_fn=lambda *args, **kwargs: "p")
    episodes = MultiAgentEnvRunner(config=config).sample(num_episodes=3, random_actions=True)
    assert [episode.is_done for episode in episodes] == [True] * 3


def test_names_of_model_settings_until_2_40_mean_the_newer_ones() -> None:
    given = {
        "uses_new_env_runners": True,
        "post_fcnet_hiddens": [7],
        "post_fcnet_activation": "relu",
        "fcnet_weights_initializer": "xavier_uniform_",
        "fcnet_weights_initializer_config": {"gain": 0.5},
    }
    found = to_native(PPOConfig().environment("CartPole-v1").rl_module(model_config_dict=given)).model_config
    assert found["head_hiddens"] == [7]
    assert found["head_activation"] == "relu"
    assert found["fcnet_kernel_initializer"] == "xavier_uniform_"
    assert found["fcnet_kernel_initializer_kwargs"] == {"gain": 0.5}


def test_settings_are_found_by_keys_that_methods_or_older_configs_have() -> None:
    config = PPOConfig().update_from_dict({"create_env_on_driver": True, "simple_optimizer": True})
    assert config["framework"] == config.get("framework") == "torch"
    assert config["create_env_on_driver"] is config.create_env_on_local_worker is True


def test_a_result_before_the_first_update_has_no_steps_trained() -> None:
    config = DQNConfig().environment("CartPole-v1").reporting(min_sample_timesteps_per_iteration=5)
    algorithm = config.build_algo()
    numbers = algorithm.train()["learners"].get("default_policy", {})
    algorithm.stop()
    assert numbers.get("num_module_steps_trained", 0) == 0 and numbers.get("weights_seq_no", 0) == 0


def test_iterations_and_seconds_count_from_the_restored_checkpoint(tmp_path: Path) -> None:
    with small_ppo().build_algo() as first:
        before = first.train()
        path = first.save_to_path(tmp_path / "saved")
    with Algorithm.from_checkpoint(path) as again:
        result = again.train()
    assert (result["training_iteration"], result["iterations_since_restore"]) == (2, 1)
    assert before["time_since_restore"] == before["time_total_s"]
    assert result["time_since_restore"] == pytest.approx(result["time_total_s"] - before["time_total_s"])


def test_actions_that_are_asked_for_in_units_of_the_module_are_refused() -> None:
    with small_ppo().environment("Pendulum-v1").build_algo() as algorithm:
        obs = np.zeros(3, np.float32)
        (action,) = algorithm.compute_single_action(obs, explore=False, unsquash_action=True)
        for call in (
            lambda: algorithm.compute_single_action(obs, unsquash_action=False),
            lambda: algorithm.compute_actions({0: obs}, unsquash_actions=False),
        ):
            with pytest.raises(ConfigError, match="unsquash_action=False"):
                call()
        assert algorithm.get_policy().compute_single_action(obs, explore=False)[0] * 2 == pytest.approx(action)
    with small_ppo().build_algo() as algorithm:  # without units
        assert algorithm.compute_single_action(np.zeros(4, np.float32), unsquash_action=False) in (0, 1)


def test_another_filesystem_and_another_state_are_refused(tmp_path: Path) -> None:
    with small_ppo().build_algo() as algorithm:
        for part in (algorithm, algorithm.learner_group, algorithm.get_module()):
            with pytest.raises(ConfigError, match=r"filesystem=.*mounted"):
                part.save_to_path(tmp_path / "there", filesystem=object())
            with pytest.raises(ConfigError, match="state="):
                part.save_to_path(tmp_path / "there", state={"weights": {}})
            with pytest.raises(ConfigError, match=r"filesystem=.*mounted"):
                part.restore_from_path(tmp_path / "there", filesystem=object())
    assert not (tmp_path / "there").exists()


def test_a_checkpoint_continues_with_some_of_its_modules_and_another_mapping(tmp_path: Path) -> None:
    config = (
        small_ppo()
        .environment(_InTurns)
        .multi_agent(
            policies={"p", "q"}, policy_mapping_fn=lambda agent_id, episode, **kwargs: "p" if agent_id == "a" else "q"
        )
    )
    with config.build_algo() as first:
        path, weights = first.save_to_path(tmp_path / "saved"), first.get_weights()["q"]
    with Algorithm.from_checkpoint(
        path, policy_ids=["q"], policy_mapping_fn=lambda agent_id, episode, **kwargs: "q", policies_to_train=["q"]
    ) as again:
        assert list(again.get_weights()) == ["q"] == list(again.config.policies) == again.config.policies_to_train
        np.testing.assert_equal(again.get_weights()["q"], weights)
        assert again.train()["env_runners"]["num_module_steps_sampled"]["q"] == 64 + 32
