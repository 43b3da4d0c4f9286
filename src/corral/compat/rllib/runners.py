"""RLlib's env runners and their groups, as views of Corral's."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Sequence
from typing import Any

from corral.compat.rllib import metrics
from corral.compat.rllib.adapted_modules import view_module
from corral.compat.rllib.constants import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from corral.compat.rllib.envs import env_settings
from corral.compat.rllib.missing import find
from corral.compat.rllib.modules import MultiRLModule
from corral.compat.rllib.pipelines import EnvToModulePipeline, ModuleToEnvPipeline
from corral.compat.rllib.policy_views import view_policy
from corral.engines.lazy import LazyEngine
from corral.errors import ConfigError
from corral.runners import runner as native_runners
from corral.runners import runner_group as native_groups

_current: list[Any] = []  # the latest runner of this process that user code was given


class EnvRunner:
    """A view of a runner of Corral with RLlib's names; everything else is Corral's.

    Args:
        native: The runner; `None` makes one from `config`.
        config: RLlib's config.
        worker_index: 0, or from 1 as in a group.
        **settings: Other arguments of RLlib's runners, which change nothing.

    Attributes:
        config: The runner's own copy of RLlib's config. Settings of the env, and no others, can change before
            `make_env`.

    Raises:
        ConfigError: The config cannot be translated.
    """

    def __init__(self, native: Any = None, *, config: Any = None, worker_index: int = 0, **settings: Any) -> None:
        """Keep the runner, or make it."""
        if native is None:
            native = _make_runner(config, worker_index)
            native.keep_view(EnvRunner, self)
        self._native = native
        self.use_config(native.config.origin)

    def use_config(self, config: Any) -> None:
        """Show another config of RLlib, such as one with other modules, as the runner's own; nothing else changes."""
        config = config.get_evaluation_config_object() if self._native.config.in_evaluation else config
        self.config = config.copy_for_runner()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self._native, "EnvRunner", name)

    @property
    def callbacks(self) -> Callbacks:
        """The instances of the user's callback classes."""
        return Callbacks.of(self._native.callbacks)

    _callbacks = callbacks

    @property
    def metrics(self) -> metrics.MetricsLogger:
        """The logger of the runner."""
        return metrics.as_rllib(self._native.metrics)

    def sample(self, **request: Any) -> list[Any]:
        """Step the env, and return the list of episodes and chunks.

        Without arguments: `rollout_fragment_length` steps of each sub-env, or whole episodes.

        Raises:
            AssertionError: Both numbers are given, as in RLlib.
        """
        if request.get("num_timesteps") is not None and request.get("num_episodes") is not None:
            raise AssertionError("sample: give num_timesteps or num_episodes, not both.")
        if request.get("num_timesteps") is None and request.get("num_episodes") is None:
            if self.config.batch_mode == "complete_episodes":
                request["num_episodes"] = self._native.num_envs
            else:
                length = self.config.get_rollout_fragment_length(self._native.worker_index)
                request["num_timesteps"] = length * self._native.num_envs
        found: list[Any] = self._native.sample(**request).episodes()
        return found

    def get_metrics(self) -> Any:
        """Return the metrics since the last call, for `MetricsLogger.aggregate`."""
        return self._native.get_metrics()[0]

    @property
    def connectors(self) -> list[Any]:
        """The connectors from the env to the module, and the ones from the module to the env."""
        return [self._native.view_as(pipeline) for pipeline in (EnvToModulePipeline, ModuleToEnvPipeline)]

    def get_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Return pairs of the spaces of observations and actions: of the env, of a sub-env, and of each module."""
        env, actors = self._native.env, self._native.actors
        one = env.single_observation_space, env.single_action_space
        whole = getattr(env, "observation_space", one[0]), getattr(env, "action_space", one[1])
        modules = {name: (each.module.observation_space, each.module.action_space) for name, each in actors.items()}
        return {INPUT_ENV_SPACES: whole, INPUT_ENV_SINGLE_SPACES: one, **modules}

    @property
    def spaces(self) -> dict[str, tuple[Any, Any]]:
        """What `get_spaces` returns."""
        return self.get_spaces()

    def get_weights(self, modules: Any = None) -> dict[str, Any]:
        """Return the weights by module id and name.

        Args:
            modules: Ids of modules; `None` is all.
        """
        actors = self._native.actors
        return {name: view_module(actors[name].module).get_state() for name in modules or actors}

    @property
    def num_workers(self) -> int:
        """Number of runners in addition to the embedded one."""
        return int(self._native.config.num_env_runners)

    def assert_healthy(self) -> None:
        """Check that there are sub-envs and modules.

        Raises:
            AssertionError: There are none.
        """
        assert self._native.env is not None and self._native.actors

    @property
    def _env_to_module(self) -> Any:
        """The connectors from env to module."""
        return self.connectors[0]

    @property
    def _module_to_env(self) -> Any:
        """The connectors from module to env."""
        return self.connectors[1]

    def make_env(self) -> None:
        """Make the env again, with the settings of `config`."""
        self._native.config.environment(**env_settings(self.config))
        self._native.make_env()

    @property
    def module(self) -> Any:
        """The module of RLlib; with several agents a `MultiRLModule`."""
        actors = self._native.actors
        modules = {module_id: view_module(actor.module) for module_id, actor in actors.items()}
        return MultiRLModule(modules) if self._native.config.is_multi_agent else next(iter(modules.values()))

    @property
    def policy_config(self) -> Any:
        """The config, by its older name."""
        return self.config

    @property
    def policy_map(self) -> dict[str, Any]:
        """The modules by id, as policies."""
        return {
            module_id: view_policy(actor.module).act_with(actor.exploration, self.config, lambda: self._native.timestep)
            for module_id, actor in self._native.actors.items()
        }

    def foreach_policy(self, func: Callable[..., Any]) -> list[Any]:
        """Return `func(policy, policy_id)` for each module."""
        return [func(policy, policy_id) for policy_id, policy in self.policy_map.items()]

    def get_policy(self, policy_id: str = "default_policy") -> Any:
        """Return a module as a policy."""
        return self.policy_map[policy_id]

    def foreach_env(self, func: Callable[[Any], Any]) -> list[Any]:
        """Return `func(sub_env)` for each sub-env."""
        return list(self._native.foreach_env(func))

    def apply(self, func: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        """Return `func(runner, ...)`."""
        return func(self, *args, **settings)


class RunnerWithoutEnv:
    """What an algorithm has in its own process when its runners are in other ones: the modules, and no env.

    Args:
        algorithm: RLlib's view of the algorithm.

    Attributes:
        config: RLlib's config.
        env: `None`.
        worker_index: 0.
    """

    env = None
    worker_index = 0

    def __init__(self, algorithm: Any) -> None:
        """Keep the algorithm."""
        self._algorithm, self.config = algorithm, algorithm.config

    @property
    def module(self) -> Any:
        """The module with the weights of the learners; with several agents a `MultiRLModule`."""
        native = self._algorithm.native
        modules = {module_id: self._algorithm.get_module(module_id) for module_id in native.module_ids}
        return MultiRLModule(modules) if native.config.is_multi_agent else next(iter(modules.values()))


def _make_runner(config: Any, worker_index: int) -> Any:
    return native_runners.EnvRunner(_to_native(config), worker_index)


def _to_native(config: Any) -> Any:
    """Return Corral's config for a config of RLlib, which may have no algorithm."""
    algorithm, native = (importlib.import_module(f"{__package__}.{name}") for name in ("algorithm", "native"))
    if not config.ALGORITHM:
        config = algorithm.PPOConfig().update_from_dict(config.to_dict())
    return native.to_native(config)


