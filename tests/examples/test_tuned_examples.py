"""The configs in examples/tuned/: each is an experiment whose env can be made and sampled with its settings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from corral.algorithms.registry import config_from_dict
from corral.runners.runner import EnvRunner
from corral.tools.cli.experiment import read_experiment
from example_files import EXAMPLES

FILES = sorted((EXAMPLES / "tuned").glob("*.yaml"))
SHAPES = {
    **{"ALE/Pong-v5": (4, 84, 84), "envpool:Pong-v5": (4, 84, 84), "HalfCheetah-v5": (17,), "Hopper-v5": (11,)},
    "mpe2.simple_spread_v3:parallel_env": (18,),
}


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, id=file.stem, marks=[] if file.stem == "dqn_atari" else pytest.mark.slow) for file in FILES],
)
def test_a_tuned_config_samples_its_env(file: Path) -> None:
    settings = read_experiment(file)
    assert settings.pop("stop")["num_env_steps"] >= 100_000
    config = config_from_dict(settings)
    config.validate()
    runner = EnvRunner(config.freeze())
    try:
        rollout = runner.sample(num_timesteps=16, random_actions=True)
        seen = rollout.modules["team"].obs if config.is_multi_agent else rollout.obs
        assert seen.shape[2:] == SHAPES[config.env]
        assert np.isfinite(rollout.rewards).all()
        assert runner.num_envs == config.num_envs_per_env_runner
    finally:
        runner.stop()
