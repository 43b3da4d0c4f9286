"""Random network distillation: rewards for the error with which a net predicts the output of a random net."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from corral.core.spaces import space_tree
from corral.core.tree import Tree, leaves, map_tree
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
from corral.modules.module import ModelConfig


class RND(IntrinsicReward):
    """Rewards the error with which a net predicts the output of a random net: random network distillation.

    A predictor net learns the outputs of a target net, whose random weights never change. The reward of a step is the
    mean squared difference of their outputs for the next observation, before the predictor learns from it. With
    `normalize`, observations are normalised by their running mean and standard deviation and clipped to [-5, 5], and
    rewards are divided by the running standard deviation of their discounted sums. The discount is 0.99, and the sums
    continue over the ends of episodes, as in section 2.4 of the paper.

    Args:
        embed_dim: Width of the nets' outputs.
        distill_net_config: Settings of both nets; see `NetworkConfig`.
        lr: Learning rate.
        intrinsic_reward_coeff: Weight of the reward.
        normalize: Whether observations and rewards are normalised.
    """

    paper = "Burda et al. 2018, arXiv:1810.12894"
    discount = 0.99

    def __init__(
        self,
        action_space: spaces.Space[Any],
        *,
        embed_dim: int = 128,
        distill_net_config: Mapping[str, Any] | None = None,
        lr: float = 1e-3,
        intrinsic_reward_coeff: float = 1.0,
        normalize: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(action_space, **kwargs)
        self.embed_dim = at_least_1(self, "embed_dim", embed_dim)
        self.distill = net_config(self, "distill_net_config", distill_net_config)
        self.lr = not_negative(self, "lr", lr)
        self.coeff = not_negative(self, "intrinsic_reward_coeff", intrinsic_reward_coeff)
        self.normalize = normalize
        self._return_moments = Moments()
        self._returns: dict[int, FloatArray] = {}  # discounted sums [N] at the end of the last rollout, by runner

    def make_net(self) -> nn.Module:
        return DistillationNet(self.model.features_space, self.distill, self.embed_dim, self.normalize)

    def judge(self, steps: Steps, shares: Sequence[Share], timestep: int) -> tuple[FloatArray, dict[str, float]]:
        if self.normalize:
            cast(DistillationNet, self.net).observe(steps.next_obs)
        errors = self.train(steps, timestep)[0].astype(np.float64)
        rewards = self.coeff * errors
        if self.normalize:
            for share in shares:
                self._return_moments.update(self._sums(share, errors[share.rows]))
            rewards = rewards / max(1e-8, float(np.sqrt(self._return_moments.variance)))
        return rewards, {"distillation_loss": float(errors.mean())}

    def errors(self, steps: Steps) -> tuple[Tensor, ...]:
        """Return the mean squared differences of the outputs, `[B]`."""
        return (self.net(steps.next_obs),)

    def _sums(self, share: Share, errors: FloatArray) -> FloatArray:
        """Return the discounted sum of the errors so far, at each valid step of a rollout, `[B]`."""
        rollout = share.rollout
        column, sums = np.zeros(rollout.valid.shape), np.empty(rollout.valid.shape)
        column[rollout.valid] = errors
        total = self._returns.get(rollout.worker_index)
        if total is None or not rollout.continues or len(total) != rollout.num_envs:
            total = np.zeros(rollout.num_envs)
        for t, valid in enumerate(rollout.valid):
            total = np.where(valid, self.discount * total + column[t], total)
            sums[t] = total
        self._returns[rollout.worker_index] = total
        flat: FloatArray = sums[rollout.valid]
        return flat

    def get_state(self) -> dict[str, Any]:
        """Return the nets and the running statistics."""
        state = super().get_state()
        if self._returns:
            state["returns"] = {index: total.copy() for index, total in self._returns.items()}
            state["return_moments"] = self._return_moments.get_state()
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self._returns = {index: total.copy() for index, total in state.get("returns", {}).items()}
        self._return_moments = Moments(**state.get("return_moments", {}))


class DistillationNet(nn.Module):
    """The nets of `RND`; buffers hold the running statistics that normalise observations."""

    limit = 5.0

    def __init__(self, space: spaces.Space[Any], config: ModelConfig, embed_dim: int, normalize: bool) -> None:
        """Build both nets and the buffers."""
        super().__init__()
        self._space, self._normalize = space_tree(space), normalize
        inputs = normalized_space(space) if normalize else space
        self.target = encoder(inputs, config, embed_dim).requires_grad_(False)
        self.predictor = encoder(inputs, config, embed_dim)
        boxes = [leaf for leaf in leaves(self._space) if isinstance(leaf, spaces.Box)]
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        for i, box in enumerate(boxes):
            self.register_buffer(f"mean_{i}", torch.zeros(box.shape, dtype=torch.float64))
            self.register_buffer(f"variance_{i}", torch.zeros(box.shape, dtype=torch.float64))

    def observe(self, obs: Tree) -> None:
        """Add observations `[B, ...]` to the running statistics."""
        moments = self._moments()
        for moment, leaf in zip(moments, self._boxes(obs), strict=True):
            for part in torch.split(leaf, MINIBATCH_ROWS):  # in parts, because images as float64 need much memory
                moment.update(part.numpy())
        for i, moment in enumerate(moments):
            self.get_buffer(f"mean_{i}").copy_(torch.as_tensor(moment.mean))
            self.get_buffer(f"variance_{i}").copy_(torch.as_tensor(moment.variance))
            self.get_buffer("count").fill_(moment.count)

    def _moments(self) -> list[Moments]:
        num_boxes = sum(isinstance(leaf, spaces.Box) for leaf in leaves(self._space))
        count = float(self.get_buffer("count"))
        return [
            Moments(self.get_buffer(f"mean_{i}").numpy(), self.get_buffer(f"variance_{i}").numpy(), count)
            for i in range(num_boxes)
        ]

    def _boxes(self, obs: Tree) -> list[Tensor]:
        pairs = zip(leaves(self._space), leaves(map_tree(lambda _, leaf: leaf, self._space, obs)), strict=True)
        return [leaf for space, leaf in pairs if isinstance(space, spaces.Box)]

    def forward(self, obs: Tree) -> Tensor:
        """Return the mean squared difference of the nets' outputs, `[B]`."""
        if self._normalize:
            moments = iter(self._moments())
            obs = map_tree(lambda space, leaf: self._scaled(space, leaf, moments), self._space, obs)
        with torch.no_grad():
            wanted = self.target(obs)
        errors: Tensor = (self.predictor(obs) - wanted).square().mean(-1)
        return errors

    def _scaled(self, space: spaces.Space[Any], leaf: Tensor, moments: Iterator[Moments]) -> Tensor:
        if not isinstance(space, spaces.Box):
            return leaf
        moment = next(moments)
        deviation = np.sqrt(np.asarray(moment.variance) + 1e-8)
        scaled = (leaf.double() - torch.as_tensor(moment.mean)) / torch.as_tensor(deviation)
        return scaled.clamp(-self.limit, self.limit).float()


