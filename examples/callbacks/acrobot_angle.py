"""Log the mean angle of Acrobot's first joint in each episode, smoothed over the latest 50 episodes.

The angle of every step is kept until the episode ends. There are two places for that: the episode's `custom_data`, a
dict for any notes, and its temporary timestep data, lists by name.
"""

import argparse
import math

import numpy as np

from corral import Callback, PPOConfig


def first_joint_angle_deg(episode):
    """Return the angle of the first joint in degrees: 0 when it hangs down."""
    cos_theta1, sin_theta1 = episode.get_observations(-1)[:2]
    return math.degrees(math.atan2(sin_theta1, cos_theta1))


class AngleInCustomData(Callback):
    def on_episode_created(self, *, episode, **kwargs):
        episode.custom_data["theta1"] = []

    def on_episode_step(self, *, episode, **kwargs):
        episode.custom_data["theta1"].append(first_joint_angle_deg(episode))

    def on_episode_end(self, *, episode, metrics_logger, **kwargs):
        metrics_logger.log_value("theta1_mean", np.mean(episode.custom_data["theta1"]), reduce="mean", window=50)


class AngleInTemporaryData(Callback):
    def on_episode_step(self, *, episode, **kwargs):
        episode.add_temporary_timestep_data("theta1", first_joint_angle_deg(episode))

    def on_episode_end(self, *, episode, metrics_logger, **kwargs):
        theta1s = episode.get_temporary_timestep_data("theta1")
        metrics_logger.log_value("theta1_mean", np.mean(theta1s), reduce="mean", window=50)


def main(callback=AngleInCustomData, num_iterations=10):
    config = PPOConfig().environment("Acrobot-v1").callbacks(callback).debugging(seed=0)
    angles = []
    with config.build() as algo:
        for i in range(num_iterations):
            # The angle appears with the first episode that ends.
            results = algo.train()["env_runners"]
            angles.append(results.get("theta1_mean", math.nan))
            print(f"iter={i} theta1_mean={angles[-1]:.2f} R={results['episode_return_mean']:.1f}")
    return angles


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--temporary", action="store_true", help="keep the angles in temporary timestep data")
    main(AngleInTemporaryData if parser.parse_args().temporary else AngleInCustomData)
