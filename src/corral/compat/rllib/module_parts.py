"""The parts of Corral's actor-critic modules, by the names that they have in RLlib's default modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from corral.compat.rllib.constants import ACTOR, CRITIC, ENCODER_OUT


class ActorCriticEncoder(nn.Module):
    """The encoders: `actor_encoder` and `critic_encoder`, or `encoder` if policy and values share one.

    Args:
        net: Module with a policy and values.
    """

    def __init__(self, net: Any) -> None:
        """Register the encoders."""
        super().__init__()
        self.shared = net.value_encoder is net.policy_encoder
        if self.shared:
            self.encoder = net.policy_encoder
        else:
            self.actor_encoder, self.critic_encoder = net.policy_encoder, net.value_encoder

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return features of observations, for the policy and for values."""
        if self.shared:
            features = self.encoder(batch["obs"])
            return {ENCODER_OUT: {ACTOR: features, CRITIC: features}}
        return {
            ENCODER_OUT: {ACTOR: self.actor_encoder(batch["obs"]), CRITIC: self.critic_encoder(batch["obs"])},
        }


class PolicyEncoder(nn.Module):
    """The encoder of a policy alone.

    Args:
        net: Module with a policy.
    """

    def __init__(self, net: Any) -> None:
        """Register the encoder."""
        super().__init__()
        self.encoder = net.policy_encoder

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return features of observations."""
        return {ENCODER_OUT: self.encoder(batch["obs"])}


class PolicyHead(nn.Module):
    """The layers from features to the inputs of the distribution.

    Args:
        net: Module with a policy and values.
    """

    def __init__(self, net: Any) -> None:
        """Register the layers."""
        super().__init__()
        self.hiddens, self.head, self.log_std = net.policy_hiddens, net.policy_head, net.log_std
        self._net = (net,)

    def forward(self, features: Tensor) -> Tensor:
        """Return the inputs of the distribution `[B, D]`."""
        found: Tensor = self._net[0]._dist_inputs({}, features)
        return found


class ValueHead(nn.Module):
    """The layers from features to values.

    Args:
        net: Module with a policy and values.
    """

    def __init__(self, net: Any) -> None:
        """Register the layers."""
        super().__init__()
        self.hiddens, self.head = net.value_hiddens, net.value_head

    def forward(self, features: Tensor) -> Tensor:
        """Return values `[B, 1]`."""
        found: Tensor = self.head(self.hiddens(features))
        return found
