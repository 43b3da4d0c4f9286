"""SAC on sequences: features against single steps, gradients by group, and a maze that only memory solves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from corral import SACConfig, load_policy
from corral.algorithms.sac import sac_loss
from corral.core.tree import map_tree
from corral.modules.inference import Inference, RowStates
from corral.testing import CountingEnv, TMaze

LSTM: dict[str, Any] = {"use_lstm": True, "lstm_cell_size": 8, "fcnet_hiddens": [8, 8], "max_seq_len": 4}
GRU: dict[str, Any] = {"use_gru": True, "gru_cell_size": 8, "fcnet_hiddens": [8], "max_seq_len": 4}


class BoxEnv(CountingEnv):
    """A `CountingEnv` whose actions are a Box."""

    action_space: Any = spaces.Box(-1.0, 1.0, (2,), np.float32)


def make_config(env: Any, **settings: Any) -> SACConfig:
    config = SACConfig().environment(
        env, env_config={"episode_length": 6, "stagger": True, "ends": "alternate"}, disable_env_checking=True
    )
    config.env_runners(num_envs_per_env_runner=3, rollout_fragment_length=2).debugging(seed=1)
    config.training(train_batch_size_per_learner=24, num_steps_sampled_before_learning_starts=60, gamma=0.9)
    copied: SACConfig = config.copy(min_sample_timesteps_per_iteration=90, **settings)
    return copied


def batch_of(algo: Any) -> dict[str, Any]:
    drawn = algo._draw("default_policy")
    batch = algo.prepare_batch("default_policy", drawn)
    return {name: map_tree(lambda leaf: torch.from_numpy(np.ascontiguousarray(leaf)), batch[name]) for name in batch}


@pytest.mark.parametrize("settings", [LSTM, GRU], ids=["lstm", "gru"])
@pytest.mark.parametrize("burn_in", [0, 3])
def test_features_match_single_steps(settings: dict[str, Any], burn_in: int) -> None:
    with make_config(CountingEnv, model_config=settings, burn_in_len=burn_in, n_step=2).build() as algo:
        algo.train()
        module: Any = algo.get_module()
        batch = batch_of(algo)
        steps = module.at_steps(batch)
        found: dict[bool, list[Any]] = {False: [], True: []}
        for target, encoder in ((False, module.encoder), (True, module.target_encoder)):
            for row in range(len(batch["learns"])):
                if batch["sequence_starts"][row]:
                    state = map_tree(lambda leaf, row=row: leaf[row : row + 1], batch["states"])
                features, state = encoder.step(batch["obs"][row : row + 1], state)
                found[target].append(features[0])
        rows = torch.nonzero(batch["learns"])[:, 0].tolist()
        later = [row + int(batch["num_steps"][row]) for row in rows]
        for given, target, places in (
            (steps["obs"]["online"], False, rows),
            (steps["next_obs"]["online"], False, later),
            (steps["next_obs"]["target"], True, later),
        ):
            assert torch.allclose(given, torch.stack([found[target][row] for row in places]), atol=1e-5)
        assert torch.equal(steps["rewards"], batch["rewards"][rows])
        assert not steps["next_obs"]["online"].requires_grad and not steps["next_obs"]["target"].requires_grad


def plain_losses(module: Any, steps: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the losses of critics and actor on features, written out for each form of actions."""
    seen, later, alpha = steps["obs"]["online"], steps["next_obs"], module.log_alpha.exp().item()
    goes_on = steps["discounts"] * ~steps["terminated"]
    if module.is_discrete:
        probs = module.actor(later["online"]).softmax(-1)
        next_q = torch.minimum(*(critic(later["target"]) for critic in module.target_q))
        next_value = (probs * (next_q - alpha * probs.log())).sum(-1)
        taken = [critic(seen).gather(1, steps["actions"][:, None])[:, 0] for critic in module.q]
        probs = module.actor(seen.detach()).softmax(-1)
        lowest = torch.minimum(*(critic(seen) for critic in module.q)).detach()
        actor_loss = (probs * (alpha * probs.log() - lowest)).sum(-1).mean()
    else:
        sample = module.distribution.squashed_sample
        actions, logp = sample(module.actor(later["online"]), steps["next_noise"])
        next_value = torch.minimum(*(critic(later["target"], actions) for critic in module.target_q)) - alpha * logp
        taken = [critic(seen, steps["actions"].tanh()) for critic in module.q]
        actions, logp = sample(module.actor(seen.detach()), steps["noise"])
        actor_loss = (alpha * logp - torch.minimum(*(critic(seen.detach(), actions) for critic in module.q))).mean()
    targets = (steps["rewards"] + goes_on * next_value).detach()
    critic_loss = sum((0.5 * (values - targets).square().mean() for values in taken), torch.zeros(()))
    return critic_loss, actor_loss


