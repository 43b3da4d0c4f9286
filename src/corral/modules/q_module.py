"""Modules with action values: a Q-network, its target network, and their dueling, noisy and distributional forms."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from corral.core.spaces import is_bounded_floats
from corral.core.tree import Tree
from corral.errors import ConfigError
from corral.modules.critics import Following
from corral.modules.module import MemoryConfig, Module, NetworkConfig
from corral.modules.networks import ACTIVATIONS, Encoder, ImageEncoder, LayerNorm, MakeLinear

NORMALIZED_NETWORK: Mapping[str, Any] = {"fcnet_hiddens": (128, 128), "use_layernorm": True}
"""Defaults of `model_config` where `is_normalized` says so."""


@dataclass
class QForm:
    """Settings of the algorithm that decide which parts a Q-network has.

    Attributes:
        dueling: Whether the head is a `DuelingHead`.
        noisy: Whether the layers after the encoder are `NoisyLinear`.
        sigma0: Initial noise of these layers.
        num_atoms: Number of atoms of the distribution of returns; 1 learns the mean return.
        v_min: Smallest atom.
        v_max: Largest atom.
        has_targets: Whether there is a target network.
        is_normalized: Whether there are hidden layers with layer normalisation where `model_config` does not say.
    """

    dueling: bool = False
    noisy: bool = False
    sigma0: float = 0.5
    num_atoms: int = 1
    v_min: float = -10.0
    v_max: float = 10.0
    has_targets: bool = True
    is_normalized: bool = False

    @classmethod
    def of(cls, model_config: Mapping[str, Any]) -> Self:
        """Return the form that is among the settings of a module."""
        return cls(**{name: model_config[name] for name in vars(cls()) if name in model_config})

    def network_config(
        self, kind: type[NetworkConfig], settings: Mapping[str, Any], space: spaces.Space[Any]
    ) -> NetworkConfig:
        """Return the settings of the layers: those given, and what normalised networks have by default.

        With a target network, what convolutions give for images needs no normalised layers.

        Args:
            kind: Class of the settings.
            settings: The given ones.
            space: Space of the observations that the network reads.
        """
        config = kind.parse(settings)
        has_layers = bool(config.hiddens_for(space) or config.head_hiddens)
        may_have_layers = has_layers or (config.fcnet_hiddens is None and not self.has_targets)
        has_own_defaults = kind not in (NetworkConfig, MemoryConfig)
        if self.is_normalized and config.architecture is None and may_have_layers and not has_own_defaults:
            config = kind.parse({**NORMALIZED_NETWORK, **settings})
        return config


class NoisyLinear(nn.Module):
    """A linear layer with learned, factorised Gaussian noise (Fortunato et al. 2018, arXiv:1706.10295, eq. 10)."""

    def __init__(self, num_inputs: int, num_outputs: int, sigma0: float) -> None:
        """Initialise as in section 3.2 of the paper; the noise is zero until it is drawn."""
        super().__init__()
        bound = 1 / math.sqrt(num_inputs)
        self.weight_mean = nn.Parameter(torch.empty(num_outputs, num_inputs).uniform_(-bound, bound))
        self.bias_mean = nn.Parameter(torch.empty(num_outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((num_outputs, num_inputs), sigma0 * bound))
        self.bias_sigma = nn.Parameter(torch.full((num_outputs,), sigma0 * bound))
        self.register_buffer("noise_in", torch.zeros(num_inputs), persistent=False)
        self.register_buffer("noise_out", torch.zeros(num_outputs), persistent=False)

    def draw(self, rng: np.random.Generator | None) -> None:
        """Draw new noise, from torch's global generator if `rng` is `None`."""
        for noise in (self.noise_in, self.noise_out):
            assert isinstance(noise, Tensor)
            normal = torch.randn(noise.shape) if rng is None else torch.from_numpy(rng.standard_normal(noise.shape))
            noise.copy_(normal.sign() * normal.abs().sqrt())

    def silence(self) -> None:
        """Set the noise to zero."""
        for noise in (self.noise_in, self.noise_out):
            assert isinstance(noise, Tensor)
            noise.zero_()

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return the weight `[out, in]` and bias `[out]` with the current noise."""
        weight = self.weight_mean + self.weight_sigma * torch.outer(self.noise_out, self.noise_in)  # type: ignore[arg-type]
        return weight, self.bias_mean + self.bias_sigma * self.noise_out  # type: ignore[operator]

    def forward(self, features: Tensor) -> Tensor:
        """Map `[B, in]` to `[B, out]`."""
        return functional.linear(features, *self.affine())


class DuelingHead(nn.Module):
    """Sums values and advantages, minus the mean advantage (Wang et al. 2016, arXiv:1511.06581, eq. 9).

    The value reads the first half of the features, the advantages read the second half, unless both read all of them.
    """

    def __init__(self, value: nn.Module, advantage: nn.Module, num_actions: int, *, halves: bool = True) -> None:
        """Take the two linear layers, each for half of the features, or for all."""
        super().__init__()
        self.value, self.advantage, self.num_actions, self.halves = value, advantage, num_actions, halves

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return the weight `[n, in]` and bias `[n]` of the whole head, with one atom."""
        (value, value_bias), (advantage, bias) = _affine(self.value), _affine(self.advantage)
        parts = value.expand_as(advantage), advantage - advantage.mean(0)
        weight = torch.cat(parts, -1) if self.halves else parts[0] + parts[1]
        return weight, value_bias + bias - bias.mean()

    def forward(self, features: Tensor) -> Tensor:
        """Map features `[B, in]` to `[B, n * atoms]`."""
        for_value, for_advantage = features.chunk(2, -1) if self.halves else (features, features)
        return sum_streams(self.value(for_value), self.advantage(for_advantage), self.num_actions)


