"""Normalise observations by a mean and a variance that all envs keep together, in a named actor.

Each env notes the observations of an episode, and at its end adds them to the actor's and takes the new statistics: one
call an episode. Averages are merged as in Chan et al. 1979 (STAN-CS-79-773), so that it makes no difference which env
saw what. A callback in the driver puts the statistics into each result.

    python examples/coordination/running_average.py --engine process --num-env-runners 2
"""

import argparse

import gymnasium as gym
import numpy as np

from corral import Callback, PPOConfig, coordination


class RunningAverage:
    """Mean and variance of all rows ever added."""

    def __init__(self, size):
        self.count, self.mean, self.squares = 0, np.zeros(size), np.zeros(size)

    def add(self, rows):
        """Add rows [count, size], and return the statistics."""
        count, mean = len(rows), rows.mean(axis=0)
        total = self.count + count
        delta = mean - self.mean
        self.squares = self.squares + ((rows - mean) ** 2).sum(axis=0) + delta**2 * self.count * count / total
        self.mean = self.mean + delta * count / total
        self.count = total
        return self.get()

    def get(self):
        """Return count, mean [size] and variance [size]."""
        return self.count, self.mean, self.squares / max(1, self.count)


class NormalizedCartPole(gym.Wrapper):
    def __init__(self, config):
        super().__init__(gym.make("CartPole-v1"))
        bound = np.full(4, np.inf, np.float32)
        self.observation_space = gym.spaces.Box(-bound, bound)
        self.average = coordination.get("observations")
        self.rows = []

    def reset(self, *, seed=None, options=None):
        given = ("add", np.array(self.rows)) if self.rows else ("get",)
        _, self.mean, self.variance = self.average.call(*given)
        self.rows = []
        obs, info = super().reset(seed=seed, options=options)
        return self.normalize(obs), info

    def step(self, action):
        obs, *rest = super().step(action)
        return self.normalize(obs), *rest

    def normalize(self, obs):
        self.rows.append(obs)
        return ((obs - self.mean) / np.sqrt(self.variance + 1e-4)).astype(np.float32)


class ReportStatistics(Callback):
    def on_train_result(self, *, result, **kwargs):
        count, mean, variance = coordination.get("observations").call("get")
        result["observations"] = {"count": count, "mean": mean, "variance": variance}


def main(engine="local", num_env_runners=2, num_iterations=2):
    if engine == "ray":
        import ray

        ray.init(ignore_reinit_error=True)  # before the actor is created, which makes it one of Ray's
    coordination.create("observations", RunningAverage, 4)
    config = (
        PPOConfig()
        .environment(NormalizedCartPole)
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=4)
        .training(train_batch_size_per_learner=1024)
        .callbacks(ReportStatistics)
        .engine(engine)
    )
    results = []
    try:
        with config.build() as algo:
            for _ in range(num_iterations):
                results.append(algo.train())
                statistics = results[-1]["observations"]
                print(f"{statistics['count']} observations: mean {np.round(statistics['mean'], 3)}")
    finally:
        coordination.remove("observations")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["local", "process", "ray"], default="process")
    parser.add_argument("--num-env-runners", type=int, default=2)
    parser.add_argument("--num-iterations", type=int, default=5)
    main(**vars(parser.parse_args()))
