"""The code about callbacks on RLlib's page "Advanced Python APIs" (2.10 and earlier; Apache-2.0), as it stands."""

from __future__ import annotations

import re

import pytest
from rllib_scripts import Run, shrink

# The page lists the methods of `DefaultCallbacks` with their signatures. Each is here once with all of its arguments.
EVERY_METHOD = """
import numpy as np
from ray.rllib.algorithms.callbacks import DefaultCallbacks
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.evaluation.rollout_worker import get_global_worker

calls = {}

def note(event, **given):
    calls.setdefault(event, []).append(given)

class Every(DefaultCallbacks):
    def on_algorithm_init(self, *, algorithm, **kwargs) -> None:
        note("on_algorithm_init")
        assert algorithm.iteration == 0

    def on_checkpoint_loaded(self, *, algorithm, **kwargs) -> None:
        note("on_checkpoint_loaded")
        assert algorithm.iteration == 1

    def on_create_policy(self, *, policy_id, policy) -> None:
        note("on_create_policy", policy_id=policy_id)
        assert policy.model.forward_inference({"obs": np.zeros((1, 4), np.float32)})

    def on_environment_created(self, *, env_runner, env, env_context, **kwargs) -> None:
        note("on_environment_created")
        assert env.num_envs == len(env.envs) == 2
        assert env_context["corridor"] == 5 and env_context.worker_index == env_runner.worker_index == 0

    def on_sub_environment_created(self, *, worker, sub_environment, env_context, env_index=None, **kwargs) -> None:
        note("on_sub_environment_created", index=env_index)
        assert sub_environment.unwrapped.corridor == env_context["corridor"]

    def on_episode_created(
        self, *, episode, worker=None, env_runner=None, base_env=None, env=None, policies=None, rl_module=None,
        env_index, **kwargs,
    ) -> None:
        note("on_episode_created", id=episode.episode_id)
        self.check(worker, env_runner, base_env, env, policies, rl_module, env_index)

    def on_episode_start(
        self, *, episode, worker=None, env_runner=None, base_env=None, env=None, policies=None, rl_module=None,
        env_index, **kwargs,
    ) -> None:
        note("on_episode_start", id=episode.episode_id)
        self.check(worker, env_runner, base_env, env, policies, rl_module, env_index)
        assert episode.length == 0
        episode.user_data["seen"] = []
        episode.hist_data["seen"] = []

    def on_episode_step(
        self, *, episode, worker=None, env_runner=None, base_env=None, env=None, policies=None, rl_module=None,
        env_index, **kwargs,
    ) -> None:
        note("on_episode_step", id=episode.episode_id)
        episode.user_data["seen"].append(float(episode.last_observation_for()[0]))

    def on_episode_end(
        self, *, episode, worker=None, env_runner=None, base_env=None, env=None, policies=None, rl_module=None,
        env_index, **kwargs,
    ) -> None:
        note("on_episode_end", id=episode.episode_id)
        self.check(worker, env_runner, base_env, env, policies, rl_module, env_index)
        assert len(episode.user_data["seen"]) == episode.length == episode.total_reward
        assert episode.agent_rewards == {("agent0", "default_policy"): episode.total_reward}
        kind = "evaluated" if worker.policy_config["in_evaluation"] else "length"
        episode.custom_metrics[kind] = episode.length
        episode.hist_data["seen"] = episode.user_data["seen"][-1:]

    def on_evaluate_start(self, *, algorithm, **kwargs) -> None:
        note("on_evaluate_start", iteration=algorithm.iteration)

    def on_evaluate_end(self, *, algorithm, evaluation_metrics, **kwargs) -> None:
        note("on_evaluate_end")
        evaluation_metrics["added"] = 1

    def on_postprocess_trajectory(
        self, *, worker, episode, agent_id, policy_id, policies, postprocessed_batch, original_batches, **kwargs
    ) -> None:
        note("on_postprocess_trajectory", count=postprocessed_batch.count)
        policy, batch = original_batches[agent_id]  # the documented form: a tuple
        assert policy is policies[policy_id] is worker.policy_map["default_policy"] and agent_id == "agent0"
        assert get_global_worker() is worker
        assert (batch["rewards"] == 1).all() and batch.count == postprocessed_batch.count
        assert len(postprocessed_batch["infos"]) == len(postprocessed_batch["new_obs"]) == batch.count
        assert (postprocessed_batch["dones"] == batch["terminateds"]).all()
        postprocessed_batch["rewards"] = np.float64(7.0) * batch["rewards"]
        episode.custom_metrics["batches"] = episode.custom_metrics.get("batches", 0) + 1

    def on_sample_end(self, *, env_runner=None, samples, worker=None, **kwargs) -> None:
        note("on_sample_end", count=samples.count, evaluates=worker.policy_config["in_evaluation"])
        assert (samples["rewards"] == 7).all() and samples.policy_batches["default_policy"].count == samples.count
        assert samples.env_steps() == sum(episode.env_steps() for episode in samples)

    def on_learn_on_batch(self, *, policy, train_batch, result, **kwargs) -> None:
        note("on_learn_on_batch", count=train_batch.count)
        assert (train_batch["rewards"] == 7).all()  # what is learned from is what the callback wrote
        result["mean_action"] = float(train_batch["actions"].mean())
        assert policy.model is not None

    def on_train_result(self, *, algorithm, result, **kwargs) -> None:
        note("on_train_result", seen=result["episode_reward_mean"])
        result["callback_ok"] = True

    def check(self, worker, env_runner, base_env, env, policies, rl_module, env_index):
        assert worker is env_runner and env_index in (0, 1) and policies.keys() == {"default_policy"}
        assert base_env.get_sub_environments()[env_index] is env.envs[env_index].unwrapped
        assert policies["default_policy"].model is rl_module and get_global_worker() is worker
"""

