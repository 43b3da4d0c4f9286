"""Steps and resets that hang: interrupted where they do, or else the process is ended. Nothing here waits forever."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import faulty
from corral import coordination
from corral.envs.step_timeout import limited
from corral.errors import ConfigError, EnvError, EnvTimeoutError
from corral.runners.runner import EnvRunner
from corral.testing import CountingEnv
from faulty import TroubleEnv, hang
from handmade import MakeRunner

LIMIT_S = 0.2
WAYS = ["sleep", "loop", "read", "lock", "swallow", "swallow_all_once"]


@pytest.fixture(autouse=True)
def leaves_signals_and_processes_as_they_were() -> Iterator[None]:
    handler, children = signal.getsignal(signal.SIGALRM), set(multiprocessing.active_children())
    coordination.environment()  # starts a thread, once, which async sub-envs need
    threads = threading.active_count()
    yield
    assert signal.getsignal(signal.SIGALRM) == handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert threading.active_count() == threads
    left = set(multiprocessing.active_children()) - children
    for process in left:
        process.kill()
    # The runner of the test is closed after this; its processes are looked at in the tests themselves.


def make_hanging(make_runner: MakeRunner, how: str = "sleep", **settings: Any) -> EnvRunner:
    names = ("step_faults", "reset_faults", "make_faults", "vector_index", "episode_length")
    config = {name: settings.pop(name) for name in names if name in settings}
    settings = {"env_step_timeout_s": LIMIT_S, "disable_env_checking": True, **settings}
    return make_runner(TroubleEnv, env_config={"how": how, "counts": {}, **config}, **settings)


class TestInterrupted:
    @pytest.mark.parametrize("how", WAYS)
    def test_a_step_wherever_it_hangs(self, make_runner: MakeRunner, how: str) -> None:
        runner = make_hanging(make_runner, how, num_envs=2, step_faults=[3], vector_index=1)
        with pytest.raises(EnvTimeoutError) as caught:
            runner.sample(num_timesteps=20)
        for word in (
            "env 'TroubleEnv', sub-env 1, step 2: step() took longer than env_step_timeout_s=0.2",
            "it hung in ",
            "faulty.py:",
        ):
            assert word in str(caught.value)
        assert isinstance(caught.value, EnvError)
        assert isinstance(caught.value, TimeoutError)

    def test_a_reset(self, make_runner: MakeRunner) -> None:
        with pytest.raises(EnvTimeoutError, match=r"sub-env 0, step 0: reset\(\) took longer"):
            make_hanging(make_runner, reset_faults=[1]).sample(num_timesteps=1)

    def test_an_autoreset(self, make_runner: MakeRunner) -> None:
        with pytest.raises(EnvTimeoutError, match=r"sub-env 0, step 3: reset\(\) took longer"):
            make_hanging(make_runner, reset_faults=[2], episode_length=3).sample(num_timesteps=9)

    def test_the_traceback_shows_the_line(self, make_runner: MakeRunner) -> None:
        with pytest.raises(EnvTimeoutError) as caught:
            make_hanging(make_runner, "sleep", step_faults=[1]).sample(num_timesteps=1)
        frames = []
        traceback = caught.value.__cause__.__traceback__  # type: ignore[union-attr]
        while traceback is not None:
            frames.append(traceback.tb_frame.f_code.co_name)
            traceback = traceback.tb_next
        assert "hang" in frames

    def test_a_native_or_ready_vector_env(self, make_runner: MakeRunner) -> None:
        class Slow(gym.vector.SyncVectorEnv):  # type: ignore[type-arg]
            def step(self, actions: Any) -> Any:
                hang("sleep")

        runner = make_runner(
            lambda: Slow([CountingEnv] * 2), num_envs=None, env_step_timeout_s=LIMIT_S, disable_env_checking=True
        )
        with pytest.raises(EnvTimeoutError, match=r"step 0: step\(\) took longer .* it hung in "):
            runner.sample(num_timesteps=1)

    def test_the_check_at_the_start(self, make_runner: MakeRunner) -> None:
        with pytest.raises(EnvTimeoutError, match=r"env 'TroubleEnv': its first reset and step took longer"):
            make_hanging(make_runner, reset_faults=[1], disable_env_checking=False)

    def test_a_fast_env_samples_the_same_with_and_without_a_limit(self, make_runner: MakeRunner) -> None:
        one = make_runner("CartPole-v1", num_envs=3, vectorization="sync", env_step_timeout_s=5.0)
        other = make_runner("CartPole-v1", num_envs=3, vectorization="sync")
        np.testing.assert_array_equal(one.sample(num_timesteps=200).obs, other.sample(num_timesteps=200).obs)

    def test_a_slow_callback_is_no_slow_step(self, make_runner: MakeRunner) -> None:
        runner = make_hanging(make_runner, on_episode_step=lambda: time.sleep(1.5 * LIMIT_S))
        assert runner.sample(num_timesteps=1).num_env_steps == 1


@pytest.fixture
def ring_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the signal while the timer is being stopped, which is when it may always come."""
    set_timer = signal.setitimer

    def set_timer_late(which: int, seconds: float, interval: float = 0.0) -> tuple[float, float]:
        before = set_timer(which, seconds, interval)
        if seconds == 0 and callable(signal.getsignal(signal.SIGALRM)):
            signal.raise_signal(signal.SIGALRM)
        return before

    monkeypatch.setattr(signal, "setitimer", set_timer_late)


