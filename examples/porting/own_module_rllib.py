"""A module, a loss and an observation connector of our own, written for RLlib.

python -m corral.compat.rllib own_module_rllib.py
"""

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule


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


class Small(TorchRLModule, ValueFunctionAPI):
    def setup(self):
        width = self.model_config["width"]
        self.body = torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Tanh())
        self.policy_head = torch.nn.Linear(width, self.action_space.n)
        self.value_head = torch.nn.Linear(width, 1)

    def _forward(self, batch, **kwargs):
        logits = self.policy_head(self.body(batch[Columns.OBS]))
        return {Columns.ACTION_DIST_INPUTS: logits}

    def compute_values(self, batch, embeddings=None):
        return self.value_head(self.body(batch[Columns.OBS])).squeeze(-1)


class SmallOutputsLearner(PPOTorchLearner):
    """Adds a penalty on large logits to the loss of PPO."""

    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
        loss = super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)
        penalty = fwd_out[Columns.ACTION_DIST_INPUTS].square().mean()
        self.metrics.log_value((module_id, "penalty"), penalty.item(), window=1)
        return loss + 0.01 * penalty


config = (
    PPOConfig()
    .environment(Corridor, env_config={"length": 8})
    .env_runners(num_env_runners=0, num_envs_per_env_runner=4)
    .training(
        learner_class=SmallOutputsLearner,
        lr=0.003,
        train_batch_size_per_learner=512,
        minibatch_size=128,
        num_epochs=4,
        use_kl_loss=False,
        lambda_=0.95,
    )
    .rl_module(rl_module_spec=RLModuleSpec(Small, model_config={"width": 32}))
    .debugging(seed=0)
)

if __name__ == "__main__":
    algo = config.build_algo()
    for _ in range(4):
        result = algo.train()
        penalty = result["learners"]["default_policy"]["penalty"]
        returns = result["env_runners"]["episode_return_mean"]
        print(round(returns, 3), round(float(penalty), 4))
    algo.stop()
