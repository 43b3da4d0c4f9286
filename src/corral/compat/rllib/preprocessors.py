"""RLlib's preprocessors of observations, as wrappers of sub-envs."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym

from corral.compat.rllib.connectors import ConnectorV2
from corral.envs.multi_agent_env import MultiAgentEnv
from corral.errors import ConfigError
from corral.transforms.transform import Transform


class _Preprocessor(ConnectorV2):
    """Base of both kinds. Each sub-env has its own copy, and `episode` is `None`: the env knows no episode."""

    def preprocess(self, observation: Any, episode: Any) -> Any:
        """Return the changed observation, of the space that `recompute_output_observation_space` returns."""
        raise ConfigError(f"{type(self).__name__} has no method preprocess(observation, episode).")

    def to_transforms(self) -> list[Transform]:
        """Return no transforms: the envs are wrapped."""
        return []

    def _for_env(self, env: Any, observation_space: Any, action_space: Any) -> tuple[Any, Any]:
        """Return a copy for an env, and the new observation space."""
        own = copy.deepcopy(self)
        own.input_observation_space, own.input_action_space = observation_space, action_space
        return own, own.recompute_output_observation_space(observation_space, action_space)


class SingleAgentObservationPreprocessor(_Preprocessor):
    """Changes the observations of an env, one at a time."""

    def wrap(self, env: Any) -> Any:
        """Return the env with changed observations."""
        own, space = self._for_env(env, env.observation_space, env.action_space)
        return gym.wrappers.TransformObservation(env, lambda obs: own.preprocess(obs, None), space)


class MultiAgentObservationPreprocessor(_Preprocessor):
    """Changes the observations of all agents at a time: dicts by agent id."""

    def wrap(self, env: Any) -> Any:
        """Return the env with changed observations."""
        return _PreprocessedAgents(env, self)


class _PreprocessedAgents(gym.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Any, preprocessor: MultiAgentObservationPreprocessor) -> None:
        super().__init__(env)
        inner: MultiAgentEnv = env.unwrapped
        self.possible_agents = list(inner.possible_agents or inner.agents)
        spaces = {agent: inner.get_observation_space(agent) for agent in self.possible_agents}
        self.action_spaces = {agent: inner.get_action_space(agent) for agent in self.possible_agents}
        given = gym.spaces.Dict(spaces), gym.spaces.Dict(self.action_spaces)  # type: ignore[arg-type]
        self._preprocessor, found = preprocessor._for_env(env, *given)
        self.observation_spaces = dict(found.spaces)

    def reset(self, **settings: Any) -> Any:
        obs, infos = self.env.reset(**settings)
        return self._preprocessor.preprocess(obs, None), infos

    def step(self, action: Any) -> Any:
        obs, *rest = self.env.step(action)
        return (self._preprocessor.preprocess(obs, None), *rest)
