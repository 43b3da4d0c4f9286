"""RLlib's `Algorithm` as a view of Corral's, and the algorithms and configs that Corral serves."""

from __future__ import annotations

import functools
import importlib
import inspect
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np

from corral.algorithms.off_policy import OffPolicyConfig
from corral.algorithms.ppo import PPOConfig as NativePPOConfig
from corral.compat.rllib import checkpoints, metrics
from corral.compat.rllib.adapted_modules import DefaultRLModule, view_module
from corral.compat.rllib.batch_infos import BatchInfos
from corral.compat.rllib.column_views import ESTIMATES
from corral.compat.rllib.config import AlgorithmConfig
from corral.compat.rllib.learner_connectors import LearnerConnectors, make_pipeline
from corral.compat.rllib.learner_groups import LearnerGroup, view_learner
from corral.compat.rllib.missing import find
from corral.compat.rllib.model_config import settings_of_default
from corral.compat.rllib.module_changes import add_module, module_states, remove_module, set_module_states
from corral.compat.rllib.module_files import check_files
from corral.compat.rllib.modules import RLModuleSpec
from corral.compat.rllib.native import algorithm_name, to_native
from corral.compat.rllib.overrides import check_overrides, note_originals, overrides
from corral.compat.rllib.own_algorithm import OwnConfig
from corral.compat.rllib.policy_views import Policy, state_from_list, view_policy
from corral.compat.rllib.results import add_missing, add_rllib_keys
from corral.compat.rllib.runners import Callbacks, EnvRunner, EnvRunnerGroup, RunnerWithoutEnv, view_group, view_runner
from corral.core.paths import resolve_path
from corral.core.places import place_of
from corral.errors import ConfigError, CorralError
from corral.exploration.epsilon import DISCRETE
from corral.runs.checkpoint.directory import check_free

_MOST_BATCHES = 256  # of which an asynchronous algorithm keeps the infos


class Checkpoint:
    """Where a checkpoint is, as Ray describes it.

    Attributes:
        path: Its directory.
    """

    def __init__(self, path: str) -> None:
        """Keep the path."""
        self.path = path

    def to_directory(self, path: Any = None) -> str:
        """Return the directory."""
        return self.path

    def __str__(self) -> str:
        return self.path

    def __fspath__(self) -> str:
        return self.path


class TrainingResult:
    """What `Algorithm.save` returns.

    Attributes:
        checkpoint: Where the checkpoint is.
        metrics: The latest result.
    """

    def __init__(self, checkpoint: Checkpoint, metrics: dict[str, Any]) -> None:
        """Keep both."""
        self.checkpoint, self.metrics = checkpoint, metrics

    def __repr__(self) -> str:
        return f"TrainingResult(checkpoint=Checkpoint(path={self.checkpoint.path}))"

    def __fspath__(self) -> str:
        return self.checkpoint.path


