"""Modules: `nn.Module`s with a policy and a value. The default module is built from the spaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from gymnasium import spaces
from pydantic import AfterValidator
from torch import Tensor, nn

from corral.core.action_masks import MASK_KEY, has_mask, without_mask
from corral.core.settings import Importable, Need, OneOf, PositiveFloat, PositiveInt, parse_settings, setting_types
from corral.core.spaces import space_tree
from corral.core.tree import Tree, leaves
from corral.core.views import Viewable
from corral.errors import ConfigError
from corral.modules.distributions import ILLEGAL, ActionDistribution, DiagGaussian
from corral.modules.html import module_html
from corral.modules.make_distribution import make_distribution
from corral.modules.memory import memory_outputs, unroll
from corral.modules.networks import (
    ACTIVATIONS,
    ConvFilters,
    Encoder,
    Initializer,
    LogStdBounds,
    LogStdClamp,
    MakeLinear,
    example_obs,
    has_image,
    is_image,
    linear,
    mlp,
)


def _increasing(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] >= bounds[1]:
        raise ValueError("the first bound must be below the second one")
    return bounds


LogStdRange = Annotated[tuple[float, float], AfterValidator(_increasing)]

DEFAULT_MAX_SEQ_LEN = 20
DEFAULT_CELL_SIZE = 64


def takes_arguments(name: str) -> Need:
    """Return the need of the keyword arguments of an initializer."""
    return Need(f"a function as {name}", lambda config: callable(getattr(config, name)))


HAS_LAYERS = Need("hidden layers (fcnet_hiddens)", lambda config: config.fcnet_hiddens != ())
HAS_HEAD_LAYERS = Need("head_hiddens", attrgetter("head_hiddens"))
HAS_ANY_LAYERS = Need(
    "hidden layers (fcnet_hiddens, head_hiddens)", lambda config: config.fcnet_hiddens != () or config.head_hiddens
)
HAS_BUILT_IN_ENCODER = Need(
    "the built-in encoder: leave out features_extractor", lambda config: not config.features_extractor
)
HAS_MEMORY = Need("use_lstm=True or use_gru=True", lambda config: config.use_lstm or config.use_gru)


@dataclass
class NetworkConfig:
    """Settings of every default module, given with `.rl_module(model_config={...})`.

    Attributes:
        architecture: What the hidden layers are: `None` is plain layers; `"simba"` is residual blocks with layer
            normalisation (Lee et al. 2024, arXiv:2410.09754), and `"simba_v2"` blocks on a sphere (Lee et al. 2025,
            arXiv:2502.15280), with scaled rewards. Both normalise observations.
        fcnet_hiddens: Widths of the hidden layers; `None` is `DEFAULT_HIDDENS`, and none if all observations are
            images. With an architecture, the widths of the blocks, all of them the same; `None` is then
            `DEFAULT_BLOCKS`.
        fcnet_activation: Activation after each hidden layer; `"linear"` is none.
        use_layernorm: Whether a layer normalisation is between each hidden layer and its activation.
        conv_filters: Convolutional layers, `[[out_channels, kernel, stride], ...]`; `None` chooses by the size of the
            image. Kernel and stride are numbers, or pairs of height and width. A fourth entry `"same"` pads images with
            zeros; `"valid"` is without padding.
        conv_activation: Activation after each convolutional layer, and after the layer of `conv_features`.
        conv_features: Width of the linear layer between the convolutions of an image and the hidden layers; `None` is
            none.
        channel_axis: Where an image has its channels: `"first"`, `[channels, height, width]`, or `"last"`. `None` takes
            two adjacent axes of equal size as the pixels if there is one such pair, and otherwise the two adjacent axes
            with the most entries.
        image_scale: Number by which the numbers in images are multiplied. `"auto"` scales them by the bounds of their
            space to [0, 1], and integers that may be negative to within [-1, 1]; numbers within [-1, 1], and floats
            that may be negative, stay.
        features_extractor: Class or function in place of the encoding of observations, or its import path: called with
            the observation space and `features_extractor_config`, it returns a `torch.nn.Module` from observations to
            features `[B, F]`, which the hidden layers read.
        features_extractor_config: Keyword arguments of `features_extractor`.
        head_hiddens: Widths of the hidden layers of each head. With `None` the last of `fcnet_hiddens` is the hidden
            layer of each stream of a Q-network, and other networks have none.
        head_activation: Activation after each hidden layer of the heads; `None` is `fcnet_activation`.
        head_use_layernorm: Whether a layer normalisation is in these layers too; `None` is `use_layernorm`.
        fcnet_kernel_initializer: How the weights of the hidden layers start: the name of a function of `torch.nn.init`,
            such as `"xavier_uniform"`; a function that sets a tensor in place, or its import path; or `"torch"`, as
            torch makes the layers. `None` is orthogonal.
        fcnet_kernel_initializer_kwargs: Its keyword arguments.
        fcnet_bias_initializer: The same for their biases; `None` is zero.
        fcnet_bias_initializer_kwargs: Its keyword arguments.
        conv_kernel_initializer: The same for the convolutions and the layer of `conv_features`.
        conv_kernel_initializer_kwargs: Its keyword arguments.
        conv_bias_initializer: The same for their biases.
        conv_bias_initializer_kwargs: Its keyword arguments.
        head_kernel_initializer: The same for the layers of the heads, the last one included.
        head_kernel_initializer_kwargs: Its keyword arguments.
        head_bias_initializer: The same for their biases.
        head_bias_initializer_kwargs: Its keyword arguments.
        action_masks: Whether the key `action_mask` of a Dict observation tells which actions are legal.
    """

    DEFAULT_HIDDENS: ClassVar[tuple[int, ...]] = (64, 64)
    DEFAULT_BLOCKS: ClassVar[tuple[int, ...]] = (128, 128)

    architecture: Annotated[
        Literal["simba", "simba_v2"] | None, Need("blocks (fcnet_hiddens)", lambda config: config.fcnet_hiddens != ())
    ] = None
    fcnet_hiddens: tuple[PositiveInt, ...] | None = None
    fcnet_activation: Annotated[Annotated[str, AfterValidator(OneOf(tuple(ACTIVATIONS)))], HAS_ANY_LAYERS] = "relu"
    use_layernorm: Annotated[bool, HAS_ANY_LAYERS] = False
    conv_filters: Annotated[ConvFilters | None, HAS_BUILT_IN_ENCODER] = None
    conv_activation: Annotated[Annotated[str, AfterValidator(OneOf(tuple(ACTIVATIONS)))], HAS_BUILT_IN_ENCODER] = "relu"
    conv_features: Annotated[PositiveInt | None, HAS_BUILT_IN_ENCODER] = 512
    channel_axis: Annotated[Literal["first", "last"] | None, HAS_BUILT_IN_ENCODER] = None
    image_scale: Annotated[PositiveFloat | Literal["auto"], HAS_BUILT_IN_ENCODER] = "auto"
    features_extractor: Importable = None
    features_extractor_config: Annotated[
        dict[str, Any], Need("features_extractor", attrgetter("features_extractor"))
    ] = field(default_factory=dict)
    head_hiddens: tuple[PositiveInt, ...] | None = None
    head_activation: Annotated[Annotated[str, AfterValidator(OneOf(tuple(ACTIVATIONS)))] | None, HAS_HEAD_LAYERS] = None
    head_use_layernorm: Annotated[bool | None, HAS_HEAD_LAYERS] = None
    fcnet_kernel_initializer: Annotated[Initializer, HAS_LAYERS] = None
    fcnet_kernel_initializer_kwargs: Annotated[dict[str, Any], takes_arguments("fcnet_kernel_initializer")] = field(
        default_factory=dict
    )
    fcnet_bias_initializer: Annotated[Initializer, HAS_LAYERS] = None
    fcnet_bias_initializer_kwargs: Annotated[dict[str, Any], takes_arguments("fcnet_bias_initializer")] = field(
        default_factory=dict
    )
    conv_kernel_initializer: Annotated[Initializer, HAS_BUILT_IN_ENCODER] = None
    conv_kernel_initializer_kwargs: Annotated[dict[str, Any], takes_arguments("conv_kernel_initializer")] = field(
        default_factory=dict
    )
    conv_bias_initializer: Annotated[Initializer, HAS_BUILT_IN_ENCODER] = None
    conv_bias_initializer_kwargs: Annotated[dict[str, Any], takes_arguments("conv_bias_initializer")] = field(
        default_factory=dict
    )
    head_kernel_initializer: Initializer = None
    head_kernel_initializer_kwargs: Annotated[dict[str, Any], takes_arguments("head_kernel_initializer")] = field(
        default_factory=dict
    )
    head_bias_initializer: Initializer = None
    head_bias_initializer_kwargs: Annotated[dict[str, Any], takes_arguments("head_bias_initializer")] = field(
        default_factory=dict
    )
    action_masks: bool = True

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Return the config with these settings, after checking names and values.

        Modules without recurrent layers take `use_lstm=False` and `use_gru=False`.

        Raises:
            ConfigError: A name is unknown, or a value has the wrong type or is out of bounds.
        """
        own: type = cls
        known = setting_types(own)
        absent = {name for name in ("use_lstm", "use_gru") if name not in known and settings.get(name) is False}
        absent |= {"critic_space", "normalize_values"}  # of other settings, which the class reads
        config = parse_settings(cls, {name: settings[name] for name in settings if name not in absent}, "model_config")
        if config.architecture is not None:
            config._refuse_layers()
        return config

    def _refuse_layers(self) -> None:
        """Refuse settings of layers that an architecture does not have."""
        default, names = type(self)(), ["fcnet_activation", "use_layernorm", "head_hiddens"]
        if self.architecture == "simba_v2":
            names.append("fcnet_bias_initializer")
        if getattr(self, "critic_hiddens", None) == ():
            raise ConfigError(
                f"model_config: architecture={self.architecture!r} needs blocks: critic_hiddens is empty."
            )
        if given := [name for name in names if getattr(self, name) != getattr(default, name)]:
            raise ConfigError(
                f"model_config: {given[0]}={getattr(self, given[0])!r} has no effect with architecture="
                f"{self.architecture!r}, whose blocks are all layers before the last one: leave one of them out."
            )

    def hiddens_for(self, space: spaces.Space[Any]) -> list[int]:
        """Return the widths of the hidden layers for observations of a space."""
        if self.fcnet_hiddens is not None:
            return list(self.fcnet_hiddens)
        if self.architecture is not None:
            return list(self.DEFAULT_BLOCKS)
        parts = leaves(space_tree(space))
        if self.features_extractor is not None:
            return list(self.DEFAULT_HIDDENS)
        return [] if all(is_image(leaf, self) for leaf in parts) else list(self.DEFAULT_HIDDENS)

    def critic_hiddens_for(self, space: spaces.Space[Any]) -> list[int]:
        """Return the widths of the hidden layers of critics for observations of a space."""
        return self.hiddens_for(space)

    def make_layers(self, num_inputs: int, hiddens: Sequence[int]) -> nn.Sequential:
        """Return the hidden layers of a network; the identity if there are none."""
        if self.architecture is not None:
            from corral.modules.residual_blocks import make_blocks

            return make_blocks(self, num_inputs, hiddens)
        return mlp(
            num_inputs,
            hiddens,
            self.fcnet_activation,
            layernorm=self.use_layernorm,
            make_linear=partial(self.make_linear, part="fcnet"),
        )

    def make_head_layers(self, num_inputs: int, make_linear: MakeLinear | None = None) -> nn.Sequential:
        """Return the hidden layers of a head, by default plain ones; the identity if there are none."""
        return mlp(
            num_inputs,
            self.head_hiddens or (),
            self.head_activation or self.fcnet_activation,
            layernorm=self.use_layernorm if self.head_use_layernorm is None else self.head_use_layernorm,
            make_linear=make_linear or partial(self.make_linear, part="head"),
        )

    def make_last_layer(self, num_inputs: int, num_outputs: int, gain: float) -> Any:
        """Return the last layer of a head on features of this width, or on the head's hidden layers."""
        return self.make_linear([num_inputs, *(self.head_hiddens or ())][-1], num_outputs, gain, "head")

    def make_linear(self, num_inputs: int, num_outputs: int, gain: float, part: str) -> Any:
        """Return a linear layer of a part, `"fcnet"` or `"head"`; the gain is the one with which weights may start."""
        if self.architecture == "simba_v2" and part == "head":
            from corral.modules.residual_blocks import SphereHead

            return SphereHead(num_inputs, num_outputs, self)
        return linear(num_inputs, num_outputs, gain, config=self, part=part)


