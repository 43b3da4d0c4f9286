"""One trial: a run in a forked process, a fault at a drawn moment, the same command again, and the verdict."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from kill_matrix import processes_of_trial as processes
from kill_matrix import verdict
from kill_matrix.cells import ITERATIONS, Cell, draw_env_fault, settings
from kill_matrix.driver import Hooks, run_driver
from kill_matrix.verdict import Attempt

TIMEOUT_S = 240.0
GONE_S = {"local": 8.0, "process": 12.0, "ray": 25.0, "two nodes": 25.0}
STOPPED_S = 0.3
SEEDS = {"local": 3, "process": 1, "ray": 1, "two nodes": 1}
"""Number of different seeds of runs; each needs an undisturbed run to compare with."""
MAX_ATTEMPTS = 4
Plan = dict[str, Any]


@dataclass
class Setup:
    """What all trials share.

    Attributes:
        home: Directory in which each trial has one.
        environment: Variables of the drivers.
        change_nodes: Function that removes (`remove`) or adds (`add`) the second node of Ray's cluster.
        keeps: Whether the files of all trials stay.
    """

    home: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    change_nodes: Callable[[str], None] | None = None
    keeps: bool = False


class Reference(dict[str, Any]):
    """What an undisturbed run did: `phases` (count and mean seconds of each), `weights`, and `config`."""


def run_seed(cell: Cell, number: int) -> int:
    """Return the seed of the run of a trial."""
    return number % SEEDS[cell.engine]


def make_reference(cell: Cell, seed: int, setup: Setup) -> Reference:
    """Make an undisturbed run.

    Raises:
        RuntimeError: It failed.
    """
    home = setup.home / f"undisturbed-{cell.config_name.replace(':', '-').replace(' ', '-')}-{seed}"
    plain = replace(cell, expects="dies", in_env=False)
    trial = Trial(plain, seed, home, setup, {}, None)
    attempt = trial.attempt({})
    if attempt.status != 0 or attempt.left:
        raise RuntimeError(f"{cell.config_name}: the undisturbed run failed: {attempt.errors[-2000:]}")
    report = json.loads((home / "report.json").read_text(encoding="utf-8"))
    return Reference(phases=report, weights=verdict.digest_of_weights(home / "run"))


class Trial:
    """The runs of one trial.

    Args:
        cell: The cell.
        seed: Seed of the runs.
        home: Directory of the trial, which is replaced.
        setup: What all trials share.
        reference: The undisturbed run.
        rng: Generator of the moments; `None` for a run without a fault.
    """

    def __init__(
        self,
        cell: Cell,
        seed: int,
        home: Path,
        setup: Setup,
        reference: Mapping[str, Any],
        rng: random.Random | None,
    ) -> None:
        """Write the settings of the run."""
        self.cell, self.home, self.setup, self.reference, self.rng = cell, home, setup, reference, rng
        shutil.rmtree(home, ignore_errors=True)
        self.record, self.run_dir = home / "record", home / "run"
        self.record.mkdir(parents=True)
        fault = draw_env_fault(cell, rng) if rng is not None and cell.in_env else None
        config = settings(cell, seed, self.record, fault)
        if rng is None:
            # Not longer where a runner is slow to start: moments of faults are drawn from what any run reaches.
            config["environment"]["env_config"]["until"] |= {"counted": "", "healthy": 0, "evaluation_healthy": 0}
        (home / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        self.attempts: list[Attempt] = []
        self.spared: set[int] = set()

    # Plans.

    def plans(self) -> Iterator[Plan]:
        """Yield what happens in each attempt; nothing happens in those that follow."""
        rng, cell = self.rng, self.cell
        if rng is None or cell.in_env:
            return
        if cell.phase == "resume":
            first = self.plan("kill", "driver", "sample")
            yield {**first, "is_first": True}
        yield self.plan(cell.kind, cell.actor, cell.phase)

    def plan(self, kind: str, actor: str, phase: str) -> Plan:
        """Draw the moment in a phase, and what happens then."""
        assert self.rng is not None
        rng = self.rng
        count, seconds = self.reference["phases"].get(phase, [1, 0.05])
        # The last call at the end of a run finds that every result is written: a full disk is no fault there.
        count -= phase == "log" and kind == "disk"
        # One for each iteration, in any case; whether the best one is written too depends on the evaluations.
        count = min(count, ITERATIONS) if phase == "checkpoint" else count
        occurrence = 1 if phase == "resume" else rng.randint(1, max(1, count))
        delay_s = rng.choice((0.0, rng.uniform(0.0, 1.2 * seconds)))
        plan: Plan = {"phase": phase, "occurrence": occurrence, "delay_s": delay_s, "actor": actor, "action": kind}
        if kind == "end":
            plan["signal"] = int(rng.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))
        elif kind == "memory":
            plan["number"] = rng.choice((0, 2**16, 2**20, 2**22, 2**24))
        elif kind == "disk":
            plan |= {"number": rng.choice((0, 30, 300, 3000, 30_000)), "lasts": rng.choice((0, 3, 10, 40))}
        elif actor == "runner":
            plan["runner"] = rng.randint(1, 2)
        return plan

    # One attempt.

    def arguments(self) -> list[str]:
        """Return the arguments of the command."""
        start = ["train", "--config", str(self.home / "config.yaml"), "--resume-or-start", str(self.run_dir)]
        return [*start, "--quiet"]

    def attempt(self, plan: Plan, arguments: list[str] | None = None) -> Attempt:
        """Run the command once, let happen what the plan says, and wait for the end of all processes."""
        told, tell = os.pipe()
        errors, error_pipe = os.pipe()
        is_resumed = (self.record / "fault").exists() and plan.get("phase") == "resume"
        if is_resumed:
            (self.record / "fault").unlink()
        hooks = Hooks(plan, self.record, tell)
        report = self.home / "report.json"
        pid = os.fork()
        if pid == 0:
            os.close(told)
            os.close(errors)
            if self.rng is None:
                _write_at_exit(hooks, report)
            run_driver(arguments or self.arguments(), hooks, self.home, self.setup.environment, error_pipe)
        os.close(tell)
        os.close(error_pipe)
        start_s = time.monotonic()
        status, text, is_late = _Watch(self, plan, pid, told, errors).wait()
        left = processes.wait_until_gone(self.record, self.spared, GONE_S[self.cell.engine])
        processes.kill_all(set(left))
        attempt = Attempt(
            status=status,
            errors=text,
            left=[f"{pid}: {command}" for pid, command in left.items()],
            is_late=is_late,
            seconds=time.monotonic() - start_s,
            happened=_read(self.record / "fault"),
            checkpoint=verdict.state_of_checkpoint(self.run_dir),
        )
        self.attempts.append(attempt)
        return attempt

    def strike(self, plan: Plan, driver: int, learner: int) -> None:
        """Do to a process from outside what the plan says."""
        time.sleep(plan["delay_s"])
        actor, action = plan["actor"], plan["action"]
        if actor == "node":
            assert self.setup.change_nodes is not None
            return self.setup.change_nodes("remove")
        target = driver if actor == "driver" else learner
        if actor == "runner":
            target = processes.newest_of(self.record, f"runner-{plan['runner']}")
        if not target:
            return None
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(action, plan.get("signal"))
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, number)
            if action == "stop" and actor == "driver":
                time.sleep(STOPPED_S)
                os.kill(target, signal.SIGCONT)
        return None

    # The trial.

    def run(self) -> list[str]:
        """Run the command until it succeeds, and return what was wrong."""
        problems: list[str] = []
        plans = self.plans()
        for _ in range(MAX_ATTEMPTS):
            plan = next(plans, {})
            attempt = self.attempt(plan)
            problems += verdict.after_attempt(self.cell, self.run_dir, attempt, is_disturbed=self.is_disturbed(attempt))
            goes_on = plan.get("is_first") or plan.get("action") in ("disk", "memory")  # later there is room again
            if attempt.is_late or (attempt.status == 0 and not goes_on):
                break
        return problems + verdict.at_the_end(self.cell, self.run_dir, self.record, self.attempts, self.reference)

    def is_disturbed(self, attempt: Attempt) -> bool:
        """Return whether the fault came in an attempt, which therefore may have failed."""
        return bool(attempt.happened) and not (
            len(self.attempts) > 1 and self.attempts[-2].happened == attempt.happened
        )


class _Watch:
    """Waits for the end of a driver, reads what it writes, and strikes when it says so."""

    def __init__(self, trial: Trial, plan: Plan, pid: int, told: int, errors: int) -> None:
        self.trial, self.plan, self.pid, self.told, self.errors = trial, plan, pid, told, errors

    def wait(self) -> tuple[int, str, bool]:
        """Return the exit status, the standard error, and whether the driver had to be killed."""
        text, end_s, is_late, status = b"", time.monotonic() + TIMEOUT_S, False, None
        open_pipes = {self.told, self.errors}
        while status is None:
            for pipe in select.select(list(open_pipes), [], [], 0.02 if open_pipes else 0.0)[0]:
                data = os.read(pipe, 65536)
                if not data:
                    open_pipes.discard(pipe)
                elif pipe == self.errors:
                    text += data
                else:
                    self.trial.strike(self.plan, self.pid, int(data.split()[0]))
            if not open_pipes:
                time.sleep(0.01)
            status = self.poll()
            if status is None and time.monotonic() > end_s:
                os.kill(self.pid, signal.SIGABRT if not is_late else signal.SIGKILL)
                is_late, end_s = True, time.monotonic() + 5.0
        os.set_blocking(self.errors, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.errors, 65536):
                text += data
        os.close(self.told)
        os.close(self.errors)
        return status, text.decode(errors="replace"), is_late

    def poll(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None


def _write_at_exit(hooks: Hooks, file: Path) -> None:
    import atexit

    atexit.register(lambda: file.write_text(json.dumps(hooks.report()), encoding="utf-8"))


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


class ExportTrial(Trial):
    """A trial of `corral export`: a run without a fault, an export that is disturbed, and another one."""

    def arguments(self) -> list[str]:
        """Return the arguments of the run."""
        return super().arguments()

    def run(self) -> list[str]:
        """Export twice, and return what was wrong."""
        assert self.rng is not None
        attempt = self.attempt({})
        if attempt.status:
            return [f"the run ended with status {attempt.status}: {attempt.errors[-300:]}"]
        file = self.home / f"policy{self.rng.choice(('.safetensors', '.safetensors', '.pt2'))}"
        command = ["export", str(self.run_dir), "--output", str(file)]
        if self.cell.agents == "several":
            command += ["--module", "left"]
        before = b"what was there before" if self.rng.random() < 0.5 else None
        if before is not None:
            file.write_bytes(before)
        plan = self.plan(self.cell.kind, "driver", "export")
        plan["delay_s"] = self.rng.choice((0.0, self.rng.uniform(0.0, 0.02 if file.suffix == ".safetensors" else 2.0)))
        attempt = self.attempt(plan, command)
        problems = verdict.after_export(file, before, attempt, is_over=False)
        again = self.attempt({}, command)
        return problems + verdict.after_export(file, None, again, is_over=True)


def run_trial(cell: Cell, number: int, seed: int, setup: Setup, reference: Reference) -> dict[str, Any]:
    """Run a trial in this process, which becomes a subreaper, and return its line of the results."""
    processes.become_subreaper()
    rng = random.Random(f"{seed}:{number}:{cell.name}")
    home = setup.home / f"trial-{number}"
    start_s = time.monotonic()
    kind = ExportTrial if cell.phase == "export" else Trial
    trial = kind(cell, run_seed(cell, number), home, setup, reference, rng)
    try:
        problems = trial.run()
    except Exception as error:
        problems = [f"the trial itself failed: {type(error).__name__}: {error}"]
    happened = next((attempt.happened for attempt in trial.attempts if attempt.happened), "")
    line = {
        "trial": number,
        "cell": cell.name,
        "fault": cell.fault,
        "engine": cell.engine,
        "happened": happened,
        "statuses": [attempt.status for attempt in trial.attempts],
        "seconds": round(time.monotonic() - start_s, 2),
        "problems": problems,
    }
    if not problems and not setup.keeps:
        shutil.rmtree(home, ignore_errors=True)
    return line


__all__ = ["ITERATIONS", "ExportTrial", "Reference", "Setup", "Trial", "make_reference", "run_seed", "run_trial"]
