"""The code about curricula and named actors on RLlib's page "Advanced Python APIs" (Apache-2.0), as it stands there."""

from __future__ import annotations

import pytest
from rllib_scripts import Run

TASKS = """
from ray.rllib.env.apis.task_settable_env import TaskSettableEnv

class MyEnv(TaskSettableEnv):
    def get_task(self):
        return self.current_difficulty

    def set_task(self, task):
        self.current_difficulty = task

def curriculum_fn(train_results, task_settable_env, env_ctx):
    # Very simple curriculum function.
    current_task = task_settable_env.get_task()
    new_task = current_task + 1
    return new_task

# Setup your Algorithm's config like so:
config = {
    "env": MyEnv,
    "env_task_fn": curriculum_fn,
}
# Train using `Tuner.fit()` or `Algorithm.train()` and the above config stub.
# ...
"""

# The page leaves out what makes MyEnv an env. Each difficulty gives other rewards, so that results show it.
MY_ENV = """
import gymnasium as gym
import numpy as np

def reset(self, *, seed=None, options=None):
    self.t = 0
    return np.zeros(1, np.float32), {}

def step(self, action):
    self.t += 1
    return np.zeros(1, np.float32), float(self.current_difficulty), self.t == 4, False, {}

MyEnv.observation_space, MyEnv.action_space = gym.spaces.Box(-1.0, 1.0, (1,)), gym.spaces.Discrete(2)
MyEnv.__init__ = lambda self, config=None: setattr(self, "current_difficulty", 1)
MyEnv.reset, MyEnv.step = reset, step
"""
TRAINS_TASKS = """
from ray.rllib.algorithms.ppo import PPO

algo = PPO(config={**config, "num_workers": 0, "train_batch_size": 40, "sgd_minibatch_size": 40, "num_sgd_iter": 1})
print([algo.train()["hist_stats"]["episode_reward"][-1] for _ in range(3)])
print(algo.workers.foreach_worker(lambda ev: ev.foreach_env(lambda env: env.get_task())))
"""


@pytest.mark.slow_cases("without_ray")
def test_a_curriculum_function_sets_the_next_task(run_in_both: Run) -> None:
    printed = run_in_both(TASKS + MY_ENV + TRAINS_TASKS).stdout
    assert printed == "[4.0, 8.0, 12.0]\n[[4]]\n"


# The page's YourEnv is not there: episodes of four steps with a return of 150, and a task that each sub-env keeps.
# `run_config` ends the endless loops of the page after two results. Ray starts here, and does not join another one.
BEFORE_TUNE = """
import functools
import os
import gymnasium as gym
import numpy as np
import ray
import ray.tune

class YourEnv(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1.0, 1.0, (1,)), gym.spaces.Discrete(2)

    def __init__(self, config=None):
        self.place = {directory!r}

    def set_task(self, task):
        with open(os.path.join(self.place, f"tasks_{{os.getpid()}}.txt"), "a") as file:
            file.write(f"{{task}}\\n")

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {{}}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), 37.5, self.t == 4, False, {{}}

ray.init = functools.partial(ray.init, address="local", num_cpus=4, include_dashboard=False)
found = []

class Tuner(ray.tune.Tuner):
    def __init__(self, *args, **kwargs):
        stop = ray.tune.RunConfig(stop={{"training_iteration": 2}}, verbose=0, storage_path={directory!r})
        super().__init__(*args, run_config=stop, **kwargs)

    def fit(self):
        found.append(super().fit())

ray.tune.Tuner = Tuner
"""
AFTER_TUNE = """
(result,) = found[0]
assert result.error is None, result.error
print(result.metrics["training_iteration"], result.metrics["episode_reward_mean"], result.metrics["timesteps_total"])
"""

# A comma is missing after `with_resources(...)` on both versions of the page.
FUNCTION_2_10 = """
import ray
from ray import train, tune
from ray.rllib.algorithms.ppo import PPO

def train_fn(config):
    algo = PPO(config=config, env=YourEnv)
    while True:
        result = algo.train()
        train.report(result)
        if result["episode_reward_mean"] > 200:
            task = 2
        elif result["episode_reward_mean"] > 100:
            task = 1
        else:
            task = 0
        algo.workers.foreach_worker(
            lambda ev: ev.foreach_env(
                lambda env: env.set_task(task)))

num_gpus = 0
num_workers = 2

ray.init()
tune.Tuner(
    tune.with_resources(train_fn, resources=tune.PlacementGroupFactory(
        [{"CPU": 1}, {"GPU": num_gpus}] + [{"CPU": 1}] * num_workers
    ),),
    param_space={
        "num_gpus": num_gpus,
        "num_workers": num_workers,
    },
).fit()
"""

# What the function takes and reports on earlier versions of the page.
FUNCTION_EARLIER = (
    FUNCTION_2_10.replace("from ray import train, tune", "from ray import tune")
    .replace("def train_fn(config):", "def train(config, reporter):")
    .replace("train.report(result)", "reporter(**result)")
    .replace("with_resources(train_fn,", "with_resources(train,")
)

