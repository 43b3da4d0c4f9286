"""The Ray engine: each worker runs in a Ray actor, on this machine or on another machine of Ray's cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
import ray.exceptions

from corral.engines.base import TRAITS, Resources
from corral.engines.call_limits import overdue_message
from corral.engines.forks import foreign_call
from corral.engines.own_commands import ROOT
from corral.engines.ray_resources import describe_available, require
from corral.engines.ray_worker import Parcel, actor_class, serialization_errors, unpack_copy
from corral.engines.worker_logs import log_records
from corral.engines.worker_setup import WORKER_SETUP
from corral.errors import WorkerDiedError

WATCH_S = 0.5  # seconds between checks for overdue actors


class RayHandle:
    """Handle of a worker in a Ray actor."""

    def __init__(self, actor: Any, factory: Callable[[], Any], name: str, answers: ThreadPoolExecutor) -> None:
        """Send the factory to the actor.

        Args:
            actor: Ray's handle of the actor.
            factory: Function that makes the worker.
            name: Name of the worker in messages.
            answers: Thread that unpacks answers and sets futures. Ray's own thread cannot do so: a callback of a future
                may call `ray.kill`, which never returns in Ray's thread.
        """
        self._actor = actor
        self._name = name
        self._owner = os.getpid()
        self._answers = answers
        self._problem: BaseException | None = None
        self._pending: dict[Future[Any], float | None] = {}  # in the order of the calls, with their limits in seconds
        self._oldest_since_s = 0.0  # clock reading when the first of them was made, or the call before was answered
        self._lock = threading.Lock()
        try:
            self._submit(actor.make, True, None, Parcel(factory, name))
        except BaseException:
            self.kill()
            raise

    def call(
        self, method: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future[Any]:
        """Send a call to the actor, and return its future; see `WorkerHandle.call`."""
        if os.getpid() != self._owner:
            return foreign_call(self._name, self._owner)
        if not ray.is_initialized():
            self._give_up(WorkerDiedError(f"{self._name} was ended: Ray was shut down."))
        sent = [
            part if isinstance(part, ray.ObjectRef) else Parcel(part, f"{self._name}: the call's ['args'][{index}]")
            for index, part in enumerate(args)
        ]
        call = {"method": method, "kwargs": kwargs}
        return self._submit(self._actor.call, False, timeout_s, Parcel(call, f"{self._name}: the call's "), *sent)

    def alive(self) -> bool:
        """Return whether the worker can still answer calls; the death of a worker is only noticed by a call."""
        return os.getpid() == self._owner and self._problem is None

    def kill(self) -> None:
        """Let Ray end the actor and the processes that it started; in a process forked since the start, do nothing."""
        if os.getpid() != self._owner:
            return
        self._give_up(WorkerDiedError(f"{self._name} was ended."))
        if ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError):  # the cluster may be gone
                ray.kill(self._actor, no_restart=True)

    def end_if_overdue(self) -> None:
        """Let Ray end the actor if it has not answered its oldest call in time."""
        with self._lock:
            timeout_s = next(iter(self._pending.values()), None)
            if timeout_s is None or time.monotonic() - self._oldest_since_s <= timeout_s:
                return
        self._give_up(WorkerDiedError(f"{self._name}: its process {overdue_message(timeout_s)}."))
        self.kill()

    def _submit(self, method: Any, is_factory: bool, timeout_s: float | None, *parcels: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # Ray has the call, so the future cannot be cancelled
        with self._lock:
            if self._problem is not None:
                future.set_exception(self._problem)
                return future
            with serialization_errors():
                answer = method.remote(*parcels).future()
            if not self._pending:
                self._oldest_since_s = time.monotonic()
            self._pending[future] = timeout_s

        def note(done: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # raised when this interpreter is ending
                self._answers.submit(self._resolve, future, done, is_factory)

        answer.add_done_callback(note)
        return future

    def _resolve(self, future: Future[Any], done: Future[Any], is_factory: bool) -> None:
        """Set a future to the answer of its call."""
        error: BaseException | None = None
        result: Any = None
        try:
            answer = done.result()
            if answer is None:
                return  # `_give_up` sets the future
            succeeded, frames, records = answer
            log_records(records, self._name)
            result = unpack_copy(frames)
            if not succeeded:
                error, error.__cause__ = result
        except ray.exceptions.RayTaskError as problem:
            error = _arrival_error(problem, self._name)
        except ray.exceptions.RayError as problem:
            self._give_up(WorkerDiedError(f"{self._name}: {_death(problem)}"))
            return
        except Exception as problem:  # the answer cannot be unpickled in this process
            problem.add_note(f"This is about what {self._name} returned.")
            error = problem
        with self._lock:
            if future not in self._pending:
                return
            del self._pending[future]
            self._oldest_since_s = time.monotonic()
        if error is None:
            future.set_result(result)
            return
        future.set_exception(error)
        if is_factory:
            self._give_up(error)

    def _give_up(self, problem: BaseException) -> None:
        """Keep the first reason why no call can succeed, and set it as the exception of all pending futures."""
        with self._lock:
            self._problem = self._problem or problem
            pending, self._pending = self._pending, {}
        for future in pending:
            future.set_exception(self._problem)


def _watch(handles: weakref.WeakSet[RayHandle], stopped: threading.Event) -> None:
    """End actors that are overdue, until the engine is stopped."""
    while not stopped.wait(WATCH_S):
        for handle in list(handles):
            handle.end_if_overdue()


def _arrival_error(error: ray.exceptions.RayTaskError, name: str) -> BaseException:
    """Return the exception that was raised when an actor unpickled its arguments."""
    cause: BaseException = getattr(error.cause, "client_exc", error.cause)
    cause.add_note(f"In {name}, which could not unpickle its arguments:\n{error.traceback_str.rstrip()}")
    return cause


def _death(error: ray.exceptions.RayError) -> str:
    """Return how an actor died, in one line, from Ray's message of several lines."""
    text = str(error)
    found = re.search(r"\n\tpid: (\d+)", text), re.search(r"\n\tip: (\S+)", text)
    process = " on ".join(match[1] for match in found if match)
    if "exit code " in text:
        how = f"ended by itself with exit code {text.rpartition('exit code ')[2].split('.')[0]}"
    elif "node has died" in text:
        how = "is gone with its node"
    elif "End of file" in text or "connection error" in text:
        how = "was killed, crashed or exited (Ray gives no reason; often its machine ran out of memory)"
    else:
        how = f"is gone: {' '.join(text.split())}"
    return f"process {process} {how}"


