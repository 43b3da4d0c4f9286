"""Policies of modules with memory: states in policy objects, in evaluation, in `compute_actions` and in exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral import DQNConfig, MultiAgentEnv, Policy, PPOConfig, evaluate_policy, load_policy
from corral.core.tree import leaves, map_tree, named_leaves
from corral.errors import ConfigError, ObservationError
from corral.modules.memory import initial_states
from corral.modules.spec import ModuleSpec
from corral.runs.policies.export_check import WatchedPolicy, check_export
from corral.testing import CountingEnv, TMaze
from memory_modules import CountsSteps

LSTM: dict[str, Any] = {"use_lstm": True, "lstm_cell_size": 8, "fcnet_hiddens": [8], "vf_share_layers": True}
GRU: dict[str, Any] = {"use_gru": True, "gru_cell_size": 8, "fcnet_hiddens": [8], "vf_share_layers": True}
OBS = np.random.default_rng(0).standard_normal((6, 3, 2)).astype(np.float32).clip(-1, 1)  # [T, B, ...]


def make_policy(settings: dict[str, Any]) -> Policy:
    """Return a policy whose actions depend on its states: the weights are far from the initial ones."""
    config = PPOConfig().rl_module(model_config=settings)
    module = config.module_spec(spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (2,), np.float32)).build()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return Policy(module)


def played(policy: Policy) -> np.ndarray[Any, Any]:
    """Return the actions `[T, B, ...]` of episodes that begin now, and the actions of `act` with states."""
    policy.reset()
    actions, states, expected = [], policy.initial_states(3), []
    for obs in OBS:
        actions.append(policy.batch(obs))
        one, states = policy.act(obs, states)
        expected.append(one)
    np.testing.assert_allclose(actions, expected, atol=1e-6)
    return np.array(expected)


def test_a_policy_remembers_each_row_until_it_is_reset() -> None:
    policy = make_policy(LSTM)
    expected = played(policy)
    np.testing.assert_allclose(played(policy), expected, atol=1e-6)
    policy.reset()
    alone = [policy(obs[1]) for obs in OBS]
    np.testing.assert_allclose(alone, expected[:, 1], atol=1e-5)
    assert np.abs(policy(OBS[0, 1]) - expected[0, 1]).max() > 1e-3  # no reset: the observation comes in another state
    with pytest.raises(ObservationError, match=r"remembers episodes of 1 row\(s\), and is given 3: call reset"):
        policy.batch(OBS[0])
    policy.reset()
    policy.batch(OBS[3])
    begins = np.array([True, False, True])
    actions = policy.batch(OBS[0], begins=begins)
    np.testing.assert_allclose(actions[begins], expected[0][begins], atol=1e-5)
    assert np.abs(actions[1] - expected[0, 1]).max() > 1e-3


def test_states_of_other_shapes_are_refused() -> None:
    policy = make_policy(GRU)
    with pytest.raises(ObservationError, match=r"state/h is float32\[3, 5\] and must be float32\[3, 8\]"):
        policy.act(OBS[0], {"h": np.zeros((3, 5), np.float32)})
    with pytest.raises(ObservationError, match=r"state/c is float32\[3, 8\] and must be left out"):
        policy.act(OBS[0], {name: np.zeros((3, 8), np.float32) for name in "hc"})


def test_the_algorithm_and_the_loaded_policy_act_alike(tmp_path: Path) -> None:
    config = PPOConfig().environment(TMaze, env_config={"length": 5}).rl_module(model_config=LSTM)
    config.training(train_batch_size_per_learner=64, num_epochs=1)
    with config.env_runners(num_envs_per_env_runner=2).build() as algo:
        algo.train()
        policy = load_policy(algo.save(tmp_path / "checkpoint"))
        state = algo.get_module().initial_state()
        for obs in OBS[:, 0]:
            action, state = algo.compute_single_action(obs, state, explore=False)
            assert action == policy(obs)
        assert [leaf.shape for leaf in leaves(state)] == [(8,), (8,)]
        missing = r"has memory: give state=.*acting_policy\(\)\.initial_states\(B\), and no state was given"
        with pytest.raises(ConfigError, match=missing):
            algo.compute_single_action(OBS[0, 0])
        with pytest.raises(ObservationError, match="state/h"):
            algo.compute_single_action(OBS[0, 0], {"h": np.zeros(3, np.float32), "c": np.zeros(8, np.float32)})
        seeds = [evaluate_policy(one, TMaze, episodes=6, num_envs=n) for one in (algo, policy) for n in (1, 4)]
        assert seeds[0].episode_returns == seeds[2].episode_returns
        assert seeds[1].episode_returns == seeds[3].episode_returns
    plain = PPOConfig().environment(CountingEnv)
    with plain.build() as algo, pytest.raises(ConfigError, match="has no memory, and state was given"):
        algo.compute_single_action(OBS[0, 0], {"h": np.zeros(3)})


class NeedsCount(CountingEnv):
    """Rewards the action that is the number of the step, and shows nothing."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(8)

    def _obs(self) -> Any:
        return np.zeros(2, np.float32)

    def step(self, action: int) -> Any:
        obs, step, *ends = super().step(action)
        return obs, float(action == step - 1), *ends


class ActsByCount(CountsSteps):
    """Chooses the action that is the number of the step."""

    def policy(self, obs: Any, state: Any) -> Any:  # type: ignore[override]
        count = state["count"]
        return -10 * (torch.arange(self.distribution.num_inputs) - count) ** 2 + 0 * self.logits, {"count": count + 1}


