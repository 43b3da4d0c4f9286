"""The runner group of an algorithm that learns from recorded data: modules are made, and nothing is sampled."""

from __future__ import annotations

from collections.abc import Mapping

from corral.core.metrics.logger import MetricsLogger
from corral.core.metrics.timers import Timers
from corral.data.episodes.rollout import Rollout
from corral.engines import Engine
from corral.errors import SampleError
from corral.modules.spec import ModuleSpec
from corral.runners.config import RunnerConfig
from corral.runners.requests import SampleRequest
from corral.runners.runner import EnvRunner, reserve_episode_metrics
from corral.runners.runner_group import EnvRunnerGroup


class NoRunners(EnvRunnerGroup):
    """A group without runners, with the metrics of runners that have not sampled yet."""

    def __init__(
        self,
        config: RunnerConfig,
        engine: Engine,
        module_specs: Mapping[str, ModuleSpec],
        metrics: MetricsLogger,
    ) -> None:
        """Keep the specs.

        Args:
            config: Settings of the runners, of which there are none.
            engine: Engine of the algorithm.
            module_specs: Specs of the modules by module id.
            metrics: Where the numbers of episodes are reserved.
        """
        super().__init__(config.copy(num_env_runners=0).freeze(), engine, module_specs, metrics)

    def _start(
        self, module_specs: Mapping[str, ModuleSpec] | None, metrics: MetricsLogger | None, timers: Timers | None
    ) -> None:
        assert module_specs is not None and metrics is not None
        self.module_specs = module_specs
        self._spaces_of_modules = {
            module_id: (spec.observation_space, spec.action_space) for module_id, spec in module_specs.items()
        }
        self.num_envs, self.steps_envs_one_by_one, self.num_agents = 1, False, 1
        self.engine_name = "none"
        reserve_episode_metrics(metrics.view("env_runners"), self._config.metrics_num_episodes_for_smoothing)

    def sample(self, request: SampleRequest, timers: Timers | None = None) -> list[Rollout]:
        """Refuse to sample.

        Raises:
            SampleError: Always.
        """
        raise SampleError("this algorithm learns from recorded data, and has no runners that sample.")

    def specs_with(self, config: RunnerConfig) -> dict[str, ModuleSpec]:
        """Return the present specs, and the specs of new modules, whose spaces the config must name."""
        found = config.module_specs_of_spaces(self._spaces_of_modules)
        return {module_id: self.module_specs.get(module_id, spec) for module_id, spec in found.items()}


def describe_env(config: RunnerConfig) -> dict[str, ModuleSpec]:
    """Return the specs of the modules of a config for its env, which is made and closed again.

    Raises:
        EnvError: The env cannot be made, or gave values that its spaces do not allow.
    """
    runner = EnvRunner(config, makes_modules=False)
    try:
        observation_space, action_space, *_ = runner.describe_env()
        return config.module_specs(observation_space, action_space)
    finally:
        runner.stop()
