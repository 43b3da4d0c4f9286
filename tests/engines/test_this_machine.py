"""What is refused where workers can have only what this machine has."""

from __future__ import annotations

import re

import pytest
import torch

from corral import PPOConfig
from corral.engines import Resources, make_engine
from corral.errors import ConfigError
from corral.testing import IdentityEnv

NUM_GPUS = torch.cuda.device_count()

each_engine = pytest.mark.parametrize("engine", ["local", "process"])


@each_engine
def test_custom_resources_need_a_cluster(engine: str) -> None:
    config = PPOConfig().environment(IdentityEnv).env_runners(num_env_runners=1).engine(engine)
    config.env_runners(custom_resources_per_env_runner={"licence": 1})
    with pytest.raises(ConfigError, match=r"custom_resources_per_env_runner asks for licence, .*engine_name='ray'"):
        config.build()


@each_engine
def test_more_gpus_than_there_are_are_refused(engine: str) -> None:
    config = PPOConfig().environment(IdentityEnv).env_runners(num_env_runners=2).engine(engine)
    config.env_runners(num_gpus_per_env_runner=NUM_GPUS + 1)
    message = f"The workers asked for (2) need {2 * NUM_GPUS + 2} GPU in all, and this machine has {NUM_GPUS} GPU."
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.build()


def test_gpus_of_learners_count_too() -> None:
    config = PPOConfig().environment(IdentityEnv).learners(num_learners=2, num_gpus_per_learner=NUM_GPUS + 1)
    with pytest.raises(ConfigError, match=rf"\(2\) need {2 * NUM_GPUS + 2} GPU in all.*num_gpus_per_learner"):
        config.engine("process").build()


@each_engine
def test_cores_are_shared(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    make_engine(engine).require([Resources(num_cpus=10_000)] * 2)
    assert ("2 workers ask for 20000 CPUs" in caplog.text) == (engine == "process")
