"""Recorded data by RLlib's settings: RLlib's own files, and what each setting means."""

from __future__ import annotations

import base64
import itertools
import json
import pickle
import shutil
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import msgpack
import numpy as np
import pytest

from corral.compat.rllib.algorithm import BCConfig, MARWILConfig, PPOConfig
from corral.compat.rllib.config import AlgorithmConfig
from corral.compat.rllib.episodes import SingleAgentEpisode
from corral.compat.rllib.native import to_native
from corral.compat.rllib.recorded_data import OfflinePreLearner, RecordedFiles, play_and_record
from corral.compat.rllib.settings import SETTINGS
from corral.core.tree import map_tree
from corral.data.offline.episode_rows import EpisodeRows
from corral.data.offline.sources import open_source
from corral.errors import ConfigError, DataError
from corral.modules.make_distribution import make_distribution

DATA = Path(__file__).parent / "data_of_rllib"
FORMS = ("table", "packed_table", "episodes", "json", "plain_json")
BOTH = pytest.mark.parametrize("config_class", [BCConfig, MARWILConfig])

CARTPOLE = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32), gym.spaces.Discrete(2)
PENDULUM = gym.spaces.Box(-8, 8, (3,), np.float32), gym.spaces.Box(-2, 2, (1,), np.float32)


def needs(form: str) -> None:
    for package in ("pyarrow", *(["lz4"] if "packed" in form or form == "json" else [])):
        pytest.importorskip(package)


def read(source: Any) -> list[EpisodeRows]:
    return [episode for rows in source.parts() for episode in rows.episodes()]


