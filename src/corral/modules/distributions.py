"""Action distributions, one class per kind of action space.

A distribution stores no parameters: they are `dist_inputs`, the `[B, D]` output of a module's policy. Sampling takes
the noise as an argument, so that a runner can draw the noise of many steps in one call.

`actions` are module actions, as stored in the columns; `to_env` converts them to actions of the env.

Runners call `noise`, `sample`, `mode` and `to_env`, which take arrays and return arrays; where the env is on a device,
they take tensors of this device and return such tensors. Losses call the other methods, with tensors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar

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
Rng = np.random.Generator | torch.Generator
Data = TypeVar("Data", NDArray[Any], Tensor)
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
        has_tensor_form: Whether `noise`, `sample`, `mode` and `to_env` of this class itself also take tensors, and a
            generator of torch; a subclass must say it again.
    """

    has_tensor_form: ClassVar[bool] = False

    num_inputs: int
    num_noise: int
    num_uniform: int = 0
    action_shape: tuple[int, ...]
    action_dtype: np.dtype[Any]
    log_std_columns: NDArray[np.int64] = np.zeros(0, np.int64)

    @abstractmethod
    def noise(self, rng: Any, shape: tuple[int, ...]) -> Any:
        """Draw noise for samples of `shape`, float32 `[*shape, num_noise]`.

        A NumPy generator draws an array. A generator of torch draws a tensor on its device.
        """

    @abstractmethod
    def sample(self, dist_inputs: Any, noise: Any) -> Any:
        """Return the actions `[B, ...]` for noise `[B, num_noise]`."""

    @abstractmethod
    def mode(self, dist_inputs: Any) -> Any:
        """Return the most likely actions `[B, ...]`."""

    @abstractmethod
    def random(self, rng: np.random.Generator, batch_size: int) -> NDArray[Any]:
        """Return actions `[batch_size, ...]` drawn uniformly from the action space."""

    @abstractmethod
    def random_logp(self, actions: NDArray[Any]) -> FloatArray:
        """Return the log-probability (or log-density) `[B]` of actions that `random` drew."""

    @abstractmethod
    def to_env(self, actions: Any) -> Tree:
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

    def env_mode(self, dist_inputs: Tensor) -> Tree:
        """Return `to_env(mode(dist_inputs))` in torch operations, so that an exported graph can hold them."""
        return self.to_env(self.mode(dist_inputs))

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


class _FromLogits(ActionDistribution):
    """What the distributions of discrete values have in common: an action is the mode of logits plus noise."""

    _start: Any = 0  # smallest value of each entry of env actions; module actions start at 0

    def _set_spaces(self, space: Any, num_inputs: int, dtype: type, start: Any = 0) -> None:
        self.num_inputs = self.num_noise = self.num_uniform = num_inputs
        self.action_shape, self.action_dtype = tuple(space.shape), np.dtype(dtype)
        self._start, self._is_shifted = start, bool(np.any(start))
        self._env_dtype, self._tensor_dtype = space.dtype, _torch_dtype(space.dtype)

    def noise(self, rng: Rng, shape: tuple[int, ...]) -> Any:
        """Draw standard Gumbel noise, float32: minus the logarithm of exponential noise, which is drawn fast."""
        tiny, shape = float(np.finfo(np.float32).tiny), (*shape, self.num_noise)  # a 0 would become infinite
        if isinstance(rng, torch.Generator):
            return -torch.empty(shape, device=rng.device).exponential_(generator=rng).clamp(min=tiny).log()
        exponential = rng.standard_exponential(shape, dtype=np.float32)
        return -np.log(np.maximum(exponential, tiny, out=exponential))

    def sample(self, dist_inputs: Any, noise: Any) -> Any:
        return self.mode(dist_inputs + noise)

    def to_env(self, actions: Any) -> Any:
        is_tensor = isinstance(actions, Tensor)
        if self._is_shifted:
            actions = actions + (torch.as_tensor(self._start, device=actions.device) if is_tensor else self._start)
        # A copy even in the same dtype: an env may write into its actions.
        return actions.to(self._tensor_dtype, copy=True) if is_tensor else actions.astype(self._env_dtype)

    def from_env(self, actions: Tree) -> NDArray[Any]:
        found: NDArray[Any] = np.asarray(actions).astype(self.action_dtype) - self._start
        return found

    def drawn_inputs(self, dist_inputs: Tensor, uniform: Tensor, spread: Tensor) -> Tensor:
        return dist_inputs + spread * _gumbel_of(uniform)

    def random_inputs(self, dist_inputs: Tensor, uniform: Tensor) -> Tensor:
        return _gumbel_of(uniform) + ILLEGAL * (dist_inputs <= ILLEGAL / 2)


