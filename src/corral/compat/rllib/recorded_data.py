"""RLlib's recorded data: what `offline_data` of its configs means, and `OfflinePreLearner`, a base of user code."""

from __future__ import annotations

import glob
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.algorithms.recording import describe_recording
from corral.compat.rllib.constants import Columns
from corral.compat.rllib.episodes import SingleAgentEpisode
from corral.compat.rllib.recorded_files import Steps, rllib_parquet_source, unpack, whole_episodes
from corral.core.paths import resolve_location
from corral.core.tree import leaves, map_tree
from corral.data.offline.episode_rows import EpisodeRows, as_flags
from corral.data.offline.parquet import as_numpy
from corral.data.offline.recorder import Recorder
from corral.data.offline.source import ParquetPlace
from corral.data.offline.sources import files_of, open_source
from corral.errors import ConfigError, DataError
from corral.runners.evaluation.statistics import summarize_episodes
from corral.runners.requests import SampleRequest

if TYPE_CHECKING:
    from corral.compat.rllib.config import AlgorithmConfig

SCHEMA = {
    name: name
    for name in (
        *(Columns.EPS_ID, Columns.AGENT_ID, Columns.MODULE_ID, Columns.OBS, Columns.ACTIONS, Columns.REWARDS),
        *(Columns.INFOS, Columns.NEXT_OBS, Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.T),
        *("agent_index", "dones", "unroll_id"),
    )
}
"""Names of the columns of tables, by RLlib's names."""

_METHODS = ("read_parquet", "read_json")
_FOR_SPEED = {"concurrency", "memory", "num_cpus", "num_gpus", "override_num_blocks", "parallelism", "ray_remote_args"}
_DEFAULT_MAX_ROWS = 100_000
_PIECE = 1000  # env steps of a part of a round of evaluation that lasts as long as training


# Reading.


def input_of(config: AlgorithmConfig) -> Any:
    """Return Corral's `input_` for a config of an algorithm that learns from recorded data.

    Raises:
        ConfigError: A setting has a value that Corral lacks, or no file matches a path.
    """
    given = config.input_
    if given == "dataset":
        given = config.input_config.get("paths", config.input_config.get("path"))
    if given is None or given == "sampler":
        return None
    _check_reading(config, given)
    if not (paths := _paths(given)):
        return given
    found = [each for path in paths for each in _matches(path)]
    schema = dict(config.input_read_schema)
    if config.ignore_final_observation:
        schema[Columns.NEXT_OBS] = schema.get(Columns.OBS, Columns.OBS)
    prelearner = config.prelearner_class
    if schema or prelearner is not None:
        return RecordedFiles(tuple(found), schema, prelearner and partial(_make_prelearner, prelearner, config))
    return found


def _check_reading(config: AlgorithmConfig, given: Any) -> None:
    """Refuse values of `input_`, and of the settings that say how it is read, which Corral lacks."""
    if config.input_read_method not in _METHODS:
        raise ConfigError(
            f"input_read_method={config.input_read_method!r:.60}: Corral reads Parquet files and RLlib's JSON files: "
            f"use one of {', '.join(_METHODS)}, or give input_ a function that returns an iterator over arrays."
        )
    if others := set(config.input_read_method_kwargs) - _FOR_SPEED:
        raise ConfigError(f"input_read_method_kwargs: {sorted(others)} are not in Corral: leave them out.")
    if callable(given) and not _takes_nothing(given):
        raise ConfigError(
            f"input_={given!r:.80}: functions that make an InputReader are not served: give paths, or a function "
            "without arguments that returns an iterator over dicts of arrays."
        )
    if isinstance(given, Mapping) and all(isinstance(part, (int, float)) for part in given.values()):
        raise ConfigError(f"input_={given!r:.80}: Corral draws evenly from all steps: give a list of the paths.")
    if config.ignore_final_observation and config.ALGORITHM != "BC":
        raise ConfigError(
            "ignore_final_observation=True: values of final observations are learned from: leave it out, or use "
            "BCConfig."
        )
    if config.prelearner_class is not None:
        check_prelearner(config.prelearner_class)


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:
        pass  # some functions of C have no signature
    return True


