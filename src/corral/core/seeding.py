"""Seeds: of the global random generators of a process, for envs and modules that use them, and of runners."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch in this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def runner_seeds(seed: int, worker_index: int, num_restarts: int, in_evaluation: bool) -> list[np.random.SeedSequence]:
    """Return the seeds of a runner's envs, of its actions, and of the ids of its episodes.

    Runners that differ in any of the arguments draw different numbers.

    Args:
        seed: Seed of the run.
        worker_index: 0 for the embedded runner, 1 and up for others.
        num_restarts: How many runners the runner replaces, one after another.
        in_evaluation: Whether the runner evaluates, rather than collects steps to train on.
    """
    entropy = [seed, worker_index, num_restarts, int(in_evaluation)]
    # Zeros at the end would not change the numbers of a seed below 2**32, but the numbers of a larger seed.
    while entropy[-1] == 0 and len(entropy) > 2:
        entropy.pop()
    return np.random.SeedSequence(entropy).spawn(3)
