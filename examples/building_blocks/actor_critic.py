"""A training workflow of your own: a group of runners and a learner as building blocks, without an `Algorithm`.

The loop samples, computes advantages, learns and sends the weights, and logs what it likes. The engine is an argument:
the runners are in this process, in processes of this machine, or Ray actors.

python examples/building_blocks/actor_critic.py --num-env-runners 2 --engine process
"""

import argparse

import numpy as np

import corral
from corral import AlgorithmConfig, EnvRunnerGroup, Learner, LearningSpec, SampleRequest, UpdateSettings

ID = "default_policy"  # of the only module


def policy_gradient_loss(module, batch, coefficients):
    dist_inputs, values = module.policy_and_value(batch["obs"])
    logp = module.distribution.logp(dist_inputs, batch["actions"])
    policy_loss = -(logp * batch["advantages"]).mean()
    vf_loss = (values - batch["targets"]).square().mean()
    entropy = module.distribution.entropy(dist_inputs).mean()
    return policy_loss + 0.5 * vf_loss - 0.01 * entropy, {"entropy": entropy.detach()}


def make_batch(rollouts, learner):
    """Return one batch `[B, ...]` of the valid steps of rollouts `[T, N, ...]`."""
    parts = []
    for rollout in rollouts:
        values, next_values = rollout.compute_values(lambda obs: learner.values(ID, obs))
        ends = (rollout.terminated, rollout.truncated, rollout.valid)
        advantages, targets = corral.gae(rollout.rewards, values, next_values, *ends, gamma=0.99, lambda_=0.95)
        columns = {"obs": rollout.obs[:-1], "actions": rollout.actions, "advantages": advantages, "targets": targets}
        parts.append(rollout.valid_rows(columns))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def train(engine_name="local", num_env_runners=0, num_iterations=150, seed=0):
    """Train on CartPole, and return the greedy mean return."""
    config = AlgorithmConfig().environment("CartPole-v1").debugging(seed=seed)
    config.env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=8)
    engine = corral.make_engine(engine_name)
    runners = EnvRunnerGroup(config.freeze(), engine)
    try:
        spec = runners.module_specs[ID]  # what every runner built its copy of the module from
        learner = Learner({ID: spec.build()}, {ID: LearningSpec(policy_gradient_loss)}, seed=seed)
        settings = {ID: UpdateSettings(lr=5e-3, grad_clip=0.5)}
        for iteration in range(num_iterations):
            runners.sync_weights({"modules": learner.get_acting_weights()}, version=iteration)
            rollouts = runners.sample(SampleRequest(num_timesteps=256))
            results = learner.update({ID: make_batch(rollouts, learner)}, settings)
            if iteration % 30 == 0:
                print(f"iteration {iteration}: entropy {results[ID]['entropy']:.2f}")
        runners.sync_weights({"modules": learner.get_acting_weights()}, version=num_iterations)
        played = runners.sample(SampleRequest(num_episodes=20, explore=False))
        return sum(float(rollout.rewards[rollout.valid].sum()) for rollout in played) / 20
    finally:
        runners.stop()
        engine.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="local", choices=("local", "process", "ray"))
    parser.add_argument("--num-env-runners", type=int, default=0)
    options = parser.parse_args()
    print(f"greedy mean return {train(options.engine, options.num_env_runners):.0f}")
