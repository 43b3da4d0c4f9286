"""Target networks: copies that follow the trained networks slowly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class Follower:
    """Moves target networks towards the networks that they are copies of.

    Args:
        followed: The network of each target network.
    """

    def __init__(self, followed: Mapping[nn.Module, nn.Module]) -> None:
        """Keep the networks."""
        self._followed = dict(followed)
        self._found: tuple[list[Any], list[Any]] | None = None
        self._with_buffers: list[tuple[nn.Module, nn.Module]] = []

    @torch.no_grad()
    def move(self, tau: float) -> None:
        """Move the targets by a fraction `tau` of the way, and copy all buffers; 1 copies the networks."""
        if self._found is None:  # to find the parameters takes longer than to move them
            pairs = self._followed.items()
            self._found = (
                [parameter for target, _ in pairs for parameter in target.parameters()],
                [parameter for _, network in pairs for parameter in network.parameters()],
            )
            parts = (part for pair in pairs for part in zip(*map(nn.Module.modules, pair), strict=True))
            self._with_buffers = [(target, part) for target, part in parts if part._buffers]
        torch._foreach_lerp_(*self._found, tau)
        for target, part in self._with_buffers:  # a forward pass may have assigned new tensors to the buffers
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    target.get_buffer(name).copy_(buffer)
