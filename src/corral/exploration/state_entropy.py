"""State entropy: rewards for observations that are far from other observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import nn

from corral.errors import ConfigError
from corral.exploration.base import not_negative
from corral.exploration.intrinsic import (
    MINIBATCH_ROWS,
    FloatArray,
    IntrinsicReward,
    Share,
    Steps,
    at_least_1,
    encoder,
    net_config,
)


class RE3(IntrinsicReward):
    """Rewards observations that are far from others, measured in the outputs of a random encoder that never learns.

    The reward of a step is `beta * log(1 + distance)`. The distance is between the next observation and its k-th
    nearest neighbour among the observations of the same rollouts and of a memory of recent steps.

    Args:
        embeds_dim: Width of the encoder's outputs.
        encoder_net_config: Settings of the encoder; see `NetworkConfig`.
        beta: Weight of the reward.
        beta_schedule: `"constant"`, or `"linear_decay"` (RLlib's name for it): `beta` is multiplied by `1 - rho` each
            time after the rewards of a round are computed.
        rho: Decay of `beta`, in [0, 1]; see `beta_schedule`.
        k_nn: Rank k of the neighbour: 1 is the nearest neighbour.
        memory_size: Number of steps in the memory.
    """

    paper = "Seo et al. 2021, arXiv:2102.09430"

    def __init__(
        self,
        action_space: spaces.Space[Any],
        *,
        embeds_dim: int = 128,
        encoder_net_config: Mapping[str, Any] | None = None,
        beta: float = 0.2,
        beta_schedule: Literal["constant", "linear_decay"] = "constant",
        rho: float = 0.1,
        k_nn: int = 50,
        memory_size: int = 4096,
        **kwargs: Any,
    ) -> None:
        super().__init__(action_space, **kwargs)
        self.embeds_dim = at_least_1(self, "embeds_dim", embeds_dim)
        self.encoder = net_config(self, "encoder_net_config", encoder_net_config)
        self.beta = not_negative(self, "beta", beta)
        self.rho = not_negative(self, "rho", rho)
        self.k_nn = at_least_1(self, "k_nn", k_nn)
        self.memory_size = at_least_1(self, "memory_size", memory_size)
        where = f"exploration_config of {type(self).__name__}"
        if beta_schedule not in ("constant", "linear_decay"):
            raise ConfigError(f"{where}: beta_schedule={beta_schedule!r} must be 'constant' or 'linear_decay'.")
        if rho > 1:
            raise ConfigError(f"{where}: rho={rho} must be in [0, 1].")
        self._decay = 1 - rho if beta_schedule == "linear_decay" else 1.0
        self._first = np.zeros((0, embeds_dim), np.float32), self.beta
        self._memory = self._first[0]

    def make_net(self) -> nn.Module:
        """Return the encoder."""
        return encoder(self.model.features_space, self.encoder, self.embeds_dim).requires_grad_(False)

    def judge(self, steps: Steps, shares: Sequence[Share], timestep: int) -> tuple[FloatArray, dict[str, float]]:
        """Return the rewards `[B]`, and `beta` and the mean distance to report."""
        with torch.inference_mode():
            new: NDArray[np.float32] = self.net(steps.next_obs).numpy()
        self._memory = np.concatenate([self._memory, new])
        distances = neighbour_distances(new, self._memory, self.k_nn)
        self._memory = self._memory[-self.memory_size :].copy()
        rewards, beta = self.beta * np.log1p(distances), self.beta
        self.beta *= self._decay
        return rewards, {"re3_beta": beta, "neighbour_distance_mean": float(distances.mean())}

    def get_state(self) -> dict[str, Any]:
        """Return the encoder, the memory and `beta`."""
        state = super().get_state()
        return {**state, "memory": self._memory, "beta": self.beta} if len(self._memory) else state

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        memory, self.beta = (state["memory"], state["beta"]) if "memory" in state else self._first
        self._memory = memory[-self.memory_size :].copy()


def neighbour_distances(points: NDArray[np.float32], among: NDArray[np.float32], k_nn: int) -> FloatArray:
    """Return the distance of each point `[B, d]` to its k-th nearest neighbour in `among` `[M, d]`, as `[B]`.

    `among` contains the points too, and a point is not its own neighbour. If a point has fewer than `k_nn` neighbours,
    the distance to the furthest is returned; if it has no neighbour, 0.
    """
    k = min(k_nn, len(among) - 1)
    center = among.mean(0)
    points, among = points - center, among - center
    lengths, squares = np.square(among).sum(-1), np.square(points).sum(-1)
    found = np.empty(len(points), np.float32)
    for start in range(0, len(points), MINIBATCH_ROWS):
        rows = slice(start, start + MINIBATCH_ROWS)
        distances = squares[rows, None] + lengths - 2 * (points[rows] @ among.T)
        found[rows] = np.partition(distances, k, -1)[:, k]  # the nearest is the point itself, or an equal point
    # The matrix product is eight times as fast as differences, but has errors of about 1e-6 of the squares. So smaller
    # distances are set to 0.
    return np.sqrt(np.where(found > 1e-5 * squares, found, 0.0), dtype=np.float64)
