"""Add a curiosity bonus to the rewards: the error of a small model that predicts what an action leads to.

The model is trained alongside, on the steps that it has just judged (a forward model as in Pathak et al. 2017,
arXiv:1705.05363, without the learned features). The env hides its reward at the end of a corridor and pays a little for
staying at its start; without the bonus the agent settles for that.
"""

import argparse

import gymnasium as gym
import numpy as np
import torch

from corral import Callback, PPOConfig

LENGTH = 20


class TemptingCorridor(gym.Env):
    """Walking right pays 1 at the end; each step left from the start pays 0.01. Episodes have 2 * LENGTH steps."""

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
        reward = 0.0
        if action == 1:
            self.position += 1
        elif self.position == 0:
            reward = 0.01
        else:
            self.position -= 1
        arrived = self.position == LENGTH
        return self.observe(), 1.0 if arrived else reward, arrived, self.t >= 2 * LENGTH, {}


class Curiosity(Callback):
    """Rewards what the forward model did not expect; each runner has a model of its own."""

    scale = 1.0

    def on_environment_created(self, *, env, **kwargs):
        num_inputs = env.single_observation_space.shape[0] + env.single_action_space.n
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = torch.nn.Sequential(
                torch.nn.Linear(num_inputs, 64),
                torch.nn.ReLU(),
                torch.nn.Linear(64, env.single_observation_space.shape[0]),
            )
        self.num_actions = int(env.single_action_space.n)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def on_sample_end(self, *, samples, metrics_logger, **kwargs):
        inputs, targets = [], []
        for episode in samples.episodes():
            obs, actions = torch.tensor(episode.get_observations()), torch.tensor(episode.get_actions())
            inputs.append(torch.cat([obs[:-1], torch.nn.functional.one_hot(actions, self.num_actions)], dim=-1))
            targets.append(obs[1:])
            with torch.no_grad():
                bonus = self.scale * (self.model(inputs[-1]) - targets[-1]).square().sum(-1)
            episode.set_rewards(new_data=episode.get_rewards() + bonus.numpy())
            metrics_logger.log_value("curiosity_bonus_mean", bonus.mean(), reduce="mean")
        self.train_model(torch.cat(inputs), torch.cat(targets))

    def train_model(self, inputs, targets):
        for _ in range(10):
            loss = (self.model(inputs) - targets).square().sum(-1).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


def main(curious=True, num_iterations=30, seed=0):
    config = PPOConfig().environment(TemptingCorridor).debugging(seed=seed)
    config.training(gamma=0.95, lr=1e-3, minibatch_size=256, num_epochs=8)
    if curious:
        config.callbacks(Curiosity)
    results = []
    with config.build() as algo:
        for _ in range(num_iterations):
            results.append(algo.train()["env_runners"])
    print(f"mean return {results[-1]['episode_return_mean']:.2f}; the corridor's end pays 1")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--incurious", action="store_true", help="train on the env's rewards alone")
    main(curious=not parser.parse_args().incurious)
