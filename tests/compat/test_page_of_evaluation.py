"""The code about evaluation on RLlib's page "Advanced Python APIs" (2.10 and earlier; Apache-2.0), as it stands."""

from __future__ import annotations

import pytest
from rllib_scripts import Run

# The page sets configs and trains nothing. Each snippet of 2.10 is followed by the excerpt of the earlier page, in
# braces as it stands there, and both are merged into a small run.
INTERVAL = (
    """
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

# Run one evaluation step on every 3rd `Algorithm.train()` call.
config = AlgorithmConfig().evaluation(
    evaluation_interval=3,
)
""",
    """
# Run one evaluation step on every 3rd `Algorithm.train()` call.
{
    "evaluation_interval": 3,
}
""",
)

DURATIONS = (
    """
# Every time we run an evaluation step, run it for exactly 10 episodes.
config = AlgorithmConfig().evaluation(
    evaluation_duration=10,
    evaluation_duration_unit="episodes",
)
""",
    """
# Every time we run an evaluation step, run it for exactly 10 episodes.
{
    "evaluation_duration": 10,
    "evaluation_duration_unit": "episodes",
}
""",
    """
# Every time we run an evaluation step, run it for (close to) 200 timesteps.
config = AlgorithmConfig().evaluation(
    evaluation_duration=200,
    evaluation_duration_unit="timesteps",
)
""",
    """
# Every time we run an evaluation step, run it for (close to) 200 timesteps.
{
    "evaluation_duration": 200,
    "evaluation_duration_unit": "timesteps",
}
""",
)

SEVEN_WORKERS = (
    """
# Every time we run an evaluation step, run it for exactly 10 episodes, no matter,
# how many eval workers we have.
config = AlgorithmConfig().evaluation(
    evaluation_duration=10,
    evaluation_duration_unit="episodes",
    # What if number of eval workers is non-dividable by 10?
    # -> Run 7 episodes (1 per eval worker), then run 3 more episodes only using
    #    evaluation workers 1-3 (evaluation workers 4-7 remain idle during that time).
    evaluation_num_workers=7,
)
""",
    """
# Every time we run an evaluation step, run it for exactly 10 episodes, no matter, how many eval workers we have.
{
    "evaluation_duration": 10,
    "evaluation_duration_unit": "episodes",

    # What if number of eval workers is non-dividable by 10?
    # -> Run 7 episodes (1 per eval worker), then run 3 more episodes only using
    #    evaluation workers 1-3 (evaluation workers 4-7 remain idle during that time).
    "evaluation_num_workers": 7,
}
""",
)

AUTO = (
    """
# Run evaluation and training at the same time via threading and make sure they roughly
# take the same time, such that the next `Algorithm.train()` call can execute
# immediately and not have to wait for a still ongoing (e.g. b/c of very long episodes)
# evaluation step:
config = AlgorithmConfig().evaluation(
    evaluation_interval=2,
    # run evaluation and training in parallel
    evaluation_parallel_to_training=True,
    # automatically end evaluation when train step has finished
    evaluation_duration="auto",
    evaluation_duration_unit="timesteps",  # <- this setting is ignored; RLlib
    # will always run by timesteps (not by complete
    # episodes) in this duration=auto mode
)
""",
    """
# Run evaluation and training at the same time via threading and make sure they roughly
# take the same time, such that the next `Algorithm.train()` call can execute
# immediately and not have to wait for a still ongoing (e.g. b/c of very long episodes)
# evaluation step:
{
    "evaluation_interval": 1,
    "evaluation_parallel_to_training": True,
    "evaluation_duration": "auto",  # automatically end evaluation when train step has finished
    "evaluation_duration_unit": "timesteps",  # <- more fine grained than "episodes"
}
""",
)

NO_EXPLORATION = (
    """
# Switching off exploration behavior for evaluation workers
# (see rllib/algorithms/algorithm.py). Use any keys in this sub-dict that are
# also supported in the main Algorithm config.
config = AlgorithmConfig().evaluation(
    evaluation_config=AlgorithmConfig.overrides(explore=False),
)
# ... which is a more type-checked version of the old-style:
# config = AlgorithmConfig().evaluation(
#    evaluation_config={"explore": False},
# )
""",
    """
config = AlgorithmConfig().evaluation(
   evaluation_config={"explore": False},
)
""",
    """
{
# Switching off exploration behavior for evaluation workers
# (see rllib/algorithms/algorithm.py). Use any keys in this sub-dict that are
# also supported in the main Algorithm config.
"evaluation_config": {
   "explore": False
}
}
""",
)