# The engine, and Ray's runtime.

_lock = threading.Lock()
_num_engines: Counter[str] = Counter()  # number of engines that use a runtime, by the runtime's id
_started: set[str] = set()  # ids of the runtimes that an engine started


def _runtime() -> str:
    return str(ray.get_runtime_context().get_worker_id())


def _join_runtime() -> str:
    """Return an id of the Ray runtime of this process; start Ray or join a cluster first, if necessary."""
    with _lock:
        was_there = ray.is_initialized()
        if not was_there:
            _start_ray()
        runtime = _runtime()
        if not was_there:
            _started.add(runtime)
        _num_engines[runtime] += 1
        return runtime


def _start_ray() -> None:
    """Start Ray or join a cluster; a handler of SIGTERM stays, where Ray's own one would end the process at once."""
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if in_main else None
    ray.init(include_dashboard=False, logging_level=logging.ERROR)
    if callable(handler):
        signal.signal(signal.SIGTERM, handler)


def _leave_runtime(runtime: str) -> None:
    """Shut Ray down if an engine started it and no engine uses it any more."""
    with _lock:
        _num_engines[runtime] -= 1
        # The user may have shut down this runtime and started another one.
        is_current = ray.is_initialized() and runtime == _runtime()
        if is_current and runtime in _started and not _num_engines[runtime]:
            ray.shutdown()


class RayEngine:
    """Starts workers as Ray actors.

    If this process has no Ray runtime, the engine joins the cluster that Ray finds by itself (from `RAY_ADDRESS`, or
    started on this machine by `ray start`), or else starts Ray on this machine. When the last engine that uses this
    runtime is stopped, it shuts the runtime down.
    """

    traits = TRAITS["ray"]

    def __init__(self) -> None:
        """Start or join Ray, if necessary."""
        self._runtime: str | None = _join_runtime()
        self._owner = os.getpid()
        self._actor_class = actor_class()
        self._answers = ThreadPoolExecutor(1, "answers of Ray actors")
        self._handles: weakref.WeakSet[RayHandle] = weakref.WeakSet()
        self._stopped = threading.Event()
        weakref.finalize(self, self._stopped.set)
        threading.Thread(
            target=_watch, args=[self._handles, self._stopped], name="watch of actors", daemon=True
        ).start()

    def require(self, resources: Sequence[Resources]) -> None:
        """Refuse more resources than the cluster has, or the placement group in which this process runs.

        Raises:
            ConfigError: The message says what was requested, and what there is.
        """
        require(resources)

    def start(
        self, factory: Callable[[], Any], *, name: str = "worker", resources: Resources | None = None
    ) -> RayHandle:
        """Start an actor, and return its handle before Ray has found a place for the actor."""
        resources = resources or Resources()
        options = {
            "num_cpus": resources.num_cpus,
            "num_gpus": resources.num_gpus,
            "resources": dict(resources.custom),
            "max_restarts": 0,  # only the caller of `start` knows the state that a new worker needs
            "max_task_retries": 0,
        }
        paths = [os.path.abspath(path) for path in sys.path]
        places, setup = (os.getcwd(), ROOT, paths), os.environ.get(WORKER_SETUP, "")
        actor = self._actor_class.options(**options).remote(name, *places, setup)
        handle = RayHandle(actor, factory, name, self._answers)
        self._handles.add(handle)
        return handle

    def put(self, value: Any) -> ray.ObjectRef[Any]:
        """Put a value into Ray's object store, and return the reference; each node fetches the value once."""
        with serialization_errors():
            return ray.put(Parcel(value, "a shared value"))

    def describe_available(self) -> str:
        """Return a sentence about the free and the total resources of Ray."""
        return describe_available()

    def stop(self) -> None:
        """Shut Ray down if an engine started it and no other engine uses it."""
        self._stopped.set()
        if self._runtime is not None and os.getpid() == self._owner:
            _leave_runtime(self._runtime)
            self._runtime = None