class Moments:
    """Running mean and variance of arrays, per entry.

    Attributes:
        mean: Running mean.
        variance: Running variance.
        count: Number of rows added so far.
    """

    def __init__(self, mean: Any = 0.0, variance: Any = 0.0, count: float = 0.0) -> None:
        """Set the statistics."""
        self.mean, self.variance, self.count = mean, variance, count

    def update(self, values: NDArray[Any]) -> None:
        """Add values `[B, ...]`; variances are merged as in Chan et al. 1979."""
        values = values.astype(np.float64)
        count = self.count + len(values)
        delta, share = values.mean(0) - self.mean, len(values) / count
        self.variance = (1 - share) * self.variance + share * (values.var(0) + (1 - share) * delta * delta)
        self.mean = self.mean + share * delta
        self.count = count

    def get_state(self) -> dict[str, Any]:
        """Return mean, variance and count."""
        return {"mean": self.mean, "variance": self.variance, "count": self.count}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `get_state` returned."""
        self.mean, self.variance, self.count = state["mean"], state["variance"], state["count"]


def normalized_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space of observations whose Box entries are normalised: all Box entries are unbounded float32."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: normalized_space(part) for key, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([normalized_space(part) for part in space.spaces])
    return spaces.Box(-np.inf, np.inf, space.shape, np.float32) if isinstance(space, spaces.Box) else space
