"""Recorded steps as rows: ends, final observations, checks, and transitions as a slow loop gives them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from corral.data.offline.episode_rows import EpisodeRows, rows_of_steps
from corral.data.replay import ReplayBuffer
from corral.errors import DataError
from corral.modules.make_distribution import make_distribution

BOX, DISCRETE = gym.spaces.Box(-100, 100, (1,), np.float32), gym.spaces.Discrete(5)


def steps(**changes: Any) -> dict[str, Any]:
    """Two episodes: two steps to a termination, and three steps to a truncation."""
    given: dict[str, Any] = {
        "obs": np.array([[0], [1], [10], [11], [12]], np.float32),
        "actions": np.array([0, 1, 2, 3, 4]),
        "rewards": np.array([1.0, 2.0, 3.0, 4.0, 5.0]),
        "terminated": np.array([0, 1, 0, 0, 0], bool),
        "truncated": np.array([0, 0, 0, 0, 1], bool),
        "next_obs": np.array([[1], [2], [11], [12], [13]], np.float32),
    }
    return {**given, **changes}


def test_final_observations_follow_each_episode() -> None:
    rows = rows_of_steps(**steps())
    assert rows.obs.reshape(-1).tolist() == [0, 1, 2, 10, 11, 12, 13]
    assert rows.valid.tolist() == [True, True, False, True, True, True, False]
    assert rows.rewards.tolist() == [1, 2, 0, 3, 4, 5, 0]
    assert np.flatnonzero(rows.terminated).tolist() == [1] and np.flatnonzero(rows.truncated).tolist() == [5]
    assert (rows.num_episodes, rows.num_steps, rows.starts.tolist()) == (2, 5, [0, 3])
    assert rows.returns().tolist() == [3, 12]
    assert rows.episode_indices.tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_next_obs_of_another_dtype_stay_as_they_are() -> None:
    rows = rows_of_steps(**steps(obs=np.array([[0], [1], [10], [11], [12]]), next_obs=steps()["next_obs"] + 0.5))
    assert rows.obs[~rows.valid].reshape(-1).tolist() == [1.5, 2.5, 11.5, 12.5, 13.5]


def test_without_next_obs_a_truncated_episode_loses_its_last_step() -> None:
    """Its observation becomes the one to bootstrap from; a terminated episode needs none."""
    rows = rows_of_steps(**steps(next_obs=None))
    assert rows.obs.reshape(-1).tolist() == [0, 1, 1, 10, 11, 12]
    assert rows.valid.tolist() == [True, True, False, True, True, False]
    assert np.flatnonzero(rows.truncated).tolist() == [4]
    assert rows.rewards.tolist() == [1, 2, 0, 3, 4, 0]


def test_an_episode_of_one_truncated_step_without_next_obs_disappears() -> None:
    flags = {"terminated": np.zeros(5, bool), "truncated": np.array([1, 0, 0, 0, 1], bool)}
    rows = rows_of_steps(**steps(next_obs=None, **flags))
    assert rows.obs.reshape(-1).tolist() == [1, 10, 11, 12]
    assert rows.valid.tolist() == [True, True, True, False]
    with pytest.raises(DataError, match="each episode is one truncated step"):
        rows_of_steps(**steps(next_obs=None, terminated=np.zeros(5, bool), truncated=np.ones(5, bool)))


def test_starts_cut_episodes_that_no_flag_ends() -> None:
    none = np.zeros(5, bool)
    rows = rows_of_steps(**steps(terminated=none, truncated=None, starts=np.array([1, 0, 1, 0, 0], bool)))
    assert np.flatnonzero(rows.truncated).tolist() == [1, 5] and not rows.terminated.any()
    assert rows.obs.reshape(-1).tolist() == [0, 1, 2, 10, 11, 12, 13]


NAN = np.array([[np.nan], [np.nan], [11], [12], [13]], np.float32)


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({}, [1, 4]),
        ({"next_obs": steps()["next_obs"].astype(np.float64) + 1e-9}, [1, 4]),  # equal in the lower precision
        ({"obs": steps()["obs"] + np.float64(1e-9)}, [1, 4]),
        ({"next_obs": steps()["next_obs"].astype(np.int64)}, [1, 4]),
        ({"obs": np.array([[0], [np.nan], [10], [11], [12]], np.float32), "next_obs": NAN}, [1, 4]),
        ({"next_obs": np.array([[np.nan], [2], [11], [12], [13]])}, [0, 1, 4]),
        ({"next_obs": steps()["next_obs"] + np.float32(0.5)}, [0, 1, 2, 3, 4]),
        ({"truncated": None, "starts": np.array([0, 0, 0, 1, 0])}, [1, 2, 4]),
        ({"terminated": np.zeros(5), "truncated": np.zeros(5)}, [1, 4]),  # no flag, and the second step leads to 2
    ],
)
def test_an_episode_ends_where_next_obs_is_not_the_next_observation(changes: dict[str, Any], ends: list[int]) -> None:
    given = steps(**changes)
    rows = rows_of_steps(**given)
    lasts = np.flatnonzero(rows.terminated | rows.truncated) - np.arange(len(ends))
    assert lasts.tolist() == ends
    flagged = given["terminated"].astype(bool)
    assert rows.terminated[rows.valid].tolist() == flagged.tolist()
    finals = rows.obs[~rows.valid][rows.truncated[np.flatnonzero(~rows.valid) - 1]]
    bootstraps = [end for end in ends if not flagged[end]]
    np.testing.assert_allclose(finals, given["next_obs"][bootstraps])
    is_known = flagged | np.isin(np.arange(5), [2, 4] if "starts" in changes else [4])
    assert rows.num_jumps == len([end for end in ends if not is_known[end]])


def test_each_leaf_of_next_obs_is_compared_and_large_data_to_its_end() -> None:
    size = 9000
    numbers = np.arange(size + 1)
    obs = {"x": numbers[:size, None] / 7, "kind": numbers[:size] % 3}
    after = {"x": numbers[1:, None] / 7, "kind": numbers[1:] % 3}
    after["kind"][[4095, 4096, 8191]] += 1
    given = {"actions": np.zeros(size, int), "rewards": np.zeros(size), "terminated": np.zeros(size, bool)}
    rows = rows_of_steps(obs, next_obs=after, **given)
    assert (np.flatnonzero(rows.truncated).tolist(), rows.num_jumps) == ([4095, 4097, 8193, size + 2], 3)
    with pytest.raises(DataError, match="'next_obs' has entries of the shapes"):
        rows_of_steps(obs, next_obs={"x": after["x"]}, **given)


@pytest.mark.parametrize("name", ["terminated", "truncated", "starts"])
@pytest.mark.parametrize(
    ("flags", "row"),
    [
        (["False", "True", "False", "False", "False"], 0),
        ([0.0, 1.0, np.nan, 0.0, 0.0], 2),
        ([0, 1, 0, -1, 0], 3),
        ([0, 7, 0, 0, 0], 1),
        ([False, True, False, None, False], 3),
        ([0, 1, 0, 0, 0.5], 4),
    ],
)
def test_flags_that_are_none_are_refused_by_row_and_column(name: str, flags: list[Any], row: int) -> None:
    with pytest.raises(DataError, match=f"row {row}, column '{name}' is .*flags are bool"):
        rows_of_steps(**steps(**{name: flags}))


@pytest.mark.parametrize("dtype", [bool, np.int8, np.float32, object])
def test_flags_are_bool_or_the_numbers_0_and_1(dtype: Any) -> None:
    rows = rows_of_steps(**steps(truncated=steps()["truncated"].astype(dtype)[:, None]))
    assert np.flatnonzero(rows.truncated).tolist() == [5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": np.arange(4)}, "column 'actions' is int64.4., and 'rewards' has 5 entries"),
        ({"next_obs": np.zeros((4, 1))}, "column 'next_obs'"),
        ({"obs": {"a": np.zeros((5, 1)), "b": np.zeros(3)}}, "column 'obs/b'"),
        ({"obs": [[0], [1], [2], [3], [4, 5]]}, "column 'obs' is no array: .*inhomogeneous"),
        ({"next_obs": np.array([["1"]] * 5)}, "'next_obs' is <U1.5, 1., and 'obs' float32.5, 1."),
        (
            {"rewards": np.ones(5, complex)},
            "column 'rewards' holds something else than numbers: it has the dtype complex",
        ),
        ({name: value[:0] for name, value in steps().items()}, "there are no steps"),
    ],
)
def test_columns_of_other_lengths_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows_of_steps(**steps(**changes))


@pytest.mark.parametrize("ids", [[7, 7, 7, 7, 9], ["b", "b", "b", "b", "a"], [[1], [1], [1], [1], [0]]])
def test_a_step_of_another_episode_id_begins_an_episode(ids: list[Any]) -> None:
    given = steps(next_obs=None, truncated=None)
    rows = rows_of_steps(**given, episode_id=ids, t=[0, 1, 0, 1, 0])
    assert rows.obs.reshape(-1).tolist() == [0, 1, 1, 10, 11]  # the episode of one step disappears
    assert np.flatnonzero(rows.truncated).tolist() == [3]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"episode_id": [0, 0, 1, 0, 0]}, "row 3, column 'episode_id' is 0, and rows before it belong to this"),
        ({"episode_id": [0, 0, 1]}, r"column 'episode_id' is int64.3., and 'rewards' has 5 entries"),
        ({"episode_id": [0, 0, 1, 1, 1], "t": [0, 1, 0, 2, 1]}, "row 4, column 't' is 1 after 2, and no episode ends"),
        ({"t": [0, 1, 0, 0, 1]}, "row 3, column 't' is 0 after 0"),
    ],
)
def test_steps_in_another_order_are_refused_by_row(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows_of_steps(**steps(next_obs=None), **columns)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"obs": np.array([[0], [1], [np.nan], [11], [12]], np.float32)}, "file.x: row 2, column 'obs' is .nan."),
        ({"actions": np.array([0, 1, 9, 3, 4])}, "row 2, column 'actions' is 9, which is not in Discrete"),
        ({"actions": np.array([0, 1, 2.5, 3, 4])}, "row 2, column 'actions' is 2.5"),
        ({"rewards": np.array([1, 2, np.inf, 4, 5])}, "row 2, column 'rewards' is inf"),
        ({"rewards": np.array([1, 2, 1e39, 4, 5])}, "row 2, column 'rewards' is 1e.39"),
        ({"next_obs": np.array([[1], [2], [11], [12], [1e39]])}, r"row 4, column 'next_obs' is .1.e.39"),
        ({"next_obs": np.array([[1], [2], [1e39], [12], [13]])}, r"row 2, column 'next_obs' is .1.e.39"),
        ({"obs": np.array([[0], [1], [10], [11], [1e39]]), "next_obs": None}, r"row 4, column 'obs' is .1.e.39"),
        (
            {"obs": np.zeros((5, 2), np.float32), "next_obs": np.zeros((5, 2), np.float32)},
            "the column 'obs' is float32",
        ),
        ({"obs": {"a": np.zeros((5, 1))}, "next_obs": {"a": np.zeros((5, 1))}}, "the data has the columns .'obs/a'."),
    ],
)
def test_entries_outside_of_the_spaces_are_refused_by_place_row_and_column(
    changes: dict[str, Any], message: str
) -> None:
    rows = rows_of_steps(**steps(**changes), place="file.x")
    with pytest.raises(DataError, match=message):
        rows.checked(BOX, DISCRETE)


def test_checked_rows_have_the_dtypes_of_modules() -> None:
    wide = gym.spaces.Box(-100, 100, (1,), np.float64)
    rows = rows_of_steps(**steps(obs=steps()["obs"].astype(np.float64), actions=np.arange(5, dtype=np.uint8)))
    checked = rows.checked(wide, DISCRETE)
    assert checked.obs.dtype == np.float32 and checked.actions.dtype == np.int64


@pytest.mark.parametrize("column", ["obs", "actions", "rewards"])
@pytest.mark.parametrize("value", [1e39, -1e39, np.inf, np.nan])
def test_a_number_that_float32_cannot_hold_is_refused_by_row(column: str, value: float) -> None:
    box = gym.spaces.Box(-np.inf, np.inf, (1,))
    given = steps(actions=np.zeros((5, 1)), next_obs=None)
    given[column] = np.array(given[column], np.float64)
    given[column][3] = value
    with pytest.raises(DataError, match=rf"row 3, column '{column}' is .?-?(1\.?e.39|inf|nan)"):
        rows_of_steps(**given).checked(box, box)


@pytest.mark.parametrize("value", [256, -1, 0.5])
def test_numbers_that_the_dtype_of_a_space_cannot_hold_are_refused(value: float) -> None:
    """They would be other numbers of the space: 256 would be 0."""
    obs = np.array([[0], [255], [value], [7], [8]])
    space = gym.spaces.Box(0, 255, (1,), np.uint8)
    with pytest.raises(DataError, match=r"row 2, column 'obs' is .*, which is not in Box"):
        rows_of_steps(**steps(obs=obs, next_obs=None)).checked(space, DISCRETE)
    obs = np.clip(np.floor(obs), 0, 255)
    checked = rows_of_steps(**steps(obs=obs, next_obs=None)).checked(space, DISCRETE)
    assert checked.obs.dtype == np.uint8 and checked.obs[1, 0] == 255


@pytest.mark.parametrize("frame", [(), (2, 3)])
def test_columns_are_reshaped_to_their_space(frame: tuple[int, ...]) -> None:
    """Tables hold flat lists; an observation of one number may be a list or a number."""
    size = max(1, int(np.prod(frame)))
    flat = np.arange(6 * size, dtype=np.float32).reshape(6, size)
    rows = rows_of_steps(**steps(obs=flat[:5], next_obs=flat[1:])).checked(
        gym.spaces.Box(-100, 100, frame, np.float32), DISCRETE
    )
    assert rows.obs.shape == (7, *frame)


@pytest.mark.parametrize(("given", "wanted"), [((3, 2, 4), (2, 4, 3)), ((2, 6), (3, 4)), ((2, 1, 6), (6, 2))])
def test_entries_in_another_order_are_refused(given: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Images whose channels come first have as many numbers as images whose channels come last."""
    images = np.zeros((5, *given), np.float32)
    rows = rows_of_steps(**steps(obs=images, next_obs=images))
    with pytest.raises(DataError, match="the column 'obs' is float32"):
        rows.checked(gym.spaces.Box(-100, 100, wanted, np.float32), DISCRETE)
    one = images.reshape(5, 1, *given, 1)
    checked = rows_of_steps(**steps(obs=one, next_obs=one)).checked(gym.spaces.Box(-1, 1, given), DISCRETE)
    assert checked.obs.shape == (7, *given)


