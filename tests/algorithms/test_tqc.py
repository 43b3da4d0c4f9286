"""TQC: the loss against closed forms and a slow loop, and what dropping quantiles does to overestimation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from at_least import all_of
from corral import TQCConfig
from corral.algorithms.sac import sac_loss
from corral.errors import ConfigError
from corral.modules.tqc_module import TQCModule, quantile_huber_loss

OBS = spaces.Box(-1, 1, (3,), np.float32)
PLANE = spaces.Box(-2, 2, (2,), np.float32)


def make_module(**settings: Any) -> TQCModule:
    torch.manual_seed(0)
    small = {"fcnet_hiddens": [16], "initial_alpha": 0.3, "num_critics": 3, "num_quantiles": 5}
    return TQCModule(OBS, PLANE, {**small, "num_dropped_quantiles": 2, **settings})


def make_batch(size: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    batch = {name: normal(size, 2) for name in ("actions", "noise", "next_noise")}
    batch |= {"obs": normal(size, 3), "next_obs": normal(size, 3), "rewards": 3 * normal(size)}
    batch |= {"discounts": torch.full((size,), 0.9), "weights": torch.rand(size, generator=generator) + 0.5}
    return {**batch, "terminated": torch.arange(size) % 3 == 0}


def slow_huber(error: float) -> float:
    return 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5


def slow_losses(module: TQCModule, batch: dict[str, torch.Tensor]) -> tuple[float, float, float]:
    """Return the losses of critics, actor and temperature, worked out one transition and quantile after another."""
    alpha, size = float(module.log_alpha.exp()), len(batch["rewards"])
    critic_loss = actor_loss = entropy = 0.0
    for i in range(size):
        row = {name: column[i : i + 1] for name, column in batch.items()}
        next_action, next_logp = module.sample(row["next_obs"], row["next_noise"])
        pool = sorted(float(q) for critic in module.target_q for q in critic(row["next_obs"], next_action)[0])
        pool = pool[: len(pool) - 2 * len(module.q)]
        target = [
            float(row["rewards"]) + (0.0 if row["terminated"] else 0.9 * (z - alpha * float(next_logp))) for z in pool
        ]
        losses = []
        for critic in module.q:
            for m, quantile in enumerate(critic(row["obs"], row["actions"].tanh())[0].tolist()):
                fraction = (2 * m + 1) / (2 * module.num_quantiles)
                losses += [abs(fraction - (y < quantile)) * slow_huber(y - quantile) for y in target]
        critic_loss += float(row["weights"]) * float(np.mean(losses)) / size
        action, logp = module.sample(row["obs"], row["noise"])
        values = [float(q) for critic in module.q for q in critic(row["obs"], action)[0]]
        actor_loss += (alpha * float(logp) - float(np.mean(values))) / size
        entropy -= float(logp) / size
    return critic_loss, actor_loss, float(module.log_alpha) * (entropy + 2.0)


def test_the_losses_match_a_slow_loop() -> None:
    module, batch = make_module(), make_batch()
    with torch.no_grad():  # the target critics are others than the critics
        for parameter in module.target_q.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    total, reported = sac_loss(module, batch, {}, target_entropy=None)
    with torch.no_grad():
        expected = slow_losses(module, batch)
    found = [float(reported[name]) for name in ("critic_loss", "actor_loss", "alpha_loss")]
    assert found == pytest.approx(expected, rel=1e-4)
    assert total.item() == pytest.approx(sum(expected), rel=1e-4)


def test_each_loss_has_gradients_in_its_own_group() -> None:
    module, batch = make_module(), make_batch()
    outputs: dict[str, torch.Tensor] = {}
    total, reported = sac_loss(module, batch, {}, target_entropy=-1.0, outputs=outputs)
    groups = module.parameter_groups()
    of_actor = torch.autograd.grad(outputs["actor_loss"], groups["actor"], retain_graph=True)
    total.backward()
    for parameter, gradient in zip(groups["actor"], of_actor, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert all_of(parameter.grad is not None for parameter in groups["critic"])
    assert all_of(parameter.grad is None for parameter in module.target_q.parameters())
    entropy = float(reported["entropy"])
    assert float(module.log_alpha.grad) == pytest.approx(entropy + 1.0, rel=1e-5)  # type: ignore[arg-type]


def test_the_loss_of_quantiles_has_its_lowest_point_at_the_quantiles() -> None:
    """Of 8 evenly spread samples, far apart next to Huber's 1, the 4 quantiles lie between their pairs."""
    samples = torch.arange(8.0)[None] * 100
    quantiles = torch.zeros(1, 1, 4, requires_grad=True)
    optimizer = torch.optim.Adam([quantiles], lr=2.0)
    for step in range(3000):
        optimizer.param_groups[0]["lr"] = 2.0 * (1 - step / 3000)
        optimizer.zero_grad()
        quantile_huber_loss(quantiles, samples).sum().backward()
        optimizer.step()
    # The fraction 1/8 is the boundary of the first and the second sample, and so on.
    found = quantiles.detach()[0, 0].tolist()
    assert all_of(100 * (2 * m) - 2 <= value <= 100 * (2 * m + 1) + 2 for m, value in enumerate(found))


