"""The module of DreamerV3 (Hafner et al. 2023, arXiv:2301.04104): a world model, an actor, a critic and its target."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from corral.core.settings import PositiveInt, parse_settings
from corral.core.spaces import is_bounded_floats, remedy_for_bounds
from corral.core.tree import Tree
from corral.errors import ConfigError
from corral.modules.critics import Following
from corral.modules.memory import memory_outputs
from corral.modules.module import Module
from corral.modules.two_hot import mixed_logits, one_hot
from corral.modules.world_model import SIZES, WorldModel, head

State = dict[str, Tensor]
MIN_STD, MAX_STD = 0.1, 1.0


@dataclass
class DreamerV3NetworkConfig:
    """Settings of the default module of DreamerV3 in `model_config`; `model_size` of the algorithm says all widths.

    Attributes:
        max_seq_len: Longest sequence, in steps, through which gradients flow; `None` is 64.
    """

    max_seq_len: PositiveInt | None = None

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Return the config with these settings, after checking names and values.

        Raises:
            ConfigError: A name is unknown, or a value has the wrong type or is out of bounds.
        """
        return parse_settings(cls, settings, "model_config")


class DreamerV3Module(Following, Module):
    """A world model, an actor and a critic that read its states, and a target of the critic.

    Its memory is the state of the world model: `h`, the classes `z`, the latest action, and whether the episode has
    `started`. While acting, `z` is the most likely one and is not drawn, so that `policy` is a function of its
    arguments.

    Attributes:
        world_model: The world model.
        actor: Network from states to the parameters of the policy.
        critic: Network from states to logits of returns over `world_model.bins`.
        target_critic: Its target, without gradients.
        is_discrete: Whether actions are Discrete; otherwise they are Box.
    """

    MUST_DEFINE = ()
    CONFIG: ClassVar[Any] = DreamerV3NetworkConfig
    ACTION_STATE = "action"
    DEFAULT_SEQ_LEN = 64

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Build the networks.

        Args:
            observation_space: Space of one observation.
            action_space: Space of one action.
            model_config: `model_size`, and `max_seq_len`.

        Raises:
            ConfigError: The actions are neither Discrete nor bounded floats, observations hold a mask of legal actions,
                or a picture does not fit the convolutions.
        """
        self.is_discrete = isinstance(action_space, spaces.Discrete)
        if not (self.is_discrete or is_bounded_floats(action_space)):
            raise ConfigError(
                "DreamerV3 takes Discrete actions, or a Box of floats whose bounds are all finite, and the env's "
                f"actions are {action_space}: {remedy_for_bounds(action_space)}."
            )
        super().__init__(observation_space, action_space, {**model_config, "action_bounds": "clip"})
        if self.has_action_mask:
            raise ConfigError(
                "DreamerV3 cannot keep to the mask of legal actions in the observations, because it imagines steps in "
                "which nothing says what is legal: use PPO, DQN or SAC, or set .environment(action_masks=False), with "
                "which the mask is a part of the observation like others."
            )
        self.max_seq_len = int(model_config.get("max_seq_len") or self.DEFAULT_SEQ_LEN)
        size = SIZES[model_config.get("model_size", "XS")]
        num_action_inputs = self.distribution.num_noise  # of a Discrete action one for each value
        self.world_model = WorldModel(self.features_space, num_action_inputs, size)
        num_features = self.world_model.num_features
        self.actor = head(num_features, size, self.distribution.num_inputs)
        self.critic = head(num_features, size, len(self.world_model.bins.bins), gain=0.0)
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)

    def followed(self) -> dict[nn.Module, nn.Module]:
        """Return the critic by its target."""
        return {self.target_critic: self.critic}

    # Acting.

    def initial_state(self) -> dict[str, Any]:
        """Return the state before the first observation of an episode: zeros, among them `started`."""
        size, distribution = self.world_model.size, self.distribution
        action: NDArray[Any] = np.zeros(distribution.action_shape, distribution.action_dtype)
        return {
            "h": torch.zeros(size.cell),
            "z": torch.zeros(size.variables, dtype=torch.int64),
            "action": torch.from_numpy(action),
            "started": torch.zeros(()),
        }

    def action_inputs(self, actions: Tensor) -> Tensor:
        """Return module actions `[..., *action_shape]` as the world model reads them, float32 `[..., d]`."""
        if self.is_discrete:
            return one_hot(actions, self.distribution.num_inputs)
        inputs: Tensor = self.distribution.to_unit(actions)  # type: ignore[attr-defined]
        num_batch_axes = actions.ndim - len(self.distribution.action_shape)
        return inputs.reshape(*actions.shape[:num_batch_axes], -1)

    def begin(self, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """Return `h`, `z` as vectors and the action as inputs, `[B, ...]`, from which the world model advances."""
        started = state["started"]
        h, z = self.world_model.begin(state["h"], self.world_model.vectors(state["z"]), started)
        return h, z, self.action_inputs(state["action"]) * started.unsqueeze(-1)

    def _see(self, obs: Tree, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """Return `h`, the most likely classes, and both as features, for observations and the states before them."""
        h = self.world_model.advance(*self.begin(state))
        z = self.world_model.posterior(h, self.world_model.encode(obs)).argmax(-1)
        return h, z, torch.cat([h, self.world_model.vectors(z)], -1)

    def policy(self, obs: Tree, state: State) -> tuple[Tensor, State]:  # type: ignore[override]
        """Return `dist_inputs`, float32 `[B, D]`, and the next states, for observations `[B, ...]` and states.

        The caller writes the action that it takes into the next states.
        """
        h, z, features = self._see(obs, state)
        after = {"h": h, "z": z, "action": state["action"], "started": torch.ones_like(state["started"])}
        return self.policy_of(features), after

    def value(self, obs: Tree, state: State) -> Tensor:  # type: ignore[override]
        """Return state values, float32 `[B]`, for observations `[B, ...]` and the states before them."""
        return self.world_model.bins.mean(self.critic(self._see(obs, state)[2]))

    def outputs(self, obs: Tree) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        """Call the methods; see `Module.outputs`."""
        yield from memory_outputs(self, obs, has_value=True)

    def acting_weights(self) -> dict[str, Tensor]:
        """Return the weights of the actor, and those with which the world model sees."""
        unused = (
            "critic.",
            "target_critic.",
            *(f"world_model.{name}" for name in ("decoder.", "reward_", "continue_")),
        )
        return {name: value for name, value in self.state_dict().items() if not name.startswith(unused)}

    # Learning.

    def policy_of(self, features: Tensor) -> Tensor:
        """Return `dist_inputs`, float32 `[..., D]`, for features of states `[..., F]`.

        Probabilities of Discrete actions are at least 0.01 / n. The means of Box actions are in [-1, 1], and their
        deviations between 0.1 and 1.
        """
        outputs: Tensor = self.actor(features)
        if self.is_discrete:
            return mixed_logits(outputs)
        mean, spread = outputs.chunk(2, -1)
        std = MIN_STD + (MAX_STD - MIN_STD) * (spread + 2.0).sigmoid()
        return torch.cat([mean.tanh(), std.log()], -1)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of `world_model`, `actor` and `critic`."""
        parts = {"world_model": self.world_model, "actor": self.actor, "critic": self.critic}
        return {name: list(part.parameters()) for name, part in parts.items()}
