"""Every built-in loss is a mean over rows: parts of a batch, weighted by rows, have the gradients of the whole batch.

Several learners see a part each, so a loss may not depend on statistics of its part. CrossQ is the exception: its
layers normalise by the rows they see, as docs/algorithms/crossq.md says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from small_configs import TRAINING, small_config

from corral.algorithms.registry import ALGORITHMS, config_class
from corral.core.tree import map_tree
from corral.learners.minibatches import Cuts
from corral.learners.update import to_tensors
from exact_runs import Drift

EARLY = {"num_steps_sampled_before_learning_starts": 32, "train_batch_size_per_learner": 32}
LSTM = {"use_lstm": True, "max_seq_len": 5, "fcnet_hiddens": [8], "lstm_cell_size": 8}


def cut_unevenly(batch: Any) -> list[tuple[Any, int]]:
    """Return a small first part and the rest, each with the number of rows that its loss is a mean over."""
    units = Cuts(batch).bounds
    cut = int(units[max(1, (len(units) - 1) // 5)])
    parts = [map_tree(lambda column, part=part: column[part], batch) for part in (slice(0, cut), slice(cut, None))]
    return [(part, Cuts(part).size) for part in parts]


def gradients(algorithm: Any, module_id: str, batch: Any, coefficients: Mapping[str, float]) -> torch.Tensor:
    """Return the gradients of all parameters by the loss of a module, as one vector; sums the losses of groups."""
    module, loss = algorithm.learner_group.get_module(module_id), algorithm.modules.loss_of(module_id)
    module.zero_grad()
    torch.manual_seed(0)  # of losses that draw
    total, _ = loss(module, to_tensors(batch, torch.device("cpu")), coefficients)
    sum(total.values() if isinstance(total, Mapping) else [total]).backward()
    found = [torch.zeros_like(each) if each.grad is None else each.grad for each in module.parameters()]
    module.zero_grad()
    return torch.cat([each.flatten() for each in found]).double()


def check_parts(config: Any) -> None:
    """Train until the gradients of three batches were compared with the gradients of their parts."""
    differences = []
    with config.build() as algorithm:
        learner = algorithm.learner_group.learner_here
        update = learner.update

        def compare(batches: Any, settings: Any) -> Any:
            for module_id, batch in batches.items() if len(differences) < 3 else ():
                coefficients = settings[module_id].coefficients
                whole = gradients(algorithm, module_id, batch, coefficients)
                parts = cut_unevenly(batch)
                assert parts[0][1] < parts[1][1]
                size = sum(rows for _, rows in parts)
                joined = sum(gradients(algorithm, module_id, part, coefficients) * rows / size for part, rows in parts)
                differences.append(float((whole - joined).norm() / whole.norm()))
            return update(batches, settings)

        learner.update = compare
        while len(differences) < 3:
            algorithm.train()
    assert max(differences) < 1e-4


SAMPLING: list[tuple[str, str | None, dict[str, Any]]] = [
    (
        "PPO",
        None,
        {"normalize_advantages": True, "kl_target": 0.01, "kl_coeff": 0.2, "entropy_coeff": 0.01, "vf_clip_param": 1.0},
    ),
    ("PPO", "box", {}),
    ("APPO", None, {"use_kl_loss": True}),
    ("IMPALA", None, {}),
    ("PQN", None, {}),
    ("DQN", None, {"replay_buffer_config": {"type": "prioritized", "capacity": 2000}, "dueling": True, "n_step": 3}),
    ("DQN", None, {"num_atoms": 11}),
    ("SAC", "box", EARLY),
    ("SAC", "discrete", EARLY),
    ("SAC", "box", {**EARLY, "num_atoms": 11}),
    ("TQC", "box", EARLY),
    ("TD3", "box", EARLY),
    ("DDPG", "box", EARLY),
    ("DreamerV3", None, EARLY | {"train_batch_size_per_learner": 80}),
    ("DreamerV3", "box", EARLY | {"train_batch_size_per_learner": 80}),
]


def test_every_algorithm_is_here() -> None:
    sampling, recorded = {algo for algo, *_ in SAMPLING}, {algo.split()[0] for algo, _ in RECORDED}
    assert sampling == TRAINING.keys() - {"CrossQ"}
    assert sampling | recorded == ALGORITHMS.keys() - {"CrossQ"}


@pytest.mark.parametrize(("algo", "space", "training"), SAMPLING)
def test_of_sampled_steps(algo: str, space: str | None, training: dict[str, Any]) -> None:
    check_parts(small_config(algo, space, **training))


@pytest.mark.parametrize("algo", ["PPO", "APPO", "DQN", "SAC"])
def test_with_memory(algo: str) -> None:
    settings = {"num_steps_sampled_before_learning_starts": 64} if algo in ("DQN", "SAC") else {}
    check_parts(small_config(algo, **settings).rl_module(model_config=LSTM))


def recorded(is_box: bool) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    actions: Any = rng.uniform(-0.9, 0.9, (200, 2)) if is_box else rng.integers(0, 3, 200)
    ends = np.arange(1, 201)
    return {
        "obs": rng.normal(size=(200, 3)).astype(np.float32),
        "actions": actions,
        "rewards": rng.normal(size=200),
        "terminated": ends % 10 == 0,
        "truncated": (ends % 5 == 0) & (ends % 10 != 0),
    }


RECORDED: list[tuple[str, dict[str, Any]]] = [
    ("BC", {"entropy_coeff": 0.01}),
    ("MARWIL", {}),
    ("MARWIL", {"moving_average_sqd_adv_norm_start": 4.0}),
    ("IQL", {}),
    ("IQL with discrete actions", {}),
    ("CQL with discrete actions", {}),
    ("SAC with discrete actions", {"imitation_coeff": 1.0, "num_offline_updates": None}),
    ("BC with memory", {"burn_in_len": 2}),
    ("CQL", {"num_imitation_updates": 1}),
    ("CQL", {"lagrangian": True}),
    *((algo, {"imitation_coeff": 1.0, "num_offline_updates": None}) for algo in ("DQN", "SAC", "TQC", "TD3", "CQL")),
    ("SAC", {"imitation_coeff": 1.0, "recorded_fraction": 0.2, "num_offline_updates": 0}),
    ("DQN", {"imitation_coeff": 1.0, "recorded_fraction": 0.2, "num_offline_updates": 0}),
]


@pytest.mark.parametrize(("algo", "training"), RECORDED)
def test_of_recorded_steps(algo: str, training: dict[str, Any]) -> None:
    name = algo.split()[0]
    is_box = name in ("SAC", "TQC", "TD3", "CQL", "IQL") and "discrete" not in algo
    config: Any = config_class(name)().environment(Drift, env_config={"box": is_box}).debugging(seed=1)
    config.offline_data(input_=recorded(is_box))
    config.rl_module(model_config=LSTM if "memory" in algo else {"fcnet_hiddens": [8]})
    config.training(train_batch_size_per_learner=32, lr=3e-2, **training)
    if training.get("num_offline_updates", 1) == 0:
        config.training(num_steps_sampled_before_learning_starts=20)
        config.reporting(min_sample_timesteps_per_iteration=40)
    else:
        config.training(num_updates_per_iteration=2)
    check_parts(config)
