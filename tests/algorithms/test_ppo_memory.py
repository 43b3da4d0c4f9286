"""PPO on sequences against slow references, and envs that only a policy with memory solves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional

from corral import PPOConfig, evaluate_policy
from corral.algorithms.ppo import ppo_loss
from corral.core.tree import map_tree
from corral.learners import learner as learner_module
from corral.modules.memory import initial_states, module_inputs
from corral.modules.module import ActorCritic
from corral.testing import CartPolePositions, CountingEnv, TMaze
from memory_modules import Accumulates

LSTM: dict[str, Any] = {"use_lstm": True, "lstm_cell_size": 8, "fcnet_hiddens": [8], "vf_share_layers": True}
GRU: dict[str, Any] = {"use_gru": True, "gru_cell_size": 8, "fcnet_hiddens": [8], "vf_share_layers": False}
STAGGERED: dict[str, Any] = {"episode_length": 6, "stagger": True, "ends": "alternate"}
GAMMA, LAMBDA = 0.9, 0.8


def make_config(**settings: Any) -> PPOConfig:
    config = PPOConfig().environment(CountingEnv, env_config=STAGGERED, disable_env_checking=True)
    config.env_runners(num_envs_per_env_runner=3).debugging(seed=1)
    config.training(train_batch_size_per_learner=48, minibatch_size=None, num_epochs=1, gamma=GAMMA, lambda_=LAMBDA)
    copied: PPOConfig = config.copy(**settings)
    return copied


def to_tensors(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: map_tree(lambda leaf: torch.from_numpy(np.ascontiguousarray(leaf)), batch[name]) for name in batch}


def unrolled_loss(module: Any, rollouts: list[Any], max_seq_len: int) -> Tensor:
    """Return the loss of the last rollout, episode by episode and step by step, from the first rollout on.

    The states are computed from the first step on, so the reference uses no state that the runner kept.
    """
    losses, advantages = [], []
    lane_states = [initial_states(module, 1) for _ in range(rollouts[0].num_envs)]
    for rollout in rollouts:
        for lane in range(rollout.num_envs):
            state, length, steps = lane_states[lane], 0, []
            for t in range(rollout.num_rows):
                if not rollout.valid[t, lane]:
                    continue
                obs = torch.from_numpy(rollout.obs[t : t + 1, lane])
                if obs[0, 1] == 0:
                    state, length = initial_states(module, 1), 0
                if length % max_seq_len == 0:
                    state = map_tree(Tensor.detach, state)
                length += 1
                value = module.value(obs, state)[0]
                outputs, state = module.policy(obs, state)
                final = rollout.final_obs.get((t, lane), rollout.obs[t + 1, lane])
                next_value = module.value(torch.from_numpy(final)[None], state)[0].item()
                over = rollout.terminated[t, lane], rollout.truncated[t, lane]
                delta = rollout.rewards[t, lane] + GAMMA * (not over[0]) * next_value - value.item()
                steps.append((outputs, value, int(rollout.actions[t, lane]), delta, any(over)))
            lane_states[lane] = map_tree(Tensor.detach, state)
            running, of_lane = 0.0, []
            for outputs, value, action, delta, over in reversed(steps):
                running = delta + (0.0 if over else GAMMA * LAMBDA * running)
                of_lane.append((outputs, value, action, running))
            if rollout is rollouts[-1]:
                losses += [(*step, step[1].item() + step[3]) for step in of_lane]
    advantages = np.array([step[3] for step in losses])
    scaled = (advantages - advantages.mean()) / advantages.std()
    total = torch.zeros(())
    for (outputs, value, action, _, target), advantage in zip(losses, scaled, strict=True):
        logp = functional.log_softmax(outputs, -1)[0, action]
        total = total - (logp - logp.detach()).exp() * advantage + 0.5 * (value - target) ** 2
    return total / len(losses)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize(
    ("settings", "cls"), [(LSTM, None), (GRU, None), ({}, Accumulates)], ids=["lstm", "gru", "by_hand"]
)
def test_the_gradient_is_the_gradient_of_episodes_unrolled_one_by_one(mode: str, settings: Any, cls: Any) -> None:
    max_seq_len = 4
    config = make_config(autoreset_mode=mode, module_class=cls, model_config={**settings, "max_seq_len": max_seq_len})
    with config.build() as algo:
        module = algo.get_module()
        with torch.no_grad():
            for parameter in module.parameters():  # the initial policy hardly depends on its state
                parameter.add_(0.3 * torch.randn_like(parameter))
        algo.learner_group.weights_version += 1
        algo.sync_weights()
        rollouts = [rollout for _ in range(2) for rollout in algo.sample(24)]
        batch = to_tensors(algo._batch("default_policy", rollouts[-1:]))
        loss, scalars = ppo_loss(
            module,
            batch,
            {"kl_coeff": 0.0, "entropy_coeff": 0.0, "clip_param": 0.2},
            vf_clip_param=None,
            vf_loss_coeff=0.5,
        )
        assert abs(scalars["mean_kl"].item()) < 1e-6  # the learner sees what the runner saw
        expected = unrolled_loss(module, rollouts, max_seq_len)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
        gradients = [torch.autograd.grad(one, list(module.parameters())) for one in (loss, expected)]
        for given, reference in zip(*gradients, strict=True):
            assert torch.allclose(given, reference, atol=1e-5, rtol=1e-3)
            assert reference.abs().max() > 1e-4


class Idle(ActorCritic):
    """The default module with a state that does nothing."""

    def initial_state(self) -> Any:
        return torch.zeros(1)

    def policy(self, obs: Any, state: Any) -> Any:  # type: ignore[override]
        return super().policy(obs), state

    def value(self, obs: Any, state: Any) -> Any:  # type: ignore[override]
        return super().value(obs)


@pytest.mark.parametrize(
    "options",
    [
        {"minibatch_size": 16, "num_epochs": 3},
        {"minibatch_size": 16, "vf_clip_param": 0.5, "entropy_coeff": 0.01, "kl_coeff": 0.2, "kl_target": 1e-4},
        {"minibatch_size": 16, "num_epochs": 6, "lr": 1e-2, "target_kl": 1e-3, "normalize_advantages": False},
    ],
    ids=["plain", "penalties", "stops"],
)
def test_a_state_that_does_nothing_gives_the_numbers_of_the_module_without_memory(options: dict[str, Any]) -> None:
    results = []
    for settings in (
        {"model_config": {"fcnet_hiddens": [8]}},
        {"model_config": {"fcnet_hiddens": [8], "max_seq_len": 1}, "module_class": Idle},
    ):
        with make_config(**options, **settings, num_envs_per_env_runner=1).build() as algo:
            reported = [algo.train()["learners"]["default_policy"] for _ in range(3)]
            results.append((reported, algo.get_module().state_dict()))
    (plain, plain_weights), (idle, idle_weights) = results
    for one, other in zip(plain, idle, strict=True):
        assert one.keys() == other.keys()
        assert [*one.values()] == pytest.approx([*other.values()], rel=1e-3, abs=1e-5)
    for name, weight in plain_weights.items():
        assert torch.allclose(weight, idle_weights[name], atol=1e-5)


def test_minibatches_are_sets_of_whole_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Watching(Accumulates):
        def policy_and_value(self, obs: Any, state: Any = None, mask: Any = None) -> Any:
            if self.training:
                seen.append((obs.clone(), mask.clone()))
            return super().policy_and_value(obs, state, mask)

    config = make_config(module_class=Watching, model_config={"max_seq_len": 5}, minibatch_size=12, num_epochs=2)
    with config.build() as algo:
        algo.train()
        batch = to_tensors(algo._batch("default_policy", algo.sample(48)))
        whole = algo.learner_group.dist_inputs("default_policy", {name: np.asarray(batch[name]) for name in batch})
        monkeypatch.setattr(learner_module, "EVALUATION_CHUNK", 11)
        parts = algo.learner_group.dist_inputs("default_policy", {name: np.asarray(batch[name]) for name in batch})
    assert np.allclose(whole, parts, atol=1e-6)
    assert len(seen) == 2 * 4
    for obs, mask in seen:
        for row, is_step in zip(obs, mask, strict=True):
            steps = row[is_step]
            assert len(steps) <= 5 and (steps[:, 0] == steps[0, 0]).all()  # of one episode
            assert torch.equal(steps[:, 1], steps[0, 1] + torch.arange(len(steps)))
    sizes = [int(mask.sum()) for _, mask in seen]
    assert sum(sizes[:4]) == sum(sizes[4:]) >= 48


@pytest.mark.slow
def test_two_learners_take_the_step_of_one_learner_with_the_whole_batch() -> None:
    weights = []
    for settings in ({"num_learners": 0}, {"num_learners": 2, "engine_name": "process"}):
        size = 48 // max(1, settings["num_learners"])  # type: ignore[type-var]
        config = make_config(model_config={**LSTM, "max_seq_len": 4}, train_batch_size_per_learner=size, **settings)
        with config.build() as algo:
            algo.train()
            weights.append({name: weight.clone() for name, weight in algo.get_module().state_dict().items()})
    for name, weight in weights[0].items():
        assert torch.allclose(weight, weights[1][name], atol=1e-5), name


def maze_config(length: int, seed: int, **model_config: Any) -> PPOConfig:
    config = PPOConfig().environment(TMaze, env_config={"length": length}).debugging(seed=seed)
    config.env_runners(num_envs_per_env_runner=32).rl_module(model_config={"fcnet_hiddens": [32], **model_config})
    return config.training(
        train_batch_size_per_learner=2048, num_epochs=8, minibatch_size=512, lr=3e-3, entropy_coeff=0.01
    )


def best_return(config: PPOConfig, iterations: int, enough: float) -> float:
    """Train until the mean return is enough, and return the best one."""
    best = -np.inf
    with config.build() as algo:
        for _ in range(iterations):
            best = np.fmax(best, algo.train()["env_runners"]["episode_return_mean"])
            if best >= enough:
                break
    return float(best)


def test_only_a_policy_with_memory_remembers_the_way() -> None:
    memory = {"use_lstm": True, "lstm_cell_size": 32, "max_seq_len": 16}
    assert best_return(maze_config(4, seed=0, **memory), 25, 0.9) >= 0.9
    assert best_return(maze_config(4, seed=0), 8, 0.9) < 0.5  # no policy without memory has more than 0


# One seed of five may fail: which one depends on how the processor rounds.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["use_lstm", "use_gru"])
def test_memory_solves_a_maze_of_length_20(kind: str) -> None:
    returns = [best_return(maze_config(20, seed, **{kind: True}, max_seq_len=64), 80, 0.9) for seed in range(5)]
    assert sorted(returns)[1] >= 0.9, returns


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_nothing_solves_a_maze_of_length_20_without_memory(seed: int) -> None:
    assert best_return(maze_config(20, seed), 40, 0.9) < 0.5


def pole_config(seed: int, **model_config: Any) -> PPOConfig:
    config = PPOConfig().environment(CartPolePositions).env_runners(num_envs_per_env_runner=16).debugging(seed=seed)
    config.rl_module(model_config={"fcnet_hiddens": [64], **model_config})
    return config.training(
        train_batch_size_per_learner=2048, minibatch_size=512, num_epochs=10, lr=3e-3, vf_loss_coeff=0.1
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["use_lstm", "use_gru"])
def test_memory_balances_a_pole_without_velocities(kind: str) -> None:
    """Without exploration, 475 is the return at which Gymnasium calls CartPole-v1 solved."""

    def greedy_return(seed: int) -> float:
        greedy = 0.0
        with pole_config(seed, **{kind: True}).build() as algo:
            while greedy < 475 and algo.num_env_steps_sampled_lifetime < 400_000:
                if algo.train()["env_runners"]["episode_return_mean"] >= 300:
                    evaluated = evaluate_policy(algo, CartPolePositions, episodes=20, num_envs=10, seed=1)
                    greedy = evaluated.episode_return_mean
        return greedy

    returns = [greedy_return(seed) for seed in range(5)]
    assert sorted(returns)[1] >= 475, returns


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_nothing_balances_the_pole_without_memory(seed: int) -> None:
    assert best_return(pole_config(seed), 100, 300.0) < 100


def test_spaces_of_all_kinds_have_a_form_on_sequences() -> None:
    for actions in (spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (2,), np.float32)):
        module = PPOConfig().rl_module(model_config=LSTM).module_spec(spaces.Discrete(3, start=5), actions).build()
        starts = torch.tensor([True, False, True])
        states = initial_states(module, 3)
        batch = {"obs": torch.tensor([5, 6, 7]), "states": states, "sequence_starts": starts}
        outputs, values = module.policy_and_value(*module_inputs(batch))
        assert outputs.shape == (3, module.distribution.num_inputs) and values.shape == (3,)