def expected_of(directory: Path) -> list[dict[str, np.ndarray]]:
    """The columns of RLlib's own episode objects."""
    with np.load(directory / "expected.npz") as file:
        arrays = dict(file)
    numbers = sorted({int(name.partition("/")[0]) for name in arrays})
    return [
        {name.partition("/")[2]: arrays[name] for name in arrays if name.startswith(f"{number}/")} for number in numbers
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("env", ["cartpole", "pendulum"])
def test_files_of_rllib_hold_what_rllibs_own_episodes_hold(env: str, form: str) -> None:
    needs(form)
    directory = DATA / f"{env}_{form}"
    found, expected = read(open_source(str(directory))), expected_of(directory)
    assert len(found) == len(expected) == 4
    for episode, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(episode.obs.astype(np.float32), wanted["obs"])
        steps = slice(0, -1)
        np.testing.assert_array_equal(np.asarray(episode.actions[steps], wanted["actions"].dtype), wanted["actions"])
        np.testing.assert_allclose(episode.rewards[steps], wanted["rewards"], rtol=1e-6 if "json" in form else 0)
        np.testing.assert_allclose(episode.added["logp"][steps], wanted["logp"], rtol=1e-6)
        assert (episode.terminated[-2], episode.truncated[-2]) == (wanted["terminated"], wanted["truncated"])
        assert not episode.terminated[:-2].any() and not episode.truncated[:-2].any()
        assert episode.module_id == "default_policy" and episode.action_units == "rllib"


def as_texts(episodes: list[EpisodeRows]) -> list[str]:
    return [repr([episode.obs.tolist(), episode.actions.tolist(), episode.truncated.tolist()]) for episode in episodes]


def test_episodes_that_continue_in_the_next_file_are_whole(tmp_path: Path) -> None:
    """RLlib writes what each sample gave, which may end in the middle of an episode."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(DATA / "cartpole_table" / "00.parquet")
    bounds = [0, 10, 30, 60, 88]
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        parquet.write_table(table.slice(start, stop - start), tmp_path / f"{number}.parquet")
    whole = read(open_source(str(DATA / "cartpole_table")))
    assert as_texts(read(open_source(str(tmp_path)))) == as_texts(whole)
    # An episode whose end is missing was cut off, and its last observation is known.
    (tmp_path / "3.parquet").unlink()
    *others, last = read(open_source(str(tmp_path)))
    assert as_texts(others) == as_texts(whole[:2])
    assert last.num_steps == 60 - 25 - 24 and last.truncated[-2]
    np.testing.assert_array_equal(last.obs[-1], whole[2].obs[last.num_steps])


def test_episodes_that_continue_in_the_next_line_are_whole(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (DATA / "cartpole_plain_json" / "steps.json").read_text().splitlines()]
    parts = [
        {name: column[part] if isinstance(column, list) else column for name, column in line.items()}
        for line in lines
        for part in (slice(0, 9), slice(9, None))
    ]
    (tmp_path / "a.json").write_text("\n".join(map(json.dumps, parts)))
    expected = as_texts(read(open_source(str(DATA / "cartpole_plain_json"))))
    assert as_texts(read(open_source(str(tmp_path)))) == expected


def test_episodes_whose_steps_take_turns_are_told_apart(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(DATA / "cartpole_table" / "00.parquet")
    rows = np.argsort(np.concatenate([np.arange(25), np.arange(24), np.arange(14), np.arange(25)]), kind="stable")
    parquet.write_table(table.take(rows), tmp_path / "a.parquet")
    expected = as_texts(read(open_source(str(DATA / "cartpole_table"))))
    assert as_texts(read(open_source(str(tmp_path)))) == expected


def test_steps_before_a_packed_chunk_are_those_of_the_chunk_before(tmp_path: Path) -> None:
    """A chunk of RLlib repeats the latest steps of the chunk before, its lookback."""
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    [file] = (DATA / "cartpole_episodes").rglob("*.parquet")
    items = [msgpack.unpackb(item.as_py(), strict_map_key=False) for item in parquet.read_table(file)["item"]]

    def cut(part: Any, rows: slice, lookback: int, more: int = 0) -> Any:
        if "data" not in part:
            return {name: cut(inner, rows, lookback) for name, inner in part.items()}
        stop = None if rows.stop is None else rows.stop + more
        return {**part, "data": part["data"][rows.start : stop], "lookback": lookback}

    chunks = [
        {
            **state,
            "observations": cut(state["observations"], rows, lookback, 1),
            **{name: cut(state[name], rows, lookback) for name in ("actions", "rewards", "extra_model_outputs")},
            **({} if rows.stop is None else {"is_terminated": False, "is_truncated": False}),
        }
        for state in items
        for rows, lookback in ((slice(0, 5), 0), (slice(3, None), 2))
    ]
    parquet.write_table(pa.table({"item": [msgpack.packb(chunk) for chunk in chunks]}), tmp_path / "a.parquet")
    expected = as_texts(read(open_source(str(DATA / "cartpole_episodes"))))
    assert as_texts(read(open_source(str(tmp_path)))) == expected


@pytest.mark.parametrize("form", FORMS)
def test_actions_that_leave_their_bounds_are_read(form: str) -> None:
    """RLlib records the samples of a Gaussian whose units are [-1, 1]; some are outside of the env's bounds."""
    needs(form)
    (rows,) = [EpisodeRows.join(read(open_source(str(DATA / f"pendulum_{form}"))))]
    assert np.abs(rows.actions).max() > 2
    assert rows.checked(*PENDULUM).num_steps == rows.num_steps == 80


def pack(value: Any) -> str:
    """A packed column, as RLlib writes it."""
    lz4 = pytest.importorskip("lz4.frame")
    return base64.b64encode(lz4.compress(pickle.dumps(value))).decode()


def as_lists(value: Any) -> Any:
    return map_tree(lambda leaf: leaf.tolist(), value)


@pytest.mark.parametrize(
    "write",
    [
        as_lists,
        pack,
        lambda value: {key: pack(part) for key, part in value.items()} if isinstance(value, dict) else pack(value),
        lambda value: [pack(part) for part in value] if isinstance(value, tuple) else pack(value),
        lambda value: pack(OrderedDict(value)) if isinstance(value, dict) else pack(value),
        lambda value: [map_tree(lambda leaf, row=row: leaf[row].tolist(), value) for row in range(3)],
    ],
    ids=["plain", "packed", "parts of a Dict packed", "parts of a Tuple packed", "ordered", "by step"],
)
def test_json_files_may_hold_dict_and_tuple_columns(tmp_path: Path, write: Any) -> None:
    places = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    obs = {"place": places, "kind": (np.array([0, 1, 2]), np.array([[1.0], [2.0], [3.0]], np.float32))}
    units = np.array([[-1.0, 0.5], [0.0, 1.0], [1.0, -0.5]], np.float32)
    columns = {"obs": obs, "actions": (np.array([0, 1, 1]), units)}
    line = {name: write(column) for name, column in columns.items()}
    line |= {"rewards": [0.0, 1.0, 2.0], "dones": [False, False, True], "eps_id": [5, 5, 5]}
    (tmp_path / "a.json").write_text(json.dumps(line))
    [rows] = read(open_source(str(tmp_path)))
    box = gym.spaces.Box(-99, 99, (2, 2), np.float32)
    kind = gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Box(0, 9, (1,), np.float32)))
    bounds = gym.spaces.Box(np.array([0.0, -4.0], np.float32), np.array([10.0, 4.0], np.float32))
    space = gym.spaces.Tuple((gym.spaces.Discrete(2), bounds))
    checked: Any = rows.checked(gym.spaces.Dict({"place": box, "kind": kind}), space)
    assert checked.terminated.tolist() == [False, False, True, False]
    np.testing.assert_array_equal(checked.obs["place"][:3], places)
    np.testing.assert_array_equal(checked.obs["kind"][0][:3], [0, 1, 2])
    np.testing.assert_array_equal(checked.obs["kind"][1][:3, 0], [1, 2, 3])
    distribution = make_distribution(space)
    numbers, actions = distribution.to_env(checked.module_actions(distribution))
    assert numbers[:3].tolist() == [0, 1, 1]
    np.testing.assert_allclose(actions[:3], [[0, 2], [5, 4], [10, -2]], atol=1e-6)