def reference(given: dict[str, Any]) -> list[tuple[float, int, float, float, bool]]:
    """The transitions of a slow loop: observation, action, reward, next observation, terminated."""
    return [
        (
            float(given["obs"][t, 0]),
            int(given["actions"][t]),
            float(given["rewards"][t]),
            float(given["next_obs"][t, 0]),
            bool(given["terminated"][t]),
        )
        for t in range(len(given["rewards"]))
    ]


def random_steps(rng: np.random.Generator, size: int, begin: int = 0) -> dict[str, Any]:
    """Steps in episodes, with observations that are there once; the last step ends its episode."""
    numbers = begin + np.cumsum(rng.integers(1, 5, size)).astype(np.float32)
    ends = (rng.random(size) < 0.3) | (np.arange(size) == size - 1)
    terminated = ends & (rng.random(size) < 0.5)
    next_obs = np.append(numbers[1:], numbers[-1] + 1)
    next_obs[ends] = numbers[ends] + 0.5
    return {
        "obs": numbers[:, None] / 100,
        "actions": rng.integers(0, 5, size),
        "rewards": rng.normal(size=size).astype(np.float32).astype(np.float64),
        "terminated": terminated,
        "truncated": ends & ~terminated,
        "next_obs": next_obs[:, None] / 100,
    }