def spec_of(env: Any) -> ModuleSpec:
    return ModuleSpec(ActsByCount, env.observation_space, env.action_space, {})


@pytest.mark.parametrize("num_envs", [1, 3])
def test_evaluation_begins_each_episode_with_the_initial_state(num_envs: int) -> None:
    policy = Policy(spec_of(NeedsCount).build())
    config = {"episode_length": 4, "stagger": True}
    found = evaluate_policy(policy, NeedsCount, env_config=config, episodes=6, num_envs=num_envs)
    assert found.episode_returns == tuple(map(float, found.episode_lens))  # each step was right
    policy(np.zeros(2)) if num_envs == 1 else None
    again = evaluate_policy(policy, NeedsCount, env_config=config, episodes=6, num_envs=num_envs)
    assert again.episode_returns == found.episode_returns


class TakeTurns(MultiAgentEnv):
    """Two agents that act in turns of different lengths, and are rewarded for the number of their own steps."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.possible_agents = self.agents = ["a", "b"]
        self.observation_spaces = dict.fromkeys(self.agents, NeedsCount.observation_space)
        self.action_spaces = dict.fromkeys(self.agents, NeedsCount.action_space)

    def _obs(self) -> Any:
        return {agent: np.zeros(2, np.float32) for agent in ("a", "ab", "b")[self.t % 3]}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.counts = 0, {"a": 0, "b": 0}
        return self._obs(), {}

    def step(self, actions: Any) -> Any:
        rewards = {agent: float(action == self.counts[agent]) for agent, action in actions.items()}
        self.counts |= {agent: self.counts[agent] + 1 for agent in actions}
        self.t += 1
        over = {"__all__": self.t == 7}
        return self._obs(), rewards, over, {"__all__": False}, {}


def test_each_agent_has_a_state_of_its_own_in_evaluation() -> None:
    config = PPOConfig().environment(TakeTurns).rl_module(module_class=ActsByCount)
    config.multi_agent(policies=["shared"]).env_runners(num_envs_per_env_runner=2)
    with config.build() as algo:
        for policies in (algo, algo.acting.agent_policies()):
            found = evaluate_policy(policies, TakeTurns, episodes=4, num_envs=2)
            assert found.episode_returns == (9.0,) * 4


@pytest.mark.parametrize(
    ("settings", "suffix"),
    [
        pytest.param(LSTM, ".onnx", marks=pytest.mark.slow),
        pytest.param(GRU, ".onnx", marks=pytest.mark.slow),
        pytest.param(LSTM, ".pt2", marks=pytest.mark.slow),
        (GRU, ".pt2"),
    ],
)
def test_exports_take_and_return_states(settings: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    policy = make_policy(settings)
    file, states = policy.export(tmp_path / f"policy{suffix}"), policy.initial_states(3)
    run: Any
    if suffix == ".onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(file)
        names = [name.replace("state", "next_state") for name, _ in named_leaves(states, "state")]
        assert [node.name for node in session.get_outputs()] == ["actions", *names]

        def run(obs: Any, states: Any) -> Any:
            given = {"obs": obs, **dict(named_leaves(states, "state"))}
            actions, *after = session.run(["actions", *names], given)
            return actions, dict(zip(states, after, strict=True))
    else:
        program = torch.export.load(str(file)).module()

        def run(obs: Any, states: Any) -> Any:
            actions, *after = program(torch.from_numpy(obs), map_tree(torch.from_numpy, states))
            return actions.numpy(), dict(zip(states, (leaf.numpy() for leaf in after), strict=True))

    policy.reset()
    for obs in OBS:
        actions, states = run(obs, states)
        np.testing.assert_allclose(actions, policy.batch(obs), atol=1e-5)


class ReturnsKeysInAnotherOrder(ActsByCount):
    """Returns its two numbers, which differ, in another order than the initial state has them."""

    def initial_state(self) -> Any:
        return {"old": torch.zeros(1), "count": torch.zeros(1)}

    def policy(self, obs: Any, state: Any) -> Any:
        outputs, after = super().policy(obs, state)
        return outputs, {**after, "old": state["count"] - 5}


def test_exported_states_have_their_names_whatever_order_a_module_returns_them_in(tmp_path: Path) -> None:
    env = NeedsCount()
    policy = WatchedPolicy(Policy(ReturnsKeysInAnotherOrder(env.observation_space, env.action_space, {})))
    policy.batch(OBS[0])
    file = policy.export(tmp_path / "policy.pt2")
    _, *after = torch.export.load(str(file)).module()(torch.from_numpy(OBS[0]), initial_states(policy.module, 3))
    assert [leaf[0].item() for leaf in after] == [-5, 1]  # as the metadata names them: old, count
    assert check_export(file, policy).is_close


def test_a_distribution_of_returns_is_exported_for_any_batch(tmp_path: Path) -> None:
    config = DQNConfig().environment(TMaze).rl_module(model_config={"use_gru": True, "fcnet_hiddens": [8, 8]})
    with config.training(num_atoms=5, dueling=True).build() as algo:
        policy = load_policy(algo.save(tmp_path / "run"))
    program = torch.export.load(str(policy.export(tmp_path / "policy.pt2"))).module()
    for num_rows in (1, 4):
        obs = np.random.default_rng(0).standard_normal((num_rows, 2)).astype(np.float32)
        actions, states = policy.act(obs, policy.initial_states(num_rows))
        given, after = program(torch.from_numpy(obs), map_tree(torch.from_numpy, policy.initial_states(num_rows)))
        assert np.array_equal(given, actions)
        np.testing.assert_allclose(after, states["h"], atol=1e-5)
