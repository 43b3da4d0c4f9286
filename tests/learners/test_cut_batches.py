"""Several learners: the gradients of uneven parts of a batch, weighted by rows, are the gradient of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral.algorithms.registry import config_class
from corral.core.tree import map_tree
from corral.learners.minibatches import Cuts
from corral.learners.update import to_tensors

OBS = spaces.Box(-10, 10, (3,), np.float32)
BOX, DISCRETE = spaces.Box(-2, 2, (1,), np.float32), spaces.Discrete(3)
CASES = {
    "BC": {"entropy_coeff": 0.1},
    "BC with memory": {"burn_in_len": 2},
    "MARWIL": {},
    "MARWIL with a start": {"moving_average_sqd_adv_norm_start": 30.0},
    "DQN": {"imitation_coeff": 1.0},
    "DQN with few recorded": {"imitation_coeff": 1.0},
    "DQN with atoms": {"num_atoms": 11},
    "SAC": {"imitation_coeff": 1.0},
    "SAC with few recorded": {"imitation_coeff": 1.0},
    "SAC with atoms": {"num_atoms": 11},
    "SAC discrete": {"imitation_coeff": 1.0},
    "TQC": {"imitation_coeff": 1.0},
    "TD3": {"imitation_coeff": 1.0},
    "TD3 with atoms": {"num_atoms": 11},
    "DDPG": {"imitation_coeff": 1.0},
    "CQL": {"imitation_coeff": 1.0},
    "CQL that imitates first": {"num_imitation_updates": 5},
    "CQL with a threshold": {"lagrangian_threshold": 1.0},
    "CQL discrete": {},
    "IQL": {},
    "IQL discrete": {},
}
"""Each built-in loss that learns from transitions, with what takes statistics of a batch.

CrossQ is not here: its layers normalise by the statistics of each learner's own rows, as `docs/learners.md` says.
"""


def gradient(module: Any, loss: Any, batch: Any, coefficients: Any) -> torch.Tensor:
    module.zero_grad()
    total, _ = loss(module, to_tensors(batch, torch.device("cpu")), coefficients)
    (sum(total.values()) if isinstance(total, dict) else total).backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in module.parameters()])


def assert_parts_are_the_whole(module: Any, loss: Any, batch: Any, coefficients: Any) -> None:
    """Cut a batch after the first fifth of its units."""
    with torch.no_grad():  # values and actions that differ between rows
        for index, parameter in enumerate(module.parameters()):
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    cuts = Cuts(batch)
    place = int(cuts.bounds[max(1, cuts.num_units // 5)])
    parts = [map_tree(lambda column, rows=rows: column[rows], batch) for rows in (np.s_[:place], np.s_[place:])]
    shares = [Cuts(part).size / cuts.size for part in parts]
    assert shares[0] < 0.4 and sum(shares) == pytest.approx(1)
    whole = gradient(module, loss, batch, coefficients)
    both = sum(share * gradient(module, loss, part, coefficients) for share, part in zip(shares, parts, strict=True))
    assert whole.norm() > 1e-3
    assert float((whole - both).norm() / whole.norm()) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_parts_of_a_batch_of_recorded_steps_give_the_gradient_of_the_whole(case: str) -> None:
    name = case.split()[0]
    is_discrete = "discrete" in case or name in ("DQN", "MARWIL")
    rng, size = np.random.default_rng(0), 300
    actions: Any = rng.integers(0, 3, size) if is_discrete else rng.uniform(-2, 2, (size, 1)).astype(np.float32)
    ends = np.arange(1, size + 1)
    data = {
        "obs": rng.normal(size=(size, 3)).astype(np.float32),
        "actions": actions,
        "rewards": rng.normal(size=size),
        "terminated": ends % 14 == 0,
        "truncated": ends % 14 == 7,
    }
    config: Any = config_class(name)().debugging(seed=2).offline_data(input_=data)
    config.environment(observation_space=OBS, action_space=DISCRETE if is_discrete else BOX)
    config.training(train_batch_size_per_learner=32, **CASES[case])
    memory = {"use_gru": True, "gru_cell_size": 8, "max_seq_len": 4} if "memory" in case else {}
    config.rl_module(model_config={"fcnet_hiddens": [8], **memory})
    if hasattr(config, "num_offline_updates"):
        config.training(num_offline_updates=None)
    with config.build() as algorithm:
        module, loss = algorithm.get_module(), algorithm.loss_of("default_policy")
        if hasattr(algorithm, "_draw_mixed"):
            batch, is_recorded = algorithm._draw_mixed("default_policy", algorithm.recorded)
            if "few" in case:
                is_recorded = np.arange(32) % 9 == 4
            batch = algorithm._mark_recorded("default_policy", batch, is_recorded)
            batch = algorithm.prepare_batch("default_policy", batch)
            coefficients = algorithm._imitation_coefficients("default_policy", batch) | {"actor_coeff": 1.0}
            assert not CASES[case].get("imitation_coeff") or name == "DQN" or coefficients["imitation_unit"] != 1
            coefficients |= {"imitates": float("first" in case)} if name == "CQL" else {}
        else:
            batch = algorithm._draw("default_policy", algorithm.data["default_policy"].train)
            coefficients = algorithm.coefficients("default_policy")
        assert_parts_are_the_whole(module, loss, batch, coefficients)


@pytest.mark.parametrize("algo", ["PPO", "APPO", "IMPALA"])
def test_parts_of_a_batch_of_sampled_steps_give_the_gradient_of_the_whole(algo: str) -> None:
    seen: list[Any] = []

    def watched(module: Any, batch: Any, coefficients: Any, default_loss: Any) -> Any:
        seen.append((map_tree(lambda leaf: leaf.numpy().copy(), batch), dict(coefficients), default_loss))
        return default_loss(module, batch, coefficients)[:2]

    config: Any = config_class(algo)().environment("CartPole-v1").debugging(seed=0)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=4, rollout_fragment_length=20)
    config.training(train_batch_size_per_learner=80, loss=watched, **({"num_epochs": 1} if algo == "PPO" else {}))
    if algo == "PPO":
        config.training(minibatch_size=80)
    config.rl_module(model_config={"fcnet_hiddens": [8]}).reporting(min_sample_timesteps_per_iteration=80)
    with config.build() as algorithm:
        algorithm.train()
        batch, coefficients, default_loss = seen[0]
        module = algorithm.get_module()
        assert_parts_are_the_whole(module, lambda *given: default_loss(*given)[:2], batch, coefficients)