def interleaved(**changes: Any) -> dict[str, Any]:
    """A line of JSON with two episodes of three steps that take turns."""
    obs = [[0.0], [10.0], [1.0], [11.0], [2.0], [12.0]]
    columns = {"obs": obs, "new_obs": [[x + 1] for [x] in obs], "actions": [0] * 6, "rewards": [1.0] * 6}
    return {**columns, "dones": [False] * 4 + [True] * 2, "eps_id": [0, 1] * 3, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eps_id": [0, 1, 0]}, r"a\.json, line 1: column 'eps_id' is int64\[3\], and 'rewards' has 6 entries"),
        ({"dones": [False]}, r"a\.json, line 1: column 'terminated' is bool\[1\], and 'rewards' has 6 entries"),
        ({"obs": None}, r"a\.json, line 1: column 'obs' is no column of steps: TypeError"),
        ({"rewards": 3}, r"a\.json, line 1: column '.*' is no column of steps: TypeError"),
        ({"rewards": ["1"] * 6}, r"column 'rewards' holds something else than numbers: it has the dtype <U1"),
        ({"rewards": [1.0, 1.0, 1.0, float("nan"), 1.0, 1.0]}, r"a\.json, line 1: row 3, column 'rewards' is nan"),
        ({"actions": [0, 0, 0, 0, 9, 0]}, r"a\.json, line 1: row 4, column 'actions' is 9"),
        ({"new_obs": [[1.0], [11.0], [2.0], [12.0], [3.0], [1e39]]}, r"row 5, column 'next_obs' is .1\.?e.39"),
    ],
)
def test_what_json_files_have_wrong_is_named_by_line_row_and_column(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(interleaved(**changes)))
    with pytest.raises(DataError, match=message):
        for rows in open_source(str(tmp_path)).parts():
            rows.checked(gym.spaces.Box(-100, 100, (1,)), gym.spaces.Discrete(2))


def test_a_json_file_without_rewards_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"obs": [[0.0]], "actions": [0]}))
    with pytest.raises(DataError, match=r"a\.json, line 1: there is no column 'rewards'"):
        list(open_source(str(tmp_path)).parts())


