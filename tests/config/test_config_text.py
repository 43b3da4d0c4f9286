"""The text of a config: the calls that make it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from gymnasium import spaces

from corral import AlgorithmConfig, Callback, DQNConfig, PPOConfig, SACConfig
from corral.core.schedules import Schedule
from corral.modules.module import ActorCritic
from corral.testing import IdentityEnv


@dataclass(kw_only=True)
class OwnConfig(PPOConfig):
    """A user's config, whose decorator would give it another text."""

    lr: Schedule = 5e-4
    patience: int = 3


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (PPOConfig(), "PPOConfig()"),
        (AlgorithmConfig(), "AlgorithmConfig()"),
        (
            PPOConfig().training(gamma=0.9).environment("CartPole-v1"),
            "PPOConfig().environment('CartPole-v1').training(gamma=0.9)",
        ),
        (PPOConfig().training(lr=3e-4).training(num_epochs=10), "PPOConfig()"),  # the defaults
        (PPOConfig().engine("local").debugging(seed=3), "PPOConfig().debugging(seed=3).engine('local')"),
        (OwnConfig().training(patience=4), "OwnConfig().training(patience=4)"),
        (SACConfig().environment(IdentityEnv), "SACConfig().environment('corral.testing:IdentityEnv')"),
        (DQNConfig().exploration(explore=False), "DQNConfig().env_runners(explore=False)"),
    ],
    ids=str,
)
def test_a_config_shows_what_differs_from_its_defaults(config: AlgorithmConfig, text: str) -> None:
    assert repr(config) == str(config) == text
    assert eval(text) == config.copy(env="corral.testing:IdentityEnv" if "Identity" in text else config.env)


def test_a_long_text_has_a_line_for_each_group_and_makes_the_config_again() -> None:
    config = (
        OwnConfig()
        .environment("CartPole-v1", env_config={"a": [1, {"b": (2,)}]})
        .env_runners(num_env_runners=2, rollout_fragment_length=32)
        .training(lr=[[0, 1e-3], [1000, 0]], patience=1)
        .rl_module(ActorCritic, model_config={"fcnet_hiddens": [32, 32]})
    )
    lines = repr(config).splitlines()
    assert lines == [
        "(",
        "    OwnConfig()",
        "    .environment('CartPole-v1', env_config={'a': [1, {'b': (2,)}]})",
        "    .env_runners(num_env_runners=2, rollout_fragment_length=32)",
        "    .training(lr=[(0.0, 0.001), (1000.0, 0.0)], patience=1)",
        "    .rl_module('corral.modules.module:ActorCritic', model_config={'fcnet_hiddens': [32, 32]})",
        ")",
    ]
    assert eval(repr(config)) == config


def test_what_has_no_short_text_is_shown_by_its_class() -> None:
    class Loud(Callback):
        def __repr__(self) -> str:
            raise AssertionError("a repr may be huge")

    config = PPOConfig().environment(
        env_config={"map": np.zeros(10**6), "tiles": list(range(10**6)), "text": "x" * 10**6}
    )
    config.callbacks([Loud, Loud()], on_train_result=lambda result: None)
    text = repr(config)
    assert "'map': <ndarray>" in text and "'tiles': [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...]" in text
    assert "on_train_result=[<lambda>]" in text and ".callbacks([<Loud>, <Loud>]," in text
    assert len(text) < 1000


def test_a_frozen_config_has_the_same_text() -> None:
    config = PPOConfig().training(gamma=0.9)
    assert repr(config.copy().freeze()) == repr(config)


def test_spaces_are_shown_as_they_print() -> None:
    hand = spaces.Dict({"hand": spaces.Tuple([spaces.Discrete(3), spaces.Discrete(3)])})
    config = PPOConfig().multi_agent(policies={"a": {"observation_space": hand, "action_space": spaces.Discrete(2)}})
    assert "'observation_space': <Dict('hand': Tuple(Discrete(3), Discrete(3)))>, 'action_space': <Discrete(2)>" in str(
        config
    )
    wide = spaces.Box(np.arange(99, dtype=np.float32), np.arange(99, dtype=np.float32) + 1)
    shown = str(PPOConfig().multi_agent(policies={"a": {"observation_space": wide}}))
    assert "...>" in shown
    assert len(shown.splitlines()) <= 4


def test_a_config_with_many_settings_of_a_dict_is_shown_whole() -> None:
    model_config = {f"setting_{index}": list(range(index)) for index in range(30)}
    config = PPOConfig().environment("CartPole-v1").rl_module(model_config={**model_config, "text": "x" * 300})
    assert "..." not in str(config)
    again = eval(str(config), {"PPOConfig": PPOConfig})
    assert again.model_config == config.model_config
