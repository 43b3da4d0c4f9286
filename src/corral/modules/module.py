"""Modules: `nn.Module`s with a policy and a value. The default module is built from the spaces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from gymnasium import spaces
from pydantic import AfterValidator
from torch import Tensor, nn

from corral.core.settings import OneOf, PositiveInt, parse_settings
from corral.core.spaces import space_tree
from corral.core.tree import Tree, leaves
from corral.modules.distributions import DiagGaussian, action_distribution
from corral.modules.networks import ACTIVATIONS, ConvFilters, Encoder, Flat, is_image, orthogonal


@dataclass
class NetworkConfig:
    """Settings of every default module, given with `.rl_module(model_config={...})`.

    Attributes:
        fcnet_hiddens: Widths of the hidden layers; `None` is no hidden layer if all observations are images, and
            `DEFAULT_HIDDENS` otherwise.
        fcnet_activation: Activation after each hidden layer: tanh, relu, elu, gelu or silu.
        conv_filters: Convolutional layers, `[[out_channels, kernel, stride], ...]`; `None` chooses by the size of the
            image.
        conv_activation: Activation after each convolutional layer, and after the layer of `conv_features`.
        conv_features: Width of the linear layer between the convolutions of an image and the hidden layers.
    """

    DEFAULT_HIDDENS: ClassVar[tuple[int, ...]] = (64, 64)

    fcnet_hiddens: tuple[PositiveInt, ...] | None = None
    fcnet_activation: Annotated[str, AfterValidator(OneOf(tuple(ACTIVATIONS)))] = "relu"
    conv_filters: ConvFilters | None = None
    conv_activation: Annotated[str, AfterValidator(OneOf(tuple(ACTIVATIONS)))] = "relu"
    conv_features: PositiveInt = 512

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Return the config with these settings, after checking names and values.

        Raises:
            ConfigError: A name is unknown, or a value has the wrong type or is out of bounds.
        """
        return parse_settings(cls, settings, "model_config")

    def hiddens_for(self, space: spaces.Space[Any]) -> list[int]:
        """Return the widths of the hidden layers for observations of a space."""
        if self.fcnet_hiddens is not None:
            return list(self.fcnet_hiddens)
        return [] if all(map(is_image, leaves(space_tree(space)))) else list(self.DEFAULT_HIDDENS)


class Module(nn.Module):
    """The base of all modules: what runners and learners call. Subclasses define `policy` and `value`.

    Attributes:
        distribution: Distribution over actions whose parameters `policy` returns; built from the action space and
            `action_bounds`.
        MUST_DEFINE: Names of the methods that a custom subclass must define.
        CONFIG: Dataclass of the settings in `model_config`; with `None` the class reads `model_config` itself.
    """

    MUST_DEFINE: ClassVar[tuple[str, ...]] = ("policy", "value")
    CONFIG: ClassVar[type[NetworkConfig] | None] = None

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Store the spaces and build the action distribution.

        Args:
            observation_space: Space of one observation.
            action_space: Space of one action.
            model_config: The settings given to `.rl_module(model_config=...)`, for the subclass to read.
        """
        super().__init__()
        self.observation_space = observation_space
        self.action_space = action_space
        self.distribution = action_distribution(action_space, model_config.get("action_bounds", "clip"))

    def policy(self, obs: Tree) -> Tensor:
        """Map observations (a tree of `[B, ...]`) to `dist_inputs`, float32 `[B, distribution.num_inputs]`."""
        raise TypeError(f"{type(self).__name__} has no method policy(obs) -> dist_inputs [B, D].")

    def value(self, obs: Tree) -> Tensor:
        """Map observations (a tree of `[B, ...]`) to state values, float32 `[B]`."""
        raise TypeError(f"{type(self).__name__} has no method value(obs) -> values [B].")

    def policy_and_value(self, obs: Tree) -> tuple[Tensor, Tensor]:
        """Return `policy(obs)` and `value(obs)`; override it if they share layers."""
        return self.policy(obs), self.value(obs)

    def forward(self, obs: Tree) -> Tensor:
        """Return `policy(obs)`, so that a module that is called returns `dist_inputs`, float32 `[B, D]`."""
        return self.policy(obs)

    def outputs(self, obs: Tree) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        """Call the methods that the class defines, and yield each call, its output, and the shape after axis 0.

        The check of a new module compares them. Override it to have other methods checked too.
        """
        own, num_inputs = type(self), (self.distribution.num_inputs,)
        if own.policy is not Module.policy:
            yield "policy(obs)", self.policy(obs), num_inputs
        if own.value is not Module.value:
            yield "value(obs)", self.value(obs), ()
        if own.policy_and_value is not Module.policy_and_value:
            both = self.policy_and_value(obs)
            policy, value = both if isinstance(both, (tuple, list)) and len(both) == 2 else (both, None)
            yield "policy_and_value(obs)[0]", policy, num_inputs
            yield "policy_and_value(obs)[1]", value, ()

    def acting_weights(self) -> dict[str, Tensor]:
        """Return the part of `state_dict` that `policy` needs, which is sent to the runners; all of it by default."""
        return self.state_dict()

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters by group; each group is clipped separately and may have its own learning rate."""
        return {"default": list(self.parameters())}

    @property
    def is_noisy(self) -> bool:
        """Whether the module has noisy layers."""
        return False

    def draw_noise(self, rng: np.random.Generator | None = None) -> None:
        """Draw new noise for noisy layers, from torch's global generator if `rng` is `None`."""

    def silence_noise(self) -> None:
        """Set the noise of noisy layers to zero."""

    def policy_layers(self) -> tuple[list[nn.Module], nn.Parameter | None] | None:
        """Return the policy as a stack of linear and activation layers on a flat observation, or `None`.

        Runners compute such a stack in NumPy, which is several times faster than torch for small networks. Hooks of the
        layers do not fire then. A layer of another class that computes a linear function must have a method `affine`
        that returns its weight `[out, in]` and bias `[out]`. The second entry of the result is a vector that the policy
        appends to the output of the stack, such as a learned log standard deviation.
        """
        return None