UNSTABLE = (
    """
# Having an environment that occasionally blocks completely for e.g. 10min would
# also affect (and block) training. Here is how you can defend your evaluation setup
# against oft-crashing or -stalling envs (or other unstable components on your evaluation
# workers).
config = AlgorithmConfig().evaluation(
    evaluation_interval=1,
    evaluation_parallel_to_training=True,
    evaluation_duration="auto",
    evaluation_duration_unit="timesteps",  # <- default anyway
    evaluation_force_reset_envs_before_iteration=True,  # <- default anyway
)
""",
)
FIVE_WORKERS = """
# Having an environment that occasionally blocks completely for e.g. 10min would
# also affect (and block) training:
{
    "evaluation_interval": 1,
    "evaluation_parallel_to_training": True,
    "evaluation_num_workers": 5,  # each worker runs two episodes
    "evaluation_duration": 10,
    "evaluation_duration_unit": "episodes",
}
"""
ASYNC = """
{
    # ...
    # same settings as above, plus:
    "enable_async_evaluation": True,  # evaluate asynchronously
}
"""

# Runs a snippet and then a small training with its evaluation settings. The actions of evaluation are noted.
TRAINS = '''
import gymnasium as gym
import numpy as np
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.callbacks import DefaultCallbacks
from ray.rllib.algorithms.ppo import PPO

DEFAULTS = AlgorithmConfig().to_dict()

def settings_of(text):
    """Return the settings of a snippet: those that differ in its config, or the keys of its dict."""
    if "config = " not in text:
        return eval(text.strip())
    names = {"AlgorithmConfig": AlgorithmConfig}
    exec(text, names)
    found = names["config"].to_dict()
    return {name: found[name] for name in found if name.startswith("evaluation") and found[name] != DEFAULTS[name]}

class Corridor(gym.Env):
    """Episodes of four steps, whose observation is always the same."""

    observation_space, action_space = gym.spaces.Box(-1.0, 1.0, (2,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), float(action), self.t == 4, False, {}

class Notes(DefaultCallbacks):
    def on_episode_end(self, *, worker, episode, **kwargs):
        if worker.policy_config["in_evaluation"]:
            episode.hist_data["worker"] = [worker.worker_index]
            episode.hist_data["actions"] = [len(set(map(int, episode.get_actions())))]

SMALL = {"num_workers": 0, "train_batch_size": 80, "sgd_minibatch_size": 40, "num_sgd_iter": 1, "callbacks": Notes}

def train(settings, num_iterations=1):
    algo = PPO(config={**SMALL, "env": Corridor, **settings})
    results = [algo.train() for _ in range(num_iterations)]
    algo.stop()
    return results

def show(name, *found):
    print(f"{name}:", *found)
'''

RUNS = """
for text in INTERVAL:
    played = [bool(result.get("evaluation", {}).get("fresh")) for result in train(settings_of(text), 4)]
    show("interval", played)
for text in DURATIONS:
    (result,) = train({"evaluation_interval": 1, **settings_of(text)})
    runners = result["evaluation"]["env_runners"]
    show("duration", result["evaluation"]["episodes_this_iter"], runners["num_env_steps_sampled"])
both = [train({"evaluation_interval": 1, **settings_of(text)})[0] for text in NO_EXPLORATION]
show("one action", [set(result["evaluation"]["hist_stats"]["actions"]) for result in both])
(result,) = train({"evaluation_interval": 1, "evaluation_duration": 20})
show("both actions", 2 in result["evaluation"]["hist_stats"]["actions"])
"""

RUNS_PARALLEL = """
for text in (*AUTO, *UNSTABLE):
    settings = settings_of(text)
    results = train({**settings, "evaluation_num_workers": 1}, 4)
    versions = [result["evaluation"]["weights_version"] for result in results if result["evaluation"].get("fresh")]
    show("auto", settings["evaluation_interval"], versions)
results = train({"evaluation_interval": 1, "evaluation_duration": 4}, 3)
show("in turn", [result["evaluation"]["weights_version"] for result in results])
"""

RUNS_WORKERS = """
for text in SEVEN_WORKERS:
    (result,) = train({"evaluation_interval": 1, **settings_of(text)})
    show("workers", sorted(result["evaluation"]["hist_stats"]["worker"]))
"""

RUNS_ASYNC = """
for settings in (settings_of(FIVE_WORKERS), {**settings_of(FIVE_WORKERS), **settings_of(ASYNC)}):
    (result,) = train(settings)
    show("episodes", result["evaluation"]["episodes_this_iter"])
(result,) = train({"evaluation_interval": 1, "evaluation_duration": 200, "evaluation_num_workers": 3,
                   "evaluation_duration_unit": "timesteps"})
show("rounded up", result["evaluation"]["env_runners"]["num_env_steps_sampled"])
"""


def with_snippets(text: str, **snippets: object) -> str:
    """Return a script in which names stand for the texts of snippets."""
    return TRAINS + "".join(f"{name} = {value!r}\n" for name, value in snippets.items()) + text


