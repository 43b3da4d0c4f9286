"""TD3's losses on batches worked out by hand, when its groups move, its module, and what it learns."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from small_configs import small_config
from torch import Tensor, nn

from corral import DDPGConfig, TD3Config, make_multi_agent
from corral.algorithms.algorithm import Algorithm
from corral.algorithms.td3 import td3_loss
from corral.errors import ConfigError
from corral.learners.losses import backward
from corral.modules.inference import Inference
from corral.modules.td3_module import TD3Module
from corral.testing import IdentityEnv

OBS = spaces.Box(-1, 1, (3,), np.float32)
BOX = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 1], np.float32))
BOTH = {"actor_coeff": 1.0}
NOISE: dict[str, float] = {"target_noise": 0.2, "target_noise_clip": 0.5}


def make_module(seed: int = 0, **model_config: Any) -> TD3Module:
    torch.manual_seed(seed)
    module = TD3Module(OBS, BOX, {"fcnet_hiddens": [16, 16], **model_config})
    with torch.no_grad():
        for networks in (module.actor, module.target_actor, module.target_q):
            for parameter in networks.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))  # outputs that differ between observations
    return module


def make_batch(size: int = 7, **columns: Any) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    normal = {name: rng.standard_normal((size, 3), dtype=np.float32) for name in ("obs", "next_obs")}
    return {
        **normal,
        "actions": rng.uniform(-1, 1, (size, 2)).astype(np.float32),
        "next_noise": rng.standard_normal((size, 2), dtype=np.float32),
        "rewards": rng.standard_normal(size, dtype=np.float32),
        "terminated": np.arange(size) % 3 == 0,
        "discounts": np.full(size, 0.9, np.float32),
        "weights": rng.uniform(0.5, 1, size).astype(np.float32),
        **columns,
    }


def tensors(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(column) for name, column in batch.items()}


class SumOfActions(nn.Module):
    """A critic that returns a number plus the sum of the actions."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(value))

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        return self.number + actions.sum(-1)


class Constant(nn.Module):
    """An actor that returns the same outputs for all observations."""

    def __init__(self, outputs: list[float]) -> None:
        super().__init__()
        self.outputs = nn.Parameter(torch.tensor(outputs))

    def forward(self, obs: Tensor) -> Tensor:
        return self.outputs.expand(len(obs), -1)


class Known(TD3Module):
    """Critics that begin at 5 and 3, targets at 50 and 30, and actions of tanh(0.5) and tanh(-1)."""

    def make_actor(self) -> nn.Module:
        return Constant([0.5, -1.0])

    def make_critic(self) -> nn.Module:
        return SumOfActions(5.0)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        with torch.no_grad():
            for critic, target, value in zip(self.q, self.target_q, (5.0, 3.0), strict=True):
                critic.number.fill_(value)  # type: ignore[operator,union-attr]
                target.number.fill_(10 * value)  # type: ignore[operator,union-attr]


def test_losses_have_the_values_worked_out_by_hand() -> None:
    # 1 step, a termination; 1 step, a truncation; 3 steps, whose rewards the buffer has summed.
    batch = make_batch(
        3,
        rewards=np.array([1, 2, 3], np.float32),
        terminated=np.array([True, False, False]),
        discounts=np.array([0.9, 0.9, 0.9**3], np.float32),
        weights=np.array([1, 0.5, 2], np.float32),
        next_noise=np.array([[1, 1], [10, -10], [-1, 0.5]], np.float32),
    )
    losses, reported = td3_loss(Known(OBS, BOX, {}), tensors(batch), BOTH, **NOISE)
    noise = np.array([[0.2, 0.2], [0.5, -0.5], [-0.2, 0.1]])  # the second row is clipped
    next_actions = np.clip(np.tanh([0.5, -1.0]) + noise, -1, 1)
    assert next_actions[1, 1] == -1  # and is clipped to the bounds
    targets = batch["rewards"] + np.array([0, 0.9, 0.9**3]) * (30 + next_actions.sum(-1))
    errors = np.array([5.0, 3.0])[:, None] + batch["actions"].sum(-1) - targets
    assert losses["critic"].item() == pytest.approx((batch["weights"] * errors**2).mean(1).sum(), rel=1e-5)
    assert losses["actor"].item() == pytest.approx(-(5 + np.tanh(0.5) + np.tanh(-1.0)), rel=1e-5)
    np.testing.assert_allclose(reported["td_error"], np.abs(errors).mean(0), rtol=1e-5)
    values = np.array([5.0, 3.0])[:, None] + batch["actions"].sum(-1)
    found = [reported[name].item() for name in ("qf_mean", "qf_min", "qf_max")]
    assert found == pytest.approx([values.mean(), values.min(), values.max()], rel=1e-5)


