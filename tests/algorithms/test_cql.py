"""CQL: the conservative loss against closed forms and a slow loop, and what it keeps the policy from."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral import Algorithm, CQLConfig
from corral.algorithms.cql import cql_loss
from corral.algorithms.sac import SACSettings, sac_loss
from corral.data.offline.episode_rows import rows_of_steps
from corral.errors import ConfigError
from corral.modules.cql_module import CQLModule
from corral.modules.sac_module import SACModule

OBS = spaces.Box(-1, 1, (2,), np.float32)
LINE = spaces.Box(-3, 3, (1,), np.float32)
THREE = spaces.Discrete(3)
CONSTANTS: dict[str, Any] = {"weight": 2.0, "temperature": 1.5, "threshold": None}


def cql(data: Any, actions: Any = THREE, make: Any = CQLConfig, **training: Any) -> Any:
    config = make().environment(observation_space=OBS, action_space=actions).offline_data(input_=data)
    config.debugging(seed=1).rl_module(model_config={"fcnet_hiddens": [32]}).learners(num_threads=1)
    small = {"lr": 5e-3, "num_updates_per_iteration": 300, "train_batch_size_per_learner": 128, "tau": 0.05}
    if make is CQLConfig:
        small["actor_lr"] = 5e-3
    return config.training(**{**small, **training})


def make_module(space: spaces.Space[Any], **settings: Any) -> CQLModule:
    torch.manual_seed(0)
    return CQLModule(OBS, space, {"fcnet_hiddens": [16], "initial_alpha": 0.3, **settings})


def make_batch(space: spaces.Space[Any], size: int = 6, num_actions: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    batch = {"obs": normal(size, 2), "next_obs": normal(size, 2), "rewards": normal(size)}
    batch |= {"discounts": torch.full((size,), 0.9), "weights": torch.rand(size, generator=generator) + 0.5}
    batch["terminated"] = torch.arange(size) % 3 == 0
    if isinstance(space, spaces.Discrete):
        return {**batch, "actions": torch.arange(size) % 3}
    batch |= {"actions": normal(size, 1), "noise": normal(size, 1), "next_noise": normal(size, 1)}
    uniform = torch.rand(size, num_actions, 1, generator=generator) * 2 - 1
    return {
        **batch,
        "uniform_actions": uniform,
        "action_noise": normal(size, num_actions, 1),
        "next_action_noise": normal(size, num_actions, 1),
    }


def slow_gaps(module: CQLModule, batch: dict[str, torch.Tensor], temperature: float) -> torch.Tensor:
    """Return the conservative loss of each critic, `[C]`, worked out one transition and action after another."""
    gaps = []
    for critic in module.q:
        of_rows = []
        for i in range(len(batch["rewards"])):
            obs, next_obs = batch["obs"][i : i + 1], batch["next_obs"][i : i + 1]
            if module.is_discrete:
                values = critic(obs)[0]
                taken, soft = values[batch["actions"][i]], (values / temperature).exp().sum().log()
            else:
                taken, terms = critic(obs, batch["actions"][i : i + 1].tanh())[0], []
                for j in range(batch["uniform_actions"].shape[1]):
                    terms.append(critic(obs, batch["uniform_actions"][i, j][None])[0] / temperature - math.log(0.5))
                    for at, name in ((obs, "action_noise"), (next_obs, "next_action_noise")):
                        action, logp = module.sample(at, batch[name][i, j][None])
                        terms.append(critic(obs, action.detach())[0] / temperature - logp[0].detach())
                soft = torch.stack(terms).exp().sum().log()
            of_rows.append(batch["weights"][i] * (temperature * soft - taken))
        gaps.append(torch.stack(of_rows).mean())
    return torch.stack(gaps)


@pytest.mark.parametrize("space", [LINE, THREE], ids=["box", "discrete"])
def test_the_loss_matches_sac_and_a_slow_loop(space: spaces.Space[Any]) -> None:
    module, batch = make_module(space), make_batch(space)
    base = partial(sac_loss, target_entropy=-1.0)
    total, reported = cql_loss(module, batch, {}, base_loss=base, **CONSTANTS)
    of_sac, _ = base(module, batch, {})
    gaps = slow_gaps(module, batch, 1.5)
    assert reported["conservative_loss"].item() == pytest.approx(gaps.mean().item(), rel=1e-4)
    expected = of_sac + 2.0 * gaps.sum()
    assert total.item() == pytest.approx(expected.item(), rel=1e-4)
    parameters = [each for group in module.parameter_groups().values() for each in group]
    found = torch.autograd.grad(total, parameters, retain_graph=True)
    for one, other in zip(found, torch.autograd.grad(expected, parameters, retain_graph=True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    # The conservative loss is of the critics alone.
    conservative = torch.autograd.grad(total - of_sac, parameters, allow_unused=True)
    groups = module.parameter_groups()
    others = {id(each) for name in ("actor", "alpha") for each in groups[name]}
    for parameter, gradient in zip(parameters, conservative, strict=True):
        assert id(parameter) not in others or gradient is None or float(gradient.abs().max()) < 1e-6


def test_with_many_actions_the_sum_is_the_integral_over_actions() -> None:
    """The mean over N actions of each kind estimates the integral of exp(Q), which a fine grid gives."""
    module, batch = make_module(LINE), make_batch(LINE, size=3, num_actions=20_000)
    outputs: dict[str, torch.Tensor] = {}
    base = partial(sac_loss, target_entropy=-1.0)
    cql_loss(module, batch, {}, base_loss=base, weight=1.0, temperature=1.0, threshold=None, outputs=outputs)
    grid = torch.linspace(-1, 1, 4001)[:, None]
    for i in range(3):
        for c, critic in enumerate(module.q):
            values = critic(batch["obs"][i].expand(4001, 2), grid)
            integral = torch.trapezoid(values.exp(), grid[:, 0]).log()
            found = outputs["soft_maxima"][c, i] - math.log(3 * 20_000)
            assert found.item() == pytest.approx(integral.item(), abs=0.03)


@pytest.mark.parametrize(("threshold", "grows"), [(-1.0, True), (50.0, False)])
def test_the_weight_grows_while_the_gap_is_too_large(threshold: float, grows: bool) -> None:
    module, batch = make_module(THREE, lagrangian=True), make_batch(THREE)
    base = partial(sac_loss, target_entropy=-1.0)
    assert module.log_cql_weight is not None
    with torch.no_grad():
        module.log_cql_weight.fill_(math.log(3.0))
    total, reported = cql_loss(module, batch, {}, base_loss=base, weight=2.0, temperature=1.5, threshold=threshold)
    (gradient,) = torch.autograd.grad(total, [module.log_cql_weight], retain_graph=True)
    gaps = slow_gaps(module, batch, 1.5)
    assert gradient.item() == pytest.approx(-2.0 * 3.0 * (gaps - threshold).sum().item(), rel=1e-4)
    assert (gradient.item() < 0) == grows  # the optimizer moves it against the gradient
    assert reported["conservative_weight"].item() == pytest.approx(6.0)
    critics = module.parameter_groups()["critic"]
    of_critics = torch.autograd.grad(total - base(module, batch, {})[0], critics)
    for one, other in zip(of_critics, torch.autograd.grad(6.0 * gaps.sum(), critics), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_deterministic_backups_have_no_entropy() -> None:
    for space in (LINE, THREE):
        module, batch = make_module(space), make_batch(space)
        targets = {}
        for with_entropy in (True, False):
            outputs: dict[str, torch.Tensor] = {}
            base = partial(sac_loss, target_entropy=-1.0, entropy_in_targets=with_entropy)
            cql_loss(module, batch, {}, base_loss=base, outputs=outputs, **CONSTANTS)
            targets[with_entropy] = outputs["targets"]
        if module.is_discrete:
            probs = module.policy(batch["next_obs"]).softmax(-1)
            value = (probs * module.q_values(batch["next_obs"], target=True).amin(0)).sum(-1)
        else:
            actions, _ = module.sample(batch["next_obs"], batch["next_noise"])
            value = module.q_values(batch["next_obs"], actions, target=True).amin(0)
        expected = batch["rewards"] + 0.9 * (~batch["terminated"]) * value
        torch.testing.assert_close(targets[False], expected)
        changed = (targets[True] - targets[False]).abs() > 1e-4
        assert torch.equal(changed, ~batch["terminated"])


@pytest.mark.parametrize("space", [LINE, THREE], ids=["box", "discrete"])
def test_at_first_the_actor_imitates(space: spaces.Space[Any]) -> None:
    module, batch = make_module(space), make_batch(space)
    base = partial(sac_loss, target_entropy=-1.0)
    if not module.is_discrete:
        batch["actions"][0] = 7.0  # before the tanh: at the bound, where the likelihood would grow without end
    total, reported = cql_loss(module, batch, {"imitates": 1.0}, base_loss=base, **CONSTANTS)
    if module.is_discrete:
        logps = module.policy(batch["obs"]).log_softmax(-1)
        own, recorded = (logps.exp() * logps).sum(-1), logps[torch.arange(6), batch["actions"]]
    else:
        own = module.sample(batch["obs"], batch["noise"])[1]
        recorded = module.distribution.logp(module.policy(batch["obs"]), batch["actions"].clamp(max=math.atanh(0.999)))
    expected = (0.3 * own - recorded).mean()
    assert reported["actor_loss"].item() == pytest.approx(expected.item(), rel=1e-4)
    actor = module.parameter_groups()["actor"]
    for one, other in zip(torch.autograd.grad(total, actor), torch.autograd.grad(expected, actor), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def one_sided(num_steps: int = 1500) -> dict[str, Any]:
    """One-step episodes in which action 2 was never taken: rewards 0 and 1 for the actions 0 and 1."""
    actions = np.random.default_rng(0).integers(0, 2, num_steps)
    zeros = np.zeros((num_steps, 2), np.float32)
    return {"obs": zeros, "actions": actions, "rewards": actions * 1.0, "terminated": np.ones(num_steps, bool)}


def test_actions_that_were_never_tried_have_lower_values() -> None:
    with cql(one_sided(), cql_weight=1.0).build() as algorithm:
        algorithm.train()
        module: Any = algorithm.get_module()
        values = module.q_values(torch.zeros(1, 2)).amin(0)[0].tolist()
        best = int(module.policy(torch.zeros(1, 2)).argmax(-1))
    assert values[2] < min(values[:2]) - 1 and best == 1


def test_the_values_of_a_bandit_are_the_closed_form() -> None:
    """Half the squared error and the soft maximum are least where q - r = w (p_data - softmax(q)) / p_data."""
    with cql(one_sided(), cql_weight=0.5, lr=1e-2).build() as algorithm:
        for _ in range(2):
            algorithm.train()
        values = algorithm.get_module().q_values(torch.zeros(1, 2)).mean(0)[0].detach().numpy()
    soft = np.exp(values) / np.exp(values).sum()
    expected = np.array([0.0, 1.0]) + 0.5 * (0.5 - soft[:2]) / 0.5
    np.testing.assert_allclose(values[:2], expected, atol=0.06)


# With discrete actions it is one of the runs of tests/rich_runs.py.
def test_training_with_box_actions_continues_exactly(tmp_path: Path) -> None:
    data = one_sided(60)
    data["actions"] = np.random.default_rng(1).uniform(-3, 3, (60, 1)).astype(np.float32)
    config = cql(data, LINE, num_updates_per_iteration=3, lagrangian=True, num_imitation_updates=5)
    with config.build() as algorithm:
        algorithm.train()
        path = algorithm.save(tmp_path / "checkpoint")
        expected = [algorithm.train()["learners"] for _ in range(2)]
    with Algorithm.from_checkpoint(path, input_=data) as restored:
        found = [restored.train()["learners"] for _ in range(2)]
    assert found == expected


def test_the_config_reaches_the_loss() -> None:
    config = cql(one_sided(60), num_updates_per_iteration=1, cql_weight=7.0, lagrangian=True, lagrangian_threshold=2.0)
    with config.build() as algorithm:
        result = algorithm.train()["learners"]["default_policy"]
    assert result["conservative_weight"] == pytest.approx(7.0)


def test_a_number_of_sampled_actions_that_has_no_effect_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    boxes = one_sided(30) | {"actions": np.zeros((30, 1), np.float32)}
    for data, space in ((boxes, LINE), (one_sided(30), THREE)):
        assert "num_sampled_actions" not in caplog.text
        cql(data, space, num_sampled_actions=3).build().stop()
    assert "num_sampled_actions=3 has no effect: CQL sums over all Discrete actions" in caplog.text


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="alpha_lr is the learning rate of the weight"):
        cql(one_sided(30), lagrangian=True, alpha_lr=0.0).build()
    with pytest.raises(ConfigError, match="CQL cannot train modules with memory"):
        cql(one_sided(30)).rl_module(model_config={"use_gru": True}).build()
    with pytest.raises(ConfigError, match="PlainModule of module 'default_policy' has no weight to adapt"):
        cql(one_sided(30), lagrangian=True).rl_module(module_class=PlainModule).build()
    assert issubclass(CQLConfig, SACSettings)


class PlainModule(SACModule):
    """SAC's module, without the weight of CQL."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        given = {name: value for name, value in model_config.items() if name != "lagrangian"}
        super().__init__(observation_space, action_space, given)


