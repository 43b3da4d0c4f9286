"""IQL: the loss against a slow loop, closed forms on bandits, and a path joined from two walks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral import Algorithm, IQLConfig
from corral.algorithms.iql import iql_loss
from corral.errors import ConfigError
from corral.modules.inference import Inference
from corral.modules.iql_module import IQLModule

OBS = spaces.Box(-10, 10, (2,), np.float32)
THREE = spaces.Discrete(3)
BOX = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 1], np.float32))
ACTION_SPACES = {"box": BOX, "discrete": THREE}


def iql(data: Any, actions: Any = THREE, **training: Any) -> Any:
    config = IQLConfig().environment(observation_space=OBS, action_space=actions).offline_data(input_=data)
    config.debugging(seed=1).rl_module(model_config={"fcnet_hiddens": [32]}).learners(num_threads=1)
    small = {"lr": 5e-3, "num_updates_per_iteration": 300, "train_batch_size_per_learner": 128, "tau": 0.05}
    return config.training(**{**small, **training})


def make_module(space: spaces.Space[Any], **model_config: Any) -> IQLModule:
    torch.manual_seed(0)
    module = IQLModule(OBS, space, {"fcnet_hiddens": [16], **model_config})
    with torch.no_grad():
        for parameter in [*module.actor.parameters(), *module.target_q.parameters()]:
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def make_batch(space: spaces.Space[Any], size: int = 9) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    is_discrete = isinstance(space, spaces.Discrete)
    return {
        "obs": torch.randn(size, 2, generator=generator),
        "next_obs": torch.randn(size, 2, generator=generator),
        "actions": torch.arange(size) % 3 if is_discrete else torch.randn(size, 2, generator=generator),
        "rewards": torch.randn(size, generator=generator),
        "terminated": torch.arange(size) % 3 == 0,
        "truncated": torch.arange(size) % 3 == 1,
        "discounts": torch.full((size,), 0.9),
        "weights": torch.rand(size, generator=generator) + 0.5,
    }


def slow_losses(module: IQLModule, batch: dict[str, torch.Tensor], max_weight: float) -> dict[str, torch.Tensor]:
    """Return the losses by group of parameters, worked out one transition after another."""
    critic, value, actor = [], [], []
    for i in range(len(batch["rewards"])):
        row = {name: column[i : i + 1] for name, column in batch.items()}
        if module.is_discrete:
            action = int(row["actions"])
            of_critic = [net(row["obs"])[0, action] for net in module.q]
            of_target = [net(row["obs"])[0, action] for net in module.target_q]
            logp = module.actor(row["obs"])[0].log_softmax(-1)[action]
        else:
            assert module.log_std is not None
            clipped = row["actions"].clamp(-1, 1)
            of_critic = [net(row["obs"], clipped)[0] for net in module.q]
            of_target = [net(row["obs"], clipped)[0] for net in module.target_q]
            normal = torch.distributions.Normal(module.actor(row["obs"]).tanh(), module.log_std.exp())
            logp = normal.log_prob(row["actions"]).sum()
        error = min(of_target).detach() - module.v(row["obs"])[0, 0]
        value.append(row["weights"][0] * (0.8 if error > 0 else 0.2) * error**2)
        not_over = 0.0 if row["terminated"][0] else 1.0
        target = (row["rewards"][0] + 0.9 * not_over * module.v(row["next_obs"])[0, 0]).detach()
        critic.append(row["weights"][0] * sum(0.5 * (q - target) ** 2 for q in of_critic))
        weight = min(math.exp(2.0 * error.item()), max_weight)
        actor.append(-row["weights"][0] * weight * logp)
    return {name: torch.stack(parts).mean() for name, parts in (("critic", critic), ("value", value), ("actor", actor))}


@pytest.mark.parametrize("max_weight", [100.0, 1.05])
@pytest.mark.parametrize("space", ACTION_SPACES.values(), ids=ACTION_SPACES)
def test_each_group_gets_the_gradient_of_its_own_loss(space: spaces.Space[Any], max_weight: float) -> None:
    module, batch = make_module(space), make_batch(space)
    total, reported = iql_loss(module, batch, {}, expectile=0.8, beta=2.0, max_weight=max_weight)
    total.backward()  # type: ignore[no-untyped-call]
    groups, expected = module.parameter_groups(), slow_losses(module, batch, max_weight)
    for name, loss in expected.items():
        assert reported[f"{name}_loss"].item() == pytest.approx(loss.item(), rel=1e-5)
        gradients = torch.autograd.grad(loss, groups[name], retain_graph=True)
        for parameter, gradient in zip(groups[name], gradients, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is None for parameter in module.target_q.parameters())


def bandit(num_steps: int = 3000) -> dict[str, Any]:
    """One-step episodes: actions drawn evenly, with the rewards -1, 0 and 1."""
    actions = np.random.default_rng(0).integers(0, 3, num_steps)
    flags = np.ones(num_steps, bool)
    zeros = np.zeros((num_steps, 2), np.float32)
    return {"obs": zeros, "actions": actions, "rewards": actions - 1.0, "terminated": flags}


@pytest.mark.slow_cases("0.5-0.0")
@pytest.mark.parametrize(("expectile", "expected"), [(0.5, 0.0), (0.9, 8 / 11)])
def test_values_are_an_expectile_of_the_recorded_actions(expectile: float, expected: float) -> None:
    """For rewards -1, 0 and 1 the expectile v > 0 solves e (1 - v) = (1 - e) (v + 1 + v); at 0.9 v is 8/11."""
    with iql(bandit(), expectile=expectile, beta=1.0, lr=1e-2, num_updates_per_iteration=400).build() as algorithm:
        algorithm.train()
        module = algorithm.get_module()
        value = module.value(torch.zeros(1, 2)).item()
        probs = module.policy(torch.zeros(1, 2)).softmax(-1)[0].tolist()
    assert value == pytest.approx(expected, abs=0.06)
    weights = np.exp([-1.0, 0.0, 1.0])  # the recorded policy, which is even, times exp(beta * q); v cancels
    np.testing.assert_allclose(probs, weights / weights.sum(), atol=0.05)


def crossing_walks() -> dict[str, Any]:
    """Two walks over the places 0, 1, 2, 3: from 0 a walk that ends badly, and from 1 one that ends well.

    Action 1 goes from 0 to 1 and from 1 to 2; action 2 goes from 1 to the end with -1, and from 2 to the end with 10;
    action 0 stays at 0. No walk goes from 0 to 10: only who joins the two knows the way.
    """
    walks = [
        *[[(0, 1, 0.0), (1, 2, -1.0)]] * 3,  # 0 -> 1 -> -1
        *[[(0, 0, 0.5)]] * 3,  # a small reward at once
        [(1, 1, 0.0), (2, 2, 10.0)],  # 1 -> 2 -> 10
    ] * 40
    columns: dict[str, list[Any]] = {name: [] for name in ("obs", "actions", "rewards", "terminated")}
    for walk in walks:
        for t, (place, action, reward) in enumerate(walk):
            columns["obs"].append([float(place), 1.0])
            columns["actions"].append(action)
            columns["rewards"].append(reward)
            columns["terminated"].append(t == len(walk) - 1)
    return {name: np.array(column, np.float32 if name == "obs" else None) for name, column in columns.items()}


def test_walks_are_joined_where_they_cross() -> None:
    with iql(crossing_walks(), expectile=0.95, beta=3.0, gamma=0.9).build() as algorithm:
        for _ in range(4):
            algorithm.train()
        module = algorithm.get_module()
        places = torch.tensor([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
        values, best = module.value(places).tolist(), module.policy(places).argmax(-1).tolist()
    assert best == [1, 1, 2]
    # The expectiles: at 1, of 9 with the share 1/4 and -1; at 0, of 0.9 times that with the share 1/2 and 0.5.
    at_1 = (0.95 * 0.25 * 9 - 0.05 * 0.75) / (0.95 * 0.25 + 0.05 * 0.75)
    at_0 = 0.95 * 0.9 * at_1 + 0.05 * 0.5
    assert values == pytest.approx([at_0, at_1, 10.0], abs=0.4)


def test_the_policy_that_runners_compute_matches_torch() -> None:
    for space in (BOX, THREE, spaces.Box(-np.inf, np.inf, (2,), np.float32)):
        module = make_module(space)
        inference = Inference(module)
        assert inference.backend == "numpy"
        obs = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
        with torch.no_grad():
            expected = module.policy(torch.from_numpy(obs)).numpy()
        np.testing.assert_allclose(inference(obs), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("space", ACTION_SPACES.values(), ids=ACTION_SPACES)
def test_training_continues_exactly(space: spaces.Space[Any], tmp_path: Path) -> None:
    data = bandit(60)
    if space is BOX:
        data["actions"] = np.random.default_rng(1).uniform([-2, 0], [2, 1], (60, 2)).astype(np.float32)
    config = iql(data, space, num_updates_per_iteration=3).offline_data(validation_fraction=0.3)
    with config.build() as algorithm:
        algorithm.train()
        path = algorithm.save(tmp_path / "checkpoint")
        expected = [algorithm.train()["learners"] for _ in range(2)]
    with Algorithm.from_checkpoint(path, input_=data) as restored:
        found = [restored.train()["learners"] for _ in range(2)]
    assert found == expected and np.isfinite(found[0]["default_policy"]["validation_loss"])


def test_forbidden_actions_are_never_taken() -> None:
    data = bandit(300)
    masks = np.ones((300, 3), np.int8)
    masks[:, 2] = 0
    data = {name: column[data["actions"] != 2] for name, column in data.items()}
    data["obs"] = {"action_mask": masks[: len(data["actions"])], "observations": data["obs"]}
    config = iql(data, num_updates_per_iteration=20)
    config.environment(observation_space=spaces.Dict({"action_mask": spaces.MultiBinary(3), "observations": OBS}))
    with config.build() as algorithm:
        algorithm.train()
        obs = {"action_mask": np.array([1, 1, 0], np.int8), "observations": np.zeros(2, np.float32)}
        assert {int(algorithm.compute_single_action(obs, explore=True)) for _ in range(50)} == {0, 1}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.MultiDiscrete([2, 2]), "IQL takes Discrete actions or a Box of floats"),
        (spaces.Box(0, 9, (2,), np.int64), "IQL takes Discrete actions or a Box of floats"),
    ],
)
def test_spaces_that_do_not_fit_are_refused(space: spaces.Space[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        IQLModule(OBS, space, {})


def test_memory_and_missing_data_are_refused() -> None:
    with pytest.raises(ConfigError, match="IQL learns from recorded data, and none was given"):
        IQLConfig().environment("CartPole-v1").build()
    with pytest.raises(ConfigError, match="IQL cannot train modules with memory"):
        iql(bandit(30)).rl_module(model_config={"use_lstm": True}).build()
