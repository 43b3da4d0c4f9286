"""Search hyperparameters with Optuna, without Ray: each trial is a loop over `train()`, and poor ones end early."""

import argparse

import optuna

from corral import PPOConfig


def make_objective(num_iterations):
    def objective(trial):
        config = PPOConfig().environment("CartPole-v1").debugging(seed=trial.number)
        config.training(
            lr=trial.suggest_float("lr", 1e-5, 1e-2, log=True),
            entropy_coeff=trial.suggest_float("entropy_coeff", 0.0, 0.02),
            num_epochs=trial.suggest_int("num_epochs", 2, 10),
        )
        with config.build() as algo:
            for iteration in range(num_iterations):
                result = algo.train()
                mean_return = result["env_runners"]["episode_return_mean"]
                if "env_runners/episode_return_mean" in result["early_means"]:
                    continue  # of too many short episodes
                trial.report(mean_return, iteration)
                if trial.should_prune():
                    raise optuna.TrialPruned
        return mean_return

    return objective


def main(num_trials=20, num_iterations=15, pruner=None, seed=0):
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=pruner or optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=3),
    )
    study.optimize(make_objective(num_iterations), n_trials=num_trials)
    pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(f"best mean return {study.best_value:.1f} with {study.best_params}; {pruned} trials ended early")
    return study


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    main(parser.parse_args().trials)
