"""Write the frozen checkpoints that every later version of Corral must load, one for each algorithm.

`python tests/checkpoint/make_samples.py` writes `samples/version-<format version>/<algorithm>/`, and next to each
`<algorithm>.json` with what the algorithm did. Run it when the format version rises, or for an algorithm that has no
sample of this version yet. A sample that a released Corral has written is never written again: it stands for the
checkpoints that users have.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from corral import Algorithm
from corral.algorithms.config.config import AlgorithmConfig
from corral.algorithms.registry import ALGORITHMS, config_class
from corral.runs.checkpoint import FORMAT_VERSION

SAMPLES = Path(__file__).parent / "samples"
NUM_ITERATIONS = 10
# What differs from algorithm to algorithm; all of them are small.
OFF_POLICY = {
    "train_batch_size_per_learner": 8,
    "num_steps_sampled_before_learning_starts": 8,
    "replay_buffer_config": {"capacity": 64},
    "store_buffer_in_checkpoints": True,
}
FROM_DATA = {"train_batch_size_per_learner": 8, "num_updates_per_iteration": 2}
TRAINING: dict[str, dict[str, Any]] = {
    "PPO": {"train_batch_size_per_learner": 32, "minibatch_size": 16, "num_epochs": 1, "lr": [[0, 1e-2], [1000, 0.0]]},
    "PQN": {"train_batch_size_per_learner": 32, "minibatch_size": 16, "num_epochs": 1},
    "APPO": {"train_batch_size_per_learner": 16, "use_kl_loss": True, "circular_buffer_num_batches": 2},
    "IMPALA": {"train_batch_size_per_learner": 16},
    "DQN": OFF_POLICY,
    "SAC": OFF_POLICY,
    "TQC": OFF_POLICY,
    "CrossQ": OFF_POLICY,
    "TD3": OFF_POLICY,
    "DDPG": OFF_POLICY,
    "DreamerV3": {**OFF_POLICY, "model_size": "nano", "training_intensity": 1.0},
    "BC": FROM_DATA,
    "MARWIL": FROM_DATA,
    "CQL": {**FROM_DATA, "num_offline_updates": 4, **OFF_POLICY, "lagrangian": True},
    "IQL": {**FROM_DATA, "num_offline_updates": 4, **OFF_POLICY},
}
LEARNS_FROM_DATA = ("BC", "MARWIL", "CQL", "IQL")
RECORDED = {
    "obs": np.tile(np.arange(4), 4),
    "actions": np.tile(np.arange(4), 4),
    "rewards": np.ones(16, np.float32),
    "terminated": np.tile([False, False, False, True], 4),
}


def sample_config(algo: str) -> AlgorithmConfig:
    """Return the small config of an algorithm's sample."""
    space = "box" if algo in ("SAC", "TQC", "CrossQ", "TD3", "DDPG") else "discrete"
    config = (
        config_class(algo)()
        .environment("corral.testing:IdentityEnv", env_config={"space": space})
        .env_runners(num_envs_per_env_runner=2)
        .training(**TRAINING[algo])
        .rl_module(model_config={"fcnet_hiddens": [4]})
        .debugging(seed=0)
    )
    if algo == "DreamerV3":
        config.rl_module(model_config={"max_seq_len": 4})
    if algo in LEARNS_FROM_DATA:
        config.offline_data(input_=RECORDED)
    if algo in ("APPO", "IMPALA"):
        config.env_runners(num_env_runners=0, rollout_fragment_length=8)
    if algo not in ("PPO", "PQN", "BC", "MARWIL"):
        config.reporting(min_sample_timesteps_per_iteration=100)
    return config


def behaviour(algorithm: Algorithm) -> dict[str, Any]:
    """Return what a restored algorithm must do as the saved one did."""
    is_box = algorithm.config.env_config["space"] == "box"
    obs = np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2) if is_box else np.arange(4)
    policy: Any = algorithm.acting_policy()
    if policy.has_memory:
        actions, _ = algorithm.compute_actions(obs, state=policy.initial_states(4), explore=False)
    else:
        actions = algorithm.compute_actions(obs, explore=False)
    return {
        "training_iteration": algorithm.training_iteration,
        "num_env_steps_sampled_lifetime": algorithm.num_env_steps_sampled_lifetime,
        "num_rows_in_buffer": len(getattr(algorithm, "local_replay_buffer", ())),
        "actions": np.asarray(actions).tolist(),
    }


def make_sample(algo: str, directory: Path) -> None:
    """Train for some iterations, and write the checkpoint and what the algorithm did."""
    path = directory / algo
    shutil.rmtree(path, ignore_errors=True)
    with sample_config(algo).build() as algorithm:
        for _ in range(NUM_ITERATIONS):
            algorithm.train()
        algorithm.save(path)
        did = behaviour(algorithm)
    (path / ".lock").unlink()
    (directory / f"{algo}.json").write_text(json.dumps(did, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or ALGORITHMS:
        make_sample(name, SAMPLES / f"version-{FORMAT_VERSION}")
