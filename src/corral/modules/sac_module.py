"""Modules with an actor and critics: soft actor-critic's networks, and the targets of the critics."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from corral.core.tree import Tree
from corral.errors import ConfigError
from corral.modules.distributions import SquashedGaussian
from corral.modules.module import Module, NetworkConfig
from corral.modules.networks import Encoder, Flat, LogStdClamp, mlp, num_outputs, orthogonal

# What "auto" takes of the largest entropy of Discrete actions; see `SACModule.auto_target_entropy`.
TARGET_ENTROPY_SHARE = 0.5


@dataclass
class SACNetworkConfig(NetworkConfig):
    """Settings of the default module of SAC; its networks are all of this form, and share nothing."""

    fcnet_hiddens: tuple[int, ...] = (256, 256)


class Actor(nn.Module):
    """An encoder and a head: from observations to `dist_inputs`, `[B, D]`."""

    def __init__(
        self, observation_space: spaces.Space[Any], num_inputs: int, config: NetworkConfig, *, clamp_log_std: bool
    ) -> None:
        """Build the layers; the head starts small, so that the first policy is nearly the same everywhere."""
        super().__init__()
        hiddens = list(config.fcnet_hiddens)
        self.encoder = Encoder(observation_space, hiddens, config.fcnet_activation, config.conv_filters)
        num_features = hiddens[-1] if hiddens else num_outputs(self.encoder.parts)
        head: list[nn.Module] = [orthogonal(nn.Linear(num_features, num_inputs), 0.01)]
        self.head = nn.Sequential(*head, *([LogStdClamp()] if clamp_log_std else []))

    def forward(self, obs: Tree) -> Tensor:
        """Map observations, a tree of `[B, ...]`, to `[B, D]`."""
        dist_inputs: Tensor = self.head(self.encoder(obs))
        return dist_inputs


class Critic(nn.Module):
    """What an action is worth: of Box actions a number, `[B]`; of Discrete ones a number for each, `[B, n]`."""

    def __init__(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], config: NetworkConfig
    ) -> None:
        """Build the layers; Box actions join the encoded observation before the first hidden layer."""
        super().__init__()
        hiddens = list(config.fcnet_hiddens)
        self.encoder = Encoder(observation_space, [], config.fcnet_activation, config.conv_filters)
        num_features = num_outputs(self.encoder.parts)
        num_values = 1
        if isinstance(action_space, spaces.Discrete):
            num_values = int(action_space.n)
        else:
            num_features += math.prod(action_space.shape or ())
        self.mlp = mlp(num_features, hiddens, config.fcnet_activation)
        self.head = orthogonal(nn.Linear(hiddens[-1] if hiddens else num_features, num_values), 1.0)

    def forward(self, obs: Tree, actions: Tensor | None = None) -> Tensor:
        """Map observations, and Box actions float32 `[B, d]`, to values."""
        features = self.encoder(obs)
        if actions is not None:
            features = torch.cat([features, actions], -1)
        values: Tensor = self.head(self.mlp(features))
        return values if actions is None else values.squeeze(-1)


class SACModule(Module):
    """An actor, one or two critics with their slowly moving copies, and a temperature.

    For networks of one's own, subclass it and give `make_actor` or `make_critic`, or both. They are called while this
    class is made, when `observation_space`, `action_space`, `distribution`, `is_discrete` and `model_config` are there.
    No parameter may be part of two of the networks: each group has an optimizer and a loss of its own.

    Attributes:
        actor: From observations to `dist_inputs`.
        q: The critics.
        target_q: Their targets, which no gradient reaches.
        log_alpha: Log of the temperature, float32 `[]`.
        is_discrete: Whether actions are Discrete, rather than Box.
    """

    MUST_DEFINE = ()
    CONFIG: ClassVar[type[NetworkConfig]] = SACNetworkConfig

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
            model_config: `twin_q` and `initial_alpha`, the settings of the algorithm; the others are for the networks.

        Raises:
            ConfigError: The actions are neither Discrete nor floats with finite bounds.
        """
        self.is_discrete = isinstance(action_space, spaces.Discrete)
        if not self.is_discrete and not _is_bounded_floats(action_space):
            raise ConfigError(
                "SAC takes Discrete actions, or a Box of floats whose bounds are all finite, and the env's actions are "
                f"{action_space}: give them such bounds with a wrapper, or use PPO."
            )
        super().__init__(observation_space, action_space, {"action_bounds": "squash"})
        self.model_config = dict(model_config)
        num_critics = 2 if self.model_config.pop("twin_q", True) else 1
        initial_alpha = float(self.model_config.pop("initial_alpha", 1.0))
        self.actor = self.make_actor()
        self.q = nn.ModuleList(self.make_critic() for _ in range(num_critics))
        self.target_q = copy.deepcopy(self.q).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(initial_alpha)))
        self._followed: list[tuple[list[Any], list[Any]]] | None = None

    # What a subclass may give.

    def make_actor(self) -> nn.Module:
        """Return a new network from observations (a tree of `[B, ...]`) to `[B, distribution.num_inputs]`.

        Of Box actions, these are means and log standard deviations before the tanh, which should be kept in a range, as
        `LogStdClamp` does; of Discrete ones, logits.
        """
        config = SACNetworkConfig.parse(self.model_config)
        return Actor(self.observation_space, self.distribution.num_inputs, config, clamp_log_std=not self.is_discrete)

    def make_critic(self) -> nn.Module:
        """Return a new network of values.

        For Box actions it is called as `critic(obs, actions)`, with float32 `[B, d]` in [-1, 1], and returns `[B]`; for
        Discrete ones as `critic(obs)`, and returns `[B, n]`.
        """
        return Critic(self.observation_space, self.action_space, SACNetworkConfig.parse(self.model_config))

    # What the algorithm calls.

    def policy(self, obs: Tree) -> Tensor:
        """Map observations to `dist_inputs`, float32 `[B, D]`."""
        outputs: Tensor = self.actor(obs)
        return outputs

    def sample(self, obs: Tree, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Box actions that noise `[B, d]` picks, float32 `[B, d]` in [-1, 1], and their log-density `[B]`.

        Gradients of both reach the actor: the reparameterisation of Haarnoja et al. 2018, eq. 11, with appendix C.
        """
        assert isinstance(self.distribution, SquashedGaussian)
        return self.distribution.squashed_sample(self.policy(obs), noise)

    def q_values(self, obs: Tree, actions: Tensor | None = None, *, target: bool = False) -> Tensor:
        """Return the values of all critics: `[C, B]` of Box actions in [-1, 1], `[C, B, n]` of all Discrete ones."""
        arguments = (obs,) if actions is None else (obs, actions)
        return torch.stack([critic(*arguments) for critic in (self.target_q if target else self.q)])

    def value(self, obs: Tree) -> Tensor:
        """Return what the most likely action is worth to the critic that values it least, float32 `[B]`."""
        outputs = self.policy(obs)
        if self.is_discrete:
            best = outputs.argmax(-1, keepdim=True)
            return self.q_values(obs).amin(0).gather(-1, best).squeeze(-1)
        mean = outputs[:, : outputs.shape[1] // 2]
        return self.q_values(obs, mean.tanh()).amin(0)

    @contextmanager
    def frozen_critics(self) -> Iterator[None]:
        """Compute values whose gradients reach the actions and not the critics, which saves a quarter of the work."""
        trainable = [parameter for parameter in self.q.parameters() if parameter.requires_grad]
        for parameter in trainable:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)

    @property
    def auto_target_entropy(self) -> float:
        """The entropy that the temperature aims at by default, in nats.

        Of Box actions minus their dimensions (Haarnoja et al. 2018b, arXiv:1812.05905, appendix D); of Discrete ones
        `TARGET_ENTROPY_SHARE` of the largest, log n. Christodoulou 2019 (arXiv:1910.07207) takes 0.98 of it, which
        keeps the policy close to even.
        """
        if isinstance(self.action_space, spaces.Discrete):
            return TARGET_ENTROPY_SHARE * math.log(int(self.action_space.n))
        return -float(self.distribution.num_noise)

    def update_target(self, tau: float) -> None:
        """Move the targets towards the critics by a share `tau`; 1 makes them copies."""
        if self._followed is None:  # finding them takes longer than moving them
            self._followed = [
                (list(self.target_q.parameters()), list(self.q.parameters())),
                (list(self.target_q.buffers()), list(self.q.buffers())),
            ]
        (targets, parameters), (target_buffers, buffers) = self._followed
        torch._foreach_lerp_(targets, parameters, tau)
        for target, buffer in zip(target_buffers, buffers, strict=True):
            target.copy_(buffer)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of `actor`, `critic` and `alpha`."""
        return {
            "actor": list(self.actor.parameters()),
            "critic": list(self.q.parameters()),
            "alpha": [self.log_alpha],
        }

    def acting_weights(self) -> dict[str, Tensor]:
        """Return the weights of the actor."""
        return {f"actor.{name}": value for name, value in self.actor.state_dict().items()}

    def policy_layers(self) -> tuple[list[nn.Module], nn.Parameter | None] | None:
        """Return the actor as a stack if it is the default one, of a flat observation."""
        if type(self).policy is not SACModule.policy or type(self.actor) is not Actor:
            return None
        if not self._is_flat(self.actor.encoder):
            return None
        return [*self.actor.encoder.mlp, *self.actor.head], None

    def _is_flat(self, encoder: Encoder) -> bool:
        parts = encoder.parts
        return len(parts) == 1 and isinstance(parts[0], Flat) and isinstance(self.observation_space, spaces.Box)


def _is_bounded_floats(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and space.is_bounded()