def test_a_buffer_of_rows_holds_the_transitions_of_a_slow_loop() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        parts = [random_steps(rng, int(rng.integers(1, 30))) for _ in range(3)]
        buffer = ReplayBuffer(200, seed=1)
        expected = set()
        for given in parts:
            expected |= set(reference(given))
            rows = rows_of_steps(**given).checked(BOX, DISCRETE)
            buffer.add(rows.as_rollout(make_distribution(DISCRETE)))
        assert len(buffer) == sum(len(given["rewards"]) for given in parts)
        batch = buffer.sample(2000)
        drawn = {
            (float(obs[0]), int(action), float(reward), float(after[0]), bool(end))
            for obs, action, reward, after, end in zip(
                batch["obs"], batch["actions"], batch["rewards"], batch["next_obs"], batch["terminated"], strict=True
            )
        }
        assert drawn == expected
        # And back: the steps of the buffer are the steps that were given, in their order.
        back = buffer.get_steps()
        assert back["obs"].tolist() == np.concatenate([given["obs"] for given in parts]).tolist()
        assert back["next_obs"].tolist() == np.concatenate([given["next_obs"] for given in parts]).tolist()
        again = rows_of_steps(**back)
        assert again.num_episodes == sum(rows_of_steps(**given).num_episodes for given in parts)


