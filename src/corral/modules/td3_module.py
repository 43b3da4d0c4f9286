"""The module of TD3 and DDPG: a deterministic actor, critics, and targets of both."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gymnasium import spaces
from torch import Tensor, nn

from corral.core.settings import PositiveInt
from corral.core.spaces import is_bounded_floats, remedy_for_bounds
from corral.core.tree import Tree
from corral.errors import ConfigError
from corral.modules.critics import Follower, ScalarHead
from corral.modules.distributions import Deterministic
from corral.modules.module import Module, NetworkConfig
from corral.modules.sac_module import ActorAndCritics, find_critic_hiddens


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


class TD3Module(ActorAndCritics, Module):
    """An actor that returns one action, one or two critics, and a target network of each.

    For custom networks, define `make_actor` or `make_critic`, or both, in a subclass; see `ActorAndCritics`. They may
    also read `num_action_dims`. The actor returns actions before the tanh, `[B, d]`.

    Attributes:
        actor: Network from observations to actions before the tanh, `[B, d]`.
        target_actor: Target of the actor, without gradients.
        q: Critics.
        target_q: Targets of the critics, without gradients.
        num_action_dims: Number of entries d of an action.
    """

    MUST_DEFINE = ()
    CONFIG: ClassVar[type[NetworkConfig]] = TD3NetworkConfig

    def check_actions(self, action_space: spaces.Space[Any]) -> None:
        """Refuse actions that are not floats with finite bounds."""
        if not is_bounded_floats(action_space):
            raise ConfigError(
                "TD3 and DDPG take a Box of floats whose bounds are all finite, and the env's actions are "
                f"{action_space}: {remedy_for_bounds(action_space)}."
            )

    def read_settings(self, settings: dict[str, Any]) -> ScalarHead:
        """Make the distribution, of one action, and return the head of the critics."""
        assert isinstance(self.action_space, spaces.Box)
        self.distribution = Deterministic(self.action_space)
        self.num_action_dims = self.distribution.num_inputs
        return ScalarHead(1.0)

    def make_targets(self) -> nn.ModuleList:
        """Make the target actor, and return the target critics."""
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        return super().make_targets()

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Build the networks; see `ActorAndCritics`."""
        super().__init__(observation_space, action_space, model_config)
        self._targets = Follower(target_actor="actor", target_q="q")

    def outputs(self, obs: Tree) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        """Call the networks, then the methods; see `Module.outputs`."""
        yield "target_actor(obs)", self.target_actor(obs), (self.num_action_dims,)
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

    def value(self, obs: Tree) -> Tensor:
        """Return the lowest of the critics' values of the actor's action, float32 `[B]`."""
        return self.q_values(obs, self.policy(obs)).amin(0)

    def policy_layers(self) -> tuple[list[nn.Module], nn.Parameter | None] | None:
        """Return the layers of the actor, if it is the default actor on flat observations."""
        is_box = isinstance(self.observation_space, spaces.Box)
        return self.layers_after(TD3Module.policy, nn.Tanh()) if is_box else None
