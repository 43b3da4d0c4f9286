"""Critics over atoms in SAC and TD3: the losses against slow loops and closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from at_least import all_of
from corral import CQLConfig, SACConfig, TD3Config, TQCConfig
from corral.algorithms.sac import sac_loss
from corral.algorithms.td3 import td3_loss
from corral.errors import ConfigError
from corral.modules.categorical_critics import CategoricalSACModule, CategoricalTD3Module
from corral.modules.critics import AtomHead
from corral.modules.sac_module import SACModule
from corral.modules.td3_module import TD3Module
from corral.testing import BitFlippingEnv

OBS = spaces.Box(-1, 1, (3,), np.float32)
PLANE = spaces.Box(-2, 2, (2,), np.float32)
ATOMS = np.linspace(-3, 3, 7)


def make_module(cls: Any) -> Any:
    torch.manual_seed(0)
    extra = {"initial_alpha": 0.3} if cls is CategoricalSACModule else {}
    module = cls(OBS, PLANE, {"fcnet_hiddens": [16], "num_atoms": 7, "v_min": -3.0, "v_max": 3.0, **extra})
    with torch.no_grad():  # the targets are others than the networks
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return module


def make_batch(size: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    batch = {name: normal(size, 2) for name in ("actions", "noise", "next_noise")}
    batch |= {"obs": normal(size, 3), "next_obs": normal(size, 3), "rewards": 2 * normal(size)}
    batch |= {"discounts": torch.full((size,), 0.9), "weights": torch.rand(size, generator=generator) + 0.5}
    return {**batch, "terminated": torch.arange(size) % 3 == 0}


def slow_softmax(logits: torch.Tensor) -> NDArray[np.float64]:
    exps = np.exp(logits.detach().numpy().astype(np.float64))
    probs: NDArray[np.float64] = exps / exps.sum()
    return probs


def slow_target(row: dict[str, torch.Tensor], probs: NDArray[np.float64], cost: float) -> NDArray[np.float64]:
    """Return the projected target of one transition: each atom moves, and is shared by its two neighbours."""
    target = np.zeros(len(ATOMS))
    for atom, prob in zip(ATOMS, probs, strict=True):
        value = float(row["rewards"]) + (0.0 if row["terminated"] else 0.9 * (atom - cost))
        value = min(max(value, -3.0), 3.0)
        for index, other in enumerate(ATOMS):
            target[index] += prob * max(0.0, 1 - abs(value - other))  # the atoms are 1 apart
    return target


def rows_of(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: column[i : i + 1] for name, column in batch.items()} for i in range(len(batch["rewards"]))]


@torch.no_grad()
def test_the_losses_of_sac_match_a_slow_loop() -> None:
    module, batch = make_module(CategoricalSACModule), make_batch()
    total, reported = sac_loss(module, batch, {}, target_entropy=None)
    alpha, critic_loss, actor_loss, entropy, td_errors = float(module.log_alpha.exp()), 0.0, 0.0, 0.0, []
    for row in rows_of(batch):
        next_action, next_logp = module.sample(row["next_obs"], row["next_noise"])
        nexts = [slow_softmax(critic(row["next_obs"], next_action)[0]) for critic in module.target_q]
        lowest = min(nexts, key=lambda probs: float(probs @ ATOMS))
        target = slow_target(row, lowest, alpha * float(next_logp))
        taken = [slow_softmax(critic(row["obs"], row["actions"].tanh())[0]) for critic in module.q]
        critic_loss -= float(row["weights"]) * sum(float(target @ np.log(probs)) for probs in taken) / 6
        td_errors.append(np.mean([abs((target - probs) @ ATOMS) for probs in taken]))
        action, logp = module.sample(row["obs"], row["noise"])
        value = min(float(slow_softmax(critic(row["obs"], action)[0]) @ ATOMS) for critic in module.q)
        actor_loss += (alpha * float(logp) - value) / 6
        entropy -= float(logp) / 6
    expected = [critic_loss, actor_loss, float(module.log_alpha) * (entropy + 2.0)]
    assert [float(reported[f"{name}_loss"]) for name in ("critic", "actor", "alpha")] == pytest.approx(expected, 1e-4)
    assert total.item() == pytest.approx(sum(expected), rel=1e-4)
    np.testing.assert_allclose(reported["td_error"], td_errors, rtol=1e-4)


@torch.no_grad()
def test_the_losses_of_td3_match_a_slow_loop() -> None:
    module, batch = make_module(CategoricalTD3Module), make_batch()
    settings: Any = {"target_noise": 0.4, "target_noise_clip": 0.5}
    losses, reported = td3_loss(module, batch, {"actor_coeff": 1.0}, **settings)
    critic_loss, actor_loss = 0.0, 0.0
    for row in rows_of(batch):
        noise = (0.4 * row["next_noise"]).clamp(-0.5, 0.5)
        next_action = (module.target_actor(row["next_obs"]).tanh() + noise).clamp(-1, 1)
        nexts = [slow_softmax(critic(row["next_obs"], next_action)[0]) for critic in module.target_q]
        target = slow_target(row, min(nexts, key=lambda probs: float(probs @ ATOMS)), 0.0)
        taken = [slow_softmax(critic(row["obs"], row["actions"])[0]) for critic in module.q]
        critic_loss -= float(row["weights"]) * sum(float(target @ np.log(probs)) for probs in taken) / 6
        actor_loss -= float(slow_softmax(module.q[0](row["obs"], module.actor(row["obs"]).tanh())[0]) @ ATOMS) / 6
    assert losses["critic"].item() == pytest.approx(critic_loss, rel=1e-4)
    assert losses["actor"].item() == pytest.approx(actor_loss, rel=1e-4)
    without, _ = td3_loss(module, batch, {"actor_coeff": 0.0}, **settings)
    assert without.keys() == {"critic"} and reported.keys() >= {"critic_loss", "actor_loss", "td_error"}


@pytest.mark.parametrize("cls", [CategoricalSACModule, CategoricalTD3Module])
def test_each_loss_has_gradients_in_its_own_group(cls: Any) -> None:
    module, batch = make_module(cls), make_batch()
    outputs: dict[str, torch.Tensor] = {}
    groups = module.parameter_groups()
    if cls is CategoricalSACModule:
        total, _ = sac_loss(module, batch, {}, target_entropy=-1.0, outputs=outputs)
        of_actor = torch.autograd.grad(outputs["actor_loss"], groups["actor"], retain_graph=True)
        total.backward()  # type: ignore[no-untyped-call]
        for parameter, gradient in zip(groups["actor"], of_actor, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    else:
        losses, _ = td3_loss(module, batch, {"actor_coeff": 0.0}, target_noise=0.2, target_noise_clip=0.5)
        losses["critic"].backward()  # type: ignore[no-untyped-call]
        assert all_of(parameter.grad is None for parameter in groups["actor"])
    assert all_of(parameter.grad is not None for parameter in groups["critic"])
    assert all_of(parameter.grad is None for parameter in module.target_q.parameters())


def test_a_terminated_step_has_the_reward_as_its_target() -> None:
    batch = {
        "rewards": torch.tensor([0.5, 0.25, 9.0]),
        "discounts": torch.tensor([0.9, 0.9, 0.9]),
        "terminated": torch.tensor([True, True, True]),
    }
    outputs = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    found = AtomHead(5, -1, 1).targets(batch, outputs, torch.full((3,), 7.0))
    expected = [[0, 0, 0, 1, 0], [0, 0, 0.5, 0.5, 0], [0, 0, 0, 0, 1]]
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (TQCConfig().training(num_atoms=11), "num_atoms=11 has no effect without SAC, TD3 or DDPG"),
        (CQLConfig().offline_data(input_="data").training(num_atoms=11), "num_atoms=11 has no effect without SAC, TD3"),
        (SACConfig().training(v_min=-2.0), "v_min=-2.0 has no effect without num_atoms above 1"),
        (SACConfig().training(num_atoms=11, v_min=5.0), r"v_min=5.0 must be below v_max=5.0"),
        (TD3Config().training(num_atoms=11, v_max=-5.0), r"v_min=-5.0 must be below v_max=-5.0"),
        (
            SACConfig().training(num_atoms=11, td_error_loss_fn="huber"),
            "td_error_loss_fn='huber' has no effect without",
        ),
        (
            SACConfig().training(num_atoms=11).rl_module(model_config={"use_lstm": True}),
            "num_atoms=11: modules with memory learn the mean return",
        ),
    ],
)
def test_contradictions_are_refused(config: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config.environment("Pendulum-v1").build()


@pytest.mark.parametrize("base", [SACConfig, TD3Config])
def test_a_class_of_the_user_has_atoms_if_its_base_has(base: Any) -> None:
    plain, categorical = (SACModule, CategoricalSACModule) if base is SACConfig else (TD3Module, CategoricalTD3Module)

    def config(parent: Any, **training: Any) -> Any:
        own = type("Own", (parent,), {})
        found: Any = base().environment("Pendulum-v1").training(**training)
        return found.rl_module(module_class=own, model_config={"architecture": "simba_v2", "fcnet_hiddens": [8]})

    with pytest.raises(ConfigError, match=r"num_atoms=11: the critics of module_class=Own give no logits: subclass"):
        config(plain, num_atoms=11).build()
    with config(categorical).build() as algo:
        assert len(algo.get_module().atoms) == 101
    with config(plain).build() as algo:
        assert not hasattr(algo.get_module(), "atoms")


def test_discrete_actions_learn_the_mean() -> None:
    config = SACConfig().environment(BitFlippingEnv).rl_module(model_config={"fcnet_hiddens": [8]})
    with pytest.raises(ConfigError, match=r"critics over atoms take a Box of floats.*set num_atoms=1"):
        config.copy(num_atoms=11).build()
    with config.copy(num_atoms=1).build() as algo:
        assert type(algo.get_module()).__name__ == "SACModule"


@pytest.mark.slow
@pytest.mark.parametrize("base", [SACConfig, TD3Config])
def test_pendulum_is_swung_up(base: Any) -> None:
    """With SimbaV2's blocks, atoms and scaled rewards, within 10,000 steps; random actions have returns of -1,200."""
    config: Any = base().environment("Pendulum-v1").debugging(seed=0)
    config.rl_module(model_config={"architecture": "simba_v2", "fcnet_hiddens": [64]})
    config.training(num_steps_sampled_before_learning_starts=500, train_batch_size_per_learner=64, lr=1e-3)
    if base is SACConfig:
        config.training(initial_alpha=0.01)
    config.reporting(min_sample_timesteps_per_iteration=1000)
    config.evaluation(evaluation_duration=10)
    returns = []
    with config.build() as algo:
        while len(returns) < 10 and max(returns, default=-1200) < -300:
            algo.train()
            returns.append(algo.evaluate()["env_runners"]["episode_return_mean"])
    assert returns[-1] > -300