def _paths(given: Any) -> list[str]:
    """Return the paths in a value of `input_`; none if it is something else."""
    parts = given if isinstance(given, (list, tuple)) else [given]
    return [fspath(part) for part in parts] if all(isinstance(part, (str, PathLike)) for part in parts) else []


def _matches(path: str) -> list[str]:
    """Return the paths that match a path with `*`, `?` or `[`; other paths as they are.

    Raises:
        ConfigError: No path matches.
    """
    if not glob.has_magic(path) or path.startswith("minari:"):
        return [path]
    location = resolve_location(path)
    if isinstance(location, str):
        from fsspec.core import url_to_fs

        files, root = url_to_fs(location)
        found = sorted(files.unstrip_protocol(each) for each in files.glob(root))
    else:
        found = sorted(glob.glob(str(location), recursive=True))
    if not found:
        raise ConfigError(f"input_={path!r}: no file matches.")
    return found


@dataclass(frozen=True)
class RecordedFiles:
    """Files of RLlib that are read in another way than their columns say; called, it returns an iterator over episodes.

    Attributes:
        paths: Directories, files and URLs.
        schema: Names of columns in tables, by RLlib's names.
        make_prelearner: Function that returns what makes episodes of columns; `None` for tables of RLlib's form.
    """

    paths: tuple[str, ...]
    schema: dict[str, str] = field(default_factory=dict)
    make_prelearner: Callable[[], Any] | None = None

    def __call__(self) -> Iterator[EpisodeRows]:
        """Yield the episodes in parts.

        Raises:
            DataError: Files are damaged, or of a form that is not known.
        """
        for path in self.paths:
            yield from self._parts(path)

    def _parts(self, path: str) -> Iterator[EpisodeRows]:
        place, names = files_of(path)
        files = [ParquetPlace(place, name) for name in names if name.endswith(".parquet")]
        if files and self.make_prelearner is not None:
            return whole_episodes(_mapped_steps(files, self.make_prelearner()))
        if not files or files[0].description() is not None:
            return open_source(path).parts()
        return rllib_parquet_source(files, self.schema).parts()


# OfflinePreLearner.


class OfflinePreLearner:
    """Makes episodes of the columns of tables. A subclass may override `_map_to_episodes`, and nothing else.

    Args:
        config: RLlib's config.
        spaces: Observation space and action space, as the config says them.
        module_state: Not used.
        **settings: Not used.

    Attributes:
        config: RLlib's config.
        observation_space: Space of one observation, or `None`.
        action_space: Space of one action, or `None`.
    """

    def __init__(self, *, config: Any, spaces: Any = None, module_state: Any = None, **settings: Any) -> None:
        """Keep config and spaces."""
        self.config = config
        pair: tuple[Any, Any] = spaces or (None, None)
        self.observation_space, self.action_space = pair

    def _map_to_episodes(self, batch: Mapping[str, Any], to_numpy: bool = False, **settings: Any) -> dict[str, Any]:
        """Return an episode of one step for each row of a table.

        Args:
            batch: Columns `[S, ...]` by name.
            to_numpy: Not used.
            **settings: Not used.

        Raises:
            DataError: A flag is neither bool nor 0 or 1.
        """
        schema = {**SCHEMA, **self.config.input_read_schema}
        size = len(batch[schema[Columns.REWARDS]])

        def entry(name: str, row: int, default: Any = None) -> Any:
            column = batch.get(schema[name])
            value = default if column is None else column[row]
            return unpack(value, schema[name]) if isinstance(value, str) and name != Columns.EPS_ID else value

        def flags(*names: str) -> Any:
            for name in names:
                column = [entry(name, row) for row in range(size)]
                if any(flag is not None for flag in column):
                    return as_flags(np.array(column, object), schema[name], "prelearner_class")
            return np.zeros(size, np.bool_)

        terminated, truncated = flags(Columns.TERMINATEDS, "dones"), flags(Columns.TRUNCATEDS)
        episodes = []
        for row in range(size):
            obs = entry(Columns.OBS, row)
            identity = entry(Columns.EPS_ID, row)
            episodes.append(
                SingleAgentEpisode(
                    id_=None if identity is None else str(identity),
                    observations=[obs, entry(Columns.NEXT_OBS, row, obs)],
                    actions=[entry(Columns.ACTIONS, row)],
                    rewards=[entry(Columns.REWARDS, row)],
                    terminated=terminated[row],
                    truncated=truncated[row],
                    len_lookback_buffer=0,
                )
            )
        return {"episodes": episodes}


