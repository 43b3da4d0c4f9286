"""What architectures add to observations and rewards: `NormalizeRewards(max_return=...)`."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from corral import NormalizeObservations, NormalizeRewards
from corral.errors import ConfigError
from corral.modules.transforms.architectures import architecture_transforms
from corral.modules.transforms.moments import merge_moments

NOTHING = spaces.Box(-1, 1, (2,))


def measured(*returns: float) -> NormalizeRewards:
    transform = NormalizeRewards(clip=None, max_return=5.0)
    state = merge_moments([transform.initial_state(NOTHING), transform.measure(None, np.array(returns))])
    return transform.with_state(state)


def test_returns_stay_below_the_limit() -> None:
    # The deviation of (-40, 0, 0, 0) is 17.3, and 40 / 17.3 is below 5; of 1 in 100 returns it is not.
    assert measured(-40.0, 0.0, 0.0, 0.0).transform_rewards(np.array([-40.0])) == pytest.approx([-40 / 17.3205], 1e-4)
    rare = measured(-40.0, *[0.0] * 99)
    assert rare.transform_rewards(np.array([-40.0, 8.0])) == pytest.approx([-5.0, 1.0])
    without = NormalizeRewards(clip=None).with_state(rare._state)
    assert without.transform_rewards(np.array([-40.0])) == pytest.approx([-40 / 3.98], 1e-2)


def test_the_largest_return_of_all_parts_counts() -> None:
    transform = NormalizeRewards(clip=None, max_return=5.0)
    returns = np.random.default_rng(0).standard_normal(60) * np.arange(60)
    parts = [transform.measure(None, part) for part in np.split(returns, 6)]
    merged = merge_moments([transform.initial_state(NOTHING), *parts, transform.measure(None, np.zeros(0))])
    whole = transform.measure(None, returns)
    assert merged.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(merged[name], value, rtol=1e-12)
        assert isinstance(merged[name], np.ndarray) and merged[name].dtype == np.float64
    assert float(merged["largest/return"]) == np.abs(returns).max()


def test_without_a_limit_the_statistics_are_what_they_were() -> None:
    assert NormalizeRewards().initial_state(NOTHING).keys() == {"count", "mean/return", "m2/return"}


def test_a_limit_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_return=0"):
        NormalizeRewards(max_return=0.0)


def test_what_is_added_depends_on_the_observations() -> None:
    def added(architecture: str, space: spaces.Space, *given: object) -> list[str]:  # type: ignore[type-arg]
        found = architecture_transforms(architecture, given, space)  # type: ignore[arg-type]
        return [type(each).__name__ for each in found]

    image = spaces.Box(0, 255, (16, 16, 3), np.uint8)
    mask = spaces.Dict({"action_mask": spaces.Box(0, 1, (4,), np.int8), "observations": spaces.Discrete(3)})
    assert added("simba", NOTHING) == ["NormalizeObservations"]
    assert added("simba", spaces.Box(0, 9, (3,), np.int64)) == ["NormalizeObservations"]
    assert added("simba_v2", spaces.Dict({"a": image, "b": NOTHING})) == ["NormalizeObservations", "NormalizeRewards"]
    assert added("simba", image) == added("simba", mask) == added("simba", spaces.Discrete(4)) == []
    assert added("simba_v2", NOTHING, NormalizeObservations(), NormalizeRewards()) == []
