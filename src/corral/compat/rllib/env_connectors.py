"""Connectors of the user's between env and module: a wrapper of each sub-env calls them.

The wrapper keeps an episode of its own, because observations before and after a connector may be of different spaces.
What a connector writes to the latest observation and reward is what the env returns; so rollouts, modules and metrics
get it. All sub-envs of a runner share the connectors of the first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from corral.callbacks.callback import Callback
from corral.compat.rllib import metrics, space_helpers
from corral.compat.rllib.connectors import ConnectorV2, is_transform
from corral.compat.rllib.constants import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES, Columns
from corral.compat.rllib.default_connectors import AddObservationsFromEpisodesToBatch, DefaultConnector
from corral.compat.rllib.episodes import MultiAgentEpisode, SingleAgentEpisode
from corral.compat.rllib.pipelines import EnvToModulePipeline, ModuleToEnvPipeline, make_connectors
from corral.core.tree import leaves, map_tree
from corral.envs.multi_agent_env import possible_agents
from corral.envs.step_checks import check_step
from corral.envs.vector import EnvContext, make_vector_env
from corral.errors import ConfigError

# Episodes whose observations change their space.


class _Held:
    """An observation of any form, as one entry of a column."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _value(held: Any) -> Any:
    return (held.item() if isinstance(held, np.ndarray) else held).value


class _Values(list[Any]):
    """A list that arrays of positions index, too."""

    def __getitem__(self, where: Any) -> Any:
        return [self[int(i)] for i in where] if isinstance(where, np.ndarray) else super().__getitem__(where)


class ConnectedEpisode(SingleAgentEpisode):
    """The episode that connectors get while the env is stepped; several observations are a list."""

    __slots__ = ()

    @property
    def is_numpy(self) -> bool:
        """False: observations are a list."""
        return False

    def get_observations(self, indices: Any = None, *, fill: Any = None, **settings: Any) -> Any:
        """Return the observations at `indices`; see Corral's episodes."""
        blank = None if fill is None else _Held(self._blank(fill))
        found = super().get_observations(indices, fill=blank, **settings)
        is_one = isinstance(indices, (int, np.integer))
        return _value(found) if is_one else _Values(_value(each) for each in found)

    def _blank(self, fill: Any) -> Any:
        return map_tree(lambda leaf: np.full_like(leaf, fill), self.get_observations(-1))

    def set_observations(self, *, new_data: Any, at_indices: Any = None, **settings: Any) -> None:
        """Overwrite the observations at `at_indices` by others of any space."""
        if isinstance(at_indices, (int, np.integer)):
            held: Any = _Held(new_data)
        else:
            rows = new_data if isinstance(new_data, list) else space_helpers.unbatch(new_data)
            held = np.empty(len(rows), object)
            held[:] = [_Held(row) for row in rows]
        super().set_observations(new_data=held, at_indices=at_indices, **settings)


class ConnectedMultiAgentEpisode(MultiAgentEpisode):
    """The episode of several agents that connectors get while the env is stepped."""

    agent_class = ConnectedEpisode

    @property
    def is_numpy(self) -> bool:
        """False: observations are lists."""
        return False


# The env.


class EnvOfConnectors:
    """What the function of connectors gets as `env`: a sub-env with the attributes of a vector env.

    Args:
        env: The sub-env.
        is_multi_agent: Whether its spaces are by agent.
    """

    def __init__(self, env: Any, is_multi_agent: bool) -> None:
        """Find the spaces."""
        self._env, self.envs, self.num_envs = env, [env], 1
        self.single_observation_space, self.single_action_space = _spaces_of(env, is_multi_agent)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._env, name)


def _spaces_of(env: Any, is_multi_agent: bool) -> tuple[Any, Any]:
    if not is_multi_agent:
        return env.observation_space, env.action_space
    inner = env.unwrapped
    found = [getattr(env, name, None) or {} for name in ("observation_spaces", "action_spaces")]
    ask = inner.get_observation_space, inner.get_action_space
    observations, actions = (
        gym.spaces.Dict({agent: known.get(agent) or of_agent(agent) for agent in possible_agents(env)})  # type: ignore[misc]
        for known, of_agent in zip(found, ask, strict=True)
    )
    return observations, actions


class LazyEnv:
    """An `EnvOfConnectors` that is made when the function first looks at it.

    Args:
        settings: Settings of the env: `env` and `env_config`.
        is_multi_agent: Whether its spaces are by agent.
    """

    def __init__(self, settings: Mapping[str, Any], is_multi_agent: bool) -> None:
        """Make nothing yet."""
        self._settings, self._is_multi_agent = settings, is_multi_agent
        self._made: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._find(), name)

    def _find(self) -> EnvOfConnectors:
        if self._made is None:
            context = EnvContext(self._settings["env_config"])
            vector = make_vector_env(self._settings["env"], context, num_envs=1, vectorization="sync", check=False)
            env = vector.envs[0]  # type: ignore[attr-defined]
            while type(env).__module__.startswith("corral.envs.") and hasattr(env, "seats"):
                env = env.env
            self._made = vector, EnvOfConnectors(env, self._is_multi_agent)
        found: EnvOfConnectors = self._made[1]
        return found

    def close(self) -> None:
        """Close the env, if there is one."""
        if self._made is not None:
            self._made[0].close()


