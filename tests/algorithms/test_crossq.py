"""CrossQ: the losses against a slow reference, the passes that move statistics, and what is refused."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_tqc import OBS, PLANE, make_batch

from at_least import all_of, at_least
from corral import CrossQConfig
from corral.algorithms.crossq import crossq_loss
from corral.algorithms.imitation import with_imitation
from corral.errors import ConfigError
from corral.modules.batch_renorm import BatchRenorm
from corral.modules.crossq_module import CrossQModule
from corral.modules.inference import Inference

SMALL = {"fcnet_hiddens": [16], "critic_hiddens": [24, 24]}
BOTH = {"actor_coeff": 1.0}


def make_module(**settings: Any) -> CrossQModule:
    torch.manual_seed(0)
    small = {**SMALL, "initial_alpha": 0.3, "num_critics": 3, "renorm_momentum": 0.1, "renorm_warmup_updates": 4}
    return CrossQModule(OBS, PLANE, {**small, **settings})


def norms_of(network: torch.nn.Module) -> list[BatchRenorm]:
    return [layer for layer in network.modules() if isinstance(layer, BatchRenorm)]


class SlowNorm:
    """A batch renormalisation in NumPy."""

    def __init__(self, norm: BatchRenorm) -> None:
        self.mean, self.var = norm.mean.numpy().astype(float), norm.var.numpy().astype(float)
        self.count, self.norm = int(norm.num_batches), norm

    def __call__(self, x: np.ndarray, by_batch: bool) -> np.ndarray:
        weight, bias = self.norm.weight.detach().numpy(), self.norm.bias.detach().numpy()
        eps = self.norm.eps
        if not by_batch:
            return (x - self.mean) / np.sqrt(self.var + eps) * weight + bias
        mean, var = x.mean(0), x.var(0)
        r, d = np.ones(x.shape[1]), np.zeros(x.shape[1])
        if self.count >= self.norm.num_warmup_batches:
            r = np.clip(np.sqrt((var + eps) / (self.var + eps)), 1 / 3, 3)
            d = np.clip((mean - self.mean) / np.sqrt(self.var + eps), -5, 5)
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * mean
        self.var = 0.9 * self.var + 0.1 * var
        return ((x - mean) / np.sqrt(var + eps) * r + d) * weight + bias


class SlowNetwork:
    """A network of the default module in NumPy: normalise, multiply, and ReLU between the layers."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.norms = [SlowNorm(norm) for norm in norms_of(network)]
        found = [layer for layer in network.modules() if isinstance(layer, torch.nn.Linear)]
        self.layers = [(layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in found]

    def __call__(self, x: np.ndarray, by_batch: bool = False) -> np.ndarray:
        for index, (norm, (weight, bias)) in enumerate(zip(self.norms, self.layers, strict=True)):
            x = norm(x, by_batch) @ weight + bias
            if index < len(self.layers) - 1:
                x = np.maximum(x, 0)
        return x


def slow_sample(outputs: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Squashed Gaussian actions in [-1, 1], and their log-density there."""
    mean, log_std = np.split(outputs, 2, -1)
    log_std = np.clip(log_std, -20, 2)
    raw = mean + np.exp(log_std) * noise
    logp = (-0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - np.tanh(raw) ** 2)).sum(-1)
    return np.tanh(raw), logp


def slow_losses(
    actor: SlowNetwork, critics: list[SlowNetwork], batch: dict[str, np.ndarray], log_alpha: float
) -> tuple[float, float, float]:
    """Return the losses of critics, actor and temperature, and move the statistics of the networks."""
    alpha = np.exp(log_alpha)
    next_actions, next_logp = slow_sample(actor(batch["next_obs"]), batch["next_noise"])
    now, then = (
        np.hstack(pair) for pair in ((batch["obs"], np.tanh(batch["actions"])), (batch["next_obs"], next_actions))
    )
    values = [critic(np.vstack([now, then]), by_batch=True)[:, 0] for critic in critics]
    size = len(now)
    next_value = np.min([value[size:] for value in values], axis=0) - alpha * next_logp
    targets = batch["rewards"] + batch["discounts"] * ~batch["terminated"] * next_value
    critic_loss = sum(0.5 * (batch["weights"] * (value[:size] - targets) ** 2).mean() for value in values)
    actions, logp = slow_sample(actor(batch["obs"], by_batch=True), batch["noise"])
    lowest = np.min([critic(np.hstack([batch["obs"], actions]))[:, 0] for critic in critics], axis=0)
    return float(critic_loss), float((alpha * logp - lowest).mean()), float(log_alpha * (2.0 - logp.mean()))


def test_the_losses_and_the_statistics_match_a_slow_reference() -> None:
    """The same for eight batches: in the warm-up of four, and after it, when the statistics are used."""
    module = make_module()
    actor, critics = SlowNetwork(module.actor), [SlowNetwork(critic) for critic in module.q]
    for _ in range(8):
        batch = make_batch(16)
        losses, _ = crossq_loss(module, batch, BOTH, target_entropy=None)
        arrays = {name: column.numpy() for name, column in batch.items()}
        expected = slow_losses(actor, critics, arrays, module.log_alpha.item())
        found = [float(losses[name].detach()) for name in ("critic", "actor", "alpha")]
        assert found == pytest.approx(expected, rel=2e-3, abs=2e-3)
        for network, slow in ((module.actor, actor), *zip(module.q, critics, strict=True)):
            for norm, slow_norm in zip(norms_of(network), slow.norms, strict=True):
                np.testing.assert_allclose(norm.mean, slow_norm.mean, rtol=1e-3, atol=1e-4)
                np.testing.assert_allclose(norm.var, slow_norm.var, rtol=1e-3, atol=1e-4)
    assert int(norms_of(module.actor)[0].num_batches) == int(norms_of(module.q)[0].num_batches) == 8


def test_imitation_normalises_by_the_pass_of_the_actors_loss() -> None:
    """It moves no statistics of its own, and its gradient is the one of that pass."""
    plain, imitating, batch = make_module(), make_module(), make_batch(16)
    batch["recorded"] = (torch.arange(16) < 8) * 2.0  # rows per recorded row
    outputs: dict[str, torch.Tensor] = {}
    expected, _ = crossq_loss(plain, batch, BOTH, target_entropy=None, outputs=outputs)
    loss = with_imitation(partial(crossq_loss, target_entropy=None), in_values=True)
    found, reported = loss(imitating, batch, {**BOTH, "imitation_coeff": 2.0})
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(imitating.state_dict()[name], value)
    means = outputs["dist_inputs"].chunk(2, -1)[0].tanh()
    imitation = (means - batch["actions"].tanh())[:8].square().mean()
    torch.testing.assert_close(reported["imitation_loss"], imitation.detach())
    torch.testing.assert_close(found["actor"], expected["actor"] + 2.0 * imitation)
    torch.testing.assert_close(reported["mean_abs_q"], outputs["q_taken"].detach().abs().mean())


def test_targets_have_no_gradient_and_the_policys_values_are_differentiable() -> None:
    module, batch = make_module(), make_batch(16)
    outputs: dict[str, torch.Tensor] = {}
    losses, _ = crossq_loss(module, batch, BOTH, target_entropy=None, outputs=outputs)
    assert not outputs["targets"].requires_grad
    groups = module.parameter_groups()
    of_critics = torch.autograd.grad(losses["critic"], groups["actor"], allow_unused=True, retain_graph=True)
    assert all_of(gradient is None for gradient in of_critics)
    of_actor = torch.autograd.grad(losses["actor"], groups["actor"], retain_graph=True)
    assert all(gradient.abs().sum() > 0 for gradient in at_least(1, of_actor[-2:]))


def test_without_the_actors_turn_only_the_critics_move() -> None:
    module, batch = make_module(), make_batch(16)
    before = copy.deepcopy(module.actor.state_dict())
    losses, reported = crossq_loss(module, batch, {"actor_coeff": 0.0}, target_entropy=None)
    assert list(losses) == ["critic"] and "actor_loss" not in reported
    assert all_of(torch.equal(before[name], value) for name, value in module.actor.state_dict().items())
    assert int(norms_of(module.q)[0].num_batches) == 1


def test_the_critics_loss_may_be_hubers() -> None:
    module, batch = make_module(), make_batch(16)
    outputs: dict[str, torch.Tensor] = {}
    losses, _ = crossq_loss(module, batch, {"actor_coeff": 0.0}, target_entropy=None, huber=True, outputs=outputs)
    errors = outputs["q_taken"] - outputs["targets"]
    each = torch.nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")
    torch.testing.assert_close(losses["critic"], (batch["weights"] * each).mean(-1).sum())


def test_runners_act_by_the_running_statistics() -> None:
    module = make_module()
    for _ in range(20):
        crossq_loss(module, make_batch(16), BOTH, target_entropy=None)
    obs = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    slow = SlowNetwork(module.actor)
    inference = Inference(copy.deepcopy(module))
    assert inference.backend == "numpy"
    np.testing.assert_allclose(inference(obs), slow(obs), rtol=1e-4, atol=1e-5)


def test_the_actor_moves_every_third_update() -> None:
    config = CrossQConfig().environment("Pendulum-v1").rl_module(model_config=SMALL).debugging(seed=0)
    config.training(num_steps_sampled_before_learning_starts=40, train_batch_size_per_learner=16)
    config.reporting(min_sample_timesteps_per_iteration=1)
    moved = []
    with config.build() as algorithm:
        while len(moved) < 6:
            if len(moved) == 4:  # states hold the number of updates
                state = algorithm.get_state()
                algorithm._num_updates.clear()  # type: ignore[attr-defined]
                algorithm.set_state(state)
            before = copy.deepcopy(algorithm.get_module().state_dict())
            algorithm.train()
            after = algorithm.get_module().state_dict()
            changed = {name.split(".")[0] for name in after if not torch.equal(after[name], before[name])}
            if changed:
                moved.append(changed)
    assert moved == 2 * [{"q"}, {"q"}, {"q", "actor", "log_alpha"}]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tau": 0.01}, "tau=0.01 has no effect without SAC: CrossQ has no target networks"),
        ({"target_network_update_freq": 9}, "target_network_update_freq=9 has no effect without SAC"),
        ({"twin_q": False}, "twin_q=False has no effect without SAC: CrossQ has num_critics"),
    ],
)
def test_settings_of_targets_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        CrossQConfig().environment("Pendulum-v1").training(**settings).build()


def test_other_actions_and_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="CrossQ takes a Box of floats"):
        CrossQConfig().environment("CartPole-v1").build()
    with pytest.raises(ConfigError, match="use_lstm"):
        CrossQConfig().environment("Pendulum-v1").rl_module(model_config={"use_lstm": True}).build()


def test_observations_may_be_nested() -> None:
    space = spaces.Dict({"place": OBS, "kind": spaces.Discrete(3)})
    module = CrossQModule(space, PLANE, {**SMALL, "num_critics": 2})
    batch = make_batch(4)
    for name in ("obs", "next_obs"):
        batch[name] = {"place": batch[name], "kind": torch.arange(4) % 3}  # type: ignore[assignment]
    losses, _ = crossq_loss(module, batch, BOTH, target_entropy=None)
    assert all_of(torch.isfinite(loss) for loss in losses.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_pendulum_is_swung_up_after_few_steps(seed: int) -> None:
    """After 5,000 env steps, a third of what TQC is given in its test."""
    config = CrossQConfig().environment("Pendulum-v1").debugging(seed=seed).learners(num_threads=1)
    config.training(num_steps_sampled_before_learning_starts=1000, gamma=0.98)
    config.rl_module(model_config={"fcnet_hiddens": [64, 64], "critic_hiddens": [128, 128]})
    with config.build() as algorithm:
        for _ in range(5):
            algorithm.train()
        found = algorithm.evaluate()["env_runners"]["episode_return_mean"]
    assert found > -300