class Module(Viewable, nn.Module):
    """The base of all modules: what runners and learners call. Subclasses define `policy` and `value`.

    Attributes:
        distribution: Distribution over actions whose parameters `policy` returns; built from the action space and
            `action_bounds`.
        has_action_mask: Whether observations hold a mask of legal actions, under the key `action_mask`.
        features_space: Space of what the networks read: the observation space without the mask.
        max_seq_len: Longest sequence, in steps, that a module with memory learns from; a key of `model_config`.
        critic_space: Space of what `value` is given in place of observations, from `model_config`, if the setting
            `critic_sees` says so; else `None`.
        MUST_DEFINE: Names of the methods that a custom subclass must define.
        CONFIG: Dataclass of the settings in `model_config`; with `None` the class reads `model_config` itself.
        ACTION_STATE: Name of the part of the state that is the latest module action, for a module with memory that
            needs it: who acts with the module writes the action there, and DreamerV3, which learns from such modules.
            `None` for other modules.
    """

    MUST_DEFINE: ClassVar[tuple[str, ...]] = ("policy", "value")
    CONFIG: ClassVar[type[NetworkConfig] | None] = None
    ACTION_STATE: ClassVar[str | None] = None

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
        self.distribution = make_distribution(
            action_space,
            model_config.get("action_bounds", "clip"),
            model_config.get("action_parts", "independent"),
            model_config.get("action_distribution"),
        )
        self.has_action_mask = bool(model_config.get("action_masks", True)) and has_mask(
            observation_space, action_space
        )
        self.features_space = without_mask(observation_space) if self.has_action_mask else observation_space
        self.max_seq_len = int(model_config.get("max_seq_len") or DEFAULT_MAX_SEQ_LEN)
        self.critic_space: spaces.Space[Any] | None = model_config.get("critic_space")

    def _repr_html_(self) -> str:
        return module_html(self)

    def mask_outputs(self, obs: Tree, outputs: Tensor) -> Tensor:
        """Return outputs `[B, n]`, logits or action values, with a large negative number for each illegal action.

        Illegal actions then have probability 0 and no gradient. Without a mask in the observations, the outputs stay as
        they are, and so do rows without a legal action: nobody acts there, but a truncated step takes its value there.
        """
        if not self.has_action_mask:
            return outputs
        illegal = obs[MASK_KEY].reshape(outputs.shape) == 0
        return outputs.masked_fill(illegal & ~illegal.all(-1, keepdim=True), ILLEGAL)

    def policy(self, obs: Tree) -> Tensor:
        """Map observations (a tree of `[B, ...]`) to `dist_inputs`, float32 `[B, distribution.num_inputs]`.

        Where observations hold a mask, the outputs have gone through `mask_outputs`.
        """
        raise TypeError(f"{type(self).__name__} has no method policy(obs) -> dist_inputs [B, D].")

    def value(self, obs: Tree) -> Tensor:
        """Map observations, or entries of `critic_space` (a tree of `[B, ...]`), to state values, float32 `[B]`."""
        raise TypeError(f"{type(self).__name__} has no method value(obs) -> values [B].")

    def policy_and_value(
        self, obs: Tree, state: Tree = None, mask: Tensor | None = None, critic_obs: Tree = None
    ) -> tuple[Tensor, Tensor]:
        """Return `policy(obs)` and `value(obs)`, or `value(critic_obs)`; override it if they share layers.

        Losses call it with `corral.modules.memory.module_inputs(batch)`. A module with memory is given sequences
        `[B, L, ...]`, their first states and their mask, and returns `[M, D]` and `[M]`. Override it if layers can
        compute whole sequences; this method takes one step after another.
        """
        if mask is not None:
            return unroll(self, obs, state, mask, critic_obs)
        return self.policy(obs), self.value(obs if critic_obs is None else critic_obs)

    def policy_for_learning(self, obs: Tree, state: Tree = None, mask: Tensor | None = None) -> Tensor:
        """Return what losses without values learn from: `policy(obs)`, or the first part of `policy_and_value`."""
        return self.policy(obs) if mask is None else self.policy_and_value(obs, state, mask)[0]

    # Memory. A module with memory defines `initial_state`, and its methods take and return states:
    # `policy(obs, state) -> (dist_inputs, state)` and `value(obs, state) -> values`, with states `[B, ...]`.

    def initial_state(self) -> Tree:
        """Return the state before the first observation of an episode, a tree of tensors `[...]` without a batch axis.

        A module that defines it has memory; see `docs/memory.md`.
        """
        raise TypeError(f"{type(self).__name__} has no memory, and so no initial_state().")

    def numpy_steps(self) -> Callable[[Any, Any], tuple[Any, Any]] | None:
        """Return `policy(obs, state)` on NumPy arrays, by the weights of now; `None` lets torch compute it.

        Runners of a module with memory call it again after each change of the weights.
        """
        return None

    @classmethod
    def has_memory(cls) -> bool:
        """Return whether the class defines `initial_state`."""
        return cls.initial_state is not Module.initial_state

    def forward(self, obs: Tree) -> Tensor:
        """Return `policy(obs)`, so that a module that is called returns `dist_inputs`, float32 `[B, D]`."""
        return self.policy(obs)

    def outputs(self, obs: Tree) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        """Call the methods that the class defines, and yield each call, its output, and the shape after axis 0.

        The check of a new module compares them. Override it to have other methods checked too.
        """
        own, num_inputs, seen = type(self), (self.distribution.num_inputs,), obs
        if self.critic_space is not None:
            seen = example_obs(self.critic_space)
        if own.has_memory():
            yield from memory_outputs(self, obs, has_value=own.value is not Module.value, critic_obs=seen)
            return
        if own.policy is not Module.policy:
            yield "policy(obs)", self.policy(obs), num_inputs
        if own.value is not Module.value:
            yield "value(obs)", self.value(seen), ()
        if own.policy_and_value is not Module.policy_and_value:
            both = self.policy_and_value(*((obs,) if seen is obs else (obs, None, None, seen)))
            policy, value = both if isinstance(both, (tuple, list)) and len(both) == 2 else (both, None)
            yield "policy_and_value(obs)[0]", policy, num_inputs
            yield "policy_and_value(obs)[1]", value, ()

    def acting_weights(self) -> dict[str, Tensor]:
        """Return the part of `state_dict` that `policy` needs, which is sent to the runners; all of it by default."""
        return self.state_dict()

    def critic_states(self, critic_obs: Tree, valid: Any) -> dict[str, Any]:
        """Return the states of a central critic with memory, by name `[T + 1, L, ...]`; without memory an empty dict.

        Runners do not know these states, because they do not see what the critic sees. Learners add them to the states
        of a rollout.

        Args:
            critic_obs: What the critic sees, a tree of tensors `[T + 1, L, ...]`.
            valid: Which rows are steps, bool `[T, L]`; after any other row an episode begins.
        """
        return {}

    def drop_critic(self) -> None:
        """Remove the layers that only a central critic needs, from a copy that acts; by default nothing."""

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

        An action mask next to the flat observation is left out: runners apply it to the output of the stack.

        Runners compute such a stack in NumPy, which is several times faster than torch for small networks. Hooks of the
        layers do not fire then. A layer of another class that computes a linear function must have a method `affine`
        that returns its weight `[out, in]` and bias `[out]`. The second entry of the result is a vector that the policy
        appends to the output of the stack, such as a learned log standard deviation.
        """
        return None


@dataclass
class MemoryConfig(NetworkConfig):
    """Settings of recurrent layers, in addition to `NetworkConfig`.

    Attributes:
        use_lstm: Whether an LSTM comes after the hidden layers, which gives the module memory.
        use_gru: Whether a GRU comes after the hidden layers.
        lstm_cell_size: Width of the LSTM; `None` is 64.
        gru_cell_size: Width of the GRU; `None` is 64.
        max_seq_len: Longest sequence, in steps, through which gradients flow; `None` is 20.
        rnn_kernel_initializer: The same for the recurrent layer. `None` is orthogonal.
        rnn_kernel_initializer_kwargs: Its keyword arguments.
        rnn_bias_initializer: The same for its biases. `None` is zero, and 1 for the forget gate of an LSTM.
        rnn_bias_initializer_kwargs: Its keyword arguments.
    """

    use_lstm: bool = False
    use_gru: bool = False
    lstm_cell_size: Annotated[PositiveInt | None, Need("use_lstm=True", attrgetter("use_lstm"))] = None
    gru_cell_size: Annotated[PositiveInt | None, Need("use_gru=True", attrgetter("use_gru"))] = None
    max_seq_len: PositiveInt | None = None
    rnn_kernel_initializer: Annotated[Initializer, HAS_MEMORY] = None
    rnn_kernel_initializer_kwargs: Annotated[dict[str, Any], takes_arguments("rnn_kernel_initializer")] = field(
        default_factory=dict
    )
    rnn_bias_initializer: Annotated[Initializer, HAS_MEMORY] = None
    rnn_bias_initializer_kwargs: Annotated[dict[str, Any], takes_arguments("rnn_bias_initializer")] = field(
        default_factory=dict
    )

    @property
    def cell_size(self) -> int:
        """Width of the recurrent layer."""
        return (self.lstm_cell_size if self.use_lstm else self.gru_cell_size) or DEFAULT_CELL_SIZE

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Return the config with these settings; see `NetworkConfig.parse`. Two recurrent layers are refused."""
        config = super().parse(settings)
        if config.use_lstm and config.use_gru:
            raise ConfigError("model_config: use_lstm and use_gru are both True: choose one of them.")
        if config.architecture is not None and (config.use_lstm or config.use_gru):
            raise ConfigError(
                f"model_config: architecture={config.architecture!r} has no recurrent layers: leave out use_lstm and "
                "use_gru, or the architecture."
            )
        return config


