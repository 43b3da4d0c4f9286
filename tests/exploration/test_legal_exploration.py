"""Every exploration keeps to the action masks, over long runs in an env that refuses illegal actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from explorers import Explorer, SamplingConfig
from gymnasium import spaces

from at_least import at_least
from corral.errors import ConfigError
from corral.exploration import BUILT_IN, Exploration, exploration_class
from corral.testing import DoorCorridor

DISCRETE = [name for name in BUILT_IN if issubclass(spaces.Discrete, exploration_class(name).action_spaces)]
MULTI = ["StochasticSampling", "EpsilonGreedy", "SoftQ", "Random"]
SETTINGS: dict[str, dict[str, Any]] = {
    "EpsilonGreedy": {"epsilon_schedule": 0.5},
    "SoftQ": {"temperature": 1e3},
    "StochasticSampling": {"random_timesteps": 200},
    "ParameterNoise": {"random_timesteps": 200},
    "Curiosity": {"random_timesteps": 200},
}


@pytest.mark.parametrize(("kind", "sizes"), [*((kind, [20]) for kind in DISCRETE), *((kind, [5, 6]) for kind in MULTI)])
def test_no_illegal_action_is_taken(kind: str, sizes: list[int]) -> None:
    config = SamplingConfig().environment(DoorCorridor, env_config={"sizes": sizes, "start": 3, "length": 3})
    config.env_runners(num_envs_per_env_runner=4).training(train_batch_size_per_learner=200).debugging(seed=0)
    config.rl_module(model_config={"fcnet_hiddens": [8]})
    config.exploration(exploration_config={"type": kind, **SETTINGS.get(kind, {})})
    with config.build() as algo:
        for _ in range(3):
            algo.train()  # an illegal action raises in the env
        actions = np.concatenate([part.valid_rows(part.actions) for part in algo.rollouts])  # type: ignore[attr-defined]
        assert all(len(np.unique(entry)) > 1 for entry in at_least(1, actions.reshape(len(actions), -1).T))
        algo.env_runner.sample(num_timesteps=200, random_actions=True)  # type: ignore[union-attr]
        masks, position = DoorCorridor({"sizes": sizes, "start": 3, "length": 3}), np.eye(4, dtype=np.float32)[1]
        masks.reset()
        masks._position = 1
        obs = {"action_mask": masks.action_masks().astype(np.int8), "observations": position}
        for _ in range(20):
            masks._position = 1
            masks.step(algo.compute_single_action(obs, explore=True))


@pytest.mark.parametrize("kind", ["ThompsonSampling", "UpperConfidenceBound"])
def test_bandits_choose_the_best_legal_arm(kind: str) -> None:
    space = spaces.Dict(action_mask=spaces.MultiBinary(4), observations=spaces.Box(-1, 1, (3,)))
    explorer = Explorer(kind, observation_space=space, num_envs=50, alpha=0.0)
    exploration = explorer.exploration
    assert exploration.weights.shape == (4, 4)  # three numbers and a 1: the mask is no feature
    exploration.set_weights({"precision": exploration.precision, "sums": np.arange(4)[:, None] * np.eye(4)[3]})
    mask = np.random.default_rng(0).random((50, 4)) < 0.5
    mask[~mask.any(1), 2] = True
    explorer.row.legal = mask
    obs = {"action_mask": mask.astype(np.int8), "observations": np.zeros((50, 3), np.float32)}
    best = np.where(mask, np.arange(4), -1).argmax(1)
    for explore in (True, False):
        np.testing.assert_array_equal(explorer.choose(np.zeros((50, 4)), obs=obs, explore=explore)[0], best)


class Stubborn(Exploration):
    """Takes action 1, whatever the mask allows."""

    def get_exploration_action(self, *, action_distribution: Any, timestep: int, explore: bool = True) -> Any:
        return np.ones(len(action_distribution.inputs), np.int64), None


def test_a_custom_exploration_that_ignores_the_mask_is_named() -> None:
    config = SamplingConfig().environment(DoorCorridor).exploration(exploration_config={"type": Stubborn})
    with (
        config.build() as algo,
        pytest.raises(ConfigError, match=r"Stubborn chose the action 1, which action_mask does not allow"),
    ):
        algo.train()