class Algorithm:
    """An algorithm with RLlib's interface; what is not RLlib's is Corral's.

    Args:
        config: A config, or a dict of settings.
        env: The env, in place of the config's.
        logger_creator: Not used.

    Attributes:
        config: RLlib's config.
        native: Corral's algorithm.
        restored: Indices of runners that were replaced and that no call of `restore_env_runners` has returned: of
            training, and of evaluation (True); noted for classes that override it.
        restored_at: Iterations and seconds of the checkpoint from which the algorithm continued.
        evaluation_recorder: What records evaluation rounds; `None` before the first one that is recorded.
    """

    ALGORITHM: ClassVar[str] = ""

    def __init__(
        self, config: AlgorithmConfig | Mapping[str, Any] | None = None, env: Any = None, logger_creator: Any = None
    ) -> None:
        """Build Corral's algorithm."""
        default: AlgorithmConfig = self.get_default_config()
        if isinstance(config, type(default)):
            config = config.copy(copy_frozen=False)
        else:  # a dict, or a config without the settings of this algorithm
            config = default.update_from_dict(config.to_dict() if isinstance(config, AlgorithmConfig) else config or {})
        if env is not None:
            config.environment(env)
        check_overrides(type(self), config)
        config.algo_class = type(self)
        self.config = config
        self._counters: dict[str, Any] = defaultdict(int)
        self._latest_result: dict[str, Any] = {}
        self._free = ""  # the directory that `save` has checked
        self.restored: dict[bool, list[int]] = {False: [], True: []}
        self.restored_at = (0, 0.0)
        self.evaluation_recorder: Any = None
        self.native: Any = None
        try:
            self.setup(config)
            if self.native is None:
                raise ConfigError(f"{type(self).__name__}.setup: call super().setup(config) first.")
        except BaseException:
            built: Any = self.native
            if getattr(built, "_stage", "") == "running":  # else it has ended what it had
                built.stop()
            raise
        config.freeze()

    def setup(self, config: AlgorithmConfig) -> None:
        """Build Corral's algorithm; a subclass may make more parts after `super().setup(config)`.

        Args:
            config: The config of this algorithm.
        """
        native = to_native(config)
        make_viewed(algorithm_name(config) or type(self).__name__, native)(native, self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "native":
            raise AttributeError(name)
        if isinstance(getattr(type(self), name, None), property):
            return object.__getattribute__(self, name)  # it raised; raise its error again
        return find(self.native, "Algorithm", name)

    @classmethod
    def get_default_config(cls) -> Any:
        """Return the config with the defaults of this algorithm."""
        config = CONFIGS.get(cls.ALGORITHM, AlgorithmConfig)()
        config.algo_class = cls
        return config

    @classmethod
    def default_resource_request(cls, config: AlgorithmConfig | Mapping[str, Any]) -> Any:
        """Return the resources that a trial of Ray Tune reserves.

        Args:
            config: A config, or a dict of settings.
        """
        return importlib.import_module(f"{__package__}.tune").request_resources(cls, config)

    # Parts.

    @property
    def metrics(self) -> metrics.MetricsLogger:
        """The logger of the algorithm."""
        return metrics.as_rllib(self.native.metrics)

    @property
    def iteration(self) -> int:
        """Finished iterations."""
        return int(self.native.training_iteration)

    @property
    def callbacks(self) -> Callbacks:
        """The instances of the user's callback classes in this process."""
        return Callbacks.of(self.native._callbacks)

    @functools.cached_property
    def logdir(self) -> str:
        """A directory for files of the user; Corral writes nothing there, and makes it when it is asked for."""
        return tempfile.mkdtemp(prefix=f"{type(self).__name__}_")

    @property
    def evaluation_config(self) -> AlgorithmConfig | None:
        """The config of the evaluation runners, which is frozen."""
        found = self.config.get_evaluation_config_object()
        return None if found is None else found.freeze()

    @property
    def env_to_module_connector(self) -> Any:
        """The connectors from env to module: of the embedded runner, or new ones for the spaces of the runners."""
        if (native := self.native.env_runner) is not None:
            return view_runner(native).connectors[0]
        return self.config.build_env_to_module_connector(spaces=self.env_runner_group.get_spaces())

    @property
    def module_to_env_connector(self) -> Any:
        """The connectors from module to env: of the embedded runner, or new ones for the spaces of the runners."""
        if (native := self.native.env_runner) is not None:
            return view_runner(native).connectors[1]
        return self.config.build_module_to_env_connector(spaces=self.env_runner_group.get_spaces())

    def get_config(self) -> AlgorithmConfig:
        """Return the config."""
        return self.config

    @property
    def eval_env_runner(self) -> EnvRunner | None:
        """The embedded evaluation runner, or `None`."""
        group = self.eval_env_runner_group
        return None if group is None else group.local_env_runner

    @property
    def env_runner(self) -> EnvRunner | RunnerWithoutEnv:
        """The embedded runner; if runners are in other processes, an object with the modules and without an env."""
        native = self.native.env_runner
        return RunnerWithoutEnv(self) if native is None else view_runner(native)

    @property
    def env_runner_group(self) -> EnvRunnerGroup:
        """The runners."""
        return view_group(self.native.env_runner_group, self.native)

    workers = env_runner_group

    @property
    def learner_group(self) -> LearnerGroup:
        """The learners."""
        return LearnerGroup(self.native)

    @property
    def eval_env_runner_group(self) -> EnvRunnerGroup | None:
        """The evaluation runners, or `None`."""
        native = self.native.eval_env_runner_group
        return None if native is None else view_group(native, self.native)

    evaluation_workers = eval_env_runner_group

    @property
    def local_replay_buffer(self) -> Any:
        """The replay buffer of an algorithm that has one; of several modules, the first one's.

        Raises:
            UnknownAttributeError: It has none.
        """
        buffers = getattr(self.native, "replay_buffers", {})
        return next(iter(buffers.values())) if len(buffers) > 1 else self.native.local_replay_buffer

    def get_module(self, module_id: str = "default_policy") -> Any:
        """Return a module of RLlib: the user's own one, or a view of a default module."""
        view = view_module(self.native.get_module(module_id))
        if isinstance(view, DefaultRLModule):
            view.model_config = settings_of_default(self.config, module_id)
            view.spec = self.native.env_runner_group.module_specs[module_id]
        return view

    # Training.

    def train(self) -> dict[str, Any]:
        """Run `step`, then `log_result` with its result, and return the result.

        Raises:
            CorralError: `step` of a subclass returned no dict.
        """
        result = self.step()
        if not isinstance(result, dict):
            raise CorralError(f"{type(self).__name__}.step returned {result!r:.80}: return a dict of results.")
        if overrides(self, "step"):  # it may have made a dict of its own
            result.setdefault("training_iteration", self.iteration)
            add_rllib_keys(result, self.config, self.native)
        self.log_result(result)
        self._latest_result = result
        return result

    def step(self) -> dict[str, Any]:
        """Run one iteration, and return its result with RLlib's keys."""
        started = time.perf_counter()
        result = self.native.train()
        result["time_this_iter_s"] = time.perf_counter() - started
        add_missing(result, self.metrics.added.reduce())
        return add_rllib_keys(result, self.config, self.native)

    def log_result(self, result: dict[str, Any]) -> None:
        """Fire `on_train_result`, if a subclass changes the result after the iteration; otherwise it has fired."""
        self.native.fire_late(result)

    def evaluate(self, parallel_train_future: Any = None) -> dict[str, Any]:
        """Play an evaluation round, and return its metrics."""
        self._before_evaluate()
        found = dict(self.native.own_evaluate())
        return add_rllib_keys({"evaluation": found})["evaluation"]  # type: ignore[no-any-return]

    def _before_evaluate(self) -> None:
        """Do nothing; a subclass may prepare a round."""

    @staticmethod
    def validate_env(env: Any, env_context: Any) -> None:
        """Do nothing; a subclass may raise for a sub-env that samples for training.

        Args:
            env: The env as its class or function made it.
            env_context: Its config and indices.
        """

    def training_step(self) -> None:
        """Sample and learn once, and keep what the learners report."""
        self.native.log_learner_results(self.native.train_once())

    def stop(self) -> None:
        """Call `cleanup`, and end all workers, whatever it does."""
        try:
            self.cleanup()
        finally:
            self.native.stop()

    def cleanup(self) -> None:
        """End all workers."""
        self.native.stop()

    def reset_config(self, new_config: Mapping[str, Any]) -> bool:
        """Return False: the algorithm cannot take another config. A subclass may, for trials of Tune."""
        return False

    def restore_env_runners(self, group: Any = None) -> list[int]:
        """Replace the runners that have failed, and return the indices of those that became ready.

        A subclass that overrides it is called before each training step and each evaluation round. Runners that were
        replaced since the last call are among the indices.
        """
        native = self.native.env_runner_group if group is None else group._native
        found: list[int] = native.restore_runners()
        noted = self.restored[native is not self.native.env_runner_group]
        found, noted[:] = sorted({*found, *noted}), []
        return found

    restore_workers = restore_env_runners

    # Checkpoints.

    def save(self, checkpoint_dir: Any = None) -> TrainingResult:
        """Call `save_checkpoint` with a directory, and return where it is.

        Raises:
            ConfigError: `save_checkpoint` of a subclass returned a dict, or another path.
        """
        directory = _new_directory() if checkpoint_dir is None else _directory(checkpoint_dir)
        path = str(directory.absolute())
        if overrides(self, "save_checkpoint"):  # it can write files of its own, as in RLlib
            check_free(place_of(directory))
            directory.mkdir(parents=True, exist_ok=True)
            self._free = path
        found = self.save_checkpoint(path)
        if found is not None and str(found) != path:
            raise ConfigError(
                f"{type(self).__name__}.save_checkpoint returned {found!r:.80}: write files into checkpoint_dir and "
                "return None, or override get_state and set_state."
            )
        return TrainingResult(Checkpoint(path), self._latest_result)

    def save_checkpoint(self, checkpoint_dir: Any) -> str | None:
        """Write a checkpoint; other files in the directory stay. A subclass may return the directory."""
        if str(checkpoint_dir) == self._free and not overrides(self, "save_to_path"):
            checkpoints.save(self, Path(checkpoint_dir), is_free=True)
        else:
            self.save_to_path(checkpoint_dir)
        return None

    def save_to_path(self, path: Any = None, **settings: Any) -> str:
        """Write a checkpoint, and return its directory; `None` is a new directory for temporary files."""
        check_files(settings)
        return str(checkpoints.save(self, _new_directory() if path is None else _directory(path)))

    def restore_from_path(self, path: Any, component: str | None = None, **settings: Any) -> None:
        """Continue from a checkpoint, or load the weights of one module.

        Args:
            path: The checkpoint; with `component`, the directory of a module in a checkpoint.
            component: `learner_group/learner/rl_module/<module id>`, the module of this algorithm to load; without the
                id all modules that the directory has.
            **settings: `filesystem`, which can only be the one of this machine; others are not used.

        Raises:
            CheckpointError: There is no such checkpoint or module, or it does not fit.
        """
        check_files(settings)
        if component is None:
            self.native.restore_from_path(_directory(path))
            self.restored_at = (self.iteration, self.native.report.time_total_s)
            return
        checkpoints.load_modules(self.native, _directory(path), component, checkpoints.MODULES)

    def restore(self, checkpoint_path: Any) -> None:
        """Call `load_checkpoint` with the directory of a checkpoint, or of what `save` returned."""
        self.load_checkpoint(str(_directory(checkpoint_path)))

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        """Continue from a checkpoint."""
        self.restore_from_path(checkpoint_dir)

    @classmethod
    def from_checkpoint(
        cls,
        path: Any = None,
        checkpoint: Any = None,
        *,
        policy_ids: Collection[str] | None = None,
        policy_mapping_fn: Any = None,
        policies_to_train: Any = None,
        **settings: Any,
    ) -> Any:
        """Return the algorithm of a checkpoint, continued from it.

        Args:
            path: The checkpoint.
            checkpoint: The same, by its older name.
            policy_ids: Ids of the modules to keep; `None` keeps all.
            policy_mapping_fn: The mapping of agents from now on; `None` keeps the saved one.
            policies_to_train: Which modules learn from now on; `None` keeps the saved choice.
            **settings: `filesystem`, which can only be the one of this machine; others are not used.

        Raises:
            CheckpointError: There is no checkpoint.
            ConfigError: The config holds a value that no file can name, or agents are mapped to a module that is not
                kept.
        """
        check_files(settings)
        directory = _directory(path if path is not None else checkpoint)
        config = checkpoints.load_config(directory, CONFIGS)
        given = {"policy_mapping_fn": policy_mapping_fn, "policies_to_train": policies_to_train}
        config.multi_agent(**{name: value for name, value in given.items() if value is not None})
        algorithm = config.build_algo()
        try:
            algorithm.restore_from_path(directory)
            for module_id in set(algorithm.native.module_ids) - set(policy_ids or algorithm.native.module_ids):
                algorithm.remove_module(module_id)
        except BaseException:
            algorithm.stop()
            raise
        return algorithm

    # Acting.

    def compute_single_action(
        self,
        observation: Any = None,
        state: Any = None,
        *,
        policy_id: str | None = None,
        explore: bool | None = None,
        full_fetch: bool = False,
        **settings: Any,
    ) -> Any:
        """Return an action for one observation.

        Args:
            observation: Observation as the env gives it.
            state: State of a module with memory: a tree, or a list such as `[h, c]`, as on the older stack. The next
                state has the same form.
            policy_id: Id of the module.
            explore: Whether to explore; `None` is the setting `explore`.
            full_fetch: Whether to return action, state and a dict of further outputs, which is empty.
            **settings: Previous action and reward, info, and other arguments of the older stack, which change nothing.

        Returns:
            The action; with a state, or with `full_fetch`, a tuple of the action, the next state and a dict.

        Raises:
            ConfigError: `unsquash_action` is False: actions are in the units of the env.
        """
        self._check_units(policy_id, settings)
        if state is None or len(state) == 0:
            found = self.native.compute_single_action(observation, explore=explore, policy_id=policy_id)
            return (found, [], {}) if full_fetch else found
        if not isinstance(state, (list, tuple)):
            found = self.native.compute_single_action(observation, state, explore=explore, policy_id=policy_id)
            return (*found, {})
        module = self.native.get_module(self.native.modules.resolve_id(policy_id))
        full = state_from_list(state, module)
        action, full = self.native.compute_single_action(observation, full, explore=explore, policy_id=policy_id)
        return action, list(full.values())[: len(state)], {}

    def compute_actions(
        self, observations: Any, state: Any = None, *, full_fetch: bool = False, **settings: Any
    ) -> Any:
        """Return actions for observations, by key if they are a dict by key; see `compute_single_action`."""
        self._check_units(settings.get("policy_id"), settings)
        if not isinstance(observations, Mapping):
            allowed = {name: settings[name] for name in ("explore", "policy_id") if name in settings}
            actions = self.native.compute_actions(observations, state=state, **allowed)
            return (actions, [], {}) if full_fetch else actions
        found = {
            key: self.compute_single_action(obs, (state or {}).get(key), full_fetch=full_fetch, **settings)
            for key, obs in observations.items()
        }
        if not full_fetch and state is None:
            return found
        return tuple({key: parts[i] for key, parts in found.items()} for i in range(3))

    def _check_units(self, policy_id: str | None, settings: Mapping[str, Any]) -> None:
        if False not in (settings.get("unsquash_action"), settings.get("unsquash_actions")):
            return
        space = self.native.get_module(self.native.modules.resolve_id(policy_id)).action_space
        if self.config.normalize_actions and not isinstance(space, DISCRETE):
            raise ConfigError(
                "unsquash_action=False: actions are in the units of the env: "
                "get_policy(policy_id).compute_single_action(obs) returns them as the module gives them."
            )

    def get_policy(self, policy_id: str = "default_policy") -> Any:
        """Return a module as a policy."""
        policy, native = view_policy(self.native.get_module(policy_id)), self.native
        exploration = native.acting_policy(policy_id).exploration
        return policy.act_with(exploration, self.config, lambda: native.num_env_steps_sampled_lifetime)

    # Modules.

    def get_weights(self, policies: Any = None) -> dict[str, Any]:
        """Return the weights by module id and name."""
        return module_states(self.native, policies)

    def set_weights(self, weights: Mapping[str, Mapping[str, Any]]) -> None:
        """Set weights by module id and name, and send them to the runners.

        Raises:
            CheckpointError: They do not fit the modules; nothing was changed.
        """
        set_module_states(self.native, weights, "set_weights")

    def get_state(self, *args: Any, **settings: Any) -> dict[str, Any]:
        """Return a copy of the whole state, which checkpoints hold; a subclass may add parts of its own.

        Args:
            *args: Not used.
            **settings: Not used.
        """
        found: dict[str, Any] = self.native.own_state()
        return found

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where the algorithm of this state was; see `set_state` of Corral's algorithm.

        Args:
            state: What `get_state` returned, or only weights by module id:
                `{"learner_group": {"learner": {"rl_module": weights}}}`.

        Raises:
            CheckpointError: The state does not fit; nothing was changed.
        """
        part: Any = state
        for name in checkpoints.MODULES.parts:
            if not (isinstance(part, Mapping) and part.keys() == {name}):
                self.native.set_own_state(state)
                return
            part = part[name]
        set_module_states(self.native, part, "set_state")

    def add_module(
        self,
        module_id: str,
        module_spec: RLModuleSpec | None = None,
        *,
        config_overrides: Any = None,
        new_agent_to_module_mapping_fn: Any = None,
        new_should_module_be_updated: Any = None,
        **parts: bool,
    ) -> Any:
        """Add a module to all learners and runners, and return the spec of all modules.

        Args:
            module_id: Id that no other module has.
            module_spec: What describes it; `None` is the default module.
            config_overrides: Settings in which it differs from the algorithm.
            new_agent_to_module_mapping_fn: The mapping of agents that are first observed later; `None` keeps the
                present one.
            new_should_module_be_updated: Which modules learn from now on; `None` keeps the present choice.
            **parts: `add_to_learners`, `add_to_env_runners` and `add_to_eval_env_runners`, which must be true.

        Raises:
            ConfigError: The algorithm has one agent, the id is taken, or a setting is wrong. Nothing was changed.
        """
        _refuse_parts("add_module", "add_to", parts)
        add_module(
            self,
            module_id,
            module_spec,
            config_overrides,
            policy_mapping_fn=new_agent_to_module_mapping_fn,
            policies_to_train=new_should_module_be_updated,
        )
        return self.config.rl_module_spec

    def remove_module(
        self,
        module_id: str,
        *,
        new_agent_to_module_mapping_fn: Any = None,
        new_should_module_be_updated: Any = None,
        **parts: bool,
    ) -> Any:
        """Remove a module from all learners and runners, and return the spec of the others; see `add_module`."""
        _refuse_parts("remove_module", "remove_from", parts)
        remove_module(
            self,
            module_id,
            policy_mapping_fn=new_agent_to_module_mapping_fn,
            policies_to_train=new_should_module_be_updated,
        )
        return self.config.rl_module_spec

    def add_policy(
        self,
        policy_id: str,
        policy_cls: Any = None,
        policy: Any = None,
        *,
        observation_space: Any = None,
        action_space: Any = None,
        config: Any = None,
        policy_mapping_fn: Any = None,
        policies_to_train: Any = None,
        module_spec: RLModuleSpec | None = None,
        **settings: Any,
    ) -> Policy:
        """Add a module by the names of the older stack, and return it as a policy.

        Args:
            policy_id: Id that no other module has.
            policy_cls: `None`, or the class of what `get_policy` returns.
            policy: Only `None`.
            observation_space: Space of one observation; `None` is the space of its agents.
            action_space: Space of one action; `None` is the space of its agents.
            config: Settings in which the module differs from the algorithm.
            policy_mapping_fn: As in `add_module`.
            policies_to_train: As in `add_module`.
            module_spec: What describes the module; `None` is the default module.
            **settings: `policy_state`, the weights by name, or what holds them as `weights`; others are not used.

        Raises:
            ConfigError: As `add_module`; also for policies of your own.
        """
        if policy is not None or policy_cls not in (None, Policy):
            raise ConfigError(f"add_policy({policy_id!r}): Corral has no Policy classes: give module_spec.")
        spec = module_spec or RLModuleSpec(observation_space=observation_space, action_space=action_space)
        add_module(
            self, policy_id, spec, config, policy_mapping_fn=policy_mapping_fn, policies_to_train=policies_to_train
        )
        if (state := settings.get("policy_state")) is not None:
            set_module_states(self.native, {policy_id: state.get("weights", state)}, "add_policy(policy_state=...)")
        added: Policy = self.get_policy(policy_id)
        return added

    def remove_policy(
        self, policy_id: str = "default_policy", *, policy_mapping_fn: Any = None, policies_to_train: Any = None
    ) -> None:
        """Remove a module by the names of the older stack; see `remove_module`."""
        remove_module(self, policy_id, policy_mapping_fn=policy_mapping_fn, policies_to_train=policies_to_train)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()


def _refuse_parts(method: str, prefix: str, parts: Mapping[str, bool]) -> None:
    """Raise for a part of an algorithm that a change of its modules leaves out, or that it lacks.

    Raises:
        ConfigError: Names the part.
    """
    known = [f"{prefix}_{part}" for part in ("learners", "env_runners", "eval_env_runners")]
    for name, is_included in parts.items():
        if not is_included or name not in known:
            raise ConfigError(
                f"{method}: {name}={is_included!r}: learners and runners have the same modules: leave it out."
            )


def _new_directory() -> Path:
    """Return a new directory for temporary files, for a checkpoint without a path."""
    return Path(tempfile.mkdtemp(prefix="rllib_")) / "checkpoint"


def _directory(path: Any) -> Path:
    """Return the directory of a checkpoint from a path, a `Checkpoint`, or what `save` returned."""
    path = getattr(path, "checkpoint", path)
    return resolve_path(getattr(path, "path", path), "a checkpoint of an RLlib script")


class _TakesEstimates:
    """An algorithm whose callbacks of trajectories may look at advantages, and change them."""

    def advantages(self, rollout: Any, values: Any, next_values: Any, **settings: Any) -> Any:
        """Return the estimates of the algorithm, or the ones that callbacks looked at."""
        algorithm: Any = super()
        found = algorithm.advantages(rollout, values, next_values, **settings)
        for column, name in zip((*found, values), ESTIMATES.values(), strict=True):
            if name in rollout:
                np.copyto(column, rollout[name], where=np.isfinite(rollout[name]))
        return found


class _Connects:
    """An algorithm whose rollouts pass the connectors of learners."""

    config: Any
    learner_connectors: LearnerConnectors | None = None

    def sample(self, num_timesteps: int) -> Any:
        """Return rollouts behind the connectors of learners."""
        algorithm: Any = super()
        rollouts = algorithm.sample(num_timesteps)
        return rollouts if self.config.sample_async else self._connect(rollouts)

    def sample_ahead(self, num_timesteps: int, *, wait: bool = True) -> Any:
        """Return rollouts behind the connectors of learners."""
        algorithm: Any = super()
        return self._connect(algorithm.sample_ahead(num_timesteps, wait=wait))

    def _connect(self, rollouts: Any) -> Any:
        return rollouts if self.learner_connectors is None or not rollouts else self.learner_connectors(rollouts)


class _MovesTargetsOnce:
    """An algorithm whose target networks move at the end of an iteration that learns from recorded data."""

    def training_step(self) -> Any:
        """Take the updates of an iteration, move target networks that are due, and return the metrics."""
        algorithm: Any = super()
        results = algorithm.training_step()
        for module_id in results:
            algorithm.update_target_if_due(module_id)
        return results

    def update_target_if_due(self, module_id: str) -> None:
        """Wait for the end of the iteration."""


class _ReadsInfos:
    """An algorithm whose runners hand out infos if connectors of learners or callbacks of batches may read them."""

    config: Any
    _callbacks: Any
    batch_infos: BatchInfos | None = None

    @property
    def READS_INFOS(self) -> bool:
        """Whether rollouts need infos. Replay buffers and learners in other processes have none."""
        config, algorithm = self.config, cast(Any, super())
        shows = config.samples and not (config.num_learners or isinstance(config, (OffPolicyConfig, OwnConfig)))
        if shows and "on_learn_on_batch" in self._callbacks.heard:
            self.batch_infos = BatchInfos(1 if isinstance(config, NativePPOConfig) else _MOST_BATCHES)
        reads: bool = algorithm.READS_INFOS
        return reads or self.batch_infos is not None or config.origin.learner_connector is not None

    def group_trained(self, rollouts: Any) -> dict[str, list[Any]]:
        """Return the rollouts of each module that learns, with the infos that callbacks of batches may read."""
        algorithm: Any = super()
        grouped: dict[str, list[Any]] = algorithm.group_trained(rollouts)
        if self.batch_infos is not None:
            self.batch_infos.add([rollout for each in grouped.values() for rollout in each])
        return grouped

    def stop(self) -> None:
        """End all workers, and forget the infos of batches."""
        algorithm: Any = super()
        algorithm.stop()
        if self.batch_infos is not None:
            self.batch_infos.clear()


class _AsksView:
    """An algorithm whose view has the methods of the script's class, which call the ones of Corral's algorithm."""

    view: Algorithm
    metrics: Any
    _callbacks: Any
    report: Any
    _fires_late = False

    def get_state(self) -> dict[str, Any]:
        """Return the state, with what the class of the view adds."""
        return self.view.get_state() if overrides(self.view, "get_state") else self.own_state()

    def own_state(self) -> dict[str, Any]:
        """Return the state of Corral's algorithm."""
        algorithm: Any = super()
        found: dict[str, Any] = algorithm.get_state()
        return found

    def set_state(self, state: Any) -> None:
        """Continue from a state, as the class of the view does it."""
        (self.view.set_state if overrides(self.view, "set_state") else self.set_own_state)(state)

    def set_own_state(self, state: Any) -> None:
        """Continue from a state of Corral's algorithm."""
        algorithm: Any = super()
        algorithm.set_state(state)

    def evaluate(self) -> Any:
        """Play an evaluation round as the class of the view does it, and return its metrics."""
        view = self.view
        if overrides(view, "restore_env_runners") and (group := view.eval_env_runner_group) is not None:
            view.restore_env_runners(group)
        if not overrides(view, "evaluate", "_before_evaluate"):
            return self.own_evaluate()
        takes_future = "parallel_train_future" in inspect.signature(view.evaluate).parameters
        return view.evaluate(parallel_train_future=None) if takes_future else view.evaluate()

    def own_evaluate(self) -> Any:
        """Play an evaluation round, and return its metrics."""
        algorithm: Any = super()
        return algorithm.evaluate()

    def _fire_train_result(self, result: dict[str, Any], start: float) -> None:
        """Fire the event, or let the view do it when its class has completed the result."""
        self._fires_late = overrides(self.view, "step", "log_result")
        if not self._fires_late:
            algorithm: Any = super()
            algorithm._fire_train_result(result, start)

    def fire_late(self, result: dict[str, Any]) -> None:
        """Fire the event of the iteration if it has not fired, with the result that the class of the view made."""
        if self._fires_late:
            self._fires_late = False
            with self.report.taking_new_metrics(result):
                self._callbacks.fire("on_train_result", algorithm=self, metrics_logger=self.metrics, result=result)
            self.metrics.start_period()


def make_viewed(name: str, config: Any) -> Any:
    """Return Corral's algorithm class for a config, whose instances know their view."""
    base: Any = config.algo_class
    more: list[type] = [_TakesEstimates] if isinstance(config, NativePPOConfig) else []
    more += [_MovesTargetsOnce] if isinstance(config, OffPolicyConfig) and not config.samples else []
    bases = (_Connects, _ReadsInfos, _AsksView, *more, base)

    class Viewed(*bases):  # type: ignore[misc]
        """An algorithm that keeps its view, and runs the `training_step` of a view that overrides it."""

        num_env_steps_sampled_lifetime: int

        def __init__(self, config: Any, view: Algorithm) -> None:
            self.view, view.native = view, self
            super().__init__(config)

        def setup(self) -> None:
            """Make what the algorithm and the connectors of learners need."""
            super().setup()
            if (pipeline := make_pipeline(self.config.origin, self)) is not None:
                self.learner_connectors = LearnerConnectors(pipeline, self)
                view_learner(self.learner_group.learner_here, self.config.origin)._pipeline = pipeline

        def send_weights(self) -> None:
            """Send the weights to the runners, also if they were changed by hand since the last update."""
            self.weights.send_anyway()

        def train_once(self) -> Any:
            """Return what the training step of Corral's algorithm returns."""
            return super().training_step()

        def training_step(self) -> Any:
            """Run the training step of the view's class, or otherwise Corral's, and return the metrics."""
            if overrides(self.view, "restore_env_runners"):
                self.view.restore_env_runners(self.view.env_runner_group)
                if self.config.evaluation_parallel_to_training and self.view.eval_env_runner_group is not None:
                    self.view.restore_env_runners(self.view.eval_env_runner_group)
            if not overrides(self.view, "training_step"):
                return self.train_once()
            self.view.training_step()
            sampled = self.metrics.peek(("env_runners", "num_env_steps_sampled_lifetime"), 0)
            self.num_env_steps_sampled_lifetime = max(self.num_env_steps_sampled_lifetime, int(sampled))
            return {}

    Viewed.__name__ = Viewed.__qualname__ = name
    return Viewed


note_originals(Algorithm)


class PPO(Algorithm):
    """RLlib's PPO on Corral's."""

    ALGORITHM = "PPO"


class PPOConfig(AlgorithmConfig):
    """RLlib's settings of PPO."""

    ALGORITHM = "PPO"

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class or PPO)


