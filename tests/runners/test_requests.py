"""A request for samples: what makes sense, and how much of it a rollout holds."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import pytest

from corral.errors import SampleError
from corral.runners.requests import SampleRequest, WorkerCounts
from handmade import MakeRunner


@pytest.mark.parametrize(
    "numbers",
    [{}, {"num_timesteps": 1, "num_episodes": 1}, {"num_timesteps": -1}, {"num_episodes": -1}],
    ids=["neither", "both", "negative steps", "negative episodes"],
)
def test_numbers_that_make_no_sense_are_refused_before_anything_runs(numbers: dict[str, int]) -> None:
    with pytest.raises(SampleError, match="num_timesteps and num_episodes"):
        SampleRequest(**numbers)


def test_it_cannot_be_changed_on_its_way() -> None:
    request: Any = SampleRequest(num_timesteps=3)
    with pytest.raises(FrozenInstanceError):
        request.num_timesteps = 4


def test_a_part_keeps_everything_but_the_number_and_the_timestep() -> None:
    whole = SampleRequest(num_episodes=9, explore=False, random_actions=True, force_reset=True, timestep=3)
    assert whole.part(4, 70) == SampleRequest(
        num_episodes=4, explore=False, random_actions=True, force_reset=True, timestep=70
    )
    assert SampleRequest(num_timesteps=9).part(4, 0) == SampleRequest(num_timesteps=4, timestep=0)


def test_counts_what_it_asked_for(make_runner: MakeRunner) -> None:
    rollout = make_runner(num_envs=2, env_config={"episode_length": 3}).sample(num_timesteps=14)
    assert SampleRequest(num_timesteps=1).num_in(rollout) == rollout.num_env_steps == 14
    assert SampleRequest(num_episodes=1).num_in(rollout) == 4


def test_the_keywords_of_a_runner_make_the_same_request(make_runner: MakeRunner) -> None:
    one, other = make_runner(num_envs=2), make_runner(num_envs=2)
    for keywords in ({"num_timesteps": 7}, {"num_episodes": 2}, {"num_timesteps": 5, "force_reset": True}):
        ours, theirs = one.sample(**keywords), other.collect(SampleRequest(**keywords))  # type: ignore[arg-type]
        assert (ours.obs == theirs.obs).all() and (ours.actions == theirs.actions).all()


def test_what_a_runner_has_counted_keeps_its_names() -> None:
    numbers = {"num_callback_errors": 1, "num_sub_env_restarts": 2, "num_env_steps_lost": 3}
    assert WorkerCounts.of(SimpleNamespace(**numbers)) == WorkerCounts(**numbers)
