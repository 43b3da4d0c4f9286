"""A mapped buffer of a million steps goes to a checkpoint and back without a copy of it in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import resource, sys
import numpy as np
from gymnasium import Env, spaces
from corral import DQNConfig
from corral.data.episodes.rollout import EpisodeCarry

class Wide(Env):
    observation_space = spaces.Box(-1.0, 1.0, (128,), np.float32)
    action_space = spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(128, np.float32), {}
    def step(self, action):
        return self.np_random.random(128, np.float32), 0.0, False, False, {}

capacity, directory, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
def config():
    made = DQNConfig().environment(Wide).env_runners(num_envs_per_env_runner=10).debugging(seed=0)
    made.rl_module(model_config={"fcnet_hiddens": [8]}).training(store_buffer_in_checkpoints=True)
    return made.training(replay_buffer_config={"capacity": capacity, "directory": directory})

def limit(algo):
    # What the process may still take, beyond what it has; files that are mapped into memory do not count.
    with open("/proc/self/status") as status:
        used = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + num_bytes // 4, resource.RLIM_INFINITY))

num_bytes = capacity * 128 * 4
sums = []
with config().build() as algo:
    algo.train()
    piece = algo.env_runner.sample(num_timesteps=10_000)
    while len(algo.local_replay_buffer) < capacity - 10_000:
        algo.local_replay_buffer.add(piece)
        piece.obs[:] += 1.0
    sample = algo.local_replay_buffer.get_state(copy=False)["columns"]["rewards"].shape
    limit(algo)
    algo.save(path)
    batch = algo.local_replay_buffer.sample(64)["obs"]
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with config().build() as algo:
    limit(algo)
    try:
        np.ones(num_bytes // 4, np.float32)
    except MemoryError:
        pass
    else:
        raise AssertionError("the limit has no effect")
    algo.restore_from_path(path)
    assert len(algo.local_replay_buffer) >= capacity - 10_000
    assert np.array_equal(algo.local_replay_buffer.sample(64)["obs"], batch)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are set as Linux counts it")
@pytest.mark.parametrize("capacity", [200_000, 1_000_000])
def test_a_mapped_buffer_is_never_copied_into_memory(capacity: int, tmp_path: Path) -> None:
    arguments = [str(capacity), str(tmp_path), str(tmp_path / "checkpoint")]
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