def test_with_one_critic_and_no_noise_the_losses_match_ddpg() -> None:
    module, batch = make_module(twin_q=False), tensors(make_batch())
    losses, _ = td3_loss(module, batch, BOTH, target_noise=0.0, target_noise_clip=0.5)
    next_actions = module.target_actor(batch["next_obs"]).tanh()
    next_q = module.target_q[0](batch["next_obs"], next_actions)
    targets = (batch["rewards"] + 0.9 * ~batch["terminated"] * next_q).detach()
    errors = module.q[0](batch["obs"], batch["actions"]) - targets
    assert losses["critic"].item() == pytest.approx((batch["weights"] * errors.square()).mean().item(), rel=1e-5)
    actor_loss = -module.q[0](batch["obs"], module.actor(batch["obs"]).tanh()).mean()
    assert losses["actor"].item() == pytest.approx(actor_loss.item(), rel=1e-5)


def test_each_group_of_parameters_gets_the_gradient_of_its_own_loss_alone() -> None:
    module, batch = make_module(), tensors(make_batch())
    losses, _ = td3_loss(module, batch, BOTH, **NOISE)
    groups = module.parameter_groups()
    expected = {
        name: torch.autograd.grad(losses[name], groups[name], retain_graph=True, allow_unused=True) for name in groups
    }
    mixed = torch.autograd.grad(losses["actor"], groups["critic"], retain_graph=True, allow_unused=True)
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in mixed)  # they would mix, if they could
    for parameter in module.parameters():
        parameter.grad = None
    backward(losses, groups, "m", 2)
    for name, parameters in groups.items():
        for parameter, gradient in zip(parameters, expected[name], strict=True):
            assert parameter.grad is not None and gradient is not None
            np.testing.assert_allclose(parameter.grad, gradient, rtol=1e-4, atol=1e-7)
    assert all(p.grad is None for p in (*module.target_q.parameters(), *module.target_actor.parameters()))


def test_without_a_coefficient_the_actors_loss_is_not_computed() -> None:
    losses, reported = td3_loss(make_module(), tensors(make_batch()), {"actor_coeff": 0.0}, **NOISE)
    assert list(losses) == ["critic"] and "actor_loss" not in reported


def test_targets_follow_by_tau() -> None:
    module = make_module()
    pairs = ((module.target_q, module.q), (module.target_actor, module.actor))
    before = [[parameter.clone() for parameter in target.parameters()] for target, _ in pairs]
    module.update_target(0.25)
    for old, (target, network) in zip(before, pairs, strict=True):
        for was, now, followed in zip(old, target.parameters(), network.parameters(), strict=True):
            np.testing.assert_allclose(now.detach(), 0.75 * was + 0.25 * followed.detach(), rtol=1e-5, atol=1e-7)
    copied = copy.deepcopy(module)  # which follows its own networks
    copied.update_target(1.0)
    for one, other in zip(copied.target_q.parameters(), module.q.parameters(), strict=True):
        np.testing.assert_array_equal(one.detach(), other.detach())
    assert any((a != b).any() for a, b in zip(module.target_q.parameters(), module.q.parameters(), strict=True))


def test_runners_compute_the_actor_in_numpy_and_alike() -> None:
    module, obs = make_module(), make_batch()["obs"]
    inference = Inference(module)
    assert inference.backend == "numpy"
    np.testing.assert_allclose(inference(obs), module.policy(torch.from_numpy(obs)).detach(), rtol=1e-5, atol=1e-6)
    assert module.distribution.num_inputs == 2
    values = module.q_values(torch.from_numpy(obs), module.policy(torch.from_numpy(obs)))
    np.testing.assert_array_equal(module.value(torch.from_numpy(obs)).detach(), values.amin(0).detach())