class Categorical(_FromLogits):
    """Discrete actions from logits `[B, n]`; sampled by the Gumbel-max trick (arXiv:1411.0030)."""

    has_tensor_form = True

    def __init__(self, space: spaces.Discrete) -> None:
        """Make the distribution of a Discrete space; module actions start at 0, whatever the `start` of the space."""
        self._set_spaces(space, int(space.n), np.int64, int(space.start))

    def sample(self, dist_inputs: Any, noise: Any) -> Any:
        return (dist_inputs + noise).argmax(-1)

    def mode(self, dist_inputs: Any) -> Any:
        return dist_inputs.argmax(-1)

    def random(self, rng: np.random.Generator, batch_size: int) -> NDArray[Any]:
        return rng.integers(0, self.num_inputs, size=batch_size)

    def random_logp(self, actions: NDArray[Any]) -> FloatArray:
        return np.full(len(actions), -math.log(self.num_inputs), np.float32)

    def logp(self, dist_inputs: Tensor, actions: Tensor) -> Tensor:
        return -functional.cross_entropy(dist_inputs, actions, reduction="none")

    def entropy(self, dist_inputs: Tensor) -> Tensor:
        return categorical_entropy(dist_inputs)

    def kl(self, dist_inputs: Tensor, other_inputs: Tensor) -> Tensor:
        return categorical_kl(dist_inputs, other_inputs)


class MultiCategorical(_FromLogits):
    """Independent categoricals, one per entry of a MultiDiscrete space, from logits `[B, sum(nvec)]`."""

    has_tensor_form = True

    def __init__(self, space: spaces.MultiDiscrete) -> None:
        """Make the distribution of a MultiDiscrete space of any shape."""
        self.sizes = [int(n) for n in space.nvec.reshape(-1)]
        self._set_spaces(space, sum(self.sizes), np.int64, space.start.astype(np.int64))
        ends = np.cumsum(self.sizes)
        self._slices = [slice(int(end) - size, int(end)) for end, size in zip(ends, self.sizes, strict=True)]

    def mode(self, dist_inputs: Any) -> Any:
        stack: Any = torch.stack if isinstance(dist_inputs, Tensor) else np.stack
        picks = stack([dist_inputs[..., part].argmax(-1) for part in self._slices], -1)
        return picks.reshape(*dist_inputs.shape[:-1], *self.action_shape)

    def random(self, rng: np.random.Generator, batch_size: int) -> NDArray[Any]:
        return rng.integers(0, self.sizes, size=(batch_size, len(self.sizes))).reshape(batch_size, *self.action_shape)

    def random_logp(self, actions: NDArray[Any]) -> FloatArray:
        return np.full(len(actions), -sum(map(math.log, self.sizes)), np.float32)

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


