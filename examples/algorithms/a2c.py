"""A2C (Mnih et al. 2016, arXiv:1602.01783, with synchronous runners) as an algorithm of your own, in one file.

An iteration takes a few steps in many envs, and one gradient step on them: an actor-critic with n-step advantages.

corral train --algo a2c:A2CConfig --env CartPole-v1 --stop episode_return_mean=400
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from torch.nn import functional

from corral import Algorithm, AlgorithmConfig, UpdateSettings, gae, register_algorithm
from corral.core.schedules import Schedule, schedule_value
from corral.core.settings import NonNegativeFloat, Probability


@dataclass(kw_only=True)
class A2CConfig(AlgorithmConfig):
    """Settings of A2C.

    Attributes:
        lambda_: Lambda of generalized advantage estimation; 1 is the n-step advantage of the paper.
        vf_loss_coeff: Weight of the value loss.
        entropy_coeff: Weight of the entropy bonus.
    """

    lr: Schedule = 3e-3
    grad_clip: float | None = 0.5
    num_envs_per_env_runner: int | None = 16
    train_batch_size_per_learner: int = 128  # 8 steps in each of 16 envs
    min_sample_timesteps_per_iteration: int = 2048  # an iteration repeats the training step until then
    lambda_: Probability = 0.95
    vf_loss_coeff: NonNegativeFloat = 0.5
    entropy_coeff: NonNegativeFloat = 0.01

    @property
    def algo_class(self):
        return A2C


class A2C(Algorithm):
    """One gradient step per batch of short fragments."""

    METRICS = ("policy_loss", "vf_loss", "entropy")

    def make_loss(self, config):
        return partial(a2c_loss, vf_loss_coeff=config.vf_loss_coeff, entropy_coeff=config.entropy_coeff)

    def training_step(self):
        rollouts = self.group_trained(self.sample(self.config.total_train_batch_size))
        batches = {name: self.make_batch(name, parts) for name, parts in rollouts.items()}
        lr = schedule_value(self.config.lr, self.num_env_steps_sampled_lifetime)
        settings = {name: UpdateSettings.from_config(self.module_config(name), lr=lr) for name in batches}
        results = self.learner_group.update(batches, settings)
        self.sync_weights()
        return results

    def make_batch(self, module_id, rollouts):
        config, parts = self.module_config(module_id), []
        for rollout in (part.transformed() for part in rollouts):  # after the transforms of observations and rewards
            values, next_values = rollout.compute_values(partial(self.learner_group.values, module_id))
            ends = (rollout.terminated, rollout.truncated, rollout.valid)
            advantages, targets = gae(
                rollout.rewards, values, next_values, *ends, gamma=config.gamma, lambda_=config.lambda_
            )
            columns = {
                "obs": rollout.obs[:-1],
                "actions": rollout.actions,
                "advantages": advantages,
                "targets": targets,
            }
            parts.append(rollout.valid_rows(columns))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def a2c_loss(module, batch, coefficients, *, vf_loss_coeff, entropy_coeff):
    """Return the scalar to minimise and what to report."""
    dist_inputs, values = module.policy_and_value(batch["obs"])
    policy_loss = -(module.distribution.logp(dist_inputs, batch["actions"]) * batch["advantages"]).mean()
    vf_loss = functional.mse_loss(values, batch["targets"])
    entropy = module.distribution.entropy(dist_inputs).mean()
    parts = {"policy_loss": policy_loss, "vf_loss": vf_loss, "entropy": entropy}
    loss = policy_loss + vf_loss_coeff * vf_loss - entropy_coeff * entropy
    return loss, {name: value.detach() for name, value in parts.items()}


register_algorithm("A2C", A2CConfig)


def main(num_iterations=40, seed=0, **learners):
    config = A2CConfig().environment("CartPole-v1").learners(**learners).debugging(seed=seed)
    with config.build() as algo:
        for _ in range(num_iterations):
            mean_return = algo.train()["env_runners"]["episode_return_mean"]
    print(f"mean return {mean_return:.0f} after {algo.num_env_steps_sampled_lifetime} env steps")
    return mean_return


if __name__ == "__main__":
    main()