class _LazySpaces(dict[str, Any]):
    """Spaces of an env by RLlib's keys, found when the function asks for them."""

    def __init__(self, env: Any) -> None:
        super().__init__({INPUT_ENV_SPACES: None, INPUT_ENV_SINGLE_SPACES: None})
        self._env = env

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        pair = self._env.single_observation_space, self._env.single_action_space
        if name == INPUT_ENV_SINGLE_SPACES:
            return pair
        return tuple(gym.vector.utils.batch_space(space, self._env.num_envs) for space in pair)


def connectors_for(config: Any, env: Any) -> tuple[list[ConnectorV2], list[ConnectorV2]]:
    """Return the connectors from env to module for an env: those that the wrapper calls, and the transforms after them.

    Args:
        config: RLlib's config.
        env: A `LazyEnv` or an `EnvOfConnectors`.

    Raises:
        ConfigError: The default connectors were left out, and observations do not get to the module.
    """
    setting = "env_to_module_connector"
    connectors = make_connectors(config.env_to_module_connector, setting, env, _LazySpaces(env), "cpu")
    if not config.add_default_connectors_to_env_to_module_pipeline and not any(
        isinstance(connector, AddObservationsFromEpisodesToBatch) for connector in connectors
    ):
        raise ConfigError(
            "add_default_connectors_to_env_to_module_pipeline=False: Corral always passes observations to the module: "
            "put AddObservationsFromEpisodesToBatch into env_to_module_connector, or leave the setting out."
        )
    num_own = max((i + 1 for i, each in enumerate(connectors) if _is_own(each)), default=0)
    return connectors[:num_own], [each for each in connectors[num_own:] if is_transform(each)]


def _is_own(connector: ConnectorV2) -> bool:
    return not (is_transform(connector) or isinstance(connector, DefaultConnector))


class Connect:
    """Wraps a sub-env; a wrapper of Corral's setting `wrappers`.

    Args:
        config: RLlib's config.
    """

    def __init__(self, config: Any) -> None:
        """Keep the config."""
        self._config = config

    def __call__(self, env: Any) -> ConnectedEnv:
        """Return the wrapped env."""
        return ConnectedEnv(env, self._config)


class ConnectedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """An env whose observations, rewards and actions go through the user's connectors.

    Args:
        env: The sub-env.
        config: RLlib's config.

    Attributes:
        to_module: Connectors from env to module.
        to_env: Connectors from module to env.
        episode: The current episode, or chunk of it.
    """

    def __init__(self, env: Any, config: Any) -> None:
        """Make the connectors."""
        super().__init__(env)
        self._config, self._is_multi_agent = config, bool(config.is_multi_agent)
        seen = EnvOfConnectors(env, self._is_multi_agent)
        given = self._given = seen.single_observation_space, seen.single_action_space
        self.to_module = EnvToModulePipeline(*given, connectors=connectors_for(config, seen)[0])
        to_env = make_connectors(config.module_to_env_connector, "module_to_env_connector", seen, _LazySpaces(seen))
        self.to_env = ModuleToEnvPipeline(*given, connectors=to_env)
        self._runner: Any = None
        self.episode: Any = None
        space = self.to_module.observation_space
        if self._is_multi_agent:
            self.possible_agents = list(possible_agents(env))
            self.observation_spaces = {agent: space[agent] for agent in self.possible_agents}
            self.action_spaces = {agent: given[1][agent] for agent in self.possible_agents}
        else:
            self.observation_space = space

    def bind(self, runner: Any, to_module: EnvToModulePipeline, to_env: ModuleToEnvPipeline) -> None:
        """Use the connectors of a runner."""
        self._runner, self.to_module, self.to_env = runner, to_module, to_env

    def cut(self) -> None:
        """Forget the steps so far, except a lookback."""
        if self.episode is not None and self.episode.is_reset and not self.episode.is_done:
            self.episode = self.episode.cut(len_lookback_buffer=max(1, self._config.episode_lookback_horizon))

    def reset(self, **settings: Any) -> Any:
        """Return the first observation behind the connectors, and the info."""
        obs, infos = self.env.reset(**settings)
        if self._is_multi_agent:
            self.episode = ConnectedMultiAgentEpisode(
                observation_space=self._given[0].spaces,
                action_space=self._given[1].spaces,
                agent_to_module_mapping_fn=self._config.policy_mapping_fn,
            )
            self.episode.add_env_reset({agent: _Held(each) for agent, each in obs.items()}, infos)
        else:
            self.episode = ConnectedEpisode(observation_space=self._given[0], action_space=self._given[1])
            self.episode.add_env_reset(_Held(obs), infos)
        return self._connect(obs), infos

    def step(self, action: Any) -> Any:
        """Return what the env returns, with observations and rewards behind the connectors."""
        action, of_module = self._changed_action(action)
        step: Any = self.env.step(action)
        if not self._is_multi_agent:
            check_step(step)  # here, because the connectors see floats and bools
        obs, rewards, terminated, truncated, infos = step
        if not self._is_multi_agent:
            self.episode.add_env_step(
                _Held(obs), of_module, float(rewards), infos, terminated=bool(terminated), truncated=bool(truncated)
            )
            obs = self._connect(obs)
            return obs, float(self.episode.get_rewards(-1)), terminated, truncated, infos
        held = {agent: _Held(each) for agent, each in obs.items()}
        self.episode.add_env_step(held, of_module, rewards, infos, terminateds=terminated, truncateds=truncated)
        parts = {agent: self.episode.agent_episodes[agent] for agent in obs if agent in self.episode.agent_episodes}
        before = {agent: part.get_rewards(-1) for agent, part in parts.items() if len(part)}
        obs = self._connect(obs)
        more = {agent: float(parts[agent].get_rewards(-1) - reward) for agent, reward in before.items()}
        rewards = {agent: reward + more.get(agent, 0.0) for agent, reward in rewards.items()}
        return obs, rewards | {a: r for a, r in more.items() if r and a not in rewards}, terminated, truncated, infos

    # Env to module.

    def _connect(self, obs: Any) -> Any:
        """Call the connectors from env to module, and return the latest observation behind them."""
        if not self.to_module.connectors:
            return obs
        batch = self.to_module(episodes=[self.episode], batch={}, **self._arguments())
        if others := sorted(batch.keys() - {Columns.OBS}):
            raise ConfigError(
                f"env_to_module_connector: a connector added the column {others[0]!r} to the batch, and Corral's "
                "modules get observations only: make it a part of a Dict observation, or add it for the loss in "
                "learner_connector."
            )
        if Columns.OBS in batch:
            return _latest(batch[Columns.OBS], self._is_multi_agent)
        if not self._is_multi_agent:
            return self.episode.get_observations(-1)
        return {agent: self.episode.agent_episodes[agent].get_observations(-1) for agent in obs}

    def _arguments(self) -> dict[str, Any]:
        if self._runner is None:
            return {"rl_module": None, "explore": None, "metrics": None, "shared_data": {}}
        from corral.compat.rllib.runners import view_runner

        runner = self._runner
        module = view_runner(runner).module if hasattr(runner, "actors") else None
        logger = metrics.as_rllib(runner.metrics)
        return {"rl_module": module, "explore": runner.config.explore, "metrics": logger, "shared_data": {}}

    # Module to env.

    def _changed_action(self, action: Any) -> tuple[Any, Any]:
        """Return the action for the env, and the action as the module chose it or as connectors changed it."""
        if not self._is_multi_agent:
            of_module = self._of_module(action, self._given[1])
            if not self.to_env.connectors:
                return action, of_module
            batch = _Actions({Columns.ACTIONS: {(self.episode.id_,): [of_module]}})
            batch = self.to_env(episodes=[self.episode], batch=batch, **self._arguments())
            (changed,) = batch[Columns.ACTIONS][(self.episode.id_,)]
            for_env = batch.get(Columns.ACTIONS_FOR_ENV)
            return next(iter(for_env.values()))[0] if for_env else self._for_env(changed, self._given[1]), changed
        spaces = self._given[1].spaces
        actions = {agent: self._of_module(each, spaces[agent]) for agent, each in action.items()}
        if not self.to_env.connectors:
            return action, actions
        keys = {agent: (self.episode.id_, agent, self.episode.module_for(agent)) for agent in actions}
        batch = _Actions({Columns.ACTIONS: {keys[agent]: [each] for agent, each in actions.items()}})
        batch = self.to_env(episodes=[self.episode], batch=batch, **self._arguments())
        changed = {agent: batch[Columns.ACTIONS][key][0] for agent, key in keys.items()}
        given = batch.get(Columns.ACTIONS_FOR_ENV) or {}
        return {
            agent: given[keys[agent]][0] if keys[agent] in given else self._for_env(each, spaces[agent])
            for agent, each in changed.items()
        }, changed

    def _of_module(self, action: Any, space: Any) -> Any:
        if isinstance(space, gym.spaces.Discrete):
            return int(action) - int(space.start)
        if self._config.normalize_actions:
            return map_tree(_as_float32, space_helpers.normalize_action(action, space))
        return action

    def _for_env(self, action: Any, space: Any) -> Any:
        if isinstance(space, gym.spaces.Discrete):
            return int(action) + int(space.start)
        if self._config.normalize_actions:
            return space_helpers.unsquash_action(action, space)
        return space_helpers.clip_action(action, space) if self._config.clip_actions else action


