"""Every event: when it fires, where, and what it is given. The one list that code and documents read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_EPISODE_ARGUMENTS = ("episode", "env_runner", "metrics_logger", "env", "rl_module", "env_index")


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        name: As in `.callbacks(<name>=...)` and as a method of `Callback`.
        process: `"algorithm"` or `"env_runner"`: where the code runs.
        arguments: Names of the keyword arguments; a callable may take any subset of them.
        fires: When.
    """

    name: str
    process: str
    arguments: tuple[str, ...]
    fires: str


_LIST = (
    Event(
        "on_algorithm_init",
        "algorithm",
        ("algorithm", "metrics_logger"),
        "Once, after the algorithm was built and before the first iteration.",
    ),
    Event(
        "on_train_result",
        "algorithm",
        ("algorithm", "metrics_logger", "result"),
        "After each iteration, when its counter has moved; may change the result that train() returns.",
    ),
    Event(
        "on_environment_created",
        "env_runner",
        ("env_runner", "metrics_logger", "env", "env_context"),
        "After a runner made its vector env.",
    ),
    Event(
        "on_episode_created",
        "env_runner",
        _EPISODE_ARGUMENTS,
        "When an episode object is made, before the reset that starts it.",
    ),
    Event(
        "on_episode_start",
        "env_runner",
        _EPISODE_ARGUMENTS,
        "After the reset; the episode holds its first observation.",
    ),
    Event(
        "on_episode_step",
        "env_runner",
        _EPISODE_ARGUMENTS,
        "After each env step of the episode, the last one included, when its data is in the episode.",
    ),
    Event(
        "on_episode_end",
        "env_runner",
        _EPISODE_ARGUMENTS,
        "After the step event of the step that terminated or truncated the episode.",
    ),
    Event(
        "on_sample_end",
        "env_runner",
        ("env_runner", "metrics_logger", "samples"),
        "At the end of sample(); samples is the rollout, and changes to its columns reach the learner.",
    ),
)

EVENTS: dict[str, Event] = {event.name: event for event in _LIST}


class Callback:
    """Base of stateful callbacks: override the methods of the events that matter.

    Only overridden methods are ever called, so a callback costs what it does and no more. A runner makes its own
    instance, and so does the algorithm. Methods get the arguments listed in `EVENTS` as keywords; end a signature with
    `**kwargs` to leave some out.
    """

    def on_algorithm_init(self, *, algorithm: Any, metrics_logger: Any, **kwargs: Any) -> None:
        """Run once, after the algorithm was built."""

    def on_train_result(self, *, algorithm: Any, metrics_logger: Any, result: dict[str, Any], **kwargs: Any) -> None:
        """Run after each iteration; `result` may be changed."""

    def on_environment_created(
        self, *, env_runner: Any, metrics_logger: Any, env: Any, env_context: Any, **kwargs: Any
    ) -> None:
        """Run after a runner made its vector env."""

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
        """Run when an episode object is made, before its reset."""

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
        """Run after the reset of an episode."""

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
        """Run after each env step of an episode."""

    def on_episode_end(
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
        """Run when an episode terminated or was truncated."""

    def on_sample_end(self, *, env_runner: Any, metrics_logger: Any, samples: Any, **kwargs: Any) -> None:
        """Run at the end of `sample()`."""
