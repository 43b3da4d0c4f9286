"""`num_threads=1` means one thread: no library does work of a training in a second one."""

import json
import os
import subprocess
import sys

import pytest
import torch

from corral.modules.threads import limit_threads

# Trains each algorithm and prints the CPU ticks of the thread that trains and of all other threads together. The nets
# are so wide that torch and NumPy use all cores if they may.
SCRIPT = """
import json, threading
from pathlib import Path
from corral import DQNConfig, PPOConfig, SACConfig

def ticks():
    stats = {int(path.parent.name): path.read_text() for path in Path("/proc/self/task").glob("*/stat")}
    fields = {thread: text.rpartition(")")[2].split() for thread, text in stats.items()}
    return {thread: int(values[11]) + int(values[12]) for thread, values in fields.items()}

used = {}
trainings = [(PPOConfig(), "Pendulum-v1", 1), (DQNConfig(), "CartPole-v1", 5), (SACConfig(), "Pendulum-v1", 1)]
for config, env, rounds in trainings:
    config.environment(env).rl_module(model_config={"fcnet_hiddens": [256, 256]}).learners(num_threads=1)
    if config.algo_name != "PPO":
        config.training(num_steps_sampled_before_learning_starts=100)
        config.reporting(min_sample_timesteps_per_iteration=200)
    with config.build() as algo:
        algo.train()
        before = ticks()
        for _ in range(rounds):
            algo.train()
        after = ticks()
    spent = {thread: count - before.get(thread, 0) for thread, count in after.items()}
    used[config.algo_name] = [spent.pop(threading.get_native_id()), sum(spent.values())]
print(json.dumps(used))
"""


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="with one core there is no second thread")
def test_training_keeps_one_thread_busy() -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for algo, (own, others) in json.loads(done.stdout.splitlines()[-1]).items():
        assert own > 0
        assert others <= max(0.05 * own, 2), algo


def test_the_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    with limit_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
