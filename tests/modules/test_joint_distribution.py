"""Nested actions: against enumeration of all values, against samples, and in algorithms, policies and exports."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from at_least import at_least
from corral import DQNConfig, MultiAgentEnv, Policy, PPOConfig, evaluate_policy, load_policy
from corral.core.tree import leaves, map_tree, named_leaves
from corral.errors import ConfigError, EnvError, ExportError
from corral.modules.distributions import Categorical
from corral.modules.joint_distribution import Joint
from corral.modules.module import ActorCritic

DISCRETE = spaces.Tuple(
    [spaces.Discrete(3), spaces.MultiDiscrete([2, 2]), spaces.Discrete(2, start=5), spaces.Discrete(2)]
)
MIXED = spaces.Dict(
    door=spaces.Discrete(3, start=-1),
    hand=spaces.Tuple(
        [spaces.Box(np.array([0, -5], np.float32), np.array([10, 1], np.float32)), spaces.MultiBinary(2)]
    ),
    speed=spaces.Box(-2, 2, (1,), np.float64),
)
FLAT = spaces.Box(-1, 1, (3,), np.float32)
every_form = pytest.mark.parametrize("autoregressive", [False, True], ids=["independent", "autoregressive"])


def inputs_of(joint: Joint, rows: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=(rows, joint.num_inputs)).astype(np.float32)


def all_actions() -> np.ndarray[Any, Any]:
    return np.array(list(itertools.product(range(3), range(2), range(2), range(2), range(2))))


def probabilities(joint: Joint, inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the probability of every action for one row of inputs, computed value by value."""
    found = []
    for a, b, c, d, e in all_actions():
        columns = iter(joint._inputs)
        p = 1.0
        rows = [0, a, a, d] if len(joint.parents) == 4 and joint.parents[1] is not None else [0, 0, 0, 0]
        for part, values, row in zip(joint.parts, ((a,), (b, c), (d,), (e,)), rows, strict=True):
            own = inputs[next(columns)].reshape(-1, part.num_inputs)[row]
            for chunk, value in zip(np.split(own, len(values)), values, strict=True):
                p *= float((np.exp(chunk) / np.exp(chunk).sum())[value])
        found.append(p)
    return np.array(found)


def test_autoregressive_parts_depend_on_the_nearest_discrete_part() -> None:
    assert Joint(DISCRETE, autoregressive=True).parents == [None, 0, 0, 2]
    assert Joint(MIXED, autoregressive=True).parents == [None, 0, 0, 0]
    assert Joint(DISCRETE).parents == [None] * 4
    assert Joint(DISCRETE).num_inputs == 3 + 4 + 2 + 2
    assert Joint(DISCRETE, autoregressive=True).num_inputs == 3 + 3 * 4 + 3 * 2 + 2 * 2


@every_form
def test_logp_entropy_and_divergence_are_the_ones_of_all_values(autoregressive: bool) -> None:
    joint, actions = Joint(DISCRETE, autoregressive=autoregressive), all_actions()
    one, other = inputs_of(joint, 5), inputs_of(joint, 5, seed=1)
    for row in range(5):
        p, q = probabilities(joint, one[row]), probabilities(joint, other[row])
        assert p.sum() == pytest.approx(1)
        repeated = torch.from_numpy(one[row]).expand(len(actions), -1)
        logp = joint.logp(repeated, torch.from_numpy(actions))
        np.testing.assert_allclose(logp, np.log(p), rtol=1e-4, atol=1e-5)
        pair = torch.from_numpy(one[row : row + 1]), torch.from_numpy(other[row : row + 1])
        assert joint.entropy(pair[0]).item() == pytest.approx(-(p * np.log(p)).sum(), rel=1e-4)
        assert joint.kl(*pair).item() == pytest.approx((p * np.log(p / q)).sum(), rel=1e-3, abs=1e-5)


@every_form
def test_samples_have_the_probabilities_of_logp(autoregressive: bool) -> None:
    joint, n = Joint(DISCRETE, autoregressive=autoregressive), 60_000
    inputs = inputs_of(joint, 1)
    actions = joint.sample(inputs.repeat(n, 0), joint.noise(np.random.default_rng(0), (n,)))
    index = np.ravel_multi_index(tuple(actions.T), (3, 2, 2, 2, 2))
    found = np.bincount(index, minlength=48) / n
    np.testing.assert_allclose(found, probabilities(joint, inputs[0]), atol=0.01)
    random = joint.random(np.random.default_rng(0), n)
    index = np.ravel_multi_index(tuple(random.T), (3, 2, 2, 2, 2))
    np.testing.assert_allclose(np.bincount(index, minlength=48) * 48 / n, 1, atol=0.15)
    np.testing.assert_allclose(joint.random_logp(random), -np.log(48), rtol=1e-5)


