"""The module of implicit Q-learning: an actor, critics with targets, and a value network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor, nn

from corral.core.spaces import is_bounded_floats
from corral.core.tree import Tree
from corral.errors import ConfigError
from corral.modules.critic_heads import ScalarHead
from corral.modules.module import Module, NetworkConfig
from corral.modules.sac_module import ActorAndCritics, ActorNetwork


@dataclass
class IQLNetworkConfig(NetworkConfig):
    """Settings of the default module of IQL, for each of its networks; the networks share no layers."""

    DEFAULT_HIDDENS: ClassVar[tuple[int, ...]] = (256, 256)


class IQLModule(ActorAndCritics, Module):
    """An actor, one or two critics with target critics that follow them slowly, and a network of state values.

    For Box actions the policy is a Gaussian, whose mean a tanh keeps within the bounds if all of them are finite, and
    whose log standard deviations are parameters that do not depend on the observation.

    For custom networks, define `make_actor`, `make_critic` or `make_value` in a subclass; see `ActorAndCritics`.

    Attributes:
        actor: Network from observations to logits, or to means before the tanh.
        log_std: Log standard deviations of Box actions, float32 `[d]`; `None` for Discrete actions.
        q: Critics.
        target_q: Target critics, without gradients.
        v: Network from observations to values.
        is_discrete: Whether actions are Discrete; otherwise they are Box.
        is_bounded: Whether all bounds of Box actions are finite.
    """

    MUST_DEFINE = ()
    CONFIG: ClassVar[type[NetworkConfig]] = IQLNetworkConfig

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Build the networks; see `ActorAndCritics`."""
        super().__init__(observation_space, action_space, model_config)
        self.v = self.make_value()

    def check_actions(self, action_space: spaces.Space[Any]) -> None:
        """Refuse actions that are neither Discrete nor a Box of floats."""
        is_floats = isinstance(action_space, spaces.Box) and action_space.dtype.kind == "f"
        if not self.is_discrete and not is_floats:
            raise ConfigError(
                f"IQL takes Discrete actions or a Box of floats, and the env's actions are {action_space}: use BC."
            )

    def read_settings(self, settings: dict[str, Any]) -> ScalarHead:
        """Make the deviations, and return the head of the critics."""
        settings.pop("action_bounds", None)
        self.is_bounded = is_bounded_floats(self.action_space)
        self.log_std = None if self.is_discrete else nn.Parameter(torch.zeros(self.distribution.num_noise))
        return super().read_settings(settings)

    # Methods that a subclass may define.

    @property
    def num_actor_outputs(self) -> int:
        """Number of outputs of the actor: logits of Discrete actions, or means of Box actions."""
        return self.distribution.num_inputs if self.is_discrete else self.distribution.num_noise

    def make_value(self) -> nn.Module:
        """Return a new network from observations to values, `[B, 1]`."""
        return ActorNetwork(self.features_space, 1, IQLNetworkConfig.parse(self.model_config))

    def outputs(self, obs: Tree) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        """Call the networks, then the methods; see `Module.outputs`."""
        yield "v(obs)", self.v(obs), (1,)
        yield from super().outputs(obs)

    # Methods that the algorithm calls.

    def policy(self, obs: Tree) -> Tensor:
        """Map observations to `dist_inputs`, float32 `[B, D]`."""
        outputs: Tensor = self.actor(obs)
        if self.log_std is None:
            return self.mask_outputs(obs, outputs)
        means = outputs.tanh() if self.is_bounded else outputs
        return torch.cat([means, self.log_std.expand_as(means)], -1)

    def value(self, obs: Tree) -> Tensor:
        """Map observations to values, float32 `[B]`."""
        values: Tensor = self.v(obs).squeeze(-1)
        return values

    def q_taken(self, obs: Tree, actions: Tensor, *, target: bool = False) -> Tensor:
        """Return the values of all critics, `[C, B]`, for actions of the distribution."""
        if self.is_discrete:
            values = self.q_values(obs, target=target)
            return values[:, torch.arange(values.shape[1], device=values.device), actions]
        taken = actions.reshape(len(actions), -1)
        if self.is_bounded:
            taken = taken.clamp(-1, 1)  # as the env clips what the Gaussian samples
        return self.q_values(obs, taken, target=target)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of `actor`, `critic` and `value`."""
        groups = super().parameter_groups()
        if self.log_std is not None:
            groups["actor"].append(self.log_std)
        return {**groups, "value": list(self.v.parameters())}

    def acting_weights(self) -> dict[str, Tensor]:
        """Return the weights of the policy."""
        own = {} if self.log_std is None else {"log_std": self.log_std.detach()}
        return {**super().acting_weights(), **own}

    def policy_layers(self) -> tuple[list[nn.Module], nn.Parameter | None] | None:
        """Return the layers of the policy, if the actor is the default one on flat observations."""
        bounds = [nn.Tanh()] if self.is_bounded and not self.is_discrete else []
        return self.layers_after(IQLModule.policy, *bounds, log_std=self.log_std)
