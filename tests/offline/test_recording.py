"""What is recorded is what the env gave and received: complete episodes, in files that are whole."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import gymnasium as gym
import numpy as np
import pyarrow.parquet
import pytest

import warm
from at_least import all_of, at_least
from corral import (
    BCConfig,
    Callback,
    DQNConfig,
    FrameStack,
    IMPALAConfig,
    NormalizeObservations,
    NormalizeRewards,
    PPOConfig,
    SACConfig,
    make_multi_agent,
)
from corral.data.offline import minari_data
from corral.data.offline.episode_rows import EpisodeRows
from corral.data.offline.sources import open_source
from corral.errors import DataError
from corral.runners.requests import SampleRequest
from file_limits import largest_file
from offline.recorded_envs import LENGTHS, Counting


def read(path: Any) -> list[EpisodeRows]:
    """The recorded episodes, in the order of the files."""
    return [episode for part in open_source(str(path)).parts() for episode in part.episodes()]


def ppo(path: Any, **env_config: Any) -> Any:
    config = PPOConfig().environment(Counting, env_config=env_config, disable_env_checking=True).debugging(seed=1)
    config.env_runners(num_envs_per_env_runner=1)
    config.training(train_batch_size_per_learner=20, num_epochs=1, minibatch_size=20).rl_module(
        model_config={"fcnet_hiddens": [4]}
    )
    return config.offline_data(output=path)


def train(config: Any, num_iterations: int = 3) -> None:
    Counting.log = []
    with config.build() as algorithm:
        for _ in range(num_iterations):
            algorithm.train()


def assert_as_logged(episodes: list[EpisodeRows], log: list[Any]) -> None:
    """Every recorded episode is one that the env logged, each once: steps, actions in the env's units, and ends."""
    assert episodes
    by_number = {
        float(np.ravel(steps[0][0]["place"] if isinstance(steps[0][0], dict) else steps[0][0])[0]): steps
        for steps in log
    }
    seen = []
    for episode in episodes:
        place = episode.obs["place"] if isinstance(episode.obs, dict) else episode.obs
        number = float(place[0, 0])
        seen.append(number)
        steps = by_number[number]
        length = len(steps)
        assert place[:, 0].tolist() == [number] * (length + 1)
        assert place[:, 1].tolist() == list(range(length + 1))  # the final observation, too
        np.testing.assert_array_equal(episode.actions[:-1], np.stack([action for _, action, _ in steps]))
        assert episode.rewards[:-1].tolist() == [reward for _, _, reward in steps]
        odd = bool(number % 2)
        assert episode.valid.tolist() == [True] * length + [False]
        assert episode.terminated.tolist() == [False] * (length - 1) + [not odd, False]
        assert episode.truncated.tolist() == [False] * (length - 1) + [odd, False]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize(
    "env_config", [{"actions": "discrete"}, {"actions": "box", "nested": True}, {"actions": "parts"}]
)
def test_episodes_are_what_the_env_gave_and_received(
    tmp_path: Path, autoreset: str, env_config: dict[str, Any]
) -> None:
    train(ppo(tmp_path / "data", **env_config).env_runners(autoreset_mode=autoreset))
    episodes = read(tmp_path / "data")
    assert_as_logged(episodes, Counting.log)
    # All that ended within the 60 steps or more.
    assert len(episodes) == len(Counting.log)
    assert all(np.isfinite(episode.added["logp"][:-1]).all() for episode in episodes)


