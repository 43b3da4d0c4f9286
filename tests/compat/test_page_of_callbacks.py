"""The code of RLlib's page about callbacks (versions 2.40 and later; Apache-2.0), as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rllib_scripts import Run, shrink

LAMBDA = """
from ray.rllib.algorithms.ppo import PPOConfig

ppo = config = (
    PPOConfig()
    .environment("CartPole-v1")
    .callbacks(
        on_episode_end=(
            lambda episode, **kw: print(f"Episode done. R={episode.get_return()}")
        )
    )
    .build()
)
ppo.train()
"""

STATEFUL = """
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback

class EpisodeReturn(RLlibCallback):
    def __init__(self):
        super().__init__()
        # Keep some global state in between individual callback events.
        self.overall_sum_of_rewards = 0.0

    def on_episode_end(self, *, episode, **kwargs):
        self.overall_sum_of_rewards += episode.get_return()
        print(f"Episode done. R={episode.get_return()} Global SUM={self.overall_sum_of_rewards}")

ppo = (
    PPOConfig()
    .environment("CartPole-v1")
    .callbacks(EpisodeReturn)
    .build()
)
ppo.train()
"""

# The page continues earlier code, which has these names.
BEFORE_CHAINED = """
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback

config = PPOConfig().environment("CartPole-v1")
"""
CHAINED = """
class MyCallbacks(RLlibCallback):
    def on_train_result(self, *, algorithm, metrics_logger, result, **kwargs):
        print("RLlibCallback subclass")

class MyDebugCallbacks(RLlibCallback):
    def on_train_result(self, *, algorithm, metrics_logger, result, **kwargs):
        print("debug subclass")

# Define the callbacks order through the config.
# Subclasses first, then individual `on_train_result` (or other events) callables:
config.callbacks(
    callbacks_class=[MyDebugCallbacks, MyCallbacks],  # <- note: debug class first
    on_train_result=[
        lambda algorithm, **kw: print('lambda 1'),
        lambda algorithm, **kw: print('lambda 2'),
    ],
)

# When training the algorithm, after each training iteration, you should see
# something like:
# > debug subclass
# > RLlibCallback subclass
# > lambda 1
# > lambda 2
"""

REPLAY_BUFFER = """
import ormsgpack
from ray.rllib.algorithms.dqn import DQNConfig

def _write_buffer_if_necessary(algorithm, metrics_logger, result):
    # Write the buffer contents only every ith iteration.
    if algorithm.training_iteration % 2 == 0:
        # python dict
        buffer_contents = algorithm.local_replay_buffer.get_state()

        # binary
        msgpacked = ormsgpack.packb(
           buffer_contents,
           option=ormsgpack.OPT_SERIALIZE_NUMPY,
        )

        # Open some file and write the buffer contents into it using `ormsgpack`.
        with open("replay_buffer_contents.msgpack", "wb") as f:
           f.write(msgpacked)

config = (
    DQNConfig()
    .environment("CartPole-v1")
    .callbacks(
       on_train_result=_write_buffer_if_necessary,
    )
)
dqn = config.build()

# Train n times. Expect buffer to be written every ith iteration.
for _ in range(4):
    print(dqn.train())
"""

ACROBOT = """
import math
import numpy as np
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback

class LogAcrobotAngle(RLlibCallback):
    def on_episode_created(self, *, episode, **kwargs):
        # Initialize an empty list in the `custom_data` property of `episode`.
        episode.custom_data["theta1"] = []

    def on_episode_step(self, *, episode, env, **kwargs):
        # First get the angle from the env (note that `env` is a VectorEnv).
        # See https://github.com/Farama-Foundation/Gymnasium/blob/main/gymnasium/envs/classic_control/acrobot.py
        # for the env source code.
        cos_theta1, sin_theta1 = env.envs[0].unwrapped.state[0], env.envs[0].unwrapped.state[1]
        # Convert cos/sin/tan into degree.
        deg_theta1 = math.degrees(math.atan2(sin_theta1, cos_theta1))

        # Log the theta1 degree value in the episode object, temporarily.
        episode.custom_data["theta1"].append(deg_theta1)

    def on_episode_end(self, *, episode, metrics_logger, **kwargs):
        # Get all the logged theta1 degree values and average them.
        theta1s = episode.custom_data["theta1"]
        avg_theta1 = np.mean(theta1s)

        # Log the final result - per episode - to the MetricsLogger.
        # Report with a sliding/smoothing window of 50.
        metrics_logger.log_value("theta1_mean", avg_theta1, reduce="mean", window=50)

