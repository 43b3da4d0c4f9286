"""A corridor over thin ice that grows while the agent learns: PPO with a curriculum, and without.

In each cell one of two steps leads to the next cell, and the other breaks the ice, which ends the episode. The only
reward is at the end. In the corridor of 24 cells a random policy arrives once in 2 ** 24 = 16 777 216 episodes, so that
plain PPO finds no reward to learn from. Where the first values of its untrained value function are high by chance, it
learns to stay alive for their sake, and may arrive; few seeds do. With the curriculum it crosses 4 cells first, then
8, and so on.

python examples/curriculum/growing_corridor.py --seeds 5 --plot docs/images/growing-corridor.svg
"""

import argparse
from pathlib import Path

import gymnasium as gym
import numpy as np

from corral import PPOConfig, TaskSettableEnv, evaluate_policy
from corral.callbacks.curriculum import ThresholdCurriculum

LENGTHS = [4, 8, 12, 16, 20, 24]
NUM_ENV_STEPS = 50_000


class Corridor(TaskSettableEnv):
    """A task is the length. The observation shows the cell, and has room for the longest corridor."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(0.0, 1.0, (LENGTHS[-1],), np.float32)
    firm_side = np.random.default_rng(7).integers(2, size=LENGTHS[-1])  # the same map in every episode

    def __init__(self, config):
        self.length = config.get("length", LENGTHS[-1])

    def get_task(self):
        return self.length

    def set_task(self, task):
        self.length = task

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cell, self.goal = 0, self.length
        return self.show(), {}

    def show(self):
        obs = np.zeros(LENGTHS[-1], np.float32)
        obs[min(self.cell, LENGTHS[-1] - 1)] = 1.0
        return obs

    def step(self, action):
        if action != self.firm_side[self.cell]:
            return self.show(), 0.0, True, False, {}
        self.cell += 1
        arrived = self.cell == self.goal
        return self.show(), float(arrived), arrived, False, {}


def make_config(seed, curriculum):
    config = PPOConfig().environment(Corridor).debugging(seed=seed)
    config.training(train_batch_size_per_learner=1024, minibatch_size=256, num_epochs=4, lr=2e-3, entropy_coeff=0.0)
    config.rl_module(model_config={"fcnet_hiddens": [32]}).env_runners(num_envs_per_env_runner=8)
    if curriculum:
        config.callbacks(ThresholdCurriculum(LENGTHS, thresholds=0.6))
    return config


def train(seed, curriculum):
    """Train, and measure the policy in the longest corridor after every second iteration.

    Returns:
        Pairs of env steps and mean number of steps in the corridor, and the share of episodes that arrive at the end.
    """
    reached, arrivals = [(0, 1.0)], 0.0
    with make_config(seed, curriculum).build() as algo:
        while algo.num_env_steps_sampled_lifetime < NUM_ENV_STEPS:
            algo.train()
            if algo.training_iteration % 2 == 0:
                found = evaluate_policy(algo, Corridor, episodes=48, explore=True)
                reached.append((algo.num_env_steps_sampled_lifetime, found.episode_len_mean))
                arrivals = found.episode_return_mean
    return reached, arrivals


def plot(path, runs):
    """Write the mean number of steps in the corridor over env steps as an SVG, with a line for each run."""
    colors = {True: "#1f77b4", False: "#d62728"}
    left, top, width, height = 60, 20, 520, 240

    def x(num_env_steps):
        return round(left + width * num_env_steps / NUM_ENV_STEPS, 1)

    def y(cells):
        return round(top + height * (1 - cells / LENGTHS[-1]), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 30} {top + height + 50}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{left + width + 30}" height="{top + height + 50}" fill="white"/>',
        f'<text x="{left + width / 2}" y="{top + height + 42}" text-anchor="middle">env steps of training</text>',
        f'<text x="16" y="{top + height / 2}" text-anchor="middle" transform="rotate(-90 16 {top + height / 2})">'
        "mean number of steps before the end</text>",
    ]
    for cells in (0, *LENGTHS):
        parts.append(f'<path d="M{left} {y(cells)}H{left + width}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y(cells) + 4}" text-anchor="end">{cells}</text>')
    for steps in range(0, NUM_ENV_STEPS + 1, 10_000):
        parts.append(f'<text x="{x(steps)}" y="{top + height + 20}" text-anchor="middle">{steps:,}</text>')
    for curriculum, reached in runs:
        points = " ".join(f"{x(steps)},{y(cells)}" for steps, cells in reached)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colors[curriculum]}" stroke-width="1.5"/>')
    for line, (curriculum, label) in enumerate([(True, "PPO with the curriculum"), (False, "PPO")]):
        parts.append(f'<text x="{left + 12}" y="{top + 40 + 18 * line}" fill="{colors[curriculum]}">{label}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def main(seeds=1, path=None):
    runs, arrivals = [], {True: [], False: []}
    for seed in range(seeds):
        for curriculum in arrivals:
            reached, share = train(seed, curriculum)
            runs.append((curriculum, reached))
            arrivals[curriculum].append(share)
            kind = "with the curriculum" if curriculum else "without"
            print(f"seed {seed}, {kind}: {share:.0%} of the episodes arrive after {reached[-1][0]:,} env steps")
    if path is not None:
        plot(path, runs)
    return arrivals


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0, 1, ...")
    parser.add_argument("--plot", type=Path, help="SVG file to write")
    args = parser.parse_args()
    main(args.seeds, args.plot)
