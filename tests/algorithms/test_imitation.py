"""`imitation_coeff`: the policy imitates recorded actions next to what the algorithm learns otherwise."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral import Callback, IQLConfig, SACConfig
from corral.algorithms.imitation import imitation_losses
from corral.algorithms.registry import config_class
from corral.modules.distributions import Categorical, Deterministic, SquashedGaussian
from exact_runs import Drift


def recorded(is_box: bool) -> dict[str, Any]:
    """Return 400 steps whose best action is not the recorded one: the sign of the first entry, or the third action."""
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(400, 3)).astype(np.float32)
    actions: Any = np.sign(obs[:, :1]) * [0.5, -0.5] if is_box else np.where(obs[:, 0] > 0, 2, 0)
    rewards = -actions.sum(-1) if is_box else (actions == 1).astype(float)
    return {"obs": obs, "actions": actions, "rewards": rewards, "terminated": np.arange(1, 401) % 10 == 0}


def with_data(algo: str, **training: Any) -> Any:
    is_box = algo in ("SAC", "TD3", "DDPG")
    config: Any = config_class(algo)().environment(Drift, env_config={"box": is_box}).debugging(seed=1)
    config.offline_data(input_=recorded(is_box)).learners(num_threads=1).rl_module(model_config={"fcnet_hiddens": [16]})
    config.reporting(min_sample_timesteps_per_iteration=40)
    return config.training(
        **{
            "train_batch_size_per_learner": 32,
            "num_steps_sampled_before_learning_starts": 20,
            "num_offline_updates": 400,
            "num_updates_per_iteration": 400,
            "lr": 5e-3,
            **training,
        }
    )


def make_batch(algorithm: Any, module: Any, is_discrete: bool) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    actions = torch.randint(0, 3, (8,), generator=rng) if is_discrete else normal(8, 2).clamp(-0.9, 0.9)
    return {
        "obs": normal(8, 3),
        "next_obs": normal(8, 3),
        "actions": actions,
        "rewards": normal(8),
        "discounts": torch.full((8,), 0.9),
        "terminated": torch.tensor([False, True] * 4),
        "weights": torch.ones(8),
        "noise": normal(8, 2),
        "next_noise": normal(8, 2),
        "recorded": (torch.arange(8) >= 5) * 8 / 3,  # of the rows per recorded row
    }


@pytest.mark.parametrize("algo", ["DQN", "C51", "SAC", "discrete SAC", "TD3"])
def test_the_loss_and_its_gradients_match_a_slow_loop(algo: str) -> None:
    is_discrete = algo in ("DQN", "C51", "discrete SAC")
    name = {"C51": "DQN", "discrete SAC": "SAC"}.get(algo, algo)
    config = with_data(name, imitation_coeff=0.3, **({"num_atoms": 11} if algo == "C51" else {}))
    if algo == "discrete SAC":
        config.environment(Drift, env_config={"box": False}).offline_data(input_=recorded(False))
    with config.build() as algorithm:
        module: Any = algorithm.get_module()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        batch = make_batch(algorithm, module, is_discrete)
        loss, plain = algorithm.modules.loss_of("default_policy"), algorithm.make_loss(algorithm.config)
        outputs: dict[str, torch.Tensor] = {}
        base, _ = plain(module, batch, {"actor_coeff": 1.0}, outputs=outputs)  # type: ignore[call-arg]
        coefficients = {"actor_coeff": 1.0, "imitation_coeff": 0.3}
        total, reported = loss(module, batch, coefficients)

        distances = []
        for row in range(5, 8):  # the recorded ones
            obs, action = batch["obs"][row : row + 1], batch["actions"][row]
            given = module.policy(obs)[0]
            if is_discrete:
                distances.append(given.logsumexp(0) - given[action])
            else:
                mode = given[:2].tanh() if algo == "SAC" else given
                aim = action.tanh() if algo == "SAC" else action
                distances.append(((mode - aim) ** 2).mean())
        imitation = sum(distances) / 3
        if name != "DQN":
            assert torch.allclose(reported["mean_abs_q"], outputs["q_taken"].abs().mean())
        if isinstance(base, dict):
            assert isinstance(total, dict) and torch.equal(total["critic"], base["critic"])
            base, total = base["actor"], total["actor"]
        assert torch.allclose(total, base + 0.3 * imitation)
        assert torch.allclose(reported["imitation_loss"], imitation)
        parameters = [each for each in module.parameters() if each.requires_grad]
        given, wanted = (
            torch.autograd.grad(each, parameters, allow_unused=True, retain_graph=True)
            for each in (total, base + 0.3 * imitation)
        )
        for ours, theirs in zip(given, wanted, strict=True):
            assert (ours is None and theirs is None) or torch.allclose(ours, theirs, atol=1e-6)
        if name != "DQN":  # critics learn what they learned before
            before = torch.autograd.grad(base, list(module.q.parameters()), allow_unused=True, retain_graph=True)
            after = torch.autograd.grad(total, list(module.q.parameters()), allow_unused=True)
            assert all(a is b or torch.allclose(a, b) for a, b in zip(before, after, strict=True))


def test_a_coefficient_that_has_fallen_to_0_costs_nothing() -> None:
    with with_data("SAC", imitation_coeff=1.0).build() as algorithm:
        module: Any = algorithm.get_module()
        batch, calls = make_batch(algorithm, module, False), []
        module.actor.register_forward_hook(lambda *arguments: calls.append(1))
        for coefficient in (0.0, 1.0):
            algorithm.modules.loss_of("default_policy")(module, batch, {"imitation_coeff": coefficient})
    assert calls == [1] * (2 + 3)  # the plain loss asks for the actions at both observations


def test_an_update_of_the_critics_alone_has_no_imitation() -> None:
    with with_data("TD3", imitation_coeff=1.0).build() as algorithm:
        module: Any = algorithm.get_module()
        losses, reported = algorithm.modules.loss_of("default_policy")(
            module, make_batch(algorithm, module, False), {"actor_coeff": 0.0, "imitation_coeff": 1.0}
        )
        assert isinstance(losses, dict) and losses.keys() == {"critic"} and "imitation_loss" not in reported


def test_the_distance_of_a_policy_from_recorded_actions() -> None:
    box = spaces.Box(-2, 2, (2,))
    aim = torch.tensor([[0.5, -0.5]])
    assert imitation_losses(Deterministic(box), torch.tensor([[0.5, 0.1]]), aim).item() == pytest.approx(0.18)
    squashed = torch.cat([torch.tensor([[0.5, 0.1]]).atanh(), torch.zeros(1, 2)], -1)
    assert imitation_losses(SquashedGaussian(box), squashed, aim.atanh()).item() == pytest.approx(0.18)
    logits = torch.tensor([[0.0, np.log(2.0), 0.0]])
    categorical = imitation_losses(Categorical(spaces.Discrete(3)), logits, torch.tensor([1]))
    assert categorical.item() == pytest.approx(np.log(2))


def agreement(algorithm: Any, is_box: bool) -> float:
    """Return how often the policy does what was recorded: by the sign of the action, or by the action."""
    data = recorded(is_box)
    actions = algorithm.compute_actions(data["obs"], explore=False)
    if is_box:
        return float((np.sign(actions[:, 0]) == np.sign(data["actions"][:, 0])).mean())
    return float((actions == data["actions"]).mean())


@pytest.mark.slow_cases("SAC", "DDPG")
@pytest.mark.parametrize("algo", ["DQN", "SAC", "TD3", "DDPG"])
def test_the_policy_imitates_although_values_say_something_else(algo: str) -> None:
    """Rewards are higher for actions that were recorded in other states, or never."""
    agreements = {}
    for coeff in (0.0, 10.0):
        with with_data(algo, **({"imitation_coeff": coeff} if coeff else {})).build() as algorithm:
            result = algorithm.train()["learners"]["default_policy"]
            agreements[coeff] = agreement(algorithm, algo != "DQN")
            assert ("imitation_loss" in result) == bool(coeff)
    assert agreements[10.0] > 0.95 and agreements[0.0] < 0.8


class KeepColumns(Callback):
    """Keeps what the batches say about their rows."""

    kept: ClassVar[list[list[float]]] = []

    def on_learn_on_batch(self, *, train_batch: Any, **kwargs: Any) -> None:
        self.kept.append(np.asarray(train_batch["recorded"]).tolist())


def test_only_recorded_rows_are_marked() -> None:
    KeepColumns.kept = kept = []
    config = with_data("SAC", imitation_coeff=1.0, num_offline_updates=4, num_updates_per_iteration=4)
    with config.training(recorded_fraction=0.25).callbacks(KeepColumns).build() as algorithm:
        algorithm.train()
        assert kept == [[1.0] * 32] * 4
        kept.clear()
        algorithm.train()
    assert kept and all(rows == [0.0, 0.0, 4.0, 0.0] * 8 for rows in kept)  # 4 rows per recorded row


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["DQN", "TD3"])
def test_several_learners_imitate_as_much_as_one(algo: str) -> None:
    """Each learner takes the mean over its own rows, so each needs its share of the recorded ones."""
    losses = []
    for num_learners in (0, 2):
        config = with_data(algo, imitation_coeff=1.0, num_offline_updates=2, num_updates_per_iteration=2, lr=1e-12)
        config.learners(num_learners=num_learners).training(train_batch_size_per_learner=64 // max(1, num_learners))
        with config.build() as algorithm:
            losses.append([algorithm.train()["learners"]["default_policy"]["imitation_loss"] for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][1] > 0


def test_the_coefficient_falls_with_env_steps_and_stands_still_before() -> None:
    seen = []

    def watched(module: Any, batch: Any, coefficients: Any, default_loss: Any) -> Any:
        seen.append(coefficients["imitation_coeff"])
        return default_loss(module, batch, coefficients)[:2]

    config = with_data("SAC", imitation_coeff=[[0, 2.0], [100, 0.0]], num_offline_updates=4, loss=watched)
    with config.build() as algorithm:
        algorithm.train()
        assert (
            len(seen) == 5 and seen[0] == 0.0
        )  # the mean absolute value of the first batch, which multiplies the setting
        units = [weight / 2.0 for weight in seen[1:]]
        assert units[0] == units[1] and len(set(units)) == 3  # of this batch, and then of the batch before
        state = algorithm.get_state()
        for _ in range(3):
            algorithm.train()
    weight = seen[5]
    assert seen[-1] == 0.0 and weight > 0.0
    seen.clear()
    with config.build() as algorithm:
        algorithm.set_state(state)
        algorithm.train()
    assert seen[0] == pytest.approx(weight)  # with the mean of the batch before


def test_what_cannot_imitate_says_so() -> None:
    with pytest.raises(ValueError, match=r"imitation_coeff.*input_"):
        SACConfig().environment("Pendulum-v1").training(imitation_coeff=1.0).build()
    never_learned_from = with_data("SAC", imitation_coeff=1.0, num_offline_updates=0, recorded_fraction=0.0)
    with pytest.raises(ValueError, match=r"imitation_coeff.*recorded_fraction"):
        never_learned_from.copy(num_updates_per_iteration=1000).build()
    config = IQLConfig().environment(Drift, env_config={"box": True}).offline_data(input_=recorded(True))
    with pytest.raises(ValueError, match="imitation_coeff"):
        config.training(imitation_coeff=1.0).build()


def test_validation_includes_it() -> None:
    losses = {}
    for coeff in (1e-9, 1.0):
        config = with_data("SAC", imitation_coeff=coeff, num_offline_updates=1, num_updates_per_iteration=1, lr=1e-9)
        with config.offline_data(validation_fraction=0.2).build() as algorithm:
            result = algorithm.train()["learners"]["default_policy"]
            losses[coeff] = result["validation_loss"]
    assert losses[1.0] > losses[1e-9] + 1e-3
