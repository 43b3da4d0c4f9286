"""Control a hyperparameter of all envs from the driver: the weight of a shaping reward, which fades with training.

The env pays at the end of a corridor, and at first a little for each step towards it. A callback in the driver sets the
weight of these steps by how much of the training is done; the envs read it at each reset, from a named actor. What the
envs have used comes back in infos, and from there into the metrics.

    python examples/coordination/central_hyperparameter.py --engine process --num-env-runners 2
"""

import argparse

import gymnasium as gym
import numpy as np

from corral import Callback, PPOConfig, coordination

LENGTH = 15


class Hyperparameters:
    def __init__(self, **values):
        self.values = values

    def set(self, name, value):
        self.values[name] = value

    def get(self, name):
        return self.values[name]


class ShapedCorridor(gym.Env):
    """The end pays 1. A step towards it pays `shaping_weight / LENGTH` more, a step back as much less."""

    observation_space = gym.spaces.Box(0.0, 1.0, (LENGTH + 1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config):
        self.hyperparameters = coordination.get("hyperparameters")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.weight = self.hyperparameters.call("get", "shaping_weight")
        self.position, self.t = 0, 0
        return self.observe(), {}

    def observe(self):
        return np.eye(LENGTH + 1, dtype=np.float32)[self.position]

    def step(self, action):
        before, self.t = self.position, self.t + 1
        self.position = max(0, self.position + (1 if action == 1 else -1))
        arrived = self.position == LENGTH
        reward = float(arrived) + self.weight * (self.position - before) / LENGTH
        return self.observe(), reward, arrived, self.t >= 2 * LENGTH, {"shaping_weight": self.weight}


class FadeShaping(Callback):
    """Sets the weight in the driver, and reports in the runners what the envs use."""

    num_env_steps = 20_000

    def on_train_result(self, *, result, **kwargs):
        progress = result["num_env_steps_sampled_lifetime"] / self.num_env_steps
        coordination.get("hyperparameters").call("set", "shaping_weight", max(0.0, 1 - progress))

    def on_episode_end(self, *, episode, metrics_logger, **kwargs):
        weight = episode.get_infos(-1)["shaping_weight"]
        metrics_logger.log_value("shaping_weight", weight, reduce="min")
        metrics_logger.log_value("arrived", episode.is_terminated, reduce="mean")


def main(engine="local", num_env_runners=2, num_iterations=10, seed=0):
    if engine == "ray":
        import ray

        ray.init(ignore_reinit_error=True)  # before the actor is created, which makes it one of Ray's
    hyperparameters = coordination.create("hyperparameters", Hyperparameters, shaping_weight=1.0)
    config = (
        PPOConfig()
        .environment(ShapedCorridor)
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=4)
        .training(train_batch_size_per_learner=2000, gamma=0.95)
        .callbacks(FadeShaping)
        .debugging(seed=seed)
        .engine(engine)
    )
    weights = []
    try:
        with config.build() as algo:
            for _ in range(num_iterations):
                metrics = algo.train()["env_runners"]
                weights.append((metrics["shaping_weight"], hyperparameters.call("get", "shaping_weight")))
                print(
                    "weight in the envs {:.2f}, set for the next iteration {:.2f};".format(*weights[-1]),
                    f"{metrics['arrived']:.0%} of the episodes reached the end",
                )
    finally:
        coordination.remove("hyperparameters")
    return weights, metrics["arrived"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["local", "process", "ray"], default="process")
    parser.add_argument("--num-env-runners", type=int, default=2)
    parser.add_argument("--num-iterations", type=int, default=10)
    main(**vars(parser.parse_args()))