# Stubs of the page, filled in: a small env, and small batches, which the page leaves open.
AROUND = '''
import gymnasium as gym
from ray.rllib.env.env_context import EnvContext

class YourEnv(gym.Env):
    """Episodes of five steps; each step gives 1."""

    observation_space, action_space = gym.spaces.Box(-1.0, 1.0, (4,)), gym.spaces.Discrete(2)

    def __init__(self, config):
        assert isinstance(config, EnvContext)
        self.corridor = config["corridor"]

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.t += 1
        return self.observation_space.sample(), 1.0, self.t == self.corridor, False, {}

config = PPOConfig().environment(YourEnv, env_config={"corridor": 5})
config.rollouts(num_rollout_workers=0, num_envs_per_worker=2)
config.training(train_batch_size=64, sgd_minibatch_size=32, num_sgd_iter=1)
'''

TRAINS = """
config.evaluation(evaluation_interval=2, evaluation_duration=4).callbacks(Every)
algo = config.build()
result, second = algo.train(), None
saved = algo.save()
second = algo.train()
algo.restore(saved)

events = [name for name in dir(DefaultCallbacks) if name.startswith("on_")]
never = {"on_evaluate_offline_start", "on_evaluate_offline_end", "on_offline_eval_runners_recreated"}
print("not called:", sorted(set(events) - calls.keys() - never))
print("policies:", calls["on_create_policy"], "sub-envs:", calls["on_sub_environment_created"][:2])
print("samples:", [call["count"] for call in calls["on_sample_end"] if not call["evaluates"]])
print("learned:", [call["count"] for call in calls["on_learn_on_batch"]])
print("steps:", len([call for call in calls["on_episode_step"]]) >= 128)
print("evaluated after:", calls["on_evaluate_start"], second["evaluation"]["added"])
print("custom:", {name: result["custom_metrics"][name] for name in sorted(result["custom_metrics"])})
print("custom in evaluation:", second["evaluation"]["custom_metrics"]["evaluated_mean"])
print("hist:", set(map(len, (result["hist_stats"]["episode_lengths"], result["hist_stats"]["seen"]))))
print("learner:", 0 <= result["info"]["learner"]["default_policy"]["custom_metrics"]["mean_action"] <= 1)
print("ok:", result["callback_ok"], result["episode_reward_mean"], result["episode_len_mean"])
print("sampler:", result["sampler_results"]["episode_reward_max"], result["timesteps_total"])
"""

