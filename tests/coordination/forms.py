"""Where the callers of an actor are, in each of the three forms of coordination."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, Protocol

import cloudpickle

from corral.engines import make_engine

Form = str


def register_by_value(module: ModuleType) -> None:
    """Send what a test module defines by value: workers do not import the tests."""
    cloudpickle.register_pickle_by_value(module)
    if "ray" in sys.modules:  # it has a cloudpickle of its own
        sys.modules["ray"].cloudpickle.register_pickle_by_value(module)


class InWorkers(Protocol):
    """Calls a function for each of several tuples of arguments, at the same time, where runners would run."""

    def __call__(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]: ...


def in_threads(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(lambda given: function(*given), arguments))


def in_processes(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    engine = make_engine("process")
    workers = [engine.start(dict) for _ in arguments]
    try:
        futures = [
            worker.call(lambda _, *given: function(*given), *given)
            for worker, given in zip(workers, arguments, strict=True)
        ]
        return [future.result(60) for future in futures]
    finally:
        for worker in workers:
            worker.kill()


def in_ray(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    import ray

    task = ray.remote(function)
    try:
        results: list[Any] = ray.get([task.remote(*given) for given in arguments], timeout=60)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    return results


IN_WORKERS: dict[Form, InWorkers] = {"local": in_threads, "process": in_processes, "ray": in_ray}