SingleAgentEnvRunner = MultiAgentEnvRunner = RolloutWorker = EnvRunner


def view_runner(native: Any) -> EnvRunner:
    """Return the view of a runner, always the same one."""
    view: EnvRunner = native.view_as(EnvRunner)
    _current[:] = [view]
    return view


def get_global_worker() -> EnvRunner | None:
    """Return the runner of this process, or `None`."""
    return _current[0] if _current else None


def _call_with_view(func: Callable[..., Any], native: Any, /, **settings: Any) -> Any:
    result = func(view_runner(native), **settings)
    return list(result) if isinstance(result, types.GeneratorType) else result  # a generator cannot leave its process


class Callbacks(list[Any]):
    """Instances of callbacks; other attributes are the attributes of the first instance, as on RLlib's older stack."""

    @classmethod
    def of(cls, dispatcher: Any) -> Callbacks:
        """Return the instances of the user's classes, or one that does nothing if there are none."""
        callbacks = importlib.import_module(f"{__package__}.callbacks")
        found = [instance.user for instance in dispatcher.instances if hasattr(instance, "user")]
        return cls(found or [callbacks.RLlibCallback()])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self[0], name)


def _make_group(config: Any) -> Any:
    """Return a group of Corral with one runner in this process, for a config of RLlib that may have no algorithm."""
    if config is None or config.num_env_runners:
        raise ConfigError(
            "EnvRunnerGroup: a group without an algorithm has one runner in this process: give a config with "
            "num_env_runners=0; or use config.build_algo().env_runner_group."
        )
    native = _to_native(config)
    return native_groups.EnvRunnerGroup(native, LazyEngine(native.engine_name))


