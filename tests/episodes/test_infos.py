"""Infos: by episode and as columns, under both ways to reset, and only where somebody can ask for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from corral.testing import CountingEnv
from handmade import MakeRunner


class Telling(CountingEnv):
    """A `CountingEnv` whose infos say where it is; some keys are there at times only."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, _ = super().reset(**kwargs)
        return obs, {"reset": self._episode, "at": np.array([self._episode, 0])}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        info: dict[str, Any] = {"t": self._t, "at": np.array([self._episode, self._t]), "deep": {"half": self._t / 2}}
        if self._t % 2 == 0:
            info["even"] = True
        if terminated:
            info["name"] = f"episode {self._episode}"
        return obs, reward, terminated, truncated, info


def expected_infos(episode: int, lo: int, hi: int) -> list[tuple[Any, ...]]:
    """Return t, even, half and name of the infos lo..hi of an episode of three steps; the first is the reset's."""
    name = f"episode {episode}"
    return [
        (t or None, True if t and t % 2 == 0 else None, t / 2 if t else None, name if t == 3 else None)
        for t in range(lo, hi)
    ]


def read(info: dict[str, Any]) -> tuple[Any, ...]:
    return info.get("t"), info.get("even"), info.get("deep", {}).get("half"), info.get("name")


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_each_step_has_its_own(make_runner: MakeRunner, num_envs: int, mode: str, vectorization: str) -> None:
    seen: list[tuple[Any, ...]] = []
    ended: list[list[tuple[Any, ...]]] = []
    runner = make_runner(
        Telling,
        num_envs=num_envs,
        autoreset_mode=mode,
        vectorization=vectorization,
        disable_env_checking=True,  # it would use up the first episode of sub-env 0
        on_episode_step=lambda episode: seen.append(read(episode.get_infos(-1))),
        on_episode_end=lambda episode: ended.append([read(info) for info in episode.get_infos()]),
        on_episode_start=lambda episode: seen.append(episode.get_infos(0)["reset"]),
    )
    for n in (4, 4, 2):
        runner.sample(num_timesteps=n * num_envs)
    if num_envs == 1:
        steps = [entry for entry in seen if isinstance(entry, tuple)]
        assert steps == [
            *expected_infos(0, 1, 4),
            *expected_infos(1, 1, 4),
            *expected_infos(2, 1, 4),
            *expected_infos(3, 1, 2),
        ]
        assert [entry for entry in seen if not isinstance(entry, tuple)] == [0, 1, 2, 3]
    # Chunks: the first info of a chunk is the last one of the chunk before.
    for infos in ended:
        assert infos in [expected_infos(episode, lo, 4) for episode in range(4) for lo in range(4)]
    assert len(ended) == 3 * num_envs


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_columns_of_them(make_runner: MakeRunner, mode: str) -> None:
    runner = make_runner(
        Telling, num_envs=2, autoreset_mode=mode, env_config={"stagger": True}, on_sample_end=lambda samples: None
    )
    runner.sample(num_timesteps=3)  # so that the next rollout begins within episodes
    rollout = runner.sample(num_timesteps=14)
    valid = rollout.valid
    t = rollout.rewards  # the reward of step t is t
    assert np.array_equal(rollout.info_column("t", default=-1), np.where(valid, t, -1))
    assert np.array_equal(rollout.info_column(("deep", "half"))[valid], t[valid] / 2)
    assert np.isnan(rollout.info_column(("deep", "half"))[~valid]).all()
    even = rollout.info_column("even", default=False)
    assert even.dtype == np.bool_ and np.array_equal(even, valid & (t % 2 == 0))
    at = rollout.info_column("at", default=-1)
    assert at.shape == (*valid.shape, 2) and np.array_equal(at[valid][:, 1], t[valid])
    names = rollout.info_column("name", default="")
    assert names.shape == valid.shape
    assert [name != "" for name in names[valid]] == rollout.terminated[valid].tolist()
    assert (rollout.info_column("nobody", default=3.0) == 3.0).all()
    assert (rollout.info_column("reset", default=-1) == -1).all()  # which no step gave
    with pytest.raises(KeyError, match=r"half.*deep"):
        rollout.info_column("deep")


class OneArray(VectorEnv[Any, Any, Any]):
    """Gives the same info array at every step, and no mask."""

    num_envs = 2
    single_observation_space = spaces.Box(0, 1e6, (1,), np.float32)
    single_action_space = spaces.Discrete(2)
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 1e6, (2, 1), np.float32)
        self.action_space = spaces.MultiDiscrete([2, 2])
        self.infos = {"t": np.zeros(2, np.int64)}

    def reset(self, **kwargs: Any) -> tuple[Any, Any]:
        self.infos["t"][:] = 0
        return np.zeros((2, 1), np.float32), self.infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        self.infos["t"] += 1
        never = np.zeros(2, np.bool_)
        return np.zeros((2, 1), np.float32), np.zeros(2), never, never, self.infos