@pytest.mark.usefixtures("ring_late")
class TestLateSignals:
    """A timer that is set when its handler is gone ends the process."""

    def test_none_is_set_after_a_sample(self, make_runner: MakeRunner) -> None:
        make_hanging(make_runner).sample(num_timesteps=3)
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL

    def test_the_limit_of_the_outer_sample_holds(self, make_runner: MakeRunner) -> None:
        inner = make_hanging(make_runner)
        outer = make_hanging(make_runner, step_faults=[2], on_episode_step=lambda: inner.sample(num_timesteps=1))
        with pytest.raises(EnvTimeoutError, match="step 1: "):
            outer.sample(num_timesteps=9)
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)

    def test_a_block_that_ends_as_its_time_ends(self) -> None:
        with pytest.raises(EnvTimeoutError), limited(10.0, "the limit") as _:
            timer = signal.getsignal(signal.SIGALRM).__self__  # type: ignore[union-attr]
            timer._deadline_s = 0.0  # the signal that follows is one of an overdue call
            signal.raise_signal(signal.SIGALRM)
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


class TestNested:
    def test_sampling_in_a_callback_of_sampling(self, make_runner: MakeRunner) -> None:
        inner = make_hanging(make_runner, step_faults=[2])
        caught: list[Exception] = []

        def sample_too() -> None:
            if not caught:
                try:
                    inner.sample(num_timesteps=5)
                except EnvTimeoutError as error:
                    caught.append(error)

        outer = make_hanging(make_runner, step_faults=[4], on_episode_step=sample_too)
        with pytest.raises(EnvTimeoutError, match="step 4: "):  # the autoreset is a row too
            outer.sample(num_timesteps=9)
        assert "step 1: " in str(caught[0])

    def test_in_on_sample_end_of_the_same_runner(self, make_runner: MakeRunner) -> None:
        depth: list[int] = []

        def again(env_runner: EnvRunner) -> None:
            depth.append(1)
            if len(depth) == 1:
                env_runner.sample(num_timesteps=2)

        runner = make_hanging(make_runner, step_faults=[4], on_sample_end=again)
        runner.sample(num_timesteps=1)
        with pytest.raises(EnvTimeoutError):
            runner.sample(num_timesteps=2)

    def test_the_timer_that_somebody_else_had_set_still_rings(self, make_runner: MakeRunner) -> None:
        rings: list[int] = []
        runner = make_hanging(make_runner)
        previous = signal.signal(signal.SIGALRM, lambda *_: rings.append(1))
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            runner.sample(num_timesteps=200)
            deadline = time.monotonic() + 5
            while not rings and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert rings == [1]

    def test_the_timer_that_somebody_else_had_set_keeps_its_time_and_its_interval(
        self, make_runner: MakeRunner
    ) -> None:
        runner = make_hanging(make_runner)
        previous = signal.signal(signal.SIGALRM, signal.SIG_IGN)
        try:
            signal.setitimer(signal.ITIMER_REAL, 1000, 500)
            runner.sample(num_timesteps=2)
            left_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert 900 < left_s <= 1000
        assert interval_s == 500