def quick(cls: type[TD3Config] = TD3Config, **training: Any) -> Any:
    return small_config("DDPG" if cls is DDPGConfig else "TD3", **training)


def learner_metrics_of(result: dict[str, Any]) -> dict[str, float]:
    metrics: dict[str, float] = result["learners"]["default_policy"]
    return metrics


def weights_of(*networks: Any) -> list[Any]:
    return [value.detach().clone() for network in networks for value in network.parameters()]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize(("settings", "delay"), [({}, 2), ({"policy_delay": 3}, 3), ({"policy_delay": 1}, 1)])
def test_the_actor_and_the_targets_move_with_every_update_that_is_due(settings: dict[str, int], delay: int) -> None:
    moved = []
    with quick(**settings, num_steps_sampled_before_learning_starts=1).build() as algorithm:
        module: Any = algorithm.get_module()
        algorithm.local_replay_buffer.add(algorithm.sample(70))  # type: ignore[attr-defined]
        for _ in range(7):
            before = [weights_of(part) for part in (module.q, module.actor, module.target_q, module.target_actor)]
            algorithm.learn("default_policy")  # type: ignore[attr-defined]
            after = [weights_of(part) for part in (module.q, module.actor, module.target_q, module.target_actor)]
            moved.append([not same(*pair) for pair in zip(before, after, strict=True)])
    assert moved == [[True, *[update % delay == 0] * 3] for update in range(1, 8)]


def test_targets_wait_for_target_network_update_freq() -> None:
    with quick(policy_delay=1, target_network_update_freq=200).build() as algorithm:
        module: Any = algorithm.get_module()
        first = weights_of(module.target_actor)
        algorithm.train()
        for _ in range(2):
            algorithm.train()
        assert same(first, weights_of(module.target_actor))
        for _ in range(2):
            algorithm.train()
        assert not same(first, weights_of(module.target_actor))


def test_actions_are_even_until_learning_starts() -> None:
    with quick().build() as algorithm:
        for _ in range(2):
            algorithm.train()
        actions = algorithm.local_replay_buffer.sample(100)["actions"]
    assert np.abs(actions).max() <= 1 and actions.std() == pytest.approx(0.55, abs=0.12)


def test_ddpg_is_td3_with_other_settings(tmp_path: Any) -> None:
    ddpg = DDPGConfig()
    assert (ddpg.twin_q, ddpg.policy_delay, ddpg.target_noise, ddpg.algo_name) == (False, 1, 0.0, "DDPG")
    with quick(DDPGConfig).build() as algorithm:
        for _ in range(3):
            algorithm.train()
        module: Any = algorithm.get_module()
        assert len(module.q) == 1
        obs = np.zeros(2, np.float32)
        expected = algorithm.compute_single_action(obs, explore=False)
        algorithm.save(tmp_path / "saved")
    with Algorithm.from_checkpoint(tmp_path / "saved") as restored:
        assert type(restored).__name__ == "DDPG"
        np.testing.assert_array_equal(restored.compute_single_action(obs, explore=False), expected)


@pytest.mark.parametrize("kind", ["GaussianNoise", "OrnsteinUhlenbeckNoise", "ParameterNoise", "StochasticSampling"])
def test_explorations_change_actions_and_no_exploration_changes_none(kind: str) -> None:
    config = quick().exploration(exploration_config={"type": kind, "random_timesteps": 0})
    with config.build() as algorithm:
        obs = np.array([[0.3, -0.2]], np.float32)
        plain = algorithm.compute_actions(obs, explore=False)
        rollouts = algorithm.sample(20)
        obs_seen, actions = (
            np.concatenate([getattr(part, name)[:1, 0] for part in rollouts]) for name in ("obs", "actions")
        )
        chosen = algorithm.get_module().policy(torch.from_numpy(obs_seen)).detach().numpy()
        assert (np.abs(actions - chosen).max() > 1e-6) == (kind != "StochasticSampling")
        np.testing.assert_array_equal(algorithm.compute_actions(obs, explore=False), plain)


def freeze_actor(module: TD3Module) -> None:
    module.actor.requires_grad_(False)


