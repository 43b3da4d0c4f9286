"""The asynchronous vector env: each sub-env runs in its own process."""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing.connection
import os
import pickle
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import sharedctypes
from operator import itemgetter
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState
from numpy.typing import NDArray

from corral.coordination import environment
from corral.core.interrupts import ENDING
from corral.core.seeding import seed_everything
from corral.core.spaces import space_tree
from corral.core.tree import Tree, copy_nested, map_tree
from corral.engines.forks import forks_end_here
from corral.engines.process_group_guard import start_guarded_group
from corral.engines.worker_logs import WorkerLog, log_records
from corral.envs.checks import check_obs
from corral.envs.replay import Start, note_of
from corral.envs.step_checks import check_reset, check_step
from corral.envs.step_timeout import StepTimer
from corral.envs.sub_envs import CLOSE_LIMIT_S, AbsentSubEnvs, Restarts, problem_of, restart_env, restart_error
from corral.errors import EnvTimeoutError, SubEnvError

_FAILURE = "corral_failure"
"""Key in the info of a failed sub-env that waits to be restarted; the value is (method, problem, traceback)."""

_LOGS = "corral_logs"
"""Key in the info of a sub-env that has logged something; the value is the records."""


@dataclass(frozen=True)
class AsyncLimits:
    """Time limits of sub-envs that run in their own processes.

    Attributes:
        step_timeout_s: Seconds that one `step` or `reset` may take; `None` means no limit.
        start_timeout_s: Seconds that restarting a failed sub-env may take, if `step_timeout_s` is set.
    """

    step_timeout_s: float | None = None
    start_timeout_s: float = 120.0


NO_LIMITS = AsyncLimits()


def make_async(
    make: Callable[..., Any],
    num_envs: int,
    mode: AutoresetMode,
    first: gym.Env[Any, Any],
    seed: int,
    limits: AsyncLimits = NO_LIMITS,
    restarts: Restarts | None = None,
) -> AsyncVectorEnv:
    """Return a vector env with one process per sub-env.

    Args:
        make: Function `(index, is_spare)` that makes a sub-env, in its process; a spare one changes no settings.
        num_envs: Number of sub-envs N.
        mode: Autoreset mode: when sub-envs are reset.
        first: An env made in this process, whose spaces are used.
        seed: Seed of the global generators in the processes; without it, all would continue from the state here.
        limits: Time limits of the sub-envs.
        restarts: Restarts of failed sub-envs; with `None`, a failure is raised.

    Raises:
        EnvError: A sub-env could not be made; all processes have been ended.
    """
    spaces = first.observation_space, first.action_space
    others = limits.step_timeout_s, restarts is not None, os.getpid()
    sub_envs = [partial(_in_process, make, index, spaces, seed + index, *others) for index in range(num_envs)]
    env = AsyncVectorEnv(sub_envs, mode, limits, restarts)
    try:
        env.get_attr("ready")
    except SubEnvError as error:
        env.close()
        raise (error.__cause__ or error) from None
    return env


def _in_process(
    make: Callable[..., Any],
    index: int,
    spaces: tuple[gym.Space[Any], gym.Space[Any]],
    seed: int,
    step_timeout_s: float | None,
    reports_failures: bool,
    parent: int,
) -> gym.Env[Any, Any]:
    """Return one sub-env, made in its own process, or a stand-in that raises the error later.

    In the process `parent`, whose generators stay as they are, Gymnasium makes one more, only for its spaces.

    The stand-in is needed because Gymnasium's worker reports no error before its loop runs.
    """
    if not (is_spare := os.getpid() == parent):
        seed_everything(seed)
    try:
        return _ProcessEnv(partial(make, index, is_spare), step_timeout_s, reports_failures)
    except Exception as error:
        return _UnmadeEnv(error, *spaces)


