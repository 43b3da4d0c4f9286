"""Central critics in PPO and APPO: values of what they see, learners, policies that act alone, continuing, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from several_agents import AGENTS, Signals, config_of, same, weights_of

import exact_runs
from corral import Algorithm, APPOConfig, DQNConfig, Module, MultiAgentEnv, PPOConfig, load_policy
from corral.algorithms.ppo import PPO
from corral.core.tree import map_tree
from corral.errors import ConfigError
from corral.modules.networks import example_obs
from corral.modules.spec import check_module

LSTM = {"fcnet_hiddens": [8], "use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 3}


def sees_signals(agent_id: Any, observations: Any, actions: Any, present: Any) -> Any:
    return np.concatenate([observations[agent] + 2 * present[agent][:, None] for agent in AGENTS], -1)


def slow_values(module: Any, critic_obs: Any, valid: Any) -> Any:
    """Return the values `[T + 1, L]` of what a critic sees, one after the other; its memory begins empty."""
    values = np.zeros((len(valid) + 1, valid.shape[1]))
    for lane in range(valid.shape[1]):
        state = None
        for t in range(len(valid) + 1):
            seen = map_tree(lambda leaf, t=t, lane=lane: torch.tensor(leaf[t, lane])[None], critic_obs)
            with torch.no_grad():
                if not module.has_memory():
                    values[t, lane] = module.value(seen)
                    continue
                state = module.value_encoder.initial_state() if state is None else state
                features, state = module.value_encoder.step(
                    seen, {name: part.reshape(1, -1) for name, part in state.items()}
                )
                values[t, lane] = module.value_head(features)
            if t < len(valid) and not valid[t, lane]:
                state = None
    return values


def slow_advantages(part: Any, values: Any, gamma: float, lambda_: float) -> Any:
    """Return advantages by their definition, the discounted sum of the differences of the values up to the end."""
    advantages = np.zeros(part.valid.shape)
    for t, lane in np.argwhere(part.valid).tolist():
        factor = 1.0
        for u in range(t, len(part.valid)):
            if not part.valid[u, lane]:
                break
            bootstrap = 0.0 if part.terminated[u, lane] else values[u + 1, lane]
            advantages[t, lane] += factor * (part.rewards[u, lane] + gamma * bootstrap - values[u, lane])
            factor *= gamma * lambda_
            if part.done[u, lane]:
                break
    return advantages


@pytest.mark.parametrize("model_config", [{"fcnet_hiddens": [8]}, LSTM])
@pytest.mark.parametrize("critic_sees", ["all", sees_signals])
def test_ppo_has_the_values_of_what_critics_see(critic_sees: Any, model_config: Any) -> None:
    config = config_of(PPOConfig, critic_sees=critic_sees).rl_module(model_config=model_config)
    config.training(normalize_advantages=False, lambda_=0.8, gamma=0.9)
    with config.build() as algo:
        assert isinstance(algo, PPO)
        algo.train()
        for module_id, parts in algo.group_trained(algo.sample(60)).items():
            (part,), batch = parts, algo._batch(module_id, parts)
            module: Any = algo.learner_group.get_module(module_id)
            values = slow_values(module, part["critic_obs"], part.valid)
            by_lane = module.has_memory()
            for name, column in (("values", values[:-1]), ("advantages", slow_advantages(part, values, 0.9, 0.8))):
                np.testing.assert_allclose(
                    batch[name], part.valid_rows(column, by_lane=by_lane), rtol=1e-4, atol=1e-5, err_msg=name
                )
            # The loss moves the values that are in the batch.
            from corral.learners.update import to_tensors
            from corral.modules.memory import module_inputs

            with torch.no_grad():
                _, again = module.policy_and_value(*module_inputs(to_tensors(batch, torch.device("cpu"))))
            np.testing.assert_allclose(again, batch["values"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_config", [{"fcnet_hiddens": [8]}, LSTM])
def test_appo_has_the_values_of_what_critics_see(model_config: Any) -> None:
    with config_of(APPOConfig, critic_sees="all").rl_module(model_config=model_config).build() as algo:
        assert hasattr(algo, "make_batch")
        algo.train()
        for module_id, parts in algo.group_trained(algo.sample(40)).items():
            batch = algo.make_batch(module_id, parts)
            module: Any = algo.learner_group.get_module(module_id)
            values = [slow_values(module, part["critic_obs"], part.valid)[:-1] for part in parts]
            rows = [
                part.valid_rows(column, by_lane=module.has_memory()) for part, column in zip(parts, values, strict=True)
            ]
            expected = np.concatenate(rows)
            np.testing.assert_allclose(batch["values"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("base", [PPOConfig, APPOConfig])
@pytest.mark.parametrize("model_config", [{"fcnet_hiddens": [8]}, LSTM])
def test_a_run_with_a_central_critic_continues_exactly(base: Any, model_config: Any, tmp_path: Path) -> None:
    config = config_of(base, critic_sees=sees_signals).rl_module(model_config=model_config)
    with config.build() as algo:
        algo.train()
        exact_runs.check_continuation(algo, tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.parametrize("model_config", [LSTM, {"fcnet_hiddens": [8]}])
def test_two_learners_and_two_runners_train_a_central_critic(model_config: Any) -> None:
    config = config_of(PPOConfig, critic_sees="all").rl_module(model_config=model_config).engine("process")
    config.env_runners(num_env_runners=2, straggler_factor=None).learners(num_learners=2)
    with config.training(train_batch_size_per_learner=32).build() as algo:
        before = weights_of(algo)
        result = algo.train()["learners"]
        after = weights_of(algo)
    assert all(np.isfinite(result[module_id]["vf_loss"]) for module_id in ("red", "blue"))
    changed = {name for name, weights in after["red"].items() if (weights != before["red"][name]).any()}
    assert {name.split(".")[0] for name in changed} >= {"policy_encoder", "value_encoder", "value_head"}


def test_policies_act_and_are_exported_without_the_critic(tmp_path: Path) -> None:
    with config_of(PPOConfig, critic_sees="all").build() as algo:
        algo.train()
        sent = algo.learner_group.learner_here.get_acting_weights()["red"]
        obs = np.array([[0, 1], [1, 0]], np.float32)
        path = algo.save(tmp_path / "saved")
        policy = load_policy(path, module_id="red")
        here = [algo.compute_single_action(row, module_id="red", explore=False) for row in obs]
        assert policy.batch(obs).tolist() == here
    assert sent and not [name for name in sent if name.startswith("value")]
    for file in ("red.safetensors", "red.pt2"):
        policy.export(tmp_path / file)
    assert load_file(tmp_path / "red.safetensors").keys() == sent.keys()
    program = torch.export.load(tmp_path / "red.pt2")
    assert {name.removeprefix("module.") for name in program.state_dict} == sent.keys()


class Sums(Module):
    """A module of a user, whose critic is one linear layer."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        super().__init__(observation_space, action_space, {})
        self.actor = torch.nn.Linear(2, self.distribution.num_inputs)
        self.critic = torch.nn.Linear(model_config["critic_space"].shape[0], 1)

    def policy(self, obs: Any) -> Any:
        return self.actor(obs)

    def value(self, obs: Any) -> Any:
        return self.critic(obs).squeeze(-1)