def test_a_frozen_actor_stays() -> None:
    with quick(policy_delay=1).build() as algorithm:
        algorithm.learner_group.foreach_module("default_policy", freeze_actor)
        module: Any = algorithm.get_module()
        before, critics = weights_of(module.actor), weights_of(module.q)
        for _ in range(3):
            algorithm.train()
        assert same(before, weights_of(module.actor)) and not same(critics, weights_of(module.q))


@pytest.mark.parametrize("engine", ["local", pytest.param("process", marks=pytest.mark.slow)])
def test_runners_of_an_engine_sample_for_it(engine: str) -> None:
    config = quick().env_runners(num_env_runners=2, num_envs_per_env_runner=2).engine(engine)
    with config.build() as algorithm:
        for _ in range(4):
            metrics = learner_metrics_of(algorithm.train())
    assert np.isfinite(metrics["actor_loss"])


class Shared(gym.Env[Any, Any]):
    """One agent's part of an env of several: an action equal to the observation is best."""

    observation_space: Any = spaces.Box(-1, 1, (2,), np.float32)
    action_space: Any = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, config: Any = None) -> None:
        self._env = IdentityEnv({"space": "box"})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._env.reset(seed=seed)

    def step(self, action: Any) -> Any:
        return self._env.step(action)


def test_several_agents_have_delays_of_their_own() -> None:
    config = quick(num_steps_sampled_before_learning_starts=32).environment(
        make_multi_agent(Shared), env_config={"num_agents": 2}
    )
    config.multi_agent(
        policies={"a", "b"},
        policy_mapping_fn=lambda agent, episode: "ab"[int(agent)],
        algorithm_config_overrides_per_module={"b": {"policy_delay": 1}},
    )
    with config.build() as algorithm:
        for _ in range(2):
            result = algorithm.train()
        one, other = (result["learners"][name] for name in "ab")
        assert algorithm.get_state()["attributes"]["num_updates"].keys() == {"a", "b"}
    assert np.isfinite([one["actor_loss"], other["actor_loss"]]).all()


def test_errors_become_priorities() -> None:
    config = quick(replay_buffer_config={"type": "prioritized", "capacity": 1000, "beta": 1.0})
    with config.build() as algorithm:
        for _ in range(3):
            metrics = learner_metrics_of(algorithm.train())
        batch = algorithm.local_replay_buffer.sample(64, beta=1.0)  # type: ignore[attr-defined]
    assert len(np.unique(batch["weights"])) > 10
    assert metrics["td_error_mean"] > 0


def test_each_group_has_its_learning_rate() -> None:
    config = quick(actor_lr=[(0, 1e-3), (200, 0.0)], critic_lr=2e-3, policy_delay=1)
    with config.build() as algorithm:
        *_, metrics = (learner_metrics_of(algorithm.train()) for _ in range(3))
    # Means over the updates of the third iteration, after 101 to 150 env steps.
    assert metrics["actor_optimizer_learning_rate"] == pytest.approx(1e-3 * (1 - 125.5 / 200))
    assert metrics["critic_optimizer_learning_rate"] == 2e-3
    assert quick().lrs(10) == {"actor": 5e-3, "critic": 5e-3}


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-np.inf, np.inf, (2,), np.float32),
        spaces.Box(0, 5, (2,), np.int64),
        spaces.Discrete(3),
        spaces.MultiBinary(3),
    ],
    ids=str,
)
def test_action_spaces_that_do_not_fit_are_refused(space: spaces.Space[Any]) -> None:
    with pytest.raises(ConfigError, match=r"Box of floats whose bounds are all finite.*use .*PPO\."):
        TD3Module(OBS, space, {})
    if isinstance(space, spaces.Discrete):
        with pytest.raises(ConfigError, match="TD3 and DDPG take a Box"):
            quick().environment(IdentityEnv, env_config={"space": "discrete"}).build()


def test_images_and_dicts_are_observations_too() -> None:
    for obs in (
        spaces.Box(0, 255, (12, 12, 3), np.uint8),
        spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2,), np.float32)}),
    ):
        module = TD3Module(obs, BOX, {"fcnet_hiddens": [8], "conv_features": 8})
        assert Inference(module).backend == "torch"
        assert [shape for _, _, shape in module.outputs(_two(obs))][:2] == [(2,), (2,)]


def _two(space: spaces.Space[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _two(part) for key, part in space.items()}
    return torch.from_numpy(np.stack([space.sample(), space.sample()]))
