"""The module of TD3 and DDPG: a deterministic actor, critics, and targets of both."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor, nn

from corral.core.settings import PositiveInt
from corral.core.spaces import is_bounded_floats, remedy_for_bounds
from corral.core.tree import Tree
from corral.errors import ConfigError
from corral.modules.distributions import Deterministic
from corral.modules.module import Module, NetworkConfig
from corral.modules.sac_module import (
    ActorNetwork,
    CriticNetwork,
    find_critic_hiddens,
    own_parameters,
    shared_encoder,
    shares_features,
)
from corral.modules.targets import Follower


@dataclass
class TD3NetworkConfig(NetworkConfig):
    """Settings of the default module of TD3 and DDPG, for each of its networks.

    Attributes:
        critic_hiddens: Widths of the hidden layers of the critics; see `SACNetworkConfig`.
        share_features: Whether actor and critics read the same features; see `SACNetworkConfig`.
    """

    DEFAULT_HIDDENS: ClassVar[tuple[int, ...]] = (400, 300)
    DEFAULT_BLOCKS: ClassVar[tuple[int, ...]] = (128,)

    critic_hiddens: tuple[PositiveInt, ...] | None = None
    share_features: bool = False

    def critic_hiddens_for(self, space: spaces.Space[Any]) -> list[int]:
        """Return the widths of the hidden layers of critics; see `find_critic_hiddens`."""
        return find_critic_hiddens(self, space)


class TD3Module(Module):
    """An actor that returns one action, one or two critics, and a target network of each.

    For custom networks, define `make_actor` or `make_critic`, or both, in a subclass. The constructor calls them; they
    may read `observation_space`, `action_space`, `num_action_dims` and `model_config`. No parameter may belong to two
    of the networks: each group of parameters has its own optimizer settings and its own loss.

    Attributes:
        actor: Network from observations to actions before the tanh, `[B, d]`.
        target_actor: Target of the actor, without gradients.
        q: Critics.
        target_q: Targets of the critics, without gradients.
        num_action_dims: Number of entries d of an action.
    """

    MUST_DEFINE = ()
    CONFIG: ClassVar[type[NetworkConfig]] = TD3NetworkConfig

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
            model_config: The algorithm's setting `twin_q`, and the settings of the networks.

        Raises:
            ConfigError: The actions are not floats with finite bounds.
        """
        if not is_bounded_floats(action_space):
            raise ConfigError(
                "TD3 and DDPG take a Box of floats whose bounds are all finite, and the env's actions are "
                f"{action_space}: {remedy_for_bounds(action_space)}."
            )
        super().__init__(observation_space, action_space, {})
        assert isinstance(action_space, spaces.Box)
        self.distribution = Deterministic(action_space)
        self.num_action_dims = math.prod(action_space.shape)
        self.model_config = dict(model_config)
        num_critics = 2 if self.model_config.pop("twin_q", True) else 1
        self.actor = self.make_actor()
        self.q = nn.ModuleList(self.make_critic() for _ in range(num_critics))
        self.shares_features = shares_features(self.actor, self.q)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_q = copy.deepcopy(self.q).requires_grad_(False)
        self._targets = Follower({self.target_actor: self.actor, self.target_q: self.q})

    @property
    def critic_shape(self) -> tuple[int, ...]:
        """Shape of what a critic gives for one observation and action."""
        return ()

    # Methods that a subclass may define.

    def make_actor(self) -> nn.Module:
        """Return a new network from observations (a tree of `[B, ...]`) to `[B, d]`; the module applies the tanh."""
        config = self.CONFIG.parse(self.model_config)
        return ActorNetwork(self.observation_space, self.num_action_dims, config, clamp_log_std=False)

    def make_critic(self) -> nn.Module:
        """Return a new critic, called as `critic(obs, actions)` with actions float32 `[B, d]` in [-1, 1].

        It returns values `[B]`, or what else `critic_shape` says for each row.
        """
        config: Any = self.CONFIG.parse(self.model_config)
        encoder, num_outputs = shared_encoder(self.actor, config), next(iter(self.critic_shape), None)
        return CriticNetwork(
            self.observation_space, self.action_space, config, num_outputs=num_outputs, encoder=encoder
        )

    def outputs(self, obs: Tree) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        """Call the networks, then the methods; see `Module.outputs`."""
        for name in ("actor", "target_actor"):
            yield f"{name}(obs)", getattr(self, name)(obs), (self.num_action_dims,)
        for name in ("q", "target_q"):
            for index, critic in enumerate(getattr(self, name)):
                values = critic(obs, torch.zeros(2, self.num_action_dims))
                yield f"{name}[{index}](obs, actions)", values, self.critic_shape
        yield from super().outputs(obs)

    # Methods that the algorithm calls.

    def policy(self, obs: Tree) -> Tensor:
        """Map observations to actions, float32 `[B, d]` in [-1, 1]."""
        actions: Tensor = self.actor(obs).tanh()
        return actions

    def target_policy(self, obs: Tree) -> Tensor:
        """Map observations to the actions of the target actor, float32 `[B, d]` in [-1, 1]."""
        actions: Tensor = self.target_actor(obs).tanh()
        return actions

    def q_values(self, obs: Tree, actions: Tensor, *, target: bool = False) -> Tensor:
        """Return the values of all critics, `[C, B]`, for actions `[B, d]` in [-1, 1]."""
        critics: Any = self.target_q if target else self.q
        if self.shares_features:
            features = critics[0].encoder(obs)
            return torch.stack([critic(obs, actions, features) for critic in critics])
        return torch.stack([critic(obs, actions) for critic in critics])

    def value(self, obs: Tree) -> Tensor:
        """Return the lowest of the critics' values of the actor's action, float32 `[B]`."""
        return self.q_values(obs, self.policy(obs)).amin(0)

    def update_target(self, tau: float) -> None:
        """Move all targets towards their networks by a fraction `tau`; 1 copies the networks."""
        self._targets.move(tau)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of `actor` and `critic`."""
        return {"actor": own_parameters(self.actor), "critic": list(self.q.parameters())}

    def acting_weights(self) -> dict[str, Tensor]:
        """Return the weights of the actor."""
        return {f"actor.{name}": value for name, value in self.actor.state_dict().items()}

    def policy_layers(self) -> tuple[list[nn.Module], nn.Parameter | None] | None:
        """Return the layers of the actor, if it is the default actor on flat observations."""
        if type(self).policy is not TD3Module.policy or type(self.actor) is not ActorNetwork:
            return None
        if not self.actor.encoder.is_flat or not isinstance(self.observation_space, spaces.Box):
            return None
        return [*self.actor.encoder.mlp, *self.actor.head, nn.Tanh()], None
