"""The episodes of a rollout, made of its columns, are those that callbacks see while it is written."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from corral.data.episodes.rollout import Rollout
from corral.errors import EpisodeError
from handmade import MakeRunner

Described = tuple[str, int, int, int, float, bool, bool, bytes, bytes]


def described(episode: Any) -> Described:
    return (
        episode.id_,
        episode.env_index,
        episode.t_started,
        len(episode),
        episode.get_return(),
        episode.is_terminated,
        episode.is_truncated,
        episode.get_observations().tobytes(),
        episode.get_actions().tobytes(),
    )


def samples(runner: Any) -> list[Rollout]:
    by_steps = [runner.sample(num_timesteps=n) for n in (1, 4, 9, 0, 3, 20)]
    return [*by_steps, runner.sample(num_episodes=3), *(runner.sample(num_timesteps=n) for n in (5, 7))]


@pytest.mark.parametrize("ends", ["terminated", "alternate"])
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_made_with_and_without_listeners_they_are_the_same(
    make_runner: MakeRunner, num_envs: int, mode: str, ends: str
) -> None:
    settings = {
        "num_envs": num_envs,
        "autoreset_mode": mode,
        "env_config": {"episode_length": 3, "stagger": True, "ends": ends},
    }
    steps: list[tuple[str, int]] = []
    listening = samples(make_runner(on_episode_step=lambda episode: steps.append((episode.id_, episode.t)), **settings))
    silent = samples(make_runner(**settings))
    assert [[described(e) for e in rollout.episodes()] for rollout in silent] == [
        [described(e) for e in rollout.episodes()] for rollout in listening
    ]
    for rollout in silent:
        assert sum(map(len, rollout.episodes())) == rollout.num_env_steps
        for episode in rollout.episodes():
            episode.custom_data["mark"] = episode.id_
        assert [e.custom_data["mark"] for e in rollout.episodes()] == [e.id_ for e in rollout.episodes()]
    # Every step event belongs to the episode that has that step; those past the last wanted episode to none.
    held = {(e.id_, e.t_started + i + 1) for rollout in silent for e in rollout.episodes() for i in range(len(e))}
    assert held <= set(steps) and len(steps) == len(set(steps))


def test_callbacks_notes_are_on_the_episodes_of_the_rollout(make_runner: MakeRunner) -> None:
    def note(episode: Any) -> None:
        episode.custom_data["steps"] = episode.custom_data.get("steps", 0) + 1

    runner = make_runner(num_envs=2, on_episode_step=note)
    for _ in range(3):
        rollout = runner.sample(num_timesteps=8)
        assert [(e.custom_data["steps"] if e.is_done else None) for e in rollout.episodes()] == [
            (e.t if e.is_done else None) for e in rollout.episodes()
        ]


def test_a_rollout_goes_with_its_last_user(make_runner: MakeRunner) -> None:
    runner = make_runner(
        num_envs=2, on_episode_end=lambda episode: None, on_sample_end=lambda samples: samples.episodes()
    )
    gc.collect()
    gc.disable()  # columns are large: they must not wait for a collection
    try:
        gone = weakref.ref(runner.sample(num_timesteps=20))
        runner.sample(num_timesteps=2)
        assert gone() is None
    finally:
        gc.enable()


def test_what_an_episode_writes_is_in_the_columns(make_runner: MakeRunner) -> None:
    for mode in ("next_step", "same_step"):
        rollout = make_runner(num_envs=2, autoreset_mode=mode).sample(num_timesteps=12)
        first, second = [episode for episode in rollout.episodes() if episode.env_index == 1][:2]
        first.set_rewards(new_data=[10.0, 20.0, 30.0])
        second.set_actions(new_data=1, at_indices=0)
        first.set_observations(new_data=np.array([7, 7], np.float32), at_indices=-1)  # the final one
        first.set_extra_model_outputs(key="logp", new_data=np.zeros(3, np.float32))
        first.set_extra_model_outputs(key="mine", new_data=np.arange(3.0))
        start = 4 if mode == "next_step" else 3
        assert rollout.rewards[:3, 1].tolist() == [10, 20, 30]
        assert rollout.actions[start, 1] == 1
        assert rollout.next_obs_at(2, 1).tolist() == first.get_observations(-1).tolist() == [7, 7]
        assert rollout.logp[:3, 1].tolist() == [0, 0, 0]
        assert rollout["mine"][:3, 1].tolist() == [0, 1, 2] and np.isnan(rollout["mine"][:, 0]).all()
        assert first.get_extra_model_outputs("mine", -1) == 2.0
        assert second.get_observations(0).tolist() == [1, 0]  # the next episode keeps its own


def test_a_view_that_continues_by_hand_owns_its_data(make_runner: MakeRunner) -> None:
    rollout = make_runner().sample(num_timesteps=5)
    whole, part = rollout.episodes()
    before = rollout.rewards.copy()
    outputs = {name: values[-1] for name, values in part.get_extra_model_outputs().items()}
    assert set(outputs) == {"dist_inputs", "logp"}
    part.add_env_step([1.0, 3.0], 0, 99.0, terminated=True, extra_model_outputs=outputs)
    part.set_rewards(new_data=-1.0, at_indices=0)
    assert part.get_rewards().tolist() == [-1, 2, 99] and part.is_done
    assert np.array_equal(rollout.rewards, before)
    assert whole[1:].get_rewards().tolist() == [2, 3]


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_an_episode_that_starts_holds_its_own_first_observation(make_runner: MakeRunner, mode: str) -> None:
    seen: list[list[float]] = []

    def on_episode_start(episode: Any) -> None:
        seen.append(episode.get_observations(-1).tolist())
        assert episode.get_observations().shape == (1, 2)
        episode.set_observations(new_data=np.array([9, 9], np.float32), at_indices=0)

    finals: list[list[float]] = []
    runner = make_runner(
        autoreset_mode=mode,
        on_episode_start=on_episode_start,
        on_sample_end=lambda samples: finals.extend(
            samples.next_obs_at(t, 0).tolist() for t in np.flatnonzero(samples.terminated[:, 0])
        ),
    )
    runner.sample(num_timesteps=10)
    assert seen == [[0, 0], [1, 0], [2, 0], [3, 0]]
    assert finals == [[0, 3], [1, 3], [2, 3]]


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_the_chunks_of_a_runner_s_episode_join(make_runner: MakeRunner, mode: str) -> None:
    joined: list[Any] = []

    def join(episode: Any, prev_episode_chunks: list[Any]) -> None:
        if prev_episode_chunks:
            whole = prev_episode_chunks[0]
            for chunk in [*prev_episode_chunks[1:], episode]:
                whole.concat_episode(chunk)
            joined.append(whole)

    runner = make_runner(num_envs=2, autoreset_mode=mode, env_config={"episode_length": 7}, on_episode_end=join)
    for _ in range(8):
        runner.sample(num_timesteps=6)
    assert len(joined) > 2
    for whole in joined:
        assert whole.is_terminated and (len(whole), whole.t, whole.get_return()) == (7, 7, 28)
        assert whole.get_observations()[:, 1].tolist() == list(range(8))
        assert whole.get_rewards().tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert whole.get_extra_model_outputs("dist_inputs").shape == (7, 2)


def test_logp_cannot_be_set_before_it_is_known(make_runner: MakeRunner) -> None:
    def early(episode: Any) -> None:
        with pytest.raises(EpisodeError, match="before the rollout is complete"):
            episode.set_extra_model_outputs(key="logp", new_data=np.zeros(len(episode), np.float32))
        assert "logp" not in episode.get_extra_model_outputs()

    make_runner(on_episode_end=early).sample(num_timesteps=4)


def test_durations_match_the_events(make_runner: MakeRunner) -> None:
    seen: dict[str, float] = {}
    runner = make_runner(
        num_envs=2, on_episode_end=lambda episode: seen.update({episode.id_: episode.get_duration_s()})
    )
    for _ in range(4):
        for episode in runner.sample(num_timesteps=5).episodes():
            if episode.is_done:
                assert episode.get_duration_s() == pytest.approx(seen[episode.id_], abs=0.05)
                assert 0 < seen[episode.id_] < 10
    assert len(seen) > 4