@dataclass
class ModelConfig(MemoryConfig):
    """Settings of the default module of policy-gradient algorithms, in addition to `MemoryConfig`.

    Attributes:
        vf_share_layers: Whether policy and value share hidden and recurrent layers; `None` shares them only for images.
        free_log_std: Whether the log standard deviation of Box actions is one learned vector rather than an output of
            the network.
        initial_log_std: Initial log standard deviation of Box actions.
        log_std_bounds: Bounds of the log standard deviation of Box actions, kept by a sigmoid; `None` is without
            bounds.
        log_std_clip: Limit c that clamps the log standard deviation of Box actions to [-c, c]; `None` does not clamp.
        action_bounds: How Box actions are kept within their bounds: `"clip"` or `"squash"` (tanh). With
            `.environment(normalize_actions=False)` the config sets `"clip_unscaled"` or `"none"`.
        action_parts: Whether the parts of Dict and Tuple actions are `"independent"`, or `"autoregressive"`: each
            depends on the nearest Discrete part before it.
        action_distribution: A subclass of `corral.modules.distributions.ActionDistribution`, or its import path, which
            is called with the action space; `None` chooses by the action space.
    """

    fcnet_activation: str = "tanh"
    vf_share_layers: bool | None = None
    free_log_std: bool = True
    initial_log_std: float = 0.0
    log_std_bounds: LogStdRange | None = None
    log_std_clip: PositiveFloat | None = None
    action_bounds: Literal["clip", "squash", "clip_unscaled", "none"] = "clip"
    action_parts: Literal["independent", "autoregressive"] = "independent"
    action_distribution: Any = None