@pytest.mark.parametrize(
    ("space", "bounds"),
    [
        (gym.spaces.Discrete(4, start=-2), "clip"),
        (gym.spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [0, 7]]), "clip"),
        (gym.spaces.MultiBinary((2, 2)), "clip"),
        (gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32)), "clip"),
        (gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32)), "squash"),
        (gym.spaces.Box(-3, 3, (2,), np.float32), "none"),
        (gym.spaces.Box(-np.inf, np.inf, (2, 2), np.float64), "clip"),
        (gym.spaces.Tuple([gym.spaces.Discrete(3, start=1), gym.spaces.Box(-1, 5, (2,), np.float32)]), "clip"),
        (gym.spaces.Dict({"b": gym.spaces.Box(-1, 5, (2,), np.float32), "a": gym.spaces.Discrete(3)}), "clip"),
    ],
)
def test_actions_of_the_env_become_module_actions_and_back(space: gym.Space[Any], bounds: str) -> None:
    from corral.core.tree import leaves, map_tree

    distribution = make_distribution(space, bounds)
    space.seed(0)
    draws = [space.sample() for _ in range(50)]
    actions = map_tree(lambda *leaf: np.stack(leaf), *draws)
    module_actions = distribution.from_env(actions)
    assert module_actions.dtype == distribution.action_dtype
    assert module_actions.shape == (50, *distribution.action_shape)
    for given, back in zip(leaves(actions), leaves(distribution.to_env(module_actions)), strict=True):
        np.testing.assert_allclose(back, given, atol=1e-5)
        assert back.dtype == given.dtype


