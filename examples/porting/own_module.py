"""The experiment of `own_module_rllib.py`, written for Corral: the same returns with the same seed.

python own_module.py
"""

import gymnasium as gym
import numpy as np
import torch

from corral import Module, PPOConfig


class Corridor(gym.Env):
    """Walk to the right end, with -0.1 per step and 1 at the end."""

    def __init__(self, config=None):
        self.length = (config or {}).get("length", 10)
        self.observation_space = gym.spaces.Box(0.0, self.length, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.position = 0
        return self.observe(), {}

    def step(self, action):
        self.position = max(0, self.position + (1 if action == 1 else -1))
        done = self.position >= self.length
        return self.observe(), 1.0 if done else -0.1, done, False, {}

    def observe(self):
        return np.array([self.position], np.float32)


class Small(Module):
    def __init__(self, observation_space, action_space, model_config):
        super().__init__(observation_space, action_space, model_config)
        width = model_config["width"]
        self.body = torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Tanh())
        self.policy_head = torch.nn.Linear(width, self.distribution.num_inputs)
        self.value_head = torch.nn.Linear(width, 1)

    def policy(self, obs):
        return self.policy_head(self.body(obs))

    def value(self, obs):
        return self.value_head(self.body(obs)).squeeze(-1)


def with_small_outputs(module, batch, coefficients, default_loss):
    """Add a penalty on large logits to the loss of PPO."""
    loss, reported, outputs = default_loss(module, batch, coefficients)
    penalty = outputs["dist_inputs"].square().mean()
    return loss + 0.01 * penalty, {**reported, "penalty": penalty.detach()}


config = (
    PPOConfig()
    .environment(Corridor, env_config={"length": 8})
    .env_runners(num_envs_per_env_runner=4)
    .training(
        loss=with_small_outputs,
        lr=0.003,
        train_batch_size_per_learner=512,
        minibatch_size=128,
        num_epochs=4,
        lambda_=0.95,
        clip_param=0.3,
        grad_clip=None,
        vf_loss_clip=10.0,
        vf_loss_coeff=1.0,
    )
    .rl_module(Small, model_config={"width": 32})
    .debugging(seed=0)
)

if __name__ == "__main__":
    with config.build() as algo:
        for _ in range(4):
            result = algo.train()
            penalty = result["learners"]["default_policy"]["penalty"]
            returns = result["env_runners"]["episode_return_mean"]
            print(round(returns, 3), round(float(penalty), 4))