@dataclass
class ModelConfig(NetworkConfig):
    """Settings of the default module of policy-gradient algorithms, in addition to `NetworkConfig`.

    Attributes:
        vf_share_layers: Whether policy and value share the hidden layers; `None` shares them only for images.
        free_log_std: Whether the log standard deviation of Box actions is one learned vector rather than an output of
            the network.
        initial_log_std: Initial value of the log standard deviation of Box actions.
        action_bounds: How Box actions are kept within their bounds: `"clip"` or `"squash"` (tanh). With
            `.environment(normalize_actions=False)` the config sets `"clip_unscaled"` or `"none"`.
    """

    fcnet_activation: str = "tanh"
    vf_share_layers: bool | None = None
    free_log_std: bool = True
    initial_log_std: float = 0.0
    action_bounds: Literal["clip", "squash", "clip_unscaled", "none"] = "clip"


class ActorCritic(Module):
    """The default module of policy-gradient algorithms: an encoder, a policy head and a value head.

    Hidden layers start orthogonal with gain sqrt(2), the policy head with gain 0.01 and the value head with 1
    (Andrychowicz et al. 2021, arXiv:2006.05990), so the initial policy is close to uniform.
    """

    CONFIG = ModelConfig
    _SMALL_POLICY_GAIN: ClassVar[float] = 0.01

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Build the layers from the spaces; see `ModelConfig` for the settings."""
        super().__init__(observation_space, action_space, model_config)
        config = ModelConfig.parse(model_config)
        hiddens = config.hiddens_for(observation_space)
        share = config.vf_share_layers
        if share is None:
            share = any(is_image(leaf) for leaf in leaves(space_tree(observation_space)))
        self.policy_encoder = Encoder(observation_space, hiddens, config)
        self.value_encoder = self.policy_encoder if share else Encoder(observation_space, hiddens, config)
        num_outputs = self.distribution.num_inputs
        self.log_std: nn.Parameter | None = None
        if isinstance(self.distribution, DiagGaussian) and config.free_log_std:
            num_outputs //= 2
            self.log_std = nn.Parameter(torch.full((num_outputs,), float(config.initial_log_std)))
        num_features = self.policy_encoder.num_outputs
        self.policy_head = orthogonal(nn.Linear(num_features, num_outputs), self._SMALL_POLICY_GAIN)
        self.value_head = orthogonal(nn.Linear(num_features, 1), 1.0)
        if isinstance(self.distribution, DiagGaussian) and self.log_std is None:
            with torch.no_grad():
                self.policy_head.bias[num_outputs // 2 :] = config.initial_log_std  # type: ignore[index]

    def _with_log_std(self, outputs: Tensor) -> Tensor:
        return outputs if self.log_std is None else torch.cat([outputs, self.log_std.expand_as(outputs)], -1)

    def policy(self, obs: Tree) -> Tensor:
        """Map observations to `dist_inputs`, float32 `[B, D]`."""
        return self._with_log_std(self.policy_head(self.policy_encoder(obs)))

    def value(self, obs: Tree) -> Tensor:
        """Map observations to state values, float32 `[B]`."""
        values: Tensor = self.value_head(self.value_encoder(obs)).squeeze(-1)
        return values

    def policy_and_value(self, obs: Tree) -> tuple[Tensor, Tensor]:
        """Return both; shared layers run once, unless a subclass overrides `policy` or `value`."""
        changed = type(self).policy is not ActorCritic.policy or type(self).value is not ActorCritic.value
        if changed or self.value_encoder is not self.policy_encoder:
            return super().policy_and_value(obs)
        features = self.policy_encoder(obs)
        return self._with_log_std(self.policy_head(features)), self.value_head(features).squeeze(-1)

    def policy_layers(self) -> tuple[list[nn.Module], nn.Parameter | None] | None:
        """Return the layers of the policy, if observations are flat and no subclass overrides `policy`."""
        if type(self).policy is not ActorCritic.policy:
            return None
        parts = self.policy_encoder.parts
        if len(parts) != 1 or not isinstance(parts[0], Flat) or not isinstance(self.observation_space, spaces.Box):
            return None
        return [*self.policy_encoder.mlp, self.policy_head], self.log_std
