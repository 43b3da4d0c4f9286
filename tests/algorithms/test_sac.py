"""SAC's losses on batches worked out by hand, its module, and what it learns."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from small_configs import small_config
from torch import Tensor, nn

from at_least import all_of, at_least
from corral import SACConfig
from corral.algorithms.algorithm import Algorithm
from corral.algorithms.sac import sac_loss
from corral.errors import ConfigError
from corral.modules.distributions import SquashedGaussian
from corral.modules.inference import Inference
from corral.modules.networks import LogStdClamp
from corral.modules.sac_module import SACModule

OBS = spaces.Box(-1, 1, (3,), np.float32)
BOX = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 1], np.float32))
DISCRETE = spaces.Discrete(4)
ACTION_SPACES = {"box": BOX, "discrete": DISCRETE}
SMALL = {"fcnet_hiddens": [16, 16]}


def make_module(space: spaces.Space[Any], seed: int = 0, **model_config: Any) -> SACModule:
    torch.manual_seed(seed)
    module = SACModule(OBS, space, {**SMALL, "initial_alpha": 0.3, **model_config})
    with torch.no_grad():
        for parameter in [*module.actor.parameters(), *module.target_q.parameters()]:
            parameter.add_(0.3 * torch.randn_like(parameter))  # outputs that differ, from observation to observation
    return module


def make_batch(space: spaces.Space[Any], size: int = 7, **columns: Any) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(3)
    normal = {name: rng.standard_normal((size, 3), dtype=np.float32) for name in ("obs", "next_obs")}
    if isinstance(space, spaces.Discrete):
        actions: dict[str, Any] = {"actions": rng.integers(0, 4, size)}
    else:
        names = ("actions", "noise", "next_noise")
        actions = {name: rng.standard_normal((size, 2), dtype=np.float32) for name in names}
    return {
        **normal,
        **actions,
        "rewards": rng.standard_normal(size, dtype=np.float32),
        "terminated": np.arange(size) % 3 == 0,
        "truncated": np.arange(size) % 3 == 1,
        "discounts": np.full(size, 0.9, np.float32),
        "weights": rng.uniform(0.5, 1, size).astype(np.float32),
        **columns,
    }


def tensors(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(column) for name, column in batch.items()}


def with_gradients(module: SACModule) -> dict[str, Tensor]:
    """Give all trained parameters gradients, as a learner does, and return them by name."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


class Known(nn.Module):
    """A critic that says a number, plus what a slope makes of the actions."""

    def __init__(self, value: float, slope: float = 0.0) -> None:
        super().__init__()
        self.number, self.slope = nn.Parameter(torch.tensor(value)), nn.Parameter(torch.tensor(slope))

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        return self.number + self.slope * actions.sum(-1)


class KnownModule(SACModule):
    """Critics that say 5 and 3, with targets 50 and 30, and a policy of mean 0 and deviation 1."""

    def make_actor(self) -> nn.Module:
        layer = nn.Linear(3, 2 * 2)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer

    def make_critic(self) -> nn.Module:
        return Known(5.0)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        with torch.no_grad():
            for critic, target, value in zip(self.q, self.target_q, (5.0, 3.0), strict=True):
                critic.number.fill_(value)
                target.number.fill_(10 * value)


def test_only_a_termination_leaves_the_next_value_out() -> None:
    # 1 step, a termination; 1 step, a truncation; 3 steps, whose rewards the buffer has summed.
    batch = make_batch(
        BOX,
        3,
        rewards=np.array([1, 2, 3], np.float32),
        terminated=np.array([True, False, False]),
        truncated=np.array([False, True, False]),
        discounts=np.array([0.9, 0.9, 0.9**3], np.float32),
        weights=np.array([1, 0.5, 2], np.float32),
    )
    module = KnownModule(OBS, BOX, {"initial_alpha": 0.2})
    _, reported = sac_loss(module, tensors(batch), {}, target_entropy=None)
    squashed = np.tanh(batch["next_noise"].astype(np.float64))
    logp = (-0.5 * batch["next_noise"] ** 2 - 0.5 * math.log(2 * math.pi) - np.log(1 - squashed**2)).sum(-1)
    targets = batch["rewards"] + np.array([0, 0.9, 0.9**3]) * (30 - 0.2 * logp)
    errors = np.array([5.0, 3.0])[:, None] - targets
    np.testing.assert_allclose(reported["td_error"], np.abs(errors).mean(0), rtol=1e-5)
    critic_loss = 0.5 * (batch["weights"] * errors**2).mean(1).sum()
    assert reported["critic_loss"].item() == pytest.approx(critic_loss, rel=1e-5)
    assert [reported[name].item() for name in ("qf_mean", "qf_min", "qf_max")] == [4, 3, 5]