@pytest.mark.parametrize(
    ("name", "like"), [("terminal", "terminated"), ("truncations", "truncated"), ("next_observations", "next_obs")]
)
@pytest.mark.parametrize("form", ["table", "json"])
def test_columns_of_files_that_look_like_a_missing_one_are_refused(
    tmp_path: Path, form: str, name: str, like: str
) -> None:
    columns = {"obs": [[0.0], [1.0]], "actions": [0, 1], "rewards": [1.0, 1.0], "new_obs": [[1.0], [2.0]]}
    columns |= {"terminateds": [False, True], "truncateds": [False, False], "eps_id": [1, 1], "is_first": [True, False]}
    columns[name] = columns.pop({"terminated": "terminateds", "truncated": "truncateds", "next_obs": "new_obs"}[like])
    if form == "json":
        (tmp_path / "a.json").write_text(json.dumps(columns))
    else:
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a\.\w+.*: the column '{name}' looks like '{like}', which is missing"):
        read(open_source(str(tmp_path)))


def test_a_table_whose_rows_lack_some_ids_of_episodes_is_refused(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"obs": [[0.0], [1.0]], "actions": [0, 1], "rewards": [1.0, 1.0], "new_obs": [[1.0], [2.0]]}
    columns |= {"terminateds": [False, True], "truncateds": [False, False], "eps_id": ["a", None]}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: column 'eps_id' is empty in 1 of 2 rows"):
        read(open_source(str(tmp_path)))


def native_of(config: AlgorithmConfig) -> Any:
    return to_native(config.environment("CartPole-v1"))


def table_config(config_class: Any = BCConfig, data: Any = DATA / "cartpole_table", **settings: Any) -> Any:
    config = config_class().environment(observation_space=CARTPOLE[0], action_space=CARTPOLE[1])
    return config.offline_data(input_=str(data), **settings).rl_module(model_config={"fcnet_hiddens": [8]})


def test_bc_and_marwil_begin_with_the_defaults_of_rllib() -> None:
    data = {"input_": "somewhere"}
    for config_class in (BCConfig, MARWILConfig):
        config = config_class().offline_data(**data)
        native = native_of(config)
        assert (native.lr, native.train_batch_size_per_learner, native.grad_clip) == (1e-4, 2000, None)
        assert native.num_updates_per_iteration is None and native.input_ == ["somewhere"]
        assert (config.beta, config.bc_logstd_coeff) == (1.0 if config_class is MARWILConfig else 0.0, 0.0)
        assert native.model_config["vf_share_layers"] is False and native.model_config["fcnet_hiddens"] == [256, 256]
        assert not config.is_online and config.is_offline and not config_class().is_offline
    assert native_of(MARWILConfig().offline_data(**data).training(beta=0.5, vf_coeff=2.0)).beta == 0.5
    marwil = native_of(MARWILConfig().offline_data(**data))
    assert (marwil.vf_coeff, marwil.gamma, marwil.max_advantage_weight) == (1.0, 0.99, 1e9)
    assert marwil.moving_average_sqd_adv_norm_start == 100.0
    assert marwil.moving_average_sqd_adv_norm_update_rate == 1e-8
    assert issubclass(BCConfig, MARWILConfig) and BCConfig().algo_class.__mro__[1].__name__ == "MARWIL"
    assert BCConfig().materialize_mapped_data and MARWILConfig().materialize_data


@BOTH
def test_sizes_of_batches_and_numbers_of_updates(config_class: Any) -> None:
    config = config_class().offline_data(input_="x", dataset_num_iters_per_learner=5)
    native = native_of(config.training(train_batch_size_per_learner=1024).env_runners(num_env_runners=3))
    assert (native.train_batch_size_per_learner, native.num_updates_per_iteration) == (1024, 5)
    two = native_of(config_class().offline_data(input_="x").training(train_batch_size=500).learners(num_learners=2))
    assert (two.train_batch_size_per_learner, two.total_train_batch_size) == (250, 500)


def test_a_schedule_counts_one_batch_in_each_iteration() -> None:
    config = BCConfig().training(lr=[[0, 1e-3], [2000, 1e-4]]).offline_data(input_="x", dataset_num_iters_per_learner=5)
    assert [*to_native(config).lr] == [(0, 1e-3), (10_000, 1e-4)]
    with pytest.raises(ConfigError, match="dataset_num_iters_per_learner"):
        to_native(config.offline_data(dataset_num_iters_per_learner=None))


