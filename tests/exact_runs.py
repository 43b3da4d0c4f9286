"""Runs that are saved and continued in another process, and an env that continues where it stood."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from corral import Algorithm, AlgorithmConfig, SACConfig
from corral.algorithms.registry import config_class

K = 2


class Drift(gym.Env[NDArray[np.float32], Any]):
    """A random walk with a random length, whose rewards depend on the actions."""

    observation_space: Any = spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        is_box = bool((config or {}).get("box"))
        self.action_space: Any = spaces.Box(-1.0, 1.0, (2,), np.float32) if is_box else spaces.Discrete(3)
        self._mean_length = int((config or {}).get("mean_length", 12))
        self._episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self._episodes += 1
        self._place = self.np_random.normal(size=3)
        return self._place.astype(np.float32), {"episodes": self._episodes}

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        push = float(np.mean(action)) - (0.0 if isinstance(self.action_space, spaces.Box) else 1.0)
        self._place = 0.9 * self._place + 0.3 * self.np_random.normal(size=3) + 0.1 * push
        over = bool(self.np_random.random() < 1 / self._mean_length)
        return self._place.astype(np.float32), -float(np.abs(self._place).sum()), over, False, {"push": push}


class StatefulDrift(Drift):
    """The same env, which can be saved in the middle of an episode."""

    def get_state(self) -> dict[str, Any]:
        return {"episodes": self._episodes, "place": self._place}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._episodes, self._place = int(state["episodes"]), np.array(state["place"], np.float64).reshape(3)


class Features(torch.nn.Linear):
    """A features extractor."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(3, 4)


SMALL: dict[str, Any] = {"fcnet_hiddens": [16]}
OFF_POLICY: dict[str, Any] = {
    "train_batch_size_per_learner": 16,
    "num_steps_sampled_before_learning_starts": 32,
    "training_intensity": 2.0,
    "replay_buffer_config": {"capacity": 500},
    "target_network_update_freq": 50,
}


def make_config(algo: str, *, env: Any = StatefulDrift, **settings: Any) -> AlgorithmConfig:
    """The config of a small run: `algo` is the name of an algorithm, or SAC-discrete."""
    config: Any = SACConfig() if algo == "SAC-discrete" else config_class(algo)()
    config.environment(env, env_config={"box": algo in ("SAC", "TQC", "CrossQ", "TD3", "DDPG")}, wrappers=[limited])
    config.env_runners(num_envs_per_env_runner=3).debugging(seed=3).rl_module(model_config=SMALL)
    if algo in ("PPO", "PQN"):
        config.training(train_batch_size_per_learner=90, minibatch_size=32, num_epochs=2, lr=[[0, 1e-2], [900, 1e-3]])
    elif algo in ("APPO", "IMPALA"):
        config.env_runners(num_env_runners=0, rollout_fragment_length=10)
        config.training(train_batch_size_per_learner=30, lr=[[0, 1e-2], [900, 1e-3]])
        config.reporting(min_sample_timesteps_per_iteration=90)
    elif algo == "CrossQ":
        config.training(**{name: OFF_POLICY[name] for name in OFF_POLICY if name != "target_network_update_freq"})
        config.reporting(min_sample_timesteps_per_iteration=60).rl_module(
            model_config={**SMALL, "critic_hiddens": [16], "renorm_warmup_updates": 3}
        )
    elif algo == "DreamerV3":
        config.training(**OFF_POLICY, model_size="nano", horizon=3).reporting(min_sample_timesteps_per_iteration=60)
        config.rl_module(model_config={"max_seq_len": 4})
    else:
        config.training(**OFF_POLICY).reporting(min_sample_timesteps_per_iteration=60)
    copied: AlgorithmConfig = config.copy(**settings)
    return copied


def limited(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    return gym.wrappers.TimeLimit(env, 25)


TIMED = ("_s", "_s_mean", "_share", "_ms_mean", "_duration_sec_mean", "time_queue")
NOT_COMPARED = ("timers", "bottleneck", "restored", "config")


def without_times(value: Any) -> Any:
    """Results and states without what depends on the speed of the machine or says that the run was restored."""
    if isinstance(value, Mapping):
        path = value.get("path")
        if path and str(path[-1]).endswith(TIMED):
            return None
        return {
            key: without_times(part)
            for key, part in value.items()
            if not (isinstance(key, str) and (key.endswith(TIMED) or key in NOT_COMPARED))
        }
    return type(value)(map(without_times, value)) if type(value) in (list, tuple) else value


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """The places at which two nested values differ, to the bit."""
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{place}/{key}")]
    if type(one) in (list, tuple) and type(one) is type(other) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for index, (a, b) in pairs for found in differences(a, b, f"{place}/{index}")]
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        same = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        return [] if same else [place]
    if type(one) is type(other) and (one == other or (one != one and other != other)):
        return []
    return [f"{place}: {one!r:.60} and {other!r:.60}"]


def play(algo: Algorithm) -> dict[str, Any]:
    """Train K iterations, and return all results and the state then, without times."""
    results = [without_times(algo.train()) for _ in range(K)]
    return {"results": results, "state": without_times(algo.get_state())}


def check_continuation(algo: Algorithm, path: Path) -> None:
    """Assert that an algorithm and one that is restored from its checkpoint continue alike; both are stopped."""
    algo.save_to_path(path)
    expected = play(algo)
    algo.stop()
    with Algorithm.from_checkpoint(path) as restored:
        assert differences(expected, play(restored)) == []


def main(directory: str, *names: str) -> None:
    """In a new process, continue each of the checkpoints in a directory, and write what happened."""
    for name in names:
        folder = Path(directory) / name
        config = pickle.loads((folder / "config.pickle").read_bytes())
        with config.build() as algo:
            algo.restore_from_path(folder / "saved")
            (folder / "resumed.pickle").write_bytes(pickle.dumps(play(algo)))


if __name__ == "__main__":
    main(*sys.argv[1:])
