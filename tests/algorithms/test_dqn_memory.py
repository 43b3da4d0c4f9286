"""DQN on sequences against a slow reference, and a maze that only a network with memory solves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from corral import DQNConfig, load_policy
from corral.algorithms.dqn import c51_loss, dqn_loss
from corral.core.tree import map_tree
from corral.errors import ConfigError
from corral.learners.minibatches import Cuts
from corral.learners.remote_learners import split_batches
from corral.modules.inference import Inference, RowStates
from corral.modules.recurrent_q_module import RecurrentQModule
from corral.testing import CountingEnv, TMaze

LSTM: dict[str, Any] = {"use_lstm": True, "lstm_cell_size": 8, "fcnet_hiddens": [8, 8], "max_seq_len": 4}
GRU: dict[str, Any] = {"use_gru": True, "gru_cell_size": 8, "fcnet_hiddens": [8, 8], "max_seq_len": 4}
STAGGERED: dict[str, Any] = {"episode_length": 6, "stagger": True, "ends": "alternate"}


def make_config(**settings: Any) -> DQNConfig:
    config = DQNConfig().environment(CountingEnv, env_config=STAGGERED, disable_env_checking=True)
    config.env_runners(num_envs_per_env_runner=3, rollout_fragment_length=2).debugging(seed=1)
    config.training(train_batch_size_per_learner=24, num_steps_sampled_before_learning_starts=60, gamma=0.9)
    config.training(training_intensity=None)
    copied: DQNConfig = config.copy(min_sample_timesteps_per_iteration=120, **settings)
    return copied


def to_tensors(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: map_tree(lambda leaf: torch.from_numpy(np.ascontiguousarray(leaf)), batch[name]) for name in batch}


def unrolled(module: Any, batch: dict[str, Any], target: bool) -> list[Tensor | None]:
    """Return the action values of each row, one step after another; `None` in the burn-in."""
    found: list[Tensor | None] = []
    state: Any = None
    for row in range(len(batch["learns"])):
        if batch["sequence_starts"][row]:
            state = map_tree(lambda leaf, row=row: leaf[row : row + 1], batch["states"])
        values, state = module.policy(batch["obs"][row : row + 1], state, target=target)
        if batch["burns_in"][row]:
            state = map_tree(Tensor.detach, state)
        found.append(None if batch["burns_in"][row] else values[0])
    return found


@pytest.mark.parametrize("settings", [LSTM, GRU], ids=["lstm", "gru"])
@pytest.mark.parametrize("double_q", [True, False])
@pytest.mark.parametrize("burn_in", [0, 3])
def test_the_loss_and_its_gradient_match_sequences_unrolled_one_by_one(
    settings: dict[str, Any], double_q: bool, burn_in: int
) -> None:
    config = make_config(model_config=settings, double_q=double_q, burn_in_len=burn_in, n_step=2)
    with config.build() as algo:
        algo.train()
        module = algo.get_module()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        batch = to_tensors(algo._draw("default_policy"))
        assert bool(burn_in) == bool(batch["burns_in"].any())
        lengths = torch.bincount(batch["sequence_starts"].cumsum(0) - 1, weights=batch["learns"].double())
        assert lengths.max() == 4 and len(lengths) == 6  # of max_seq_len=4 and a batch of 24 steps
        loss, reported = dqn_loss(module, batch, {}, double_q=double_q, huber=True)
        online, target = unrolled(module, batch, False), unrolled(module, batch, True)
        errors, losses = [], []
        for row in torch.nonzero(batch["learns"])[:, 0].tolist():
            later = row + int(batch["num_steps"][row])
            chooser, values = online[later] if double_q else target[later], target[later]
            assert chooser is not None and values is not None and online[row] is not None
            value = values[chooser.argmax()].detach()
            goal = batch["rewards"][row] + batch["discounts"][row] * ~batch["terminated"][row] * value
            taken = online[row][batch["actions"][row]]  # type: ignore[index]
            losses.append(functional.smooth_l1_loss(taken, goal))
            errors.append((row, (taken - goal).item()))
        expected = torch.stack(losses).mean()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
        for row, error in errors:
            assert reported["td_error"][row].item() == pytest.approx(error, abs=1e-4)
        assert reported["td_error"].shape == batch["learns"].shape
        learned = list(module.q.parameters())
        gradients = [torch.autograd.grad(one, learned) for one in (loss, expected)]
        for given, reference in zip(*gradients, strict=True):
            assert torch.allclose(given, reference, atol=1e-4, rtol=1e-3)


def test_one_atom_more_than_enough_gives_a_loss_on_the_same_steps() -> None:
    options = {"num_atoms": 11, "v_min": -5.0, "v_max": 30.0, "dueling": True, "noisy": True}
    with make_config(model_config=LSTM, **options).build() as algo:
        result = algo.train()["learners"]["default_policy"]
        assert np.isfinite(result["total_loss"])
        batch = to_tensors(algo._draw("default_policy"))
        _, reported = c51_loss(algo.get_module(), batch, {}, double_q=True)
        assert (reported["td_error"][~batch["learns"]] == 0).all() and (reported["td_error"][batch["learns"]] > 0).all()


class LearnsItsInitialState(RecurrentQModule):
    """Its initial state is a parameter."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.first = torch.nn.Parameter(torch.full((8,), 0.25))

    def initial_state(self) -> dict[str, Tensor]:
        return {"h": self.first}


