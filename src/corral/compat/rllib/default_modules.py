"""RLlib's default modules of actor-critics and of BC as classes that user code derives from, with Corral's layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from corral.compat.rllib.constants import ACTOR, CRITIC, ENCODER_OUT, TARGET_NETWORK_ACTION_DIST_INPUTS, Columns
from corral.compat.rllib.learner import make_target_network
from corral.compat.rllib.model_config import translated
from corral.compat.rllib.module_parts import ActorCriticEncoder, PolicyEncoder, PolicyHead, ValueHead
from corral.compat.rllib.modules import TargetNetworkAPI, TorchRLModule, ValueFunctionAPI
from corral.errors import ConfigError
from corral.modules.module import ActorCritic


class DefaultPPOTorchRLModule(TorchRLModule, ValueFunctionAPI):
    """An encoder, `pi` and `vf`; without a subclass, Corral's own module takes its place.

    Attributes:
        encoder: Encoders of observations.
        pi: Layers of the policy.
        vf: Layers of the values.
    """

    IS_DEFAULT = True

    def setup(self) -> None:
        """Build the layers.

        Raises:
            ConfigError: The settings ask for memory.
        """
        net = _layers(self, "PPO")
        self.encoder, self.pi, self.vf = ActorCriticEncoder(net), PolicyHead(net), ValueHead(net)

    def _forward(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self.pi(self.encoder(batch)[ENCODER_OUT][ACTOR])}

    def _forward_train(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        features = self.encoder(batch)[ENCODER_OUT]
        return {
            Columns.ACTION_DIST_INPUTS: self.pi(features[ACTOR]),
            Columns.EMBEDDINGS: features[CRITIC],
        }

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        """Return values `[B]` of observations, or of their features."""
        if embeddings is None:
            embeddings = self.encoder(batch)[ENCODER_OUT][CRITIC]
        values: Tensor = self.vf(embeddings).squeeze(-1)
        return values


class DefaultAPPOTorchRLModule(DefaultPPOTorchRLModule, TargetNetworkAPI):
    """The same with target networks, which a loss of your own may ask for; Corral's APPO has a target policy itself."""

    IS_DEFAULT = True

    def make_target_networks(self) -> None:
        """Copy the encoder and `pi`."""
        self._old_encoder, self._old_pi = make_target_network(self.encoder), make_target_network(self.pi)

    def get_target_network_pairs(self) -> list[tuple[Any, Any]]:
        return [(self.encoder, self._old_encoder), (self.pi, self._old_pi)]

    def forward_target(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return what the copies output for observations."""
        features = self._old_encoder(batch)[ENCODER_OUT][ACTOR]
        return {TARGET_NETWORK_ACTION_DIST_INPUTS: self._old_pi(features)}


class DefaultBCTorchRLModule(TorchRLModule):
    """An encoder and a head of the policy; without a subclass, Corral's own module takes its place."""

    IS_DEFAULT = True

    def setup(self) -> None:
        """Build the layers.

        Raises:
            ConfigError: The settings ask for memory.
        """
        net = _layers(self, "BC")
        self._encoder, self._pi_head = PolicyEncoder(net), PolicyHead(net)

    def _forward(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self._pi_head(self._encoder(batch)[ENCODER_OUT])}


def _layers(module: Any, algorithm: str) -> ActorCritic:
    """Return Corral's module with the settings of a module of RLlib.

    Raises:
        ConfigError: The settings ask for memory.
    """
    settings = translated(module.model_config, algorithm)
    if settings.get("use_lstm"):
        raise ConfigError(f"{type(module).__name__}: use_lstm is for the default module, not for classes from it.")
    return ActorCritic(module.observation_space, module.action_space, settings)


DEFAULTS = {
    **{"PPO": DefaultPPOTorchRLModule, "APPO": DefaultAPPOTorchRLModule, "IMPALA": DefaultPPOTorchRLModule},
    **{"MARWIL": DefaultPPOTorchRLModule, "BC": DefaultBCTorchRLModule},
}
"""Default module classes of the algorithms that have a class of their own."""
