"""MARWIL: the loss against a slow reference, and the better half of mixed data."""

from __future__ import annotations

import itertools
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from corral import BCConfig, ClipRewards, MARWILConfig, NormalizeObservations
from corral.algorithms.bc import bc_loss
from corral.algorithms.marwil import marwil_loss
from corral.algorithms.offline import OfflineAlgorithm
from corral.errors import ConfigError
from corral.modules.module import ActorCritic
from corral.modules.spec import ModuleSpec

OBS, ACTIONS = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(3)


def marwil(data: Any, make: Any = MARWILConfig, **training: Any) -> Any:
    config = make().environment(observation_space=OBS, action_space=ACTIONS).offline_data(input_=data)
    config.debugging(seed=1).rl_module(model_config={"fcnet_hiddens": [32]})
    return config.training(
        **{"lr": 1e-2, "num_updates_per_iteration": 300, "train_batch_size_per_learner": 128, **training}
    )


def batch_of(size: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "obs": torch.rand(size, 2, generator=generator),
        "actions": torch.arange(size) % 3,
        "returns": torch.randn(size, generator=generator) * 3,
        "bootstrap_discounts": torch.tensor([0.0, 0.9, 0.81, 0.0] * (size // 4)),
        "final_obs": torch.rand(size, 2, generator=generator),
    }


@pytest.mark.parametrize("norm", [0.3, 4.0])
@pytest.mark.parametrize("max_weight", [20.0, 1.1])
def test_the_loss_matches_a_slow_loop(norm: float, max_weight: float) -> None:
    module, batch = ModuleSpec(ActorCritic, OBS, ACTIONS, {}).build(), batch_of()
    found, reported = marwil_loss(module, batch, {"sqd_adv_norm": norm}, beta=1.5, vf_coeff=0.7, max_weight=max_weight)
    advantages, errors = [], []
    for i in range(12):
        value = module.value(batch["obs"][i : i + 1])[0]
        target = (
            batch["returns"][i]
            + batch["bootstrap_discounts"][i] * module.value(batch["final_obs"][i : i + 1])[0].detach()
        )
        advantages.append(float((target - value).detach()))
        errors.append(0.5 * (value - target) ** 2)
    scale = math.sqrt(norm)
    assert float(reported["sqd_adv"]) == pytest.approx(np.mean(np.square(advantages)), rel=1e-4)
    policy_loss: Any = 0
    for i in range(12):
        weight = min(math.exp(1.5 * advantages[i] / scale), max_weight)
        logp = module.policy(batch["obs"][i : i + 1]).log_softmax(-1)[0, batch["actions"][i]]
        policy_loss = policy_loss - weight * logp / 12
    expected = policy_loss + 0.7 * sum(errors) / 12
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(reported["policy_loss"], policy_loss.detach(), rtol=1e-4, atol=1e-4)
    # The gradients, too: the weights of the policy loss have none.
    grads = [torch.autograd.grad(loss, list(module.parameters()), allow_unused=True) for loss in (found, expected)]
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)


def test_the_norm_begins_with_the_mean_of_the_first_batch() -> None:
    with marwil(bandit()).build() as algorithm:
        batch = algorithm._draw("default_policy", algorithm.data["default_policy"].train)
        module = algorithm.get_module()
        with torch.no_grad():
            values = module.value(torch.from_numpy(batch["obs"])).numpy()
        expected = np.mean(np.square(batch["returns"] - values))
        assert algorithm.coefficients("default_policy")["sqd_adv_norm"] == pytest.approx(expected, rel=1e-4)


def test_beta_0_is_behaviour_cloning() -> None:
    module, batch = ModuleSpec(ActorCritic, OBS, ACTIONS, {}).build(), batch_of()
    _, reported = marwil_loss(module, batch, {"sqd_adv_norm": 1.0}, beta=0.0, vf_coeff=1.0, max_weight=20.0)
    _, cloned = bc_loss(module, batch, {"entropy_coeff": 0.0})
    torch.testing.assert_close(reported["policy_loss"], cloned["policy_loss"])


def test_recorded_actions_at_a_bound_are_imitated_as_if_inside_it() -> None:
    spec = ModuleSpec(ActorCritic, OBS, gym.spaces.Box(-1, 1, (1,), np.float32), {"action_bounds": "squash"})
    module, losses = spec.build(), []
    for action in (1.0, 0.999, 0.99):
        actions = torch.from_numpy(module.distribution.from_env(np.full((12, 1), action, np.float32)))
        batch = {**batch_of(), "actions": actions}
        found = marwil_loss(module, batch, {"sqd_adv_norm": 1.0}, beta=1.0, vf_coeff=1.0, max_weight=20.0)
        cloned = bc_loss(module, batch, {"entropy_coeff": 0.0})
        losses.append([float(reported["policy_loss"]) for _, reported in (found, cloned)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] != pytest.approx(losses[2], rel=1e-2)


def bandit() -> dict[str, Any]:
    """One-step episodes: actions drawn evenly, with the rewards -1, 0 and 1."""
    actions = np.random.default_rng(0).integers(0, 3, 3000)
    flags = np.ones(3000, bool)
    return {"obs": np.zeros((3000, 2), np.float32), "actions": actions, "rewards": actions - 1.0, "terminated": flags}


@pytest.mark.slow_cases("1.0")
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_the_policy_of_a_bandit_is_the_closed_form(beta: float) -> None:
    """It is the recorded policy times exp(beta * A / c), where c is the root of the mean squared advantage."""
    with marwil(bandit(), beta=beta).build() as algorithm:
        for _ in range(2):
            result = algorithm.train()
        probs = algorithm.get_module().policy(torch.zeros(1, 2)).softmax(-1)[0].tolist()
    scale = math.sqrt(2 / 3)
    weights = np.exp(beta * np.array([-1.0, 0.0, 1.0]) / scale)
    np.testing.assert_allclose(probs, weights / weights.sum(), atol=0.05)
    assert result["learners"]["default_policy"]["sqd_adv_norm"] == pytest.approx(2 / 3, abs=0.05)


def walks(seed: int = 0) -> dict[str, Any]:
    """Episodes of up to ten steps with the reward 1 per step: action 2 continues, others end with probability 1/2."""
    rng = np.random.default_rng(seed)
    columns: dict[str, list[Any]] = {
        name: [] for name in ("obs", "actions", "rewards", "terminated", "truncated", "next_obs")
    }
    for _ in range(600):
        for t in range(10):
            action = int(rng.integers(0, 3))
            ends = action != 2 and rng.random() < 0.5
            columns["obs"].append([t / 10, 0])
            columns["next_obs"].append([(t + 1) / 10, 0])
            columns["actions"].append(action)
            columns["rewards"].append(1.0)
            columns["terminated"].append(ends)
            columns["truncated"].append(not ends and t == 9)
            if ends:
                break
    floats = ("obs", "next_obs")
    return {name: np.array(column, np.float32 if name in floats else None) for name, column in columns.items()}


def test_good_actions_are_imitated_more_than_bad_ones() -> None:
    chosen = {}
    for make in (MARWILConfig, BCConfig):
        config = marwil(walks(), make)
        if make is MARWILConfig:
            config.training(gamma=0.9)
        with config.build() as algorithm:
            for _ in range(3):
                algorithm.train()
            obs = torch.tensor([[t / 10, 0] for t in range(10)])
            chosen[make.__name__] = algorithm.get_module().policy(obs).softmax(-1)[:, 2].mean().item()
            if make is MARWILConfig:
                values = algorithm.get_module().value(obs).tolist()
    assert chosen["BCConfig"] == pytest.approx(1 / 3, abs=0.04)
    assert chosen["MARWILConfig"] > 0.45
    # Two of three steps end none of the episodes, and truncated episodes bootstrap: all values solve v = 1 + 0.6 v.
    assert np.mean(values) == pytest.approx(2.5, abs=0.4)


def test_rewards_are_learned_from_after_their_transforms() -> None:
    data = bandit()
    data["rewards"] = data["rewards"] * 50
    with marwil(data).env_runners(transforms=[ClipRewards()]).build() as algorithm:
        found = [algorithm.train()["learners"]["default_policy"]["sqd_adv_norm"] for _ in range(2)][-1]
    assert found == pytest.approx(2 / 3, abs=0.05)


def test_the_mean_squared_advantage_moves_at_its_rate() -> None:
    config = marwil(bandit(), num_updates_per_iteration=1, moving_average_sqd_adv_norm_start=100.0)
    config.training(moving_average_sqd_adv_norm_update_rate=0.5, lr=0.0, train_batch_size_per_learner=3000)
    with config.build() as algorithm:
        values = [algorithm.train()["learners"]["default_policy"]["sqd_adv_norm"] for _ in range(4)]
    assert values[0] == 100.0
    for before, after in itertools.pairwise(values):
        assert after == pytest.approx(0.5 * before + 0.5 * 2 / 3, rel=0.03)


def test_the_mean_of_the_first_batch_stays_the_norm_at_a_rate_of_0() -> None:
    config = marwil(bandit(), num_updates_per_iteration=1, train_batch_size_per_learner=50)
    with config.training(moving_average_sqd_adv_norm_update_rate=0.0).build() as algorithm:
        first, *later = (algorithm.train()["learners"]["default_policy"]["sqd_adv_norm"] for _ in range(3))
    assert later == [first, first]


@pytest.mark.parametrize("name", ["gamma", "moving_average_sqd_adv_norm_start"])
def test_what_was_summed_or_has_begun_cannot_change(name: str) -> None:
    with marwil(walks(), num_updates_per_iteration=1).build() as algorithm:
        algorithm.reconfigure(beta=0.5, vf_coeff=2.0)
        with pytest.raises(ConfigError, match=f"{name} can only be set before building"):
            algorithm.reconfigure(**{name: 0.5})


def test_a_user_loss_may_report_what_it_likes() -> None:
    def loss(module: Any, batch: Any, coefficients: Any, default_loss: Any) -> Any:
        value, _, _ = default_loss(module, batch, coefficients)
        return value, {"mine": value.detach()}

    config = marwil(walks(), num_updates_per_iteration=2).training(loss=loss)
    with config.offline_data(validation_fraction=0.2).build() as algorithm:
        for _ in range(2):
            found = algorithm.train()["learners"]["default_policy"]
        assert "mine" in found and math.isfinite(found["validation_loss"])


def test_validation_has_the_names_of_training_and_undefined_is_nan() -> None:
    config = marwil(bandit() | {"rewards": np.ones(3000)}, num_updates_per_iteration=2)
    with config.offline_data(validation_fraction=0.2).build() as algorithm:
        found = algorithm.train()["learners"]["default_policy"]
    names = {name.removeprefix("validation_") for name in found if name.startswith("validation_")}
    assert names - {"loss"} <= found.keys() and "sqd_adv" not in names
    assert np.isnan(found["vf_explained_var"]) and np.isnan(found["validation_vf_explained_var"])


def test_truncated_episodes_bootstrap_from_transformed_observations() -> None:
    """All observations are alike but the final ones, which are far away: normalized they have another value."""
    data = walks()
    data["obs"] = data["obs"] * 0.01 + 5
    data["next_obs"] = data["next_obs"] * 0.01 + 5
    config = marwil(data, num_updates_per_iteration=1).env_runners(transforms=[NormalizeObservations()])
    config.environment(observation_space=gym.spaces.Box(-9, 9, (2,), np.float32), action_space=ACTIONS)
    with config.build() as algorithm:
        assert isinstance(algorithm, OfflineAlgorithm)
        batch = algorithm._draw("default_policy", algorithm.data["default_policy"].train)
        mean = algorithm.modules.get_transform_states()["default_policy"]["NormalizeObservations"]["mean/"]
    assert mean[0] == pytest.approx(5, abs=0.1)
    assert (batch["bootstrap_discounts"] > 0).any()
    assert np.abs(batch["final_obs"]).max() < 20 and (np.abs(batch["final_obs"][:, 0]) < 4.5).any()


def test_modules_have_constants_of_their_own() -> None:
    from corral.data.offline.episode_rows import rows_of_steps

    spaces = {"observation_space": OBS, "action_space": ACTIONS}
    data = [rows_of_steps(**walks(), module_id=name) for name in ("one", "two")]
    config = marwil(data, num_updates_per_iteration=1).environment(observation_space=None, action_space=None)
    config.multi_agent(
        policies={"one": spaces, "two": spaces},
        algorithm_config_overrides_per_module={"two": {"beta": 0.0, "gamma": 0.0, "vf_coeff": 0.0}},
    )
    with config.build() as algorithm:
        assert isinstance(algorithm, OfflineAlgorithm)
        returns = {name: algorithm._draw(name, data.train)["returns"].max() for name, data in algorithm.data.items()}
        result = algorithm.train()
        learned = result["learners"]
    assert result["num_env_steps_sampled_lifetime"] == algorithm.config.total_train_batch_size  # of both together
    assert returns["two"] == 1 and returns["one"] > 5
    assert learned["two"]["mean_advantage_weight"] == 1 != learned["one"]["mean_advantage_weight"]
    assert learned["two"]["total_loss"] == pytest.approx(learned["two"]["policy_loss"])


def test_a_module_that_comes_back_begins_with_the_first_norm() -> None:
    from corral.data.offline.episode_rows import rows_of_steps

    spaces = {"observation_space": OBS, "action_space": ACTIONS}
    data = [rows_of_steps(**walks(), module_id=name) for name in ("one", "two")]
    settings = {"moving_average_sqd_adv_norm_start": 7.0, "moving_average_sqd_adv_norm_update_rate": 0.5}
    config = marwil(data, num_updates_per_iteration=1, **settings).environment(
        observation_space=None, action_space=None
    )
    with config.multi_agent(policies={"one": spaces, "two": spaces}).build() as algorithm:
        norms = [algorithm.train()["learners"]["two"]["sqd_adv_norm"] for _ in range(2)]
        algorithm.remove_module("two")
        kept = algorithm.train()["learners"]["one"]["sqd_adv_norm"]
        algorithm.add_module("two", **spaces)
        norms.append(algorithm.train()["learners"]["two"]["sqd_adv_norm"])
    assert norms[0] == norms[2] == 7.0 != norms[1] and kept != 7.0


def test_memory_is_refused() -> None:
    config = marwil(walks()).rl_module(model_config={"use_lstm": True})
    with pytest.raises(ConfigError, match="MARWIL"):
        config.build()


def test_steps_bootstrap_from_the_last_observation_of_their_episode() -> None:
    numbers = np.arange(60, dtype=np.float32)
    obs = np.stack([numbers, numbers // 6], 1)
    after = np.stack([numbers + 0.5, numbers // 6], 1)
    ends = numbers % 6 == 5
    after[~ends] = obs[1:][~ends[:-1]]
    data = {"obs": obs, "next_obs": after, "actions": np.zeros(60, int), "rewards": np.ones(60)}
    config = marwil({**data, "terminated": np.zeros(60, bool), "truncated": ends})
    config.environment(observation_space=gym.spaces.Box(-99, 99, (2,), np.float32), action_space=ACTIONS)
    with config.build() as algorithm:
        assert isinstance(algorithm, OfflineAlgorithm)
        batch = algorithm._draw("default_policy", algorithm.data["default_policy"].train, 200)
    episodes = batch["obs"][:, 1]
    assert len(set(batch["obs"][:, 0].tolist())) > 50
    np.testing.assert_array_equal(batch["final_obs"], np.stack([episodes * 6 + 5.5, episodes], 1))