@BOTH
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"input_": "x", "input_read_method": "read_images"}, "input_read_method='read_images': Corral reads Parquet"),
        (
            {"input_": "x", "input_read_method_kwargs": {"columns": ["a"]}},
            "input_read_method_kwargs: .'columns'. are not",
        ),
        ({"input_": lambda context: None}, "functions that make an InputReader are not served"),
        ({"input_": {"a.json": 0.5, "sampler": 0.5}}, "Corral draws evenly from all steps"),
        ({"input_": "/nowhere/*.parquet"}, "input_='/nowhere/.*': no file matches"),
        ({"input_": "x", "input_filesystem": "gcs"}, "input_filesystem='gcs': .*give a URL"),
        ({"input_": "x", "offline_data_class": dict}, "offline_data_class=.*give a `prelearner_class`"),
        ({"input_": "x", "output_write_method": "write_csv"}, "output_write_method='write_csv'.*Parquet"),
        ({"input_": "x", "prelearner_buffer_class": dict}, "prelearner_buffer_class=.*drawn evenly"),
        ({}, "learns from recorded data, and none was given"),
    ],
)
def test_what_corral_lacks_is_refused_by_name(config_class: Any, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        native_of(config_class().offline_data(**settings)).validate()


def test_settings_of_one_of_the_algorithms_are_refused_by_the_other() -> None:
    for config, message in (
        (BCConfig().training(beta=0.5), "beta=0.5: .*use `MARWILConfig`"),
        (BCConfig().training(bc_logstd_coeff=0.1), "bc_logstd_coeff=0.1: .*entropy_coeff"),
        (MARWILConfig().training(lambda_=0.9), "lambda_=0.9: .*returns to the end of the episode"),
        (MARWILConfig().training(burnin_len=3), "burnin_len=3: .*single steps"),
        (MARWILConfig().offline_data(ignore_final_observation=True), "ignore_final_observation=True: .*BCConfig"),
    ):
        with pytest.raises(ConfigError, match=message):
            native_of(config.offline_data(input_="x"))
    memory = {"use_lstm": True, "max_seq_len": 8}
    config = BCConfig().offline_data(input_="x").training(burnin_len=3).rl_module(model_config=memory)
    assert native_of(config).burn_in_len == 3


def test_algorithms_that_learn_from_envs_take_no_recorded_data() -> None:
    with pytest.raises(ConfigError, match="input_='data': PPO learns from an env: use BCConfig, MARWILConfig"):
        native_of(PPOConfig().offline_data(input_="data"))
    native_of(PPOConfig().offline_data(input_="sampler", output=None))


def test_connectors_of_users_are_refused() -> None:
    config = BCConfig().offline_data(input_="x").training(learner_connector=lambda obs, act: [])
    with pytest.raises(ConfigError, match=r"BC: recorded steps pass no connectors of your own: .*prelearner_class"):
        native_of(config)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("data", ["data"]),
        ([Path("/a/b"), "s3://bucket/c"], ["/a/b", "s3://bucket/c"]),
        (f"{DATA}/cartpole_*table", [f"{DATA}/cartpole_packed_table", f"{DATA}/cartpole_table"]),
        (f"local://{DATA}/cartpole_table", [f"local://{DATA}/cartpole_table"]),
        (f"local://{DATA}/cartpole_tab*", [f"{DATA}/cartpole_table"]),
    ],
)
def test_paths_and_globs(given: Any, expected: list[str]) -> None:
    assert native_of(BCConfig().offline_data(input_=given)).input_ == expected


def test_the_older_dataset_input_names_its_paths() -> None:
    config = BCConfig().offline_data(input_="dataset", input_config={"format": "json", "paths": "/a/b.json"})
    assert native_of(config).input_ == ["/a/b.json"]
    assert BCConfig().update_from_dict({"input": "/x"}).input_ == "/x"


def trained(config: Any, iterations: int = 1) -> tuple[Any, dict[str, Any]]:
    """The data of an algorithm and its last result."""
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
        data = algo.native.data["default_policy"]
        data.steps = data.train.get_steps()
        return data, result


