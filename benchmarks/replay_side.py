"""Measures of Corral's replay buffers: draws from a large one, and insertion of rollouts."""

from time import process_time
from typing import Any

import measuring
from measuring import Fields, Options

CAPACITY = 1_000_000
BATCH = 32
ROWS, ENVS = 32, 64


def _rollout(rows: int, envs: int, seed: int) -> Any:
    """Returns a rollout with CartPole's spaces, whose episodes take some twenty steps."""
    import numpy as np

    from corral.data.episodes.rollout import Rollout

    rng = np.random.default_rng(seed)
    shape = (rows, envs)
    rollout = Rollout(
        {
            "obs": rng.standard_normal((rows + 1, envs, 4), dtype=np.float32),
            "actions": rng.integers(0, 2, shape),
            "rewards": np.ones(shape),
            "terminated": rng.random(shape) < 0.05,
            "truncated": np.zeros(shape, np.bool_),
            "valid": np.ones(shape, np.bool_),
        },
        num_rows=rows,
    )
    rollout.num_env_steps = rows * envs
    return rollout


def sampling(options: Options) -> Fields:
    """Microseconds of drawing 32 steps of 1,000,000 by priority, whole batches with weights and indices."""
    import numpy as np

    from corral.data.replay import PrioritizedReplayBuffer

    buffer = PrioritizedReplayBuffer(CAPACITY, seed=options.seed)
    rollout = _rollout(10_000, 1, options.seed)
    for _ in range(CAPACITY // len(rollout) + 1):
        buffer.add(rollout)
    rng = np.random.default_rng(options.seed)
    for _ in range(1000):  # priorities that differ, as after some learning
        batch = buffer.sample(512)
        buffer.update_priorities(batch["indices"], rng.random(512))
    return {
        **measuring.call_time(f"buffer.sample({BATCH}, beta=0.4)", {"buffer": buffer}, options),
        "size": len(buffer),
    }


def insertion(options: Options) -> Fields:
    """Steps per second that go into a prioritised buffer of 1,000,000 as rollouts of 32 x 64."""
    from corral.data.replay import PrioritizedReplayBuffer

    buffer, rollout = PrioritizedReplayBuffer(CAPACITY, seed=options.seed), _rollout(ROWS, ENVS, options.seed)
    for _ in range(50):
        buffer.add(rollout)
    start, count = process_time(), 0
    while process_time() - start < options.seconds:
        for _ in range(100):
            buffer.add(rollout)
        count += 100
    return {"transitions_per_s": count * ROWS * ENVS / (process_time() - start)}
