"""PQN: its targets against a slow loop on what was sampled, its loss by hand, its networks, and what it refuses."""

from __future__ import annotations

import ast
import re
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from at_least import at_least
from corral import PQNConfig
from corral.algorithms.pqn import lambda_returns, pqn_loss
from corral.data.episodes.rollout import Rollout
from corral.errors import ConfigError
from corral.learners.update import to_tensors
from corral.modules.q_module import QModule

SPACES = (spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2))


FORM = {"has_targets": False, "is_normalized": True}


class Walk(gym.Env[Any, Any]):
    """A walk of random observations: action 1 ends it in one of four steps, and so does a limit of five steps."""

    observation_space, action_space = SPACES

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        ends = bool(action == 1 and self.np_random.random() < 0.25)
        return self._look(), float(self.np_random.normal()), ends, self.steps == 5 and not ends, {}

    def _look(self) -> Any:
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)


def make_config(**settings: Any) -> PQNConfig:
    config = PQNConfig().environment(Walk).env_runners(num_envs_per_env_runner=3).debugging(seed=0)
    config.rl_module(model_config={"fcnet_hiddens": [8]})
    return config.training(train_batch_size_per_learner=120, minibatch_size=None, num_epochs=1).copy(**settings)


def slow_returns(episode: Any, value: Any, gamma: float, lambda_: float) -> list[float]:
    """Return `r + gamma * ((1 - lambda) * V(s') + lambda * R')` of each step, backwards from the end of an episode."""
    values = [value(obs) for obs in episode.get_observations()]
    found, after = [], 0.0 if episode.is_terminated else values[-1]
    for t in reversed(range(len(episode))):
        is_last = t == len(episode) - 1
        following = after if is_last else (1 - lambda_) * values[t + 1] + lambda_ * after
        after = float(episode.get_rewards(t)) + gamma * following
        found.append(after)
    return found[::-1]


@pytest.mark.parametrize("lambda_", [0.0, 0.65, 1.0])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_targets_are_the_lambda_returns_of_a_slow_loop(lambda_: float, autoreset: str) -> None:
    config = make_config(lambda_=lambda_, gamma=0.9)
    config.env_runners(vectorization="sync", autoreset_mode=autoreset)
    with config.build() as algo:
        rollouts = algo.sample(120)
        batch = algo._batch("default_policy", rollouts)
        module = algo.get_module()

        def value(obs: Any) -> float:
            return float(module.q_values(torch.as_tensor(obs)[None]).detach().max())

        expected = {}
        for episode in (episode for rollout in rollouts for episode in rollout.episodes()):
            returns = slow_returns(episode, value, 0.9, lambda_)
            observations = episode.get_observations()
            expected |= {tuple(obs.tolist()): each for obs, each in zip(observations, returns, strict=False)}
    found = [expected[tuple(obs.tolist())] for obs in batch["obs"]]
    assert len(found) >= 120
    np.testing.assert_allclose(batch["value_targets"], found, rtol=1e-4, atol=1e-5)


def test_a_terminated_step_bootstraps_nothing_and_a_truncated_one_from_where_it_led() -> None:
    rollout = Rollout.allocate(2, 2, SPACES[0], QModule(*SPACES, FORM).distribution)
    rollout.num_rows, columns = 2, rollout.columns
    columns["rewards"][:] = [[1.0, 1.0], [2.0, 2.0]]
    columns["valid"][:] = True
    columns["terminated"][:] = [[False, False], [True, False]]
    columns["truncated"][:] = [[False, False], [False, True]]
    values = np.array([[5.0, 5.0], [10.0, 10.0]], np.float32)
    next_values = np.array([[10.0, 10.0], [100.0, 100.0]], np.float32)
    _, targets = lambda_returns(rollout, values, next_values, gamma=0.5, lambda_=0.5)
    # Step 1: 2 without a next value, or 2 + 0.5 * 100. Step 0: 1 + 0.5 * (0.5 * 10 + 0.5 * the target of step 1).
    np.testing.assert_allclose(targets, [[4.0, 16.5], [2.0, 52.0]])


def test_loss_is_half_the_mean_squared_error_of_the_actions_taken() -> None:
    module = QModule(*SPACES, {"fcnet_hiddens": (), **FORM})
    last = module.q.head
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight.copy_(torch.tensor([[1.0, 0, 0], [0, 2.0, 0]]))
        last.bias.zero_()
    batch = {
        "obs": torch.tensor([[1.0, 0.5, 0.0], [-1.0, 1.0, 0.0]]),  # Q-values (1, 1) and (-1, 2)
        "actions": torch.tensor([0, 1]),
        "value_targets": torch.tensor([4.0, 0.0]),
    }
    loss, scalars = pqn_loss(module, batch, {})
    assert loss.item() == pytest.approx(0.5 * (3**2 + 2**2) / 2)
    assert {name: value.item() for name, value in scalars.items()} == pytest.approx(
        {"td_loss": 3.25, "qf_mean": 1.5, "qf_min": 1.0, "qf_max": 2.0}
    )
    loss.backward()  # type: ignore[no-untyped-call]
    # d loss / d q = (q - target) / 2 of the action taken, and nothing for the other action
    assert last.bias.grad is not None
    np.testing.assert_allclose(last.bias.grad, [(1 - 4) / 2, (2 - 0) / 2])


