"""Every source gives the same episodes, and what cannot be read is refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from corral import PPOConfig, SingleAgentEpisode
from corral.core.places import place_of
from corral.data.offline.config import ArraysInMemory
from corral.data.offline.episode_rows import EpisodeRows, rows_of_steps
from corral.data.offline.parquet import Description, RecordedEpisode, write_episodes
from corral.data.offline.sources import open_source
from corral.data.replay import ReplayBuffer
from corral.errors import ConfigError, DataError
from offline.test_episode_rows import random_steps, steps

SPACES = (gym.spaces.Box(-100, 100, (1,), np.float32), gym.spaces.Discrete(5))


def write(path: Path, given: dict[str, Any], module_id: str = "default_policy", spaces: Any = SPACES) -> None:
    rows = rows_of_steps(**given, module_id=module_id)
    episodes = [RecordedEpisode(episode, f"{path.name}{index}") for index, episode in enumerate(rows.episodes())]
    write_episodes(place_of(path.parent), path.name, episodes, Description({module_id: spaces}))


def contents(given: Any) -> list[tuple[Any, ...]]:
    """What a source holds, in an order that does not matter."""
    found = []
    for part in open_source(given).parts():
        for episode in part.episodes():
            columns = (episode.obs, episode.actions, episode.rewards, episode.terminated, episode.truncated)
            found.append(tuple(tuple(np.asarray(column, np.float64).reshape(-1).tolist()) for column in columns))
    return sorted(found)


def test_all_sources_give_the_same_episodes(tmp_path: Path) -> None:
    given = random_steps(np.random.default_rng(3), 40)
    expected = contents(given)
    assert len(expected) > 5
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    write(tmp_path / "a" / "one.parquet", given)
    rows = rows_of_steps(**given)
    half = rows.starts[rows.num_episodes // 2]
    for name, part in (("x", rows.take(slice(0, half))), ("y", rows.take(slice(half, None)))):
        recorded = [RecordedEpisode(episode, f"{name}{index}") for index, episode in enumerate(part.episodes())]
        write_episodes(place_of(tmp_path / "b"), f"{name}.parquet", recorded, Description({"default_policy": SPACES}))
    assert contents(str(tmp_path / "a")) == contents(tmp_path / "a" / "one.parquet") == expected
    assert contents(str(tmp_path / "b")) == contents(
        [str(tmp_path / "b" / "y.parquet"), str(tmp_path / "b" / "x.parquet")]
    )
    assert contents(str(tmp_path / "b")) == expected
    assert contents(f"file://{tmp_path}/b") == expected
    assert contents(ArraysInMemory(given)) == expected
    by_names = dict(
        zip(("next_observations", "terminals", "timeouts"), ("next_obs", "terminated", "truncated"), strict=True)
    )
    names = {name: theirs for theirs, name in by_names.items()} | {"obs": "observations"}
    assert contents({names.get(name, name): column for name, column in given.items()}) == expected
    assert contents([given]) == contents(lambda: iter([given])) == contents(part for part in [rows]) == expected
    episodes = [
        SingleAgentEpisode(
            observations=[*episode.obs],
            actions=[*episode.actions[:-1]],
            rewards=[*episode.rewards[:-1]],
            terminated=bool(episode.terminated.any()),
            truncated=bool(episode.truncated.any()),
            observation_space=SPACES[0],
            action_space=SPACES[1],
            len_lookback_buffer=0,
        )
        for episode in rows.episodes()
    ]
    assert contents(episodes) == [(obs, (*actions[:-1], 0.0), *rest) for obs, actions, *rest in expected]


def test_buffers_and_their_states_are_sources(tmp_path: Path) -> None:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=3)
    with config.debugging(seed=1).build() as algorithm:
        buffer, wrapped = ReplayBuffer(10_000, seed=0), ReplayBuffer(60, seed=0)
        steps_seen = []
        for _ in range(4):
            [rollout] = algorithm.sample(100)
            buffer.add(rollout)
            wrapped.add(rollout)
            steps_seen.append(rollout)
    [rows] = list(open_source(buffer).parts())
    assert rows.num_steps == len(buffer) == sum(rollout.num_env_steps for rollout in steps_seen)
    # A slow loop over the sub-envs, in which episodes continue from one rollout to the next.
    returns: list[float] = []
    for n in range(3):
        total = 0.0
        for rollout in steps_seen:
            for t in range(rollout.num_rows):
                if rollout.valid[t, n]:
                    total += float(rollout.rewards[t, n])
                    if rollout.done[t, n]:
                        returns.append(total)
                        total = 0.0
        returns.append(total)
    assert sorted(rows.returns().tolist()) == sorted(each for each in returns if each)
    assert rows.action_units == "module"
    state = copy.deepcopy(buffer.get_state())
    [again] = list(open_source(state).parts())
    np.testing.assert_array_equal(again.obs, rows.obs)
    # A ring that overwrote its oldest rows holds the latest steps, and episodes without their beginnings.
    [latest] = list(open_source(wrapped).parts())
    assert latest.num_steps == len(wrapped) < 70


def test_files_of_several_modules_are_told_apart(tmp_path: Path) -> None:
    for module_id in ("left", "right"):
        write(tmp_path / f"{module_id}.parquet", steps(), module_id)
    source = open_source(str(tmp_path))
    assert source.num_rows == {"left": 7, "right": 7} and source.spaces == {"left": SPACES, "right": SPACES}
    assert [rows.module_id for rows in source.parts()] == ["left", "right"]


def test_a_source_can_be_read_twice() -> None:
    def generate() -> Any:
        yield steps()
        yield steps()

    for given in (generate, generate(), [steps(), steps()]):
        source = open_source(given)
        assert sum(map(len, source.parts())) == sum(map(len, source.parts())) == 14


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"seen": np.zeros(3), "actions": np.zeros(3), "rewards": np.zeros(3)},
            r"lack 'obs'. Known names: actions, rewards, seen",
        ),
        ({"obs": np.zeros(3), "actions": np.zeros(3), "rewards": np.zeros(3)}, "do not say where episodes end"),
        (17, "input_=17 is no data that Corral reads"),
        ([17], "list.0. is 17: give SingleAgentEpisode objects"),
        ([], "list gives no episodes"),
        (ReplayBuffer(10), "the replay buffer holds no steps"),
        ("/does/not/exist", "/does/not/exist does not exist"),
        ("", "input_ is an empty text"),
    ],
)
def test_what_is_no_data_is_refused(given: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(open_source(given).parts())


@pytest.mark.parametrize(
    ("missing", "names"),
    [
        ("truncated", "done Dones is_last timeout TimeLimit.truncated truncations episode_end finished trunc_at"),
        ("terminated", "terminal is_terminal termination absorbing is_done terminate_d"),
        ("next_obs", "new_obs next_state nextObs next_observation obs_next observations_next next_ob"),
        ("starts", "is_first episode_starts First"),
        ("episode_id", "episode ep episode_ids eps_id trajectory_id Episode_Index"),
    ],
)
def test_columns_that_look_like_a_missing_one_are_refused(missing: str, names: str) -> None:
    """They would not be read as such, and episodes would have other ends, or no final observations."""
    given = {**steps(), "starts": [True, False, True, False, False], "truncated": [False] * 5}
    given.pop(missing, None)
    if missing == "episode_id":
        del given["starts"]  # which says the same
    for name in names.split():
        with pytest.raises(DataError, match=f"the column '{name}' looks like '{missing}', which is missing: call it"):
            open_source({**given, name: np.zeros(5, np.bool_)})


@pytest.mark.parametrize("name", ["done", "new_obs", "is_first", "terminal"])
def test_columns_that_look_like_one_that_is_there_are_added(name: str) -> None:
    given = {**steps(), "starts": [True, False, True, False, False], "truncated": [False] * 5, name: np.arange(5.0)}
    [rows] = open_source(given).parts()
    assert rows.added[name][rows.valid].tolist() == [0, 1, 2, 3, 4]
    [others] = open_source({**steps(), "weights": np.ones(5), "dt": np.ones(5), "logp": np.ones(5)}).parts()
    assert others.added.keys() == {"weights", "dt", "logp"}


def test_two_names_of_one_column_are_refused() -> None:
    with pytest.raises(DataError, match=r"the arrays hold 'terminals' and 'terminated': leave one of them out"):
        open_source({**steps(), "terminals": [False] * 5})


def test_directories_in_a_directory_may_have_a_dot_in_their_names(tmp_path: Path) -> None:
    for name in ("lr0.1", "seed-1", ".hidden"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.parquet", steps())
    (tmp_path / "notes.txt").touch()
    assert contents(str(tmp_path)) == sorted(2 * contents(str(tmp_path / "seed-1")))


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no .parquet and no .json files"):
        open_source(str(tmp_path))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match=r"a.parquet cannot be read as a Parquet file"):
        open_source(str(tmp_path))
    write(tmp_path / "a.parquet", steps())
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"a.parquet cannot be read as a Parquet file"):
        open_source(str(tmp_path))
    (tmp_path / "a.parquet").write_bytes(whole)
    write(tmp_path / "b.parquet", steps(), spaces=(SPACES[0], gym.spaces.Discrete(6)))
    with pytest.raises(DataError, match=r"b.parquet was recorded with the spaces .* give the data of one env"):
        open_source(str(tmp_path))


def change(path: Path, **columns: Any) -> None:
    """Replace columns of a file, as a user may with any tool for tables."""
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.parquet.read_table(path)
    for name, values in columns.items():
        index = table.column_names.index(name)
        if values is None:
            table = table.remove_column(index)
        else:
            table = table.set_column(index, name, pa.array(values))
    pa.parquet.write_table(table, path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"valid": [True] * 7}, "row 2, column 'valid' must be False after the last step"),
        ({"valid": [True, False, False, True, True, True, False]}, "row 1, column 'valid' must be False after"),
        ({"rewards": None}, r"the columns .'rewards'. are missing"),
        ({"rewards": [1.0, None, 0, 0, 0, 0, 0]}, "row 1, column 'rewards' has no value"),
        ({"rewards": ["much"] * 7}, "column 'rewards' holds string, and neither numbers nor lists of numbers"),
        ({"obs": [[1.0]] * 6 + [[1.0, 2.0]]}, "column 'obs' has lists of 1 and of 2 entries"),
        ({"module_id": ["a"] * 3 + ["b"] * 4}, r"holds episodes of the modules .'a', 'b'."),
        ({"t": [0, 1, 2, 0, 2, 3, 4]}, "row 4, column 't' is 2: the steps of an episode must follow each other"),
        ({"t": [0, 1, 2, 1, 2, 3, 4]}, "row 3, column 't' is 1"),
    ],
)
def test_files_that_were_changed_are_checked(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    write(tmp_path / "a.parquet", steps())
    change(tmp_path / "a.parquet", **columns)
    with pytest.raises(DataError, match=f"a.parquet.*{message}"):
        list(open_source(str(tmp_path)).parts())


def test_flags_and_rewards_of_other_dtypes_mean_the_same(tmp_path: Path) -> None:
    """As tools for tables may write them; and an env may set both flags."""
    write(tmp_path / "a.parquet", steps())
    expected = contents(str(tmp_path))
    flags = {"valid": [1, 1, 0, 1, 1, 1, 0], "terminated": [0, 1, 0, 0, 0, 0, 0], "truncated": [0, 1, 0, 0, 0, 1, 0]}
    change(tmp_path / "a.parquet", rewards=[1, 2, 0, 3, 4, 5, 0], **flags)
    assert contents(str(tmp_path)) == expected
    [rows] = open_source(str(tmp_path)).parts()
    assert rows.valid.dtype == rows.truncated.dtype == np.bool_ and rows.rewards.dtype == np.float64


def test_files_that_pandas_wrote_again_are_read(tmp_path: Path) -> None:
    """It keeps neither the metadata nor lists of fixed length."""
    import pandas as pd

    given = random_steps(np.random.default_rng(0), 40)
    write(tmp_path / "a.parquet", given)
    write(tmp_path / "b.parquet", given)
    expected = contents(str(tmp_path))
    pd.read_parquet(tmp_path / "a.parquet").to_parquet(tmp_path / "a.parquet")
    assert contents(str(tmp_path)) == expected
    source = open_source(str(tmp_path))
    assert source.num_rows is None and source.spaces == {"default_policy": SPACES}


def table(path: Path, rows: slice | list[int] = slice(None), **changes: Any) -> str:
    """A Parquet table as pandas writes it: Corral's names of columns, and neither spaces nor final observations."""
    import pandas as pd

    columns: dict[str, Any] = {
        "episode_id": ["a", "a", "a", "b", "b", "b"],
        "t": [0, 1, 2, 0, 1, 2],
        "obs": [[0.0], [1.0], [2.0], [10.0], [11.0], [12.0]],
        "actions": [[-2.0], [-1.5], [-1.0], [1.0], [1.5], [2.0]],
        "rewards": [1, 2, 3, 4, 5, 6],
        "terminated": [False, False, True, False, False, False],
        **changes,
    }
    frame = pd.DataFrame({name: column for name, column in columns.items() if column is not None})
    frame.iloc[rows].to_parquet(path)
    return str(path)