def test_arrays_that_a_vector_env_uses_again_are_copied(make_runner: MakeRunner) -> None:
    kept: list[Any] = []
    runner = make_runner(
        OneArray, num_envs=None, disable_env_checking=True, on_sample_end=lambda samples: kept.append(samples)
    )
    for _ in range(2):
        runner.sample(num_timesteps=6)
    assert [rollout.info_column("t", default=-1)[:, 1].tolist() for rollout in kept] == [[1, 2, 3], [4, 5, 6]]
    assert [episode.get_infos(0) for episode in kept[1].episodes()] == [{"t": 3}, {"t": 3}]


@pytest.mark.parametrize(
    ("event", "kept"),
    [
        ("on_episode_end", True),
        ("on_sample_end", True),
        ("on_postprocess_trajectory", True),
        ("on_environment_created", False),
        ("on_train_result", False),
        (None, False),
    ],
)
def test_they_are_kept_only_where_somebody_can_ask(make_runner: MakeRunner, event: str | None, kept: bool) -> None:
    runner = make_runner(Telling, **({event: lambda: None} if event else {}))
    rollout = runner.sample(num_timesteps=4)
    assert bool(rollout.info_rows) == kept


def test_without_infos_there_is_nothing_to_keep(make_runner: MakeRunner) -> None:
    rollout = make_runner("CartPole-v1", num_envs=4, on_episode_end=lambda: None).sample(num_timesteps=100)
    assert rollout.info_rows == {}
    assert rollout.episodes()[0].get_infos(0) == {}


GIVEN: list[Any] = [
    0,
    0.37,
    "a",
    None,
    {"deep": {0: 1.5}, "_deep": 2},
    np.arange(2),
    np.arange(3),
    [1, [2, 3]],
    2**70,
    True,
]
"""What a `Mixed` env gives under one key, one entry per step."""


class Mixed(CountingEnv):
    """Gives another kind of value in each step and sub-env, always in the same dict and the same array."""

    episode_length = 7

    def __init__(self, config: Any) -> None:
        super().__init__({"stagger": True, **config})
        self.info: dict[str, Any] = {}
        self.counts = np.zeros(2, np.int64)

    def given(self) -> dict[str, Any]:
        self.info.clear()
        self.counts[:] = self._episode, self._t
        entry = GIVEN[(self._t + 3 * self._episode) % len(GIVEN)]
        self.info.update(score=entry, _score=self._t, counts=self.counts)
        return self.info

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, _ = super().reset(**kwargs)
        return obs, self.given()

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *returned, _ = super().step(action)
        return *returned, self.given() | {"final_info": "mine"}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_callbacks_get_exactly_what_sub_envs_gave(make_runner: MakeRunner, mode: str, vectorization: str) -> None:
    ended: list[list[dict[str, Any]]] = []
    runner = make_runner(
        Mixed,
        num_envs=3,
        autoreset_mode=mode,
        vectorization=vectorization,
        batch_mode="complete_episodes",
        disable_env_checking=True,
        on_episode_end=lambda episode: ended.append(episode.get_infos()),
    )
    runner.sample(num_episodes=9)
    assert len(ended) >= 9
    for infos in ended:
        episode = int(infos[0]["counts"][0])
        for t, info in enumerate(infos):
            entry = GIVEN[(t + 3 * episode) % len(GIVEN)]
            assert type(info["score"]) is type(entry) and str(info["score"]) == str(entry)
            assert (info["_score"], info["counts"].tolist()) == (t, [episode, t])
            assert info.get("final_info") == ("mine" if t else None)


def test_columns_of_mixed_values_hold_objects(make_runner: MakeRunner) -> None:
    runner = make_runner(Mixed, num_envs=3, on_sample_end=lambda samples: None)
    rollout = runner.sample(num_timesteps=30)
    counts = rollout.info_column("counts", default=0)
    assert counts.shape == (*rollout.valid.shape, 2) and counts.dtype == np.int64
    with pytest.raises(KeyError, match="deep"):
        rollout.info_column("score")
    deep = rollout.info_column(("score", "deep", 0), default=0)  # type: ignore[arg-type]
    assert set(deep[rollout.valid].tolist()) == {0.0, 1.5}
