"""Modules of PQN: Q-networks with layer normalisation and without target networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gymnasium import spaces

from corral.modules.module import MemoryConfig, NetworkConfig
from corral.modules.q_module import QModule
from corral.modules.recurrent_q_module import RecurrentQModule

IMAGE_FEATURES = 512


@dataclass
class NormedConfig(NetworkConfig):
    """Settings of networks with layer normalisation, which bounds their values where nothing else does.

    The layer of 512 after the convolutions of images is a hidden layer, so that it is normalised too.
    """

    DEFAULT_HIDDENS: ClassVar[tuple[int, ...]] = (128, 128)

    use_layernorm: bool = True
    conv_features: int | None = None

    def hiddens_for(self, space: spaces.Space[Any]) -> list[int]:
        """Return the widths of the hidden layers for observations of a space."""
        hiddens = super().hiddens_for(space)
        return [IMAGE_FEATURES] if self.fcnet_hiddens is None and not hiddens else hiddens


@dataclass
class NormedMemoryConfig(NormedConfig, MemoryConfig):
    """Settings of the same networks with a recurrent layer; see `MemoryConfig`."""


class PQNModule(QModule):
    """The default module of PQN: a Q-network, without a target network."""

    CONFIG = NormedConfig
    has_targets = False


class RecurrentPQNModule(RecurrentQModule):
    """The default module of PQN with memory."""

    CONFIG = NormedMemoryConfig
    has_targets = False