@pytest.mark.parametrize("form", FORMS)
@BOTH
def test_both_learn_from_all_forms_without_an_env(config_class: Any, form: str) -> None:
    needs(form)
    config = table_config(config_class, DATA / f"cartpole_{form}").training(train_batch_size_per_learner=32)
    data, result = trained(config, 2)
    assert (data.num_episodes, data.num_steps) == (4, 88)
    numbers = result["learners"]["default_policy"]
    assert np.isfinite(numbers["policy_loss"]) and np.isfinite(numbers["total_loss"])
    assert numbers["num_module_steps_trained"] == 3 * 32  # one pass: 88 steps in batches of 32
    # RLlib counts one batch in each iteration, and no steps of runners.
    assert result["num_env_steps_sampled_lifetime"] == result["num_env_steps_sampled"] == 2 * 32
    assert result["timesteps_total"] == 64
    if config_class is MARWILConfig:
        assert numbers["moving_avg_sqd_adv_norm"] == pytest.approx(100.0, abs=1e-3)
        assert numbers["vf_loss"] > 0 and numbers["vf_explained_variance"] <= 1


def test_box_actions_have_the_units_that_normalize_actions_says() -> None:
    pytest.importorskip("pyarrow")
    stored = []
    for normalized in (True, False):
        config = BCConfig().environment(
            observation_space=PENDULUM[0], action_space=PENDULUM[1], normalize_actions=normalized
        )
        config.offline_data(input_=str(DATA / "pendulum_table"), dataset_num_iters_per_learner=1)
        data, _ = trained(config.rl_module(model_config={"fcnet_hiddens": [8]}))
        stored.append(data.steps["actions"])
    actions = np.concatenate([each["actions"] for each in expected_of(DATA / "pendulum_table")])
    np.testing.assert_allclose(np.sort(stored[0], 0), np.sort(np.clip(actions, -1, 1), 0), rtol=1e-6)
    np.testing.assert_allclose(np.sort(stored[1], 0), np.sort(actions, 0), rtol=1e-6)


