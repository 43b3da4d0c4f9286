"""Vector envs that reset by a mask: each sub-env with its own arguments, and otherwise as with same-step autoreset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from corral import PPOConfig, SampleRequest
from corral.core.tree import map_tree
from corral.envs.episode_resets import EpisodeReset
from corral.errors import EnvError
from corral.testing import CountingEnv
from exact_runs import StatefulDrift
from faulty import TroubleDictEnv
from handmade import MakeRunner


class Noted(StatefulDrift):
    """Notes how each reset was called, and says so in its info."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.noted.append((seed, options))
        obs, info = super().reset(seed=seed)
        return obs, {**info, "began": True}


def by_mask(env: Any = Noted, mode: AutoresetMode = AutoresetMode.DISABLED) -> Any:
    def make(config: Any) -> Any:
        return SyncVectorEnv([env] * 3, autoreset_mode=mode)

    return make


def noted(runner: Any) -> list[list[Any]]:
    found: list[list[Any]] = runner.foreach_env(lambda env: env.noted)
    return found


def pushes(episode: Any) -> list[Any]:
    """Infos without the number of the episode: the vector env has one more, its first reset as a whole."""
    return [{key: value for key, value in info.items() if key != "episodes"} for info in episode.get_infos()]


def test_it_samples_what_same_step_autoreset_samples(make_runner: MakeRunner) -> None:
    seeds = {"env_reset_fn": lambda env_index, episode_index: {"seed": 100 * env_index + episode_index}}
    masked = make_runner(by_mask(), num_envs=None, disable_env_checking=True, **seeds)

    def one(config: Any) -> Any:
        return Noted()

    single = make_runner(one, num_envs=3, autoreset_mode="same_step", disable_env_checking=True, **seeds)
    ours, theirs = (runner.collect(SampleRequest(num_timesteps=60, with_infos=True)) for runner in (masked, single))
    assert ours.done.any()
    for name in ("obs", "actions", "rewards", "terminated", "truncated", "valid"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    assert [e.get_observations(-1).tolist() for e in ours] == [e.get_observations(-1).tolist() for e in theirs]
    assert [pushes(episode) for episode in ours] == [pushes(episode) for episode in theirs]


def test_each_sub_env_has_its_own_arguments(make_runner: MakeRunner) -> None:
    runner = make_runner(by_mask(), num_envs=None, disable_env_checking=True, env_reset_fn=lambda: None)
    resets = tuple(EpisodeReset(seed=k, options={"level": k}) for k in range(7))
    assert len(runner.collect(SampleRequest(num_episodes=7, resets=resets)).episodes()) == 7
    for i, found in enumerate(noted(runner)):  # the first reset is of the whole vector env
        assert found[1 : 1 + len(resets[i::3])] == [(k, {"level": k}) for k in range(7)][i::3]


def test_without_a_function_it_is_an_ordinary_vector_env() -> None:
    config = PPOConfig().environment(by_mask(CountingEnv)).debugging(seed=0)
    with config.training(train_batch_size_per_learner=90, minibatch_size=30, num_epochs=1).build() as algo:
        result = algo.train()
    assert result["env_runners"]["episode_len_mean"] == 3 and result["env_runners"]["num_episodes"] == 30


def test_nested_observations(make_runner: MakeRunner) -> None:
    runner = make_runner(by_mask(lambda: TroubleDictEnv({})), num_envs=None, disable_env_checking=True)
    rollout = runner.sample(num_timesteps=18)
    assert rollout.obs["t"][:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert map_tree(lambda leaf: leaf.shape[:2], rollout.obs) == {"t": (7, 3), "pair": ((7, 3), (7, 3))}


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_other_modes_stay_as_they_are(make_runner: MakeRunner, mode: AutoresetMode) -> None:
    runner = make_runner(by_mask(CountingEnv, mode), num_envs=None, disable_env_checking=True)
    assert type(runner.env) is SyncVectorEnv


def test_a_reset_that_does_not_read_the_mask_is_an_error(make_runner: MakeRunner) -> None:
    class ResetsAll(SyncVectorEnv):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return super().reset(seed=seed)

    def make(config: Any) -> Any:
        return ResetsAll([StatefulDrift] * 3, autoreset_mode=AutoresetMode.DISABLED)

    with pytest.raises(EnvError, match="changed other sub-envs than the mask says"):
        make_runner(make, num_envs=None, disable_env_checking=True).sample(num_timesteps=200)


class Leveled(Noted):
    """Has tasks, and notes the task of each reset."""

    task = 0

    def get_task(self) -> int:
        return self.task

    def set_task(self, task: int) -> None:
        self.task = task
        self.noted.append(task)


def test_each_episode_of_a_sub_env_has_its_own_task(make_runner: MakeRunner) -> None:
    def choose(env_index: int, episode_index: int) -> dict[str, int]:
        return {"task": 10 * env_index + episode_index}

    runner = make_runner(by_mask(Leveled), num_envs=None, disable_env_checking=True, env_reset_fn=choose)
    runner.collect(SampleRequest(num_episodes=7))
    tasks = [[task for task in found if isinstance(task, int)] for found in noted(runner)]
    assert [found[:3] for found in tasks] == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]


def test_a_task_for_sub_envs_without_tasks_names_the_vector_env(make_runner: MakeRunner) -> None:
    runner = make_runner(by_mask(), num_envs=None, disable_env_checking=True, env_reset_fn=lambda: {"task": 3})
    with pytest.raises(EnvError, match="has the task 3, and SyncVectorEnv has no methods get_task and set_task"):
        runner.sample(num_timesteps=1)


def test_evaluation_plays_its_tasks() -> None:
    config = PPOConfig().environment(by_mask(Leveled)).evaluation(evaluation_tasks=[1, 4], evaluation_duration=6)
    with config.build() as algo:
        assert [found["num_episodes"] for found in algo.evaluate()["by_task"].values()] == [3, 3]