class TestOutsideOfTheMainThread:
    def test_is_refused_when_the_runner_is_made(self, make_runner: MakeRunner) -> None:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(make_hanging, make_runner)
            with pytest.raises(ConfigError, match=r"env_step_timeout_s.*main thread.*num_env_runners>=1"):
                future.result()

    def test_is_refused_when_it_samples_elsewhere(self, make_runner: MakeRunner) -> None:
        runner = make_hanging(make_runner)
        with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigError, match="main thread"):
            pool.submit(runner.sample, num_timesteps=1).result()

    def test_async_sub_envs_have_main_threads_of_their_own(self, make_runner: MakeRunner) -> None:
        def sample() -> None:
            make_hanging(make_runner, num_envs=2, vectorization="async", step_faults=[2]).sample(num_timesteps=9)

        with ThreadPoolExecutor(1) as pool, pytest.raises(EnvTimeoutError, match=r"sub-env 0, step 1: step\(\) took"):
            pool.submit(sample).result()


class TestAsync:
    @pytest.mark.parametrize("how", ["sleep", "loop", "swallow"])
    @pytest.mark.parametrize("fault", ["step_faults", "reset_faults"])
    def test_the_sub_env_interrupts_itself(self, make_runner: MakeRunner, fault: str, how: str) -> None:
        runner = make_hanging(
            make_runner, how, num_envs=2, vectorization="async", vector_index=1, episode_length=3, **{fault: [2]}
        )
        row = 1 if fault == "step_faults" else 3
        with pytest.raises(EnvTimeoutError) as caught:
            runner.sample(num_timesteps=20)
        method = fault.partition("_")[0]
        assert f"sub-env 1, step {row}: {method}() took longer than env_step_timeout_s=0.2" in str(caught.value)
        assert "it hung in " in str(caught.value)
        assert_ends(runner)

    @pytest.mark.parametrize("how", ["c_with_gil", "c", "SIGSTOP"])
    def test_a_sub_env_that_cannot_be_interrupted_is_killed(self, make_runner: MakeRunner, how: str) -> None:
        runner = make_hanging(make_runner, how, num_envs=2, vectorization="async", vector_index=1, step_faults=[2])
        with pytest.raises(EnvTimeoutError, match=r"sub-env 1, step 1: step\(\) did not answer within 1.4 s.*killed"):
            runner.sample(num_timesteps=20)
        assert_ends(runner)

    @pytest.mark.parametrize("fault", ["step_faults", "reset_faults"])
    @pytest.mark.parametrize("timeout_s", [None, 30.0])
    def test_one_whose_process_was_killed_is_named_at_once(
        self, make_runner: MakeRunner, timeout_s: float | None, fault: str
    ) -> None:
        runner = make_hanging(
            make_runner,
            "SIGKILL",
            num_envs=3,
            vectorization="async",
            vector_index=1,
            env_step_timeout_s=timeout_s,
            **{fault: [1]},
        )
        method = fault.partition("_")[0]
        with pytest.raises(EnvError, match=rf"sub-env 1, step 0: raised in {method}.*ended with signal SIGKILL"):
            runner.sample(num_timesteps=20)
        assert_ends(runner)

    def test_one_that_was_killed_between_samples(self, make_runner: MakeRunner) -> None:
        runner = make_hanging(make_runner, num_envs=2, vectorization="async")
        runner.sample(num_timesteps=2)
        process = runner.env.unwrapped.processes[1]  # type: ignore[attr-defined]
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with pytest.raises(EnvError, match=r"sub-env 1, step 1: .*ended with signal SIGKILL"):
            runner.sample(num_timesteps=2)
        assert_ends(runner)


