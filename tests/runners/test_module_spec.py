"""One spec of the module, made in the driver, builds the module of every runner."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import corral.algorithms.config.config
from at_least import all_of
from corral.core.ids import DEFAULT_MODULE_ID
from corral.engines.lazy import LazyEngine
from corral.modules.spec import ModuleSpec
from corral.runners.requests import SampleRequest
from corral.runners.runner import EnvRunner
from corral.runners.runner_group import EnvRunnerGroup
from corral.testing import CountingEnv
from small import small


@pytest.mark.parametrize("engine", ["embedded", "local", pytest.param("process", marks=pytest.mark.slow)])
def test_the_driver_makes_one_spec_and_every_process_builds_from_it(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ModuleSpec] = []
    inner = corral.algorithms.config.config.AlgorithmConfig.module_spec

    def noted(config: Any, *spaces: Any) -> ModuleSpec:
        made.append(inner(config, *spaces))
        return made[-1]

    monkeypatch.setattr(corral.algorithms.config.config.AlgorithmConfig, "module_spec", noted)
    config = small() if engine == "embedded" else small(num_env_runners=2, engine_name=engine)
    with config.build() as algo:
        group = algo.env_runner_group
        assert made == [*group.module_specs.values()]
        assert made[0].observation_space == CountingEnv().observation_space
        names = group.foreach_env_runner(lambda runner: sorted(runner.module.state_dict()))
        assert all_of(theirs == sorted(algo.get_module().state_dict()) for theirs in names)


def shapes(runner: EnvRunner) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in runner.module.parameters()]


@pytest.mark.parametrize("engine", ["local", pytest.param("process", marks=pytest.mark.slow)])
def test_a_replacement_builds_from_the_spec_of_the_group(engine: str) -> None:
    """The spec is not the config's, so that only a runner that was given it can have such a module."""
    config = small(num_env_runners=1, engine_name=engine, delay_between_env_runner_restarts_s=0.0)
    env = CountingEnv()
    spec = config.copy(model_config={"fcnet_hiddens": [7]}).module_spec(env.observation_space, env.action_space)
    owner = LazyEngine(engine)
    group = EnvRunnerGroup(config.freeze(), owner, {DEFAULT_MODULE_ID: spec})
    try:
        expected = [tuple(parameter.shape) for parameter in spec.build().parameters()]
        assert group.foreach_env_runner(shapes) == [expected]
        group._runners[1].handle.kill()
        deadline_s = time.monotonic() + 60
        while not group.restore_runners():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert group.num_remote_worker_restarts == 1
        assert group.foreach_env_runner(shapes) == [expected]
    finally:
        group.stop()
        owner.stop()


def test_a_runner_by_itself_makes_the_spec_from_its_own_env() -> None:
    runner = EnvRunner(small().freeze())
    spec = small().module_spec(runner.env.single_observation_space, runner.env.single_action_space)
    ours, theirs = runner.module.state_dict(), spec.build().state_dict()
    assert ours.keys() == theirs.keys() and all_of((ours[name] == theirs[name]).all() for name in ours)
    runner.stop()


def test_a_module_that_comes_later_samples_the_same() -> None:
    config = small().freeze()
    whole, later = EnvRunner(config, 1), EnvRunner(config, 1, makes_modules=False)
    later.make_modules(config.module_specs(*later.describe_env()[:2]))
    ours, theirs = (runner.collect(SampleRequest(num_timesteps=20)) for runner in (whole, later))
    np.testing.assert_array_equal(ours.actions, theirs.actions)
    np.testing.assert_array_equal(ours.dist_inputs, theirs.dist_inputs)
    whole.stop()
    later.stop()
