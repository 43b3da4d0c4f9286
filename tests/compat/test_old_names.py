"""Names of RLlib's older stack that its pages do not show, and that scripts use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import corral
from corral.compat.rllib.algorithm import DQNConfig, PPOConfig
from corral.compat.rllib.callbacks import DefaultCallbacks
from corral.errors import ConfigError


def small() -> PPOConfig:
    config = PPOConfig().environment("CartPole-v1").rollouts(num_rollout_workers=0).debugging(seed=0)
    return config.training(train_batch_size=100, sgd_minibatch_size=50, num_sgd_iter=1)


class Notes(DefaultCallbacks):
    def on_episode_step(self, *, worker: Any, base_env: Any, policies: Any, episode: Any, **kwargs: Any) -> None:
        for agent in episode.get_agents():
            assert episode.last_observation_for(agent).shape == (4,) and episode.policy_for(agent) == f"p{agent}"
            assert episode.last_reward_for(agent) == 1.0 and episode.last_action_for(agent) in (0, 1)
            assert episode.last_info_for(agent) == {}

    def on_episode_end(self, *, worker: Any, episode: Any, **kwargs: Any) -> None:
        assert sum(episode.agent_rewards.values()) == episode.total_reward > 0
        assert {policy_id for _, policy_id in episode.agent_rewards} == {"p0", "p1"}
        episode.custom_metrics["length"] = episode.length

    def on_postprocess_trajectory(
        self,
        *,
        agent_id: Any,
        policy_id: str,
        policies: Any,
        postprocessed_batch: Any,
        original_batches: Any,
        **kw: Any,
    ) -> None:
        policy, batch = original_batches[agent_id]
        assert policy is policies[policy_id] and policy_id == f"p{agent_id}"
        postprocessed_batch["rewards"] = 2 * batch["rewards"]

    def on_sample_end(self, *, worker: Any, samples: Any, **kwargs: Any) -> None:
        assert samples.policy_batches.keys() == {"p0", "p1"} and samples.count == samples.env_steps()
        assert samples.as_multi_agent().agent_steps() == samples.agent_steps()

    def on_learn_on_batch(self, *, policy: Any, train_batch: Any, result: dict[str, Any], **kwargs: Any) -> None:
        result["reward"] = float(train_batch["rewards"].mean())


def test_callbacks_of_several_agents() -> None:
    config = small().environment(corral.make_multi_agent("CartPole-v1"), env_config={"num_agents": 2}).callbacks(Notes)
    config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda aid, *args, **kw: f"p{aid}")
    with config.build() as algo:
        algo.train()
        result = algo.train()
        assert result["custom_metrics"]["length_mean"] == result["episode_len_mean"]
        assert result["info"]["learner"]["p1"]["custom_metrics"] == {"reward": 2.0}
        assert result["sampler_results"]["policy_reward_mean"].keys() == {"p0", "p1"}

        policy = algo.get_policy("p0")
        policy.set_weights({name: 0 * value for name, value in policy.get_weights().items()})
        algo.workers.sync_weights()
        (in_runner,) = algo.workers.foreach_worker(lambda w: w.get_policy("p0").get_weights())
        assert not any(value.any() for value in in_runner.values())
        assert set(algo.workers.foreach_policy(lambda policy, policy_id: policy_id)) == {"p0", "p1"}
        assert algo.workers.local_worker().apply(lambda w, i: w.worker_index + i, 3) == 3


def test_a_policy_acts_with_and_without_exploration() -> None:
    obs = np.zeros((30, 4), np.float32)
    with small().build() as algo:
        policy = algo.get_policy()
        actions, states, outputs = policy.compute_actions(obs)
        assert set(actions) == {0, 1} and states == [] and outputs["action_dist_inputs"].shape == (30, 2)
        best, _, _ = policy.compute_actions(obs, explore=False)
        action, _, _ = policy.compute_single_action(obs[0], explore=False)
        assert set(best) == {action} == {algo.compute_single_action(obs[0], explore=False)}
        assert algo.compute_single_action(obs[0], explore=False, full_fetch=True) == (action, [], {})
        together = algo.compute_actions({"a": obs[0]}, explore=False, full_fetch=True)
        assert together == ({"a": action}, {"a": []}, {"a": {}})
        assert set(algo.compute_actions(obs, policy_id="default_policy", explore=False)) == {action}


@pytest.mark.parametrize("explores", [True, False])
def test_a_policy_explores_by_default_as_the_config_says(explores: bool) -> None:
    obs = np.zeros((60, 4), np.float32)
    with small().env_runners(explore=explores).build() as algo:
        (in_runner,) = algo.workers.foreach_worker(lambda w: set(w.get_policy().compute_actions(obs)[0]))
        for chosen in (
            set(algo.get_policy().compute_actions(obs)[0]),
            set(algo.get_policy().compute_actions(obs, explore=None)[0]),
            in_runner,
        ):
            assert len(chosen) == (2 if explores else 1)


def test_a_policy_explores_with_the_exploration_of_its_algorithm() -> None:
    obs = np.zeros((200, 4), np.float32)
    config = DQNConfig().environment("CartPole-v1").env_runners(epsilon=[(0, 1.0), (1000, 0.0)])
    with config.build() as algo:
        policy = algo.get_policy()
        best = set(policy.compute_actions(obs, explore=False)[0])
        assert len(best) == 1 and set(policy.compute_actions(obs, explore=True)[0]) == {0, 1}
        assert set(policy.compute_actions(obs, explore=True, timestep=1000)[0]) == best
        assert policy.get_exploration_state() == {"cur_epsilon": 1.0, "last_timestep": 0}
        assert type(policy.exploration).__name__ == "EpsilonGreedy" and policy.config["explore"]
        assert policy.action_space.n == 2 and policy.observation_space.shape == (4,)
        (in_runner,) = algo.workers.foreach_worker(lambda w: w.policy_map["default_policy"])
        assert set(in_runner.compute_actions(obs, explore=True)[0]) == {0, 1}
        assert set(in_runner.compute_actions(obs, explore=False)[0]) == best


class Acts(DefaultCallbacks):
    chosen: set[int] = set()  # noqa: RUF012

    def on_episode_start(self, *, policies: Any, **kwargs: Any) -> None:
        actions, _, _ = policies["default_policy"].compute_actions(np.zeros((60, 4), np.float32))
        self.chosen.update(actions.tolist())


def test_policies_of_callbacks_explore_too() -> None:
    config = DQNConfig().environment("CartPole-v1").callbacks(Acts)
    with (
        config.training(num_steps_sampled_before_learning_starts=99999)
        .reporting(min_sample_timesteps_per_iteration=50)
        .build() as algo
    ):
        algo.train()
    assert Acts.chosen == {0, 1}


def test_weights_are_sent_from_the_group_of_the_algorithm_only() -> None:
    def send(worker_set: Any, **kwargs: Any) -> None:
        worker_set.sync_weights()

    with small().build() as algo:
        group = type(algo.workers)(algo.native.env_runner_group)
        with pytest.raises(ConfigError, match=r"call algorithm.env_runner_group.sync_weights\(\)"):
            send(group)
        assert (group.num_remote_workers(), group.num_healthy_workers(), group.num_remote_worker_restarts()) == (
            0,
            1,
            0,
        )


LOOKED: dict[str, list[Any]] = {"post": [], "learned": []}


class Looks(DefaultCallbacks):
    def on_postprocess_trajectory(self, *, postprocessed_batch: Any, **kwargs: Any) -> None:
        names = ("advantages", "value_targets", "vf_preds", "rewards", "dones")
        LOOKED["post"].append({name: np.array(postprocessed_batch[name]) for name in names})

    def on_learn_on_batch(self, *, train_batch: Any, **kwargs: Any) -> None:
        LOOKED["learned"].append({name: np.array(train_batch[name]) for name in ("advantages", "value_targets")})


class Rewrites(Looks):
    def on_postprocess_trajectory(self, *, postprocessed_batch: Any, **kwargs: Any) -> None:
        postprocessed_batch["advantages"] = np.arange(len(postprocessed_batch["rewards"]))
        postprocessed_batch["value_targets"][:] = 7.0


def look(callbacks: Any, config: PPOConfig) -> tuple[list[Any], list[Any]]:
    LOOKED["post"], LOOKED["learned"] = [], []
    with config.callbacks(callbacks).build() as algo:
        for _ in range(2):  # a filter has statistics from the second one on
            algo.train()
    return LOOKED["post"], LOOKED["learned"]


@pytest.mark.parametrize("observation_filter", ["NoFilter", "MeanStdFilter"])
def test_trajectories_show_their_advantages(observation_filter: str) -> None:
    config = small().env_runners(observation_filter=observation_filter)
    post, learned = look(Looks, config.training(lambda_=0.0, gamma=0.5))
    ended = next(batch for batch in post if batch["dones"][-1])
    assert ended["value_targets"][-1] == pytest.approx(1.0)  # the last reward, and nothing after it
    expected = ended["rewards"][:-1] + 0.5 * ended["vf_preds"][1:]
    assert ended["value_targets"][:-1] == pytest.approx(expected, abs=1e-5)
    assert ended["advantages"] == pytest.approx(ended["value_targets"] - ended["vf_preds"], abs=1e-5)
    assert np.sort(np.concatenate([batch["value_targets"] for batch in post])) == pytest.approx(
        np.sort(np.concatenate([batch["value_targets"] for batch in learned])), abs=1e-5
    )


def several() -> PPOConfig:
    config = small().environment(corral.make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
    return config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda aid, *args, **kw: f"p{aid}")


@pytest.mark.parametrize("config", [small, several])
def test_losses_see_the_advantages_that_callbacks_write(config: Any) -> None:
    _, learned = look(Rewrites, config())
    assert learned and all((batch["value_targets"] == 7.0).all() for batch in learned)
    advantages = np.concatenate([batch["advantages"] for batch in learned])
    assert len(np.unique(advantages)) > 5 and abs(float(advantages.mean())) < 0.5  # normalised, as in RLlib