def renamed(target: Path, names: dict[str, str], drop: tuple[str, ...] = ()) -> Path:
    """A table of RLlib with other names of columns."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(DATA / "cartpole_table" / "00.parquet").drop_columns(list(drop))
    parquet.write_table(table.rename_columns([names.get(name, name) for name in table.column_names]), target)
    return target


def test_a_schema_names_the_columns(tmp_path: Path) -> None:
    names = {"obs": "o_t", "actions": "a_t", "new_obs": "o_next", "eps_id": "episode", "terminateds": "ended"}
    file = renamed(tmp_path / "x.parquet", names)
    with pytest.raises(DataError, match=r"x.parquet: there is no column 'obs'"):
        trained(table_config(data=file))
    data, _ = trained(table_config(data=file, input_read_schema=names))
    plain, _ = trained(table_config())
    assert (data.num_episodes, data.num_steps, data.fingerprint) == (4, 88, plain.fingerprint)


def test_without_final_observations_the_last_steps_stay_if_they_are_ignored(tmp_path: Path) -> None:
    file = renamed(tmp_path / "x.parquet", {}, drop=("new_obs",))
    assert trained(table_config(data=file))[0].num_steps == 86  # two episodes are truncated
    assert trained(table_config(data=file, ignore_final_observation=True))[0].num_steps == 88


class Renames(OfflinePreLearner):
    """Makes whole episodes of a table with columns of its own."""

    def _map_to_episodes(self, batch: Any, to_numpy: bool = False, **settings: Any) -> Any:
        episodes = []
        for name in dict.fromkeys(batch["who"]):
            rows = np.flatnonzero(batch["who"] == name)
            x = batch["x"][rows].reshape(-1, 1).astype(np.float32)
            episodes.append(
                SingleAgentEpisode(
                    id_=str(name),
                    observations=[*x, x[-1] + 1],
                    actions=list(batch["chosen"][rows]),
                    rewards=list(batch["gain"][rows]),
                    terminated=True,
                    len_lookback_buffer=0,
                )
            )
        return {"episodes": episodes}


class Older(OfflinePreLearner):
    """The signature of Ray up to 2.5x."""

    @staticmethod
    def _map_to_episodes(
        is_multi_agent: Any, batch: Any, schema: Any = None, to_numpy: bool = False, **other: Any
    ) -> Any:  # type: ignore[override]
        assert is_multi_agent is False and schema["obs"] == "obs"
        return Renames._map_to_episodes(None, batch)  # type: ignore[arg-type]


class Cut(Renames):
    """Makes a second episode that is truncated."""

    def _map_to_episodes(self, batch: Any, to_numpy: bool = False, **settings: Any) -> Any:
        found = super()._map_to_episodes(batch)
        found["episodes"][1].is_terminated, found["episodes"][1].is_truncated = False, True
        return found


@pytest.mark.parametrize("prelearner", [Renames, Older, Cut])
def test_a_prelearner_maps_columns_to_episodes(tmp_path: Path, prelearner: Any) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = {"who": ["a", "a", "b", "b", "b"], "x": [0, 1, 5, 6, 7], "chosen": [0, 1, 1, 0, 1], "gain": [1.0] * 5}
    parquet.write_table(pa.table(table), tmp_path / "x.parquet")
    config = BCConfig().environment(
        observation_space=gym.spaces.Box(-9, 9, (1,), np.float32), action_space=gym.spaces.Discrete(2)
    )
    config.offline_data(input_=[str(tmp_path)], prelearner_class=prelearner)
    data, _ = trained(config)
    steps = data.steps
    assert (data.num_episodes, data.num_steps, data.episode_return_mean) == (2, 5, 2.5)
    assert steps["obs"].ravel().tolist() == [0, 1, 5, 6, 7] and steps["actions"].tolist() == [0, 1, 1, 0, 1]
    assert steps["terminated"].tolist() == [False, True, False, False, prelearner is not Cut]


@pytest.mark.parametrize("form", ["table", "packed_table"])
def test_the_prelearner_itself_reads_rllibs_tables(form: str) -> None:
    needs(form)
    plain, _ = trained(table_config(data=DATA / f"cartpole_{form}"))
    mapped, _ = trained(table_config(data=DATA / f"cartpole_{form}", prelearner_class=OfflinePreLearner))
    assert mapped.fingerprint == plain.fingerprint


class Ends(Renames):
    """Makes episodes of another class, whose ends are not checked when they are made."""

    def _map_to_episodes(self, batch: Any, to_numpy: bool = False, **settings: Any) -> Any:
        found = super()._map_to_episodes(batch)
        found["episodes"][1].is_truncated = "no"
        return found


@pytest.mark.parametrize(
    ("prelearner", "column", "problem"),
    [
        (OfflinePreLearner, {"terminateds": [0.0, 1.0, np.nan]}, r"row 2, column 'terminateds' is nan: flags are"),
        (OfflinePreLearner, {"dones": ["no", "no", "yes"]}, r"dones cannot be unpacked"),
        (OfflinePreLearner, {"truncateds": [0, 3, 1]}, r"row 1, column 'truncateds' is 3: flags are"),
        (OfflinePreLearner, {"truncateds": [None, True, True]}, r"row 0, column 'truncateds' is None: flags are"),
        (Ends, {}, r"x.parquet: row 2, column 'truncated' is no: flags are bool"),
    ],
)
def test_flags_that_are_none_are_refused_through_a_prelearner(
    tmp_path: Path, prelearner: Any, column: dict[str, Any], problem: str
) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    steps = {"obs": [[0.0], [1.0], [2.0]], "new_obs": [[1.0], [2.0], [3.0]], "actions": [0, 1, 0], "rewards": [1.0] * 3}
    others = {"who": ["a", "a", "b"], "x": [0, 1, 5], "chosen": [0, 1, 1], "gain": [1.0] * 3}
    parquet.write_table(pa.table({**steps, **others, "eps_id": ["a"] * 3, **column}), tmp_path / "x.parquet")
    config = BCConfig().environment(
        observation_space=gym.spaces.Box(-9, 9, (1,), np.float32), action_space=gym.spaces.Discrete(2)
    )
    config.offline_data(input_=[str(tmp_path)], prelearner_class=prelearner)
    with pytest.raises(DataError, match=problem):
        trained(config)


def test_flags_without_any_value_are_false_through_a_prelearner() -> None:
    prelearner = OfflinePreLearner(config=BCConfig())
    columns = {"obs": [[0.0]] * 3, "actions": [0] * 3, "rewards": [1.0] * 3, "truncateds": [None] * 3}
    columns |= {"terminateds": [None] * 3, "dones": [0, 1, True]}
    episodes = prelearner._map_to_episodes(columns)["episodes"]
    assert [(each.is_terminated, each.is_truncated) for each in episodes] == [
        (False, False),
        (True, False),
        (True, False),
    ]


def test_other_prelearners_are_refused() -> None:
    class Samples(OfflinePreLearner):
        def __call__(self, batch: Any) -> Any:
            return batch

    with pytest.raises(ConfigError, match=r"Corral does not call Samples.__call__, .*override _map_to_episodes"):
        BCConfig().offline_data(prelearner_class=Samples)
    with pytest.raises(ValueError, match="is no subclass of OfflinePreLearner"):
        BCConfig().offline_data(prelearner_class=dict)


def test_spaces_of_the_env_win_over_given_ones() -> None:
    config = table_config().environment("CartPole-v1").evaluation(evaluation_interval=1, evaluation_duration=2)
    _, result = trained(config)
    assert result["evaluation"]["env_runners"]["episode_return_mean"] > 5


def test_reading_is_part_of_the_config_that_checkpoints_name() -> None:
    files = RecordedFiles(("a",), {"obs": "o"})
    assert pickle.loads(pickle.dumps(files)) == files != RecordedFiles(("b",), {"obs": "o"})


def test_recording_by_evaluation_and_by_training(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0)
    config.training(train_batch_size=200, minibatch_size=100, num_epochs=1).rl_module(
        model_config={"fcnet_hiddens": [8]}
    )
    config.evaluation(evaluation_duration=6, evaluation_config={"explore": False})
    config.offline_data(output=f"local://{tmp_path}/out/", output_write_episodes=False, output_max_rows_per_file=50)
    with config.build() as algo:
        rounds = [algo.evaluate() for _ in range(2)]
    recorded = read(open_source(f"{tmp_path}/out"))
    played = [each["env_runners"] for each in rounds]
    assert len(recorded) == sum(each["num_episodes"] for each in played) == 12
    assert sum(each.num_steps for each in recorded) == sum(each["num_env_steps_sampled"] for each in played)
    returns = [float(each.returns()[0]) for each in recorded]
    assert np.mean(returns[:6]) == pytest.approx(played[0]["episode_return_mean"])
    assert all("logp" not in each.added for each in recorded)  # the policy's distribution did not act
    shutil.rmtree(tmp_path / "out")
    with config.copy(copy_frozen=False).build() as algo:
        algo.train()
    of_training = read(open_source(f"{tmp_path}/out"))
    assert sum(each.num_steps for each in of_training) <= 200 and len(of_training) >= 2
    assert all(np.isfinite(each.added["logp"][:-1]).all() for each in of_training)
    data, _ = trained(table_config(data=tmp_path / "out"))
    assert data.num_episodes == len(of_training)


@pytest.mark.parametrize(
    ("unit", "asked", "resets"),
    [("episodes", False, True), ("timesteps", True, True), ("timesteps", False, False), ("timesteps", None, False)],
)
def test_a_recorded_round_continues_episodes_only_where_it_may(unit: str, asked: bool | None, resets: bool) -> None:
    settings: dict[str, Any] = {"evaluation_duration": 10, "evaluation_duration_unit": unit}
    settings["evaluation_force_reset_envs_before_iteration"] = asked
    recorder = SimpleNamespace(add=lambda rollouts: None, end_round=dict)
    view, config = SimpleNamespace(evaluation_recorder=recorder), SimpleNamespace(**settings)
    algorithm = SimpleNamespace(view=view, config=config, num_env_steps_sampled_lifetime=7)
    requests: list[Any] = []
    play_and_record(algorithm, SimpleNamespace(sample=requests.append))
    assert [(request.force_reset, request.timestep) for request in requests] == [(resets, 7)]


def test_every_name_of_offline_data_says_what_corral_does() -> None:
    for name, setting in SETTINGS["offline_data"].items():
        assert setting.note, name
        given = {name: setting.default}
        BCConfig().offline_data(**given)