HALF = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, np.inf], np.float32))


@pytest.mark.parametrize(
    ("space", "bounds", "recorded", "expected"),
    [
        (gym.spaces.Box(-1, 5, (2,), np.float32), "clip", [[-0.5, 1]], [[0.5, 5]]),
        (gym.spaces.Box(-1, 5, (2,), np.float32), "squash", [[-0.5, 1]], [[0.5, 5]]),
        (gym.spaces.Box(-np.inf, np.inf, (2,), np.float32), "clip", [[-0.5, 7]], [[-0.5, 7]]),
        (HALF, "clip", [[-0.5, 7]], [[-0.5, 7]]),
        (gym.spaces.Discrete(3, start=1), "clip", [2], [2]),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_of_the_actions_of_rllib_each_bounded_box_is_in_units(
    space: gym.Space[Any], bounds: str, recorded: list[Any], expected: list[Any], nested: bool
) -> None:
    rows = rows_of_steps([[0.0]], np.array(recorded), [0.0], [True])
    rows.action_units = "rllib"
    if nested:
        rows.actions = {"other": np.zeros(len(rows)), "one": (rows.actions,)}
        space = gym.spaces.Dict({"one": gym.spaces.Tuple((space,)), "other": gym.spaces.Discrete(2)})
    checked = rows.checked(gym.spaces.Box(-1, 1, (1,), np.float32), space)
    distribution = make_distribution(space, bounds)
    found: Any = distribution.to_env(checked.module_actions(distribution))
    np.testing.assert_allclose((found["one"][0] if nested else found)[:1], expected, atol=1e-2)


def test_squashed_actions_at_the_bounds_are_exact_for_critics_and_inside_for_likelihoods() -> None:
    distribution = make_distribution(gym.spaces.Box(-2, 2, (1,), np.float32), "squash")
    given = np.array([[-2.0], [2.0], [1.9999], [1.9985], [0.3]], np.float32)
    actions = distribution.from_env(given)
    np.testing.assert_allclose(distribution.to_env(actions), given, atol=2e-6)
    inside = distribution.inside_bounds(torch.from_numpy(actions))
    wanted = given.clip(-2 * 0.999, 2 * 0.999)
    np.testing.assert_allclose(distribution.to_env(inside.numpy()), wanted, atol=1e-5)
    both = make_distribution(
        gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Box(-2, 2, (1,), np.float32))), "squash"
    )
    nested = both.from_env((np.array([2, 0, 1, 1, 1]), given))
    found = both.to_env(both.inside_bounds(torch.from_numpy(nested)).numpy())
    assert found[0].tolist() == [2, 0, 1, 1, 1]
    np.testing.assert_allclose(found[1], wanted, atol=1e-5)


