"""An algorithm as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import corral
from corral.checkpoint.directory import Checkpoint, write_checkpoint
from corral.checkpoint.settings import unnamed
from corral.errors import CheckpointError
from corral.loggers.run import plain, run_name

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm


def save_algorithm(algorithm: Algorithm, path: str | Path | None) -> Path:
    """Write a checkpoint of an algorithm; see `Algorithm.save`."""
    config, state = algorithm.config, algorithm.get_state()
    if path is None:
        path = Path("checkpoints") / f"{run_name(config)}-{algorithm.training_iteration}"
    learners = dict(state["learners"])
    weights = learners.pop("weights")
    return write_checkpoint(
        path,
        state={**state, "learners": learners},
        weights=weights,
        config=plain(config.to_dict()),
        metadata={
            "corral_version": corral.__version__,
            "algo": config.algo_name,
            "training_iteration": algorithm.training_iteration,
            "num_env_steps_sampled_lifetime": algorithm.num_env_steps_sampled_lifetime,
            "unnamed": unnamed(config),
        },
    )


def algorithm_state(checkpoint: Checkpoint, algo_name: str) -> dict[str, Any]:
    """Return the state for `Algorithm.set_state`.

    Raises:
        CheckpointError: The checkpoint is of another algorithm.
    """
    algo = checkpoint.metadata.get("algo")
    if algo != algo_name:
        raise CheckpointError(f"{checkpoint.path} is a checkpoint of {algo}, and this is {algo_name}.")
    state = checkpoint.state
    return {**state, "learners": {**state["learners"], "weights": checkpoint.weights}}
