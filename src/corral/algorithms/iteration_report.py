"""The report of an iteration: what is logged, which keys its result has, and which of its means are early."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from corral.algorithms.algorithm_state import NOT_RESTORED
from corral.algorithms.loop_run import LoopRun
from corral.core.ids import ALL_MODULES
from corral.core.metrics.reducers import reduction_of_updates
from corral.core.metrics.result import EARLY_MEANS, merge_nested
from corral.core.metrics.result_html import Result
from corral.core.metrics.timers import timer_results
from corral.errors import CorralError
from corral.learners.losses import learner_metrics

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm

log = logging.getLogger("corral")

MOST_CALLS_WITHOUT_STEPS = 100
"""Calls of a training step of the user, one after another, that may take no env steps."""

FIXED_KEYS = frozenset(
    {
        "evaluation",
        "fault_tolerance",
        "runner_group",
        EARLY_MEANS,
        "training_iteration",
        "num_env_steps_sampled_lifetime",
        "restored",
        "engine",
        "config",
        "timers",
        "bottleneck",
        "time_total_s",
    }
)
"""Keys of the result that the algorithm sets itself, so that no metric can have them."""


class Report:
    """Makes the results of an algorithm.

    Attributes:
        latest: Result of the latest iteration; empty before the first one.
        time_total_s: Seconds of all iterations.
        restored: What `result["restored"]` says.
        may_be_early: Whether a sub-env may still be in its first episode.
        loop_run: Run directory of a loop around `train`, for a config that names loggers; otherwise `None`.
        num_steps_trained: Rows of the gradient steps that are not logged yet, over all modules.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        """Begin before the first iteration."""
        self._algorithm = algorithm
        self.latest: dict[str, Any] = {}
        self.time_total_s = 0.0
        self.restored: dict[str, Any] = dict(NOT_RESTORED)
        self.may_be_early = True
        self.loop_run = None if algorithm.config.loggers is None else LoopRun(algorithm)
        self.num_steps_trained = 0
        self.num_steps_before = 0  # env steps before the iteration
        self._shown: BaseException | None = None  # the exception that on_exception saw
        self.use_config()

    def use_config(self) -> None:
        """Show the settings of the algorithm's config from now on; all results share one dict of them."""
        self._config_dict = self._algorithm.config.to_dict()

    # Logging.

    def reserve_metrics(self) -> None:
        """Put the metrics of the modules that learn into the result, before anything is learned."""
        algorithm = self._algorithm
        for module_id in filter(algorithm.modules.trains, algorithm.modules):
            names = algorithm.metrics_of(module_id)
            if algorithm.config.is_multi_agent:  # a module may learn nothing at first, because no agent has it
                names = (*names, *learner_metrics(*algorithm.modules[module_id].module.parameter_groups()))
            for name in dict.fromkeys(names):
                algorithm.metrics.log_reserved({("learners", module_id, name): []}, reduction_of_updates(name))

    def log_learner_results(self, *updates: Mapping[str, Mapping[str, Any]]) -> None:
        """Log the results of updates, each by module id, and count their rows; see `Algorithm.log_learner_results`."""
        for results in updates:
            for module_id, values in results.items():
                self.count_rows(values)
                self._algorithm.metrics.log_update(("learners", module_id), values)

    def count_rows(self, values: Mapping[str, Any]) -> None:
        """Count the rows of the gradient steps of an update, given what it reports for one module."""
        if "num_gradient_steps" in values:
            self.num_steps_trained += round(values["num_gradient_steps"] * values["module_train_batch_size_mean"])

    def log_steps_trained(self) -> None:
        """Log the rows of the gradient steps of the iteration."""
        metrics, steps, self.num_steps_trained = self._algorithm.metrics, self.num_steps_trained, 0
        units = ("module",) if self._algorithm.config.policies else ("env", "module")
        for name in [f"num_{unit}_steps_trained" for unit in units]:
            metrics.log_reserved({("learners", ALL_MODULES, name): [steps]}, "sum")
            metrics.log_reserved({("learners", ALL_MODULES, f"{name}_lifetime"): [steps]}, "lifetime_sum")

    # The result.

    def result(self) -> Result:
        """Return the result of the iteration that ends now, without its costs."""
        algorithm = self._algorithm
        group, evaluator, ahead = algorithm.env_runner_group, algorithm.evaluator, algorithm.sampler.ahead
        evaluation = {} if algorithm.config.evaluation_interval is None else {"evaluation": evaluator.result()}
        result = Result(
            **evaluation,
            fault_tolerance=group.fault_results(),
            runner_group=group.take_costs(),
            training_iteration=algorithm.training_iteration + 1,
            num_env_steps_sampled_lifetime=algorithm.num_env_steps_sampled_lifetime,
            restored=dict(self.restored),
            engine=group.engine_name,
            config=self._config_dict,
        )
        if ahead is not None:
            result["runner_group"] |= ahead.take_costs()
        result |= algorithm.metrics.peek()
        result[EARLY_MEANS] = self._find_early_means() if self.may_be_early else []
        if evaluation:
            result[EARLY_MEANS] += evaluator.early_means
        return result

    def set_costs(self, result: dict[str, Any], iteration_s: float) -> None:
        """Put times and callback errors into a result; callbacks of `on_train_result` add to both."""
        algorithm, num_steps = self._algorithm, 0
        config: Any = algorithm.config
        group = algorithm.env_runner_group
        if group.steps_envs_one_by_one:
            num_steps = algorithm.num_env_steps_sampled_lifetime - self.num_steps_before
        timers, bottleneck = timer_results(
            algorithm.timers.seconds,
            iteration_s,
            num_single_steps=num_steps,
            num_envs=group.num_envs,
            setting_of_arrays=group.setting_of_arrays,
            is_served=group.is_served,
            is_replayed=hasattr(type(config), "training_intensity") and config.num_offline_updates is not None,
        )
        num_errors = algorithm._callbacks.num_errors + group.counts.num_callback_errors
        num_errors += algorithm.learner_group.num_callback_errors
        if algorithm.evaluator.group is not None:
            num_errors += algorithm.evaluator.group.counts.num_callback_errors
        counts = {"num_callback_errors": num_errors}
        costs = {"timers": timers, "bottleneck": bottleneck, "time_total_s": self.time_total_s + iteration_s}
        if "timers" in result:  # callbacks of on_train_result may have written into each part
            merge_nested(result, {"fault_tolerance": counts, **costs})
        else:
            result["fault_tolerance"] |= counts
            result |= costs

    @contextmanager
    def taking_new_metrics(self, result: dict[str, Any]) -> Iterator[None]:
        """Put the metrics that are logged within the block into a result, which has the others already."""
        self._algorithm.metrics.mark()
        yield
        merge_nested(result, self._algorithm.metrics.peek_new())

    def fire_train_result(self, result: dict[str, Any], start: float) -> None:
        """Fire `on_train_result`, and put what its callbacks logged into the result."""
        algorithm = self._algorithm
        self.set_costs(result, time.perf_counter() - start)
        with self.taking_new_metrics(result), algorithm.timers.time("callbacks"):
            algorithm._callbacks.fire(
                "on_train_result", algorithm=algorithm, metrics_logger=algorithm.metrics, result=result
            )
        if self.may_be_early:
            result[EARLY_MEANS] = [*dict.fromkeys((*self._find_early_means(), *result.get(EARLY_MEANS, ())))]

    def announce_recreated(self, indices: list[int]) -> None:
        """Fire `on_env_runners_recreated` for runners that train."""
        algorithm = self._algorithm
        with algorithm.timers.time("callbacks"):
            algorithm._callbacks.fire(
                "on_env_runners_recreated",
                algorithm=algorithm,
                env_runner_group=algorithm.env_runner_group,
                env_runner_indices=indices,
                is_evaluation=False,
            )

    def _find_early_means(self) -> list[str]:
        """Return the names of the statistics that favour short episodes, because long ones have not ended yet.

        They are early until every sub-env has ended the episode that it began with, or their window is full. A
        statistic without a window counts as full with as many episodes as the other windows have.
        """
        algorithm = self._algorithm
        if not any(0 in counts for counts in algorithm.env_runner_group.num_episodes_over.values()):
            self.may_be_early = False
            return []
        num_episodes = algorithm.metrics.peek(("env_runners", "num_episodes_lifetime"))
        if num_episodes == 0:  # then it is about something else
            return []
        window = algorithm.config.metrics_num_episodes_for_smoothing
        return algorithm.metrics.names_of_unfilled(without_window=num_episodes < window)

    @contextmanager
    def exceptions_shown(self) -> Iterator[None]:
        """Fire `on_exception` for an exception of the block; once, also if blocks are nested."""
        try:
            yield
        except BaseException as error:
            if error is not self._shown:
                self._shown = error
                try:
                    self._algorithm._callbacks.fire("on_exception", algorithm=self._algorithm, exception=error)
                except Exception:
                    log.exception("A callback raised at on_exception; the first exception is raised further.")
            raise


def check_results(algorithm: Algorithm, results: Any) -> None:
    """Check that a training step returned numbers by module id.

    Raises:
        CorralError: It did not.
    """
    if not isinstance(results, Mapping) or not all(isinstance(values, Mapping) for values in results.values()):
        raise CorralError(
            f"{type(algorithm).__name__}.training_step returned {results!r:.100}: return dicts of numbers by module "
            "id, as self.learner_group.update(...) does."
        )


def refuse_to_repeat(algorithm: Algorithm) -> None:
    """Refuse a training step of the user that takes no env steps: an iteration of it would never end.

    Raises:
        CorralError: It takes none. The training steps of Corral may wait for runners.
    """
    if not type(algorithm).training_step.__module__.startswith("corral."):
        raise CorralError(
            f"{type(algorithm).__name__}.training_step took no env steps in {MOST_CALLS_WITHOUT_STEPS} calls, and an "
            "iteration ends after "
            f"min_sample_timesteps_per_iteration={algorithm.config.min_sample_timesteps_per_iteration} of them: sample "
            "with self.sample(...), or set it to 0."
        )