def check_prelearner(cls: Any) -> None:
    """Refuse a class that is no `OfflinePreLearner`, or that overrides what Corral does not call.

    Raises:
        ValueError: It is no subclass.
        ConfigError: It overrides another method.
    """
    if not (isinstance(cls, type) and issubclass(cls, OfflinePreLearner)):
        raise ValueError(f"prelearner_class={cls!r:.80} is no subclass of OfflinePreLearner.")
    for name in ("__call__", "_map_sample_batch_to_episode", "_postprocess_and_sample", "_validate_episodes"):
        if any(name in vars(base) for base in cls.__mro__):
            raise ConfigError(
                f"prelearner_class: Corral does not call {cls.__name__}.{name}, and draws batches from all steps "
                "itself: override _map_to_episodes."
            )


def _make_prelearner(cls: type[OfflinePreLearner], config: Any) -> OfflinePreLearner:
    return cls(config=config, spaces=(config.observation_space, config.action_space))


def _mapped_steps(files: Sequence[ParquetPlace], prelearner: OfflinePreLearner) -> Iterator[Steps]:
    """Yield the steps of the episodes that a prelearner makes of tables."""
    for file in files:
        batch = file.use(partial(_columns_of_table, place=file.path))
        mapped = _map_to_episodes(prelearner, batch)
        episodes = [episode for episode in mapped if len(episode)]
        if episodes:
            yield Steps(_columns_of_episodes(episodes), file.path)


def _map_to_episodes(prelearner: OfflinePreLearner, batch: Mapping[str, Any]) -> list[Any]:
    """Return the episodes that a prelearner makes of columns, with the arguments that its method names."""
    method = prelearner._map_to_episodes
    known = {
        "is_multi_agent": False,
        "batch": batch,
        "schema": {**SCHEMA, **prelearner.config.input_read_schema},
        "to_numpy": False,
        "input_compress_columns": list(prelearner.config.input_compress_columns or ()),
        "observation_space": prelearner.observation_space,
        "action_space": prelearner.action_space,
    }
    found = method(**{name: known[name] for name in inspect.signature(method).parameters if name in known})
    if not isinstance(found, Mapping) or "episodes" not in found:
        raise DataError(
            f"prelearner_class: {type(prelearner).__name__}._map_to_episodes returned {found!r:.80}: it must return "
            "{'episodes': [...]}."
        )
    return list(found["episodes"])


def _columns_of_table(file: Any, place: str) -> dict[str, Any]:
    """Return the columns of a table as arrays: of numbers where they are numbers, else of objects."""
    table = file.read()
    found: dict[str, Any] = {}
    for name in table.column_names:
        column = table[name]
        try:
            if hasattr(column.type, "extension_name"):  # an array of fixed shape, as Ray Data writes it
                column = column.cast(column.type.storage_type)
            found[name] = as_numpy(column, name, place)
        except DataError:
            values = column.to_pylist()
            found[name] = np.empty(len(values), object)
            found[name][:] = values
    return found


