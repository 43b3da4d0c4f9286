"""Every event: when it fires, where, and what it is given. The one list that code and documents read.

A method of `Callback` is an event: its keyword arguments are the event's arguments, its docstring says when it fires,
and the decorator where. `EVENTS` is read off them, so nothing is said twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

ARGUMENTS = {
    "agent_id": "which agent of the env; `default_agent` where there is only one",
    "algorithm": "the `Algorithm`",
    "env": "the runner's vector env; a synchronous one has its sub-envs in `env.envs`",
    "env_context": "`env_config` with `worker_index`, `num_workers` and `vector_index`",
    "env_index": "index of the sub-env in the vector env",
    "env_runner": "the `EnvRunner` in whose process this runs; `env_runner.config.in_evaluation` tells what it is for",
    "env_runner_group": "the `EnvRunnerGroup` that the runners belong to",
    "env_runner_indices": "list of the `worker_index` of each runner that was made anew",
    "episode": "the `SingleAgentEpisode`, or the chunk of it in the current rollout",
    "evaluation_metrics": "the dict that `evaluate()` is about to return; may be changed",
    "exception": "what was raised",
    "gradients": "by parameter name, the tensors before clipping; change them in place",
    "is_evaluation": "whether the runners are those of the evaluation",
    "learner": "the `Learner`",
    "metrics_logger": "the `MetricsLogger` of this process; what it is told lands in the result of this iteration",
    "original_batches": "by `agent_id`, the pair of the policy and a copy of the columns as they were sampled",
    "policies": "dict of the modules by `policy_id`",
    "policy": "the module",
    "policy_id": "the module's `module_id`; `default_policy` where there is only one",
    "postprocessed_batch": "the columns of the trajectory `[len, ...]` by name; may be changed, and added to",
    "prev_episode_chunks": "list of the episode's chunks in earlier rollouts, the oldest first",
    "result": "a dict that may be changed: the result that `train()` is about to return, or the learner's metrics of "
    "this module",
    "rl_module": "the runner's copy of the module",
    "samples": "the `Rollout`; its columns may be changed, and added to, and the learner trains on that",
    "sub_environment": "the sub-env, in its wrappers",
    "train_batch": "the columns `[B, ...]` of the whole update by name; may be changed, and added to",
}
"""What each argument is, by name."""


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        name: As in `.callbacks(<name>=...)` and as a method of `Callback`.
        process: `"algorithm"`, `"env_runner"` or `"learner"`: where the code runs.
        arguments: Names of the keyword arguments; a callable may take any subset of them.
        fires: When.
    """

    name: str
    process: str
    arguments: tuple[str, ...]
    fires: str


EVENTS: dict[str, Event] = {}

_Method = TypeVar("_Method", bound=Callable[..., None])


def _event(process: str) -> Callable[[_Method], _Method]:
    """Enter a method of `Callback` into `EVENTS`."""

    def enter(method: _Method) -> _Method:
        parameters = inspect.signature(method).parameters.values()
        arguments = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        assert method.__doc__ and set(arguments) <= set(ARGUMENTS), method.__name__
        fires = " ".join(method.__doc__.split())
        EVENTS[method.__name__] = Event(method.__name__, process, arguments, fires)
        return method

    return enter


class Callback:
    """Base of stateful callbacks: override the methods of the events that matter.

    Only overridden methods are ever called, so a callback costs what it does and no more. The algorithm, each runner
    and each learner make their own instance. Arguments come as keywords; end a signature with `**kwargs` to leave some
    out.
    """

    # In the algorithm's process.

    @_event("algorithm")
    def on_create_policy(self, *, policy_id: str, policy: Any, metrics_logger: Any, **kwargs: Any) -> None:
        """Once for each module that is to be trained, before the learner and the runners get its weights."""

    @_event("algorithm")
    def on_algorithm_init(self, *, algorithm: Any, metrics_logger: Any, **kwargs: Any) -> None:
        """Once, after the algorithm was built and before the first iteration."""

    @_event("algorithm")
    def on_train_result(self, *, algorithm: Any, metrics_logger: Any, result: dict[str, Any], **kwargs: Any) -> None:
        """After each iteration, when its counter has moved and before its result is returned and logged."""

    @_event("algorithm")
    def on_evaluate_start(self, *, algorithm: Any, metrics_logger: Any, **kwargs: Any) -> None:
        """Before an evaluation, when its runners have the weights."""

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
        """After runners that had failed were made anew."""

    @_event("algorithm")
    def on_checkpoint_loaded(self, *, algorithm: Any, **kwargs: Any) -> None:
        """After the algorithm took its state from a checkpoint."""

    @_event("algorithm")
    def on_exception(self, *, algorithm: Any, exception: BaseException, **kwargs: Any) -> None:
        """When training raised, an interrupt included, before the exception goes on to the caller."""

    @_event("algorithm")
    def on_algorithm_stop(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Once, when the algorithm is stopped, while its envs are still open; not if its building failed."""

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
        """After the sub-envs were made, checked and wrapped, for each of them that lives in this process."""

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
        rl_module: Any,
        env_index: int,
        **kwargs: Any,
    ) -> None:
        """When an episode object is made, before the reset that starts it."""

    @_event("env_runner")
    def on_episode_start(
        self,
        *,
        episode: Any,
        env_runner: Any,
        metrics_logger: Any,
        env: Any,
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
        rl_module: Any,
        env_index: int,
        **kwargs: Any,
    ) -> None:
        """After each env step of the episode, the last one included, when its data is in the episode."""

    @_event("env_runner")
    def on_episode_end(
        self,
        *,
        episode: Any,
        prev_episode_chunks: list[Any],
        env_runner: Any,
        metrics_logger: Any,
        env: Any,
        rl_module: Any,
        env_index: int,
        **kwargs: Any,
    ) -> None:
        """After the step event of the step that terminated or truncated the episode."""

    @_event("env_runner")
    def on_postprocess_trajectory(
        self,
        *,
        env_runner: Any,
        metrics_logger: Any,
        episode: Any,
        agent_id: str,
        policy_id: str,
        policies: dict[str, Any],
        postprocessed_batch: Any,
        original_batches: dict[str, tuple[Any, dict[str, Any]]],
        **kwargs: Any,
    ) -> None:
        """At the end of sample(), for each episode or chunk in the rollout, before returns are computed from it."""

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
        """Before the gradient steps of an update, for each module that has a batch."""

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
        """In each gradient step, after the backward pass and before clipping and the optimizer's step."""

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
        """After the gradient steps of an update, for each module that had a batch."""


class MultiCallbacks(Callback):
    """Stands for several classes where one is expected; `make_multi_callbacks` makes it."""

    callback_classes: ClassVar[tuple[type, ...]] = ()


def make_multi_callbacks(callback_class_list: Sequence[type]) -> type[Callback]:
    """Return one class that stands for several: their methods are called in list order.

    `.callbacks([A, B])` does the same; this is for places that take one class.

    Args:
        callback_class_list: Subclasses of `Callback`, or classes that define methods of its events.
    """
    return type("MultiCallbacks", (MultiCallbacks,), {"callback_classes": tuple(callback_class_list)})


def overrides_event(cls: type, event: str) -> bool:
    """Say whether a class has a method of its own for an event."""
    method = getattr(cls, event, None)
    return method is not None and method is not getattr(Callback, event)
