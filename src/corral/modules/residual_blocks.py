"""Residual blocks in place of plain hidden layers: SimBa and SimbaV2.

SimBa is Lee et al. 2024 (arXiv:2410.09754), SimbaV2 is Lee et al. 2025 (arXiv:2502.15280). Both normalise observations
by running statistics, which is a transform here: see `corral.modules.transforms.architectures`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from corral.errors import ConfigError
from corral.modules.layers import ConstrainedLayer
from corral.modules.networks import FloatArray, LayerNorm, arrays_of, initialize, set_weights

EXPANSION = 4
"""Width of the hidden layer of a block, in widths of the block."""
SHIFT = 3.0
"""What SimbaV2 appends to inputs before it scales them to norm 1, so that their norm is not lost."""
EPSILON = 1e-8
"""What keeps a block of SimbaV2 from a vector of zeros, which has no direction."""


def make_blocks(config: Any, num_inputs: int, hiddens: Sequence[int]) -> nn.Sequential:
    """Return the hidden layers of an architecture: an embedding, and one block for each of `hiddens`.

    Args:
        config: Settings of the network, with the architecture `"simba"` or `"simba_v2"`.
        num_inputs: Width of the inputs.
        hiddens: Widths of the blocks, all of them the same; no block gives the identity.

    Raises:
        ConfigError: The widths differ.
    """
    if len(set(hiddens)) > 1:
        raise ConfigError(
            f"model_config: architecture={config.architecture!r} adds the output of each block to its input, "
            f"so all blocks need the same width: not {list(hiddens)}, such as {[hiddens[0]] * len(hiddens)}."
        )
    if not hiddens:
        return nn.Sequential()
    width, num_blocks = hiddens[0], len(hiddens)
    if config.architecture == "simba":
        embedding = initialize(nn.Linear(num_inputs, width), 1.0, config, "fcnet")
        blocks = [ResidualBlock(width, config) for _ in hiddens]
        return nn.Sequential(embedding, *blocks, LayerNorm(width))
    return nn.Sequential(
        SphereEmbedding(num_inputs, width, config), *(SphereBlock(width, num_blocks, config) for _ in hiddens)
    )


class ResidualBlock(nn.Module):
    """A block of SimBa: a layer normalisation, two linear layers with a ReLU between them, and the input added."""

    def __init__(self, width: int, config: Any) -> None:
        """Build the layers; unless the config says otherwise, weights start as in He et al. 2015 (arXiv:1502.01852)."""
        super().__init__()
        self.norm = LayerNorm(width)
        self.expand = nn.Linear(width, EXPANSION * width)
        self.contract = nn.Linear(EXPANSION * width, width)
        start = partial(nn.init.kaiming_normal_, nonlinearity="relu")
        for layer in (self.expand, self.contract):
            set_weights(layer.weight, config, "fcnet", "kernel", start)
            set_weights(layer.bias, config, "fcnet", "bias", nn.init.zeros_)

    def forward(self, features: Tensor) -> Tensor:
        """Map `[B, width]` to `[B, width]`."""
        changes: Tensor = self.contract(self.expand(self.norm(features)).relu())
        return features + changes

    def numpy_form(self) -> Callable[[FloatArray], FloatArray]:
        """Return the block as a function of an array; see `corral.modules.inference`."""
        norm, expand, contract = self.norm.numpy_form(), arrays_of(self.expand), arrays_of(self.contract)

        def block(x: FloatArray) -> FloatArray:
            hidden: FloatArray = norm(x) @ expand[0]
            hidden += expand[1]
            changes: FloatArray = np.maximum(hidden, 0, out=hidden) @ contract[0]
            changes += contract[1]
            changes += x
            return changes

        return block


class UnitLinear(nn.Linear, ConstrainedLayer):
    """A linear layer without bias whose rows of weights have norm 1, also after each gradient step."""

    def __init__(self, num_inputs: int, num_outputs: int, config: Any, part: str) -> None:
        """Start orthogonal unless the config says otherwise.

        Raises:
            ConfigError: A row of weights starts as zeros.
        """
        super().__init__(num_inputs, num_outputs, bias=False)
        set_weights(self.weight, config, part, "kernel", nn.init.orthogonal_)
        if not self.weight.norm(dim=1).all():
            raise ConfigError(
                f"model_config: {part}_kernel_initializer gives rows of zeros, which cannot have norm 1: use another."
            )
        self.constrain()

    @torch.no_grad()
    def constrain(self) -> None:
        """Scale each row of weights to norm 1, unless they are frozen; learners call it after each gradient step."""
        if self.weight.requires_grad:  # rounding would move frozen weights, and targets follow as averages
            self.weight.div_(self.weight.norm(dim=1, keepdim=True).clamp_(min=EPSILON))


class Scaler(nn.Module):
    """Multiplies each feature by a learned number.

    The number is learned in units of `scale`, by which its size in Adam's steps does not depend on where it starts.
    """

    def __init__(self, width: int, start: float, scale: float) -> None:
        """Take the first value of all numbers, and the unit."""
        super().__init__()
        self.scaler = nn.Parameter(torch.full((width,), scale))
        self.unit = start / scale

    def values(self) -> Tensor:
        """Return the numbers, `[width]`."""
        return self.scaler * self.unit

    def numpy_values(self) -> FloatArray:
        """Return the numbers as a new array."""
        values: FloatArray = self.scaler.detach().numpy() * np.float32(self.unit)
        return values

    def forward(self, features: Tensor) -> Tensor:
        """Scale `[B, width]`."""
        return features * self.values()


class SphereEmbedding(nn.Module):
    """Maps inputs to vectors of norm 1, with a constant appended to the inputs so that their norm has an effect."""

    def __init__(self, num_inputs: int, width: int, config: Any) -> None:
        """Build the layers."""
        super().__init__()
        self.linear = UnitLinear(num_inputs + 1, width, config, "fcnet")
        self.scaler = Scaler(width, *[math.sqrt(2 / width)] * 2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `[B, num_inputs]` to `[B, width]`."""
        shifted = functional.normalize(functional.pad(inputs, (0, 1), value=SHIFT), dim=-1)
        return functional.normalize(self.scaler(self.linear(shifted)), dim=-1)

    def numpy_form(self) -> Callable[[FloatArray], FloatArray]:
        """Return the embedding as a function of an array; see `corral.modules.inference`."""
        # The length of the input before the linear layer cancels out, because the output is scaled to norm 1.
        weight, values = self.linear.weight.detach().numpy().T, self.scaler.numpy_values()
        matrix, bias = weight[:-1], SHIFT * weight[-1]

        def embedding(x: FloatArray) -> FloatArray:
            features: FloatArray = x @ matrix
            features += bias
            features *= values
            return scale_to_sphere(features)

        return embedding


