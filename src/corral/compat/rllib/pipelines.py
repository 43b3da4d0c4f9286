"""RLlib's pipelines of connectors, and the functions that make them from a config."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from corral.compat.rllib import default_connectors as default
from corral.compat.rllib.connectors import ConnectorV2
from corral.errors import ConfigError


class ConnectorPipelineV2(ConnectorV2):
    """Connectors in order: each gets the batch that the one before returned.

    Args:
        input_observation_space: Space of the observations before the first connector.
        input_action_space: Space of the actions before the first connector.
        connectors: The connectors.

    Attributes:
        connectors: The connectors, a list.
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        connectors: Sequence[Any] | None = None,
        **settings: Any,
    ) -> None:
        """Pass the spaces from connector to connector."""
        self.connectors = [
            made[0](*made[1], **made[2]) if isinstance(made, tuple) else made for made in connectors or ()
        ]
        super().__init__(input_observation_space, input_action_space)
        self._fix_spaces()

    def __call__(
        self,
        *,
        rl_module: Any = None,
        batch: Any = None,
        episodes: Any = (),
        explore: Any = None,
        shared_data: Any = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Call the connectors one after another.

        Raises:
            ConfigError: A connector returned no dict.
        """
        batch, shared_data = {} if batch is None else batch, {} if shared_data is None else shared_data
        for connector in self.connectors:
            batch = connector(
                rl_module=rl_module,
                batch=batch,
                episodes=episodes,
                explore=explore,
                shared_data=shared_data,
                metrics=metrics,
                **kwargs,
            )
            if not isinstance(batch, dict):
                raise ConfigError(f"connector {type(connector).__name__} returned {batch!r:.60}: return the batch.")
        return batch

    @classmethod
    def from_checkpoint(cls, path: Any, **settings: Any) -> Any:
        """Refuse to load a pipeline alone.

        Raises:
            ConfigError: Always: checkpoints hold states of connectors, and no connectors.
        """
        raise ConfigError(
            f"{cls.__name__}.from_checkpoint: Corral's checkpoints hold the states of connectors, not the connectors: "
            "use Algorithm.from_checkpoint(path).compute_single_action(obs), or corral.load_policy(path)."
        )

    # The connectors.

    def __len__(self) -> int:
        return len(self.connectors)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.connectors)

    def __getitem__(self, key: int | str | type) -> Any:
        """Return a connector by position, or the list of all connectors of a class or of a class's name."""
        if isinstance(key, int):
            return self.connectors[key]
        return [each for each in self.connectors if _is_called(each, key) or _is_of(each, key)]

    def append(self, connector: ConnectorV2) -> None:
        """Add a connector at the end."""
        self._insert(len(self.connectors), connector)

    def prepend(self, connector: ConnectorV2) -> None:
        """Add a connector at the beginning."""
        self._insert(0, connector)

    def insert_before(self, name_or_class: Any, connector: ConnectorV2) -> ConnectorV2:
        """Add a connector before another, which is returned.

        Raises:
            ValueError: There is no connector of this name or class.
        """
        found = self._find(name_or_class)
        self._insert(found, connector)
        other: ConnectorV2 = self.connectors[found + 1]
        return other

    def insert_after(self, name_or_class: Any, connector: ConnectorV2) -> ConnectorV2:
        """Add a connector after another, which is returned.

        Raises:
            ValueError: There is no connector of this name or class.
        """
        found = self._find(name_or_class)
        self._insert(found + 1, connector)
        other: ConnectorV2 = self.connectors[found]
        return other

    def remove(self, name_or_class: Any) -> None:
        """Remove a connector, if there is one of this name or class."""
        for index, connector in enumerate(self.connectors):
            if _is_called(connector, name_or_class):
                del self.connectors[index]
                self._fix_spaces()
                return

    def _find(self, name_or_class: Any) -> int:
        for index, connector in enumerate(self.connectors):
            if _is_called(connector, name_or_class):
                return index
        known = ", ".join(type(connector).__name__ for connector in self.connectors)
        raise ValueError(f"the pipeline has no connector {name_or_class!r}; it has {known}.")

    def _insert(self, index: int, connector: ConnectorV2) -> None:
        self.connectors.insert(index, connector)
        self._fix_spaces()

    # Spaces.

    def _fix_spaces(self) -> None:
        """Tell each connector the spaces before it."""
        observations, actions = self.input_observation_space, self.input_action_space
        if observations is None:
            return
        for connector in self.connectors:
            connector.input_action_space, connector.input_observation_space = actions, observations
            observations, actions = connector.observation_space, connector.action_space

    def recompute_output_observation_space(self, input_observation_space: Any, input_action_space: Any) -> Any:
        """Tell each connector the spaces before it, and return the space behind the last one."""
        self._fix_spaces()
        return self.observation_space

    @property
    def observation_space(self) -> Any:
        """Space of the observations behind the last connector."""
        return self.connectors[-1].observation_space if self.connectors else self.input_observation_space

    @property
    def action_space(self) -> Any:
        """Space of the actions behind the last connector."""
        return self.connectors[-1].action_space if self.connectors else self.input_action_space

    # State.

    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Return the states of the connectors that have one, by class name.

        The second connector of a class has the name `Class_2`, and so on.
        """
        states = {name: connector.get_state() for name, connector in self._by_name().items()}
        return {name: state for name, state in states.items() if state}

    def set_state(self, state: Any) -> None:
        """Set the states of connectors by the names of `get_state`."""
        for name, connector in self._by_name().items():
            if name in state:
                connector.set_state(state[name])

    def _by_name(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        counts = Counter[str]()
        for connector in self.connectors:
            name = type(connector).__name__
            counts[name] += 1
            found[name if counts[name] == 1 else f"{name}_{counts[name]}"] = connector
        return found

    def reset_state(self) -> None:
        """Reset the states of all connectors."""
        for connector in self.connectors:
            connector.reset_state()

    def merge_states(self, states: Any) -> dict[str, Any]:
        """Return one state for the states of the same pipeline in several runners.

        Connectors without a method `merge_states` are left out.
        """
        merged = {}
        for name, connector in self._by_name().items():
            parts = [state[name] for state in states if name in state]
            if parts and type(connector).merge_states is not ConnectorV2.merge_states:
                merged[name] = connector.merge_states(parts)
        return merged


class EnvToModulePipeline(ConnectorPipelineV2):
    """Connectors from the env to the module."""


class ModuleToEnvPipeline(ConnectorPipelineV2):
    """Connectors from the module to the env."""


class LearnerConnectorPipeline(ConnectorPipelineV2):
    """Connectors from episodes to the batch of a learner."""


def _is_called(connector: ConnectorV2, name_or_class: Any) -> bool:
    if isinstance(name_or_class, type):
        return type(connector) is name_or_class
    return bool(type(connector).__name__ == name_or_class)


def _is_of(connector: ConnectorV2, key: Any) -> bool:
    return isinstance(key, type) and isinstance(connector, key)


# The connectors of a config.


def make_connectors(function: Callable[..., Any] | None, setting: str, *given: Any) -> list[ConnectorV2]:
    """Return the connectors that a function makes.

    Args:
        function: Function that returns a connector, a pipeline, or a list of connectors.
        setting: Name of the setting, for the message.
        *given: Arguments, of which the function gets as many as it takes.

    Raises:
        ConfigError: Something is no connector.
    """
    if function is None:
        return []
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    num_taken = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    made = function(*(given if takes_all else given[:num_taken]))
    connectors = []
    for connector in made if isinstance(made, (list, tuple)) else [made]:
        if isinstance(connector, ConnectorPipelineV2):
            connectors += connector.connectors
        elif isinstance(connector, ConnectorV2):
            connectors.append(connector)
        elif connector is not None:
            raise ConfigError(f"{setting}: {connector!r:.80} is no connector.")
    return connectors


def env_to_module_pipeline(config: Any, env: Any = None, spaces: Any = None, device: Any = None) -> EnvToModulePipeline:
    """Return the connectors of a config from env to module, with the default ones behind the user's."""
    observations, actions = _spaces_of(config, env, spaces)
    own = make_connectors(config.env_to_module_connector, "env_to_module_connector", env, spaces, device)
    pipeline = EnvToModulePipeline(observations, actions, connectors=own)
    if config.add_default_connectors_to_env_to_module_pipeline:
        pipeline.connectors += default.env_to_module(config)
        pipeline._fix_spaces()
    return pipeline


def module_to_env_pipeline(config: Any, env: Any = None, spaces: Any = None) -> ModuleToEnvPipeline:
    """Return the connectors of a config from module to env, between the default ones before and after."""
    observations, actions = _spaces_of(config, env, spaces)
    own = make_connectors(config.module_to_env_connector, "module_to_env_connector", env, spaces)
    if config.add_default_connectors_to_module_to_env_pipeline:
        before, after = default.module_to_env(config)
        own = [*before, *own, *after]
    return ModuleToEnvPipeline(observations, actions, connectors=own)


def learner_pipeline(config: Any, observation_space: Any, action_space: Any) -> LearnerConnectorPipeline:
    """Return the connectors of a config for learners, with the default ones behind the user's."""
    own = make_connectors(config.learner_connector, "learner_connector", observation_space, action_space)
    if config.add_default_connectors_to_learner_pipeline:
        before, after = default.learner(config)
        own = [*before, *own, *after]
    return LearnerConnectorPipeline(observation_space, action_space, connectors=own)


def _spaces_of(config: Any, env: Any, spaces: Any) -> tuple[Any, Any]:
    if env is not None:
        space = getattr(env, "single_observation_space", None) or env.observation_space
        return space, getattr(env, "single_action_space", None) or env.action_space
    if spaces and "__env_single__" in spaces:
        observations, actions = spaces["__env_single__"]
        return observations, actions
    return config.observation_space, config.action_space
