"""Records the files in this directory with RLlib itself, and what RLlib's own objects say is in them.

`make samples` calls it with this directory.

RLlib writes the file of a table or of packed episodes after each sample. Each data set here is one evaluation round of
a few short episodes; `expected.npz` has the columns of each of its episodes, from RLlib's episode objects.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.offline.json_writer import JsonWriter
from ray.rllib.policy.sample_batch import SampleBatch
from ray.tune.registry import register_env

ENVS = {"cartpole": ("CartPole-v1", 25), "pendulum": ("Pendulum-v1", 20)}
EPISODES = []


class Keep(RLlibCallback):
    """Keeps the chunks of episodes that evaluation samples, which are what RLlib writes."""

    def on_sample_end(self, *, env_runner, samples, **kwargs):
        """Keep the samples."""
        EPISODES.extend(samples)


def record(directory: Path, name: str, num_episodes: int, **output: object) -> list:
    """Record episodes of a fresh policy with RLlib, and return its episode objects."""
    env, max_steps = ENVS[name]
    register_env(name, lambda config: gym.make(env, max_episode_steps=max_steps))
    config = (
        PPOConfig()
        .environment(name)
        .env_runners(num_env_runners=0, batch_mode="complete_episodes")
        .callbacks(Keep)
        .debugging(seed=0)
        .evaluation(evaluation_num_env_runners=0, evaluation_interval=1, evaluation_duration=num_episodes)
        .offline_data(output=directory.as_posix(), output_write_method_kwargs={"min_rows_per_file": 10_000}, **output)
    )
    EPISODES.clear()
    algorithm = config.build_algo()
    algorithm.evaluate()
    algorithm.stop()
    return list(EPISODES)


def columns_of(episode: object) -> dict[str, np.ndarray]:
    """Return what an episode object of RLlib holds."""
    return {
        "obs": np.array(episode.get_observations()),
        "actions": np.array(episode.get_actions()),
        "rewards": np.array(episode.get_rewards()),
        "terminated": np.array(episode.is_terminated),
        "truncated": np.array(episode.is_truncated),
        "logp": np.array(episode.get_extra_model_outputs("action_logp")),
    }


def write(directory: Path, target: Path, episodes: list) -> None:
    """Put the Parquet files of RLlib under short names, and what is expected, into a directory."""
    target.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(sorted(directory.rglob("*.parquet"))):
        shutil.copyfile(file, target / f"{number:02d}.parquet")
    write_expected(target, episodes)


def write_expected(target: Path, episodes: list) -> None:
    """Write the columns of episodes, by number and name."""
    arrays = {}
    for number, episode in enumerate(episodes):
        arrays |= {f"{number}/{name}": column for name, column in columns_of(episode).items()}
    np.savez_compressed(target / "expected.npz", **arrays)


def write_json(target: Path, episodes: list, compress_columns: list[str]) -> None:
    """Write episodes as earlier versions of RLlib did: a `SampleBatch` in each line."""
    target.mkdir(parents=True, exist_ok=True)
    writer = JsonWriter(target.as_posix(), compress_columns=compress_columns)
    for number, episode in enumerate(episodes):
        columns = columns_of(episode)
        size = len(columns["rewards"])
        flags = np.zeros(size, bool)
        ends = {name: flags.copy() for name in ("terminated", "truncated")}
        for name, column in ends.items():
            column[-1] = columns[name]
        batch = {
            "obs": columns["obs"][:-1],
            "new_obs": columns["obs"][1:],
            "actions": columns["actions"],
            "rewards": columns["rewards"].astype(np.float32),
            "terminateds": ends["terminated"],
            "truncateds": ends["truncated"],
            "action_logp": columns["logp"],
            "eps_id": np.full(size, 1000 + number),
            "unroll_id": np.full(size, number),
            "agent_index": np.zeros(size, int),
            "t": np.arange(size),
        }
        writer.write(SampleBatch(batch))
    (file,) = target.glob("output-*.json")
    file.rename(target / "steps.json")
    write_expected(target, episodes)


def main(target: Path) -> None:
    """Record all data sets."""
    ray.init(num_cpus=2, include_dashboard=False)
    forms = {
        "table": {"output_write_episodes": False, "output_compress_columns": []},
        "packed_table": {"output_write_episodes": False, "output_compress_columns": ["obs", "actions"]},
        "episodes": {"output_write_episodes": True},
    }
    for form, output in forms.items():
        for name in ENVS:
            written = target / "written" / form / name
            episodes = record(written, name, 4, **output)
            write(written, target / f"{name}_{form}", episodes)
            if form == "table":
                write_json(target / f"{name}_json", episodes, ["obs", "new_obs"])
                write_json(target / f"{name}_plain_json", episodes, [])
    shutil.rmtree(target / "written")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