class DuelingStreams(nn.Module):
    """A `DuelingHead` whose value and advantages have hidden layers of their own, which read the same features."""

    def __init__(self, value: nn.Module, advantage: nn.Module, num_actions: int) -> None:
        """Take the layers of the two streams."""
        super().__init__()
        self.value, self.advantage, self.num_actions = value, advantage, num_actions

    def forward(self, features: Tensor) -> Tensor:
        """Map features `[B, in]` to `[B, n * atoms]`."""
        return sum_streams(self.value(features), self.advantage(features), self.num_actions)


def sum_streams(values: Tensor, advantages: Tensor, num_actions: int) -> Tensor:
    """Return values `[B, atoms]` plus advantages `[B, n * atoms]` minus their mean over the actions."""
    value = values.unsqueeze(1)
    advantage = advantages.reshape(values.shape[0], num_actions, -1)
    outputs: Tensor = value + advantage - advantage.mean(1, keepdim=True)
    return outputs.flatten(1)


def _affine(layer: Any) -> tuple[Tensor, Tensor]:
    affine: tuple[Tensor, Tensor] = layer.affine() if hasattr(layer, "affine") else (layer.weight, layer.bias)
    return affine


class QNetwork(nn.Module):
    """An encoder, one more hidden layer (one per stream in a dueling network), and a head: `[B, n * atoms]`.

    With `head_hiddens` or an architecture the encoder has all of `fcnet_hiddens`, and the hidden layers of the head, or
    of each stream, have the widths in `head_hiddens`.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        num_actions: int,
        config: Any,
        form: QForm,
        encoder_class: Any = Encoder,
    ):
        """Build the layers; without `head_hiddens` the last of `fcnet_hiddens` is the width of each stream.

        Without hidden layers, the two streams of a dueling network read one half each of the features of an image or of
        a recurrent layer.

        Raises:
            ConfigError: A dueling network has neither a hidden layer nor an even number of features of one image or of
                a recurrent layer.
        """
        super().__init__()
        hiddens = config.hiddens_for(observation_space)
        *shared, width = hiddens or [0]
        has_blocks = config.architecture is not None
        if has_blocks or config.head_hiddens is not None:
            shared = hiddens
        self.encoder = encoder_class(observation_space, shared, config)
        num_features = self.encoder.num_outputs

        def make_linear(num_inputs: int, num_outputs: int, gain: float, part: str = "head") -> nn.Module:
            if form.noisy:
                return NoisyLinear(num_inputs, num_outputs, form.sigma0)
            layer: nn.Module = config.make_linear(num_inputs, num_outputs, gain, part)
            return layer

        if has_blocks or config.head_hiddens is not None:
            self._build_heads(make_linear, num_features, num_actions, config, form)
            return
        num_streams = 2 if form.dueling else 1
        layers: list[nn.Module] = []
        if width:
            layers = [make_linear(num_features, num_streams * width, math.sqrt(2), "fcnet")]
            if config.use_layernorm:  # of each stream on its own
                layers.append(nn.GroupNorm(num_streams, num_streams * width) if form.dueling else LayerNorm(width))
            layers.append(ACTIVATIONS[config.fcnet_activation]())
            num_features = width
        elif form.dueling:
            parts = getattr(self.encoder, "parts", None)  # a recurrent layer has none
            if (parts is not None and [type(part) for part in parts] != [ImageEncoder]) or num_features % 2:
                raise ConfigError(
                    "dueling=True needs a hidden layer for each stream: fcnet_hiddens is empty. Give fcnet_hiddens, or "
                    "an even number of features: conv_features for one image, the cell size with memory."
                )
            num_features //= 2
        self.streams = nn.Sequential(*layers)
        self.head: nn.Module = make_linear(num_features, num_actions * form.num_atoms, 1.0)
        if form.dueling:
            self.head = DuelingHead(make_linear(num_features, form.num_atoms, 1.0), self.head, num_actions)

    def _build_heads(
        self, make_linear: MakeLinear, num_features: int, num_actions: int, config: NetworkConfig, form: QForm
    ) -> None:
        """Build heads with the hidden layers of `head_hiddens`."""
        width, sizes = [num_features, *(config.head_hiddens or ())][-1], (form.num_atoms, num_actions * form.num_atoms)
        if not form.dueling:
            self.streams = config.make_head_layers(num_features, make_linear)
            self.head = make_linear(width, sizes[1], 1.0)
            return
        self.streams = nn.Sequential()
        value, advantage = (make_linear(width, size, 1.0) for size in sizes)
        if config.head_hiddens:
            hiddens = (config.make_head_layers(num_features, make_linear) for _ in sizes)
            value, advantage = (nn.Sequential(*next(hiddens), last) for last in (value, advantage))
            self.head = DuelingStreams(value, advantage, num_actions)
        else:
            self.head = DuelingHead(value, advantage, num_actions, halves=False)

    def forward(self, obs: Tree) -> Tensor:
        """Map observations, a tree of `[B, ...]`, to `[B, n * atoms]`."""
        outputs: Tensor = self.head(self.streams(self.encoder(obs)))
        return outputs


class QModule(Following, Module):
    """Values of Discrete actions, from a network and from its target network, which follows it slowly.

    For a custom network, define `make_network` in a subclass.

    Attributes:
        q: Network from observations to `[B, n * atoms]`.
        target_q: Target network, without gradients, if its form `has_targets`.
        atoms: Returns that the atoms represent, float32 `[atoms]`.
    """

    MUST_DEFINE = ()
    CONFIG: ClassVar[type[NetworkConfig]] = NetworkConfig

    atoms: Tensor

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Build both networks.

        Raises:
            ConfigError: The actions are not Discrete.
        """
        if not isinstance(action_space, spaces.Discrete):
            remedy = "SAC, TD3 or PPO" if is_bounded_floats(action_space) else "PPO"
            raise ConfigError(f"Q-values need Discrete actions, and the env's are {action_space}: use {remedy}.")
        own = {name: model_config[name] for name in ("action_masks", "max_seq_len") if name in model_config}
        super().__init__(observation_space, action_space, own)
        self.model_config = dict(model_config)
        self.form = QForm.of(model_config)
        for name in vars(self.form).keys() & model_config.keys():
            del self.model_config[name]
        self.num_actions = int(action_space.n)
        self.q = self.make_network()
        if self.form.has_targets:
            self.target_q = copy.deepcopy(self.q).requires_grad_(False)
            if any(isinstance(layer, (nn.LayerNorm, nn.GroupNorm)) for layer in self.q.modules()):
                self.auto_tau = 0.03  # without normalisation such fast targets let the values of CartPole-v1 collapse
        atoms = torch.linspace(self.form.v_min, self.form.v_max, self.form.num_atoms)
        self.register_buffer("atoms", atoms, persistent=False)
        self._noisy = [layer for layer in self.modules() if isinstance(layer, NoisyLinear)]

    def make_network(self) -> nn.Module:
        """Return a new network from observations (a tree of `[B, ...]`) to `[B, n * atoms]`."""
        return QNetwork(self.features_space, self.num_actions, self.network_config(), self.form)

    def network_config(self) -> Any:
        """Return the settings of the layers; see `QForm.network_config`."""
        return self.form.network_config(self.CONFIG, self.model_config, self.features_space)

    def logits(self, obs: Tree, *, target: bool = False) -> Tensor:
        """Return the logits of the atoms of each action's return, `[B, n, atoms]`."""
        outputs: Tensor = (self.target_q if target else self.q)(obs)
        return outputs.reshape(outputs.shape[0], self.num_actions, -1)

    def q_values(self, obs: Tree, *, target: bool = False) -> Tensor:
        """Return the value of each action, float32 `[B, n]`; a large negative number for an illegal action."""
        if self.form.num_atoms == 1:
            values: Tensor = (self.target_q if target else self.q)(obs)
        else:
            values = self.logits(obs, target=target).softmax(-1) @ self.atoms
        return self.mask_outputs(obs, values) if self.has_action_mask else values

    def outputs(self, obs: Tree) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        """Call the networks, then the methods; see `Module.outputs`."""
        num_outputs = self.num_actions * self.form.num_atoms
        for name in ("q", "target_q") if self.form.has_targets else ("q",):
            yield f"{name}(obs)", getattr(self, name)(obs), (num_outputs,)
        yield "logits(obs)", self.logits(obs), (self.num_actions, self.form.num_atoms)
        yield "q_values(obs)", self.q_values(obs), (self.num_actions,)
        yield from super().outputs(obs)

    def policy(self, obs: Tree) -> Tensor:
        """Return the action values as `dist_inputs`: the best action is the mode."""
        return self.q_values(obs)

    def value(self, obs: Tree) -> Tensor:
        """Return the value of the best action, float32 `[B]`."""
        return self.q_values(obs).amax(-1)

    def followed(self) -> dict[nn.Module, nn.Module]:
        """Return the network by its target."""
        return {self.target_q: self.q} if self.form.has_targets else {}

    def acting_weights(self) -> dict[str, Tensor]:
        """Return the weights of the network, without the weights of the target network."""
        return {name: value for name, value in self.state_dict().items() if name.startswith("q.")}

    @property
    def is_noisy(self) -> bool:
        """Whether the networks have `NoisyLinear` layers."""
        return bool(self._noisy)

    def draw_noise(self, rng: np.random.Generator | None = None) -> None:
        """Draw new noise for all noisy layers, from torch's global generator if `rng` is `None`."""
        for layer in self._noisy:
            layer.draw(rng)

    def silence_noise(self) -> None:
        """Set the noise of all noisy layers to zero."""
        for layer in self._noisy:
            layer.silence()

    def policy_layers(self) -> tuple[list[nn.Module], nn.Parameter | None] | None:
        """Return the layers of the network, if it is a plain stack on flat observations with one atom."""
        layers = self._layers(self.q)
        return None if layers is None else (layers, None)

    def _layers(self, network: nn.Module) -> list[nn.Module] | None:
        plain = type(network) is QNetwork and type(self).q_values is QModule.q_values and self.form.num_atoms == 1
        if not plain or type(self).policy is not QModule.policy:
            return None
        assert isinstance(network, QNetwork)
        if not network.encoder.is_flat:
            return None
        return [*network.encoder.mlp, *network.streams, network.head]
