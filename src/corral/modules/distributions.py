"""Action distributions, one class per kind of action space.

A distribution stores no parameters: they are `dist_inputs`, the `[B, D]` output of a module's policy. Losses call the
torch methods; runners call the NumPy methods. Sampling takes the noise as an argument, so that a runner can draw the
noise of many steps in one call.

`actions` are module actions, as stored in the columns; `to_env` converts them to actions of the env.

Where the env is on a device, `tensor_noise`, `tensor_sample`, `tensor_mode` and `tensor_to_env` do there what `noise`,
`sample`, `mode` and `to_env` do with arrays.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from corral.core.spaces import space_tree
from corral.core.tree import Tree, leaves
from corral.errors import ConfigError

FloatArray = NDArray[np.float32]
_LOG_2PI = math.log(2 * math.pi)
_LOWEST_LOGP = -1e4  # its exponential is 0 in every dtype
ILLEGAL = -1e9  # logit or value of an illegal action; finite, so that sums with it and their gradients are no NaN
UNSCALED = ("clip_unscaled", "none")  # values of `action_bounds` where module actions have the units of the env
_NEARLY_1 = 1 - 2.0**-20  # limit of squashed actions before the arctanh, whose float32 numbers come back as they were
_INSIDE = float(np.arctanh(0.999))  # limit of recorded actions where their density is maximised


class ActionDistribution(ABC):
    """Samples actions from `dist_inputs`, and computes their likelihood.

    Attributes:
        num_inputs: Width D of `dist_inputs`.
        num_noise: Width of the noise for one sample.
        num_uniform: Width of the uniform numbers for one sample in an exported graph.
        action_shape: Shape of one module action.
        action_dtype: Dtype of module actions in the columns.
        log_std_columns: Columns of `dist_inputs` that hold log standard deviations; none by default.
        has_tensor_form: Whether this class itself has the methods for tensors; a subclass must say it again.
    """

    has_tensor_form: ClassVar[bool] = False

    num_inputs: int
    num_noise: int
    num_uniform: int = 0
    action_shape: tuple[int, ...]
    action_dtype: np.dtype[Any]
    log_std_columns: NDArray[np.int64] = np.zeros(0, np.int64)

    @abstractmethod
    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
        """Draw noise for samples of `shape`, float32 `[*shape, num_noise]`."""

    @abstractmethod
    def sample(self, dist_inputs: FloatArray, noise: FloatArray) -> NDArray[Any]:
        """Return the actions `[B, ...]` for noise `[B, num_noise]`."""

    @abstractmethod
    def mode(self, dist_inputs: FloatArray) -> NDArray[Any]:
        """Return the most likely actions `[B, ...]`."""

    @abstractmethod
    def random(self, rng: np.random.Generator, batch_size: int) -> NDArray[Any]:
        """Return actions `[batch_size, ...]` drawn uniformly from the action space."""

    @abstractmethod
    def random_logp(self, actions: NDArray[Any]) -> FloatArray:
        """Return the log-probability (or log-density) `[B]` of actions that `random` drew."""

    @abstractmethod
    def to_env(self, actions: NDArray[Any]) -> Tree:
        """Convert module actions `[B, ...]` to actions of the env's space and dtype, in a new array.

        Actions of a Dict or Tuple space become a tree of arrays.
        """

    def from_env(self, actions: Tree) -> NDArray[Any]:
        """Convert actions of the env, a tree of `[B, ...]`, to module actions `[B, ...]`: the inverse of `to_env`.

        Actions outside the bounds are clipped. Learning from recorded data needs it.
        """
        raise TypeError(f"{type(self).__name__} has no method from_env(actions), which recorded actions need.")

    def from_rllib(self, actions: Tree) -> NDArray[Any]:
        """Convert recorded actions of RLlib, a tree of `[B, ...]`, to module actions `[B, ...]`.

        Of them, each Box whose bounds are all finite is in [-1, 1], and everything else in the units of the env.
        """
        return self.from_env(actions)

    @abstractmethod
    def env_mode(self, dist_inputs: Tensor) -> Tree:
        """Return `to_env(mode(dist_inputs))` in torch operations, so that an exported graph can hold them."""

    def drawn_inputs(self, dist_inputs: Tensor, uniform: Tensor, spread: Tensor) -> Tensor:
        """Return inputs `[B, D]` whose mode is a sample, in torch operations, so that an exported graph can hold them.

        Args:
            dist_inputs: Outputs of the policy, `[B, D]`.
            uniform: Numbers drawn uniformly from (0, 1), `[B, num_uniform]`.
            spread: Factor of the noise, `[]`: 1 is a sample of the distribution, and 0 its mode.
        """
        raise TypeError(f"{type(self).__name__} has no method drawn_inputs(dist_inputs, uniform, spread).")

    def random_inputs(self, dist_inputs: Tensor, uniform: Tensor) -> Tensor:
        """Return inputs `[B, D]` whose mode is drawn uniformly from the legal actions; see `drawn_inputs`."""
        raise TypeError(f"{type(self).__name__} has no method random_inputs(dist_inputs, uniform).")

    def tensor_noise(self, generator: torch.Generator, num_rows: int) -> Tensor:
        """Draw noise for samples on the device of the generator, float32 `[num_rows, num_noise]`."""
        raise TypeError(f"{type(self).__name__} has no form on tensors.")

    def tensor_sample(self, dist_inputs: Tensor, noise: Tensor) -> Tensor:
        """Return the actions `[B, ...]` for noise `[B, num_noise]`."""
        raise TypeError(f"{type(self).__name__} has no form on tensors.")

    def tensor_mode(self, dist_inputs: Tensor) -> Tensor:
        """Return the most likely actions `[B, ...]`."""
        raise TypeError(f"{type(self).__name__} has no form on tensors.")

    def tensor_to_env(self, actions: Tensor) -> Tensor:
        """Convert module actions `[B, ...]` to actions of the env's space and dtype."""
        raise TypeError(f"{type(self).__name__} has no form on tensors.")

    @abstractmethod
    def logp(self, dist_inputs: Tensor, actions: Tensor) -> Tensor:
        """Return the log-probability (or log-density) `[B]` of module actions."""

    def inside_bounds(self, actions: Tensor) -> Tensor:
        """Return recorded module actions as likelihoods learn them.

        Squashed actions are at most at 0.999 of the way to the bounds: at the bounds their density would grow without
        end, and one such action would outweigh many others.
        """
        return actions

    @abstractmethod
    def entropy(self, dist_inputs: Tensor) -> Tensor:
        """Return the entropy `[B]` in nats."""

    @abstractmethod
    def kl(self, dist_inputs: Tensor, other_inputs: Tensor) -> Tensor:
        """Return KL(dist_inputs || other_inputs) `[B]` in nats."""


