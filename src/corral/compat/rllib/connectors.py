"""RLlib's built-in connectors, as transforms of Corral."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from corral.errors import ConfigError
from corral.transforms.observations import FlattenObservations as NativeFlatten
from corral.transforms.observations import NormalizeObservations
from corral.transforms.temporal import FrameStack
from corral.transforms.temporal import PrevActionsPrevRewards as NativePrevious
from corral.transforms.transform import Transform


class ConnectorV2:
    """Base class of connectors.

    Raises:
        ConfigError: When Corral is to use a connector that it does not serve.
    """

    def __init__(self, input_observation_space: Any = None, input_action_space: Any = None, **settings: Any) -> None:
        """Keep the spaces."""
        self.input_observation_space, self.input_action_space = input_observation_space, input_action_space

    agent_ids: Any = None
    """Agents whose observations the connector changes; `None` is all."""

    def recompute_output_observation_space(self, input_observation_space: Any, input_action_space: Any) -> Any:
        """Return the space of observations behind the connector."""
        return input_observation_space

    def recompute_output_action_space(self, input_observation_space: Any, input_action_space: Any) -> Any:
        """Return the space of actions behind the connector."""
        return input_action_space

    def to_transforms(self) -> list[Transform]:
        """Return the transforms of Corral that do the same."""
        raise ConfigError(
            f"{type(self).__name__}: connectors of your own are not served yet. Write a corral.Transform, or a wrapper "
            "of the env."
        )


@dataclass(kw_only=True)
class FlattenObservations(ConnectorV2):
    """Joins all parts of an observation into one vector.

    Attributes:
        multi_agent: Whether observations are by agent; Corral applies transforms to each agent alone.
        agent_ids: Agents whose observations are flattened; `None` is all.
    """

    input_observation_space: Any = None
    input_action_space: Any = None
    multi_agent: bool = False
    agent_ids: Any = None

    def to_transforms(self) -> list[Transform]:
        """Return `FlattenObservations`."""
        return [NativeFlatten()]


@dataclass(kw_only=True)
class MeanStdFilter(ConnectorV2):
    """Normalises observations by their running mean and deviation.

    Attributes:
        multi_agent: Whether observations are by agent.
        de_mean_to_zero: Whether the mean is subtracted; only True.
        de_std_to_one: Whether observations are divided by the deviation; only True.
        clip_by_value: Largest absolute value, or `None`.
        update_stats: Whether statistics change; only True.
    """

    input_observation_space: Any = None
    input_action_space: Any = None
    multi_agent: bool = False
    de_mean_to_zero: bool = True
    de_std_to_one: bool = True
    clip_by_value: float | None = 10.0
    update_stats: bool = True

    def to_transforms(self) -> list[Transform]:
        """Return `NormalizeObservations`."""
        for name in ("de_mean_to_zero", "de_std_to_one", "update_stats"):
            if not getattr(self, name):
                raise ConfigError(f"MeanStdFilter: {name}=False is not in Corral: leave it out.")
        return [NormalizeObservations(clip=self.clip_by_value)]


@dataclass(kw_only=True)
class FrameStackingEnvToModule(ConnectorV2):
    """Stacks the latest observations.

    Attributes:
        num_frames: Number of observations.
        multi_agent: Whether observations are by agent.
    """

    input_observation_space: Any = None
    input_action_space: Any = None
    num_frames: int = 1
    multi_agent: bool = False

    def to_transforms(self) -> list[Transform]:
        """Return `FrameStack`."""
        return [FrameStack(self.num_frames)]


@dataclass(kw_only=True)
class FrameStackingLearner(FrameStackingEnvToModule):
    """The learner's part of stacking, which Corral does with the other part."""

    def to_transforms(self) -> list[Transform]:
        """Return no transforms."""
        return []


@dataclass(kw_only=True)
class PrevActionsPrevRewards(ConnectorV2):
    """Adds the previous action and reward to observations.

    Attributes:
        multi_agent: Whether observations are by agent.
        n_prev_actions: Number of actions; only 1.
        n_prev_rewards: Number of rewards; only 1.
    """

    input_observation_space: Any = None
    input_action_space: Any = None
    multi_agent: bool = False
    n_prev_actions: int = 1
    n_prev_rewards: int = 1

    def to_transforms(self) -> list[Transform]:
        """Return `PrevActionsPrevRewards`."""
        if (self.n_prev_actions, self.n_prev_rewards) != (1, 1):
            raise ConfigError(
                "PrevActionsPrevRewards: Corral adds one action and one reward: add a FrameStack for more."
            )
        return [NativePrevious()]


def make_connectors(function: Callable[..., Any] | None, setting: str) -> list[ConnectorV2]:
    """Return the connectors that a function makes.

    Args:
        function: `fn(env)`, `fn(env, spaces, device)`, or for learners `fn(observation_space, action_space)`, which
            returns one connector or a list of them. Its arguments are `None`.
        setting: Name of the setting, for the message.

    Raises:
        ConfigError: Something is no connector.
    """
    if function is None:
        return []
    parameters = inspect.signature(function).parameters.values()
    num_wanted = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    made = function(*([None] * num_wanted))
    connectors = [each for each in (made if isinstance(made, (list, tuple)) else [made]) if each is not None]
    for connector in connectors:
        if not isinstance(connector, ConnectorV2):
            raise ConfigError(f"{setting}: {connector!r:.80} is no connector.")
    return connectors


def to_transforms(
    connectors: Sequence[ConnectorV2], module_id: str | None = None, mapping: Callable[..., str] | None = None
) -> list[Transform]:
    """Return the transforms of connectors.

    Args:
        connectors: The connectors.
        module_id: Leave out connectors of agents that do not have this module; `None` keeps all.
        mapping: Function `(agent_id, episode)` that returns the module of an agent.
    """
    transforms: list[Transform] = []
    for connector in connectors:
        agents = connector.agent_ids if module_id is not None and mapping is not None else None
        if agents is None or any(mapping(agent, None) == module_id for agent in agents):  # type: ignore[misc]
            transforms += connector.to_transforms()
    return transforms