class _ProcessEnv(gym.Wrapper[Any, Any, Any, Any]):
    """A sub-env in its own process: it checks observations, and raises only exceptions that can be pickled.

    With `reports_failures` it raises nothing: the info describes the failure, and the sub-env waits for `renew`.
    """

    ready = True

    def __init__(
        self, make: Callable[[], gym.Env[Any, Any]], step_timeout_s: float | None, reports_failures: bool
    ) -> None:
        super().__init__(make())
        self.note_step: Callable[[], None] = lambda: None  # the process sets it, and `logs`
        self.logs: WorkerLog | None = None
        self._make, self._reports_failures = make, reports_failures
        self._resets_next = False  # whether the next step only resets; see `continue_from`
        self._note = note_of(self.env)  # before each reset it notes how an episode begins
        self._start: Start | None = None
        self._timer = None if step_timeout_s is None else StepTimer(step_timeout_s)
        self._no_obs = map_tree(lambda space: np.zeros(space.shape, space.dtype), space_tree(self.observation_space))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._resets_next = False
        try:
            with _portable_errors():
                self._start = {**self._note(), "seed": seed, "options": options}
                obs, info = check_reset(self._call(self.env.reset, seed=seed, options=options))
                check_obs(self.observation_space, obs)
        except Exception as error:
            return self._no_obs, self._failed("reset", error)
        return obs, self._with_logs(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._resets_next:
            obs, info = self.reset()
            return obs, 0.0, False, False, info
        try:
            with _portable_errors():
                returned = self._call(self.env.step, action)
                self.note_step()
                obs, reward, terminated, truncated, info = check_step(returned)
                check_obs(self.observation_space, obs)
            if terminated or truncated:  # with same-step autoreset, the reset may write into the same objects
                obs, info = copy_nested(obs), copy_nested(info)
        except Exception as error:
            return self._no_obs, 0.0, False, False, self._failed("step", error)
        if self.logs is not None and self.logs.records:  # here, so that a step without a record makes no call
            info = self._with_logs(info)
        return obs, reward, terminated, truncated, info

    def _failed(self, method: str, error: Exception) -> dict[str, Any]:
        if not self._reports_failures:
            if self.logs is not None and self.logs.records:
                print(*(text for *_, text in self.logs.take()), sep="\n", file=sys.stderr, flush=True)
            raise error
        failure = method, problem_of(error), "".join(traceback.format_exception(error))
        return self._with_logs({_FAILURE: failure})

    def _with_logs(self, info: dict[str, Any]) -> dict[str, Any]:
        """Return an info with what this process has logged since the last one."""
        if self.logs is None or not self.logs.records:
            return info
        return {**info, _LOGS: self.logs.take()}

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the env within the time limit; a process that it forks would answer on the same pipe."""
        with forks_end_here():
            if self._timer is None:
                return function(*args, **kwargs)
            with self._timer.installed():
                return self._timer.call(function, *args, **kwargs)

    def renew(self, seed: int, known_task: bytes) -> tuple[Any, ...]:
        """Restart the env; return its first observation and info, or a tuple with only the exception."""
        try:
            with _portable_errors():
                self.env, obs, info = restart_env(
                    self.env,
                    self._make,
                    seed=seed,
                    call=self._call,
                    begins=self._begin,
                    known_task=cloudpickle.loads(known_task),
                )
        except Exception as error:
            error.add_note("".join(traceback.format_exception(error)))
            return (error,)
        return obs, self._with_logs(info)

    def _begin(self, env: gym.Env[Any, Any], seed: int) -> None:
        """Note how the first episode of a new env begins."""
        self._note = note_of(env)
        self._start = {**self._note(), "seed": seed}

    def start(self) -> Start | None:
        """Return how the current episode began."""
        return self._start

    def continue_from(self, start: Start | None, resets_next: bool) -> None:
        """Continue where another sub-env stood.

        Args:
            start: How its episode began.
            resets_next: Whether the next step only resets the env, as it does after a step that ended an episode.
                Gymnasium's worker keeps this in a variable of its own, which is False in a new process.
        """
        self._start, self._resets_next = start, resets_next

    def apply(self, packed: bytes) -> bytes:
        """Call a packed function with the env and further arguments; return its packed result or exception."""
        function, args = cloudpickle.loads(packed)
        try:
            with forks_end_here(), _portable_errors():
                answer: bytes = cloudpickle.dumps((True, function(self.env, *args)))
        except Exception as error:
            error.add_note(f"In the process of the sub-env:\n{''.join(traceback.format_exception(error))}")
            answer = cloudpickle.dumps((False, error))
        return answer


class _UnmadeEnv(gym.Env[Any, Any]):
    """Stand-in for a sub-env that raised an exception when it was made in its own process."""

    def __init__(self, error: Exception, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self._error = error
        self.observation_space, self.action_space = observation_space, action_space

    @property
    def ready(self) -> bool:
        raise self._error


@contextmanager
def _portable_errors() -> Iterator[None]:
    """Replace an exception that cannot be sent to another process with a `RuntimeError` of its name and message."""
    try:
        yield
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise


class _Pipe:
    """The parent's end of a pipe to the process of a sub-env; its errors give the index of a process that has ended."""

    def __init__(self, connection: Any, index: int) -> None:
        self._connection, self._index = connection, index
        self.fileno, self.poll, self.close = connection.fileno, connection.poll, connection.close
        self.recv_bytes = connection.recv_bytes

    @property
    def closed(self) -> bool:
        return bool(self._connection.closed)

    def send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except ConnectionError:
            raise _ProcessEnded(self._index) from None

    def recv(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            raise _ProcessEnded(self._index) from None


class _Overdue(Exception):
    """A sub-env has not answered in time; the arguments are its index and the limit in seconds."""


class _ProcessEnded(Exception):
    """The process of a sub-env has ended; the argument is the index of the sub-env."""


class AsyncVectorEnv(gym.vector.AsyncVectorEnv):  # generic only since Gymnasium 1.3
    """Gymnasium's asynchronous vector env, which also names failed sub-envs, limits all waits, and closes cleanly.

    Infos are the info dicts of the sub-envs by index, exactly as the sub-envs gave them.

    Args:
        env_fns: Functions that make the sub-envs, each in its process.
        mode: Autoreset mode: when sub-envs are reset.
        limits: Time limits of the sub-envs.
        restarts: Restarts of failed sub-envs; with `None`, a failure is raised.

    Attributes:
        is_broken: Whether an exchange with the processes failed, so that the vector env can only be closed.
    """

    envs = AbsentSubEnvs(
        "with vectorization='async' each sub-env is in another process: call env_runner.foreach_env(fn), or set "
        ".env_runners(vectorization='sync')"
    )
    is_broken = False
    _interrupted = False
    _failed_in_step = False

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        mode: AutoresetMode,
        limits: AsyncLimits,
        restarts: Restarts | None,
    ) -> None:
        """Start the processes."""
        # Which sub-envs have taken the current step. In shared memory, so that it survives their processes.
        self._stepped = sharedctypes.RawArray("b", len(env_fns))
        self._owner = os.getpid()
        self._guard = start_guarded_group()
        group = None if self._guard is None else self._guard.pid
        try:
            super().__init__(env_fns, autoreset_mode=mode, worker=partial(_worker, environment(), group, self._stepped))
        except BaseException:
            self._end_guard()
            raise
        self.parent_pipes = [_Pipe(pipe, i) for i, pipe in enumerate(self.parent_pipes)]  # type: ignore[misc]
        self._limits, self._restarts = limits, restarts

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all sub-envs; see `gymnasium.vector.AsyncVectorEnv.reset`."""
        with self._exchange("reset"):
            self.reset_async(seed=seed, options=options)
            obs, infos = self.reset_wait(timeout=self._wait_limit_s)
        self._restart_failed(obs, infos)
        return obs, infos

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step all sub-envs; see `gymnasium.vector.AsyncVectorEnv.step`."""
        with self._exchange("step"):
            ctypes.memset(self._stepped, 0, self.num_envs)
            self.step_async(actions)
            obs, rewards, terminated, truncated, infos = self.step_wait(timeout=self._wait_limit_s)
        self._restart_failed(obs, infos)
        return obs, rewards, terminated, truncated, infos

    @property
    def num_steps_of_failed_call(self) -> int:
        """Steps that sub-envs took in a call of `step` that raised; it is final once the vector env is closed."""
        return sum(self._stepped) if self._failed_in_step else 0

    @num_steps_of_failed_call.setter
    def num_steps_of_failed_call(self, _: int) -> None:
        self._failed_in_step = False

    def foreach(self, fn: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Return `fn(sub_env, *arguments[i])` for each sub-env; `fn` is called in the process of the sub-env.

        Raises:
            Exception: Exception of `fn`; if `fn` raised in several sub-envs, the exception in the first of them.
        """
        answers = self._call_each("apply", [(cloudpickle.dumps((fn, tuple(given))),) for given in arguments])
        unpacked = [cloudpickle.loads(answer) for answer in answers]
        for succeeded, answer in unpacked:
            if not succeeded:
                raise answer
        return [answer for _, answer in unpacked]

    def _call_each(
        self, name: str, arguments: Sequence[Sequence[Any] | None], limit_s: float | None = None
    ) -> list[Any]:
        """Call a method of each sub-env whose arguments are not `None`, all at the same time; return their answers."""
        self._assert_is_running()
        chosen = [i for i, given in enumerate(arguments) if given is not None]
        with self._exchange(name):
            for i in chosen:
                self.parent_pipes[i].send(("_call", (name, arguments[i], {})))
            self._state = AsyncState.WAITING_CALL
            self._poll_pipe_envs(limit_s, chosen)
            answers, successes = zip(*[self.parent_pipes[i].recv() for i in chosen], strict=True)
            self._raise_if_errors(successes)
            self._state = AsyncState.DEFAULT
        return list(answers)

    def starts(self) -> list[Start | None]:
        """Return how the current episode of each sub-env began."""
        return self._call_each("start", [()] * self.num_envs)

    def continue_from(self, starts: Sequence[Start | None], resets_next: NDArray[np.bool_]) -> None:
        """Continue where other sub-envs stood; see `SyncVectorEnv.continue_from`."""
        self._call_each("continue_from", [*zip(starts, resets_next.tolist(), strict=True)])

    # Failures.

    @property
    def _wait_limit_s(self) -> float | None:
        """Seconds to wait for answers: longer than a sub-env takes to interrupt itself."""
        timeout_s = self._limits.step_timeout_s
        return None if timeout_s is None else 2 * timeout_s + 1

    @contextmanager
    def _exchange(self, method: str) -> Iterator[None]:
        """Raise an error that names the sub-env whose process ended or hung; `close_extras` reads what is left."""
        try:
            try:
                yield
            except BaseException:
                self.is_broken, self._failed_in_step = True, method == "step"
                raise
        except _ProcessEnded as ended:
            index = ended.args[0]
            process = self.processes[index]
            process.join(CLOSE_LIMIT_S)
            raise SubEnvError(index, method, f"its process ended with {_exit_code(process.exitcode)}") from None
        except _Overdue as overdue:
            index, limit_s = overdue.args
            self.processes[index].kill()
            error = EnvTimeoutError(f"did not answer within {limit_s:g} s, and could not be interrupted: it was killed")
            raise SubEnvError(index, method, str(error)) from error
        except Exception:
            raise
        except BaseException:
            self._interrupted = True  # a message may have been cut, so the pipes cannot be read any more
            raise

    def _poll_pipe_envs(self, timeout: float | None = None, chosen: Sequence[int] | None = None) -> bool:
        """Wait until sub-envs have answered; Gymnasium calls this before it reads the answers.

        Raises:
            _Overdue: A sub-env has not answered within `timeout` seconds.
        """
        self._assert_is_running()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        for i in range(self.num_envs) if chosen is None else chosen:
            left_s = max(0.0, deadline - time.monotonic())
            if timeout is not None and not self.parent_pipes[i].poll(left_s):
                raise _Overdue(i, timeout)
        return True

    def _add_info(self, vector_infos: dict[Any, Any], env_info: dict[str, Any], env_num: int) -> dict[Any, Any]:
        """Add the info of a sub-env, and log what it has logged; Gymnasium calls this for each."""
        for info in (env_info.get("final_info"), env_info) if env_info else ():
            if info and _LOGS in info:
                log_records(info.pop(_LOGS), f"sub-env {env_num}")
        if env_info:
            vector_infos[env_num] = env_info
        return vector_infos

    def _restart_failed(self, obs: Tree, infos: dict[Any, Any]) -> None:
        """Restart the sub-envs that report a failure, and put their first observations into the batch."""
        reported = {i: info.pop(_FAILURE) for i, info in infos.items() if _FAILURE in info}
        if not reported or self._restarts is None:
            return
        failures = []
        for i, (method, problem, trace) in reported.items():
            failures.append(SubEnvError(i, method, problem))
            failures[-1].add_note(f"In the process of sub-env {i}:\n{trace}")
        arguments: list[Sequence[Any] | None] = [None] * self.num_envs
        for failure in failures:
            known_task = self._restarts.known_task(failure.env_index)
            arguments[failure.env_index] = (self._restarts.next_seed(), cloudpickle.dumps(known_task))
        limit_s = None if self._limits.step_timeout_s is None else self._limits.start_timeout_s
        try:
            answers = self._call_each("renew", arguments, limit_s)
        except SubEnvError as error:
            raise restart_error(next(f for f in failures if f.env_index == error.env_index), error) from None
        for failure, answer in zip(failures, answers, strict=True):
            if len(answer) == 1:
                raise restart_error(failure, answer[0])
            new_obs, info = answer
            at = failure.env_index
            map_tree(lambda rows, row, at=at: np.copyto(rows[at, ...], row, casting="unsafe"), obs, new_obs)
            infos[failure.env_index] |= info
            self._add_info(infos, infos[failure.env_index], failure.env_index)
            self._restarts.restarted(failure)

    def _raise_if_errors(self, successes: Any) -> None:
        failed = [i for i, success in enumerate(successes) if not success]
        if not failed:
            return
        index, _, cause, trace = min((self.error_queue.get(timeout=CLOSE_LIMIT_S) for _ in failed), key=itemgetter(0))
        for i in failed:
            self.parent_pipes[i].close()
            self.parent_pipes[i] = None  # type: ignore[call-overload]  # as Gymnasium's own close() expects
        self._state = AsyncState.DEFAULT
        cause.add_note(f"In the process of sub-env {index}:\n{trace}")
        called = re.search(r"in (reset|step)\n", trace)
        raise SubEnvError(index, called[1] if called else "step", problem_of(cause)) from cause

    # The end.

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ask the processes to end, wait for `timeout` seconds or without limit, and kill those that still run."""
        if os.getpid() != self._owner:  # a process that was forked from it
            return
        pipes = [None if pipe is None or pipe.closed else pipe for pipe in self.parent_pipes]
        try:
            if not (self._interrupted or terminate):
                self._end_gently(pipes, math.inf if timeout is None else time.monotonic() + timeout)
        finally:  # also if Ctrl-C interrupts the wait
            for process in self.processes:
                process.kill()
            for pipe, process in zip(pipes, self.processes, strict=True):
                process.join()
                if pipe is not None:
                    pipe.close()
            self.error_queue.close()
            self._end_guard()

    def _end_gently(self, pipes: Sequence[Any], deadline: float) -> None:
        """Ask the processes to end, and wait until `deadline`; a process without a pipe has failed, or was asked."""
        for pipe in pipes:
            if pipe is not None:
                with suppress(_ProcessEnded):
                    pipe.send(("close", None))
        for pipe, process in zip(pipes, self.processes, strict=True):
            if pipe is None:  # it ends by itself, unless it hangs
                deadline = min(deadline, time.monotonic() + CLOSE_LIMIT_S)
            _wait_for_end(process, pipe, deadline)

    def _end_guard(self) -> None:
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()


def _wait_for_end(process: Any, pipe: Any, deadline: float) -> None:
    """Wait for the end of a process, and read its pipe, because a process that writes waits for its reader."""
    while process.is_alive() and (left_s := deadline - time.monotonic()) > 0:
        waiting = [process.sentinel] if pipe is None else [process.sentinel, pipe]
        ready = multiprocessing.connection.wait(waiting, None if left_s == math.inf else left_s)
        if pipe in ready:
            try:
                pipe.recv_bytes()
            except (EOFError, OSError):
                pipe = None
        if process.sentinel in ready:
            process.join()


def _exit_code(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _worker(
    coordination: dict[str, str],
    group: int | None,
    stepped: Any,
    index: int,
    make: Callable[[], gym.Env[Any, Any]],
    *arguments: Any,
) -> None:
    """Run Gymnasium's worker, and ignore signals that terminals and job schedulers send to all processes.

    The parent ends workers, after it has saved their state.

    `group` is a process group that ends with the parent. `stepped` notes which sub-envs have taken the current step.
    """
    # What the parent left as garbage, such as a pool of C++ threads, would crash this process if collected here.
    gc.freeze()
    if group is not None:
        os.setpgid(0, group)
    os.environ.update(coordination)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in ENDING[1:]:  # by a handler, since programs that an env starts would inherit that they are ignored
        signal.signal(number, lambda *_: None)

    logs = WorkerLog()
    logs.take_over()

    def make_and_connect() -> gym.Env[Any, Any]:
        env = make()
        if isinstance(env, _ProcessEnv):
            env.note_step, env.logs = partial(stepped.__setitem__, index, 1), logs
        return env

    gym.vector.async_vector_env._async_worker(index, make_and_connect, *arguments)