config = (
    PPOConfig()
    .environment("Acrobot-v1")
    .callbacks(
        callbacks_class=LogAcrobotAngle,
    )
)
ppo = config.build()

# Train n times. Expect to find `theta1_mean` in the results under:
# `env_runners/theta1_mean`
for i in range(10):
    results = ppo.train()
    print(
        f"iter={i} "
        f"theta1_mean={results['env_runners']['theta1_mean']} "
        f"R={results['env_runners']['episode_return_mean']}"
    )
"""

# Where version 2.40 keeps the angles.
ACROBOT_2_40 = (
    ACROBOT.replace(
        """    def on_episode_created(self, *, episode, **kwargs):
        # Initialize an empty list in the `custom_data` property of `episode`.
        episode.custom_data["theta1"] = []

""",
        "",
    )
    .replace('custom_data["theta1"].append(deg_theta1)', 'add_temporary_timestep_data("theta1", deg_theta1)')
    .replace('custom_data["theta1"]', 'get_temporary_timestep_data("theta1")')
)

# The tip at the end of the page, which has no code: `env_runner.config.in_evaluation`.
IN_EVALUATION = """
from ray.rllib.algorithms.ppo import PPOConfig

seen = set()
config = PPOConfig().environment("CartPole-v1").evaluation(evaluation_interval=1, evaluation_duration=2)
config.callbacks(on_episode_start=lambda env_runner, **kw: seen.add(env_runner.config.in_evaluation))
algo = config.build()
algo.train()
print("in evaluation:", sorted(seen))
"""

# The page shows the heat map of Ms. Pac-Man only as a link. This is its idea, for an env that needs no game file.
HEAT_MAP = """
import numpy as np
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback

class HeatMap(RLlibCallback):
    def __init__(self, env_runner_indices=None):
        super().__init__()
        self.indices = env_runner_indices
        self.heat = np.zeros((8, 8), np.int32)

    def on_episode_step(self, *, episode, env_runner, metrics_logger, env, env_index, rl_module, **kwargs):
        if self.indices is None or env_runner.worker_index in self.indices:
            x, _, angle, _ = env.unwrapped.envs[env_index].unwrapped.state
            place = min(7, int(4 + x)), min(7, int(4 + 10 * angle))
            episode.add_temporary_timestep_data("place", place)

    def on_episode_end(self, *, episode, env_runner, metrics_logger, env, env_index, rl_module, **kwargs):
        for x, y in episode.get_temporary_timestep_data("place"):
            self.heat[x, y] += 1
        heat = np.expand_dims(self.heat, 0)
        metrics_logger.log_value("heat_map", heat, reduce=None, clear_on_reduce=True)
        self.heat[:] = 0

