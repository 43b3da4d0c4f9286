"""Spaces without any number are refused by name, wherever they are nested."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from corral import MultiAgentEnv, PPOConfig
from corral.core.spaces import unsupported
from corral.errors import EnvError

BOX, NOTHING = spaces.Box(-1, 1, (2,), np.float32), spaces.Box(0, 1, (0,), np.float32)
OBSERVATIONS: dict[str, tuple[Any, str]] = {
    "box": (NOTHING, "at observation_space:"),
    "matrix": (spaces.Box(0, 1, (3, 0), np.float32), "at observation_space:"),
    "dict": (spaces.Dict({}), r"Dict\(\) at observation_space:"),
    "tuple": (spaces.Tuple(()), r"Tuple\(\) at observation_space:"),
    "part of a dict": (spaces.Dict(a=NOTHING, b=BOX), "at observation_space/a:"),
    "dict in a dict": (spaces.Dict(a=BOX, b=spaces.Dict(c=spaces.Dict({}))), r"Dict\(\) at observation_space/b/c:"),
    "tuple in a tuple": (spaces.Tuple((spaces.Tuple(()), BOX)), r"Tuple\(\) at observation_space/0:"),
}
ACTIONS: dict[str, Any] = {
    "box": spaces.Box(-1, 1, (0,), np.float32),
    "dict": spaces.Dict({}),
    "tuple": spaces.Tuple(()),
    "nested": spaces.Dict(a=spaces.Tuple(()), b=spaces.Discrete(2)),
    "of nothing": spaces.Tuple((NOTHING, NOTHING)),
}


class Blind(gym.Env[Any, Any]):
    def __init__(self, observation_space: Any, action_space: Any = None) -> None:
        self.observation_space, self.action_space = (
            observation_space,
            spaces.Discrete(2) if action_space is None else action_space,
        )


class BlindPair(MultiAgentEnv):
    def __init__(self, observation_space: Any) -> None:
        self.possible_agents = self.agents = ["a", "b"]
        self.observation_spaces = {"a": BOX, "b": observation_space}
        self.action_spaces = dict.fromkeys("ab", spaces.Discrete(2))


@pytest.mark.parametrize(("space", "words"), OBSERVATIONS.values(), ids=OBSERVATIONS)
def test_observations(space: Any, words: str) -> None:
    with pytest.raises(EnvError, match=rf"env 'Blind': empty observation space .*{words} leave this part out"):
        PPOConfig().environment(Blind, env_config={"observation_space": space}).build()
    config = PPOConfig().environment(BlindPair, env_config={"observation_space": space})
    with pytest.raises(EnvError, match=rf"agent 'b'.*empty observation space .*{words}"):
        config.multi_agent(policies={"m"}).build()


@pytest.mark.parametrize("space", ACTIONS.values(), ids=ACTIONS)
def test_actions(space: Any) -> None:
    config = PPOConfig().environment(Blind, env_config={"observation_space": BOX, "action_space": space})
    with pytest.raises(EnvError, match=r"env 'Blind': empty action space .*Discrete\(1\)"):
        config.build()


def test_what_the_message_says_to_use_is_supported() -> None:
    assert unsupported(spaces.Box(0, 1, (1,)), spaces.Discrete(1)) is None
    assert unsupported(BOX, spaces.Tuple((NOTHING, spaces.Discrete(2)))) is None