class SphereBlock(nn.Module):
    """A block of SimbaV2: a step on the sphere of norm 1 from the input towards what two linear layers return."""

    def __init__(self, width: int, num_blocks: int, config: Any) -> None:
        """Build the layers; all blocks together start with steps of `1 / (num_blocks + 1)` of the way."""
        super().__init__()
        self.expand = UnitLinear(width, EXPANSION * width, config, "fcnet")
        self.scaler = Scaler(EXPANSION * width, *[math.sqrt(2 / width) / math.sqrt(EXPANSION)] * 2)
        self.contract = UnitLinear(EXPANSION * width, width, config, "fcnet")
        self.step = Scaler(width, 1 / (num_blocks + 1), 1 / math.sqrt(width))

    def forward(self, features: Tensor) -> Tensor:
        """Map `[B, width]` of norm 1 to `[B, width]` of norm 1."""
        hidden = self.scaler(self.expand(features)).relu() + EPSILON
        aim = functional.normalize(self.contract(hidden), dim=-1)
        return functional.normalize(features + self.step(aim - features), dim=-1)

    def numpy_form(self) -> Callable[[FloatArray], FloatArray]:
        """Return the block as a function of an array; see `corral.modules.inference`."""
        expand, contract = (layer.weight.detach().numpy().T for layer in (self.expand, self.contract))
        values, step = self.scaler.numpy_values(), self.step.numpy_values()

        def block(x: FloatArray) -> FloatArray:
            hidden: FloatArray = x @ expand
            hidden *= values
            np.maximum(hidden, 0, out=hidden)
            hidden += EPSILON
            aim = scale_to_sphere(hidden @ contract)
            aim -= x
            aim *= step
            aim += x
            return scale_to_sphere(aim)

        return block


class SphereHead(nn.Module):
    """A head of SimbaV2: a linear layer, learned scales, and a linear layer with a bias; the weights have norm 1."""

    def __init__(self, num_inputs: int, num_outputs: int, config: Any) -> None:
        """Build the layers."""
        super().__init__()
        self.hidden = UnitLinear(num_inputs, num_inputs, config, "head")
        self.scaler = Scaler(num_inputs, 1.0, 1.0)
        self.linear = UnitLinear(num_inputs, num_outputs, config, "head")
        self.bias = nn.Parameter(torch.zeros(num_outputs))
        set_weights(self.bias, config, "head", "bias", nn.init.zeros_)

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return the weight `[out, in]` and bias `[out]` of the linear function that the head is."""
        return (self.linear.weight * self.scaler.values()) @ self.hidden.weight, self.bias

    def forward(self, features: Tensor) -> Tensor:
        """Map `[B, in]` to `[B, out]`."""
        outputs: Tensor = self.linear(self.scaler(self.hidden(features))) + self.bias
        return outputs


def scale_to_sphere(x: FloatArray) -> FloatArray:
    """Scale rows `[B, n]` to norm 1 in place, and return them."""
    norms = np.sqrt(np.einsum("ij,ij->i", x, x))[:, None]
    x /= np.maximum(norms, 1e-12, out=norms)  # as `torch.nn.functional.normalize`
    return x