def test_log_probabilities_come_from_the_policy_that_acted(tmp_path: Path) -> None:
    config = ppo(tmp_path / "data", actions="parts")
    with config.build() as algorithm:
        seen = algorithm.sample(40)
        module = algorithm.get_module()
    import torch

    [rollout] = seen
    with torch.no_grad():
        outputs = module.policy(torch.from_numpy(rollout.obs[:-1].reshape(-1, 2)))
        expected = module.distribution.logp(outputs, torch.from_numpy(rollout.actions.reshape(-1, 2))).numpy()
    by_place = {
        tuple(obs): value for obs, value in zip(rollout.obs[:-1].reshape(-1, 2).tolist(), expected, strict=True)
    }
    for episode in read(tmp_path / "data"):
        for obs, logp in zip(episode.obs[:-1].tolist(), episode.added["logp"], strict=False):
            assert logp == pytest.approx(by_place[tuple(obs)], abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"transforms": [FrameStack(2), NormalizeObservations(), NormalizeRewards()]},
        {"exploration_config": {"type": "Curiosity", "feature_dim": 4}},
    ],
    ids=["transforms", "intrinsic_rewards"],
)
def test_what_changes_for_learning_is_recorded_as_the_env_gave_it(tmp_path: Path, settings: dict[str, Any]) -> None:
    train(ppo(tmp_path / "data", actions="box").copy(**settings))
    assert_as_logged(read(tmp_path / "data"), Counting.log)


@pytest.mark.parametrize("make", [DQNConfig, SACConfig])
def test_off_policy_algorithms_record_too(tmp_path: Path, make: Any) -> None:
    config = make().environment(Counting, disable_env_checking=True).debugging(seed=1)
    config.training(num_steps_sampled_before_learning_starts=10, train_batch_size_per_learner=8)
    config.reporting(min_sample_timesteps_per_iteration=30).offline_data(output=tmp_path / "data")
    train(config)
    assert_as_logged(read(tmp_path / "data"), Counting.log)


def test_squashed_actions_are_recorded_in_the_units_of_the_env(tmp_path: Path) -> None:
    config = (
        SACConfig().environment(Counting, env_config={"actions": "box"}, disable_env_checking=True).debugging(seed=1)
    )
    config.training(num_steps_sampled_before_learning_starts=5, train_batch_size_per_learner=8)
    config.reporting(min_sample_timesteps_per_iteration=30).offline_data(output=tmp_path / "data")
    train(config)
    assert_as_logged(read(tmp_path / "data"), Counting.log)


@pytest.mark.parametrize("engine", ["local", "process"])
def test_episodes_of_several_runners_and_sub_envs_do_not_mix(tmp_path: Path, engine: str) -> None:
    config = ppo(tmp_path / "data").engine(engine).env_runners(num_env_runners=2, num_envs_per_env_runner=3)
    train(config.training(train_batch_size_per_learner=90))
    episodes = read(tmp_path / "data")
    for episode in episodes:
        number, length = int(episode.obs[0, 0]), len(episode) - 1
        assert length == LENGTHS[number % len(LENGTHS)]
        assert episode.obs[:, 0].tolist() == [number] * (length + 1)
        assert episode.obs[:, 1].tolist() == list(range(length + 1))
    # Six sub-envs with episodes of the same numbers: each number is there up to six times.
    numbers, counts = np.unique([int(episode.obs[0, 0]) for episode in episodes], return_counts=True)
    assert counts.max() == 6 and numbers[0] == 0


@pytest.mark.slow
def test_asynchronous_samples_are_recorded_as_they_were_sampled(tmp_path: Path) -> None:
    config = IMPALAConfig().environment(Counting).debugging(seed=1).offline_data(output=tmp_path / "data")
    config.engine("process").env_runners(num_env_runners=2, rollout_fragment_length=7, num_envs_per_env_runner=2)
    config.training(train_batch_size_per_learner=28).reporting(min_sample_timesteps_per_iteration=300)
    train(config, 1)
    episodes = read(tmp_path / "data")
    assert len(episodes) > 50
    assert all(len(episode) - 1 == LENGTHS[int(episode.obs[0, 0]) % len(LENGTHS)] for episode in episodes)