def test_joined_rows_are_the_rows_of_all() -> None:
    none = np.zeros(5, bool)
    one, two = rows_of_steps(**steps()), rows_of_steps(**steps(rewards=np.arange(5.0) * 10, terminated=none))
    one.infos, two.infos = {1: {"a": 1}}, {0: {"b": 2}}
    both = EpisodeRows.join([one, two])
    assert both.returns().tolist() == [3, 12, 10, 90] and both.infos == {1: {"a": 1}, 7: {"b": 2}}
    assert [part.num_steps for part in both.episodes()] == [2, 3, 2, 3]
    assert [part.returns()[0] for part in both.episodes()] == [3, 12, 10, 90]
    last_two = both.take(both.episode_indices >= 2)
    assert last_two.infos == {0: {"b": 2}} and last_two.returns().tolist() == [10, 90]
    assert [part.num_jumps for part in (one, two, both, EpisodeRows.join([two, two]))] == [0, 1, 1, 2]
    last = both.take(both.episode_indices == 3)
    with pytest.raises(DataError, match="row 3, column 'actions'"):
        replace(last, actions=np.array([2, 5, 4, 0])).checked(BOX, DISCRETE)


def test_an_error_of_joined_rows_names_the_place_of_its_row() -> None:
    good, bad = steps(), steps(rewards=np.array([1.0, 2.0, 3.0, np.inf, 5.0]))
    parts = [rows_of_steps(**given, place=place) for given, place in ((good, "episode 0"), (bad, "episode 1"))]
    both = EpisodeRows.join(parts)
    for rows in (both, both.take(both.episode_indices > 0)):
        with pytest.raises(DataError, match=r"^episode 1: row 3, column 'rewards' is inf"):
            rows.checked(BOX, DISCRETE)
