"""RLlib's learner group as a view of Corral's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from corral.compat.rllib import checkpoints
from corral.compat.rllib.adapted_modules import joint_view
from corral.compat.rllib.learner import Learner
from corral.compat.rllib.missing import find
from corral.compat.rllib.module_changes import module_states, set_module_states
from corral.compat.rllib.module_files import check_files
from corral.compat.rllib.own_learner import OwnLearner
from corral.core.metrics.logger import MetricsLogger
from corral.core.paths import resolve_path
from corral.core.schedules import schedule_value
from corral.errors import CheckpointError, ConfigError
from corral.learners.learner import Learner as NativeLearner
from corral.learners.settings import UpdateSettings
from corral.runs.checkpoint import codec

MODULES = Path("learner/rl_module")
"""Where the directories of modules are in the directory of a learner group."""

_STATE = "state.msgpack"


class LearnerGroup:
    """A view of the learners of an algorithm; everything else is Corral's.

    Args:
        algorithm: Corral's algorithm.
    """

    def __init__(self, algorithm: Any) -> None:
        """Keep the algorithm."""
        self._algorithm = algorithm
        self._native = algorithm.learner_group

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self._native, "LearnerGroup", name)

    # Files.

    def save_to_path(self, path: Any = None, **settings: Any) -> str:
        """Write the state of the learners, with a directory for each module; return the directory.

        `None` is a new directory for temporary files.
        """
        check_files(settings)
        path = tempfile.mkdtemp(prefix="learner_group_") if path is None else path
        directory = resolve_path(path, "the learners").absolute()
        checkpoints.write_modules(self._algorithm, directory / MODULES)
        (directory / _STATE).write_bytes(codec.encode(self._native.get_state()))
        return str(directory)

    def restore_from_path(self, path: Any, *, component: str | None = None, **settings: Any) -> None:
        """Continue from what `save_to_path` wrote, or load the weights of modules.

        Args:
            path: The directory; with `component`, the directory of this component.
            component: `learner/rl_module` for all modules that the directory has, or `learner/rl_module/<module id>`.
            **settings: `filesystem`, which can only be the one of this machine; others are not used.

        Raises:
            CheckpointError: There is nothing to continue from, or it does not fit.
        """
        check_files(settings)
        if component is not None:
            checkpoints.load_modules(self._algorithm, path, component, MODULES)
            return
        file = resolve_path(path, "the learners") / _STATE
        if not file.is_file():
            raise CheckpointError(
                f"{path} holds no {_STATE}: give what learner_group.save_to_path() returned; checkpoints of algorithms "
                "are restored by algo.restore_from_path(path)."
            )
        self._native.set_state(codec.decode(file.read_bytes()))
        self._algorithm.send_weights()

    def load_module_state(
        self,
        *,
        multi_rl_module_ckpt_dir: Any = None,
        modules_to_load: Any = None,
        rl_module_ckpt_dirs: Mapping[str, Any] | None = None,
    ) -> None:
        """Load the weights of modules.

        Args:
            multi_rl_module_ckpt_dir: Directory with a directory for each module.
            modules_to_load: Ids of the modules to load from it; `None` is all that it has.
            rl_module_ckpt_dirs: Directories of single modules by id, which are loaded after it.

        Raises:
            ValueError: There is nothing to load.
            CheckpointError: There is no such module, or its weights do not fit.
        """
        if not (multi_rl_module_ckpt_dir or rl_module_ckpt_dirs):
            raise ValueError("load_module_state: give multi_rl_module_ckpt_dir or rl_module_ckpt_dirs.")
        if modules_to_load and not multi_rl_module_ckpt_dir:
            raise ValueError("load_module_state: modules_to_load needs multi_rl_module_ckpt_dir.")
        parts: dict[str, Any] = {}
        if multi_rl_module_ckpt_dir and modules_to_load is None:
            checkpoints.load_modules(self._algorithm, multi_rl_module_ckpt_dir, str(MODULES), MODULES)
        elif multi_rl_module_ckpt_dir:
            modules = resolve_path(multi_rl_module_ckpt_dir, "the modules")
            parts = {name: modules / name for name in modules_to_load}
        for module_id, path in {**parts, **(rl_module_ckpt_dirs or {})}.items():
            checkpoints.load_modules(self._algorithm, path, str(MODULES / module_id), MODULES)

    def shutdown(self) -> None:
        """Do nothing: the algorithm ends its learners in `stop()`."""

    @property
    def _learner(self) -> Learner | None:
        """The learner of this process; `None` if learners run in other processes."""
        return None if self.is_remote else view_learner(self._native.learner_here, self._algorithm.config.origin)

    @property
    def is_local(self) -> bool:
        """Whether the learner is in this process."""
        return self._native.remote is None

    @property
    def is_remote(self) -> bool:
        """Whether the learners are in other processes."""
        return not self.is_local

    def __len__(self) -> int:
        return int(self._native.num_learners)

    def get_weights(self, module_ids: Any = None, **settings: Any) -> dict[str, Any]:
        """Return the weights by module id and name."""
        return module_states(self._algorithm, module_ids)

    def set_weights(self, weights: Mapping[str, Mapping[str, Any]]) -> None:
        """Set weights by module id and name, in the runners too.

        Raises:
            CheckpointError: They do not fit the modules; nothing was changed.
        """
        set_module_states(self._algorithm, weights, "learner_group.set_weights")

    def foreach_learner(self, func: Callable[..., Any], **settings: Any) -> list[Any]:
        """Return `func(learner)` of each learner, each with a method `get()`.

        If learners are in other processes, `func` is also called for the connectors of learners, which are in this one.
        """
        config = self._algorithm.config.origin
        answers = [Answer(value) for value in self._native.foreach_learner(_call_with_view, func, config)]
        if self.is_remote and (connectors := self._algorithm.learner_connectors) is not None:
            with suppress(_OnlyConnectorsError):
                func(_OnlyConnectors(connectors.pipeline))
        return answers

    def update(
        self,
        *,
        episodes: Sequence[Any] | None = None,
        batch: Any = None,
        timesteps: Mapping[str, Any] | None = None,
        minibatch_size: int | None = None,
        num_epochs: int | None = None,
        shuffle_batch_per_epoch: bool | None = None,
        **settings: Any,
    ) -> list[Any]:
        """Learn from episodes, and return the metrics of each learner, for `MetricsLogger.aggregate`.

        Args:
            episodes: Episodes; each learner gets a part of them.
            batch: Columns by module id, in place of episodes.
            timesteps: Env steps so far, for schedules.
            minibatch_size: Rows of a gradient step; `None` is the setting.
            num_epochs: Passes over the batch; `None` is the setting.
            shuffle_batch_per_epoch: Whether rows are shuffled; `None` is the setting.
            **settings: Not used.

        Raises:
            ConfigError: There is nothing to learn from, or the algorithm has a training step of Corral.
        """
        if episodes is None and batch is None:
            raise ConfigError("learner_group.update: give episodes, or a batch.")
        timestep = int(next(iter((timesteps or {}).values()), 0) or 0)
        changes = {"num_epochs": num_epochs, "minibatch_size": minibatch_size, "shuffle": shuffle_batch_per_epoch}
        given = {name: value for name, value in changes.items() if value is not None}
        updates = {
            module_id: _settings(self._algorithm.module_config(module_id), timestep, given)
            for module_id in self._native.learning_ids
        }
        shards: list[Any] = [batch] * len(self) if episodes is None else split_episodes(episodes, len(self))
        answers = self._native.foreach_learner(_learn, updates, episodes is None, each=shards)
        for results, _ in answers:
            for values in results.values():
                self._algorithm.report.count_rows(values)
        return [parts for _, parts in answers]

    def update_from_episodes(self, episodes: Sequence[Any], **settings: Any) -> list[Any]:
        """Learn from episodes, and return the metrics: an older name of `update`."""
        return self.update(episodes=episodes, **settings)

    def update_from_batch(self, batch: Any, **settings: Any) -> list[Any]:
        """Learn from columns by module id, and return the metrics: an older name of `update`."""
        return self.update(batch=batch, **settings)


def _settings(config: Any, timestep: int, given: Mapping[str, Any]) -> UpdateSettings:
    found = UpdateSettings.from_config(config, lr=schedule_value(config.lr, timestep), timestep=timestep)
    return UpdateSettings(**{**vars(found), **given})


def split_episodes(episodes: Sequence[Any], num_parts: int) -> list[list[Any]]:
    """Return the episodes in parts of about equal numbers of steps."""
    parts: list[list[Any]] = [[] for _ in range(num_parts)]
    sizes = [0] * num_parts
    for episode in sorted(episodes, key=len, reverse=num_parts > 1):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(episode)
        sizes[smallest] += len(episode)
    return [list(episodes)] if num_parts == 1 else parts


def _learn(learner: Any, data: Any, updates: Mapping[str, UpdateSettings], is_batch: bool) -> Any:
    """Learn from episodes or a batch in one learner; return results, and the same for `MetricsLogger.aggregate`."""
    if not isinstance(learner, OwnLearner):
        raise ConfigError(
            "learner_group.update: the losses of PPO and the other algorithms need what their steps "
            "compute: call super().training_step(), or give a learner_class with compute_loss_for_module."
        )
    results = learner.learn_from_batch(data, updates) if is_batch else learner.learn_from_episodes(data, updates)
    logger = MetricsLogger()
    for module_id, numbers in results.items():
        for name, value in numbers.items():
            if isinstance(value, (int, float)):
                logger.log_reserved({(module_id, name): [float(value)]})
    return results, logger.take()


class Answer:
    """What a learner returned.

    Attributes:
        ok: True.
    """

    ok = True

    def __init__(self, value: Any) -> None:
        """Keep the value."""
        self._value = value

    def get(self) -> Any:
        """Return the value."""
        return self._value


class _OnlyConnectorsError(AttributeError):
    """An attribute was asked for that only learners have."""


class _OnlyConnectors:
    """Stands for a learner, of which it has the connectors only.

    Args:
        pipeline: The connectors.
    """

    def __init__(self, pipeline: Any) -> None:
        """Keep the connectors."""
        self._learner_connector = pipeline

    def __getattr__(self, name: str) -> Any:
        raise _OnlyConnectorsError(name)


def view_learner(native: NativeLearner, config: Any = None) -> Learner:
    """Return the learner of RLlib for a learner of Corral."""
    if isinstance(native, OwnLearner):
        return native.view
    return native.view_as(_make_view, config)


def _make_view(native: NativeLearner, config: Any) -> Learner:
    view: Learner = config.learner_class(config=config, module=joint_view(native.modules))
    view._native, view._device = native, native.device
    return view


def _call_with_view(native: Any, func: Callable[..., Any], config: Any) -> Any:
    return func(view_learner(native, config))