result = PPOConfig().environment("CartPole-v1").callbacks(HeatMap).build().train()
images = result["env_runners"]["heat_map"]
# One image for each episode, and a point in it for each step of the episode.
lengths = result["env_runners"]["episode_len_mean"]
print("images:", len(images) == result["env_runners"]["num_episodes"], images[0].shape)
print("points:", abs(np.mean([image.sum() for image in images[-100:]]) - lengths) < 1e-6)
"""


def marked(*snippets: str) -> str:
    """Return a script that runs several snippets one after the other, with a line between their outputs."""
    return "\nprint('----')\n".join(snippets)


def check_printed_returns(lambda_: str, stateful: str) -> None:
    returns = [float(found) for found in re.findall(r"^Episode done. R=([\d.]+)$", lambda_, re.M)]
    assert len(returns) > 5 and all(8 <= found <= 500 for found in returns)
    rows = re.findall(r"^Episode done. R=([\d.]+) Global SUM=([\d.]+)$", stateful, re.M)
    total = 0.0
    for found, global_sum in rows:  # one runner: the sum grows from line to line
        total += float(found)
        assert float(global_sum) == total
    assert len(rows) > 5


def test_callables_and_classes_print_returns_in_the_order_of_the_page(run_in_both: Run) -> None:
    script = shrink() + marked(LAMBDA, STATEFUL, BEFORE_CHAINED + CHAINED + "\nconfig.build().train()\n")
    lambda_, stateful, chained = run_in_both(script).stdout.split("----\n")
    check_printed_returns(lambda_, stateful)
    assert chained.splitlines() == ["debug subclass", "RLlibCallback subclass", "lambda 1", "lambda 2"]


def check_buffer(directory: Path, num_steps: int) -> None:
    ormsgpack = pytest.importorskip("ormsgpack")
    contents = ormsgpack.unpackb((directory / "replay_buffer_contents.msgpack").read_bytes())

    def longest(part: object) -> int:
        if isinstance(part, dict):
            return max(map(longest, part.values()), default=0)
        return len(part) if isinstance(part, list) else 0

    assert longest(contents) >= num_steps


@pytest.mark.slow_cases("without_ray")
def test_a_replay_buffer_is_written_with_msgpack(run_in_both: Run, tmp_path: Path) -> None:
    pytest.importorskip("ormsgpack")
    printed = run_in_both(shrink() + REPLAY_BUFFER).stdout
    assert len(printed.splitlines()) == 4
    check_buffer(tmp_path, 400)


@pytest.mark.slow_cases("without_ray-later")
@pytest.mark.parametrize(
    "snippet", [pytest.param(ACROBOT_2_40, marks=pytest.mark.slow), ACROBOT], ids=["2.40", "later"]
)
def test_the_angle_of_acrobot_is_in_the_results(run_in_both: Run, snippet: str) -> None:
    lines = run_in_both(shrink() + snippet).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [f"iter={i}" for i in range(10)]
    angles = [float(line.split("theta1_mean=")[1].split()[0]) for line in lines]
    returns = [float(line.split("R=")[1]) for line in lines]
    assert all(-180 < angle < 180 for angle in angles) and all(-500 <= found < 0 for found in returns)
    assert len(set(angles)) > 1


@pytest.mark.slow
def test_callbacks_know_evaluation_and_log_images(run_in_both: Run) -> None:
    printed = run_in_both(shrink() + marked(IN_EVALUATION, HEAT_MAP)).stdout
    assert "in evaluation: [False, True]\n" in printed
    assert "images: True (1, 8, 8)\npoints: True\n" in printed


@pytest.mark.slow
def test_snippets_with_their_own_sizes(run: Run, tmp_path: Path) -> None:
    """With RLlib's defaults: two runners in processes, so each has a sum of its own, and 30 epochs."""
    pytest.importorskip("ray")
    printed = run(LAMBDA).stdout
    # Two processes print into one pipe, and a line may get into another one.
    assert len(re.findall(r"Episode done. R=\d+\.\d", printed)) > 100
    assert len(re.findall(r"Episode done. R=\d+\.\d Global SUM=\d+\.\d", run(STATEFUL).stdout)) > 100
    chained = run(BEFORE_CHAINED + CHAINED + "\nconfig.build().train()\n").stdout
    assert chained.splitlines() == ["debug subclass", "RLlibCallback subclass", "lambda 1", "lambda 2"]
    run(REPLAY_BUFFER)
    check_buffer(tmp_path, 4000)


@pytest.mark.slow
@pytest.mark.parametrize("snippet", [ACROBOT_2_40, ACROBOT], ids=["2.40", "later"])
def test_acrobot_with_its_own_sizes(run: Run, snippet: str) -> None:
    pytest.importorskip("ray")
    printed = run(snippet, timeout_s=900).stdout
    assert len(re.findall(r"^iter=\d theta1_mean=-?[\d.]+ R=-[\d.]+$", printed, re.M)) == 10