CALLBACKS = """
import ray
from ray import tune
from ray.rllib.agents.callbacks import DefaultCallbacks

class MyCallbacks(DefaultCallbacks):
    def on_train_result(self, algorithm, result, **kwargs):
        if result["episode_reward_mean"] > 200:
            task = 2
        elif result["episode_reward_mean"] > 100:
            task = 1
        else:
            task = 0
        algorithm.workers.foreach_worker(
            lambda ev: ev.foreach_env(
                lambda env: env.set_task(task)))

ray.init()
tune.Tuner(
    "PPO",
    param_space={
        "env": YourEnv,
        "callbacks": MyCallbacks,
    },
).fit()
"""


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("snippet", [FUNCTION_2_10, FUNCTION_EARLIER, CALLBACKS], ids=["2.10", "earlier", "callbacks"])
def test_training_in_tune_sets_tasks_after_each_result(run: Run, tmp_path: object, snippet: str) -> None:
    pytest.importorskip("ray")
    script = BEFORE_TUNE.format(directory=str(tmp_path)) + snippet + AFTER_TUNE
    assert run(script).stdout.splitlines()[-1] == "2 150.0 8000"
    files = list(tmp_path.glob("tasks_*.txt"))  # type: ignore[attr-defined]
    assert len(files) == 2  # the sub-envs of two workers
    assert {line for file in files for line in file.read_text().split()} == {"1"}


CALLBACKS_IN_PLACE = """
algo = PPOConfig().environment(YourEnv).callbacks(MyCallbacks).rollouts(num_rollout_workers=0)
algo = algo.training(train_batch_size=40, sgd_minibatch_size=40, num_sgd_iter=1).build()
print(algo.train()["episode_reward_mean"])
"""


@pytest.mark.slow
def test_the_callbacks_set_tasks_without_ray(run: Run, tmp_path: object) -> None:
    """The class of the page works without Tune; what needs Tune names the extra."""
    before = BEFORE_TUNE.format(directory=str(tmp_path)).partition("ray.init =")[0].replace("import ray.tune\n", "")
    callbacks = CALLBACKS.partition("ray.init()")[0].replace("from ray import tune\n", "")
    script = before + callbacks + "from ray.rllib.algorithms.ppo import PPOConfig\n" + CALLBACKS_IN_PLACE
    assert run(script, with_ray=False).stdout == "150.0\n"
    (file,) = tmp_path.glob("tasks_*.txt")  # type: ignore[attr-defined]
    assert file.read_text() == "1\n"


COUNTER = """
import ray


@ray.remote
class Counter:
    def __init__(self):
        self.count = 0

    def inc(self, n):
        self.count += n

    def get(self):
        return self.count


# on the driver
counter = Counter.options(name="global_counter").remote()
print(ray.get(counter.get.remote()))  # get the latest count
"""

COUNTER_IN_ENVS = """
# in your envs
counter = ray.get_actor("global_counter")
counter.inc.remote(1)  # async call to increment the global count
"""

# The stub: an env, with the last part of the page in its `reset`, and Ray's workers, whose envs all count.
COUNTS = """
import time
import gymnasium as gym
from ray.rllib.algorithms.ppo import PPOConfig

class YourEnv(gym.Wrapper):
    def __init__(self, config):
        super().__init__(gym.make("CartPole-v1"))

    def reset(self, **kwargs):
        {inside}
        return super().reset(**kwargs)

config = PPOConfig().environment(YourEnv).rollouts(num_rollout_workers=2)
algo = config.training(train_batch_size=200, sgd_minibatch_size=100, num_sgd_iter=1).build()
ended = algo.train()["episodes_total"]
deadline = time.monotonic() + 30
while (count := ray.get(counter.get.remote())) < ended + 2 and time.monotonic() < deadline:
    pass
print(ended > 0, ended + 2 <= count <= ended + 20)  # each worker has begun one more; checks of the env reset it, too
"""

BEFORE_COUNTER = "import ray\nray.init(address='local', num_cpus=4, include_dashboard=False, log_to_driver=False)\n"


@pytest.mark.xdist_group("ray")
@pytest.mark.slow
def test_a_named_actor_counts_in_the_envs_of_workers(run: Run) -> None:
    pytest.importorskip("ray")
    inside = COUNTER_IN_ENVS.replace("\n", "\n        ")
    assert run(BEFORE_COUNTER + COUNTER + COUNTS.format(inside=inside)).stdout == "0\nTrue True\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("snippet", "name"),
    [
        (COUNTER, "ray.remote"),
        (FUNCTION_2_10, "ray.tune.Tuner"),
        (FUNCTION_EARLIER, "ray.tune.Tuner"),
        (CALLBACKS, "ray.tune.Tuner"),
    ],
    ids=["actor", "2.10", "earlier", "callbacks"],
)
def test_without_ray_actors_and_tune_name_the_extra(run: Run, snippet: str, name: str) -> None:
    done = run("YourEnv = None\n" + snippet, with_ray=False, code=1)
    assert f"{name} needs Ray, which is not installed: pip install 'corral[rllib]'" in done.stderr
