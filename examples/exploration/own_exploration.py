"""Explore in a way of your own: a random action is repeated for some steps, so that it leads somewhere.

In the env there is a corridor to walk, and a single random action leads nowhere: the next one leads back. With repeated
ones the agent gets to the end, and learns to (ez-greedy, Dabney et al. 2021, arXiv:2006.01782).
"""

import argparse

import gymnasium as gym
import numpy as np

from corral import DQNConfig, Exploration

LENGTH = 25


class Corridor(gym.Env):
    """The right end pays 1. Stepping left from the start pays 0.01. Episodes have at most 3 * LENGTH steps."""

    observation_space = gym.spaces.Box(0.0, 1.0, (LENGTH + 1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.t = 0, 0
        return self.observe(), {}

    def observe(self):
        return np.eye(LENGTH + 1, dtype=np.float32)[self.position]

    def step(self, action):
        self.t += 1
        reward = 0.01 if action == 0 and self.position == 0 else 0.0
        self.position = max(0, self.position + (1 if action == 1 else -1))
        arrived = self.position == LENGTH
        return self.observe(), 1.0 if arrived else reward, arrived, self.t >= 3 * LENGTH, {}


class RepeatedEpsilon(Exploration):
    """Epsilon-greedy whose random actions last; each sub-env has its own. The arguments are the settings it takes."""

    on_policy = False  # PPO would refuse it: it takes actions that its policy does not
    action_spaces = (gym.spaces.Discrete,)

    def __init__(self, action_space, *, epsilon=0.1, longest=15, **kwargs):
        super().__init__(action_space, **kwargs)  # `self.num_envs`, `self.config` and others come from there
        self.epsilon, self.longest = epsilon, longest
        self.repeated = np.zeros(self.num_envs, np.int64)
        self.steps_left = np.zeros(self.num_envs, np.int64)

    def begin_episodes(self, begins, *, timestep, explore):
        self.steps_left[begins] = 0

    def get_exploration_action(self, *, action_distribution, timestep, explore=True):
        best = action_distribution.mode()
        if not explore or len(best) != self.num_envs:  # compute_actions takes any number of observations
            return best, None
        rng = action_distribution.rng
        starts = (self.steps_left == 0) & (rng.random(self.num_envs) < self.epsilon)
        self.repeated = np.where(starts, action_distribution.random(), self.repeated)
        self.steps_left = np.where(starts, rng.integers(1, self.longest + 1, self.num_envs), self.steps_left)
        actions = np.where(self.steps_left > 0, self.repeated, best)
        self.steps_left = np.maximum(0, self.steps_left - 1)
        return actions, None

    def get_metrics(self, timestep):
        return {"repeating_share": float(np.mean(self.steps_left > 0))}

    def get_state(self):
        return {"repeated": self.repeated.copy(), "steps_left": self.steps_left.copy()}

    def set_state(self, state):
        if len(state["repeated"]) == self.num_envs:
            self.repeated, self.steps_left = state["repeated"].copy(), state["steps_left"].copy()


def main(exploration_config=None, num_env_steps=4000, seed=0):
    config = (
        DQNConfig()
        .environment(Corridor)
        .exploration(exploration_config=exploration_config or {"type": RepeatedEpsilon, "epsilon": 0.1})
        .training(lr=2e-3, gamma=0.95, target_network_update_freq=100, num_steps_sampled_before_learning_starts=200)
        .debugging(seed=seed)
    )
    with config.build() as algo:
        while algo.num_env_steps_sampled_lifetime < num_env_steps:
            result = algo.train()
        corridor = np.eye(LENGTH, LENGTH + 1, dtype=np.float32)
        goes_right = float(np.mean(algo.compute_actions(corridor, explore=False)))
    returned = result["env_runners"]["episode_return_mean"]
    print(f"mean return {returned:.2f} while exploring; without, it goes right in {goes_right:.0%} of the corridor")
    return returned, goes_right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="explore by single random actions")
    main({"type": "EpsilonGreedy", "epsilon_schedule": 0.1} if parser.parse_args().plain else None)
