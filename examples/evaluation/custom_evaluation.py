"""Evaluate in a way of your own: each evaluation runner plays corridors of its own length.

`python custom_evaluation.py --no-custom-eval` plays ordinary evaluation rounds instead.
"""

import argparse

import gymnasium as gym
import numpy as np

from corral import PPOConfig, RoundPlan, play_round, summarize_episodes


class SimpleCorridor(gym.Env):
    """Walk left (0) or right (1); the right end of the corridor gives the reward 1, and the time is limited."""

    observation_space = gym.spaces.Box(0.0, 999.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config):
        self.length, self.max_steps = config["corridor_length"], 50

    def set_corridor_length(self, length):
        print("Update corridor length to", length, flush=True)  # in the process of the runner
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.steps = 0
        return np.array([self.place], np.float32), {}

    def step(self, action):
        self.place, self.steps = max(0, self.place + 2 * int(action) - 1), self.steps + 1
        at_end = self.place >= self.length
        return np.array([self.place], np.float32), float(at_end), at_end, self.steps >= self.max_steps, {}


def custom_evaluation(algorithm, env_runner_group):
    """Return metrics of 4 rounds of 10 episodes in a short and a longer corridor, and the env steps that they took."""
    for runner, length in ((1, 4), (2, 7)):
        env_runner_group.foreach_env(
            lambda env, length=length: env.unwrapped.set_corridor_length(length), remote_worker_ids=[runner]
        )
    episodes, num_env_steps = [], 0
    for i in range(1, 5):
        print("Custom evaluation round", i, flush=True)
        played = play_round(env_runner_group, RoundPlan(num_episodes=10))
        episodes += played.episodes
        num_env_steps += played.num_env_steps
    statistics = summarize_episodes(
        [episode.episode_return for episode in episodes], [episode.episode_len for episode in episodes]
    )
    return {"env_runners": statistics, "foo": 1}, num_env_steps, num_env_steps


def main(custom=True, num_iterations=2):
    config = (
        PPOConfig()
        .environment(SimpleCorridor, env_config={"corridor_length": 10})
        .env_runners(num_envs_per_env_runner=1)
        .training(train_batch_size_per_learner=2000, minibatch_size=250, lr=3e-3)
        .debugging(seed=0)
        .evaluation(
            evaluation_interval=num_iterations,
            evaluation_duration=10,
            evaluation_num_env_runners=2,
            custom_evaluation_function=custom_evaluation if custom else None,
        )
    )
    with config.build() as algo:
        for _ in range(num_iterations):
            evaluation = algo.train()["evaluation"]
    print("evaluation:")
    for name in ("episode_len_mean", "episode_return_max", "episode_return_mean", "episode_return_min", "num_episodes"):
        print(f"  {name}: {evaluation['env_runners'][name]}")
    if custom:
        print(f"  foo: {evaluation['foo']}")
    return evaluation


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-custom-eval", action="store_true", help="play ordinary evaluation rounds")
    main(custom=not parser.parse_args().no_custom_eval)
