"""The runner group: all runners of an algorithm behind one object, wherever they live."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from corral.engines import make_engine
from corral.env.rollout import Rollout
from corral.env.runner import EnvRunner
from corral.metrics.logger import MetricsLogger
from corral.metrics.timers import Timers

log = logging.getLogger("corral")

if TYPE_CHECKING:
    from corral.algorithms.config import AlgorithmConfig
    from corral.engines.base import WorkerHandle


class EnvRunnerGroup:
    """Samples from the runners and keeps their weights in step.

    With `num_env_runners=0` there is one embedded runner, and no engine is involved. Otherwise the engine starts the
    runners 1, 2, ... and the embedded one does not exist.

    Attributes:
        local_env_runner: The embedded runner, or `None`.
        engine_name: Which engine runs the runners; `"embedded"` without one.
        num_callback_errors: Exceptions so far that `on_error="log"` kept from ending the run, at the last collection.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        """Start the runners."""
        engine = make_engine(config.engine_name)
        self.engine_name = engine.name if config.num_env_runners else "embedded"
        log.info("Engine: %s.", self.engine_name)
        self._config = config
        self._handles: list[WorkerHandle] = []
        self.local_env_runner: EnvRunner | None = None
        self.num_callback_errors = 0
        self._weights_version = -1
        if config.num_env_runners == 0:
            self.local_env_runner = EnvRunner(config)
            return
        try:
            for index in range(1, config.num_env_runners + 1):
                self._handles.append(engine.start(partial(EnvRunner, config, index)))
        except BaseException:
            self.stop()
            raise

    @property
    def num_healthy_remote_workers(self) -> int:
        """Runners of the engine that can take calls."""
        return sum(handle.alive() for handle in self._handles)

    def _call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        if self.local_env_runner is not None:
            return [getattr(self.local_env_runner, method)(*args, **kwargs)]
        futures = [handle.call(method, *args, **kwargs) for handle in self._handles]
        return [future.result() for future in futures]

    def describe_env(self) -> tuple[Any, Any, int]:
        """Return the observation and the action space of one sub-env, and the number of sub-envs of a runner."""
        description: tuple[Any, Any, int] = self._call_all("describe_env")[0]
        return description

    def sample(self, num_timesteps: int, timers: Timers) -> list[Rollout]:
        """Take at least `num_timesteps` env steps in all, spread evenly over the runners, one rollout each.

        What this process waits for runners of the engine goes to the timers.
        """
        if self.local_env_runner is not None:
            return [self.local_env_runner.sample(num_timesteps=num_timesteps)]
        share, extra = divmod(num_timesteps, len(self._handles))
        futures = [
            handle.call("sample", num_timesteps=share + (index < extra)) for index, handle in enumerate(self._handles)
        ]
        with timers.time("waiting"):
            return [future.result() for future in futures]

    def sync_weights(self, weights: Mapping[str, Mapping[str, NDArray[Any]]], version: int) -> None:
        """Give the runners new weights, if the version changed since the last call."""
        if version != self._weights_version:
            self._call_all("set_weights", weights, version)
            self._weights_version = version

    def collect_metrics(self, metrics: MetricsLogger, timers: Timers) -> None:
        """Take in what the runners logged since the last call: metrics under `env_runners`, seconds into the timers."""
        collected = self._call_all("get_metrics")
        metrics.aggregate([parts for parts, _, _ in collected], key="env_runners")
        for _, seconds, _ in collected:
            timers.add(seconds)
        self.num_callback_errors = sum(num_errors for _, _, num_errors in collected)

    def stop(self) -> None:
        """Close all envs and end all workers."""
        if self.local_env_runner is not None:
            self.local_env_runner.stop()
        for handle in self._handles:
            if not handle.alive():
                continue
            try:
                handle.call("stop").result()
            except Exception:
                log.exception("A runner could not close its env.")
            finally:
                handle.kill()