@every_form
def test_parts_with_densities_add_their_entropies(autoregressive: bool) -> None:
    joint = Joint(MIXED, autoregressive=autoregressive)
    inputs = torch.from_numpy(inputs_of(joint, 20_000)[:1].repeat(20_000, 0))
    noise = joint.noise(np.random.default_rng(0), (20_000,))
    actions = joint.sample(inputs.numpy(), noise)
    assert (actions.dtype, actions.shape) == (np.float32, (20_000, 1 + 2 + 2 + 1))
    logp = joint.logp(inputs, torch.from_numpy(actions))
    assert -logp.mean().item() == pytest.approx(joint.entropy(inputs[:1]).item(), abs=0.05)
    other = torch.from_numpy(inputs_of(joint, 1, seed=1))
    gap = logp - joint.logp(other.expand(20_000, -1), torch.from_numpy(actions))
    assert gap.mean().item() == pytest.approx(joint.kl(inputs[:1], other).item(), rel=0.05)
    assert joint.kl(inputs[:5], inputs[:5]).abs().max() < 1e-6


@every_form
def test_env_actions_are_nested_as_their_space(autoregressive: bool) -> None:
    joint = Joint(MIXED, autoregressive=autoregressive)
    inputs = inputs_of(joint, 30) * 4
    for actions in (
        joint.to_env(joint.sample(inputs, joint.noise(np.random.default_rng(0), (30,)))),
        joint.to_env(joint.random(np.random.default_rng(0), 30)),
        joint.to_env(joint.mode(inputs)),
    ):
        for i in range(30):
            assert MIXED.contains(map_tree(lambda leaf, i=i: np.asarray(leaf[i]), actions))
    modes = joint.env_mode(torch.from_numpy(inputs))
    for one, other in zip(leaves(modes), leaves(joint.to_env(joint.mode(inputs))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        assert one.numpy().dtype == other.dtype


def test_the_initial_deviation_is_set_in_all_rows_of_a_table() -> None:
    module = ActorCritic(FLAT, MIXED, {"action_parts": "autoregressive", "initial_log_std": -1.5})
    joint = module.distribution
    assert isinstance(joint, Joint)
    outputs = module.policy(torch.zeros(2, 3))
    for index, num_numbers in ((1, 2), (3, 1)):  # the Boxes, with a row for each value of the door
        table = outputs[:, joint._inputs[index]].reshape(2, 3, 2 * num_numbers)
        torch.testing.assert_close(table[..., num_numbers:], torch.full((2, 3, num_numbers), -1.5))
    assert len(set(joint.log_std_columns.tolist())) == len(joint.log_std_columns) == 3 * (2 + 1)
    assert isinstance(joint.parts[0], Categorical)


class Signals(gym.Env[Any, Any]):
    """Open the door that the observation names, with the speed of the sign of the second number."""

    observation_space = FLAT
    action_space = MIXED

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        return self._see(), {}

    def _see(self) -> Any:
        self._obs = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return self._obs

    def step(self, action: Any) -> Any:
        assert MIXED.contains(action)
        wanted = int(self._obs[0] > 0) * 2 - 1
        reward = 0.5 * (action["door"] == wanted) + 0.5 * (np.sign(action["speed"][0]) == np.sign(self._obs[1]))
        self._t += 1
        return self._see(), float(reward), self._t == 8, False, {}


def config_of(parts: str) -> PPOConfig:
    config = PPOConfig().environment(Signals).debugging(seed=0)
    config.rl_module(model_config={"action_parts": parts, "fcnet_hiddens": [16]})
    return config.training(train_batch_size_per_learner=512, minibatch_size=128, lr=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [pytest.param("independent", marks=pytest.mark.slow), "autoregressive"])
def test_ppo_learns_nested_actions(parts: str, tmp_path: Path) -> None:
    with config_of(parts).build() as algo:
        for _ in range(8):
            algo.train()
        action = algo.compute_single_action(np.array([0.9, 0.9, 0.0], np.float32), explore=False)
        assert MIXED.contains(action)
        assert (action["door"], action["speed"][0] > 0) == (1, True)
        policy = load_policy(algo.save(tmp_path / "checkpoint"))
        found = evaluate_policy(algo, Signals, episodes=20)
    assert found.episode_return_mean > 7  # 8 at best, and about 3.3 at random
    assert evaluate_policy(policy, Signals, episodes=20) == found
    if parts == "autoregressive" and torch.__version__.startswith("2.6."):
        with pytest.raises(ExportError, match="cannot be exported: Constraints violated"):
            policy.export(tmp_path / "policy.pt2")
        return
    obs = np.random.default_rng(0).uniform(-1, 1, (9, 3)).astype(np.float32)
    program = torch.export.load(str(policy.export(tmp_path / "policy.pt2"))).module()
    check_same(policy, obs, leaves(program(torch.from_numpy(obs))))


def check_same(policy: Policy, obs: Any, found: list[Any]) -> None:
    for one, other in zip(found, leaves(policy.batch(obs)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_onnx_names_the_parts(tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    policy = Policy(ActorCritic(FLAT, MIXED, {"action_parts": "autoregressive"}))
    session = ort.InferenceSession(policy.export(tmp_path / "policy.onnx"))
    names = [name for name, _ in named_leaves(policy.batch(np.zeros((1, 3), np.float32)), "actions")]
    assert [node.name for node in session.get_outputs()] == names == [*names]
    obs = np.random.default_rng(0).uniform(-1, 1, (9, 3)).astype(np.float32)
    check_same(policy, obs, session.run(names, {"obs": obs}))


class Pairs(MultiAgentEnv):
    """Two agents with nested actions, one with joined ones; `c` acts in every other step."""

    possible_agents = ("a", "b", "c")
    observation_spaces = dict.fromkeys("abc", FLAT)
    action_spaces = {"a": MIXED, "b": MIXED, "c": spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)])}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        self.obs = np.zeros(3, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._t = 0
        return self._see(), {}

    def _see(self) -> Any:
        return {agent: self.obs for agent in ("ab" if self._t % 2 else "abc")}

    def step(self, action_dict: Any) -> Any:  # type: ignore[override]
        assert all(self.action_spaces[agent].contains(action) for agent, action in at_least(1, action_dict.items()))
        self._t += 1
        rewards = {agent: float(action["door"]) for agent, action in action_dict.items() if agent != "c"}
        return self._see(), rewards, {"__all__": self._t == 6}, {"__all__": False}, {}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_agents_take_nested_actions(vectorization: str) -> None:
    config = PPOConfig().environment(Pairs).debugging(seed=0).rl_module(model_config={"fcnet_hiddens": [8]})
    config.env_runners(num_envs_per_env_runner=2, vectorization=vectorization)
    policies = {"p": {"model_config": {"action_parts": "autoregressive", "fcnet_hiddens": [8]}}, "c": {}}
    config.multi_agent(policies=policies, policy_mapping_fn=lambda agent, episode: "c" if agent == "c" else "p")
    with config.training(train_batch_size_per_learner=60, minibatch_size=30).build() as algo:
        result = algo.train()
        assert result["env_runners"]["episode_len_mean"] == 6
        actions = algo.compute_single_action(np.zeros(3, np.float32), module_id="p")
        assert MIXED.contains(actions)
        assert evaluate_policy(algo, Pairs, episodes=2).num_episodes == 2


@pytest.mark.parametrize("settings", [{"vectorization": "async"}, {"autoreset_mode": "same_step"}])
def test_every_vectorization_passes_nested_actions(settings: dict[str, Any]) -> None:
    config = config_of("independent").env_runners(num_envs_per_env_runner=2, **settings)
    with config.build() as algo:
        rollout = algo.env_runner.sample(num_timesteps=40)  # type: ignore[union-attr]
        algo.env_runner.sample(num_timesteps=40, random_actions=True)  # type: ignore[union-attr]
    assert rollout.actions.shape[2:] == (6,)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="action_parts"):
        config_of("dependent").build()
    with pytest.raises(
        ConfigError, match=r"'autoregressive' is for Dict and Tuple actions, and the module has Discrete"
    ):
        config_of("autoregressive").environment("CartPole-v1").build()
    with pytest.raises(ConfigError, match=r"Q-values need Discrete actions"):
        DQNConfig().environment(Signals).build()
    with pytest.raises(ConfigError, match=r"GaussianNoise needs the action space Box|learns from actions of its own"):
        config_of("independent").exploration(exploration_config={"type": "GaussianNoise"}).build()

    class Graphs(Signals):
        action_space = spaces.Dict(door=spaces.Discrete(3), text=spaces.Text(4))  # type: ignore[assignment]

    with pytest.raises(EnvError, match=r"unsupported action space Text.* at action_space/text; use Discrete"):
        PPOConfig().environment(Graphs).build()