def test_agents_have_episodes_of_their_own_in_files_by_module(tmp_path: Path) -> None:
    config = ppo(tmp_path / "data").environment(make_multi_agent(Counting), env_config={"num_agents": 3})
    config.multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda agent_id, episode: "ab"[int(agent_id) % 2])
    train(config.training(train_batch_size_per_learner=60))
    source = open_source(str(tmp_path / "data"))
    assert source.spaces.keys() == {"a", "b"} and source.num_rows is not None and source.num_rows.keys() == {"a", "b"}
    for part in source.parts():
        for episode in part.episodes():
            number, length = int(episode.obs[0, 0]), len(episode) - 1
            assert length == LENGTHS[number % len(LENGTHS)]
            assert episode.rewards[:-1].tolist() == [10.0 * number + t + 1 for t in range(length)]
    table = pyarrow.parquet.read_table(next((tmp_path / "data").glob("*.parquet"))).to_pandas()
    assert set(table["agent_id"]) in ({"0", "2"}, {"1"}) and len(set(table["module_id"])) == 1


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_infos_are_recorded_on_request(tmp_path: Path, autoreset: str) -> None:
    train(ppo(tmp_path / "none").env_runners(autoreset_mode=autoreset))
    assert not any(episode.infos for episode in read(tmp_path / "none"))
    train(ppo(tmp_path / "data").env_runners(autoreset_mode=autoreset).offline_data(output_infos=True))
    for episode in at_least(1, read(tmp_path / "data")):
        assert episode.infos[0] == {"begun": int(episode.obs[0, 0])}
        for t in range(1, len(episode)):
            assert episode.infos[t] == {"t": t, "array": [0, 1]}


class KeyedInfos(gym.Wrapper[Any, Any, Any, Any]):
    """Gives infos whose keys are no texts."""

    def step(self, action: Any) -> Any:
        *step, info = self.env.step(action)
        return (*step, {"cells": [{(0, 1): info["t"]}], "ids": {np.int64(7): info["array"]}})


def test_keys_of_infos_that_are_no_texts_are_recorded_as_texts(tmp_path: Path) -> None:
    train(ppo(tmp_path / "data").environment(wrappers=[KeyedInfos]).offline_data(output_infos=True))
    for episode in at_least(1, read(tmp_path / "data")):
        for t in range(1, len(episode)):
            assert episode.infos[t] == {"cells": [{"(0, 1)": t}], "ids": {"7": [0, 1]}}


def test_files_have_a_bounded_number_of_rows_and_later_runs_add_files(tmp_path: Path) -> None:
    for _ in range(2):
        train(ppo(tmp_path / "data").offline_data(output_max_rows_per_file=20))
    files = sorted((tmp_path / "data").iterdir())
    numbers = [file.name.split("-")[1] for file in files]
    assert numbers == [f"{number:06d}" for number in range(1, len(files) + 1)]
    sizes = [pyarrow.parquet.ParquetFile(file).metadata.num_rows for file in files]
    assert len(files) >= 6 and max(sizes) < 20 + 30
    ids = [id_ for file in files for id_ in set(pyarrow.parquet.read_table(file)["episode_id"].to_pylist())]
    assert len(set(ids)) == len(ids) == len(read(tmp_path / "data"))


def test_a_file_is_written_as_soon_as_enough_rows_are_complete(tmp_path: Path) -> None:
    with ppo(tmp_path / "data").offline_data(output_max_rows_per_file=30).build() as algorithm:
        recorder = algorithm.sampler.recorder
        assert recorder is not None
        for _ in range(20):
            recorder.add(algorithm.env_runner_group.sample(SampleRequest(num_timesteps=10)))
    sizes = [pyarrow.parquet.ParquetFile(file).metadata.num_rows for file in sorted((tmp_path / "data").iterdir())]
    assert len(sizes) > 4 and all(30 <= size < 60 for size in sizes[:-1])


def test_any_file_system_can_hold_the_data() -> None:
    train(ppo("memory://recorded/data"))
    assert_as_logged(read("memory://recorded/data"), Counting.log)
    names = [Path(name).name for name in fsspec.filesystem("memory").ls("/recorded/data", detail=False)]
    assert [name[:16] for name in names] == ["episodes-000001-"] and names[0].endswith(".parquet")