def test_the_largest_quantiles_of_all_critics_together_are_dropped() -> None:
    module, batch = make_module(), make_batch()
    actions = batch["actions"].tanh()
    kept, all_ = module.kept_quantiles(batch["obs"], actions), module.quantiles(batch["obs"], actions)
    assert kept.shape == (6, 3 * (5 - 2)) and module.num_kept == 9
    for row in range(6):
        assert kept[row].tolist() == sorted(all_[:, row].flatten().tolist())[:9]
    torch.testing.assert_close(module.q_values(batch["obs"], actions), all_.mean(-1))


def test_dropping_more_quantiles_lowers_the_targets() -> None:
    """The more is dropped, the lower is what is expected of the same critics."""
    means = []
    for num_dropped in (0, 2, 4):
        module = make_module(num_dropped_quantiles=num_dropped)
        batch = make_batch(256)
        means.append(module.kept_quantiles(batch["next_obs"], batch["actions"].tanh()).mean().item())
    assert means[0] > means[1] > means[2]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"num_dropped_quantiles": 25}, "num_dropped_quantiles=25 leaves none of num_quantiles=25: drop fewer"),
        ({"twin_q": False}, "twin_q=False has no effect without SAC: TQC has num_critics"),
        ({"td_error_loss_fn": "huber"}, "td_error_loss_fn='huber' has no effect without SAC"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TQCConfig().environment("Pendulum-v1").training(**settings).build()


def test_other_actions_and_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="TQC takes a Box of floats"):
        TQCConfig().environment("CartPole-v1").build()
    with pytest.raises(ConfigError, match="use_lstm"):
        TQCConfig().environment("Pendulum-v1").rl_module(model_config={"use_lstm": True}).build()


@pytest.mark.slow
def test_pendulum_is_swung_up() -> None:
    config = TQCConfig().environment("Pendulum-v1").debugging(seed=0).learners(num_threads=1)
    config.training(num_steps_sampled_before_learning_starts=1000, lr=1e-3, gamma=0.98)
    config.rl_module(model_config={"fcnet_hiddens": [64, 64]})
    with config.build() as algorithm:
        for _ in range(12):
            result = algorithm.train()
            if result["env_runners"]["episode_return_mean"] > -300:
                break
        found = algorithm.evaluate()["env_runners"]["episode_return_mean"]
    assert found > -300


def test_the_value_is_the_mean_of_the_kept_quantiles_of_the_squashed_action() -> None:
    module = make_module()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3.0)
        obs = make_batch()["obs"] * 30
        means = module.policy(obs).chunk(2, -1)[0]
        assert means.abs().max() > 0.1
        expected = module.quantiles(obs, means.tanh()).transpose(0, 1).flatten(1).sort(-1).values[:, : module.num_kept]
        torch.testing.assert_close(module.value(obs), expected.mean(-1))
