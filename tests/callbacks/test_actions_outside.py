"""A callback that writes an action outside the action space: it is named, whatever event, engine and space."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from corral import PPOConfig
from corral.errors import CallbackError
from corral.testing import CountingEnv
from small import small


def at_step(episode: Any) -> None:
    if len(episode) == 2:
        episode.set_actions(new_data=7, at_indices=-1)


def in_trajectory(postprocessed_batch: Any) -> None:
    postprocessed_batch["actions"][1] = -1


def in_samples(samples: Any) -> None:
    samples.actions[0, 1] = 2


def in_batch(train_batch: Any) -> None:
    train_batch["actions"][3] = 99


WRITERS = {
    "on_episode_step": (at_step, "7"),
    "on_postprocess_trajectory": (in_trajectory, "-1"),
    "on_sample_end": (in_samples, "2"),
    "on_learn_on_batch": (in_batch, "99"),
}


def config(**events: Any) -> PPOConfig:
    return small(disable_env_checking=True, train_batch_size_per_learner=16, minibatch_size=8).callbacks(**events)


@pytest.mark.parametrize("num_env_runners", [0, 1])
@pytest.mark.parametrize("event", WRITERS)
def test_it_is_named_with_the_action(event: str, num_env_runners: int) -> None:
    function, action = WRITERS[event]
    experiment = config(**{event: function}).env_runners(num_env_runners=num_env_runners).engine("local")
    with experiment.build() as algo:
        with pytest.raises(CallbackError) as caught:
            algo.train()
        assert algo.env_runner_group.num_remote_worker_restarts == 0
    message = str(caught.value)
    assert message.startswith(f"{event}: callback {function.__name__} (")
    assert f"action {action} " in message and "outside Discrete(2)" in message


def test_all_callbacks_that_may_have_written_it_are_named() -> None:
    experiment = config(on_episode_step=at_step, on_episode_end=lambda episode: None)
    with experiment.build() as algo, pytest.raises(CallbackError) as caught:
        algo.train()
    assert "at_step" in str(caught.value) and "on_episode_end" in str(caught.value)


@pytest.mark.parametrize(
    ("space", "bad"),
    [
        (spaces.MultiDiscrete([2, 3]), [0, 3]),
        (spaces.MultiBinary(2), [0, 2]),
        (spaces.Box(-1, 1, (2,), np.float32), [0.5, np.nan]),
    ],
    ids=["MultiDiscrete", "MultiBinary", "Box"],
)
def test_every_space_has_an_outside(space: spaces.Space[Any], bad: list[float]) -> None:
    class Chosen(CountingEnv):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.action_space = space

        def step(self, action: Any) -> Any:
            return super().step(0)

    def write(samples: Any) -> None:
        samples.actions[2, 0] = bad

    experiment = config(on_sample_end=write).environment(Chosen)
    with experiment.build() as algo, pytest.raises(CallbackError, match=r"on_sample_end: callback .*write.* outside"):
        algo.train()


def test_actions_that_a_policy_could_take_are_left_alone() -> None:
    def write(samples: Any) -> None:
        samples.actions[:] = 1 - samples.actions

    with config(on_sample_end=write).build() as algo:
        algo.train()