CALLED = """not called: ['on_env_runners_recreated', 'on_workers_recreated']
policies: [{'policy_id': 'default_policy'}] sub-envs: [{'index': 0}, {'index': 1}]
samples: [64, 64]
learned: [64, 64]
steps: True
evaluated after: [{'iteration': 2}] 1
"""


def test_every_method_of_the_callbacks_is_called_with_its_arguments(run_in_both: Run) -> None:
    printed = run_in_both(EVERY_METHOD + AROUND + TRAINS).stdout
    assert printed.startswith(CALLED), printed
    for name in ("length_mean", "length_min", "length_max"):
        assert f"'{name}': 5.0" in printed
    assert "'batches_min': 1.0" in printed and "custom in evaluation: 5.0\n" in printed
    assert "hist: {12}\nlearner: True\nok: True 5.0 5.0\nsampler: 5.0 64\n" in printed


RECREATED = """
from ray.rllib.algorithms.callbacks import DefaultCallbacks

class MyCallbacks(DefaultCallbacks):
    def on_workers_recreated(
        self,
        *,
        algorithm,
        worker_set,
        worker_ids,
        is_evaluation,
        **kwargs,
    ):
        # Define what you would like to do on the recreated
        # workers:
        def func(w):
            # Here, we just set some arbitrary property to 1.
            if is_evaluation:
                w._custom_property_for_evaluation = 1
            else:
                w._custom_property_for_training = 1

        # Use the `foreach_workers` method of the worker set and
        # only loop through those worker IDs that have been restarted.
        # Note that we set `local_worker=False` to NOT include it (local
        # workers are never recreated; if they fail, the entire Algorithm
        # fails).
        worker_set.foreach_worker(
            func,
            remote_worker_ids=worker_ids,
            local_worker=False,
        )
"""

# The page has no training: here one of two runners ends itself, and a later iteration recreates it.
ENDS_A_RUNNER = """
import os
import time
from ray.rllib.algorithms.ppo import PPOConfig

config = PPOConfig().environment("CartPole-v1").callbacks(MyCallbacks)
config.rollouts(num_rollout_workers=2).training(train_batch_size=64, sgd_minibatch_size=32, num_sgd_iter=1)
config.fault_tolerance(recreate_failed_workers=True, delay_between_worker_restarts_s=0)
algo = config.build()
algo.train()
algo.workers.foreach_worker(
    lambda w: os._exit(1) if w.worker_index == 2 else None, local_worker=False, remote_worker_ids=[2]
)
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    algo.train()
    has = algo.workers.foreach_worker(lambda w: hasattr(w, "_custom_property_for_training"), local_worker=False)
    if True in has:
        break
print("set on:", has)
"""


@pytest.mark.slow
def test_recreated_workers_get_the_property(run_in_both: Run) -> None:
    assert "set on: [False, True]" in run_in_both(RECREATED + ENDS_A_RUNNER).stdout


# The four dots at the end of the list are a slip of the page.
SEVERAL = """
config.callbacks(make_multi_callbacks([
    MyCustomStatsCallbacks,
    MyCustomVideoCallbacks,
    MyCustomTraceCallbacks,
]))
"""

BEFORE_SEVERAL = """
from ray.rllib.algorithms.callbacks import DefaultCallbacks, MultiCallbacks, make_multi_callbacks
from ray.rllib.algorithms.ppo import PPOConfig

def printing(name):
    return type(name, (DefaultCallbacks,), {"on_train_result": lambda self, *, algorithm, result, **kw: print(name)})

MyCustomStatsCallbacks, MyCustomVideoCallbacks, MyCustomTraceCallbacks = map(printing, ("stats", "video", "trace"))
config = PPOConfig().environment("CartPole-v1")
config.training(train_batch_size=256, sgd_minibatch_size=128)  # several episodes of a policy that has not learned
"""