def test_a_module_of_a_user_is_told_what_its_critic_sees(tmp_path: Path) -> None:
    config = config_of(PPOConfig, critic_sees=sees_signals, policies={"red", "blue", "rest"})
    with config.rl_module(Sums, model_config={}).build() as algo:
        algo.train()
        again = weights_of(algo)["blue"]
        assert again["critic.weight"].shape == (1, 6)
        algo.save(tmp_path / "saved")
        assert load_policy(tmp_path / "saved", module_id="blue")(np.zeros(2, np.float32)) in (0, 1)
    with Algorithm.from_checkpoint(tmp_path / "saved") as restored:
        assert same(weights_of(restored)["blue"], again)


class SeesItself(Sums):
    """A module of before there were central critics."""

    def policy_and_value(self, obs: Any, state: Any = None, mask: Any = None) -> Any:
        return self.policy(obs), self.value(obs)


def test_a_module_whose_critic_cannot_see_is_refused_at_building() -> None:
    config = config_of(PPOConfig, critic_sees=sees_signals, policies={"red", "blue", "rest"})
    with pytest.raises(ConfigError, match=r"SeesItself: .*must take what critic_sees gives, entries of Box\("):
        config.rl_module(SeesItself, model_config={}).build()


class Positive(Sums):
    """Its policy cannot take some of the observations that modules are checked with, which no env may give."""

    def policy(self, obs: Any) -> Any:
        if (obs < 0).any():
            raise ValueError("no signal is negative")
        return super().policy(obs)


