"""The experiment of `two_agents_rllib.py`, written for Corral: the same returns with the same seed.

python two_agents.py          # trains, saves and restores
python two_agents.py --tune   # tries two learning rates
"""

import sys
import tempfile

import gymnasium as gym
import numpy as np

from corral import PPO, FlattenObservations, MultiAgentEnv, PPOConfig


class Meeting(MultiAgentEnv):
    """Two agents walk on a line of 7 cells; both get 1 when they meet, and -0.1 per step."""

    def __init__(self, config=None):
        super().__init__()
        self.agents = self.possible_agents = ["left", "right"]
        cell = gym.spaces.Discrete(7)
        observation = gym.spaces.Dict({"here": cell, "there": cell})
        self.observation_spaces = dict.fromkeys(self.agents, observation)
        self.action_spaces = dict.fromkeys(self.agents, gym.spaces.Discrete(3))

    def reset(self, *, seed=None, options=None):
        self.cells = {"left": 0, "right": 6}
        self.num_steps = 0
        return self.observe(), {}

    def step(self, actions):
        for agent, action in actions.items():
            self.cells[agent] = int(np.clip(self.cells[agent] + action - 1, 0, 6))
        self.num_steps += 1
        met = self.cells["left"] == self.cells["right"]
        rewards = dict.fromkeys(self.agents, 1.0 if met else -0.1)
        over = {"__all__": self.num_steps == 50}
        return self.observe(), rewards, {"__all__": met}, over, {}

    def observe(self):
        left, right = self.cells["left"], self.cells["right"]
        return {
            "left": {"here": left, "there": right},
            "right": {"here": right, "there": left},
        }


def choose_module(agent_id, episode, **kwargs):
    return f"walker_{agent_id}"


config = (
    PPOConfig()
    .environment(Meeting)
    .env_runners(num_envs_per_env_runner=4, transforms=[FlattenObservations()])
    .training(
        lr=0.002,
        train_batch_size_per_learner=512,
        minibatch_size=128,
        num_epochs=4,
        lambda_=0.95,
        clip_param=0.3,
        grad_clip=None,
        vf_loss_clip=10.0,
        vf_loss_coeff=1.0,
        kl_coeff=0.2,
        kl_target=0.01,
        kl_band=2.0,
        kl_factors=(1.5, 0.5),
    )
    .rl_module(
        model_config={
            "fcnet_hiddens": [256, 256],
            "vf_share_layers": False,
            "fcnet_kernel_initializer": "torch",
            "fcnet_bias_initializer": "torch",
            "head_kernel_initializer": "torch",
            "head_bias_initializer": "torch",
        }
    )
    .multi_agent(policies={"walker_left", "walker_right"}, policy_mapping_fn=choose_module)
    .debugging(seed=0)
)


def train():
    with config.build() as algo:
        for _ in range(3):
            result = algo.train()
            print(round(result["env_runners"]["episode_return_mean"], 3))
        with tempfile.TemporaryDirectory() as directory:
            algo.save(directory)
            with PPO.from_checkpoint(directory) as restored:
                result = restored.train()
                print(round(result["env_runners"]["episode_return_mean"], 3))


def search():
    from ray import tune

    import corral.compat.tune

    tuner = tune.Tuner(
        corral.compat.tune.trainable(config),
        param_space={"lr": tune.grid_search([0.002, 0.0005])},
        run_config=tune.RunConfig(stop={"training_iteration": 2}),
    )
    best = tuner.fit().get_best_result("env_runners/episode_return_mean", "max")
    print(best.config["lr"])


if __name__ == "__main__":
    search() if "--tune" in sys.argv else train()
