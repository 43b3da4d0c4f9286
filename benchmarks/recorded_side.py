"""Measures of Corral's recorded data: reading Parquet files, drawing batches, and the memory of a large data set."""

import resource
import tempfile
from pathlib import Path
from time import process_time
from typing import Any

from measuring import Fields, Options

STEPS_PER_FILE = 100_000
EPISODE_LEN = 200
BATCH = 2048
NUM_STEPS, MANY_STEPS = 1_000_000, 10_000_000


def _write(directory: Path, num_steps: int, seed: int) -> None:
    """Writes episodes with CartPole's spaces, 200 steps each."""
    import gymnasium as gym
    import numpy as np

    from corral.core.places import place_of
    from corral.data.offline.episode_rows import rows_of_steps
    from corral.data.offline.parquet import Description, RecordedEpisode, write_episodes

    rng, size = np.random.default_rng(seed), STEPS_PER_FILE
    spaces = gym.spaces.Box(-100, 100, (4,), np.float32), gym.spaces.Discrete(2)
    for number in range(num_steps // size):
        obs = rng.standard_normal((size, 4), dtype=np.float32)
        ends = np.arange(1, size + 1) % EPISODE_LEN == 0
        rows = rows_of_steps(obs, rng.integers(0, 2, size), np.ones(size), ends, next_obs=obs)
        episodes = [RecordedEpisode(each, f"{number}-{index}") for index, each in enumerate(rows.episodes())]
        write_episodes(
            place_of(directory), f"episodes-{number:06d}.parquet", episodes, Description({"default_policy": spaces})
        )


def _build(directory: str, seed: int) -> Any:
    from corral import BCConfig

    config = BCConfig().offline_data(input_=directory).training(train_batch_size_per_learner=BATCH)
    return config.debugging(seed=seed).build()


def reading(options: Options) -> Fields:
    """Steps per CPU second that BC reads from Parquet files when it is built, and that it draws in batches."""
    with tempfile.TemporaryDirectory() as directory:
        _write(Path(directory), NUM_STEPS, options.seed)
        _build(directory, options.seed).stop()  # imports
        start = process_time()
        algorithm = _build(directory, options.seed)
        read_s = process_time() - start
        draw, start, count = algorithm.data["default_policy"].train.sample_steps, process_time(), 0
        while process_time() - start < options.seconds:
            draw(BATCH)
            count += 1
        drawn_s = process_time() - start
        algorithm.stop()
    return {"steps_read_per_s": NUM_STEPS / read_s, "steps_drawn_per_s": count * BATCH / drawn_s}


def memory(options: Options) -> Fields:
    """Megabytes of a process that trains BC on 10,000,000 recorded steps, at most."""
    with tempfile.TemporaryDirectory() as directory:
        _write(Path(directory), MANY_STEPS, options.seed)
        with _build(directory, options.seed) as algorithm:
            algorithm.reconfigure(num_updates_per_iteration=100)
            algorithm.train()
    return {"megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