@pytest.mark.parametrize("memory", [{}, {"use_gru": True, "gru_cell_size": 4}])
def test_hidden_layers_are_normalised_and_there_is_no_target_network(memory: dict[str, Any]) -> None:
    config = make_config().rl_module(model_config={"fcnet_hiddens": [8], **memory})
    with config.build() as algo:
        names = [name for name, _ in algo.get_module().named_parameters()]
        assert not any("target" in name for name in at_least(1, names))
        assert any(isinstance(part, nn.LayerNorm) for part in algo.get_module().modules())
        before = {name: value.clone() for name, value in algo.get_module().named_parameters()}
        result = algo.train()["learners"]["default_policy"]
        after = dict(algo.get_module().named_parameters())
    assert np.isfinite(result["td_loss"])
    assert all(not torch.equal(after[name], before[name]) for name in at_least(4, names))


def test_layer_normalisation_can_be_left_out() -> None:
    module = QModule(*SPACES, {"use_layernorm": False, **FORM})
    assert not any(isinstance(part, nn.LayerNorm) for part in module.modules())


def test_images_have_normalised_layers_too() -> None:
    space = spaces.Box(0, 255, (36, 36, 3), np.uint8)
    module = QModule(space, spaces.Discrete(2), FORM)
    norms = [part for part in module.modules() if isinstance(part, nn.LayerNorm)]
    assert [tuple(norm.normalized_shape) for norm in norms] == [(128,), (128,)]
    assert module.q_values(torch.zeros(2, 36, 36, 3, dtype=torch.uint8)).shape == (2, 2)


def test_illegal_actions_are_in_no_target() -> None:
    class Masked(Walk):
        observation_space: Any = spaces.Dict({"at": SPACES[0], "action_mask": spaces.MultiBinary(2)})

        def _look(self) -> Any:
            return {"at": super()._look(), "action_mask": np.array([1, 0], np.int8)}

    with make_config().environment(Masked).build() as algo:
        batch = algo._batch("default_policy", algo.sample(120))
        head: Any = algo.get_module().q.head
        head.bias.data[1] = 1e6  # the value of the illegal action
        again = partial(algo.learner_group.values, "default_policy")(batch["obs"])
    assert (np.asarray(batch["actions"]) == 0).all()
    assert np.abs(again).max() < 1e3


def test_values_of_a_module_with_memory_are_the_largest_of_legal_actions() -> None:
    class Masked(Walk):
        observation_space: Any = spaces.Dict({"at": SPACES[0], "action_mask": spaces.MultiBinary(2)})

        def _look(self) -> Any:
            mask = [1, self.np_random.integers(2)]
            return {"at": super()._look(), "action_mask": np.array(mask, np.int8)}

    memory = {"fcnet_hiddens": [8], "use_gru": True, "gru_cell_size": 4}
    with make_config().environment(Masked).rl_module(model_config=memory).build() as algo:
        algo.get_module().q.head.bias.data[1] = 5.0  # action 1 is the best where it is legal
        algo.sync_weights()
        batch = algo._batch("default_policy", algo.sample(120))
        legal = batch["obs"]["action_mask"][:, 1] == 1
        outputs: dict[str, Any] = {}
        with torch.no_grad():
            pqn_loss(algo.get_module(), to_tensors(batch, torch.device("cpu")), {}, outputs=outputs)
    q_values = outputs["q_values"].numpy()
    assert legal.any() and not legal.all() and not batch["actions"][~legal].any()
    np.testing.assert_allclose(batch["values"], q_values.max(-1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(batch["values"], np.where(legal, q_values[:, 1], q_values[:, 0]), rtol=1e-4, atol=1e-4)


def test_epsilon_and_the_learning_rate_fall_as_they_do_by_default() -> None:
    config = PQNConfig().environment(Walk).env_runners(num_envs_per_env_runner=3).debugging(seed=0)
    config.training(train_batch_size_per_learner=3000, minibatch_size=None, num_epochs=1)
    with config.build() as algo:
        result = algo.train()
        steps, rates = algo.num_env_steps_sampled_lifetime, result["learners"]["default_policy"]
    assert result["env_runners"]["epsilon"] == pytest.approx(1 - 0.9 * steps / 15_000, abs=1e-3)
    assert rates["default_optimizer_learning_rate"] == pytest.approx(1e-3 - 8e-4 * steps / 60_000, rel=1e-6)


def test_box_actions_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"Q-values need Discrete actions.*use SAC, TD3 or PPO"):
        PQNConfig().environment("Pendulum-v1").build()


def test_it_learns_with_the_optimizer_of_the_authors() -> None:
    page = (Path(__file__).parents[2] / "docs/algorithms/pqn.md").read_text()
    (given,) = re.findall(r"`\.training\(optimizer=(\".*\"), lr=(.*)\)`", page)
    optimizer, lr = map(ast.literal_eval, given)
    with make_config(optimizer=optimizer, lr=lr).build() as algo:
        result = algo.train()["learners"]["default_policy"]
        assert isinstance(algo.learner_group.learner_here.torch_optimizer("default_policy"), torch.optim.RAdam)
    assert np.isfinite(result["td_loss"])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_it_solves_cart_pole(seed: int) -> None:
    with PQNConfig().environment("CartPole-v1").debugging(seed=seed).learners(num_threads=1).build() as algo:
        best = 0.0
        while best < 475 and algo.num_env_steps_sampled_lifetime < 60_000:
            for _ in range(5):
                algo.train()
            rollout = algo.env_runner.sample(num_episodes=10, explore=False)
            best = float(rollout.rewards[rollout.valid].sum()) / 10
    assert best >= 475