def _as_float32(part: Any) -> Any:
    array = np.asarray(part)
    return array.astype(np.float32) if array.dtype.kind == "f" else part


def _latest(column: Any, by_agent: bool) -> Any:
    """Return the observation in the column `obs` of a batch of one episode, by agent if there are several."""
    if isinstance(column, dict) and all(isinstance(key, tuple) for key in column):
        found = {key[1] if by_agent else None: items[-1] for key, items in column.items()}
        return found if by_agent else found[None]
    if by_agent:
        raise ConfigError("env_to_module_connector: observations by module cannot be brought back to agents.")
    found = map_tree(lambda leaf: np.asarray(leaf)[-1], column)
    return found if leaves(found) else column


class _Actions(dict[str, Any]):
    """Columns of actions; names what else RLlib would have."""

    def __missing__(self, name: str) -> Any:
        raise ConfigError(
            f"module_to_env_connector: the batch has no column {name!r}: between module and env Corral passes actions "
            "only; outputs of the module are in the episodes of callbacks."
        )


# The runner.


class ConnectorEvents(Callback):
    """Gives all sub-envs of a runner the same connectors, and keeps the connectors of all runners alike."""

    def __init__(self) -> None:
        """Know no sub-env yet."""
        self._pipelines: tuple[EnvToModulePipeline, ModuleToEnvPipeline] | None = None
        self._layers: dict[int, ConnectedEnv] = {}
        self._saved: Mapping[str, Any] | None = None
        self._merged: EnvToModulePipeline | None = None

    def on_sub_environment_created(
        self, *, env_runner: Any, sub_environment: Any, env_index: int, **kwargs: Any
    ) -> None:
        """Bind the wrapper of a new sub-env to the connectors of the runner."""
        layer = next(layer for layer in _layers(sub_environment) if isinstance(layer, ConnectedEnv))
        if self._pipelines is None:
            self._pipelines = layer.to_module, layer.to_env
            self._restore()
        env_runner.keep_view(EnvToModulePipeline, self._pipelines[0])
        env_runner.keep_view(ModuleToEnvPipeline, self._pipelines[1])
        self._layers[env_index] = layer
        layer.bind(env_runner, *self._pipelines)

    def on_sample_end(self, **kwargs: Any) -> None:
        """Forget the steps that were sampled."""
        for layer in self._layers.values():
            layer.cut()

    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Keep connectors for merging the states of remote runners."""
        group = algorithm.env_runner_group
        if group.num_remote_workers and any(group.foreach_env_runner(_merges)):
            self._merged = group.foreach_env_runner(_get_connectors)[0]

    def on_train_result(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Merge the states of the connectors of all runners."""
        if self._merged is not None:
            group = algorithm.env_runner_group
            state = self._merged.merge_states(group.foreach_env_runner(_get_state))
            group.foreach_env_runner(_set_state, kwargs={"state": state})

    def on_evaluate_start(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Give the connectors of evaluation runners the state of the connectors that train."""
        group, states = algorithm.eval_env_runner_group, algorithm.env_runner_group.foreach_env_runner(_get_state)
        if group is not None and states and states[0]:
            group.foreach_env_runner(_set_state, kwargs={"state": states[0]})

    def get_state(self) -> dict[str, Any]:
        """Return the states of both pipelines."""
        if self._pipelines is None:
            return {}
        return {"pipelines": [pipeline.get_state() for pipeline in self._pipelines]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from states, now or when the connectors are made."""
        self._saved = state
        if self._pipelines is not None:
            self._restore()

    def _restore(self) -> None:
        if self._saved and self._pipelines is not None:
            for pipeline, saved in zip(self._pipelines, self._saved["pipelines"], strict=True):
                pipeline.set_state(saved)


def _layers(env: Any) -> Iterator[Any]:
    while env is not None:
        yield env
        env = vars(env).get("env")


def _merges(runner: Any) -> bool:
    """Return whether a connector of a runner merges states."""
    connectors = _get_connectors(runner).connectors
    return any(type(each).merge_states is not ConnectorV2.merge_states for each in connectors)


def _get_connectors(runner: Any) -> EnvToModulePipeline:
    pipeline: EnvToModulePipeline = runner.view_as(EnvToModulePipeline)
    return pipeline


def _get_state(runner: Any) -> Any:
    return _get_connectors(runner).get_state()


def _set_state(runner: Any, state: Any) -> None:
    _get_connectors(runner).set_state(state)