def view_group(native: Any, algorithm: Any = None) -> EnvRunnerGroup:
    """Return the view of a group, always the same one, with Corral's algorithm where that is known."""
    view: EnvRunnerGroup = native.view_as(EnvRunnerGroup)
    view._algorithm = view._algorithm if algorithm is None else algorithm
    return view


class EnvRunnerGroup:
    """A view of a group of runners of Corral with RLlib's names; everything else is Corral's.

    Args:
        native: The group; `None` makes one runner in this process from `config`.
        algorithm: Corral's algorithm, whose weights `sync_weights` sends.
        config: RLlib's config.
        **settings: Other arguments of RLlib's groups, which change nothing.

    Raises:
        ConfigError: The config cannot be translated, or needs runners in other processes, which an algorithm has.
    """

    def __init__(self, native: Any = None, algorithm: Any = None, *, config: Any = None, **settings: Any) -> None:
        """Keep both, or make the group."""
        self._native, self._algorithm = _make_group(config) if native is None else native, algorithm

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self._native, "EnvRunnerGroup", name)

    def get_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Return what `EnvRunner.get_spaces` returns in one of the runners."""
        ids = None if self.local_env_runner is not None else self.healthy_worker_ids()[:1]
        found: dict[str, tuple[Any, Any]] = self.foreach_env_runner("get_spaces", remote_worker_ids=ids)[0]
        return found

    @property
    def local_env_runner(self) -> EnvRunner | None:
        """The embedded runner, if there is one."""
        local = self._native.local_env_runner
        return None if local is None else view_runner(local)

    def local_worker(self) -> EnvRunner | None:
        """Return the embedded runner, if there is one."""
        return self.local_env_runner

    def foreach_env_runner(
        self,
        func: Any,
        *,
        kwargs: Any = None,
        local_env_runner: bool = True,
        healthy_only: bool = True,
        remote_worker_ids: Sequence[int] | None = None,
        timeout_seconds: float | None = None,
        return_obj_refs: bool = False,
        mark_healthy: bool = False,
        local_worker: bool | None = None,
    ) -> list[Any]:
        """Return `func(env_runner)`, or the result of a method by name, for each runner.

        If no runner is remote, the embedded one answers even with `local_env_runner=False`.
        """
        calls = functools.partial(_call_named, func) if isinstance(func, str) else func
        local = local_env_runner if local_worker is None else local_worker
        if not self._native.num_remote_workers:
            local = True
        found: list[Any] = self._native.foreach_env_runner(
            functools.partial(_call_with_view, calls),
            kwargs=kwargs,
            local_env_runner=local,
            remote_worker_ids=remote_worker_ids,
            timeout_seconds=timeout_seconds,
        )
        return found

    foreach_worker = foreach_env_runner

    def foreach_env_runner_with_id(self, func: Callable[..., Any], **settings: Any) -> list[Any]:
        """Return `func(worker_index, env_runner)` for each runner."""
        return self.foreach_env_runner(functools.partial(_call_with_id, func), **settings)

    foreach_worker_with_id = foreach_env_runner_with_id

    def foreach_env(self, func: Callable[[Any], Any]) -> list[list[Any]]:
        """Return, for each runner, `func(sub_env)` for each of its sub-envs."""
        found: list[list[Any]] = self._native.foreach_env(func)
        return found

    def sync_weights(self, *args: Any, **settings: Any) -> None:
        """Send the weights of the learners to the runners; the arguments change nothing.

        Raises:
            ConfigError: The group is not from `algorithm.env_runner_group`.
        """
        if self._algorithm is None:
            raise ConfigError("sync_weights: call algorithm.env_runner_group.sync_weights().")
        self._algorithm.send_weights()

    def sync_env_runner_states(self, *args: Any, **settings: Any) -> None:
        """Do nothing: Corral merges the states of transforms in every round."""

    def healthy_worker_ids(self) -> list[int]:
        """Return the indices of the runners that are alive."""
        return list(self._native.healthy_worker_ids)

    healthy_env_runner_ids = healthy_worker_ids

    def remote_workers(self) -> list[int]:
        """Return the indices of the runners that are not embedded."""
        return list(self._native.worker_indices)

    def num_remote_env_runners(self) -> int:
        """Return the number of runners that are not embedded."""
        return int(self._native.num_remote_workers)

    num_remote_workers = num_remote_env_runners

    def num_healthy_remote_env_runners(self) -> int:
        """Return the number of runners that are alive and not embedded."""
        return int(self._native.num_healthy_remote_workers)

    num_healthy_remote_workers = num_healthy_remote_env_runners

    def num_healthy_env_runners(self) -> int:
        """Return the number of runners that are alive, the embedded one included."""
        return self.num_healthy_remote_env_runners() + (self._native.local_env_runner is not None)

    num_healthy_workers = num_healthy_env_runners

    def num_remote_worker_restarts(self) -> int:
        """Return how often runners were recreated."""
        return int(self._native.num_remote_worker_restarts)

    num_remote_env_runner_restarts = num_remote_worker_restarts

    def foreach_policy(self, func: Callable[..., Any]) -> list[Any]:
        """Return `func(policy, policy_id)` for each module of each runner."""
        answers = self.foreach_env_runner(functools.partial(_call_named, "foreach_policy"), kwargs={"func": func})
        return [each for answer in answers for each in answer]


WorkerSet = EnvRunnerGroup


def _call_with_id(func: Callable[..., Any], runner: EnvRunner, /, **settings: Any) -> Any:
    return func(runner.worker_index, runner, **settings)


def _call_named(name: str, runner: EnvRunner, /, **settings: Any) -> Any:
    return getattr(runner, name)(**settings)


class BaseEnv:
    """RLlib's older view of a vector env.

    Args:
        env: The vector env.
    """

    def __init__(self, env: Any) -> None:
        """Keep the vector env."""
        self._env = env

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._env, name)

    def get_sub_environments(self) -> list[Any]:
        """Return the sub-envs, without their wrappers."""
        return [env.unwrapped for env in self._env.envs]

    get_unwrapped = get_sub_environments