# The earlier page names the class, without code; and `info["pre_batch"]` is from callbacks that take one dict.
OTHER_FORMS = """
config.build().train()
config.callbacks(MultiCallbacks([MyCustomTraceCallbacks, MyCustomStatsCallbacks])).build().train()

def on_postprocess_traj(info):
    policy, batch = info["pre_batch"]
    rewards.append((batch["rewards"].sum(), info["post_batch"]["rewards"].sum(), type(policy.model).__name__))
    info["post_batch"]["rewards"] *= 2
    assert info["all_pre_batches"][info["agent_id"]] == info["pre_batch"] and info["episode"].length > 0

rewards = []
config.callbacks({"on_postprocess_traj": on_postprocess_traj, "on_train_result": lambda info: print(*info)})
config.build().train()
print(all(before == after > 0 for before, after, _ in rewards), len(rewards) > 1)
"""


@pytest.mark.slow_cases("without_ray")
def test_several_classes_are_called_in_their_order(run_in_both: Run) -> None:
    printed = run_in_both(shrink() + BEFORE_SEVERAL + SEVERAL + OTHER_FORMS).stdout
    assert printed.split() == ["stats", "video", "trace", "trace", "stats", "trainer", "result", "True", "True"]


GLOBAL_WORKER = """
from ray.rllib.evaluation.rollout_worker import get_global_worker

# You can use this from any callback to get a reference to the
# RolloutWorker running in the process, which in turn has references to
# all the policies, etc: see rollout_worker.py for more info.
rollout_worker = get_global_worker()
"""


@pytest.mark.slow
def test_the_worker_of_the_process_is_found_from_a_callback(run_in_both: Run) -> None:
    inside = "\n".join(f"        {line}" for line in GLOBAL_WORKER.splitlines())
    script = f"""
from ray.rllib.algorithms.callbacks import DefaultCallbacks
from ray.rllib.algorithms.ppo import PPOConfig

class Mine(DefaultCallbacks):
    def on_episode_end(self, *, episode, **kwargs):
{inside}
        episode.custom_metrics["index"] = rollout_worker.worker_index
        assert set(rollout_worker.policy_map) == {{"default_policy"}}

config = PPOConfig().environment("CartPole-v1").callbacks(Mine).rollouts(num_rollout_workers=2)
config.training(train_batch_size=400, sgd_minibatch_size=200, num_sgd_iter=1)
found = config.build().train()["custom_metrics"]
print(found["index_min"], found["index_max"])
"""
    assert run_in_both(script).stdout == "1.0 2.0\n"


@pytest.mark.slow
def test_advantages_that_nobody_computes_are_refused(run: Run) -> None:
    script = """
from ray.rllib.algorithms.callbacks import DefaultCallbacks
from ray.rllib.algorithms.dqn import DQNConfig

class Mine(DefaultCallbacks):
    def on_postprocess_trajectory(self, *, postprocessed_batch, **kwargs):
        postprocessed_batch["advantages"] = postprocessed_batch["rewards"]

DQNConfig().environment("CartPole-v1").rollouts(num_rollout_workers=0).callbacks(Mine).build().train()
"""
    words = re.sub(r"\s+", " ", run(script, code=1).stderr)
    assert "'advantages' is computed after on_postprocess_trajectory: change the rewards" in words


@pytest.mark.slow
@pytest.mark.parametrize("name", ["on_postprocess", "on_episode_ends"])
def test_unknown_events_of_functions_of_one_dict_are_named(run: Run, name: str) -> None:
    done = run(f"from ray.rllib.algorithms.ppo import PPOConfig\nPPOConfig().callbacks({{{name!r}: print}})", code=1)
    assert f"callbacks: unknown event {name!r}" in done.stderr