class Categorical(ActionDistribution):
    """Discrete actions from logits `[B, n]`; sampled by the Gumbel-max trick (arXiv:1411.0030)."""

    has_tensor_form = True

    def __init__(self, space: spaces.Discrete) -> None:
        """Make the distribution of a Discrete space; module actions start at 0, whatever the `start` of the space."""
        self.num_inputs = self.num_noise = self.num_uniform = int(space.n)
        self.action_shape = ()
        self.action_dtype = np.dtype(np.int64)
        self._start, self._env_dtype = int(space.start), space.dtype

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
        return gumbel(rng, (*shape, self.num_noise))

    def sample(self, dist_inputs: FloatArray, noise: FloatArray) -> NDArray[Any]:
        picks: NDArray[Any] = (dist_inputs + noise).argmax(-1)
        return picks

    def mode(self, dist_inputs: FloatArray) -> NDArray[Any]:
        picks: NDArray[Any] = dist_inputs.argmax(-1)
        return picks

    def random(self, rng: np.random.Generator, batch_size: int) -> NDArray[Any]:
        return rng.integers(0, self.num_inputs, size=batch_size)

    def random_logp(self, actions: NDArray[Any]) -> FloatArray:
        return np.full(len(actions), -math.log(self.num_inputs), np.float32)

    def to_env(self, actions: NDArray[Any]) -> NDArray[Any]:
        shifted = actions + self._start if self._start else actions
        return shifted.astype(self._env_dtype)

    def from_env(self, actions: Tree) -> NDArray[Any]:
        found: NDArray[Any] = np.asarray(actions).astype(self.action_dtype) - self._start
        return found

    def env_mode(self, dist_inputs: Tensor) -> Tensor:
        return self.tensor_to_env(self.tensor_mode(dist_inputs))

    def tensor_noise(self, generator: torch.Generator, num_rows: int) -> Tensor:
        exponential = torch.empty((num_rows, self.num_noise), device=generator.device)
        return -exponential.exponential_(generator=generator).clamp(min=torch.finfo(torch.float32).tiny).log()

    def tensor_sample(self, dist_inputs: Tensor, noise: Tensor) -> Tensor:
        return self.tensor_mode(dist_inputs + noise)

    def tensor_mode(self, dist_inputs: Tensor) -> Tensor:
        return dist_inputs.argmax(-1)

    def tensor_to_env(self, actions: Tensor) -> Tensor:
        return (actions + self._start).to(_torch_dtype(self._env_dtype))

    def drawn_inputs(self, dist_inputs: Tensor, uniform: Tensor, spread: Tensor) -> Tensor:
        return dist_inputs + spread * _torch_gumbel(uniform)

    def random_inputs(self, dist_inputs: Tensor, uniform: Tensor) -> Tensor:
        return _torch_gumbel(uniform) + ILLEGAL * (dist_inputs <= ILLEGAL / 2)

    def logp(self, dist_inputs: Tensor, actions: Tensor) -> Tensor:
        return -functional.cross_entropy(dist_inputs, actions, reduction="none")

    def entropy(self, dist_inputs: Tensor) -> Tensor:
        return categorical_entropy(dist_inputs)

    def kl(self, dist_inputs: Tensor, other_inputs: Tensor) -> Tensor:
        return categorical_kl(dist_inputs, other_inputs)


