"""Values in units of the deviation of their targets: Pop-Art (van Hasselt et al. 2016, arXiv:1602.07714)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

DECAY = 0.99
"""Weight of the targets of earlier batches for each later batch."""
MIN_VARIANCE = 1e-2


class ValueScale(nn.Module):
    """Maps what a value head returns to values, by mean and deviation of the value targets of recent batches."""

    def __init__(self) -> None:
        """Begin with mean 0 and deviation 1."""
        super().__init__()
        for name, value in (("mean", 0.0), ("variance", 1.0), ("mean_sum", 0.0), ("square_sum", 0.0), ("weight", 0.0)):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float64))  # squares of large values

    def forward(self, outputs: Tensor) -> Tensor:
        """Return values `[B]` for outputs `[B]`."""
        return outputs * self.variance.sqrt() + self.mean  # type: ignore[operator]

    def update(self, mean: float, square: float, head: Any) -> None:
        """Move to the targets of a batch, and change the last layer so that all values stay the same.

        Args:
            mean: Mean of the targets.
            square: Mean of their squares.
            head: The layer whose output is scaled.
        """
        own: Any = self
        before, shift = own.variance.sqrt(), own.mean.clone()
        for total, new in ((own.mean_sum, mean), (own.square_sum, square), (own.weight, 1.0)):
            total.mul_(DECAY).add_(new, alpha=1 - DECAY)
        own.mean.copy_(own.mean_sum / own.weight)  # without the bias towards the zeros that they began with
        own.variance.copy_((own.square_sum / own.weight - own.mean.square()).clamp(min=MIN_VARIANCE))
        deviation = own.variance.sqrt()
        head.weight.mul_(before / deviation)
        head.bias.mul_(before).add_(shift - own.mean).div_(deviation)


def has_value_scale(module: Any) -> bool:
    """Return whether a module scales values, and its head is one linear layer."""
    return getattr(module, "value_scale", None) is not None and type(module.value_head) is nn.Linear


def update_value_scale(module: Any, mean: float, square: float) -> None:
    """Move the scale of a module to the targets of a batch; see `ValueScale.update`."""
    module.value_scale.update(mean, square, module.value_head)