class WithoutEncoder(RecurrentQModule):
    """Its network has no layer that remembers."""

    def make_network(self) -> torch.nn.Module:
        return torch.nn.Linear(2, self.num_actions)


def test_networks_of_other_forms_learn_or_are_refused() -> None:
    with make_config(model_config=GRU, module_class=LearnsItsInitialState, burn_in_len=2).build() as algo:
        assert np.isfinite(algo.train()["learners"]["default_policy"]["total_loss"])
        batch = algo._draw("default_policy")
        firsts = batch["sequence_starts"] & (batch["obs"][:, 1] == 0)
        assert batch["burns_in"][firsts].any() and (batch["states"]["h"][firsts] == 0.25).all()
        learned_first = batch["learns"] & (batch["obs"][:, 1] == 0)
        assert learned_first.any() and batch["sequence_starts"][learned_first].all()
    with pytest.raises(ConfigError, match=r"make_network\(\) returned Linear without encoder, streams, head"):
        make_config(module_class=WithoutEncoder).build()
    with make_config(model_config={**LSTM, "fcnet_hiddens": []}, dueling=True).build() as algo:
        assert np.isfinite(algo.train()["learners"]["default_policy"]["total_loss"])
    with pytest.raises(ConfigError, match=r"an even number of features: .* the cell size with memory"):
        make_config(model_config={**LSTM, "fcnet_hiddens": [], "lstm_cell_size": 7}, dueling=True).build()


def with_distance_to_rewards(module: Any, batch: Any, coefficients: Any, default_loss: Any) -> Any:
    loss, reported, outputs = default_loss(module, batch, coefficients)
    steps = batch["learns"]
    distance = (outputs["q_taken"] - batch["rewards"][steps]).square().mean()
    taken = outputs["q_values"][torch.arange(int(steps.sum())), batch["actions"][steps]]
    return loss + distance, {**reported, "distance": distance.detach(), "gap": (taken - outputs["q_taken"]).abs().max()}


def test_an_own_loss_finds_the_rows_of_the_steps() -> None:
    with make_config(model_config=LSTM, burn_in_len=3, loss=with_distance_to_rewards).build() as algo:
        result = algo.train()["learners"]["default_policy"]
        assert result["distance"] > 0 and result["gap"] == 0.0


def test_learners_count_the_steps_that_they_learn_from() -> None:
    with make_config(model_config=LSTM, burn_in_len=3).build() as algo:
        result = algo.train()["learners"]["default_policy"]
        assert 6 <= result["module_train_batch_size_mean"] <= 24  # six sequences of at most 4 steps
        module, drawn = algo.get_module(), algo._draw("default_policy")
        shards = [shard["m"] for shard in split_batches({"m": drawn}, 2)]
        cuts = [Cuts(shard) for shard in shards]
        for one in cuts:
            one.draw()
        sizes = [one.sizes() for one in cuts]
        learned, numbers = list(module.q.parameters()), [int(shard["learns"].sum()) for shard in shards]
        assert sizes == [[number] for number in numbers] and numbers == [one.size for one in cuts]
        assert numbers[0] * len(shards[1]["learns"]) != numbers[1] * len(shards[0]["learns"])

        def gradient_of(batch: dict[str, Any]) -> Tensor:
            loss, _ = dqn_loss(module, to_tensors(batch), {}, double_q=True, huber=True)
            return torch.cat([part.flatten() for part in torch.autograd.grad(loss, learned)])

        whole = sum(gradient_of(shard) * number / sum(numbers) for shard, number in zip(shards, numbers, strict=True))
        assert torch.allclose(whole, gradient_of(drawn), atol=1e-5)