class ActorCritic(Module):
    """The default module of policy-gradient algorithms: an encoder, a policy head and a value head.

    Unless `ModelConfig` says otherwise, hidden layers start orthogonal with gain sqrt(2), the policy head with gain
    0.01 and the value head with 1 (Andrychowicz et al. 2021, arXiv:2006.05990), so the initial policy is close to
    uniform.
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
        hiddens = config.hiddens_for(self.features_space)
        share = config.vf_share_layers
        if share is None:
            share = self.critic_space is None and has_image(self.features_space, config)
        self.policy_encoder = self.make_encoder(hiddens, config)
        if self.critic_space is None:
            self.value_encoder = self.policy_encoder if share else self.make_encoder(hiddens, config)
        elif share:
            raise ConfigError(
                "model_config: vf_share_layers=True shares layers that see one agent with a critic that sees all of "
                "them: leave it out, or leave out multi_agent(critic_sees=...)."
            )
        else:
            of_critic = config.hiddens_for(self.critic_space)
            self.value_encoder = self.make_encoder(of_critic, config, self.critic_space)
        num_outputs = self.distribution.num_inputs
        self.log_std: nn.Parameter | None = None
        self.log_std_bounds, initial_log_std = _bounds(self.distribution, config)
        columns = self.distribution.log_std_columns
        if isinstance(self.distribution, DiagGaussian) and len(columns) and config.free_log_std:
            num_outputs //= 2
            self.log_std = nn.Parameter(torch.full((num_outputs,), initial_log_std))
        num_features, num_of_value = self.policy_encoder.num_outputs, self.value_encoder.num_outputs
        self.policy_hiddens, self.value_hiddens = map(config.make_head_layers, (num_features, num_of_value))
        self.policy_head = config.make_last_layer(num_features, num_outputs, self._SMALL_POLICY_GAIN)
        self.value_head = config.make_last_layer(num_of_value, 1, 1.0)
        self.value_scale: Any = None
        if model_config.get("normalize_values"):
            from corral.modules.value_scale import ValueScale

            self.value_scale = ValueScale()
        if self.log_std is None:
            with torch.no_grad():
                self.policy_head.bias[torch.from_numpy(columns)] += initial_log_std

    def make_encoder(self, hiddens: Sequence[int], config: ModelConfig, space: spaces.Space[Any] | None = None) -> Any:
        """Return an encoder of observations, or of another space, with these hidden layers."""
        return Encoder(self.features_space if space is None else space, hiddens, config)

    def _dist_inputs(self, obs: Tree, features: Tensor) -> Tensor:
        outputs: Tensor = self.policy_head(self.policy_hiddens(features))
        if self.log_std is not None:
            outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], -1)
        if self.log_std_bounds is not None:
            outputs = self.log_std_bounds(outputs)
        return self.mask_outputs(obs, outputs) if self.has_action_mask else outputs

    def policy(self, obs: Tree) -> Tensor:
        """Map observations to `dist_inputs`, float32 `[B, D]`."""
        return self._dist_inputs(obs, self.policy_encoder(obs))

    def value(self, obs: Tree) -> Tensor:
        """Map observations, or entries of `critic_space`, to state values, float32 `[B]`."""
        return self._values(self.value_encoder(obs))

    def _values(self, features: Tensor) -> Tensor:
        values: Tensor = self.value_head(self.value_hiddens(features)).squeeze(-1)
        return values if self.value_scale is None else self.value_scale(values)

    def policy_and_value(
        self, obs: Tree, state: Tree = None, mask: Tensor | None = None, critic_obs: Tree = None
    ) -> tuple[Tensor, Tensor]:
        """Return both; shared layers run once, unless a subclass overrides `policy` or `value`."""
        changed = type(self).policy is not ActorCritic.policy or type(self).value is not ActorCritic.value
        if changed or self.value_encoder is not self.policy_encoder:
            return super().policy_and_value(obs, state, mask, critic_obs)
        features = self.policy_encoder(obs)
        return self._dist_inputs(obs, features), self._values(features)

    def acting_weights(self) -> dict[str, Tensor]:
        """Return all weights, or the weights of the policy alone if there is a central critic."""
        weights = self.state_dict()
        if self.critic_space is None:
            return weights
        return {name: value for name, value in weights.items() if not name.startswith("value_")}

    def drop_critic(self) -> None:
        """Remove the layers of a central critic."""
        if self.critic_space is not None:
            del self.value_encoder, self.value_hiddens, self.value_head, self.value_scale

    def policy_layers(self) -> tuple[list[nn.Module], nn.Parameter | None] | None:
        """Return the layers of the policy, if observations are flat and no subclass overrides `policy`."""
        if type(self).policy is not ActorCritic.policy or not self.policy_encoder.is_flat or self.log_std_bounds:
            return None
        return [*self.policy_encoder.mlp, *self.policy_hiddens, self.policy_head], self.log_std


def _bounds(distribution: ActionDistribution, config: ModelConfig) -> tuple[LogStdBounds | LogStdClamp | None, float]:
    """Return the bounds of log standard deviations, if there are any, and the initial value before these bounds.

    Raises:
        ConfigError: The actions have no deviation, or the initial one is not between the bounds.
    """
    given = {"log_std_bounds": config.log_std_bounds, "log_std_clip": config.log_std_clip}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) == 2:
        raise ConfigError(
            "model_config: log_std_bounds and log_std_clip both limit the deviation: leave one of them out."
        )
    for name, value in given.items():
        if not isinstance(distribution, DiagGaussian) or not len(distribution.log_std_columns):
            raise ConfigError(f"model_config: {name}={value} is for Box actions: leave it out.")
    if config.log_std_clip is not None:
        return LogStdClamp(-config.log_std_clip, config.log_std_clip), float(config.initial_log_std)
    if config.log_std_bounds is None:
        return None, float(config.initial_log_std)
    low, high = config.log_std_bounds
    if not low < config.initial_log_std < high:
        raise ConfigError(
            f"model_config: initial_log_std={config.initial_log_std} must be between log_std_bounds={low, high}."
        )
    bounds = LogStdBounds(low, high)
    return bounds, bounds.inverse(config.initial_log_std)