class IMPALA(Algorithm):
    """RLlib's IMPALA on Corral's."""

    ALGORITHM = "IMPALA"
    _aggregator_actor_manager: ClassVar[None] = None  # as in RLlib without aggregators


class IMPALAConfig(AlgorithmConfig):
    """RLlib's settings of IMPALA."""

    ALGORITHM = "IMPALA"

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class or IMPALA)


class APPO(IMPALA):
    """RLlib's APPO on Corral's."""

    ALGORITHM = "APPO"


class APPOConfig(IMPALAConfig):
    """RLlib's settings of APPO."""

    ALGORITHM = "APPO"

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class or APPO)


class DQN(Algorithm):
    """RLlib's DQN on Corral's."""

    ALGORITHM = "DQN"


class DQNConfig(AlgorithmConfig):
    """RLlib's settings of DQN."""

    ALGORITHM = "DQN"

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class or DQN)


class SAC(Algorithm):
    """RLlib's SAC on Corral's."""

    ALGORITHM = "SAC"


class SACConfig(AlgorithmConfig):
    """RLlib's settings of SAC."""

    ALGORITHM = "SAC"

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class or SAC)


class TQC(SAC):
    """RLlib's TQC on Corral's."""

    ALGORITHM = "TQC"


class TQCConfig(SACConfig):
    """RLlib's settings of TQC."""

    ALGORITHM = "TQC"

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class or TQC)