def test_other_programs_read_the_files(tmp_path: Path) -> None:
    """Plain columns with standard names, and the spaces as JSON in the metadata."""
    train(ppo(tmp_path / "data", nested=True))
    [file] = (tmp_path / "data").iterdir()
    table = pyarrow.parquet.read_table(file)
    frame = table.to_pandas()
    first = frame[frame.episode_id == frame.episode_id.iloc[0]]
    assert first.t.tolist() == list(range(len(first)))
    assert np.stack(first["obs/place"]).shape == (len(first), 2) and first["obs/kind"].dtype == np.int64
    described = json.loads(table.schema.metadata[b"corral"])
    assert described["env"] == "Counting" and described["algo"] == "PPO"
    assert described["modules"]["default_policy"]["action_space"]["n"] == 3


KILLED = """
import os, signal, sys
from offline.recorded_envs import Counting
from offline.test_recording import ppo
config = ppo(sys.argv[1]).offline_data(output_max_rows_per_file=50)
with config.build() as algorithm:
    for _ in range(10):
        algorithm.train()
    print(len(Counting.log), sum(len(steps) + 1 for steps in Counting.log), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_loses_the_open_file_at_most(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, "-c", KILLED, str(tmp_path / "data")]
    done = warm.run(command, env={**os.environ, "PYTHONPATH": path})
    num_episodes, num_rows = map(int, done.stdout.split())
    kept = read(tmp_path / "data")
    assert num_rows - sum(len(episode) for episode in kept) <= 50 + 30
    assert 0 < len(kept) <= num_episodes
    assert not [file for file in (tmp_path / "data").iterdir() if file.suffix == ".part"]


def test_what_a_killed_writer_left_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "episodes-000001-0a1b.parquet.part").write_bytes(b"half a file")
    train(ppo(tmp_path / "data"))
    assert_as_logged(read(tmp_path / "data"), Counting.log)


class Fragile(Counting):
    """Fails once in each fourth episode, in its second step."""

    def step(self, action: Any) -> Any:
        if self.episode % 4 == 2 and self.t == 1:
            raise RuntimeError("fragile")
        return super().step(action)


def test_episodes_that_a_failed_sub_env_cut_off_are_not_recorded(tmp_path: Path) -> None:
    config = ppo(tmp_path / "data").environment(Fragile).fault_tolerance(restart_failed_sub_environments=True)
    train(config)
    episodes = read(tmp_path / "data")
    assert {len(episode) - 1 for episode in episodes} == {3, 1}  # the third one of each env fails
    assert all_of(episode.obs[:, 1].tolist() == list(range(len(episode))) for episode in episodes)


def test_episodes_of_a_policy_can_be_recorded(tmp_path: Path) -> None:
    with ppo(None).build() as algorithm:
        algorithm.train()
        Counting.log = []
        summary = algorithm.record(tmp_path / "data", num_episodes=7, with_infos=True)
        assert algorithm.num_env_steps_sampled_lifetime < 60  # they are not training's
    episodes = read(tmp_path / "data")
    assert_as_logged(episodes, Counting.log)
    assert summary.num_episodes == len(episodes) == 7
    assert summary.num_steps == sum(episode.num_steps for episode in episodes)
    assert summary.episode_return_mean == pytest.approx(np.mean([episode.returns()[0] for episode in episodes]))
    assert all(np.isfinite(episode.added["logp"][:-1]).all() and episode.infos[0] for episode in episodes)


def test_recording_with_one_seed_gives_the_same_episodes(tmp_path: Path) -> None:
    found = []
    with PPOConfig().environment("CartPole-v1").debugging(seed=1).build() as algorithm:
        for name, seed in (("a", 5), ("b", 5), ("c", 6)):
            algorithm.record(tmp_path / name, num_episodes=4, seed=seed)
            found.append([episode.obs.tolist() for episode in read(tmp_path / name)])
    assert found[0] == found[1] != found[2]


def test_greedy_episodes_have_no_log_probabilities(tmp_path: Path) -> None:
    with ppo(None).build() as algorithm:
        algorithm.record(tmp_path / "data", num_episodes=3, explore=False)
    assert not any("logp" in episode.added for episode in read(tmp_path / "data"))


def test_writers_of_one_directory_do_not_replace_files_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that look at the directory at the same time find the same number."""
    from corral.core.places import LocalPlace

    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "names", lambda place: [])
        for _ in range(2):
            train(ppo(tmp_path / "data"))
    assert len(list((tmp_path / "data").iterdir())) == 2
    assert len(read(tmp_path / "data")) == 2 * len(Counting.log)


