"""PPO's loss on batches worked out by hand, its batch, and its adaptive KL coefficient."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from corral import PPO, Module, PPOConfig, SACConfig
from corral.algorithms.ppo import KLStop, adapted_kl_coeff, explained_variance, ppo_batch, ppo_loss
from corral.data.episodes.rollout import Rollout
from corral.errors import ConfigError
from corral.testing import CountingEnv

NO_TERMS = {"kl_coeff": 0.0, "entropy_coeff": 0.0, "clip_param": 0.2}


class Given(Module):
    """A module whose logits and values are its parameters, one row each."""

    def __init__(self, logits: Any, values: Any) -> None:
        super().__init__(spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2), {})
        self.logits = nn.Parameter(torch.as_tensor(logits, dtype=torch.float32))
        self.values = nn.Parameter(torch.as_tensor(values, dtype=torch.float32))

    def policy(self, obs: Any) -> Tensor:
        return self.logits

    def value(self, obs: Any) -> Tensor:
        return self.values


def logits_for(probabilities: list[float]) -> list[list[float]]:
    """Return logits of two actions of which action 1 has the given probability."""
    return [[math.log(1 - p), math.log(p)] for p in probabilities]


def make_batch(old: list[float], advantages: list[float], **columns: Any) -> dict[str, Tensor]:
    """Make a batch in which action 1 was taken with the old probabilities."""
    size = len(old)
    batch = {
        "obs": np.zeros((size, 1)),
        "actions": np.ones(size, np.int64),
        "logp": np.log(old),
        "dist_inputs": logits_for(old),
        "values": np.zeros(size),
        "advantages": advantages,
        "value_targets": np.zeros(size),
        **columns,
    }
    return {
        name: torch.as_tensor(column, dtype=torch.int64 if name == "actions" else torch.float32)
        for name, column in batch.items()
    }


def loss_of(
    module: Given, batch: dict[str, Tensor], coefficients: dict[str, float] = NO_TERMS, **settings: Any
) -> tuple[Tensor, dict[str, float]]:
    constants = {"vf_clip_param": None, "vf_loss_coeff": 0.0, **settings}
    loss, scalars = ppo_loss(module, batch, NO_TERMS | coefficients, **constants)
    return loss, {name: value.item() for name, value in scalars.items()}


@pytest.mark.parametrize(
    ("old", "new", "advantage", "surrogate", "moves"),
    [
        (0.5, 0.55, 2.0, 1.1 * 2, True),  # inside: the plain ratio
        (0.5, 0.55, -2.0, 1.1 * -2, True),
        (0.5, 0.75, 2.0, 1.2 * 2, False),  # too likely already: no gain left
        (0.5, 0.75, -2.0, 1.5 * -2, True),  # too likely and bad: pulled back
        (0.5, 0.25, 2.0, 0.5 * 2, True),  # too unlikely and good: pulled back
        (0.5, 0.25, -2.0, 0.8 * -2, False),  # too unlikely already
    ],
)
def test_clipped_surrogate(old: float, new: float, advantage: float, surrogate: float, moves: bool) -> None:
    # The second row has ratio 1 and advantage 3.
    module = Given(logits_for([new, 0.4]), [0, 0])
    loss, scalars = loss_of(module, make_batch([old, 0.4], [advantage, 3.0]))
    assert loss.item() == pytest.approx(-(surrogate + 3.0) / 2, abs=1e-5)
    assert scalars["policy_loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert scalars["clip_fraction"] == (0.0 if abs(new / old - 1) < 0.2 else 0.5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert module.logits.grad is not None
    assert (module.logits.grad[0].abs().sum() > 0).item() is moves
    assert module.logits.grad[1].abs().sum() > 0


def test_the_gradient_at_the_old_policy_is_the_policy_gradient() -> None:
    module = Given(logits_for([0.3, 0.6]), [0, 0])
    loss_of(module, make_batch([0.3, 0.6], [2.0, -1.0]))[0].backward()  # type: ignore[no-untyped-call]
    # d log p(1) / d logit 1 = 1 - p(1), weighted with the advantage, over the mean of two rows
    assert module.logits.grad is not None
    np.testing.assert_allclose(module.logits.grad[:, 1], [-2 * 0.7 / 2, 1 * 0.4 / 2], rtol=1e-5)


@pytest.mark.parametrize(
    ("vf_clip_param", "errors"),
    [
        (None, [9.0, 16.0]),
        (10.0, [9.0, 16.0]),  # a range that holds the change clips nothing
        # Row 0: 1 -> 3, held at 1.5, farther from its target 0 when unclipped. Row 1: -1 -> 0, held at -0.5, target 4.
        (0.5, [max(9.0, 1.5**2), max(16.0, 4.5**2)]),
    ],
)
def test_value_loss(vf_clip_param: float | None, errors: list[float]) -> None:
    module = Given(logits_for([0.5, 0.5]), [3.0, 0.0])
    batch = make_batch([0.5, 0.5], [0.0, 0.0], values=[1.0, -1.0], value_targets=[0.0, 4.0])
    loss, scalars = loss_of(module, batch, vf_clip_param=vf_clip_param, vf_loss_coeff=0.25)
    assert scalars["vf_loss"] == pytest.approx(sum(errors) / 2)
    assert loss.item() == pytest.approx(0.25 * sum(errors) / 2)


def test_a_value_beyond_its_clip_range_gets_no_gradient_when_the_clipped_error_is_larger() -> None:
    module = Given(logits_for([0.5, 0.5]), [0.0, 0.0])
    batch = make_batch([0.5, 0.5], [0.0, 0.0], values=[-1.0, 0.0], value_targets=[4.0, 4.0])
    loss_of(module, batch, vf_clip_param=0.5, vf_loss_coeff=1.0)[0].backward()  # type: ignore[no-untyped-call]
    assert module.values.grad is not None
    np.testing.assert_allclose(module.values.grad, [0, 2 * -4 / 2])


@pytest.mark.parametrize(
    ("settings", "errors"),
    [
        ({"vf_loss_clip": 20.0}, [9.0, 16.0]),
        ({"vf_loss_clip": 10.0}, [9.0, 10.0]),
        ({"vf_loss_clip": 1.0}, [1.0, 1.0]),
        ({"vf_loss_clip": 18.0, "vf_clip_param": 0.5}, [9.0, 18.0]),  # the error of row 1 is 4.5 ** 2
    ],
)
def test_each_squared_error_of_a_value_counts_at_most_the_limit(
    settings: dict[str, float], errors: list[float]
) -> None:
    module = Given(logits_for([0.5, 0.5]), [3.0, 0.0])
    batch = make_batch([0.5, 0.5], [0.0, 0.0], values=[1.0, -1.0], value_targets=[0.0, 4.0])
    loss, scalars = loss_of(module, batch, vf_loss_coeff=0.25, **settings)
    assert scalars["vf_loss"] == pytest.approx(sum(errors) / 2)
    assert scalars["vf_loss_unclipped"] == pytest.approx((9 + (4.5**2 if "vf_clip_param" in settings else 16)) / 2)
    assert loss.item() == pytest.approx(0.25 * sum(errors) / 2)
    loss.backward()  # type: ignore[no-untyped-call]
    assert module.values.grad is not None
    np.testing.assert_array_equal(module.values.grad[0] != 0, errors[0] == 9)
    assert "vf_loss_unclipped" not in loss_of(module, batch)[1]


def entropy_of(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def kl_of(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def test_entropy_is_a_bonus() -> None:
    module, batch = Given(logits_for([0.3, 0.9]), [0, 0]), make_batch([0.3, 0.9], [0.0, 0.0])
    loss, scalars = loss_of(module, batch, {"entropy_coeff": 0.1})
    entropy = (entropy_of(0.3) + entropy_of(0.9)) / 2
    assert scalars["entropy"] == pytest.approx(entropy, rel=1e-5)
    assert loss.item() == pytest.approx(-0.1 * entropy, rel=1e-5)


def test_kl_from_the_old_policy_to_the_new_is_a_penalty() -> None:
    module, batch = Given(logits_for([0.4, 0.5]), [0, 0]), make_batch([0.3, 0.9], [0.0, 0.0])
    loss, scalars = loss_of(module, batch, {"kl_coeff": 0.5})
    kl = (kl_of(0.3, 0.4) + kl_of(0.9, 0.5)) / 2
    assert scalars["mean_kl"] == pytest.approx(kl, rel=1e-4)
    assert loss.item() == pytest.approx(0.5 * kl, rel=1e-4)


def test_without_the_penalty_the_divergence_is_estimated_and_costs_nothing() -> None:
    module, batch = Given(logits_for([0.4, 0.5]), [0, 0]), make_batch([0.3, 0.9], [0.0, 0.0])
    loss, scalars = loss_of(module, batch)
    ratios = np.array([0.4 / 0.3, 0.5 / 0.9])
    assert scalars["mean_kl"] == pytest.approx((ratios - 1 - np.log(ratios)).mean(), rel=1e-4)
    assert loss.item() == 0.0


@pytest.mark.parametrize(("kl", "expected"), [(0.031, 0.4), (0.029, 0.2), (0.02, 0.2), (0.0134, 0.2), (0.0132, 0.1)])
def test_kl_coefficient_doubles_above_the_band_and_halves_below(kl: float, expected: float) -> None:
    assert adapted_kl_coeff(0.2, kl, kl_target=0.02) == pytest.approx(expected)


@pytest.mark.parametrize(("kl", "expected"), [(0.041, 0.3), (0.039, 0.2), (0.011, 0.2), (0.009, 0.1)])
def test_band_and_factors_of_the_kl_coefficient_can_be_set(kl: float, expected: float) -> None:
    config = PPOConfig().environment("CartPole-v1").training(kl_coeff=0.2, kl_target=0.02)
    config.training(kl_band=2, kl_factors=(1.5, 0.5))
    config.validate()
    found = adapted_kl_coeff(0.2, kl, 0.02, config.kl_band, config.kl_factors)
    assert found == pytest.approx(expected)


def test_a_band_without_a_target_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kl_band=2.0 has no effect without kl_target"):
        PPOConfig().environment("CartPole-v1").training(kl_band=2).validate()


def test_explained_variance() -> None:
    targets = np.array([1.0, 2.0, 4.0])
    assert explained_variance(targets + 7, targets) == pytest.approx(1)  # a constant offset explains all the same
    assert explained_variance(np.zeros(3), targets) == pytest.approx(0)
    assert explained_variance(-targets, targets) == pytest.approx(-3)
    assert math.isnan(explained_variance(targets, np.ones(3)))


def sample_of(**runner_settings: Any) -> tuple[Rollout, PPOConfig]:
    config = PPOConfig().environment(CountingEnv, env_config={"episode_length": 3, "stagger": True})
    config.env_runners(num_envs_per_env_runner=2, **runner_settings).debugging(seed=0)
    with config.build() as algo:
        assert algo.env_runner is not None
        return algo.env_runner.sample(num_timesteps=30), config


advantages_of: Any = partial(PPO.advantages, None, config=PPOConfig().training(gamma=0.9, lambda_=0.8))
batch_of = partial(ppo_batch, value_fn=lambda obs: obs[:, 1] * 0.5, advantages_fn=advantages_of)


@pytest.mark.parametrize("autoreset_mode", ["next_step", "same_step"])
def test_batch_holds_the_valid_steps_and_nothing_else(autoreset_mode: str) -> None:
    rollout, _ = sample_of(autoreset_mode=autoreset_mode)
    assert rollout.valid.all() == (autoreset_mode == "same_step")
    batch = batch_of([rollout, rollout], normalize_advantages=False)
    assert {len(column) for column in batch.values()} == {2 * rollout.num_env_steps}
    # The observation of a step is [episode, t]; no step acts on the last observation of an episode.
    assert set(batch["obs"][:, 1]) == {0, 1, 2, 3}
    lengths = rollout.valid_rows(np.broadcast_to([3, 4], rollout.valid.shape))
    assert (batch["obs"][: len(lengths), 1] < lengths).all()
    np.testing.assert_array_equal(batch["values"], batch["obs"][:, 1] * 0.5)
    np.testing.assert_allclose(batch["advantages"] + batch["values"], batch["value_targets"], rtol=1e-5)
    last = batch["obs"][: len(lengths), 1] == lengths - 1  # a last step pays t, and there is nothing after it
    np.testing.assert_allclose(batch["value_targets"][: len(lengths)][last], lengths[last])


def test_advantages_are_normalised_over_the_whole_batch_and_targets_are_not() -> None:
    rollout, _ = sample_of()
    plain = batch_of([rollout, rollout], normalize_advantages=False)
    batch = batch_of([rollout, rollout], normalize_advantages=True)
    assert batch["advantages"].mean() == pytest.approx(0, abs=1e-5)
    assert batch["advantages"].std() == pytest.approx(1, rel=1e-4)
    assert np.corrcoef(batch["advantages"], plain["advantages"])[0, 1] == pytest.approx(1)
    np.testing.assert_array_equal(batch["value_targets"], plain["value_targets"])


@pytest.mark.parametrize(("kl_target", "factor"), [(1e-7, 2.0), (10.0, 0.5)])
def test_kl_target_moves_the_coefficient(kl_target: float, factor: float) -> None:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=4).debugging(seed=0)
    config.training(train_batch_size_per_learner=128, minibatch_size=64, num_epochs=2)
    with config.training(kl_coeff=0.2, kl_target=kl_target).build() as algo:
        seen = [algo.train()["learners"]["default_policy"]["curr_kl_coeff"] for _ in range(3)]
    assert seen == pytest.approx([0.2, 0.2 * factor, 0.2 * factor**2])


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_kl_target_compares_the_divergence_after_the_last_epoch(env: str) -> None:
    config = PPOConfig().environment(env).env_runners(num_envs_per_env_runner=4).debugging(seed=0)
    config.training(train_batch_size_per_learner=256, minibatch_size=32, num_epochs=2, lr=3e-3, kl_coeff=0.01)
    sampled: list[Rollout] = []
    listening = config.copy().callbacks(on_sample_end=lambda samples: sampled.append(samples)).training(kl_target=1.0)
    with listening.build() as algo:
        reported = algo.train()["learners"]["default_policy"]
        [rollout] = sampled
        module = algo.get_module()
        with torch.no_grad():
            now = module.policy(torch.from_numpy(rollout.valid_rows(rollout.obs[:-1])))
        old = torch.from_numpy(rollout.valid_rows(rollout.dist_inputs))
        kl = float(module.distribution.kl(old, now).mean())
    assert reported["final_kl"] == pytest.approx(kl, rel=1e-3)
    # A target whose band ends between the mean over the epochs and the final divergence tells them apart.
    kl_target = math.sqrt(kl * reported["mean_kl"]) / 1.5
    expected = adapted_kl_coeff(0.01, kl, kl_target)
    assert expected != adapted_kl_coeff(0.01, reported["mean_kl"], kl_target)
    with config.training(kl_target=kl_target).build() as algo:
        seen = [algo.train()["learners"]["default_policy"]["curr_kl_coeff"] for _ in range(2)]
    assert seen == pytest.approx([0.01, expected])


def test_schedules_follow_the_env_steps() -> None:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=4).debugging(seed=0)
    config.training(train_batch_size_per_learner=128, minibatch_size=64, num_epochs=1)
    config.training(lr=[(0, 1e-3), (256, 0.0)], entropy_coeff=[(0, 0.0), (256, 1.0)])
    config.training(clip_param=[(0, 0.4), (256, 0.0)])
    with config.build() as algo:
        for _ in range(3):
            result = algo.train()
            progress = min(1.0, result["num_env_steps_sampled_lifetime"] / 256)
            learner = result["learners"]["default_policy"]
            assert learner["default_optimizer_learning_rate"] == pytest.approx(1e-3 * (1 - progress))
            assert learner["curr_entropy_coeff"] == pytest.approx(progress)
            assert learner["curr_clip_param"] == pytest.approx(0.4 * (1 - progress))


@pytest.mark.parametrize(("last", "warnings"), [(0.0, 1), (1e-5, 0)])
def test_a_run_that_learns_nothing_any_more_says_so_once(
    last: float, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = PPOConfig().environment(CountingEnv).env_runners(num_envs_per_env_runner=2).debugging(seed=0)
    config.training(train_batch_size_per_learner=32, minibatch_size=16, num_epochs=1, lr=[[0, 1e-3], [64, last]])
    with config.build() as algo:
        for _ in range(2):
            algo.train()
        assert "learns nothing" not in caplog.text  # the run may end where its schedule ends
        before = algo.get_module().state_dict()["policy_encoder.mlp.0.weight"].clone() if warnings else None
        for _ in range(2):
            algo.train()
        if before is not None:
            assert torch.equal(algo.get_module().state_dict()["policy_encoder.mlp.0.weight"], before)
    found = [record.message for record in caplog.records if "learns nothing after" in record.message]
    assert len(found) == warnings
    assert all("after 64 env steps: its learning rate is 0" in message for message in found)


@pytest.mark.parametrize(("critic_lr", "warnings"), [([[0, 1e-3], [50, 0.0]], 1), (None, 0)])
def test_the_rates_of_actor_and_critic_count_where_they_are_set(
    critic_lr: Any, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = SACConfig().environment("Pendulum-v1").debugging(seed=0)
    config.training(actor_lr=[[0, 1e-3], [50, 0.0]], critic_lr=critic_lr, num_steps_sampled_before_learning_starts=1000)
    with config.reporting(min_sample_timesteps_per_iteration=60).build() as algo:
        for _ in range(3):
            algo.train()
    assert len([record for record in caplog.records if "learns nothing" in record.message]) == warnings


def test_the_explained_variance_is_of_the_batch_that_was_learned_from() -> None:
    batches: list[Any] = []

    def note(train_batch: Any) -> None:
        batches.append((train_batch["values"].copy(), train_batch["value_targets"].copy()))

    config = PPOConfig().environment("CartPole-v1").debugging(seed=0).training(train_batch_size_per_learner=256)
    with config.callbacks(on_learn_on_batch=note).build() as algo:
        explained = algo.train()["learners"]["default_policy"]["vf_explained_var"]
    [(values, targets)] = batches
    assert explained == pytest.approx(1 - np.var(targets - values) / np.var(targets))


def learner_after(num_iterations: int, **training: Any) -> dict[str, float]:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=4).debugging(seed=0)
    config.training(train_batch_size_per_learner=128, minibatch_size=64, num_epochs=6, lr=1e-2, **training)
    with config.build() as algo:
        for _ in range(num_iterations):
            result: dict[str, float] = algo.train()["learners"]["default_policy"]
    return result


def test_target_kl_ends_the_epochs_of_an_iteration() -> None:
    plain = learner_after(2)
    assert plain["num_epochs"] == 6 and plain["mean_kl"] > 0
    assert learner_after(2, target_kl=1e3) == plain
    first = learner_after(1, target_kl=1e-9)
    assert (first["num_epochs"], first["num_gradient_steps"]) == (1, 2)
    between = learner_after(1, target_kl=learner_after(1)["mean_kl"] / 1.5)
    assert 1 < between["num_epochs"] < 6


def test_the_limit_is_one_and_a_half_times_the_target() -> None:
    stop = KLStop(1.5 * 0.02)
    assert [stop({"mean_kl": kl}) for kl in (0.0, 0.029, 0.031)] == [False, False, True]
    with pytest.raises(ConfigError, match="target_kl"):
        PPOConfig().environment("CartPole-v1").training(target_kl=0.0).validate()
