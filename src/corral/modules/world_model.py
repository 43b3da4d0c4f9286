"""The world model of DreamerV3: a recurrent state-space model of observations, rewards and the ends of episodes.

Hafner et al. 2023, arXiv:2301.04104, section "World Model Learning". The state of an episode has two parts: `h`, which
a recurrent cell computes, and `z`, categorical variables. The posterior of `z` sees the observation, and the prior,
with which the model imagines, does not.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from gymnasium import spaces
from torch import Tensor, nn

from corral.core.spaces import space_tree
from corral.core.tree import Tree, leaves, map_tree
from corral.errors import ConfigError
from corral.modules.networks import first_pixel_axis, flat_encoder, is_image, mlp
from corral.modules.pixels import find_scaling
from corral.modules.two_hot import TwoHotBins, drawn, mixed_logits, one_hot, symlog

NUM_HALVINGS = 4
"""Convolutions with stride 2, each of which halves a picture."""
_FILTER = 4, 2, 1  # size, stride and padding


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the networks.

    Attributes:
        units: Width of the hidden layers.
        cell: Width of the recurrent cell.
        layers: Number of hidden layers of each network.
        variables: Number of categorical variables.
        classes: Classes of each variable.
        channels: Channels after the first convolution; each further one doubles them.
    """

    units: int
    cell: int
    layers: int
    variables: int
    classes: int
    channels: int


SIZES = {
    "nano": ModelSize(16, 16, 1, 4, 4, 2),
    "micro": ModelSize(32, 32, 1, 8, 8, 4),
    "mini": ModelSize(64, 64, 1, 16, 16, 8),
    "XXS": ModelSize(128, 128, 1, 32, 32, 16),
    "XS": ModelSize(256, 256, 1, 32, 32, 24),
    "S": ModelSize(512, 512, 2, 32, 32, 32),
    "M": ModelSize(640, 1024, 3, 32, 32, 48),
    "L": ModelSize(768, 2048, 4, 32, 32, 64),
    "XL": ModelSize(1024, 4096, 5, 32, 32, 96),
}
"""Sizes from XS on are of table B.1 of the paper; the smaller ones are RLlib's."""


def layers(num_inputs: int, num_layers: int, units: int) -> nn.Sequential:
    """Return linear layers, each with layer normalisation and SiLU."""
    return mlp(num_inputs, [units] * num_layers, "silu", layernorm=True)


def head(num_inputs: int, size: ModelSize, num_outputs: int, *, gain: float = 1.0) -> nn.Sequential:
    """Return hidden layers and a last layer; with a gain of 0 its outputs start at 0."""
    last = nn.Linear(size.units, num_outputs)
    with torch.no_grad():
        last.weight.mul_(gain)
        last.bias.zero_()
    return nn.Sequential(*layers(num_inputs, size.layers, size.units), last)


class Cell(nn.Module):
    """A GRU with layer normalisation, whose gate of updates starts almost closed (Hafner et al. 2021, appendix)."""

    def __init__(self, num_inputs: int, num_units: int) -> None:
        """Build the layer."""
        super().__init__()
        self.linear = nn.Linear(num_units + num_inputs, 3 * num_units, bias=False)
        self.norm = nn.LayerNorm(3 * num_units)

    def forward(self, inputs: Tensor, h: Tensor) -> Tensor:
        """Return the next `h`, `[B, num_units]`, for inputs `[B, num_inputs]`."""
        reset, candidate, update = self.norm(self.linear(torch.cat([h, inputs], -1))).chunk(3, -1)
        candidate = torch.tanh(reset.sigmoid() * candidate)
        return torch.lerp(h, candidate, (update - 1).sigmoid())


