"""Action distributions of torch, in RLlib's spelling, for modules and learners of scripts.

Corral's own modules use `corral.modules.distributions`. These classes serve code that calls
`module.get_train_action_dist_cls().from_logits(logits)`. Batch axes come first: `[B, ...]` or `[T, B, ...]`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Self

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from corral.compat.rllib.constants import MAX_LOG_NN_OUTPUT, MIN_LOG_NN_OUTPUT, SMALL_NUMBER
from corral.core.tree import leaves, map_tree
from corral.errors import ConfigError


class Distribution:
    """A distribution of actions; subclasses define `sample`, `logp`, `entropy`, `kl` and `required_input_dim`."""

    def rsample(self, *, sample_shape: Any = None, **kwargs: Any) -> Any:
        """Return actions through which gradients flow; without such actions, ordinary ones."""
        return self.sample(sample_shape=sample_shape, **kwargs)

    def sample(self, *, sample_shape: Any = None, **kwargs: Any) -> Any:
        """Return actions `[*sample_shape, B, ...]`."""
        raise TypeError(f"{type(self).__name__} must define sample().")

    def logp(self, value: Any, **kwargs: Any) -> Tensor:
        """Return the log-probabilities `[B]` of actions `[B, ...]`."""
        raise TypeError(f"{type(self).__name__} must define logp(value).")

    def entropy(self, **kwargs: Any) -> Tensor:
        """Return the entropies, `[B]`."""
        raise TypeError(f"{type(self).__name__} has no entropy in closed form.")

    def kl(self, other: Any, **kwargs: Any) -> Tensor:
        """Return the KL divergences from this distribution to another one, `[B]`."""
        raise TypeError(f"{type(self).__name__} has no KL divergence in closed form.")

    @classmethod
    def from_logits(cls, logits: Any, **kwargs: Any) -> Self:
        """Return the distribution of the outputs of a net, `[B, n]`."""
        make: Any = cls
        made: Self = make(logits, **kwargs)
        return made

    @classmethod
    def get_partial_dist_cls(cls, **partial_kwargs: Any) -> type[Self]:
        """Return a class whose `from_logits` and `required_input_dim` already have some arguments."""
        parent: Any = cls

        class Partial(parent):  # type: ignore[misc]
            from_logits = staticmethod(functools.partial(parent.from_logits, **partial_kwargs))
            required_input_dim = staticmethod(functools.partial(parent.required_input_dim, **partial_kwargs))

        Partial.__name__ = Partial.__qualname__ = f"{cls.__name__}Partial"
        return Partial

    def to_deterministic(self) -> Any:
        """Return a distribution that always gives the most likely action."""
        return self

    def sample_and_logp(self, *, sample_shape: Any = None) -> tuple[Any, Tensor]:
        """Return actions and their log-probabilities."""
        actions = self.sample(sample_shape=sample_shape)
        return actions, self.logp(actions)

    def rsample_and_logp(self, *, sample_shape: Any = None) -> tuple[Any, Tensor]:
        """Return actions through which gradients flow, and their log-probabilities."""
        actions = self.rsample(sample_shape=sample_shape)
        return actions, self.logp(actions)


class TorchDistribution(Distribution):
    """A distribution of `torch.distributions`, whose log-probabilities are one number per action."""

    def __init__(self, dist: Any) -> None:
        """Keep the distribution of torch."""
        self._dist = dist

    def sample(self, *, sample_shape: Any = None, **kwargs: Any) -> Any:
        return self._dist.sample(sample_shape or torch.Size())

    def rsample(self, *, sample_shape: Any = None, **kwargs: Any) -> Any:
        return self._dist.rsample(sample_shape or torch.Size())

    def logp(self, value: Any, **kwargs: Any) -> Tensor:
        found: Tensor = self._dist.log_prob(value)
        return found

    def entropy(self, **kwargs: Any) -> Tensor:
        found: Tensor = self._dist.entropy()
        return found

    def kl(self, other: Any, **kwargs: Any) -> Tensor:
        return torch.distributions.kl_divergence(self._dist, other._dist)


def _normal(loc: Any, scale: Any) -> Any:
    """Return independent normal numbers along the last axis."""
    return torch.distributions.Independent(torch.distributions.Normal(loc, scale, validate_args=False), 1)


class TorchCategorical(TorchDistribution):
    """One of n actions; `logits` or `probs` are `[B, n]`."""

    def __init__(self, logits: Tensor | None = None, probs: Tensor | None = None) -> None:
        """Keep logits or probabilities."""
        self.logits, self.probs = logits, probs
        super().__init__(torch.distributions.Categorical(logits=logits, probs=probs, validate_args=False))

    def rsample(self, *, sample_shape: Any = None, **kwargs: Any) -> Tensor:
        """Return one-hot actions whose gradients are the gradients of the probabilities (straight-through)."""
        dist = torch.distributions.OneHotCategoricalStraightThrough(logits=self._dist.logits, validate_args=False)
        return dist.rsample(sample_shape or torch.Size())

    @staticmethod
    def required_input_dim(space: gym.spaces.Discrete, **kwargs: Any) -> int:
        """Return the number of actions."""
        return int(space.n)

    def to_deterministic(self) -> TorchDeterministic:
        return TorchDeterministic(self._dist.logits.argmax(dim=-1))


class TorchDiagGaussian(TorchDistribution):
    """Independent normal numbers with means `loc` and standard deviations `scale`, `[B, n]`."""

    def __init__(self, loc: Any, scale: Any = 1.0) -> None:
        """Keep means and standard deviations."""
        self.loc = loc
        super().__init__(_normal(loc, scale))

    @classmethod
    def from_logits(cls, logits: Tensor, **kwargs: Any) -> Self:
        """Return the distribution whose means and log standard deviations are the halves of `logits` `[B, 2 n]`."""
        loc, log_std = logits.chunk(2, dim=-1)
        return cls(loc, log_std.exp(), **kwargs)

    @staticmethod
    def required_input_dim(space: gym.spaces.Box, **kwargs: Any) -> int:
        """Return two for each number of an action."""
        return 2 * math.prod(space.shape)

    def to_deterministic(self) -> TorchDeterministic:
        return TorchDeterministic(self.loc)


class TorchSquashedGaussian(TorchDistribution):
    """Normal numbers, squashed by tanh to the range from `low` to `high` (https://arxiv.org/abs/1801.01290)."""

    def __init__(self, loc: Any, scale: Any = 1.0, low: float = -1.0, high: float = 1.0) -> None:
        """Keep means, standard deviations and the range."""
        self.loc, self.low, self.high = loc, low, high
        super().__init__(_normal(loc, scale))

    @classmethod
    def from_logits(cls, logits: Tensor, low: float = -1.0, high: float = 1.0, **kwargs: Any) -> Self:
        """Return the distribution whose means and log standard deviations are the halves of `logits` `[B, 2 n]`."""
        loc, log_std = logits.chunk(2, dim=-1)
        return cls(loc, log_std.clamp(MIN_LOG_NN_OUTPUT, MAX_LOG_NN_OUTPUT).exp(), low, high, **kwargs)

    def sample_and_logp(self, *, sample_shape: Any = None) -> tuple[Any, Tensor]:
        raw = super().sample(sample_shape=sample_shape)
        return self._squash(raw), self._logp_of_raw(raw)

    def rsample_and_logp(self, *, sample_shape: Any = None) -> tuple[Any, Tensor]:
        raw = super().rsample(sample_shape=sample_shape)
        return self._squash(raw), self._logp_of_raw(raw)

    def sample(self, *, sample_shape: Any = None, **kwargs: Any) -> Any:
        return self.sample_and_logp(sample_shape=sample_shape)[0]

    def rsample(self, *, sample_shape: Any = None, **kwargs: Any) -> Any:
        return self.rsample_and_logp(sample_shape=sample_shape)[0]

    def entropy(self, **kwargs: Any) -> Tensor:
        return Distribution.entropy(self)

    def kl(self, other: Any, **kwargs: Any) -> Tensor:
        return Distribution.kl(self, other)

    def logp(self, value: Tensor, **kwargs: Any) -> Tensor:
        share = 2.0 * (value - self.low) / (self.high - self.low) - 1.0
        return self._logp_of_raw(torch.atanh(share.clamp(-1.0 + SMALL_NUMBER, 1.0 - SMALL_NUMBER)))

    def _squash(self, raw: Tensor) -> Tensor:
        return self.low + (torch.tanh(raw) + 1.0) * (self.high - self.low) / 2.0

    def _logp_of_raw(self, raw: Tensor) -> Tensor:
        # The log of the slope of tanh, in a form that is exact for large numbers.
        log_slope = 2.0 * (math.log(2.0) - raw - nn.functional.softplus(-2.0 * raw))
        return super().logp(raw) - log_slope.sum(-1)

    @staticmethod
    def required_input_dim(space: gym.spaces.Box, **kwargs: Any) -> int:
        """Return two for each number of an action."""
        return 2 * math.prod(space.shape)

    def to_deterministic(self) -> TorchDeterministic:
        """Return the squashed mean, which is in the range of the actions."""
        return TorchDeterministic(self._squash(self.loc))


class TorchDeterministic(Distribution):
    """Always the action `loc`, `[B, ...]`."""

    def __init__(self, loc: Tensor) -> None:
        """Keep the action."""
        self.loc = loc

    def sample(self, *, sample_shape: Any = None, **kwargs: Any) -> Tensor:
        return self.loc.expand(*(sample_shape or ()), *self.loc.shape).clone()

    def logp(self, value: Tensor, **kwargs: Any) -> Tensor:
        return torch.zeros_like(self.loc)

    @staticmethod
    def required_input_dim(space: gym.spaces.Box, **kwargs: Any) -> int:
        """Return one for each number of an action."""
        return math.prod(space.shape)


class TorchMultiCategorical(Distribution):
    """Several categorical actions, `[B, k]`."""

    def __init__(self, categoricals: Sequence[TorchCategorical]) -> None:
        """Keep the parts."""
        self._cats = list(categoricals)

    @classmethod
    def from_logits(  # type: ignore[override]
        cls, logits: Tensor, input_lens: Sequence[int], temperatures: Sequence[float] | None = None, **kwargs: Any
    ) -> Self:
        """Return the distribution of the parts of `logits`, which are `input_lens` long.

        Raises:
            ConfigError: The lengths do not add up to the logits' length.
        """
        if sum(input_lens) != logits.shape[-1]:
            raise ConfigError(f"input_lens {list(input_lens)} do not add up to the {logits.shape[-1]} logits.")
        return cls([TorchCategorical(logits=part) for part in torch.split(logits, list(input_lens), dim=-1)])

    def sample(self, *, sample_shape: Any = None, **kwargs: Any) -> Tensor:
        return torch.stack([part.sample(sample_shape=sample_shape) for part in self._cats], dim=-1)

    def logp(self, value: Tensor, **kwargs: Any) -> Tensor:
        columns = value.unbind(dim=-1)
        return torch.stack([part.logp(column) for part, column in zip(self._cats, columns, strict=True)]).sum(0)

    def entropy(self, **kwargs: Any) -> Tensor:
        return torch.stack([part.entropy() for part in self._cats]).sum(0)

    def kl(self, other: TorchMultiCategorical, **kwargs: Any) -> Tensor:
        return torch.stack([part.kl(its) for part, its in zip(self._cats, other._cats, strict=True)]).sum(0)

    @staticmethod
    def required_input_dim(space: gym.spaces.MultiDiscrete, **kwargs: Any) -> int:
        """Return the sum of the numbers of actions."""
        return int(np.sum(space.nvec))

    def to_deterministic(self) -> TorchDeterministic:
        return TorchDeterministic(torch.stack([part.to_deterministic().loc for part in self._cats], dim=-1))


class TorchMultiDistribution(Distribution):
    """A nested action, each part with a distribution of its own."""

    def __init__(self, child_distribution_struct: Any) -> None:
        """Keep the nested distributions."""
        self._parts = child_distribution_struct

    @classmethod
    def from_logits(  # type: ignore[override]
        cls, logits: Tensor, child_distribution_cls_struct: Any, input_lens: Any, space: Any = None, **kwargs: Any
    ) -> Self:
        """Return the distributions of the parts of `logits`.

        Args:
            logits: Outputs of a net, `[B, n]`.
            child_distribution_cls_struct: Nested classes of the parts.
            input_lens: Number of logits of each part: a list in the order of the parts, or nested as they are.
            space: Space of the actions.
            **kwargs: Ignored.
        """
        if isinstance(input_lens, dict):
            input_lens = leaves(map_tree(lambda _, length: int(length), child_distribution_cls_struct, input_lens))
        parts = iter(torch.split(logits, list(input_lens), dim=-1))
        made = map_tree(lambda part_class: part_class.from_logits(next(parts)), child_distribution_cls_struct)
        return cls(made)

    def sample(self, *, sample_shape: Any = None, **kwargs: Any) -> Any:
        return map_tree(lambda part: part.sample(sample_shape=sample_shape), self._parts)

    def rsample(self, *, sample_shape: Any = None, **kwargs: Any) -> Any:
        return map_tree(lambda part: part.rsample(sample_shape=sample_shape), self._parts)

    def logp(self, value: Any, **kwargs: Any) -> Tensor:
        """Return the sums of the log-probabilities of the parts.

        Args:
            value: Nested actions, or one tensor `[B, n]` of their columns.
            **kwargs: Ignored.
        """
        if isinstance(value, Tensor):
            widths = [max(1, part.sample().reshape(len(value), -1).shape[1]) for part in leaves(self._parts)]
            columns = iter(torch.split(value, widths, dim=-1))
            value = map_tree(lambda part: next(columns), self._parts)

        def part_logp(part: Any, action: Tensor) -> Tensor:
            is_column = isinstance(part, TorchCategorical) and action.ndim > 1 and action.shape[-1] == 1
            found: Tensor = part.logp(action.squeeze(-1) if is_column else action)
            return found

        total: Tensor = sum(leaves(map_tree(part_logp, self._parts, value)))
        return total

    def entropy(self, **kwargs: Any) -> Tensor:
        return torch.stack([part.entropy() for part in leaves(self._parts)]).sum(0)

    def kl(self, other: TorchMultiDistribution, **kwargs: Any) -> Tensor:
        return torch.stack(leaves(map_tree(lambda part, its: part.kl(its), self._parts, other._parts))).sum(0)

    @staticmethod
    def required_input_dim(space: Any, input_lens: Sequence[int], **kwargs: Any) -> int:
        """Return the sum of the lengths of the parts."""
        return int(sum(input_lens))

    def to_deterministic(self) -> TorchMultiDistribution:
        return TorchMultiDistribution(map_tree(lambda part: part.to_deterministic(), self._parts))


def distribution_class(space: Any) -> Any:
    """Return the class of the distribution over the actions of a space.

    Raises:
        ConfigError: There is none for such a space.
    """
    if isinstance(space, gym.spaces.Discrete):
        return TorchCategorical
    if isinstance(space, gym.spaces.Box):
        return TorchDiagGaussian
    if isinstance(space, gym.spaces.MultiDiscrete):
        return TorchMultiCategorical.get_partial_dist_cls(input_lens=[int(n) for n in space.nvec.reshape(-1)])
    if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        parts = dict(space.spaces) if isinstance(space, gym.spaces.Dict) else tuple(space.spaces)
        classes = map_tree(distribution_class, parts)
        lengths = [_num_inputs(part) for part in leaves(parts)]
        return TorchMultiDistribution.get_partial_dist_cls(child_distribution_cls_struct=classes, input_lens=lengths)
    raise ConfigError(f"there is no distribution of RLlib for actions in {space}.")


def _num_inputs(space: Any) -> int:
    found: int = distribution_class(space).required_input_dim(space)
    return found
