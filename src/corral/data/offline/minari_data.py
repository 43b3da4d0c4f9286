"""Recorded episodes as Minari datasets (https://minari.farama.org), which other libraries read, too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.interrupts import interruptible
from corral.core.tree import leaves, map_tree, named_leaves
from corral.data.offline.episode_rows import EpisodeRows, rows_of_steps
from corral.data.offline.parquet import Description, RecordedEpisode
from corral.data.offline.source import MINARI, Source
from corral.errors import DataError, MissingPackageError

_MANY = 20_000  # rows of the parts in which a dataset is read


def import_minari() -> Any:
    """Return the package `minari`.

    Raises:
        MissingPackageError: It is not installed.
    """
    try:
        import minari
    except ImportError as error:
        raise MissingPackageError("Minari datasets need minari: run `pip install 'corral[offline]'`.") from error
    return minari


def load_minari(dataset_id: str) -> Source:
    """Return the source of a dataset that is on this machine.

    Raises:
        DataError: There is no such dataset.
        MissingPackageError: minari is not installed.
    """
    minari = import_minari()
    try:
        return minari_source(minari.load_dataset(dataset_id))
    except (FileNotFoundError, ValueError, ImportError) as error:
        raise DataError(
            f"offline_data: the Minari dataset {dataset_id!r} cannot be read: {error} Known here: "
            f"{sorted(minari.list_local_datasets())}. `minari download {dataset_id}` downloads a dataset."
        ) from error


def minari_source(dataset: Any) -> Source:
    """Return the source of a `minari.MinariDataset`."""
    spec = dataset.spec
    name = f"{MINARI}{spec.dataset_id}"

    @interruptible
    def parts() -> Iterator[EpisodeRows]:
        waiting: list[EpisodeRows] = []
        for episode in dataset.iterate_episodes():
            waiting.append(_rows(episode, name))
            _check_last_step(dataset, episode, name)
            if sum(map(len, waiting)) >= _MANY:
                yield EpisodeRows.join(waiting)
                waiting = []
        if waiting:
            yield EpisodeRows.join(waiting)

    # Minari's numbers of steps are not those that it reads of episodes without a final observation.
    spaces = {DEFAULT_MODULE_ID: (spec.observation_space, spec.action_space)}
    return Source(parts, name, spaces)


def _rows(episode: Any, name: str) -> EpisodeRows:
    """Return one episode as rows; one that no flag ends counts as truncated.

    Some datasets lack the final observation. Nothing reads it in an episode that terminated, and any other one loses
    its last step, as arrays without `next_obs` do.
    """
    obs = map_tree(np.asarray, episode.observations)
    size, place = len(episode.rewards), f"{name}, episode {episode.id}"
    lengths = {len(leaf) for leaf in leaves(obs)}
    if lengths not in ({size}, {size + 1}):
        raise DataError(f"{place} has {size} rewards, and observations of the lengths {sorted(lengths)}.")
    has_final = lengths == {size + 1}
    return rows_of_steps(
        map_tree(lambda leaf: leaf[:size], obs),
        map_tree(np.asarray, episode.actions),
        episode.rewards,
        episode.terminations,
        episode.truncations,
        next_obs=map_tree(lambda leaf: leaf[1:], obs) if has_final else None,
        place=place,
    )


def _check_last_step(dataset: Any, episode: Any, name: str) -> None:
    """Refuse an episode of which Minari left out the last step, and whether it terminated.

    Minari's Arrow format keeps an entry more of each column than there are steps, and leaves out the last one, which
    is a step if there is no final observation.

    Raises:
        DataError: Minari knows of more steps.
    """
    size = len(episode.rewards)
    if not (np.any(episode.terminations[-1:]) or np.any(episode.truncations[-1:])):
        [metadata] = dataset.storage.get_episode_metadata([episode.id])
        if metadata.get("total_steps", size) > size:
            raise DataError(
                f"{name}, episode {episode.id} has no final observation, and Minari leaves out the last step of such "
                "episodes in its Arrow format: write the dataset with final observations, or with data_format='hdf5'."
            )


class MinariWriter:
    """Writes episodes to one dataset on this machine.

    Args:
        dataset_id: Id of the dataset, such as `"cartpole/expert-v0"`.

    Raises:
        DataError: There is a dataset of this id.
        MissingPackageError: minari is not installed.
    """

    def __init__(self, dataset_id: str) -> None:
        """Check the id."""
        minari = import_minari()
        if dataset_id in minari.list_local_datasets():
            raise DataError(
                f"offline_data: there is a Minari dataset {dataset_id!r} already: choose another id, or remove it with "
                f"`minari delete {dataset_id}`."
            )
        self._dataset_id, self._dataset = dataset_id, None

    def write(self, episodes: Sequence[RecordedEpisode], description: Description) -> None:
        """Add episodes to the dataset, which the first call makes.

        Raises:
            DataError: The episodes are of several agents, or the id is malformed.
        """
        minari = import_minari()
        if len(description.spaces) > 1 or any(episode.agent_id != episodes[0].agent_id for episode in episodes):
            raise DataError("offline_data: a Minari dataset holds the episodes of one agent: record Parquet files.")
        buffers = [_buffer(minari, episode.rows) for episode in episodes]
        if self._dataset is not None:
            self._dataset.storage.update_episodes(buffers)
            return
        [(observation_space, action_space)] = description.spaces.values()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of metadata that a user may add later
                self._dataset = minari.create_dataset_from_buffers(
                    self._dataset_id,
                    buffers,
                    env=_registered(description.env),
                    observation_space=observation_space,
                    action_space=action_space,
                    algorithm_name=description.algo,
                    description="Recorded with Corral.",
                    data_format="arrow",
                    jpeg_encoding=False,  # which loses pixels
                )
        except ValueError as error:
            raise DataError(f"offline_data: Minari dataset {self._dataset_id!r}: {error}") from error


def _registered(env: str) -> str | None:
    """Return the id of a registered env, from which Minari recovers the env, or `None`."""
    import gymnasium

    return env if env in gymnasium.registry else None


def _buffer(minari: Any, rows: EpisodeRows) -> Any:
    steps = slice(0, -1)
    infos = {}
    if any(rows.infos.values()):
        names = {
            name
            for info in rows.infos.values()
            for name, value in named_leaves(info)
            if isinstance(value, (bool, int, float, np.number))
        }
        flat = [dict(named_leaves(rows.infos.get(row, {}))) for row in range(len(rows))]
        infos = {name: [float(info.get(name, np.nan)) for info in flat] for name in sorted(names)}
    return minari.data_collector.EpisodeBuffer(
        observations=rows.obs,
        actions=map_tree(lambda leaf: leaf[steps], rows.actions),
        rewards=rows.rewards[steps],
        terminations=rows.terminated[steps],
        truncations=rows.truncated[steps],
        infos=infos,
    )