class MultiCategorical(ActionDistribution):
    """Independent categoricals, one per entry of a MultiDiscrete space, from logits `[B, sum(nvec)]`."""

    has_tensor_form = True

    def __init__(self, space: spaces.MultiDiscrete) -> None:
        """Make the distribution of a MultiDiscrete space of any shape."""
        self.sizes = [int(n) for n in space.nvec.reshape(-1)]
        self.num_inputs = self.num_noise = self.num_uniform = sum(self.sizes)
        self.action_shape = tuple(space.nvec.shape)
        self.action_dtype = np.dtype(np.int64)
        self._start, self._env_dtype = space.start.astype(np.int64), space.dtype
        ends = np.cumsum(self.sizes)
        self._slices = [slice(int(end) - size, int(end)) for end, size in zip(ends, self.sizes, strict=True)]

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
        return gumbel(rng, (*shape, self.num_noise))

    def sample(self, dist_inputs: FloatArray, noise: FloatArray) -> NDArray[Any]:
        return self.mode(dist_inputs + noise)

    def mode(self, dist_inputs: FloatArray) -> NDArray[Any]:
        picks = np.stack([dist_inputs[..., part].argmax(-1) for part in self._slices], -1)
        return picks.reshape(*dist_inputs.shape[:-1], *self.action_shape)

    def random(self, rng: np.random.Generator, batch_size: int) -> NDArray[Any]:
        return rng.integers(0, self.sizes, size=(batch_size, len(self.sizes))).reshape(batch_size, *self.action_shape)

    def random_logp(self, actions: NDArray[Any]) -> FloatArray:
        return np.full(len(actions), -sum(map(math.log, self.sizes)), np.float32)

    def to_env(self, actions: NDArray[Any]) -> NDArray[Any]:
        return (actions + self._start).astype(self._env_dtype, copy=False)

    def from_env(self, actions: Tree) -> NDArray[Any]:
        found: NDArray[Any] = np.asarray(actions).astype(self.action_dtype) - self._start
        return found

    def env_mode(self, dist_inputs: Tensor) -> Tensor:
        return self.tensor_to_env(self.tensor_mode(dist_inputs))

    drawn_inputs, random_inputs = Categorical.drawn_inputs, Categorical.random_inputs  # of logits, too
    tensor_noise, tensor_sample = Categorical.tensor_noise, Categorical.tensor_sample

    def tensor_mode(self, dist_inputs: Tensor) -> Tensor:
        picks = torch.stack([part.argmax(-1) for part in self._parts(dist_inputs)], -1)
        return picks.reshape(-1, *self.action_shape)

    def tensor_to_env(self, actions: Tensor) -> Tensor:
        shifted = actions + torch.from_numpy(self._start).to(actions.device) if self._start.any() else actions
        return shifted.to(_torch_dtype(self._env_dtype), copy=True)  # an env may write into its actions

    def _parts(self, dist_inputs: Tensor) -> tuple[Tensor, ...]:
        return torch.split(dist_inputs, self.sizes, dim=-1)

    def logp(self, dist_inputs: Tensor, actions: Tensor) -> Tensor:
        picks = actions.reshape(actions.shape[0], -1, 1).unbind(1)
        pairs = zip(self._parts(dist_inputs), picks, strict=True)
        parts = [part.log_softmax(-1).gather(-1, pick) for part, pick in pairs]
        return torch.cat(parts, -1).sum(-1)

    def entropy(self, dist_inputs: Tensor) -> Tensor:
        return torch.stack([categorical_entropy(part) for part in self._parts(dist_inputs)]).sum(0)

    def kl(self, dist_inputs: Tensor, other_inputs: Tensor) -> Tensor:
        pairs = zip(self._parts(dist_inputs), self._parts(other_inputs), strict=True)
        return torch.stack([categorical_kl(part, other) for part, other in pairs]).sum(0)


