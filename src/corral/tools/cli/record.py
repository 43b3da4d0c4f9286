"""`corral record`: episodes of the policy of a run or a checkpoint as recorded data."""

from __future__ import annotations

import argparse

from corral.algorithms.algorithm import Algorithm
from corral.errors import ConfigError
from corral.runs.checkpoint import find_checkpoint


def record(options: argparse.Namespace) -> int:
    """Run `corral record`: play episodes, write them, and print what they returned."""
    if options.episodes < 1:
        raise ConfigError(f"--episodes {options.episodes} must be at least 1.")
    path = find_checkpoint(options.path, prefer="best")
    settings = {"env": options.env} if options.env else {}
    with Algorithm.from_checkpoint(
        path,
        **settings,
        num_env_runners=0,
        num_learners=0,
        evaluation_interval=None,
        loggers=None,
        output=None,
    ) as algorithm:
        summary = algorithm.record(
            options.output,
            num_episodes=options.episodes,
            explore=options.explore,
            seed=options.seed,
            with_infos=options.infos,
        )
        print(f"{path} (iteration {algorithm.training_iteration})\n{summary}, in {options.output}")
    return 0