@pytest.mark.slow_cases("without_ray")
def test_evaluation_runs_as_the_settings_of_the_page_say(run_in_both: Run) -> None:
    script = with_snippets(RUNS, INTERVAL=INTERVAL, DURATIONS=DURATIONS, NO_EXPLORATION=NO_EXPLORATION)
    assert (
        run_in_both(script).stdout
        == """interval: [False, False, True, False]
interval: [False, False, True, False]
duration: 10 40
duration: 10 40
duration: 50 200
duration: 50 200
one action: [{1}, {1}, {1}]
both actions: True
"""
    )


@pytest.mark.slow
def test_parallel_evaluation_has_the_weights_before_its_training_step(run_in_both: Run) -> None:
    """The sequence of the page: train(1->2) + eval(1)."""
    printed = run_in_both(with_snippets(RUNS_PARALLEL, AUTO=AUTO, UNSTABLE=UNSTABLE), timeout_s=400).stdout
    auto = "auto: 2 [1, 3]\nauto: 1 [0, 1, 2, 3]\nauto: 1 [0, 1, 2, 3]\n"
    assert printed == f"{auto}in turn: [1, 2, 3]\n"


@pytest.mark.slow
def test_ten_episodes_are_played_by_seven_workers_and_then_by_three(run_in_both: Run) -> None:
    printed = run_in_both(with_snippets(RUNS_WORKERS, SEVEN_WORKERS=SEVEN_WORKERS), timeout_s=400).stdout
    assert printed == 2 * "workers: [1, 1, 2, 2, 3, 3, 4, 5, 6, 7]\n"


@pytest.mark.slow
def test_workers_share_episodes_and_timesteps(run_in_both: Run) -> None:
    printed = run_in_both(with_snippets(RUNS_ASYNC, FIVE_WORKERS=FIVE_WORKERS, ASYNC=ASYNC), timeout_s=400).stdout
    assert printed == "episodes: 10\nepisodes: 10\nrounded up: 201\n"


# What the sample output of the page shows: the keys of the evaluation, without and with a function of its own. The
# corridor of RLlib's examples is here as a stub, so that it needs no file of Ray.
CUSTOM = """
from ray.rllib.evaluation.metrics import collect_episodes, summarize_episodes

class SimpleCorridor(Corridor):
    length = 10

    def __init__(self, config=None):
        self.length = config["corridor_length"]

    def set_corridor_length(self, length):
        self.length = length
        print("Update corridor length to", length)

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 0.25, self.t == self.length, False, {}

def custom_eval_function(algorithm, eval_workers):
    assert algorithm.evaluation_workers is eval_workers and algorithm.workers is algorithm.env_runner_group
    assert eval_workers.num_remote_workers() == 2
    eval_workers.foreach_worker(
        func=lambda w: w.foreach_env(lambda env: env.set_corridor_length(4 if w.worker_index == 1 else 7))
    )
    for i in range(5):
        print("Custom evaluation round", i)
        eval_workers.foreach_worker(func=lambda w: w.sample(), local_worker=False)
    episodes = collect_episodes(workers=eval_workers, timeout_seconds=99999)
    metrics = summarize_episodes(episodes)
    metrics["foo"] = 1
    return metrics

evaluation = {"evaluation_interval": 1, "evaluation_num_workers": 2, "evaluation_duration": 10}
for more in ({}, {"custom_eval_function": custom_eval_function}):
    config = {**evaluation, **more, "env": SimpleCorridor, "env_config": {"corridor_length": 10}}
    config["evaluation_config"] = {"env_config": {"corridor_length": 5}}
    (result,) = train(config)
    keys = ("custom_metrics", "episode_len_mean", "episode_reward_max", "episode_reward_mean", "episode_reward_min")
    print({key: result["evaluation"][key] for key in (*keys, "episodes_this_iter")}, result["evaluation"].get("foo"))
"""


@pytest.mark.slow
def test_metrics_of_a_function_are_below_evaluation(run_in_both: Run) -> None:
    lines = run_in_both(TRAINS + CUSTOM).stdout.splitlines()
    # The workers are processes: their lines come in any order with the lines of the script, as in RLlib.
    of_workers = [line for line in lines if line.startswith("Update")]
    assert sorted(of_workers) == [f"Update corridor length to {length}" for length in (4, 7)]
    assert [line for line in lines if line not in of_workers] == [
        "{'custom_metrics': {}, 'episode_len_mean': 5.0, 'episode_reward_max': 1.25, 'episode_reward_mean': 1.25, "
        "'episode_reward_min': 1.25, 'episodes_this_iter': 10} None",
        *[f"Custom evaluation round {i}" for i in range(5)],
        "{'custom_metrics': {}, 'episode_len_mean': 5.5, 'episode_reward_max': 1.75, 'episode_reward_mean': 1.375, "
        "'episode_reward_min': 1.0, 'episodes_this_iter': 10} 1",
    ]
