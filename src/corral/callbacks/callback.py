"""All events: when each fires, in which process, and with which arguments. Code and documentation read this one list.

A method of `Callback` is an event. Its keyword arguments are the arguments of the event, its docstring says when the
event fires, and the decorator says where. `EVENTS` is made from the methods, so that nothing is written twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

ARGUMENTS = {
    "agent_id": "id of the agent in the env, a string or an integer; `default_agent` in an env with a single agent",
    "algorithm": "the `Algorithm`",
    "env": "the vector env of the runner",
    "env_context": "`env_config` with `worker_index`, `num_workers` and `vector_index`",
    "env_index": "index of the sub-env in the vector env",
    "env_runner": "the `EnvRunner` in whose process the callback runs; `env_runner.config.in_evaluation` says whether "
    "it samples for evaluation",
    "env_runner_group": "the `EnvRunnerGroup` that the runners belong to",
    "env_runner_indices": "list of the `worker_index` of each runner that was recreated",
    "episode": "the `SingleAgentEpisode`, or the chunk of it in the current rollout; with several agents a "
    "`MultiAgentEpisode`",
    "evaluation_metrics": "the dict that `evaluate()` is about to return; may be changed",
    "exception": "the exception that was raised",
    "gradients": "dict of the gradients before clipping, tensors by parameter name; change them in place",
    "is_evaluation": "whether the runners sample for evaluation",
    "learner": "the `Learner`",
    "metrics_logger": "the `MetricsLogger` of this process; values logged with it are in the result of this iteration",
    "original_batches": "dict by `agent_id` of pairs: the policy, and a copy of the columns as they were sampled, for "
    "all agents of the episode",
    "policies": "dict of the modules by `policy_id`",
    "policy": "the module",
    "policy_id": "the `module_id` of the module; `default_policy` if there is only one module",
    "postprocessed_batch": "dict of the columns `[len, ...]` of the trajectory; columns may be changed and added",
    "prev_episode_chunks": "list of the chunks of the episode in earlier rollouts, the oldest first",
    "result": "a dict that may be changed: the result that `train()` is about to return, or the metrics of the module "
    "in the learner",
    "rl_module": "the copy of the module in the runner; with several agents a dict of the modules by `module_id`",
    "samples": "the `Rollout`, from which the learner learns; columns may be changed and added. With several agents a "
    "`MultiAgentRollout`, whose `modules` holds the rollouts to change by `module_id`",
    "sub_environment": "the sub-env with its wrappers; in events of episodes, the sub-env that plays the episode, or "
    "`None` where it is not an object in the process of the runner. If a callback of such an event names "
    'this argument, `vectorization="auto"` steps sub-envs one by one',
    "train_batch": "dict of the columns `[B, ...]` of the whole update; columns may be changed and added",
}
"""Descriptions of the arguments, by name."""


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        name: Name of the event in `.callbacks(<name>=...)` and of the method of `Callback`.
        process: Process in which the code runs: `"algorithm"`, `"env_runner"` or `"learner"`.
        arguments: Names of the keyword arguments; a callable may take any subset of them.
        fires: Sentence that says when the event fires.
    """

    name: str
    process: str
    arguments: tuple[str, ...]
    fires: str


EVENTS: dict[str, Event] = {}

_Method = TypeVar("_Method", bound=Callable[..., None])


def _event(process: str) -> Callable[[_Method], _Method]:
    """Return a decorator that enters a method of `Callback` into `EVENTS`."""

    def enter(method: _Method) -> _Method:
        parameters = inspect.signature(method).parameters.values()
        arguments = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        assert method.__doc__ and set(arguments) <= set(ARGUMENTS), method.__name__
        fires = " ".join(method.__doc__.split())
        EVENTS[method.__name__] = Event(method.__name__, process, arguments, fires)
        return method

    return enter