def test_the_mean_error_is_the_mean_over_the_steps_that_are_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_config(model_config=LSTM, burn_in_len=3).build() as algo:
        batches, update = [], algo.update_module

        def update_module(module_id: str, batch: Any, settings: Any) -> dict[str, Any]:
            batches.append(batch)
            return {**update(module_id, batch, settings), "td_error": np.where(batch["learns"], 2.0, 0.0)}

        monkeypatch.setattr(algo, "update_module", update_module)
        assert algo.train()["learners"]["default_policy"]["td_error_mean"] == 2.0
        assert batches and not all(batch["learns"].all() for batch in batches)


@pytest.mark.slow
def test_two_learners_take_the_steps_of_one_learner_with_the_whole_batch() -> None:
    weights, losses = [], []
    for num_learners in (0, 2):
        config = make_config(model_config=LSTM, burn_in_len=3, num_learners=num_learners, engine_name="process")
        config.training(train_batch_size_per_learner=24 // max(1, num_learners), optimizer="sgd", lr=0.1)
        with config.build() as algo:
            losses.append(algo.train()["learners"]["default_policy"]["total_loss"])
            weights.append(torch.cat([part.flatten() for part in algo.get_module().q.parameters()]).clone())
    assert torch.allclose(*weights, atol=1e-5) and losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"dueling": True, "noisy": True}])
def test_numpy_takes_the_steps_of_torch(options: dict[str, Any]) -> None:
    with make_config(model_config=GRU, **options).build() as algo:
        module = algo.get_module()
        inference = Inference(module)
        inference.begin_sample(True, np.random.default_rng(0))
        assert inference.backend == "numpy"
        memory, obs = RowStates(module, 3), np.random.default_rng(0).standard_normal((5, 3, 2)).astype(np.float32)
        state = map_tree(torch.from_numpy, memory.states)
        for row in obs:
            given = memory.step(inference, row)
            with torch.no_grad():
                values, state = module.policy(torch.from_numpy(row), state)
            assert np.allclose(given, values, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "burn_in"), [("lstm", 0), ("gru", 4)])
def test_only_a_network_with_memory_remembers_the_way(kind: str, burn_in: int, tmp_path: Any) -> None:
    def best_return(iterations: int, model_config: Any, **training: Any) -> float:
        config = DQNConfig().environment(TMaze, env_config={"length": 4}).debugging(seed=0)
        config.env_runners(num_envs_per_env_runner=8, rollout_fragment_length=4)
        config.training(
            **{"lr": 1e-3, "train_batch_size_per_learner": 256, "num_steps_sampled_before_learning_starts": 500},
            **{"target_network_update_freq": 200, "n_step": 3, "gamma": 0.95, **training},
        )
        config.exploration(exploration_config={"epsilon_timesteps": 6000}).rl_module(model_config=model_config)
        best = -np.inf
        with config.build() as algo:
            for _ in range(iterations):
                best = np.fmax(best, algo.train()["env_runners"]["episode_return_mean"])
                if best > 0.85:
                    policy, right = load_policy(algo.save(tmp_path / "best")), TMaze({"length": 4})
                    for seed in range(6):
                        (obs, _), over = right.reset(seed=seed), False
                        policy.reset()
                        while not over:
                            obs, reward, terminated, truncated, _ = right.step(int(policy(obs)))
                            over = terminated or truncated
                        assert reward == 1.0
                    break
        return float(best)

    memory = {f"use_{kind}": True, f"{kind}_cell_size": 32, "max_seq_len": 16, "fcnet_hiddens": [32, 32]}
    assert best_return(16, memory, burn_in_len=burn_in) > 0.85
    if kind == "lstm":
        assert best_return(8, {"fcnet_hiddens": [32, 32]}) < 0.5