def _columns_of_episodes(episodes: Sequence[Any]) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {name: [] for name in ("obs", "next_obs", "actions", "rewards", "eps_id")}
    ends: dict[str, list[Any]] = {"terminated": [], "truncated": []}
    for number, episode in enumerate(episodes):
        obs, size = _listed(episode.get_observations()), len(episode)
        columns["obs"] += obs[:-1]
        columns["next_obs"] += obs[1:]
        columns["actions"] += _listed(episode.get_actions())
        columns["rewards"] += _listed(episode.get_rewards())
        columns["eps_id"] += [str(number if episode.id_ is None else episode.id_)] * size
        for name, flags in ends.items():
            flags += [False] * (size - 1) + [getattr(episode, f"is_{name}")]
    stacked = {
        name: map_tree(lambda *leaf: np.stack([np.asarray(part) for part in leaf]), *entries)
        for name, entries in columns.items()
    }
    return stacked | {name: np.array(flags, object) for name, flags in ends.items()}  # which `Steps` checks


def _listed(given: Any) -> list[Any]:
    """Return the entries of a list, or of a tree of arrays."""
    if isinstance(given, list):
        return given
    size = len(leaves(given)[0])
    return [map_tree(lambda leaf, row=row: leaf[row], given) for row in range(size)]


# Recording.


def output_of(config: AlgorithmConfig) -> dict[str, Any]:
    """Return Corral's settings for what a config of RLlib records."""
    if config.output is None:
        return {}
    return {
        "output": fspath(config.output),
        "output_max_rows_per_file": config.output_max_rows_per_file or _DEFAULT_MAX_ROWS,
    }


def records_evaluation(config: AlgorithmConfig) -> bool:
    """Return whether evaluation rounds are recorded, as RLlib does it for one agent."""
    return config.output is not None and not config.is_multi_agent and not config.custom_evaluation_function


class EvaluationRecorder(Recorder):
    """Records the complete episodes of evaluation rounds, and says what a round was like.

    They are in the directory `evaluation` of the directory `output`: training may write there at the same time.
    """

    def __init__(self, algorithm: Any) -> None:
        """Find the directory; nothing is written yet."""
        settings, config = output_of(algorithm.config.origin), algorithm.config
        super().__init__(
            f"{settings['output'].rstrip('/')}/evaluation",
            *describe_recording(algorithm),
            max_rows_per_file=settings["output_max_rows_per_file"],
            with_logp=config.evaluation_config.get("explore", config.explore),  # the distribution acts only then
        )
        self._returns: list[float] = []
        self._lens: list[int] = []

    def complete_episode(self, rows: EpisodeRows, agent_id: str) -> None:
        """Take a complete episode, and note its return and length."""
        super().complete_episode(rows, agent_id)
        self._returns.append(float(rows.rewards.sum()))
        self._lens.append(rows.num_steps)

    def end_round(self) -> dict[str, Any]:
        """Write what is complete, and return the statistics of the episodes since the last call."""
        self.flush()
        returns, lens, self._returns, self._lens = self._returns, self._lens, [], []
        return {**summarize_episodes(returns, lens), "episode_returns": returns, "episode_lens": lens}


def play_and_record(algorithm: Any, env_runner_group: Any) -> dict[str, Any]:
    """Play an evaluation round, record its complete episodes, and return its metrics; a custom evaluation function."""
    view, config = algorithm.view, algorithm.config
    recorder = view.evaluation_recorder = view.evaluation_recorder or EvaluationRecorder(algorithm)
    duration, by_episodes = config.evaluation_duration, config.evaluation_duration_unit == "episodes"
    lasts = duration == "auto"  # as long as training
    wanted: dict[str, Any] = {
        "num_episodes" if by_episodes and not lasts else "num_timesteps": _PIECE if lasts else duration
    }
    force_reset = by_episodes or config.evaluation_force_reset_envs_before_iteration
    while True:
        request = SampleRequest(
            **wanted, timestep=algorithm.num_env_steps_sampled_lifetime, force_reset=bool(force_reset)
        )
        recorder.add(env_runner_group.sample(request))
        if not lasts or algorithm.evaluator.training_done:
            return {"env_runners": recorder.end_round()}
        force_reset = False