def test_a_policy_that_refuses_an_example_is_no_fault_of_the_critic() -> None:
    space, seen = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Box(-1, 1, (6,), np.float32)
    module = Positive(space, gym.spaces.Discrete(2), {"critic_space": seen})
    module.critic_space = seen
    with pytest.raises(ValueError, match="no signal is negative"):
        module.policy(example_obs(space))
    check_module(module)


class Masked(MultiAgentEnv):
    """Each agent may take one action only, which its mask shows."""

    possible_agents = ("a", "b")
    observation_space = gym.spaces.Dict(
        {"seen": gym.spaces.Box(0, 1, (1,), np.float32), "action_mask": gym.spaces.MultiBinary(3)}
    )
    action_space = gym.spaces.Discrete(3)

    def __init__(self, config: Any) -> None:
        super().__init__()

    def show(self) -> Any:
        self.legal = {agent: int(self.np_random.integers(3)) for agent in self.possible_agents}
        masks = {agent: np.eye(3, dtype=np.int8)[legal] for agent, legal in self.legal.items()}
        return {agent: {"seen": np.ones(1, np.float32), "action_mask": mask} for agent, mask in masks.items()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return self.show(), {}

    def step(self, actions: Any) -> Any:
        assert actions == self.legal
        self.time += 1
        return self.show(), dict.fromkeys(actions, 1.0), {"__all__": self.time == 7}, {"__all__": False}, {}


@pytest.mark.parametrize("model_config", [{"fcnet_hiddens": [8]}, LSTM])
def test_masks_stay_masks_of_the_policy(model_config: Any) -> None:
    config = PPOConfig().environment(Masked).multi_agent(policies={"both"}, critic_sees="all").debugging(seed=0)
    config.rl_module(model_config=model_config)
    with config.training(train_batch_size_per_learner=64, minibatch_size=32, num_epochs=1).build() as algo:
        algo.train()
        space = algo.learner_group.get_module("both").critic_space
        assert isinstance(space, gym.spaces.Dict)
        assert space["observations"]["b"].keys() == {"seen", "action_mask"}  # type: ignore[index]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            config_of(DQNConfig, critic_sees="all"),
            "critic_sees='all' is for PPO, APPO and IMPALA, and DQN has no critic",
        ),
        (PPOConfig().environment("CartPole-v1").multi_agent(critic_sees="all"), "critic_sees='all' needs policies="),
        (
            config_of(PPOConfig, critic_sees=lambda observations: observations),
            r"is called as critic_sees\(agent_id, observations, actions, present\)",
        ),
        (
            config_of(PPOConfig, critic_sees="all").rl_module(model_config={"vf_share_layers": True}),
            "vf_share_layers=True shares layers",
        ),
    ],
)
def test_a_critic_that_cannot_see_is_refused_at_building(config: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config.build()


def test_only_all_and_functions_say_what_critics_see() -> None:
    with pytest.raises(ConfigError, match=r'critic_sees=.everyone.*give "all", or a function'):
        PPOConfig().multi_agent(critic_sees="everyone")  # type: ignore[arg-type]


def test_evaluation_computes_nothing_for_critics() -> None:
    config = config_of(PPOConfig, critic_sees=sees_signals).evaluation(evaluation_duration=2)
    with config.build() as algo:
        assert np.isfinite(algo.evaluate()["env_runners"]["episode_return_mean"])
        stepping = algo.eval_env_runner_group.local_env_runner.stepping  # type: ignore[union-attr]
        assert stepping._critic is None and algo.env_runner.stepping._critic is not None  # type: ignore[union-attr]
    assert Signals.metadata is not None
