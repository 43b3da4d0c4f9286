"""Population-based training with Ray Tune: poor trials copy good ones, and change the learning rate in place.

With `reuse_actors=True` an algorithm continues with the copied weights and the new settings: neither its runners nor
its envs are built again.
"""

import argparse

from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

import corral.compat.tune
from corral import PPOConfig


def main(num_iterations=30, perturbation_interval=5, num_trials=4, storage_path=None, **settings):
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=perturbation_interval,
        hyperparam_mutations={"lr": tune.loguniform(1e-4, 1e-2), "entropy_coeff": [0.0, 0.001, 0.01]},
    )
    tuner = tune.Tuner(
        corral.compat.tune.trainable(PPOConfig),
        param_space={"env": "CartPole-v1", "lr": tune.loguniform(1e-4, 1e-2), "entropy_coeff": 0.0, **settings},
        tune_config=tune.TuneConfig(
            metric="env_runners/episode_return_mean",
            mode="max",
            num_samples=num_trials,
            scheduler=scheduler,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(stop={"training_iteration": num_iterations}, storage_path=storage_path, verbose=1),
    )
    results = tuner.fit()
    for result in results:
        metrics = result.metrics
        print(f"lr {metrics['config']['lr']:.2g}: mean return {metrics['env_runners']['episode_return_mean']:.1f}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=30)
    main(parser.parse_args().iterations)
