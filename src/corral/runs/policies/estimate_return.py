"""The return of a policy, estimated from recorded episodes of another policy, without an env."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.spaces import space_tree
from corral.core.tree import Tree, leaves, map_tree
from corral.data.offline.data import ModuleRows
from corral.data.offline.episode_rows import EpisodeRows
from corral.data.offline.fitted_values import FitSettings, FittedValues, fit_values
from corral.data.offline.off_policy_estimates import (
    Bootstrap,
    ValueEstimate,
    discounted_returns,
    doubly_robust,
    importance_sampling,
    mean_estimate,
    per_decision_importance_sampling,
    weighted_doubly_robust,
    weighted_importance_sampling,
    weighted_per_decision_importance_sampling,
)
from corral.data.offline.source import Source
from corral.data.offline.sources import open_source
from corral.errors import ConfigError, DataError, nearest
from corral.modules.distributions import ActionDistribution, Deterministic, DiagGaussian, SquashedGaussian
from corral.modules.heuristic import HeuristicModule
from corral.modules.inference import Inference
from corral.modules.spec import ModuleSpec
from corral.runs.policies.policy import Policy

log = logging.getLogger("corral")

Method = Literal["is", "wis", "pdis", "wpdis", "dr", "wdr", "fqe"]

METHODS: dict[str, str] = {
    "is": "importance sampling",
    "wis": "weighted importance sampling",
    "pdis": "per-decision importance sampling",
    "wpdis": "weighted per-decision importance sampling",
    "dr": "doubly robust",
    "wdr": "weighted doubly robust",
    "fqe": "fitted Q evaluation",
}
"""Names of the methods in words."""

_BY_RATIOS: dict[str, Callable[..., ValueEstimate]] = {
    "is": importance_sampling,
    "wis": weighted_importance_sampling,
    "pdis": per_decision_importance_sampling,
    "wpdis": weighted_per_decision_importance_sampling,
    "dr": doubly_robust,
    "wdr": weighted_doubly_robust,
}
_BY_VALUES = ("dr", "wdr", "fqe")

FEW_EPISODES, FEW_OF_ALL = 10, 0.05
"""Effective sample size, in episodes and as a part of all episodes, below which a warning says that few count."""

_ROWS_AT_ONCE = 8192
_LARGE = 1e30  # an action outside of all bounds
_NEAR_BOUND = 0.0005  # part of the range of a squashed action at each end of which `from_env` moves actions


@dataclass(frozen=True)
class OffPolicyEvaluation:
    """Estimates of the return of a policy from recorded episodes.

    Attributes:
        estimates: The estimates by method; see `METHODS`.
        skipped: Why the other methods do not apply, by method.
        recorded: Mean discounted return of the recorded episodes, which another policy may have played.
        episode_return_mean: Mean return of the recorded episodes, without discount.
        num_steps: Number of recorded steps.
        gamma: Discount per step.
        explore: Whether the policy was evaluated that draws its actions, and not the greedy one.
        td_error: Error of the fitted values in units of the rewards, see `FittedValues`; NaN if none were fitted.
    """

    estimates: dict[str, ValueEstimate]
    skipped: dict[str, str]
    recorded: ValueEstimate
    episode_return_mean: float
    num_steps: int
    gamma: float
    explore: bool
    td_error: float = math.nan

    @property
    def num_episodes(self) -> int:
        """Number of recorded episodes."""
        return self.recorded.num_episodes

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers in types that JSON holds; numbers that are not finite are `None`."""
        return {
            "num_episodes": self.num_episodes,
            "num_env_steps": self.num_steps,
            "gamma": self.gamma,
            "explore": self.explore,
            "episode_return_mean": _finite(self.episode_return_mean),
            "recorded": _as_dict(self.recorded),
            "estimates": {method: _as_dict(found) for method, found in self.estimates.items()},
            "td_error": _finite(self.td_error),
            "skipped": dict(self.skipped),
        }

    def __str__(self) -> str:
        """Return the numbers as a few lines of text."""
        head = {
            "episodes": f"{self.num_episodes:,} of {self.num_steps:,} env steps, mean return "
            f"{self.episode_return_mean:.2f} without discount",
            "policy": "draws its actions" if self.explore else "greedy",
            "discount": f"{self.gamma:g}",
        }
        table: list[tuple[str, ...]] = [("return", "estimate", "95% interval", "std. error", "effective episodes")]
        table += [_cells("recorded", self.recorded)]
        table += [_cells(method, found) for method, found in self.estimates.items()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [f"{name:<20}{text}" for name, text in head.items()]
        lines += [
            "  ".join([f"{row[0]:<18}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))])
            for row in table
        ]
        lines += [f"{method:<20}not estimated: {reason}" for method, reason in self.skipped.items()]
        return "\n".join(lines)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _as_dict(found: ValueEstimate) -> dict[str, float | None]:
    numbers = {
        "value": found.value,
        "interval_low": found.interval[0],
        "interval_high": found.interval[1],
        "standard_error": found.standard_error,
        "effective_sample_size": found.effective_sample_size,
    }
    return {name: _finite(number) for name, number in numbers.items()}


def _cells(name: str, found: ValueEstimate) -> tuple[str, ...]:
    def number(value: float, form: str = "#.5g") -> str:
        return "-" if math.isnan(value) else f"{value:{form}}"

    interval = "-" if math.isnan(found.interval[0]) else " to ".join(number(end) for end in found.interval)
    return name, number(found.value), interval, number(found.standard_error), number(found.effective_sample_size, ".1f")


@dataclass
class _Recorded:
    """Columns of the recorded episodes of one module.

    Attributes:
        rows: Rows as they were recorded.
        obs: Observations as the module sees them, a tree of `[R, ...]`.
        actions: Module actions `[R, ...]`; numbers of the space without meaning where a row is not valid.
        dist_inputs: Outputs of the policy, float32 `[R, D]`.
    """

    rows: list[EpisodeRows] = field(default_factory=list)
    obs: list[Tree] = field(default_factory=list)
    actions: list[NDArray[Any]] = field(default_factory=list)
    dist_inputs: list[NDArray[np.float32]] = field(default_factory=list)

    def column(self, name: str) -> NDArray[Any]:
        """Return a column `[R]` of all rows."""
        return np.concatenate([getattr(part, name) for part in self.rows])


def estimate_return(
    policy: Any,
    data: Any,
    *,
    methods: str | Sequence[str] = "all",
    gamma: float = 0.99,
    explore: bool = False,
    module_id: str | None = None,
    max_ratio: float | None = None,
    num_gradient_steps: int = 10_000,
    batch_size: int = 256,
    lr: float = 1e-3,
    model_config: Mapping[str, Any] | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> OffPolicyEvaluation:
    """Estimate the mean discounted return of a policy from the start of an episode, from recorded episodes.

    The estimates by probability ratios (`is`, `wis`, `pdis`, `wpdis`, `dr`, `wdr`) need the log-probabilities of the
    recorded actions, and a policy with probabilities. The values that `dr` and `wdr` need are the values of `fqe`,
    fitted to the same data. Rewards are the recorded ones, whatever transforms the algorithm had. See
    docs/off-policy-evaluation.md.

    Args:
        policy: A policy, or an algorithm.
        data: The recorded episodes, as in `.offline_data(input_=data)`.
        methods: Names of `METHODS`, or `"all"` for all that apply.
        gamma: Discount per step.
        explore: Whether to evaluate the policy that draws its actions, as in `policy(obs, explore=True)`; otherwise the
            greedy one is evaluated, as `evaluate_policy` and `load_policy` do. The greedy policy takes its most likely
            action with probability 1.
        module_id: Id of the module, in the data and of an algorithm, if there are several.
        max_ratio: Bound to which the probability ratio of each step is clipped; `None` clips none.
        num_gradient_steps: Gradient steps of fitted Q evaluation.
        batch_size: Steps of the data in each of them.
        lr: Its learning rate, which falls linearly to a tenth.
        model_config: Settings of its network, as of a critic of SAC, such as `{"fcnet_hiddens": [64, 64]}`.
        num_resamples: Resamples of the bootstrap for the intervals.
        seed: Seed of the bootstrap and of the fit.

    Raises:
        ConfigError: A method that was named does not apply to the policy, the policy has memory or follows rules, or an
            argument is out of bounds.
        DataError: There is no data of the module, an entry does not fit the policy's spaces, or a method that was named
            needs log-probabilities that the data lacks.
    """
    wanted = _named_methods(methods)
    if not 0 <= gamma <= 1:
        raise ConfigError(f"estimate_return: gamma={gamma} must be from 0 to 1.")
    if num_resamples < 1:
        raise ConfigError(f"estimate_return: num_resamples={num_resamples} must be at least 1.")
    if max_ratio is not None and not max_ratio > 0:
        raise ConfigError(f"estimate_return: max_ratio={max_ratio} must be above 0.")
    settings = FitSettings(num_gradient_steps, batch_size, lr, model_config, seed)
    if hasattr(policy, "acting_policy"):
        policy = policy.acting_policy(module_id)
    if not isinstance(policy, Policy):
        raise ConfigError(f"estimate_return: {policy!r:.80} is no policy and no algorithm: see corral.load_policy.")
    _check_policy(policy)
    source = open_source(data)
    recorded = _read(policy, source, _id_in_data(source, module_id))
    skipped = _find_reasons(policy, recorded, explore, gamma)
    skipped = {method: skipped[method] for method in wanted if method in skipped}
    if methods != "all" and skipped:
        method, (error, reason) = next(iter(skipped.items()))
        raise error(f"estimate_return: {METHODS[method]} ({method!r}) does not apply: {reason}.")
    chosen = [method for method in wanted if method not in skipped]
    found = _estimates(
        policy, recorded, chosen, gamma, explore, max_ratio, settings, Bootstrap(num_resamples, seed=seed)
    )
    evaluation = OffPolicyEvaluation(
        **found,
        skipped={method: reason for method, (_, reason) in skipped.items()},
        gamma=gamma,
        explore=explore,
    )
    _warn(policy, evaluation)
    return evaluation


def _named_methods(methods: str | Sequence[str]) -> list[str]:
    """Return the methods, each once.

    Raises:
        ConfigError: A name is unknown, or there is none.
    """
    given = list(METHODS) if methods == "all" else [methods] if isinstance(methods, str) else list(methods)
    for method in given:
        if method not in METHODS:
            raise ConfigError(
                f"estimate_return: there is no method {method!r}. {nearest(str(method), [*METHODS, 'all'])}"
            )
    if not given:
        raise ConfigError(f"estimate_return: no method was named: name some of {list(METHODS)}, or 'all'.")
    return list(dict.fromkeys(given))


def _check_policy(policy: Policy) -> None:
    """Refuse policies whose actions depend on more than the observation, or follow rules.

    Raises:
        ConfigError: Names the class of the module.
    """
    name = type(policy.module).__name__
    if isinstance(policy.module, HeuristicModule):
        raise ConfigError(
            f"estimate_return: {name} chooses actions by rules, whose probabilities are not known: evaluate it in an "
            "env, with evaluate_policy."
        )
    if policy.module.has_memory():
        raise ConfigError(
            f"estimate_return: {name} has memory, and estimates from data are for modules that see one observation at "
            "a time: evaluate it in an env, with evaluate_policy, or train with the transform FrameStack in its place."
        )


def _id_in_data(source: Source, module_id: str | None) -> str:
    """Return the id that the module has in the data: with one module in the data, whatever id it has.

    Raises:
        DataError: There are episodes of several modules, and none or another one was named; or there are none.
    """
    known = list(source.num_rows or source.spaces or dict.fromkeys(rows.module_id for rows in source.parts()))
    if not known:
        raise DataError(f"offline_data: {source.name} holds no episodes.")
    if len(known) == 1:
        return known[0]
    if module_id not in known:
        raise DataError(
            f"offline_data: {source.name} holds episodes of the modules {known}: choose one of them with module_id, or "
            "with --module on the command line."
        )
    return module_id


def _read(policy: Policy, source: Source, module_id: str) -> _Recorded:
    """Return the checked columns of a module, with the outputs of the policy.

    Raises:
        DataError: There are no episodes of the module, or an entry does not fit the policy's spaces.
    """
    module, distribution = policy.module, policy.module.distribution
    spec = ModuleSpec(type(module), policy.observation_space, policy.action_space, {}, pipeline=policy.pipeline)
    rows, found, inference = ModuleRows(source, module_id, spec, distribution), _Recorded(), Inference(module)
    inference.begin_sample(False, np.random.default_rng(0))  # without the noise of noisy layers
    for part in rows.parts():
        rollout = rows.as_rollout(part, policy.pipeline).transformed()
        obs = map_tree(lambda leaf: leaf[:, 0].copy(), rollout.obs)  # columns of files cannot be written
        found.rows.append(part)
        found.obs.append(obs)
        found.actions.append(part.module_actions(distribution))
        found.dist_inputs.append(
            np.concatenate(
                [
                    np.array(inference(map_tree(lambda leaf, at=at: leaf[at : at + _ROWS_AT_ONCE], obs)))
                    for at in range(0, len(part), _ROWS_AT_ONCE)
                ]
            )
        )
    if not found.rows:
        raise DataError(f"offline_data: {source.name} holds no episodes of module {module_id!r}.")
    if jumps := sum(part.num_jumps for part in found.rows):
        raise DataError(
            f"estimate_return: in {source.name}, {jumps:,} steps of module {module_id!r} are followed by a step that "
            "begins in another observation than their 'next_obs', and no flag ends an episode there. Estimates need "
            "whole episodes in the order of time: put the steps in order, and mark each end with 'terminated' or "
            "'truncated'."
        )
    return found


# Which methods apply.


def _find_reasons(
    policy: Policy, recorded: _Recorded, explore: bool, gamma: float
) -> dict[str, tuple[type[ConfigError] | type[DataError], str]]:
    """Return for each method that does not apply the class of the error, and the reason."""
    reasons: dict[str, tuple[type[ConfigError] | type[DataError], str]] = {}
    if isinstance(policy.action_space, (spaces.Discrete, spaces.Box)):
        if gamma == 1 and recorded.column("truncated").any():
            reasons |= dict.fromkeys(
                _BY_VALUES,
                (
                    ConfigError,
                    "with gamma=1 the values of truncated episodes, which would continue, have no limit; give a "
                    "smaller gamma",
                ),
            )
    else:
        reasons |= dict.fromkeys(
            _BY_VALUES,
            (ConfigError, f"fitted values need Discrete or Box actions, and the policy's are {policy.action_space}"),
        )
    if problem := _problem_of_ratios(policy, recorded, explore):
        reasons |= dict.fromkeys(_BY_RATIOS, problem)
    return {method: reasons[method] for method in METHODS if method in reasons}


def _problem_of_ratios(
    policy: Policy, recorded: _Recorded, explore: bool
) -> tuple[type[ConfigError] | type[DataError], str] | None:
    """Return why there are no probability ratios; `None` if there are."""
    distribution, name = policy.module.distribution, type(policy.module).__name__
    if isinstance(distribution, Deterministic):
        return (
            ConfigError,
            f"the policy of {name} is deterministic, so that its actions have no density; 'fqe' needs none",
        )
    if not explore and not _is_discrete(distribution):
        return ConfigError, (
            "the greedy policy has no density over continuous actions; explore=True (--explore) evaluates the policy "
            "that draws its actions, and 'fqe' needs no density"
        )
    lacking = sum(
        int(np.count_nonzero(~np.isfinite(part.added["logp"][part.valid]))) if "logp" in part.added else part.num_steps
        for part in recorded.rows
    )
    if lacking:
        num_steps = sum(part.num_steps for part in recorded.rows)
        return DataError, (
            f"{lacking:,} of {num_steps:,} recorded steps have no log-probability of their action (column 'logp'), "
            "which Corral records where PPO, APPO or IMPALA explore, as with `corral record RUN --explore`; 'fqe' "
            "needs none"
        )
    at_bounds = sum(
        int(np.count_nonzero(_are_at_bounds(distribution, policy.action_space, part, actions)))
        for part, actions in zip(recorded.rows, recorded.actions, strict=True)
    )
    if at_bounds:
        return DataError, (
            f"{at_bounds:,} recorded steps have actions at the bounds of {policy.action_space}, where the drawn action "
            "that has the recorded log-probability is not known; 'fqe' needs none"
        )
    return None


def _is_discrete(distribution: ActionDistribution) -> bool:
    return bool(np.dtype(distribution.action_dtype).kind in "biu")


def _are_at_bounds(
    distribution: ActionDistribution, space: spaces.Space[Any], rows: EpisodeRows, actions: NDArray[Any]
) -> NDArray[np.bool_]:
    """Return the valid rows, bool `[S]`, whose actions were clipped, or squashed so far that no inverse is exact."""
    found = np.zeros(rows.num_steps, np.bool_)
    parts = getattr(distribution, "parts", [distribution])
    if not any(isinstance(part, DiagGaussian) for part in parts):
        return found
    env_actions = distribution.to_env(actions[rows.valid])
    for part, _, taken in zip(parts, leaves(space_tree(space)), leaves(env_actions), strict=True):
        if isinstance(part, DiagGaussian):
            low, high = (
                part.to_env(np.full((1, *part.action_shape), end)).astype(np.float64) for end in (-_LARGE, _LARGE)
            )
            margin = _NEAR_BOUND * (high - low) if isinstance(part, SquashedGaussian) else 0.0
            at_bound = ((taken <= low + margin) | (taken >= high - margin)) & (low < high)
            found |= at_bound.reshape(len(found), -1).any(1)
    return found


# The estimates.


def _estimates(
    policy: Policy,
    recorded: _Recorded,
    methods: Sequence[str],
    gamma: float,
    explore: bool,
    max_ratio: float | None,
    settings: FitSettings,
    bootstrap: Bootstrap,
) -> dict[str, Any]:
    """Return the fields of an `OffPolicyEvaluation` that are computed."""
    valid = recorded.column("valid")
    first_rows = np.concatenate([[True], ~valid[:-1]])
    rewards, starts = recorded.column("rewards")[valid], first_rows[valid]
    columns: dict[str, NDArray[Any]] = {"rewards": rewards, "starts": starts}
    if any(method in _BY_RATIOS for method in methods):
        columns["behaviour_logp"] = np.concatenate([part.added["logp"][part.valid] for part in recorded.rows])
        columns["target_logp"] = _target_logp(policy, recorded, explore)
    fitted: FittedValues | None = None
    if any(method in _BY_VALUES for method in methods):
        fitted = _fit(policy, recorded, gamma, explore, settings)
    values = {} if fitted is None else {n: getattr(fitted, n)[valid] for n in ("q_values", "state_values")}
    estimates: dict[str, ValueEstimate] = {}
    for method in methods:
        if method == "fqe":
            assert fitted is not None
            estimates[method] = mean_estimate(fitted.state_values[first_rows], bootstrap)
        else:
            given = {**columns, **(values if method in _BY_VALUES else {})}
            estimates[method] = _BY_RATIOS[method](**given, gamma=gamma, max_ratio=max_ratio, bootstrap=bootstrap)
    return {
        "estimates": estimates,
        "recorded": mean_estimate(discounted_returns(rewards, starts, gamma), bootstrap),
        "episode_return_mean": float(discounted_returns(rewards, starts, 1.0).mean()),
        "num_steps": len(rewards),
        "td_error": math.nan if fitted is None else fitted.td_error,
    }


def _target_logp(policy: Policy, recorded: _Recorded, explore: bool) -> NDArray[np.float64]:
    """Return the log-probabilities of the recorded actions under the policy, float64 `[S]`."""
    distribution, found = policy.module.distribution, list[NDArray[Any]]()
    for part, actions, dist_inputs in zip(recorded.rows, recorded.actions, recorded.dist_inputs, strict=True):
        taken, inputs = actions[part.valid], dist_inputs[part.valid]
        if explore:
            with torch.inference_mode():
                logp = distribution.logp(torch.from_numpy(inputs), torch.from_numpy(taken)).double().numpy()
        else:
            same = (np.asarray(distribution.mode(inputs)) == taken).reshape(len(taken), -1).all(1)
            logp = np.where(same, 0.0, -math.inf)
        found.append(logp)
    return np.concatenate(found)


def _fit(policy: Policy, recorded: _Recorded, gamma: float, explore: bool, settings: FitSettings) -> FittedValues:
    """Return the fitted values of the policy in all rows."""
    module, space = policy.module, policy.action_space
    distribution = module.distribution
    dist_inputs, actions = np.concatenate(recorded.dist_inputs), np.concatenate(recorded.actions)
    obs = map_tree(lambda *leaf: np.concatenate(leaf), *recorded.obs)
    valid = recorded.column("valid")
    if isinstance(space, spaces.Discrete):
        actions = np.where(valid, actions, 0)
        target: Any = _probabilities(distribution, dist_inputs, int(space.n), explore)
    else:
        assert isinstance(space, spaces.Box)
        actions = _as_units(distribution, space, actions)
        target = partial(_draw_units, distribution, space, dist_inputs, explore)
    rewards, terminated = recorded.column("rewards"), recorded.column("terminated")
    return fit_values(module.features_space, space, obs, actions, rewards, terminated, valid, target, gamma, settings)


def _probabilities(
    distribution: ActionDistribution, dist_inputs: NDArray[np.float32], num_actions: int, explore: bool
) -> NDArray[np.float32]:
    """Return the probabilities of Discrete actions, float32 `[R, n]`."""
    if not explore:
        certain: NDArray[np.float32] = np.eye(num_actions, dtype=np.float32)[distribution.mode(dist_inputs)]
        return certain
    inputs, chances = torch.from_numpy(dist_inputs), np.empty((len(dist_inputs), num_actions), np.float32)
    with torch.inference_mode():
        for action in range(num_actions):
            each = torch.full((len(inputs),), action)
            chances[:, action] = distribution.logp(inputs, each).exp().numpy()
    return chances


def _draw_units(
    distribution: ActionDistribution,
    space: spaces.Box,
    dist_inputs: NDArray[np.float32],
    explore: bool,
    rows: NDArray[np.int64],
    rng: np.random.Generator,
) -> NDArray[np.float32]:
    """Return Box actions of the policy for some rows, as `_as_units` returns them."""
    inputs = dist_inputs[rows]
    if explore:
        return _as_units(distribution, space, distribution.sample(inputs, distribution.noise(rng, (len(inputs),))))
    return _as_units(distribution, space, distribution.mode(inputs))


def _as_units(distribution: ActionDistribution, space: spaces.Box, actions: NDArray[Any]) -> NDArray[np.float32]:
    """Return module actions as the env receives them, float32 `[B, d]`, with finite bounds mapped to [-1, 1]."""
    taken = np.asarray(distribution.to_env(actions), np.float64)
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    finite = np.isfinite(low) & np.isfinite(high) & (high > low)
    center = np.where(finite, np.where(finite, low, 0) / 2 + np.where(finite, high, 0) / 2, 0.0)
    half = np.where(finite, np.where(finite, high, 1) / 2 - np.where(finite, low, -1) / 2, 1.0)
    return ((taken - center) / half).reshape(len(taken), -1).astype(np.float32)


# Warnings.


def _warn(policy: Policy, found: OffPolicyEvaluation) -> None:
    """Warn of methods that were left out, and of weights that few episodes have."""
    by_reason: dict[str, list[str]] = {}
    for method, reason in found.skipped.items():
        by_reason.setdefault(reason, []).append(method)
    for reason, methods in by_reason.items():
        log.warning("Not estimated by %s: %s.", ", ".join(methods), reason)
    sizes = [each.effective_sample_size for method, each in found.estimates.items() if method in _BY_RATIOS]
    if not sizes:
        return
    size, total = sizes[0], found.num_episodes
    if size < max(FEW_OF_ALL * total, min(FEW_EPISODES, total / 2)):
        greedy = "" if found.explore else ", or explore=True (--explore) for the policy that draws its actions"
        log.warning(
            "The weights of %s episodes count as much as %.1f episodes of equal weight: estimates by probability "
            "ratios are unreliable. Record a policy closer to this one, record more episodes, clip ratios with "
            "max_ratio (--max-ratio), or trust 'fqe' more%s.",
            *(f"{total:,}", size, greedy),
        )
