"""Count the steps of all envs in one place: a named actor that every env increments and the driver reads.

The same code runs in this process, with runners in processes of their own, and on Ray:

    python examples/coordination/counter.py --engine process --num-env-runners 2
"""

import argparse

import gymnasium as gym

from corral import PPOConfig, coordination


class Counter:
    def __init__(self):
        self.count = 0

    def inc(self, n):
        self.count += n

    def get(self):
        return self.count


class CountingCartPole(gym.Wrapper):
    def __init__(self, config):
        super().__init__(gym.make("CartPole-v1"))
        self.counter = coordination.get("global_counter")

    def step(self, action):
        self.counter.call("inc", 1)
        return super().step(action)


def main(engine="local", num_env_runners=2, num_iterations=2):
    if engine == "ray":
        import ray

        ray.init(ignore_reinit_error=True)  # before the actor is created, which makes it one of Ray's
    counter = coordination.create("global_counter", Counter)
    config = (
        PPOConfig()
        .environment(CountingCartPole)
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=4)
        .training(train_batch_size_per_learner=512)
        .engine(engine)
    )
    counts = []
    try:
        with config.build() as algo:
            for _ in range(num_iterations):
                result = algo.train()
                counts.append((counter.call("get"), result["num_env_steps_sampled_lifetime"]))
                print("{} steps counted, {} sampled".format(*counts[-1]))
    finally:
        coordination.remove("global_counter")
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["local", "process", "ray"], default="process")
    parser.add_argument("--num-env-runners", type=int, default=2)
    parser.add_argument("--num-iterations", type=int, default=3)
    main(**vars(parser.parse_args()))
