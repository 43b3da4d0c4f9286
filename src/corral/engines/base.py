"""The contract of an engine: start a stateful worker from a factory, and call its methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from corral.errors import ConfigError


@dataclass(frozen=True)
class Resources:
    """Resources that one worker needs. Ray reserves them; processes on this machine share all CPUs and GPUs.

    Attributes:
        num_cpus: Number of CPUs; with a fraction, several workers share one CPU.
        num_gpus: Number of GPUs; with a fraction, several workers share one GPU.
        custom: Amounts of other resources, by name.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    custom: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineTraits:
    """Traits of an engine that are known without starting it.

    Attributes:
        name: Name in the setting `engine_name`.
        has_own_process: Whether each worker runs in its own process, so that workers can wait for each other.
        is_on_one_machine: Whether all workers run on this machine and share its CPUs and GPUs.
    """

    name: str
    has_own_process: bool
    is_on_one_machine: bool


TRAITS = {
    traits.name: traits
    for traits in (
        EngineTraits("local", has_own_process=False, is_on_one_machine=True),
        EngineTraits("process", has_own_process=True, is_on_one_machine=True),
        EngineTraits("ray", has_own_process=True, is_on_one_machine=False),
    )
}
"""Traits of each engine, by the engine's name."""


class WorkerHandle(Protocol):
    """A running worker. Its calls run one after another, in the order in which they were made."""

    def call(
        self, method: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future[Any]:
        """Call a method of the worker by name, or `method(worker, *args, **kwargs)`, and return a future at once.

        The future holds the result, or the exception with the worker's traceback as a note. It holds a
        `WorkerDiedError` if the worker died before or during the call, and the exception of the factory if the factory
        raised one.

        Args:
            method: Name of a method, or a function.
            args: Positional arguments.
            timeout_s: Seconds that the worker may take, counted from its answer to the call before. A worker that takes
                longer is killed, so that it counts as dead. `None` is no limit. The local engine has no limit, because
                its calls run in the thread that makes them.
            kwargs: Further keyword arguments.

        Raises:
            SerializationError: An argument cannot be pickled.
        """

    def alive(self) -> bool:
        """Return whether the worker can still answer calls."""

    def kill(self) -> None:
        """End the worker, and all processes that it started, now; running calls and later calls fail."""


class Engine(Protocol):
    """Starts workers.

    Attributes:
        traits: Traits of the engine.
    """

    @property
    def traits(self) -> EngineTraits:
        """Traits of the engine."""

    def require(self, resources: Sequence[Resources]) -> None:
        """Refuse workers that need more resources than the engine can ever provide.

        Raises:
            ConfigError: The message says what was requested, and what there is.
        """

    def start(
        self, factory: Callable[[], Any], *, name: str = "worker", resources: Resources | None = None
    ) -> WorkerHandle:
        """Start a worker, the object that `factory()` returns, and return its handle before the factory has run.

        Args:
            factory: Function that is called in the process of the worker.
            name: Name of the worker in messages and process lists, such as `env runner 2`.
            resources: Resources that the worker needs.

        Raises:
            SerializationError: The factory holds a value that cannot be pickled; the message names the value.
        """

    def put(self, value: Any) -> Any:
        """Return a copy of a value that is packed only once; pass it to several calls as a positional argument."""

    def describe_available(self) -> str:
        """Return a sentence about the free resources, for the message when workers do not start."""

    def stop(self) -> None:
        """End what the engine itself has started, such as a Ray runtime; workers are ended by their handles."""


def require_on_this_machine(resources: Sequence[Resources]) -> None:
    """Refuse GPUs that this machine does not have, and custom resources, which only a cluster has.

    Raises:
        ConfigError: The message says what was requested, and what there is.
    """
    if custom := sorted({name for part in resources for name in part.custom}):
        raise ConfigError(
            f"custom_resources_per_env_runner asks for {', '.join(custom)}, which only a Ray cluster can have: set "
            "engine_name='ray', or leave custom_resources_per_env_runner unset."
        )
    num_gpus = sum(part.num_gpus for part in resources)
    if not num_gpus:
        return
    import torch  # takes seconds

    if num_gpus > torch.cuda.device_count():
        raise ConfigError(
            f"The workers asked for ({len(resources)}) need {num_gpus:g} GPU in all, and this machine has "
            f"{torch.cuda.device_count()} GPU. Ask for less per worker, with num_gpus_per_env_runner or "
            "num_gpus_per_learner, or set engine_name='ray' and use a cluster."
        )
