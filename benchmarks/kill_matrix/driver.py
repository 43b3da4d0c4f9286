"""The driver of a trial: a forked process that runs the command line, with hooks at the phases of a run."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kill_matrix.envs import claim, cut_connections, limit_memory

POINTS: dict[str, tuple[str, ...]] = {
    "start": ("corral.algorithms.algorithm:Algorithm.__init__",),
    "sample": (
        "corral.runners.runner_group:EnvRunnerGroup.sample",
        "corral.runners.runner_group:EnvRunnerGroup.sample_async",
        "corral.runners.async_sampling:AsyncSampler.sample",
    ),
    "update": (
        "corral.learners.learner_group:LearnerGroup.update",
        "corral.learners.learner_group:LearnerGroup.update_async",
    ),
    "weights": ("corral.runners.runner_group:EnvRunnerGroup.sync_weights",),
    "evaluation": ("corral.algorithms.evaluator:Evaluator._play",),
    "checkpoint": ("corral.runs.checkpoint.directory:_save",),
    "log": ("corral.runs.loggers.run:Run.log_result",),
    "resume": ("corral.algorithms.fitting:restore_run",),
    "export": ("corral.runs.policies.policy:Policy.export",),
}
"""Functions at whose begin a phase begins."""


class Hooks:
    """Wraps the functions of all phases: counts and times them, and does what a plan says at one of them.

    The plan has `phase`, `occurrence` (from 1), `action`, and `number` for actions that take one. Actions on this
    process are done here; the others are left to the process that watches, which is told the phase.

    Args:
        plan: What to do; empty for nothing.
        record: Directory of the record.
        pipe: Descriptor on which the watching process is told.
    """

    def __init__(self, plan: Mapping[str, Any], record: Path, pipe: int) -> None:
        """Wrap nothing yet."""
        self.plan, self.record, self.pipe = plan, record, pipe
        self.counts: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.inside: set[str] = set()
        self.algorithm: Any = None
        self.limit_until = 0

    def install(self) -> None:
        """Wrap the functions."""
        for phase, points in POINTS.items():
            for point in points:
                module_name, _, path = point.partition(":")
                owner: Any = importlib.import_module(module_name)
                *outer, name = path.split(".")
                for part in outer:
                    owner = getattr(owner, part)
                setattr(owner, name, self.wrapped(phase, getattr(owner, name)))

    def wrapped(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that enters a phase first, unless it is inside of it."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if phase == "start":
                self.algorithm = args[0]
            if phase in self.inside:
                return function(*args, **kwargs)
            self.inside.add(phase)
            start_s = time.perf_counter()
            try:
                self.enter(phase)
                return function(*args, **kwargs)
            finally:
                self.inside.discard(phase)
                self.seconds[phase] += time.perf_counter() - start_s

        return call

    def enter(self, phase: str) -> None:
        """Count, and do what is planned for this moment."""
        self.counts[phase] += 1
        if self.limit_until and sum(self.counts.values()) >= self.limit_until:
            self.limit_until = 0
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        plan = self.plan
        if not plan or phase != plan["phase"] or self.counts[phase] != plan["occurrence"]:
            return
        if claim(self.record, f"{plan['action']} at {phase} {self.counts[phase]}"):
            self.act(plan["action"], plan.get("number", 0))

    def act(self, action: str, number: int) -> None:
        """Do something to this process, or tell the process that watches."""
        if action == "memory":
            limit_memory(number)
        elif action == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (number, resource.RLIM_INFINITY))
            lasts = self.plan["lasts"]
            self.limit_until = sum(self.counts.values()) + lasts if lasts else 0
        elif action == "disconnect":
            self.cut()
        else:
            os.write(self.pipe, f"{self.pid_of_learner()}\n".encode())

    def cut(self) -> None:
        """Cut the connection to one worker, or to all if the engine does not say which."""
        workers = self.learners() or [runner.handle for runner in self.algorithm.env_runner_group._runners.values()]
        channel = getattr(workers[-1], "_channel", None)
        if channel is None:
            cut_connections()
        else:
            with contextlib.suppress(OSError):
                channel.shutdown(2)

    def learners(self) -> list[Any]:
        """Return the handles of learners in processes of their own."""
        remote = getattr(getattr(self.algorithm, "learner_group", None), "remote", None)
        return [] if remote is None else list(remote.workers)

    def pid_of_learner(self) -> int:
        """Return the process of a learner; 0 if there is none."""
        return next((handle.pid for handle in self.learners() if hasattr(handle, "pid")), 0)

    def report(self) -> dict[str, Any]:
        """Return how often each phase came, and how many seconds it took each time."""
        return {phase: [count, self.seconds[phase] / count] for phase, count in self.counts.items()}


def run_driver(arguments: list[str], hooks: Hooks, home: Path, environment: Mapping[str, str], errors: int) -> None:
    """Run the command line in this forked process, and end the process as an interpreter ends. It never returns."""
    status = 70
    try:
        os.setpgid(0, 0)
        os.chdir(home)
        os.environ.update(environment)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number, file in ((0, nowhere), (1, nowhere), (2, errors)):
            os.dup2(file, number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
        sys.dont_write_bytecode = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from corral.tools.cli.main import main

        hooks.install()
        status = main(arguments)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        status = 1
        traceback.print_exc()
    try:
        # As the interpreter does it at its end.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stderr.flush()
    finally:
        os._exit(status)