def test_the_actor_imitates_in_exactly_the_first_updates() -> None:
    seen: list[float] = []

    def watched(module: Any, batch: Any, coefficients: Any, default_loss: Any) -> Any:
        seen.append(coefficients["imitates"])
        return default_loss(module, batch, coefficients)[:2]

    rng = np.random.default_rng(0)
    data = {"obs": rng.normal(size=(40, 3)).astype(np.float32), "actions": rng.integers(0, 3, 40)}
    data |= {"rewards": rng.normal(size=40), "terminated": np.arange(40) % 8 == 7}
    config = (
        CQLConfig()
        .offline_data(input_=data)
        .environment(observation_space=spaces.Box(-9, 9, (3,), np.float32), action_space=spaces.Discrete(3))
    )
    config.training(num_imitation_updates=2, num_updates_per_iteration=4, train_batch_size_per_learner=8, loss=watched)
    with config.build() as algorithm:
        algorithm.train()
    assert [bool(each) for each in seen] == [True, True, False, False]


def test_the_actor_of_a_module_that_comes_back_imitates_at_first() -> None:
    seen: list[float] = []

    def watched(module: Any, batch: Any, coefficients: Any, default_loss: Any) -> Any:
        seen.append(coefficients["imitates"])
        return default_loss(module, batch, coefficients)[:2]

    both: dict[str, Any] = {"observation_space": OBS, "action_space": THREE}
    data = [rows_of_steps(**one_sided(40), module_id=name) for name in ("one", "two")]
    config = cql(data, num_imitation_updates=1, num_updates_per_iteration=2, train_batch_size_per_learner=8)
    overrides = {"two": {"loss": watched}}
    config.environment(observation_space=None, action_space=None).multi_agent(
        policies={"one": both, "two": both}, algorithm_config_overrides_per_module=overrides
    )
    with config.build() as algorithm:
        algorithm.train()
        algorithm.remove_module("two")
        algorithm.add_module("two", **both, overrides=overrides["two"])
        algorithm.train()
    assert seen == [1.0, 0.0, 1.0, 0.0]