EPISODES_OF_TABLE = [
    ((0, 1, 2, 2), (-2, -1.5, -1, 0), (1, 2, 3, 0), (0, 0, 1, 0), (0, 0, 0, 0)),
    ((10, 11, 12), (1, 1.5, 2), (4, 5, 0), (0, 0, 0), (0, 1, 0)),  # nothing is observed after the last step
]


def test_a_table_of_another_program_has_actions_of_the_env_and_its_episodes(tmp_path: Path) -> None:
    """Its actions are not in [-1, 1], as in tables of RLlib, and its rows may be in any order."""
    import pandas as pd

    for name, rows in (("a", slice(None)), ("b", [4, 0, 3, 2, 5, 1])):
        file = table(tmp_path / f"{name}.parquet", rows)
        assert contents(file) == EPISODES_OF_TABLE
        assert {part.action_units for part in open_source(file).parts()} == {"env"}
    plain = table(tmp_path / "c.parquet", episode_id=None, t=None, truncated=[False] * 5 + [True])
    assert contents(plain) == EPISODES_OF_TABLE
    arrays = {name: [*column] for name, column in pd.read_parquet(tmp_path / "a.parquet").items()}
    assert contents(arrays) == EPISODES_OF_TABLE


def test_an_episode_may_begin_in_one_table_and_end_in_another(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    files = [table(tmp_path / "parts" / f"{i}.parquet", slice(2 * i, 2 * i + 2)) for i in range(3)]
    assert contents(str(tmp_path / "parts")) == contents(files) == EPISODES_OF_TABLE


def test_files_of_corral_and_other_tables_are_not_mixed_in_a_directory(tmp_path: Path) -> None:
    """Rows of final observations would be read as steps."""
    for name in ("both", "one", "two"):
        (tmp_path / name).mkdir()
    write(tmp_path / "both" / "a.parquet", steps())
    write(tmp_path / "one" / "a.parquet", steps())
    for name in ("both", "two"):
        table(tmp_path / name / "b.parquet")
    with pytest.raises(DataError, match=r"a.parquet is a file of Corral, and .*b.parquet is another table: put them"):
        open_source(str(tmp_path / "both"))
    apart = contents([str(tmp_path / "one"), str(tmp_path / "two")])
    assert apart == sorted(contents(steps()) + EPISODES_OF_TABLE)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"episode_id": None, "terminated": [False] * 6}, "row 3, column 't' is 0 after 2"),
        ({"episode_id": None, "terminated": None}, "no column says where episodes end: add 'terminated'"),
        ({"terminated": None, "dones": [False] * 6}, "the column 'dones' looks like 'terminated'"),
        ({"valid": [True] * 6}, r"columns .'agent_id', 'module_id', 'truncated'. are missing: .* leave out the column"),
        ({"module_id": ["x"] * 3 + ["y"] * 3}, r"holds steps of the modules .'x', 'y'."),
    ],
)
def test_a_table_that_does_not_say_enough_is_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"x.parquet.*{message}"):
        list(open_source(table(tmp_path / "x.parquet", **columns)).parts())


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    import pyarrow.parquet

    write(tmp_path / "a.parquet", steps())
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(tmp_path / "a.parquet")[:0], tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet holds no episodes: remove the file"):
        list(open_source(str(tmp_path)).parts())


def test_a_file_of_a_later_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from corral.data.offline import parquet

    monkeypatch.setattr(parquet, "FORMAT", 2)
    write(tmp_path / "a.parquet", steps())
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"a.parquet has format 2, and this version of Corral reads 1"):
        open_source(str(tmp_path))


def test_paths_have_the_home_directory_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "a.parquet", steps())
    assert contents("~/data") == contents(str(tmp_path / "data"))
    with pytest.raises(ConfigError):
        open_source("~nobody-of-this-name/data")


def test_joined_parts_keep_whole_episodes() -> None:
    parts = list(open_source([steps(), steps()]).parts())
    assert isinstance(parts[0], EpisodeRows) and EpisodeRows.join(parts).num_episodes == 4
