"""What the user gives of an `exploration_config` has an effect, and the algorithm's default gives the rest."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from corral import APPOConfig, DDPGConfig, DQNConfig, IMPALAConfig, PPOConfig, SACConfig, TD3Config
from corral.errors import ConfigError

DEFAULTS = [
    (TD3Config, "Pendulum-v1", "GaussianNoise"),
    (DDPGConfig, "Pendulum-v1", "OrnsteinUhlenbeckNoise"),
    (SACConfig, "Pendulum-v1", "StochasticSampling"),
    (DQNConfig, "CartPole-v1", "EpsilonGreedy"),
    (PPOConfig, "CartPole-v1", "StochasticSampling"),
    (partial(IMPALAConfig, num_env_runners=0), "CartPole-v1", "StochasticSampling"),
    (partial(APPOConfig, num_env_runners=0), "Pendulum-v1", "StochasticSampling"),
]


def built(config: Any, env: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what an exploration does: its metrics over time, and its constants."""
    with config.environment(env).exploration(exploration_config=settings).build() as algorithm:
        found = algorithm.env_runner.exploration
    metrics = {step: found.get_metrics(step) for step in (0, 1000, 5000, 50_000)}
    names = ("random_timesteps", "stddev", "base_scale", "theta", "sigma")
    return {**metrics, **{name: getattr(found, name) for name in names if hasattr(found, name)}}


@pytest.mark.parametrize(("config", "env", "kind"), DEFAULTS)
def test_naming_the_type_of_the_default_changes_nothing(config: Any, env: str, kind: str) -> None:
    expected = built(config(), env, {})
    assert built(config(), env, {"type": kind}) == expected


@pytest.mark.parametrize(("config", "env", "kind"), DEFAULTS[:1] + DEFAULTS[3:4])
def test_naming_it_keeps_what_is_given(config: Any, env: str, kind: str) -> None:
    given = {"final_scale": 0.5} if kind == "GaussianNoise" else {"final_epsilon": 0.5}
    assert built(config(), env, given) == built(config(), env, {"type": kind, **given})


def test_parts_of_a_schedule_have_an_effect_on_a_default() -> None:
    noise = built(TD3Config(), "Pendulum-v1", {"final_scale": 0.5, "random_timesteps": 0})
    assert noise[5000] == {"noise_scale": 0.75} and noise[50_000] == {"noise_scale": 0.5}
    noisy = built(DQNConfig(noisy=True), "CartPole-v1", {"initial_epsilon": 0.5})
    assert noisy[0] == {"epsilon": 0.5} and noisy[50_000] == {"epsilon": 0.0}
    assert built(DQNConfig(noisy=True), "CartPole-v1", {})[0] == {"epsilon": 0.0}


def test_a_schedule_takes_the_place_of_the_parts_of_the_default() -> None:
    found = built(DQNConfig(), "CartPole-v1", {"epsilon_schedule": [[0, 0.3], [10_000, 0.1]]})
    assert found[0] == {"epsilon": 0.3} and found[5000] == {"epsilon": pytest.approx(0.2)}


def test_a_default_with_a_schedule_yields_to_parts() -> None:
    class Constant(DQNConfig):
        @property
        def default_exploration(self) -> dict[str, Any]:
            return {"type": "EpsilonGreedy", "epsilon_schedule": 0.4}

    assert built(Constant(), "CartPole-v1", {"final_epsilon": 0.2})[50_000] == {"epsilon": 0.2}
    assert built(Constant(), "CartPole-v1", {"type": "EpsilonGreedy"})[50_000] == {"epsilon": 0.4}


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (DQNConfig, {"epsilon_schedule": 0.1, "final_epsilon": 0.2}, "epsilon_schedule=0.1 replaces final_epsilon"),
        (TD3Config, {"scale_schedule": 0.1, "scale_timesteps": 5}, "scale_schedule=0.1 replaces scale_timesteps"),
    ],
)
def test_a_schedule_together_with_its_parts_is_refused(config: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config().environment("CartPole-v1").exploration(exploration_config=given).validate()