class Bernoulli(ActionDistribution):
    """Independent Bernoulli variables, one per entry of a MultiBinary space, from logits `[B, n]`."""

    has_tensor_form = True

    def __init__(self, space: spaces.MultiBinary) -> None:
        """Make the distribution of a MultiBinary space of any shape."""
        self.action_shape = tuple(space.shape)
        self.num_inputs = self.num_noise = self.num_uniform = math.prod(self.action_shape)
        self.action_dtype = np.dtype(np.int8)
        self._env_dtype = space.dtype

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
        return rng.logistic(size=(*shape, self.num_noise)).astype(np.float32)

    def sample(self, dist_inputs: FloatArray, noise: FloatArray) -> NDArray[Any]:
        return self.mode(dist_inputs + noise)

    def mode(self, dist_inputs: FloatArray) -> NDArray[Any]:
        return (dist_inputs > 0).astype(np.int8).reshape(*dist_inputs.shape[:-1], *self.action_shape)

    def random(self, rng: np.random.Generator, batch_size: int) -> NDArray[Any]:
        return rng.integers(0, 2, size=(batch_size, *self.action_shape), dtype=np.int8)

    def random_logp(self, actions: NDArray[Any]) -> FloatArray:
        return np.full(len(actions), -self.num_inputs * math.log(2), np.float32)

    def to_env(self, actions: NDArray[Any]) -> NDArray[Any]:
        return actions.astype(self._env_dtype)

    def from_env(self, actions: Tree) -> NDArray[Any]:
        return np.asarray(actions).astype(self.action_dtype)

    def env_mode(self, dist_inputs: Tensor) -> Tensor:
        return self.tensor_to_env(self.tensor_mode(dist_inputs))

    def tensor_noise(self, generator: torch.Generator, num_rows: int) -> Tensor:
        uniform = torch.rand((num_rows, self.num_noise), device=generator.device, generator=generator)
        return self.random_inputs(uniform, uniform.clamp(min=torch.finfo(torch.float32).tiny))

    def tensor_sample(self, dist_inputs: Tensor, noise: Tensor) -> Tensor:
        return self.tensor_mode(dist_inputs + noise)

    def tensor_mode(self, dist_inputs: Tensor) -> Tensor:
        return (dist_inputs > 0).to(torch.int8).reshape(-1, *self.action_shape)

    def tensor_to_env(self, actions: Tensor) -> Tensor:
        return actions.to(_torch_dtype(self._env_dtype), copy=True)

    def drawn_inputs(self, dist_inputs: Tensor, uniform: Tensor, spread: Tensor) -> Tensor:
        return dist_inputs + spread * self.random_inputs(dist_inputs, uniform)

    def random_inputs(self, dist_inputs: Tensor, uniform: Tensor) -> Tensor:
        return uniform.log() - (1 - uniform).log()

    def logp(self, dist_inputs: Tensor, actions: Tensor) -> Tensor:
        signs = actions.reshape(dist_inputs.shape) * 2 - 1
        return functional.logsigmoid(signs * dist_inputs).sum(-1)

    def entropy(self, dist_inputs: Tensor) -> Tensor:
        # H = softplus(l) - l * sigmoid(l): finite for every finite logit, unlike p * log(p).
        largest = torch.finfo(dist_inputs.dtype).max
        logits = dist_inputs.clamp(-largest, largest)
        return (functional.softplus(logits) - logits * logits.sigmoid()).sum(-1)

    def kl(self, dist_inputs: Tensor, other_inputs: Tensor) -> Tensor:
        p = dist_inputs.sigmoid()
        on = functional.logsigmoid(dist_inputs) - functional.logsigmoid(other_inputs)
        off = functional.logsigmoid(-dist_inputs) - functional.logsigmoid(-other_inputs)
        on, off = on.masked_fill(dist_inputs == -math.inf, 0), off.masked_fill(dist_inputs == math.inf, 0)
        return (p * on + (1 - p) * off).sum(-1)


