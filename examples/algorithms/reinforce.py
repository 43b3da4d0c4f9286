"""REINFORCE (Williams 1992, doi:10.1007/BF00992696) as an algorithm of your own, in one file.

An iteration plays whole episodes, and makes each action more likely by the return that followed it. There is no critic:
the mean return of the batch is the baseline.

corral train --algo reinforce:ReinforceConfig --env CartPole-v1 --stop episode_return_mean=300
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from corral import Algorithm, AlgorithmConfig, UpdateSettings, gae, register_algorithm
from corral.core.schedules import Schedule, schedule_value
from corral.core.settings import NonNegativeFloat


@dataclass(kw_only=True)
class ReinforceConfig(AlgorithmConfig):
    """Settings of REINFORCE; the settings of `.training(...)` that all algorithms have come from the base.

    Attributes:
        entropy_coeff: Weight of the entropy bonus.
    """

    lr: Schedule = 5e-3
    train_batch_size_per_learner: int = 1000
    batch_mode: str = "complete_episodes"  # a return needs the end of its episode
    num_envs_per_env_runner: int | None = 8
    entropy_coeff: NonNegativeFloat = 0.0

    @property
    def algo_class(self):
        return Reinforce


class Reinforce(Algorithm):
    """Plays episodes, and takes one gradient step on all of them."""

    METRICS = ("policy_loss", "entropy")  # what the loss reports; in the result from the first iteration

    def make_loss(self, config):
        return partial(reinforce_loss, entropy_coeff=config.entropy_coeff)

    def training_step(self):
        rollouts = self.group_trained(self.sample(self.config.total_train_batch_size))
        batches = {name: make_batch(parts, self.config.gamma) for name, parts in rollouts.items()}
        lr = schedule_value(self.config.lr, self.num_env_steps_sampled_lifetime)
        settings = {name: UpdateSettings.from_config(self.config, lr=lr) for name in batches}
        results = self.learner_group.update(batches, settings)
        self.sync_weights()
        return results


def make_batch(rollouts, gamma):
    """Turn rollouts, columns `[T, N, ...]` from each runner, into one batch of valid steps `[B, ...]`."""
    parts = []
    for rollout in (part.transformed() for part in rollouts):  # after the transforms of observations and rewards
        zeros = np.zeros_like(rollout.rewards)  # GAE without values is the discounted sum of the rewards
        ends = (rollout.terminated, rollout.truncated, rollout.valid)
        returns, _ = gae(rollout.rewards, zeros, zeros, *ends, gamma=gamma, lambda_=1.0)
        columns = {"obs": rollout.obs[:-1], "actions": rollout.actions, "returns": returns}
        parts.append(rollout.valid_rows(columns))
    batch = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    returns = batch.pop("returns")
    return {**batch, "advantages": (returns - returns.mean()) / (returns.std() + 1e-8)}


def reinforce_loss(module, batch, coefficients, *, entropy_coeff):
    """Return the scalar to minimise and what to report; `batch` holds tensors."""
    dist_inputs = module.policy(batch["obs"])
    policy_loss = -(module.distribution.logp(dist_inputs, batch["actions"]) * batch["advantages"]).mean()
    entropy = module.distribution.entropy(dist_inputs).mean()
    reported = {"policy_loss": policy_loss.detach(), "entropy": entropy.detach()}
    return policy_loss - entropy_coeff * entropy, reported


register_algorithm("REINFORCE", ReinforceConfig)  # a short name, in processes that import this file


def main(num_iterations=60, seed=0):
    config = ReinforceConfig().environment("CartPole-v1").debugging(seed=seed)
    with config.build() as algo:
        for _ in range(num_iterations):
            mean_return = algo.train()["env_runners"]["episode_return_mean"]
    print(f"mean return {mean_return:.0f} after {algo.num_env_steps_sampled_lifetime} env steps")
    return mean_return


if __name__ == "__main__":
    main()
