"""Estimates of a policy's return from episodes of another policy; pure functions on columns.

The columns hold the steps of whole episodes, one episode after the other, `[S]` each. The probability ratio of a step
is the probability of its action under the target policy, which is evaluated, divided by its probability under the
behaviour policy, which was recorded. The weight of an episode up to a step is the product of the ratios up to it.

All estimates are for the sum of discounted rewards from the start of an episode to its end as it was recorded. An
episode that a time limit truncated ends there, as it would in the same env with the same limit: no value is added for
what would have followed.

Everything is computed in float64, and products of ratios as sums of logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.errors import DataError

MIN_EPISODES_FOR_INTERVAL = 5
"""With fewer episodes than this, there are too few different resamples."""

_MAX_DRAWS = 1_000_000  # draws that are in memory at a time
_MAX_CELLS = 4_000_000  # entries of episodes by steps that are in memory at a time

Column = NDArray[np.float64]
Terms = tuple[Column, Column | None]
"""Numerators `[E, K]`, and denominators `[E, K]`, or `None` if they are 1: the estimate is the sum over K of the mean
numerator divided by the mean denominator."""


@dataclass(frozen=True)
class Bootstrap:
    """How the intervals are found: percentiles of the estimates from episodes that are drawn with replacement.

    Attributes:
        num_resamples: Number of draws of as many episodes as there are.
        level: Probability with which the interval is to hold the true value.
        seed: Seed of the draws.
    """

    num_resamples: int = 1000
    level: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class ValueEstimate:
    """An estimate of the mean discounted return of a policy from the start of an episode.

    Attributes:
        value: The estimate; infinite if it is larger than the largest float, and NaN if all weights are 0 and it is
            divided by their sum.
        interval: Its confidence interval; NaN for fewer than five episodes.
        standard_error: Its standard error, for a ratio of means by the delta method; NaN for a single episode.
        effective_sample_size: Number of episodes of equal weight that would say as much: (sum of weights)^2 / sum of
            squared weights (Kish 1965, "Survey Sampling"), by the weights of whole episodes; 0 if all weights are 0,
            and NaN for estimates without weights.
        num_episodes: Number of episodes.
    """

    value: float
    interval: tuple[float, float]
    standard_error: float
    effective_sample_size: float
    num_episodes: int


def importance_sampling(
    rewards: NDArray[Any],
    starts: NDArray[Any],
    behaviour_logp: NDArray[Any],
    target_logp: NDArray[Any],
    gamma: float,
    *,
    max_ratio: float | None = None,
    bootstrap: Bootstrap = Bootstrap(),
) -> ValueEstimate:
    """Return the mean of weight times return over the episodes (Precup, Sutton and Singh 2000, ICML).

    It is unbiased, but its variance grows exponentially with the length of the episodes.

    Args:
        rewards: Rewards `[S]`.
        starts: Flags of the first steps of episodes, bool `[S]`.
        behaviour_logp: Log-probability (or log-density) of the actions under the policy that was recorded, `[S]`.
        target_logp: The same under the policy that is evaluated, `[S]`; minus infinity where it never takes the action.
        gamma: Discount per step.
        max_ratio: Bound to which the ratio of each step is clipped, which makes the estimate biased; `None` clips none.
        bootstrap: How the interval is found.

    Raises:
        DataError: The columns are empty or differ in length, or hold a value that makes no sense.
    """
    steps = _Steps(rewards, starts, behaviour_logp, target_logp, gamma, max_ratio)
    scale, weights = steps.episode_weights()
    returns = steps.sum_by_episode(steps.discounts * steps.rewards)
    return _estimate(lambda: iter([((weights * returns)[:, None], None)]), weights, bootstrap, scale)


def weighted_importance_sampling(
    rewards: NDArray[Any],
    starts: NDArray[Any],
    behaviour_logp: NDArray[Any],
    target_logp: NDArray[Any],
    gamma: float,
    *,
    max_ratio: float | None = None,
    bootstrap: Bootstrap = Bootstrap(),
) -> ValueEstimate:
    """Return the mean of the returns of the episodes by their weights (Precup, Sutton and Singh 2000, ICML).

    It is consistent and lies between the lowest and the highest return, but biased with few episodes. See
    `importance_sampling` for the arguments.
    """
    steps = _Steps(rewards, starts, behaviour_logp, target_logp, gamma, max_ratio)
    _, weights = steps.episode_weights()
    returns = steps.sum_by_episode(steps.discounts * steps.rewards)
    return _estimate(lambda: iter([((weights * returns)[:, None], weights[:, None])]), weights, bootstrap)


def per_decision_importance_sampling(
    rewards: NDArray[Any],
    starts: NDArray[Any],
    behaviour_logp: NDArray[Any],
    target_logp: NDArray[Any],
    gamma: float,
    *,
    max_ratio: float | None = None,
    bootstrap: Bootstrap = Bootstrap(),
) -> ValueEstimate:
    """Return the mean of the sums of rewards, each by the weight up to its step (Precup et al. 2000).

    It is unbiased, as `importance_sampling` is, with less variance: no reward depends on later actions. See
    `importance_sampling` for the arguments.
    """
    zeros = np.zeros(len(rewards))
    return doubly_robust(
        *(rewards, starts, behaviour_logp, target_logp, zeros, zeros, gamma), max_ratio=max_ratio, bootstrap=bootstrap
    )


def weighted_per_decision_importance_sampling(
    rewards: NDArray[Any],
    starts: NDArray[Any],
    behaviour_logp: NDArray[Any],
    target_logp: NDArray[Any],
    gamma: float,
    *,
    max_ratio: float | None = None,
    bootstrap: Bootstrap = Bootstrap(),
) -> ValueEstimate:
    """Return the sum over time of the rewards at each time, averaged by the weights up to it.

    It is consistent, and biased with few episodes. An episode that is over keeps its last weight, and has rewards of 0
    (the consistent form of Thomas 2015, "Safe Reinforcement Learning", chapter 3). See `importance_sampling` for the
    arguments.
    """
    zeros = np.zeros(len(rewards))
    return weighted_doubly_robust(
        *(rewards, starts, behaviour_logp, target_logp, zeros, zeros, gamma), max_ratio=max_ratio, bootstrap=bootstrap
    )


def doubly_robust(
    rewards: NDArray[Any],
    starts: NDArray[Any],
    behaviour_logp: NDArray[Any],
    target_logp: NDArray[Any],
    q_values: NDArray[Any],
    state_values: NDArray[Any],
    gamma: float,
    *,
    max_ratio: float | None = None,
    bootstrap: Bootstrap = Bootstrap(),
) -> ValueEstimate:
    """Return the doubly robust estimate for sequences (Jiang and Li 2016, arXiv:1511.03722).

    From the last step of each episode to its first one: estimate = V(s) + ratio * (reward + gamma * estimate of the
    next step - Q(s, a)), and 0 after the last step. Wrong action values cost variance but no bias, as long as
    `state_values` are their means over the actions of the target policy. With values of 0 it is per-decision importance
    sampling.

    Args:
        rewards: Rewards `[S]`.
        starts: Flags of the first steps of episodes, bool `[S]`.
        behaviour_logp: Log-probability (or log-density) of the actions under the policy that was recorded, `[S]`.
        target_logp: The same under the policy that is evaluated, `[S]`.
        q_values: Values of the recorded actions under the policy that is evaluated, `[S]`.
        state_values: Values of the observations under this policy, `[S]`.
        gamma: Discount per step.
        max_ratio: Bound to which the ratio of each step is clipped; `None` clips none.
        bootstrap: How the interval is found.

    Raises:
        DataError: The columns are empty or differ in length, or hold a value that makes no sense.
    """
    steps = _Steps(rewards, starts, behaviour_logp, target_logp, gamma, max_ratio, q_values, state_values)
    scale = max(0.0, steps.largest_log_weight())
    after = np.exp(steps.log_weights - scale) * (steps.rewards - steps.q_values)
    before = np.exp(steps.log_weights_before() - scale) * steps.state_values
    sums = steps.sum_by_episode(steps.discounts * (after + before))
    return _estimate(lambda: iter([(sums[:, None], None)]), steps.episode_weights()[1], bootstrap, scale)


def weighted_doubly_robust(
    rewards: NDArray[Any],
    starts: NDArray[Any],
    behaviour_logp: NDArray[Any],
    target_logp: NDArray[Any],
    q_values: NDArray[Any],
    state_values: NDArray[Any],
    gamma: float,
    *,
    max_ratio: float | None = None,
    bootstrap: Bootstrap = Bootstrap(),
) -> ValueEstimate:
    """Return the weighted doubly robust estimate (Thomas and Brunskill 2016, arXiv:1604.00923).

    As `doubly_robust`, with the weights of all episodes at each time divided by their mean. It is consistent, and
    biased with few episodes. An episode that is over keeps its last weight. See `doubly_robust` for the arguments.
    """
    steps = _Steps(rewards, starts, behaviour_logp, target_logp, gamma, max_ratio, q_values, state_values)
    return _estimate(steps.terms_by_time, steps.episode_weights()[1], bootstrap)


def mean_estimate(values: NDArray[Any], bootstrap: Bootstrap = Bootstrap()) -> ValueEstimate:
    """Return the mean of one value for each episode, `[E]`, such as the recorded returns, or values of first steps.

    Raises:
        DataError: There are no values, or one is not finite.
    """
    column = np.asarray(values, np.float64)
    if not len(column) or not np.isfinite(column).all():
        raise DataError(
            f"off-policy estimates: give at least one value, and only finite ones; got {len(column)} values."
        )
    return _estimate(lambda: iter([(column[:, None], None)]), None, bootstrap)


def discounted_returns(rewards: NDArray[Any], starts: NDArray[Any], gamma: float) -> Column:
    """Return the discounted sum of the rewards of each episode, float64 `[E]`, from columns `[S]`."""
    zeros = np.zeros(len(rewards))
    steps = _Steps(rewards, starts, zeros, zeros, gamma, None)
    return steps.sum_by_episode(steps.discounts * steps.rewards)


class _Steps:
    """Checked columns of steps.

    Attributes:
        rewards: float64 `[S]`.
        discounts: Discount of each step since the start of its episode, float64 `[S]`.
        log_weights: Logarithm of the weight of the episode up to a step, float64 `[S]`.
        q_values: float64 `[S]`.
        state_values: float64 `[S]`.
    """

    def __init__(
        self,
        rewards: NDArray[Any],
        starts: NDArray[Any],
        behaviour_logp: NDArray[Any],
        target_logp: NDArray[Any],
        gamma: float,
        max_ratio: float | None,
        q_values: NDArray[Any] | None = None,
        state_values: NDArray[Any] | None = None,
    ) -> None:
        given = {
            "rewards": rewards,
            "behaviour_logp": behaviour_logp,
            "target_logp": target_logp,
            "q_values": np.zeros(len(rewards)) if q_values is None else q_values,
            "state_values": np.zeros(len(rewards)) if state_values is None else state_values,
        }
        columns = {name: np.asarray(column, np.float64) for name, column in given.items()}
        begins = np.asarray(starts, np.bool_)
        for name, column in {**columns, "starts": begins}.items():
            if column.shape != (len(rewards),):
                raise DataError(
                    f"off-policy estimates: {name} has the shape {list(column.shape)}, and there are {len(rewards)} "
                    "rewards: give one number for each step."
                )
        if not len(begins) or not begins[0]:
            raise DataError(
                "off-policy estimates: there are no steps, or the first one begins no episode: give whole episodes."
            )
        _check_numbers(columns)
        if not 0 <= gamma <= 1 or (max_ratio is not None and not max_ratio > 0):
            raise DataError(
                f"off-policy estimates: gamma={gamma} must be from 0 to 1, and max_ratio={max_ratio} above 0."
            )
        self.rewards, self.q_values, self.state_values = (
            columns[name] for name in ("rewards", "q_values", "state_values")
        )
        self._firsts = np.flatnonzero(begins)
        self._lengths = np.diff([*self._firsts, len(begins)])
        self._times = np.arange(len(begins)) - np.repeat(self._firsts, self._lengths)
        self.discounts: Column = np.power(float(gamma), self._times)
        log_ratios = columns["target_logp"] - columns["behaviour_logp"]
        if max_ratio is not None:
            log_ratios = np.minimum(log_ratios, math.log(max_ratio))
        self.log_weights = np.empty(len(log_ratios))
        for first, length in zip(self._firsts.tolist(), self._lengths.tolist(), strict=True):
            # Each episode alone: the difference of two sums over all steps would lose digits, and minus infinity.
            np.cumsum(log_ratios[first : first + length], out=self.log_weights[first : first + length])

    def sum_by_episode(self, column: Column) -> Column:
        """Return the sums `[E]` of a column `[S]`."""
        sums: Column = np.add.reduceat(column, self._firsts)
        return sums

    def largest_log_weight(self) -> float:
        """Return the largest logarithm of the weights up to any step; 0 if all weights are 0."""
        return _finite_or_zero(float(self.log_weights.max()))

    def log_weights_before(self) -> Column:
        """Return the logarithms of the weights up to the step before each step, `[S]`."""
        before = np.roll(self.log_weights, 1)
        before[self._firsts] = 0.0
        return before

    def episode_weights(self) -> tuple[float, Column]:
        """Return the logarithm of a factor, and the weights `[E]` of whole episodes, at most 1, without the factor."""
        logs = self.log_weights[self._firsts + self._lengths - 1]
        scale = _finite_or_zero(float(logs.max()))
        return scale, np.exp(logs - scale)

    def terms_by_time(self) -> Iterator[Terms]:
        """Yield the terms of the estimates whose weights are divided by their mean at each time, for some times each.

        The weights at one time have a common factor, which cancels.
        """
        num_episodes, longest = len(self._firsts), int(self._lengths.max())
        size = max(1, _MAX_CELLS // num_episodes)
        for start in range(0, longest, size):
            times = np.arange(start, min(start + size, longest))
            lasts = self._lengths[:, None] - 1
            rows = self._firsts[:, None] + np.minimum(times, lasts)
            # The weight before the first step is 1.
            rows_before = self._firsts[:, None] + np.clip(times - 1, 0, lasts)
            logs_before = np.where(times > 0, self.log_weights[rows_before], 0.0)
            counts = np.where(times <= lasts, self.discounts[rows], 0.0)
            for logs, values in (
                (self.log_weights[rows], (self.rewards - self.q_values)[rows]),
                (logs_before, self.state_values[rows]),
            ):
                top = logs.max(0)
                weights = np.exp(logs - np.where(np.isfinite(top), top, 0.0))
                yield weights * counts * values, weights


def _check_numbers(columns: dict[str, Column]) -> None:
    """Refuse NaN and infinity; only a target policy may never take an action.

    Raises:
        DataError: Names the column and the step.
    """
    for name, column in columns.items():
        bad = ~np.isfinite(column)
        if name == "target_logp":
            bad &= column != -math.inf
        if bad.any():
            step = int(bad.argmax())
            why = (
                ": the log-probability of an action that was recorded is a finite number"
                if name.endswith("logp")
                else ""
            )
            raise DataError(f"off-policy estimates: {name} of step {step} is {column[step]}{why}.")


def _finite_or_zero(number: float) -> float:
    return number if math.isfinite(number) else 0.0


# From terms to estimates.


def _estimate(
    terms: Callable[[], Iterator[Terms]], weights: Column | None, bootstrap: Bootstrap, scale: float = 0.0
) -> ValueEstimate:
    """Return the estimate of some terms.

    Args:
        terms: Function that returns an iterator over the terms, the same each time.
        weights: Weights of the episodes up to a common factor, or `None` if there are none.
        bootstrap: How the interval is found.
        scale: Logarithm of the factor that the numerators lack.
    """
    value, influence = 0.0, np.zeros(0)
    for numerators, denominators in terms():
        divisors = np.ones(1) if denominators is None else denominators.mean(0)
        with np.errstate(divide="ignore", invalid="ignore"):  # all weights are 0: NaN
            ratios = numerators.mean(0) / divisors
            gaps = numerators - ratios * (1.0 if denominators is None else denominators)
            part = (gaps / divisors).sum(1)
        value += float(ratios.sum())
        influence = part if not len(influence) else influence + part
    size = len(influence)
    error = float(influence.std(ddof=1)) / math.sqrt(size) if size > 1 else math.nan
    low, high = _interval(terms, size, bootstrap)
    return ValueEstimate(
        _scaled(value, scale),
        (_scaled(low, scale), _scaled(high, scale)),
        _scaled(error, scale),
        math.nan if weights is None else _effective_sample_size(weights),
        size,
    )


def _interval(terms: Callable[[], Iterator[Terms]], size: int, bootstrap: Bootstrap) -> tuple[float, float]:
    """Return the percentiles of the estimates from resampled episodes."""
    if size < MIN_EPISODES_FOR_INTERVAL:
        return math.nan, math.nan
    rng, found = np.random.default_rng(bootstrap.seed), list[Column]()
    at_once = max(1, _MAX_DRAWS // size)
    for start in range(0, bootstrap.num_resamples, at_once):
        num = min(at_once, bootstrap.num_resamples - start)
        drawn = rng.integers(size, size=(num, size)) + size * np.arange(num)[:, None]
        shares = np.bincount(drawn.reshape(-1), minlength=num * size).reshape(num, size) / size
        totals = np.zeros(num)
        for numerators, denominators in terms():
            with np.errstate(divide="ignore", invalid="ignore"):
                divisors = 1.0 if denominators is None else shares @ denominators
                totals += (shares @ numerators / divisors).sum(1)
        found.append(totals)
    values = np.concatenate(found)
    values = values[~np.isnan(values)]  # draws in which all weights are 0 say nothing
    if not len(values):
        return math.nan, math.nan
    low, high = np.quantile(values, [(1 - bootstrap.level) / 2, (1 + bootstrap.level) / 2])
    return float(low), float(high)


def _effective_sample_size(weights: Column) -> float:
    total = float(weights.sum())
    return total * total / float((weights * weights).sum()) if total else 0.0


def _scaled(number: float, scale: float) -> float:
    """Return a number times e to the power of `scale`; infinite if it is too large for a float."""
    if not number or not scale or math.isnan(number):
        return number
    log = math.log(abs(number)) + scale
    try:
        return math.copysign(math.exp(log), number)
    except OverflowError:
        return math.copysign(math.inf, number)
