"""Try several learning rates side by side with Ray Tune, and act with the best policy."""

import argparse

from ray import tune

import corral.compat.tune
from corral import PPO, PPOConfig


def main(num_iterations=15, learning_rates=(3e-4, 1e-3, 3e-3), storage_path=None, **settings):
    config = PPOConfig().environment("CartPole-v1").debugging(seed=0)
    tuner = tune.Tuner(
        corral.compat.tune.trainable(config),
        param_space={"lr": tune.grid_search(list(learning_rates)), **settings},
        tune_config=tune.TuneConfig(metric="env_runners/episode_return_mean", mode="max"),
        run_config=tune.RunConfig(
            stop={"training_iteration": num_iterations},
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
            storage_path=storage_path,
            verbose=1,
        ),
    )
    best = tuner.fit().get_best_result()
    print(f"best lr {best.config['lr']}: mean return {best.metrics['env_runners']['episode_return_mean']:.1f}")
    with PPO.from_checkpoint(best.checkpoint.path) as algo:
        print("action:", algo.compute_single_action([0.0, 0.0, 0.1, 0.0], explore=False))
    return best


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=15)
    main(parser.parse_args().iterations)