class Callback:
    """Base class of stateful callbacks: override the methods of the events to listen to.

    Only overridden methods are called, so the other events cost nothing. The algorithm, each runner and each learner
    make their own instance. Arguments are given as keywords; end a signature with `**kwargs` to leave some out.
    """

    # In the process of the algorithm.

    @_event("algorithm")
    def on_create_policy(self, *, policy_id: str, policy: Any, metrics_logger: Any, **kwargs: Any) -> None:
        """Once for each module to train, before the learner and the runners receive its weights."""

    @_event("algorithm")
    def on_algorithm_init(self, *, algorithm: Any, metrics_logger: Any, **kwargs: Any) -> None:
        """Once, after the algorithm was built and before the first iteration."""

    @_event("algorithm")
    def on_train_result(self, *, algorithm: Any, metrics_logger: Any, result: dict[str, Any], **kwargs: Any) -> None:
        """After each iteration, when the iteration has been counted and before its result is returned and logged."""

    @_event("algorithm")
    def on_evaluate_start(self, *, algorithm: Any, metrics_logger: Any, **kwargs: Any) -> None:
        """Before an evaluation, when its runners have received the weights."""

    @_event("algorithm")
    def on_evaluate_end(
        self, *, algorithm: Any, metrics_logger: Any, evaluation_metrics: dict[str, Any], **kwargs: Any
    ) -> None:
        """After an evaluation, before its metrics are returned."""

    @_event("algorithm")
    def on_env_runners_recreated(
        self,
        *,
        algorithm: Any,
        env_runner_group: Any,
        env_runner_indices: list[int],
        is_evaluation: bool,
        **kwargs: Any,
    ) -> None:
        """After runners that had failed were recreated."""

    @_event("algorithm")
    def on_checkpoint_loaded(self, *, algorithm: Any, **kwargs: Any) -> None:
        """After the algorithm restored its state from a checkpoint."""

    @_event("algorithm")
    def on_exception(self, *, algorithm: Any, exception: BaseException, **kwargs: Any) -> None:
        """When training raised an exception, or was interrupted, before the exception reaches the caller."""

    @_event("algorithm")
    def on_algorithm_stop(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Once, when the algorithm is stopped and its envs are still open; not if building the algorithm failed."""

    # In the process of each runner.

    @_event("env_runner")
    def on_sub_environment_created(
        self,
        *,
        env_runner: Any,
        metrics_logger: Any,
        sub_environment: Any,
        env_context: Any,
        env_index: int,
        **kwargs: Any,
    ) -> None:
        """After the sub-envs were made, checked and wrapped, once for each sub-env in the process of the runner."""

    @_event("env_runner")
    def on_environment_created(
        self, *, env_runner: Any, metrics_logger: Any, env: Any, env_context: Any, **kwargs: Any
    ) -> None:
        """After a runner made its vector env."""

    @_event("env_runner")
    def on_episode_created(
        self,
        *,
        episode: Any,
        env_runner: Any,
        metrics_logger: Any,
        env: Any,
        sub_environment: Any,
        rl_module: Any,
        env_index: int,
        **kwargs: Any,
    ) -> None:
        """When an episode object is made, before the reset that starts the episode."""

    @_event("env_runner")
    def on_episode_start(
        self,
        *,
        episode: Any,
        env_runner: Any,
        metrics_logger: Any,
        env: Any,
        sub_environment: Any,
        rl_module: Any,
        env_index: int,
        **kwargs: Any,
    ) -> None:
        """After the reset; the episode holds its first observation."""

    @_event("env_runner")
    def on_episode_step(
        self,
        *,
        episode: Any,
        env_runner: Any,
        metrics_logger: Any,
        env: Any,
        sub_environment: Any,
        rl_module: Any,
        env_index: int,
        **kwargs: Any,
    ) -> None:
        """After each env step of the episode, the last one included, when the episode holds the data of the step."""

    @_event("env_runner")
    def on_episode_end(
        self,
        *,
        episode: Any,
        prev_episode_chunks: list[Any],
        env_runner: Any,
        metrics_logger: Any,
        env: Any,
        sub_environment: Any,
        rl_module: Any,
        env_index: int,
        **kwargs: Any,
    ) -> None:
        """After `on_episode_step` of the step that terminated or truncated the episode."""

    @_event("env_runner")
    def on_postprocess_trajectory(
        self,
        *,
        env_runner: Any,
        metrics_logger: Any,
        episode: Any,
        agent_id: Any,
        policy_id: str,
        policies: dict[str, Any],
        postprocessed_batch: Any,
        original_batches: dict[Any, tuple[Any, dict[str, Any]]],
        **kwargs: Any,
    ) -> None:
        """At the end of sample(), for each agent of each episode or chunk, before returns are computed from it."""

    @_event("env_runner")
    def on_sample_end(self, *, env_runner: Any, metrics_logger: Any, samples: Any, **kwargs: Any) -> None:
        """At the end of sample(), when its metrics are logged and before returns are computed from the rollout."""

    # In the process of each learner.

    @_event("learner")
    def on_learn_on_batch(
        self,
        *,
        learner: Any,
        metrics_logger: Any,
        policy_id: str,
        policy: Any,
        train_batch: Any,
        result: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        """Before the gradient steps of an update, once for each module that has a batch."""

    @_event("learner")
    def on_gradients(
        self,
        *,
        learner: Any,
        metrics_logger: Any,
        policy_id: str,
        policy: Any,
        gradients: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        """In each gradient step, after the backward pass and before clipping and the step of the optimizer."""

    @_event("learner")
    def on_update_end(
        self,
        *,
        learner: Any,
        metrics_logger: Any,
        policy_id: str,
        policy: Any,
        result: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        """After the gradient steps of an update, once for each module that had a batch."""


class MultiCallbacks(Callback):
    """Base of a class that represents several callback classes; `make_multi_callbacks` makes such a class."""

    callback_classes: ClassVar[tuple[type, ...]] = ()


def make_multi_callbacks(callback_class_list: Sequence[type]) -> type[Callback]:
    """Return one class that represents several classes, whose methods are called in list order.

    `.callbacks([A, B])` does the same. Use this function where only one class can be given.

    Args:
        callback_class_list: Subclasses of `Callback`, or classes that define methods of its events.
    """
    return type("MultiCallbacks", (MultiCallbacks,), {"callback_classes": tuple(callback_class_list)})


def overrides_event(cls: type, event: str) -> bool:
    """Return whether a class has its own method for an event."""
    method = getattr(cls, event, None)
    return method is not None and method is not getattr(Callback, event)
