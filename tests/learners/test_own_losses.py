"""`.training(loss=...)`: a user's loss, with the tensors at hand that the algorithm's loss computed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from corral import (
    Algorithm,
    APPOConfig,
    DQNConfig,
    IMPALAConfig,
    PPOConfig,
    SACConfig,
    TD3Config,
    make_multi_agent,
)
from corral.algorithms.config.config import AlgorithmConfig
from corral.errors import ConfigError, LossError
from corral.learners import numpy_q_learning
from corral.modules.module import ActorCritic
from corral.testing import CountingEnv, IdentityEnv

SMALL = {"fcnet_hiddens": [8]}
ON_POLICY = (PPOConfig, IMPALAConfig, APPOConfig)
REPLAY: dict[str, Any] = {
    "train_batch_size_per_learner": 16,
    "num_steps_sampled_before_learning_starts": 16,
    "replay_buffer_config": {"capacity": 500},
}


def config(cls: type[AlgorithmConfig], **training: Any) -> AlgorithmConfig:
    space = "box" if cls in (SACConfig, TD3Config) else "discrete"
    made = cls().environment(IdentityEnv, env_config={"space": space}).rl_module(model_config=SMALL)
    given = {"train_batch_size_per_learner": 64, "minibatch_size": 32, "num_epochs": 2} if cls in ON_POLICY else REPLAY
    if cls in (IMPALAConfig, APPOConfig):
        made.env_runners(num_env_runners=0, rollout_fragment_length=16)
    made.training(**{**given, **training}).debugging(seed=0)
    return made.reporting(min_sample_timesteps_per_iteration=64 if cls in ON_POLICY else 24)


def train(made: AlgorithmConfig, num_iterations: int = 2) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with made.build() as algo:
        for _ in range(num_iterations):
            result = algo.train()["learners"]
        weights = {name: value.clone() for name, value in algo.get_module("default_policy").state_dict().items()}
        return weights, result["default_policy"]


def with_entropy(module: Any, batch: Any, coefficients: Mapping[str, float], default_loss: Any) -> Any:
    """The entropy bonus of PPO, added from outside."""
    loss, reported, outputs = default_loss(module, batch, coefficients)
    entropy = module.distribution.entropy(outputs["dist_inputs"]).mean()
    return loss - 0.05 * entropy, {**reported, "own_entropy": entropy.detach()}


@pytest.mark.parametrize("cls", ON_POLICY)
def test_an_auxiliary_loss_does_what_the_same_term_in_the_algorithm_does(cls: type[AlgorithmConfig]) -> None:
    weights, metrics = train(config(cls, loss=with_entropy, entropy_coeff=0.0))
    expected, _ = train(config(cls, entropy_coeff=0.05))
    plain, _ = train(config(cls, entropy_coeff=0.0))
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)
    assert not torch.equal(plain["policy_head.weight"], expected["policy_head.weight"])
    assert metrics["own_entropy"] == pytest.approx(metrics["entropy"], rel=1e-5)


class Counting(ActorCritic):
    """Counts the passes that learning makes."""

    num_passes = 0

    def policy_and_value(self, obs: Any) -> tuple[Tensor, Tensor]:
        type(self).num_passes += 1
        return super().policy_and_value(obs)


def test_no_forward_pass_is_made_twice() -> None:
    counts = []
    for loss in (None, with_entropy):
        Counting.num_passes = 0
        train(config(PPOConfig, loss=loss).rl_module(Counting), 1)
        counts.append(Counting.num_passes)
    assert counts[0] == counts[1] >= 4


# What the outputs of each default loss hold: names with shapes, for batches of B rows.
OUTPUTS: dict[str, tuple[type[AlgorithmConfig], dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "ppo": (PPOConfig, {}, {"dist_inputs": ("B", 4), "values": ("B",), "logp": ("B",), "ratio": ("B",)}),
    "impala": (IMPALAConfig, {}, {"dist_inputs": ("B", 4), "values": ("B",), "logp": ("B",)}),
    "appo": (
        APPOConfig,
        {"use_kl_loss": True},
        {"dist_inputs": ("B", 4), "values": ("B",), "logp": ("B",), "ratio": ("B",)},
    ),
    "dqn": (DQNConfig, {}, {"q_values": ("B", 4), "q_taken": ("B",), "targets": ("B",)}),
    "c51": (DQNConfig, {"num_atoms": 5}, {"logits": ("B", 4, 5), "targets": ("B", 5)}),
    "sac": (
        SACConfig,
        {},
        {"q_taken": (2, "B"), "targets": ("B",), "actions": ("B", 2), "logp": ("B",), "actor_loss": ()},
    ),
    "td3": (TD3Config, {"policy_delay": 1}, {"q_taken": (2, "B"), "targets": ("B",), "actions": ("B", 2)}),
}
CONSTANT = ("targets",)


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_outputs_of_a_default_loss_have_gradients(name: str) -> None:
    cls, training, expected = OUTPUTS[name]
    seen: list[Any] = []

    def note(module: Any, batch: Any, coefficients: Any, default_loss: Any) -> Any:
        loss, reported, outputs = default_loss(module, batch, coefficients)
        size = len(batch["obs"])
        shapes = {key: tuple("B" if n == size else n for n in value.shape) for key, value in outputs.items()}
        seen.append((shapes, {key for key, value in outputs.items() if not value.requires_grad}))
        return loss, {**reported, "note": torch.tensor(3.0)}

    weights, metrics = train(config(cls, loss=note, **training))
    assert seen[-1][0] == expected
    assert seen[-1][1] == set(CONSTANT) & expected.keys()
    assert metrics["note"] == 3.0
    plain, _ = train(config(cls, **training))  # and a loss that adds nothing changes nothing
    for key, value in plain.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-3, atol=1e-5)


def with_small_actions(module: Any, batch: Any, coefficients: Any, default_loss: Any) -> Any:
    losses, reported, outputs = default_loss(module, batch, coefficients)
    if "actor" in losses:  # the update moves the actor
        losses["actor"] = losses["actor"] + 100 * outputs["actions"].square().mean()
    return losses, reported


def test_one_group_of_parameters_may_get_another_loss() -> None:
    def size_of_actions(loss: Any) -> float:
        with config(TD3Config, loss=loss, lr=3e-3).build() as algo:
            for _ in range(6):
                algo.train()
            obs = np.random.default_rng(0).uniform(-1, 1, (50, 2)).astype(np.float32)
            return float(np.abs(algo.compute_actions(obs, explore=False)).mean())

    assert size_of_actions(with_small_actions) < 0.5 * size_of_actions(None)


def test_the_form_in_numpy_is_not_used_for_another_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_q_learning, "dqn_loss_in_numpy", None)  # which would be called, and fail
    types: set[type] = set()

    def note(module: Any, batch: Any, coefficients: Any, default_loss: Any) -> Any:
        types.add(type(batch["rewards"]))
        loss, reported, _ = default_loss(module, batch, coefficients)
        return 2 * loss, reported

    train(config(DQNConfig, loss=note).environment(CountingEnv, env_config={}))
    assert types == {Tensor}
    with pytest.raises(TypeError):
        train(config(DQNConfig).environment(CountingEnv, env_config={}))


@pytest.mark.parametrize(
    ("cls", "training"), [(PPOConfig, {}), (IMPALAConfig, {}), (APPOConfig, {}), (APPOConfig, {"use_kl_loss": True})]
)
def test_a_loss_may_leave_the_default_loss_out(cls: type[AlgorithmConfig], training: dict[str, Any]) -> None:
    def regression(module: Any, batch: Any, coefficients: Any, default_loss: Any) -> Any:
        return (module.value(batch["obs"]) - 7).square().mean(), {}

    made = config(cls, loss=regression, lr=0.1, num_epochs=10, **training)
    with made.build() as algo:
        for _ in range(3):
            algo.train()
        values = algo.learner_group.values("default_policy", np.arange(4))
    assert values == pytest.approx(7, abs=0.5)


@pytest.mark.parametrize("cls", ON_POLICY)
def test_modules_and_reconfigure_have_losses_of_their_own(cls: type[AlgorithmConfig]) -> None:
    made = config(cls).environment(make_multi_agent(IdentityEnv), env_config={"num_agents": 2})
    made.multi_agent(
        policies={"a", "b"},
        policy_mapping_fn=lambda agent, episode: "ab"[int(agent)],
        algorithm_config_overrides_per_module={"b": {"loss": with_entropy}},
    )
    with made.build() as algo:
        result = algo.train()["learners"]
        assert "own_entropy" in result["b"] and "own_entropy" not in result["a"]
    with config(cls).build() as algo:
        assert "own_entropy" not in algo.train()["learners"]["default_policy"]
        algo.reconfigure(loss=with_entropy)
        assert "own_entropy" in algo.train()["learners"]["default_policy"]
        algo.reconfigure(loss=None)


OF_A_USER = """
def doubled(module, batch, coefficients, default_loss):
    loss, reported, _ = default_loss(module, batch, coefficients)
    return 2 * loss, reported | {"single_loss": loss.detach()}
