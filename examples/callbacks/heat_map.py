"""Log a heat map of the cells that the agent visits as an image to TensorBoard.

python examples/callbacks/heat_map.py
tensorboard --logdir runs
"""

import argparse

import numpy as np

from corral import Callback, PPOConfig
from corral.runs.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger

SIDE = 8  # cells of the lake
PIXELS = 16  # of a cell


class VisitedCells(Callback):
    """Counts the steps taken in each cell, and shows the counts of the latest samples as brightness."""

    def __init__(self):
        self.counts = np.zeros(SIDE * SIDE)

    def on_sample_end(self, *, samples, metrics_logger, **kwargs):
        # The rollout's columns hold the steps of all sub-envs: no loop over steps is needed.
        cells = samples.obs[:-1][samples.valid]
        self.counts = 0.9 * self.counts + np.bincount(cells, minlength=SIDE * SIDE)
        metrics_logger.log_value("visited_cells", heat_map(self.counts.reshape(SIDE, SIDE)), reduce="item")


def heat_map(counts):
    """Return counts `[H, W]` as an image, uint8 `[H * PIXELS, W * PIXELS, 3]`: black, red, yellow, white."""
    heat = np.sqrt(counts / max(counts.max(), 1.0))[..., None]  # the root shows rare visits too
    colours = np.clip(3 * heat - np.arange(3), 0, 1)
    return np.kron((255 * colours).astype(np.uint8), np.ones((PIXELS, PIXELS, 1), np.uint8))


def main(num_iterations=20, run_dir=None):
    config = (
        PPOConfig()
        .environment("FrozenLake-v1", env_config={"map_name": f"{SIDE}x{SIDE}", "is_slippery": False})
        .callbacks(VisitedCells)
        .debugging(seed=0)
    )
    with config.build() as algo:
        return algo.fit(
            stop={"training_iteration": num_iterations},
            run_dir=run_dir,
            loggers=[CSVLogger(), JSONLinesLogger(), TensorBoardLogger()],
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20)
    main(parser.parse_args().iterations)