@pytest.mark.parametrize("kind", ["one agent", "several agents"])
def test_episodes_with_lost_fragments_are_not_recorded(tmp_path: Path, kind: str) -> None:
    """What is too old to be learned from never arrives: the fragments before and after it are not one episode."""
    config = IMPALAConfig().environment(Counting).debugging(seed=1).offline_data(output=tmp_path / "data")
    if kind == "several agents":
        config.environment(make_multi_agent(Counting), env_config={"num_agents": 2})
        config.multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda agent_id, episode: "ab"[int(agent_id) % 2])
    config.env_runners(num_env_runners=0, rollout_fragment_length=2, num_envs_per_env_runner=2)
    with config.build() as algorithm:
        recorder = algorithm.sampler.recorder
        assert recorder is not None
        for round_ in range(30):
            sampled = algorithm.env_runner_group.sample(SampleRequest(num_timesteps=4))
            if round_ % 3 != 1:
                recorder.add(sampled)
    episodes = read(tmp_path / "data")
    assert len(episodes) > 5
    for episode in episodes:
        assert episode.obs[:, 1].tolist() == list(range(LENGTHS[int(episode.obs[0, 0]) % len(LENGTHS)] + 1))


def test_a_reset_of_one_runner_leaves_the_open_episodes_of_another_one(tmp_path: Path) -> None:
    config = IMPALAConfig().environment(Counting).debugging(seed=1).offline_data(output=tmp_path / "data")
    config.env_runners(num_env_runners=0, rollout_fragment_length=2, num_envs_per_env_runner=1)
    with config.build() as algorithm:
        recorder = algorithm.sampler.recorder
        assert recorder is not None
        for round_ in range(6):
            [rollout] = algorithm.env_runner_group.sample(SampleRequest(num_timesteps=2))
            rollout.worker_index = 2
            assert rollout.continues == (round_ > 0)
            reset = copy.copy(rollout)
            reset.worker_index, reset.continues = 1, False
            recorder.add([rollout])
            recorder.add([reset])
    numbers = [int(episode.obs[0, 0]) for episode in read(tmp_path / "data") if len(episode) > 3]
    assert numbers == [0, 2]  # the episodes that are longer than a rollout; runner 1 has only pieces of episodes


