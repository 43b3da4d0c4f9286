"""RLlib's configs of layers that modules of users build: perceptrons as heads, and as encoders of observations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from corral.compat.rllib.constants import ENCODER_OUT, Columns
from corral.compat.rllib.helpers import get_activation_fn
from corral.errors import ConfigError

Initializer = str | Callable[..., Any] | None
"""Function that fills a tensor, or its name in `torch.nn.init`; `None` leaves what torch makes."""


@dataclass
class MLPHeadConfig:
    """Settings of a perceptron, with RLlib's names and defaults."""

    input_dims: Sequence[int] = field(default_factory=list)
    hidden_layer_dims: Sequence[int] = (256, 256)
    hidden_layer_use_bias: bool = True
    hidden_layer_activation: str = "relu"
    hidden_layer_use_layernorm: bool = False
    hidden_layer_weights_initializer: Initializer = None
    hidden_layer_weights_initializer_config: Mapping[str, Any] | None = None
    hidden_layer_bias_initializer: Initializer = None
    hidden_layer_bias_initializer_config: Mapping[str, Any] | None = None
    output_layer_dim: int | None = None
    output_layer_use_layernorm: bool = False
    output_layer_use_bias: bool = True
    output_layer_activation: str = "linear"
    output_layer_weights_initializer: Initializer = None
    output_layer_weights_initializer_config: Mapping[str, Any] | None = None
    output_layer_bias_initializer: Initializer = None
    output_layer_bias_initializer_config: Mapping[str, Any] | None = None
    clip_log_std: bool = False
    log_std_clip_param: float = 20.0

    @property
    def output_dims(self) -> tuple[int, ...]:
        """Size of the output."""
        dims = (*self.input_dims, *self.hidden_layer_dims, *([self.output_layer_dim] if self.output_layer_dim else []))
        return (dims[-1],)

    def build(self, framework: str = "torch") -> nn.Module:
        """Return the layers.

        Raises:
            ConfigError: A setting has a value that Corral lacks.
        """
        if framework != "torch":
            raise ConfigError(f"{type(self).__name__}.build: framework={framework!r}: use 'torch'.")
        if len(self.input_dims) != 1:
            raise ConfigError(f"{type(self).__name__}: input_dims={self.input_dims!r} must be one size, such as [32].")
        if self.clip_log_std:
            raise ConfigError(f"{type(self).__name__}: clip_log_std=True is not in Corral: clamp them in your module.")
        layers: list[nn.Module] = []
        size = self.input_dims[0]
        for kind, sizes in (
            ("hidden_layer", self.hidden_layer_dims),
            ("output_layer", [self.output_layer_dim] if self.output_layer_dim else []),
        ):
            for num_outputs in sizes:
                layers += self._layer(kind, size, num_outputs)
                size = num_outputs
        return nn.Sequential(*layers)

    def _layer(self, kind: str, num_inputs: int, num_outputs: int) -> list[nn.Module]:
        """Return a layer of one kind, and what follows it."""

        def setting(name: str) -> Any:
            return getattr(self, f"{kind}_{name}")

        linear = nn.Linear(num_inputs, num_outputs, bias=setting("use_bias"))
        for part, tensor in (("weights", linear.weight), ("bias", linear.bias)):
            given = setting(f"{part}_initializer")
            if given is not None and tensor is not None:
                fill = getattr(nn.init, given) if isinstance(given, str) else given
                fill(tensor, **(setting(f"{part}_initializer_config") or {}))
        activation = get_activation_fn(setting("activation"), framework="torch")
        norm = [nn.LayerNorm(num_outputs, eps=0.001)] if setting("use_layernorm") else []
        return [linear, *norm, *([] if activation is None else [activation()])]


@dataclass
class MLPEncoderConfig(MLPHeadConfig):
    """Settings of a perceptron that takes the observations of a batch."""

    def build(self, framework: str = "torch") -> nn.Module:
        return _Encoder(super().build(framework))


class _Encoder(nn.Module):
    """Layers that are given a batch, and return features by their name."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
        """Return the features of the observations."""
        return {ENCODER_OUT: self.net(batch[Columns.OBS])}