"""


def test_checkpoints_name_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "losses_of_a_user.py").write_text(OF_A_USER)
    monkeypatch.syspath_prepend(tmp_path)
    with config(PPOConfig, loss="losses_of_a_user:doubled").build() as algo:
        algo.train()
        algo.save(tmp_path / "saved")
    with Algorithm.from_checkpoint(tmp_path / "saved") as restored:
        assert restored.config.loss.__name__ == "doubled"
        metrics = restored.train()["learners"]["default_policy"]
    assert metrics["total_loss"] == pytest.approx(2 * metrics["single_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [*ON_POLICY, TD3Config])
def test_two_learners_use_it(cls: type[AlgorithmConfig]) -> None:
    loss = with_entropy if cls in ON_POLICY else with_small_actions
    made = config(cls, loss=loss).learners(num_learners=2).engine("process")
    _, metrics = train(made)
    assert np.isfinite(metrics["total_loss"])
    assert cls is TD3Config or metrics["own_entropy"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("cls", [*ON_POLICY, TD3Config])
def test_it_is_compiled_too(cls: type[AlgorithmConfig]) -> None:
    loss = with_entropy if cls in ON_POLICY else with_small_actions
    weights, _ = train(config(cls, loss=loss).learners(compile=True))
    plain, _ = train(config(cls, loss=loss))
    for name, value in plain.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)
    torch.compiler.reset()


def three(module: Any, batch: Any, coefficients: Any) -> Any:
    """A loss that does not take the default loss."""


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("entropy", r"loss"),
        (3, r"training: loss must be a function loss\(module, batch, coefficients, default_loss\), got 3"),
        (three, r"training: loss is called as loss\(module, batch, coefficients, default_loss\)"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(PPOConfig, loss=loss).validate()


def test_scalars_of_groups_stay_apart() -> None:
    def total(module: Any, batch: Any, coefficients: Any, default_loss: Any) -> Any:
        losses, reported, _ = default_loss(module, batch, coefficients)
        return torch.stack(list(losses.values())).sum(), reported

    with pytest.raises(LossError, match=r"of the groups of parameters \['critic', 'actor'\].*one scalar for all"):
        train(config(TD3Config, loss=total, policy_delay=1))


def test_what_a_loss_returns_is_checked() -> None:
    def returning(value: Any) -> Any:
        return lambda module, batch, coefficients, default_loss: value(default_loss(module, batch, coefficients))

    with pytest.raises(LossError, match="returned a tuple of 3"):
        train(config(PPOConfig, loss=returning(lambda found: found)))
    with pytest.raises(LossError, match="must report the column 'td_error'"):
        train(config(SACConfig, loss=returning(lambda found: (found[0], {}))))
    with pytest.raises(LossError, match=r"groups of parameters \['critic'\], but the update also moves \['actor'\]"):
        only = returning(lambda found: ({"critic": found[0]["critic"]}, found[1]))
        train(config(TD3Config, loss=only, policy_delay=1))
