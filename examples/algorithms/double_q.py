"""Clipped double Q-learning for Discrete actions (Fujimoto et al. 2018, arXiv:1802.09477, section 4.2), in one file.

An algorithm of your own with a replay buffer, its own module, and two groups of parameters, each with its own loss: two
Q-networks learn from the lower value of their targets. The buffer, the schedule of updates and the moves of the targets
come from `OffPolicyAlgorithm`.

corral train --algo double_q:DoubleQConfig --env CartPole-v1 --stop episode_return_mean=200
"""

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from corral import Module, register_algorithm
from corral.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyConfig, off_policy_metrics
from corral.core.schedules import Schedule
from corral.modules.networks import mlp


class TwoQNetworks(Module):
    """Two Q-networks and their targets; the policy acts on the first one."""

    MUST_DEFINE = ()

    def __init__(self, observation_space, action_space, model_config):
        super().__init__(observation_space, action_space, model_config)
        num_inputs, num_actions = observation_space.shape[0], int(action_space.n)
        hiddens = model_config.get("fcnet_hiddens", [64, 64])
        self.q = nn.ModuleList(
            nn.Sequential(*mlp(num_inputs, hiddens, "relu"), nn.Linear(hiddens[-1], num_actions)) for _ in range(2)
        )
        self.target_q = copy.deepcopy(self.q).requires_grad_(False)

    def policy(self, obs):
        return self.q[0](obs)  # Q-values as logits: the most likely action is the best one

    def parameter_groups(self):
        return {name: list(network.parameters()) for name, network in zip(("first", "second"), self.q, strict=True)}

    def update_target(self, tau):
        torch._foreach_lerp_(list(self.target_q.parameters()), list(self.q.parameters()), tau)


@dataclass(kw_only=True)
class DoubleQConfig(OffPolicyConfig):
    """Settings of clipped double Q-learning; the settings of replay come from the base."""

    DEFAULT_EXPLORATION: ClassVar = {"type": "EpsilonGreedy", "epsilon_timesteps": 5_000}

    lr: Schedule = 1e-3
    train_batch_size_per_learner: int = 64
    rollout_fragment_length: int = 4
    target_network_update_freq: int = 0  # after every update,
    tau: float = 0.01  # a little

    @property
    def algo_class(self):
        return DoubleQ

    @property
    def default_module_class(self):
        return TwoQNetworks


class DoubleQ(OffPolicyAlgorithm):
    """Two Q-networks that learn from the lower of their targets' values."""

    METRICS = ("qf_mean", *off_policy_metrics("first", "second"))

    def make_loss(self, config):
        return double_q_loss


def double_q_loss(module, batch, coefficients):
    """Return one scalar for each group of parameters, and what to report with the column `td_error`."""
    with torch.no_grad():
        best = module.q[0](batch["next_obs"]).argmax(1, keepdim=True)
        next_q = torch.stack([target(batch["next_obs"]).gather(1, best)[:, 0] for target in module.target_q])
        targets = batch["rewards"] + batch["discounts"] * ~batch["terminated"] * next_q.amin(0)
    taken = [q(batch["obs"]).gather(1, batch["actions"][:, None])[:, 0] for q in module.q]
    errors = torch.stack(taken) - targets
    first, second = (batch["weights"] * errors.square()).mean(1)
    reported = {"qf_mean": taken[0].detach().mean(), "td_error": errors.detach().abs().mean(0)}
    return {"first": first, "second": second}, reported


register_algorithm("DoubleQ", DoubleQConfig)


def main(num_env_steps=12_000, seed=0):
    config = DoubleQConfig().environment("CartPole-v1").debugging(seed=seed)
    with config.build() as algo:
        while algo.num_env_steps_sampled_lifetime < num_env_steps:
            algo.train()
        rollout = algo.env_runner.sample(num_episodes=10, explore=False)
    mean_return = float(rollout.rewards[rollout.valid].sum()) / 10
    print(f"greedy mean return {mean_return:.0f} after {algo.num_env_steps_sampled_lifetime} env steps")
    return mean_return


if __name__ == "__main__":
    main()