class _ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of each pixel, of `[B, channels, H, W]`."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Pictures(nn.Module):
    """Convolutions over pictures of one space, and their inverse.

    Attributes:
        num_outputs: Number of features of a picture.
        scaling: How pictures are scaled.
        is_wide: Whether numbers may stay far outside [-1, 1].
        description: What pictures there are, in words.
    """

    offset: Tensor
    scale: Tensor

    def __init__(self, space: spaces.Box, size: ModelSize, num_features: int) -> None:
        """Build the layers; `num_features` is the width of what pictures are computed from.

        Raises:
            ConfigError: The convolutions do not fit the picture, or nothing says how to scale it.
        """
        super().__init__()
        rows = first_pixel_axis(space)
        height, width = space.shape[rows : rows + 2]
        multiple = 2**NUM_HALVINGS
        if height % multiple or width % multiple:
            best = [max(multiple, round(side / multiple) * multiple) for side in (height, width)]
            raise ConfigError(
                f"DreamerV3: the observations {list(space.shape)} are pictures of {height} x {width} pixels, which "
                f"{NUM_HALVINGS} convolutions must halve: height and width must be multiples of {multiple}. Resize "
                f"them, for example with gymnasium.wrappers.ResizeObservation to {tuple(best)}."
            )
        others = [axis for axis in range(len(space.shape)) if axis not in (rows, rows + 1)]
        self._axes = [0, *(axis + 1 for axis in (*others, rows, rows + 1))]  # batch, channels, pixels
        self._shape = math.prod(space.shape) // (height * width), height, width
        try:
            self.scaling = find_scaling(space)
        except ConfigError as error:
            raise ConfigError(
                f"DreamerV3: the observations {space} are pictures without bounds, which cannot be scaled: give the "
                "Box the smallest and the largest number that occur, or add transforms=[NormalizeObservations()]."
            ) from error
        self.is_wide = self.scaling.is_wide
        self.description = f"pictures {list(space.shape)}: {height} x {width} pixels, {self.scaling}"
        for name in ("offset", "scale"):
            numbers = torch.as_tensor(getattr(self.scaling, name), dtype=torch.float32)
            self.register_buffer(name, numbers, persistent=False)
        channels = [self._shape[0], *(size.channels * 2**n for n in range(NUM_HALVINGS))]
        self._small = channels[-1], height // multiple, width // multiple
        self.num_outputs = math.prod(self._small)
        down: list[nn.Module] = []
        up: list[nn.Module] = []
        for before, after in itertools.pairwise(channels):
            down += [nn.Conv2d(before, after, *_FILTER, bias=False), _ChannelNorm(after), nn.SiLU()]
        for after, before in zip(channels[:0:-1], channels[-2::-1], strict=True):
            is_last = before == channels[0] and len(up) == 3 * (NUM_HALVINGS - 1)
            up.append(nn.ConvTranspose2d(after, before, *_FILTER, bias=is_last))
            up += [] if is_last else [_ChannelNorm(before), nn.SiLU()]
        self.encoder, self.decoder = nn.Sequential(*down), nn.Sequential(*up)
        self.first = nn.Linear(num_features, self.num_outputs)

    def pixels(self, obs: Tensor) -> Tensor:
        """Return scaled pictures, float32 `[B, channels, H, W]`."""
        scaled = (obs.float() - self.offset) * self.scale
        return scaled.permute(self._axes).reshape(-1, *self._shape)

    def encode(self, obs: Tensor) -> Tensor:
        """Return features `[B, num_outputs]` of pictures `[B, ...]`."""
        features: Tensor = self.encoder(self.pixels(obs) - 0.5)
        return features.flatten(1)

    def decode(self, features: Tensor) -> Tensor:
        """Return scaled pictures, float32 `[B, channels, H, W]`, of features `[B, num_features]`."""
        pixels: Tensor = self.decoder(self.first(features).unflatten(1, self._small))
        return pixels + 0.5


