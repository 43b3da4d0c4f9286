"""The module of implicit Q-learning: an actor, critics with targets, and a value network."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor, nn

from corral.core.spaces import is_bounded_floats
from corral.core.tree import Tree
from corral.errors import ConfigError
from corral.modules.module import Module, NetworkConfig
from corral.modules.sac_module import ActorNetwork, CriticNetwork
from corral.modules.targets import Follower


@dataclass
class IQLNetworkConfig(NetworkConfig):
    """Settings of the default module of IQL, for each of its networks; the networks share no layers."""

    DEFAULT_HIDDENS: ClassVar[tuple[int, ...]] = (256, 256)


class IQLModule(Module):
    """An actor, one or two critics with target critics that follow them slowly, and a network of state values.

    For Box actions the policy is a Gaussian, whose mean a tanh keeps within the bounds if all of them are finite, and
    whose log standard deviations are parameters that do not depend on the observation.

    For custom networks, define `make_actor`, `make_critic` or `make_value` in a subclass. The constructor calls them;
    they may read `observation_space`, `features_space`, `action_space`, `distribution`, `is_discrete` and
    `model_config`. No parameter may belong to two of the networks.

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
        """Build the networks.

        Args:
            observation_space: Space of one observation.
            action_space: Space of one action.
            model_config: The algorithm's setting `twin_q`, and the settings of the networks.

        Raises:
            ConfigError: The actions are neither Discrete nor a Box of floats.
        """
        self.is_discrete = isinstance(action_space, spaces.Discrete)
        is_floats = isinstance(action_space, spaces.Box) and action_space.dtype.kind == "f"
        if not self.is_discrete and not is_floats:
            raise ConfigError(
                f"IQL takes Discrete actions or a Box of floats, and the env's actions are {action_space}: use BC."
            )
        own = {
            name: model_config[name]
            for name in ("action_masks", "action_bounds", "max_seq_len")
            if name in model_config
        }
        super().__init__(observation_space, action_space, own)
        self.model_config = {name: value for name, value in model_config.items() if name != "action_bounds"}
        num_critics = 2 if self.model_config.pop("twin_q", True) else 1
        self.is_bounded = is_bounded_floats(action_space)
        self.actor = self.make_actor()
        self.log_std = None if self.is_discrete else nn.Parameter(torch.zeros(self.distribution.num_noise))
        self.q = nn.ModuleList(self.make_critic() for _ in range(num_critics))
        self.target_q = copy.deepcopy(self.q).requires_grad_(False)
        self.v = self.make_value()
        self._targets = Follower({self.target_q: self.q})

    # Methods that a subclass may define.

    @property
    def num_actor_outputs(self) -> int:
        """Number of outputs of the actor: logits of Discrete actions, or means of Box actions."""
        return self.distribution.num_inputs if self.is_discrete else self.distribution.num_noise

    def make_actor(self) -> nn.Module:
        """Return a new network from observations (a tree of `[B, ...]`) to `[B, num_actor_outputs]`."""
        config = IQLNetworkConfig.parse(self.model_config)
        return ActorNetwork(self.features_space, self.num_actor_outputs, config, clamp_log_std=False)

    def make_critic(self) -> nn.Module:
        """Return a new critic.

        For Box actions it is called as `critic(obs, actions)`, with actions float32 `[B, d]`, and returns `[B]`. For
        Discrete actions it is called as `critic(obs)` and returns `[B, n]`.
        """
        return CriticNetwork(self.features_space, self.action_space, IQLNetworkConfig.parse(self.model_config))

    def make_value(self) -> nn.Module:
        """Return a new network from observations to values, `[B, 1]`."""
        return ActorNetwork(self.features_space, 1, IQLNetworkConfig.parse(self.model_config), clamp_log_std=False)

    def outputs(self, obs: Tree) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        """Call the networks, then the methods; see `Module.outputs`."""
        yield "actor(obs)", self.actor(obs), (self.num_actor_outputs,)
        yield "v(obs)", self.v(obs), (1,)
        for index, critic in enumerate(self.q):
            if isinstance(self.action_space, spaces.Discrete):
                yield f"q[{index}](obs)", critic(obs), (int(self.action_space.n),)
            else:
                yield f"q[{index}](obs, actions)", critic(obs, torch.zeros(2, self.distribution.num_noise)), ()
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
        critics = self.target_q if target else self.q
        if self.is_discrete:
            values = torch.stack([critic(obs) for critic in critics])
            return values[:, torch.arange(values.shape[1], device=values.device), actions]
        taken = actions.reshape(len(actions), -1)
        if self.is_bounded:
            taken = taken.clamp(-1, 1)  # as the env clips what the Gaussian samples
        return torch.stack([critic(obs, taken) for critic in critics])

    def update_target(self, tau: float) -> None:
        """Move the target critics towards the critics by a fraction `tau`; 1 copies the critics."""
        self._targets.move(tau)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of `actor`, `critic` and `value`."""
        own = [] if self.log_std is None else [self.log_std]
        return {
            "actor": [*self.actor.parameters(), *own],
            "critic": list(self.q.parameters()),
            "value": list(self.v.parameters()),
        }

    def acting_weights(self) -> dict[str, Tensor]:
        """Return the weights of the policy."""
        own = {} if self.log_std is None else {"log_std": self.log_std.detach()}
        return {**{f"actor.{name}": value for name, value in self.actor.state_dict().items()}, **own}

    def policy_layers(self) -> tuple[list[nn.Module], nn.Parameter | None] | None:
        """Return the layers of the policy, if the actor is the default one on flat observations."""
        if type(self).policy is not IQLModule.policy or type(self.actor) is not ActorNetwork:
            return None
        if not self.actor.encoder.is_flat:
            return None
        bounds = [nn.Tanh()] if self.is_bounded and not self.is_discrete else []
        return [*self.actor.encoder.mlp, *self.actor.head, *bounds], self.log_std
