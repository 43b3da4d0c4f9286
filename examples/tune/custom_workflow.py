"""A custom training loop, run by Ray Tune: a curriculum that raises the task when the return passes a threshold.

Tune runs `train_fn`. It builds an algorithm, calls `train()`, changes the envs in between, reports, and saves. A trial
that was interrupted continues from its last checkpoint.
"""

import argparse
import tempfile
from pathlib import Path

import gymnasium as gym
from ray import tune

import corral.compat.tune
from corral import PPOConfig, TaskSettableEnv

EPISODE_LENGTH, LAST_TASK = 16, 2
THRESHOLD = 0.8 * EPISODE_LENGTH


class Cues(TaskSettableEnv):
    """Repeat the cue as the action. Task 0 shows 2 kinds of cues, task 1 shows 4, task 2 all 8.

    With `get_task`, Corral gives the task to runners that are restarted, and saves it in checkpoints.
    """

    observation_space = gym.spaces.Discrete(8)
    action_space = gym.spaces.Discrete(8)

    def __init__(self, config):
        self.task = 0

    def get_task(self):
        return self.task

    def set_task(self, task):
        self.task = task

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.show(), {}

    def show(self):
        self.cue = int(self.np_random.integers(2 ** (self.task + 1)))
        return self.cue

    def step(self, action):
        self.t += 1
        reward = float(action == self.cue)
        return self.show(), reward, False, self.t == EPISODE_LENGTH, {}


def set_task(algo, task):
    algo.env_runner_group.foreach_env(lambda env: env.unwrapped.set_task(task))


def train_fn(settings):
    num_iterations = settings.pop("num_iterations")
    task = 0
    with corral.compat.tune.configured(make_config(), settings).build() as algo:
        if checkpoint := tune.get_checkpoint():
            with checkpoint.as_directory() as directory:
                algo.restore_from_path(Path(directory, "algorithm"))
                task = int(Path(directory, "task").read_text())
        while algo.training_iteration < num_iterations:
            result = algo.train()
            reported = corral.compat.tune.reportable(result)  # in which early means are NaN
            passed = reported["env_runners"]["episode_return_mean"] > THRESHOLD
            if passed and task < LAST_TASK:
                task += 1
                set_task(algo, task)
            with tempfile.TemporaryDirectory() as directory:
                algo.save(Path(directory, "algorithm"))
                Path(directory, "task").write_text(str(task))
                tune.report(
                    {**reported, "task": task},
                    checkpoint=tune.Checkpoint.from_directory(directory),
                )


def make_config():
    config = PPOConfig().environment(Cues).training(lr=3e-3, gamma=0.0, lambda_=0.0).debugging(seed=0)
    return config.reporting(metrics_num_episodes_for_smoothing=50)


def main(num_iterations=25, storage_path=None, **settings):
    config = corral.compat.tune.configured(make_config(), settings)
    tuner = tune.Tuner(
        tune.with_resources(train_fn, corral.compat.tune.resources(config)),
        param_space={"num_iterations": num_iterations, **settings},
        run_config=tune.RunConfig(
            failure_config=tune.FailureConfig(max_failures=1),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=2),
            storage_path=storage_path,
            verbose=1,
        ),
    )
    [result] = tuner.fit()
    mean_return = result.metrics["env_runners"]["episode_return_mean"]
    print(f"task {result.metrics['task']}, mean return {mean_return:.1f} of {EPISODE_LENGTH}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-env-runners", type=int, default=2)
    main(num_env_runners=parser.parse_args().num_env_runners)