class WorldModel(nn.Module):
    """Predicts observations, rewards and the ends of episodes from states of its own.

    Attributes:
        size: Sizes of the networks.
        num_features: Width of a state as the heads, the actor and the critic read it: `h` and `z`.
        bins: What the logits of rewards stand for.
    """

    def __init__(self, space: spaces.Space[Any], num_action_inputs: int, size: ModelSize) -> None:
        """Build the networks.

        Args:
            space: Space of the observations.
            num_action_inputs: Width of an action as the model reads it.
            size: Sizes of the networks.

        Raises:
            ConfigError: A picture does not fit the convolutions.
        """
        super().__init__()
        self.size, self._space = size, space_tree(space)
        num_z = size.variables * size.classes
        self.num_features = size.cell + num_z
        parts = leaves(self._space)
        self._is_picture = [is_image(part) for part in parts]
        self._is_box = [isinstance(part, spaces.Box) for part in parts]
        self.parts = nn.ModuleList(
            Pictures(part, size, self.num_features) if is_picture else flat_encoder(part)
            for part, is_picture in zip(parts, self._is_picture, strict=True)
        )
        widths = [cast(int, part.num_outputs) for part in self.parts]
        self._num_numbers = sum(n for n, is_picture in zip(widths, self._is_picture, strict=True) if not is_picture)
        num_embedded = sum(widths) - self._num_numbers
        if self._num_numbers:
            self.encoder = layers(self._num_numbers, size.layers, size.units)
            self.decoder = head(self.num_features, size, self._num_numbers)
            num_embedded += size.units
        self.first_h = nn.Parameter(torch.zeros(size.cell))
        self.cell_inputs = layers(num_z + num_action_inputs, 1, size.units)
        self.cell = Cell(size.units, size.cell)
        self.prior_head = nn.Sequential(*layers(size.cell, 1, size.units), nn.Linear(size.units, num_z))
        num_inputs = size.cell + num_embedded
        self.posterior_head = nn.Sequential(*layers(num_inputs, 1, size.units), nn.Linear(size.units, num_z))
        self.bins = TwoHotBins()
        self.reward_head = head(self.num_features, size, len(self.bins.bins), gain=0.0)
        self.continue_head = head(self.num_features, size, 1)

    # Observations.

    def _numbers(self, obs: list[Tensor]) -> Tensor:
        """Return all parts that are no pictures as one vector `[B, num_numbers]`, numbers of a Box after symlog."""
        parts = zip(self.parts, obs, self._is_picture, self._is_box, strict=True)
        found = [
            symlog(part(leaf)) if is_box else part(leaf) for part, leaf, is_picture, is_box in parts if not is_picture
        ]
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    def _pictures(self, obs: list[Tensor]) -> list[tuple[Pictures, Tensor]]:
        return [(part, leaf) for part, leaf in zip(self.parts, obs, strict=True) if isinstance(part, Pictures)]

    def _leaves(self, obs: Tree) -> list[Tensor]:
        """Return the leaves in the order of the space: the keys of a dict may come in any other."""
        found: list[Tensor] = leaves(map_tree(lambda _, leaf: leaf, self._space, obs))
        return found

    def encode(self, obs: Tree) -> Tensor:
        """Return what the posterior reads of observations, a tree of `[B, ...]`: float32 `[B, E]`."""
        given = self._leaves(obs)
        parts = [part.encode(leaf) for part, leaf in self._pictures(given)]
        if self._num_numbers:
            parts.append(self.encoder(self._numbers(given)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def observation_loss(self, features: Tensor, obs: Tree) -> Tensor:
        """Return the squared errors of the predictions, summed over an observation, `[B]`.

        Args:
            features: States `[B, num_features]`.
            obs: The observations, a tree of `[B, ...]`.
        """
        given = self._leaves(obs)
        losses = [
            (part.decode(features) - part.pixels(leaf)).square().flatten(1).sum(1)
            for part, leaf in self._pictures(given)
        ]
        if self._num_numbers:
            losses.append((self.decoder(features) - self._numbers(given)).square().sum(1))
        return torch.stack(losses).sum(0)

    # States.

    def variables(self, logits: Tensor) -> Tensor:
        """Return log-probabilities `[..., variables, classes]` of logits `[..., variables * classes]`."""
        return mixed_logits(logits.reshape(*logits.shape[:-1], self.size.variables, self.size.classes))

    def prior(self, h: Tensor) -> Tensor:
        """Return the log-probabilities of `z` without an observation, `[..., variables, classes]`."""
        return self.variables(self.prior_head(h))

    def posterior(self, h: Tensor, embedded: Tensor) -> Tensor:
        """Return the log-probabilities of `z`, given what `encode` returned for the observation."""
        return self.variables(self.posterior_head(torch.cat([h, embedded], -1)))

    def vectors(self, indices: Tensor) -> Tensor:
        """Return classes `[..., variables]` as one-hot vectors next to each other, `[..., variables * classes]`."""
        return one_hot(indices, self.size.classes).flatten(-2)

    def begin(self, h: Tensor, z: Tensor, started: Tensor) -> tuple[Tensor, Tensor]:
        """Return states `[B, ...]`, with the learned first state where `started`, float32 `[B]`, is 0."""
        first = torch.tanh(self.first_h)
        first_z = self.vectors(self.prior(first).argmax(-1))
        is_on = started.unsqueeze(-1)
        return torch.lerp(first.expand_as(h), h, is_on), torch.lerp(first_z.expand_as(z), z, is_on)

    def advance(self, h: Tensor, z: Tensor, actions: Tensor) -> Tensor:
        """Return the next `h`, `[B, cell]`, after actions `[B, num_action_inputs]` in states."""
        after: Tensor = self.cell(self.cell_inputs(torch.cat([z, actions], -1)), h)
        return after

    def observe(
        self, h: Tensor, z: Tensor, actions: Tensor, embedded: Tensor, uniform: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states of sequences, with gradients through the drawn `z` (straight-through).

        Args:
            h: First states, `[B, cell]`, those before the first observation.
            z: Their variables as vectors, `[B, variables * classes]`.
            actions: The action before each observation, `[B, L, num_action_inputs]`; zeros before the first one.
            embedded: What `encode` returned for the observations, `[B, L, E]`.
            uniform: Uniform numbers, `[B, L, variables]`.

        Returns:
            `h`, `[B, L, cell]`; `z` as vectors; and the log-probabilities of `z`, `[B, L, variables, classes]`.
        """
        states, vectors, logps = [], [], []
        for action, seen, noise in zip(actions.unbind(1), embedded.unbind(1), uniform.unbind(1), strict=True):
            h = self.advance(h, z, action)
            logp = self.posterior(h, seen)
            probs = logp.exp().flatten(-2)
            z = self.vectors(drawn(logp, noise)) + probs - probs.detach()
            states.append(h)
            vectors.append(z)
            logps.append(logp)
        return torch.stack(states, 1), torch.stack(vectors, 1), torch.stack(logps, 1)

    # Predictions for features `[..., num_features]`.

    def rewards(self, features: Tensor) -> Tensor:
        """Return the expected rewards with which states were reached, `[...]`."""
        return self.bins.mean(self.reward_head(features))

    def continues(self, features: Tensor) -> Tensor:
        """Return the logits of the probabilities that episodes do not terminate in states, `[...]`."""
        logits: Tensor = self.continue_head(features).squeeze(-1)
        return logits