class MARWIL(Algorithm):
    """RLlib's MARWIL on Corral's."""

    ALGORITHM = "MARWIL"


class MARWILConfig(AlgorithmConfig):
    """RLlib's settings of MARWIL."""

    ALGORITHM = "MARWIL"

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class or MARWIL)


class BC(MARWIL):
    """RLlib's BC on Corral's."""

    ALGORITHM = "BC"


class BCConfig(MARWILConfig):
    """RLlib's settings of BC."""

    ALGORITHM = "BC"

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class or BC)


class CQL(SAC):
    """RLlib's CQL on Corral's."""

    ALGORITHM = "CQL"


class CQLConfig(SACConfig):
    """RLlib's settings of CQL."""

    ALGORITHM = "CQL"

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class or CQL)


class IQL(MARWIL):
    """RLlib's IQL on Corral's."""

    ALGORITHM = "IQL"


class IQLConfig(MARWILConfig):
    """RLlib's settings of IQL."""

    ALGORITHM = "IQL"

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class or IQL)


class DreamerV3(Algorithm):
    """RLlib's DreamerV3 on Corral's."""

    ALGORITHM = "DreamerV3"


class DreamerV3Config(AlgorithmConfig):
    """RLlib's settings of DreamerV3."""

    ALGORITHM = "DreamerV3"

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class or DreamerV3)

    @property
    def total_train_batch_size(self) -> int:
        """Env steps in a batch, over all learners."""
        return int(self.batch_size_B * self.batch_length_T)

    @property
    def batch_size_B_per_learner(self) -> int:
        """Sequences in a batch of one learner."""
        return int(self.batch_size_B // max(1, self.num_learners))


CONFIGS: dict[str, type[AlgorithmConfig]] = {
    "PPO": PPOConfig,
    "APPO": APPOConfig,
    "IMPALA": IMPALAConfig,
    "DQN": DQNConfig,
    "SAC": SACConfig,
    "TQC": TQCConfig,
    "MARWIL": MARWILConfig,
    "BC": BCConfig,
    "CQL": CQLConfig,
    "IQL": IQLConfig,
    "DreamerV3": DreamerV3Config,
}
"""Config classes by the name of the algorithm."""
