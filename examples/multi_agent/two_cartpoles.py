"""Two agents, each with a cart of its own: one module for both, or a module for each.

The episode ends when both poles have fallen, or after 500 steps. An agent whose pole has fallen waits for the other.

python examples/multi_agent/two_cartpoles.py --modules separate --seeds 3
"""

import argparse

from corral import PPOConfig, make_multi_agent

SOLVED = 450.0  # mean return of each agent over its latest 100 episodes, of 500
NUM_ENV_STEPS = 200_000

MAPPINGS = {
    "shared": ({"shared"}, lambda agent_id, episode: "shared"),
    "separate": ({"module_0", "module_1"}, lambda agent_id, episode: f"module_{agent_id}"),
}


def make_config(seed, modules):
    policies, mapping = MAPPINGS[modules]
    return (
        PPOConfig()
        .environment(make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
        .env_runners(num_envs_per_env_runner=16)
        .multi_agent(policies=policies, policy_mapping_fn=mapping)
        .training(train_batch_size_per_learner=2048, minibatch_size=512, num_epochs=10, lr=3e-3)
        .debugging(seed=seed)
    )


def train(seed, modules, num_env_steps=NUM_ENV_STEPS):
    """Train until both agents have solved the task, and return the env steps and the mean return of each agent."""
    with make_config(seed, modules).build() as algo:
        while algo.num_env_steps_sampled_lifetime < num_env_steps:
            returns = algo.train()["env_runners"]["agent_episode_return_mean"]
            if min(returns.values()) >= SOLVED:
                break
        return algo.num_env_steps_sampled_lifetime, returns


def main(seeds=1, modules=("shared", "separate")):
    found = {}
    for name in modules:
        for seed in range(seeds):
            num_env_steps, returns = found[name, seed] = train(seed, name)
            shown = ", ".join(f"agent {agent}: {value:.0f}" for agent, value in returns.items())
            print(f"{name}, seed {seed}: after {num_env_steps:,} env steps, {shown}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", choices=MAPPINGS, nargs="+", default=list(MAPPINGS))
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0, 1, ...")
    args = parser.parse_args()
    main(args.seeds, args.modules)