@pytest.mark.parametrize("env", [CountingEnv, BoxEnv], ids=["discrete", "box"])
def test_the_losses_are_computed_from_features_and_only_the_critics_train_the_encoder(env: Any) -> None:
    with make_config(env, model_config=LSTM, burn_in_len=2).build() as algo:
        module: Any = algo.get_module()
        results = algo.train()["learners"]["default_policy"]
        assert np.isfinite(results["critic_loss"]) and results["gradients_critic_optimizer_global_norm"] > 0
        with torch.no_grad():
            for parameter in module.parameters():  # targets too, so that they differ
                parameter.add_(0.3 * torch.randn_like(parameter))
        batch = batch_of(algo)
        loss, reported = sac_loss(module, batch, {}, target_entropy=None)
        assert reported["td_error"].shape == batch["learns"].shape
        assert (reported["td_error"][~batch["learns"]] == 0).all()
        critic_loss, actor_loss = plain_losses(module, module.at_steps(batch))
        assert reported["critic_loss"].item() == pytest.approx(critic_loss.item(), rel=1e-4)
        assert reported["actor_loss"].item() == pytest.approx(actor_loss.item(), rel=1e-4)
        groups = module.parameter_groups()
        assert {*module.encoder.parameters()} < {*groups["critic"]}
        for name, expected in (("critic", critic_loss), ("actor", actor_loss)):
            gradients = [torch.autograd.grad(one, groups[name], retain_graph=True) for one in (loss, expected)]
            for given, reference in zip(*gradients, strict=True):
                torch.testing.assert_close(given, reference, rtol=1e-3, atol=1e-4)


def test_targets_follow_encoder_and_critics() -> None:
    with make_config(CountingEnv, model_config=LSTM).build() as algo:
        module: Any = algo.get_module()
        with torch.no_grad():
            for parameter in (*module.encoder.parameters(), *module.q.parameters()):
                parameter.add_(1.0)
        targets = [*module.target_encoder.parameters(), *module.target_q.parameters()]
        before = [parameter.clone() for parameter in targets]
        module.update_target(0.25)
        for was, now in zip(before, targets, strict=True):
            torch.testing.assert_close(now, was + 0.25)


@pytest.mark.parametrize("env", [CountingEnv, BoxEnv], ids=["discrete", "box"])
def test_numpy_takes_the_steps_of_torch(env: Any) -> None:
    module = make_config(env, model_config=LSTM).module_spec(env.observation_space, env.action_space).build()
    inference = Inference(module)
    assert inference.backend == "numpy"
    memory, state = RowStates(module, 3), map_tree(torch.from_numpy, RowStates(module, 3).states)
    for row in np.random.default_rng(0).standard_normal((5, 3, 2)).astype(np.float32):
        given = memory.step(inference, row)
        with torch.no_grad():
            outputs, state = module.policy(torch.from_numpy(row), state)  # type: ignore[call-arg]
        assert np.allclose(given, outputs, atol=1e-5)


@pytest.mark.slow
def test_a_policy_with_memory_remembers_the_way(tmp_path: Any) -> None:
    def best_return(iterations: int, **model_config: Any) -> float:
        config = SACConfig().environment(TMaze, env_config={"length": 4}).debugging(seed=0)
        config.env_runners(num_envs_per_env_runner=8, rollout_fragment_length=4)
        config.training(
            **{"lr": 1e-3, "train_batch_size_per_learner": 256, "num_steps_sampled_before_learning_starts": 500},
            **{"tau": 0.02, "initial_alpha": 0.05, "target_entropy": 0.1, "gamma": 0.95, "n_step": 3},
        )
        config.rl_module(model_config={"fcnet_hiddens": [32, 32], **model_config})
        best = -np.inf
        with config.build() as algo:
            for _ in range(iterations):
                best = np.fmax(best, algo.train()["env_runners"]["episode_return_mean"])
                if best > 0.8:
                    assert load_policy(algo.save(tmp_path / "best")).has_memory
                    break
        return float(best)

    assert best_return(16, use_gru=True, gru_cell_size=32, max_seq_len=16) > 0.8