class BothFlags(Counting):
    """Says of the end of each episode that it is both."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated or truncated, terminated or truncated, info


def test_an_episode_that_terminates_at_its_limit_counts_as_terminated(tmp_path: Path) -> None:
    train(ppo(tmp_path / "data").environment(BothFlags))
    for episode in read(tmp_path / "data"):
        assert episode.terminated[-2] and not episode.truncated.any()


class Noting(Callback):
    """Adds a column from the second sample on."""

    name: ClassVar[str] = "noted"

    def on_environment_created(self, *, env_runner: Any, **kwargs: Any) -> None:
        self.num_samples = 0

    def on_sample_end(self, *, samples: Any, **kwargs: Any) -> None:
        self.num_samples += 1
        if self.num_samples > 1:
            samples[self.name] = np.ones(samples.rewards.shape, np.float32)


def test_a_column_that_callbacks_add_later_can_be_read(tmp_path: Path) -> None:
    train(ppo(tmp_path / "data").callbacks(Noting))
    config = BCConfig().offline_data(input_=tmp_path / "data").training(num_updates_per_iteration=1)
    with config.build() as algorithm:
        algorithm.train()
    noted = np.concatenate([episode.added["noted"][:-1] for episode in read(tmp_path / "data")])
    assert np.isnan(noted).any() and (noted == 1).any()


def test_added_columns_keep_their_shape(tmp_path: Path) -> None:
    class AddsMatrix(Callback):
        def on_sample_end(self, *, samples: Any, **kwargs: Any) -> None:
            samples["matrix"] = np.arange(6.0).reshape(2, 3) + samples.rewards[..., None, None]

    train(ppo(tmp_path / "data").callbacks(AddsMatrix))
    for episode in at_least(1, read(tmp_path / "data")):
        expected = np.arange(6.0).reshape(2, 3) + episode.rewards[:-1, None, None]
        np.testing.assert_array_equal(episode.added["matrix"][:-1], expected)


def test_added_columns_cannot_take_the_names_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noting, "name", "t")
    with pytest.raises(DataError, match=r"a callback added the columns .'t'."):
        train(ppo(tmp_path / "data").callbacks(Noting))


def test_recorded_episodes_are_of_the_present_weights(tmp_path: Path) -> None:
    """With and without a seed; the evaluation runners had other weights before."""
    import torch

    with ppo(None).training(lr=0.5).build() as algorithm:
        for name, seed in (("first", None), ("later", None), ("seeded", 3)):
            algorithm.record(tmp_path / name, num_episodes=4, seed=seed)
            module = algorithm.get_module()
            for episode in read(tmp_path / name):
                with torch.no_grad():
                    outputs = module.policy(torch.from_numpy(episode.obs[:-1].copy()))
                    actions = torch.from_numpy(module.distribution.from_env(episode.actions[:-1]))
                    expected = module.distribution.logp(outputs, actions).numpy()
                np.testing.assert_allclose(episode.added["logp"][:-1], expected, atol=1e-4)
            algorithm.train()


def test_recording_with_a_seed_leaves_evaluation_as_it_was(tmp_path: Path) -> None:
    found = []
    for records in (False, True):
        config = ppo(None).environment("CartPole-v1").evaluation(evaluation_interval=1, evaluation_duration=3)
        with config.build() as algorithm:
            rounds = []
            for _ in range(3):
                rounds.append(algorithm.train()["evaluation"]["env_runners"]["episode_return_mean"])
                if records:
                    algorithm.record(tmp_path / "data", num_episodes=2, seed=7)
        found.append(rounds)
    assert found[0] == found[1]


def test_episodes_that_are_complete_survive_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from corral.algorithms import recording

    class Interrupted(Counting):
        def step(self, action: Any) -> Any:
            if self.episode == 6:
                raise KeyboardInterrupt
            return super().step(action)

    monkeypatch.setattr(recording, "_EPISODES_AT_ONCE", 2)
    with ppo(None).environment(Interrupted).build() as algorithm, pytest.raises(KeyboardInterrupt):
        algorithm.record(tmp_path / "data", num_episodes=50)
    assert len(read(tmp_path / "data")) > 1


@pytest.mark.parametrize(("path", "message"), [("", "the output is an empty text"), ("file/data", "file is a file")])
def test_outputs_that_cannot_be_written_are_refused_before_the_env_is_stepped(
    tmp_path: Path, path: str, message: str
) -> None:
    (tmp_path / "file").write_text("")
    Counting.log = []
    with pytest.raises(DataError, match=message):
        ppo(path and tmp_path / path).build()
    assert not Counting.log


def test_a_file_in_the_place_of_the_directory_is_refused_before_the_env_is_stepped(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    Counting.log = []
    with pytest.raises(DataError, match="is a file: give a directory"):
        ppo(tmp_path / "data").build()
    assert not Counting.log


def test_minari_datasets_can_be_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.setattr(minari_data, "_MANY", 7)  # rows of a part, of which there are several
    for nested in (False, True):
        name = f"counting/nested-{nested}-v0".lower()
        train(
            ppo(f"minari:{name}", actions="box", nested=nested).offline_data(
                output_max_rows_per_file=20, output_infos=True
            )
        )
        assert_as_logged(read(f"minari:{name}"), Counting.log)
        dataset = minari.load_dataset(name)
        assert dataset.total_episodes == len(Counting.log)
        assert dataset.spec.action_space.high.tolist() == [2, 10]
        assert next(dataset.iterate_episodes()).infos["t"].tolist()[1:] == [1, 2, 3]
        with pytest.raises(DataError, match="there is a Minari dataset"):
            ppo(f"minari:{name}").build()
    with pytest.raises(DataError, match=r"cannot be read.*Known here: ..counting/nested-false-v0"):
        open_source("minari:counting/other-v0")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of metadata that the dataset lacks
@pytest.mark.parametrize("ends", ["terminated", "truncated", "neither"])
@pytest.mark.parametrize("data_format", ["arrow", "hdf5", "memory"])
def test_minari_episodes_without_a_final_observation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_format: str, ends: str
) -> None:
    """The Arrow format of Minari leaves out their last step, and whether it terminated."""
    minari = pytest.importorskip("minari")
    if data_format == "hdf5":
        pytest.importorskip("h5py")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    size = 4
    flags = {f"{name}s": [False] * 3 + [ends.startswith(name[:6])] for name in ("termination", "truncation")}
    buffers = [
        minari.data_collector.EpisodeBuffer(
            id=number,
            observations={"place": np.stack([np.full(size, number), np.arange(size)], -1).astype(np.float32)},
            actions=np.arange(size),
            rewards=np.arange(size) + 1.0,
            **flags,
        )
        for number in range(2)
    ]
    dataset = minari.create_dataset_from_buffers(
        "short/counting-v0",
        buffers,
        observation_space=gym.spaces.Dict({"place": gym.spaces.Box(-9, 9, (2,), np.float32)}),
        action_space=gym.spaces.Discrete(4),
        data_format="arrow" if data_format == "memory" else data_format,
    )
    if data_format == "arrow":
        with pytest.raises(DataError, match=r"short/counting-v0, episode 0 has no final observation, and Minari"):
            list(open_source("minari:short/counting-v0").parts())
        return
    if data_format == "memory":
        dataset.iterate_episodes = lambda: iter(buffers)
    is_whole = ends == "terminated"  # nothing bootstraps from the final observation; else the last step is lost
    steps = list(range(size if is_whole else size - 1))
    episodes = [episode for part in open_source(dataset).parts() for episode in part.episodes()]
    assert [int(episode.obs["place"][0, 0]) for episode in episodes] == [0, 1]
    for episode in episodes:
        assert episode.obs["place"][:-1, 1].tolist() == episode.actions[:-1].tolist() == steps
        assert episode.obs["place"][-1, 1] == size - 1
        assert (bool(episode.terminated.any()), bool(episode.truncated.any())) == (is_whole, not is_whole)
        assert episode.returns().tolist() == [10 if is_whole else 6]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_minari_episodes_of_other_lengths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    ends = {"terminations": np.array([False, True]), "truncations": np.zeros(2, np.bool_)}
    buffer = minari.data_collector.EpisodeBuffer(
        id=0, observations=np.zeros((3, 1), np.float32), actions=np.zeros(2, np.int64), rewards=np.ones(2), **ends
    )
    spaces = {"observation_space": gym.spaces.Box(-9, 9, (1,)), "action_space": gym.spaces.Discrete(4)}
    dataset = minari.create_dataset_from_buffers("short/counting-v0", [buffer], data_format="arrow", **spaces)
    assert sum(map(len, open_source(dataset).parts())) == 3
    dataset.iterate_episodes = lambda: iter([dataclasses.replace(buffer, observations=buffer.observations[:1])])
    with pytest.raises(DataError, match=r"episode 0 has 2 rewards, and observations of the lengths \[1\]"):
        list(open_source(dataset).parts())


def test_a_file_that_finds_no_room_is_named_and_its_episodes_are_written_later(tmp_path: Path) -> None:
    with ppo(str(tmp_path / "data")).build() as algorithm:
        algorithm.train()
        recorder = algorithm.sampler.recorder
        assert recorder is not None and recorder.num_episodes_recorded > 0
        with (
            largest_file(100),
            pytest.raises(DataError, match=r"episodes-.*\.parquet cannot be written: File too large"),
        ):
            recorder.flush()
        assert list((tmp_path / "data").iterdir()) == []
        num_episodes = recorder.num_episodes_recorded
    assert len(read(tmp_path / "data")) == num_episodes
