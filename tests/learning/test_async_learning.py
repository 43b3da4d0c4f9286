"""APPO and IMPALA learn with runners in processes, which are ahead of the learner; a memory task, too."""

from __future__ import annotations

import pytest

from corral import APPOConfig
from corral.algorithms.registry import config_from_dict
from corral.algorithms.tuned_settings import tuned_settings
from corral.testing import CartPolePositions

pytestmark = pytest.mark.slow


def best_return(config, num_env_steps: int, enough: float) -> tuple[float, int]:
    """Return the best mean return, and the env steps at which it was enough, or at the end."""
    best = float("-inf")
    with config.build() as algo:
        while best < enough and algo.num_env_steps_sampled_lifetime < num_env_steps:
            best = max(best, algo.train()["env_runners"]["episode_return_mean"])
        return best, algo.num_env_steps_sampled_lifetime


@pytest.mark.parametrize(("algo", "num_env_steps"), [("APPO", 200_000), ("IMPALA", 300_000)])
@pytest.mark.parametrize("seed", range(3))
def test_balances_a_pole_from_every_seed(algo: str, num_env_steps: int, seed: int) -> None:
    settings = tuned_settings("CartPole-v1", algo)
    del settings["stop"]
    best, _ = best_return(config_from_dict(settings).debugging(seed=seed), num_env_steps, 450.0)
    assert best >= 450.0


@pytest.mark.parametrize("seed", range(2))
def test_swings_a_pendulum_up(seed: int) -> None:
    """A policy that does nothing gets about -1,200."""
    settings = tuned_settings("Pendulum-v1", "APPO")
    del settings["stop"]
    best, _ = best_return(config_from_dict(settings).debugging(seed=seed), 200_000, -250.0)
    assert best >= -250.0


def test_memory_balances_a_pole_without_velocities() -> None:
    """Without memory the best return is below 100; see `test_nothing_balances_the_pole_without_memory` of PPO."""

    def found(seed: int) -> float:
        config = APPOConfig().environment(CartPolePositions).debugging(seed=seed)
        config.training(lr=3e-3, num_epochs=4, minibatch_size=125)
        config.training(circular_buffer_num_batches=2, target_network_update_freq=1)
        config.rl_module(model_config={"use_lstm": True, "lstm_cell_size": 64, "fcnet_hiddens": [64]})
        return best_return(config, 400_000, 300.0)[0]

    returns = [found(seed) for seed in range(3)]
    assert sorted(returns)[1] >= 300.0, returns