def test_the_density_matches_the_squashed_action() -> None:
    distribution = SquashedGaussian(BOX)
    inputs = torch.tensor([[0.3, -1.0, 0.2, -0.5], [4.0, 0.0, 1.0, -3.0]])
    noise = torch.tensor([[0.5, -2.0], [1.0, 0.1]])
    actions, logp = distribution.squashed_sample(inputs, noise)
    mean, log_std = inputs.double().chunk(2, -1)
    reference = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, log_std.exp()), torch.distributions.TanhTransform()
    )
    exact = (mean + log_std.exp() * noise).tanh()
    np.testing.assert_allclose(actions, exact, rtol=1e-5)
    np.testing.assert_allclose(logp, reference.log_prob(exact).sum(-1), rtol=1e-3)
    np.testing.assert_allclose(logp, distribution.logp(inputs, mean.float() + log_std.float().exp() * noise), rtol=1e-4)


def reference_losses(module: SACModule, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the three losses, each with a whole graph, written as the papers write them."""
    alpha, not_over = module.log_alpha.exp(), ~batch["terminated"]
    if module.is_discrete:
        next_probs = module.policy(batch["next_obs"]).softmax(-1)
        probs = module.policy(batch["obs"]).softmax(-1)
        q_1, q_2 = (critic(batch["obs"]) for critic in module.q)
        next_q = torch.min(*(critic(batch["next_obs"]) for critic in module.target_q))
        next_value = (next_probs * (next_q - alpha * next_probs.log())).sum(-1)
        rows, taken = torch.arange(len(probs)), batch["actions"]
        values = [q_1[rows, taken], q_2[rows, taken]]
        actor_loss = (probs * (alpha * probs.log() - torch.min(q_1, q_2))).sum(-1).mean()
        entropy, target_entropy = -(probs * probs.log()).sum(-1).mean(), 0.5 * math.log(4)
    else:
        actions, logp = module.sample(batch["obs"], batch["noise"])
        next_actions, next_logp = module.sample(batch["next_obs"], batch["next_noise"])
        next_q = torch.min(*(critic(batch["next_obs"], next_actions) for critic in module.target_q))
        next_value = next_q - alpha * next_logp
        values = [critic(batch["obs"], batch["actions"].tanh()) for critic in module.q]
        actor_loss = (alpha * logp - torch.min(*(critic(batch["obs"], actions) for critic in module.q))).mean()
        entropy, target_entropy = -logp.mean(), -2.0
    targets = (batch["rewards"] + batch["discounts"] * not_over * next_value).detach()
    critic_loss = sum(0.5 * (batch["weights"] * (value - targets) ** 2).mean() for value in values)
    alpha_loss = -module.log_alpha * (target_entropy - entropy).detach()
    assert isinstance(critic_loss, Tensor)
    return {"actor": actor_loss, "critic": critic_loss, "alpha": alpha_loss}


@pytest.mark.parametrize("space", ACTION_SPACES.values(), ids=ACTION_SPACES)
def test_each_group_of_parameters_gets_the_gradient_of_its_own_loss_alone(space: spaces.Space[Any]) -> None:
    module, batch = make_module(space), make_batch(space)
    gradients = with_gradients(module)
    loss, reported = sac_loss(module, tensors(batch), {}, target_entropy=None)
    loss.backward()  # type: ignore[no-untyped-call]
    groups, references = module.parameter_groups(), reference_losses(module, tensors(batch))
    for name, reference in references.items():
        assert reported[f"{name}_loss"].item() == pytest.approx(reference.item(), rel=1e-4)
        expected = torch.autograd.grad(reference, groups[name], retain_graph=True)
        for parameter, gradient in zip(groups[name], expected, strict=True):
            assert parameter.grad is not None
            np.testing.assert_allclose(parameter.grad, gradient, rtol=1e-3, atol=1e-6)
    # They would mix, if they could: the actor's loss depends on the critics, and the critics' on the temperature.
    mixed = torch.autograd.grad(references["actor"], [*groups["critic"], *groups["alpha"]], allow_unused=True)
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in at_least(1, mixed[1:3]))
    assert not any(name.startswith("target_q") for name in gradients)
    assert all_of(parameter.requires_grad for parameter in module.q.parameters())


def test_discrete_values_are_sums_over_actions() -> None:
    module, batch = make_module(DISCRETE), make_batch(DISCRETE, 5, terminated=np.zeros(5, bool))
    with torch.no_grad():
        logits = module.policy(torch.from_numpy(batch["next_obs"])).double().numpy()
        first, second = module.q_values(torch.from_numpy(batch["next_obs"]), target=True).double().numpy()
        taken = module.q_values(torch.from_numpy(batch["obs"])).numpy()
        _, reported = sac_loss(module, tensors(batch), {}, target_entropy=None)
    for row in range(5):
        probabilities = np.exp(logits[row]) / np.exp(logits[row]).sum()
        value = 0.0
        for action, p in enumerate(probabilities):
            value += p * (min(first[row, action], second[row, action]) - 0.3 * math.log(p))
        target = batch["rewards"][row] + 0.9 * value
        errors = [abs(taken[critic, row, batch["actions"][row]] - target) for critic in range(2)]
        assert reported["td_error"][row].item() == pytest.approx(np.mean(errors), rel=1e-4)


@pytest.mark.parametrize("space", ACTION_SPACES.values(), ids=ACTION_SPACES)
@pytest.mark.parametrize(("by", "rises"), [(0.5, True), (-0.5, False)])
def test_the_temperature_rises_where_there_is_too_little_entropy(
    space: spaces.Space[Any], by: float, rises: bool
) -> None:
    module, batch = make_module(space), tensors(make_batch(space))
    entropy = sac_loss(module, batch, {}, target_entropy=None)[1]["entropy"].item()
    sac_loss(module, batch, {}, target_entropy=entropy + by)[0].backward()  # type: ignore[no-untyped-call]
    assert module.log_alpha.grad is not None
    assert module.log_alpha.grad.item() == pytest.approx(-by, rel=1e-4)  # a descent goes the other way
    assert (module.log_alpha - 0.1 * module.log_alpha.grad > module.log_alpha).item() is rises


@pytest.mark.parametrize("space", ACTION_SPACES.values(), ids=ACTION_SPACES)
@pytest.mark.parametrize("setting", ["mse", "huber"])
def test_the_loss_of_the_critics_is_the_one_of_the_config(space: spaces.Space[Any], setting: str) -> None:
    module, batch, outputs = make_module(space), make_batch(space), dict[str, Tensor]()
    batch["rewards"] = np.array([-9, -2, -0.5, 0, 0.5, 2, 9], np.float32)
    with quick(td_error_loss_fn=setting).build() as algorithm:
        _, reported = algorithm.make_loss(algorithm.config)(module, tensors(batch), {}, outputs=outputs)
    expected = 0.0
    for values in outputs["q_taken"].tolist():
        for weight, value, target in zip(batch["weights"], values, outputs["targets"].tolist(), strict=True):
            error = abs(value - target)
            is_linear = setting == "huber" and error > 1
            expected += weight * (error - 0.5 if is_linear else 0.5 * error**2) / 7
    assert reported["critic_loss"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("given", "aimed_at"), [("auto", -2.0), (-3.5, -3.5), (0.0, 0.0)])
def test_the_loss_has_the_target_entropy_of_the_config(given: Any, aimed_at: float) -> None:
    module, batch = make_module(BOX), tensors(make_batch(BOX))
    with quick(target_entropy=given).build() as algorithm:
        _, reported = algorithm.make_loss(algorithm.config)(module, batch, {})
    surplus = reported["entropy"].item() - aimed_at
    assert reported["alpha_loss"].item() == pytest.approx(math.log(0.3) * surplus, rel=1e-5)


def test_the_entropy_that_is_aimed_at() -> None:
    assert make_module(BOX).auto_target_entropy({}) == -2
    assert make_module(DISCRETE).auto_target_entropy({}) == pytest.approx(math.log(4) / 2)


def test_targets_follow_by_tau() -> None:
    module = make_module(BOX)
    before = [parameter.clone() for parameter in module.target_q.parameters()]
    module.update_target(0.25)
    for old, target, parameter in zip(before, module.target_q.parameters(), module.q.parameters(), strict=True):
        np.testing.assert_allclose(target.detach(), 0.75 * old + 0.25 * parameter.detach(), rtol=1e-5, atol=1e-7)
    module.update_target(1.0)
    for target, parameter in zip(module.target_q.parameters(), module.q.parameters(), strict=True):
        np.testing.assert_allclose(target.detach(), parameter.detach(), rtol=1e-6)


def test_targets_follow_buffers_that_are_assigned_again() -> None:
    module = make_module(BOX)
    for networks in (module.q, module.target_q):
        for critic in networks:
            critic.register_buffer("mean", torch.zeros(2))
    for number in (1.0, 2.0):
        for critic in module.q:
            critic.mean = torch.full((2,), number)
        module.update_target(0.1)
        assert all_of((critic.get_buffer("mean") == number).all() for critic in module.target_q)


def test_values_match_the_most_likely_action() -> None:
    obs = torch.from_numpy(make_batch(BOX)["obs"])
    module = make_module(BOX)
    mean = module.policy(obs)[:, :2]
    np.testing.assert_array_equal(
        module.value(obs).detach(), torch.min(*(critic(obs, mean.tanh()) for critic in module.q)).detach()
    )
    module = make_module(DISCRETE)
    best = module.policy(obs).argmax(-1)
    lower = torch.min(*(critic(obs) for critic in module.q))
    np.testing.assert_array_equal(module.value(obs).detach(), lower[torch.arange(len(obs)), best].detach())


def test_deviations_are_clamped_wherever_they_are_computed() -> None:
    module = make_module(BOX)
    with torch.no_grad():
        module.actor.get_parameter("head.0.bias").copy_(torch.tensor([50.0, -50.0, 9.0, -90.0]))
    obs = make_batch(BOX)["obs"]
    layers = [*module.actor.encoder.mlp, *module.actor.head]  # type: ignore[union-attr,misc]
    one_by_one = torch.from_numpy(obs)
    for layer in layers:
        one_by_one = layer(one_by_one)
    inference = Inference(module)
    assert inference.backend == "numpy"
    assert (one_by_one[:, :2].abs() > 40).all()
    np.testing.assert_array_equal(one_by_one[:, 2:].detach(), np.broadcast_to([2.0, -20.0], (7, 2)))
    for outputs in (inference(obs), module.policy(torch.from_numpy(obs)).detach()):
        np.testing.assert_allclose(outputs, one_by_one.detach(), rtol=1e-5)


def test_clamped_log_stds_have_no_gradient() -> None:
    inputs = torch.tensor([[30.0, -30.0, 1.0, -1.0], [0.0, 0.0, 2.5, -20.5]], requires_grad=True)
    weights = torch.arange(1.0, 9.0).reshape(2, 4)
    (LogStdClamp()(inputs) * weights).sum().backward()
    assert inputs.grad is not None
    np.testing.assert_array_equal(inputs.grad, [[1, 2, 3, 4], [5, 6, 0, 0]])


quick = partial(small_config, "SAC")


def greedy_return(algorithm: Algorithm, num_episodes: int) -> float:
    assert algorithm.env_runner is not None
    rollout = algorithm.env_runner.sample(num_episodes=num_episodes, explore=False)
    return float(rollout.rewards[rollout.valid].sum()) / num_episodes


def learner_metrics_of(result: dict[str, Any]) -> dict[str, float]:
    metrics: dict[str, float] = result["learners"]["default_policy"]
    return metrics


@pytest.mark.parametrize("space", ACTION_SPACES)
@pytest.mark.parametrize(("settings", "num_critics"), [({}, 2), ({"twin_q": True}, 2), ({"twin_q": False}, 1)])
def test_there_are_as_many_critics_as_the_config_says(space: str, settings: dict[str, Any], num_critics: int) -> None:
    with quick(space, **settings, num_steps_sampled_before_learning_starts=32).build() as algorithm:
        module: Any = algorithm.get_module()
        before = [copy.deepcopy(list(networks.parameters())) for networks in (*module.q, *module.target_q)]
        assert len(before) == 2 * num_critics
        algorithm.train()
        for old, network in zip(before, (*module.q, *module.target_q), strict=True):
            assert not any(map(torch.equal, old, network.parameters()))
        obs = torch.zeros(
            5, *module.observation_space.shape, dtype=torch.int64 if module.is_discrete else torch.float32
        )
        actions = None if module.is_discrete else torch.zeros(5, module.distribution.num_noise)
        assert module.q_values(obs, actions).shape[:2] == (num_critics, 5)


def test_actions_are_even_until_learning_starts() -> None:
    with quick().build() as algorithm:
        for _ in range(2):
            algorithm.train()
        actions = np.tanh(algorithm.local_replay_buffer.sample(64)["actions"])
    assert actions.std() == pytest.approx(1 / math.sqrt(3), abs=0.12)


def test_checkpoints_hold_it_all(tmp_path: Any) -> None:
    config = quick("discrete")
    with config.build() as algorithm:
        for _ in range(3):
            algorithm.train()
        algorithm.save(tmp_path / "one")
        noise_rng = algorithm.get_state()["attributes"]["noise_rng"]
        with Algorithm.from_checkpoint(tmp_path / "one") as restored:
            assert restored.get_state()["attributes"]["noise_rng"] == noise_rng
            for name, value in algorithm.get_module().state_dict().items():
                np.testing.assert_array_equal(restored.get_module().state_dict()[name], value)


def test_actions_now_and_next_are_drawn_with_independent_normal_noise() -> None:
    columns: list[Any] = []

    def note(train_batch: Any) -> None:
        columns.append((train_batch["noise"].copy(), train_batch["next_noise"].copy()))

    with quick().callbacks(on_learn_on_batch=note).build() as algorithm:
        for _ in range(3):
            algorithm.train()
    now, following = (np.concatenate(column).ravel() for column in zip(*columns, strict=True))
    assert len(now) > 500 and abs(np.corrcoef(now, following)[0, 1]) < 0.1
    assert [now.std(), following.std()] == pytest.approx([1, 1], abs=0.1)


def test_errors_become_priorities() -> None:
    config = quick(replay_buffer_config={"type": "prioritized", "capacity": 1000, "beta": 1.0})
    with config.build() as algorithm:
        for _ in range(4):
            metrics = learner_metrics_of(algorithm.train())
        batch = algorithm.local_replay_buffer.sample(64, beta=1.0)  # type: ignore[attr-defined]
    assert len(np.unique(batch["weights"])) > 10
    assert metrics["td_error_mean"] > 0
    losses = metrics["critic_loss"] + metrics["actor_loss"] + metrics["alpha_loss"]
    assert metrics["total_loss"] == pytest.approx(losses, abs=1e-4)


def test_the_buffer_is_as_large_as_the_papers_unless_the_config_says() -> None:
    assert SACConfig().replay_config.capacity == 1_000_000
    assert SACConfig().training(replay_buffer_config={"type": "prioritized"}).replay_config.capacity == 1_000_000
    assert quick().replay_config.capacity == 10_000


def test_each_group_has_its_learning_rate() -> None:
    config = quick(actor_lr=[(0, 1e-3), (200, 0.0)], critic_lr=2e-3, alpha_lr=0.0, initial_alpha=0.25)
    with config.build() as algorithm:
        *_, metrics = (learner_metrics_of(algorithm.train()) for _ in range(3))
        alpha = algorithm.get_module().log_alpha.exp().item()  # type: ignore[operator,union-attr]
    # Means over the updates of the third iteration, after 101 to 150 env steps.
    assert metrics["actor_optimizer_learning_rate"] == pytest.approx(1e-3 * (1 - 125.5 / 200))
    assert metrics["critic_optimizer_learning_rate"] == 2e-3
    assert metrics["alpha"] == alpha == pytest.approx(0.25)
    assert quick().lrs(10) == {"actor": 3e-3, "critic": 3e-3, "alpha": 3e-3}


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-np.inf, np.inf, (2,), np.float32),
        spaces.Box(np.array([0, 0], np.float32), np.array([1, np.inf], np.float32)),
        spaces.Box(0, 5, (2,), np.int64),
        spaces.MultiDiscrete([3, 2]),
        spaces.MultiBinary(3),
    ],
    ids=str,
)
def test_action_spaces_that_do_not_fit_are_refused(space: spaces.Space[Any]) -> None:
    with pytest.raises(ConfigError, match=r"Discrete actions, or a Box of floats whose bounds are all finite.*PPO"):
        SACModule(OBS, space, {})
    if isinstance(space, spaces.MultiDiscrete):
        with pytest.raises(ConfigError, match="Discrete actions, or a Box"):
            quick("multi_discrete").build()


class TwoInputs(SACModule):
    """Custom networks."""

    class MyCritic(nn.Module):
        def __init__(self, num_inputs: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(num_inputs, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 1))

        def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
            values: Tensor = self.layers(torch.cat([obs, actions], -1)).squeeze(-1)
            return values

    def make_critic(self) -> nn.Module:
        return self.MyCritic(self.observation_space.shape[0] + self.distribution.num_noise)  # type: ignore[index]


def test_a_custom_module_is_trained() -> None:
    with quick().rl_module(TwoInputs).build() as algorithm:
        for _ in range(3):
            metrics = learner_metrics_of(algorithm.train())
        module = algorithm.get_module()
        assert isinstance(module, TwoInputs)
        target, critic = (
            module.target_q[0].get_buffer("layers.1.running_mean"),
            module.q[0].get_buffer("layers.1.running_mean"),
        )
        assert (target == critic).all() and (critic != 0).any()
    assert metrics["critic_loss"] > 0
    with pytest.raises(ConfigError, match="SACModule"):
        quick().rl_module(nn.Linear).validate()


@pytest.mark.parametrize(
    ("space", "obs"),
    [
        (BOX, spaces.Box(0, 255, (12, 12, 3), np.uint8)),
        (BOX, spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2,), np.float32)})),
        (DISCRETE, spaces.Box(0, 255, (12, 12, 3), np.uint8)),
        (DISCRETE, spaces.Discrete(5)),
    ],
)
def test_other_observations(space: spaces.Space[Any], obs: spaces.Space[Any]) -> None:
    module = SACModule(obs, space, SMALL)
    samples = [obs.sample() for _ in range(4)]
    batch: dict[str, Any] = tensors(make_batch(space, 4))
    if isinstance(obs, spaces.Dict):
        batch["obs"] = {key: torch.as_tensor(np.stack([sample[key] for sample in samples])) for key in obs}
    else:
        batch["obs"] = torch.as_tensor(np.stack(samples))
    batch["next_obs"] = batch["obs"]
    loss, _ = sac_loss(module, batch, {}, target_entropy=None)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all_of(parameter.grad is not None for group in module.parameter_groups().values() for parameter in group)
    assert module.value(batch["obs"]).shape == (4,)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_pendulum_reaches_minus_200_within_20_000_steps(seed: int) -> None:
    with SACConfig().environment("Pendulum-v1").debugging(seed=seed).build() as algorithm:
        best = -np.inf
        while best < -200 and algorithm.num_env_steps_sampled_lifetime < 20_000:
            algorithm.train()
            if greedy_return(algorithm, 10) >= -180:
                best = greedy_return(algorithm, 50)
    assert best >= -200
