"""Training steps of users that sample nothing, or return something else than numbers, end in an error that says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from corral import Algorithm, AlgorithmConfig
from corral.errors import CorralError


@dataclass(kw_only=True)
class OwnConfig(AlgorithmConfig):
    """An algorithm of the user whose training step does what the class says."""

    @property
    def algo_class(self) -> type[Algorithm]:
        return Own


class Own(Algorithm):
    """Returns `returned`, after sampling if `samples`."""

    returned: Any = None
    samples = True

    def make_loss(self, config: Any) -> Any:
        return lambda module, batch, coefficients: (None, {})

    def training_step(self) -> Any:
        if self.samples:
            self.sample(8)
        return self.returned


@pytest.fixture(autouse=True)
def _returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "returned", {})


def build() -> Algorithm:
    config = OwnConfig().environment("CartPole-v1").reporting(min_sample_timesteps_per_iteration=20)
    return config.build()


@pytest.mark.parametrize("returned", [None, {"my_loss": 3.0}, [1, 2]])
def test_a_training_step_that_returns_no_numbers_by_module_is_named(
    returned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Own, "returned", returned)
    with build() as algo, pytest.raises(CorralError, match=r"Own\.training_step returned .*numbers by module id"):
        algo.train()


def test_a_training_step_that_takes_no_env_steps_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "samples", False)
    with build() as algo, pytest.raises(CorralError, match=r"took no env steps in 100 calls.*=20.*self\.sample"):
        algo.train()


def test_an_iteration_that_only_time_ends_may_take_no_env_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "samples", False)
    config = OwnConfig().environment("CartPole-v1").reporting(min_time_s_per_iteration=0.1)
    with config.build() as algo:
        assert algo.train()["num_env_steps_sampled_lifetime"] == 0


def test_training_steps_that_sample_too_little_are_repeated() -> None:
    with build() as algo:
        assert algo.train()["num_env_steps_sampled_lifetime"] == 24
