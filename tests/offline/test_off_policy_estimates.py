"""Estimates of a policy from recorded episodes: closed forms, plain references, intervals and large weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

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
from corral.errors import DataError

GAMMA = 0.9
HORIZON = 3
# Three states, the last one final; two actions. P[s, a] are the probabilities of the next states, R[s, a] the rewards.
P = np.array([[[0.6, 0.3, 0.1], [0.2, 0.5, 0.3]], [[0.3, 0.3, 0.4], [0.0, 0.9, 0.1]]])
R = np.array([[1.0, -0.5], [0.3, 2.0]])
BEHAVIOUR = np.array([[0.7, 0.3], [0.4, 0.6]])
TARGET = np.array([[0.2, 0.8], [0.9, 0.1]])
FEW = Bootstrap(num_resamples=20)

Simple = Callable[..., ValueEstimate]
WITHOUT_VALUES: list[Simple] = [
    importance_sampling,
    weighted_importance_sampling,
    per_decision_importance_sampling,
    weighted_per_decision_importance_sampling,
]
WITH_VALUES: list[Simple] = [doubly_robust, weighted_doubly_robust]


def exact_values() -> tuple[NDArray[Any], NDArray[Any]]:
    """Values `[T + 1, s]` and action values `[T, s, a]` of the target policy, with `T - t` steps left."""
    v, q = np.zeros((HORIZON + 1, 3)), np.zeros((HORIZON, 2, 2))
    for t in reversed(range(HORIZON)):
        q[t] = R + GAMMA * P @ v[t + 1]
        v[t, :2] = (TARGET * q[t]).sum(1)
    return v, q


def trajectories(policy: NDArray[Any]) -> Iterator[tuple[float, list[tuple[int, int, float]]]]:
    """Each possible episode from state 0 under a policy, with its probability: its (state, action, reward)."""

    def extend(state: int, steps: list[tuple[int, int, float]], chance: float) -> Any:
        if state == 2 or len(steps) == HORIZON:  # terminated, or truncated
            yield chance, steps
            return
        for action, after in itertools.product(range(2), range(3)):
            share = policy[state, action] * P[state, action, after]
            if share:
                yield from extend(after, [*steps, (state, action, R[state, action])], chance * share)

    yield from extend(0, [], 1.0)


def columns_of(episodes: list[list[tuple[int, int, float]]]) -> dict[str, NDArray[Any]]:
    steps = np.array([step for episode in episodes for step in episode])
    states, actions = steps[:, 0].astype(int), steps[:, 1].astype(int)
    return {
        "rewards": steps[:, 2],
        "starts": np.array([t == 0 for episode in episodes for t in range(len(episode))]),
        "behaviour_logp": np.log(BEHAVIOUR[states, actions]),
        "target_logp": np.log(TARGET[states, actions]),
    }


def exact_columns(episodes: list[list[tuple[int, int, float]]]) -> dict[str, NDArray[Any]]:
    """The columns with the exact values at each time."""
    v, q = exact_values()
    at = [(t, state, action) for episode in episodes for t, (state, action, _) in enumerate(episode)]
    return {
        **columns_of(episodes),
        "q_values": np.array([q[t, state, action] for t, state, action in at]),
        "state_values": np.array([v[t, state] for t, state, _ in at]),
    }


def expectation(estimate: Simple, columns: Callable[[Any], dict[str, Any]]) -> float:
    """The exact expectation of an estimate from one episode of the behaviour policy."""
    return sum(
        chance * estimate(**columns([steps]), gamma=GAMMA, bootstrap=FEW).value
        for chance, steps in trajectories(BEHAVIOUR)
    )


def test_the_enumeration_is_complete_and_agrees_with_the_recursion() -> None:
    assert sum(chance for chance, _ in trajectories(BEHAVIOUR)) == pytest.approx(1)
    value = sum(
        chance * sum(GAMMA**t * reward for t, (_, _, reward) in enumerate(steps))
        for chance, steps in trajectories(TARGET)
    )
    assert value == pytest.approx(exact_values()[0][0, 0])


@pytest.mark.parametrize("estimate", [importance_sampling, per_decision_importance_sampling])
def test_importance_sampling_is_unbiased(estimate: Simple) -> None:
    assert expectation(estimate, columns_of) == pytest.approx(exact_values()[0][0, 0], rel=1e-12)


@pytest.mark.parametrize("kind", ["exact", "zero", "wrong"])
def test_doubly_robust_is_unbiased_whatever_the_values(kind: str) -> None:
    rng = np.random.default_rng(0)
    wrong = rng.normal(size=(2, 2)) * 5

    def columns(episodes: Any) -> dict[str, Any]:
        found = exact_columns(episodes)
        states, actions = (np.array([step[i] for episode in episodes for step in episode]) for i in (0, 1))
        if kind == "wrong":
            found |= {"q_values": wrong[states, actions], "state_values": (TARGET * wrong).sum(1)[states]}
        elif kind == "zero":
            found |= {"q_values": np.zeros(len(states)), "state_values": np.zeros(len(states))}
        return found

    assert expectation(doubly_robust, columns) == pytest.approx(exact_values()[0][0, 0], rel=1e-12)


def test_with_exact_values_actions_add_no_variance() -> None:
    """With certain transitions, every episode of any actions gives the exact value."""
    q1 = np.array([2.0, -1.0])  # at the second and last step, whose state is always the same
    v1 = float(TARGET[1] @ q1)
    q0 = np.array([0.5, 3.0]) + GAMMA * v1
    v0 = float(TARGET[0] @ q0)
    for a0, a1 in itertools.product(range(2), range(2)):
        actions = np.array([[0, 1], [a0, a1]])
        found = doubly_robust(
            np.array([q0[a0] - GAMMA * v1, q1[a1]]),
            np.array([True, False]),
            np.log(BEHAVIOUR[actions[0], actions[1]]),
            np.log(TARGET[actions[0], actions[1]]),
            np.array([q0[a0], q1[a1]]),
            np.array([v0, v1]),
            GAMMA,
        )
        assert found.value == pytest.approx(v0, rel=1e-12)


def test_with_values_of_zero_doubly_robust_is_per_decision_importance_sampling() -> None:
    columns = random_columns(np.random.default_rng(3), 30)
    zeros = {name: np.zeros(len(columns["rewards"])) for name in ("q_values", "state_values")}
    columns = {name: column for name, column in columns.items() if name not in zeros}
    pairs = [
        (per_decision_importance_sampling, doubly_robust),
        (weighted_per_decision_importance_sampling, weighted_doubly_robust),
    ]
    for plain, robust in pairs:
        assert plain(**columns, gamma=GAMMA) == robust(**columns, **zeros, gamma=GAMMA)


def sampled(rng: np.random.Generator, num_episodes: int) -> list[list[tuple[int, int, float]]]:
    """Episodes of the behaviour policy."""
    chances, episodes = zip(*trajectories(BEHAVIOUR), strict=True)
    return [episodes[i] for i in rng.choice(len(episodes), num_episodes, p=np.array(chances) / sum(chances))]


@pytest.mark.parametrize("estimate", [*WITHOUT_VALUES, *WITH_VALUES])
def test_estimates_are_consistent(estimate: Simple) -> None:
    episodes = sampled(np.random.default_rng(1), 40_000)
    columns = columns_of(episodes) if estimate in WITHOUT_VALUES else exact_columns(episodes)
    found = estimate(**columns, gamma=GAMMA, bootstrap=FEW)
    assert abs(found.value - exact_values()[0][0, 0]) < 4 * found.standard_error
    assert found.standard_error < 0.05


# A slow reference, without logarithms and without columns.


def random_columns(rng: np.random.Generator, num_episodes: int) -> dict[str, NDArray[Any]]:
    """Columns of episodes of unequal lengths."""
    lengths = rng.integers(1, 9, num_episodes)
    size = int(lengths.sum())
    starts = np.zeros(size, bool)
    starts[np.cumsum(lengths) - lengths] = True
    columns = {name: rng.normal(size=size) for name in ("rewards", "q_values", "state_values")}
    logs = {name: np.log(rng.uniform(0.05, 1, size)) for name in ("behaviour_logp", "target_logp")}
    return {"rewards": columns.pop("rewards"), "starts": starts, **logs, **columns}


def reference(columns: dict[str, NDArray[Any]], gamma: float) -> dict[Simple, float]:
    episodes: list[list[dict[str, float]]] = []
    for step in range(len(columns["rewards"])):
        if columns["starts"][step]:
            episodes.append([])
        entry = {name: float(column[step]) for name, column in columns.items()}
        entry["ratio"] = math.exp(entry["target_logp"]) / math.exp(entry["behaviour_logp"])
        episodes[-1].append(entry)
    weights = [math.prod(step["ratio"] for step in episode) for episode in episodes]
    returns = [sum(gamma**t * step["rewards"] for t, step in enumerate(episode)) for episode in episodes]
    per_decision, robust = 0.0, 0.0
    for episode in episodes:
        value = rest = 0.0
        for step in reversed(episode):
            value = step["ratio"] * (step["rewards"] + gamma * value)
            rest = step["state_values"] + step["ratio"] * (step["rewards"] + gamma * rest - step["q_values"])
        per_decision, robust = per_decision + value / len(episodes), robust + rest / len(episodes)

    def weight(episode: list[dict[str, float]], num_steps: int) -> float:
        return math.prod(step["ratio"] for step in episode[:num_steps])  # which stays the same after the end

    weighted = weighted_robust = 0.0
    for t in range(max(map(len, episodes))):
        now, before = (sum(weight(episode, num) for episode in episodes) for num in (t + 1, t))
        for episode in episodes:
            if t < len(episode):
                step, share, share_before = episode[t], weight(episode, t + 1) / now, weight(episode, t) / before
                weighted += gamma**t * share * step["rewards"]
                weighted_robust += gamma**t * share * (step["rewards"] - step["q_values"])
                weighted_robust += gamma**t * share_before * step["state_values"]
    products = [one * other for one, other in zip(weights, returns, strict=True)]
    return {
        importance_sampling: sum(products) / len(episodes),
        weighted_importance_sampling: sum(products) / sum(weights),
        per_decision_importance_sampling: per_decision,
        weighted_per_decision_importance_sampling: weighted,
        doubly_robust: robust,
        weighted_doubly_robust: weighted_robust,
    }


def called(estimate: Simple, columns: dict[str, NDArray[Any]], **settings: Any) -> ValueEstimate:
    """An estimate from the columns that it takes."""
    own = columns if estimate in WITH_VALUES else {name: columns[name] for name in columns if "values" not in name}
    return estimate(**own, **{"gamma": GAMMA, "bootstrap": FEW, **settings})


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gamma", [0.0, 0.8, 1.0])
def test_estimates_agree_with_a_plain_reference(seed: int, gamma: float) -> None:
    columns = random_columns(np.random.default_rng(seed), 1 + 6 * seed)
    for estimate, expected in reference(columns, gamma).items():
        assert called(estimate, columns, gamma=gamma).value == pytest.approx(expected, rel=1e-9), estimate.__name__


def test_long_data_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = random_columns(np.random.default_rng(5), 40)
    whole = [called(estimate, columns, bootstrap=Bootstrap()) for estimate in (*WITHOUT_VALUES, *WITH_VALUES)]
    monkeypatch.setattr("corral.data.offline.off_policy_estimates._MAX_CELLS", 80)
    for estimate, before in zip((*WITHOUT_VALUES, *WITH_VALUES), whole, strict=True):
        found = called(estimate, columns, bootstrap=Bootstrap())
        assert found.value == pytest.approx(before.value) and found.interval == pytest.approx(before.interval)


def test_equal_policies_give_the_recorded_mean() -> None:
    columns = random_columns(np.random.default_rng(8), 25)
    columns["target_logp"] = columns["behaviour_logp"]
    mean = float(discounted_returns(columns["rewards"], columns["starts"], GAMMA).mean())
    for estimate in WITHOUT_VALUES:
        found = called(estimate, columns)
        assert found.value == pytest.approx(mean, rel=1e-12)
        assert found.effective_sample_size == pytest.approx(25)


def test_ratios_are_clipped_only_when_asked_to() -> None:
    rewards, starts = np.ones(2), np.array([True, True])
    behaviour, target = np.log([0.1, 0.5]), np.log([0.9, 0.5])
    arguments = (rewards, starts, behaviour, target, 1.0)
    assert importance_sampling(*arguments).value == pytest.approx((9 + 1) / 2)
    assert importance_sampling(*arguments, max_ratio=2).value == pytest.approx((2 + 1) / 2)
    assert importance_sampling(*arguments).effective_sample_size == pytest.approx(10**2 / (81 + 1))


# Errors and intervals.


def test_standard_errors_match_means_and_ratios_of_means() -> None:
    columns = random_columns(np.random.default_rng(2), 400)
    many = Bootstrap(num_resamples=4000)
    for estimate in (*WITHOUT_VALUES, *WITH_VALUES):
        found = called(estimate, columns, bootstrap=many)
        # The width of the interval says the same, where the estimate is nearly normal.
        assert (found.interval[1] - found.interval[0]) / (2 * 1.96) == pytest.approx(found.standard_error, rel=0.35)
    values = np.array([1.0, 2.0, 4.0, 9.0, 4.0])
    found = mean_estimate(values)
    assert found.value == 4.0
    assert found.standard_error == pytest.approx(values.std(ddof=1) / math.sqrt(5))
    assert math.isnan(found.effective_sample_size)


@pytest.mark.parametrize("estimate", [*WITHOUT_VALUES, doubly_robust])
def test_intervals_cover_the_true_value(estimate: Simple) -> None:
    """200 data sets of 100 episodes; the target is near enough to the behaviour for the bootstrap to be right."""
    near = 0.5 * BEHAVIOUR + 0.5 * TARGET
    value, held = np.zeros(3), 0
    for _ in range(HORIZON):
        value[:2] = (near * (R + GAMMA * P @ value)).sum(1)
    for seed in range(200):
        episodes = sampled(np.random.default_rng(seed), 100)
        columns = columns_of(episodes)
        pairs = np.array([step[:2] for episode in episodes for step in episode]).astype(int)
        columns["target_logp"] = np.log(near[pairs[:, 0], pairs[:, 1]])
        if estimate is doubly_robust:  # with rough values
            columns |= {"q_values": R[pairs[:, 0], pairs[:, 1]], "state_values": (near * R).sum(1)[pairs[:, 0]]}
        low, high = estimate(**columns, gamma=GAMMA, bootstrap=Bootstrap(400, seed=seed)).interval
        held += low <= value[0] <= high
    assert 0.88 <= held / 200 <= 0.99


def test_the_interval_follows_its_settings_and_not_the_machine() -> None:
    columns = random_columns(np.random.default_rng(4), 50)
    one, same, other, narrow = (
        called(importance_sampling, columns, bootstrap=bootstrap).interval
        for bootstrap in (Bootstrap(), Bootstrap(), Bootstrap(seed=1), Bootstrap(level=0.5))
    )
    assert one == same != other
    assert one[0] < narrow[0] < narrow[1] < one[1]
    few = called(importance_sampling, random_columns(np.random.default_rng(4), 4))
    assert np.isnan(few.interval).all() and math.isfinite(few.standard_error)


# Large and small weights.


@pytest.mark.filterwarnings("error")
def test_ratios_of_1000_steps_do_not_overflow() -> None:
    size, num_episodes = 1000, 6
    rng = np.random.default_rng(0)
    columns = {
        "rewards": rng.uniform(0, 1, size * num_episodes),
        "starts": np.arange(size * num_episodes) % size == 0,
        "behaviour_logp": np.full(size * num_episodes, math.log(0.3)),
        "target_logp": np.full(size * num_episodes, math.log(0.9)),
    }
    columns |= {name: np.full(size * num_episodes, 0.25) for name in ("q_values", "state_values")}
    returns = discounted_returns(columns["rewards"], columns["starts"], GAMMA)
    for estimate in (*WITHOUT_VALUES, *WITH_VALUES):
        found = called(estimate, columns)
        assert not math.isnan(found.value) and not np.isnan(found.interval).any()
        assert found.effective_sample_size == pytest.approx(num_episodes)
    assert called(importance_sampling, columns).value == math.inf  # 3 to the power of 1000 is no float
    # Divided by their sum, equal weights are equal.
    assert called(weighted_importance_sampling, columns).value == pytest.approx(returns.mean())
    assert called(weighted_per_decision_importance_sampling, columns).value == pytest.approx(returns.mean())
    # Small ones vanish, and a weight that is e to the power of 2000 larger than the others decides alone.
    columns["target_logp"][size:] = math.log(0.03)
    assert called(importance_sampling, columns).effective_sample_size == pytest.approx(1)
    assert called(weighted_importance_sampling, columns).value == pytest.approx(returns[0])


@pytest.mark.filterwarnings("error")
def test_a_policy_that_never_acts_as_recorded() -> None:
    columns = random_columns(np.random.default_rng(6), 10)
    columns["target_logp"] = np.full(len(columns["rewards"]), -math.inf)
    for estimate in (importance_sampling, per_decision_importance_sampling):
        found = called(estimate, columns)
        assert (found.value, found.effective_sample_size) == (0.0, 0.0)
    for estimate in (weighted_importance_sampling, weighted_per_decision_importance_sampling):
        found = called(estimate, columns)
        assert math.isnan(found.value) and np.isnan(found.interval).all()
    first = columns["state_values"][columns["starts"]]
    assert called(doubly_robust, columns).value == pytest.approx(first.mean())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"behaviour_logp": np.array([0.0, math.nan])}, "behaviour_logp of step 1 is nan"),
        ({"behaviour_logp": np.array([-math.inf, 0.0])}, "behaviour_logp of step 0 is -inf"),
        ({"target_logp": np.array([0.0, math.inf])}, "target_logp of step 1 is inf"),
        ({"rewards": np.array([0.0, math.inf])}, "rewards of step 1 is inf"),
        ({"starts": np.array([False, True])}, "begins no episode"),
        ({"starts": np.array([True])}, r"starts has the shape \[1\], and there are 2 rewards"),
        ({"gamma": 1.5}, "gamma=1.5"),
        ({"max_ratio": 0.0}, "max_ratio=0.0"),
    ],
)
def test_bad_arguments_of_estimates_are_named(change: dict[str, Any], message: str) -> None:
    given = {"rewards": np.ones(2), "starts": np.array([True, False]), "gamma": 0.9}
    given |= {"behaviour_logp": np.zeros(2), "target_logp": np.zeros(2)}
    with pytest.raises(DataError, match=message):
        importance_sampling(**{**given, **change})