class Bernoulli(_FromLogits):
    """Independent Bernoulli variables, one per entry of a MultiBinary space, from logits `[B, n]`."""

    has_tensor_form = True

    def __init__(self, space: spaces.MultiBinary) -> None:
        """Make the distribution of a MultiBinary space of any shape."""
        self._set_spaces(space, math.prod(space.shape), np.int8)

    def noise(self, rng: Rng, shape: tuple[int, ...]) -> Any:
        if isinstance(rng, torch.Generator):
            uniform = torch.rand((*shape, self.num_noise), device=rng.device, generator=rng)
            return self.random_inputs(uniform, uniform.clamp(min=torch.finfo(torch.float32).tiny))
        return rng.logistic(size=(*shape, self.num_noise)).astype(np.float32)

    def mode(self, dist_inputs: Any) -> Any:
        picks = dist_inputs > 0
        picks = picks.to(torch.int8) if isinstance(picks, Tensor) else picks.astype(np.int8)
        return picks.reshape(*dist_inputs.shape[:-1], *self.action_shape)

    def random(self, rng: np.random.Generator, batch_size: int) -> NDArray[Any]:
        return rng.integers(0, 2, size=(batch_size, *self.action_shape), dtype=np.int8)

    def random_logp(self, actions: NDArray[Any]) -> FloatArray:
        return np.full(len(actions), -self.num_inputs * math.log(2), np.float32)

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
    _squashes: ClassVar[bool] = False

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
        self._env_dtype, self._tensor_dtype = space.dtype, _torch_dtype(space.dtype)
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        finite = np.isfinite(low) & np.isfinite(high)
        self._bounded = finite & scaled
        # [-1, 1] stands in for infinite bounds: scale 1 and offset 0, without computing inf - inf.
        ends = np.where(self._bounded, low, -1.0), np.where(self._bounded, high, 1.0)
        scale, offset = (ends[1] - ends[0]) / 2, (ends[1] + ends[0]) / 2
        # Where random actions are drawn from: the ends of the module actions, if they have any.
        self._is_finite = finite
        self._ends = np.where(finite & ~self._bounded, low, -1.0), np.where(finite & ~self._bounded, high, 1.0)
        is_clipped = scaled or clipped
        limits = (low, high) if is_clipped else (np.full_like(low, -np.inf), np.full_like(high, np.inf))
        self._arrays = scale, offset, *limits, self._bounded
        # The same on devices: tensors with at least one axis, because an array of float32 times a tensor without axes
        # would not be of float64.
        self._on_device = {torch.device("cpu"): tuple(torch.from_numpy(np.atleast_1d(part)) for part in self._arrays)}

    def _split(self, dist_inputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = dist_inputs.chunk(2, dim=-1)
        return mean, log_std

    def _constants(self, device: torch.device | None) -> tuple[Any, ...]:
        """Return scale, offset, bounds and where actions are bounded, as tensors on a device, or without as arrays."""
        if device is None:
            return self._arrays
        if device not in self._on_device:
            cpu = self._on_device[torch.device("cpu")]
            self._on_device[device] = tuple(part.to(device) for part in cpu)
        return self._on_device[device]

    def noise(self, rng: Rng, shape: tuple[int, ...]) -> Any:
        if isinstance(rng, torch.Generator):
            return torch.randn((*shape, self.num_noise), device=rng.device, generator=rng)
        return rng.standard_normal((*shape, self.num_noise), dtype=np.float32)

    def sample(self, dist_inputs: Any, noise: Any) -> Any:
        mean, log_std = dist_inputs[..., : self.num_noise], dist_inputs[..., self.num_noise :]
        exp: Any = torch.exp if isinstance(log_std, Tensor) else np.exp
        return (mean + exp(log_std) * noise).reshape(*dist_inputs.shape[:-1], *self.action_shape)

    def mode(self, dist_inputs: Any) -> Any:
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

    def to_unit(self, actions: Any) -> Any:
        """Return module actions `[B, ...]` as units: in [-1, 1] in bounded dimensions, in the env's units in others.

        Like `from_unit` it takes arrays or tensors, and returns the same kind.
        """
        if isinstance(actions, Tensor):
            return torch.where(self._constants(actions.device)[-1], actions.clamp(-1, 1), actions)
        return np.where(self._bounded, np.clip(actions, -1, 1), actions)

    def from_unit(self, actions: Any) -> Any:
        """Return module actions, float32 `[B, ...]`, for what `to_unit` returns, after clipping to the bounds."""
        found = self.to_unit(actions)
        return found.float() if isinstance(found, Tensor) else found.astype(np.float32)

    def to_env(self, actions: Any) -> Any:
        is_tensor = isinstance(actions, Tensor)
        xp: Any = torch if is_tensor else np
        scale, offset, low, high, _ = self._constants(actions.device) if is_tensor else self._arrays
        clipped = xp.clip((xp.tanh(actions) if self._squashes else actions) * scale + offset, low, high)
        return clipped.to(self._tensor_dtype) if is_tensor else clipped.astype(self._env_dtype)

    def from_env(self, actions: Tree) -> NDArray[Any]:
        scale, offset, *_ = self._arrays
        found: FloatArray = self.from_unit((np.asarray(actions) - offset) / np.where(scale, scale, 1))
        return found

    def from_rllib(self, actions: Tree) -> NDArray[Any]:
        is_mixed = self._bounded.any() and not self._bounded.all()
        return self.from_env(actions) if is_mixed else self.from_unit(np.asarray(actions))

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

    def sample(self, dist_inputs: Any, noise: Any) -> Any:
        return self.mode(dist_inputs)

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
    _squashes = True

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
        drawn: FloatArray = self.from_unit(super().random(rng, batch_size))
        return drawn

    def to_unit(self, actions: Any) -> Any:
        return actions.tanh() if isinstance(actions, Tensor) else np.tanh(actions)

    def from_unit(self, actions: Any) -> Any:
        if isinstance(actions, Tensor):
            return actions.clamp(-_NEARLY_1, _NEARLY_1).float().arctanh()
        return np.arctanh(np.clip(actions, -_NEARLY_1, _NEARLY_1)).astype(np.float32)

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


def _gumbel_of(uniform: Tensor) -> Tensor:
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