class DiagGaussian(ActionDistribution):
    """A Gaussian with diagonal covariance from `[B, 2d]`: means, then log standard deviations.

    `to_env` respects the bounds by clipping. In a dimension with two finite bounds, module actions are clipped to
    [-1, 1] and mapped to [low, high]. In any other dimension they have the units of the env and are clipped to the
    finite bound, if there is one. `logp` is the log-density of the module action before clipping.
    """

    has_tensor_form = True

    def __init__(self, space: spaces.Box, *, scaled: bool = True, clipped: bool = True) -> None:
        """Make the distribution of a Box space of any shape.

        Args:
            space: The space.
            scaled: Whether [-1, 1] is mapped to finite bounds; otherwise all module actions have the env's units.
            clipped: Whether actions without scale are clipped to the bounds.
        """
        self.action_shape = tuple(space.shape)
        self.num_noise = math.prod(self.action_shape)
        self.num_inputs = self.num_uniform = 2 * self.num_noise
        self.log_std_columns = np.arange(self.num_noise, self.num_inputs)
        self.action_dtype = np.dtype(np.float32)
        self._env_dtype = space.dtype
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        finite = np.isfinite(low) & np.isfinite(high)
        self._bounded = finite & scaled
        # [-1, 1] stands in for infinite bounds: scale 1 and offset 0, without computing inf - inf.
        ends = np.where(self._bounded, low, -1.0), np.where(self._bounded, high, 1.0)
        self._scale, self._offset = (ends[1] - ends[0]) / 2, (ends[1] + ends[0]) / 2
        # Where random actions are drawn from: the ends of the module actions, if they have any.
        self._is_finite = finite
        self._ends = np.where(finite & ~self._bounded, low, -1.0), np.where(finite & ~self._bounded, high, 1.0)
        is_clipped = scaled or clipped
        self._low, self._high = (low, high) if is_clipped else (np.full_like(low, -np.inf), np.full_like(high, np.inf))
        # Scale, offset and bounds, and where actions are bounded, on the device that was used last.
        self._held: tuple[Tensor, ...] = ()
        self._held_bounded: tuple[Tensor, ...] = ()

    def _split(self, dist_inputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = dist_inputs.chunk(2, dim=-1)
        return mean, log_std

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
        return rng.standard_normal((*shape, self.num_noise), dtype=np.float32)

    def sample(self, dist_inputs: FloatArray, noise: FloatArray) -> NDArray[Any]:
        mean, log_std = dist_inputs[..., : self.num_noise], dist_inputs[..., self.num_noise :]
        return (mean + np.exp(log_std) * noise).reshape(*dist_inputs.shape[:-1], *self.action_shape)

    def mode(self, dist_inputs: FloatArray) -> NDArray[Any]:
        return dist_inputs[..., : self.num_noise].reshape(*dist_inputs.shape[:-1], *self.action_shape)

    def random(self, rng: np.random.Generator, batch_size: int) -> NDArray[Any]:
        shape = (batch_size, *self.action_shape)
        even = rng.uniform(*self._ends, size=shape)
        return np.where(self._is_finite, even, rng.standard_normal(shape)).astype(np.float32)

    def random_logp(self, actions: NDArray[Any]) -> FloatArray:
        normal = -0.5 * (actions.astype(np.float64) ** 2 + _LOG_2PI)
        even = -np.log(self._ends[1] - self._ends[0])
        logp: FloatArray = np.where(self._is_finite, even, normal).reshape(len(actions), -1).sum(-1)
        return logp.astype(np.float32)

    def to_unit(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Return module actions `[B, ...]` as units: in [-1, 1] in bounded dimensions, in the env's units in others."""
        return np.where(self._bounded, np.clip(actions, -1, 1), actions)

    def from_unit(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Return module actions, float32 `[B, ...]`, for what `to_unit` returns, after clipping to the bounds."""
        return self.to_unit(actions).astype(np.float32)

    def to_env(self, actions: NDArray[Any]) -> NDArray[Any]:
        clipped: NDArray[Any] = np.clip(actions * self._scale + self._offset, self._low, self._high)
        return clipped.astype(self._env_dtype)

    def from_env(self, actions: Tree) -> NDArray[Any]:
        return self.from_unit((np.asarray(actions) - self._offset) / np.where(self._scale, self._scale, 1))

    def from_rllib(self, actions: Tree) -> NDArray[Any]:
        is_mixed = self._bounded.any() and not self._bounded.all()
        return self.from_env(actions) if is_mixed else self.from_unit(np.asarray(actions))

    def env_mode(self, dist_inputs: Tensor) -> Tensor:
        return self._scaled(self._split(dist_inputs)[0])

    def drawn_inputs(self, dist_inputs: Tensor, uniform: Tensor, spread: Tensor) -> Tensor:
        mean, log_std = self._split(dist_inputs)
        return torch.cat([mean + spread * log_std.exp() * _torch_normal(uniform), log_std], -1)

    def random_inputs(self, dist_inputs: Tensor, uniform: Tensor) -> Tensor:
        return torch.cat([self._random_mean(uniform), self._split(dist_inputs)[1]], -1)

    def _random_mean(self, uniform: Tensor) -> Tensor:
        """Return what `random` draws, `[B, d]`, from uniform numbers `[B, 2d]`."""
        low, high = (torch.from_numpy(end.reshape(-1).astype(np.float32)) for end in self._ends)
        even = low + (high - low) * uniform[:, : self.num_noise]
        return torch.where(torch.from_numpy(self._is_finite.reshape(-1)), even, _torch_normal(uniform))

    def tensor_noise(self, generator: torch.Generator, num_rows: int) -> Tensor:
        return torch.randn((num_rows, self.num_noise), device=generator.device, generator=generator)

    def tensor_sample(self, dist_inputs: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = self._split(dist_inputs)
        return (mean + log_std.exp() * noise).reshape(-1, *self.action_shape)

    def tensor_mode(self, dist_inputs: Tensor) -> Tensor:
        return dist_inputs[..., : self.num_noise].reshape(-1, *self.action_shape)

    def tensor_to_unit(self, actions: Tensor) -> Tensor:
        """Return what `to_unit` returns, for tensors."""
        if not self._held_bounded or self._held_bounded[0].device != actions.device:
            self._held_bounded = (torch.from_numpy(self._bounded).to(actions.device),)
        return torch.where(self._held_bounded[0], actions.clamp(-1, 1), actions)

    def tensor_from_unit(self, actions: Tensor) -> Tensor:
        """Return what `from_unit` returns, for tensors."""
        return self.tensor_to_unit(actions).float()

    def tensor_to_env(self, actions: Tensor) -> Tensor:
        if not self._held or self._held[0].device != actions.device:
            self._held = tuple(part.to(actions.device) for part in self._to_tensors())
        return self._scaled(actions.reshape(-1, self.num_noise), self._held)

    def _to_tensors(self) -> tuple[Tensor, ...]:
        """Return scale, offset and bounds as tensors `[d]`, float64."""
        parts = self._scale, self._offset, self._low, self._high
        return tuple(torch.from_numpy(part.reshape(-1)) for part in parts)

    def _scaled(self, actions: Tensor, constants: tuple[Tensor, ...] = ()) -> Tensor:
        """Return module actions `[B, d]` as env actions `[B, ...]`."""
        scale, offset, low, high = constants or self._to_tensors()
        clipped = torch.minimum(torch.maximum(actions * scale + offset, low), high)
        return clipped.to(_torch_dtype(self._env_dtype)).reshape(-1, *self.action_shape)

    def logp(self, dist_inputs: Tensor, actions: Tensor) -> Tensor:
        mean, log_std = self._split(dist_inputs)
        z = (actions.reshape(mean.shape) - mean) * (-log_std).exp()
        return -(0.5 * z * z + log_std).sum(-1) - 0.5 * self.num_noise * _LOG_2PI

    def entropy(self, dist_inputs: Tensor) -> Tensor:
        _, log_std = self._split(dist_inputs)
        return log_std.sum(-1) + 0.5 * self.num_noise * (1 + _LOG_2PI)

    def kl(self, dist_inputs: Tensor, other_inputs: Tensor) -> Tensor:
        mean, log_std = self._split(dist_inputs)
        other_mean, other_log_std = self._split(other_inputs)
        gap = log_std - other_log_std
        z = (mean - other_mean) * (-other_log_std).exp()
        return 0.5 * ((2 * gap).exp() + z * z - 1 - 2 * gap).sum(-1)


class Deterministic(DiagGaussian):
    """The actions that the policy returns, `[B, d]`, with probability 1: the limit of a Gaussian without deviation.

    Explorations add the noise that such a policy needs (Silver et al. 2014, https://proceedings.mlr.press/v32/silver14.html).
    Bounds are respected as in `DiagGaussian`.
    """

    has_tensor_form = True

    def __init__(self, space: spaces.Box, *, scaled: bool = True, clipped: bool = True) -> None:
        """Make the distribution of a Box space of any shape; see `DiagGaussian`."""
        super().__init__(space, scaled=scaled, clipped=clipped)
        self.num_inputs = self.num_noise
        self.log_std_columns = self.log_std_columns[:0]

    def sample(self, dist_inputs: FloatArray, noise: FloatArray) -> NDArray[Any]:
        return self.mode(dist_inputs)

    def tensor_sample(self, dist_inputs: Tensor, noise: Tensor) -> Tensor:
        return self.tensor_mode(dist_inputs)

    def env_mode(self, dist_inputs: Tensor) -> Tensor:
        return self._scaled(dist_inputs)

    def drawn_inputs(self, dist_inputs: Tensor, uniform: Tensor, spread: Tensor) -> Tensor:
        """Return the actions with Gaussian noise of standard deviation `spread`, within the bounds."""
        bounded = torch.from_numpy(self._bounded.reshape(-1))
        actions = torch.where(bounded, dist_inputs.clamp(-1, 1), dist_inputs) + spread * _torch_normal(uniform)
        return torch.where(bounded, actions.clamp(-1, 1), actions)

    def random_inputs(self, dist_inputs: Tensor, uniform: Tensor) -> Tensor:
        return self._random_mean(uniform)

    def logp(self, dist_inputs: Tensor, actions: Tensor) -> Tensor:
        return -_infinite_where((actions.reshape(dist_inputs.shape) != dist_inputs).any(-1))

    def entropy(self, dist_inputs: Tensor) -> Tensor:
        return torch.zeros_like(dist_inputs[..., 0])

    def kl(self, dist_inputs: Tensor, other_inputs: Tensor) -> Tensor:
        return _infinite_where((dist_inputs != other_inputs).any(-1))


class SquashedGaussian(DiagGaussian):
    """A diagonal Gaussian squashed by tanh onto bounds that are all finite (Haarnoja et al. 2018, arXiv:1801.01290).

    The columns hold the action before the tanh, so that no log-density needs an arctanh. `logp` and `entropy` refer to
    the squashed action in [-1, 1]. The KL divergence equals the divergence of the Gaussians, because an invertible map
    does not change it.
    """

    has_tensor_form = True

    def __init__(self, space: spaces.Box) -> None:
        """Make the distribution of a Box space.

        Raises:
            ConfigError: A bound is infinite.
        """
        super().__init__(space)
        if not self._bounded.all():
            raise ConfigError(
                f"action_bounds='squash' needs finite bounds, but the action space is {space}; use 'clip'."
            )
        # Gauss-Hermite nodes turn the expectation in the entropy, which has no closed form, into a sum.
        nodes, weights = np.polynomial.hermite_e.hermegauss(16)
        self._nodes = torch.as_tensor(nodes, dtype=torch.float32)
        self._weights = torch.as_tensor(weights / weights.sum(), dtype=torch.float32)

    def random(self, rng: np.random.Generator, batch_size: int) -> NDArray[Any]:
        return self.from_unit(super().random(rng, batch_size))

    def to_unit(self, actions: NDArray[Any]) -> NDArray[Any]:
        squashed: FloatArray = np.tanh(actions)
        return squashed

    def from_unit(self, actions: NDArray[Any]) -> NDArray[Any]:
        unsquashed: FloatArray = np.arctanh(np.clip(actions, -_NEARLY_1, _NEARLY_1)).astype(np.float32)
        return unsquashed

    def to_env(self, actions: NDArray[Any]) -> NDArray[Any]:
        return super().to_env(np.tanh(actions))

    def env_mode(self, dist_inputs: Tensor) -> Tensor:
        return self._scaled(self._split(dist_inputs)[0].tanh())

    def tensor_to_unit(self, actions: Tensor) -> Tensor:
        return actions.tanh()

    def tensor_from_unit(self, actions: Tensor) -> Tensor:
        return actions.clamp(-_NEARLY_1, _NEARLY_1).float().arctanh()

    def tensor_to_env(self, actions: Tensor) -> Tensor:
        return super().tensor_to_env(actions.tanh())

    def _random_mean(self, uniform: Tensor) -> Tensor:
        return super()._random_mean(uniform).clamp(-_NEARLY_1, _NEARLY_1).arctanh()

    def logp(self, dist_inputs: Tensor, actions: Tensor) -> Tensor:
        flat = actions.reshape(actions.shape[0], -1)
        return super().logp(dist_inputs, actions) - _log_tanh_slope(flat).sum(-1)

    def inside_bounds(self, actions: Tensor) -> Tensor:
        return actions.clamp(-_INSIDE, _INSIDE)

    def squashed_sample(self, dist_inputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the actions `[B, d]` in [-1, 1] for standard normal noise `[B, d]`, and their `logp` `[B]`.

        Both are differentiable in the inputs (Haarnoja et al. 2018, eq. 11 and appendix C).
        """
        mean, log_std = dist_inputs.chunk(2, dim=-1)
        actions = mean + log_std.exp() * noise
        logp = -(0.5 * noise * noise + log_std + _log_tanh_slope(actions)).sum(-1) - 0.5 * self.num_noise * _LOG_2PI
        return actions.tanh(), logp

    def entropy(self, dist_inputs: Tensor) -> Tensor:
        mean, log_std = self._split(dist_inputs)
        points = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * self._nodes.to(mean.device)
        slope = (_log_tanh_slope(points) * self._weights.to(mean.device)).sum(-1)
        return super().entropy(dist_inputs) + slope.sum(-1)


def uniform_logits(legal: NDArray[np.bool_]) -> FloatArray:
    """Return logits `[B, n]` with which the legal actions of each row, bool `[B, n]`, are equally likely."""
    return np.where(legal, np.float32(0), np.float32(ILLEGAL))


def categorical_logp(logits: Tensor) -> Tensor:
    """Return log-probabilities `[..., n]` for logits `[..., n]`, finite also where a logit is `-inf`.

    So products with a probability of 0, and their gradients, are 0 and not NaN.
    """
    return logits.log_softmax(-1).clamp(min=_LOWEST_LOGP)


def categorical_entropy(logits: Tensor) -> Tensor:
    """Return the entropy `[...]` in nats for logits `[..., n]`; a logit of `-inf` excludes a value."""
    logp = categorical_logp(logits)
    return -(logp.exp() * logp).sum(-1)


def categorical_kl(logits: Tensor, other_logits: Tensor) -> Tensor:
    """Return KL(logits || other_logits) `[...]` in nats; infinite if only the other excludes a value."""
    logp = logits.log_softmax(-1)
    gap = (logp - other_logits.log_softmax(-1)).masked_fill(logits == -math.inf, 0)
    return (logp.exp() * gap).sum(-1)


def _infinite_where(differs: Tensor) -> Tensor:
    """Return infinity where a mask is True, and 0 elsewhere, float32."""
    return torch.zeros(differs.shape, device=differs.device).masked_fill(differs, math.inf)


def _torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _log_tanh_slope(u: Tensor) -> Tensor:
    """Return log(1 - tanh(u)^2), accurate in the tails."""
    return 2 * (math.log(2) - u - functional.softplus(-2 * u))


def gumbel(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    """Draw standard Gumbel noise, float32: minus the logarithm of exponential noise, which NumPy draws fast."""
    exponential = rng.standard_exponential(shape, dtype=np.float32)
    np.maximum(exponential, np.finfo(np.float32).tiny, out=exponential)  # a 0 would become infinite
    noise: FloatArray = -np.log(exponential)
    return noise


def _torch_gumbel(uniform: Tensor) -> Tensor:
    """Return standard Gumbel noise for numbers drawn uniformly from (0, 1)."""
    return -(-uniform.log()).log()


def _torch_normal(uniform: Tensor) -> Tensor:
    """Return standard normal noise `[B, d]` for uniform numbers `[B, 2d]`.

    Source: Box and Muller 1958, doi:10.1214/aoms/1177706645.
    """
    radius, angle = uniform.chunk(2, dim=-1)
    return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()


def action_distribution(space: spaces.Space[Any], action_bounds: str = "clip") -> ActionDistribution:
    """Return the distribution of a plain action space.

    Args:
        space: Discrete, MultiDiscrete, MultiBinary, or a floating-point Box.
        action_bounds: `"clip"` or `"squash"`, for a Box: see `DiagGaussian` and `SquashedGaussian`. The config sets
            `"clip_unscaled"` or `"none"` for `normalize_actions=False`.

    Raises:
        ConfigError: No distribution fits the space, or `action_bounds` is none of these.
    """
    if action_bounds not in ("clip", "squash", *UNSCALED):
        raise ConfigError(f"model_config: action_bounds is 'clip' or 'squash', not {action_bounds!r}.")
    if isinstance(space, spaces.Discrete):
        return Categorical(space)
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical(space)
    if isinstance(space, spaces.MultiBinary):
        return Bernoulli(space)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        if action_bounds in UNSCALED:
            return DiagGaussian(space, scaled=False, clipped=action_bounds == "clip_unscaled")
        return SquashedGaussian(space) if action_bounds == "squash" else DiagGaussian(space)
    raise ConfigError(
        f"Unsupported action space {space}: use Discrete, MultiDiscrete, MultiBinary, a floating-point Box, or a Dict "
        "or Tuple of these."
    )


def module_action_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space of module actions: the space of the env, but Discrete and MultiDiscrete spaces start at 0.

    Actions of a Dict or Tuple space are rows of numbers; see `Joint`.
    """
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec)
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        length = sum(math.prod(leaf.shape) for leaf in leaves(space_tree(space)))
        return spaces.Box(-np.inf, np.inf, (length,), np.float32)
    return space