def assert_ends(runner: EnvRunner) -> None:
    """Stop a runner, and see that none of its sub-envs' processes is left."""
    processes = runner.env.unwrapped.processes  # type: ignore[attr-defined]
    stopping = threading.Thread(target=runner.stop)
    stopping.start()
    stopping.join(20)
    left = [process for process in processes if process.is_alive()]
    for process in left:
        process.kill()  # so that nothing waits for it
    stopping.join(20)
    assert left == []
    assert not stopping.is_alive()


# Without a runner, whose torch takes seconds to import.
TIMER_ALONE = """
import sys, time
sys.path.insert(0, {tests!r})
from faulty import hang
from corral.envs.step_timeout import StepTimer, sampling

timer = StepTimer({limit_s!r})
try:
    with sampling(timer, has_own_process=True):
        for how in {ways!r}:
            timer.call(hang, how)
except Exception as error:
    print(type(error).__name__)
time.sleep({rest_s!r})
print("done")
"""

WITH_RUNNER = """
import sys
sys.path.insert(0, {tests!r})
from faulty import TroubleEnv
from corral import PPOConfig
from corral.runners.runner import EnvRunner

config = PPOConfig().environment(TroubleEnv, env_config=dict(how={ways[0]!r}, step_faults=[3]))
config.environment(disable_env_checking=True).fault_tolerance(env_step_timeout_s={limit_s!r})
EnvRunner(config.env_runners(num_envs_per_env_runner=1), 1, has_own_process=True).sample(num_timesteps=50)
"""


def run_watched(code: str, *ways: str, limit_s: float = 0.3, rest_s: float = 0.0) -> tuple[int, str, str]:
    """Run code in a process of its own; return its exit code, its output, and what it wrote as it crashed."""
    read, write = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code.format(tests=os.path.dirname(faulty.__file__), **locals())],
            env={**os.environ, "CORRAL_CRASH_FD": str(write)},
            pass_fds=[write],
            stdout=subprocess.PIPE,
            text=True,
            timeout=50,
            check=False,
        )
    finally:
        os.close(write)
        with os.fdopen(read) as pipe:
            dump = pipe.read()
    return done.returncode, done.stdout, dump


class TestWatchdog:
    @pytest.mark.slow_cases("c_with_gil")
    @pytest.mark.parametrize(
        ("code", "how"),
        [
            (TIMER_ALONE, "c_with_gil"),
            pytest.param(TIMER_ALONE, "c", marks=pytest.mark.slow),
            pytest.param(WITH_RUNNER, "c_with_gil", marks=pytest.mark.slow),
        ],
    )
    def test_ends_a_process_that_cannot_be_interrupted(self, code: str, how: str) -> None:
        exit_code, output, dump = run_watched(code, how)
        assert exit_code == 1
        assert output == ""
        assert "Timeout" in dump
        assert "in _wait_in_c" in dump
        assert "faulty.py" in dump

    @pytest.mark.slow
    def test_the_watchdog_spares_interruptible_and_idle_processes(self) -> None:
        assert run_watched(TIMER_ALONE, "sleep", rest_s=2.0) == (0, "EnvTimeoutError\ndone\n", "")

    @pytest.mark.slow
    def test_is_set_back_while_steps_are_made(self) -> None:
        # 50 steps of 50 ms take longer than the 2 s after which a process that makes none is ended.
        assert run_watched(TIMER_ALONE, *["nap"] * 50, limit_s=0.5) == (0, "done\n", "")
